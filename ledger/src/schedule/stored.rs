//! Attention in three stages with two matrices between them, the schedule that tiles do away with
//! (M4.3 §0x02B), and the softmax of a stored row in its three forms (§0x06, §0x07).

use ferroflash_core::row_state::RowState;

use super::call::Call;
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};
use crate::materialized::Softmax;

/// What the three stages leave in slow memory.
#[derive(Clone, Debug)]
pub struct Forward<F> {
    /// Outputs, `[batch, q_head, row, value channel]`.
    pub o: Vec<F>,
    /// Probabilities, after dropout, `[batch, q_head, row, key]`.
    pub p: Vec<F>,
    /// What was done.
    pub trace: Trace,
}

/// Scores are stored, masked; read and stored as probabilities; read and multiplied by V. A stage
/// reads each of its operands once for every query head.
pub fn forward<F: Real>(call: &Call<'_, F>) -> Forward<F> {
    let (s, heads) = (call.shape, call.heads());
    let (mut trace, [q, k, v]) = (Trace::default(), call.inputs());
    let mut scores = Slow::undefined(Tensor::Scores, heads, s.q_len, s.kv_len);
    let mut p = Slow::undefined(Tensor::Probabilities, heads, s.q_len, s.kv_len);
    let mut o = Slow::undefined(Tensor::O, heads, s.q_len, s.value_dim);
    let (rows, keys) = (0..s.q_len, 0..s.kv_len);
    for head in 0..heads {
        let (program, chip) = (head as u64, Chip::default());
        let q_rows = q.load(&chip, &mut trace, head, rows.clone());
        let k_rows = k.load(&chip, &mut trace, call.kv_head(head), keys.clone());
        let mut tile = q_rows.times_transposed(&k_rows, call.scale);
        if F::HAS_VALUE {
            for row in rows.clone() {
                for key in keys.clone().filter(|key| !call.sees(row, *key)) {
                    tile.row_mut(row)[key] = F::EMPTY.row_max;
                }
            }
        }
        scores.store(&mut trace, program, head, rows.clone(), &tile);
        trace.peak_words = trace.peak_words.max(chip.peak());
    }
    for head in 0..heads {
        let (program, chip) = (head as u64, Chip::default());
        let mut tile = scores.load(&chip, &mut trace, head, rows.clone());
        for row in rows.clone().filter(|_| F::HAS_VALUE) {
            let state = call.row_state(tile.row_mut(row), head, row, &keys);
            let normalizer = F::normalizer(state);
            tile.row_mut(row).iter_mut().for_each(|weight| *weight = *weight * normalizer);
        }
        p.store(&mut trace, program, head, rows.clone(), &tile);
        trace.peak_words = trace.peak_words.max(chip.peak());
    }
    for head in 0..heads {
        let (program, chip) = (head as u64, Chip::default());
        let tile = p.load(&chip, &mut trace, head, rows.clone());
        let v_rows = v.load(&chip, &mut trace, call.kv_head(head), keys.clone());
        let mut output = Tile::filled(&chip, s.q_len, s.value_dim, F::ZERO);
        output.add_product(F::ONE, &tile, &v_rows);
        o.store(&mut trace, program, head, rows.clone(), &output);
        trace.peak_words = trace.peak_words.max(chip.peak());
    }
    Forward { o: o.into_values(), p: p.into_values(), trace }
}

/// The softmax of a stored row, and how often memory was used for it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRow<F> {
    /// Probabilities.
    pub p: Vec<F>,
    /// Times that all scores were gone through.
    pub scans: u64,
    /// Scores loaded.
    pub loads: u64,
    /// Probabilities stored.
    pub stores: u64,
}

/// The softmax of a stored row that nothing of is kept but a maximum and a sum: every scan loads
/// all scores again. The native form takes exponentials of scores as they are, and gives NaN where
/// these are too large, or all too small.
pub fn softmax<F: Real>(form: Softmax, scores: &[F]) -> StoredRow<F> {
    let mut row = StoredRow { p: Vec::new(), scans: 0, loads: 0, stores: 0 };
    let mut scan = |visit: &mut dyn FnMut(F)| {
        row.scans += 1;
        for score in scores {
            row.loads += 1;
            visit(*score);
        }
    };
    let mut state = F::EMPTY;
    let one = |score| RowState { row_max: score, row_sum: F::ONE };
    let is_seen = |score: F| score != F::EMPTY.row_max;
    match form {
        Softmax::Native => {
            state.row_max = F::ZERO;
            scan(&mut |score| state.row_sum = state.row_sum + score.exp());
        }
        Softmax::Safe => {
            scan(&mut |score| {
                if state.row_max < score {
                    state.row_max = score;
                }
            });
            scan(&mut |score| {
                if is_seen(score) {
                    state.row_sum = state.row_sum + (score - state.row_max).exp();
                }
            });
        }
        Softmax::Online => scan(&mut |score| {
            if is_seen(score) {
                state = F::merge(state, one(score)).0;
            }
        }),
    }
    let mut p = Vec::with_capacity(scores.len());
    scan(&mut |score| {
        p.push(match form {
            Softmax::Native => score.exp() / state.row_sum,
            _ if is_seen(score) => (score - state.row_max).exp() * F::normalizer(state),
            _ => F::ZERO,
        });
    });
    row.stores = p.len() as u64;
    StoredRow { p, ..row }
}
