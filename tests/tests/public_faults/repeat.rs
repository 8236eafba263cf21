//! Runs that must repeat, and masks that must not (d1 to d4).

use std::sync::atomic::{AtomicBool, Ordering};

use ferroflash::Dropout;
use ferroflash::cpu::tiled::CpuTile;
use ferroflash_tests::backend::{Backend, tiled_backward};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use half::{bf16, f16};

use crate::probe::{Probe, assert_close, assert_zero};

fn d1_packed() -> Case<bf16> {
    let offsets = vec![0, 100, 100, 137, 300];
    let packed = PackedLengths { cu_q: offsets.clone(), cu_k: offsets, ..PackedLengths::default() };
    Case::packed((4, 2), (64, 64), packed, Sight::window(Some(40), Some(0)), 70, 1.0)
}

/// More query tiles than key tiles; the first see nothing.
fn d1_empty_tiles() -> Case<f16> {
    Case::new(shape(1, (4, 4), (500, 60), (64, 64)), Sight::BOTTOM_RIGHT, 71, 1.0)
}

fn d1<T: Real>() -> Case<T> {
    Case::new(shape(2, (4, 2), (256, 256), (64, 64)), Sight::BOTTOM_RIGHT, 72, 1.0)
}

/// Runs `run` thirty times (the oracle three), the last half while a thread is busy otherwise.
fn repeats<R: PartialEq>(backend: Backend, run: impl Fn() -> Option<R>) {
    let runs = if backend == Backend::CpuDense { 3 } else { 30 };
    let first = run();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for attempt in 1..runs {
            if attempt == runs / 2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        ferroflash_tests::random::normal(1, 100_000, 1.0);
                    }
                });
            }
            let same = run() == first;
            if !same || attempt == runs - 1 {
                is_done.store(true, Ordering::Relaxed);
            }
            assert!(same, "run {attempt} differs from run 0");
        }
    });
}

pub(crate) fn d1_forward(probe: &Probe) {
    repeats(probe.backend, || probe.forward_uncompared(&d1::<bf16>()));
    repeats(probe.backend, || probe.forward_uncompared(&d1::<f16>()));
    repeats(probe.backend, || probe.forward_uncompared(&d1_empty_tiles()));
}

pub(crate) fn d1_backward(probe: &Probe) {
    let small = Some(CpuTile { q_rows: 48, kv_columns: 32 });
    if probe.backend == Backend::CpuTiled {
        // Many blocks that add to the same dQ.
        repeats(probe.backend, || Some(tiled_backward(&d1::<f16>(), small).expect("a valid call")));
    }
    repeats(probe.backend, || probe.backward_uncompared(&d1::<bf16>()));
    repeats(probe.backend, || probe.backward_uncompared(&d1_empty_tiles()));
}

pub(crate) fn d1_packed_forward(probe: &Probe) {
    repeats(probe.backend, || probe.forward_uncompared(&d1_packed()));
}

pub(crate) fn d1_packed_backward(probe: &Probe) {
    repeats(probe.backend, || probe.backward_uncompared(&d1_packed()));
}

/// Many items, more rows than keys, large values.
fn d2() -> Case<f16> {
    Case::new(shape(10, (1, 1), (256, 128), (128, 128)), Sight::FULL, 73, 3.0)
}

pub(crate) fn d2_forward(probe: &Probe) {
    repeats(probe.backend, || probe.forward_uncompared(&d2()));
}

pub(crate) fn d2_backward(probe: &Probe) {
    let case = d2();
    let first = probe.backward(&case);
    let runs = if probe.backend == Backend::CpuDense { 2 } else { 50 };
    for run in 1..runs {
        assert!(probe.backward_uncompared(&case) == first, "run {run} differs from run 0");
    }
}

/// Two calls at once, each as alone.
fn d3(probe: &Probe, is_backward: bool) {
    let cases = [74, 75].map(|seed| {
        Case::<bf16>::new(shape(1, (4, 2), (300, 300), (64, 64)), Sight::BOTTOM_RIGHT, seed, 1.0)
    });
    let backend = probe.backend;
    let run = |case: &Case<bf16>| {
        let outcome = ferroflash_tests::backend::forward(backend, case).expect("a valid call");
        let grads = is_backward
            .then(|| ferroflash_tests::backend::backward(backend, case).expect("a valid call"));
        (outcome, grads)
    };
    let alone = cases.each_ref().map(run);
    probe.forward(&cases[0]);
    for _ in 0..5 {
        let run = &run;
        std::thread::scope(|scope| {
            let threads = cases.each_ref().map(|case| scope.spawn(move || run(case)));
            for (thread, alone) in threads.into_iter().zip(&alone) {
                assert!(thread.join().expect("it ran") == *alone, "two at once differ from one");
            }
        });
    }
}

pub(crate) fn d3_forward(probe: &Probe) {
    d3(probe, false);
}

pub(crate) fn d3_backward(probe: &Probe) {
    d3(probe, true);
}

const SIZE: usize = 64;

/// q, k and v so that o is the dropped P: V = I, and dO = I.
fn d4<T: Real>(probability: f32, offset: u64) -> Case<T> {
    let mut case = Case::new(shape(1, (1, 1), (SIZE, SIZE), (SIZE, SIZE)), Sight::FULL, 76, 0.5);
    let identity = |index: usize, _: f32| if index / SIZE == index % SIZE { 1.0 } else { 0.0 };
    case.v.set(identity);
    case.d_o.set(identity);
    case.with_dropout(Dropout::new(probability, (77, offset)))
}

fn d4_of<T: Real>(probe: &Probe) {
    let Some(had) = probe.forward(&d4::<T>(0.5, 0)) else { return };
    assert_eq!(probe.forward(&d4::<T>(0.5, 0)).as_ref(), Some(&had), "the same seed and offset");
    let Some(other) = probe.forward(&d4::<T>(0.5, 1)) else { return };
    assert_ne!(had.o, other.o, "another offset");
    assert_eq!(had.lse, other.lse, "lse is of the row before dropout");
    let dropped = had.o.iter().filter(|p| **p == 0.0).count();
    assert!((SIZE * SIZE * 2 / 5..SIZE * SIZE * 3 / 5).contains(&dropped), "{dropped} dropped");
    let Some(nothing) = probe.forward(&d4::<T>(1.0, 0)) else { return };
    assert_zero(&nothing.o, "o where everything is dropped");
}

pub(crate) fn d4_forward(probe: &Probe) {
    d4_of::<f32>(probe);
}

pub(crate) fn d4_bf16_forward(probe: &Probe) {
    d4_of::<bf16>(probe);
}

pub(crate) fn d4_backward(probe: &Probe) {
    let case = d4::<f32>(0.5, 0);
    let Some(had) = probe.backward(&case) else { return };
    let Some(dropped) = probe.forward(&case) else { return };
    let transposed: Vec<f64> =
        (0..SIZE * SIZE).map(|cell| dropped.o[cell % SIZE * SIZE + cell / SIZE]).collect();
    assert_close(&had.dv, &transposed, 1e-6, "dv is the dropped P, transposed");
    if probe.backend == Backend::CpuTiled {
        for tile in [(16, 16), (7, 64), (33, 5)] {
            let tile = Some(CpuTile { q_rows: tile.0, kv_columns: tile.1 });
            let grads = tiled_backward(&case, tile).expect("a valid call");
            assert_close(&grads.dv, &had.dv, 1e-6, "the mask does not depend on tiles");
        }
    }
    let Some(nothing) = probe.backward(&d4::<f32>(1.0, 0)) else { return };
    for gradient in [&nothing.dq, &nothing.dk, &nothing.dv] {
        assert_zero(gradient, "a gradient where everything is dropped");
    }
}
