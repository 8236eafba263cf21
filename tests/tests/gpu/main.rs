//! Every kernel of the table, in both forms, on a GPU.
//!
//! Tests are named `KERNEL/FORM/WORKLOAD`, or after what they show; a part of a name selects. Where
//! there is no GPU each is ignored by name, and fails if `FERROFLASH_REQUIRE_GPU=1`.
//! `FERROFLASH_ARTIFACT=cubin|ptx` leaves one form, `FERROFLASH_EVIDENCE=FILE` collects a record,
//! and `FERROFLASH_BENCH=1` times the kernels instead of testing them.

mod backward;
mod backward_behaviour;
mod behaviour;
mod bench;
mod bench_options;
mod examples;
mod heavy_keys;
mod kernels;
mod lengths;
mod options;
mod packed_heads;
mod random;
mod workloads;

use ferroflash::{Direction, Form, KERNELS, KernelSpec};
use ferroflash_tests::gpu;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let mut arguments = Arguments::from_args();
    let is_bench = std::env::var("FERROFLASH_BENCH").is_ok_and(|value| value == "1");
    let trials = if is_bench {
        // Timings are of one kernel at a time.
        arguments.test_threads = Some(1);
        let trials = [bench::trials(), bench_options::trials(), packed_heads::bench_trials()];
        trials.into_iter().flatten().collect()
    } else {
        let trials = [
            kernels::trials(),
            backward::trials(),
            behaviour::trials(),
            backward_behaviour::trials(),
            heavy_keys::trials(),
            lengths::trials(),
            examples::trials(),
            random::trials(),
            packed_heads::trials(),
        ];
        trials.into_iter().flatten().collect()
    };
    libtest_mimic::run(&arguments, trials).exit();
}

/// A test that needs a GPU, and of it what `is_possible` says.
fn trial(name: String, is_possible: bool, run: impl FnOnce() + Send + 'static) -> Trial {
    let run = move || -> Result<(), Failed> {
        gpu::device().map_err(|error| format!("a GPU is required, but {error}"))?;
        run();
        Ok(())
    };
    Trial::test(name, run).with_ignored_flag(!(gpu::is_present_or_required() && is_possible))
}

/// Every kernel of a direction in every form that is to be tested, and whether the device runs the
/// form.
fn kernels_and_forms(direction: Direction) -> Vec<(&'static KernelSpec, Form, bool)> {
    let capability = gpu::device().ok().and_then(|device| Some(device.limits()?.capability));
    let is_possible = |spec: &KernelSpec, form| match (form, capability) {
        (_, None) => true,
        (Form::Cubin, Some((major, minor))) => spec.family.cubin_runs_on(major, minor),
        (Form::Ptx, Some((major, minor))) => spec.family.runs_on(major, minor),
    };
    let forms = gpu::forms();
    let kernels = KERNELS.iter().filter(|spec| spec.direction == direction);
    let pairs = kernels.flat_map(|spec| forms.iter().map(move |form| (spec, *form)));
    pairs.map(|(spec, form)| (spec, form, is_possible(spec, form))).collect()
}
