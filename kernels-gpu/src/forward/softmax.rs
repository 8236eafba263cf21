//! The online softmax of score fragments, in registers.
//!
//! A thread holds, of each 16-row `mma` tile, parts of two rows; the four lanes of a quad hold the
//! rest of them. The state of a row is (row maximum, row sum) with the numerator in the output
//! accumulator (`ferroflash_core::row_state`). Exponentials are powers of two, so that the scale's
//! product with log2 e and the subtraction of the maximum are one fused multiply-add.

use ferroflash_core::fragment::Fragment;

use crate::ptx::math::{exp2, fma, log2, max};
use crate::ptx::warp::shuffle_xor;

/// Beyond this magnitude of `row_max · scale_log2`, the rounding of that product no longer vanishes
/// in a 16-bit probability: at 512 it is 2⁻¹⁵, well under half a unit of binary16 at 1.
pub(super) const LARGE_OFFSET: f32 = 512.0;

/// The softmax state of the rows a thread holds parts of: two a row tile, two row tiles at most.
#[derive(Clone, Copy)]
pub struct ThreadRows {
    /// Largest raw score so far of each row, `-∞` before the first visible one.
    pub row_max: [f32; 4],
    /// This thread's part of each row's sum of exponentials.
    pub row_sum: [f32; 4],
}

impl ThreadRows {
    /// The state of no keys.
    pub const EMPTY: Self = Self { row_max: [f32::NEG_INFINITY; 4], row_sum: [0.0; 4] };
}

/// Turns one row's raw scores into unnormalised probabilities and advances the row's state.
///
/// The row is number `row` of the thread's; its values are those of row tile `row / 2` (of
/// `tiles` 8-column tiles) in the row half `row % 2`. Returns the factor of what the row has
/// accumulated so far.
///
/// # Safety
/// All lanes of the warp call this alike, and `scores` has `tiles · 4` values a row tile.
#[inline(always)]
pub unsafe fn advance<S: Fragment>(
    scores: &mut S,
    state: &mut ThreadRows,
    row: usize,
    tiles: usize,
    scale_log2: f32,
) -> f32 {
    let first = row / 2 * tiles * 4 + row % 2 * 2;
    let old_max = state.row_max[row];
    let mut new_max = old_max;
    let mut tile = 0;
    while tile < tiles {
        new_max = max(new_max, scores.at(first + tile * 4));
        new_max = max(new_max, scores.at(first + tile * 4 + 1));
        tile += 1;
    }
    new_max = max(new_max, shuffle_xor(new_max, 1));
    new_max = max(new_max, shuffle_xor(new_max, 2));
    state.row_max[row] = new_max;

    // A row that has seen nothing keeps -∞; subtracting it would make NaN of its -∞ scores.
    let mut offset = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max * scale_log2 };
    if offset.abs() > LARGE_OFFSET {
        let mut tile = 0;
        while tile < tiles {
            *scores.at_mut(first + tile * 4) -= new_max;
            *scores.at_mut(first + tile * 4 + 1) -= new_max;
            tile += 1;
        }
        offset = 0.0;
    }

    let rescale =
        if old_max == f32::NEG_INFINITY { 0.0 } else { exp2((old_max - new_max) * scale_log2) };
    let mut sum = 0.0;
    let mut tile = 0;
    while tile < tiles {
        let value = scores.at_mut(first + tile * 4);
        *value = exp2(fma(*value, scale_log2, -offset));
        sum += *value;
        let value = scores.at_mut(first + tile * 4 + 1);
        *value = exp2(fma(*value, scale_log2, -offset));
        sum += *value;
        tile += 1;
    }
    state.row_sum[row] = fma(state.row_sum[row], rescale, sum);
    rescale
}

/// A row's last step: the factor that normalises its output, and its natural log-sum-exp. A row
/// that saw no key has factor 0 and log-sum-exp `-∞`.
///
/// # Safety
/// All lanes of the warp call this alike.
#[inline(always)]
pub unsafe fn finish(state: &ThreadRows, row: usize, scale: f32) -> (f32, f32) {
    let mut sum = state.row_sum[row];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if sum == 0.0 {
        (0.0, f32::NEG_INFINITY)
    } else {
        let lse = fma(state.row_max[row], scale, log2(sum) * core::f32::consts::LN_2);
        (1.0 / sum, lse)
    }
}
