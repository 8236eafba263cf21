//! What a run of measurements is, as a file: `ferroflash.bench.v1`, whose JSON Schema is
//! `fixtures/schemas/bench.v1.json`. The Python package writes the same.
//!
//! Raw samples are what counts: medians and rates are computed from them wherever they are shown,
//! and never read from a file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::statistics::median;

/// Name and version of the schema.
pub(crate) const SCHEMA: &str = "ferroflash.bench.v1";
/// Samples of a row or a roof at least.
pub(crate) const LEAST_SAMPLES: usize = 20;
/// The name that this library's times have among those of others.
pub(crate) const OURS: &str = "ferroflash";

/// Measurements of one device by one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// [`SCHEMA`].
    pub(crate) schema: String,
    /// Version of the library.
    pub(crate) ferroflash: String,
    /// When it began, UTC, RFC 3339.
    pub(crate) date: String,
    /// What it ran on.
    pub(crate) device: MeasuredOn,
    /// How a sample was taken, in words.
    pub(crate) method: String,
    /// How clocks were read, or why they were not.
    pub(crate) clocks: String,
    /// Median of samples of no work at all, in milliseconds: what the timer adds to a sample.
    pub(crate) timer_ms: f64,
    /// Versions of the other libraries that took part.
    pub(crate) peers: BTreeMap<String, String>,
    /// A row a workload.
    pub(crate) rows: Vec<Row>,
    /// What was asked for and not measured.
    pub(crate) left_out: Vec<LeftOut>,
    /// What the device reaches on simpler work.
    pub(crate) roofs: Vec<Roof>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeasuredOn {
    /// `cuda` or `cpu`.
    pub(crate) backend: String,
    /// Name of the GPU, or model of the CPU.
    pub(crate) name: String,
    /// Version of the driver; none on a CPU.
    pub(crate) driver: Option<String>,
    /// Compute capability, such as `9.0`; none on a CPU.
    pub(crate) capability: Option<String>,
    /// Multiprocessors of a GPU, threads on a CPU.
    pub(crate) units: u32,
    /// Second-level cache of a GPU in bytes.
    pub(crate) l2_bytes: Option<u64>,
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pass {
    /// o of q, k and v.
    Forward,
    /// dq, dk and dv, from preprocessing to conversion.
    Backward,
}

/// What is timed: equal workloads are compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// The pass.
    pub(crate) direction: Pass,
    /// Channels of a query and of a key.
    pub(crate) d: usize,
    /// Channels of a value.
    pub(crate) dv: usize,
    /// Query rows of an item.
    pub(crate) s: usize,
    /// Keys of an item.
    pub(crate) sk: usize,
    /// Items.
    pub(crate) b: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads.
    pub(crate) kv_heads: usize,
    /// `bf16`, `f16` or `f32`.
    pub(crate) dtype: String,
    /// Whether keys after a row's diagonal are hidden.
    pub(crate) causal: bool,
    /// Whether equal backward calls give equal bits.
    pub(crate) deterministic: bool,
    /// Options beyond those.
    pub(crate) options: Features,
}

/// Options of a workload; those that are not there were not asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Features {
    /// Keys before and after the diagonal, −1 for no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) window: Option<[i64; 2]>,
    /// Where the diagonal lies, if rows and keys differ in number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) align: Option<String>,
    /// Factor of the scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scale: Option<f32>,
    /// Cap of the scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) softcap: Option<f32>,
    /// Probability that an entry is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dropout: Option<f32>,
    /// Whether scores lose a slope by distance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) alibi: bool,
}

/// The times of a workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What was timed.
    #[serde(flatten)]
    pub(crate) workload: Workload,
    /// This library's kernel.
    pub(crate) kernel: Option<String>,
    /// Operations of one call, by the convention of `workload.rs`.
    pub(crate) flops: f64,
    /// 10¹² operations a second, by medians: for those who read the file alone.
    pub(crate) tflops: BTreeMap<String, f64>,
    /// Samples of each contender in the order they were taken, in milliseconds a call.
    pub(crate) ms: BTreeMap<String, Vec<f64>>,
    /// Calls of a sample.
    pub(crate) calls: BTreeMap<String, u32>,
    /// Milliseconds in which the host queued one call.
    pub(crate) host_ms: BTreeMap<String, f64>,
    /// Sets of tensors that calls took in turn.
    pub(crate) buffers: u32,
    /// Largest relative difference of a contender's results from the first contender's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) difference: BTreeMap<String, f64>,
    /// Clocks while it ran, if they could be read.
    pub(crate) clock: Option<Clock>,
}

/// What a GPU says of itself while it works.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Clock {
    /// Clock of the multiprocessors, in MHz.
    pub(crate) sm_mhz: Option<u32>,
    /// Clock of the memory, in MHz.
    pub(crate) memory_mhz: Option<u32>,
    /// Temperature, in °C.
    pub(crate) celsius: Option<u32>,
    /// Power drawn, in watts.
    pub(crate) watts: Option<f64>,
    /// Why clocks are held down, such as `power cap`; empty if they are not.
    pub(crate) throttled_by: Vec<String>,
}

/// A workload that has no times, or a contender of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LeftOut {
    /// Which.
    pub(crate) what: String,
    /// Why.
    pub(crate) why: String,
}

/// What a roof is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RoofKind {
    /// Bytes read and written a second.
    Copy,
    /// Floating-point operations of products a second.
    Matrix,
}

/// A rate that the device was seen to reach.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Roof {
    /// What it is of.
    pub(crate) kind: RoofKind,
    /// Element type of a matrix roof.
    pub(crate) dtype: Option<String>,
    /// What was done, in words.
    pub(crate) method: String,
    /// Bytes or operations of one call.
    pub(crate) work: f64,
    /// Samples in milliseconds a call.
    pub(crate) ms: Vec<f64>,
}

impl Roof {
    /// Bytes or operations a second, by the median.
    pub(crate) fn per_second(&self) -> f64 {
        self.work / (median(&self.ms) * 1e-3)
    }
}

impl Row {
    /// Operations a second of a contender, by its median; `None` where it took no part.
    pub(crate) fn rate(&self, contender: &str) -> Option<f64> {
        self.ms.get(contender).map(|ms| self.flops / (median(ms) * 1e-3))
    }
}

impl Run {
    /// Everyone who was timed: this library first, then by name.
    pub(crate) fn contenders(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.rows.iter().flat_map(|row| row.ms.keys().map(String::as_str)).collect();
        names.sort_by_key(|name| (*name != OURS, *name));
        names.dedup();
        names
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of one row.
    pub(crate) fn run(samples: &[f64]) -> Run {
        let workload = Workload {
            direction: Pass::Forward,
            d: 64,
            dv: 64,
            s: 128,
            sk: 128,
            b: 2,
            heads: 4,
            kv_heads: 4,
            dtype: "f32".to_owned(),
            causal: false,
            deterministic: false,
            options: Features::default(),
        };
        let row = Row {
            workload,
            kernel: Some("cpu_tiled_forward".to_owned()),
            flops: 4.0 * 2.0 * 4.0 * 128.0 * 128.0 * 64.0,
            tflops: BTreeMap::new(),
            ms: BTreeMap::from([(OURS.to_owned(), samples.to_vec())]),
            calls: BTreeMap::from([(OURS.to_owned(), 1)]),
            host_ms: BTreeMap::new(),
            buffers: 1,
            difference: BTreeMap::new(),
            clock: None,
        };
        Run {
            schema: SCHEMA.to_owned(),
            ferroflash: "0.1.0".to_owned(),
            date: "1970-01-01T00:00:00Z".to_owned(),
            device: MeasuredOn {
                backend: "cpu".to_owned(),
                name: "a processor".to_owned(),
                driver: None,
                capability: None,
                units: 2,
                l2_bytes: None,
            },
            method: "none".to_owned(),
            clocks: "not read".to_owned(),
            timer_ms: 1e-6,
            peers: BTreeMap::new(),
            rows: vec![row],
            left_out: Vec::new(),
            roofs: Vec::new(),
        }
    }

    #[test]
    fn rates_come_from_medians() {
        let mut samples = [2.0; 20];
        samples[0] = 100.0;
        let run = run(&samples);
        let row = &run.rows[0];
        assert_eq!(row.rate(OURS), Some(row.flops / 2e-3));
        assert_eq!(row.rate("cudnn"), None);
    }
}
