//! The scalars that a schedule runs on.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Sub};

use ferroflash_core::row_state::{Rescale, RowState};

/// A scalar of a schedule.
pub trait Real:
    Copy
    + Debug
    + PartialEq
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// Whether there is a value at all; products are left out where there is none.
    const HAS_VALUE: bool = true;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The state of a row that has seen no key.
    const EMPTY: RowState<Self>;

    /// The nearest scalar.
    fn from_f64(value: f64) -> Self;
    /// The value in binary64, exactly.
    fn to_f64(self) -> f64;
    /// The exponential.
    fn exp(self) -> Self;
    /// The states of two disjoint sets of keys as one, and the factors of their numerators; see
    /// [`RowState::merge`].
    fn merge(left: RowState<Self>, right: RowState<Self>) -> (RowState<Self>, Rescale<Self>);
    /// `1 / l`, or 0 for a row that saw nothing.
    fn normalizer(state: RowState<Self>) -> Self;
    /// `m + ln l`, or −∞ for a row that saw nothing.
    fn lse(state: RowState<Self>) -> Self;
}

macro_rules! real {
    ($float:ident) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const EMPTY: RowState<Self> = RowState::<$float>::EMPTY;

            fn from_f64(value: f64) -> Self {
                value as $float
            }

            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            fn exp(self) -> Self {
                $float::exp(self)
            }

            fn merge(
                left: RowState<Self>,
                right: RowState<Self>,
            ) -> (RowState<Self>, Rescale<Self>) {
                left.merge(right, $float::exp)
            }

            fn normalizer(state: RowState<Self>) -> Self {
                state.normalizer()
            }

            fn lse(state: RowState<Self>) -> Self {
                state.lse($float::ln)
            }
        }
    };
}
real!(f32);
real!(f64);

/// IEEE binary16 in which every single operation is rounded, to nearest and ties to even. It shows
/// what the order of merges costs (M4.3 §0x08G); no device adds states up like this.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Binary16(f64);

impl Binary16 {
    /// Rounds. An operation in binary64 on binary16 operands, rounded again, is rounded right:
    /// 53 bits are more than twice 11 and two (Figueroa, "When is double rounding innocuous?").
    fn round(value: f64) -> Self {
        if value == 0.0 || !value.is_finite() {
            return Self(value);
        }
        let exponent = (value.to_bits() >> 52 & 0x7FF) as i32 - 1023;
        let unit = 2_f64.powi(exponent.max(-14) - 10);
        let rounded = (value / unit).round_ties_even() * unit;
        Self(if rounded.abs() > 65504.0 { f64::INFINITY.copysign(value) } else { rounded })
    }
}

/// The four operations of a type, from an expression of its operands.
macro_rules! arithmetic {
    ($number:ty, $($operator:ident $method:ident $result:expr;)*) => {
        $(impl $operator for $number {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                let result: fn(Self, Self) -> Self = $result;
                result(self, other)
            }
        })*
    };
}

arithmetic! { Binary16,
    Add add |a, b| Self::round(a.0 + b.0);
    Sub sub |a, b| Self::round(a.0 - b.0);
    Mul mul |a, b| Self::round(a.0 * b.0);
    Div div |a, b| Self::round(a.0 / b.0);
}

impl Real for Binary16 {
    const ZERO: Self = Self(0.0);
    const ONE: Self = Self(1.0);
    const EMPTY: RowState<Self> = RowState { row_max: Self(f64::NEG_INFINITY), row_sum: Self(0.0) };

    fn from_f64(value: f64) -> Self {
        Self::round(value)
    }

    fn to_f64(self) -> f64 {
        self.0
    }

    fn exp(self) -> Self {
        Self::round(self.0.exp())
    }

    fn merge(left: RowState<Self>, right: RowState<Self>) -> (RowState<Self>, Rescale<Self>) {
        let widened = |state: RowState<Self>| RowState { row_max: state.row_max.0, row_sum: 0.0 };
        let (maximum, factors) = widened(left).merge(widened(right), |x| Self::round(x.exp()).0);
        let rescale = Rescale { left: Self(factors.left), right: Self(factors.right) };
        let row_sum = left.row_sum * rescale.left + right.row_sum * rescale.right;
        (RowState { row_max: Self(maximum.row_max), row_sum }, rescale)
    }

    fn normalizer(state: RowState<Self>) -> Self {
        if state.row_sum == Self::ZERO { Self::ZERO } else { Self::ONE / state.row_sum }
    }

    fn lse(state: RowState<Self>) -> Self {
        if state.row_sum == Self::ZERO {
            return Self(f64::NEG_INFINITY);
        }
        state.row_max + Self::round(state.row_sum.0.ln())
    }
}

/// A scalar without a value: a schedule of these visits, loads and stores as any other, and is
/// done in no time.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct NoValue;

arithmetic! { NoValue,
    Add add |_, _| NoValue;
    Sub sub |_, _| NoValue;
    Mul mul |_, _| NoValue;
    Div div |_, _| NoValue;
}

impl Real for NoValue {
    const HAS_VALUE: bool = false;
    const ZERO: Self = NoValue;
    const ONE: Self = NoValue;
    const EMPTY: RowState<Self> = RowState { row_max: NoValue, row_sum: NoValue };

    fn from_f64(_: f64) -> Self {
        NoValue
    }

    fn to_f64(self) -> f64 {
        f64::NAN
    }

    fn exp(self) -> Self {
        NoValue
    }

    fn merge(_: RowState<Self>, _: RowState<Self>) -> (RowState<Self>, Rescale<Self>) {
        (Self::EMPTY, Rescale { left: NoValue, right: NoValue })
    }

    fn normalizer(_: RowState<Self>) -> Self {
        NoValue
    }

    fn lse(_: RowState<Self>) -> Self {
        NoValue
    }
}
