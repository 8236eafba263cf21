//! Tests of the oracle: differences, identities, and small inputs with known answers.

mod case;
mod dropout;
mod gradients;
mod masks;
mod precision;
mod range;
mod refused;
mod seeds;

/// Whether `a` and `b` differ by no more than `tolerance` everywhere; two NaNs never agree.
#[track_caller]
fn assert_close(a: &[f64], b: &[f64], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a == b || (a - b).abs() <= tolerance, "{what}[{index}]: {a} and {b}");
    }
}

#[track_caller]
fn assert_zero(values: &[f64], what: &str) {
    assert!(values.iter().all(|value| *value == 0.0), "{what} is not all 0: {values:?}");
}
