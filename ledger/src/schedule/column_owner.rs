//! The backward by K/V tiles, and the two reductions it cannot do without (M4.4 §0x06.1).
//!
//! A program holds a K/V tile with its dK and dV, and walks the query tiles that see it, from the
//! last to the first. dQ sums over K/V tiles, so over programs: either every share is added to one
//! scratch that a kernel before has cleared, in whatever order the programs arrive, or every share
//! is kept apart, and a kernel after adds them up in the order of the tiles. Query heads that
//! share a KV head give shares of its dK and dV: either each head has programs and results of its
//! own, summed in the end, or a program walks the heads of its group.

use std::ops::Range;

use super::call::{Blocks, Call, column, expect_len};
use super::fa1::Backward;
use super::fa2::Forward;
use super::gradient::{Cells, Gradients, PairTiles, RowsState, deltas};
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};
use crate::error::{Error, Result};

/// How the shares of dQ come together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DqSum {
    /// Atomic additions, in the order of arrival.
    Atomic,
    /// A share of each K/V tile stored by itself, added up in the order of the tiles.
    Partials,
}

/// How the query heads of a group come together in dK and dV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSum {
    /// Programs and results for every query head, and a sum at the end.
    Expanded,
    /// A program for every KV head, which walks its query heads.
    Looped,
}

/// The reductions of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reductions<'a> {
    /// Of dQ over K/V tiles.
    pub dq: DqSum,
    /// Of dK and dV over the heads of a group.
    pub group: GroupSum,
    /// The K/V tiles of a head in the order in which their programs run; by number if there is
    /// none. No device promises one.
    pub arrival: Option<&'a [usize]>,
}

impl Reductions<'_> {
    /// Those of flash-attention v2.0.0.
    pub const ATOMIC: Self = Self { dq: DqSum::Atomic, group: GroupSum::Expanded, arrival: None };
    /// One result whatever the arrival, for more scratch.
    pub const ORDERED: Self = Self { dq: DqSum::Partials, ..Self::ATOMIC };
    /// Atomic, without results of the query heads: this project's.
    pub const LOOPED: Self = Self { group: GroupSum::Looped, ..Self::ATOMIC };
}

/// `⟨dO, O⟩` of every row, in slow memory: the kernel before the main one.
pub(crate) fn preprocess<F: Real>(
    call: &Call<'_, F>,
    blocks: Blocks,
    trace: &mut Trace,
    o: &Slow<F>,
    d_o: &Slow<F>,
) -> Slow<F> {
    let mut delta = Slow::undefined(Tensor::Delta, call.heads(), call.shape.q_len, 1);
    for head in 0..call.heads() {
        for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
            let chip = Chip::default();
            let o_tile = o.load(&chip, trace, head, rows.clone());
            let d_o_tile = d_o.load(&chip, trace, head, rows.clone());
            let of_rows = column(&chip, deltas(&d_o_tile, &o_tile));
            delta.store(trace, i as u64, head, rows, &of_rows);
        }
    }
    delta
}

/// dQ on its way: sums, or shares by K/V tile.
struct Shares<F> {
    scratch: Slow<F>,
    sum: DqSum,
    kv_tiles: usize,
}

impl<F: Real> Shares<F> {
    fn new(call: &Call<'_, F>, trace: &mut Trace, sum: DqSum, kv_tiles: usize) -> Self {
        let (s, heads) = (call.shape, call.heads());
        let kept = if sum == DqSum::Atomic { heads } else { heads * kv_tiles };
        let mut scratch = Slow::undefined(Tensor::Scratch, kept, s.q_len, s.head_dim);
        if sum == DqSum::Atomic {
            (0..heads).for_each(|head| scratch.initialise(trace, head, 0..s.q_len, F::ZERO));
        }
        Self { scratch, sum, kv_tiles }
    }

    fn give(
        &mut self,
        trace: &mut Trace,
        program: u64,
        (head, kv_tile): (usize, usize),
        rows: Range<usize>,
        share: &Tile<'_, F>,
    ) {
        match self.sum {
            DqSum::Atomic => self.scratch.add(trace, program, head, rows, share),
            DqSum::Partials => {
                let place = head * self.kv_tiles + kv_tile;
                self.scratch.store(trace, program, place, rows, share);
            }
        }
    }

    /// The kernel after: the scale, which was left to it, and dQ.
    fn finish(self, call: &Call<'_, F>, trace: &mut Trace, blocks: Blocks) -> Vec<F> {
        if self.sum == DqSum::Atomic {
            return self.scratch.convert(trace, Tensor::DQ, call.scale);
        }
        let s = call.shape;
        let mut dq = Slow::undefined(Tensor::DQ, call.heads(), s.q_len, s.head_dim);
        for head in 0..call.heads() {
            for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
                let chip = Chip::default();
                let mut sum = Tile::filled(&chip, rows.len(), s.head_dim, F::ZERO);
                for (j, keys) in call.kv_tiles(blocks).into_iter().enumerate() {
                    if call.visible_cells(&rows, &keys) > 0 {
                        let place = head * self.kv_tiles + j;
                        let share = self.scratch.load(&chip, trace, place, rows.clone());
                        sum.add_scaled(call.scale, &share);
                    }
                }
                dq.store(trace, i as u64, head, rows, &sum);
            }
        }
        dq.into_values()
    }
}

/// Gradients by K/V tiles, with these reductions.
///
/// # Errors
/// A block size of 0; `d_o`, or what the forward left, of another size; an arrival that is no order
/// of the K/V tiles.
pub fn backward<F: Real>(
    call: &Call<'_, F>,
    blocks: Blocks,
    saved: &Forward<F>,
    d_o: &[F],
    reductions: &Reductions<'_>,
) -> Result<Backward<F>> {
    call.check(blocks)?;
    let s = call.shape;
    expect_len("d_o", d_o.len(), &s.o_dims())?;
    expect_len("o", saved.o.len(), &s.o_dims())?;
    expect_len("lse", saved.lse.len(), &s.lse_dims())?;
    let kv_tiles = call.kv_tiles(blocks);
    let order = order(reductions.arrival, kv_tiles.len())?;
    let (mut trace, [q, k, v]) = (Trace::default(), call.inputs());
    let o = Slow::holding(Tensor::O, s.q_len, s.value_dim, &saved.o);
    let d_o = Slow::holding(Tensor::DO, s.q_len, s.value_dim, d_o);
    let lse = Slow::holding(Tensor::State, s.q_len, 1, &saved.lse);
    let delta = preprocess(call, blocks, &mut trace, &o, &d_o);
    let mut shares = Shares::new(call, &mut trace, reductions.dq, kv_tiles.len());

    let (owners, walked) = match reductions.group {
        GroupSum::Expanded => (call.heads(), 1),
        GroupSum::Looped => (call.kv_heads(), s.group()),
    };
    let mut dk = Slow::undefined(Tensor::DK, owners, s.kv_len, s.head_dim);
    let mut dv = Slow::undefined(Tensor::DV, owners, s.kv_len, s.value_dim);
    for owner in 0..owners {
        // Query heads of a KV head follow one another.
        let heads = owner * walked..(owner + 1) * walked;
        let kv_head = call.kv_head(heads.start);
        for &j in &order {
            let (program, chip, keys) = (trace.programs, Chip::default(), kv_tiles[j].clone());
            trace.programs += 1;
            let k_tile = k.load(&chip, &mut trace, kv_head, keys.clone());
            let v_tile = v.load(&chip, &mut trace, kv_head, keys.clone());
            let mut gradients = Gradients::zeros(call, &chip, keys.len());
            for head in heads.clone() {
                for (i, rows) in call.q_tiles(blocks).into_iter().enumerate().rev() {
                    if call.visible_cells(&rows, &keys) == 0 {
                        continue;
                    }
                    call.visit(&mut trace, program, (i, &rows), (j, &keys));
                    let q_tile = q.load(&chip, &mut trace, head, rows.clone());
                    let d_o_tile = d_o.load(&chip, &mut trace, head, rows.clone());
                    let state = RowsState {
                        lse: lse.load(&chip, &mut trace, head, rows.clone()),
                        delta: delta.load(&chip, &mut trace, head, rows.clone()),
                    };
                    let mut share = Tile::filled(&chip, rows.len(), s.head_dim, F::ZERO);
                    let cells = Cells { head, rows: &rows, keys: &keys };
                    let tiles = PairTiles { q: &q_tile, k: &k_tile, v: &v_tile, d_o: &d_o_tile };
                    gradients.add(call, cells, tiles, &state, &mut share, F::ONE);
                    shares.give(&mut trace, program, (head, j), rows, &share);
                }
            }
            dk.store(&mut trace, program, owner, keys.clone(), &gradients.dk);
            dv.store(&mut trace, program, owner, keys, &gradients.dv);
            trace.peak_words = trace.peak_words.max(chip.peak());
        }
    }
    let dq = shares.finish(call, &mut trace, blocks);
    let (mut dk, mut dv) = (dk.into_values(), dv.into_values());
    if owners != call.kv_heads() {
        dk = sum_group(call, &mut trace, dk, Tensor::DK, s.head_dim);
        dv = sum_group(call, &mut trace, dv, Tensor::DV, s.value_dim);
    }
    Ok(Backward { dq, dk, dv, trace })
}

/// The tiles in order of arrival, each once.
fn order(arrival: Option<&[usize]>, tiles: usize) -> Result<Vec<usize>> {
    let by_number: Vec<usize> = (0..tiles).collect();
    let Some(arrival) = arrival else { return Ok(by_number) };
    let mut sorted = arrival.to_vec();
    sorted.sort_unstable();
    if sorted != by_number {
        let needs = format!("the {tiles} K/V tiles, each once");
        return Err(Error::field("arrival", format!("{arrival:?}"), needs));
    }
    Ok(arrival.to_vec())
}

/// Adds up the query heads of each group.
fn sum_group<F: Real>(
    call: &Call<'_, F>,
    trace: &mut Trace,
    expanded: Vec<F>,
    gradient: Tensor,
    width: usize,
) -> Vec<F> {
    let head_values = call.shape.kv_len * width;
    let mut summed = vec![F::ZERO; call.kv_heads() * head_values];
    for (head, values) in expanded.chunks(head_values).enumerate() {
        let sums = &mut summed[call.kv_head(head) * head_values..][..head_values];
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = *sum + *value);
    }
    trace.touch(gradient).reads += expanded.len() as u128;
    trace.touch(gradient).writes += summed.len() as u128;
    summed
}
