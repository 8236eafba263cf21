//! The forward call on a device: from checked tensors to one launch.

use cudarc::driver::sys;
use ferroflash_core::axes::{Dtype, Family, MaskClass};
use ferroflash_core::params::{DeviceTensor, HopperForwardParams, PortableForwardParams, scales};
use ferroflash_core::schedule::ForwardSchedule;
use ferroflash_core::shape::Strides;
use ferroflash_core::table::KernelSpec;
use ferroflash_core::tensor_map::{MapRefusal, TensorMapPlan, hopper_forward_boxes};
use ferroflash_core::visibility::Visibility;

use super::device::{CudaDevice, Limits};
use super::kernel::Kernel;
use super::options::DeviceOptions;
use super::packed_heads::PackedHeads;
use super::tensor_map;
use crate::attention::{Attention, Inputs, Layout, Output};
use crate::element::Element;
use crate::error::Result;
use crate::tensor::Raw;

/// Share of the second-level cache that the K and V of one section of heads may take.
const CACHE_SHARE: (u64, u64) = (3, 5);

/// Heads of a section of short sequences, for persistent blocks: with more, the query blocks of a
/// head come too far apart. Measured on an H200 at 512 rows, where 32 heads gain 1 to 4 % on 128.
const MOST_SECTION_HEADS: u32 = 32;

/// Query blocks of a head, and heads: of every item, or of all packed items together (see
/// `ferroflash_core::items`). `None` where their product is past any number.
pub(crate) fn query_blocks(attention: &Attention, spec: &KernelSpec) -> Option<(usize, usize)> {
    let shape = &attention.shape;
    let (q_blocks, heads) = match attention.layout {
        Layout::Packed { q_tokens, .. } => {
            let slots = q_tokens / spec.tile.q_rows as usize + 1;
            (slots.checked_add(shape.batch)?, shape.q_heads)
        }
        Layout::Dense | Layout::KeyLengths => {
            (spec.tile.q_blocks(shape.q_len), shape.batch.checked_mul(shape.q_heads)?)
        }
    };
    q_blocks.checked_mul(heads).map(|_| (q_blocks, heads))
}

/// The order in which blocks of `spec` take a call's query blocks on a device.
pub(crate) fn schedule(
    attention: &Attention,
    spec: &KernelSpec,
    limits: &Limits,
) -> ForwardSchedule {
    let shape = &attention.shape;
    let (q_blocks, heads) = query_blocks(attention, spec).unwrap_or((0, 0));
    let batch_heads = heads as u32;
    let channels = (shape.head_dim + shape.value_dim) as u64;
    let bytes_per_head =
        shape.kv_len as u64 * channels * spec.dtype.bytes() as u64 / shape.group().max(1) as u64;
    let (cache, most_heads) = match spec.family {
        Family::Portable => (limits.l2_bytes * CACHE_SHARE.0 / CACHE_SHARE.1, u32::MAX),
        Family::Hopper => (ForwardSchedule::SECTION_BYTES, MOST_SECTION_HEADS),
    };
    let fitting = ForwardSchedule::section_for(batch_heads, bytes_per_head, cache).min(most_heads);
    // Query heads of a group read the same K and V: a section holds whole groups if it can.
    let group = (shape.group() as u32).clamp(1, most_heads);
    let section = (fitting / group).max(1) * group;
    ForwardSchedule {
        q_blocks: q_blocks as u32,
        batch_heads,
        section,
        longest_first: u32::from(attention.mask.right.is_some()),
    }
}

/// The visible cells, as the kernels take them. Keys past every row's range are cut off, so that
/// what they hold never reaches a product; an unbounded side becomes one that sums in 32 bits.
pub(super) fn device_visibility(attention: &Attention) -> Visibility {
    let shape = &attention.shape;
    let visible = attention.mask.visibility(shape.q_len, shape.kv_len);
    let everything = (shape.q_len + shape.kv_len) as i32;
    Visibility {
        kv_len: visible.keys_of_any(&(0..visible.q_len)).end,
        left: visible.left.min(everything),
        right: visible.right.min(everything),
        ..visible
    }
}

/// A forward call with its tensors, checked against each other.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) attention: &'a Attention,
    pub(crate) dtype: Dtype,
    pub(crate) q: Raw,
    pub(crate) k: &'a Raw,
    pub(crate) v: &'a Raw,
    pub(crate) o: Raw,
    /// Address of lse, or 0.
    pub(crate) lse: u64,
    /// The options, where the kernel takes any.
    pub(crate) options: DeviceOptions,
    /// Address of the workspace, as large as [`workspace_bytes`] says.
    pub(crate) workspace: u64,
}

/// Bytes of workspace that a forward kernel needs, aligned to 4.
pub(crate) fn workspace_bytes(spec: &KernelSpec) -> usize {
    match spec.family {
        Family::Portable => 0,
        // The counter from which persistent blocks draw their work.
        Family::Hopper => 4,
    }
}

impl<'a> Call<'a> {
    pub(crate) fn new<T: Element>(
        attention: &'a Attention,
        inputs: &'a Inputs<'_, T>,
        output: &'a Output<'_, T>,
        workspace: u64,
    ) -> Result<Self> {
        Ok(Self {
            attention,
            workspace,
            dtype: T::DTYPE,
            q: inputs.q.raw,
            k: &inputs.k.raw,
            v: &inputs.v.raw,
            o: output.o.raw,
            options: DeviceOptions::new(attention, inputs)?,
            lse: output.lse.as_ref().map_or(0, |lse| lse.raw.address as u64),
        })
    }

    /// The same call with the heads of a group as rows, where q and o allow it by their strides.
    pub(crate) fn packed(&self, heads: &'a PackedHeads) -> Option<Self> {
        let (q, o) = (heads.view(&self.q)?, heads.view(&self.o)?);
        Some(Self { attention: &heads.attention, q, o, ..*self })
    }

    /// What the copy engine is told of q, k, v and o, or the tensor that it cannot address and why.
    pub(crate) fn tensor_maps(
        &self,
        spec: &KernelSpec,
    ) -> std::result::Result<[TensorMapPlan; 4], (&'static str, MapRefusal)> {
        let boxes = hopper_forward_boxes(&spec.tile);
        // Keys that no row sees are cut off; those of packed items are told by offsets.
        let keys = match self.attention.layout {
            Layout::Packed { .. } => None,
            _ => Some(device_visibility(self.attention).kv_len as usize),
        };
        let plan = |name, raw: &Raw, panel| {
            // Packed items lie on one row axis: a batch of one.
            let (batch, [rows, heads, channels]) = match *raw.dims() {
                [batch, rows, heads, channels] => (batch, [rows, heads, channels]),
                [rows, heads, channels] => (1, [rows, heads, channels]),
                _ => (0, [0; 3]),
            };
            let rows = if name == "k" || name == "v" { keys.unwrap_or(rows) } else { rows };
            let dims = [batch, rows, heads, channels];
            TensorMapPlan::new(raw.address as u64, dims, strides(raw), panel)
                .map_err(|refusal| (name, refusal))
        };
        let (k, v) = self.mapped_keys();
        Ok([
            plan("q", &self.q, boxes[0])?,
            plan("k", k, boxes[1])?,
            plan("v", v, boxes[2])?,
            plan("o", &self.o, boxes[3])?,
        ])
    }

    /// What the maps of k and v show. Where packed items have no keys at all, no tile is copied,
    /// but a map needs elements: q and o, of as many channels, stand in.
    fn mapped_keys(&self) -> (&Raw, &Raw) {
        match self.attention.layout {
            Layout::Packed { kv_tokens: 0, .. } => (&self.q, &self.o),
            _ => (self.k, self.v),
        }
    }

    /// Launches `kernel`, of any family that needs no tensor maps.
    ///
    /// # Safety
    /// The tensors are valid on the device until the launch has completed on `stream`, which
    /// belongs to the device's context.
    pub(crate) unsafe fn launch_portable(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        stream: sys::CUstream,
    ) -> Result<()> {
        let shape = &self.attention.shape;
        let schedule = schedule(self.attention, kernel.spec, &device.limits);
        let (query_sign, scale, scale_log2) = scales(self.attention.scale_factor());
        let size = self.dtype.bytes();
        let params = PortableForwardParams {
            q: device_tensor(&self.q, size),
            k: device_tensor(self.k, size),
            v: device_tensor(self.v, size),
            o: device_tensor(&self.o, size),
            lse: self.lse,
            schedule,
            visibility: device_visibility(self.attention),
            q_heads: shape.q_heads as u32,
            group: shape.group() as u32,
            scale,
            scale_log2,
            query_sign,
        };
        let blocks = schedule.blocks() as u32;
        for first in (0..shape.value_dim).step_by(kernel.spec.tile.value_dim as usize) {
            let params = PortableForwardParams {
                v: channels_from(params.v, first, kernel.spec),
                o: channels_from(params.o, first, kernel.spec),
                ..params
            };
            // SAFETY: these are the parameters of a portable forward kernel of the mask class; the
            // rest is the caller's promise. The planner checked that the blocks fit the grid.
            unsafe {
                match kernel.spec.mask {
                    MaskClass::Full | MaskClass::Causal => {
                        kernel.launch(device, stream, blocks, &params)
                    }
                    MaskClass::Masked | MaskClass::General => {
                        let params = self.options.params(self.attention, params);
                        kernel.launch(device, stream, blocks, &params)
                    }
                }
            }?;
        }
        Ok(())
    }

    /// Launches `kernel`, of the hopper family, with the plans that [`Self::tensor_maps`] made.
    ///
    /// # Safety
    /// As [`Self::launch_portable`].
    pub(crate) unsafe fn launch_hopper(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        stream: sys::CUstream,
        plans: &[TensorMapPlan; 4],
    ) -> Result<()> {
        // Encoding a tensor map needs a context, which the caller may not have.
        let _current = device.enter()?;
        let shape = &self.attention.shape;
        let schedule = schedule(self.attention, kernel.spec, &device.limits);
        let (query_sign, scale, scale_log2) = scales(self.attention.scale_factor());
        let map = |raw: &Raw, plan| {
            tensor_map::encode(kernel.spec.name, raw.address as u64, plan, self.dtype)
        };
        let (k, v) = self.mapped_keys();
        let params = HopperForwardParams {
            maps: [
                map(&self.q, &plans[0])?,
                map(k, &plans[1])?,
                map(v, &plans[2])?,
                map(&self.o, &plans[3])?,
            ],
            lse: self.lse,
            counter: self.workspace,
            schedule,
            visibility: device_visibility(self.attention),
            q_heads: shape.q_heads as u32,
            group: shape.group() as u32,
            axes: [plans[0].axes, plans[1].axes, plans[2].axes],
            scale,
            scale_log2,
            query_sign,
        };
        let blocks = grid(kernel.spec, &schedule, &device.limits);
        // SAFETY: the counter is the caller's workspace, on the stream's device.
        unsafe { kernel.clear(device, stream, self.workspace, workspace_bytes(kernel.spec)) }?;
        // SAFETY: these are the parameters of a hopper forward kernel of the mask class; the rest
        // is the caller's promise.
        unsafe {
            if kernel.spec.has_options() {
                let o = device_tensor(&self.o, self.dtype.bytes());
                let params = self.options.hopper_params(self.attention, params, o);
                kernel.launch(device, stream, blocks as u32, &params)
            } else {
                kernel.launch(device, stream, blocks as u32, &params)
            }
        }
    }
}

/// Blocks that a kernel is launched with: persistent ones fill the device once.
pub(crate) fn grid(spec: &KernelSpec, schedule: &ForwardSchedule, limits: &Limits) -> u64 {
    match spec.family {
        Family::Portable => schedule.blocks(),
        Family::Hopper => schedule.blocks().min(u64::from(limits.multiprocessors)),
    }
}

/// Strides of a `[batch, row, head, channel]` tensor, or of a packed `[row, head, channel]` one; 0
/// along an axis of one element.
pub(super) fn strides(raw: &Raw) -> Strides {
    let stride = |axis: usize| if raw.dims()[axis] > 1 { raw.strides()[axis] } else { 0 };
    match raw.dims().len() {
        3 => Strides { batch: 0, row: stride(0), head: stride(1) },
        _ => Strides { batch: stride(0), row: stride(1), head: stride(2) },
    }
}

/// A `[batch, row, head, channel]` or `[row, head, channel]` tensor of `size`-byte elements as
/// kernels take it: in units of 16 bits.
pub(super) fn device_tensor(raw: &Raw, size: usize) -> DeviceTensor {
    let units = size / 2;
    let strides = strides(raw);
    let aligned = [strides.batch, strides.row, strides.head]
        .iter()
        .map(|stride| (*stride as u64).wrapping_mul(size as u64))
        .chain([raw.address as u64])
        .fold(16, |all, part| all | part);
    DeviceTensor {
        address: raw.address as u64,
        strides: Strides {
            batch: strides.batch.wrapping_mul(units as i64),
            row: strides.row.wrapping_mul(units as i64),
            head: strides.head.wrapping_mul(units as i64),
        },
        channels: (raw.dims()[raw.dims().len() - 1] * units) as u32,
        access_bytes: 1 << aligned.trailing_zeros().min(4),
    }
}

/// The channels of v or o from `first` on that one launch of `spec` computes.
fn channels_from(tensor: DeviceTensor, first: usize, spec: &KernelSpec) -> DeviceTensor {
    let units = spec.dtype.bytes() as u32 / 2;
    let channels = (tensor.channels - first as u32 * units).min(spec.tile.value_dim * units);
    let bytes = (first * spec.dtype.bytes()) as u64;
    // A tile's width is a multiple of the widest access.
    DeviceTensor { address: tensor.address.wrapping_add(bytes), channels, ..tensor }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Align, Mask, Shape};
    use crate::tensor::{Place, TensorRef};
    use half::bf16;

    #[test]
    fn keys_past_every_row_are_cut_off() {
        let shape = Shape {
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: 3,
            kv_len: 10,
            head_dim: 8,
            value_dim: 8,
        };
        let of = |mask| device_visibility(&Attention::new(shape).mask(mask));
        assert_eq!(of(Mask::causal(Align::TopLeft)).kv_len, 3);
        assert_eq!(of(Mask::causal(Align::BottomRight)).kv_len, 10);
        assert_eq!((of(Mask::full()).kv_len, of(Mask::full()).right), (10, 13));
        assert_eq!(of(Mask::causal(Align::TopLeft).window(None, Some(2))).kv_len, 5);
    }

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
            device_tensor(&tensor.unwrap().raw, 2).access_bytes
        };
        assert_eq!(access(4096, [4800, 1600, 40, 1]), 16);
        assert_eq!(access(4096 + 8, [4800, 1600, 40, 1]), 8);
        assert_eq!(access(4096, [4800, 1600, 42, 1]), 4);
        assert_eq!(access(4096 + 2, [4800, 1600, 40, 1]), 2);
        assert_eq!(access(4096, [-4800, 1601, 40, 1]), 2);
        assert_eq!(access(4096, [0, 0, 0, 1]), 16);
    }
}
