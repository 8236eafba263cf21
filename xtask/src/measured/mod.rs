//! Side-by-side timings of docs/benchmarks: rows of raw rounds, and the figures that follow from
//! them. Whatever summary a row carries beside its rounds is not read.

pub(crate) mod bars;
pub(crate) mod errors;
mod ratios;
mod table;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::workspace::{files_under, read_text, root};

pub(crate) use ratios::{Point, deterministic, is_conventional, is_grouped, option_costs, points};
pub(crate) use table::{Options, check, run};

/// Our own contender in a row.
pub(crate) const OURS: &str = "ferroflash";
/// Our backward with a fixed order of sums.
pub(crate) const DETERMINISTIC: &str = "ferroflash_deterministic";
/// The peers, by the names that rows give them, with the names they are known by.
pub(crate) const PEERS: [(&str, &str); 9] = [
    ("cudnn", "cuDNN"),
    ("fa4", "FlashAttention-4"),
    ("fa3", "FlashAttention-3"),
    ("fa2", "FlashAttention-2"),
    ("flex", "FlexAttention"),
    ("xformers", "xFormers"),
    ("triton", "Triton"),
    ("torch", "PyTorch"),
    ("dense", "dense PyTorch"),
];
/// Least rounds of a row whose medians may be compared.
const LEAST_ROUNDS: usize = 20;

/// One call, timed in alternating rounds of one process.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Row {
    /// `forward` or `backward`.
    pub(crate) direction: String,
    /// Channels of a head.
    pub(crate) d: u64,
    /// Query rows and keys.
    pub(crate) s: u64,
    /// Items.
    #[serde(default = "one")]
    pub(crate) b: u64,
    /// Query heads.
    pub(crate) heads: u64,
    /// KV heads; those of the queries if absent.
    pub(crate) kv_heads: Option<u64>,
    /// Element type.
    #[serde(default = "f32_name")]
    pub(crate) dtype: String,
    /// Whether the mask is causal.
    pub(crate) causal: bool,
    /// The call's option, such as `window 1024`; a plain call has none.
    pub(crate) options: Option<String>,
    /// Lengths of packed items; `s` and `b` are then those of the plain call beside it.
    pub(crate) lengths: Option<Vec<u64>>,
    /// The device.
    pub(crate) device: Option<String>,
    /// The day, `YYYY-MM-DD`.
    pub(crate) recorded: Option<String>,
    /// Our kernel, by its name in the table.
    pub(crate) kernel: Option<String>,
    /// Milliseconds of each round, by contender.
    pub(crate) ms: BTreeMap<String, Vec<f64>>,
}

fn one() -> u64 {
    1
}

fn f32_name() -> String {
    "f32".to_owned()
}

impl Row {
    /// KV heads.
    pub(crate) fn kv_heads(&self) -> u64 {
        self.kv_heads.unwrap_or(self.heads)
    }

    /// Whether our kernel is of a family.
    pub(crate) fn is_of(&self, family: &str) -> bool {
        let kernel = self.kernel.as_deref().unwrap_or_default();
        kernel.strip_prefix(family).is_some_and(|rest| rest.starts_with('_'))
    }

    /// Whether it is of a CPU: no kernel of the table ran.
    pub(crate) fn is_of_cpu(&self) -> bool {
        self.kernel.is_none()
    }

    /// The element type, as the library calls it.
    pub(crate) fn dtype(&self) -> &str {
        if self.dtype == "fp16" { "f16" } else { &self.dtype }
    }

    /// Median milliseconds of a contender.
    pub(crate) fn median(&self, contender: &str) -> Option<f64> {
        self.ms.get(contender).and_then(|rounds| median(rounds))
    }

    /// FLOPs of the products: 4·B·H·S²·d forward, half of it causal, 2.5 times it backward.
    pub(crate) fn flops(&self) -> f64 {
        let cells = (self.s * self.s) as f64;
        let products = if self.direction == "forward" { 4.0 } else { 10.0 };
        let share = if self.causal { 0.5 } else { 1.0 };
        products * share * (self.b * self.heads * self.d) as f64 * cells
    }

    /// Visible cells of the packed items over those of the plain call beside them; 1 where nothing
    /// is packed.
    pub(crate) fn packed_share(&self) -> f64 {
        let cells = |length: &u64| {
            let length = *length as f64;
            if self.causal { length * (length + 1.0) / 2.0 } else { length * length }
        };
        let plain = self.b as f64 * cells(&self.s);
        self.lengths.as_ref().map_or(1.0, |all| all.iter().map(cells).sum::<f64>() / plain)
    }

    /// TFLOP/s of a contender's median.
    pub(crate) fn rate(&self, contender: &str) -> Option<f64> {
        self.median(contender).map(|milliseconds| self.flops() / milliseconds / 1e9)
    }

    /// Our rate over the fastest of `peers`, all of which must be in the row.
    pub(crate) fn ratio_to(&self, peers: &[&str]) -> Option<f64> {
        let times: Option<Vec<f64>> = peers.iter().map(|peer| self.median(peer)).collect();
        let fastest = times?.into_iter().reduce(f64::min)?;
        Some(fastest / self.median(OURS)?)
    }

    /// Whether two rows are of one call, but for who ran it.
    fn is_same_call(&self, other: &Self) -> bool {
        (&self.direction, self.d, self.s, self.b, self.heads, self.kv_heads(), self.dtype())
            == (&other.direction, other.d, other.s, other.b, other.heads, other.kv_heads(), {
                other.dtype()
            })
            && (self.causal, &self.options) == (other.causal, &other.options)
    }

    /// Where it stands among rows: `d 64 causal`.
    pub(crate) fn place(&self) -> String {
        let mask = if self.causal { "causal" } else { "full" };
        format!("d {} {mask}", self.d)
    }

    fn validate(&self) -> Result<()> {
        if !matches!(self.direction.as_str(), "forward" | "backward") {
            bail!("direction is `{}`; it must be forward or backward", self.direction);
        }
        if self.d * self.s * self.b * self.heads * self.kv_heads() == 0 {
            bail!("d, s, b, heads and kv_heads must be at least 1");
        }
        if let Some(day) = &self.recorded {
            crate::evidence::validate_day(day)?;
        }
        if let Some(lengths) = &self.lengths
            && lengths.iter().sum::<u64>() != self.b * self.s
        {
            bail!("lengths must be of b·s = {} tokens in all", self.b * self.s);
        }
        for (contender, rounds) in &self.ms {
            if rounds.len() < LEAST_ROUNDS {
                bail!("{contender} has {} rounds; {LEAST_ROUNDS} are needed", rounds.len());
            }
            if rounds.iter().any(|time| !(time.is_finite() && *time > 0.0)) {
                bail!("{contender} has a round that took no finite time above zero");
            }
        }
        Ok(())
    }
}

/// Rows of docs/benchmarks. Of two of one call by one of our kernels the later stands, by file name
/// and place.
pub(crate) fn rows() -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for (file, value) in records()? {
        if value["schema"] == errors::SCHEMA {
            continue;
        }
        let lines = match value {
            Value::Array(lines) => lines,
            run => rows_of_run(&run),
        };
        for (index, line) in lines.into_iter().enumerate() {
            let place = || format!("{}: row {index}", file.display());
            let row: Row = serde_json::from_value(line).with_context(place)?;
            row.validate().with_context(place)?;
            rows.retain(|old| !(old.is_same_call(&row) && old.kernel == row.kernel));
            rows.push(row);
        }
    }
    Ok(rows)
}

/// Rows of a record that `ferroflash bench` wrote, in the form of those that stand alone: square
/// calls of one head dimension, by the default order of sums.
fn rows_of_run(run: &Value) -> Vec<Value> {
    let rows = run["rows"].as_array().into_iter().flatten();
    let is_plain = |row: &&Value| {
        row["d"] == row["dv"] && row["s"] == row["sk"] && row["deterministic"] == false
    };
    let row = |row: &Value| {
        let mut row = row.clone();
        row["options"] = words(&row["options"]);
        row["device"] = run["device"]["name"].clone();
        row["recorded"] = json!(run["date"].as_str().and_then(|date| date.get(..10)));
        row
    };
    rows.filter(is_plain).map(row).collect()
}

/// Options as words, `window 1024, softcap 30`; null where there are none. Alignment says nothing
/// of a square call.
fn words(options: &Value) -> Value {
    let Some(options) = options.as_object() else { return options.clone() };
    let word = |(name, value): (&String, &Value)| match value {
        Value::Bool(_) => name.clone(),
        Value::Array(sides) => format!("{name} {}", sides.first().unwrap_or(&Value::Null)),
        value => format!("{name} {value}"),
    };
    let given = options.iter().filter(|(name, _)| *name != "align");
    let words: Vec<String> = given.map(word).collect();
    if words.is_empty() { Value::Null } else { json!(words.join(", ")) }
}

/// What docs/benchmarks holds, a value a file.
pub(crate) fn records() -> Result<Vec<(PathBuf, Value)>> {
    let read = |file: PathBuf| {
        let value = serde_json::from_str(&read_text(&file)?);
        let value = value.with_context(|| format!("{} is no JSON", file.display()))?;
        Ok((file, value))
    };
    files()?.into_iter().map(read).collect()
}

fn files() -> Result<Vec<PathBuf>> {
    let mut files = files_under(&root().join("docs").join("benchmarks"))?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    Ok(files)
}

/// The middle of some values: of an even number, the mean of the middle two.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[middle - 1] + upper) / 2.0) }
}

/// The geometric mean; none of nothing.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    Some((sum / values.len() as f64).exp())
}

/// A length as it is written in tables: 512, 4k.
pub(crate) fn length(s: u64) -> String {
    if s >= 1024 && s.is_multiple_of(1024) { format!("{}k", s / 1024) } else { s.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn row(ours: f64, peers: &[(&str, f64)]) -> Row {
        let mut ms = BTreeMap::from([(OURS.to_owned(), vec![ours; LEAST_ROUNDS])]);
        ms.extend(peers.iter().map(|(name, time)| ((*name).to_owned(), vec![*time; 20])));
        let text = r#"{"direction": "forward", "d": 128, "s": 1024, "b": 2, "heads": 4,
            "dtype": "bf16", "causal": true, "kernel": "hopper_forward_d128_bf16_causal",
            "ms": {}}"#;
        let row: Row = serde_json::from_str(text).expect("the row is well formed");
        Row { ms, ..row }
    }

    #[test]
    fn middles_and_means() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert!(geometric_mean(&[0.5, 2.0]).is_some_and(|mean| (mean - 1.0).abs() < 1e-12));
        assert_eq!(geometric_mean(&[]), None);
    }

    #[test]
    fn a_ratio_is_to_the_fastest_of_peers_that_are_all_there() {
        let row = row(2.0, &[("cudnn", 3.0), ("fa3", 2.5)]);
        assert_eq!(row.ratio_to(&["cudnn", "fa3"]), Some(1.25));
        assert_eq!(row.ratio_to(&["cudnn", "fa4"]), None);
        let flops = 4.0 * 0.5 * f64::from(2 * 4 * 128) * f64::from(1024 * 1024);
        assert_eq!(row.flops(), flops);
        assert_eq!(row.rate(OURS), Some(flops / 2e9));
    }

    #[test]
    fn rows_that_cannot_be_compared_are_refused() {
        let refused = |change: fn(&mut Row)| {
            let mut row = row(2.0, &[("cudnn", 3.0)]);
            row.validate().expect("the row is sound");
            change(&mut row);
            row.validate().expect_err("the row is not").to_string()
        };
        assert!(refused(|row| row.direction = "both".to_owned()).contains("direction"));
        assert!(refused(|row| row.heads = 0).contains("at least 1"));
        assert!(refused(|row| row.recorded = Some("today".to_owned())).contains("recorded"));
        let short = |row: &mut Row| drop(row.ms.insert("fa2".to_owned(), vec![1.0; 19]));
        assert!(refused(short).contains("fa2 has 19 rounds"));
        let broken = |row: &mut Row| row.ms.get_mut("cudnn").expect("it is there")[3] = 0.0;
        assert!(refused(broken).contains("no finite time"));
    }

    #[test]
    fn rows_of_a_run_read_like_the_others() {
        let row = json!({
            "direction": "forward", "d": 64, "dv": 64, "s": 512, "sk": 512, "b": 1, "heads": 2,
            "kv_heads": 2, "dtype": "bf16", "causal": true, "deterministic": false,
            "options": {"softcap": 30.0, "window": [1024, 0], "align": "top-left"},
            "kernel": "portable_forward_d64_bf16_masked", "ms": {"ferroflash": vec![1.0; 20]},
        });
        let mut other = row.clone();
        other["sk"] = json!(1024);
        let run = json!({
            "schema": "ferroflash.bench.v1", "date": "2026-12-01T08:00:00Z",
            "device": {"name": "a device"}, "rows": [row, other],
        });
        let rows = rows_of_run(&run);
        assert_eq!(rows.len(), 1);
        let row: Row = serde_json::from_value(rows[0].clone()).expect("it reads");
        assert_eq!(row.options.as_deref(), Some("softcap 30.0, window 1024"));
        assert_eq!(row.recorded.as_deref(), Some("2026-12-01"));
        assert_eq!(row.device.as_deref(), Some("a device"));
        assert_eq!(words(&json!({})), Value::Null);
    }

    #[test]
    fn the_committed_rows_read() {
        assert!(rows().expect("they read").len() > 100);
    }
}
