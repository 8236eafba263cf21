//! How far a result may be from the reference.
//!
//! A 16-bit kernel rounds P (and dS) to its element type, so its error is measured by what those
//! roundings cost an otherwise exact computation:
//! `max|x − ref| ≤ 2·max|rounded − ref| + 2⁻¹⁰·max|ref| + 1e-6`, where `rounded` is the dense CPU
//! path with operands and results of the element type. An f32 implementation rounds nothing to 16
//! bits: for it the middle term is 2⁻¹⁹.

use ferroflash::Dtype;

/// A measured error and the largest that passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// `max|x − ref|`; NaN where one of the two is not finite and they differ.
    pub max_error: f64,
    /// The bound.
    pub tolerance: f64,
}

impl Measured {
    /// Whether the error is within the bound; not so where it is NaN.
    pub fn holds(&self) -> bool {
        self.max_error <= self.tolerance
    }

    /// Panics unless it holds.
    pub fn assert_holds(&self, name: &str) {
        let Self { max_error, tolerance } = self;
        assert!(self.holds(), "{name}: error {max_error:e}, at most {tolerance:e} passes");
    }
}

/// The largest difference; NaN if exactly one of a pair is NaN or infinities differ.
pub fn max_difference(x: &[f64], reference: &[f64]) -> f64 {
    assert_eq!(x.len(), reference.len(), "lengths");
    let mut largest = 0.0;
    for (x, reference) in x.iter().zip(reference) {
        if x == reference || (x.is_nan() && reference.is_nan()) {
            continue;
        }
        let difference = (x - reference).abs();
        if !difference.is_finite() {
            return f64::NAN;
        }
        largest = f64::max(largest, difference);
    }
    largest
}

/// The largest finite magnitude.
pub fn max_magnitude(values: &[f64]) -> f64 {
    values.iter().filter(|value| value.is_finite()).fold(0.0, |max, value| value.abs().max(max))
}

/// The bound on o and on gradients, from the reference and the rounded baseline.
pub fn result_error(x: &[f64], reference: &[f64], rounded: &[f64], dtype: Dtype) -> Measured {
    let relative = match dtype {
        Dtype::Bf16 | Dtype::F16 => 1.0 / 1024.0,
        Dtype::F32 => 1.0 / 524_288.0,
    };
    let finite: Vec<(f64, f64)> = rounded
        .iter()
        .zip(reference)
        .filter(|(rounded, reference)| rounded.is_finite() && reference.is_finite())
        .map(|(rounded, reference)| (*rounded, *reference))
        .collect();
    let baseline = finite.iter().fold(0.0, |max, (a, b)| f64::max(max, (a - b).abs()));
    let tolerance = 2.0 * baseline + relative * max_magnitude(reference) + 1e-6;
    Measured { max_error: max_difference(x, reference), tolerance }
}

/// The bound on lse, which is f32 whatever the element type: 2⁻¹⁸ of the largest, and 1e-5.
pub fn lse_error(lse: &[f64], reference: &[f64]) -> Measured {
    let tolerance = max_magnitude(reference) / 262_144.0 + 1e-5;
    Measured { max_error: max_difference(lse, reference), tolerance }
}

/// Panics unless rows that see no key (lse = −∞) are exactly zero, and no other row is, where the
/// reference is not. `row` names the row of lse that element `index` of o belongs to.
pub fn assert_zero_rows(
    o: &[f64],
    reference: &[f64],
    lse: &[f64],
    value_dim: usize,
    row: impl Fn(usize) -> usize,
) {
    for (number, (had, exact)) in
        o.chunks_exact(value_dim).zip(reference.chunks_exact(value_dim)).enumerate()
    {
        let is_zero = had.iter().all(|value| *value == 0.0);
        if lse[row(number)] == f64::NEG_INFINITY {
            assert!(is_zero, "o of row {number}, which sees no key, is {had:?}");
        } else if exact.iter().any(|value| value.abs() > 1e-6) {
            assert!(!is_zero, "o of row {number}, which sees keys, is all zero");
        }
    }
}
