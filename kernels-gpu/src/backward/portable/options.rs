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
//! makes it the gradient of the product. P∘Z is what dV is made of. A `masked` kernel has neither
//! biases nor dropout, and multiplies dP − delta by that derivative at once, so that no register
//! holds it.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::dropout::{BLOCK_KEYS, BLOCK_ROWS, column_group, row_group};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::options::{ScoreOptions, ScoreTensor};
use ferroflash_core::visibility::Visibility;

use super::{Corner, Kernel, Place, Step, Work};
use crate::options::{Tanh, load_dropout, sides, tanh, tanh_far, tanh_near};
use crate::ptx::math::{exp2, fma, max};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_global_f32, load_shared_v2_f32};

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
    pub(super) const HALVES: usize = Self::ROW_TILES * 2;
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
            let mut factor = options.product_scale;
            if options.softcap != 0.0 {
                Self::cap::<M>(p, &mut slopes, options, cells);
                factor = 1.0;
                if !is_general {
                    Self::each(cells, |index, at| {
                        let delta = Self::deltas(states, at % 4 / 2)[at % 2];
                        *ds.at_mut(index) = slopes[at] * (ds.at(index) - delta);
                    });
                }
            }
            if options.alibi.address != 0 {
                Self::subtract_alibi::<M>(p, params, cells, factor);
            } else if options.softcap == 0.0 {
                Self::each(cells, |index, _| *p.at_mut(index) *= factor);
            }
            if is_general && options.bias.address != 0 {
                Self::add_bias(p, params, cells);
            }
        }
        let mut hides = is_general && options.bias.address != 0;
        if is_general && options.boolean_mask.address != 0 {
            Self::hide_by_mask(p, params, cells);
            hides = true;
        }
        if !Self::is_inside(cells) {
            Self::hide_outside(p, params, cells);
            hides = true;
        }

        let mut kept = u32::MAX;
        if is_general && options.drops != 0 {
            kept = Self::kept(params, cells);
            Self::each(cells, |index, at| {
                let scaled = ds.at(index) * options.dropout.keep_scale;
                *ds.at_mut(index) = if kept >> at & 1 != 0 { scaled } else { 0.0 };
            });
        }
        let is_final = !is_general && options.softcap != 0.0;
        if hides {
            Self::differentiate::<true>(p, ds, cells, states, params.exponent_scale, is_final);
        } else {
            Self::differentiate::<false>(p, ds, cells, states, params.exponent_scale, is_final);
        }
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
        if is_general && options.softcap != 0.0 {
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

    /// Whether options have faster forms for common cases, each of which is code: not in f32, for
    /// its error, nor in the class `general`, whose other options take longer.
    const fn is_lean<M: MaskKind>() -> bool {
        E::PIECES == 1 && matches!(M::CLASS, MaskClass::Masked)
    }

    /// `score = cap · tanh(score · scale)`, and the derivatives.
    #[inline(always)]
    unsafe fn cap<M: MaskKind>(
        scores: &mut T::Scores,
        derivatives: &mut [f32; 16],
        options: &ScoreOptions,
        cells: &Cells<'_>,
    ) {
        let mut form = Tanh::Exact;
        if Self::is_lean::<M>() {
            let mut largest = 0.0;
            Self::each(cells, |index, _| largest = max(largest, scores.at(index).abs()));
            form = Tanh::of(options, largest);
        }
        let scale = options.softcap_scale;
        let mut take = |index, at: usize, tanh: &dyn Fn(f32) -> f32| {
            let value = tanh(scores.at(index));
            derivatives[at] = fma(-value, value, 1.0);
            *scores.at_mut(index) = options.softcap * value;
        };
        match form {
            Tanh::Near => Self::each(cells, |index, at| {
                take(index, at, &|product| tanh_near(product, options.softcap_polynomial));
            }),
            Tanh::Far => Self::each(cells, |index, at| {
                take(index, at, &|product| tanh_far(product * scale));
            }),
            Tanh::Exact => Self::each(cells, |index, at| {
                take(index, at, &|product| tanh(product * scale));
            }),
        }
    }

    /// `score = factor · score − slope · |row + Sk − Sq − key|`. Distances to the diagonal are
    /// whole numbers; those that f32 can't hold are rounded to 24 bits.
    #[inline(always)]
    unsafe fn subtract_alibi<M: MaskKind>(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
        factor: f32,
    ) {
        let corner = Self::corner(cells);
        let (home, slopes) = (Self::home(cells.place.shared), &params.options.alibi);
        let offset = slopes.offset(home.item, cells.step.q_head) * 4;
        let slope = load_global_f32(slopes.address.wrapping_add(offset as u64));
        let shift = home.kv_len as i32 - home.q_len as i32;
        let first = (corner.row as i32 + shift - corner.key as i32) as f32;
        let step = |at| (row_of(at % 4) as i32 - key_of(at / 4) as i32) as f32;
        // On one side of the diagonal a distance grows or falls with the key all over these cells.
        let nearest = corner.warp_row as i32 + shift - corner.warp_key as i32;
        let is_before = nearest >= (Self::PLAN.row_tiles * 16) as i32;
        if Self::is_lean::<M>() && (is_before || nearest + 16 <= 0) {
            let slope = if is_before { -slope } else { slope };
            let own = slope * first;
            Self::each(cells, |index, at| {
                let score = scores.at_mut(index);
                *score = fma(*score, factor, fma(slope, step(at), own));
            });
            return;
        }
        Self::each(cells, |index, at| {
            let score = scores.at_mut(index);
            *score = fma(-slope, (first + step(at)).abs(), *score * factor);
        });
    }

    /// Address of a lane's first cell in a tensor of `size`-byte elements, and the bytes from one
    /// row to the next.
    #[inline(always)]
    pub(super) unsafe fn first_cell(
        tensor: &ScoreTensor,
        cells: &Cells<'_>,
        corner: &Corner,
        size: i64,
    ) -> (u64, i64) {
        let item = Self::home(cells.place.shared).item;
        let offset = tensor.offset(item, cells.step.q_head, corner.row, corner.key) * size;
        (tensor.address.wrapping_add(offset as u64), tensor.row * size)
    }

    /// Whether every row of the step sees every key of the block.
    #[inline(always)]
    unsafe fn is_inside(cells: &Cells<'_>) -> bool {
        let [first, end] = Work::load_inside(cells.place.shared + Self::PLAN.work);
        (first..end).contains(&cells.step.tile)
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

    /// The lane's two rows' deltas, of a tile of 8 queries.
    #[inline(always)]
    unsafe fn deltas(states: u32, tile: usize) -> [f32; 2] {
        load_shared_v2_f32(states + Self::TILE.q_rows * 4 + tile as u32 * 32)
    }

    /// From scores and dP: P and dS, 0 where the score is −∞, if any may be. Where `is_final`, `ds`
    /// has what P is multiplied by.
    #[inline(always)]
    unsafe fn differentiate<const HIDES: bool>(
        scores: &mut T::Scores,
        ds: &mut T::Scores,
        cells: &Cells<'_>,
        states: u32,
        exponent_scale: f32,
        is_final: bool,
    ) {
        let mut tile = 0;
        while tile < 2 {
            let lse = load_shared_v2_f32(states + tile as u32 * 32);
            let delta = if is_final { [0.0; 2] } else { Self::deltas(states, tile) };
            let mut at = 0;
            while at < Self::HALVES * 2 {
                let (half, side) = (at / 2, at % 2);
                let index = Self::cell(half, (cells.tile + tile) * 2 + side);
                let score = scores.at(index);
                // One rounding near the row's maximum, whatever the magnitude of lse.
                let exponent = fma(score, exponent_scale, -lse[side]);
                let p = exp2(exponent * core::f32::consts::LOG2_E);
                let gradient = p * (ds.at(index) - delta[side]);
                let is_hidden = HIDES && score == f32::NEG_INFINITY;
                *scores.at_mut(index) = if is_hidden { 0.0 } else { p };
                *ds.at_mut(index) = if is_hidden { 0.0 } else { gradient };
                at += 1;
            }
            tile += 1;
        }
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
