//! One backend at one fault: runs calls, compares every result, and holds refusals to the table.

use std::cell::Cell;

use ferroflash::Error;
use ferroflash_tests::backend::{
    Backend, Grads, Outcome, backward, backward_references, forward, forward_references,
};
use ferroflash_tests::bound::{lse_error, max_difference, max_magnitude, result_error};
use ferroflash_tests::case::Case;
use ferroflash_tests::element::Real;
use ferroflash_tests::reference::attend;

/// Most products of a call that is compared with plain loops as well.
const PLAIN_LOOPS: usize = 20_000_000;

/// Reasons that a backend is expected to give, forward and backward.
pub(crate) type Refusals = [&'static [&'static str]; 2];

/// Nothing is refused.
pub(crate) const NO_REFUSALS: Refusals = [&[], &[]];

/// A backend, and what it is expected to refuse.
pub(crate) struct Probe {
    pub(crate) backend: Backend,
    refusals: Refusals,
    calls: Cell<usize>,
}

impl Probe {
    pub(crate) fn new(backend: Backend, refusals: Refusals) -> Self {
        Self { backend, refusals, calls: Cell::new(0) }
    }

    /// Panics if nothing was run: a fault that tests nothing is no pass.
    pub(crate) fn finish(self) {
        assert!(self.calls.get() > 0, "the fault made no call");
    }

    /// o and lse, compared with the reference; `None` where the backend refused as it should.
    pub(crate) fn forward<T: Real>(&self, case: &Case<T>) -> Option<Outcome> {
        let had = self.forward_uncompared(case)?;
        if self.backend == Backend::CpuDense {
            if is_small(case) {
                let (exact, _) = attend(case);
                let scores = max_magnitude(&exact.lse);
                assert_equal(&had.o, &exact.o, scores, "o");
                assert_equal(&had.lse, &exact.lse, scores, "lse");
            }
            return Some(had);
        }
        let [exact, rounded] = forward_references(case);
        result_error(&had.o, &exact.o, &rounded.o, T::DTYPE).assert_holds("o");
        lse_error(&had.lse, &exact.lse).assert_holds("lse");
        Some(had)
    }

    /// o and lse where the oracle would take too long or f32 cannot follow it.
    pub(crate) fn forward_uncompared<T: Real>(&self, case: &Case<T>) -> Option<Outcome> {
        self.expect(0, forward(self.backend, case))
    }

    /// Every gradient, compared with the reference.
    pub(crate) fn backward<T: Real>(&self, case: &Case<T>) -> Option<Grads> {
        let had = self.backward_uncompared(case)?;
        if self.backend == Backend::CpuDense {
            if is_small(case) {
                let (outcome, exact) = attend(case);
                let scores = max_magnitude(&outcome.lse);
                compare(&had, &exact, |had, exact, _, name| {
                    assert_equal(had, exact, scores, name);
                });
            }
            return Some(had);
        }
        let [exact, rounded] = backward_references(case);
        let rounded = pairs(&rounded);
        compare(&had, &exact, |had, exact, index, name| {
            result_error(had, exact, rounded[index].1, T::DTYPE).assert_holds(name);
        });
        Some(had)
    }

    /// Every gradient, uncompared.
    pub(crate) fn backward_uncompared<T: Real>(&self, case: &Case<T>) -> Option<Grads> {
        self.expect(1, backward(self.backend, case))
    }

    /// The answer to a legal call in a direction (0 forward, 1 backward): its result, or the
    /// refusal in the table.
    fn expect<R>(&self, direction: usize, answer: Result<R, Error>) -> Option<R> {
        self.calls.set(self.calls.get() + 1);
        let refusals = self.refusals[direction];
        match answer {
            Ok(result) if refusals.is_empty() => Some(result),
            Ok(_) => panic!("it ran, but the table says that it refuses {refusals:?}"),
            Err(error) => {
                assert!(is_refusal(&error, refusals), "{error}, not one of {refusals:?}");
                None
            }
        }
    }

    /// A call that is wrong: the error, which names `argument`.
    pub(crate) fn wrong<T: Real>(&self, case: &Case<T>, argument: &str) {
        self.calls.set(self.calls.get() + 1);
        let errors = [
            forward(self.backend, case).expect_err("the forward pass accepts it"),
            backward(self.backend, case).expect_err("the backward pass accepts it"),
        ];
        for (error, refusals) in errors.iter().zip(self.refusals) {
            // What a kernel refuses may be found before or after what is wrong.
            let is_found = named(error) == argument || is_refusal(error, refusals);
            assert!(is_found, "{error}: neither {argument} nor one of {refusals:?}");
        }
    }
}

/// Whether an error is one of these refusals.
fn is_refusal(error: &Error, refusals: &[&str]) -> bool {
    let Error::Unsupported { reasons, .. } = error else { return false };
    refusals.iter().any(|refusal| reasons.contains(refusal))
}

/// The argument or tensor that an error names.
pub(crate) fn named(error: &Error) -> &'static str {
    match error {
        Error::Argument { argument, .. } => argument,
        Error::Dimensions { tensor, .. }
        | Error::ChannelStride { tensor, .. }
        | Error::OutOfBounds { tensor, .. }
        | Error::Placement { tensor, .. }
        | Error::Presence { tensor, .. } => tensor,
        _ => "",
    }
}

fn is_small<T: Real>(case: &Case<T>) -> bool {
    let s = case.attention.shape();
    let cells = match &case.packed {
        None => s.batch * s.q_len * s.kv_len,
        Some(packed) => {
            let span = |pair: &[i32]| (pair[1] - pair[0]) as usize;
            let spans = packed.cu_q.windows(2).zip(packed.cu_k.windows(2));
            spans.map(|(q, k)| span(q) * span(k)).sum()
        }
    };
    cells * s.q_heads * (s.head_dim + s.value_dim) <= PLAIN_LOOPS
}

/// Each gradient with its name.
fn pairs(grads: &Grads) -> Vec<(&'static str, &[f64])> {
    let Grads { dq, dk, dv, dbias, dsink } = grads;
    let mut pairs = vec![("dq", &dq[..]), ("dk", &dk[..]), ("dv", &dv[..])];
    pairs.extend(dbias.as_deref().map(|dbias| ("dbias", dbias)));
    pairs.extend(dsink.as_deref().map(|dsink| ("dsink", dsink)));
    pairs
}

fn compare(had: &Grads, exact: &Grads, judge: impl Fn(&[f64], &[f64], usize, &str)) {
    let (had, exact) = (pairs(had), pairs(exact));
    assert_eq!(had.len(), exact.len(), "gradients");
    for (index, ((name, had), (_, exact))) in had.into_iter().zip(exact).enumerate() {
        judge(had, exact, index, name);
    }
}

/// Two binary64 results, up to the order of their sums; scores as large as `scores` are rounded by
/// as much before they are exponents.
#[track_caller]
fn assert_equal(had: &[f64], exact: &[f64], scores: f64, name: &str) {
    let tolerance = (1e-11 + 1e-15 * scores) * max_magnitude(exact).max(1.0);
    let difference = max_difference(had, exact);
    assert!(difference <= tolerance, "{name}: {difference:e} from plain loops, over {tolerance:e}");
}

/// Panics unless all of it is finite.
#[track_caller]
pub(crate) fn assert_finite(values: &[f64], name: &str) {
    let bad = values.iter().position(|value| !value.is_finite());
    assert!(bad.is_none(), "{name}[{}] is {}", bad.unwrap_or(0), values[bad.unwrap_or(0)]);
}

/// Panics unless all of it is zero, of either sign.
#[track_caller]
pub(crate) fn assert_zero(values: &[f64], name: &str) {
    let bad = values.iter().position(|value| *value != 0.0);
    assert!(bad.is_none(), "{name}[{}] is {}", bad.unwrap_or(0), values[bad.unwrap_or(0)]);
}

/// Panics unless the two differ by no more than `tolerance` anywhere.
#[track_caller]
pub(crate) fn assert_close(had: &[f64], expected: &[f64], tolerance: f64, name: &str) {
    let difference = max_difference(had, expected);
    assert!(difference <= tolerance, "{name}: off by {difference:e}, over {tolerance:e}");
}

/// All gradients are finite.
#[track_caller]
pub(crate) fn assert_finite_gradients(grads: &Grads) {
    for (name, values) in pairs(grads) {
        assert_finite(values, name);
    }
}
