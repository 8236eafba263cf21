//! What a call drops, element by element: for tests, and for those who wonder.

use ferroflash_core::dropout::{BLOCK_KEYS, column_group, half, row_group};
use rayon::prelude::*;

use crate::attention::Attention;
use crate::error::{Error, Result};
use crate::options::read_state;
use crate::tensor::{Place, TensorRef};

/// The dropout mask of a call, `[B, Hq, Sq, Sk]`: 1 where a probability is kept, 0 where it is
/// dropped. `state` is [`Inputs::dropout_state`](crate::Inputs::dropout_state), in host memory, if
/// the call declares one.
///
/// It is the mask that every device applies, in both passes, whatever its tiles. Rows and keys are
/// those of their item: of packed items, and of those with key lengths, what lies past an item's
/// own is the mask of an item of the stated maxima. The result is **quadratic** in the lengths, as
/// attention itself never is.
///
/// # Errors
/// [`Error::Argument`] for a call without dropout, and for what no call may have;
/// [`Error::Presence`] for a state that is not declared or not given; [`Error::Placement`] for one
/// that is not in host memory; [`Error::OutOfMemory`].
pub fn dropout_mask(attention: &Attention, state: Option<&TensorRef<'_, u64>>) -> Result<Vec<u8>> {
    attention.validate()?;
    if let Some(state) = attention.declared_state(state)? {
        read_state(state)?;
    }
    let Some(mask) = attention.dropout_mask(state)? else {
        return Err(Error::argument("dropout", "none", "a call that drops probabilities"));
    };
    let shape = attention.shape();
    let dims = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
    let elements = dims.iter().fold(1_usize, |product, dim| product.saturating_mul(*dim));
    let mut kept = Vec::new();
    if dims.contains(&0) {
        return Ok(kept);
    }
    kept.try_reserve_exact(elements)
        .map_err(|_| Error::OutOfMemory { device: Place::Host.to_string(), bytes: elements })?;
    kept.resize(elements, 0);
    kept.par_chunks_mut(shape.kv_len).enumerate().for_each(|(index, kept)| {
        let (head, row) = ((index / shape.q_len) as u32, (index % shape.q_len) as u32);
        let blocks = kept.chunks_mut(BLOCK_KEYS as usize);
        for (first, block) in (0..).step_by(BLOCK_KEYS as usize).zip(blocks) {
            // One call has the bits of four keys, 8 apart.
            for along in 0..8.min(block.len()) {
                let group = column_group(first + along as u32);
                let words = mask.words(head, row_group(row), group);
                for (kept, word) in block[along..].iter_mut().step_by(8).zip(words) {
                    *kept = u8::from(mask.keeps_bits(word >> (half(row) * 16)));
                }
            }
        }
    });
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Dropout, DropoutState, Shape};
    use ferroflash_core::dropout::DropoutMask;

    fn attention(q_len: usize, kv_len: usize) -> Attention {
        Attention::new(Shape {
            batch: 2,
            q_heads: 3,
            kv_heads: 1,
            q_len,
            kv_len,
            head_dim: 8,
            value_dim: 8,
        })
    }

    #[test]
    fn it_is_the_definition() {
        let state = [1 << 40 | 3, 5 << 33 | 9];
        let defined = DropoutMask::new(0.4, state[0], state[1]);
        for (q_len, kv_len) in [(1, 1), (7, 5), (35, 77), (16, 32), (0, 4)] {
            let call = attention(q_len, kv_len);
            let by_value = call.dropout(Dropout::new(0.4, (state[0], state[1])));
            let given = call.dropout(Dropout::new(0.4, DropoutState::Given));
            let view = TensorRef::host(&state, &[2]).unwrap();
            let mask = dropout_mask(&by_value, None).unwrap();
            assert_eq!(mask, dropout_mask(&given, Some(&view)).unwrap());
            assert_eq!(mask.len(), 6 * q_len * kv_len);
            for (index, kept) in mask.into_iter().enumerate() {
                let (row, key) = (index / kv_len % q_len, index % kv_len);
                let head = index / kv_len / q_len;
                let keeps = defined.keeps(head as u32, row as u32, key as u32);
                assert_eq!(kept, u8::from(keeps), "head {head}, row {row}, key {key}");
            }
        }
    }

    #[test]
    fn a_state_is_given_where_it_is_declared_and_only_there() {
        let call = attention(4, 4);
        let two = [1_u64, 2];
        let state = TensorRef::host(&two, &[2]).unwrap();
        let one = TensorRef::host(&two, &[1]).unwrap();
        let apart = TensorRef::host_strided(&two, &[2], &[0]).unwrap();
        let given = call.dropout(Dropout::new(0.4, DropoutState::Given));
        let by_value = call.dropout(Dropout::new(0.4, (1, 2)));
        let of = |call: &Attention, state| dropout_mask(call, state).unwrap_err();
        assert!(matches!(of(&call, None), Error::Argument { argument: "dropout", .. }));
        for (call, state) in [(&given, None), (&by_value, Some(&state)), (&call, Some(&state))] {
            let error = of(call, state);
            assert!(matches!(error, Error::Presence { tensor: "dropout_state", .. }), "{error}");
        }
        let error = of(&given, Some(&one));
        assert!(matches!(error, Error::Dimensions { tensor: "dropout_state", .. }), "{error}");
        let error = of(&given, Some(&apart));
        assert!(matches!(error, Error::ChannelStride { tensor: "dropout_state", .. }), "{error}");
    }
}
