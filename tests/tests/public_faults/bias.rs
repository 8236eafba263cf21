//! Biases and options that other paths dropped (b1 to b3).

use ferroflash::Broadcast;
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::memory::Arrangement;
use ferroflash_tests::random::uniform;
use half::bf16;

use crate::probe::{Probe, assert_close, assert_finite};

/// Every ALiBi call of the fault: slopes a head and slopes an item and head.
fn b1() -> Vec<Case<bf16>> {
    let mut cases = Vec::new();
    for heads in [12, 48] {
        for lengths in [(1, 17), (5, 9)] {
            for sight in [Sight::FULL, Sight::BOTTOM_RIGHT, Sight::TOP_LEFT] {
                for count in [heads, 2 * heads] {
                    let shape = shape(2, (heads, heads / 4), lengths, (32, 32));
                    let slopes = uniform(40, count, 0.0, 1.0);
                    cases.push(Case::new(shape, sight, 41, 1.0).with_alibi(&slopes));
                }
            }
        }
    }
    cases
}

pub(crate) fn b1_forward(probe: &Probe) {
    for case in b1() {
        let Some(had) = probe.forward(&case) else { continue };
        let (exact, _) = ferroflash_tests::reference::attend(&case);
        assert_close(&had.lse, &exact.lse, 1e-5, "lse");
        assert_close(&had.o, &exact.o, 0.02, "o");
    }
}

pub(crate) fn b1_backward(probe: &Probe) {
    for case in b1() {
        probe.backward(&case);
    }
}

/// An f32 bias for all items, in memory whose rows are wider than the keys.
fn b2(axes: Broadcast) -> Case<bf16> {
    let wide = Arrangement { channel_gap: 9, ..Arrangement::CONTIGUOUS };
    Case::new(shape(8, (4, 4), (128, 128), (32, 32)), Sight::FULL, 42, 1.0)
        .with_bias(axes, wide, 43)
}

const B2_AXES: [Broadcast; 3] = [
    Broadcast { batch: true, heads: false, rows: false },
    Broadcast { batch: true, heads: true, rows: true },
    Broadcast { batch: false, heads: true, rows: false },
];

pub(crate) fn b2_forward(probe: &Probe) {
    for axes in B2_AXES {
        probe.forward(&b2(axes));
    }
}

pub(crate) fn b2_backward(probe: &Probe) {
    for axes in B2_AXES {
        let Some(had) = probe.backward(&b2(axes)) else { continue };
        let dbias = had.dbias.expect("there is a bias");
        assert_finite(&dbias, "dbias");
        // Softmax does not see a shift of a row, so that its gradient sums to zero over keys.
        if !axes.rows {
            for row in dbias.chunks_exact(128) {
                assert!(row.iter().sum::<f64>().abs() < 0.3, "dbias of a row sums to 0");
            }
        }
        assert!(dbias.iter().any(|value| value.abs() > 1e-3), "dbias is not all zero");
    }
}

/// A call without the option, dense or packed; the option must change it.
fn b3(is_packed: bool, sight: Sight) -> Case<bf16> {
    if !is_packed {
        return Case::new(shape(2, (4, 2), (60, 60), (64, 64)), sight, 44, 2.0);
    }
    let offsets = vec![0, 25, 25, 60];
    let packed = PackedLengths { cu_q: offsets.clone(), cu_k: offsets, ..PackedLengths::default() };
    Case::packed((4, 2), (64, 64), packed, sight, 44, 2.0)
}

/// Runs a call with and without an option, in both layouts.
fn b3_changes(probe: &Probe, is_backward: bool, with: fn(bool) -> Case<bf16>) {
    for is_packed in [false, true] {
        let case = with(is_packed);
        let plain = b3(is_packed, Sight::BOTTOM_RIGHT);
        if is_backward {
            let Some(had) = probe.backward(&case) else { continue };
            let plain = probe.backward_uncompared(&plain).expect("it has no option");
            assert_ne!(had.dq, plain.dq, "the option changes nothing");
        } else {
            let Some(had) = probe.forward(&case) else { continue };
            let plain = probe.forward_uncompared(&plain).expect("it has no option");
            assert_ne!(had.lse, plain.lse, "the option changes nothing");
            assert_ne!(had.o, plain.o, "the option changes nothing");
        }
    }
}

fn softcap(is_packed: bool) -> Case<bf16> {
    b3(is_packed, Sight::BOTTOM_RIGHT).with_softcap(2.0)
}

fn window(is_packed: bool) -> Case<bf16> {
    b3(is_packed, Sight::window(Some(5), Some(0)))
}

fn alibi(is_packed: bool) -> Case<bf16> {
    b3(is_packed, Sight::BOTTOM_RIGHT).with_alibi(&[0.5, 0.25, 0.125, 1.0])
}

pub(crate) fn b3_softcap_forward(probe: &Probe) {
    b3_changes(probe, false, softcap);
}

pub(crate) fn b3_softcap_backward(probe: &Probe) {
    b3_changes(probe, true, softcap);
}

pub(crate) fn b3_window_forward(probe: &Probe) {
    b3_changes(probe, false, window);
}

pub(crate) fn b3_window_backward(probe: &Probe) {
    b3_changes(probe, true, window);
}

pub(crate) fn b3_alibi_forward(probe: &Probe) {
    b3_changes(probe, false, alibi);
}

pub(crate) fn b3_alibi_backward(probe: &Probe) {
    b3_changes(probe, true, alibi);
}
