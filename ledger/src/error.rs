//! One error for every figure that cannot be had, and the arithmetic that raises it.

use std::fmt;

/// Result of a ledger function.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a figure cannot be had; each names the field.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A field that counts or divides is zero.
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// A field has a value that the formula does not admit.
    Field {
        /// Name of the field.
        field: &'static str,
        /// What it had.
        had: String,
        /// What it needs.
        needs: String,
    },
    /// A figure exceeds what its type holds.
    Overflow {
        /// Name of the figure.
        field: &'static str,
    },
    /// A name that no table has.
    Unknown {
        /// What was looked up.
        field: &'static str,
        /// The name given.
        had: String,
        /// The names there are.
        known: String,
    },
}

impl Error {
    /// A field whose value the formula does not admit.
    pub fn field(field: &'static str, had: impl fmt::Display, needs: impl fmt::Display) -> Self {
        Self::Field { field, had: had.to_string(), needs: needs.to_string() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { field } => write!(f, "{field}: is 0, but must be at least 1"),
            Self::Field { field, had, needs } => {
                write!(f, "{field}: is {had}, but must be {needs}")
            }
            Self::Overflow { field } => write!(f, "{field}: exceeds what 128 bits hold"),
            Self::Unknown { field, had, known } => {
                write!(f, "{field}: there is no {had:?}; there are {known}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// `value`, or [`Error::Zero`].
pub(crate) fn positive(field: &'static str, value: u64) -> Result<u128> {
    if value == 0 { Err(Error::Zero { field }) } else { Ok(u128::from(value)) }
}

/// The product of `factors`, or [`Error::Overflow`].
pub(crate) fn product(field: &'static str, factors: &[u128]) -> Result<u128> {
    if factors.contains(&0) {
        return Ok(0);
    }
    let step = |product: u128, factor: &u128| product.checked_mul(*factor);
    factors.iter().try_fold(1, step).ok_or(Error::Overflow { field })
}

/// The sum of `terms`, or [`Error::Overflow`].
pub(crate) fn sum(field: &'static str, terms: &[u128]) -> Result<u128> {
    let step = |sum: u128, term: &u128| sum.checked_add(*term);
    terms.iter().try_fold(0, step).ok_or(Error::Overflow { field })
}

/// Blocks of `block` positions that `len` positions take, `⌈len / block⌉`.
pub(crate) fn blocks(field: &'static str, len: u64, block: u64) -> Result<u128> {
    Ok(u128::from(len).div_ceil(positive(field, block)?))
}

/// A finite number above zero, or an error.
pub(crate) fn positive_real(field: &'static str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::field(field, value, "a finite number above 0"))
}

/// `a / b` as a real; 0 where `b` is 0.
pub(crate) fn ratio(a: u128, b: u128) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_wraps() {
        let overflow = Err(Error::Overflow { field: "x" });
        assert_eq!(product("x", &[u128::MAX, 2]), overflow);
        assert_eq!(product("x", &[u128::MAX, 2, 0]), Ok(0));
        assert_eq!(sum("x", &[u128::MAX, 1]), overflow);
        assert_eq!(positive("x", 0), Err(Error::Zero { field: "x" }));
        assert_eq!(blocks("x", 5, 0), Err(Error::Zero { field: "x" }));
        assert_eq!(blocks("x", u64::MAX, 1), Ok(u128::from(u64::MAX)));
        assert!(positive_real("x", f64::NAN).is_err());
    }
}
