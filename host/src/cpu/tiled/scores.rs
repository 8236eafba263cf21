//! A tile of scores between its two products: options and masks, in either orientation.

use std::ops::{Deref, Range};

use ferroflash_core::dropout::{self, DropoutMask};
use ferroflash_core::visibility::{TileClass, Visibility};

use super::softmax;
use super::vector::{LANES, padded};
use crate::cpu::problem::{Item, Problem};

/// Which side of a score tile is contiguous: the side that its block owns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lanes {
    /// Query rows (forward): a line is a key.
    Rows,
    /// Keys (backward): a line is a query row.
    Keys,
}

/// The cells `rows × keys` of an item, held as lines of [`Self::stride`] lanes. Lanes past the
/// last row or key are padding: finite or not, nothing reads them.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub(super) rows: Range<u32>,
    pub(super) keys: Range<u32>,
    pub(super) lanes: Lanes,
}

impl Tile {
    /// What each line stands for.
    pub(super) fn lines(&self) -> Range<u32> {
        match self.lanes {
            Lanes::Rows => self.keys.clone(),
            Lanes::Keys => self.rows.clone(),
        }
    }

    /// What each lane stands for.
    pub(super) fn columns(&self) -> Range<u32> {
        match self.lanes {
            Lanes::Rows => self.rows.clone(),
            Lanes::Keys => self.keys.clone(),
        }
    }

    /// Values from one line to the next.
    pub(super) fn stride(&self) -> usize {
        padded(self.columns().len())
    }

    /// Values of the tile in scratch.
    pub(super) fn values(&self) -> usize {
        self.lines().len() * self.stride()
    }

    fn class(&self, visibility: &Visibility) -> TileClass {
        visibility.class(&self.rows, &self.keys)
    }
}

/// Keys or rows of a strip of a partial tile: the narrower, the less is computed in vain, the wider
/// the better a product runs.
const STRIP: u32 = 64;

/// Hands out what is to be computed of `tile`: all of it if it is full, and of a partial tile
/// strips of lines, each with only the lanes that see something of it.
pub(super) fn for_each_part(
    visibility: &Visibility,
    tile: &Tile,
    mut part: impl FnMut(Tile, TileClass),
) {
    if tile.rows.is_empty() || tile.keys.is_empty() {
        return;
    }
    match tile.class(visibility) {
        TileClass::Skipped => {}
        TileClass::Full => part(tile.clone(), TileClass::Full),
        TileClass::Partial => {
            let lines = tile.lines();
            for start in lines.clone().step_by(STRIP as usize) {
                let strip = start..lines.end.min(start + STRIP);
                let part_tile = match tile.lanes {
                    Lanes::Rows => {
                        let seen = visibility.rows_of_any(&strip);
                        Tile { rows: clipped(&tile.rows, &seen), keys: strip, ..*tile }
                    }
                    Lanes::Keys => {
                        let seen = visibility.keys_of_any(&strip);
                        Tile { keys: clipped(&tile.keys, &seen), rows: strip, ..*tile }
                    }
                };
                let class = part_tile.class(visibility);
                if !part_tile.columns().is_empty() && class != TileClass::Skipped {
                    part(part_tile, class);
                }
            }
        }
    }
}

/// `whole ∩ seen`, widened to whole groups of lanes of `whole`, so that a part's padding is never
/// another row or key of its block.
fn clipped(whole: &Range<u32>, seen: &Range<u32>) -> Range<u32> {
    let (start, end) = (seen.start.max(whole.start), seen.end.min(whole.end));
    if start >= end {
        return whole.start..whole.start;
    }
    let groups = |lanes: u32| whole.start + lanes * LANES as u32;
    let first = (start - whole.start) / LANES as u32;
    let last = (end - whole.start).div_ceil(LANES as u32);
    groups(first)..groups(last).min(whole.end)
}

/// One query head of an item: where its options are read.
#[derive(Clone, Copy)]
pub(super) struct Head<'p, 'a, T> {
    pub(super) problem: &'p Problem<'a, T>,
    pub(super) item: &'p Item,
    pub(super) q_head: usize,
}

impl<T> Head<'_, '_, T> {
    /// Turns scaled products into final scores: softcap, ALiBi, bias, masks, in this order.
    /// `derivative`, where it is not empty, gets the softcap's derivative of each score.
    pub(super) fn finish_scores(
        &self,
        tile: &Tile,
        class: TileClass,
        scores: &mut [f32],
        derivative: &mut [f32],
    ) {
        let Self { problem, item, q_head } = *self;
        match problem.attention.softcap {
            Some(cap) if derivative.is_empty() => softmax::softcap(scores, cap),
            Some(cap) => softmax::softcap_with_derivative(scores, cap, derivative),
            None => {}
        }
        if let Some(slope) = problem.alibi_slope(item, q_head) {
            subtract_alibi(tile, &item.visibility, slope, scores);
        }
        let keys = tile.keys.start as usize..tile.keys.end as usize;
        if problem.attention.bias.is_some() {
            with_row_values(
                tile,
                scores,
                |score, bias: f32| *score += bias,
                |row| problem.bias_row(item, q_head, row).map(|bias| &bias[keys.clone()]),
            );
        }
        if problem.attention.boolean_mask.is_some() {
            let hide = |score: &mut f32, seen: u8| {
                *score = if seen == 0 { f32::NEG_INFINITY } else { *score };
            };
            with_row_values(tile, scores, hide, |row| {
                problem.mask_row(item, q_head, row, keys.clone())
            });
        }
        if class == TileClass::Partial {
            hide_unseen(tile, &item.visibility, scores);
        }
    }

    /// Factors Z of dropout for every cell: 0, or `1 / (1 - p̂)`.
    pub(super) fn dropout_factors(&self, tile: &Tile, mask: &DropoutMask, factors: &mut [f32]) {
        let batch_head = self.problem.batch_head(self.item, self.q_head);
        let stride = tile.stride();
        // Rows and keys of one call: 8 apart in a block of 16 rows and 32 keys.
        let groups = |range: &Range<u32>, block: u32| {
            let (first, end) = (range.start / block, range.end.div_ceil(block));
            (first..end).flat_map(move |start| (0..8).map(move |within| start * block + within))
        };
        for key in groups(&tile.keys, dropout::BLOCK_KEYS) {
            for row in groups(&tile.rows, dropout::BLOCK_ROWS) {
                let (row_group, key_group) = (dropout::row_group(row), dropout::column_group(key));
                let words = mask.words(batch_head, row_group, key_group);
                for (cell_row, cell_key) in [0, 8]
                    .into_iter()
                    .flat_map(|down| [0, 8, 16, 24].map(|along| (row + down, key + along)))
                    .filter(|(row, key)| tile.rows.contains(row) && tile.keys.contains(key))
                {
                    let bits = words[dropout::word(cell_key)] >> (16 * dropout::half(cell_row));
                    let (row, key) = (cell_row - tile.rows.start, cell_key - tile.keys.start);
                    let (line, lane) = match tile.lanes {
                        Lanes::Rows => (key, row),
                        Lanes::Keys => (row, key),
                    };
                    factors[line as usize * stride + lane as usize] =
                        if mask.keeps_bits(bits) { mask.keep_scale } else { 0.0 };
                }
            }
        }
    }
}

/// `score -= slope · |row + Sk − Sq − key|`.
fn subtract_alibi(tile: &Tile, visibility: &Visibility, slope: f32, scores: &mut [f32]) {
    let lengths = i64::from(visibility.kv_len) - i64::from(visibility.q_len);
    let columns = tile.columns();
    for (line, scores) in tile.lines().zip(scores.chunks_exact_mut(tile.stride())) {
        let meets = match tile.lanes {
            Lanes::Rows => i64::from(line) - lengths,
            Lanes::Keys => i64::from(line) + lengths,
        };
        // Lengths are at most 2²⁹, so every difference fits.
        let first = (i64::from(columns.start) - meets) as i32;
        for (lane, score) in scores[..columns.len()].iter_mut().enumerate() {
            *score -= slope * (first + lane as i32).abs() as f32;
        }
    }
}

/// Applies to each score the value that its row's tensor has at its key.
fn with_row_values<V: Copy, R: Deref<Target = [V]>>(
    tile: &Tile,
    scores: &mut [f32],
    apply: impl Fn(&mut f32, V),
    values: impl Fn(usize) -> Option<R>,
) {
    let stride = tile.stride();
    match tile.lanes {
        Lanes::Keys => {
            for (row, scores) in tile.rows.clone().zip(scores.chunks_exact_mut(stride)) {
                let Some(values) = values(row as usize) else { return };
                scores.iter_mut().zip(&*values).for_each(|(score, &value)| apply(score, value));
            }
        }
        // A group of rows at a time, so that what is written stays in the cache.
        Lanes::Rows => {
            for (group, first) in tile.rows.clone().step_by(LANES).enumerate() {
                let end = tile.rows.end.min(first + LANES as u32);
                let Some(rows) =
                    (first..end).map(|row| values(row as usize)).collect::<Option<Vec<_>>>()
                else {
                    return;
                };
                for (key, scores) in scores.chunks_exact_mut(stride).enumerate() {
                    let scores = &mut scores[group * LANES..];
                    scores.iter_mut().zip(&rows).for_each(|(score, row)| apply(score, row[key]));
                }
            }
        }
    }
}

/// Hides the cells that the window does not show.
fn hide_unseen(tile: &Tile, visibility: &Visibility, scores: &mut [f32]) {
    let columns = tile.columns();
    for (line, scores) in tile.lines().zip(scores.chunks_exact_mut(tile.stride())) {
        let seen = match tile.lanes {
            Lanes::Rows => visibility.rows_of_any(&(line..line + 1)),
            Lanes::Keys => visibility.keys_of_any(&(line..line + 1)),
        };
        let start = seen.start.clamp(columns.start, columns.end) - columns.start;
        let end = seen.end.clamp(columns.start, columns.end) - columns.start;
        scores[..start as usize].fill(f32::NEG_INFINITY);
        scores[(end.max(start)) as usize..columns.len()].fill(f32::NEG_INFINITY);
    }
}
