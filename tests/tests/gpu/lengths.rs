//! Lengths on the device: malformed ones stay inside the tensors and are named by `validate`, those
//! on the host are refused where they would be read later, and captured calls read them anew.
//! Masks of dropout are those of the CPU, bit for bit.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use ferroflash::{Direction, Dropout, Dtype, Error, Form, KernelSpec, MaskClass, Stream};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{Loaded, LoadedBackward, Wanted, copy_stream, device, plan};
use ferroflash_tests::random::below;
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::options::packed;
use crate::{kernels_and_forms, trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        if spec.mask == MaskClass::General {
            let name = format!("{}/{form}/dropout_masks_are_the_cpus", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => dropout_masks_are_the_cpus::<f16>(spec, form),
                Dtype::F32 => dropout_masks_are_the_cpus::<f32>(spec, form),
                _ => dropout_masks_are_the_cpus::<bf16>(spec, form),
            }));
        }
        if spec.mask >= MaskClass::Masked {
            let name = format!("sanitize/{}/{form}/malformed_lengths", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => malformed_lengths_stay_inside::<f16>(spec, form),
                Dtype::F32 => malformed_lengths_stay_inside::<f32>(spec, form),
                _ => malformed_lengths_stay_inside::<bf16>(spec, form),
            }));
        }
    }
    for (spec, form, is_possible) in kernels_and_forms(Direction::Backward) {
        if spec.mask >= MaskClass::Masked {
            let name = format!("sanitize/{}/{form}/malformed_lengths", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => malformed_lengths_stay_inside_backward::<f16>(spec, form),
                Dtype::F32 => malformed_lengths_stay_inside_backward::<f32>(spec, form),
                _ => malformed_lengths_stay_inside_backward::<bf16>(spec, form),
            }));
            let name = format!("{}/{form}/items_do_not_touch_each_other", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => items_do_not_touch_each_other::<f16>(spec, form),
                Dtype::F32 => items_do_not_touch_each_other::<f32>(spec, form),
                _ => items_do_not_touch_each_other::<bf16>(spec, form),
            }));
            let name = format!("{}/{form}/malformed_offsets_end_in_order", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => malformed_offsets_end_in_order::<f16>(spec, form),
                Dtype::F32 => malformed_offsets_end_in_order::<f32>(spec, form),
                _ => malformed_offsets_end_in_order::<bf16>(spec, form),
            }));
        }
    }
    let once: [(&str, fn()); 5] = [
        ("many_malformed_offsets_end_in_order", many_malformed_offsets_end_in_order),
        ("validate_names_what_is_malformed", validate_names_what_is_malformed),
        ("host_lengths_are_refused_where_they_are_read_later", host_lengths_are_refused),
        ("many_short_items", many_short_items),
        ("many_short_items_backward", many_short_items_backward),
    ];
    trials.extend(once.map(|(name, run)| trial(name.to_owned(), true, run)));
    trials
}

/// A seed and an offset that use both halves of their words.
const STATE: [u64; 2] = [1 << 40 | 3, 5 << 33 | 9];

/// With q = 0 every probability is 1 / keys, and with V a part of the identity o shows which of
/// them are kept. The state is a part of the description, then lies on the device.
fn dropout_masks_are_the_cpus<T: Real>(spec: &'static KernelSpec, form: Form) {
    let (dim, channels) = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let (rows, keys, heads) = (spec.tile.q_rows as usize + 37, 3 * channels, 2);
    let sizes = shape(2, (heads, heads), (rows, keys), (dim, channels));
    for (part, is_given) in [(0, false), (1, false), (2, false), (0, true), (1, true), (2, true)] {
        let mut case = Case::<T>::new(sizes, Sight::FULL, 1, 1.0);
        case = match is_given {
            true => case.with_dropout_given(0.4, STATE),
            false => case.with_dropout(Dropout::new(0.4, (STATE[0], STATE[1]))),
        };
        case.q.set(|_, _| 0.0);
        case.v.set(|at, _| {
            let (key, channel) = (at / channels / heads % keys, at % channels);
            if key == part * channels + channel { 1.0 } else { 0.0 }
        });
        let mask = case.dropout_mask().expect("it drops");
        let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
        let stream = Stream::from(copy_stream());
        let mut loaded = Loaded::new(&case, true);
        let inspected = loaded.dropout_mask(&plan, &stream).expect("a state");
        loaded.run(&plan, &stream).expect("a launch");
        let (o, _) = loaded.results(&stream);
        for (at, o) in o.contents().into_iter().enumerate() {
            let (head, row) = (at / channels % heads, at / channels / heads % rows);
            let (item, key) = (at / channels / heads / rows, part * channels + at % channels);
            let batch_head = item * heads + head;
            let is_kept = mask.keeps(batch_head as u32, row as u32, key as u32);
            assert_eq!(o != 0.0, is_kept, "item {item}, head {head}, row {row}, key {key}");
            let had = inspected[(batch_head * rows + row) * keys + key];
            assert_eq!(had, u8::from(is_kept), "item {item}, head {head}, row {row}, key {key}");
        }
    }
}

/// Offsets that fall, start late, end early or point anywhere.
fn malformed() -> Vec<(&'static str, PackedLengths)> {
    let good = packed(&[(70, 50), (0, 30), (90, 61)]);
    let bad = |name, change: fn(&mut PackedLengths)| {
        let mut lengths = good.clone();
        change(&mut lengths);
        (name, lengths)
    };
    vec![
        bad("cu_q", |lengths| lengths.cu_q = vec![0, 120, 70, 160]),
        bad("cu_q", |lengths| lengths.cu_q = vec![50, 70, 70, 160]),
        bad("cu_q", |lengths| lengths.cu_q = vec![0, 70, 70, 90]),
        bad("cu_q", |lengths| lengths.cu_q = vec![0, i32::MAX, i32::MIN, -1]),
        bad("cu_q", |lengths| lengths.cu_q = vec![i32::MAX; 4]),
        bad("cu_k", |lengths| lengths.cu_k = vec![0, i32::MAX, 80, 141]),
        bad("cu_k", |lengths| lengths.cu_k = vec![-5, -7, i32::MAX, i32::MIN]),
        bad("used_q", |lengths| lengths.used_q = Some(vec![i32::MAX, -1, 91])),
        bad("used_k", |lengths| lengths.used_k = Some(vec![i32::MIN, 31, i32::MAX])),
    ]
}

fn with_lengths<T: Real>(dims: (usize, usize), lengths: &PackedLengths) -> Case<T> {
    let good = packed(&[(70, 50), (0, 30), (90, 61)]);
    let mut case = Case::<T>::packed((2, 1), dims, good, Sight::BOTTOM_RIGHT, 2, 1.0);
    case.packed = Some(lengths.clone());
    case
}

/// Nothing around the tensors is written, and a sound call after it is right: no fault came of it.
fn malformed_lengths_stay_inside<T: Real>(spec: &'static KernelSpec, form: Form) {
    let dims = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let stream = Stream::from(copy_stream());
    for (_, lengths) in malformed() {
        let case = with_lengths::<T>(dims, &lengths);
        let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
        let mut loaded = Loaded::new(&case, true);
        loaded.run(&plan, &stream).expect("a launch");
        let (o, lse) = loaded.results(&stream);
        o.assert_guards("o");
        lse.expect("it was asked for").assert_guards("lse");
    }
}

/// The same of gradients, and of the workspace.
fn malformed_lengths_stay_inside_backward<T: Real>(spec: &'static KernelSpec, form: Form) {
    let dims = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let stream = Stream::from(copy_stream());
    for (_, lengths) in malformed() {
        let case = with_lengths::<T>(dims, &lengths);
        let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
        let mut loaded =
            LoadedBackward::new(&case, &plan, Wanted::ALL, &stream).expect("a forward pass");
        loaded.run(&plan, &stream).expect("a launch");
        for (name, gradient) in loaded.results(&stream).named() {
            gradient.assert_guards(name);
        }
    }
}

/// Ordered sums of packed items whose offsets are malformed: no block waits for a turn that has
/// passed or that never comes.
fn malformed_offsets_end_in_order<T: Real>(spec: &'static KernelSpec, form: Form) {
    let dims = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let stream = Stream::from(copy_stream());
    for (good, malformed) in [shared_turns(spec), hidden_first_blocks(spec)] {
        for sight in [Sight::FULL, Sight::BOTTOM_RIGHT] {
            let mut case = Case::<T>::packed((2, 1), dims, good.clone(), sight, 2, 1.0);
            case.packed = Some(malformed.clone());
            let attention = case.attention.deterministic();
            let plan = plan::<T>(&attention, Some(spec.name), Some(form)).expect("it is eligible");
            let loaded = LoadedBackward::new(&case, &plan, Wanted::ALL, &stream);
            let mut loaded = loaded.expect("a forward pass");
            loaded.run(&plan, &stream).expect("a launch");
            for (name, gradient) in loaded.results(&stream).named() {
                gradient.assert_guards(name);
            }
        }
    }
}

/// Items, and the same with one whose rows are another's as well: its first tile has the turns of
/// the first item's last.
fn shared_turns(spec: &KernelSpec) -> (PackedLengths, PackedLengths) {
    let (rows, keys) = (spec.tile.q_rows as usize, spec.tile.kv_columns as usize);
    let good = packed(&[(3 * rows, 3 * keys); 4]);
    let mut lengths = good.clone();
    lengths.cu_q[2] = 0;
    (good, lengths)
}

/// More items than one vote tells apart, and the same with one whose first key blocks are looked
/// for among others, since the item before it starts late.
fn hidden_first_blocks(spec: &KernelSpec) -> (PackedLengths, PackedLengths) {
    let (rows, keys) = (spec.tile.q_rows as usize, spec.tile.kv_columns);
    let mut sizes = [(rows, keys as usize); 40];
    sizes[39].1 *= 30;
    let good = packed(&sizes);
    let mut lengths = good.clone();
    lengths.cu_k[20] = 40 * keys as i32;
    lengths.cu_k[21] = 20 * keys as i32;
    let end = lengths.cu_k[40];
    lengths.cu_k[22..].fill(end);
    (good, lengths)
}

/// Everything that one item is made of, and what lies past the used lengths of the others, is NaN:
/// their gradients are the same, but for roundings of a forward pass that takes other ways.
fn items_do_not_touch_each_other<T: Real>(spec: &'static KernelSpec, form: Form) {
    let dims = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let (rows, keys) = (spec.tile.q_rows as usize, spec.tile.kv_columns as usize);
    let sizes = [(rows + 7, keys + 9), (rows / 2 + 3, keys / 2 + 5), (2 * rows - 3, 2 * keys + 1)];
    let mut lengths = packed(&sizes);
    lengths.used_q = Some(vec![rows as i32 + 5, rows as i32 / 2 + 3, 2 * rows as i32 - 9]);
    lengths.used_k = Some(vec![keys as i32 - 4, keys as i32 / 2 + 5, 2 * keys as i32 - 30]);
    let stream = Stream::from(copy_stream());
    for sight in [Sight::FULL, Sight::BOTTOM_RIGHT, Sight::window(Some(keys / 3), Some(2))] {
        let mut case = Case::<T>::packed((4, 2), dims, lengths.clone(), sight, 7, 1.0);
        let plan =
            plan::<T>(&case.attention.deterministic(), Some(spec.name), Some(form)).expect("one");
        let run = |case: &Case<T>| {
            let loaded = LoadedBackward::new(case, &plan, Wanted::ALL, &stream);
            let mut loaded = loaded.expect("a forward pass");
            loaded.run(&plan, &stream).expect("a launch");
            loaded.results(&stream)
        };
        let before = run(&case);
        let used = [lengths.used_q.clone(), lengths.used_k.clone()].map(Option::unwrap_or_default);
        let is_foreign = |cu: &[i32], used: &[i32], row: usize| {
            let item = cu.iter().rposition(|first| *first as usize <= row).unwrap_or(0);
            item == 1 || row as i32 - cu[item] >= used[item]
        };
        for (tensor, cu, used) in [
            (&mut case.q, &lengths.cu_q, &used[0]),
            (&mut case.d_o, &lengths.cu_q, &used[0]),
            (&mut case.k, &lengths.cu_k, &used[1]),
            (&mut case.v, &lengths.cu_k, &used[1]),
        ] {
            let row_values = tensor.count() / tensor.dims()[0];
            tensor.set(|at, value| match is_foreign(cu, used, at / row_values) {
                true => f32::NAN,
                false => value,
            });
        }
        let after = run(&case);
        for ((name, was), (_, is)) in before.named().zip(after.named()) {
            let (cu, used) =
                if name == "dq" { (&lengths.cu_q, &used[0]) } else { (&lengths.cu_k, &used[1]) };
            let row_values = was.count() / was.dims()[0];
            let most = was.contents().iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            for (at, (was, is)) in was.contents().into_iter().zip(is.contents()).enumerate() {
                let row = at / row_values;
                let is_same = (was - is).abs() <= 0.02 * most;
                assert!(is_same || is_foreign(cu, used, row), "{name}: row {row}: {was} and {is}");
            }
        }
    }
}

/// More items than one vote tells apart, with offsets anywhere: ordered sums end all the same.
fn many_malformed_offsets_end_in_order() {
    let good = packed(&[(40, 50); 70]);
    let (q_tokens, kv_tokens) = (70 * 40, 70 * 50);
    let stream = Stream::from(copy_stream());
    for seed in 0..8 {
        let mut case =
            Case::<bf16>::packed((2, 1), (128, 128), good.clone(), Sight::BOTTOM_RIGHT, 2, 1.0);
        let mut lengths = good.clone();
        let anywhere = |stream: u64, tokens: usize| -> Vec<i32> {
            below(seed * 2 + stream, 71, tokens as u64 * 2).iter().map(|at| *at as i32).collect()
        };
        (lengths.cu_q, lengths.cu_k) = (anywhere(0, q_tokens), anywhere(1, kv_tokens));
        case.packed = Some(lengths);
        let attention = case.attention.deterministic();
        let plan = plan::<bf16>(&attention, Some("hopper"), None).expect("it is eligible");
        let loaded = LoadedBackward::new(&case, &plan, Wanted::ALL, &stream);
        let mut loaded = loaded.expect("a forward pass");
        loaded.run(&plan, &stream).expect("a launch");
        for (name, gradient) in loaded.results(&stream).named() {
            gradient.assert_guards(name);
        }
    }
}

fn validate_names_what_is_malformed() {
    let stream = Stream::from(copy_stream());
    for (name, lengths) in malformed() {
        let case = with_lengths::<bf16>((64, 64), &lengths);
        let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
        let found = Loaded::new(&case, true).validate(&plan, &stream);
        assert!(matches!(found, Err(Error::Argument { argument, .. }) if argument == name));
    }
    let good = packed(&[(70, 50), (0, 30), (90, 61)]);
    let case = with_lengths::<bf16>((64, 64), &good);
    let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
    assert_eq!(Loaded::new(&case, true).validate(&plan, &stream), Ok(()));
}

fn host_lengths_are_refused() {
    let case = with_lengths::<bf16>((64, 64), &packed(&[(70, 50), (0, 30), (90, 61)]));
    let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
    let queue = device().expect("a device").context().expect("CUDA").new_stream().expect("one");
    let stream = Stream::from(queue.clone());
    let mut loaded = Loaded::new(&case, true);
    queue.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("begun");
    let refused = loaded.run_from_host_lengths(&plan, &stream, &case);
    let launched = loaded.run(&plan, &stream);
    let graph = queue.end_capture(CUgraphInstantiate_flags(0)).expect("a graph");
    assert!(matches!(refused, Err(Error::Argument { argument: "cu_q", .. })), "{refused:?}");
    launched.expect("lengths on the device may be captured");
    graph.expect("a graph with one kernel").launch().expect("a replay");
    let captured = loaded.results(&stream).0;
    loaded.poison();
    loaded.run_from_host_lengths(&plan, &stream, &case).expect("a launch");
    assert!(captured.bits() == loaded.results(&stream).0.bits(), "a replay differs");
}

fn short_items() -> Case<bf16> {
    let items = packed(&vec![(1, 1); 65_537]);
    Case::<bf16>::packed((1, 1), (8, 8), items, Sight::BOTTOM_RIGHT, 3, 1.0)
}

/// 65,537 items of one row and one key: each row of o is its own value.
fn many_short_items() {
    let case = short_items();
    let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(&case, true);
    loaded.run(&plan, &stream).expect("a launch");
    let (o, _) = loaded.results(&stream);
    o.assert_written("o");
    assert!(o.contents() == case.v.contents(), "a row is not its own value");
}

/// Each row of dV is its own dO, dQ and dK are zero up to rounding, and the workspace is linear in
/// tokens: 264 bytes each at 64 channels, and for each item a record and, with ordered sums, a
/// counter.
fn many_short_items_backward() {
    let case = short_items();
    let stream = Stream::from(copy_stream());
    for attention in [case.attention, case.attention.deterministic()] {
        let plan = plan::<bf16>(&attention, None, None).expect("a plan");
        assert!(plan.workspace().backward <= 65_700 * 264 + 66_100 * 84 + 20_000);
        let mut loaded =
            LoadedBackward::new(&case, &plan, Wanted::ALL, &stream).expect("a forward pass");
        loaded.run(&plan, &stream).expect("a launch");
        let gradients = loaded.results(&stream);
        gradients.assert_written();
        let [dq, dk, dv] = [gradients.dq, gradients.dk, gradients.dv]
            .map(|gradient| gradient.expect("it was asked for").contents());
        assert!(dv == case.d_o.contents(), "a row of dV is not its own dO");
        let most = dq.iter().chain(&dk).fold(0.0, |most: f64, value| most.max(value.abs()));
        assert!(most < 1e-5, "dQ or dK is {most:e}");
    }
}
