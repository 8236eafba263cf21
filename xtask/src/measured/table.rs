//! `cargo xtask bars`: docs/bars.md, from the raw rounds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Result;

use super::bars::{Bar, Verdict, bars};
use super::ratios::Point;
use super::{Row, length, rows};
use crate::workspace::{root, write_or_compare};

/// Where the table is kept.
const FILE: &str = "docs/bars.md";

const HEAD: &str = "# The bars

What the project set out to reach, and what was measured. Written by `cargo xtask bars` from the raw
rounds in [benchmarks/](benchmarks/): a ratio is of medians of at least 20 rounds, which alternate
with the peers' in one process, and is a quotient of rates unless the bar says time. A mean is
geometric. Verdicts are by unrounded figures; a bar without rounds says so.

";

/// What `bars`, `readme` and `report` take.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Compare with what is there instead of writing
    #[arg(long)]
    pub(crate) check: bool,
}

/// Runs `bars`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = rows()?;
    let bars = bars(&rows, &super::errors::calls()?);
    write_or_compare(&root().join(FILE), &page(&rows, &bars), options.check, "bars")?;
    let count = |verdict| bars.iter().filter(|bar| bar.verdict() == verdict).count();
    eprintln!(
        "{} bars: {} met, {} not met, {} incomplete, {} not measured",
        bars.len(),
        count(Verdict::Met),
        count(Verdict::NotMet),
        count(Verdict::Incomplete),
        count(Verdict::NotMeasured)
    );
    Ok(())
}

/// Fails where the table is not what the rounds give.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

fn page(rows: &[Row], bars: &[Bar]) -> String {
    let mut text = HEAD.to_owned();
    text += &sources(rows);
    text += "\n| bar | needs | mean | furthest off | points | |\n\
             | --- | --- | --- | --- | --- | --- |\n";
    for bar in bars {
        let mean = bar.mean().map_or("–".to_owned(), |mean| format!("{mean:.3}"));
        let worst = bar.worst().map_or("–".to_owned(), |point| {
            format!("{:.3} ({}, {})", point.ratio, point.place, length(point.s))
        });
        let of = bar.expected.map(|expected| format!(" of {expected}")).unwrap_or_default();
        let (asks, points) = (bar.asks(), bar.points.len());
        let verdict = match bar.verdict() {
            Verdict::Met => "met".to_owned(),
            other => format!("**{}**", other.words()),
        };
        let name = &bar.name;
        let _ = writeln!(text, "| {name} | {asks} | {mean} | {worst} | {points}{of} | {verdict} |");
    }
    for bar in bars.iter().filter(|bar| !bar.points.is_empty()) {
        text += &points(bar);
    }
    text
}

/// Devices and days of the rounds.
fn sources(rows: &[Row]) -> String {
    let mut days: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for row in rows {
        let device = row.device.as_deref().unwrap_or("a device that was not recorded");
        let day = row.recorded.as_deref().unwrap_or("a day that was not recorded");
        days.entry(device).or_default().insert(day);
    }
    let line = |(device, days): (&&str, &BTreeSet<&str>)| {
        let of_device = |row: &&Row| row.device.as_deref().is_none_or(|name| name == *device);
        let count = rows.iter().filter(of_device).count();
        let days: Vec<&str> = days.iter().copied().collect();
        format!("- {device}: {count} rows, {}\n", days.join(", "))
    };
    days.iter().map(line).collect()
}

/// Every point of a bar.
fn points(bar: &Bar) -> String {
    let lengths: BTreeSet<u64> = bar.points.iter().map(|point| point.s).collect();
    let mut places: Vec<&str> = bar.points.iter().map(|point| point.place.as_str()).collect();
    places.dedup();
    let mut text = format!("\n## {}\n\n| |", bar.name);
    lengths.iter().for_each(|s| text += &format!(" {} |", length(*s)));
    text += "\n| --- |";
    text += &" --- |".repeat(lengths.len());
    for place in places {
        let _ = write!(text, "\n| {place} |");
        for s in &lengths {
            let here = |point: &&Point| point.place == place && point.s == *s;
            let all: Vec<String> =
                bar.points.iter().filter(here).map(|point| format!("{:.3}", point.ratio)).collect();
            let _ = write!(text, " {} |", if all.is_empty() { "–".into() } else { all.join(", ") });
        }
    }
    text + "\n"
}
