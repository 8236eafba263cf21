//! Timing the workloads of a run, one after another.

use std::collections::BTreeMap;

use ferroflash::{Device, Error, Explanation, Form, Preference};
use half::{bf16, f16};

use super::clocks::Clocks;
use super::grid::{Case, Group};
use super::record::{Clock, LEAST_SAMPLES, LeftOut, MeasuredOn, OURS, Pass, Row};
use super::statistics::median;
use super::tensors::Tensors;
use super::timer::{Call, Timer};
use crate::failure::{Failure, Result};
use crate::file::Stored;
use crate::progress::Progress;

/// Milliseconds of work before a workload's first sample, on a GPU.
const WARM_UP_MS: f64 = 60.0;
/// Warm-up calls at least.
const WARM_UP_CALLS: u32 = 2;

/// Where and how workloads are timed.
pub(super) struct Bench {
    pub(super) device: Device,
    pub(super) timer: Timer,
    pub(super) clocks: Clocks,
    /// Samples of a workload.
    pub(super) rounds: usize,
    /// A kernel or a family that is insisted on.
    pub(super) kernel: Option<String>,
    /// The form that kernels are loaded in, if one is insisted on.
    pub(super) form: Option<Form>,
}

/// The samples of some work.
pub(super) struct Samples {
    /// Milliseconds a call.
    pub(super) ms: Vec<f64>,
    /// Calls of each.
    pub(super) calls: u32,
    /// Milliseconds in which the host queued a call.
    pub(super) host_ms: f64,
    /// Clocks at the end.
    pub(super) clock: Option<Clock>,
}

/// Rows, and what has none.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) rows: Vec<Row>,
    pub(super) left_out: Vec<LeftOut>,
}

impl Bench {
    /// What is measured on.
    pub(super) fn measured_on(&self) -> MeasuredOn {
        match self.device.limits() {
            Some(limits) => {
                let cuda = limits.driver_version;
                let cuda = format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
                MeasuredOn {
                    backend: "cuda".to_owned(),
                    name: limits.name.clone(),
                    driver: Some(match self.clocks.driver() {
                        Some(version) => format!("{version}, {cuda}"),
                        None => cuda,
                    }),
                    capability: Some(format!("{}.{}", limits.capability.0, limits.capability.1)),
                    units: limits.multiprocessors,
                    l2_bytes: Some(limits.l2_bytes),
                }
            }
            None => MeasuredOn {
                backend: "cpu".to_owned(),
                name: processor(),
                driver: None,
                capability: None,
                units: threads() as u32,
                l2_bytes: None,
            },
        }
    }

    /// Times every case of every group.
    pub(super) fn rows(&mut self, groups: &[Group]) -> Result<Rows> {
        let total: usize = groups.iter().map(|group| group.cases.len()).sum();
        let progress = Progress::of("measuring");
        let mut rows = Rows::default();
        let mut tell = |rows: &Rows| {
            progress.tell(rows.rows.len() + rows.left_out.len(), total);
        };
        for group in groups {
            match group.dtype {
                ferroflash::Dtype::Bf16 => self.group::<bf16>(group, &mut rows, &mut tell)?,
                ferroflash::Dtype::F16 => self.group::<f16>(group, &mut rows, &mut tell)?,
                ferroflash::Dtype::F32 => self.group::<f32>(group, &mut rows, &mut tell)?,
            }
        }
        Ok(rows)
    }

    fn group<T: Stored>(
        &mut self,
        group: &Group,
        rows: &mut Rows,
        tell: &mut dyn FnMut(&Rows),
    ) -> Result<()> {
        let any = |is: fn(&Case) -> bool| group.cases.iter().any(is);
        let with_backward = any(|case| case.workload.direction == Pass::Backward);
        let with_slopes = any(|case| case.workload.options.alibi);
        // Tensors are made once there is a plan that reads them.
        let mut tensors = None;
        for case in &group.cases {
            let plan = match self.plan::<T>(case) {
                Ok(plan) => plan,
                Err(why) => {
                    rows.left_out.push(left_out(case, &why)?);
                    tell(rows);
                    continue;
                }
            };
            let made = tensors.get_or_insert_with(|| {
                Tensors::new(&self.device, group.shape, with_backward, with_slopes)
            });
            match made {
                Ok(tensors) => rows.rows.push(self.row(case, &plan, tensors)?),
                // There was no memory: smaller workloads may still have it.
                Err(why) => {
                    rows.left_out.push(LeftOut { what: case.workload.words(), why: why.line() })
                }
            }
            tell(rows);
        }
        Ok(())
    }

    fn plan<T: Stored>(&self, case: &Case) -> std::result::Result<ferroflash::Plan<T>, Error> {
        let is_forward = case.workload.direction == Pass::Forward;
        let preference = Preference {
            kernel: self.kernel.as_deref(),
            form: self.form,
            forward_only: is_forward,
            ..Preference::default()
        };
        let plan = case.attention.plan_with::<T>(&self.device, preference)?;
        match &plan.explain().no_backward {
            Some(why) if !is_forward => Err(Error::Unsupported {
                what: "the backward pass".to_owned(),
                device: plan.explain().device.clone(),
                reasons: why.clone(),
            }),
            _ => Ok(plan),
        }
    }

    /// Times one case.
    pub(super) fn row<T: Stored>(
        &mut self,
        case: &Case,
        plan: &ferroflash::Plan<T>,
        tensors: &mut Tensors<T>,
    ) -> Result<Row> {
        let pass = case.workload.direction;
        if pass == Pass::Backward {
            tensors.prepare(plan)?;
        }
        let mut workspace = tensors.workspace(plan, pass)?;
        let samples = self.samples(&mut || tensors.call(plan, pass, &mut workspace))?;
        let kernel = match pass {
            Pass::Forward => Some(plan.explain()),
            Pass::Backward => plan.explain().backward.as_deref(),
        };
        let flops = case.workload.flops(&case.attention);
        let ours = |value| BTreeMap::from([(OURS.to_owned(), value)]);
        Ok(Row {
            workload: case.workload.clone(),
            kernel: kernel.map(|kernel: &Explanation| kernel.kernel.clone()),
            flops,
            tflops: ours(flops / median(&samples.ms) * 1e-9),
            ms: BTreeMap::from([(OURS.to_owned(), samples.ms)]),
            calls: BTreeMap::from([(OURS.to_owned(), samples.calls)]),
            host_ms: ours(samples.host_ms),
            buffers: tensors.count() as u32,
            difference: BTreeMap::new(),
            clock: samples.clock,
        })
    }

    /// Warms up and takes the samples of a call.
    pub(super) fn samples(&mut self, call: Call<'_>) -> Result<Samples> {
        let on_gpu = self.device.context().is_some();
        let mut nothing = || ();
        let timer = &mut self.timer;
        let mut first = timer.sample(1, call, &mut nothing)?;
        for _ in 1..WARM_UP_CALLS {
            first = timer.sample(1, call, &mut nothing)?;
        }
        let calls = (timer.aim_ms() / first.ms.max(1e-6)).ceil();
        let calls = (calls as u32).clamp(1, timer.most_calls());
        let mut warmed = if on_gpu { 0.0 } else { WARM_UP_MS };
        let mut host_ms = first.host_ms * f64::from(calls);
        loop {
            timer.expect(host_ms);
            let sample = timer.sample(calls, call, &mut nothing)?;
            host_ms = sample.host_ms;
            // A sample that waited for the host says less than the work there was.
            warmed += sample.ms.max(sample.host_ms).max(1e-3);
            if warmed >= WARM_UP_MS {
                break;
            }
        }
        timer.expect(host_ms);
        let mut ms = Vec::with_capacity(self.rounds);
        let mut hosts = Vec::with_capacity(self.rounds);
        for _ in 0..self.rounds {
            let sample = timer.sample(calls, call, &mut nothing)?;
            ms.push(nanoseconds(sample.ms / f64::from(calls)).max(1e-6));
            hosts.push(sample.host_ms / f64::from(calls));
        }
        // Once more, not to be counted: reading clocks takes the driver's time.
        let mut clock = None;
        if on_gpu {
            timer.sample(calls, call, &mut || clock = self.clocks.read())?;
        }
        Ok(Samples { ms, calls, host_ms: nanoseconds(median(&hosts)), clock })
    }
}

/// Samples of a workload, as asked for.
pub(super) fn rounds(asked: usize) -> Result<usize> {
    if asked < LEAST_SAMPLES {
        let needs = format!("at least {LEAST_SAMPLES}: fewer samples show no spread");
        return Err(Failure::needs("--rounds", asked, needs));
    }
    Ok(asked)
}

/// A case that no kernel runs, that is none, or for which there is no memory; any other fault ends
/// the run.
fn left_out(case: &Case, why: &Error) -> Result<LeftOut> {
    match why {
        Error::Unsupported { .. } | Error::OutOfMemory { .. } | Error::Argument { .. } => {
            Ok(LeftOut { what: case.workload.words(), why: why.to_string() })
        }
        other => Err(other.clone().into()),
    }
}

/// Milliseconds to the nanosecond, finer than any clock here.
fn nanoseconds(ms: f64) -> f64 {
    (ms * 1e6).round() / 1e6
}

/// Threads that the CPU path uses: the library's own pool, or what its variable asks for.
pub(super) fn threads() -> usize {
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok());
    let there = || std::thread::available_parallelism().map_or(1, usize::from);
    asked.filter(|threads| *threads > 0).unwrap_or_else(there)
}

/// The processor's model.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map(|(_, name)| name.trim()).filter(|name| !name.is_empty());
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), str::to_owned)
}
