//! Scores that are huge, equal, saturated or far below zero (r1 to r9).

use ferroflash::Broadcast;
use ferroflash_core::row_state::RowState;
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::memory::Arrangement;
use ferroflash_tests::random::normal;
use half::{bf16, f16};

use crate::probe::{Probe, assert_close, assert_finite, assert_finite_gradients, assert_zero};

/// One key with q·k = −524288, or −524287 where the last channel is 63 · −65.
fn r1(is_odd: bool) -> Case<bf16> {
    let mut case = Case::new(shape(1, (1, 1), (1, 1), (128, 128)), Sight::FULL, 20, 1.0);
    let is_last = |index| is_odd && index == 127;
    case.q.set(|index, _| if is_last(index) { 63.0 } else { 64.0 });
    case.k.set(|index, _| if is_last(index) { -65.0 } else { -64.0 });
    case.v.set(|_, _| 1.0);
    case
}

pub(crate) fn r1_forward(probe: &Probe) {
    for (is_odd, product) in [(false, -524_288.0), (true, -524_287.0)] {
        let case = r1(is_odd);
        let Some(had) = probe.forward(&case) else { continue };
        assert_eq!(had.o, [1.0; 128], "o is the only value");
        let lse = product * f64::from(case.scale);
        assert_close(&had.lse, &[lse], 46_341.0 / 8_388_608.0, "lse");
    }
}

pub(crate) fn r1_backward(probe: &Probe) {
    for is_odd in [false, true] {
        let case = r1(is_odd);
        let Some(had) = probe.backward(&case) else { continue };
        assert_zero(&had.dq, "dq");
        assert_zero(&had.dk, "dk");
        assert_eq!(had.dv, case.d_o.contents(), "P is 1");
    }
}

/// Every score near −120, so that a tail that is not masked overflows the exponential.
fn r2<T: Real>(len: usize, dim: usize) -> Case<T> {
    let mut case = Case::new(shape(1, (1, 1), (len, len), (dim, dim)), Sight::FULL, 21, 0.1);
    let first = |index: usize| index.is_multiple_of(dim);
    case.q.set(|index, value| if first(index) { 1.0 } else { value });
    let below = -120.0 * (dim as f32).sqrt();
    case.k.set(|index, value| if first(index) { below } else { value });
    let (v, d_o) = (normal(22, len * dim, 1.0), normal(23, len * dim, 1.0));
    case.v.set(|index, _| v[index]);
    case.d_o.set(|index, _| d_o[index]);
    case
}

const R2: [(usize, usize); 6] =
    [(64, 32), (192, 64), (320, 128), (704, 64), (1000, 32), (1216, 32)];

pub(crate) fn r2_forward(probe: &Probe) {
    fn run<T: Real>(probe: &Probe) {
        for (len, dim) in R2 {
            let Some(had) = probe.forward(&r2::<T>(len, dim)) else { continue };
            assert_finite(&had.o, "o");
            let near = -120.0 + (len as f64).ln();
            assert!(had.lse.iter().all(|lse| (lse - near).abs() < 1.0), "lse is near {near}");
        }
    }
    run::<bf16>(probe);
    run::<f16>(probe);
}

pub(crate) fn r2_backward(probe: &Probe) {
    fn run<T: Real>(probe: &Probe) {
        for (len, dim) in R2 {
            let case = r2::<T>(len, dim);
            let Some(had) = probe.backward(&case) else { continue };
            assert_finite_gradients(&had);
            // P sums to 1 over keys, so the sums of dv and of dO agree.
            let sum = |values: &[f64]| values.iter().sum::<f64>();
            let (dv, d_o) = (sum(&had.dv), sum(&case.d_o.contents()));
            assert!((dv - d_o).abs() < 0.02 * (len * dim) as f64, "dv sums to {dv}, dO to {d_o}");
        }
    }
    run::<bf16>(probe);
    run::<f16>(probe);
}

fn r3_one() -> Case<f16> {
    let mut case = Case::new(shape(1, (1, 1), (1, 1), (16, 16)), Sight::FULL, 24, 3.0);
    case.d_o.set(|_, _| 1.0);
    case
}

fn r3_many() -> Case<f16> {
    let mut case =
        Case::new(shape(1, (1, 1), (1024, 1024), (128, 128)), Sight::BOTTOM_RIGHT, 25, 3.0);
    case.d_o.set(|_, _| 1.0);
    case
}

pub(crate) fn r3_forward(probe: &Probe) {
    let case = r3_one();
    if let Some(had) = probe.forward(&case) {
        assert_eq!(had.o, case.v.contents(), "o is the only value");
    }
    if let Some(had) = probe.forward(&r3_many()) {
        assert_finite(&had.o, "o");
    }
}

pub(crate) fn r3_backward(probe: &Probe) {
    if let Some(had) = probe.backward(&r3_one()) {
        assert_close(&had.dq, &[0.0; 16], 1e-3, "dq");
        assert_close(&had.dk, &[0.0; 16], 1e-3, "dk");
        assert_eq!(had.dv, [1.0; 16], "dv is dO");
    }
    if let Some(had) = probe.backward(&r3_many()) {
        assert_finite_gradients(&had);
    }
}

/// All rows of q, k and v alike.
fn r4<T: Real>(value: f32) -> Case<T> {
    let mut case = Case::new(shape(4, (16, 16), (32, 32), (64, 64)), Sight::FULL, 26, 1.0);
    for tensor in [&mut case.q, &mut case.k, &mut case.v] {
        tensor.set(|_, _| value);
    }
    case
}

pub(crate) fn r4_f32_forward(probe: &Probe) {
    let case = r4::<f32>(1000.0);
    let Some(had) = probe.forward(&case) else { return };
    assert_close(&had.o, &case.v.contents(), 1e-3, "o is the value of every row");
}

pub(crate) fn r4_bf16_forward(probe: &Probe) {
    let case = r4::<bf16>(1e4);
    let Some(had) = probe.forward_uncompared(&case) else { return };
    assert_eq!(had.o, case.v.contents(), "o is the value of every row");
    assert_finite(&had.lse, "lse");
}

/// P is 1/32 up to a factor of e^(ulp(|L|)/2), what rounding L to f32 costs.
pub(crate) fn r4_f32_backward(probe: &Probe) {
    let case = r4::<f32>(1000.0);
    let Some(had) = probe.backward_uncompared(&case) else { return };
    assert_finite_gradients(&had);
    let lse = 1e6 * 64.0 * f64::from(case.scale);
    let half_an_ulp = f64::from((lse as f32).next_up() - lse as f32) / 2.0;
    let d_o = case.d_o.contents();
    for (index, dv) in had.dv.iter().enumerate() {
        let (batch, head_and_channel) = (index / 32 / 1024, index % 1024);
        let rows = (0..32).map(|row| d_o[(batch * 32 + row) * 1024 + head_and_channel]);
        let (sum, size) =
            rows.fold((0.0, 0.0), |(sum, size), d_o| (sum + d_o / 32.0, size + d_o.abs() / 32.0));
        let allowed = half_an_ulp.exp_m1() * size + 1e-5;
        assert!((dv - sum).abs() <= allowed, "dv[{index}] is {dv}, not {sum} ± {allowed}");
    }
}

pub(crate) fn r4_bf16_backward(probe: &Probe) {
    let Some(had) = probe.backward_uncompared(&r4::<bf16>(1e4)) else { return };
    assert_finite_gradients(&had);
}

/// Scores of ±1000 to ±10000 under a softcap of 50.
fn r5_saturated<T: Real>() -> Case<T> {
    let mut case = Case::new(shape(1, (1, 1), (8, 5), (1, 64)), Sight::FULL, 27, 1.0);
    let rows = [1.0, -1.0, 2.0, -2.0, 5.0, -5.0, 10.0, -10.0];
    case.q.set(|index, _| rows[index]);
    case.k.set(|_, _| 1000.0);
    case.with_scale(1.0).with_softcap(50.0)
}

fn r5_random<T: Real>() -> Case<T> {
    let case = Case::new(shape(2, (2, 1), (70, 90), (64, 64)), Sight::BOTTOM_RIGHT, 28, 10.0);
    case.with_softcap(50.0)
}

fn r5<T: Real>(probe: &Probe) {
    if let Some(had) = probe.forward(&r5_saturated::<T>()) {
        let lse: Vec<f64> =
            (0..8).map(|row| if row % 2 == 0 { 50.0 } else { -50.0 } + 5_f64.ln()).collect();
        assert_close(&had.lse, &lse, 1e-5, "every score is ±50");
    }
    if let Some(had) = probe.forward(&r5_random::<T>()) {
        let most = 50.0 + 90_f64.ln() + 1e-4;
        assert!(had.lse.iter().all(|lse| lse.abs() <= most));
    }
}

pub(crate) fn r5_forward(probe: &Probe) {
    r5::<f32>(probe);
}

pub(crate) fn r5_bf16_forward(probe: &Probe) {
    r5::<bf16>(probe);
}

pub(crate) fn r5_backward(probe: &Probe) {
    if let Some(had) = probe.backward(&r5_saturated::<f32>()) {
        assert_zero(&had.dq, "dq");
        assert_zero(&had.dk, "dk");
        assert_finite(&had.dv, "dv");
    }
    if let Some(had) = probe.backward(&r5_random::<f32>()) {
        assert_finite_gradients(&had);
    }
}

fn r6() -> Case<f32> {
    Case::new(shape(2, (4, 2), (200, 300), (64, 80)), Sight::BOTTOM_RIGHT, 29, 1.0)
}

/// f32-level error is the bound of an f32 case; here it is said once more, without a baseline.
pub(crate) fn r6_forward(probe: &Probe) {
    let case = r6();
    let Some(had) = probe.forward(&case) else { return };
    let (exact, _) = ferroflash_tests::reference::attend(&case);
    assert_close(&had.o, &exact.o, 5e-6, "o");
    assert_close(&had.lse, &exact.lse, 5e-6, "lse");
}

pub(crate) fn r6_backward(probe: &Probe) {
    let case = r6();
    let Some(had) = probe.backward(&case) else { return };
    let (_, exact) = ferroflash_tests::reference::attend(&case);
    assert_close(&had.dq, &exact.dq, 2e-5, "dq");
    assert_close(&had.dk, &exact.dk, 2e-5, "dk");
    assert_close(&had.dv, &exact.dv, 2e-5, "dv");
}

/// Scaled, capped and biased scores; both biases.
fn r7() -> Case<f32> {
    let axes = Broadcast { batch: true, heads: false, rows: false };
    Case::new(shape(2, (2, 2), (20, 30), (16, 16)), Sight::BOTTOM_RIGHT, 30, 2.0)
        .with_softcap(3.0)
        .with_alibi(&[0.25, 0.125])
        .with_bias(axes, Arrangement::CONTIGUOUS, 31)
}

pub(crate) fn r7_forward(probe: &Probe) {
    let case = r7();
    let Some(had) = probe.forward(&case) else { return };
    let (exact, _) = ferroflash_tests::reference::attend(&case);
    assert_close(&had.lse, &exact.lse, 1e-5, "lse is the natural log of the final scores' sum");
}

/// A loss on the mean of lse alone: dq = scale · Σ dL_i P_ij k_j and dv = 0.
pub(crate) fn r7_backward(probe: &Probe) {
    probe.backward(&r7().with_d_lse(32));
    let mut case = Case::<f32>::new(shape(1, (1, 1), (20, 30), (16, 16)), Sight::FULL, 33, 1.0);
    case.d_o.set(|_, _| 0.0);
    let mut case = case.with_d_lse(34);
    if let Some(d_lse) = &mut case.d_lse {
        d_lse.set(|_, _| 1.0 / 20.0);
    }
    let Some(had) = probe.backward(&case) else { return };
    assert_zero(&had.dv, "dv");
    // Σ P_ij k_j is attention with the keys as values.
    let mut keys = case.clone();
    keys.v = case.k.clone();
    let Some(mean_keys) = probe.forward(&keys) else { return };
    let factor = f64::from(case.scale) / 20.0;
    let expected: Vec<f64> = mean_keys.o.iter().map(|key| factor * key).collect();
    assert_close(&had.dq, &expected, 1e-6, "dq");
}

/// Merging states of nothing: no backend is involved, so the fault is run by one of them.
pub(crate) fn r8_forward(probe: &Probe) {
    let attention = Case::<bf16>::new(shape(1, (1, 1), (1, 1), (8, 8)), Sight::FULL, 35, 1.0);
    let Some(had) = probe.forward(&attention) else { return };
    let lse = had.lse[0];
    let state = RowState::<f64> { row_max: lse, row_sum: 1.0 };
    let empty = RowState::<f64>::EMPTY;
    let (nothing, rescale) = empty.merge(empty, f64::exp);
    assert_eq!((nothing.lse(f64::ln), rescale.left, rescale.right), (f64::NEG_INFINITY, 0.0, 0.0));
    for (a, b) in [(state, empty), (empty, state)] {
        assert_eq!(a.merge(b, f64::exp).0.lse(f64::ln), lse);
    }
}

/// A factor of −0.125, and the same with the queries negated instead.
fn r9<T: Real>() -> [Case<T>; 2] {
    let sized =
        || Case::<T>::new(shape(1, (4, 2), (70, 90), (64, 64)), Sight::BOTTOM_RIGHT, 36, 1.0);
    let negative = sized().with_scale(-0.125);
    let mut negated = sized().with_scale(0.125);
    negated.q.set(|_, value| -value);
    [negative, negated]
}

pub(crate) fn r9_forward(probe: &Probe) {
    let [negative, negated] = r9::<bf16>().map(|case| probe.forward(&case));
    assert_eq!(negative, negated);
}

pub(crate) fn r9_backward(probe: &Probe) {
    let [negative, negated] = r9::<bf16>().map(|case| probe.backward(&case));
    let (Some(negative), Some(negated)) = (negative, negated) else { return };
    assert_eq!((negative.dk, negative.dv), (negated.dk, negated.dv));
    let negated_dq: Vec<f64> = negated.dq.iter().map(|dq| -dq).collect();
    assert_eq!(negative.dq, negated_dq);
}
