//! The warps of one block: who produces an output row (M4.4 §0x05).
//!
//! Split-K deals the keys to the warps: each has a state of its own for every row, and a row is
//! done only when W states have been joined, in `W − 1` merges whatever the order. Split-Q deals
//! the rows: a warp has all there is of its rows, and nothing is joined. In both the block brings
//! K and V onto the chip once, for all its warps.

use std::collections::BTreeSet;
use std::ops::Range;

use ferroflash_core::row_state::RowState;
use ferroflash_core::tile::MMA_ROWS;

use super::call::{Call, tiles};
use super::fa2::finish;
use super::gradient::Cells;
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};
use crate::error::{Error, Result};

/// In which order the states of the warps are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// One warp takes the others' states one after another.
    Chain,
    /// Pairs of warps, then pairs of pairs.
    Tree,
}

/// What the warps of all blocks exchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// Words of one row's state: m, l and the numerator.
    pub state_words: u128,
    /// Row states that a warp was left with after its keys.
    pub partial_states: u128,
    /// Merges of two warps' states.
    pub merges: u128,
    /// States that a warp handed to another.
    pub handed_states: u128,
    /// Merges of a row, one of which waits for the other, in the longest chain.
    pub depth: u128,
    /// How many warps produced each row of a head, `[batch, q_head, row]`.
    pub producers: Vec<usize>,
}

/// What a block's warps leave.
#[derive(Clone, Debug)]
pub struct Outcome<F> {
    /// Outputs, `[batch, q_head, row, value channel]`.
    pub o: Vec<F>,
    /// Log-sum-exp of each row, `[batch, q_head, row]`.
    pub lse: Vec<F>,
    /// What was done.
    pub trace: Trace,
    /// What the warps exchanged.
    pub exchange: Exchange,
}

/// The running states of some rows.
struct Rows<'c, F> {
    states: Vec<RowState<F>>,
    numerators: Tile<'c, F>,
}

/// Split-K: warp w sees the keys `slices[w]` of every row of a block of `q_block` rows.
///
/// # Errors
/// A `q_block` of 0, and slices that are not `0..kv_len` cut into pieces.
pub fn split_k<F: Real>(
    call: &Call<'_, F>,
    q_block: usize,
    slices: &[Range<usize>],
    join: Join,
) -> Result<Outcome<F>> {
    let end = slices
        .iter()
        .try_fold(0, |end, slice| (slice.start == end && slice.end >= end).then_some(slice.end));
    if end != Some(call.shape.kv_len) {
        let needs = format!("0..{} cut into pieces, in order", call.shape.kv_len);
        return Err(Error::field("slices", format!("{slices:?}"), needs));
    }
    run(call, q_block, |chip, trace, exchange, block| {
        let Block { head, rows, q, k, v } = block;
        let mut parts: Vec<Rows<'_, F>> = Vec::new();
        for (warp, keys) in slices.iter().enumerate() {
            let mut part = Rows::empty(chip, rows.len(), call.shape.value_dim);
            let k_tile = k.load(chip, trace, call.kv_head(head), keys.clone());
            let v_tile = v.load(chip, trace, call.kv_head(head), keys.clone());
            call.visit(trace, trace.programs, (rows.start / q_block, &rows), (warp, keys));
            let scores = q.times_transposed(&k_tile, call.scale);
            let cells = Cells { head, rows: &rows, keys };
            let Rows { states, numerators } = &mut part;
            call.merge_tile(trace, cells, scores, &v_tile, states, numerators);
            exchange.partial_states += rows.len() as u128;
            parts.push(part);
        }
        let producers = &mut exchange.producers[head * call.shape.q_len..];
        producers[rows.clone()].fill(slices.len());
        let mut depth = 0;
        while parts.len() > 1 {
            depth += 1;
            let others = match join {
                Join::Chain => vec![parts.remove(1)],
                Join::Tree => {
                    let (mut owners, mut others) = (Vec::new(), Vec::new());
                    for (at, part) in parts.into_iter().enumerate() {
                        if at % 2 == 0 { owners.push(part) } else { others.push(part) }
                    }
                    parts = owners;
                    others
                }
            };
            for (owner, other) in parts.iter_mut().zip(others) {
                exchange.handed_states += other.states.len() as u128;
                exchange.merges += other.states.len() as u128;
                owner.take(other);
            }
        }
        exchange.depth = exchange.depth.max(depth);
        parts.pop().unwrap_or_else(|| Rows::empty(chip, rows.len(), call.shape.value_dim))
    })
}

/// Split-Q: 16-row bands of a block of `q_block` rows are dealt to `warps` in turn, and K and V
/// come in tiles of `kv_block` keys.
///
/// # Errors
/// A size of 0.
pub fn split_q<F: Real>(
    call: &Call<'_, F>,
    q_block: usize,
    kv_block: usize,
    warps: usize,
) -> Result<Outcome<F>> {
    for (field, size) in [("kv_block", kv_block), ("warps", warps)] {
        if size == 0 {
            return Err(Error::Zero { field });
        }
    }
    run(call, q_block, |chip, trace, exchange, block| {
        let Block { head, rows, q, k, v } = block;
        let mut whole = Rows::empty(chip, rows.len(), call.shape.value_dim);
        let mut producers: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); rows.len()];
        for (j, keys) in tiles(call.shape.kv_len, kv_block).into_iter().enumerate() {
            if call.visible_cells(&rows, &keys) == 0 {
                continue;
            }
            call.visit(trace, trace.programs, (rows.start / q_block, &rows), (j, &keys));
            let k_tile = k.load(chip, trace, call.kv_head(head), keys.clone());
            let v_tile = v.load(chip, trace, call.kv_head(head), keys.clone());
            for (band, band_rows) in tiles(rows.len(), MMA_ROWS as usize).into_iter().enumerate() {
                let of_band = rows.start + band_rows.start..rows.start + band_rows.end;
                let values = q.values[band_rows.start * q.width..band_rows.end * q.width].to_vec();
                let q_rows = Tile::new(chip, q.width, values);
                let scores = q_rows.times_transposed(&k_tile, call.scale);
                let cells = Cells { head, rows: &of_band, keys: &keys };
                let mut part = whole.part(chip, band_rows.clone());
                let Rows { states, numerators } = &mut part;
                call.merge_tile(trace, cells, scores, &v_tile, states, numerators);
                whole.put(band_rows.start, &part);
                for row in band_rows {
                    producers[row].insert(band % warps);
                }
            }
        }
        exchange.partial_states += rows.len() as u128;
        let counts = &mut exchange.producers[head * call.shape.q_len..];
        for (count, warps) in counts[rows].iter_mut().zip(producers) {
            *count = warps.len();
        }
        whole
    })
}

/// Rows that a warp owns under split-Q.
pub fn rows_of_warp(q_block: usize, warps: usize, warp: usize) -> Vec<usize> {
    let bands = tiles(q_block, MMA_ROWS as usize).into_iter().enumerate();
    bands
        .filter(|(band, _)| band.checked_rem(warps) == Some(warp))
        .flat_map(|(_, rows)| rows)
        .collect()
}

/// A block of query rows and what it reads.
struct Block<'t, 'c, F> {
    head: usize,
    rows: Range<usize>,
    q: &'t Tile<'c, F>,
    k: &'t Slow<F>,
    v: &'t Slow<F>,
}

/// Every block of every head: `attend` gives the states of its rows.
fn run<F: Real>(
    call: &Call<'_, F>,
    q_block: usize,
    attend: impl for<'c> Fn(&'c Chip, &mut Trace, &mut Exchange, Block<'_, 'c, F>) -> Rows<'c, F>,
) -> Result<Outcome<F>> {
    if q_block == 0 {
        return Err(Error::Zero { field: "q_block" });
    }
    let (s, heads) = (call.shape, call.heads());
    let (mut trace, [q, k, v]) = (Trace::default(), call.inputs());
    let mut exchange = Exchange {
        state_words: s.value_dim as u128 + 2,
        producers: vec![0; heads * s.q_len],
        ..Exchange::default()
    };
    let mut o = Slow::undefined(Tensor::O, heads, s.q_len, s.value_dim);
    let mut lse = Slow::undefined(Tensor::State, heads, s.q_len, 1);
    for head in 0..heads {
        for rows in tiles(s.q_len, q_block) {
            let (program, chip) = (trace.programs, Chip::default());
            let q = q.load(&chip, &mut trace, head, rows.clone());
            let block = Block { head, rows: rows.clone(), q: &q, k: &k, v: &v };
            let Rows { states, mut numerators } = attend(&chip, &mut trace, &mut exchange, block);
            finish(&mut trace, &states, &mut numerators);
            o.store(&mut trace, program, head, rows.clone(), &numerators);
            let of_rows = states.iter().map(|state| F::lse(*state)).collect();
            lse.store(&mut trace, program, head, rows, &Tile::new(&chip, 1, of_rows));
            trace.peak_words = trace.peak_words.max(chip.peak());
            trace.programs += 1;
        }
    }
    Ok(Outcome { o: o.into_values(), lse: lse.into_values(), trace, exchange })
}

impl<'c, F: Real> Rows<'c, F> {
    fn empty(chip: &'c Chip, rows: usize, width: usize) -> Self {
        Self { states: vec![F::EMPTY; rows], numerators: Tile::filled(chip, rows, width, F::ZERO) }
    }

    /// Merges another warp's states of the same rows, in one frame.
    fn take(&mut self, other: Self) {
        for (at, right) in other.states.iter().enumerate() {
            let (merged, rescale) = F::merge(self.states[at], *right);
            self.states[at] = merged;
            let pairs = self.numerators.row_mut(at).iter_mut().zip(other.numerators.row(at));
            for (left, right) in pairs {
                *left = *left * rescale.left + *right * rescale.right;
            }
        }
    }

    fn part(&self, chip: &'c Chip, rows: Range<usize>) -> Self {
        let width = self.numerators.width;
        let values = self.numerators.values[rows.start * width..rows.end * width].to_vec();
        Self { states: self.states[rows].to_vec(), numerators: Tile::new(chip, width, values) }
    }

    fn put(&mut self, first: usize, part: &Self) {
        let at = first * part.numerators.width;
        self.states[first..first + part.states.len()].copy_from_slice(&part.states);
        self.numerators.values[at..at + part.numerators.values.len()]
            .copy_from_slice(&part.numerators.values);
    }
}
