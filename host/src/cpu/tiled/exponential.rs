//! Elementary functions as straight-line code, one lane at a time, for loops that vectorise.

use super::vector::MultiplyAdd;
#[cfg(test)]
use super::vector::{Fused, Separate};

/// ln 2 in two parts: the first has nine significant bits, so that small multiples are exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Adding it to a small number leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `-127 ln 2`: from here down the power of two is zero.
const LOWEST: f32 = -88.029_69;
/// `128 ln 2`: from here up it is infinite.
const HIGHEST: f32 = 88.722_84;

/// `eˣ` within 2 ulp wherever the result is a normal number.
///
/// x = n ln 2 + r with |r| ≤ ln 2 / 2, and eˣ = 2ⁿ·eʳ by a polynomial of degree 6 whose relative
/// error is 3e-9. Results below 2⁻¹²⁶ become 0 (subnormal factors would slow every product down),
/// those from 2¹²⁷·√2 on become +∞. A NaN stays one.
#[inline(always)]
pub(super) fn exp<M: MultiplyAdd>(x: f32) -> f32 {
    let x = if LOWEST > x { LOWEST } else { x };
    let x = if HIGHEST < x { HIGHEST } else { x };
    let shifted = M::multiply_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = M::multiply_add(n, -LN_2_HIGH, x);
    let r = M::multiply_add(n, -LN_2_LOW, r);
    let series = M::multiply_add(r, 1.381_446_7e-3, 8.368_781e-3);
    let series = M::multiply_add(r, series, 4.166_839_3e-2);
    let series = M::multiply_add(r, series, 1.666_652e-1);
    let series = M::multiply_add(r, series, 4.999_999_4e-1);
    let series = M::multiply_add(r, series, 1.0);
    let series = M::multiply_add(r, series, 1.0);
    series * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

/// `tanh x` within a few ulp, also near 0: the odd polynomial of Cephes' `tanhf` below 0.625,
/// `1 - 2 / (e²ˣ + 1)` above.
#[inline(always)]
pub(super) fn tanh<M: MultiplyAdd>(x: f32) -> f32 {
    let square = x * x;
    let series = M::multiply_add(square, -5.704_988_7e-3, 2.063_909e-2);
    let series = M::multiply_add(square, series, -5.373_971_6e-2);
    let series = M::multiply_add(square, series, 1.333_144_2e-1);
    let series = M::multiply_add(square, series, -3.333_328e-1);
    let near = M::multiply_add(x * square, series, x);
    let size = x.abs();
    let far = (1.0 - 2.0 / (exp::<M>(2.0 * size) + 1.0)).copysign(x);
    if size < 0.625 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(had: f32, exact: f64) -> f64 {
        let ulp = f64::from((exact as f32).abs().next_up()) - f64::from((exact as f32).abs());
        (f64::from(had) - exact).abs() / ulp
    }

    fn check(exp: fn(f32) -> f32, tanh: fn(f32) -> f32) {
        let mut worst = (0.0_f64, 0.0_f64);
        for step in 0..2_000_000 {
            let x = -87.3 + 175.6 * (step as f32 / 2_000_000.0);
            worst.0 = worst.0.max(ulps(exp(x), f64::from(x).exp()));
            let x = x / 10.0;
            worst.1 = worst.1.max(ulps(tanh(x), f64::from(x).tanh()));
        }
        assert!(worst.0 <= 2.0 && worst.1 <= 4.0, "{worst:?}");
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-100.0)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f32::INFINITY), tanh(0.0)), (f32::INFINITY, 0.0));
        assert_eq!((tanh(f32::NEG_INFINITY), tanh(f32::INFINITY)), (-1.0, 1.0));
        assert!(tanh(1e-20) == 1e-20 && tanh(f32::NAN).is_nan());
        for bits in [0x7fc0_0000, 0x7f80_0001, 0xffff_ffff] {
            assert!(exp(f32::from_bits(bits)).is_nan());
        }
    }

    #[test]
    fn exp_and_tanh_are_close_to_f64() {
        check(exp::<Fused>, tanh::<Fused>);
        check(exp::<Separate>, tanh::<Separate>);
    }
}
