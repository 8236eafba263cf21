//! `cargo xtask test`: every test that runs without a GPU, a Python or anything installed.

use std::io::{BufRead, BufReader, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::workspace::{cargo, printed};

/// Members that have no tests of their own: the Python extension links only inside a Python.
const WITHOUT_TESTS: &[&str] = &["ferroflash-python"];

/// What one test program said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    program: String,
    passed: u32,
    failed: u32,
    skipped: u32,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
}

/// Names of the workspace's packages.
pub(crate) fn packages() -> Result<Vec<String>> {
    let text = printed(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Metadata =
        serde_json::from_str(&text).context("`cargo metadata` wrote what does not read")?;
    Ok(metadata.packages.into_iter().map(|package| package.name).collect())
}

/// Unit, integration and documentation tests of every package, then what came of each, then the
/// reports of the worked examples.
pub(crate) fn run() -> Result<()> {
    let begun = Instant::now();
    let packages = packages()?;
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]);
    for package in WITHOUT_TESTS.iter().filter(|name| packages.iter().any(|p| p == *name)) {
        command.args(["--exclude", package]);
    }
    // One pipe for both, so that the order stays.
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let both = writer.try_clone().context("cannot make a pipe")?;
    command.stdout(writer).stderr(both);
    let mut child = command.spawn().context("`cargo test` did not start")?;
    // The command holds the writing end, which would keep the reader waiting.
    drop(command);

    let mut tallies = Vec::new();
    let mut terminal = std::io::stdout().lock();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("the tests' output broke off")?;
        read(&String::from_utf8_lossy(&line), &mut tallies);
        // A closed terminal is no reason to stop testing.
        let _ = terminal.write_all(&line).and_then(|()| terminal.write_all(b"\n"));
    }
    drop(terminal);
    let status = child.wait().context("waiting for `cargo test`")?;

    println!("\n{}", summary(&tallies, begun.elapsed().as_secs_f32()));
    if !status.success() {
        let failed = tallies.iter().filter(|tally| tally.failed > 0);
        let names: Vec<&str> = failed.map(|tally| tally.program.as_str()).collect();
        if names.is_empty() {
            bail!("`cargo test` ended with {status}: see above");
        }
        bail!("tests failed in {}", names.join(", "));
    }
    crate::oracles::check()
}

fn summary(tallies: &[Tally], seconds: f32) -> String {
    let mut text = String::new();
    let mut total = Tally { program: "all".to_owned(), ..Tally::default() };
    for tally in tallies.iter().filter(|t| t.passed + t.failed + t.skipped > 0) {
        total.passed += tally.passed;
        total.failed += tally.failed;
        total.skipped += tally.skipped;
        text.push_str(&tally.line());
    }
    text.push_str(&total.line());
    if total.skipped > 0 {
        text.push_str("Skipped tests are named above; those of a GPU run where there is one.\n");
    }
    let verdict = if total.failed == 0 { "passed" } else { "FAILED" };
    text + &format!("{verdict} in {seconds:.0} s")
}

/// Takes in a line of `cargo test`: the name of the next program, or the result of the last.
fn read(line: &str, tallies: &mut Vec<Tally>) {
    let line = line.trim_start();
    if let Some(program) = program(line) {
        tallies.push(Tally { program, ..Tally::default() });
    } else if let Some(tally) = tallies.last_mut() {
        tally.read(line);
    }
}

/// The program that a line such as `Running tests/seeds.rs (target/debug/deps/seeds-0123)` names.
fn program(line: &str) -> Option<String> {
    if let Some(package) = line.strip_prefix("Doc-tests ") {
        return Some(format!("{package} (documentation)"));
    }
    let (_, file) = line.strip_prefix("Running ")?.split_once(" (")?;
    let file = file.trim_end().strip_suffix(')')?.rsplit(['/', '\\']).next()?;
    let (name, _hash) = file.rsplit_once('-')?;
    Some(name.to_owned())
}

impl Tally {
    /// Adds a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn read(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        for part in result.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }

    fn line(&self) -> String {
        let Self { program, passed, failed, skipped } = self;
        format!("{program:<36} {passed:>5} passed {failed:>4} failed {skipped:>4} skipped\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_added_up_by_program() {
        let mut tallies = Vec::new();
        for line in [
            "   Compiling ferroflash-core v0.1.0",
            "     Running unittests src/lib.rs (target/debug/deps/ferroflash_core-0a1b)",
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; \
             finished in 0.00s",
            "   Doc-tests ferroflash",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured",
        ] {
            read(line, &mut tallies);
        }
        let unit =
            Tally { program: "ferroflash_core".to_owned(), passed: 3, failed: 0, skipped: 1 };
        let documentation = Tally {
            program: "ferroflash (documentation)".to_owned(),
            passed: 1,
            failed: 2,
            skipped: 0,
        };
        assert_eq!(tallies, [unit, documentation]);
        assert!(summary(&tallies, 1.0).ends_with("FAILED in 1 s"));
    }
}
