//! This project's own kernels by the ledger: the same functions that account for historical ones.

use ferroflash_core::table::{KERNELS, KernelSpec};
use ferroflash_ledger::device::{DEVICES, device};
use ferroflash_ledger::residency::{BlockResources, WARP_LANES, residency};

fn block(spec: &KernelSpec) -> BlockResources {
    BlockResources {
        warps: u64::from(spec.threads) / WARP_LANES,
        shared_bytes: spec.shared_bytes.into(),
        registers_per_thread: None,
    }
}

/// What a call may be given one of several kernels for.
fn purpose(spec: &KernelSpec) -> impl PartialEq + use<> {
    let KernelSpec { family, direction, dtype, mask, tile, .. } = *spec;
    (family, direction, dtype, mask, tile.head_dim, tile.value_dim)
}

#[test]
fn every_purpose_has_a_kernel_that_launches_on_the_devices_of_its_family() {
    for device in DEVICES {
        let [major, minor] = device.compute_capability.map(|part| part as u32);
        // Backward, 256 channels with every option take a larger block than some devices grant; so
        // do 512 forward.
        let large = ["portable_backward_d256_large", "portable_forward_d512"];
        let is_left_out = |spec: &&KernelSpec| large.iter().any(|name| spec.name.starts_with(name));
        let all = KERNELS.iter().filter(|spec| spec.family.runs_on(major, minor));
        for spec in all.filter(|spec| !is_left_out(spec)) {
            let alike = KERNELS.iter().filter(|other| purpose(other) == purpose(spec));
            let launches = alike.map(|other| residency(&block(other), device).map(|r| r.launches));
            let launches: Vec<bool> = launches.collect::<Result<_, _>>().expect("a block");
            assert!(launches.contains(&true), "{} on {}", spec.name, device.name);
        }
    }
}

#[test]
fn the_table_counts_on_no_more_blocks_than_fit() {
    for spec in KERNELS {
        // Where the tiles were measured; smaller devices hold fewer blocks of some.
        let found = residency(&block(spec), device("h200", &[]).expect("a known device"));
        let found = found.expect("a block of this project");
        assert!(found.blocks_per_sm >= spec.blocks_per_sm.into(), "{}: {found:?}", spec.name);
    }
}
