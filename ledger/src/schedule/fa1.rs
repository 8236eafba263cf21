//! FlashAttention-1: K/V tiles outside, query tiles inside (M4.3 §0x0A, §0x0D).
//!
//! A K/V tile is loaded once and meets every query tile. No query tile stays: its output, always
//! normalised, and its m and l come in from slow memory and go back at every visit, and so does dQ
//! in the backward. A program is a whole head. Every tile is visited, also one whose cells are all
//! masked; merging nothing leaves the state as it is.

use ferroflash_core::row_state::RowState;

use super::call::{Blocks, Call, column, expect_len};
use super::gradient::{Cells, Gradients, PairTiles, RowsState, deltas};
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, add_scaled};
use super::trace::{Tensor, Trace};
use crate::error::{Error, Result};

/// Sides of the tiles that the paper cuts for a chip of `chip_words` scalars:
/// `B_c = ⌈M / 4d⌉`, `B_r = min(B_c, d)`.
///
/// # Errors
/// A size of 0.
pub fn blocks(chip_words: usize, head_dim: usize) -> Result<Blocks> {
    for (field, size) in [("chip_words", chip_words), ("head_dim", head_dim)] {
        if size == 0 {
            return Err(Error::Zero { field });
        }
    }
    let four_rows = head_dim.checked_mul(4).ok_or(Error::Overflow { field: "head_dim" })?;
    let kv_block = chip_words.div_ceil(four_rows);
    Ok(Blocks { q_block: kv_block.min(head_dim), kv_block })
}

/// What the forward leaves in slow memory.
#[derive(Clone, Debug)]
pub struct Forward<F> {
    /// Outputs, `[batch, q_head, row, value channel]`.
    pub o: Vec<F>,
    /// The final m and l of each row, `[batch, q_head, row]`.
    pub states: Vec<RowState<F>>,
    /// What was done.
    pub trace: Trace,
}

/// Algorithm 1, the paper's lines in order, with scale, mask and dropout where they belong.
///
/// # Errors
/// A block size of 0.
pub fn forward<F: Real>(call: &Call<'_, F>, blocks: Blocks) -> Result<Forward<F>> {
    call.check(blocks)?;
    let (s, heads) = (call.shape, call.heads());
    let (mut trace, [q, k, v]) =
        (Trace { programs: heads as u64, ..Trace::default() }, call.inputs());
    let mut o = Slow::undefined(Tensor::O, heads, s.q_len, s.value_dim);
    let mut row_max = Slow::undefined(Tensor::State, heads, s.q_len, 1);
    let mut row_sum = Slow::undefined(Tensor::State, heads, s.q_len, 1);
    for head in 0..heads {
        let (program, chip) = (head as u64, Chip::default());
        o.initialise(&mut trace, head, 0..s.q_len, F::ZERO);
        row_max.initialise(&mut trace, head, 0..s.q_len, F::EMPTY.row_max);
        row_sum.initialise(&mut trace, head, 0..s.q_len, F::ZERO);
        for (j, keys) in call.kv_tiles(blocks).into_iter().enumerate() {
            let k_tile = k.load(&chip, &mut trace, call.kv_head(head), keys.clone());
            let v_tile = v.load(&chip, &mut trace, call.kv_head(head), keys.clone());
            for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
                call.visit(&mut trace, program, (i, &rows), (j, &keys));
                let q_tile = q.load(&chip, &mut trace, head, rows.clone());
                let mut o_tile = o.load(&chip, &mut trace, head, rows.clone());
                let mut m = row_max.load(&chip, &mut trace, head, rows.clone());
                let mut l = row_sum.load(&chip, &mut trace, head, rows.clone());
                let mut scores = q_tile.times_transposed(&k_tile, call.scale);
                for (at, row) in rows.clone().enumerate() {
                    let old = RowState { row_max: m.values[at], row_sum: l.values[at] };
                    let tile = call.row_state(scores.row_mut(at), head, row, &keys);
                    let (new, rescale) = F::merge(old, tile);
                    (trace.merges, trace.divisions) = (trace.merges + 1, trace.divisions + 1);
                    (m.values[at], l.values[at]) = (new.row_max, new.row_sum);
                    if !F::HAS_VALUE {
                        continue;
                    }
                    // The old output was divided by the old sum; the new one is by the new.
                    let normalizer = F::normalizer(new);
                    let kept = old.row_sum * rescale.left * normalizer;
                    o_tile.row_mut(at).iter_mut().for_each(|value| *value = *value * kept);
                    for (key, weight) in scores.row(at).iter().enumerate() {
                        let weight = *weight * rescale.right * normalizer;
                        add_scaled(o_tile.row_mut(at), weight, v_tile.row(key));
                    }
                }
                o.store(&mut trace, program, head, rows.clone(), &o_tile);
                row_max.store(&mut trace, program, head, rows.clone(), &m);
                row_sum.store(&mut trace, program, head, rows, &l);
            }
        }
        trace.peak_words = trace.peak_words.max(chip.peak());
    }
    let states = row_max.into_values().into_iter().zip(row_sum.into_values());
    let states = states.map(|(row_max, row_sum)| RowState { row_max, row_sum }).collect();
    Ok(Forward { o: o.into_values(), states, trace })
}

/// Gradients, in the layout of their tensors.
#[derive(Clone, Debug)]
pub struct Backward<F> {
    /// Of q.
    pub dq: Vec<F>,
    /// Of k.
    pub dk: Vec<F>,
    /// Of v.
    pub dv: Vec<F>,
    /// What was done.
    pub trace: Trace,
}

/// Algorithm 4: the loops of the forward again, from its outputs and states and `d_o`, which has
/// their layout. dK and dV of a tile stay on the chip; dQ goes to and fro.
///
/// # Errors
/// A block size of 0; `d_o`, or what the forward left, of another size; shared KV heads, which the
/// paper does not have.
pub fn backward<F: Real>(
    call: &Call<'_, F>,
    blocks: Blocks,
    saved: &Forward<F>,
    d_o: &[F],
) -> Result<Backward<F>> {
    call.check(blocks)?;
    let (s, heads) = (call.shape, call.heads());
    if s.q_heads != s.kv_heads {
        return Err(Error::field("kv_heads", s.kv_heads, format!("{}, as q_heads", s.q_heads)));
    }
    expect_len("d_o", d_o.len(), &s.o_dims())?;
    expect_len("o", saved.o.len(), &s.o_dims())?;
    expect_len("states", saved.states.len(), &s.lse_dims())?;
    let (mut trace, [q, k, v]) =
        (Trace { programs: heads as u64, ..Trace::default() }, call.inputs());
    let o = Slow::holding(Tensor::O, s.q_len, s.value_dim, &saved.o);
    let d_o = Slow::holding(Tensor::DO, s.q_len, s.value_dim, d_o);
    let state = |of: fn(&RowState<F>) -> F| {
        let values: Vec<F> = saved.states.iter().map(of).collect();
        Slow::holding(Tensor::State, s.q_len, 1, &values)
    };
    let (row_max, row_sum) = (state(|state| state.row_max), state(|state| state.row_sum));
    let mut dq = Slow::undefined(Tensor::DQ, heads, s.q_len, s.head_dim);
    let mut dk = Slow::undefined(Tensor::DK, heads, s.kv_len, s.head_dim);
    let mut dv = Slow::undefined(Tensor::DV, heads, s.kv_len, s.value_dim);
    for head in 0..heads {
        let (program, chip) = (head as u64, Chip::default());
        dq.initialise(&mut trace, head, 0..s.q_len, F::ZERO);
        dk.initialise(&mut trace, head, 0..s.kv_len, F::ZERO);
        dv.initialise(&mut trace, head, 0..s.kv_len, F::ZERO);
        for (j, keys) in call.kv_tiles(blocks).into_iter().enumerate() {
            let k_tile = k.load(&chip, &mut trace, head, keys.clone());
            let v_tile = v.load(&chip, &mut trace, head, keys.clone());
            let mut gradients = Gradients::zeros(call, &chip, keys.len());
            for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
                call.visit(&mut trace, program, (i, &rows), (j, &keys));
                let q_tile = q.load(&chip, &mut trace, head, rows.clone());
                let o_tile = o.load(&chip, &mut trace, head, rows.clone());
                let d_o_tile = d_o.load(&chip, &mut trace, head, rows.clone());
                let mut dq_tile = dq.load(&chip, &mut trace, head, rows.clone());
                let m = row_max.load(&chip, &mut trace, head, rows.clone());
                let l = row_sum.load(&chip, &mut trace, head, rows.clone());
                let states = m.values.iter().zip(&l.values);
                let lse = states.map(|(m, l)| F::lse(RowState { row_max: *m, row_sum: *l }));
                let rows_state = RowsState {
                    lse: column(&chip, lse.collect()),
                    delta: column(&chip, deltas(&d_o_tile, &o_tile)),
                };
                let cells = Cells { head, rows: &rows, keys: &keys };
                let tiles = PairTiles { q: &q_tile, k: &k_tile, v: &v_tile, d_o: &d_o_tile };
                gradients.add(call, cells, tiles, &rows_state, &mut dq_tile, call.scale);
                dq.store(&mut trace, program, head, rows, &dq_tile);
            }
            dk.store(&mut trace, program, head, keys.clone(), &gradients.dk);
            dv.store(&mut trace, program, head, keys, &gradients.dv);
        }
        trace.peak_words = trace.peak_words.max(chip.peak());
    }
    Ok(Backward { dq: dq.into_values(), dk: dk.into_values(), dv: dv.into_values(), trace })
}
