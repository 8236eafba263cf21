//! What would run here, without tensors.

use std::fmt::Write as _;

use ferroflash::{Align, Device, Dtype, KERNELS, KernelSpec, Mask, Place, Shape};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;

use crate::error::exception;
use crate::plan::Options;

/// `kernel_name(direction, dtype, (causal, deterministic), sizes, device)`: the kernel that a call
/// of these sizes, `(batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim)`, would run; a
/// device of −1 is the CPU.
#[pyfunction]
#[pyo3(signature = (direction, dtype, options, sizes, device, /))]
pub(crate) fn kernel_name(
    py: Python<'_>,
    direction: &str,
    dtype: &str,
    options: (bool, bool),
    sizes: [usize; 7],
    device: i32,
) -> PyResult<String> {
    let (causal, deterministic) = options;
    let is_backward = match direction {
        "forward" => false,
        "backward" => true,
        other => {
            return Err(PyValueError::new_err(format!(
                "direction: {other:?}, but it must be \"forward\" or \"backward\""
            )));
        }
    };
    let dtype = match dtype {
        "bf16" | "bfloat16" => Dtype::Bf16,
        "fp16" | "f16" | "float16" | "half" => Dtype::F16,
        "f32" | "fp32" | "float32" | "float" => Dtype::F32,
        other => {
            return Err(PyValueError::new_err(format!(
                "dtype: {other:?}, but it must be bf16, f16 or f32"
            )));
        }
    };
    let [batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim] = sizes;
    let shape = Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let options = Options {
        mask: if causal { Mask::causal(Align::BottomRight) } else { Mask::full() },
        deterministic,
        ..Options::of(shape)
    };
    let place = usize::try_from(device).map_or(Place::Host, Place::Cuda);
    let plan = py.detach(|| options.plan(dtype, place));
    let plan = plan.map_err(|error| exception(error, "dtype, head_dim"))?;
    let forward = plan.explain();
    match &forward.backward {
        _ if !is_backward => Ok(forward.kernel.clone()),
        Some(backward) => Ok(backward.kernel.clone()),
        None => Err(PyNotImplementedError::new_err(format!(
            "direction: {}",
            forward.no_backward.as_deref().unwrap_or("there is no backward kernel")
        ))),
    }
}

/// Whether there is a usable driver that sees a CUDA device.
#[pyfunction]
pub(crate) fn is_available(py: Python<'_>) -> bool {
    py.detach(|| Device::cuda_count().is_ok_and(|count| count > 0))
}

/// What is here: the package's kernels, the driver, each device and what runs on it.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>) -> String {
    py.detach(|| {
        let (kernels, bytes) = ferroflash::totals();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut text = format!(
            "ferroflash {}\nkernels    {kernels} embedded, {:.1} MB\nmade by    {}\n",
            env!("CARGO_PKG_VERSION"),
            bytes as f64 / 1e6,
            ferroflash::made_by()
        );
        // Writing to a string does not fail.
        let _ = writeln!(text, "cpu        {threads} threads; bf16, f16, f32");
        match Device::cuda_count() {
            Ok(0) => text.push_str("cuda       the driver sees no device\n"),
            Ok(count) => (0..count).for_each(|ordinal| text.push_str(&device_line(ordinal))),
            Err(error) => {
                let _ = writeln!(text, "cuda       {error}");
            }
        }
        text
    })
}

/// One device: what it is, and how many kernels run on it in which form.
fn device_line(ordinal: usize) -> String {
    let name = format!("cuda:{ordinal}");
    let device = match Device::cuda(ordinal) {
        Ok(device) => device,
        Err(error) => return format!("{name:<10} {error}\n"),
    };
    let Some(limits) = device.limits() else { return String::new() };
    let (major, minor) = limits.capability;
    let fits = KERNELS.iter().filter(|spec| {
        spec.family.runs_on(major, minor) && spec.shared_bytes <= limits.shared_bytes_per_block
    });
    let (cubins, others): (Vec<&KernelSpec>, Vec<&KernelSpec>) =
        fits.partition(|spec| spec.family.cubin_runs_on(major, minor));
    format!(
        "{name:<10} {}, sm_{major}{minor}, {} multiprocessors, {:.0} GB, driver for CUDA {}.{}\n\
         {:<10} {} of {} kernels run: {} as machine code, {} as PTX\n",
        limits.name,
        limits.multiprocessors,
        limits.memory_bytes as f64 / 1e9,
        limits.driver_version / 1000,
        limits.driver_version % 1000 / 10,
        "",
        cubins.len() + others.len(),
        KERNELS.len(),
        cubins.len(),
        others.len()
    )
}
