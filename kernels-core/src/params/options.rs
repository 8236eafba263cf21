//! What kernels of the classes `masked` and `general` take beside the plain parameters. An option
//! that is off is a 0 where its address, its factor or its flag would be.

use super::PortableForwardParams;
use crate::dropout::DropoutMask;
use crate::items::Items;

/// Arguments of a portable forward kernel of class `masked` or `general`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortableMaskedParams {
    /// Tensors, schedule and heads. Where [`ScoreOptions::product_scale`] or a softcap is given,
    /// `scale` is 1: scores leave their options in natural units. The visible cells are those of
    /// the stated maxima.
    pub forward: PortableForwardParams,
    /// Where the items lie.
    pub items: Items,
    /// What happens to a score.
    pub options: ScoreOptions,
}

/// What happens to a product of a query and a key before the softmax, and to a probability after.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreOptions {
    /// Factor of every product, where an option adds to the score; 0 where none does.
    pub product_scale: f32,
    /// c of `c·tanh(x)`, or 0.
    pub softcap: f32,
    /// With a softcap, the factor that makes x of a product: `|scale| / c`.
    pub softcap_scale: f32,
    /// 1 where probabilities are dropped.
    pub drops: u32,
    /// Which.
    pub dropout: DropoutMask,
    /// 1 where [`Self::boolean_mask`] has a bit a key, the lowest of a byte first, 0 where it has a
    /// byte a key.
    pub mask_is_bits: u32,
    /// Address of a seed and an offset, two u64 aligned to 8, that take the place of those in
    /// [`Self::dropout`]; 0 where these hold.
    pub dropout_state: u64,
    /// f32 slopes of ALiBi at `[item, q_head]`.
    pub alibi: HeadValues,
    /// f32 logits of the sinks at `[item, q_head]`.
    pub sink: HeadValues,
    /// f32 biases.
    pub bias: ScoreTensor,
    /// u8, zero where a key is hidden; strides are in bytes.
    pub boolean_mask: ScoreTensor,
}

/// One f32 an item and query head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadValues {
    /// Address of the first; 0 where there are none.
    pub address: u64,
    /// Elements from one item to the next; 0 where all have the same.
    pub batch: i64,
    /// Elements from one head to the next.
    pub head: i64,
}

/// A `[item, q_head, row, key]` tensor with contiguous keys; strides in elements, 0 along an axis
/// that is broadcast.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreTensor {
    /// Address of the first element; 0 where there is no such tensor.
    pub address: u64,
    /// From one item to the next.
    pub batch: i64,
    /// From one head to the next.
    pub head: i64,
    /// From one row to the next.
    pub row: i64,
}

impl HeadValues {
    /// No values.
    pub const NONE: Self = Self { address: 0, batch: 0, head: 0 };

    /// Element offset of a head's value.
    #[inline(always)]
    pub const fn offset(&self, item: u32, q_head: u32) -> i64 {
        self.batch * item as i64 + self.head * q_head as i64
    }
}

impl ScoreTensor {
    /// No tensor.
    pub const NONE: Self = Self { address: 0, batch: 0, head: 0, row: 0 };

    /// Element offset of (`item`, `q_head`, `row`, `key`).
    #[inline(always)]
    pub const fn offset(&self, item: u32, q_head: u32, row: u32, key: u32) -> i64 {
        self.batch * item as i64 + self.head * q_head as i64 + self.row * row as i64 + key as i64
    }
}
