//! The online softmax of score fragments, in registers.
//!
//! A thread holds, of each 16-row `mma` tile, parts of two rows; the four lanes of a quad hold the
//! rest of them. The state of a row is (row maximum, row sum) with the numerator in the output
//! accumulator (`ferroflash_core::row_state`). Exponentials are powers of two, so that the scale's
//! product with log2 e and the subtraction of the maximum are one fused multiply-add.

use ferroflash_core::fragment::Fragment;

use crate::ptx::math::{exp2, fma, log2, max};
use crate::ptx::warp::{any, shuffle_xor};

/// The same for an f32 probability: at 16 the rounding is 2⁻²⁰, the largest that its bound leaves
/// room for. Larger scores lose as much by their own rounding.
pub(super) const LARGE_F32_OFFSET: f32 = 16.0;

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

/// What a new tile's maxima mean for the thread's rows.
#[derive(Clone, Copy)]
pub struct Advance {
    /// What to subtract from each row's scaled scores.
    pub offset: [f32; 4],
    /// Factors of what the rows have accumulated so far.
    pub rescale: [f32; 4],
    /// Whether, in this warp, a factor is not 1 or an offset enormous.
    pub is_needed: bool,
}

impl ThreadRows {
    /// Takes in the maxima of a tile's raw scores, of `tiles` 8-column tiles a row tile: row
    /// `row < rows` is in row tile `row / 2`, in its half `row % 2`. All rows at once, since each
    /// maximum and each exchange waits for the one before. Offsets beyond `large` are enormous.
    ///
    /// # Safety
    /// All lanes of the warp call this alike, and `scores` has `tiles · 4` values a row tile.
    #[inline(always)]
    pub unsafe fn advance<S: Fragment>(
        &mut self,
        scores: &S,
        rows: usize,
        tiles: usize,
        scale_log2: f32,
        large: f32,
    ) -> Advance {
        let mut new_max = self.row_max;
        let mut chains = [f32::NEG_INFINITY; 4];
        let mut tile = 0;
        while tile < tiles {
            let mut row = 0;
            while row < rows {
                let first = value_index(row, tile, tiles);
                new_max[row] = max(new_max[row], scores.at(first));
                chains[row] = max(chains[row], scores.at(first + 1));
                row += 1;
            }
            tile += 1;
        }
        let mut row = 0;
        while row < rows {
            new_max[row] = max(new_max[row], chains[row]);
            row += 1;
        }
        let mut lanes = 1;
        while lanes <= 2 {
            let mut row = 0;
            while row < rows {
                new_max[row] = max(new_max[row], shuffle_xor(new_max[row], lanes));
                row += 1;
            }
            lanes *= 2;
        }

        let mut advance = Advance { offset: [0.0; 4], rescale: [0.0; 4], is_needed: false };
        let mut row = 0;
        while row < rows {
            // A row that has seen nothing keeps -∞; subtracting it would make NaN of its -∞ scores.
            if new_max[row] != f32::NEG_INFINITY {
                advance.offset[row] = new_max[row] * scale_log2;
            }
            if self.row_max[row] != f32::NEG_INFINITY {
                advance.rescale[row] = exp2((self.row_max[row] - new_max[row]) * scale_log2);
            }
            self.row_sum[row] *= advance.rescale[row];
            advance.is_needed |= advance.rescale[row] != 1.0 || advance.offset[row].abs() > large;
            row += 1;
        }
        self.row_max = new_max;
        advance.is_needed = any(advance.is_needed);
        advance
    }

    /// Where an offset is enormous, subtracts the rows' maxima from the scores themselves.
    ///
    /// # Safety
    /// As [`ThreadRows::advance`], whose outcome is given.
    #[inline(always)]
    pub unsafe fn subtract_large<S: Fragment>(
        &self,
        scores: &mut S,
        rows: usize,
        tiles: usize,
        advance: &mut Advance,
        large: f32,
    ) {
        let [a, b, c, d] = advance.offset;
        if !any(max(max(a.abs(), b.abs()), max(c.abs(), d.abs())) > large) {
            return;
        }
        let mut row = 0;
        while row < rows {
            let largest =
                if self.row_max[row] == f32::NEG_INFINITY { 0.0 } else { self.row_max[row] };
            let mut tile = 0;
            while tile < tiles {
                let first = value_index(row, tile, tiles);
                *scores.at_mut(first) -= largest;
                *scores.at_mut(first + 1) -= largest;
                tile += 1;
            }
            row += 1;
        }
        advance.offset = [0.0; 4];
    }

    /// Turns the raw scores of 16 keys, two 8-column tiles from `tile` on, into unnormalised
    /// probabilities, and adds them to the rows' sums.
    ///
    /// # Safety
    /// As [`ThreadRows::advance`], which has been called for these scores.
    #[inline(always)]
    pub unsafe fn exponentials<S: Fragment>(
        &mut self,
        scores: &mut S,
        rows: usize,
        tiles: usize,
        tile: usize,
        offset: &[f32; 4],
        scale_log2: f32,
    ) {
        let mut row = 0;
        while row < rows {
            let mut sums = [0.0; 2];
            let mut half = 0;
            while half < 2 {
                let first = value_index(row, tile + half, tiles);
                let left = exp2(fma(scores.at(first), scale_log2, -offset[row]));
                let right = exp2(fma(scores.at(first + 1), scale_log2, -offset[row]));
                *scores.at_mut(first) = left;
                *scores.at_mut(first + 1) = right;
                sums[half] = left + right;
                half += 1;
            }
            self.row_sum[row] += sums[0] + sums[1];
            row += 1;
        }
    }
}

/// Index of the first of a row's two values in an 8-column tile.
#[inline(always)]
const fn value_index(row: usize, tile: usize, tiles: usize) -> usize {
    (row / 2 * tiles + tile) * 4 + row % 2 * 2
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
