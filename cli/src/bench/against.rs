//! Two runs beside one another, row by row.

use std::fmt::Write;
use std::path::Path;

use super::record::{MeasuredOn, Run};
use super::statistics::{Comparison, LEAST_EFFECT, Verdict};
use crate::failure::{Failure, Result};

/// A contender's times of one workload in both runs.
pub(super) struct Pair {
    what: String,
    contender: String,
    old_ms: f64,
    new_ms: f64,
    comparison: Comparison,
}

/// What the comparison of two runs comes to.
pub(super) struct Against {
    pairs: Vec<Pair>,
    /// Workloads that only the old run has, and those that only the new one has.
    alone: [usize; 2],
    old: String,
}

impl Against {
    /// Compares `new` with `old`, which is in `file`.
    pub(super) fn new(old: &Run, new: &Run, file: &Path) -> Result<Self> {
        check_comparable(old, new, file)?;
        let mut pairs = Vec::new();
        let mut shared = 0;
        for row in &new.rows {
            let Some(before) = old.rows.iter().find(|old| old.workload == row.workload) else {
                continue;
            };
            shared += 1;
            for (contender, samples) in &row.ms {
                let Some(earlier) = before.ms.get(contender) else { continue };
                pairs.push(Pair {
                    what: row.workload.words(),
                    contender: contender.clone(),
                    old_ms: super::statistics::median(earlier),
                    new_ms: super::statistics::median(samples),
                    comparison: Comparison::new(earlier, samples),
                });
            }
        }
        if pairs.is_empty() {
            let why = format!("{} has no workload of this run, by any contender", file.display());
            return Err(Failure::input("--against", why));
        }
        let alone = [old.rows.len() - shared, new.rows.len() - shared];
        let words = format!("{}, ferroflash {}", old.date, old.ferroflash);
        Ok(Self { pairs, alone, old: words })
    }

    /// A line a pair, and what they come to.
    pub(super) fn words(&self) -> String {
        let mut text = format!(
            "\nagainst the run of {}: ratio of medians, new to old, with its 99 % interval\n",
            self.old
        );
        let width = self.pairs.iter().map(|pair| pair.what.len()).max().unwrap_or(0);
        for pair in &self.pairs {
            let Comparison { ratio, interval: [low, high], verdict } = pair.comparison;
            let _ = writeln!(
                text,
                "{:<8} {:<width$}  {:<10} {:>9.4} -> {:>9.4} ms  {ratio:.3} [{low:.3}, {high:.3}]",
                verdict.word(),
                pair.what,
                pair.contender,
                pair.old_ms,
                pair.new_ms
            );
        }
        let count = |verdict| self.count(verdict);
        let _ = writeln!(
            text,
            "{} slower, {} faster, {} same within {:.0} %, {} unclear; only there {}, only here {}",
            count(Verdict::Slower),
            count(Verdict::Faster),
            count(Verdict::Same),
            LEAST_EFFECT * 100.0,
            count(Verdict::Unclear),
            self.alone[0],
            self.alone[1]
        );
        text
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.pairs.iter().filter(|pair| pair.comparison.verdict == verdict).count()
    }

    /// A failure if something got slower. Others' times are shown and do not count.
    pub(super) fn verdict(&self) -> Result<()> {
        let ours = self.pairs.iter().filter(|pair| pair.contender == super::record::OURS);
        let slower: Vec<&Pair> =
            ours.filter(|pair| pair.comparison.verdict == Verdict::Slower).collect();
        match slower.first() {
            None => Ok(()),
            Some(first) => Err(Failure::Slower(format!(
                "--against: {} of the workloads got slower; the first is {}, {:.1} % longer",
                slower.len(),
                first.what,
                (first.comparison.ratio - 1.0) * 100.0
            ))),
        }
    }
}

/// Refuses a run of another device or sampled in another way; `new` needs no rows yet.
pub(super) fn check_comparable(old: &Run, new: &Run, file: &Path) -> Result<()> {
    check_device(&old.device, &new.device, file)?;
    if old.method != new.method {
        let had = format!("{} was sampled in another way: {}", file.display(), old.method);
        return Err(Failure::needs("--against", had, format!("as this run: {}", new.method)));
    }
    Ok(())
}

fn check_device(old: &MeasuredOn, new: &MeasuredOn, file: &Path) -> Result<()> {
    let of = |on: &MeasuredOn| match on.backend.as_str() {
        "cpu" => format!("{}, {} threads", on.name, on.units),
        _ => on.name.clone(),
    };
    if of(old) == of(new) {
        return Ok(());
    }
    let had = format!("{} was measured on {}", file.display(), of(old));
    Err(Failure::needs("--against", had, format!("a run of this device, {}", of(new))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;

    fn samples(middle: f64) -> Vec<f64> {
        (0..20).map(|index| middle * (1.0 + 1e-3 * f64::from(index % 5))).collect()
    }

    fn compare(old: &Run, new: &Run) -> Result<Against> {
        Against::new(old, new, Path::new("old.json"))
    }

    #[test]
    fn regressions_have_their_own_exit_code() {
        let (old, new) = (run(&samples(1.0)), run(&samples(1.1)));
        let against = compare(&old, &new).expect("one device");
        let failure = against.verdict().expect_err("slower");
        assert_eq!(failure.exit_code(), 3);
        assert!(failure.line().contains("10.0 % longer"), "{failure:?}");
        assert!(against.words().contains("1 slower, 0 faster"), "{}", against.words());
        assert_eq!(compare(&new, &old).expect("one device").verdict(), Ok(()));
        assert_eq!(compare(&old, &old).expect("one device").verdict(), Ok(()));
    }

    #[test]
    fn a_slower_peer_is_no_regression() {
        let (mut old, mut new) = (run(&samples(1.0)), run(&samples(1.0)));
        for (run, ms) in [(&mut old, 1.0), (&mut new, 2.0)] {
            run.rows[0].ms.insert("cudnn".to_owned(), samples(ms));
        }
        let against = compare(&old, &new).expect("one device");
        assert_eq!(against.verdict(), Ok(()));
        assert!(against.words().contains("1 slower"), "{}", against.words());
    }

    #[test]
    fn other_devices_methods_and_workloads_are_refused() {
        let (old, mut new) = (run(&samples(1.0)), run(&samples(1.0)));
        new.rows[0].workload.s = 4096;
        let why = compare(&old, &new).err().expect("refused").line();
        assert!(why.contains("has no workload of this run"), "{why}");
        new.method = "alternating".to_owned();
        let why = compare(&old, &new).err().expect("refused").line();
        assert!(why.contains("was sampled in another way: none"), "{why}");
        new.device.name = "another".to_owned();
        let why = compare(&old, &new).err().expect("refused").line();
        assert!(why.contains("was measured on a processor, 2 threads"), "{why}");
    }
}
