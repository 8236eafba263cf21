//! Inputs on which public attention libraries went wrong, as kinds, and what they must give.
//!
//! Tests are named `FAULT/DIRECTION/BACKEND`. What a GPU kernel does not do is refused by name: the
//! table says which refusal each fault expects there, and a call that runs all the same fails.
//! Where there is no GPU its tests are ignored by name; `FERROFLASH_REQUIRE_GPU=1` makes them fail.
//! What cannot arise here at all is listed with its reason and ignored by name, too.

mod bias;
mod coverage;
mod far;
mod lengths;
mod masks;
mod memory;
mod probe;
mod range;
mod repeat;

use ferroflash_tests::backend::Backend;
use ferroflash_tests::gpu;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::probe::{NO_REFUSALS, Probe, Refusals};

type Run = fn(&Probe);

/// A kind of fault.
struct Fault {
    id: &'static str,
    /// Reasons, one of which a GPU kernel gives for each call, forward and backward; empty where it
    /// computes them. Every forward call is computed.
    refused_on_gpu: Refusals,
    forward: Run,
    backward: Option<Run>,
}

macro_rules! faults {
    ($($id:literal [$($reason:literal),*] $module:ident::$forward:ident $($backward:ident)?;)*) => {
        const FAULTS: &[Fault] = &[$(Fault {
            id: $id,
            refused_on_gpu: [&[], &[$($reason),*]],
            forward: $module::$forward,
            backward: faults!(@ $module $($backward)?),
        }),*];
    };
    (@ $module:ident) => { None };
    (@ $module:ident $backward:ident) => { Some($module::$backward) };
}

faults! {
    "m1" [] masks::m1_forward m1_backward;
    "m2_dense" [] masks::m2_dense_forward m2_dense_backward;
    "m2_packed" [] masks::m2_packed_forward m2_packed_backward;
    "m3" [] masks::m3_forward m3_backward;
    "m4" [] masks::m4_forward m4_backward;
    "m5" [] masks::m5_forward m5_backward;
    "m6" [] masks::m6_forward m6_backward;
    "m6_unbounded" [] masks::m6_unbounded_forward m6_unbounded_backward;
    "m7" [] lengths::m7_forward m7_backward;
    "m8" [] lengths::m8_forward m8_backward;
    "m8_empty" [] lengths::m8_empty_forward m8_empty_backward;
    "m9" [] lengths::m9_forward m9_backward;
    "m9_past" [] lengths::m9_past_forward m9_past_backward;
    "m10" [] lengths::m10_forward;
    "m11" [] lengths::m11_forward m11_backward;
    "m12" [] lengths::m12_forward m12_backward;
    "m12_f32" [] lengths::m12_f32_forward m12_f32_backward;
    "r1" [] range::r1_forward r1_backward;
    "r2" [] range::r2_forward r2_backward;
    "r3" [] range::r3_forward r3_backward;
    "r4_f32" [] range::r4_f32_forward r4_f32_backward;
    "r4_bf16" [] range::r4_bf16_forward r4_bf16_backward;
    "r5" [] range::r5_forward r5_backward;
    "r5_bf16" [] range::r5_bf16_forward;
    "r6" [] range::r6_forward r6_backward;
    "r7" [] range::r7_forward r7_backward;
    "r8" [] range::r8_forward;
    "r9" [] range::r9_forward r9_backward;
    "b1" [] bias::b1_forward b1_backward;
    "b2" [] bias::b2_forward b2_backward;
    "b3_softcap" [] bias::b3_softcap_forward b3_softcap_backward;
    "b3_window" [] bias::b3_window_forward b3_window_backward;
    "b3_alibi" [] bias::b3_alibi_forward b3_alibi_backward;
    "p1" [] memory::p1_forward p1_backward;
    "p1_view" [] memory::p1_view_forward p1_view_backward;
    "p2" [] memory::p2_forward p2_backward;
    "p3" [] memory::p3_forward p3_backward;
    "p3_window" [] memory::p3_window_forward p3_window_backward;
    "p4" [] memory::p4_forward p4_backward;
    "p4_wide" ["head dimensions up to (256, 256)"] memory::p4_wide_forward p4_wide_backward;
    "p5" [] memory::p5_forward p5_backward;
    "p5_f32" [] memory::p5_f32_forward p5_f32_backward;
    "p6" [] memory::p6_forward p6_backward;
    "p6_packed" [] memory::p6_packed_forward p6_packed_backward;
    "p7" [] memory::p7_forward p7_backward;
    "p7_strides" [] memory::p7_strides_forward;
    "p8" [] lengths::p8_forward;
    "p8_lengths" [] lengths::p8_lengths_forward;
    "d1" [] repeat::d1_forward d1_backward;
    "d1_packed" [] repeat::d1_packed_forward d1_packed_backward;
    "d2" [] repeat::d2_forward d2_backward;
    "d3" [] repeat::d3_forward d3_backward;
    "d4" [] repeat::d4_forward d4_backward;
    "d4_bf16" [] repeat::d4_bf16_forward;
}

/// What no test can do here, and why.
const NOT_APPLICABLE: &[(&str, &str)] = &[
    ("m6/negative_sides", "sides are usize: a negative one does not compile"),
    ("m10/integer_type", "lengths are i32: another type does not compile"),
    ("m10/device_lengths", "the GPU suite gives kernels malformed lengths, and `validate`"),
    ("p7/dense_masks_over_2^31_cells", "as many scores take minutes on a CPU"),
    ("d2/race_checker", "run by `gpu-bundle`'s racecheck stage"),
    ("d3/second_device", "needs two GPUs"),
    ("d4/device_offset", "the GPU suite captures a graph that reads its state on the device"),
];

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for fault in FAULTS {
        for backend in Backend::ALL {
            trials.push(trial(fault, "forward", backend, fault.forward));
            if let Some(backward) = fault.backward {
                trials.push(trial(fault, "backward", backend, backward));
            }
        }
    }
    let backward_only: Run = memory::p5_repeated_backward;
    for backend in [Backend::CpuDense, Backend::CpuTiled] {
        let name = format!("p5_repeated/backward/{backend}");
        trials.push(Trial::test(name, move || probe(backend, NO_REFUSALS, backward_only)));
    }
    trials.push(Trial::test("p9/packed_scratch", coverage::p9_packed_scratch));
    trials.push(Trial::test("every_listed_fault_is_tested", || {
        let faults = FAULTS.iter().map(|fault| fault.id);
        let others = NOT_APPLICABLE.iter().map(|(name, _)| *name);
        coverage::every_listed_fault_is_tested(faults.chain(others).chain(["p9"]))
    }));
    for (name, reason) in NOT_APPLICABLE {
        let name = format!("{name}: not applicable, {reason}");
        trials.push(Trial::test(name, || Ok(())).with_ignored_flag(true));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(fault: &'static Fault, direction: &str, backend: Backend, run: Run) -> Trial {
    let name = format!("{}/{direction}/{backend}", fault.id);
    let refusals = if backend.is_gpu() { fault.refused_on_gpu } else { NO_REFUSALS };
    let is_ignored = backend.is_gpu() && !gpu::is_present_or_required();
    Trial::test(name, move || probe(backend, refusals, run)).with_ignored_flag(is_ignored)
}

fn probe(backend: Backend, refusals: Refusals, run: Run) -> Result<(), Failed> {
    if backend.is_gpu() {
        gpu::device().map_err(|error| format!("a GPU is required, but {error}"))?;
    }
    let probe = Probe::new(backend, refusals);
    run(&probe);
    probe.finish();
    Ok(())
}
