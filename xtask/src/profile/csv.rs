//! Nsight Compute's raw page as CSV: names, units, then a line a launch.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// Column of the kernel's name.
const KERNEL: &str = "Kernel Name";

/// Every launch: the kernel's name, and its metrics by name.
pub(super) fn launches(text: &str) -> Result<Vec<(String, BTreeMap<String, f64>)>> {
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
        for (name, value) in names.iter().zip(&line).filter(|(name, _)| name.contains("__")) {
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
    fn a_line_cut_short_is_found_out() {
        let text = "\"ID\",\"Kernel Name\",\"a__b.sum\"\n\"\",\"\",\"\"\n\"0\",\"k\"";
        let why = launches(text).expect_err("it is cut short").to_string();
        assert!(why.contains("cut short"), "{why}");
    }
}
