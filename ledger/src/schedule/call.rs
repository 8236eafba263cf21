//! One attention call, and the tiles it is cut into.

use std::ops::Range;

use ferroflash_core::row_state::RowState;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::Visibility;

use super::gradient::Cells;
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile, add_scaled};
use super::trace::{Tensor, Trace, Visit};
use crate::error::{Error, Result};

/// The multiplier of a probability by (query head of all items, row, key): 0 where it is dropped,
/// else `1 / (1 − p)`.
pub type Multiplier<'a, F> = &'a (dyn Fn(usize, usize, usize) -> F + 'a);

/// Query rows and keys of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Query rows, `B_r`.
    pub q_block: usize,
    /// Keys, `B_c`.
    pub kv_block: usize,
}

/// A dense attention call. Tensors are contiguous, `[batch, head, row, channel]`.
#[derive(Clone, Copy)]
pub struct Call<'a, F> {
    pub(crate) shape: Shape,
    pub(crate) visible: Visibility,
    pub(crate) scale: F,
    pub(crate) q: &'a [F],
    pub(crate) k: &'a [F],
    pub(crate) v: &'a [F],
    pub(crate) dropout: Option<Multiplier<'a, F>>,
}

impl<'a, F: Real> Call<'a, F> {
    /// A call; `visible` says which keys a row of any item and head may see.
    ///
    /// # Errors
    /// A size of 0, query heads that KV heads do not divide, a slice or `visible` of another size
    /// than the shape says, an output beyond what can be counted; by name.
    pub fn new(
        shape: Shape,
        visible: Visibility,
        scale: F,
        q: &'a [F],
        k: &'a [F],
        v: &'a [F],
    ) -> Result<Self> {
        for (field, size) in [
            ("batch", shape.batch),
            ("q_heads", shape.q_heads),
            ("kv_heads", shape.kv_heads),
            ("q_len", shape.q_len),
            ("kv_len", shape.kv_len),
            ("head_dim", shape.head_dim),
            ("value_dim", shape.value_dim),
        ] {
            if size == 0 {
                return Err(Error::Zero { field });
            }
        }
        if !shape.q_heads.is_multiple_of(shape.kv_heads) {
            let needs = format!("a multiple of kv_heads = {}", shape.kv_heads);
            return Err(Error::field("q_heads", shape.q_heads, needs));
        }
        if (visible.q_len as usize, visible.kv_len as usize) != (shape.q_len, shape.kv_len) {
            let had = format!("{} × {}", visible.q_len, visible.kv_len);
            let needs = format!("{} × {}", shape.q_len, shape.kv_len);
            return Err(Error::field("visible", had, needs));
        }
        for (field, slice, dims) in
            [("q", q, shape.q_dims()), ("k", k, shape.k_dims()), ("v", v, shape.v_dims())]
        {
            expect_len(field, slice.len(), &dims)?;
        }
        values("o", &shape.o_dims())?;
        Ok(Self { shape, visible, scale, q, k, v, dropout: None })
    }

    /// Multiplies every probability, after it was normalised. The same call serves the backward,
    /// which therefore replays the same multipliers.
    pub fn with_dropout(mut self, dropout: Multiplier<'a, F>) -> Self {
        self.dropout = Some(dropout);
        self
    }

    pub(crate) fn check(&self, blocks: Blocks) -> Result<()> {
        for (field, size) in [("q_block", blocks.q_block), ("kv_block", blocks.kv_block)] {
            if size == 0 {
                return Err(Error::Zero { field });
            }
        }
        Ok(())
    }

    /// Query heads of all items.
    pub(crate) fn heads(&self) -> usize {
        self.shape.batch * self.shape.q_heads
    }

    /// KV heads of all items.
    pub(crate) fn kv_heads(&self) -> usize {
        self.shape.batch * self.shape.kv_heads
    }

    /// The KV head, of all items, that a query head of all items reads.
    pub(crate) fn kv_head(&self, head: usize) -> usize {
        let (item, q_head) = (head / self.shape.q_heads, head % self.shape.q_heads);
        item * self.shape.kv_heads + self.shape.kv_head(q_head)
    }

    pub(crate) fn q_tiles(&self, blocks: Blocks) -> Vec<Range<usize>> {
        tiles(self.shape.q_len, blocks.q_block)
    }

    pub(crate) fn kv_tiles(&self, blocks: Blocks) -> Vec<Range<usize>> {
        tiles(self.shape.kv_len, blocks.kv_block)
    }

    /// q, k and v in slow memory.
    pub(crate) fn inputs(&self) -> [Slow<F>; 3] {
        let s = &self.shape;
        [
            Slow::holding(Tensor::Q, s.q_len, s.head_dim, self.q),
            Slow::holding(Tensor::K, s.kv_len, s.head_dim, self.k),
            Slow::holding(Tensor::V, s.kv_len, s.value_dim, self.v),
        ]
    }

    /// Whether a row may see a key.
    pub(crate) fn sees(&self, row: usize, key: usize) -> bool {
        self.visible.sees(row as u32, key as u32)
    }

    /// Cells of a tile that its rows may see.
    pub(crate) fn visible_cells(&self, rows: &Range<usize>, keys: &Range<usize>) -> u64 {
        let of_row = |row: usize| {
            let start = keys.start.max(self.visible.keys_start(row as u32) as usize);
            let end = keys.end.min(self.visible.keys_end(row as u32) as usize);
            end.saturating_sub(start) as u64
        };
        rows.clone().map(of_row).sum()
    }

    /// Dropout's multiplier of a cell.
    pub(crate) fn multiplier(&self, head: usize, row: usize, key: usize) -> F {
        self.dropout.map_or(F::ONE, |dropout| dropout(head, row, key))
    }

    /// Notes a visit of the tile `rows × keys`.
    pub(crate) fn visit(
        &self,
        trace: &mut Trace,
        program: u64,
        (q_tile, rows): (usize, &Range<usize>),
        (kv_tile, keys): (usize, &Range<usize>),
    ) {
        trace.visits.push(Visit {
            program,
            q_tile,
            kv_tile,
            rows: rows.len(),
            keys: keys.len(),
            visible: self.visible_cells(rows, keys),
        });
    }

    /// The softmax state of one row in one tile. Its `scores` become what multiplies the values:
    /// `exp(s − m)` times dropout's multiplier, 0 where the key is not visible. The mask acts
    /// before the maximum; no exponential of a row without keys is taken.
    pub(crate) fn row_state(
        &self,
        scores: &mut [F],
        head: usize,
        row: usize,
        keys: &Range<usize>,
    ) -> RowState<F> {
        if !F::HAS_VALUE {
            return F::EMPTY;
        }
        let mut state = F::EMPTY;
        let counts = |key, score: F| self.sees(row, key) && score != F::EMPTY.row_max;
        for (score, key) in scores.iter().zip(keys.clone()) {
            if counts(key, *score) && state.row_max < *score {
                state.row_max = *score;
            }
        }
        for (score, key) in scores.iter_mut().zip(keys.clone()) {
            if counts(key, *score) {
                let weight = (*score - state.row_max).exp();
                state.row_sum = state.row_sum + weight;
                *score = weight * self.multiplier(head, row, key);
            } else {
                *score = F::ZERO;
            }
        }
        state
    }

    /// Merges a tile of `scores` into the states and the unnormalised numerators of its rows.
    pub(crate) fn merge_tile(
        &self,
        trace: &mut Trace,
        cells: Cells<'_>,
        mut scores: Tile<'_, F>,
        values: &Tile<'_, F>,
        states: &mut [RowState<F>],
        numerators: &mut Tile<'_, F>,
    ) {
        for (at, row) in cells.rows.clone().enumerate() {
            let tile = self.row_state(scores.row_mut(at), cells.head, row, cells.keys);
            let (merged, rescale) = F::merge(states[at], tile);
            states[at] = merged;
            trace.merges += 1;
            if F::HAS_VALUE {
                for value in numerators.row_mut(at) {
                    *value = *value * rescale.left;
                }
                for (key, weight) in scores.row(at).iter().enumerate() {
                    add_scaled(numerators.row_mut(at), rescale.right * *weight, values.row(key));
                }
            }
        }
    }
}

/// `0..len` in pieces of `block`; the last may be shorter.
pub(crate) fn tiles(len: usize, block: usize) -> Vec<Range<usize>> {
    (0..len).step_by(block).map(|start| start..len.min(start.saturating_add(block))).collect()
}

/// Values of a tensor.
fn values(field: &'static str, dims: &[usize]) -> Result<usize> {
    let product = dims.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
    product.ok_or(Error::Overflow { field })
}

/// A slice is as long as its tensor.
pub(crate) fn expect_len(field: &'static str, had: usize, dims: &[usize]) -> Result<()> {
    let needs = values(field, dims)?;
    if needs == had {
        return Ok(());
    }
    Err(Error::field(field, format!("{had} values"), format!("{needs} values")))
}

/// A column of row scalars on the chip.
pub(crate) fn column<'c, F: Real>(chip: &'c Chip, values: Vec<F>) -> Tile<'c, F> {
    Tile::new(chip, 1, values)
}
