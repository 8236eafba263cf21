//! What the backward stages of the classes `masked` and `general` take beside the plain parameters.

use super::{ConvertParams, HopperBackwardParams, PortableBackwardParams, PreprocessParams};
#[cfg(doc)]
use crate::backward::record::KeyRecord;
use crate::items::Items;
use crate::params::options::{HeadValues, ScoreOptions, ScoreTensor};

/// Arguments of a portable backward kernel of class `masked` or `general`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortableMaskedBackwardParams {
    /// Tensors, scratch, schedule and heads. Its visible cells are those of the stated maxima, and
    /// are not looked at.
    pub backward: PortableBackwardParams,
    /// Where the items lie.
    pub items: Items,
    /// What happens to a score. Its scales have the sign of the caller's.
    pub options: ScoreOptions,
    /// Factor of a score, after its options, in the exponent: 1 where
    /// [`ScoreOptions::product_scale`] is given, else the caller's scale.
    pub exponent_scale: f32,
    /// 1 where cells share an element of [`Self::bias_gradient`], which is then a sum by atomics.
    pub bias_gradient_is_sum: u32,
    /// f32 gradient of the bias, zero when the kernel starts; address 0 where it is not wanted.
    pub bias_gradient: ScoreTensor,
}

/// Arguments of a hopper backward kernel of class `masked`. The maps come first, as in the plain
/// kernel's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperMaskedBackwardParams {
    /// Maps, scratch, schedule and heads. Of its visible cells only the rows of the row axis of q
    /// are looked at.
    pub backward: HopperBackwardParams,
    /// What the options add.
    pub options: HopperBackwardOptions,
}

/// What a hopper backward kernel knows of a call's options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperBackwardOptions {
    /// A [`KeyRecord`] for each key block of each item: of packed items by slots, else
    /// `[batch, kv_blocks]`.
    pub records: u64,
    /// Of each query head, the counters of turns beyond one a query tile: where items are packed,
    /// as many as their tiles may take.
    pub more_turns: u32,
    /// With a softcap, the factor that makes tanh's argument of a product; 0 without.
    pub softcap_scale: f32,
    /// Factor of a product, or of tanh, in the exponent.
    pub score_scale: f32,
    /// 1 / c of `c·tanh(x)`.
    pub softcap_inverse: f32,
    /// f32 slopes of ALiBi at `[item, q_head]`.
    pub alibi: HeadValues,
}

/// Which records a preprocess kernel makes for the main kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordParams {
    /// Where they go; 0 where the main kernel wants none.
    pub address: u64,
    /// How many: [`Self::kv_blocks`] of each batch item, and packed items are one.
    pub count: u32,
    /// Key blocks of a head.
    pub kv_blocks: u32,
    /// Query rows of a tile.
    pub q_rows: u32,
    /// Keys of a block.
    pub kv_columns: u32,
    /// 1 where sums of dQ are added in order.
    pub ordered: u32,
    /// Where the items lie.
    pub items: Items,
}

/// Arguments of a preprocess kernel of a call with options.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreprocessMaskedParams {
    /// As of a call without.
    pub preprocess: PreprocessParams,
    /// f32 gradient of the bias, to clear; address 0 where it is not wanted.
    pub bias_gradient: ScoreTensor,
    /// Dimensions of the gradient of the bias.
    pub bias_dims: [u32; 4],
    /// The records of a hopper main kernel.
    pub records: RecordParams,
}

/// Arguments of a convert kernel of a call with options. Blocks past those that convert dQ each
/// form the gradient of one head's sink.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertMaskedParams {
    /// As of a call without.
    pub convert: ConvertParams,
    /// Blocks that convert dQ.
    pub blocks: u32,
    /// f32 logits of the sinks.
    pub sink: HeadValues,
    /// f32 `[q_heads]`, contiguous: their gradient; 0 where it is not wanted.
    pub sink_gradient: u64,
}
