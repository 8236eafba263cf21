//! Tiled against dense, over random calls; repeatability; containment; refusals.

mod case;

use half::{bf16, f16};
use proptest::prelude::*;

use self::case::{Case, Memory, Options, Owned, Results, options};
use super::{CpuTile, backward, forward, forward_with_progress};
use crate::attention::{Align, Broadcast, Gradients, Mask, Output, Saved, Scale};
use crate::cpu::dense::{self, Precision};
use crate::element::Element;
use crate::error::Error;
use crate::tensor::TensorRef;

/// Largest difference allowed, as a part of the largest value and of each value.
#[derive(Clone, Copy)]
struct Tolerance {
    whole: f64,
    each: f64,
}

fn compare(name: &str, had: &[f64], exact: &[f64], tolerance: Tolerance) {
    assert_eq!(had.len(), exact.len(), "{name}");
    let finite = |value: &f64| if value.is_finite() { value.abs() } else { 0.0 };
    let largest = exact.iter().map(finite).fold(1.0, f64::max);
    for (index, (had, exact)) in had.iter().zip(exact).enumerate() {
        let allowed = tolerance.whole * largest + tolerance.each * exact.abs();
        let is_close = had == exact || (had - exact).abs() <= allowed;
        assert!(is_close, "{name}[{index}]: {had}, but dense has {exact}");
    }
}

/// Compares both passes with dense. Gradients inherit the rounding of the saved o, so that 16-bit
/// ones are compared loosely; f32 ones are not.
fn tiled_is_dense<T: Element>(options: &Options, rounding: f64) {
    let case = options.case::<T>();
    let results = case.run();
    let inputs = case.inputs();
    let exact = dense::forward(&case.attention, &inputs, Precision::F64).unwrap();
    let output = Tolerance { whole: 4e-6, each: rounding };
    compare("o", &results.o.contents(), &exact.o, output);
    compare("lse", &results.lse.contents(), &exact.lse, Tolerance { whole: 4e-6, each: 1e-6 });

    let d_lse = case.d_lse.as_ref().map(Owned::view);
    let exact =
        dense::backward(&case.attention, &inputs, &case.d_o.view(), d_lse.as_ref(), Precision::F64)
            .unwrap();
    // dP and delta are sums of up to 64 products that may cancel, a hundred rows a key.
    let gradient = Tolerance { whole: 4e-5 + 8.0 * rounding, each: rounding };
    compare("dq", &results.dq.contents(), &exact.dq, gradient);
    compare("dk", &results.dk.contents(), &exact.dk, gradient);
    compare("dv", &results.dv.contents(), &exact.dv, gradient);
    if let (Some(had), Some(exact)) = (&results.dbias, &exact.dbias) {
        compare("dbias", &had.contents(), exact, gradient);
    }
    if let (Some(had), Some(exact)) = (&results.dsink, &exact.dsink) {
        compare("dsink", &had.contents(), exact, gradient);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tiled_is_dense_in_f32(options in options()) {
        tiled_is_dense::<f32>(&options, 0.0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn tiled_is_dense_in_f16(options in options()) {
        tiled_is_dense::<f16>(&options, 1.0 / 2048.0);
    }

    #[test]
    fn tiled_is_dense_in_bf16(options in options()) {
        tiled_is_dense::<bf16>(&options, 1.0 / 256.0);
    }

    /// Keys and values that no item has may hold anything.
    #[test]
    fn unused_rows_never_reach_a_result(mut options in options()) {
        options.layout = 1 + options.layout % 3;
        let case = options.case::<f32>();
        let clean = case.run();
        let mut poisoned = options.case::<f32>();
        for (batch, rows) in case.unused_keys() {
            for tensor in [&mut poisoned.k, &mut poisoned.v] {
                poison(tensor, batch, rows.clone());
            }
        }
        prop_assert_eq!(bits(&poisoned.run()), bits(&clean));
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads(mut options in options()) {
        options.tile.q_rows = options.tile.q_rows.min(20);
        options.tile.kv_columns = options.tile.kv_columns.min(20);
        let case = options.case::<f32>();
        let with_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            bits(&pool.install(|| case.run()))
        };
        let one = with_threads(1);
        for threads in [2, 3, 7] {
            prop_assert_eq!(&with_threads(threads), &one);
        }
    }

    /// Each gradient alone is what it is among the others.
    #[test]
    fn any_subset_of_gradients_is_the_same(options in options(), wanted in any::<[bool; 5]>()) {
        let case = options.case::<f32>();
        let all = case.run();
        let mut some = all.clone();
        {
            let Results { o, lse, dq, dk, dv, dbias, dsink } = &mut some;
            let saved = Saved { inputs: case.inputs(), o: o.view(), lse: lse.view() };
            let mut gradients = Gradients {
                dq: wanted[0].then(|| dq.view_mut()),
                dk: wanted[1].then(|| dk.view_mut()),
                dv: wanted[2].then(|| dv.view_mut()),
                dbias: dbias.as_mut().filter(|_| wanted[3]).map(Owned::view_mut),
                dsink: dsink.as_mut().filter(|_| wanted[4]).map(Owned::view_mut),
            };
            let d_lse = case.d_lse.as_ref().map(Owned::view);
            let (d_o, tile) = (case.d_o.view(), Some(case.tile));
            backward(&case.attention, &saved, &d_o, d_lse.as_ref(), &mut gradients, tile).unwrap();
        }
        prop_assert_eq!(bits(&some), bits(&all));
    }
}

/// Rows `rows` of an item become NaN.
fn poison(tensor: &mut Owned<f32>, batch: usize, rows: std::ops::Range<usize>) {
    let dims = tensor.dims.clone();
    let row_axis = dims.len() - 3;
    let inner: usize = dims[row_axis + 1..].iter().product();
    let mut contents: Vec<f32> = tensor.contents().iter().map(|value| *value as f32).collect();
    let start = batch * dims[row_axis];
    contents[(start + rows.start) * inner..(start + rows.end) * inner].fill(f32::NAN);
    *tensor = Owned::new(&contents, &dims, Memory::Contiguous);
}

/// Every result, bit by bit; the elements between rows are NaN throughout.
fn bits(results: &Results<f32>) -> Vec<Vec<u32>> {
    let Results { o, lse, dq, dk, dv, dbias, dsink } = results;
    [Some(o), Some(lse), Some(dq), Some(dk), Some(dv), dbias.as_ref(), dsink.as_ref()]
        .into_iter()
        .flatten()
        .map(|owned| owned.values.iter().map(|value| value.to_bits()).collect())
        .collect()
}

/// One item, two heads of 64 channels, no option.
fn plain(lengths: (usize, usize), mask: Mask, tile: CpuTile) -> Options {
    Options {
        batch: 1,
        heads: (2, 1),
        lengths,
        channels: (64, 64),
        layout: 0,
        mask,
        scale: Scale::InvSqrtHeadDim,
        softcap: false,
        alibi: false,
        bias: None,
        boolean_mask: None,
        sink: false,
        dropout: false,
        d_lse: false,
        memory: Memory::HeadsFirst,
        tile,
        seed: 3,
    }
}

#[test]
fn default_tiles_are_dense_over_several_tiles() {
    for mask in [
        Mask::full(),
        Mask::causal(Align::TopLeft),
        Mask::causal(Align::BottomRight),
        Mask::causal(Align::BottomRight).window(Some(100), Some(0)),
    ] {
        tiled_is_dense::<f32>(&plain((500, 700), mask, CpuTile::FORWARD), 0.0);
        let everything = Options {
            softcap: true,
            alibi: true,
            bias: Some(Broadcast { batch: true, heads: true, rows: false }),
            boolean_mask: Some(Broadcast { batch: true, heads: false, rows: true }),
            sink: true,
            dropout: true,
            d_lse: true,
            ..plain((450, 400), mask, CpuTile::FORWARD)
        };
        tiled_is_dense::<f32>(&everything, 0.0);
    }
}

/// Every key is the same row of memory, and so is every value.
#[test]
fn rows_may_repeat_by_a_stride_of_zero() {
    let case: Case<f32> = plain((70, 90), Mask::full(), CpuTile::FORWARD).case();
    let [_, k_dims, v_dims, o_dims] = case.attention.tensor_dims();
    let mut inputs = case.inputs();
    inputs.k = TensorRef::host_strided(&case.k.values, &k_dims, &[0, 0, 0, 1]).unwrap();
    inputs.v = TensorRef::host_strided(&case.v.values, &v_dims, &[0, 0, 0, 1]).unwrap();
    let mut o = Owned::poisoned(&o_dims, Memory::Contiguous);
    let mut output = Output { o: o.view_mut(), lse: None };
    forward(&case.attention, &inputs, &mut output, None).unwrap();
    drop(output);
    let value: Vec<f64> = case.v.values[..64].iter().map(|value| f64::from(*value)).collect();
    for row in o.contents().chunks_exact(64) {
        compare("o", row, &value, Tolerance { whole: 4e-6, each: 0.0 });
    }
}

#[test]
fn calls_without_elements_are_fine() {
    for (batch, heads, lengths) in [(0, (1, 1), (4, 4)), (2, (0, 1), (4, 4)), (1, (1, 0), (4, 4))] {
        for layout in 0..3 {
            let tile = CpuTile::FORWARD;
            let sizes = Options { batch, heads, layout, ..plain(lengths, Mask::full(), tile) };
            let results = Options { sink: true, ..sizes }.case::<f32>().run();
            assert!(results.dk.contents().iter().all(|value| *value == 0.0));
        }
    }
}

/// Keys past the diagonal of every row are outside every range.
#[test]
fn keys_that_no_row_may_see_are_never_read() {
    let options = plain((40, 200), Mask::causal(Align::TopLeft), CpuTile::FORWARD);
    let mut case: Case<f32> = options.case();
    let clean = case.run();
    poison(&mut case.k, 0, 40..200);
    poison(&mut case.v, 0, 40..200);
    let poisoned = case.run();
    assert_eq!(poisoned.o.contents(), clean.o.contents());
    assert_eq!(poisoned.dq.contents(), clean.dq.contents());
    assert!(clean.dk.contents()[40 * 64..].iter().all(|value| *value == 0.0));
    assert_eq!(poisoned.dk.contents(), clean.dk.contents());
    assert_eq!(poisoned.dv.contents(), clean.dv.contents());
}

#[test]
fn a_visible_nan_or_infinity_propagates() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case: Case<f32> = plain((20, 30), Mask::full(), CpuTile::FORWARD).case();
        case.k.values[5 * 64] = bad;
        case.q.values.iter_mut().for_each(|value| *value = value.abs());
        let o = case.run().o.contents();
        assert!(o.iter().all(|value| value.is_nan()));
    }
}

#[test]
fn extreme_scores_stay_exact() {
    for factor in [1e4, -1e4, 1e30] {
        let mut options = plain((70, 90), Mask::causal(Align::BottomRight), CpuTile::FORWARD);
        options.scale = Scale::Factor(factor);
        let case: Case<f32> = options.case();
        let o = case.run().o.contents();
        let exact = dense::forward(&case.attention, &case.inputs(), Precision::F64).unwrap().o;
        // Scores are so far apart that each row picks one key, unless two nearly tie.
        let differing = o.iter().zip(&exact).filter(|(a, b)| (*a - *b).abs() > 1e-2).count();
        assert!(differing * 20 <= o.len(), "{factor}: {differing} of {}", o.len());
        assert!(o.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn progress_counts_every_block_once() {
    let tile = CpuTile { q_rows: 32, kv_columns: 32 };
    let case: Case<f32> = plain((100, 50), Mask::full(), tile).case();
    let [.., o_dims] = case.attention.tensor_dims();
    let mut o = Owned::poisoned(&o_dims, Memory::Contiguous);
    let mut output = Output { o: o.view_mut(), lse: None };
    let seen = std::sync::Mutex::new(Vec::new());
    let tell = |done, total| seen.lock().unwrap().push((done, total));
    forward_with_progress(&case.attention, &case.inputs(), &mut output, Some(tile), &tell).unwrap();
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (1..=8).map(|done| (done, 8)).collect::<Vec<_>>());
}

#[test]
fn tiles_without_rows_are_refused() {
    let case: Case<f32> = plain((4, 4), Mask::full(), CpuTile::FORWARD).case();
    let [.., o_dims] = case.attention.tensor_dims();
    let mut o = Owned::poisoned(&o_dims, Memory::Contiguous);
    let mut output = Output { o: o.view_mut(), lse: None };
    for (tile, name) in [
        (CpuTile { q_rows: 0, kv_columns: 8 }, "q_rows"),
        (CpuTile { q_rows: 8, kv_columns: CpuTile::LARGEST + 1 }, "kv_columns"),
    ] {
        let refused = forward(&case.attention, &case.inputs(), &mut output, Some(tile));
        assert!(
            matches!(refused, Err(Error::Argument { argument, .. }) if argument == name),
            "{refused:?}"
        );
    }
    drop(output);
    assert!(o.contents().iter().all(|value| value.is_nan()), "nothing was written");
}
