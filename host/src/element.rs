//! Element types of tensors.

use ferroflash_core::axes::Dtype;
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
    impl Sealed for f32 {}
}

/// An element type of q, k, v, o and their gradients: `bf16`, `f16` or `f32`.
///
/// Products accumulate in f32 whatever the element type; the oracle converts to f64.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + 'static
{
    /// The type's name.
    const DTYPE: Dtype;
    /// Exact widening.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Rounds once, from f64, to nearest.
    fn from_f64(value: f64) -> Self;
    /// Exact widening.
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn from_f64(value: f64) -> Self {
        bf16::from_f32(to_odd(value))
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn from_f64(value: f64) -> Self {
        f16::from_f32(to_odd(value))
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

/// The f32 towards zero of `value`, its last bit set if anything was cut off. Rounded to a shorter
/// format, it rounds as `value` itself would: no tie is made or lost on the way.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || near.is_nan() {
        return near;
    }
    let cut = if near.is_infinite() || f64::from(near).abs() > value.abs() {
        f32::from_bits(near.to_bits() - 1)
    } else {
        near
    };
    f32::from_bits(cut.to_bits() | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f64_is_rounded_once() {
        let tie = 1.0 + 2_f64.powi(-8);
        assert_eq!(<bf16 as Element>::from_f64(tie).to_f32(), 1.0);
        assert_eq!(
            <bf16 as Element>::from_f64(tie + 2_f64.powi(-50)).to_f32(),
            1.0 + 2_f32.powi(-7)
        );
        assert_eq!(
            <bf16 as Element>::from_f64(-tie - 2_f64.powi(-50)).to_f32(),
            -1.0 - 2_f32.powi(-7)
        );
        let tie = 1.0 + 2_f64.powi(-11);
        assert_eq!(<f16 as Element>::from_f64(tie).to_f32(), 1.0);
        assert_eq!(
            <f16 as Element>::from_f64(tie + 2_f64.powi(-50)).to_f32(),
            1.0 + 2_f32.powi(-10)
        );
        assert_eq!(<f16 as Element>::from_f64(1e300).to_f32(), f32::INFINITY);
        assert!(<f16 as Element>::from_f64(f64::NAN).to_f32().is_nan());
    }
}
