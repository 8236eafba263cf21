//! Backward calls with options that have no forward of their own.

use ferroflash::{KernelSpec, MaskClass};
use ferroflash_tests::gpu::Wanted;

use super::{everything, lengths, masks_and_biases, scores, windows};
use crate::workloads::{Backward, Workload};

/// What only a backward call with options has: sums in an order, gradients of lse, and the
/// gradients of options alone.
pub(crate) fn backward_workloads(spec: &KernelSpec) -> Vec<Workload> {
    if spec.mask < MaskClass::Masked {
        return Vec::new();
    }
    let named = |name: &str, of: &Workload| Workload { name: name.to_owned(), ..of.clone() };
    let with = |name: &str, of: &Workload, change: fn(&mut Backward)| {
        let mut workload = named(name, of);
        change(&mut workload.backward);
        workload
    };
    let all_options = everything(spec);
    let find = |name: &str| {
        let mut known = windows(spec).into_iter().chain(lengths(spec)).chain(scores(spec));
        known.find(|workload| workload.name == name).expect("a workload above")
    };
    let mut all = vec![with("everything_with_d_lse", &all_options, |b| b.with_d_lse = true)];
    let mut capped = named("everything_but_alibi", &all_options);
    (capped.options.alibi, capped.options.softcap) = (None, Some(5.0));
    let mut ordered = with("everything_but_alibi_ordered", &capped, |b| b.deterministic = true);
    // Its gradient would have no order.
    ordered.options.bias = None;
    all.extend([ordered, capped]);
    for name in [
        "window_5_3",
        "window_more_keys",
        "packed_window",
        "packed_causal",
        "packed_used",
        "packed_ones",
        "key_lengths_window",
        "sink_alone",
    ] {
        let ordered = format!("{name}_ordered");
        all.push(with(&ordered, &find(name), |b| b.deterministic = true));
    }
    all.push(with("sink_with_d_lse", &find("sink_alone"), |b| b.with_d_lse = true));
    let alone = |b: &mut Backward| {
        b.wanted = Wanted { dq: false, dk: false, dv: false, options: true };
    };
    all.push(with("dsink_alone", &find("sink_packed"), alone));
    if spec.mask == MaskClass::General {
        all.push(with("options_alone", &all_options, alone));
        let biases = masks_and_biases(spec);
        let named = |name| biases.iter().find(|workload| workload.name == name).expect("above");
        let (own, tiles) = (named("bias_bhs"), named("mask_hides_tiles"));
        // Turns at query tiles are passed on by blocks that skip them.
        all.push(with("mask_hides_tiles_ordered", tiles, |b| b.deterministic = true));
        all.push(with("bias_ordered", own, |b| b.deterministic = true));
        all.push(with("bias_with_d_lse", own, |b| b.with_d_lse = true));
    }
    all
}
