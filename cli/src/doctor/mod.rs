//! `ferroflash doctor`: what this machine has, and what would run on it. Never fails for lack of
//! anything.

mod compiler;

use clap::Args;
use ferroflash::{
    Align, Attention, Device, Dtype, Form, KERNELS, Limits, Mask, Preference, Shape, made_by,
    record, totals,
};
use half::{bf16, f16};
use serde::Serialize;

use crate::failure::Result;
use crate::file::Stored;
use crate::options::form;
use crate::report::{Table, print_json};

/// Arguments of `doctor`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    driver: Driver,
    devices: Vec<Examined>,
    artifacts: Artifacts,
    build_ptx: compiler::Found,
}

#[derive(Serialize)]
struct Driver {
    found: bool,
    /// CUDA version it supports, or why there is none.
    says: String,
}

#[derive(Serialize)]
struct Examined {
    device: String,
    name: String,
    capability: String,
    multiprocessors: u32,
    shared_bytes_per_block: u32,
    l2_bytes: u64,
    memory_bytes: u64,
    kernels: Vec<Trial>,
}

/// A kind of call, and what would run it.
#[derive(Serialize)]
struct Trial {
    call: String,
    /// The kernel that was chosen and loaded.
    kernel: Option<String>,
    /// The form it was loaded in, and how long that took; or why no kernel runs the call.
    says: String,
}

#[derive(Serialize)]
struct Artifacts {
    kernels: usize,
    recorded: usize,
    bytes: usize,
    made_by: &'static str,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let form = form()?;
    let (driver, devices) = match Device::cuda_count() {
        Err(why) => (Driver { found: false, says: why.to_string() }, Vec::new()),
        Ok(count) => {
            let devices: Vec<Examined> = (0..count).map(|n| examine(n, form)).collect();
            let says = match Device::cuda(0).ok().as_ref().and_then(Device::limits) {
                Some(limits) => {
                    let version = limits.driver_version;
                    format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
                }
                None => "it sees no device that opens".to_owned(),
            };
            (Driver { found: true, says }, devices)
        }
    };
    let (kernels, bytes) = totals();
    let recorded = KERNELS.iter().filter(|kernel| record(kernel.name).is_some()).count();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        driver,
        devices,
        artifacts: Artifacts { kernels, recorded, bytes, made_by: made_by() },
        build_ptx: compiler::Found::look(),
    };
    if arguments.json { print_json(&report) } else { table(&report).print() }
}

fn examine(ordinal: usize, form: Option<Form>) -> Examined {
    let device = Device::cuda(ordinal);
    let limits = device.as_ref().ok().and_then(Device::limits);
    let of = |limit: fn(&Limits) -> u32| limits.map_or(0, limit);
    Examined {
        device: format!("cuda:{ordinal}"),
        name: match (&device, limits) {
            (Err(why), _) => why.to_string(),
            (Ok(_), limits) => limits.map_or_else(String::new, |limits| limits.name.clone()),
        },
        capability: format!("{}.{}", of(|l| l.capability.0), of(|l| l.capability.1)),
        multiprocessors: of(|l| l.multiprocessors),
        shared_bytes_per_block: of(|l| l.shared_bytes_per_block),
        l2_bytes: limits.map_or(0, |l| l.l2_bytes),
        memory_bytes: limits.map_or(0, |l| l.memory_bytes),
        kernels: device.map_or_else(|_| Vec::new(), |device| trials(&device, form)),
    }
}

/// Plans a few kinds of call, which loads their kernels.
fn trials(device: &Device, form: Option<Form>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for head_dim in [32, 64, 96, 128, 192, 256] {
        for causal in [false, true] {
            trials.push(attempt::<bf16>(device, form, head_dim, causal));
        }
    }
    trials.push(attempt::<f16>(device, form, 64, true));
    trials.push(attempt::<f16>(device, form, 128, true));
    trials.push(attempt::<f32>(device, form, 64, true));
    trials.push(attempt::<bf16>(device, form, 512, false));
    trials
}

fn attempt<T: Stored>(device: &Device, form: Option<Form>, head_dim: usize, causal: bool) -> Trial {
    let shape = Shape {
        batch: 1,
        q_heads: 8,
        kv_heads: 8,
        q_len: 1024,
        kv_len: 1024,
        head_dim,
        value_dim: head_dim,
    };
    let mask = if causal { Mask::causal(Align::BottomRight) } else { Mask::full() };
    let plan = Attention::new(shape)
        .mask(mask)
        .plan_with::<T>(device, Preference { form, forward_only: true, ..Preference::default() });
    let words = if causal { "causal" } else { "full" };
    let call = format!("{} {words} d {head_dim}", T::DTYPE);
    match plan {
        Ok(plan) => {
            let explanation = plan.explain();
            let says = explanation.launch.as_ref().map_or_else(String::new, |launch| {
                format!("{}, loaded in {:.1} ms", launch.form, launch.load_milliseconds)
            });
            Trial { call, kernel: Some(explanation.kernel.clone()), says }
        }
        Err(why) => Trial { call, kernel: None, says: why.to_string() },
    }
}

fn table(report: &Report) -> Table {
    let mut table = Table::default();
    table.row("ferroflash", report.version);
    let driver = &report.driver;
    table.row("driver", driver.says.as_str());
    for device in &report.devices {
        let Examined { name, capability, multiprocessors, .. } = device;
        table.row(
            device.device.as_str(),
            format!(
                "{name}, compute capability {capability}, {multiprocessors} multiprocessors, \
                 {:.1} GB",
                device.memory_bytes as f64 / 1e9
            ),
        );
        table.row(
            "",
            format!(
                "{} bytes of shared memory a block, {:.0} MB of L2",
                device.shared_bytes_per_block,
                device.l2_bytes as f64 / 1e6
            ),
        );
        for Trial { call, kernel, says } in &device.kernels {
            match kernel {
                Some(kernel) => table.row(format!("  {call}"), format!("{kernel} ({says})")),
                None => table.row(format!("  {call}"), format!("none: {says}")),
            }
        }
    }
    if report.devices.is_empty() {
        table.row("kernels", "no GPU kernel would run: there is no device to run it on");
    }
    table.row("cpu", cpu());
    let artifacts = &report.artifacts;
    table.row(
        "artifacts",
        format!(
            "{} kernels as PTX and cubin, {:.2} MB, {} in the build's manifest",
            artifacts.kernels,
            artifacts.bytes as f64 / 1e6,
            artifacts.recorded
        ),
    );
    table.row("made by", artifacts.made_by);
    table.row("build-ptx", report.build_ptx.compiler.words());
    table.row("ptxas", report.build_ptx.ptxas.words());
    table
}

/// What the CPU path does, in words.
fn cpu() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "forward and backward of {}, {} and {}, {threads} threads",
        Dtype::Bf16,
        Dtype::F16,
        Dtype::F32
    )
}
