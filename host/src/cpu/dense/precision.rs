//! What is rounded on the way.

use ferroflash_core::axes::Dtype;
use half::{bf16, f16};

/// How much of the arithmetic is binary64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// All of it: the reference.
    F64,
    /// As a kernel of this element type rounds, which gives the error that the type itself costs:
    /// scores, lse and delta to f32; the operands of the second and later products (the
    /// unnormalised P, P, dS) and the results (o, which delta is made of, dq, dk, dv) to the
    /// element type. Sums within one product are not rounded, as f32 accumulation errs far less
    /// than a 16-bit operand.
    Rounded(Dtype),
}

impl Precision {
    /// A row's state or a score, which kernels hold in f32.
    pub(super) fn state(self, value: f64) -> f64 {
        match self {
            Precision::F64 => value,
            Precision::Rounded(_) => f64::from(value as f32),
        }
    }

    /// An operand of a matrix product, computed in f32 and packed to the element type.
    pub(super) fn operand(self, value: f64) -> f64 {
        let single = value as f32;
        match self {
            Precision::F64 => value,
            Precision::Rounded(Dtype::F32) => f64::from(single),
            Precision::Rounded(Dtype::F16) => f16::from_f32(single).to_f64(),
            Precision::Rounded(Dtype::Bf16) => bf16::from_f32(single).to_f64(),
        }
    }

    /// A result, accumulated in f32 and stored in the element type.
    pub(super) fn result(self, value: f64) -> f64 {
        self.operand(value)
    }
}
