//! `ferroflash explain`: what a plan would do, why, and what the call costs by arithmetic.

mod drawing;
mod measured;
mod modelled;
mod roofline;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use ferroflash::{Dtype, Explanation, Shape};
use ferroflash_ledger::device::{DeviceModel, device};
use half::{bf16, f16};
use serde::Serialize;

use crate::bench::record::{Pass, Workload};
use crate::call::Inputs;
use crate::failure::{Failure, Result, one_line};
use crate::file::{Safetensors, Stored};
use crate::forward::{Chosen, Purpose};
use crate::options::{AxisOrder, Options};
use crate::report::{print, print_json};

use measured::Measured;
use modelled::Modelled;

/// Arguments of `explain`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// A .safetensors that holds q, k and v: only its header is read
    #[arg(required_unless_present = "shape", conflicts_with_all = ["shape", "dtype"])]
    file: Option<PathBuf>,
    /// Sizes of the call, in place of FILE: B,Hq,Hkv,Sq,Sk,D or B,Hq,Hkv,Sq,Sk,D,Dv
    #[arg(long, value_name = "SIZES")]
    shape: Option<ShapeArgument>,
    /// Element type, with --shape
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArgument,
    /// Order of the axes in FILE
    #[arg(long, value_enum, default_value = "bshd")]
    layout: AxisOrder,
    #[command(flatten)]
    options: Options,
    /// Model the call on a device that need not be here: a100, cc8.6, h100, h200, or a .json of
    /// one's limits
    #[arg(long, value_name = "NAME")]
    device_model: Option<String>,
    /// Place the call under the roofs that `ferroflash bench --roofs --json FILE` measured
    #[arg(long, value_name = "FILE")]
    roofs: Option<PathBuf>,
    /// Draw the tiles, their owners and the rooflines into FILE
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DtypeArgument {
    Bf16,
    F16,
    F32,
}

#[derive(Clone, Copy, Debug)]
struct ShapeArgument(Shape);

impl FromStr for ShapeArgument {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let sizes: std::result::Result<Vec<usize>, String> = text
            .split(',')
            .map(|size| size.trim().parse().map_err(|_| format!("`{size}` is not a size")))
            .collect();
        let sizes = sizes?;
        let (&[batch, q_heads, kv_heads, q_len, kv_len, head_dim], rest) = sizes
            .split_first_chunk()
            .ok_or_else(|| format!("6 or 7 sizes are needed, not {}", sizes.len()))?;
        let value_dim = match rest {
            [] => head_dim,
            [value_dim] => *value_dim,
            _ => return Err(format!("6 or 7 sizes are needed, not {}", sizes.len())),
        };
        Ok(Self(Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }))
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let (shape, dtype) = match (&arguments.file, arguments.shape) {
        (Some(path), _) => {
            let file = Safetensors::open(path)?;
            let [q, k, v] = [file.entry("q")?, file.entry("k")?, file.entry("v")?];
            let inputs = Inputs::new(q, k, v, arguments.layout)?;
            (inputs.shape, inputs.dtype())
        }
        (None, Some(ShapeArgument(shape))) => (
            shape,
            match arguments.dtype {
                DtypeArgument::Bf16 => Dtype::Bf16,
                DtypeArgument::F16 => Dtype::F16,
                DtypeArgument::F32 => Dtype::F32,
            },
        ),
        (None, None) => return Err(Failure::input("FILE", "neither it nor --shape was given")),
    };
    match dtype {
        Dtype::Bf16 => explain::<bf16>(arguments, shape),
        Dtype::F16 => explain::<f16>(arguments, shape),
        Dtype::F32 => explain::<f32>(arguments, shape),
    }
}

/// A plan and a model of one call, each under a name of its own.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    plan: Explanation,
    modelled: Option<Modelled>,
    /// Why there is no model.
    not_modelled: Option<String>,
    /// The call under roofs that were measured, where a file of such was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Measured>,
}

fn explain<T: Stored>(arguments: &Arguments, shape: Shape) -> Result<()> {
    let attention = arguments.options.attention(shape)?;
    let chosen = Chosen::<T>::new(arguments.options.device, &attention, Purpose::Explanation)?;
    let explanation = chosen.explanation();
    let named = arguments.device_model.as_deref().map(device_named).transpose()?;
    let is_named = named.is_some();
    let modelled = match Modelled::new(&attention, T::DTYPE, &explanation, named) {
        // What was asked for by name or into a file must be had.
        Err(why) if is_named || arguments.svg.is_some() => return Err(why),
        modelled => modelled,
    };
    let measured = match &arguments.roofs {
        Some(file) => {
            let mask = &arguments.options.mask;
            let of = |pass| {
                let mut workload = Workload::new(pass, &shape, T::DTYPE, mask);
                workload.options.scale = arguments.options.scale;
                workload
            };
            let call = [of(Pass::Forward), of(Pass::Backward)];
            Some(Measured::new(file, &explanation, &call, is_named)?)
        }
        None => None,
    };
    if let (Some(file), Ok(modelled)) = (&arguments.svg, &modelled) {
        let drawing = drawing::svg(modelled, &attention.visibility(), measured.as_ref());
        crate::file::write_text("--svg", file, &drawing)?;
    }
    if arguments.json {
        let not_modelled = modelled.as_ref().err().map(Failure::line);
        let modelled = modelled.ok();
        return print_json(&Report { plan: explanation, modelled, not_modelled, measured });
    }
    let lines = explanation.to_string();
    let mut words: String = lines.lines().map(|line| one_line(line) + "\n").collect();
    match modelled {
        Ok(modelled) => words += &modelled.words(&attention.visibility()),
        Err(why) => words += &format!("not modelled: {}\n", why.line()),
    }
    words += &measured.map_or_else(
        || "measured  nothing: `ferroflash bench` times calls, and roofs for --roofs\n".to_owned(),
        |measured| measured.words(),
    );
    print(&words)
}

/// A device of the ledger's table, or the one that a file describes.
fn device_named(name: &str) -> Result<DeviceModel> {
    if !name.ends_with(".json") {
        return device(name, &[]).cloned().map_err(|why| Failure::input("--device-model", why));
    }
    let failed = |why: String| Failure::input("--device-model", format!("{name}: {why}"));
    let text = std::fs::read_to_string(name).map_err(|why| failed(why.to_string()))?;
    let model: DeviceModel = serde_json::from_str(&text).map_err(|why| failed(why.to_string()))?;
    model.check().map_err(|why| failed(why.to_string()))?;
    Ok(model)
}
