//! The tiled backward pass: one block owns a tile of keys and values (M4.4 §0x04).
//!
//! First, for every row, `delta = ⟨dO, O⟩ − dLSE` (and its part of dsink). Then a block holds its
//! K and V tile, also transposed, one line a channel, and walks the query heads that share them,
//! and the query tiles of each in ascending order. Scores are computed one line a query row and one
//! lane a key, from the saved log-sum-exp, so nothing is summed across a register. For each tile:
//!
//! 1. scores = scale · Q · Kᵀ, then options and masks; dP = dO · Vᵀ;
//! 2. P = exp(score − lse), dS = P ∘ (Z ∘ dP − delta), and P becomes P ∘ Z;
//! 3. dV += Pᵀ · dO; dbias += dS; dS ∘= the softcap's derivative; dK += scale · dSᵀ · Q;
//! 4. in turn, dQ += scale · dS · K.
//!
//! dK and dV stay in the block's scratch and are rounded once. dQ of a query tile is a sum over
//! blocks, held in f32 from its first block to its last, which rounds it. Blocks are numbered item
//! by item, KV head by KV head and in ascending order of keys, and take turns in that order; a
//! block that started later walks the same query tiles one step behind, so turns are rarely waited
//! for. A bias gradient that is summed over heads or items is ordered the same way. So every sum
//! has one order, whatever the number of threads.
//!
//! Scratch of a worker: K, Kᵀ, V, Vᵀ, dK and dV tiles, Q and dO unless they are f32 and read where
//! they lie, and up to four score tiles (scores, dP, dropout factors, derivatives).

use std::ops::Range;

use ferroflash_core::axes::Dtype;
use ferroflash_core::visibility::TileClass;

use super::CpuTile;
use super::blocks::{Abandoned, Numbering, for_each_block};
use super::delta::{self, Results};
use super::ordered::{BiasGradient, Block, QueryGradient, QueryTile};
use super::pack::{self, narrow, pack_rows, transpose};
use super::product::{Sizes, Target, View, product};
use super::scores::{Head, Lanes, Tile, for_each_part};
use super::softmax::{self, finite_lse};
use super::vector::padded;
use crate::cpu::problem::{GradientRows, Item, Problem};
use crate::cpu::rows::RowsMut;
use crate::element::Element;

/// What every block of a call shares.
struct Call<'p, 'a, 'g, T> {
    problem: &'p Problem<'a, T>,
    results: &'p Results<'a, T>,
    /// At [`Problem::lse_index`].
    delta: Vec<f32>,
    tile: CpuTile,
    dq: Option<QueryGradient<'g, T>>,
    dk: Option<RowsMut<'g, T>>,
    dv: Option<RowsMut<'g, T>>,
    dbias: Option<BiasGradient<'g>>,
    abandoned: Abandoned,
}

/// A part of a tile of scores, its queries and dO, and where its lane 0 is among the `lanes` of the
/// block.
struct Part<'s> {
    tile: Tile,
    class: TileClass,
    q: View<'s>,
    d_o: View<'s>,
    lane: usize,
    lanes: usize,
}

/// A worker's query and dO tiles, where they have to be widened.
struct Widened {
    q: Vec<f32>,
    d_o: Vec<f32>,
}

/// A worker's tiles.
struct Scratch {
    k: Vec<f32>,
    k_lines: Vec<f32>,
    v: Vec<f32>,
    v_lines: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    scores: Vec<f32>,
    d_scores: Vec<f32>,
    keep: Vec<f32>,
    derivative: Vec<f32>,
}

impl Scratch {
    fn new<T>(problem: &Problem<'_, T>, tile: CpuTile) -> Self {
        let (head_dim, value_dim) = (problem.shape().head_dim, problem.shape().value_dim);
        let (rows, keys) = (tile.q_rows, tile.kv_columns);
        let lanes = padded(keys);
        let zeros = |values| vec![0.0; values];
        let optional = |is_used: bool| zeros(if is_used { rows * lanes } else { 0 });
        Self {
            k: zeros(keys * head_dim),
            k_lines: zeros(head_dim * lanes),
            v: zeros(keys * value_dim),
            v_lines: zeros(value_dim * lanes),
            dk: zeros(keys * head_dim),
            dv: zeros(keys * value_dim),
            scores: zeros(rows * lanes),
            d_scores: zeros(rows * lanes),
            keep: optional(problem.dropout.is_some()),
            derivative: optional(problem.attention.softcap.is_some()),
        }
    }
}

impl Widened {
    fn new<T: Element>(problem: &Problem<'_, T>, tile: CpuTile) -> Self {
        let rows = if T::DTYPE == Dtype::F32 { 0 } else { tile.q_rows };
        let tile = |channels| vec![0.0; rows * channels];
        Self { q: tile(problem.shape().head_dim), d_o: tile(problem.shape().value_dim) }
    }
}

/// Runs every block of the call.
pub(super) fn run<T: Element>(
    problem: &Problem<'_, T>,
    results: &Results<'_, T>,
    gradients: GradientRows<'_, T>,
    tile: CpuTile,
) {
    let tile = tile.clipped(problem.shape());
    let GradientRows { mut dq, mut dk, mut dv, dbias, dsink } = gradients;
    if problem.leaves_rows_out() || problem.shape().kv_len == 0 {
        for rows in [&mut dq, &mut dk, &mut dv].into_iter().flatten() {
            rows.fill(T::default());
        }
    }
    let call = Call {
        problem,
        results,
        delta: delta::of_all_rows(problem, results, dsink),
        tile,
        dq: dq.map(|rows| QueryGradient::new(rows, problem, tile)),
        dk,
        dv,
        dbias: dbias
            .zip(problem.attention.bias)
            .map(|(rows, axes)| BiasGradient::new(rows, axes, problem, tile)),
        abandoned: Abandoned::default(),
    };
    if call.dq.is_none() && call.dk.is_none() && call.dv.is_none() && call.dbias.is_none() {
        return;
    }
    let kv_tiles = |item: &Item| item.kv_len().div_ceil(tile.kv_columns);
    let kv_heads = problem.shape().kv_heads;
    let numbering = Numbering::new(problem.items.iter().map(|item| kv_tiles(item) * kv_heads));
    for_each_block(
        numbering.total(),
        || (Scratch::new(problem, tile), Widened::new(problem, tile)),
        |number, (scratch, widened)| {
            let _guard = call.abandoned.on_panic();
            let (item_number, within) = numbering.locate(number);
            let item = &problem.items[item_number];
            let (kv_head, kv_tile) = (within / kv_tiles(item), within % kv_tiles(item));
            call.block(&Block { item, item_number, kv_head, kv_tile }, scratch, widened);
        },
    );
}

impl<T: Element> Call<'_, '_, '_, T> {
    /// One K/V tile, from its keys to its gradients.
    fn block(&self, block: &Block<'_>, scratch: &mut Scratch, widened: &mut Widened) {
        let Self { problem, tile, .. } = self;
        let &Block { item, kv_head, .. } = block;
        let shape = problem.shape();
        let (head_dim, value_dim) = (shape.head_dim, shape.value_dim);
        let owned = block.kv_tile * tile.kv_columns;
        let owned = owned as u32..(owned + tile.kv_columns).min(item.kv_len()) as u32;
        // Keys that no row sees, and rows that see no key, may hold anything: they are not read.
        let keys = common(&owned, &item.visibility.keys_of_any(&(0..item.visibility.q_len)));
        let seeing = item.visibility.rows_of_any(&(0..item.visibility.kv_len));
        let (first, count) = (keys.start as usize, keys.len());
        let lanes = padded(count);
        let index = |key| item.kv_index(first + key, kv_head);
        pack_rows(count, head_dim, |key| problem.k.row(index(key)), &mut scratch.k);
        pack_rows(count, value_dim, |key| problem.v.row(index(key)), &mut scratch.v);
        transpose(&scratch.k, count, head_dim, &mut scratch.k_lines, lanes);
        transpose(&scratch.v, count, value_dim, &mut scratch.v_lines, lanes);
        scratch.dk.fill(0.0);
        scratch.dv.fill(0.0);

        let group = kv_head * shape.group()..(kv_head + 1) * shape.group();
        let q_tiles = item.q_len().div_ceil(tile.q_rows);
        for (q_head, number) in group.flat_map(|head| (0..q_tiles).map(move |tile| (head, tile))) {
            let first_row = number * tile.q_rows;
            let rows = tile.q_rows.min(item.q_len() - first_row);
            let query_tile = QueryTile { q_head, number, first: first_row, count: rows };
            let rows = common(&(first_row as u32..(first_row + rows) as u32), &seeing);
            let whole = Tile { rows, keys: keys.clone(), lanes: Lanes::Keys };
            for_each_part(&item.visibility, &whole, |tile, class| {
                let lane = tile.keys.start as usize - first;
                let row = |row| item.q_index(tile.rows.start as usize + row, q_head);
                let (q, d_o) = (|at| problem.q.row(row(at)), |at| self.results.d_o.row(row(at)));
                // SAFETY: rows of an item and head are rows of a tensor, one stride apart.
                let (q, d_o) = unsafe {
                    (
                        pack::tile(tile.rows.len(), head_dim, q, &mut widened.q),
                        pack::tile(tile.rows.len(), value_dim, d_o, &mut widened.d_o),
                    )
                };
                let part = Part { tile, class, q, d_o, lane, lanes };
                self.gradients_of_scores(Head { problem, item, q_head }, &part, scratch);
                self.add_products(block, &query_tile, &part, scratch);
            });
            if let Some(dq) = &self.dq {
                dq.pass(block, &query_tile, &self.abandoned);
            }
        }
        if let Some(dbias) = &self.dbias {
            dbias.pass(block, &self.abandoned);
        }
        let key_gradients = [(&self.dk, &scratch.dk, head_dim), (&self.dv, &scratch.dv, value_dim)];
        for (gradient, sums, channels) in key_gradients {
            let Some(gradient) = gradient else { continue };
            for key in owned.clone() {
                // SAFETY: keys of a KV head belong to one block.
                let row = unsafe { gradient.row_unshared(item.kv_index(key as usize, kv_head)) };
                match key.checked_sub(keys.start).filter(|_| key < keys.end) {
                    Some(key) => narrow(&sums[key as usize * channels..][..channels], 1.0, row),
                    None => row.fill(T::default()),
                }
            }
        }
    }

    /// Steps 1 and 2: P ∘ Z in `scores` and dS in `d_scores`.
    fn gradients_of_scores(&self, head: Head<'_, '_, T>, part: &Part<'_>, scratch: &mut Scratch) {
        let Head { problem, item, q_head } = head;
        let (head_dim, value_dim) = (problem.shape().head_dim, problem.shape().value_dim);
        let Part { tile, lane, lanes, .. } = part;
        let (stride, rows, values) = (tile.stride(), tile.rows.len(), tile.values());
        let scores = &mut scratch.scores[..values];
        let d_scores = &mut scratch.d_scores[..values];
        product(
            Sizes { rows: stride, columns: rows, depth: head_dim },
            (scores, stride),
            Target::Replace,
            problem.scale,
            View::columns(&scratch.k_lines[*lane..], *lanes),
            part.q,
        );
        product(
            Sizes { rows: stride, columns: rows, depth: value_dim },
            (d_scores, stride),
            Target::Replace,
            1.0,
            View::columns(&scratch.v_lines[*lane..], *lanes),
            part.d_o,
        );
        let is_capped = problem.attention.softcap.is_some();
        let derivative = &mut scratch.derivative[..if is_capped { values } else { 0 }];
        head.finish_scores(tile, part.class, scores, derivative);

        let start = problem.lse_index(item, q_head, tile.rows.start as usize);
        let states = self.results.lse[start..].iter().zip(&self.delta[start..]);
        let lines = scores.chunks_exact_mut(stride).zip(d_scores.chunks_exact_mut(stride));
        if let Some(mask) = &problem.dropout {
            let keep = &mut scratch.keep[..values];
            head.dropout_factors(tile, mask, keep);
            for (((scores, d_scores), (&lse, &delta)), keep) in
                lines.zip(states).zip(keep.chunks_exact(stride))
            {
                let lse = finite_lse(lse);
                softmax::gradients_of_dropped_row(scores, d_scores, keep, lse, delta);
            }
        } else {
            for ((scores, d_scores), (&lse, &delta)) in lines.zip(states) {
                softmax::gradients_of_row(scores, d_scores, finite_lse(lse), delta);
            }
        }
    }

    /// Steps 3 and 4.
    fn add_products(
        &self,
        block: &Block<'_>,
        query_tile: &QueryTile,
        part: &Part<'_>,
        scratch: &mut Scratch,
    ) {
        let shape = self.problem.shape();
        let (head_dim, value_dim, scale) = (shape.head_dim, shape.value_dim, self.problem.scale);
        let Part { tile, lane, .. } = part;
        let (rows, keys, stride) = (tile.rows.len(), tile.keys.len(), tile.stride());
        let d_scores = &mut scratch.d_scores[..tile.values()];
        if self.dv.is_some() {
            product(
                Sizes { rows: value_dim, columns: keys, depth: rows },
                (&mut scratch.dv[lane * value_dim..], value_dim),
                Target::Add,
                1.0,
                part.d_o,
                View::rows(&scratch.scores, stride),
            );
        }
        if let Some(dbias) = &self.dbias {
            dbias.add(block, query_tile.q_head, tile, d_scores, &self.abandoned);
        }
        if self.problem.attention.softcap.is_some() {
            softmax::multiply(d_scores, &scratch.derivative[..tile.values()]);
        }
        if self.dk.is_some() {
            product(
                Sizes { rows: head_dim, columns: keys, depth: rows },
                (&mut scratch.dk[lane * head_dim..], head_dim),
                Target::Add,
                scale,
                part.q,
                View::rows(d_scores, stride),
            );
        }
        if let Some(dq) = &self.dq {
            let first = (tile.rows.start as usize - query_tile.first) * head_dim;
            dq.add(block, query_tile, &self.abandoned, |sums| {
                product(
                    Sizes { rows: head_dim, columns: rows, depth: keys },
                    (&mut sums[first..], head_dim),
                    Target::Add,
                    scale,
                    View::columns(&scratch.k[lane * head_dim..], head_dim),
                    View::columns(d_scores, stride),
                );
            });
        }
    }
}

/// `a ∩ b`; empty at the start of `a` if they are apart.
fn common(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    if start < end { start..end } else { a.start..a.start }
}
