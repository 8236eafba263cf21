//! What the backward stages of the classes `masked` and `general` take beside the plain parameters.

use super::{ConvertParams, PortableBackwardParams, PreprocessParams};
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
