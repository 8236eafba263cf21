//! What the library says of itself, as one JSON object: which features each backend computes, and
//! what workspace calls need. For `cargo xtask readme` and `cargo xtask report`.
//!
//! The CPU is asked by running a small call. GPUs need not be here: the library is asked which
//! kernel a device of their limits would be given, or why none.

use ferroflash::{
    Attention, Broadcast, Direction, Dropout, DropoutState, Dtype, Error, KernelSpec, Limits, Mask,
    Shape,
};
use ferroflash_ledger::device::device;
use ferroflash_tests::backend::{Backend, backward, forward};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::memory::Arrangement;
use half::{bf16, f16};
use serde_json::{Value, json};

/// Devices by the ledger's names: the newest, and two of the least that kernels are made for.
const DEVICES: [&str; 3] = ["h200", "a100", "cc8.6"];
const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];
/// Largest head dimension of the contract.
const MOST_CHANNELS: usize = 512;

fn main() {
    let devices = DEVICES.map(|name| (name, limits(name)));
    println!("{}", json!({ "support": support(&devices), "workspace": workspace(&devices[0].1) }));
}

/// The limits of a device of the ledger's table.
fn limits(name: &str) -> Limits {
    let device = device(name, &[]).expect("a device of the table");
    let narrow = |value: u64| u32::try_from(value).expect("a limit of 32 bits");
    let [major, minor] = device.compute_capability;
    Limits {
        name: device.name.to_string(),
        capability: (narrow(major), narrow(minor)),
        multiprocessors: narrow(device.multiprocessors.unwrap_or(1)),
        shared_bytes_per_block: narrow(device.shared_bytes_per_block),
        shared_bytes_per_multiprocessor: narrow(device.shared_bytes_per_sm),
        l2_bytes: 0,
        memory_bytes: 0,
        driver_version: 0,
    }
}

/// A small call of more keys than rows, so that the two alignments differ.
fn small<T: Real>(sight: Sight) -> Case<T> {
    Case::new(shape(2, (4, 4), (5, 7), (16, 16)), sight, 7, 1.0)
}

fn grouped<T: Real>() -> Case<T> {
    Case::new(shape(2, (4, 1), (5, 7), (16, 16)), Sight::FULL, 7, 1.0)
}

fn packed<T: Real>() -> Case<T> {
    let lengths =
        PackedLengths { cu_q: vec![0, 3, 5], cu_k: vec![0, 4, 9], used_q: None, used_k: None };
    Case::packed((4, 4), (16, 16), lengths, Sight::FULL, 7, 1.0)
}

const DROPOUT: Dropout =
    Dropout { probability: 0.5, state: DropoutState::Value { seed: 1, offset: 2 } };
const SLOPES: [f32; 4] = [0.5, 0.25, 0.125, 0.0625];

fn every_option<T: Real>() -> Case<T> {
    small(Sight::window(Some(3), Some(0)))
        .with_key_lengths(&[7, 5])
        .with_softcap(4.0)
        .with_alibi(&SLOPES)
        .with_sink(&SLOPES)
        .with_bias(Broadcast::NONE, Arrangement::CONTIGUOUS, 3)
        .with_boolean_mask(Broadcast::NONE, |[_, _, row, key]| (row + key) % 3 > 0)
        .with_dropout(DROPOUT)
}

/// Every feature, by the name that a reader knows it by.
fn features() -> Vec<(&'static str, Case<bf16>)> {
    let window = |left, right| small(Sight::window(left, right));
    vec![
        ("full", small(Sight::FULL)),
        ("causal, aligned at the top left", small(Sight::TOP_LEFT)),
        ("causal, aligned at the bottom right", small(Sight::BOTTOM_RIGHT)),
        ("grouped and multi-query heads", grouped()),
        ("window, right side", window(None, Some(1))),
        ("window, left side or both", window(Some(2), Some(1))),
        ("key lengths", small(Sight::FULL).with_key_lengths(&[7, 5])),
        ("packed sequences", packed()),
        ("softcap", small(Sight::FULL).with_softcap(4.0)),
        ("ALiBi", small(Sight::FULL).with_alibi(&SLOPES)),
        ("sink", small(Sight::FULL).with_sink(&SLOPES)),
        ("bias", small(Sight::FULL).with_bias(Broadcast::NONE, Arrangement::CONTIGUOUS, 3)),
        (
            "boolean mask",
            small(Sight::FULL).with_boolean_mask(Broadcast::NONE, |[_, _, row, key]| row != key),
        ),
        ("dropout", small(Sight::FULL).with_dropout(DROPOUT)),
        ("all options together", every_option()),
        ("gradient of lse", small(Sight::FULL).with_d_lse(5)),
    ]
}

fn support(devices: &[(&str, Limits)]) -> Vec<Value> {
    let mut rows: Vec<Value> = Vec::new();
    for (name, case) in features() {
        // An upstream gradient of lse is no matter of a forward pass.
        let directions = if case.d_lse.is_some() { &DIRECTIONS[1..] } else { &DIRECTIONS[..] };
        rows.push(json!({ "feature": name, "answers": answers(&case, devices, directions) }));
    }
    let fixed = |direction| {
        let case = small::<bf16>(Sight::BOTTOM_RIGHT);
        let case = Case { attention: case.attention.deterministic(), ..case };
        answers(&case, devices, &[direction])
    };
    rows.push(json!({
        "feature": "deterministic, if asked", "answers": fixed(Direction::Backward),
    }));
    rows.push(of_type::<bf16>("bf16", devices));
    rows.push(of_type::<f16>("f16", devices));
    rows.push(of_type::<f32>("f32", devices));
    let of_16_bits: &[Dtype] = &[Dtype::Bf16, Dtype::F16];
    for (dtypes, name) in [(of_16_bits, ""), (&[Dtype::F32], " of f32")] {
        let of = |direction: &Direction| channels(devices, *direction, dtypes);
        let ranges: Vec<Value> = DIRECTIONS.iter().flat_map(of).collect();
        rows.push(json!({
            "feature": format!("head dimensions{name}, of keys and of values each"),
            "answers": ranges,
        }));
    }
    rows
}

fn of_type<T: Real>(name: &str, devices: &[(&str, Limits)]) -> Value {
    let case = small::<T>(Sight::FULL);
    json!({
        "feature": format!("elements of {name}"),
        "answers": answers(&case, devices, &DIRECTIONS),
    })
}

/// What the CPU and each device make of a call.
fn answers<T: Real>(
    case: &Case<T>,
    devices: &[(&str, Limits)],
    directions: &[Direction],
) -> Vec<Value> {
    let mut answers = Vec::new();
    for &direction in directions {
        let done = match direction {
            Direction::Forward => forward(Backend::CpuTiled, case).map(drop),
            _ => backward(Backend::CpuTiled, case).map(drop),
        };
        answers.push(answer("cpu", direction, done.map(|()| "tiled"), T::DTYPE));
        for (name, limits) in devices {
            let kernel = kernel_for(&case.attention, T::DTYPE, limits, direction);
            let family = kernel.map(|spec| spec.family.name());
            answers.push(answer(name, direction, family, T::DTYPE));
        }
    }
    answers
}

fn kernel_for(
    attention: &Attention,
    dtype: Dtype,
    limits: &Limits,
    direction: Direction,
) -> Result<&'static KernelSpec, Error> {
    match direction {
        Direction::Forward => attention.kernel_for(dtype, limits),
        _ => attention.backward_kernel_for(dtype, limits),
    }
}

fn answer(backend: &str, direction: Direction, said: Result<&str, Error>, dtype: Dtype) -> Value {
    let mut answer = json!({ "backend": backend, "direction": direction.name() });
    match said {
        Ok(by) => answer["by"] = json!(by),
        Err(why) => answer["refused"] = json!(reason(&why, dtype)),
    }
    answer
}

/// Why no kernel runs a call: of the kernels that could for its type, sizes and device.
fn reason(why: &Error, dtype: Dtype) -> String {
    let Error::Unsupported { reasons, .. } = why else { return why.to_string() };
    let other_type = format!(", the call is {dtype}");
    let wanted: Vec<&str> = reasons
        .split("; ")
        .filter(|reason| !reason.ends_with(&other_type) && !reason.starts_with("needs compute"))
        .collect();
    // What the narrowest kernels lack is not what keeps the widest from it.
    let of_widest: Vec<&str> =
        wanted.iter().copied().filter(|reason| !reason.contains("mask but")).collect();
    match (of_widest.is_empty(), wanted.is_empty()) {
        (false, _) => of_widest.join("; "),
        (true, false) => wanted.join("; "),
        (true, true) => reasons.clone(),
    }
}

/// The largest head dimension from 1 without a gap that each backend takes, alone and with the
/// least and the largest of values.
fn channels(devices: &[(&str, Limits)], direction: Direction, dtypes: &[Dtype]) -> Vec<Value> {
    let of =
        |sizes: (usize, usize)| Attention::new(shape(1, (1, 1), (4, 4), sizes)).mask(Mask::full());
    let most = |runs: &dyn Fn(&Attention) -> bool| {
        let fits =
            |d: &usize| [(*d, *d), (*d, 1), (1, *d)].into_iter().all(|sizes| runs(&of(sizes)));
        (1..=MOST_CHANNELS).take_while(fits).count()
    };
    let line = |backend: &str, most: usize| {
        let by = format!("1 to {most}");
        json!({ "backend": backend, "direction": direction.name(), "by": by })
    };
    let runs_on_cpu = |attention: &Attention| {
        let case = Case::<f32>::new(*attention.shape(), Sight::FULL, 1, 1.0);
        match direction {
            Direction::Forward => forward(Backend::CpuTiled, &case).is_ok(),
            _ => backward(Backend::CpuTiled, &case).is_ok(),
        }
    };
    let mut lines = vec![line("cpu", most(&runs_on_cpu))];
    for (name, limits) in devices {
        let runs = |attention: &Attention| {
            dtypes.iter().all(|dtype| kernel_for(attention, *dtype, limits, direction).is_ok())
        };
        lines.push(line(name, most(&runs)));
    }
    lines
}

/// Workspace of calls of 16384 tokens and 2048 channels, as an H200's planner has it.
fn workspace(limits: &Limits) -> Vec<Value> {
    let mut rows = Vec::new();
    for head_dim in [64, 128, 256] {
        for length in [512, 1024, 2048, 4096, 8192, 16384] {
            let (batch, heads) = (16384 / length, 2048 / head_dim);
            let shape = Shape {
                batch,
                q_heads: heads,
                kv_heads: heads,
                q_len: length,
                kv_len: length,
                head_dim,
                value_dim: head_dim,
            };
            let attention = Attention::new(shape);
            let bytes = attention.workspace_for(Dtype::Bf16, limits).expect("a call that runs");
            rows.push(json!({
                "d": head_dim, "s": length, "b": batch, "heads": heads,
                "forward": bytes.forward, "backward": bytes.backward,
            }));
        }
    }
    rows
}
