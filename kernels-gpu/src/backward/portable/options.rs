//! What options do to a warp's scores and to their gradients.
//!
//! The same as in the forward pass (`forward/portable/options.rs`), on transposed scores: a lane
//! holds keys 8 apart and, of every 8 queries, two neighbours. A hidden cell's score is −∞, and its
//! P and dS are 0 by selection. Every `if` here is on a parameter: all threads of the grid agree;
//! or it selects between two registers. Sixteen queries are weighed at a time, and where a block
//! works is read again for each option: registers are short, shared memory is not.
//!
//! **Order of the gradients.** dS = P∘(Z∘dP − delta), with Z the factors of dropout, is the
//! gradient of the score after its options, and so of a bias; the derivative of the softcap then
//! makes it the gradient of the product. P∘Z is what dV is made of.
//!
//! **A bias' gradient.** Where each cell has an element of its own, the block that owns the key
//! stores it. Elsewhere blocks add to it by atomics, which have no order; of a bias without rows a
//! warp adds the sum of its queries.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::dropout::{BLOCK_KEYS, BLOCK_ROWS, column_group, row_group};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::options::ScoreTensor;
use ferroflash_core::visibility::Visibility;

use super::{Corner, Kernel, Place, Step};
use crate::options::{biased, load_dropout, sides, tanh};
use crate::ptx::math::{exp2, fma};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    add_global_f32, load_global_f32, load_global_f32_if, load_shared_v2_f32, store_global_f32,
};
use crate::ptx::warp::shuffle_xor;

/// The cells of 16 queries and the warp's keys; where they lie is made anew for each option.
#[derive(Clone, Copy)]
pub(super) struct Cells<'a> {
    pub(super) place: &'a Place,
    pub(super) step: Step,
    /// First of the queries, in the step's tile.
    pub(super) query: u32,
    /// First of their tiles of 8, among the warp's.
    pub(super) tile: usize,
}

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    const HALVES: usize = Self::ROW_TILES * 2;
    const OPTIONS_CHECKED: () = {
        assert!(Self::QUERY_TILES == 2 || Self::QUERY_TILES == 4);
        assert!(Self::TILE.kv_columns.is_multiple_of(BLOCK_KEYS) && BLOCK_ROWS == 16);
    };

    /// See [`super::Variant::weigh`].
    #[inline(always)]
    pub(super) unsafe fn weigh_with_options<M: MaskKind>(
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
        states: u32,
        p: &mut T::Scores,
        ds: &mut T::Scores,
    ) {
        const { Self::OPTIONS_CHECKED };
        Self::weigh_16::<M>(params, cells, states, p, ds);
        if Self::QUERY_TILES == 4 {
            let next = Cells { query: cells.query + 16, tile: 2, ..*cells };
            Self::weigh_16::<M>(params, &next, states + 64, p, ds);
        }
    }

    #[inline(always)]
    unsafe fn weigh_16<M: MaskKind>(
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
        states: u32,
        p: &mut T::Scores,
        ds: &mut T::Scores,
    ) {
        let (options, is_general) = (&params.options, matches!(M::CLASS, MaskClass::General));
        // The derivative of the softcap.
        let mut slopes = [0.0; 16];
        if options.product_scale != 0.0 {
            if options.softcap == 0.0 {
                Self::each(cells, |index, _| *p.at_mut(index) *= options.product_scale);
            } else {
                Self::each(cells, |index, at| {
                    let tanh = tanh(p.at(index) * options.softcap_scale);
                    slopes[at] = fma(-tanh, tanh, 1.0);
                    *p.at_mut(index) = options.softcap * tanh;
                });
            }
            if options.alibi.address != 0 {
                Self::subtract_alibi(p, params, cells);
            }
            if is_general && options.bias.address != 0 {
                Self::add_bias(p, params, cells);
            }
        }
        if is_general && options.boolean_mask.address != 0 {
            Self::hide_by_mask(p, params, cells);
        }
        Self::hide_outside(p, params, cells);

        let mut kept = u32::MAX;
        if is_general && options.drops != 0 {
            kept = Self::kept(params, cells);
            Self::each(cells, |index, at| {
                let scaled = ds.at(index) * options.dropout.keep_scale;
                *ds.at_mut(index) = if kept >> at & 1 != 0 { scaled } else { 0.0 };
            });
        }
        Self::differentiate(p, ds, cells, states, params.exponent_scale);
        if is_general && options.drops != 0 {
            Self::each(cells, |index, at| {
                let scaled = p.at(index) * options.dropout.keep_scale;
                *p.at_mut(index) = if kept >> at & 1 != 0 { scaled } else { 0.0 };
            });
        }
        // Warps with the role of dV have no dS.
        let has_ds = Self::PLAN.roles == 1 || cells.place.split == 0;
        if is_general && has_ds && params.bias_gradient.address != 0 {
            Self::add_bias_gradient(ds, params, cells);
        }
        if options.softcap != 0.0 {
            Self::each(cells, |index, at| *ds.at_mut(index) *= slopes[at]);
        }
    }

    /// Each of the lane's cells: its index among the warp's scores, and among these.
    #[inline(always)]
    pub(super) unsafe fn each(cells: &Cells<'_>, mut act: impl FnMut(usize, usize)) {
        let mut at = 0;
        while at < Self::HALVES * 4 {
            act(Self::cell(at / 4, cells.tile * 2 + at % 4), at);
            at += 1;
        }
    }

    /// What the item's rows see.
    #[inline(always)]
    pub(super) unsafe fn visible(
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) -> Visibility {
        Self::home(cells.place.shared).visible(&params.items)
    }

    #[inline(always)]
    pub(super) unsafe fn corner(cells: &Cells<'_>) -> Corner {
        Corner::of::<T, E>(cells.place, cells.step, cells.query)
    }

    /// `score -= slope · |row + Sk − Sq − key|`. Distances to the diagonal are whole numbers; those
    /// that f32 can't hold are rounded to 24 bits.
    #[inline(always)]
    unsafe fn subtract_alibi(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let corner = Self::corner(cells);
        let (home, slopes) = (Self::home(cells.place.shared), &params.options.alibi);
        let offset = slopes.offset(home.item, cells.step.q_head) * 4;
        let slope = load_global_f32(slopes.address.wrapping_add(offset as u64));
        let diagonal = corner.row as i32 + home.kv_len as i32 - home.q_len as i32;
        let first = (diagonal - corner.key as i32) as f32;
        Self::each(cells, |index, at| {
            let step = row_of(at % 4) as i32 - key_of(at / 4) as i32;
            *scores.at_mut(index) = fma(-slope, (first + step as f32).abs(), scores.at(index));
        });
    }

    /// Address of a lane's first cell in a tensor of `size`-byte elements, and the bytes from one
    /// row to the next.
    #[inline(always)]
    unsafe fn first_cell(
        tensor: &ScoreTensor,
        cells: &Cells<'_>,
        corner: &Corner,
        size: i64,
    ) -> (u64, i64) {
        let item = Self::home(cells.place.shared).item;
        let offset = tensor.offset(item, cells.step.q_head, corner.row, corner.key) * size;
        (tensor.address.wrapping_add(offset as u64), tensor.row * size)
    }

    /// `score += bias`; a bias of −∞ hides the key, whatever its score.
    #[inline(always)]
    unsafe fn add_bias(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let (first, row_bytes) = Self::first_cell(&params.options.bias, cells, &corner, 4);
        let mut biases = [0.0; 16];
        Self::each(cells, |_, at| {
            let (row, key) = (row_of(at % 4), key_of(at / 4));
            let is_there = corner.row + row < visible.q_len && corner.key + key < visible.kv_len;
            let offset = row_bytes * row as i64 + key as i64 * 4;
            biases[at] = load_global_f32_if(first.wrapping_add(offset as u64), is_there);
        });
        Self::each(cells, |index, at| {
            *scores.at_mut(index) = biased(scores.at(index), biases[at]);
        });
    }

    /// Makes scores −∞ that the window, or an end of the item, hides.
    #[inline(always)]
    unsafe fn hide_outside(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let last_row = corner.warp_row + 15;
        let (all_start, all_end) =
            (sides(&visible, last_row).0, sides(&visible, corner.warp_row).1);
        let end_key = corner.warp_key + Self::PLAN.row_tiles * 16;
        let is_inside = last_row < visible.q_len
            && corner.warp_key as i32 >= all_start
            && end_key as i32 <= all_end;
        if is_inside {
            return;
        }
        Self::each(cells, |index, at| {
            let row = corner.row + row_of(at % 4);
            let (start, end) = sides(&visible, row);
            // One compare for both sides: a key before the start wraps to a large number.
            let seen = if row < visible.q_len { (end - start).max(0) as u32 } else { 0 };
            if ((corner.key as i32 - start) as u32).wrapping_add(key_of(at / 4)) >= seen {
                *scores.at_mut(index) = f32::NEG_INFINITY;
            }
        });
    }

    /// Bit `i` says whether cell `i` is kept; see `ferroflash_core::dropout` for who shares a call.
    #[inline(always)]
    unsafe fn kept(params: &PortableMaskedBackwardParams, cells: &Cells<'_>) -> u32 {
        let (mask, _) = load_dropout(&params.options, Self::dropout_slot(cells.place.shared));
        let heads = params.backward.q_heads;
        let (item, corner) = (Self::home(cells.place.shared).item, Self::corner(cells));
        let batch_head = item.wrapping_mul(heads).wrapping_add(cells.step.q_head);
        // A warp of 16 keys needs one half of each call's words: all bits are set if the upper.
        let is_upper = ((corner.warp_key >> 4 & 1) as i32).wrapping_neg() as u32;
        let mut kept = 0;
        let mut side = 0;
        while side < 2 {
            // Rows 8 apart, the queries of two tiles, share a call.
            let rows = row_group(corner.row + side as u32);
            let words = mask.words(batch_head, rows, column_group(corner.key));
            let mut half = 0;
            while half < Self::HALVES {
                let word = match Self::HALVES {
                    2 => words[half] & !is_upper | words[half + 2] & is_upper,
                    _ => words[half],
                };
                let near = mask.keeps_bits(word) as u32;
                let far = mask.keeps_bits(word >> 16) as u32;
                kept |= near << (half * 4 + side) | far << (half * 4 + side + 2);
                half += 1;
            }
            side += 1;
        }
        kept
    }

    /// From scores and dP: P and dS, 0 where the score is −∞.
    #[inline(always)]
    unsafe fn differentiate(
        scores: &mut T::Scores,
        ds: &mut T::Scores,
        cells: &Cells<'_>,
        states: u32,
        exponent_scale: f32,
    ) {
        let mut tile = 0;
        while tile < 2 {
            let lse = load_shared_v2_f32(states + tile as u32 * 32);
            let delta = load_shared_v2_f32(states + Self::TILE.q_rows * 4 + tile as u32 * 32);
            let mut at = 0;
            while at < Self::HALVES * 2 {
                let (half, side) = (at / 2, at % 2);
                let index = Self::cell(half, (cells.tile + tile) * 2 + side);
                let score = scores.at(index);
                // One rounding near the row's maximum, whatever the magnitude of lse.
                let exponent = fma(score, exponent_scale, -lse[side]);
                let p = exp2(exponent * core::f32::consts::LOG2_E);
                let gradient = p * (ds.at(index) - delta[side]);
                let is_hidden = score == f32::NEG_INFINITY;
                *scores.at_mut(index) = if is_hidden { 0.0 } else { p };
                *ds.at_mut(index) = if is_hidden { 0.0 } else { gradient };
                at += 1;
            }
            tile += 1;
        }
    }

    /// Adds dS to the gradient of the bias, or stores it there.
    #[inline(always)]
    unsafe fn add_bias_gradient(
        ds: &T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let (first, row_bytes) = Self::first_cell(&params.bias_gradient, cells, &corner, 4);
        if row_bytes == 0 {
            let mut half = 0;
            while half < Self::HALVES {
                // Hidden cells and rows past the end are 0.
                let mut sum = 0.0;
                let mut column = 0;
                while column < 4 {
                    sum += ds.at(Self::cell(half, cells.tile * 2 + column));
                    column += 1;
                }
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                let key = key_of(half);
                // The first of the four lanes that share a key.
                if corner.row == corner.warp_row && corner.key + key < visible.kv_len {
                    add_global_f32(first + key as u64 * 4, sum);
                }
                half += 1;
            }
            return;
        }
        let is_sum = params.bias_gradient_is_sum != 0;
        Self::each(cells, |index, at| {
            let (row, key) = (row_of(at % 4), key_of(at / 4));
            let offset = row_bytes * row as i64 + key as i64 * 4;
            let to = first.wrapping_add(offset as u64);
            if corner.row + row < visible.q_len && corner.key + key < visible.kv_len {
                if is_sum {
                    add_global_f32(to, ds.at(index));
                } else {
                    store_global_f32(to, ds.at(index));
                }
            }
        });
    }
}

/// Keys from a lane's first to its key `half`.
#[inline(always)]
pub(super) const fn key_of(half: usize) -> u32 {
    half as u32 * 8
}

/// Rows from a lane's first to its query `column` of four.
#[inline(always)]
pub(super) const fn row_of(column: usize) -> u32 {
    (column / 2 * 8 + column % 2) as u32
}
