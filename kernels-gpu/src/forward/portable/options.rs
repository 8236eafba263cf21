//! What options do to a warp's score fragment: softcap, ALiBi, bias, masks and dropout.
//!
//! A lane holds, of each 16-row tile, rows r and r + 8, and of every 8 keys two neighbours: so each
//! of its places differs from its first by constants, and one row's part of a bias is a few pairs
//! at constant distances. Every `if` here is on a parameter: all threads of the grid agree.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::dropout::{BLOCK_KEYS, DropoutMask, column_group, row_group};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::options::{PortableMaskedParams, ScoreOptions, ScoreTensor};
use ferroflash_core::tile::ForwardTiling;
use ferroflash_core::visibility::Visibility;

use super::place::Place;
use super::{Kernel, Warp, fragment_row};
use crate::options::{Tanh, biased, sides, tanh, tanh_far, tanh_near};
use crate::ptx::math::{fma, max};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    load_global_pair_f32, load_global_pair_u8, load_global_u8_if, load_shared_u32,
};

/// Where a lane's first score lies in its item.
#[derive(Clone, Copy)]
struct Corner {
    row: u32,
    key: u32,
}

impl Corner {
    /// `tile_key` is the tile's first key, counted from the block's first.
    #[inline(always)]
    fn of(place: &Place, tile_key: u32, warp: &Warp) -> Self {
        Self {
            row: place.first_row + warp.first_row + warp.lane / 4,
            key: place.first_key + tile_key + warp.lane % 4 * 2,
        }
    }
}

impl<T: ForwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Index of the first of two neighbouring scores of a lane: row `row` of its rows, 8-key tile
    /// `tile`.
    const fn pair_index(row: usize, tile: usize) -> usize {
        (row / 2 * Self::SCORE_TILES + tile) * 4 + row % 2 * 2
    }

    /// Turns products into final scores: scale and softcap, ALiBi, bias, masks, in this order.
    /// `tile_key` is the tile's first key, counted from the block's first; `shown` the address of
    /// what the boolean mask shows of the tile.
    #[inline(always)]
    pub(super) unsafe fn finish_scores<M: MaskKind>(
        scores: &mut T::Scores,
        params: &PortableMaskedParams,
        place: &Place,
        tile_key: u32,
        warp: &Warp,
        shown: u32,
    ) {
        let options = &params.options;
        let first_key = place.first_key + tile_key;
        let warp_row = place.first_row + warp.first_row;
        let corner = Corner::of(place, tile_key, warp);
        if options.product_scale != 0.0 {
            let mut factor = options.product_scale;
            if options.softcap != 0.0 {
                Self::cap::<M>(scores, options);
                factor = 1.0;
            }
            if options.alibi.address != 0 {
                let warp_corner = Corner { row: warp_row, key: first_key };
                Self::subtract_alibi::<M>(scores, place, corner, warp_corner, factor);
            } else if options.softcap == 0.0 {
                Self::for_each(scores, |score| score * factor);
            }
            if matches!(M::CLASS, MaskClass::General) && options.bias.address != 0 {
                Self::add_bias(scores, &options.bias, place, corner);
            }
        }
        if matches!(M::CLASS, MaskClass::General) && options.boolean_mask.address != 0 {
            let shown = [load_shared_u32(shown), load_shared_u32(shown + 4)];
            Self::hide_by_mask(scores, shown);
        }
        let visible = place.visible(&params.items);
        // A warp's own rows, not the block's: fewer warps compare.
        let last_row = (warp_row + T::SHAPE.rows_per_warp()).min(visible.q_len).saturating_sub(1);
        let (all_start, all_end) = (sides(&visible, last_row).0, sides(&visible, warp_row).1);
        if (first_key as i32) < all_start || (first_key + T::SHAPE.kv_columns) as i32 > all_end {
            Self::hide_outside(scores, &visible, corner);
        }
    }

    #[inline(always)]
    unsafe fn for_each(scores: &mut T::Scores, value: impl Fn(f32) -> f32) {
        let mut index = 0;
        while index < T::Scores::LEN {
            *scores.at_mut(index) = value(scores.at(index));
            index += 1;
        }
    }

    /// Whether options have faster forms for common cases, each of which is code: not in f32, for
    /// its error, nor in the class `general`, whose other options take longer.
    const fn is_lean<M: MaskKind>() -> bool {
        E::PIECES == 1 && matches!(M::CLASS, MaskClass::Masked)
    }

    /// `score = cap · tanh(score · scale)`.
    #[inline(always)]
    unsafe fn cap<M: MaskKind>(scores: &mut T::Scores, options: &ScoreOptions) {
        let mut form = Tanh::Exact;
        if Self::is_lean::<M>() {
            let mut chains = [0.0; 4];
            let mut index = 0;
            while index < T::Scores::LEN {
                chains[index % 4] = max(chains[index % 4], scores.at(index).abs());
                index += 1;
            }
            let largest = max(max(chains[0], chains[1]), max(chains[2], chains[3]));
            form = Tanh::of(options, largest);
        }
        let (cap, scale) = (options.softcap, options.softcap_scale);
        match form {
            Tanh::Near => {
                let polynomial = options.softcap_polynomial;
                Self::for_each(scores, |score| cap * tanh_near(score, polynomial));
            }
            Tanh::Far => Self::for_each(scores, |score| cap * tanh_far(score * scale)),
            Tanh::Exact => Self::for_each(scores, |score| cap * tanh(score * scale)),
        }
    }

    /// `score = factor · score − slope · |row + Sk − Sq − key|`. Distances to the diagonal are
    /// whole numbers; those that f32 can't hold are rounded to 24 bits.
    #[inline(always)]
    unsafe fn subtract_alibi<M: MaskKind>(
        scores: &mut T::Scores,
        place: &Place,
        corner: Corner,
        warp_corner: Corner,
        factor: f32,
    ) {
        let slope = -place.slope;
        let shift = place.kv_len as i32 - place.q_len as i32;
        let first = (corner.row as i32 + shift - corner.key as i32) as f32;
        // On one side of the diagonal a distance grows or falls with the key all over the tile.
        let nearest = warp_corner.row as i32 + shift - warp_corner.key as i32;
        let is_before = nearest >= T::SHAPE.kv_columns as i32;
        let is_behind = nearest + (T::SHAPE.rows_per_warp() as i32) <= 0;
        if Self::is_lean::<M>() && (is_before || is_behind) {
            let slope = if is_before { slope } else { -slope };
            let mut row = 0;
            while row < Self::ROWS {
                let own = slope * (first + fragment_row(row) as f32);
                let mut tile = 0;
                while tile < Self::SCORE_TILES {
                    let index = Self::pair_index(row, tile);
                    let key = tile as f32 * 8.0;
                    let score = scores.at_mut(index);
                    *score = fma(*score, factor, fma(slope, -key, own));
                    let score = scores.at_mut(index + 1);
                    *score = fma(*score, factor, fma(slope, -key - 1.0, own));
                    tile += 1;
                }
                row += 1;
            }
            return;
        }
        let mut row = 0;
        while row < Self::ROWS {
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let index = Self::pair_index(row, tile);
                let distance = first + (fragment_row(row) as i32 - tile as i32 * 8) as f32;
                let score = scores.at_mut(index);
                *score = fma(slope, distance.abs(), *score * factor);
                let score = scores.at_mut(index + 1);
                *score = fma(slope, (distance - 1.0).abs(), *score * factor);
                tile += 1;
            }
            row += 1;
        }
    }

    /// `score += bias`; a bias of −∞ hides the key, whatever its score.
    #[inline(always)]
    unsafe fn add_bias(scores: &mut T::Scores, bias: &ScoreTensor, place: &Place, corner: Corner) {
        let mut row = 0;
        while row < Self::ROWS {
            let own_row = corner.row + fragment_row(row);
            let keys = if own_row < place.q_len { place.kv_len } else { 0 };
            let first = bias.offset(place.item, place.q_head, own_row, corner.key) * 4;
            let address = bias.address.wrapping_add(first as u64);
            let mut pairs = [[0.0; 2]; 8];
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let available = keys.saturating_sub(corner.key + tile as u32 * 8);
                pairs[tile] =
                    load_global_pair_f32(address.wrapping_add(tile as u64 * 32), available);
                tile += 1;
            }
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let index = Self::pair_index(row, tile);
                *scores.at_mut(index) = biased(scores.at(index), pairs[tile][0]);
                *scores.at_mut(index + 1) = biased(scores.at(index + 1), pairs[tile][1]);
                tile += 1;
            }
            row += 1;
        }
    }

    /// Which of a lane's scores the boolean mask shows: of row `row` 16 bits, from bit `row % 2 ·
    /// 16` of word `row / 2`, the pair of tile t at 2t. Keys past the end are hidden, as are rows.
    #[inline(always)]
    pub(super) unsafe fn shown(
        options: &ScoreOptions,
        place: &Place,
        tile_key: u32,
        warp: &Warp,
    ) -> [u32; 2] {
        let mask = &options.boolean_mask;
        let corner = Corner::of(place, tile_key, warp);
        let mut shown = [0; 2];
        let mut row = 0;
        while row < Self::ROWS {
            let own_row = corner.row + fragment_row(row);
            let keys = if own_row < place.q_len { place.kv_len } else { 0 };
            let mut pairs = [0; 8];
            if options.mask_is_bits != 0 {
                let first = mask.offset(place.item, place.q_head, own_row, corner.key / 8);
                let address = mask.address.wrapping_add(first as u64);
                let mut tile = 0;
                while tile < Self::SCORE_TILES {
                    // A lane's first key of a tile is even, and so in one byte with the second.
                    let is_there = corner.key + (tile as u32) * 8 < keys;
                    pairs[tile] = load_global_u8_if(address.wrapping_add(tile as u64), is_there);
                    tile += 1;
                }
                let mut tile = 0;
                while tile < Self::SCORE_TILES {
                    pairs[tile] = pairs[tile] >> (corner.key % 8) & 3;
                    tile += 1;
                }
            } else {
                let first = mask.offset(place.item, place.q_head, own_row, corner.key);
                let address = mask.address.wrapping_add(first as u64);
                let mut bytes = [[0; 2]; 8];
                let mut tile = 0;
                while tile < Self::SCORE_TILES {
                    let available = keys.saturating_sub(corner.key + tile as u32 * 8);
                    let address = address.wrapping_add(tile as u64 * 8);
                    bytes[tile] = load_global_pair_u8(address, available);
                    tile += 1;
                }
                let mut tile = 0;
                while tile < Self::SCORE_TILES {
                    pairs[tile] =
                        (bytes[tile][0] != 0) as u32 | ((bytes[tile][1] != 0) as u32) << 1;
                    tile += 1;
                }
            }
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                shown[row / 2] |= pairs[tile] << (row % 2 * 16 + tile * 2);
                tile += 1;
            }
            row += 1;
        }
        shown
    }

    /// Makes scores −∞ that the mask hides.
    #[inline(always)]
    unsafe fn hide_by_mask(scores: &mut T::Scores, shown: [u32; 2]) {
        let mut row = 0;
        while row < Self::ROWS {
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let index = Self::pair_index(row, tile);
                let pair = shown[row / 2] >> (row % 2 * 16 + tile * 2);
                if pair & 1 == 0 {
                    *scores.at_mut(index) = f32::NEG_INFINITY;
                }
                if pair & 2 == 0 {
                    *scores.at_mut(index + 1) = f32::NEG_INFINITY;
                }
                tile += 1;
            }
            row += 1;
        }
    }

    /// Makes scores −∞ that the window or the end of the keys hides.
    #[inline(always)]
    unsafe fn hide_outside(scores: &mut T::Scores, visible: &Visibility, corner: Corner) {
        let (start, _) = sides(visible, corner.row);
        let mut row = 0;
        while row < Self::ROWS {
            let (_, end) = sides(visible, corner.row + fragment_row(row));
            let start = start + fragment_row(row) as i32;
            // One compare for both sides: a key before the start wraps to a large number.
            let seen = (end - start).max(0) as u32;
            let first = (corner.key as i32 - start) as u32;
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let index = Self::pair_index(row, tile);
                let key = first.wrapping_add(tile as u32 * 8);
                if key >= seen {
                    *scores.at_mut(index) = f32::NEG_INFINITY;
                }
                if key.wrapping_add(1) >= seen {
                    *scores.at_mut(index + 1) = f32::NEG_INFINITY;
                }
                tile += 1;
            }
            row += 1;
        }
    }

    /// Makes dropped probabilities 0, of a tile whose first row and key for the warp are given; see
    /// `ferroflash_core::dropout` for who shares a call.
    #[inline(always)]
    pub(super) unsafe fn drop_probabilities(
        p: &mut T::Scores,
        mask: &DropoutMask,
        batch_head: u32,
        (first_row, first_key): (u32, u32),
        lane: u32,
    ) {
        const TILES: usize = BLOCK_KEYS as usize / 8;
        let (first_row, first_key) = (first_row + lane / 4, first_key + lane % 4 * 2);
        let mut row_tile = 0;
        while row_tile < Self::ROW_TILES {
            let rows = row_group(first_row + row_tile as u32 * 16);
            let mut call = 0;
            while call < Self::SCORE_TILES / TILES * 2 {
                let (block, side) = (call / 2, call % 2);
                let key = first_key + block as u32 * BLOCK_KEYS + side as u32;
                let words = mask.words(batch_head, rows, column_group(key));
                let mut tile = 0;
                while tile < TILES {
                    let index = Self::pair_index(row_tile * 2, block * TILES + tile) + side;
                    if !mask.keeps_bits(words[tile]) {
                        *p.at_mut(index) = 0.0;
                    }
                    if !mask.keeps_bits(words[tile] >> 16) {
                        *p.at_mut(index + 2) = 0.0;
                    }
                    tile += 1;
                }
                call += 1;
            }
            row_tile += 1;
        }
    }
}
