//! Each backward kernel and form on each workload, against the dense path in binary64.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use ferroflash::{
    Attention, Direction, Dtype, Error, Family, Form, KERNELS, KernelSpec, Plan, Stream,
};
use ferroflash_tests::backend::{Grads, backward_references};
use ferroflash_tests::bound::{Measured, result_error};
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{GradientsOf, LoadedBackward, Wanted, copy_stream, plan};
use ferroflash_tests::memory::{Arrangement, Owned};
use ferroflash_tests::{evidence, gpu};
use half::{bf16, f16};
use libtest_mimic::Trial;
use serde_json::json;

use crate::workloads::{Workload, backward_workloads};
use crate::{kernels_and_forms, trial};

/// `KERNEL/FORM/WORKLOAD`, the repeatability of each kernel, and `sanitize/KERNEL/FORM` for a few
/// small ones in one process.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Backward) {
        let mut small = Vec::new();
        for workload in backward_workloads(spec) {
            if ["one_key", "few_keys", "start_1", "ordered"].contains(&workload.name.as_str()) {
                small.push(workload.clone());
            }
            let name = format!("{}/{form}/{}", spec.name, workload.name);
            trials.push(trial(name, is_possible, move || compare(spec, form, &workload)));
        }
        let name = format!("sanitize/{}/{form}", spec.name);
        trials.push(trial(name, is_possible, move || {
            small.iter().for_each(|workload| compare(spec, form, workload));
        }));
        let name = format!("{}/{form}/thirty_ordered_runs_are_bitwise_equal", spec.name);
        trials.push(trial(name, is_possible, move || match spec.dtype {
            Dtype::F16 => thirty_ordered_runs_are_bitwise_equal::<f16>(spec, form),
            Dtype::F32 => thirty_ordered_runs_are_bitwise_equal::<f32>(spec, form),
            _ => thirty_ordered_runs_are_bitwise_equal::<bf16>(spec, form),
        }));
    }
    trials
}

fn compare(spec: &'static KernelSpec, form: Form, workload: &Workload) {
    match spec.dtype {
        Dtype::Bf16 => compare_as::<bf16>(spec, form, workload),
        Dtype::F16 => compare_as::<f16>(spec, form, workload),
        Dtype::F32 => compare_as::<f32>(spec, form, workload),
    }
}

/// A plan whose backward pass is by `spec`.
fn plan_by<T: Real>(attention: &Attention, spec: &KernelSpec, form: Form) -> Plan<T> {
    let plan = plan::<T>(attention, Some(spec.name), Some(form)).expect("it is eligible");
    let chosen = plan.explain().backward.as_ref().map(|backward| backward.kernel.as_str());
    assert_eq!(chosen, Some(spec.name));
    plan
}

fn compare_as<T: Real>(spec: &'static KernelSpec, form: Form, workload: &Workload) {
    let case = workload.case::<T>();
    let plan = plan_by::<T>(&case.attention, spec, form);
    let stream = Stream::from(copy_stream());
    let wanted = workload.backward.wanted;
    let mut loaded = LoadedBackward::new(&case, &plan, wanted, &stream).expect("a forward pass");
    if workload.backward.repeats_d_o {
        loaded.repeat_d_o();
    }
    let launched = loaded.run(&plan, &stream);
    let is_repeated = workload.backward.repeats_d_o;
    if spec.family == Family::Hopper && (is_repeated || !is_aligned(&case)) {
        refused_and_left_to_another(form, workload, &case, launched, &loaded);
        return;
    }
    launched.expect("a launch");
    // The reference is computed while the kernels run.
    let references = references(&format!("{} {}", spec.name, workload.name), &case);
    let gradients = loaded.results(&stream);
    record::<T>(spec, form, workload, &gradients, &references);
    judge(&case, &gradients, &references);
}

/// Whether the copy engine can address what a backward kernel reads.
fn is_aligned<T: Real>(case: &Case<T>) -> bool {
    [&case.q, &case.k, &case.v, &case.d_o].into_iter().all(Owned::is_aligned)
}

/// The copy engine cannot address a tensor: the kernel says so and writes nothing, and a plan of
/// the planner's own choice runs the call by another kernel.
fn refused_and_left_to_another<T: Real>(
    form: Form,
    workload: &Workload,
    case: &Case<T>,
    launched: Result<(), Error>,
    loaded: &LoadedBackward<T>,
) {
    let stream = Stream::from(copy_stream());
    match launched {
        Err(Error::Unsupported { reasons, .. })
            if reasons.contains("no multiple of 16 bytes") || reasons.contains("repeats rows") => {}
        other => panic!("{other:?}, where an alignment should be refused"),
    }
    for bits in loaded.results(&stream).bits() {
        assert!(bits.iter().all(|bits| *bits == T::POISON.bits()), "a refused call wrote");
    }
    let plan = plan::<T>(&case.attention, None, Some(form)).expect("some kernel runs it");
    let wanted = workload.backward.wanted;
    let mut loaded = LoadedBackward::new(case, &plan, wanted, &stream).expect("a forward pass");
    if workload.backward.repeats_d_o {
        loaded.repeat_d_o();
    }
    loaded.run(&plan, &stream).expect("a kernel takes over");
    judge(case, &loaded.results(&stream), &backward_references(case));
}

/// The gradient that a name stands for.
fn of<'g>(grads: &'g Grads, name: &str) -> &'g [f64] {
    match name {
        "dq" => &grads.dq,
        "dk" => &grads.dk,
        "dv" => &grads.dv,
        "dbias" => grads.dbias.as_deref().expect("there is a bias"),
        _ => grads.dsink.as_deref().expect("there are sinks"),
    }
}

fn measure<T: Real>(
    gradients: &GradientsOf<T>,
    [exact, rounded]: &[Grads; 2],
) -> Vec<(&'static str, Measured)> {
    let error = |(name, had): (&'static str, Vec<f64>)| {
        (name, result_error(&had, of(exact, name), of(rounded, name), T::DTYPE))
    };
    gradients.contents().into_iter().map(error).collect()
}

/// Panics unless everything was written, nothing beside it was, all of it is right, and what
/// nothing visible contributes to is exactly zero.
fn judge<T: Real>(case: &Case<T>, gradients: &GradientsOf<T>, references: &[Grads; 2]) {
    gradients.assert_written();
    measure(gradients, references).into_iter().for_each(|(name, error)| error.assert_holds(name));
    for (name, gradient) in gradients.named() {
        let [.., rows, heads, channels] = gradient.dims()[..] else { panic!("three axes") };
        let mut is_blind = vec![true; gradient.count() / heads / channels];
        for item in case.items() {
            let (q_len, kv_len) = (item.rows.len(), item.keys.len());
            let sees = |row, key| case.sight.sees(row, key, q_len, kv_len);
            let (first, count) = match name {
                "dq" => (item.rows.start, q_len),
                _ => (item.keys.start, kv_len),
            };
            for own in 0..count {
                is_blind[item.batch * rows + first + own] = match name {
                    "dq" => !(0..kv_len).any(|key| sees(own, key)),
                    _ => !(0..q_len).any(|row| sees(row, own)),
                };
            }
        }
        for (number, row) in gradient.contents().chunks_exact(heads * channels).enumerate() {
            let is_zero = row.iter().all(|value| *value == 0.0);
            assert!(is_zero || !is_blind[number], "{name}: row {number} sees nothing");
        }
    }
}

/// A row for the main kernel; of one kernel's calls, for the stages around it as well.
fn record<T: Real>(
    spec: &'static KernelSpec,
    form: Form,
    workload: &Workload,
    gradients: &GradientsOf<T>,
    references: &[Grads; 2],
) {
    let measured = measure(gradients, references);
    let passed = measured.iter().all(|(_, error)| error.holds());
    let mut more = serde_json::Map::new();
    for (name, Measured { max_error, tolerance }) in &measured {
        more.insert(format!("{name}_max_error"), json!(max_error));
        more.insert(format!("{name}_tolerance"), json!(tolerance));
    }
    let share = |error: &Measured| error.max_error / error.tolerance;
    let worst = measured.iter().map(|(_, error)| *error);
    let worst = worst.max_by(|a, b| share(a).total_cmp(&share(b))).expect("a gradient");
    let of_dtype = |stage: &&KernelSpec| stage.dtype == spec.dtype;
    let is_stage = |stage: &&KernelSpec| {
        [Direction::Preprocess, Direction::Convert].contains(&stage.direction)
    };
    let has_stages = spec.name.starts_with("portable_backward_d64_");
    let stages = KERNELS.iter().filter(of_dtype).filter(is_stage).filter(|_| has_stages);
    for kernel in stages.chain([spec]) {
        evidence::append(kernel, form, workload.describe(), worst, passed, more.clone());
    }
}

/// The reference of a case; both forms of a kernel share it.
fn references<T: Real>(key: &str, case: &Case<T>) -> Arc<[Grads; 2]> {
    type Known = HashMap<String, Arc<[Grads; 2]>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(references) = known().remove(key) {
        return references;
    }
    let references = Arc::new(backward_references(case));
    if gpu::forms().len() > 1 {
        known().insert(key.to_owned(), references.clone());
    }
    references
}

fn thirty_ordered_runs_are_bitwise_equal<T: Real>(spec: &'static KernelSpec, form: Form) {
    let tile = &spec.tile;
    let dims = (tile.head_dim as usize, tile.value_dim as usize);
    let lengths = (5 * tile.q_rows as usize + 1, 7 * tile.kv_columns as usize + 3);
    let sight = match spec.mask {
        ferroflash::MaskClass::Full => Sight::FULL,
        _ => Sight::BOTTOM_RIGHT,
    };
    let mut case = Case::<T>::new(shape(2, (8, 4), lengths, dims), sight, 3, 1.0);
    if spec.mask >= ferroflash::MaskClass::Masked {
        // A window, so that a query tile's first key block is not the first of all.
        case =
            Case::new(*case.attention.shape(), Sight::window(Some(lengths.1 / 2), Some(9)), 3, 1.0);
        case = case.with_sink(&[0.5; 8]).with_softcap(20.0);
    }
    if spec.mask == ferroflash::MaskClass::General {
        case = case.with_bias(ferroflash::Broadcast::NONE, Arrangement::CONTIGUOUS, 5);
    }
    thirty_runs_are_bitwise_equal(spec, form, &case);
    if spec.mask >= ferroflash::MaskClass::Masked {
        // Items that share query tiles, and some longer than a block of keys.
        let lengths = [(91, 70), (3 * tile.q_rows as usize, 500), (5, 5), (410, 333), (77, 200)];
        let items = crate::options::packed(&lengths);
        let case = Case::<T>::packed((8, 4), dims, items, Sight::BOTTOM_RIGHT, 4, 1.0);
        thirty_runs_are_bitwise_equal(spec, form, &case);
    }
}

fn thirty_runs_are_bitwise_equal<T: Real>(spec: &'static KernelSpec, form: Form, case: &Case<T>) {
    let plan = plan_by::<T>(&case.attention.deterministic(), spec, form);
    let stream = Stream::from(copy_stream());
    let mut loaded =
        LoadedBackward::new(case, &plan, Wanted::ALL, &stream).expect("a forward pass");
    let mut first = None;
    for run in 0..30 {
        loaded.poison();
        loaded.run(&plan, &stream).expect("a launch");
        let bits = loaded.results(&stream).bits();
        let first = first.get_or_insert_with(|| bits.clone());
        assert!(*first == bits, "run {run} differs from run 0");
    }
}
