//! `ferroflash doctor --evidence`: what this machine can show of the library, rung by rung.
//!
//! One small call a device: its semantics are written down, its result is compared with the f64
//! oracle, the kernel that ran is named with the hash of its code, and its time is taken. What
//! cannot be done here stays unmeasured; nothing is taken from another machine.

use ferroflash::{Align, Attention, Device, Dtype, Mask, Shape, record};
use ferroflash_ledger::evidence::{
    Identity, Manifest, Parity, Record, Rung, SAMPLES, Timing, Verdict, ladder, median_seconds,
};
use half::bf16;
use serde::Serialize;

use crate::attend::compare;
use crate::call::{Axes, Tensors};
use crate::failure::{Failure, Result};
use crate::file::Stored;
use crate::forward::{Chosen, Purpose};
use crate::options::DeviceChoice;
use crate::report::{Table, sizes};

/// Runs before the first sample.
const WARMUPS: u64 = 3;

/// Grouped heads, unequal lengths and a diagonal: enough to tell one meaning from another.
const SHAPE: Shape = Shape {
    batch: 1,
    q_heads: 4,
    kv_heads: 2,
    q_len: 192,
    kv_len: 256,
    head_dim: 64,
    value_dim: 64,
};

/// The rungs of one device.
#[derive(Serialize)]
pub(super) struct Climbed {
    device: String,
    rungs: [Rung; 4],
    /// Of the samples in the record, once every rung holds.
    median_seconds: Option<f64>,
    /// What was observed, whole.
    record: Record,
}

/// Climbs on the CPU and on every GPU; without one, says why there is none.
pub(super) fn climb() -> Vec<Climbed> {
    let gpus = Device::cuda_count().unwrap_or(0).max(1);
    let cpu = Climbed::on::<f32>(DeviceChoice::Cpu);
    let gpus = (0..gpus).map(|ordinal| Climbed::on::<bf16>(DeviceChoice::Cuda(ordinal)));
    std::iter::once(cpu).chain(gpus).collect()
}

impl Climbed {
    fn on<T: Stored>(choice: DeviceChoice) -> Self {
        let mut observed = Record { manifest: semantics(T::DTYPE), ..Record::default() };
        if let Err(why) = observe::<T>(choice, &mut observed) {
            // A refusal is an observation too.
            observed.identity = Some(Identity {
                requested: "a kernel of this library".to_owned(),
                kernels: Vec::new(),
                body: None,
                diagnostics: vec![why.line()],
            });
        }
        Self {
            device: choice.to_string(),
            rungs: ladder(&observed),
            median_seconds: median_seconds(&observed),
            record: observed,
        }
    }

    /// Adds the rungs to a table.
    pub(super) fn table(&self, table: &mut Table) {
        table.row(format!("evidence on {}", self.device), sizes(&SHAPE));
        for Rung { name, verdict, reason } in &self.rungs {
            let words = match verdict {
                Verdict::Established => self.established(name),
                Verdict::Unmeasured => "unmeasured".to_owned(),
                Verdict::Refused => format!("refused: {reason}"),
            };
            table.row(format!("  {name}"), words);
        }
    }

    /// What an established rung rests on.
    fn established(&self, name: &str) -> String {
        let Record { parity, identity, timing, .. } = &self.record;
        match (name, parity, identity, timing, self.median_seconds) {
            ("reference parity", Some(parity), ..) => {
                let Parity { reference, tolerance, max_error } = parity;
                format!("{max_error:.2e} from {reference}, at most {tolerance:.2e} is right")
            }
            ("kernel identity", _, Some(identity), ..) => {
                let body: String = identity.body.iter().flat_map(|b| b.chars().take(16)).collect();
                format!("{} ({body})", identity.kernels.join(", "))
            }
            ("timing", _, _, Some(timing), Some(seconds)) => {
                let samples = timing.samples_seconds.len();
                format!("median {:.3} ms of {samples} raw samples, measured here", seconds * 1e3)
            }
            _ => "established".to_owned(),
        }
    }
}

/// What the call means, before anything runs.
fn semantics(dtype: Dtype) -> Manifest {
    let some = |words: &str| Some(words.to_owned());
    Manifest {
        device: None,
        driver: None,
        version: some(env!("CARGO_PKG_VERSION")),
        dtype: Some(dtype.to_string()),
        sizes: Some(sizes(&SHAPE)),
        layout: some("[batch, row, head, channel], contiguous"),
        mask: some("causal, aligned at the bottom right"),
        scale: Some(format!("1/sqrt({})", SHAPE.head_dim)),
        dropout: some("none"),
    }
}

fn observe<T: Stored>(choice: DeviceChoice, observed: &mut Record) -> Result<()> {
    let attention = Attention::new(SHAPE).mask(Mask::causal(Align::BottomRight));
    let chosen = Chosen::<T>::new(choice, &attention, Purpose::Forward)?;
    let explanation = chosen.explanation();
    observed.manifest.driver = Some(driver(choice));
    observed.manifest.device = Some(explanation.device);

    let tensors = Tensors {
        q: noise(SHAPE.q_dims(), 1),
        k: noise(SHAPE.k_dims(), 2),
        v: noise(SHAPE.v_dims(), 3),
        shape: SHAPE,
        axes: Axes::BSHD,
    };
    let results = chosen.run(&tensors)?;
    let checks = compare(&attention, &tensors, &results)?;
    observed.parity = Some(Parity {
        reference: "the f64 oracle".to_owned(),
        tolerance: checks.o.bound,
        max_error: if checks.lse.passed { checks.o.max_abs_error } else { f64::INFINITY },
    });

    // The CPU's code is this executable; a GPU kernel's is what its hash says.
    let body = match choice {
        DeviceChoice::Cpu => Some(format!("ferroflash {}", env!("CARGO_PKG_VERSION"))),
        _ => record(&explanation.kernel).map(|record| record.body_hash.clone()),
    };
    observed.identity = Some(Identity {
        requested: explanation.kernel.clone(),
        kernels: vec![explanation.kernel],
        body,
        diagnostics: explanation.rejected.iter().map(|(k, why)| format!("{k}: {why}")).collect(),
    });

    for _ in 0..WARMUPS {
        chosen.run(&tensors)?;
    }
    let sample = |_| Ok(chosen.run(&tensors)?.milliseconds / 1e3);
    let samples_seconds = (0..SAMPLES).map(sample).collect::<Result<_>>()?;
    observed.timing = Some(Timing { warmups: Some(WARMUPS), synchronized: true, samples_seconds });
    Ok(())
}

fn driver(choice: DeviceChoice) -> String {
    let DeviceChoice::Cuda(ordinal) = choice else { return "none is needed".to_owned() };
    let device = Device::cuda(ordinal);
    let version = device.ok().as_ref().and_then(Device::limits).map(|l| l.driver_version);
    version.map_or_else(String::new, |version| {
        format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
    })
}

/// Values in ±2 that look random and are the same everywhere.
fn noise<T: Stored>(dims: [usize; 4], seed: u32) -> Vec<T> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::from_f32((state >> 8) as f32 / (1 << 22) as f32 - 2.0)
    };
    (0..dims.iter().product()).map(|_| next()).collect()
}

/// Fails where something ran and was wrong; what could not run is no failure.
pub(super) fn verdict(climbed: &[Climbed]) -> Result<()> {
    let wrong = climbed.iter().find(|climbed| {
        let ran = climbed.record.parity.is_some();
        ran && climbed.rungs.iter().any(|rung| rung.verdict == Verdict::Refused)
    });
    let Some(Climbed { device, rungs, .. }) = wrong else { return Ok(()) };
    let reasons = rungs.iter().filter(|rung| rung.verdict == Verdict::Refused);
    let reasons: Vec<String> = reasons.map(|r| format!("{}: {}", r.name, r.reason)).collect();
    Err(Failure::Run(format!("--evidence on {device}: {}", reasons.join("; "))))
}
