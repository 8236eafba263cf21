//! The tiled forward pass: one block owns a tile of query rows (M4.4 §0x02, §0x03).
//!
//! A block holds its queries transposed, one line a channel, and walks the K/V tiles that its rows
//! may see in ascending order. A tile's scores are computed transposed too, one line a key and one
//! lane a query row, so that row maxima and row sums are plain vectors of lanes and never summed
//! across a register. For each tile:
//!
//! 1. scores = scale · K · Qᵀ, then options and masks;
//! 2. the row maximum rises; row sum and numerator are rescaled by `exp(old - new)`;
//! 3. scores become `exp(score - row_max)`, added to the row sum;
//! 4. dropout, if any, then numerator += P · V.
//!
//! The numerator stays unnormalised until the last tile. Then the sink enters, and each row is
//! divided once and rounded once. Scratch is a few tiles a worker, whatever the sequence length:
//!
//! | | values |
//! | --- | --- |
//! | queries, transposed | D × rows |
//! | K tile, V tile (f32 is read where it lies) | keys × D, keys × Dv |
//! | scores (and dropout factors) | keys × rows |
//! | numerator | rows × Dv |
//! | row maximum, row sum, factor | rows |
//!
//! Every row is owned by one block and every sum is made in the order of keys, so results do not
//! depend on the number of threads. Keys outside the rows' range, and rows past an item's length,
//! are never read.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroflash_core::axes::Dtype;
use ferroflash_core::row_state::RowState;
use ferroflash_core::schedule::ForwardSchedule;
use ferroflash_core::visibility::TileClass;

use super::blocks::{Numbering, for_each_block, lock};
use super::pack::{self, narrow, pack_rows, transpose};
use super::product::{Sizes, Target, View, product};
use super::scores::{Head, Lanes, Tile, for_each_part};
use super::softmax;
use super::vector::padded;
use super::{CpuTile, Progress};
use crate::cpu::problem::{Item, OutputRows, Problem};
use crate::cpu::rows::RowsMut;
use crate::element::Element;

/// What every block of a call shares.
struct Call<'p, 'o, T> {
    tile: CpuTile,
    o: &'p RowsMut<'o, T>,
    lse: Option<Mutex<&'p mut [f32]>>,
}

/// A worker's tiles.
struct Scratch {
    q_rows: Vec<f32>,
    q_lines: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    scores: Vec<f32>,
    keep: Vec<f32>,
    numerator: Vec<f32>,
    row_max: Vec<f32>,
    old_max: Vec<f32>,
    row_sum: Vec<f32>,
    factor: Vec<f32>,
}

impl Scratch {
    fn new<T: Element>(problem: &Problem<'_, T>, tile: CpuTile) -> Self {
        let shape = problem.shape();
        let (rows, keys) = (tile.q_rows, tile.kv_columns);
        let lanes = padded(rows);
        let zeros = |values| vec![0.0; values];
        let widened = |values| zeros(if T::DTYPE == Dtype::F32 { 0 } else { values });
        Self {
            q_rows: zeros(rows * shape.head_dim),
            q_lines: zeros(shape.head_dim * lanes),
            k: widened(keys * shape.head_dim),
            v: widened(keys * shape.value_dim),
            scores: zeros(keys * lanes),
            keep: zeros(if problem.dropout.is_some() { keys * lanes } else { 0 }),
            numerator: zeros(rows * shape.value_dim),
            row_max: zeros(lanes),
            old_max: zeros(lanes),
            row_sum: zeros(lanes),
            factor: zeros(lanes),
        }
    }
}

/// Runs every block of the call.
pub(super) fn run<T: Element>(
    problem: &Problem<'_, T>,
    output: OutputRows<'_, T>,
    tile: CpuTile,
    progress: Progress<'_>,
) {
    let tile = tile.clipped(problem.shape());
    let OutputRows { mut o, mut lse } = output;
    if problem.leaves_rows_out() {
        o.fill(T::default());
        lse.iter_mut().for_each(|lse| lse.fill(f32::NEG_INFINITY));
    }
    let schedule = |item: &Item| ForwardSchedule {
        q_blocks: item.q_len().div_ceil(tile.q_rows) as u32,
        batch_heads: problem.shape().q_heads as u32,
        section: 1,
        longest_first: u32::from(problem.attention.mask.right.is_some()),
    };
    let numbering =
        Numbering::new(problem.items.iter().map(|item| schedule(item).blocks() as usize));
    let call = Call { tile, o: &o, lse: lse.map(Mutex::new) };
    let (done, total) = (AtomicUsize::new(0), numbering.total());
    for_each_block(
        total,
        || Scratch::new(problem, tile),
        |block, scratch| {
            let (item, within) = numbering.locate(block);
            let item = &problem.items[item];
            let work = schedule(item).work(within as u32);
            let head = Head { problem, item, q_head: work.batch_head as usize };
            call.block(head, work.q_block as usize, scratch);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, total);
        },
    );
}

impl<T: Element> Call<'_, '_, T> {
    /// Query block `q_block` of a head, from its queries to its output.
    fn block(&self, head: Head<'_, '_, T>, q_block: usize, scratch: &mut Scratch) {
        let Head { problem, item, q_head } = head;
        let shape = problem.shape();
        let (head_dim, value_dim) = (shape.head_dim, shape.value_dim);
        let first = q_block * self.tile.q_rows;
        let count = self.tile.q_rows.min(item.q_len() - first);
        let lanes = padded(count);
        let rows = first as u32..(first + count) as u32;

        let q_row = |row| problem.q.row(item.q_index(first + row, q_head));
        pack_rows(count, head_dim, q_row, &mut scratch.q_rows);
        transpose(&scratch.q_rows, count, head_dim, &mut scratch.q_lines, lanes);
        scratch.numerator[..count * value_dim].fill(0.0);
        scratch.row_max[..lanes].fill(f32::NEG_INFINITY);
        scratch.row_sum[..lanes].fill(0.0);

        let seen = item.visibility.keys_of_any(&rows);
        for start in seen.clone().step_by(self.tile.kv_columns) {
            let keys = start..seen.end.min(start + self.tile.kv_columns as u32);
            let tile = Tile { rows: rows.clone(), keys, lanes: Lanes::Rows };
            for_each_part(&item.visibility, &tile, |part, class| {
                let lane = (part.rows.start - rows.start) as usize;
                accumulate(head, &part, class, (lane, lanes), scratch);
            });
        }
        self.finish(head, first, count, scratch);
    }

    /// The sink, the normalisation, and the rows' output.
    fn finish(&self, head: Head<'_, '_, T>, first: usize, count: usize, scratch: &mut Scratch) {
        let Head { problem, item, q_head } = head;
        let value_dim = problem.shape().value_dim;
        let sink = problem.sink(q_head);
        for row in 0..count {
            let mut state =
                RowState { row_max: scratch.row_max[row], row_sum: scratch.row_sum[row] };
            let mut factor = 1.0;
            if let Some(row_max) = sink {
                let (merged, rescale) = state.merge(RowState { row_max, row_sum: 1.0 }, f32::exp);
                (state, factor) = (merged, rescale.left);
            }
            // SAFETY: query rows of a head belong to one block.
            let o = unsafe { self.o.row_unshared(item.q_index(first + row, q_head)) };
            let numerator = &scratch.numerator[row * value_dim..][..value_dim];
            narrow(numerator, factor * state.normalizer(), o);
            scratch.factor[row] = state.lse(f32::ln);
        }
        if let Some(lse) = &self.lse {
            let start = problem.lse_index(item, q_head, first);
            lock(lse)[start..start + count].copy_from_slice(&scratch.factor[..count]);
        }
    }
}

/// Adds the keys of one tile to the state of its rows. The tile's lane 0 is lane `lane` of the
/// block's `lanes`.
fn accumulate<T: Element>(
    head: Head<'_, '_, T>,
    part: &Tile,
    class: TileClass,
    (lane, lanes): (usize, usize),
    scratch: &mut Scratch,
) {
    let problem = head.problem;
    let (head_dim, value_dim) = (problem.shape().head_dim, problem.shape().value_dim);
    let (stride, rows, keys) = (part.stride(), part.rows.len(), part.keys.len());
    let owned = lane..lane + stride;
    let kv_head = problem.shape().kv_head(head.q_head);
    let kv_index = |key| head.item.kv_index(part.keys.start as usize + key, kv_head);
    // SAFETY: keys of an item and head are rows of a tensor, one stride apart.
    let (k, v) = unsafe {
        (
            pack::tile(keys, head_dim, |key| problem.k.row(kv_index(key)), &mut scratch.k),
            pack::tile(keys, value_dim, |key| problem.v.row(kv_index(key)), &mut scratch.v),
        )
    };
    let scores = &mut scratch.scores[..part.values()];
    product(
        Sizes { rows: stride, columns: keys, depth: head_dim },
        (scores, stride),
        Target::Replace,
        problem.scale,
        View::columns(&scratch.q_lines[lane..], lanes),
        k,
    );
    head.finish_scores(part, class, scores, &mut []);

    let row_max = &mut scratch.row_max[owned.clone()];
    let old_max = &mut scratch.old_max[..stride];
    let row_sum = &mut scratch.row_sum[owned];
    let factor = &mut scratch.factor[..stride];
    old_max.copy_from_slice(row_max);
    softmax::raise_row_max(scores, row_max);
    softmax::rescale_sums(old_max, row_max, factor, row_sum);
    softmax::exponentiate(scores, row_max, row_sum);
    if let Some(mask) = &problem.dropout {
        let keep = &mut scratch.keep[..part.values()];
        head.dropout_factors(part, mask, keep);
        softmax::multiply(scores, keep);
    }

    let numerator = &mut scratch.numerator[lane * value_dim..][..rows * value_dim];
    softmax::scale_rows(numerator, value_dim, factor);
    product(
        Sizes { rows: value_dim, columns: rows, depth: keys },
        (numerator, value_dim),
        Target::Add,
        1.0,
        v,
        View::rows(scores, stride),
    );
}
