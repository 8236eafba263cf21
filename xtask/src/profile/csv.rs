//! Nsight Compute's raw page as CSV: names, units, then a line a launch.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// Column of the kernel's name.
const KERNEL: &str = "Kernel Name";

/// A launch: the kernel's name, and its metrics by name.
pub(super) type Launch = (String, BTreeMap<String, f64>);

/// Every launch, with those of `wanted` metrics that are there. Newer versions of the tool add a
/// column for each attribute of the device, and three for each metric.
pub(super) fn launches(text: &str, wanted: &[&str]) -> Result<Vec<Launch>> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty()).map(fields);
    let names = lines.next().context("it holds no launches")?;
    let kernel = names.iter().position(|name| name == KERNEL);
    let kernel = kernel.with_context(|| format!("there is no column `{KERNEL}`"))?;
    let mut launches = Vec::new();
    // The line after the names is of units.
    for line in lines.skip(1) {
        if line.len() != names.len() {
            bail!("a line of {} fields under {} names: it is cut short", line.len(), names.len());
        }
        // A second page repeats the names.
        if line[kernel] == KERNEL || line[kernel].is_empty() {
            continue;
        }
        let mut metrics = BTreeMap::new();
        let fields = names.iter().zip(&line);
        for (name, value) in fields.filter(|(name, _)| wanted.contains(&name.as_str())) {
            let plain = value.replace(',', "");
            let number: f64 =
                plain.parse().ok().filter(|x: &f64| x.is_finite()).with_context(|| {
                    format!("{}: {name} is `{value}`, and no number", line[kernel])
                })?;
            metrics.insert(name.clone(), number);
        }
        launches.push((line[kernel].clone(), metrics));
    }
    if launches.is_empty() {
        bail!("it holds no launches");
    }
    Ok(launches)
}

/// Fields of a line; quotes keep commas inside, and two stand for one.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(c) = characters.next() {
        let field = fields.last_mut().expect("there is always one");
        match c {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            c => field.push(c),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_keep_commas() {
        assert_eq!(fields(r#""1,234","a ""b""",c"#), ["1,234", "a \"b\"", "c"]);
    }

    #[test]
    fn what_was_not_asked_for_is_passed_over() {
        let text = "\"Kernel Name\",\"a__b.sum\",\"a__b.avg\",\"device__name\"\n,byte,byte,\n\
                    \"k\",\"1,024\",\"1\",\"some device\"\n";
        let found = launches(text, &["a__b.sum", "c__d.sum"]).expect("it reads");
        assert_eq!(found, [("k".to_owned(), BTreeMap::from([("a__b.sum".to_owned(), 1024.0)]))]);
    }

    #[test]
    fn a_line_cut_short_is_found_out() {
        let text = "\"ID\",\"Kernel Name\",\"a__b.sum\"\n\"\",\"\",\"\"\n\"0\",\"k\"";
        let why = launches(text, &["a__b.sum"]).expect_err("it is cut short").to_string();
        assert!(why.contains("cut short"), "{why}");
    }
}
