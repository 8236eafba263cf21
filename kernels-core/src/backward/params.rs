//! The structures that the backward kernels take by value.

pub mod options;

use super::schedule::BackwardSchedule;
#[cfg(doc)]
use super::scratch::CONVERTED_ROWS;
use super::scratch::{HopperCounters, QueryGradientOrder};
use crate::params::DeviceTensor;
use crate::tensor_map::{AxisMasks, TensorMap};
use crate::visibility::Visibility;

/// The f32 memory that the stages of a backward call share. Every array holds, for each (batch,
/// query head), [`Self::padded_rows`] rows; every address is a multiple of 16. Packed items are one
/// batch item here, and rows of theirs are rows of q: so it is linear in tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardScratch {
    /// f32 `[batch · q_heads, padded_rows]`: lse, natural or of powers of two as [`Self::natural`]
    /// says; `+∞` where the row sees no key and for rows past the end, so that P is 0.
    pub lse: u64,
    /// f32 `[batch · q_heads, padded_rows]`: delta = ⟨dO, O⟩ − dLSE; 0 where lse is `+∞`.
    pub delta: u64,
    /// f32 sums of dQ / scale, in a [`QueryGradientOrder`]; 0 where dQ is not wanted.
    pub dq: u64,
    /// u32 `[batch · q_heads, padded_rows / LSE_ROWS]`: 1 where these rows' lse is natural, since
    /// some of it is large; 0 where it is of powers of two. 0 where all of it is natural.
    pub natural: u64,
    /// u32 counters, zero when the main kernel starts; 0 where it needs none. Of a hopper kernel
    /// see [`HopperCounters`]; of a portable one, for ordered sums, the one that blocks draw their
    /// number from, then the turn of each query tile, `[batch · q_heads, padded_rows / q_rows]`.
    pub counters: u64,
    /// f32 sums of dK, then dV, that parts of a group pass on, in the order of the accumulators:
    /// `[batch · kv_heads, kv_blocks][values of a thread / 4][256 threads][4]`; 0 without parts.
    pub part_sums: u64,
    /// Rows of each array: the query rows of an item rounded up to the main kernel's tile.
    pub padded_rows: u32,
    /// Channels of a row of `dq`: the compiled head dimension of the main kernel.
    pub dq_channels: u32,
}

/// Arguments of a preprocess kernel: one warp a row of the padded rows, four rows at a time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreprocessParams {
    /// The forward's output.
    pub o: DeviceTensor,
    /// Its gradient.
    pub d_o: DeviceTensor,
    /// f32 `[batch, q_heads, q_len]`, contiguous: the forward's log-sum-exp, natural.
    pub lse: u64,
    /// Its gradient, alike; 0 if there is none.
    pub d_lse: u64,
    /// What is filled and cleared.
    pub scratch: BackwardScratch,
    /// lse of powers of two ÷ natural lse, log2 e but for the rounding of the main kernel's scale;
    /// 0 where all lse stays natural.
    pub lse_factor: f32,
    /// (Batch, query head)s whose sums of dQ are cleared; the main kernel clears the others.
    pub cleared_heads: u32,
    /// Counters to clear.
    pub counters: u32,
    /// Query rows of an item.
    pub q_len: u32,
    /// Query heads of an item.
    pub q_heads: u32,
    /// Batch items × query heads.
    pub batch_heads: u32,
}

/// Arguments of a convert kernel: dq = scale · sums, rounded to the element type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertParams {
    /// The sums.
    pub scratch: BackwardScratch,
    /// Gradient of the queries.
    pub dq: DeviceTensor,
    /// u32 of each section of the main kernel's walk: [`CONVERTED_ROWS`] that it has converted; 0
    /// if it converts none.
    pub converted: u64,
    /// [`CONVERTED_ROWS`] of such a section, of all its query heads.
    pub section_groups: u32,
    /// Order of the sums.
    pub order: QueryGradientOrder,
    /// Query rows of an item.
    pub q_len: u32,
    /// Query heads of an item.
    pub q_heads: u32,
    /// Batch items × query heads.
    pub batch_heads: u32,
    /// Scale of the scores, with its sign.
    pub scale: f32,
}

/// Arguments of a portable backward kernel (column owner, M4.4 §0x06).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortableBackwardParams {
    /// Queries.
    pub q: DeviceTensor,
    /// Keys.
    pub k: DeviceTensor,
    /// Values.
    pub v: DeviceTensor,
    /// Gradient of the output.
    pub d_o: DeviceTensor,
    /// Gradient of the keys; address 0 where it is not wanted.
    pub dk: DeviceTensor,
    /// Gradient of the values; address 0 where it is not wanted.
    pub dv: DeviceTensor,
    /// lse, delta, the sums of dQ and the counters.
    pub scratch: BackwardScratch,
    /// Block index to key block.
    pub schedule: BackwardSchedule,
    /// The visible cells of every item; its `kv_len` ends at the last key that any row sees.
    pub visibility: Visibility,
    /// Keys of an item in memory: dk and dv have as many rows.
    pub kv_rows: u32,
    /// Query heads of an item.
    pub q_heads: u32,
    /// KV heads of an item.
    pub kv_heads: u32,
    /// Query heads that share one KV head.
    pub group: u32,
    /// Scale of the scores, with its sign.
    pub scale: f32,
    /// 1 where the parts of each dQ tile are added in the order of the key blocks.
    pub ordered: u32,
}

/// Arguments of a hopper backward kernel. The maps come first: they must lie at multiples of 64
/// bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperBackwardParams {
    /// Queries, keys, values and the output's gradient.
    pub maps: [TensorMap; 4],
    /// Gradient of the keys; address 0 where it is not wanted.
    pub dk: DeviceTensor,
    /// Gradient of the values; address 0 where it is not wanted.
    pub dv: DeviceTensor,
    /// Gradient of the queries, in rows of whole 16-byte chunks; address 0 where it is not wanted,
    /// or only the convert kernel writes it.
    pub dq: DeviceTensor,
    /// lse, delta, the sums of dQ and the counters.
    pub scratch: BackwardScratch,
    /// Where the scratch's counters are.
    pub counters: HopperCounters,
    /// Work of the whole call, which persistent blocks share.
    pub schedule: BackwardSchedule,
    /// The visible cells of every item; its `kv_len` ends at the last key that any row sees.
    pub visibility: Visibility,
    /// Keys of an item in memory: dk and dv have as many rows.
    pub kv_rows: u32,
    /// Query heads of an item.
    pub q_heads: u32,
    /// KV heads of an item.
    pub kv_heads: u32,
    /// Query tiles of a section, and of the call: sums of dQ are cleared tile by tile.
    pub section_tiles: u32,
    /// See [`Self::section_tiles`].
    pub query_tiles: u32,
    /// Query heads that a work takes: of those that share a KV head all, or a part.
    pub work_heads: u32,
    /// Axes of q, k, v and the output's gradient that repeat.
    pub axes: [AxisMasks; 4],
    /// Scale of the scores, with its sign.
    pub scale: f32,
    /// The same times log2 e, rounded.
    pub scale_log2: f32,
    /// 1 where the parts of each dQ tile are added in the order of the key blocks.
    pub ordered: u32,
}
