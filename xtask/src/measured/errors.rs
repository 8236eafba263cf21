//! Errors beside the peers': what `python -m ferroflash.errors` wrote to docs/benchmarks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::ratios::{Point, sorted};
use super::{OURS, records};
use crate::schema::Schema;

/// The schema of such a record.
pub(crate) const SCHEMA: &str = "ferroflash.errors.v1";

/// Figures of a tensor, one a seed.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Figures {
    max: Vec<f64>,
    rms: Vec<f64>,
}

impl Figures {
    /// The root of the mean square over all seeds.
    pub(crate) fn rms(&self) -> f64 {
        let squares: f64 = self.rms.iter().map(|rms| rms * rms).sum();
        (squares / self.rms.len() as f64).sqrt()
    }

    /// The largest of all seeds.
    pub(crate) fn max(&self) -> f64 {
        self.max.iter().copied().fold(0.0, f64::max)
    }
}

/// Figures by tensor: o, or dq, dk and dv.
pub(crate) type Tensors = BTreeMap<String, Figures>;

/// One pass of one call, by each contender.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    /// Channels of a head.
    pub(crate) d: u64,
    /// Rows and keys.
    pub(crate) s: u64,
    /// Items.
    pub(crate) b: u64,
    /// Query heads.
    pub(crate) heads: u64,
    /// Element type.
    pub(crate) dtype: String,
    /// Whether the mask is causal.
    pub(crate) causal: bool,
    /// Our kernel.
    pub(crate) kernel: Option<String>,
    /// The f64 values.
    pub(crate) reference: Tensors,
    /// Differences from them, by contender.
    pub(crate) errors: BTreeMap<String, Tensors>,
    /// The device.
    #[serde(skip)]
    pub(crate) device: String,
    /// The day.
    #[serde(skip)]
    pub(crate) day: String,
    /// How many seeds.
    #[serde(skip)]
    pub(crate) seeds: usize,
}

impl Call {
    /// Where it stands in a table: `d 64 causal`.
    pub(crate) fn place(&self) -> String {
        format!("d {} {}", self.d, if self.causal { "causal" } else { "full" })
    }

    fn figures(&self) -> impl Iterator<Item = &Figures> {
        self.errors.values().flat_map(BTreeMap::values).chain(self.reference.values())
    }
}

/// What the records of docs/benchmarks hold.
pub(crate) fn calls() -> Result<Vec<Call>> {
    let own = |(_, value): &(PathBuf, Value)| value["schema"] == SCHEMA;
    let mut calls = Vec::new();
    for (file, record) in records()?.into_iter().filter(own) {
        calls.extend(read(&record).with_context(|| file.display().to_string())?);
    }
    Ok(calls)
}

fn read(record: &Value) -> Result<Vec<Call>> {
    Schema::named("errors.v1")?.validate(record)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let seeds = record["seeds"].as_array().map_or(0, Vec::len);
    let mut calls: Vec<Call> = serde_json::from_value(record["rows"].clone())?;
    for (index, call) in calls.iter_mut().enumerate() {
        if call
            .figures()
            .any(|figures| [&figures.max, &figures.rms].iter().any(|f| f.len() != seeds))
        {
            bail!("row {index} has not one figure for each of {seeds} seeds");
        }
        call.device = text(&record["device"]["name"]);
        call.day = text(&record["date"]).chars().take(10).collect();
        call.seeds = seeds;
    }
    Ok(calls)
}

/// Our error over a peer's, a point a call and tensor.
pub(crate) fn over_peer(calls: &[Call], peer: &str, of: fn(&Figures) -> f64) -> Vec<Point> {
    let mut points = Vec::new();
    for call in calls {
        let (Some(ours), Some(theirs)) = (call.errors.get(OURS), call.errors.get(peer)) else {
            continue;
        };
        for (tensor, own) in ours {
            let Some(other) = theirs.get(tensor).map(of).filter(|error| *error > 0.0) else {
                continue;
            };
            let place = format!("{}, {tensor}", call.place());
            points.push(Point { place, s: call.s, ratio: of(own) / other });
        }
    }
    sorted(points)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A record with one call, by us and by cuDNN.
    pub(crate) fn record() -> Value {
        let figures = |x: f64| json!({"max": [x * 4.0, x * 3.0, x * 5.0], "rms": [x, x, x]});
        json!({
            "schema": SCHEMA, "ferroflash": "0.1.0", "date": "2026-12-01T08:00:00Z",
            "device": {"backend": "cuda", "name": "a device", "driver": null, "capability": "9.0",
                "units": 1, "l2_bytes": null},
            "method": "none", "peers": {"cudnn": "9"}, "seeds": [1, 2, 3], "left_out": [],
            "rows": [{"direction": "forward", "d": 64, "dv": 64, "s": 512, "sk": 512, "b": 1,
                "heads": 8, "kv_heads": 8, "dtype": "bf16", "causal": true, "deterministic": false,
                "kernel": "hopper_forward_d64_bf16_causal", "reference": {"o": figures(1.0)},
                "errors": {OURS: {"o": figures(1e-3)}, "cudnn": {"o": figures(2e-3)}}}],
        })
    }

    #[test]
    fn errors_are_compared_with_a_peer_s() {
        let calls = read(&record()).expect("it reads");
        let point = |ratio| Point { place: "d 64 causal, o".to_owned(), s: 512, ratio };
        assert_eq!(over_peer(&calls, "cudnn", Figures::rms), [point(0.5)]);
        assert_eq!(over_peer(&calls, "cudnn", Figures::max), [point(0.5)]);
        assert!(over_peer(&calls, "fa3", Figures::rms).is_empty());
        assert_eq!((calls[0].day.as_str(), calls[0].seeds), ("2026-12-01", 3));
    }

    #[test]
    fn a_seed_without_figures_is_found_out() {
        let mut short = record();
        short["seeds"] = json!([1, 2, 3, 4]);
        assert!(format!("{:#}", read(&short).expect_err("it is short")).contains("4 seeds"));
        let mut other = record();
        other["rows"][0]["errors"]["cudnn"]["dp"] = json!({"max": [1, 1, 1], "rms": [1, 1, 1]});
        assert!(format!("{:#}", read(&other).expect_err("no such tensor")).contains("dp"));
    }
}
