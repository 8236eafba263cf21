//! Gradients that several blocks of the backward pass add to, each in a fixed order.

use std::sync::Mutex;

use super::CpuTile;
use super::blocks::{Abandoned, Numbering, Turn, lock};
use super::pack::narrow;
use super::scores::Tile;
use crate::attention::Broadcast;
use crate::cpu::problem::{Item, Problem};
use crate::cpu::rows::RowsMut;
use crate::element::Element;

/// A block of the backward pass: a K/V tile of a KV head of an item.
pub(super) struct Block<'p> {
    pub(super) item: &'p Item,
    /// Place of the item among the problem's.
    pub(super) item_number: usize,
    pub(super) kv_head: usize,
    pub(super) kv_tile: usize,
}

/// A tile of query rows of a head: rows `first..first + count` of its item.
pub(super) struct QueryTile {
    pub(super) q_head: usize,
    pub(super) number: usize,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// dQ: the K/V tiles of an item add in ascending order. A query tile's sums are in f32, and exist
/// from its first block to its last.
pub(super) struct QueryGradient<'g, T> {
    rows: RowsMut<'g, T>,
    /// One a query tile, item by item and head by head.
    sums: Vec<Turn<Vec<f32>>>,
    numbering: Numbering,
    tile: CpuTile,
    head_dim: usize,
}

impl<'g, T: Element> QueryGradient<'g, T> {
    pub(super) fn new(rows: RowsMut<'g, T>, problem: &Problem<'_, T>, tile: CpuTile) -> Self {
        let q_heads = problem.shape().q_heads;
        let q_tiles = |item: &Item| item.q_len().div_ceil(tile.q_rows);
        let numbering = Numbering::new(problem.items.iter().map(|item| q_tiles(item) * q_heads));
        let sums = (0..numbering.total()).map(|_| Turn::new(Vec::new())).collect();
        Self { rows, sums, numbering, tile, head_dim: problem.shape().head_dim }
    }

    /// Lets `add` add to the sums of a query tile, `[row, channel]`, in the block's turn.
    pub(super) fn add(
        &self,
        block: &Block<'_>,
        query_tile: &QueryTile,
        abandoned: &Abandoned,
        add: impl FnOnce(&mut [f32]),
    ) {
        self.turn(block, query_tile).act(block.kv_tile, abandoned, |sums| {
            sums.resize(query_tile.count * self.head_dim, 0.0);
            add(sums);
        });
    }

    /// The block has nothing more to add to a query tile; the last one rounds the sums.
    pub(super) fn pass(&self, block: &Block<'_>, query_tile: &QueryTile, abandoned: &Abandoned) {
        let (item, turn) = (block.item, self.turn(block, query_tile));
        if block.kv_tile + 1 == item.kv_len().div_ceil(self.tile.kv_columns) {
            turn.act(block.kv_tile, abandoned, |sums| {
                let mut sums = std::mem::take(sums);
                sums.resize(query_tile.count * self.head_dim, 0.0);
                for (row, sums) in sums.chunks_exact(self.head_dim).enumerate() {
                    let index = item.q_index(query_tile.first + row, query_tile.q_head);
                    // SAFETY: only the last block of a query tile writes its rows.
                    narrow(sums, 1.0, unsafe { self.rows.row_unshared(index) });
                }
            });
        }
        turn.pass(block.kv_tile, abandoned);
    }

    fn turn(&self, block: &Block<'_>, query_tile: &QueryTile) -> &Turn<Vec<f32>> {
        let q_tiles = block.item.q_len().div_ceil(self.tile.q_rows);
        let first = self.numbering.start(block.item_number);
        &self.sums[first + query_tile.q_head * q_tiles + query_tile.number]
    }
}

/// dbias. An element that is summed over heads or items gets its addends in the order of blocks.
pub(super) struct BiasGradient<'g> {
    rows: Mutex<RowsMut<'g, f32>>,
    axes: Broadcast,
    /// One a K/V tile of the longest item; none if every element has one block.
    turns: Vec<Turn<()>>,
    /// For each item and K/V tile, the blocks of earlier items that have the same tile.
    earlier: Vec<Vec<usize>>,
}

impl<'g> BiasGradient<'g> {
    /// Clears `rows`.
    pub(super) fn new<T>(
        mut rows: RowsMut<'g, f32>,
        axes: Broadcast,
        problem: &Problem<'_, T>,
        tile: CpuTile,
    ) -> Self {
        rows.fill(0.0);
        let rows = Mutex::new(rows);
        if !axes.batch && !axes.heads {
            return Self { rows, axes, turns: Vec::new(), earlier: Vec::new() };
        }
        let kv_tiles = |item: &Item| item.kv_len().div_ceil(tile.kv_columns);
        let longest = problem.items.iter().map(kv_tiles).max().unwrap_or(0);
        let mut so_far = vec![0; longest];
        let count = |item| {
            let so_far = &mut so_far[..kv_tiles(item)];
            let earlier = so_far.to_vec();
            so_far.iter_mut().for_each(|blocks| *blocks += problem.shape().kv_heads);
            earlier
        };
        let earlier = problem.items.iter().map(count).collect();
        Self { rows, axes, turns: (0..longest).map(|_| Turn::new(())).collect(), earlier }
    }

    /// Adds the dS of a tile, one line a row, to the rows of a head's bias.
    pub(super) fn add(
        &self,
        block: &Block<'_>,
        q_head: usize,
        tile: &Tile,
        d_scores: &[f32],
        abandoned: &Abandoned,
    ) {
        let place = |is_one: bool, index: usize| if is_one { 0 } else { index };
        let add = || {
            let mut rows = lock(&self.rows);
            for (row, d_scores) in tile.rows.clone().zip(d_scores.chunks_exact(tile.stride())) {
                let index = [
                    place(self.axes.batch, block.item.index),
                    place(self.axes.heads, q_head),
                    place(self.axes.rows, row as usize),
                ];
                let sums = &mut rows.row_mut(index)[tile.keys.start as usize..];
                sums.iter_mut().zip(&d_scores[..tile.keys.len()]).for_each(|(sum, d)| *sum += d);
            }
        };
        match self.turns.get(block.kv_tile) {
            Some(turn) => turn.act(self.turn_of(block), abandoned, |()| add()),
            None => add(),
        }
    }

    /// The block has nothing more to add.
    pub(super) fn pass(&self, block: &Block<'_>, abandoned: &Abandoned) {
        if let Some(turn) = self.turns.get(block.kv_tile) {
            turn.pass(self.turn_of(block), abandoned);
        }
    }

    fn turn_of(&self, block: &Block<'_>) -> usize {
        self.earlier[block.item_number][block.kv_tile] + block.kv_head
    }
}
