//! This project's own kernels by the ledger: the same functions that account for historical ones.

use ferroflash_core::table::KERNELS;
use ferroflash_ledger::device::{DEVICES, device};
use ferroflash_ledger::residency::{BlockResources, WARP_LANES, residency};

#[test]
fn every_kernel_launches_on_the_devices_of_its_family() {
    for spec in KERNELS {
        let block = BlockResources {
            warps: u64::from(spec.threads) / WARP_LANES,
            shared_bytes: spec.shared_bytes.into(),
            registers_per_thread: None,
        };
        for device in DEVICES {
            let [major, minor] = device.compute_capability;
            if !spec.family.runs_on(major as u32, minor as u32) {
                continue;
            }
            let found = residency(&block, device).expect("a block of this project");
            assert!(found.launches, "{} on {}: {found:?}", spec.name, device.name);
        }
    }
}

#[test]
fn the_table_counts_on_no_more_blocks_than_fit() {
    for spec in KERNELS {
        let block = BlockResources {
            warps: u64::from(spec.threads) / WARP_LANES,
            shared_bytes: spec.shared_bytes.into(),
            registers_per_thread: None,
        };
        // Where the tiles were measured; smaller devices hold fewer blocks of some.
        let found = residency(&block, device("h200", &[]).expect("a known device"));
        let found = found.expect("a block of this project");
        assert!(found.blocks_per_sm >= spec.blocks_per_sm.into(), "{}: {found:?}", spec.name);
    }
}
