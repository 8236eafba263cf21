//! The gradients of one tile of scores: what every backward schedule does at a visit
//! (M4.3 §0x0DB, M4.4 §0x06.1A).

use std::ops::Range;

use super::call::Call;
use super::number::Real;
use super::tile::{Chip, Tile};

/// Where a tile lies.
#[derive(Clone, Copy)]
pub(crate) struct Cells<'t> {
    /// Query head of all items.
    pub(crate) head: usize,
    pub(crate) rows: &'t Range<usize>,
    pub(crate) keys: &'t Range<usize>,
}

/// What a visit reads.
#[derive(Clone, Copy)]
pub(crate) struct PairTiles<'t, 'c, F> {
    pub(crate) q: &'t Tile<'c, F>,
    pub(crate) k: &'t Tile<'c, F>,
    pub(crate) v: &'t Tile<'c, F>,
    pub(crate) d_o: &'t Tile<'c, F>,
}

/// What a visit reads of each row: its log-sum-exp and `⟨dO, O⟩`.
pub(crate) struct RowsState<'c, F> {
    pub(crate) lse: Tile<'c, F>,
    pub(crate) delta: Tile<'c, F>,
}

/// The two tiles of a visit from which all gradients follow.
struct Local<'c, F> {
    /// `P·Z`, what the outputs were made with.
    dropped: Tile<'c, F>,
    /// `P·(dP·Z − delta)`.
    d_scores: Tile<'c, F>,
}

/// Recomputes P from the scores and lse, then dS.
fn local<'c, F: Real>(
    call: &Call<'_, F>,
    cells: Cells<'_>,
    tiles: PairTiles<'_, 'c, F>,
    state: &RowsState<'c, F>,
) -> Local<'c, F> {
    let mut dropped = tiles.q.times_transposed(tiles.k, call.scale);
    let mut d_scores = tiles.d_o.times_transposed(tiles.v, F::ONE);
    if !F::HAS_VALUE {
        return Local { dropped, d_scores };
    }
    for (at, row) in cells.rows.clone().enumerate() {
        for (column, key) in cells.keys.clone().enumerate() {
            let (p, d_score) = if call.sees(row, key) && state.lse.values[at] != F::EMPTY.row_max {
                let p = (dropped.row(at)[column] - state.lse.values[at]).exp();
                let multiplier = call.multiplier(cells.head, row, key);
                let d_p = d_scores.row(at)[column] * multiplier;
                (p * multiplier, p * (d_p - state.delta.values[at]))
            } else {
                (F::ZERO, F::ZERO)
            };
            dropped.row_mut(at)[column] = p;
            d_scores.row_mut(at)[column] = d_score;
        }
    }
    Local { dropped, d_scores }
}

/// `⟨dO, O⟩` of each row.
pub(crate) fn deltas<F: Real>(d_o: &Tile<'_, F>, o: &Tile<'_, F>) -> Vec<F> {
    let of_row = |row| {
        let pairs = d_o.row(row).iter().zip(o.row(row));
        pairs.fold(F::ZERO, |sum, (d_o, o)| sum + *d_o * *o)
    };
    (0..d_o.rows).map(of_row).collect()
}

/// dK and dV of one K/V tile, on the chip of its owner.
pub(crate) struct Gradients<'c, F> {
    pub(crate) dk: Tile<'c, F>,
    pub(crate) dv: Tile<'c, F>,
}

impl<'c, F: Real> Gradients<'c, F> {
    pub(crate) fn zeros(call: &Call<'_, F>, chip: &'c Chip, keys: usize) -> Self {
        Self {
            dk: Tile::filled(chip, keys, call.shape.head_dim, F::ZERO),
            dv: Tile::filled(chip, keys, call.shape.value_dim, F::ZERO),
        }
    }

    /// Adds one visit to dK and dV, and `dq_factor · dS·K` to `dq`. The scale belongs to dQ and dK,
    /// not to dV; a scratch of dQ may leave it to its conversion.
    pub(crate) fn add(
        &mut self,
        call: &Call<'_, F>,
        cells: Cells<'_>,
        tiles: PairTiles<'_, 'c, F>,
        state: &RowsState<'c, F>,
        dq: &mut Tile<'c, F>,
        dq_factor: F,
    ) {
        let Local { dropped, d_scores } = local(call, cells, tiles, state);
        self.dv.add_transposed_product(F::ONE, &dropped, tiles.d_o);
        self.dk.add_transposed_product(call.scale, &d_scores, tiles.q);
        dq.add_product(dq_factor, &d_scores, tiles.k);
    }
}
