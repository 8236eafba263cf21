//! Masks, alignment, lengths and rows that see nothing (m1 to m12).

use ferroflash::Align;
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::memory::Owned;
use half::{bf16, f16};

use crate::probe::{Probe, assert_close, assert_zero};

const ALL_HEADS: ferroflash::Broadcast =
    ferroflash::Broadcast { batch: true, heads: true, rows: false };

fn cumulative(lengths: &[i32]) -> Vec<i32> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    offsets
}

fn packed(q: &[i32], k: &[i32]) -> PackedLengths {
    PackedLengths { cu_q: cumulative(q), cu_k: cumulative(k), ..PackedLengths::default() }
}

/// Rows `rows` of a `[rows, elements]` matrix.
fn rows(tensor: &[f64], rows: std::ops::Range<usize>, elements: usize) -> &[f64] {
    &tensor[rows.start * elements..rows.end * elements]
}

fn m1() -> Case<f16> {
    let packed = packed(&[76, 34, 146], &[1, 1, 1]);
    let mut case = Case::packed((1, 1), (32, 32), packed, Sight::BOTTOM_RIGHT, 1, 3.0);
    case.d_o.set(|_, _| 1.0);
    case
}

const M1_LAST: [usize; 3] = [75, 109, 255];

pub(crate) fn m1_forward(probe: &Probe) {
    let case = m1();
    let Some(had) = probe.forward(&case) else { return };
    let v = case.v.contents();
    for row in 0..256 {
        let o = rows(&had.o, row..row + 1, 32);
        match M1_LAST.iter().position(|last| *last == row) {
            Some(item) => assert_eq!(o, rows(&v, item..item + 1, 32), "row {row}"),
            None => {
                assert_zero(o, "o of a row without keys");
                assert_eq!(had.lse[row], f64::NEG_INFINITY, "row {row}");
            }
        }
    }
}

pub(crate) fn m1_backward(probe: &Probe) {
    let Some(had) = probe.backward(&m1()) else { return };
    for row in (0..256).filter(|row| !M1_LAST.contains(row)) {
        assert_zero(rows(&had.dq, row..row + 1, 32), "dq of a row without keys");
    }
    // ⟨dO, v⟩ is summed twice, over 32 channels of deviation 3: it cancels within rounding.
    assert_close(&had.dq, &[0.0; 256 * 32], 0.1, "dq");
    assert_close(&had.dk, &[0.0; 3 * 32], 0.1, "dk");
    assert_close(&had.dv, &[1.0; 3 * 32], 0.0, "dv");
}

const M2_LENGTHS: [(usize, usize); 2] = [(130, 2), (200, 70)];

fn m2_is_empty(o: &[f64], lse: &[f64], empty: usize) {
    assert_zero(&o[..empty * 64], "o of rows without keys");
    assert!(lse[..empty].iter().all(|lse| *lse == f64::NEG_INFINITY));
    assert!(lse[empty..].iter().all(|lse| lse.is_finite()));
}

fn m2_dense((q_len, kv_len): (usize, usize)) -> Case<bf16> {
    let shape = shape(1, (1, 1), (q_len, kv_len), (64, 64));
    Case::new(shape, Sight::BOTTOM_RIGHT, 2, 1.0).with_d_lse(3)
}

pub(crate) fn m2_dense_forward(probe: &Probe) {
    for lengths in M2_LENGTHS {
        let Some(had) = probe.forward(&m2_dense(lengths)) else { continue };
        m2_is_empty(&had.o, &had.lse, lengths.0 - lengths.1);
    }
}

pub(crate) fn m2_dense_backward(probe: &Probe) {
    for lengths in M2_LENGTHS {
        let Some(had) = probe.backward(&m2_dense(lengths)) else { continue };
        assert_zero(&had.dq[..(lengths.0 - lengths.1) * 64], "dq of rows without keys");
    }
}

fn m2_packed() -> Case<bf16> {
    let packed = packed(&[130, 200], &[2, 70]);
    Case::packed((1, 1), (64, 64), packed, Sight::BOTTOM_RIGHT, 2, 1.0).with_d_lse(3)
}

pub(crate) fn m2_packed_forward(probe: &Probe) {
    let Some(had) = probe.forward(&m2_packed()) else { return };
    m2_is_empty(&had.o[..130 * 64], &had.lse[..130], 128);
    m2_is_empty(&had.o[130 * 64..], &had.lse[130..], 130);
}

pub(crate) fn m2_packed_backward(probe: &Probe) {
    let Some(had) = probe.backward(&m2_packed()) else { return };
    assert_zero(&had.dq[..128 * 64], "dq of rows without keys");
    assert_zero(&had.dq[130 * 64..260 * 64], "dq of rows without keys");
}

fn m3(sight: Sight) -> Case<bf16> {
    Case::new(shape(1, (2, 2), (1, 8), (64, 64)), sight, 4, 1.0)
}

pub(crate) fn m3_forward(probe: &Probe) {
    let top = m3(Sight::TOP_LEFT);
    let Some(had) = probe.forward(&top) else { return };
    assert_eq!(had.o, top.v.contents()[..2 * 64], "the first value of each head");
    let [all, bottom] = [Sight::FULL, Sight::BOTTOM_RIGHT].map(|s| probe.forward(&m3(s)));
    assert_eq!(bottom, all, "bottom right sees every key");
}

pub(crate) fn m3_backward(probe: &Probe) {
    let Some(had) = probe.backward(&m3(Sight::TOP_LEFT)) else { return };
    assert_zero(&had.dk[2 * 64..], "dk of keys that the row does not see");
    assert_zero(&had.dv[2 * 64..], "dv of keys that the row does not see");
    let [all, bottom] = [Sight::FULL, Sight::BOTTOM_RIGHT].map(|s| probe.backward(&m3(s)));
    assert_eq!(bottom, all, "bottom right sees every key");
}

/// A grouped call, and the same with each KV head repeated.
fn m4((q_heads, kv_heads): (usize, usize), len: usize) -> [Case<bf16>; 2] {
    let sized = |kv_heads| shape(1, (q_heads, kv_heads), (len, len), (64, 64));
    let grouped = Case::<bf16>::new(sized(kv_heads), Sight::TOP_LEFT, 5, 1.0);
    let mut repeated = Case::<bf16>::new(sized(q_heads), Sight::TOP_LEFT, 5, 1.0);
    let group = q_heads / kv_heads;
    let repeat = |from: &Owned<bf16>, to: &mut Owned<bf16>| {
        let from = from.contents();
        to.set(|index, _| {
            let (row, head, channel) = (index / 64 / q_heads, index / 64 % q_heads, index % 64);
            from[(row * kv_heads + head / group) * 64 + channel] as f32
        });
    };
    repeat(&grouped.k, &mut repeated.k);
    repeat(&grouped.v, &mut repeated.v);
    [grouped, repeated]
}

const M4_HEADS: [((usize, usize), usize); 6] =
    [((16, 4), 256), ((6, 2), 70), ((12, 2), 70), ((7, 1), 70), ((9, 3), 70), ((21, 7), 70)];

pub(crate) fn m4_forward(probe: &Probe) {
    for (heads, len) in M4_HEADS {
        let [grouped, repeated] = m4(heads, len).map(|case| probe.forward(&case));
        assert_eq!(grouped, repeated, "{heads:?}");
    }
}

pub(crate) fn m4_backward(probe: &Probe) {
    for (heads, len) in M4_HEADS {
        let [grouped, repeated] = m4(heads, len).map(|case| probe.backward(&case));
        let (Some(grouped), Some(repeated)) = (grouped, repeated) else { continue };
        assert_eq!(grouped.dq, repeated.dq, "{heads:?}");
    }
}

fn m5_corner() -> Case<bf16> {
    Case::new(shape(1, (1, 1), (8, 8), (64, 64)), Sight::FULL, 6, 1.0)
        .with_boolean_mask(ALL_HEADS, |[_, _, row, key]| row < 4 && key < 4)
}

fn m5_last_row() -> Case<bf16> {
    Case::new(shape(1, (2, 2), (6, 10), (8, 8)), Sight::FULL, 7, 1.0)
        .with_scale(0.125)
        .with_boolean_mask(ALL_HEADS, |[_, _, row, _]| row < 5)
}

pub(crate) fn m5_forward(probe: &Probe) {
    if let Some(had) = probe.forward(&m5_corner()) {
        assert_zero(&had.o[4 * 64..], "o of rows without keys");
    }
    if let Some(had) = probe.forward(&m5_last_row()) {
        assert_zero(&had.o[5 * 16..], "o of the row without keys");
        assert_eq!([had.lse[5], had.lse[11]], [f64::NEG_INFINITY; 2]);
    }
}

pub(crate) fn m5_backward(probe: &Probe) {
    if let Some(had) = probe.backward(&m5_corner()) {
        for (name, gradient) in [("dq", &had.dq), ("dk", &had.dk), ("dv", &had.dv)] {
            assert_zero(&gradient[4 * 64..], name);
        }
    }
    let mut case = m5_last_row();
    let Some(had) = probe.backward(&case) else { return };
    assert_zero(&had.dq[5 * 16..], "dq of the row without keys");
    // What comes from above for that row reaches no key.
    case.d_o.set_rows(0, 5..6, 1e4);
    let Some(other) = probe.backward_uncompared(&case) else { return };
    assert_eq!((other.dk, other.dv), (had.dk, had.dv));
}

fn m6(len: usize, left: Option<usize>, right: Option<usize>) -> Case<bf16> {
    Case::new(shape(1, (1, 1), (len, len), (64, 64)), Sight::window(left, right), 8, 1.0)
}

const M6_WINDOWS: [(usize, usize); 3] = [(8, 1), (8, 0), (2048, 1024)];

pub(crate) fn m6_forward(probe: &Probe) {
    let one_key = m6(8, Some(0), Some(0));
    if let Some(had) = probe.forward(&one_key) {
        assert_eq!(had.o, one_key.v.contents(), "each row sees its own key");
    }
    for (len, left) in M6_WINDOWS {
        probe.forward(&m6(len, Some(left), Some(0)));
    }
}

pub(crate) fn m6_backward(probe: &Probe) {
    for (len, left) in M6_WINDOWS {
        probe.backward(&m6(len, Some(left), Some(0)));
    }
}

/// A left side of every key, or unbounded, is causal, on every backend.
pub(crate) fn m6_unbounded_forward(probe: &Probe) {
    let unbounded = probe.forward(&m6(100, None, Some(0)));
    let mut causal = m6(100, None, Some(0));
    causal.attention = causal.attention.mask(ferroflash::Mask::causal(Align::BottomRight));
    assert_eq!(probe.forward(&causal), unbounded);
    let [causal, whole, last] =
        [None, Some(8), Some(7)].map(|left| probe.forward(&m6(8, left, Some(0))));
    assert!(causal == whole && whole == last, "a window of every key is causal");
}

pub(crate) fn m6_unbounded_backward(probe: &Probe) {
    let unbounded = probe.backward(&m6(100, None, Some(0)));
    let mut causal = m6(100, None, Some(0));
    causal.attention = causal.attention.mask(ferroflash::Mask::causal(Align::BottomRight));
    assert_eq!(probe.backward(&causal), unbounded);
    let [causal, whole, last] =
        [None, Some(8), Some(7)].map(|left| probe.backward(&m6(8, left, Some(0))));
    assert!(causal == whole && whole == last, "a window of every key is causal");
}
