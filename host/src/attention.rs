//! What a call computes: the options, and the tensors that go with them.
//!
//! An [`Attention`] is a description without data. Options that carry data (a bias, a boolean mask,
//! lengths) are declared here by their shape and given at the call, so that a plan can be made
//! once, with its kernel chosen, and run many times.

mod tensors;

use ferroflash_core::shape::MAX_LENGTH;
pub use ferroflash_core::shape::Shape;
pub use ferroflash_core::visibility::Align;
use ferroflash_core::visibility::{UNBOUNDED, Visibility};

pub use self::tensors::{Gradients, Inputs, Lengths, Output, Packed, Saved};
use crate::error::{Error, Result};

/// Which keys a row may see by position.
///
/// With `off` the alignment's offset (0, or Sk − Sq), key j is visible to row i iff
/// `-left <= j - (i + off) <= right`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    pub(crate) align: Align,
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

impl Mask {
    /// Every key is visible.
    pub const fn full() -> Self {
        Self { align: Align::TopLeft, left: None, right: None }
    }

    /// A row sees the keys up to its diagonal.
    pub const fn causal(align: Align) -> Self {
        Self { align, left: None, right: Some(0) }
    }

    /// A row sees `left` keys before its diagonal, the diagonal, and `right` after it; `None` is
    /// unbounded. Replaces the mask's own sides.
    pub const fn window(self, left: Option<usize>, right: Option<usize>) -> Self {
        Self { align: self.align, left, right }
    }

    /// The alignment of the diagonal.
    pub const fn aligned(self, align: Align) -> Self {
        Self { align, left: self.left, right: self.right }
    }

    /// The visible cells of an item of `q_len` rows and `kv_len` keys.
    pub(crate) fn visibility(&self, q_len: usize, kv_len: usize) -> Visibility {
        let side = |side: Option<usize>| match side {
            Some(keys) if keys < q_len + kv_len => keys as i32,
            _ => UNBOUNDED,
        };
        Visibility {
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            offset: self.align.offset(q_len, kv_len) as i32,
            left: side(self.left),
            right: side(self.right),
        }
    }
}

/// The factor of every score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// `1 / √head_dim`.
    InvSqrtHeadDim,
    /// Any finite number; zero and negative ones are legal.
    Factor(f32),
}

/// Dropout of probabilities, replayable: the mask is a function of seed, offset and position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an entry is dropped, 0 to 1; applied as `round(p·2¹⁶) / 2¹⁶`.
    pub probability: f32,
    /// Which mask.
    pub state: DropoutState,
}

/// Where the seed and the offset of a dropout come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropoutState {
    /// They are part of the description: every call drops the same.
    Value {
        /// Seed of the generator.
        seed: u64,
        /// Offset of the generator: another offset, another mask.
        offset: u64,
    },
    /// They come with each call, as [`Inputs::dropout_state`].
    Given,
}

impl Dropout {
    /// Drops with `probability`; `state` is `(seed, offset)`, or [`DropoutState::Given`].
    ///
    /// ```
    /// use ferroflash::{Dropout, DropoutState};
    /// let fixed = Dropout::new(0.1, (seed(), 0));
    /// let advancing = Dropout::new(0.1, DropoutState::Given);
    /// # fn seed() -> u64 { 7 }
    /// ```
    pub fn new(probability: f32, state: impl Into<DropoutState>) -> Self {
        Self { probability, state: state.into() }
    }
}

impl From<(u64, u64)> for DropoutState {
    fn from((seed, offset): (u64, u64)) -> Self {
        Self::Value { seed, offset }
    }
}

/// How the items of a batch lie in the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[batch, row, head, channel]`, every item of the shape's lengths.
    Dense,
    /// As dense, but item b has only its first `key_lengths[b]` keys, at the last of which a
    /// bottom-right diagonal ends.
    KeyLengths,
    /// `[token, head, channel]`: items follow one another, at cumulative offsets given at the
    /// call. The shape's `batch` is the number of items, its lengths the stated maxima.
    Packed {
        /// Rows of q and o.
        q_tokens: usize,
        /// Rows of k and v.
        kv_tokens: usize,
    },
}

/// A `[batch, head, row, key]` tensor whose first three axes may be broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Broadcast {
    /// Whether the batch axis has size 1.
    pub batch: bool,
    /// Whether the head axis has size 1.
    pub heads: bool,
    /// Whether the row axis has size 1.
    pub rows: bool,
}

impl Broadcast {
    /// No axis is broadcast.
    pub const NONE: Self = Self { batch: false, heads: false, rows: false };

    pub(crate) fn dims(&self, shape: &Shape) -> [usize; 4] {
        let axis = |one: bool, size: usize| if one { 1 } else { size };
        [
            axis(self.batch, shape.batch),
            axis(self.heads, shape.q_heads),
            axis(self.rows, shape.q_len),
            shape.kv_len,
        ]
    }
}

/// The description of one attention call.
///
/// ```
/// use ferroflash::{Align, Attention, Mask, Shape};
/// let shape = Shape {
///     batch: 1, q_heads: 8, kv_heads: 2, q_len: 128, kv_len: 512, head_dim: 64, value_dim: 64,
/// };
/// let attention = Attention::new(shape).mask(Mask::causal(Align::BottomRight)).softcap(50.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub(crate) shape: Shape,
    pub(crate) layout: Layout,
    pub(crate) mask: Mask,
    pub(crate) scale: Scale,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi: bool,
    pub(crate) bias: Option<Broadcast>,
    pub(crate) boolean_mask: Option<Broadcast>,
    /// Whether the boolean mask has a bit a key.
    pub(crate) mask_is_bits: bool,
    pub(crate) sink: bool,
    pub(crate) dropout: Option<Dropout>,
    pub(crate) deterministic: bool,
}

impl Attention {
    /// Full attention of `shape`, scaled by `1 / √head_dim`, without any option.
    pub const fn new(shape: Shape) -> Self {
        Self {
            shape,
            layout: Layout::Dense,
            mask: Mask::full(),
            scale: Scale::InvSqrtHeadDim,
            softcap: None,
            alibi: false,
            bias: None,
            boolean_mask: None,
            mask_is_bits: false,
            sink: false,
            dropout: None,
            deterministic: false,
        }
    }

    /// Which keys a row may see by position.
    pub const fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// The factor of every score.
    pub const fn scale(mut self, scale: Scale) -> Self {
        self.scale = scale;
        self
    }

    /// How items lie in the tensors.
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Replaces each scaled score s by `cap·tanh(s / cap)`.
    pub const fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Subtracts `slope_h · |i + Sk − Sq − j|` from each score; slopes are given at the call.
    pub const fn alibi(mut self) -> Self {
        self.alibi = true;
        self
    }

    /// Adds a bias to each score, given at the call as `[B or 1, Hq or 1, Sq or 1, Sk]`.
    pub const fn bias(mut self, broadcast: Broadcast) -> Self {
        self.bias = Some(broadcast);
        self
    }

    /// Hides the keys where a boolean tensor, `[B or 1, Hq or 1, Sq or 1, Sk]`, is false.
    pub const fn boolean_mask(mut self, broadcast: Broadcast) -> Self {
        (self.boolean_mask, self.mask_is_bits) = (Some(broadcast), false);
        self
    }

    /// As [`Self::boolean_mask`], in an eighth of the memory: the tensor is
    /// `[B or 1, Hq or 1, Sq or 1, ⌈Sk / 8⌉]`, and key j is visible where bit `j % 8` of byte
    /// `j / 8` is set, bit 0 being the lowest.
    pub const fn bit_mask(mut self, broadcast: Broadcast) -> Self {
        (self.boolean_mask, self.mask_is_bits) = (Some(broadcast), true);
        self
    }

    /// One extra logit a head that takes probability and has no value.
    pub const fn sink(mut self) -> Self {
        self.sink = true;
        self
    }

    /// Drops probabilities.
    pub const fn dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Equal backward calls give equal bits: a GPU adds the parts of dQ in a fixed order, at some
    /// cost. Forward calls always repeat, and so do the CPU's backward calls.
    pub const fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// The sizes of the call.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The scale as a number.
    pub(crate) fn scale_factor(&self) -> f32 {
        match self.scale {
            Scale::InvSqrtHeadDim => (1.0 / (self.shape.head_dim as f64).sqrt()) as f32,
            Scale::Factor(factor) => factor,
        }
    }

    /// Dimensions of q, k, v and o, in that order.
    pub(crate) fn tensor_dims(&self) -> [Vec<usize>; 4] {
        let s = &self.shape;
        match self.layout {
            Layout::Dense | Layout::KeyLengths => {
                [s.q_dims(), s.k_dims(), s.v_dims(), s.o_dims()].map(|dims| dims.to_vec())
            }
            Layout::Packed { q_tokens, kv_tokens } => [
                vec![q_tokens, s.q_heads, s.head_dim],
                vec![kv_tokens, s.kv_heads, s.head_dim],
                vec![kv_tokens, s.kv_heads, s.value_dim],
                vec![q_tokens, s.q_heads, s.value_dim],
            ],
        }
    }

    /// Dimensions of the boolean mask, if there is one.
    pub(crate) fn mask_dims(&self) -> Option<[usize; 4]> {
        let [batch, heads, rows, keys] = self.boolean_mask?.dims(&self.shape);
        let columns = if self.mask_is_bits { keys.div_ceil(8) } else { keys };
        Some([batch, heads, rows, columns])
    }

    /// Dimensions of lse: `[B, Hq, Sq]`, or `[Hq, Tq]` where items are packed.
    pub(crate) fn lse_dims(&self) -> Vec<usize> {
        match self.layout {
            Layout::Dense | Layout::KeyLengths => self.shape.lse_dims().to_vec(),
            Layout::Packed { q_tokens, .. } => vec![self.shape.q_heads, q_tokens],
        }
    }

    /// Checks everything that no device has a say in.
    pub(crate) fn validate(&self) -> Result<()> {
        let s = &self.shape;
        if s.kv_heads == 0 && s.q_heads != 0 {
            return Err(Error::argument("kv_heads", 0, "at least 1 where there are query heads"));
        }
        if s.kv_heads != 0 && !s.q_heads.is_multiple_of(s.kv_heads) {
            return Err(Error::argument(
                "q_heads",
                s.q_heads,
                format!("a multiple of kv_heads = {}", s.kv_heads),
            ));
        }
        let heads = u32::MAX as usize;
        for (argument, size, range) in [
            ("q_len", s.q_len, 0..=MAX_LENGTH),
            ("kv_len", s.kv_len, 0..=MAX_LENGTH),
            ("batch", s.batch, 0..=heads),
            ("q_heads", s.q_heads, 0..=heads),
            ("head_dim", s.head_dim, 1..=512),
            ("value_dim", s.value_dim, 1..=512),
        ] {
            if !range.contains(&size) {
                let needs = format!("between {} and {}", range.start(), range.end());
                return Err(Error::argument(argument, size, needs));
            }
        }
        if let Scale::Factor(factor) = self.scale
            && !factor.is_finite()
        {
            return Err(Error::argument("scale", factor, "a finite number"));
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::argument("softcap", cap, "finite and above zero"));
        }
        if let Some(dropout) = self.dropout
            && !(0.0..=1.0).contains(&dropout.probability)
        {
            return Err(Error::argument("dropout", dropout.probability, "between 0 and 1"));
        }
        Ok(())
    }
}
