//! `ferroflash grad`: the backward pass from file to file.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use ferroflash::cpu::dense::{self, Precision};
use ferroflash::cpu::tiled;
use ferroflash::{Attention, Buffer, Device, Dtype, Gradients, Plan, Saved, TensorMut, TensorRef};
use half::{bf16, f16};
use serde::Serialize;

use crate::call::{Inputs, Tensors};
use crate::check::Check;
use crate::failure::{Failure, Result};
use crate::file::{Destination, Safetensors, Stored, Written, has_extension};
use crate::forward::{Chosen, Purpose, zeros};
use crate::options::{AxisOrder, Options};
use crate::progress::Progress;
use crate::report::{Sizes, Table, print_json, sizes};

/// Arguments of `grad`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// A .safetensors that holds q, k, v and d_o, the gradient of o; o and lse are used if both
    /// are there, and computed if not; d_lse, the gradient of lse, is used if it is there
    file: PathBuf,
    /// Where dq, dk and dv go: a .safetensors; optional with --check or --json
    #[arg(long, value_name = "FILE", required_unless_present_any = ["check", "json"])]
    out: Option<PathBuf>,
    /// Order of the axes in the files
    #[arg(long, value_enum, default_value = "bshd")]
    layout: AxisOrder,
    #[command(flatten)]
    options: Options,
    /// Equal runs give equal bits on a GPU as well, at some cost; the cpu's always do
    #[arg(long)]
    deterministic: bool,
    /// Compare with the f64 oracle; exit with 1, and write nothing, if a gradient is wrong
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

#[derive(Serialize)]
struct Checks {
    dq: Check,
    dk: Check,
    dv: Check,
}

impl Checks {
    fn each(&self) -> [(&'static str, &Check); 3] {
        [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
    }
}

/// The forward's inputs and results, and the gradients from above.
struct Given<T> {
    tensors: Tensors<T>,
    o: Vec<T>,
    lse: Vec<f32>,
    d_o: Vec<T>,
    d_lse: Option<Vec<f32>>,
}

/// Gradients that lie as their tensors do.
struct Computed<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    milliseconds: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let file = Safetensors::open(&arguments.file)?;
    let [q, k, v] = [file.entry("q")?, file.entry("k")?, file.entry("v")?];
    let inputs = Inputs::new(q, k, v, arguments.layout)?;
    match inputs.dtype() {
        Dtype::Bf16 => grad::<bf16>(arguments, &file, &inputs),
        Dtype::F16 => grad::<f16>(arguments, &file, &inputs),
        Dtype::F32 => grad::<f32>(arguments, &file, &inputs),
    }
}

fn grad<T: Stored>(arguments: &Arguments, file: &Safetensors, inputs: &Inputs) -> Result<()> {
    let mut attention = arguments.options.attention(inputs.shape)?;
    if arguments.deterministic {
        attention = attention.deterministic();
    }
    let chosen = Chosen::<T>::new(arguments.options.device, &attention, Purpose::Gradients)?;
    let destination = match &arguments.out {
        Some(out) if has_extension(out, "npy") => {
            return Err(Failure::needs("--out", out.display(), "a .safetensors"));
        }
        Some(out) => {
            let names = ["dq", "dk", "dv"];
            Some(Destination::new(out, &names, T::DTYPE, &[&arguments.file])?)
        }
        None => None,
    };
    let (given, forward) = read::<T>(&chosen, file, inputs)?;
    let computed = match chosen.gpu() {
        Some(device) => backward_on_gpu(device, chosen.plan(), &given)?,
        None => backward_on_cpu(&attention, &given)?,
    };
    let check = match arguments.check {
        true => Some(compare(&attention, &given, &computed)?),
        false => None,
    };

    // Gradients that are wrong are reported, and not written.
    let verdict = check.iter().flat_map(Checks::each).try_for_each(|(n, check)| check.verdict(n));
    let (shape, axes) = (&inputs.shape, inputs.axes);
    let mut written = String::new();
    if let (Ok(()), Some(destination)) = (&verdict, &destination) {
        let outputs = [
            Written::new("dq", &axes.in_file(shape.q_dims()), &computed.dq),
            Written::new("dk", &axes.in_file(shape.k_dims()), &computed.dk),
            Written::new("dv", &axes.in_file(shape.v_dims()), &computed.dv),
        ];
        let files = destination.write(&outputs)?.iter().map(|file| file.display().to_string());
        written = files.collect::<Vec<_>>().join(" and ");
    }

    let explanation = chosen.plan().explain();
    let kernel = explanation.backward.as_ref().map_or("none", |backward| &backward.kernel);
    if arguments.json {
        print_json(&Report {
            device: chosen.device(),
            kernel: kernel.to_owned(),
            shape: inputs.shape.into(),
            milliseconds: computed.milliseconds,
            check,
        })?;
        return verdict;
    }
    let mut table = Table::default();
    table.row("device", &explanation.device);
    table.row("kernel", format!("{kernel} ({})", T::DTYPE));
    if let Some(why) = chosen.fallback() {
        table.row("because", why);
    }
    table.row("forward", forward);
    table.row("shape", sizes(shape));
    table.row("time", format!("{:.3} ms", computed.milliseconds));
    for (name, check) in check.iter().flat_map(Checks::each) {
        table.row(name, check.words());
    }
    if !written.is_empty() {
        table.row("wrote", written);
    }
    table.print()?;
    verdict
}

/// Reads what the file has, and computes o and lse if it lacks them; also says which.
fn read<T: Stored>(
    chosen: &Chosen<T>,
    file: &Safetensors,
    inputs: &Inputs,
) -> Result<(Given<T>, String)> {
    let Inputs { shape, axes, .. } = inputs;
    let like_o = |name| {
        let entry = file.entry(name)?;
        inputs.check(&entry, shape.o_dims(), "q and v")?;
        Ok::<_, Failure>(entry)
    };
    let like_lse = |name| {
        let entry = file.entry(name)?;
        inputs.check_in_file(&entry, &axes.lse_in_file(shape), "q")?;
        Ok::<_, Failure>(entry)
    };
    let d_o = like_o("d_o")?.read::<T>()?;
    let d_lse = match file.has("d_lse") {
        true => Some(like_lse("d_lse")?.read::<f32>()?),
        false => None,
    };
    let saved = match file.has("o") && file.has("lse") {
        true => Some((like_o("o")?.read::<T>()?, like_lse("lse")?.read::<f32>()?)),
        false => None,
    };
    let tensors = inputs.read::<T>()?;
    let (o, lse, words) = match saved {
        Some((o, lse)) => (o, lse, "o and lse are the file's".to_owned()),
        None => {
            let results = chosen.run(&tensors)?;
            let words = format!("computed in {:.3} ms", results.milliseconds);
            (results.o, results.lse, words)
        }
    };
    Ok((Given { tensors, o, lse, d_o, d_lse }, words))
}

impl<T> Given<T> {
    fn d_o(&self) -> ferroflash::Result<TensorRef<'_, T>> {
        let dims = self.tensors.shape.o_dims();
        self.tensors.axes.view(dims, |dims| TensorRef::host(&self.d_o, dims))
    }

    fn d_lse(&self) -> ferroflash::Result<Option<TensorRef<'_, f32>>> {
        let dims = self.tensors.shape.lse_dims();
        self.d_lse.as_ref().map(|d_lse| TensorRef::host(d_lse, &dims)).transpose()
    }
}

fn backward_on_cpu<T: Stored>(attention: &Attention, given: &Given<T>) -> Result<Computed<T>> {
    let Tensors { shape, axes, .. } = &given.tensors;
    let mut dq = zeros::<T>("dq", &shape.q_dims())?;
    let mut dk = zeros::<T>("dk", &shape.k_dims())?;
    let mut dv = zeros::<T>("dv", &shape.v_dims())?;
    let saved = Saved {
        inputs: given.tensors.inputs()?,
        o: axes.view(shape.o_dims(), |dims| TensorRef::host(&given.o, dims))?,
        lse: TensorRef::host(&given.lse, &shape.lse_dims())?,
    };
    let begun = Instant::now();
    let mut gradients = Gradients {
        dq: Some(axes.view_mut(shape.q_dims(), |dims| TensorMut::host(&mut dq, dims))?),
        dk: Some(axes.view_mut(shape.k_dims(), |dims| TensorMut::host(&mut dk, dims))?),
        dv: Some(axes.view_mut(shape.v_dims(), |dims| TensorMut::host(&mut dv, dims))?),
        ..Gradients::default()
    };
    let d_lse = given.d_lse()?;
    tiled::backward(attention, &saved, &given.d_o()?, d_lse.as_ref(), &mut gradients, None)?;
    drop(gradients);
    Ok(Computed { dq, dk, dv, milliseconds: begun.elapsed().as_secs_f64() * 1e3 })
}

fn backward_on_gpu<T: Stored>(
    device: &Device,
    plan: &Plan<T>,
    given: &Given<T>,
) -> Result<Computed<T>> {
    let Tensors { shape, axes, q, k, v, .. } = &given.tensors;
    let stream = device.default_stream();
    let upload = |data: &[T]| Buffer::from_slice(device, data);
    let (q, k, v) = (upload(q)?, upload(k)?, upload(v)?);
    let (o, d_o) = (upload(&given.o)?, upload(&given.d_o)?);
    let lse = Buffer::from_slice(device, &given.lse)?;
    let d_lse = given.d_lse.as_ref().map(|d_lse| Buffer::from_slice(device, d_lse)).transpose()?;
    let like = |dims: [usize; 4]| Buffer::<T>::new(device, dims.iter().product());
    let (mut dq, mut dk) = (like(shape.q_dims())?, like(shape.k_dims())?);
    let mut dv = like(shape.v_dims())?;
    stream.synchronize()?;

    let begun = Instant::now();
    {
        let saved = Saved {
            inputs: ferroflash::Inputs::new(
                axes.view(shape.q_dims(), |dims| q.tensor(&stream, dims))?,
                axes.view(shape.k_dims(), |dims| k.tensor(&stream, dims))?,
                axes.view(shape.v_dims(), |dims| v.tensor(&stream, dims))?,
            ),
            o: axes.view(shape.o_dims(), |dims| o.tensor(&stream, dims))?,
            lse: lse.tensor(&stream, &shape.lse_dims())?,
        };
        let d_o = axes.view(shape.o_dims(), |dims| d_o.tensor(&stream, dims))?;
        let d_lse = d_lse.as_ref().map(|d_lse| d_lse.tensor(&stream, &shape.lse_dims()));
        let d_lse = d_lse.transpose()?;
        let mut gradients = Gradients {
            dq: Some(axes.view_mut(shape.q_dims(), |dims| dq.tensor_mut(&stream, dims))?),
            dk: Some(axes.view_mut(shape.k_dims(), |dims| dk.tensor_mut(&stream, dims))?),
            dv: Some(axes.view_mut(shape.v_dims(), |dims| dv.tensor_mut(&stream, dims))?),
            ..Gradients::default()
        };
        plan.backward(&stream, &saved, &d_o, d_lse.as_ref(), &mut gradients)?;
    }
    stream.synchronize()?;
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    let (dq, dk) = (dq.to_vec(&stream)?, dk.to_vec(&stream)?);
    Ok(Computed { dq, dk, dv: dv.to_vec(&stream)?, milliseconds })
}

/// Compares the gradients with the oracle's.
fn compare<T: Stored>(
    attention: &Attention,
    given: &Given<T>,
    computed: &Computed<T>,
) -> Result<Checks> {
    let Tensors { shape, axes, .. } = &given.tensors;
    let progress = Progress::of("the f64 oracle");
    let (d_o, d_lse) = (given.d_o()?, given.d_lse()?);
    let oracle = |precision| {
        let inputs = given.tensors.inputs()?;
        dense::backward(attention, &inputs, &d_o, d_lse.as_ref(), precision)
    };
    let reference = oracle(Precision::F64)?;
    progress.tell(1, 2);
    let rounded = oracle(Precision::Rounded(T::DTYPE))?;
    let check = |gradient: &[T], dims, reference: &[f64], rounded: &[f64]| {
        let gradient = axes.in_order(gradient, dims).map(T::to_f64);
        Check::new(T::DTYPE, shape, gradient, reference, rounded)
    };
    Ok(Checks {
        dq: check(&computed.dq, shape.q_dims(), &reference.dq, &rounded.dq),
        dk: check(&computed.dk, shape.k_dims(), &reference.dk, &rounded.dk),
        dv: check(&computed.dv, shape.v_dims(), &reference.dv, &rounded.dv),
    })
}
