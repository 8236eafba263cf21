//! Whether every kernel's present body has been shown to be right.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ferroflash_core::table::KERNELS;
use serde::Deserialize;

use super::folder;
use super::record::{Record, Row};
use crate::build_ptx::manifest::Manifest;
use crate::workspace::read_text;

/// The two forms a kernel ships in.
const FORMS: [&str; 2] = ["cubin", "ptx"];

/// `fixtures/evidence/unverified.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unverified {
    #[serde(default)]
    kernel: Vec<Excuse>,
}

/// A kernel that no GPU has shown to be right yet.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Excuse {
    name: String,
    reason: String,
    /// `cubin` or `ptx`, where only one form is excused.
    form: Option<String>,
}

/// Names each kernel that has neither evidence nor an excuse.
pub(super) fn run(records: &[(PathBuf, Record)]) -> Result<()> {
    let manifest = Manifest::committed()?;
    let excuses = excuses()?;
    let rows: Vec<&Row> = records.iter().flat_map(|(_, record)| &record.rows).collect();
    let mut faults = Vec::new();
    let (mut shown, mut excused) = (0, 0);
    for spec in KERNELS {
        let Some(built) = manifest.kernel(spec.name) else {
            faults.push(format!("{}: not in host/artifacts/manifest.json", spec.name));
            continue;
        };
        for form in FORMS {
            let excuse = excuses.iter().find(|excuse| excuse.covers(spec.name, form));
            match (verdict(&rows, spec.name, form, &built.body_hash), excuse) {
                (Ok(()), None) => shown += 1,
                (Ok(()), Some(_)) => {
                    eprintln!("note: {} ({form}) has evidence; its excuse can go", spec.name);
                    shown += 1;
                }
                (Err(_), Some(_)) => excused += 1,
                (Err(why), None) => faults.push(format!("{} ({form}): {why}", spec.name)),
            }
        }
    }
    if !faults.is_empty() {
        bail!(
            "{} kernel forms lack evidence; run them on a GPU (`cargo xtask gpu-bundle`), or name \
             them with a reason in fixtures/evidence/unverified.toml:\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    eprintln!("{} kernels: {shown} forms shown right, {excused} excused", KERNELS.len());
    Ok(())
}

/// Why the rows do not show a kernel's present body to be right.
fn verdict(rows: &[&Row], kernel: &str, form: &str, body_hash: &str) -> Result<(), String> {
    let of_form = rows.iter().filter(|row| row.kernel == kernel && row.form == form);
    let (present, older): (Vec<&Row>, Vec<&Row>) =
        of_form.copied().partition(|row| row.body_hash == body_hash);
    if let Some(failed) = present.iter().find(|row| !row.holds()) {
        let workload = serde_json::to_string(&failed.workload).unwrap_or_default();
        let error = failed.max_error.map_or("not finite".to_owned(), |error| error.to_string());
        return Err(format!(
            "it failed on {workload}: error {error}, tolerance {}",
            failed.tolerance
        ));
    }
    match (present.is_empty(), older.is_empty()) {
        (false, _) => Ok(()),
        (true, false) => Err("its evidence is of an older body".to_owned()),
        (true, true) => Err("there is no evidence".to_owned()),
    }
}

fn excuses() -> Result<Vec<Excuse>> {
    let path = folder().join("unverified.toml");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let list: Unverified = toml::from_str(&read_text(&path)?)
        .with_context(|| format!("{} does not read", path.display()))?;
    for excuse in &list.kernel {
        if !KERNELS.iter().any(|spec| spec.name == excuse.name) {
            bail!("{} names {}, which is not in the table", path.display(), excuse.name);
        }
        if excuse.reason.trim().is_empty() {
            bail!("{} gives no reason for {}", path.display(), excuse.name);
        }
        if excuse.form.as_deref().is_some_and(|form| !FORMS.contains(&form)) {
            bail!("{} names a form of {} other than cubin or ptx", path.display(), excuse.name);
        }
    }
    Ok(list.kernel)
}

impl Excuse {
    fn covers(&self, name: &str, form: &str) -> bool {
        self.name == name && self.form.as_deref().is_none_or(|own| own == form)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(form: &str, hash: &str, error: f64) -> Row {
        let text = format!(
            r#"{{"kernel": "k", "form": "{form}", "body_hash": "{hash}", "workload": {{"n": 1}},
                "tolerance": 1.0, "max_error": {error}, "passed": {}}}"#,
            error <= 1.0
        );
        serde_json::from_str(&text).expect("the row is well formed")
    }

    #[test]
    fn only_passing_rows_of_the_present_body_count() {
        let rows = [row("cubin", "new", 0.5), row("ptx", "old", 0.5), row("cubin", "old", 2.0)];
        let rows: Vec<&Row> = rows.iter().collect();
        assert!(verdict(&rows, "k", "cubin", "new").is_ok());
        assert!(verdict(&rows, "k", "ptx", "new").unwrap_err().contains("older body"));
        assert!(verdict(&rows, "k", "cubin", "old").unwrap_err().contains("failed on {\"n\":1}"));
        assert!(verdict(&rows, "other", "ptx", "new").unwrap_err().contains("no evidence"));
    }

    #[test]
    fn excuses_read() {
        let text = "[[kernel]]\nname = \"k\"\nreason = \"new\"\nform = \"ptx\"\n";
        let list: Unverified = toml::from_str(text).expect("it is well formed");
        assert!(list.kernel[0].covers("k", "ptx") && !list.kernel[0].covers("k", "cubin"));
        assert!(toml::from_str::<Unverified>("[[kernel]]\nname = \"k\"\n").is_err());
    }
}
