//! `cargo xtask oracles`: every worked example of the seed documents is run, then the reports and
//! the table of what checks which claim are written, or compared with those that are there.

mod coverage;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::workspace::{cargo, root};

/// What `cargo xtask oracles` takes.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Compare with what is there instead of writing
    #[arg(long)]
    check: bool,
}

/// What came of one case.
#[derive(Deserialize)]
struct Outcome {
    topic: String,
    id: String,
    kind: String,
    claims: Vec<String>,
    source: String,
    note: Option<String>,
    printed: Vec<Printed>,
    error: Option<String>,
}

/// What the document prints, and what was computed in its place.
#[derive(Deserialize)]
struct Printed {
    at: Option<String>,
    value: Value,
    agrees: Option<bool>,
    computed: Option<Value>,
}

/// Runs, then writes or compares.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.check { check() } else { write() }
}

/// Fails on a case that fails, and on a report that is not what the cases give.
pub(crate) fn check() -> Result<()> {
    let begun = Instant::now();
    let outcomes = outcomes()?;
    let mut stale = Vec::new();
    for (file, text) in files(&outcomes)? {
        if std::fs::read_to_string(root().join(&file)).is_ok_and(|there| there == text) {
            continue;
        }
        stale.push(file.display().to_string());
    }
    stale.extend(unknown_reports(&outcomes)?);
    if !stale.is_empty() {
        bail!("run `cargo xtask oracles`: these are not what the fixtures give: {stale:?}");
    }
    println!("{} cases passed in {:.1} s", outcomes.len(), begun.elapsed().as_secs_f32());
    Ok(())
}

fn write() -> Result<()> {
    let outcomes = outcomes()?;
    for (file, text) in files(&outcomes)? {
        let path = root().join(&file);
        std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", file.display());
    }
    for file in unknown_reports(&outcomes)? {
        std::fs::remove_file(root().join(&file))?;
        println!("removed {file}");
    }
    Ok(())
}

/// Every case, run.
fn outcomes() -> Result<Vec<Outcome>> {
    let mut command = cargo();
    command.args(["run", "--quiet", "--package", "ferroflash-tests", "--bin", "oracles"]);
    let output = command.output().context("`cargo run --bin oracles` did not start")?;
    let lines = String::from_utf8_lossy(&output.stdout);
    let outcomes = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Outcome>, _>>();
    let outcomes = outcomes.context("the oracles wrote what does not read")?;
    if outcomes.is_empty() {
        bail!("no case ran:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let failed: Vec<String> = outcomes
        .iter()
        .filter_map(|case| case.error.as_ref().map(|why| format!("{}: {why}", case.id)))
        .collect();
    if !failed.is_empty() {
        bail!("{} of {} cases failed:\n  {}", failed.len(), outcomes.len(), failed.join("\n  "));
    }
    Ok(outcomes)
}

/// The reports and the coverage table, by path.
fn files(outcomes: &[Outcome]) -> Result<BTreeMap<PathBuf, String>> {
    let mut files = BTreeMap::new();
    for topic in topics(outcomes) {
        let cases: Vec<&Outcome> = outcomes.iter().filter(|case| case.topic == topic).collect();
        files.insert(report_file(topic), report::of_topic(topic, &cases));
    }
    files.insert(PathBuf::from("fixtures/coverage.md"), coverage::table(outcomes)?);
    Ok(files)
}

fn topics(outcomes: &[Outcome]) -> Vec<&str> {
    let mut topics: Vec<&str> = outcomes.iter().map(|case| case.topic.as_str()).collect();
    topics.dedup();
    topics
}

fn report_file(topic: &str) -> PathBuf {
    PathBuf::from(format!("fixtures/reports/{topic}.md"))
}

/// Reports of topics that there are no longer.
fn unknown_reports(outcomes: &[Outcome]) -> Result<Vec<String>> {
    let topics = topics(outcomes);
    let Ok(folder) = std::fs::read_dir(root().join("fixtures/reports")) else {
        return Ok(Vec::new());
    };
    let mut unknown = Vec::new();
    for entry in folder {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !topics.iter().any(|topic| name == format!("{topic}.md")) {
            unknown.push(format!("fixtures/reports/{name}"));
        }
    }
    Ok(unknown)
}
