//! Comparing results with the f64 oracle.
//!
//! With `ref` the oracle's result and `rounded` the oracle's again, with the roundings that the
//! element type itself asks for (`Precision::Rounded`), a result x passes if
//!
//! | element type | max \|x − ref\| is at most |
//! | --- | --- |
//! | bf16, f16 | 2·max \|rounded − ref\| + 2⁻¹⁰·max \|ref\| + 1e-6 |
//! | f32 | (4 + 2√D)·max \|rounded − ref\| + 2e-6·max \|ref\| |
//! | lse, always f32 | as f32, + 1e-5 |
//!
//! with D the longer of the two head dimensions: `rounded` rounds a score once, while a sum in f32
//! over D channels is rounded D times, which a random walk takes √D as far, and now and then twice
//! that. There is no absolute term for f32, since results are small where the values are; but a
//! log-sum-exp may be small where scores are not.
//!
//! Where scores are in the thousands, a gradient may be nothing but the difference of two equal
//! f32 sums; its check then fails though nothing better can be had in f32.

use ferroflash::{Dtype, Shape};
use serde::Serialize;

use crate::failure::{Failure, Result};

/// How far a result is from the oracle's.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    /// Largest |x − ref|.
    pub(crate) max_abs_error: f64,
    /// ‖x − ref‖ / ‖ref‖.
    pub(crate) rel_error: f64,
    /// What `max_abs_error` may be.
    pub(crate) bound: f64,
    /// Whether it is.
    pub(crate) passed: bool,
}

/// The factors of a bound.
struct Slack {
    /// Of max |rounded − ref|.
    baseline: f64,
    /// Of max |ref|.
    relative: f64,
    absolute: f64,
}

impl Check {
    /// Compares `result`, of element type `dtype`, with the oracle's results in f64 and rounded.
    pub(crate) fn new(
        dtype: Dtype,
        shape: &Shape,
        result: impl Iterator<Item = f64>,
        reference: &[f64],
        rounded: &[f64],
    ) -> Self {
        let slack = match dtype {
            Dtype::Bf16 | Dtype::F16 => {
                Slack { baseline: 2.0, relative: 1.0 / 1024.0, absolute: 1e-6 }
            }
            Dtype::F32 => Slack { baseline: sums_in_f32(shape), relative: 2e-6, absolute: 0.0 },
        };
        Self::within(&slack, result, reference, rounded)
    }

    /// Compares log-sum-exps.
    pub(crate) fn of_lse(shape: &Shape, lse: &[f32], reference: &[f64], rounded: &[f64]) -> Self {
        let slack = Slack { baseline: sums_in_f32(shape), relative: 2e-6, absolute: 1e-5 };
        Self::within(&slack, lse.iter().map(|&lse| f64::from(lse)), reference, rounded)
    }

    fn within(
        slack: &Slack,
        result: impl Iterator<Item = f64>,
        reference: &[f64],
        rounded: &[f64],
    ) -> Self {
        let mut max_abs_error = 0.0_f64;
        let (mut error_squares, mut squares) = (0.0, 0.0);
        let mut count = 0;
        for (value, &reference) in result.zip(reference) {
            let error = difference(value, reference);
            max_abs_error = max_abs_error.max(error);
            error_squares += error * error;
            squares += if reference.is_finite() { reference * reference } else { 0.0 };
            count += 1;
        }
        if count != reference.len() {
            max_abs_error = f64::INFINITY;
        }
        let baseline = rounded.iter().zip(reference).map(|(a, b)| difference(*a, *b));
        // A 16-bit type overflows where f64 does not; that allows nothing elsewhere.
        let baseline = baseline.filter(|error| error.is_finite()).fold(0.0, f64::max);
        let largest = reference.iter().filter(|x| x.is_finite()).fold(0.0, |m, x| x.abs().max(m));
        let bound = slack.baseline * baseline + slack.relative * largest + slack.absolute;
        let rel_error = if error_squares == 0.0 { 0.0 } else { (error_squares / squares).sqrt() };
        Self { max_abs_error, rel_error, bound, passed: max_abs_error <= bound }
    }

    /// An error if the check of `name` did not pass.
    pub(crate) fn verdict(&self, name: &str) -> Result<()> {
        if self.passed {
            return Ok(());
        }
        Err(Failure::Run(format!(
            "--check: {name} is {:.3e} from the f64 oracle, and at most {:.3e} is right; \
             nothing was written",
            self.max_abs_error, self.bound
        )))
    }

    /// In words.
    pub(crate) fn words(&self) -> String {
        format!(
            "{}: max error {:.2e} (bound {:.2e}), relative error {:.2e}",
            if self.passed { "passed" } else { "FAILED" },
            self.max_abs_error,
            self.bound,
            self.rel_error
        )
    }
}

/// How much further than one rounding the roundings of a sum over channels go.
fn sums_in_f32(shape: &Shape) -> f64 {
    4.0 + 2.0 * (shape.head_dim.max(shape.value_dim) as f64).sqrt()
}

/// |a − b|; 0 where both are NaN or the same infinity, infinite where only one is.
fn difference(a: f64, b: f64) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let difference = (a - b).abs();
    if difference.is_nan() { f64::INFINITY } else { difference }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(dtype: Dtype, result: &[f64], reference: &[f64]) -> Check {
        let shape = Shape {
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: 3,
            kv_len: 3,
            head_dim: 1,
            value_dim: 1,
        };
        Check::new(dtype, &shape, result.iter().copied(), reference, reference)
    }

    #[test]
    fn errors_beyond_the_bound_fail() {
        let reference = [1.0, -2.0, 0.5];
        assert!(check(Dtype::F32, &[1.0, -2.000_003, 0.5], &reference).passed);
        let wrong = check(Dtype::F32, &[1.0, -2.000_005, 0.5], &reference);
        assert!(!wrong.passed);
        assert_eq!(wrong.verdict("o").map_err(|failure| failure.exit_code()), Err(1));
        assert!(check(Dtype::Bf16, &[1.0, -2.001, 0.5], &reference).passed);
        assert!(!check(Dtype::Bf16, &[1.0, -2.002, 0.5], &reference).passed);
    }

    #[test]
    fn values_that_are_no_numbers_must_be_the_same() {
        let odd = [f64::NAN, f64::INFINITY, 1.0];
        assert!(check(Dtype::F32, &odd, &odd).passed);
        for wrong in [[0.0, f64::INFINITY, 1.0], [f64::NAN, 3.0, 1.0], [f64::NAN; 3]] {
            let check = check(Dtype::F32, &wrong, &odd);
            assert!(!check.passed && check.max_abs_error == f64::INFINITY);
        }
        assert!(!check(Dtype::F32, &[1.0], &[1.0, 1.0]).passed);
    }

    #[test]
    fn zeros_have_no_relative_error() {
        assert_eq!(check(Dtype::F32, &[0.0; 2], &[0.0; 2]).rel_error, 0.0);
    }
}
