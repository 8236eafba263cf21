//! The mergeable state of one query row's softmax (M4.3 §0x0B, M4.4 §0x02).
//!
//! After any set of keys, a row is described by its maximum `m`, its sum `l = Σ exp(s - m)` and its
//! unnormalised numerator `u = Σ exp(s - m)·v`. States of disjoint key sets merge, in any order
//! and any tree; the state of no keys, `(-∞, 0, 0)`, is the identity. The numerator is a vector
//! that lives elsewhere (registers, an accumulator tile), so a merge hands out the two factors.

/// Row maximum and row sum; the numerator is scaled by the factors a merge returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowState<F> {
    /// Largest score so far, `-∞` if no key was visible.
    pub row_max: F,
    /// `Σ exp(score - row_max)`.
    pub row_sum: F,
}

/// What each side's numerator is multiplied by before they are added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rescale<F> {
    /// Factor of the left (older) numerator.
    pub left: F,
    /// Factor of the right (newer) numerator.
    pub right: F,
}

macro_rules! row_state {
    ($float:ty) => {
        impl RowState<$float> {
            /// The state of no keys.
            pub const EMPTY: Self = Self { row_max: <$float>::NEG_INFINITY, row_sum: 0.0 };

            /// Merges the states of two disjoint key sets; `exp` is the exponential of the
            /// caller's platform. The identity branch is taken for real: `exp(-∞ - -∞)` is never
            /// evaluated, so two empty states merge to an empty one.
            pub fn merge(
                self,
                other: Self,
                exp: impl Fn($float) -> $float,
            ) -> (Self, Rescale<$float>) {
                let row_max = if self.row_max > other.row_max || other.row_max.is_nan() {
                    self.row_max
                } else {
                    other.row_max
                };
                let factor = |own: $float| {
                    if own == <$float>::NEG_INFINITY { 0.0 } else { exp(own - row_max) }
                };
                let rescale = Rescale { left: factor(self.row_max), right: factor(other.row_max) };
                let row_sum = self.row_sum * rescale.left + other.row_sum * rescale.right;
                (Self { row_max, row_sum }, rescale)
            }

            /// Factor of the numerator at the end of a row: `1 / l`, or 0 for a row that saw
            /// nothing, which makes its output exactly zero.
            pub fn normalizer(self) -> $float {
                if self.row_sum == 0.0 { 0.0 } else { 1.0 / self.row_sum }
            }

            /// Log-sum-exp of the row's scores, `m + ln l`; `-∞` for a row that saw nothing.
            pub fn lse(self, ln: impl Fn($float) -> $float) -> $float {
                if self.row_sum == 0.0 {
                    <$float>::NEG_INFINITY
                } else {
                    self.row_max + ln(self.row_sum)
                }
            }
        }
    };
}
row_state!(f32);
row_state!(f64);

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn of(scores: &[f64]) -> RowState<f64> {
        let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if row_max == f64::NEG_INFINITY {
            return RowState::<f64>::EMPTY;
        }
        RowState { row_max, row_sum: scores.iter().map(|s| (s - row_max).exp()).sum() }
    }

    proptest! {
        #[test]
        fn any_split_merges_to_the_whole(
            scores in prop::collection::vec(
                prop_oneof![-50.0..50.0_f64, Just(f64::NEG_INFINITY)], 0..40),
            cut in 0..40_usize,
        ) {
            let cut = cut.min(scores.len());
            let whole = of(&scores);
            let (merged, _) = of(&scores[..cut]).merge(of(&scores[cut..]), f64::exp);
            prop_assert_eq!(merged.row_max, whole.row_max);
            prop_assert!((merged.row_sum - whole.row_sum).abs() <= 1e-12 * whole.row_sum);
            let reversed: Vec<f64> = scores.iter().rev().copied().collect();
            prop_assert!((of(&reversed).row_sum - whole.row_sum).abs() <= 1e-12 * whole.row_sum);
        }
    }

    #[test]
    fn the_empty_state_is_the_identity() {
        let state = of(&[1.0, -2.0]);
        let empty = RowState::<f64>::EMPTY;
        assert_eq!(empty.merge(empty, f64::exp).0, empty);
        assert_eq!(state.merge(empty, f64::exp).0, state);
        assert_eq!(empty.merge(state, f64::exp).0, state);
        assert_eq!((empty.normalizer(), empty.lse(f64::ln)), (0.0, f64::NEG_INFINITY));
    }
}
