//! Reading a run: whatever no measurement writes is refused by name.

use std::path::Path;

use super::record::{LEAST_SAMPLES, Run, SCHEMA};
use crate::failure::{Failure, Result};

impl Run {
    /// Reads and checks a file; `argument` is what named it.
    pub(crate) fn read(argument: &str, path: &Path) -> Result<Self> {
        let failed = |why: String| Failure::input(argument, format!("{}: {why}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    /// Reads and checks the text of a file.
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
            if error.is_eof() {
                format!("is cut short: {error}")
            } else {
                format!("is not JSON: {error}")
            }
        })?;
        match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(SCHEMA) => {}
            Some(other) => {
                return Err(format!("is of schema {other}, but it must be {SCHEMA}"));
            }
            None => return Err(format!("names no schema, but it must be {SCHEMA}")),
        }
        let run: Self = serde_json::from_value(value)
            .map_err(|error| format!("does not follow {SCHEMA}: {error}"))?;
        run.check()?;
        Ok(run)
    }

    /// Refuses what no measurement writes.
    fn check(&self) -> std::result::Result<(), String> {
        for (index, row) in self.rows.iter().enumerate() {
            let earlier = &self.rows[..index];
            if let Some(first) = earlier.iter().position(|other| other.workload == row.workload) {
                let words = row.workload.words();
                return Err(format!("rows {first} and {index} are the same workload, {words}"));
            }
            if row.ms.is_empty() {
                return Err(format!("rows[{index}].ms: is empty, but it must hold samples"));
            }
            if !(row.flops.is_finite() && row.flops > 0.0) {
                return Err(format!(
                    "rows[{index}].flops: is {}, but it must be above 0",
                    row.flops
                ));
            }
            for (contender, samples) in &row.ms {
                check_samples(&format!("rows[{index}].ms.{contender}"), samples)?;
            }
        }
        for (index, roof) in self.roofs.iter().enumerate() {
            if !(roof.work.is_finite() && roof.work > 0.0) {
                return Err(format!("roofs[{index}].work: is {}, but must be above 0", roof.work));
            }
            check_samples(&format!("roofs[{index}].ms"), &roof.ms)?;
        }
        Ok(())
    }
}

fn check_samples(field: &str, samples: &[f64]) -> std::result::Result<(), String> {
    if samples.len() < LEAST_SAMPLES {
        let had = samples.len();
        return Err(format!("{field}: has {had} samples, but it must have {LEAST_SAMPLES}"));
    }
    match samples.iter().find(|ms| !(ms.is_finite() && **ms > 0.0)) {
        Some(wrong) => Err(format!("{field}: holds {wrong}, but times must be above 0")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;

    fn text(run: &Run) -> String {
        serde_json::to_string(run).expect("numbers and strings")
    }

    #[test]
    fn a_run_is_read_as_it_was_written() {
        let run = run(&[1.5; 20]);
        assert_eq!(Run::parse(&text(&run)), Ok(run));
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let whole = text(&run(&[1.0; 20]));
        let refused = |text: &str, word: &str| {
            let why = Run::parse(text).expect_err("refused");
            assert!(why.contains(word), "no `{word}` in {why}");
        };
        refused(&whole[..whole.len() / 2], "cut short");
        refused("", "cut short");
        refused("ms: 3", "not JSON");
        refused("[]", "names no schema");
        refused(&whole.replace("bench.v1", "bench.v2"), "ferroflash.bench.v2");
        refused(&whole.replace("\"heads\":4,", ""), "missing field `heads`");
        let mut twice = run(&[1.0; 20]);
        twice.rows.push(twice.rows[0].clone());
        refused(&text(&twice), "rows 0 and 1 are the same workload");
        refused(&text(&run(&[1.0; 19])), "has 19 samples");
        let mut samples = [1.0; 20];
        samples[7] = 0.0;
        refused(&text(&run(&samples)), "rows[0].ms.ferroflash: holds 0");
    }
}
