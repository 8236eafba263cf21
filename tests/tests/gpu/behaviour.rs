//! What holds of every kernel beside its numbers: repeatability, the caller's context, streams,
//! graphs, and cudarc's own ordering.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, result};
use ferroflash::{
    Direction, Error, Form, Inputs, KernelSpec, Output, Plan, Stream, TensorMut, TensorRef,
};
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{Loaded, copy_stream, device, plan};
use ferroflash_tests::memory::{Arrangement, Owned};
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::{kernels_and_forms, trial};

/// Repeatability of each kernel, then the rest once.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        let name = format!("{}/{form}/thirty_runs_are_bitwise_equal", spec.name);
        trials.push(trial(name, is_possible, move || match spec.dtype {
            ferroflash::Dtype::F16 => thirty_runs_are_bitwise_equal::<f16>(spec, form),
            ferroflash::Dtype::F32 => thirty_runs_are_bitwise_equal::<f32>(spec, form),
            _ => thirty_runs_are_bitwise_equal::<bf16>(spec, form),
        }));
    }
    let once: [(&str, fn()); 7] = [
        ("the_callers_context_is_restored", the_callers_context_is_restored),
        ("a_captured_call_replays", a_captured_call_replays),
        ("two_streams_equal_serial_runs", two_streams_equal_serial_runs),
        ("cudarc_slices_are_ordered_between_streams", cudarc_slices_are_ordered_between_streams),
        ("a_refused_call_writes_nothing", a_refused_call_writes_nothing),
        ("host_tensors_are_refused", host_tensors_are_refused),
        ("empty_calls_launch_nothing", empty_calls_launch_nothing),
    ];
    trials.extend(once.map(|(name, run)| trial(name.to_owned(), true, run)));
    trials
}

fn thirty_runs_are_bitwise_equal<T: Real>(spec: &'static KernelSpec, form: Form) {
    let tile = &spec.tile;
    let dims = (tile.head_dim as usize, tile.value_dim as usize);
    let lengths = (3 * tile.q_rows as usize + 1, 5 * tile.kv_columns as usize + 3);
    let sight = match spec.mask {
        ferroflash::MaskClass::Full => Sight::FULL,
        _ => Sight::BOTTOM_RIGHT,
    };
    let case = Case::<T>::new(shape(2, (16, 4), lengths, dims), sight, 3, 1.0);
    let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(&case, true);
    let mut first = None;
    for run in 0..30 {
        loaded.poison();
        loaded.run(&plan, &stream).expect("a launch");
        let (o, lse) = loaded.results(&stream);
        let bits = (o.bits(), lse.map(|lse| lse.bits()));
        let first = first.get_or_insert_with(|| bits.clone());
        assert!(*first == bits, "run {run} differs from run 0");
    }
}

/// A causal call of 64 channels.
fn small(seed: u64, len: usize) -> (Case<bf16>, Plan<bf16>) {
    let shape = shape(1, (4, 2), (len, len), (64, 64));
    let case = Case::<bf16>::new(shape, Sight::BOTTOM_RIGHT, seed, 1.0);
    let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
    (case, plan)
}

fn bits<T: Real>((o, lse): (Owned<T>, Option<Owned<f32>>)) -> (Vec<u32>, Option<Vec<u32>>) {
    (o.bits(), lse.map(|lse| lse.bits()))
}

fn serial(case: &Case<bf16>, plan: &Plan<bf16>) -> (Vec<u32>, Option<Vec<u32>>) {
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(case, true);
    loaded.run(plan, &stream).expect("a launch");
    bits(loaded.results(&stream))
}

fn the_callers_context_is_restored() {
    // In a thread of its own, which takes its contexts with it.
    let thread = std::thread::spawn(whatever_context_is_current);
    thread.join().expect("every context was restored");
}

fn whatever_context_is_current() {
    let (case, _) = small(1, 100);
    let mut loaded = Loaded::new(&case, true);
    let stream = Stream::from(copy_stream());
    let mut call = |what: &str| {
        let before = result::ctx::get_current().expect("a driver");
        let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
        loaded.run(&plan, &stream).expect("a launch");
        stream.synchronize().expect("the kernel ran");
        assert_eq!(result::ctx::get_current().expect("a driver"), before, "{what}");
    };
    call("the device's own context");
    // SAFETY: no context is current from here on, which every driver call below allows for.
    unsafe { result::ctx::set_current(std::ptr::null_mut()) }.expect("a driver");
    call("no context");
    let other = CudaContext::new_non_primary(0, 0).expect("another context");
    other.bind_to_thread().expect("a driver");
    call("another context");
    // What was made in the device's context is freed in it, before the other goes.
    device().expect("a device").context().expect("CUDA").bind_to_thread().expect("a driver");
    drop(loaded);
}

fn a_captured_call_replays() {
    let (case, plan) = small(2, 300);
    let other = small(3, 300).0;
    let expected = [serial(&case, &plan), serial(&other, &plan)];
    let queue = device().expect("a device").context().expect("CUDA").new_stream().expect("one");
    let stream = Stream::from(queue.clone());
    let mut loaded = Loaded::new(&case, true);
    queue.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("begun");
    let launched = loaded.run(&plan, &stream);
    let graph = queue.end_capture(CUgraphInstantiate_flags(0)).expect("a graph");
    launched.expect("a launch may be captured");
    let graph = graph.expect("a graph with one kernel");
    // Nothing ran while it was captured.
    let (o, _) = loaded.results(&stream);
    assert!(o.bits().iter().all(|bits| *bits == bf16::POISON.bits()), "it ran at once");
    for (case, expected) in [&case, &other].into_iter().zip(&expected) {
        loaded.replace_inputs(case);
        loaded.poison();
        graph.launch().expect("a replay");
        assert!(bits(loaded.results(&stream)) == *expected, "a replay differs");
    }
}

fn two_streams_equal_serial_runs() {
    let cases = [small(4, 1500), small(5, 1500)];
    let expected = [0, 1].map(|index| serial(&cases[index].0, &cases[index].1));
    let context = device().expect("a device").context().expect("CUDA").clone();
    let streams = [(); 2].map(|()| Stream::from(context.new_stream().expect("a stream")));
    let mut loaded = [0, 1].map(|index| Loaded::new(&cases[index].0, true));
    for _ in 0..10 {
        loaded.iter_mut().for_each(Loaded::poison);
        for _ in 0..4 {
            for ((loaded, stream), (_, plan)) in loaded.iter_mut().zip(&streams).zip(&cases) {
                loaded.run(plan, stream).expect("a launch");
            }
        }
        for ((loaded, stream), expected) in loaded.iter().zip(&streams).zip(&expected) {
            assert!(bits(loaded.results(stream)) == *expected, "overlapping runs differ");
        }
    }
}

/// q is copied on one stream, the kernel runs on a second and a third reads o: only the events of
/// the slices order them.
fn cudarc_slices_are_ordered_between_streams() {
    let (case, plan) = small(6, 2000);
    let expected = serial(&case, &plan).0;
    let context = device().expect("a device").context().expect("CUDA").clone();
    let [writer, runner, reader] = [(); 3].map(|()| context.new_stream().expect("a stream"));
    let s = *case.attention.shape();
    let elements = |owned: &Owned<bf16>| -> Vec<bf16> {
        owned.bits().into_iter().map(|bits| bf16::from_bits(bits as u16)).collect()
    };
    let upload = |values: &[bf16]| writer.clone_htod(values).expect("device memory");
    for _ in 0..5 {
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|tensor| upload(&elements(tensor)));
        let mut o = writer.clone_htod(&vec![bf16::POISON; s.o_dims().iter().product()]).expect("o");
        let stream = Stream::from(runner.clone());
        let inputs = Inputs::new(
            TensorRef::cuda(&q, &runner, &s.q_dims()).expect("q"),
            TensorRef::cuda(&k, &runner, &s.k_dims()).expect("k"),
            TensorRef::cuda(&v, &runner, &s.v_dims()).expect("v"),
        );
        let mut output =
            Output { o: TensorMut::cuda(&mut o, &runner, &s.o_dims()).expect("o"), lse: None };
        plan.run(&stream, inputs, &mut output).expect("a launch");
        drop(output);
        let had: Vec<bf16> = reader.clone_dtoh(&o).expect("a copy");
        reader.synchronize().expect("a copy");
        assert!(had.into_iter().map(Real::bits).eq(expected.iter().copied()), "unordered");
    }
}

fn a_refused_call_writes_nothing() {
    let (case, plan) = small(7, 64);
    let mut wrong = Loaded::new(&case, true);
    let longer = small(7, 65).1;
    let stream = Stream::from(copy_stream());
    let refused = wrong.run(&longer, &stream);
    assert!(matches!(refused, Err(Error::Dimensions { tensor: "q", .. })), "{refused:?}");
    let refused = wrong.run(&plan, &Stream::host());
    assert!(matches!(refused, Err(Error::Placement { tensor: "stream", .. })), "{refused:?}");
    let (o, lse) = wrong.results(&stream);
    assert!(o.bits().iter().all(|bits| *bits == bf16::POISON.bits()));
    assert!(lse.is_some_and(|lse| lse.bits().iter().all(|bits| *bits == f32::POISON.bits())));
}

fn host_tensors_are_refused() {
    let (case, plan) = small(8, 64);
    let mut o = Owned::<bf16>::poisoned(&case.o_dims, Arrangement::CONTIGUOUS);
    let mut output = Output { o: o.view_mut(), lse: None };
    let refused = plan.run(&Stream::from(copy_stream()), case.inputs(), &mut output);
    assert!(matches!(refused, Err(Error::Placement { tensor: "q", .. })), "{refused:?}");
}

fn empty_calls_launch_nothing() {
    for empty in [
        shape(0, (2, 1), (3, 4), (64, 64)),
        shape(2, (0, 0), (3, 4), (64, 64)),
        shape(2, (2, 1), (0, 4), (64, 64)),
    ] {
        let case = Case::<bf16>::new(empty, Sight::FULL, 9, 1.0);
        let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
        let stream = Stream::from(copy_stream());
        let mut loaded = Loaded::new(&case, true);
        loaded.run(&plan, &stream).expect("nothing to do");
        let (o, lse) = loaded.results(&stream);
        o.assert_guards("o");
        lse.expect("it was asked for").assert_guards("lse");
    }
}
