//! What holds of backward calls beside their numbers: graphs, workspaces, and refusals before
//! anything is launched.

use cudarc::driver::DevicePtr;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use ferroflash::{
    Broadcast, Buffer, Dropout, Error, Gradients, Output, Plan, Preference, Saved, Stream,
    TensorMut, WORKSPACE_ALIGNMENT, Workspace,
};
use ferroflash_tests::backend::{Backend, backward};
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{self, LoadedBackward, Wanted, copy_stream, device, plan};
use ferroflash_tests::memory::Arrangement;
use half::bf16;
use libtest_mimic::Trial;

use crate::trial;

/// Each once.
pub(crate) fn trials() -> Vec<Trial> {
    let once: [(&str, fn()); 7] = [
        ("a_captured_backward_replays", a_captured_backward_replays),
        ("a_captured_dropout_reads_its_state_anew", a_captured_dropout_reads_its_state_anew),
        ("a_bias_of_an_empty_call_has_a_gradient", a_bias_of_an_empty_call_has_a_gradient),
        ("two_backward_streams_equal_serial_runs", two_backward_streams_equal_serial_runs),
        ("a_backward_workspace_is_checked", a_backward_workspace_is_checked),
        ("a_refused_backward_names_its_tensor", a_refused_backward_names_its_tensor),
        ("a_forward_only_plan_has_no_backward", a_forward_only_plan_has_no_backward),
    ];
    once.map(|(name, run)| trial(name.to_owned(), true, run)).into()
}

/// A causal, deterministic call of 64 channels.
fn small(seed: u64, len: usize) -> (Case<bf16>, Plan<bf16>) {
    let shape = shape(1, (4, 2), (len, len), (64, 64));
    let mut case = Case::<bf16>::new(shape, Sight::BOTTOM_RIGHT, seed, 1.0);
    case.attention = case.attention.deterministic();
    let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
    (case, plan)
}

fn loaded(case: &Case<bf16>, plan: &Plan<bf16>) -> LoadedBackward<bf16> {
    let stream = Stream::from(copy_stream());
    LoadedBackward::new(case, plan, Wanted::ALL, &stream).expect("a forward pass")
}

fn serial(case: &Case<bf16>, plan: &Plan<bf16>) -> Vec<Vec<u32>> {
    let stream = Stream::from(copy_stream());
    let mut loaded = loaded(case, plan);
    loaded.run(plan, &stream).expect("a launch");
    loaded.results(&stream).bits()
}

fn a_captured_backward_replays() {
    let (case, plan) = small(20, 300);
    let expected = serial(&case, &plan);
    let queue = device().expect("a device").context().expect("CUDA").new_stream().expect("one");
    let stream = Stream::from(queue.clone());
    let mut loaded = loaded(&case, &plan);
    queue.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("begun");
    let launched = loaded.run(&plan, &stream);
    let graph = queue.end_capture(CUgraphInstantiate_flags(0)).expect("a graph");
    launched.expect("a launch may be captured");
    let graph = graph.expect("a graph with three kernels");
    for bits in loaded.results(&stream).bits() {
        assert!(bits.iter().all(|bits| *bits == bf16::POISON.bits()), "it ran at once");
    }
    for _ in 0..3 {
        loaded.poison();
        graph.launch().expect("a replay");
        assert!(loaded.results(&stream).bits() == expected, "a replay differs");
    }
}

/// Both passes in one graph, which is replayed for other seeds and offsets: each is the call that
/// has them in its description.
fn a_captured_dropout_reads_its_state_anew() {
    let case = |given: Option<[u64; 2]>, state: [u64; 2]| {
        let sizes = shape(2, (4, 2), (150, 170), (64, 64));
        let mut case = Case::<bf16>::new(sizes, Sight::BOTTOM_RIGHT, 24, 1.0);
        case = match given {
            Some(given) => case.with_dropout_given(0.3, given),
            None => case.with_dropout(Dropout::new(0.3, (state[0], state[1]))),
        };
        case.attention = case.attention.deterministic();
        let plan = plan::<bf16>(&case.attention, None, None).expect("a plan");
        (case, plan)
    };
    let (of_state, of_replay) = case(Some([1, 2]), [0; 2]);
    let queue = device().expect("a device").context().expect("CUDA").new_stream().expect("one");
    let stream = Stream::from(queue.clone());
    let mut loaded = loaded(&of_state, &of_replay);
    queue.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("begun");
    let launched = loaded.run_both(&of_replay, &stream);
    let graph = queue.end_capture(CUgraphInstantiate_flags(0)).expect("a graph");
    launched.expect("launches may be captured");
    let graph = graph.expect("a graph with four kernels");
    let mut seen: Vec<Vec<Vec<u32>>> = Vec::new();
    for state in [[1, 2], [1, 3], [1 << 40, 1 << 33], [1 << 40, 1]] {
        loaded.replace_dropout_state(state);
        loaded.poison();
        graph.launch().expect("a replay");
        let had = loaded.results(&stream).bits();
        let (by_value, plan) = case(None, state);
        assert!(had == serial(&by_value, &plan), "another mask than of the state by value");
        assert!(!seen.contains(&had), "two states, one mask");
        seen.push(had);
    }
}

/// A bias that is broadcast has elements where the call has no cells: their gradient is zero, and
/// so are those of keys that no row sees.
fn a_bias_of_an_empty_call_has_a_gradient() {
    let axes = |batch, heads, rows| Broadcast { batch, heads, rows };
    for (sizes, axes) in [
        (shape(0, (2, 1), (3, 70), (64, 64)), axes(true, false, false)),
        (shape(2, (0, 0), (3, 70), (64, 64)), axes(false, true, false)),
        (shape(2, (2, 1), (0, 70), (64, 64)), axes(false, false, true)),
        (shape(0, (0, 0), (0, 70), (64, 64)), axes(true, true, true)),
    ] {
        let case = Case::<bf16>::new(sizes, Sight::FULL, 25, 1.0);
        let case = case.with_bias(axes, Arrangement::CONTIGUOUS, 26);
        for form in gpu::forms() {
            let had = backward(Backend::Portable(form), &case).expect("nothing to do but zeros");
            let dbias = had.dbias.expect("it was asked for");
            assert!(!dbias.is_empty(), "{sizes:?}: the test has a gradient to look at");
            for gradient in [&dbias, &had.dk, &had.dv] {
                assert!(gradient.iter().all(|value| *value == 0.0), "{sizes:?}: {gradient:?}");
            }
        }
    }
}

fn two_backward_streams_equal_serial_runs() {
    let cases = [small(21, 1500), small(22, 1500)];
    let expected = [0, 1].map(|index| serial(&cases[index].0, &cases[index].1));
    let context = device().expect("a device").context().expect("CUDA").clone();
    let streams = [(); 2].map(|()| Stream::from(context.new_stream().expect("a stream")));
    let mut calls = [0, 1].map(|index| loaded(&cases[index].0, &cases[index].1));
    for _ in 0..5 {
        calls.iter_mut().for_each(LoadedBackward::poison);
        for _ in 0..3 {
            for ((call, stream), (_, plan)) in calls.iter_mut().zip(&streams).zip(&cases) {
                call.run(plan, stream).expect("a launch");
            }
        }
        for ((call, stream), expected) in calls.iter().zip(&streams).zip(&expected) {
            assert!(call.results(stream).bits() == *expected, "overlapping runs differ");
        }
    }
}

/// q, k, v and o are one tensor here, and so are the gradients: refusals come first.
struct Tensors {
    values: Buffer<bf16>,
    lse: Buffer<f32>,
    gradient: Buffer<bf16>,
}

const DIMS: [usize; 4] = [1, 70, 2, 64];
const LSE_DIMS: [usize; 3] = [1, 2, 70];

impl Tensors {
    fn new() -> (Self, Plan<bf16>) {
        let sizes = shape(1, (2, 2), (70, 70), (64, 64));
        let attention = Case::<bf16>::new(sizes, Sight::FULL, 23, 1.0).attention;
        let device = device().expect("a device");
        let tensors = Self {
            values: Buffer::from_slice(&device, &vec![bf16::ONE; 70 * 128]).expect("memory"),
            lse: Buffer::from_slice(&device, &[1.0; 140]).expect("memory"),
            gradient: Buffer::from_slice(&device, &vec![bf16::POISON; 70 * 128]).expect("memory"),
        };
        (tensors, plan::<bf16>(&attention, None, None).expect("a plan"))
    }

    /// The answer to a call with these dimensions of o, lse and dO.
    fn answer(
        &mut self,
        plan: &Plan<bf16>,
        [o, d_o]: [&[usize]; 2],
        lse: &[usize],
        workspace: Workspace<'_>,
    ) -> Result<(), Error> {
        let stream = Stream::from(copy_stream());
        let view = |dims: &[usize]| self.values.tensor(&stream, dims).expect("inside");
        let inputs = ferroflash::Inputs::new(view(&DIMS), view(&DIMS), view(&DIMS));
        let lse = self.lse.tensor(&stream, lse).expect("inside");
        let saved = Saved { inputs, o: view(o), lse };
        let d_o = view(d_o);
        let dq = self.gradient.tensor_mut(&stream, &DIMS).expect("inside");
        let mut gradients = Gradients { dq: Some(dq), ..Gradients::default() };
        plan.backward_into(&stream, &saved, &d_o, None, &mut gradients, workspace)
    }

    fn assert_untouched(&self) {
        let had = self.gradient.to_vec(&Stream::from(copy_stream())).expect("a copy");
        assert!(had.iter().all(|value| value.is_poison()), "a refused call wrote");
    }
}

fn a_backward_workspace_is_checked() {
    let (mut tensors, plan) = Tensors::new();
    let needs = plan.workspace().backward;
    let device = device().expect("a device");
    let mut memory = Buffer::<u8>::new(&device, needs + WORKSPACE_ALIGNMENT).expect("memory");
    let stream = Stream::from(copy_stream());
    let both = [&DIMS[..], &DIMS[..]];
    let none = tensors.answer(&plan, both, &LSE_DIMS, Workspace::none());
    assert_eq!(none, Err(Error::Workspace { had: 0, needs }));
    let small = memory.tensor_mut(&stream, &[needs - 1]).expect("inside");
    let small = tensors.answer(&plan, both, &LSE_DIMS, small.into());
    assert_eq!(small, Err(Error::Workspace { had: needs - 1, needs }));
    let queue = copy_stream();
    let bytes = queue.clone_htod(&vec![0_u8; needs + WORKSPACE_ALIGNMENT]).expect("memory");
    let address = bytes.device_ptr(&queue).0 + 1;
    // SAFETY: the bytes are in `bytes`, which outlives the call.
    let shifted =
        unsafe { TensorMut::<u8>::from_raw(address as *mut u8, &[needs], &[1], device.place()) };
    let shifted = tensors.answer(&plan, both, &LSE_DIMS, shifted.expect("one axis").into());
    assert!(matches!(shifted, Err(Error::Argument { argument: "workspace", .. })), "{shifted:?}");
    tensors.assert_untouched();
    let enough = memory.tensor_mut(&stream, &[needs]).expect("inside");
    tensors.answer(&plan, both, &LSE_DIMS, enough.into()).expect("a launch");
}

fn a_refused_backward_names_its_tensor() {
    let (mut tensors, plan) = Tensors::new();
    let other = [1, 70, 2, 32];
    for (o, d_o, lse, name) in [
        (&other, &DIMS, &LSE_DIMS, "o"),
        (&DIMS, &other, &LSE_DIMS, "d_o"),
        (&DIMS, &DIMS, &[1, 70, 2], "lse"),
    ] {
        let refused = tensors.answer(&plan, [&o[..], &d_o[..]], lse, Workspace::none());
        match refused {
            Err(Error::Dimensions { tensor, .. }) if tensor == name => {}
            other => panic!("{other:?}, where {name} should be named"),
        }
    }
    tensors.assert_untouched();
    let stream = Stream::from(copy_stream());
    let view = || tensors.values.tensor(&stream, &DIMS).expect("inside");
    let saved = Saved {
        inputs: ferroflash::Inputs::new(view(), view(), view()),
        o: view(),
        lse: tensors.lse.tensor(&stream, &LSE_DIMS).expect("inside"),
    };
    let mut sink = Buffer::<f32>::new(&device().expect("a device"), 2).expect("memory");
    let dsink = sink.tensor_mut(&stream, &[2]).expect("inside");
    let mut gradients = Gradients { dsink: Some(dsink), ..Gradients::default() };
    let refused = plan.backward(&stream, &saved, &view(), None, &mut gradients);
    assert!(matches!(refused, Err(Error::Presence { tensor: "dsink", .. })), "{refused:?}");
}

fn a_forward_only_plan_has_no_backward() {
    let (mut tensors, plan) = Tensors::new();
    let preference = Preference { forward_only: true, ..Preference::default() };
    let device = device().expect("a device");
    let forward = plan.attention().plan_with::<bf16>(&device, preference).expect("a plan");
    assert_eq!(forward.workspace().backward, 0);
    assert!(forward.explain().backward.is_none());
    let both = [&DIMS[..], &DIMS[..]];
    match tensors.answer(&forward, both, &LSE_DIMS, Workspace::none()) {
        Err(Error::Unsupported { reasons, .. }) if reasons.contains("forward_only") => {}
        other => panic!("{other:?}, where the backward pass should be refused"),
    }
    tensors.assert_untouched();
    // The forward pass runs all the same.
    let stream = Stream::from(copy_stream());
    let view = || tensors.values.tensor(&stream, &DIMS).expect("inside");
    let inputs = ferroflash::Inputs::new(view(), view(), view());
    let mut output =
        Output { o: tensors.gradient.tensor_mut(&stream, &DIMS).expect("inside"), lse: None };
    forward.run(&stream, inputs, &mut output).expect("a launch");
}
