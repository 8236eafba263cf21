//! Options drawn together, at random from fixed seeds: whatever a user may write, by the planner's
//! choice and by the narrowest portable kernel, against the dense path; and by the tiled CPU path,
//! so that the draws are known to be legal where there is no GPU.

use ferroflash::{Align, Broadcast, Form};
use ferroflash_tests::backend::{
    Backend, Grads, backward, backward_references, forward, forward_references,
};
use ferroflash_tests::bound::{lse_error, result_error};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::forms;
use ferroflash_tests::memory::Arrangement;
use ferroflash_tests::random::below;
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::options::{Options, packed};
use crate::trial;
use crate::workloads::{Fill, Workload};

/// Draws of 16-bit elements.
const DRAWS: u64 = 120;
/// Draws of f32 after them, of at most as many channels as f32 kernels have.
const F32_DRAWS: u64 = 40;
const F32_CHANNELS: usize = 128;

/// `random/BACKEND/SEED` and `random_backward/BACKEND/SEED`.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let gpu = |form: Form| [Backend::Portable(form), Backend::Planned(form)];
    let backends: Vec<Backend> = forms().into_iter().flat_map(gpu).collect();
    for seed in 0..DRAWS + F32_DRAWS {
        for &backend in &backends {
            for (name, is_backward) in DIRECTIONS {
                let name = format!("{name}/{backend}/{seed}");
                trials.push(trial(name, true, move || judge(backend, seed, is_backward)));
            }
        }
        for (name, is_backward) in DIRECTIONS {
            let name = format!("{name}/cpu_tiled/{seed}");
            trials.push(Trial::test(name, move || {
                judge(Backend::CpuTiled, seed, is_backward);
                Ok(())
            }));
        }
    }
    trials
}

/// Names of the directions, and whether each is the backward pass.
const DIRECTIONS: [(&str, bool); 2] = [("random", false), ("random_backward", true)];

fn judge(backend: Backend, seed: u64, is_backward: bool) {
    let mut workload = drawn(seed);
    workload.backward.with_d_lse = seed.is_multiple_of(3);
    if seed >= DRAWS {
        workload.shape.head_dim = workload.shape.head_dim.min(F32_CHANNELS);
        workload.shape.value_dim = workload.shape.value_dim.min(F32_CHANNELS);
        return match is_backward {
            false => judge_case(backend, &workload.case::<f32>()),
            true => judge_gradients(backend, &workload.case::<f32>()),
        };
    }
    match (seed % 2, is_backward) {
        (0, false) => judge_case(backend, &workload.case::<bf16>()),
        (0, true) => judge_gradients(backend, &workload.case::<bf16>()),
        (_, false) => judge_case(backend, &workload.case::<f16>()),
        (_, true) => judge_gradients(backend, &workload.case::<f16>()),
    }
}

fn judge_gradients<T: Real>(backend: Backend, case: &Case<T>) {
    let had = backward(backend, case).expect("a legal call");
    let [exact, rounded] = backward_references(case);
    let of = |grads: &Grads| {
        let Grads { dq, dk, dv, dbias, dsink } = grads.clone();
        [("dq", Some(dq)), ("dk", Some(dk)), ("dv", Some(dv)), ("dbias", dbias), ("dsink", dsink)]
    };
    for (((name, had), (_, exact)), (_, rounded)) in
        of(&had).into_iter().zip(of(&exact)).zip(of(&rounded))
    {
        assert_eq!(had.is_some(), exact.is_some(), "{name}");
        if let (Some(had), Some(exact), Some(rounded)) = (had, exact, rounded) {
            result_error(&had, &exact, &rounded, T::DTYPE).assert_holds(name);
        }
    }
}

fn judge_case<T: Real>(backend: Backend, case: &Case<T>) {
    let had = forward(backend, case).expect("a legal call");
    let [exact, rounded] = forward_references(case);
    result_error(&had.o, &exact.o, &rounded.o, T::DTYPE).assert_holds("o");
    lse_error(&had.lse, &exact.lse).assert_holds("lse");
}

/// The call of a seed.
fn drawn(seed: u64) -> Workload {
    let mut draws = below(seed + 1000, 100, u64::MAX).into_iter();
    let mut draw = |choices: usize| (draws.next().unwrap_or(0) % choices as u64) as usize;
    let channels = [8, 24, 32, 64, 80, 96, 128, 160, 192, 256];
    let head_dim = channels[draw(10)];
    let value_dim = if draw(3) == 0 { channels[draw(10)] } else { head_dim };
    let (group, kv_heads) = (1 + draw(3), 1 + draw(2));
    let side = |draw: &mut dyn FnMut(usize) -> usize| match draw(3) {
        0 => None,
        1 => Some(draw(8)),
        _ => Some(draw(200)),
    };
    let align = if draw(2) == 0 { Align::TopLeft } else { Align::BottomRight };
    let sight = Sight { align, left: side(&mut draw), right: side(&mut draw) };
    let batch = 1 + draw(4);
    let lengths = (draw(300), draw(400));
    let axes = |draw: &mut dyn FnMut(usize) -> usize| Broadcast {
        batch: draw(2) == 0,
        heads: draw(2) == 0,
        rows: draw(3) == 0,
    };
    let arrangement = |draw: &mut dyn FnMut(usize) -> usize| Arrangement {
        offset: draw(8),
        heads_first: draw(2) == 0,
        channel_gap: draw(10),
        ..Arrangement::CONTIGUOUS
    };
    let mut options = Options {
        softcap: [None, None, Some(1.5), Some(30.0)][draw(4)],
        alibi: [None, None, Some(false), Some(true)][draw(4)],
        sink: draw(3) == 0,
        bias: (draw(3) == 0).then(|| (axes(&mut draw), arrangement(&mut draw))),
        boolean_mask: (draw(3) == 0).then(|| axes(&mut draw)),
        dropout: [None, None, Some(0.1), Some(0.6)][draw(4)],
        mask_is_bits: seed.is_multiple_of(2),
        mask_is_blocks: seed.is_multiple_of(3),
        state_is_given: seed.is_multiple_of(5),
        ..Options::default()
    };
    match draw(3) {
        0 => {}
        1 => {
            let lengths = (0..batch).map(|_| draw(lengths.1 + 1) as i32);
            options.key_lengths = Some(lengths.collect());
        }
        _ => {
            let mut items = Vec::new();
            for _ in 0..1 + draw(40) {
                let longest = [1, 3, 50, 200][draw(4)];
                items.push((draw(longest + 1), draw(longest + 1)));
            }
            let mut offsets = packed(&items);
            if draw(2) == 0 {
                let mut part = |lengths: Vec<usize>| -> Vec<i32> {
                    lengths.into_iter().map(|length| draw(length + 1) as i32).collect()
                };
                offsets.used_q = Some(part(items.iter().map(|item| item.0).collect()));
                offsets.used_k = Some(part(items.iter().map(|item| item.1).collect()));
            }
            options.packed = Some::<PackedLengths>(offsets);
        }
    }
    let batch = options.packed.as_ref().map_or(batch, |packed| packed.cu_q.len() - 1);
    let sizes = shape(batch, (group * kv_heads, kv_heads), lengths, (head_dim, value_dim));
    let name = format!("random {seed}");
    Workload {
        sight,
        options,
        fill: Fill::Normal(1.0),
        seed,
        ..Workload::new(&name, sizes, ferroflash::MaskClass::Full)
    }
}
