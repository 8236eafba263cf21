//! Items of different, zero and malformed lengths (m7 to m12, p8).

use ferroflash::{Dropout, Lengths, TensorRef};
use ferroflash_tests::backend::Backend;
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::memory::{Arrangement, Owned};
use half::bf16;

use crate::probe::{Probe, assert_zero};

fn lengths(cu_q: &[i32], cu_k: &[i32]) -> PackedLengths {
    PackedLengths { cu_q: cu_q.to_vec(), cu_k: cu_k.to_vec(), ..PackedLengths::default() }
}

/// A quarter of the reported lengths: what matters is who has queries.
fn m7() -> Case<bf16> {
    let packed = lengths(&[0, 0, 302, 512, 512], &[0, 634, 1070, 1280, 2048]);
    Case::packed((4, 1), (256, 256), packed, Sight::FULL, 10, 1.0)
}

pub(crate) fn m7_forward(probe: &Probe) {
    probe.forward(&m7());
}

pub(crate) fn m7_backward(probe: &Probe) {
    let Some(had) = probe.backward(&m7()) else { return };
    for (name, gradient) in [("dk", &had.dk), ("dv", &had.dv)] {
        assert_zero(&gradient[..634 * 256], name);
        assert_zero(&gradient[1280 * 256..], name);
        assert!(gradient[634 * 256..1280 * 256].iter().all(|value| value.is_finite()));
    }
}

fn m8_without_keys(sight: Sight) -> Case<bf16> {
    Case::new(shape(1, (2, 2), (5, 0), (64, 64)), sight, 11, 1.0)
}

pub(crate) fn m8_forward(probe: &Probe) {
    for sight in [Sight::FULL, Sight::TOP_LEFT, Sight::BOTTOM_RIGHT] {
        let Some(had) = probe.forward(&m8_without_keys(sight)) else { continue };
        assert_zero(&had.o, "o");
        assert_eq!(had.lse, [f64::NEG_INFINITY; 10]);
    }
}

pub(crate) fn m8_backward(probe: &Probe) {
    for sight in [Sight::FULL, Sight::TOP_LEFT, Sight::BOTTOM_RIGHT] {
        let Some(had) = probe.backward(&m8_without_keys(sight)) else { continue };
        assert_zero(&had.dq, "dq");
        assert!(had.dk.is_empty() && had.dv.is_empty());
    }
}

fn m8_empty() -> [Case<bf16>; 4] {
    [
        shape(0, (2, 1), (3, 4), (64, 64)),
        shape(2, (0, 0), (3, 4), (64, 64)),
        shape(2, (0, 1), (3, 4), (64, 64)),
        shape(2, (2, 1), (0, 4), (64, 64)),
    ]
    .map(|shape| Case::new(shape, Sight::BOTTOM_RIGHT, 12, 1.0))
}

pub(crate) fn m8_empty_forward(probe: &Probe) {
    for case in m8_empty() {
        let Some(had) = probe.forward(&case) else { continue };
        assert!(had.o.is_empty() && had.lse.is_empty());
    }
}

pub(crate) fn m8_empty_backward(probe: &Probe) {
    for case in m8_empty() {
        let Some(had) = probe.backward(&case) else { continue };
        assert!(had.dq.is_empty());
        assert_zero(&had.dk, "dk");
        assert_zero(&had.dv, "dv");
    }
}

const M9: [i32; 4] = [0, 300, 1100, 2048];

fn m9() -> Case<bf16> {
    Case::packed((2, 1), (64, 64), lengths(&M9, &M9), Sight::BOTTOM_RIGHT, 13, 1.0)
}

/// Item `item` of [`m9`] as a call of its own, on a GPU packed as well: the same kernel.
fn m9_item(whole: &Case<bf16>, item: usize, is_packed: bool) -> Case<bf16> {
    let (first, end) = (M9[item] as usize, M9[item + 1] as usize);
    let len = end - first;
    let sight = Sight::BOTTOM_RIGHT;
    let mut case = if is_packed {
        let offsets = [0, len as i32];
        Case::packed((2, 1), (64, 64), lengths(&offsets, &offsets), sight, 13, 1.0)
    } else {
        Case::new(shape(1, (2, 1), (len, len), (64, 64)), sight, 13, 1.0)
    };
    let parts: [(&mut Owned<bf16>, &Owned<bf16>); 4] = [
        (&mut case.q, &whole.q),
        (&mut case.k, &whole.k),
        (&mut case.v, &whole.v),
        (&mut case.d_o, &whole.d_o),
    ];
    for (own, whole) in parts {
        let (elements, contents) = (own.count() / len, whole.contents());
        own.set(|index, _| contents[first * elements + index] as f32);
    }
    case
}

pub(crate) fn m9_forward(probe: &Probe) {
    let case = m9();
    let Some(had) = probe.forward(&case) else { return };
    let is_packed = probe.backend.is_gpu();
    for item in 0..3 {
        let (first, end) = (M9[item] as usize, M9[item + 1] as usize);
        let Some(own) = probe.forward_uncompared(&m9_item(&case, item, is_packed)) else {
            continue;
        };
        assert_eq!(had.o[first * 128..end * 128], own.o, "o of item {item}");
        let lse = [0, 1].map(|head| &had.lse[head * 2048 + first..head * 2048 + end]);
        assert_eq!(lse.concat(), own.lse, "lse of item {item}");
    }
}

pub(crate) fn m9_backward(probe: &Probe) {
    let case = m9();
    let Some(had) = probe.backward(&case) else { return };
    // Query tiles of a hopper backward kernel follow the tokens, not the items: sums of the same
    // values are formed in another order.
    if matches!(probe.backend, Backend::Planned(_)) {
        for item in 0..3 {
            probe.backward(&m9_item(&case, item, true));
        }
        return;
    }
    let is_packed = probe.backend.is_gpu();
    for item in 0..3 {
        let (first, end) = (M9[item] as usize, M9[item + 1] as usize);
        let Some(own) = probe.backward_uncompared(&m9_item(&case, item, is_packed)) else {
            continue;
        };
        assert_eq!(had.dq[first * 128..end * 128], own.dq, "dq of item {item}");
        assert_eq!(had.dk[first * 64..end * 64], own.dk, "dk of item {item}");
        assert_eq!(had.dv[first * 64..end * 64], own.dv, "dv of item {item}");
    }
}

/// 486 of 698 rows belong to items. Offsets that end before the rows do are refused; the rows that
/// belong to items are then passed as a view, whose surroundings are NaN.
fn m9_past(cu: &[i32], tokens: usize) -> Case<bf16> {
    let dropout = Dropout::new(0.1, (5, 6));
    let whole = lengths(&[0, tokens as i32], &[0, tokens as i32]);
    let case = Case::packed((2, 2), (64, 64), whole, Sight::TOP_LEFT, 14, 1.0);
    let mut case = case.with_dropout(dropout);
    let packed = lengths(cu, cu);
    case.packed = Some(packed);
    let s = shape(cu.len() - 1, (2, 2), (2048, 2048), (64, 64));
    let layout = ferroflash::Layout::Packed { q_tokens: tokens, kv_tokens: tokens };
    case.attention =
        ferroflash::Attention::new(s).mask(Sight::TOP_LEFT.mask()).layout(layout).dropout(dropout);
    case
}

pub(crate) fn m9_past_forward(probe: &Probe) {
    probe.wrong(&m9_past(&[0, 137, 486], 698), "cu_q");
    if let Some(had) = probe.forward(&m9_past(&[0, 137, 486], 486)) {
        assert!(had.o.iter().all(|o| o.is_finite()));
    }
}

pub(crate) fn m9_past_backward(probe: &Probe) {
    probe.backward(&m9_past(&[0, 137, 486], 486));
}

fn m10(cu_q: &[i32], cu_k: &[i32]) -> Case<bf16> {
    let mut case = Case::packed(
        (2, 1),
        (16, 16),
        lengths(&[0, 2, 5], &[0, 4, 6]),
        Sight::BOTTOM_RIGHT,
        15,
        1.0,
    );
    case.packed = Some(lengths(cu_q, cu_k));
    case
}

pub(crate) fn m10_forward(probe: &Probe) {
    let (good_q, good_k) = ([0, 2, 5], [0, 4, 6]);
    for bad in [[1, 2, 5], [0, 2, 4], [0, 6, 5], [0, 3, 2], [0, -1, 5], [0, 2, i32::MAX]] {
        probe.wrong(&m10(&bad, &good_k), "cu_q");
    }
    for bad in [[1, 4, 6], [0, 7, 6], [0, 4, 5], [0, 4, 7], [0, i32::MIN, 6]] {
        probe.wrong(&m10(&good_q, &bad), "cu_k");
    }
    probe.wrong(&m10(&[0, 5], &good_k), "cu_q");
    probe.wrong(&m10(&good_q, &[0, 1, 4, 6]), "cu_k");
    let layout = ferroflash::Layout::Packed { q_tokens: 5, kv_tokens: 6 };
    for (lengths, name) in [((2, 4), "q_len"), ((3, 3), "kv_len")] {
        let mut case = m10(&good_q, &good_k);
        let stated = shape(2, (2, 1), lengths, (16, 16));
        case.attention = ferroflash::Attention::new(stated).layout(layout);
        probe.wrong(&case, name);
    }
    for (used_q, used_k, name) in
        [(Some(vec![3, 1]), None, "used_q"), (None, Some(vec![4, -1]), "used_k")]
    {
        let mut case = m10(&good_q, &good_k);
        if let Some(packed) = &mut case.packed {
            (packed.used_q, packed.used_k) = (used_q, used_k);
        }
        probe.wrong(&case, name);
    }
}

/// Used lengths below the span of the offsets, with NaN in the rows that are not used.
fn m11(gap: f32) -> Case<bf16> {
    let mut packed = lengths(&[0, 3, 7, 9], &[0, 3, 7, 9]);
    (packed.used_q, packed.used_k) = (Some(vec![2, 3, 1]), Some(vec![2, 3, 1]));
    let mut case = Case::packed((2, 2), (64, 64), packed, Sight::BOTTOM_RIGHT, 16, 1.0);
    for row in M11_GAPS {
        for tensor in [&mut case.q, &mut case.k, &mut case.v, &mut case.d_o] {
            tensor.set_rows(0, row..row + 1, gap);
        }
    }
    case
}

const M11_GAPS: [usize; 3] = [2, 6, 8];

pub(crate) fn m11_forward(probe: &Probe) {
    let Some(clean) = probe.forward(&m11(0.0)) else { return };
    let Some(had) = probe.forward_uncompared(&m11(f32::NAN)) else { return };
    assert_eq!(had, clean, "NaN in rows that are not used");
    for row in M11_GAPS {
        assert_zero(&had.o[row * 128..][..128], "o of a row that is not used");
        assert_eq!([had.lse[row], had.lse[9 + row]], [f64::NEG_INFINITY; 2]);
    }
}

pub(crate) fn m11_backward(probe: &Probe) {
    let Some(clean) = probe.backward(&m11(0.0)) else { return };
    let Some(had) = probe.backward_uncompared(&m11(f32::NAN)) else { return };
    assert_eq!(had, clean, "NaN in rows that are not used");
    for row in M11_GAPS {
        for gradient in [&had.dq, &had.dk, &had.dv] {
            assert_zero(&gradient[row * 128..][..128], "a row that is not used");
        }
    }
}

fn m12(lengths: (usize, usize), dim: usize) -> Case<bf16> {
    Case::new(shape(1, (2, 2), lengths, (dim, dim)), Sight::FULL, 17, 1.0)
}

pub(crate) fn m12_forward(probe: &Probe) {
    probe.forward(&m12((1, 64), 64));
    probe.forward(&m12((1, 64), 128));
    probe.forward(&m12((192, 192), 16));
}

pub(crate) fn m12_backward(probe: &Probe) {
    probe.backward(&m12((1, 64), 64));
    probe.backward(&m12((1, 64), 128));
    probe.backward(&m12((192, 192), 16));
}

fn m12_f32() -> Case<f32> {
    Case::new(shape(1, (1, 1), (4092, 4092), (32, 32)), Sight::BOTTOM_RIGHT, 18, 1.0)
}

pub(crate) fn m12_f32_forward(probe: &Probe) {
    probe.forward(&m12_f32());
}

pub(crate) fn m12_f32_backward(probe: &Probe) {
    probe.backward(&m12_f32());
}

fn p8() -> Case<bf16> {
    Case::new(shape(2, (2, 1), (3, 8), (64, 64)), Sight::FULL, 19, 1.0)
}

/// k and v of different lengths, and lengths beyond the tensors.
pub(crate) fn p8_forward(probe: &Probe) {
    let mut shorter = p8();
    shorter.v = Owned::new(&vec![0.5; 2 * 7 * 64], &[2, 7, 1, 64], Arrangement::CONTIGUOUS);
    probe.wrong(&shorter, "v");
    let mut shorter = p8();
    shorter.k = Owned::new(&vec![0.5; 2 * 7 * 64], &[2, 7, 1, 64], Arrangement::CONTIGUOUS);
    probe.wrong(&shorter, "k");
}

pub(crate) fn p8_lengths_forward(probe: &Probe) {
    for lengths in [&[1, 9][..], &[-1, 2], &[1], &[1, 2, 3], &[i32::MAX, 0]] {
        probe.wrong(&p8().with_key_lengths(lengths), "key_lengths");
    }
    if probe.backend == Backend::CpuTiled {
        device_lengths_are_refused_on_the_cpu();
    }
}

fn device_lengths_are_refused_on_the_cpu() {
    let case = p8().with_key_lengths(&[1, 2]);
    let mut inputs = case.inputs();
    // SAFETY: the view is refused before anything is read through it.
    let lengths = unsafe {
        TensorRef::from_raw(
            std::ptr::without_provenance(256),
            &[2],
            &[1],
            ferroflash::Place::Cuda(0),
        )
    };
    inputs.key_lengths = Some(Lengths::Device(lengths.expect("one axis")));
    let mut o = Owned::<bf16>::poisoned(&case.o_dims, Arrangement::CONTIGUOUS);
    let mut output = ferroflash::Output { o: o.view_mut(), lse: None };
    let refused =
        ferroflash::cpu::tiled::forward(&case.attention, &inputs, &mut output, None).unwrap_err();
    assert_eq!(crate::probe::named(&refused), "key_lengths");
}
