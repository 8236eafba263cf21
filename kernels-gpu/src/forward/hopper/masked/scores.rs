//! What the options do to a consumer's scores.
//!
//! A thread holds, of every 8 keys, two neighbours of two rows: row r and row r + 8. So the
//! distances of its scores differ from its first by constants.

use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::HopperTiling;

use super::super::consumer::Rows;
use super::consumer::Reader;
use super::record::{has_softcap, is_given};
use crate::options::{sides, tanh, tanh_near};
use crate::ptx::math::{exp2, fma, max, reciprocal};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::compute_before_waiting;
use crate::ptx::warp::any;
use crate::ptx::wgmma::Product;

/// Up to this factor of tanh, a cap of 128, an error of 3·10⁻⁷ of 1 in tanh changes a probability
/// by less than a sixth of what rounding to binary16 may.
pub(super) const FAR_SCALE: f32 = 128.0 * core::f32::consts::LOG2_E;

impl<T: HopperTiling, E: MatrixElement> Reader<'_, T, E>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// Turns the products of `step` into probabilities relative to the rows' true maxima, whatever
    /// the options: softcap, ALiBi, masks, in this order. Returns the factors of what the rows have
    /// accumulated so far.
    #[inline(always)]
    pub(super) unsafe fn finish(&mut self, rows: &mut Rows<T>, step: u32) -> [f32; 2] {
        let options = &self.params.options;
        if has_softcap(options) {
            self.is_far = !self.cap(rows);
        }
        if is_given(options.alibi.address) {
            self.subtract_distances(rows, step);
        }
        self.hide(rows, step);
        rows.state.advance(&mut rows.scores, self.params.forward.scale_log2)
    }

    /// tanh of every score. Where all of the warp's are near zero, which is the common case, by a
    /// polynomial without exponentials. Returns whether they were.
    #[inline(always)]
    pub(super) unsafe fn cap(&self, rows: &mut Rows<T>) -> bool {
        let options = &self.params.options;
        let scores = &mut rows.scores;
        let mut chains = [0.0; 4];
        let mut index = 0;
        while index < T::Scores::LEN {
            chains[index % 4] = max(chains[index % 4], scores.at(index).abs());
            index += 1;
        }
        let largest = max(max(chains[0], chains[1]), max(chains[2], chains[3]));
        let is_near = !any(largest > options.softcap_near);
        let mut index = 0;
        if is_near {
            while index < T::Scores::LEN {
                *scores.at_mut(index) = self.near(scores.at(index));
                index += 1;
            }
        } else {
            while index < T::Scores::LEN {
                *scores.at_mut(index) = tanh(scores.at(index) * options.softcap_scale);
                index += 1;
            }
        }
        is_near
    }

    /// tanh of a score near zero.
    #[inline(always)]
    unsafe fn near(&self, score: f32) -> f32 {
        tanh_near(score, self.params.options.softcap_polynomial)
    }

    /// As [`RowPair::guess`](super::super::softmax::RowPair::guess), of tanh by the polynomial, so
    /// that its products run under the exponentials. Beside the sums the largest magnitude of a
    /// score: past the polynomial's reach, the guess is worth nothing.
    #[inline(always)]
    pub(super) unsafe fn guess_near(&self, rows: &mut Rows<T>) -> ([f32; 2], f32) {
        let scale_log2 = self.params.forward.scale_log2;
        // One product a score less, where three registers are left for the coefficients.
        let is_folded = const { T::SHAPE.warpgroups() < 3 };
        let [mut a, mut b, mut c] = self.params.options.softcap_polynomial;
        if is_folded {
            (a, b, c) = (a * scale_log2, b * scale_log2, c * scale_log2);
        }
        let [first, second] = rows.state.row_max;
        let offset = [first * scale_log2, second * scale_log2];
        let scores = &mut rows.scores;
        let (mut sums, mut largest) = ([0.0; 2], [0.0; 4]);
        let mut index = 0;
        while index < T::Scores::LEN {
            let (row, score) = (index / 2 % 2, scores.at(index));
            largest[index % 4] = max(largest[index % 4], score.abs());
            let square = score * score;
            let factor = fma(fma(c, square, b), square, a);
            let power = match is_folded {
                true => fma(score, factor, -offset[row]),
                false => fma(score * factor, scale_log2, -offset[row]),
            };
            *scores.at_mut(index) = exp2(power);
            sums[row] += scores.at(index);
            index += 1;
            // The second half runs after the wait for the output, where packing fits between.
            if index == T::Scores::LEN / 8 * 4 {
                compute_before_waiting(sums[0] + sums[1]);
            }
        }
        (sums, max(max(largest[0], largest[1]), max(largest[2], largest[3])))
    }

    /// As [`RowPair::guess`](super::super::softmax::RowPair::guess), of tanh as `1 − 2 / (e²ˣ +
    /// 1)`, which is right within 3·10⁻⁷ of 1, not of tanh: for caps up to [`FAR_SCALE`].
    #[inline(always)]
    pub(super) unsafe fn guess_far(&self, rows: &mut Rows<T>) -> [f32; 2] {
        let scale_log2 = self.params.forward.scale_log2;
        let double = self.params.options.softcap_scale * (2.0 * core::f32::consts::LOG2_E);
        // Finite, for the product with 0.
        let double = double.min(f32::MAX);
        let [first, second] = rows.state.row_max;
        let highest = [(1.0 - first) * scale_log2, (1.0 - second) * scale_log2];
        let scores = &mut rows.scores;
        let mut sums = [0.0; 2];
        let mut index = 0;
        while index < T::Scores::LEN {
            let row = index / 2 % 2;
            let inverse = reciprocal(exp2(scores.at(index) * double) + 1.0);
            *scores.at_mut(index) = exp2(fma(-2.0 * scale_log2, inverse, highest[row]));
            sums[row] += scores.at(index);
            index += 1;
            // The second half runs after the wait for the output, where packing fits between.
            if index == T::Scores::LEN / 8 * 4 {
                compute_before_waiting(sums[0] + sums[1]);
            }
        }
        sums
    }

    /// Distance of the thread's first score of `step` before the diagonal of ALiBi: positive for
    /// keys before it.
    #[inline(always)]
    unsafe fn first_distance(&self, step: u32) -> i32 {
        let (row, key) = self.corner(step);
        let visible = self.record().visible(self.params);
        row as i32 + visible.kv_len as i32 - visible.q_len as i32 - key as i32
    }

    /// Row and key of the thread's first score of `step`, in the item.
    #[inline(always)]
    unsafe fn corner(&self, step: u32) -> (u32, u32) {
        let (record, thread) = (self.record(), self.consumer.thread());
        let lane = thread % 32;
        let row = record.first_row(self.consumer.index) + thread / 32 * 16 + lane / 4;
        (row, record.walk().tile(step) * T::SHAPE.kv_columns + lane % 4 * 2)
    }

    /// Scores as powers of two, with ALiBi's distances subtracted.
    #[inline(always)]
    pub(super) unsafe fn subtract_distances(&self, rows: &mut Rows<T>, step: u32) {
        let scale = self.params.options.bias_scale;
        let slope = -self.record().slope();
        let first = self.first_distance(step) as f32;
        let mut index = 0;
        while index < T::Scores::LEN {
            let distance = first + distance_from_first(index);
            let score = rows.scores.at_mut(index);
            *score = fma(slope, distance.abs(), *score * scale);
            index += 1;
        }
    }

    /// As [`RowPair::guess`](super::super::softmax::RowPair::guess), with ALiBi's distances, which
    /// grow or fall with the key all over the tile.
    #[inline(always)]
    pub(super) unsafe fn guess_sloped(&self, rows: &mut Rows<T>, step: u32) -> [f32; 2] {
        let scale = self.params.options.bias_scale;
        let record = self.record();
        let is_before = record.walk().tile(step) < record.part().straight.0;
        let slope = if is_before { -record.slope() } else { record.slope() };
        let first = self.first_distance(step) as f32;
        let offset = [
            fma(slope, first, -rows.state.row_max[0]),
            fma(slope, first + 8.0, -rows.state.row_max[1]),
        ];
        let scores = &mut rows.scores;
        let mut sums = [0.0; 2];
        let mut index = 0;
        while index < T::Scores::LEN {
            let row = index / 2 % 2;
            let key = distance_from_first(index / 4 * 4 + index % 2);
            let score = scores.at_mut(index);
            *score = exp2(fma(*score, scale, fma(slope, key, offset[row])));
            sums[row] += *score;
            index += 1;
            // The second half runs after the wait for the output, where packing fits between.
            if index == T::Scores::LEN / 8 * 4 {
                compute_before_waiting(sums[0] + sums[1]);
            }
        }
        sums
    }

    /// Makes the scores −∞ that the window or the end of the keys hides, if there are any.
    #[inline(always)]
    unsafe fn hide(&self, rows: &mut Rows<T>, step: u32) {
        let tile = self.record().walk().tile(step);
        let (full, full_end) = self.record().part().full;
        if tile >= full_end {
            self.hide_side::<true>(rows, step);
        }
        if tile < full {
            self.hide_side::<false>(rows, step);
        }
    }

    /// One side: keys from each row's end on, or before its start.
    #[inline(always)]
    unsafe fn hide_side<const END: bool>(&self, rows: &mut Rows<T>, step: u32) {
        let visible = self.record().visible(self.params);
        let (row, key) = self.corner(step);
        let mut half = 0;
        while half < 2 {
            // Rows that are not used see what the last one does, so that they need no amending.
            let (start, end) = sides(&visible, (row + half * 8).min(visible.q_len - 1));
            let bound = if END { end } else { start } - key as i32;
            let mut index = half as usize * 2;
            while index < T::Scores::LEN {
                let mut side = 0;
                while side < 2 {
                    let at = (index / 4 * 8 + side) as i32;
                    let is_hidden = if END { at >= bound } else { at < bound };
                    if is_hidden {
                        *rows.scores.at_mut(index + side) = f32::NEG_INFINITY;
                    }
                    side += 1;
                }
                index += 4;
            }
            half += 1;
        }
    }
}

/// The distance of score `index` before the diagonal, counted from the thread's first.
const fn distance_from_first(index: usize) -> f32 {
    (index / 2 % 2 * 8) as f32 - (index / 4 * 8 + index % 2) as f32
}
