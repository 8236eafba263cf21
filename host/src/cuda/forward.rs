//! The forward call on a device: from a validated call to one launch.

use cudarc::driver::sys;
use ferroflash_core::params::{DeviceTensor, PortableForwardParams};
use ferroflash_core::schedule::ForwardSchedule;
use ferroflash_core::shape::Strides;
use ferroflash_core::table::KernelSpec;

use super::device::{CudaDevice, Limits};
use super::kernel::Kernel;
use crate::attention::{Attention, Inputs, Output};
use crate::element::Element;
use crate::error::Result;
use crate::tensor::Raw;

/// Share of the second-level cache that the K and V of one section of heads may take.
const CACHE_SHARE: (u64, u64) = (3, 5);

/// The order in which blocks of `spec` take a call's query blocks on a device.
pub(crate) fn schedule(
    attention: &Attention,
    spec: &KernelSpec,
    limits: &Limits,
) -> ForwardSchedule {
    let shape = &attention.shape;
    let batch_heads = (shape.batch * shape.q_heads) as u32;
    let channels = (shape.head_dim + shape.value_dim) as u64;
    let bytes_per_head =
        shape.kv_len as u64 * channels * spec.dtype.bytes() as u64 / shape.group().max(1) as u64;
    let cache = limits.l2_bytes * CACHE_SHARE.0 / CACHE_SHARE.1;
    ForwardSchedule {
        q_blocks: spec.tile.q_blocks(shape.q_len) as u32,
        batch_heads,
        section: ForwardSchedule::section_for(batch_heads, bytes_per_head, cache),
        longest_first: u32::from(attention.mask.right.is_some()),
    }
}

/// Launches the forward kernel.
///
/// # Safety
/// The tensors are valid on the device until the launch has completed on `stream`, which belongs to
/// the device's context, and have the dimensions that `attention` implies.
pub(crate) unsafe fn launch<T: Element>(
    attention: &Attention,
    device: &CudaDevice,
    kernel: &Kernel,
    stream: sys::CUstream,
    inputs: &Inputs<'_, T>,
    output: &Output<'_, T>,
) -> Result<()> {
    let shape = &attention.shape;
    let schedule = schedule(attention, kernel.spec, &device.limits);
    if schedule.blocks() == 0 {
        return Ok(());
    }
    let (query_sign, scale, scale_log2) = PortableForwardParams::scales(attention.scale_factor());
    let params = PortableForwardParams {
        q: device_tensor::<T>(&inputs.q.raw),
        k: device_tensor::<T>(&inputs.k.raw),
        v: device_tensor::<T>(&inputs.v.raw),
        o: device_tensor::<T>(&output.o.raw),
        lse: output.lse.as_ref().map_or(0, |lse| lse.raw.address as u64),
        schedule,
        visibility: attention.mask.visibility(shape.q_len, shape.kv_len),
        q_heads: shape.q_heads as u32,
        group: shape.group() as u32,
        scale,
        scale_log2,
        query_sign,
    };
    // SAFETY: these are the parameters of a portable forward kernel; the rest is the caller's
    // promise. The planner checked that the blocks fit the grid.
    unsafe { kernel.launch(device, stream, schedule.blocks() as u32, &params) }
}

/// A `[batch, row, head, channel]` tensor as kernels take it.
fn device_tensor<T: Element>(raw: &Raw) -> DeviceTensor {
    let (dims, strides) = (raw.dims(), raw.strides());
    let size = size_of::<T>();
    let stride = |axis: usize| if dims[axis] > 1 { strides[axis] } else { 0 };
    let strides = Strides { batch: stride(0), row: stride(1), head: stride(2) };
    let aligned = [strides.batch, strides.row, strides.head]
        .iter()
        .map(|stride| (*stride as u64).wrapping_mul(size as u64))
        .chain([raw.address as u64])
        .fold(16, |all, part| all | part);
    DeviceTensor {
        address: raw.address as u64,
        strides,
        channels: dims[3] as u32,
        access_bytes: 1 << aligned.trailing_zeros().min(4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Place, TensorRef};
    use half::bf16;

    #[test]
    fn the_widest_access_follows_address_and_strides() {
        let access = |address: usize, strides: [i64; 4]| {
            // SAFETY: the tensor is never read.
            let tensor = unsafe {
                TensorRef::<bf16>::from_raw(
                    address as *const bf16,
                    &[2, 3, 4, 40],
                    &strides,
                    Place::Cuda(0),
                )
            };
            device_tensor::<bf16>(&tensor.unwrap().raw).access_bytes
        };
        assert_eq!(access(4096, [4800, 1600, 40, 1]), 16);
        assert_eq!(access(4096 + 8, [4800, 1600, 40, 1]), 8);
        assert_eq!(access(4096, [4800, 1600, 42, 1]), 4);
        assert_eq!(access(4096 + 2, [4800, 1600, 40, 1]), 2);
        assert_eq!(access(4096, [-4800, 1601, 40, 1]), 2);
        assert_eq!(access(4096, [0, 0, 0, 1]), 16);
    }
}
