//! Which workloads are measured: every combination of what was asked for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ferroflash::{Attention, Dropout, Dtype, Scale, Shape};

use super::record::{Features, Pass, Workload};
use crate::failure::{Failure, Result};
use crate::options::{Alignment, Causal, MaskOptions, Window};

/// Rows of all items together, and channels of all heads, unless said otherwise: the papers'
/// convention, and a CPU's share of it.
const GPU_DEFAULTS: Defaults =
    Defaults { tokens: 16_384, width: 2048, seqs: &[512, 1024, 2048, 4096, 8192, 16_384] };
const CPU_DEFAULTS: Defaults = Defaults { tokens: 2048, width: 512, seqs: &[512, 1024, 2048] };

struct Defaults {
    tokens: usize,
    width: usize,
    seqs: &'static [usize],
}

/// The workloads; every list is combined with every other.
#[derive(Args)]
pub(super) struct Grid {
    /// Query rows of an item [default: 512 to 16384 on a GPU, 512 to 2048 on a CPU]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    seqs: Vec<usize>,
    /// Keys of an item [default: as many as query rows]
    #[arg(long, value_name = "N")]
    kv_len: Option<usize>,
    /// Channels of a head [default: 64, 128 and, on a GPU, 256]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    dims: Vec<usize>,
    /// Query heads [default: 2048 / channels on a GPU, 512 / channels on a CPU]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key and value heads [default: as many as query heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Items [default: 16384 / rows on a GPU, 2048 / rows on a CPU, at least 1]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Element types [default: bf16 on a GPU, f32 on a CPU]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TYPE,…")]
    dtype: Vec<Element>,
    /// Masks
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "none,bottom-right",
        value_name = "ALIGN,…"
    )]
    causal: Vec<Causal>,
    /// Passes; deterministic is a backward pass whose equal calls give equal bits
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "forward,backward",
        value_name = "PASS,…"
    )]
    directions: Vec<Direction>,
    /// Show a row LEFT keys before its diagonal and RIGHT after it; -1 is unbounded
    #[arg(long, value_name = "LEFT,RIGHT", allow_hyphen_values = true)]
    window: Option<Window>,
    /// The window's diagonal, if --causal does not say and q and k differ in length
    #[arg(long, value_enum, value_name = "ALIGN")]
    align: Option<Alignment>,
    /// Factor of the scores [default: 1 / √head_dim]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    scale: Option<f32>,
    /// Cap of the scores, c·tanh(s / c)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    softcap: Option<f32>,
    /// Probability that an entry is dropped
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    dropout: Option<f32>,
    /// Subtract a slope by distance, the usual one of each head
    #[arg(long)]
    alibi: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Element {
    Bf16,
    F16,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Direction {
    /// o of q, k and v
    Forward,
    /// dq, dk and dv
    Backward,
    /// The same, repeatable bit for bit
    Deterministic,
}

/// A workload and its description for the library.
pub(super) struct Case {
    pub(super) workload: Workload,
    pub(super) attention: Attention,
}

/// Cases on the same tensors.
pub(super) struct Group {
    pub(super) shape: Shape,
    pub(super) dtype: Dtype,
    pub(super) cases: Vec<Case>,
}

impl Grid {
    /// The cases, those on the same tensors together.
    pub(super) fn groups(&self, on_gpu: bool) -> Result<Vec<Group>> {
        let defaults = if on_gpu { GPU_DEFAULTS } else { CPU_DEFAULTS };
        let or = |given: &[usize], other: &[usize]| match given {
            [] => other.to_vec(),
            given => given.to_vec(),
        };
        let seqs = or(&self.seqs, defaults.seqs);
        let dims = or(&self.dims, if on_gpu { &[64, 128, 256] } else { &[64, 128] });
        let dtypes = match (self.dtype.as_slice(), on_gpu) {
            ([], true) => &[Element::Bf16],
            ([], false) => &[Element::F32],
            (given, _) => given,
        };
        let mut groups = Vec::new();
        for &element in dtypes {
            for &d in &dims {
                for &s in &seqs {
                    let shape = self.shape(&defaults, s, d)?;
                    let dtype = match element {
                        Element::Bf16 => Dtype::Bf16,
                        Element::F16 => Dtype::F16,
                        Element::F32 => Dtype::F32,
                    };
                    groups.push(Group { shape, dtype, cases: self.cases(&shape, dtype)? });
                }
            }
        }
        refuse_twice(&groups)?;
        Ok(groups)
    }

    fn shape(&self, defaults: &Defaults, s: usize, d: usize) -> Result<Shape> {
        let kv_len = self.kv_len.unwrap_or(s);
        for (argument, size) in [("--seqs", s), ("--dims", d), ("--kv-len", kv_len)] {
            if size == 0 {
                return Err(Failure::needs(argument, size, "at least 1"));
            }
        }
        let q_heads = self.heads.unwrap_or((defaults.width / d).max(1));
        let batch = self.batch.unwrap_or((defaults.tokens / s).max(1));
        let kv_heads = self.kv_heads.unwrap_or(q_heads);
        for (argument, size) in [("--heads", q_heads), ("--kv-heads", kv_heads), ("--batch", batch)]
        {
            if size == 0 {
                return Err(Failure::needs(argument, size, "at least 1"));
            }
        }
        Ok(Shape { batch, q_heads, kv_heads, q_len: s, kv_len, head_dim: d, value_dim: d })
    }

    fn cases(&self, shape: &Shape, dtype: Dtype) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        for &causal in &self.causal {
            let mask = MaskOptions { causal, window: self.window, align: self.align };
            for &direction in &self.directions {
                let (pass, deterministic) = match direction {
                    Direction::Forward => (Pass::Forward, false),
                    Direction::Backward => (Pass::Backward, false),
                    Direction::Deterministic => (Pass::Backward, true),
                };
                let attention = self.attention(shape, &mask, deterministic)?;
                let mut workload = Workload::new(pass, shape, dtype, &mask);
                workload.deterministic = deterministic;
                workload.options = Features {
                    scale: self.scale,
                    softcap: self.softcap,
                    dropout: self.dropout,
                    alibi: self.alibi,
                    ..workload.options
                };
                cases.push(Case { workload, attention });
            }
        }
        Ok(cases)
    }

    fn attention(
        &self,
        shape: &Shape,
        mask: &MaskOptions,
        deterministic: bool,
    ) -> Result<Attention> {
        let mut attention = Attention::new(*shape).mask(mask.of(shape)?);
        if let Some(factor) = self.scale {
            attention = attention.scale(Scale::Factor(factor));
        }
        if let Some(cap) = self.softcap {
            attention = attention.softcap(cap);
        }
        if let Some(probability) = self.dropout {
            attention = attention.dropout(Dropout::new(probability, (1, 0)));
        }
        if self.alibi {
            attention = attention.alibi();
        }
        Ok(if deterministic { attention.deterministic() } else { attention })
    }
}

/// A run has a workload once.
fn refuse_twice(groups: &[Group]) -> Result<()> {
    let workloads: Vec<&Workload> =
        groups.iter().flat_map(|group| &group.cases).map(|case| &case.workload).collect();
    for (index, workload) in workloads.iter().enumerate() {
        if workloads[..index].contains(workload) {
            let had = format!("{} is asked for twice", workload.words());
            return Err(Failure::input("--seqs, --dims, --dtype, --causal or --directions", had));
        }
    }
    Ok(())
}

/// Where the measurements go.
#[derive(Args)]
pub(super) struct Outputs {
    /// Write the run, raw samples and all, as JSON; without FILE to stdout, in place of the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(super) json: Option<PathBuf>,
    /// Write a line for each workload and contender
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Write a page with curves and a table
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Replace files that are there
    #[arg(long)]
    pub(super) force: bool,
}
