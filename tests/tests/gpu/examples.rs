//! The worked attention and gradients of the seed documents, by every kernel of their mask's class.
//!
//! Their channels are few and no multiple of 8: zeros follow, which change no number. What is
//! compared are the worked numbers, within the usual bound, whose baseline then also holds what
//! rounding the inputs to 16 bits costs.

use ferroflash::{Direction, Dtype, Form, KernelSpec, MaskClass, Stream};
use ferroflash_tests::backend::{backward_references, forward_references};
use ferroflash_tests::bound::{lse_error, result_error};
use ferroflash_tests::case::{Case, Sight};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{Loaded, LoadedBackward, Wanted, copy_stream, plan};
use ferroflash_tests::seeds;
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::{kernels_and_forms, trial};

/// Channels are padded to multiples of it, as the copy engine asks.
const CHANNELS: usize = 8;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for direction in [Direction::Forward, Direction::Backward] {
        for (spec, form, is_possible) in kernels_and_forms(direction) {
            // The seeds work no gradients of some classes.
            if examples::<bf16>(spec).next().is_none() {
                continue;
            }
            let name = format!("{}/{form}/worked_examples", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => worked_examples::<f16>(spec, form),
                Dtype::F32 => worked_examples::<f32>(spec, form),
                _ => worked_examples::<bf16>(spec, form),
            }));
        }
    }
    trials
}

/// Whether an example's mask is of the kernel's class, or of one that its class holds.
fn is_of_class<T>(case: &Case<T>, class: MaskClass) -> bool {
    match class {
        MaskClass::Full => case.boolean_mask.is_none() && case.sight == Sight::FULL,
        MaskClass::Causal => case.sight != Sight::FULL,
        MaskClass::Masked => case.boolean_mask.is_none(),
        MaskClass::General => true,
    }
}

/// The examples of a kernel's direction and class, with their calls.
fn examples<T: Real>(spec: &KernelSpec) -> impl Iterator<Item = (seeds::Case, Case<T>)> {
    let is_backward = spec.direction == Direction::Backward;
    let of_direction =
        seeds::cases().into_iter().filter(move |e| is_backward == (e.kind == "backward"));
    let calls = of_direction.filter_map(|e| e.call::<T>(CHANNELS).map(|case| (e, case)));
    calls.filter(|(_, case)| is_of_class(case, spec.mask))
}

fn worked_examples<T: Real>(spec: &'static KernelSpec, form: Form) {
    for (example, case) in examples::<T>(spec) {
        match spec.direction {
            Direction::Backward => gradients(spec, form, &example, &case),
            _ => attention(spec, form, &example, &case),
        }
    }
}

fn attention<T: Real>(spec: &KernelSpec, form: Form, example: &seeds::Case, case: &Case<T>) {
    let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(case, true);
    loaded.run(&plan, &stream).expect("a launch");
    let (o, lse) = loaded.results(&stream);
    o.assert_written("o");
    let [exact, rounded] = forward_references(case);
    let worked = example.expected("o", CHANNELS);
    let error = result_error(&o.contents(), &worked, &rounded.o, T::DTYPE);
    error.assert_holds(&format!("{}: o", example.id));
    // lse is as exact as f32, so that it shows what rounding the inputs costs: theirs is compared.
    let lse = lse.expect("it was asked for").contents();
    lse_error(&lse, &exact.lse).assert_holds(&format!("{}: lse", example.id));
}

fn gradients<T: Real>(spec: &KernelSpec, form: Form, example: &seeds::Case, case: &Case<T>) {
    let [_, rounded] = backward_references(case);
    for attention in [case.attention, case.attention.deterministic()] {
        let plan = plan::<T>(&attention, Some(spec.name), Some(form)).expect("it is eligible");
        let stream = Stream::from(copy_stream());
        let loaded = LoadedBackward::new(case, &plan, Wanted::ALL, &stream);
        let mut loaded = loaded.expect("a forward pass");
        loaded.run(&plan, &stream).expect("a launch");
        let gradients = loaded.results(&stream);
        gradients.assert_written();
        for (name, had) in gradients.contents() {
            let rounded = match name {
                "dq" => &rounded.dq,
                "dk" => &rounded.dk,
                _ => &rounded.dv,
            };
            let worked = example.expected(name, CHANNELS);
            let error = result_error(&had, &worked, rounded, T::DTYPE);
            error.assert_holds(&format!("{}: {name}", example.id));
        }
    }
}
