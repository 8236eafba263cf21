//! `ferroflash attend`: attention from file to file.

use std::path::PathBuf;

use clap::Args;
use ferroflash::cpu::dense::{self, Precision};
use ferroflash::{Attention, Dtype};
use half::{bf16, f16};
use serde::Serialize;

use crate::call::{Inputs, Tensors};
use crate::check::Check;
use crate::failure::Result;
use crate::file::{Destination, Stored, Written};
use crate::forward::{Chosen, Purpose, Results};
use crate::options::{AxisOrder, Options, Sources};
use crate::progress::Progress;
use crate::report::{Sizes, Table, print_json, sizes};

/// Arguments of `attend`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    sources: Sources,
    /// Where o goes: a .safetensors or a .npy; optional with --check or --json
    #[arg(long, value_name = "FILE", required_unless_present_any = ["check", "json"])]
    out: Option<PathBuf>,
    /// Write lse too: in the .safetensors, or in STEM.lse.npy beside the .npy
    #[arg(long, requires = "out")]
    lse: bool,
    /// Order of the axes in the files
    #[arg(long, value_enum, default_value = "bshd")]
    layout: AxisOrder,
    #[command(flatten)]
    options: Options,
    /// Compare o and lse with the f64 oracle; exit with 1, and write nothing, if they are wrong
    #[arg(long)]
    check: bool,
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    device: String,
    kernel: String,
    shape: Sizes,
    milliseconds: f64,
    check: Option<Checks>,
}

/// The check of o, and within it that of lse.
#[derive(Serialize)]
struct Checks {
    #[serde(flatten)]
    o: Check,
    lse: Check,
}

impl Checks {
    fn verdict(&self) -> Result<()> {
        self.o.verdict("o").and_then(|()| self.lse.verdict("lse"))
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let inputs = arguments.sources.open(arguments.layout)?;
    match inputs.dtype() {
        Dtype::Bf16 => attend::<bf16>(arguments, &inputs),
        Dtype::F16 => attend::<f16>(arguments, &inputs),
        Dtype::F32 => attend::<f32>(arguments, &inputs),
    }
}

fn attend<T: Stored>(arguments: &Arguments, inputs: &Inputs) -> Result<()> {
    let attention = arguments.options.attention(inputs.shape)?;
    let chosen = Chosen::<T>::new(arguments.options.device, &attention, Purpose::Forward)?;
    let names: &[&str] = if arguments.lse { &["o", "lse"] } else { &["o"] };
    let read = arguments.sources.paths();
    let destination = match &arguments.out {
        Some(out) => Some(Destination::new(out, names, T::DTYPE, &read)?),
        None => None,
    };
    let tensors = inputs.read::<T>()?;
    let results = chosen.run(&tensors)?;
    let check = match arguments.check {
        true => Some(compare(&attention, &tensors, &results)?),
        false => None,
    };

    // A result that is wrong is reported, and not written.
    let verdict = check.as_ref().map_or(Ok(()), Checks::verdict);
    let mut written = String::new();
    if let (Ok(()), Some(destination)) = (&verdict, &destination) {
        let axes = inputs.axes;
        let mut outputs = vec![Written::new("o", &axes.in_file(inputs.shape.o_dims()), &results.o)];
        if arguments.lse {
            outputs.push(Written::new("lse", &axes.lse_in_file(&inputs.shape), &results.lse));
        }
        let files = destination.write(&outputs)?.iter().map(|file| file.display().to_string());
        written = files.collect::<Vec<_>>().join(" and ");
    }

    let explanation = chosen.explanation();
    if arguments.json {
        print_json(&Report {
            device: chosen.device(),
            kernel: explanation.kernel,
            shape: inputs.shape.into(),
            milliseconds: results.milliseconds,
            check,
        })?;
        return verdict;
    }
    let mut table = Table::default();
    table.row("device", explanation.device);
    table.row("kernel", format!("{} ({})", explanation.kernel, explanation.dtype));
    table.row("because", explanation.reason);
    table.row("shape", sizes(&inputs.shape));
    table.row("time", format!("{:.3} ms", results.milliseconds));
    if let Some(check) = &check {
        table.row("o", check.o.words());
        table.row("lse", check.lse.words());
    }
    if !written.is_empty() {
        table.row("wrote", written);
    }
    table.print()?;
    verdict
}

/// Compares o and lse with the oracle's.
fn compare<T: Stored>(
    attention: &Attention,
    tensors: &Tensors<T>,
    results: &Results<T>,
) -> Result<Checks> {
    let progress = Progress::of("the f64 oracle");
    let reference = dense::forward(attention, &tensors.inputs()?, Precision::F64)?;
    progress.tell(1, 2);
    let rounded = dense::forward(attention, &tensors.inputs()?, Precision::Rounded(T::DTYPE))?;
    let o = tensors.axes.in_order(&results.o, tensors.shape.o_dims()).map(T::to_f64);
    Ok(Checks {
        o: Check::new(T::DTYPE, &tensors.shape, o, &reference.o, &rounded.o),
        lse: Check::of_lse(&tensors.shape, &results.lse, &reference.lse, &rounded.lse),
    })
}
