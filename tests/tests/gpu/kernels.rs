//! Each kernel and form on each workload, against the dense path in binary64.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use ferroflash::{Direction, Dtype, Error, Family, Form, KERNELS, KernelSpec, Stream};
use ferroflash_tests::backend::{Outcome, forward_references, tiled_forward};
use ferroflash_tests::bound::{Measured, assert_zero_rows, lse_error, result_error};
use ferroflash_tests::case::Case;
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{Loaded, copy_stream, plan};
use ferroflash_tests::memory::Owned;
use ferroflash_tests::{evidence, gpu};
use half::{bf16, f16};
use libtest_mimic::Trial;
use serde_json::json;

use crate::workloads::{Workload, workloads};
use crate::{kernels_and_forms, trial};

/// Kernels whose workloads the tiled CPU path runs as well.
pub(crate) const ON_THE_CPU: &[&str] = &[
    "portable_forward_d64_bf16_general",
    "portable_forward_d192x128_f16_full",
    "portable_forward_d64_f32_general",
];

/// `KERNEL/FORM/WORKLOAD`, and `sanitize/KERNEL/FORM` for a few small ones in one process.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        let mut small = Vec::new();
        for workload in workloads(spec) {
            if ["one_key", "few_keys", "start_1", "each_otherwise", "everything"]
                .contains(&workload.name.as_str())
            {
                small.push(workload.clone());
            }
            let name = format!("{}/{form}/{}", spec.name, workload.name);
            trials.push(trial(name, is_possible, move || compare(spec, form, &workload)));
        }
        let name = format!("sanitize/{}/{form}", spec.name);
        trials.push(trial(name, is_possible, move || {
            small.iter().for_each(|workload| compare(spec, form, workload));
        }));
    }
    for name in ON_THE_CPU {
        let spec = KERNELS.iter().find(|spec| spec.name == *name).expect("it is in the table");
        for workload in workloads(spec) {
            let name = format!("cpu_tiled/{}/{}", spec.name, workload.name);
            trials.push(Trial::test(name, move || {
                match spec.dtype {
                    Dtype::F16 => compare_on_the_cpu::<f16>(&workload),
                    Dtype::F32 => compare_on_the_cpu::<f32>(&workload),
                    Dtype::Bf16 => compare_on_the_cpu::<bf16>(&workload),
                }
                Ok(())
            }));
        }
    }
    trials
}

pub(crate) fn compare(spec: &'static KernelSpec, form: Form, workload: &Workload) {
    match spec.dtype {
        Dtype::Bf16 => compare_as::<bf16>(spec, form, workload),
        Dtype::F16 => compare_as::<f16>(spec, form, workload),
        Dtype::F32 => compare_as::<f32>(spec, form, workload),
    }
}

fn compare_as<T: Real>(spec: &'static KernelSpec, form: Form, workload: &Workload) {
    let case = workload.case::<T>();
    let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(&case, workload.with_lse);
    let launched = loaded.run(&plan, &stream);
    if spec.family == Family::Hopper && !case.is_aligned() {
        refused_and_left_to_another(spec, form, workload, &case, launched, &loaded);
        return;
    }
    launched.expect("a launch");
    // The reference is computed while the kernel runs.
    let references = references(&format!("{} {}", spec.name, workload.name), &case);
    let (o, lse) = loaded.results(&stream);
    let (error, state) = measure(&o, lse.as_ref(), &references);
    let passed = error.holds() && state.is_none_or(|state| state.holds());
    record(spec, form, workload, error, state, passed);
    judge(workload, &o, lse.as_ref(), &references);
}

/// The copy engine cannot address a tensor: the kernel says so and writes nothing, and a plan of
/// the planner's own choice runs the call by another kernel.
fn refused_and_left_to_another<T: Real>(
    spec: &'static KernelSpec,
    form: Form,
    workload: &Workload,
    case: &Case<T>,
    launched: Result<(), Error>,
    loaded: &Loaded<T>,
) {
    let stream = Stream::from(copy_stream());
    let is_named = |reasons: &str| reasons.contains("no multiple of 16 bytes");
    match launched {
        Err(Error::Unsupported { reasons, .. }) if is_named(&reasons) => {}
        other => panic!("{other:?}, where an alignment should be refused"),
    }
    let (o, _) = loaded.results(&stream);
    assert!(o.bits().iter().all(|bits| *bits == T::POISON.bits()), "a refused call wrote o");
    let plan = plan::<T>(&case.attention, None, Some(form)).expect("some kernel runs it");
    let mut loaded = Loaded::new(case, workload.with_lse);
    loaded.run(&plan, &stream).expect("a kernel takes over");
    let references = references(&format!("{} {}", spec.name, workload.name), case);
    let (o, lse) = loaded.results(&stream);
    judge(workload, &o, lse.as_ref(), &references);
}

/// The same workloads and the same judgement without a GPU: what a kernel is held to can be met.
pub(crate) fn compare_on_the_cpu<T: Real>(workload: &Workload) {
    let case = workload.case::<T>();
    let (o, lse) = tiled_forward(&case, None).expect("a valid call");
    judge(workload, &o, Some(&lse), &forward_references(&case));
}

/// The errors of o and of lse.
fn measure<T: Real>(
    o: &Owned<T>,
    lse: Option<&Owned<f32>>,
    [exact, rounded]: &[Outcome; 2],
) -> (Measured, Option<Measured>) {
    let error = result_error(&o.contents(), &exact.o, &rounded.o, T::DTYPE);
    (error, lse.map(|lse| lse_error(&lse.contents(), &exact.lse)))
}

/// Panics unless everything was written, nothing beside it was, and all of it is right.
fn judge<T: Real>(
    workload: &Workload,
    o: &Owned<T>,
    lse: Option<&Owned<f32>>,
    references: &[Outcome; 2],
) {
    o.assert_written("o");
    lse.inspect(|lse| lse.assert_written("lse"));
    let (error, state) = measure(o, lse, references);
    error.assert_holds("o");
    state.inspect(|state| state.assert_holds("lse"));
    let (s, exact) = (workload.shape, &references[0]);
    let tokens = lse_rows(workload, exact);
    assert_zero_rows(&o.contents(), &exact.o, &exact.lse, s.value_dim, |number| {
        if let Some(tokens) = tokens {
            return number % s.q_heads * tokens + number / s.q_heads;
        }
        let (batch, row, head) =
            (number / s.q_heads / s.q_len, number / s.q_heads % s.q_len, number % s.q_heads);
        (batch * s.q_heads + head) * s.q_len + row
    });
}

/// Rows of a head's lse where items are packed.
fn lse_rows(workload: &Workload, exact: &Outcome) -> Option<usize> {
    workload.options.packed.as_ref().map(|_| exact.lse.len() / workload.shape.q_heads)
}

fn record(
    spec: &KernelSpec,
    form: Form,
    workload: &Workload,
    error: Measured,
    state: Option<Measured>,
    passed: bool,
) {
    let mut more = serde_json::Map::new();
    if let Some(Measured { max_error, tolerance }) = state {
        more.insert("lse_max_error".to_owned(), json!(max_error));
        more.insert("lse_tolerance".to_owned(), json!(tolerance));
    }
    evidence::append(spec, form, workload.describe(), error, passed, more);
}

/// The reference of a case; both forms of a kernel share it.
fn references<T: Real>(key: &str, case: &Case<T>) -> Arc<[Outcome; 2]> {
    type Known = HashMap<String, Arc<[Outcome; 2]>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(references) = known().remove(key) {
        return references;
    }
    let references = Arc::new(forward_references(case));
    if gpu::forms().len() > 1 {
        known().insert(key.to_owned(), references.clone());
    }
    references
}
