//! The structures a kernel takes by value, laid out alike on both sides.
//!
//! Device addresses are plain `u64`: the host never dereferences them, and the kernels reach them
//! by explicit global loads and stores. Every offset is computed in 64 bits.

pub mod options;

use crate::schedule::ForwardSchedule;
use crate::shape::Strides;
use crate::tensor_map::{AxisMasks, TensorMap};
use crate::visibility::Visibility;

/// A `[batch, row, head, channel]` tensor in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Address of element 0.
    pub address: u64,
    /// Strides in units of 16 bits: an element of 32 bits is two.
    pub strides: Strides,
    /// Channels in units of 16 bits; those past it, up to the tile's, read as zero and are not
    /// written.
    pub channels: u32,
    /// The widest access, in bytes, that every row start and every stride allows: 16, 8, 4 or 2.
    pub access_bytes: u32,
}

/// Arguments of a portable forward kernel (query-row owner, M4.4 §0x03).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortableForwardParams {
    /// Queries.
    pub q: DeviceTensor,
    /// Keys.
    pub k: DeviceTensor,
    /// Values.
    pub v: DeviceTensor,
    /// Output, in the input type.
    pub o: DeviceTensor,
    /// f32 `[batch, q_heads, q_len]`, contiguous; 0 where it is not wanted.
    pub lse: u64,
    /// Block index to query block.
    pub schedule: ForwardSchedule,
    /// The visible cells of every item.
    pub visibility: Visibility,
    /// Query heads of an item.
    pub q_heads: u32,
    /// Query heads that share one KV head.
    pub group: u32,
    /// `|scale|`, never zero: scores are `scale · (±q)·k`.
    pub scale: f32,
    /// `scale · log2 e`: exponentials are powers of two.
    pub scale_log2: f32,
    /// Exclusive-or mask of a packed pair of queries: `0x8000_8000` where the scale is negative.
    pub query_sign: u32,
}

/// Arguments of a hopper forward kernel. The maps come first: they must lie at multiples of 64
/// bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperForwardParams {
    /// Queries, keys, values and output; see
    /// [`hopper_forward_boxes`](crate::tensor_map::hopper_forward_boxes).
    pub maps: [TensorMap; 4],
    /// f32 `[batch, q_heads, q_len]`, contiguous; 0 where it is not wanted.
    pub lse: u64,
    /// A u32 from which blocks draw their next work; zero when the kernel starts. A block's first
    /// work is the one of its own number.
    pub counter: u64,
    /// Work of the whole call, which persistent blocks share.
    pub schedule: ForwardSchedule,
    /// The visible cells of every item.
    pub visibility: Visibility,
    /// Query heads of an item.
    pub q_heads: u32,
    /// Query heads that share one KV head.
    pub group: u32,
    /// Axes of q, k and v that repeat.
    pub axes: [AxisMasks; 3],
    /// `|scale|`, never zero: scores are `scale · (±q)·k`.
    pub scale: f32,
    /// `scale · log2 e`: exponentials are powers of two.
    pub scale_log2: f32,
    /// Exclusive-or mask of a packed pair of queries: `0x8000_8000` where the scale is negative.
    pub query_sign: u32,
}

/// The scale a kernel is given where the caller's is zero. Scores must be equal, masked ones still
/// `-∞` and a NaN still NaN; a true zero would turn the mask's `-∞` into NaN. 2⁻¹²⁶ makes every
/// finite product vanish in the exponent.
pub const ZERO_SCALE: f32 = f32::MIN_POSITIVE;

/// `query_sign`, `scale` and `scale_log2` of a forward kernel for a caller's `scale`.
pub fn scales(scale: f32) -> (u32, f32, f32) {
    let sign = if scale < 0.0 { 0x8000_8000 } else { 0 };
    let magnitude = if scale == 0.0 { ZERO_SCALE } else { scale.abs() };
    (sign, magnitude, magnitude * core::f32::consts::LOG2_E)
}
