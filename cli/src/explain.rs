//! `ferroflash explain`: what a plan would do, and why.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use ferroflash::{Dtype, Shape};
use half::{bf16, f16};

use crate::call::Inputs;
use crate::failure::{Failure, Result, one_line};
use crate::file::{Safetensors, Stored};
use crate::forward::{Chosen, Purpose};
use crate::options::{AxisOrder, Options};
use crate::report::{print, print_json};

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

fn explain<T: Stored>(arguments: &Arguments, shape: Shape) -> Result<()> {
    let attention = arguments.options.attention(shape)?;
    let chosen = Chosen::<T>::new(arguments.options.device, &attention, Purpose::Explanation)?;
    let explanation = chosen.explanation();
    if arguments.json {
        return print_json(&explanation);
    }
    let lines = explanation.to_string();
    print(&lines.lines().map(|line| one_line(line) + "\n").collect::<String>())
}
