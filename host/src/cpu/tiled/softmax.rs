//! The passes over a score tile between its products, vectorised.
//!
//! A tile is a sequence of *lines* of `stride` lanes, `stride` a multiple of [`LANES`]. In the
//! forward pass lanes are query rows, so a row's maximum and sum are kept lane by lane and nothing
//! is summed across a register; in the backward pass lanes are keys and a line has one row's
//! log-sum-exp.

use super::exponential::{exp, tanh};
use super::vector::{Fused, LANES, MultiplyAdd, Separate, vectorised};

/// Groups of lanes whose state stays in registers while a pass walks down the lines.
const GROUPS: usize = 4;
const WIDE: usize = GROUPS * LANES;

vectorised! {
    /// `row_max[lane] = max(row_max[lane], every line's score)`; a NaN score is passed over, and
    /// shows up in the sum instead.
    fn raise_row_max<M>(scores: &[f32], row_max: &mut [f32]) {
        #[inline(always)]
        fn run<const N: usize>(scores: &[f32], stride: usize, from: usize, maxima: &mut [f32; N]) {
            let mut kept = *maxima;
            for line in scores.chunks_exact(stride) {
                let Some(line) = line[from..].first_chunk::<N>() else { return };
                for lane in 0..N {
                    kept[lane] = if line[lane] > kept[lane] { line[lane] } else { kept[lane] };
                }
            }
            *maxima = kept;
        }
        let stride = row_max.len();
        let (wide, narrow) = row_max.as_chunks_mut::<WIDE>();
        let from = wide.len() * WIDE;
        for (group, maxima) in wide.iter_mut().enumerate() {
            run(scores, stride, group * WIDE, maxima);
        }
        for (group, maxima) in narrow.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            run(scores, stride, from + group * LANES, maxima);
        }
    }

    /// Scores become `exp(score - row_max)`, and `row_sum[lane]` grows by its lines' sum. A row
    /// that has seen only `-∞` keeps exact zeros.
    fn exponentiate<M>(scores: &mut [f32], row_max: &[f32], row_sum: &mut [f32]) {
        #[inline(always)]
        fn run<M: MultiplyAdd, const N: usize>(
            scores: &mut [f32], stride: usize, from: usize, maxima: &[f32; N], sums: &mut [f32; N],
        ) {
            let shift = maxima.map(finite_shift);
            let mut tile_sums = [0.0; N];
            for line in scores.chunks_exact_mut(stride) {
                let Some(line) = line[from..].first_chunk_mut::<N>() else { return };
                for lane in 0..N {
                    let probability = exp::<M>(line[lane] - shift[lane]);
                    line[lane] = probability;
                    tile_sums[lane] += probability;
                }
            }
            for lane in 0..N {
                sums[lane] += tile_sums[lane];
            }
        }
        let stride = row_max.len();
        let (wide, narrow) = row_max.as_chunks::<WIDE>();
        let (wide_sums, narrow_sums) = row_sum.as_chunks_mut::<WIDE>();
        let from = wide.len() * WIDE;
        for (group, (maxima, sums)) in wide.iter().zip(wide_sums).enumerate() {
            run::<M, WIDE>(scores, stride, group * WIDE, maxima, sums);
        }
        let narrow_sums = narrow_sums.as_chunks_mut::<LANES>().0;
        let narrow = narrow.as_chunks::<LANES>().0;
        for (group, (maxima, sums)) in narrow.iter().zip(narrow_sums).enumerate() {
            run::<M, LANES>(scores, stride, from + group * LANES, maxima, sums);
        }
    }

    /// `factor = exp(old_max - new_max)` and `row_sum *= factor`, lane by lane.
    fn rescale_sums<M>(old_max: &[f32], new_max: &[f32], factor: &mut [f32], row_sum: &mut [f32]) {
        let lanes = factor.len();
        let (old_max, new_max) = (&old_max[..lanes], &new_max[..lanes]);
        let row_sum = &mut row_sum[..lanes];
        for lane in 0..lanes {
            factor[lane] = exp::<M>(old_max[lane] - finite_shift(new_max[lane]));
            row_sum[lane] *= factor[lane];
        }
    }

    /// Softcaps scores, `cap · tanh(score / cap)`.
    fn softcap<M>(scores: &mut [f32], cap: f32) {
        for score in scores {
            *score = cap * tanh::<M>(*score / cap);
        }
    }

    /// Softcaps scores, and keeps the derivative `1 - tanh²` of each.
    fn softcap_with_derivative<M>(scores: &mut [f32], cap: f32, derivative: &mut [f32]) {
        for (score, derivative) in scores.iter_mut().zip(derivative) {
            let tanh = tanh::<M>(*score / cap);
            *score = cap * tanh;
            *derivative = M::multiply_add(-tanh, tanh, 1.0);
        }
    }

    /// One row: scores become `P = exp(score - lse)`, dP becomes `dS = P ∘ (dP - delta)`.
    fn gradients_of_row<M>(scores: &mut [f32], d_scores: &mut [f32], lse: f32, delta: f32) {
        for (score, d_score) in scores.iter_mut().zip(d_scores) {
            let probability = exp::<M>(*score - lse);
            *score = probability;
            *d_score = probability * (*d_score - delta);
        }
    }

    /// One row with dropout factors Z: scores become `P ∘ Z`, dP becomes `P ∘ (Z ∘ dP - delta)`.
    fn gradients_of_dropped_row<M>(
        scores: &mut [f32], d_scores: &mut [f32], keep: &[f32], lse: f32, delta: f32,
    ) {
        for ((score, d_score), &keep) in scores.iter_mut().zip(d_scores).zip(keep) {
            let probability = exp::<M>(*score - lse);
            *score = probability * keep;
            *d_score = probability * M::multiply_add(keep, *d_score, -delta);
        }
    }

    /// `values *= factors`, element by element.
    fn multiply<M>(values: &mut [f32], factors: &[f32]) {
        for (value, factor) in values.iter_mut().zip(factors) {
            *value *= factor;
        }
    }

    /// Row r of a contiguous matrix is multiplied by `factors[r]`.
    fn scale_rows<M>(values: &mut [f32], columns: usize, factors: &[f32]) {
        for (row, &factor) in values.chunks_exact_mut(columns).zip(factors) {
            if factor != 1.0 {
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
    }
}

/// What is subtracted before exponentiating: the maximum, or 0 where nothing was visible, since
/// `-∞ - -∞` is not a number.
#[inline(always)]
fn finite_shift(row_max: f32) -> f32 {
    if row_max == f32::NEG_INFINITY { 0.0 } else { row_max }
}

/// The log-sum-exp that makes every probability of an empty row 0.
pub(super) fn finite_lse(lse: f32) -> f32 {
    if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse }
}
