//! FlashAttention-2: a program owns the rows, or the keys, that it writes (M4.4 §0x03, §0x06.1).
//!
//! Forward: a program is a query tile of one query head. It walks the K/V tiles that its rows see,
//! keeps m, l and an unnormalised numerator on the chip, divides once and writes once. Backward: a
//! program is a K/V tile of one query head. It walks the query tiles that see it, keeps dK and dV
//! on the chip and writes them once; dQ, which every K/V tile contributes to, is added up in a
//! scratch that one kernel clears before and another converts after. Query heads that share a KV
//! head are added up last.

use ferroflash_core::row_state::RowState;

use super::call::{Blocks, Call};
use super::column_owner::{self, Reductions};
use super::fa1::Backward;
use super::gradient::Cells;
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};
use crate::error::Result;

/// What the forward leaves in slow memory.
#[derive(Clone, Debug)]
pub struct Forward<F> {
    /// Outputs, `[batch, q_head, row, value channel]`.
    pub o: Vec<F>,
    /// Log-sum-exp of each row, `[batch, q_head, row]`.
    pub lse: Vec<F>,
    /// What was done.
    pub trace: Trace,
}

/// What a program keeps of a row for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// Log-sum-exp, one word a row: what FlashAttention-2 does.
    Lse,
    /// m and l, two words a row: the row-owned reading of FlashAttention-1 (M4.3 §0x0AA).
    MaximumAndSum,
}

/// Algorithm 1.
///
/// # Errors
/// A block size of 0.
pub fn forward<F: Real>(call: &Call<'_, F>, blocks: Blocks, saved: Saved) -> Result<Forward<F>> {
    call.check(blocks)?;
    let (s, heads) = (call.shape, call.heads());
    let (mut trace, [q, k, v]) = (Trace::default(), call.inputs());
    let mut o = Slow::undefined(Tensor::O, heads, s.q_len, s.value_dim);
    let words = if saved == Saved::Lse { 1 } else { 2 };
    let mut kept = Slow::undefined(Tensor::State, heads, s.q_len, words);
    for head in 0..heads {
        for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
            let (program, chip) = (trace.programs, Chip::default());
            trace.programs += 1;
            let q_tile = q.load(&chip, &mut trace, head, rows.clone());
            let mut states = vec![F::EMPTY; rows.len()];
            let mut numerators = Tile::filled(&chip, rows.len(), s.value_dim, F::ZERO);
            for (j, keys) in call.kv_tiles(blocks).into_iter().enumerate() {
                if call.visible_cells(&rows, &keys) == 0 {
                    continue;
                }
                call.visit(&mut trace, program, (i, &rows), (j, &keys));
                let k_tile = k.load(&chip, &mut trace, call.kv_head(head), keys.clone());
                let v_tile = v.load(&chip, &mut trace, call.kv_head(head), keys.clone());
                let scores = q_tile.times_transposed(&k_tile, call.scale);
                let cells = Cells { head, rows: &rows, keys: &keys };
                call.merge_tile(&mut trace, cells, scores, &v_tile, &mut states, &mut numerators);
            }
            finish(&mut trace, &states, &mut numerators);
            o.store(&mut trace, program, head, rows.clone(), &numerators);
            let of_rows = states.iter().flat_map(|state| match saved {
                Saved::Lse => vec![F::lse(*state)],
                Saved::MaximumAndSum => vec![state.row_max, state.row_sum],
            });
            let of_rows = Tile::new(&chip, words, of_rows.collect());
            kept.store(&mut trace, program, head, rows, &of_rows);
            trace.peak_words = trace.peak_words.max(chip.peak());
        }
    }
    let kept = kept.into_values();
    let lse = kept.chunks(words).map(|row| match row {
        [row_max, row_sum] => F::lse(RowState { row_max: *row_max, row_sum: *row_sum }),
        row => row[0],
    });
    Ok(Forward { o: o.into_values(), lse: lse.collect(), trace })
}

/// Divides the numerators of rows by their sums, once.
pub(crate) fn finish<F: Real>(
    trace: &mut Trace,
    states: &[RowState<F>],
    numerators: &mut Tile<'_, F>,
) {
    for (at, state) in states.iter().enumerate() {
        let normalizer = F::normalizer(*state);
        numerators.row_mut(at).iter_mut().for_each(|value| *value = *value * normalizer);
        trace.divisions += 1;
    }
}

/// Algorithm 2 as flash-attention v2.0.0 runs it: dQ is added up atomically, and dK and dV of the
/// query heads are summed over their group at the end; see [`column_owner`].
///
/// # Errors
/// A block size of 0; `d_o`, or what the forward left, of another size.
pub fn backward<F: Real>(
    call: &Call<'_, F>,
    blocks: Blocks,
    saved: &Forward<F>,
    d_o: &[F],
) -> Result<Backward<F>> {
    column_owner::backward(call, blocks, saved, d_o, &Reductions::ATOMIC)
}
