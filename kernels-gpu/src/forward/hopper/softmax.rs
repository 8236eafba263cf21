//! The online softmax of a `wgmma` score accumulator: two rows a thread, parts of each.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::fragment::Fragment;

use super::super::softmax::LARGE_OFFSET;
use crate::ptx::math::{exp2, fma, log2, max, reciprocal};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::compute_before_waiting;
use crate::ptx::warp::{any, shuffle_xor};

/// The softmax state of the two rows a thread holds parts of.
#[derive(Clone, Copy)]
pub(super) struct RowPair {
    /// The raw score that each row's exponentials are relative to, its reference: `-∞` before the
    /// first visible one, later the maximum, or below it by what [`Self::bounds`] allow.
    pub(super) row_max: [f32; 2],
    /// This thread's part of each row's sum of exponentials.
    pub(super) row_sum: [f32; 2],
    /// Whether all rows of the warp have references, and [`RowPair::guess`] may use them: none
    /// makes an offset that rounding shows in.
    pub(super) steady: bool,
    /// The largest probability that a guess may have in each row, packed twice; of no use under a
    /// causal mask.
    bounds: [u32; 2],
}

/// A probability above this, relative to a reference that was guessed, makes the true maximum the
/// reference, whatever the row.
const RISEN: f32 = 8.0;
/// Without a mask, so does one above this share of what the row's other keys should sum to, times
/// the number of keys to the power of [`SHARE_POWER`]: a tenth of 512. The maximum's own
/// probability is 1 and rounds to nothing; relative to anything below, it has a rounding error
/// like every other, which shows where it carries much of the row. The longer the rows, the less
/// the heaviest carries. Under a causal mask the largest errors are of rows with few keys, whose
/// maxima are true.
const SHARE: f32 = 10.76;
/// See [`SHARE`].
const SHARE_POWER: f32 = -0.75;
/// Up to this sum, exponentials have not overflowed and can be scaled.
const SCALABLE: f32 = 1e30;

impl RowPair {
    /// The state of no keys.
    pub(super) const EMPTY: Self =
        Self { row_max: [f32::NEG_INFINITY; 2], row_sum: [0.0; 2], steady: false, bounds: [0; 2] };

    /// Turns raw scores into unnormalised probabilities and advances the state. Returns the factors
    /// of what the rows have accumulated so far.
    ///
    /// # Safety
    /// All lanes of the warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn advance<S: Fragment>(
        &mut self,
        scores: &mut S,
        scale_log2: f32,
    ) -> [f32; 2] {
        let old_max = self.row_max;
        self.row_max = maxima(scores, old_max);
        let mut offset = [0.0; 2];
        let mut rescale = [0.0; 2];
        let mut row = 0;
        while row < 2 {
            let new_max = self.row_max[row];
            // A row that has seen nothing keeps -∞; subtracting it would make NaN of -∞ scores.
            offset[row] = if new_max == f32::NEG_INFINITY { 0.0 } else { new_max * scale_log2 };
            rescale[row] = if old_max[row] == f32::NEG_INFINITY {
                0.0
            } else {
                exp2((old_max[row] - new_max) * scale_log2)
            };
            row += 1;
        }
        self.note_steady(scale_log2);
        // The branch is the warp's, and taken by enormous scores alone.
        if any(offset[0].abs().max(offset[1].abs()) > LARGE_OFFSET) {
            subtract(scores, self.row_max);
            offset = [0.0; 2];
        }
        // Two chains a row: their additions overlap.
        let mut sums = [0.0; 4];
        let mut first = 0;
        while first < S::LEN {
            let mut value = 0;
            while value < 4 {
                let score = scores.at_mut(first + value);
                *score = exp2(fma(*score, scale_log2, -offset[value / 2]));
                sums[value] += *score;
                value += 1;
            }
            first += 4;
        }
        self.row_sum[0] = fma(self.row_sum[0], rescale[0], sums[0] + sums[1]);
        self.row_sum[1] = fma(self.row_sum[1], rescale[1], sums[2] + sums[3]);
        rescale
    }

    /// Turns raw scores into probabilities relative to the references as they are, and returns
    /// this thread's part of their sums: neither maxima nor exchanges stand before the first
    /// exponential. The caller looks at the outcome; see [`RowPair::needs_amending`].
    #[inline(always)]
    pub(super) unsafe fn guess<S: Fragment>(&self, scores: &mut S, scale_log2: f32) -> [f32; 2] {
        let offset = self.offsets(scale_log2);
        let mut sums = [0.0; 2];
        let mut index = 0;
        while index < S::LEN {
            let row = index / 2 % 2;
            let score = scores.at_mut(index);
            *score = exp2(fma(*score, scale_log2, -offset[row]));
            sums[row] += *score;
            index += 1;
            // The second half runs after the wait for the output, where packing fits between.
            if index == S::LEN / 8 * 4 {
                compute_before_waiting(sums[0] + sums[1]);
            }
        }
        sums
    }

    /// Bounds later guesses by [`RISEN`] and [`SHARE`], in rows of `keys` keys of which `seen` have
    /// been seen; the others are taken to be like those, but for the one at the reference.
    ///
    /// # Safety
    /// All lanes of the warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn bound_shares<E: MatrixElement>(&mut self, seen: u32, keys: u32) {
        let keys = keys as f32;
        let share = SHARE * exp2(log2(keys) * SHARE_POWER);
        let unseen = keys * reciprocal(seen as f32);
        let mut row = 0;
        while row < 2 {
            let mut sum = self.row_sum[row];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            let bound = share * fma(sum - 1.0, unseen, 1.0);
            let bound = max(bound.min(RISEN), 1.0);
            self.bounds[row] = E::pack(bound, bound);
            row += 1;
        }
    }

    /// Whether a guess, packed, must be amended in this warp: a probability is above its row's
    /// bound, or there should have been no guess. One vote, so that the packing before it mingles
    /// with the exponentials; positive floats compare as integers.
    ///
    /// # Safety
    /// All lanes of the warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn needs_amending<E: MatrixElement, M: MaskKind, P: Fragment<u32>>(
        &self,
        packed: &P,
    ) -> bool {
        // Four chains, since each maximum waits for the one before. Pairs alternate between rows.
        let mut chains = [packed.at(0), packed.at(1), packed.at(2), packed.at(3)];
        let mut index = 4;
        while index < P::LEN {
            chains[index % 4] = E::max_pair(chains[index % 4], packed.at(index));
            index += 1;
        }
        if matches!(M::CLASS, MaskClass::Full) {
            let rows = [E::max_pair(chains[0], chains[2]), E::max_pair(chains[1], chains[3])];
            let [first, second] = self.bounds;
            let is_first_above = E::max_pair(rows[0], first) != first;
            let is_second_above = E::max_pair(rows[1], second) != second;
            return any(!self.steady | is_first_above | is_second_above);
        }
        let halves = [E::max_pair(chains[0], chains[1]), E::max_pair(chains[2], chains[3])];
        let largest = E::max_pair(halves[0], halves[1]);
        let bound = E::pack(RISEN, 0.0);
        any(!self.steady | (largest & 0xffff > bound) | (largest >> 16 > bound))
    }

    /// Accepts a guess, `sums` its sums.
    #[inline(always)]
    pub(super) fn take(&mut self, sums: [f32; 2]) {
        self.row_sum[0] += sums[0];
        self.row_sum[1] += sums[1];
    }

    /// Whether [`RowPair::rise`] can amend the guess with these sums.
    ///
    /// # Safety
    /// All lanes of the warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn can_rise(&self, sums: [f32; 2]) -> bool {
        self.steady && !any(sums[0] > SCALABLE || sums[1] > SCALABLE)
    }

    /// Makes the maxima of guessed probabilities the references. Returns the factors of what the
    /// rows have accumulated so far.
    ///
    /// # Safety
    /// All lanes of the warp call this alike, after [`RowPair::can_rise`].
    #[inline(always)]
    pub(super) unsafe fn rise<S: Fragment>(
        &mut self,
        scores: &mut S,
        sums: [f32; 2],
        scale_log2: f32,
    ) -> [f32; 2] {
        let peaks = maxima(scores, [1.0; 2]);
        let old = self.offsets(scale_log2);
        let mut row = 0;
        while row < 2 {
            if peaks[row] > 1.0 {
                self.row_max[row] += log2(peaks[row]) * reciprocal(scale_log2);
            }
            row += 1;
        }
        // From the new references as they were rounded: every tile then agrees on them.
        let new = self.offsets(scale_log2);
        let factors = [exp2(old[0] - new[0]), exp2(old[1] - new[1])];
        let mut index = 0;
        while index < S::LEN {
            *scores.at_mut(index) *= factors[index / 2 % 2];
            index += 1;
        }
        self.take(sums);
        self.row_sum[0] *= factors[0];
        self.row_sum[1] *= factors[1];
        self.note_steady(scale_log2);
        factors
    }

    #[inline(always)]
    fn offsets(&self, scale_log2: f32) -> [f32; 2] {
        [self.row_max[0] * scale_log2, self.row_max[1] * scale_log2]
    }

    /// Decides whether the next tile may be guessed. Before the first visible score, the offset is
    /// infinite.
    #[inline(always)]
    unsafe fn note_steady(&mut self, scale_log2: f32) {
        let offset = self.offsets(scale_log2);
        self.steady = !any(offset[0].abs().max(offset[1].abs()) > LARGE_OFFSET);
    }

    /// The last step: what normalises each row's output, and its natural log-sum-exp. A row that
    /// saw no key has factor 0 and log-sum-exp `-∞`.
    ///
    /// # Safety
    /// All lanes of the warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn finish(&self, scale: f32) -> [(f32, f32); 2] {
        let mut finished = [(0.0, f32::NEG_INFINITY); 2];
        let mut row = 0;
        while row < 2 {
            let mut sum = self.row_sum[row];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if sum != 0.0 {
                let lse = fma(self.row_max[row], scale, log2(sum) * core::f32::consts::LN_2);
                finished[row] = (reciprocal(sum), lse);
            }
            row += 1;
        }
        finished
    }
}

/// The rows' maxima, over the scores of the whole quad and `so_far`.
#[inline(always)]
unsafe fn maxima<S: Fragment>(scores: &S, so_far: [f32; 2]) -> [f32; 2] {
    // Two chains a row, since each maximum waits for the one before.
    let mut chains =
        [max(so_far[0], scores.at(0)), scores.at(1), max(so_far[1], scores.at(2)), scores.at(3)];
    let mut first = 4;
    while first < S::LEN {
        let mut chain = 0;
        while chain < 4 {
            chains[chain] = max(chains[chain], scores.at(first + chain));
            chain += 1;
        }
        first += 4;
    }
    let mut row_max = [max(chains[0], chains[1]), max(chains[2], chains[3])];
    let mut row = 0;
    while row < 2 {
        row_max[row] = max(row_max[row], shuffle_xor(row_max[row], 1));
        row_max[row] = max(row_max[row], shuffle_xor(row_max[row], 2));
        row += 1;
    }
    row_max
}

/// Subtracts each row's maximum from its scores, exactly where it matters.
#[inline(always)]
unsafe fn subtract<S: Fragment>(scores: &mut S, row_max: [f32; 2]) {
    let mut index = 0;
    while index < S::LEN {
        let row = index / 2 % 2;
        let largest = if row_max[row] == f32::NEG_INFINITY { 0.0 } else { row_max[row] };
        *scores.at_mut(index) -= largest;
        index += 1;
    }
}
