//! Clearing the sums of dQ, a section ahead of those that add to them.
//!
//! The preprocess kernel clears the first section's. Of each block a warp that has nothing else to
//! do clears the others, tile after tile as drawn from a counter, but never further ahead than the
//! section after the one that its block draws works from: what is cleared is still in the
//! second-level cache when it is added to. A block waits only for tiles that running blocks have
//! drawn.

use ferroflash_core::backward::hopper::HopperBackwardTiling;
use ferroflash_core::backward::scratch::HopperCounters;
use ferroflash_core::schedule::divide;

use super::{Block, Kernel};
use crate::ptx::memory::{
    fetch_add_global_u32, load_acquire_global_u32, load_relaxed_shared_u32, load_shared_u32,
    release_add_global_u32, store_global_v4, store_shared_u32,
};
use crate::ptx::thread::{lane_id, opaque, pause};
use crate::ptx::tma::fence_proxy_async_global;
use crate::ptx::warp::{sync_warp, uniform};

/// Nanoseconds between two looks at the section that the block draws from.
const PAUSE: u32 = 2000;

/// Clears tiles until there are no more.
///
/// # Safety
/// One warp of the block calls this.
#[inline(always)]
pub(super) unsafe fn clear_ahead<T: HopperBackwardTiling>(block: &Block<'_>) {
    let scratch = &block.params.scratch;
    if scratch.dq == 0 {
        return;
    }
    let (own_tiles, tiles) = (block.params.section_tiles, block.params.query_tiles);
    let tile_bytes = T::SHAPE.q_rows * T::SHAPE.head_dim * 4;
    loop {
        let counter = block.counter(HopperCounters::CLEAR as u64);
        let mut drawn = 0;
        if lane_id() == 0 {
            // What is drawn is cleared at once: others may wait for it.
            while load_relaxed_shared_u32(block.section::<T>())
                < divide(load_acquire_global_u32(counter), own_tiles)
            {
                pause(PAUSE);
            }
            drawn = fetch_add_global_u32(counter, 1);
        }
        // The first section's have been cleared.
        let tile = uniform(drawn) + own_tiles;
        if tile >= tiles {
            break;
        }
        let section = divide(tile, own_tiles);
        let target = scratch.dq + tile as u64 * tile_bytes as u64;
        let mut byte = lane_id() * 16;
        while byte < tile_bytes {
            store_global_v4(target + byte as u64, [0; 4]);
            byte += 512;
        }
        // The copy engine adds there next.
        fence_proxy_async_global();
        sync_warp();
        if lane_id() == 0 {
            let cleared = block.params.counters.cleared + section;
            release_add_global_u32(block.counter(cleared as u64), 1);
        }
    }
}

/// Waits until the sums of `section`, of which the block has drawn a work, are clear.
///
/// # Safety
/// The producing thread calls this.
#[inline(always)]
pub(super) unsafe fn await_section<T: HopperBackwardTiling>(block: &Block<'_>, section: u32) {
    let clear_section = opaque(block.shared) + Kernel::<T>::PLAN.clear_section;
    // The first one was clear before.
    if section == load_shared_u32(clear_section) || block.params.scratch.dq == 0 {
        return;
    }
    store_shared_u32(clear_section, section);
    // Opaque, so that nothing is computed ahead and kept.
    let own_tiles = opaque(block.params.section_tiles);
    let left = opaque(block.params.query_tiles) - section * own_tiles;
    let needed = if left < own_tiles { left } else { own_tiles };
    let cleared = block.counter((block.params.counters.cleared + section) as u64);
    while load_acquire_global_u32(cleared) < needed {}
    fence_proxy_async_global();
}
