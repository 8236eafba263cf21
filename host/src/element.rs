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
        bf16::from_f64(value)
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
        f16::from_f64(value)
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
