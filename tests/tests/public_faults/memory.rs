//! Rows nobody owns, head sizes, views, and counts and strides beyond 16 and 31 bits (p1 to p7).

use ferroflash::cpu::tiled;
use ferroflash::{Error, Gradients, Output, Saved, TensorRef};
use ferroflash_tests::backend::{Backend, tiled_forward};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::memory::{Arrangement, Owned};
use half::{bf16, f16};

use crate::probe::{Probe, assert_close, assert_finite, assert_zero, named};

/// Items of 200, 150 and 47 keys in buffers of 640 rows; the rest holds `rest`.
fn p1(rest: f32, sight: Sight) -> Case<bf16> {
    let case = Case::new(shape(3, (8, 8), (20, 640), (128, 128)), sight, 50, 1.0);
    let lengths = [200, 150, 47];
    let mut case = case.with_key_lengths(&lengths);
    for (item, length) in lengths.into_iter().enumerate() {
        case.k.set_rows(item, length as usize..640, rest);
        case.v.set_rows(item, length as usize..640, rest);
    }
    case
}

pub(crate) fn p1_forward(probe: &Probe) {
    for sight in [Sight::FULL, Sight::BOTTOM_RIGHT] {
        let Some(clean) = probe.forward(&p1(0.0, sight)) else { continue };
        assert_eq!(probe.forward_uncompared(&p1(f32::NAN, sight)), Some(clean));
    }
}

pub(crate) fn p1_backward(probe: &Probe) {
    for sight in [Sight::FULL, Sight::BOTTOM_RIGHT] {
        let Some(clean) = probe.backward(&p1(0.0, sight)) else { continue };
        assert_eq!(probe.backward_uncompared(&p1(f32::NAN, sight)), Some(clean));
    }
}

/// The same rows as views of 133 of 640, with NaN or nothing after them.
fn p1_view(row_gap: usize) -> Case<bf16> {
    let arrangement = Arrangement { row_gap, ..Arrangement::CONTIGUOUS };
    Case::new(shape(3, (8, 8), (50, 133), (128, 128)), Sight::BOTTOM_RIGHT, 51, 1.0)
        .arranged([arrangement; 4])
}

pub(crate) fn p1_view_forward(probe: &Probe) {
    let clean = probe.forward(&p1_view(0));
    assert_eq!(probe.forward(&p1_view(640 - 133)), clean);
}

pub(crate) fn p1_view_backward(probe: &Probe) {
    let clean = probe.backward(&p1_view(0));
    assert_eq!(probe.backward(&p1_view(640 - 133)), clean);
}

/// 21 of 24 rows are valid.
fn p2() -> Case<bf16> {
    let case = Case::new(shape(1, (16, 1), (24, 24), (128, 128)), Sight::FULL, 52, 1.0);
    let mut case = case.with_key_lengths(&[21]);
    case.k.set_rows(0, 21..24, f32::NAN);
    case.v.set_rows(0, 21..24, f32::NAN);
    case
}

pub(crate) fn p2_forward(probe: &Probe) {
    let Some(had) = probe.forward(&p2()) else { return };
    assert_finite(&had.o, "o");
}

pub(crate) fn p2_backward(probe: &Probe) {
    let Some(had) = probe.backward(&p2()) else { return };
    assert_finite(&had.dq, "dq");
    for gradient in [&had.dk, &had.dv] {
        assert_zero(&gradient[21 * 128..], "a gradient of a row past the length");
    }
}

/// Keys past the diagonal of every row.
fn p3(unseen: f32) -> Case<bf16> {
    let mut case = Case::new(shape(2, (4, 2), (40, 200), (64, 64)), Sight::TOP_LEFT, 53, 1.0);
    for item in 0..2 {
        case.k.set_rows(item, 40..200, unseen);
        case.v.set_rows(item, 40..200, unseen);
    }
    case
}

pub(crate) fn p3_forward(probe: &Probe) {
    let clean = probe.forward(&p3(0.0));
    for unseen in [f32::NAN, f32::INFINITY] {
        assert_eq!(probe.forward_uncompared(&p3(unseen)), clean);
    }
}

pub(crate) fn p3_backward(probe: &Probe) {
    let clean = probe.backward(&p3(0.0));
    for unseen in [f32::NAN, f32::INFINITY] {
        assert_eq!(probe.backward_uncompared(&p3(unseen)), clean);
    }
}

/// Keys before the window of every row, and after it.
fn p3_window(unseen: f32) -> Case<bf16> {
    let sight = Sight::window(Some(7), Some(0));
    let mut case = Case::new(shape(1, (4, 2), (40, 200), (64, 64)), sight, 54, 1.0);
    // Rows 0 and 39 have their diagonals at keys 160 and 199.
    case.k.set_rows(0, 0..153, unseen);
    case.v.set_rows(0, 0..153, unseen);
    case
}

pub(crate) fn p3_window_forward(probe: &Probe) {
    let clean = probe.forward(&p3_window(0.0));
    assert_eq!(probe.forward_uncompared(&p3_window(f32::NAN)), clean);
}

pub(crate) fn p3_window_backward(probe: &Probe) {
    let clean = probe.backward(&p3_window(0.0));
    assert_eq!(probe.backward_uncompared(&p3_window(f32::NAN)), clean);
}

const P4: [usize; 14] = [1, 7, 8, 40, 72, 80, 96, 112, 136, 144, 160, 176, 192, 256];

fn p4<T: Real>(dim: usize) -> Case<T> {
    Case::new(shape(1, (2, 1), (70, 90), (dim, dim)), Sight::BOTTOM_RIGHT, 55, 1.0)
}

pub(crate) fn p4_forward(probe: &Probe) {
    for dim in P4 {
        probe.forward(&p4::<bf16>(dim));
        probe.forward(&p4::<f16>(dim));
    }
}

pub(crate) fn p4_backward(probe: &Probe) {
    for dim in P4 {
        probe.backward(&p4::<bf16>(dim));
        probe.backward(&p4::<f16>(dim));
    }
}

/// Head dimensions past the widest backward kernel: the GPU names its limit, the CPU has none.
pub(crate) fn p4_wide_forward(probe: &Probe) {
    probe.forward(&p4::<bf16>(264));
    probe.forward(&p4::<bf16>(512));
}

pub(crate) fn p4_wide_backward(probe: &Probe) {
    probe.backward(&p4::<bf16>(264));
    probe.backward(&p4::<bf16>(512));
}

/// Starts at each element, and memory in another order of axes.
fn p5<T: Real>(starts: usize) -> Vec<Case<T>> {
    let sized = |arranged| {
        let shape = shape(2, (4, 2), (40, 50), (72, 72));
        Case::new(shape, Sight::BOTTOM_RIGHT, 56, 1.0).arranged(arranged)
    };
    let start = |offset| [Arrangement { offset, ..Arrangement::CONTIGUOUS }; 4];
    let mut cases: Vec<Case<T>> = (1..=starts).map(|offset| sized(start(offset))).collect();
    cases.push(sized([Arrangement::HEADS_FIRST; 4]));
    cases
}

pub(crate) fn p5_forward(probe: &Probe) {
    let plain = p5::<bf16>(0).remove(0).arranged([Arrangement::CONTIGUOUS; 4]);
    let plain = probe.forward(&plain);
    // The planner may take another kernel for another alignment.
    let is_same_kernel = !matches!(probe.backend, Backend::Planned(_));
    for case in p5::<bf16>(7) {
        let had = probe.forward(&case);
        assert!(!is_same_kernel || had == plain, "the values are the same");
    }
}

pub(crate) fn p5_backward(probe: &Probe) {
    let plain = p5::<bf16>(0).remove(0).arranged([Arrangement::CONTIGUOUS; 4]);
    let plain = probe.backward(&plain);
    // As in the forward pass.
    let is_same_kernel = !matches!(probe.backend, Backend::Planned(_));
    for mut case in p5::<bf16>(7) {
        case.d_o = case.d_o.rearranged(case.results);
        let had = probe.backward(&case);
        assert!(!is_same_kernel || had == plain, "the values are the same");
    }
}

pub(crate) fn p5_f32_forward(probe: &Probe) {
    for case in p5::<f32>(3) {
        probe.forward(&case);
    }
}

pub(crate) fn p5_f32_backward(probe: &Probe) {
    for case in p5::<f32>(3) {
        probe.backward(&case);
    }
}

/// dO with one row for all rows, heads and items is read; with a channel stride of 0 it is refused.
pub(crate) fn p5_repeated_backward(probe: &Probe) {
    let mut case = p5::<f32>(1).remove(0);
    let channels: Vec<f32> = (0..72).map(|channel| channel as f32 / 36.0 - 1.0).collect();
    case.d_o.set(|index, _| channels[index % 72]);
    let Some(copied) = probe.backward(&case) else { return };
    if probe.backend != Backend::CpuTiled {
        return;
    }
    let (o, lse) = tiled_forward(&case, None).expect("a valid call");
    let with_d_o = |d_o: &TensorRef<'_, f32>| -> Result<Vec<f64>, Error> {
        let mut dq = Owned::<f32>::poisoned(case.q.dims(), Arrangement::CONTIGUOUS);
        let saved = Saved { inputs: case.inputs(), o: o.view(), lse: lse.view() };
        let mut gradients = Gradients { dq: Some(dq.view_mut()), ..Gradients::default() };
        tiled::backward(&case.attention, &saved, d_o, None, &mut gradients, None)?;
        drop(gradients);
        Ok(dq.contents())
    };
    let view = |strides: [i64; 4]| {
        TensorRef::host_strided(&channels, &case.o_dims, &strides).expect("inside its memory")
    };
    assert_eq!(with_d_o(&view([0, 0, 0, 1])), Ok(copied.dq));
    let refused = with_d_o(&view([0, 0, 0, 0])).expect_err("channels are not contiguous");
    assert_eq!(named(&refused), "d_o");
}

/// Counts that do not fit 16 bits, one row and one key each.
fn p6() -> [Case<bf16>; 2] {
    [(65_537, 1), (1, 65_537)].map(|(batch, heads)| {
        let shape = shape(batch, (heads, heads), (1, 1), (8, 8));
        Case::new(shape, Sight::BOTTOM_RIGHT, 57, 1.0)
    })
}

fn p6_packed() -> Case<bf16> {
    let offsets: Vec<i32> = (0..=65_537).collect();
    let packed = PackedLengths { cu_q: offsets.clone(), cu_k: offsets, ..PackedLengths::default() };
    Case::packed((1, 1), (8, 8), packed, Sight::BOTTOM_RIGHT, 58, 1.0)
}

pub(crate) fn p6_forward(probe: &Probe) {
    for case in p6() {
        let Some(had) = probe.forward(&case) else { continue };
        assert_eq!(had.o, case.v.contents(), "o is the only value");
    }
}

pub(crate) fn p6_backward(probe: &Probe) {
    for case in p6() {
        let Some(had) = probe.backward(&case) else { continue };
        assert_eq!(had.dv, case.d_o.contents(), "P is 1");
    }
}

pub(crate) fn p6_packed_forward(probe: &Probe) {
    let case = p6_packed();
    let Some(had) = probe.forward(&case) else { return };
    assert_eq!(had.o, case.v.contents(), "o is the only value");
}

pub(crate) fn p6_packed_backward(probe: &Probe) {
    let case = p6_packed();
    let Some(had) = probe.backward(&case) else { return };
    assert_eq!(had.dv, case.d_o.contents(), "P is 1");
}

/// Zeros of length 33728, so that the square is over 2^30; on the CPU 4 rows of it.
fn p7(probe: &Probe) -> Case<bf16> {
    let rows = if probe.backend.is_gpu() { 33_728 } else { 4 };
    let mut case = Case::new(shape(1, (1, 1), (rows, 33_728), (256, 256)), Sight::FULL, 59, 0.0);
    case.d_o.set(|_, _| 1.0);
    case
}

pub(crate) fn p7_forward(probe: &Probe) {
    let Some(had) = probe.forward_uncompared(&p7(probe)) else { return };
    assert_zero(&had.o, "o");
    let lse = vec![33_728_f64.ln(); had.lse.len()];
    assert_close(&had.lse, &lse, 1e-5, "lse");
}

pub(crate) fn p7_backward(probe: &Probe) {
    let Some(had) = probe.backward_uncompared(&p7(probe)) else { return };
    assert_zero(&had.dq, "dq");
    assert_zero(&had.dk, "dk");
    // P of each row is 1/33728, rounded to bf16 on a GPU.
    let rows = if probe.backend.is_gpu() { 33_728.0 } else { 4.0 };
    let dv = vec![rows / 33_728.0; had.dv.len()];
    assert_close(&had.dv, &dv, 4e-6_f64.max(rows / 33_728.0 / 256.0), "dv");
}

/// Rows 2^30 elements apart, in memory that is only touched where they lie.
pub(crate) fn p7_strides_forward(probe: &Probe) {
    let case = Case::<bf16>::new(shape(1, (1, 1), (3, 3), (64, 64)), Sight::FULL, 60, 1.0);
    let Some(had) = probe.forward(&case) else { return };
    if probe.backend == Backend::CpuTiled {
        assert_eq!(far_rows_on_the_cpu(&case), had.o);
    } else if probe.backend.is_gpu() {
        crate::far::on_the_gpu(probe.backend, &case, &had.o);
    }
}

fn far_rows_on_the_cpu(case: &Case<bf16>) -> Vec<f64> {
    const STEP: usize = (1 << 30) + 8;
    // Zeros are mapped, not written: only the pages of the rows take memory.
    let mut memory = vec![0_u16; 2 * STEP + 4 * 64];
    let place = |tensor: usize, row: usize| row * STEP + tensor * 64;
    for (tensor, owned) in [&case.q, &case.k, &case.v].into_iter().enumerate() {
        for (row, bits) in owned.bits().chunks_exact(64).enumerate() {
            let to = &mut memory[place(tensor, row)..][..64];
            to.iter_mut().zip(bits).for_each(|(to, bits)| *to = *bits as u16);
        }
    }
    let dims = [1, 3, 1, 64];
    let strides = [0, STEP as i64, 0, 1];
    let base = memory.as_mut_ptr().cast::<bf16>();
    let host = ferroflash::Place::Host;
    // SAFETY: bf16 is u16 in memory; the last row ends inside the allocation, and the four tensors
    // share no element.
    let (inputs, mut output) = unsafe {
        let read = |tensor: usize| {
            TensorRef::from_raw(base.add(tensor * 64), &dims, &strides, host).expect("four axes")
        };
        let o = ferroflash::TensorMut::from_raw(base.add(3 * 64), &dims, &strides, host);
        let inputs = ferroflash::Inputs::new(read(0), read(1), read(2));
        (inputs, Output { o: o.expect("four axes"), lse: None })
    };
    tiled::forward(&case.attention, &inputs, &mut output, None).expect("a valid call");
    drop((inputs, output));
    let o = (0..3).flat_map(|row| memory[place(3, row)..][..64].to_vec());
    o.map(|bits| bf16::from_bits(bits).to_f64()).collect()
}
