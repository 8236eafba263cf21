//! Laws of attention, at random: what any implementation must obey, whatever its tiles.
//!
//! That tiled is dense is drawn inside the library as well, with every option; here calls go
//! through a plan, and results of the same path are held against each other.

use ferroflash::cpu::tiled::CpuTile;
use ferroflash::{Align, Broadcast, Device, Output, Shape};
use ferroflash_core::row_state::RowState;
use ferroflash_tests::backend::{
    Backend, Grads, Outcome, backward, forward, forward_references, tiled_backward, tiled_forward,
};
use ferroflash_tests::bound::{lse_error, max_difference, max_magnitude, result_error};
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::memory::{Arrangement, Owned};
use ferroflash_tests::random::{below, normal};
use half::{bf16, f16};
use proptest::prelude::*;

/// Largest difference of two f32 results of the same values, as a part of the largest.
const F32_ROUNDING: f64 = 4e-6;

fn close(had: &[f64], expected: &[f64], name: &str) -> Result<(), TestCaseError> {
    let allowed = F32_ROUNDING * max_magnitude(expected).max(1.0);
    let difference = max_difference(had, expected);
    prop_assert!(difference <= allowed, "{}: {:e} over {:e}", name, difference, allowed);
    Ok(())
}

fn outcomes_close(had: &Outcome, expected: &Outcome) -> Result<(), TestCaseError> {
    close(&had.o, &expected.o, "o")?;
    close(&had.lse, &expected.lse, "lse")
}

fn grads_close(had: &Grads, expected: &Grads) -> Result<(), TestCaseError> {
    close(&had.dq, &expected.dq, "dq")?;
    close(&had.dk, &expected.dk, "dk")?;
    close(&had.dv, &expected.dv, "dv")
}

fn in_tiles<T: Real>(case: &Case<T>, tile: CpuTile) -> Outcome {
    let (o, lse) = tiled_forward(case, Some(tile)).expect("a valid call");
    Outcome { o: o.contents(), lse: lse.contents() }
}

fn attend<T: Real>(case: &Case<T>) -> Outcome {
    forward(Backend::CpuTiled, case).expect("a valid call")
}

fn gradients<T: Real>(case: &Case<T>) -> Grads {
    backward(Backend::CpuTiled, case).expect("a valid call")
}

fn sizes() -> impl Strategy<Value = Shape> {
    let channels = || prop_oneof![Just(1_usize), Just(8), Just(20), Just(33), Just(64)];
    let heads = (1..4_usize, 1..3_usize);
    (1..3_usize, heads, (0..90_usize, 0..120_usize), (channels(), channels())).prop_map(
        |(batch, (group, kv_heads), lengths, channels)| {
            shape(batch, (group * kv_heads, kv_heads), lengths, channels)
        },
    )
}

fn sights() -> impl Strategy<Value = Sight> {
    let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
    let side = || proptest::option::weighted(0.6, 0..30_usize);
    prop_oneof![
        Just(Sight::FULL),
        Just(Sight::TOP_LEFT),
        Just(Sight::BOTTOM_RIGHT),
        (align, side(), side()).prop_map(|(align, left, right)| Sight { align, left, right }),
    ]
}

fn tiles() -> impl Strategy<Value = CpuTile> {
    let side = || prop_oneof![Just(16), Just(64), 1..100_usize];
    (side(), side()).prop_map(|(q_rows, kv_columns)| CpuTile { q_rows, kv_columns })
}

fn arrangements() -> impl Strategy<Value = Arrangement> {
    let repeat = || proptest::bool::weighted(0.1);
    (0..8_usize, any::<bool>(), 0..4_usize, 0..3_usize, repeat(), repeat()).prop_map(
        |(offset, heads_first, channel_gap, row_gap, repeat_batch, repeat_heads)| Arrangement {
            offset,
            heads_first,
            channel_gap,
            row_gap,
            repeat_batch,
            repeat_heads,
        },
    )
}

/// The call of a case through a plan for the CPU.
fn planned<T: Real>(case: &Case<T>) -> Outcome {
    let device = Device::cpu();
    let plan = case.attention.plan::<T>(&device).expect("a plan");
    let mut o = Owned::<T>::poisoned(&case.o_dims, case.results);
    let mut lse = Owned::<f32>::poisoned(&case.lse_dims, Arrangement::CONTIGUOUS);
    let mut output = Output { o: o.view_mut(), lse: Some(lse.view_mut()) };
    plan.run(&device.default_stream(), case.inputs(), &mut output).expect("a valid call");
    drop(output);
    o.assert_written("o");
    lse.assert_written("lse");
    Outcome { o: o.contents(), lse: lse.contents() }
}

fn a_plan_is_dense<T: Real>(case: &Case<T>) -> Result<(), TestCaseError> {
    let had = planned(case);
    let [exact, rounded] = forward_references(case);
    let error = result_error(&had.o, &exact.o, &rounded.o, T::DTYPE);
    prop_assert!(error.holds(), "o: {:?}", error);
    let error = lse_error(&had.lse, &exact.lse);
    prop_assert!(error.holds(), "lse: {:?}", error);
    Ok(())
}

/// A case of normal values.
fn case<T: Real>(shape: Shape, sight: Sight, seed: u64) -> Case<T> {
    Case::new(shape, sight, seed, 1.0)
}

/// Rows of a `[B, S, H, D]` tensor in another order: row `order[i]` becomes row i.
fn reordered(owned: &Owned<f32>, order: &[usize]) -> Owned<f32> {
    let (contents, dims) = (owned.contents(), owned.dims().to_vec());
    let row = dims[2] * dims[3];
    let mut other = owned.clone();
    other.set(|at, _| {
        let (item, within) = (at / row / dims[1], at / row % dims[1]);
        contents[(item * dims[1] + order[within]) * row + at % row] as f32
    });
    other
}

/// The first `rows` rows of each item.
fn first_rows(owned: &Owned<f32>, rows: usize) -> Owned<f32> {
    let (contents, mut dims) = (owned.contents(), owned.dims().to_vec());
    let (all, row) = (dims[1], dims[2] * dims[3]);
    dims[1] = rows;
    let mut values = Vec::new();
    for item in 0..dims[0] {
        let kept = &contents[item * all * row..(item * all + rows) * row];
        values.extend(kept.iter().map(|value| *value as f32));
    }
    Owned::new(&values, &dims, Arrangement::CONTIGUOUS)
}

/// A random order of `count` things.
fn order(seed: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for (at, with) in below(seed, count, u64::MAX).into_iter().enumerate() {
        order.swap(at, at + (with % (count - at) as u64) as usize);
    }
    order
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(200)
    })]

    #[test]
    fn a_plan_is_dense_in_any_memory(
        shape in sizes(), sight in sights(), seed in 0..1000_u64,
        q in arrangements(), k in arrangements(), v in arrangements(), o in arrangements(),
    ) {
        let o = Arrangement { repeat_batch: false, repeat_heads: false, ..o };
        let arranged = [q, k, v, o];
        a_plan_is_dense(&case::<f32>(shape, sight, seed).arranged(arranged))?;
        a_plan_is_dense(&case::<bf16>(shape, sight, seed).arranged(arranged))?;
        a_plan_is_dense(&case::<f16>(shape, sight, seed).arranged(arranged))?;
    }

    /// The same values anywhere in memory give the same bits.
    #[test]
    fn memory_does_not_matter(
        shape in sizes(), sight in sights(), seed in 0..1000_u64, arrangement in arrangements(),
    ) {
        let plain = Arrangement::CONTIGUOUS;
        let given = Arrangement { repeat_batch: false, repeat_heads: false, ..arrangement };
        let contiguous = case::<bf16>(shape, sight, seed);
        let moved = contiguous.clone().arranged([given, plain, given, given]);
        prop_assert_eq!(attend(&contiguous), attend(&moved));
        prop_assert_eq!(gradients(&contiguous), gradients(&moved));
    }

    #[test]
    fn tile_sizes_do_not_matter(
        shape in sizes(), sight in sights(), seed in 0..1000_u64, a in tiles(), b in tiles(),
    ) {
        let case = case::<f32>(shape, sight, seed);
        outcomes_close(&in_tiles(&case, a), &in_tiles(&case, b))?;
        let [a, b] = [a, b].map(|tile| tiled_backward(&case, Some(tile)).expect("a valid call"));
        grads_close(&a, &b)?;
    }

    /// Any order of keys, if every row sees all of them.
    #[test]
    fn the_order_of_keys_does_not_matter(shape in sizes(), seed in 0..1000_u64) {
        let case = case::<f32>(shape, Sight::FULL, seed);
        let order = order(seed, shape.kv_len);
        let mut other = case.clone();
        (other.k, other.v) = (reordered(&case.k, &order), reordered(&case.v, &order));
        outcomes_close(&attend(&other), &attend(&case))?;
        let (had, expected) = (gradients(&other), gradients(&case));
        close(&had.dq, &expected.dq, "dq")?;
        let moved = |values: &[f64], like: &Owned<f32>| {
            let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            let owned = Owned::new(&values, like.dims(), Arrangement::CONTIGUOUS);
            reordered(&owned, &order).contents()
        };
        close(&had.dk, &moved(&expected.dk, &case.k), "dk")?;
        close(&had.dv, &moved(&expected.dv, &case.v), "dv")?;
    }

    /// The first rows of a causal call are the causal call of the first rows and keys.
    #[test]
    fn later_keys_do_not_reach_earlier_rows(
        shape in sizes(), seed in 0..1000_u64, share in 0.0..1.0_f64,
    ) {
        let len = shape.q_len.min(shape.kv_len);
        let prefix = (len as f64 * share) as usize;
        let whole = case::<f32>(shape, Sight::TOP_LEFT, seed);
        let sizes = Shape { q_len: prefix, kv_len: prefix, ..shape };
        let mut part = case::<f32>(sizes, Sight::TOP_LEFT, seed);
        part.q = first_rows(&whole.q, prefix);
        (part.k, part.v) = (first_rows(&whole.k, prefix), first_rows(&whole.v, prefix));
        let had = attend(&whole);
        let values: Vec<f32> = had.o.iter().map(|value| *value as f32).collect();
        let o = Owned::<f32>::new(&values, &whole.o_dims, Arrangement::CONTIGUOUS);
        close(&first_rows(&o, prefix).contents(), &attend(&part).o, "o")?;
    }

    /// A KV head that several query heads share is as good as a copy for each.
    #[test]
    fn shared_heads_are_repeated_heads(
        shape in sizes(), sight in sights(), seed in 0..1000_u64,
    ) {
        let grouped = case::<bf16>(shape, sight, seed);
        let mut repeated = case::<bf16>(Shape { kv_heads: shape.q_heads, ..shape }, sight, seed);
        for (from, to) in [(&grouped.k, &mut repeated.k), (&grouped.v, &mut repeated.v)] {
            let (contents, channels) = (from.contents(), from.dims()[3]);
            to.set(|at, _| {
                let (row, head) =
                    (at / channels / shape.q_heads, at / channels % shape.q_heads);
                let own = row * shape.kv_heads + shape.kv_head(head);
                contents[own * channels + at % channels] as f32
            });
        }
        prop_assert_eq!(attend(&grouped), attend(&repeated));
        prop_assert_eq!(gradients(&grouped).dq, gradients(&repeated).dq);
    }

    /// The same number added to every score of a row moves lse by it and o not at all. It enters
    /// through one more channel.
    #[test]
    fn a_shift_of_all_scores_moves_lse_alone(
        shape in sizes(), sight in sights(), seed in 0..1000_u64, shift in -20.0..20.0_f32,
    ) {
        let wider = Shape { head_dim: shape.head_dim + 1, ..shape };
        let scale = 0.25;
        let with = |addend: f32| {
            let mut case = case::<f32>(wider, sight, seed).with_scale(scale);
            let is_added = |at: usize| at % wider.head_dim == shape.head_dim;
            case.q.set(|at, value| if is_added(at) { 1.0 } else { value });
            case.k.set(|at, value| if is_added(at) { addend / scale } else { value });
            attend(&case)
        };
        let (plain, shifted) = (with(0.0), with(shift));
        let allowed = F32_ROUNDING * 20.0 * max_magnitude(&plain.o).max(1.0);
        prop_assert!(max_difference(&shifted.o, &plain.o) <= allowed);
        let moved: Vec<f64> = plain.lse.iter().map(|lse| lse + f64::from(shift)).collect();
        close(&shifted.lse, &moved, "lse")?;
    }

    /// Keys cut into parts, each attended alone, and the parts' (o, lse) merged along any tree.
    #[test]
    fn parts_merge_to_the_whole(
        shape in sizes(), seed in 0..1000_u64, parts in 1..6_usize,
    ) {
        let whole = case::<f32>(shape, Sight::FULL, seed);
        let of_key = below(seed + 1, shape.kv_len, parts as u64);
        let mut states: Vec<Outcome> = (0..parts as u64)
            .map(|part| {
                let keys: Vec<usize> =
                    (0..shape.kv_len).filter(|key| of_key[*key] == part).collect();
                let sizes = Shape { kv_len: keys.len(), ..shape };
                let mut case = case::<f32>(sizes, Sight::FULL, seed);
                case.q = whole.q.clone();
                let order: Vec<usize> =
                    keys.iter().copied().chain((0..shape.kv_len).filter(|k| !keys.contains(k)))
                        .collect();
                case.k = first_rows(&reordered(&whole.k, &order), keys.len());
                case.v = first_rows(&reordered(&whole.v, &order), keys.len());
                attend(&case)
            })
            .collect();
        for pick in below(seed + 2, parts - 1, u64::MAX) {
            let right = states.remove(pick as usize % states.len());
            let at = (pick >> 32) as usize % states.len();
            states[at] = merged(&states[at], &right, &shape);
        }
        outcomes_close(&states[0], &attend(&whole))?;
    }

    /// A sink is one more key: its logit as a bias of a key of zeros, whose value is zero.
    #[test]
    fn a_sink_is_a_key_without_a_value(shape in sizes(), seed in 0..1000_u64) {
        let logits = normal(seed, shape.q_heads, 2.0);
        let with_sink = case::<f32>(shape, Sight::FULL, seed).with_sink(&logits).with_d_lse(seed);
        let sizes = Shape { kv_len: shape.kv_len + 1, ..shape };
        let axes = Broadcast { batch: true, heads: false, rows: true };
        let mut with_key = case::<f32>(sizes, Sight::FULL, seed)
            .with_bias(axes, Arrangement::CONTIGUOUS, seed)
            .with_d_lse(seed);
        if let Some((_, bias)) = &mut with_key.bias {
            let keys = sizes.kv_len;
            bias.set(|at, _| if at % keys == keys - 1 { logits[at / keys] } else { 0.0 });
        }
        for (own, all) in [(&with_sink.k, &mut with_key.k), (&with_sink.v, &mut with_key.v)] {
            let (contents, row) = (own.contents(), own.dims()[2] * own.dims()[3]);
            let (keys, longer) = (shape.kv_len * row, sizes.kv_len * row);
            all.set(|at, _| match at % longer {
                within if within < keys => contents[at / longer * keys + within] as f32,
                _ => 0.0,
            });
        }
        outcomes_close(&attend(&with_sink), &attend(&with_key))?;
        let (sink, key) = (gradients(&with_sink), gradients(&with_key));
        close(&sink.dq, &key.dq, "dq")?;
        let dbias = key.dbias.expect("there is a bias");
        let last: Vec<f64> =
            dbias.chunks_exact(sizes.kv_len).map(|keys| keys[shape.kv_len]).collect();
        let dsink = sink.dsink.expect("there is a sink");
        let allowed = 2e-5 * max_magnitude(&dbias).max(1.0);
        prop_assert!(max_difference(&dsink, &last) <= allowed, "{:?} {:?}", dsink, last);
    }

    /// Each item of a batch is what it is alone.
    #[test]
    fn items_do_not_see_each_other(shape in sizes(), sight in sights(), seed in 0..1000_u64) {
        let whole = case::<bf16>(shape, sight, seed);
        let had = attend(&whole);
        let rows = shape.q_len * shape.q_heads * shape.value_dim;
        for item in 0..shape.batch {
            let mut alone = case::<bf16>(Shape { batch: 1, ..shape }, sight, seed);
            for (own, all) in [
                (&mut alone.q, &whole.q), (&mut alone.k, &whole.k), (&mut alone.v, &whole.v),
            ] {
                let (contents, first) = (all.contents(), item * own.count());
                own.set(|at, _| contents[first + at] as f32);
            }
            prop_assert_eq!(&attend(&alone).o, &had.o[item * rows..(item + 1) * rows]);
        }
    }
}

/// (o, lse) of two sets of keys as one: `RowState` with m = lse, l = 1, u = o.
fn merged(left: &Outcome, right: &Outcome, s: &Shape) -> Outcome {
    let mut merged = left.clone();
    for item in 0..s.batch {
        for (row, head) in (0..s.q_len).flat_map(|row| (0..s.q_heads).map(move |h| (row, h))) {
            let at_lse = (item * s.q_heads + head) * s.q_len + row;
            let at_o = ((item * s.q_len + row) * s.q_heads + head) * s.value_dim;
            let state = |outcome: &Outcome| match outcome.lse[at_lse] {
                f64::NEG_INFINITY => RowState::<f64>::EMPTY,
                row_max => RowState { row_max, row_sum: 1.0 },
            };
            let (sum, rescale) = state(left).merge(state(right), f64::exp);
            merged.lse[at_lse] = sum.lse(f64::ln);
            for channel in at_o..at_o + s.value_dim {
                let numerator = left.o[channel] * rescale.left + right.o[channel] * rescale.right;
                merged.o[channel] = numerator * sum.normalizer();
            }
        }
    }
    merged
}
