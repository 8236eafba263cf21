//! Masks of bits, and dropout whose seed and offset come with the call.

use ferroflash::{Dropout, DropoutState};
use ferroflash_core::dropout::DropoutMask;

use super::{Case, broadcast_dims};
use crate::element::Real;

impl<T: Real> Case<T> {
    /// With dropout whose seed and offset are given with the call.
    pub fn with_dropout_given(self, probability: f32, state: [u64; 2]) -> Self {
        let case = self.with_dropout(Dropout::new(probability, DropoutState::Given));
        Self { dropout_state: Some(state), ..case }
    }

    /// What is dropped, if anything is.
    pub fn dropout_mask(&self) -> Option<DropoutMask> {
        let dropout = self.dropout?;
        let [seed, offset] = match dropout.state {
            DropoutState::Value { seed, offset } => [seed, offset],
            DropoutState::Given => self.dropout_state.expect("it comes with the case"),
        };
        Some(DropoutMask::new(dropout.probability, seed, offset))
    }

    /// The boolean mask with a bit a key; the bits past the last key are set.
    pub fn with_bits(mut self) -> Self {
        let (axes, mask) = self.boolean_mask.as_ref().expect("a mask to pack");
        let keys = self.attention.shape().kv_len;
        let byte = |chunk: &[u8]| {
            let bit = |bit: usize| chunk.get(bit).is_none_or(|byte| *byte != 0);
            (0..8).fold(0, |byte, at| byte | u8::from(bit(at)) << at)
        };
        let rows = mask.chunks(keys.max(1));
        self.bit_mask = Some(rows.flat_map(|row| row.chunks(8).map(byte)).collect());
        self.attention = self.attention.bit_mask(*axes);
        self
    }

    /// The boolean mask as the call is given it, with its dimensions.
    pub fn given_mask(&self) -> Option<(&[u8], [usize; 4])> {
        let (axes, mask) = self.boolean_mask.as_ref()?;
        let mut dims = broadcast_dims(*axes, self.attention.shape());
        let Some(bits) = &self.bit_mask else { return Some((mask, dims)) };
        dims[3] = dims[3].div_ceil(8);
        Some((bits, dims))
    }
}
