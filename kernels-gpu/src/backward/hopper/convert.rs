//! Converting the sums of dQ behind the works that add to them.
//!
//! Of a section whose works are all done, warps that have nothing else to do take 16 rows after the
//! other, as drawn from the section's counter, while the sums are still in the second-level cache.
//! They stop when their block's works end; the convert kernel does what is left, the last section
//! at least. They have few registers: a warp takes 16 channels at a time.

use ferroflash_core::backward::hopper::HopperBackwardTiling;
use ferroflash_core::backward::scratch::CONVERTED_ROWS;
use ferroflash_core::schedule::divide;

use super::{Block, NO_SECTION};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    fetch_add_global_u32, load_acquire_global_u32, load_relaxed_global_v4, load_relaxed_shared_u32,
    store_global_v4,
};
use crate::ptx::thread::{lane_id, opaque, pause};
use crate::ptx::tma::fence_proxy_async_global;
use crate::ptx::warp::{shuffle_xor, sync_warp, uniform};

/// Nanoseconds between two looks at whether a section is done.
const PAUSE: u32 = 1000;

/// Converts what is done until the block's works end.
///
/// # Safety
/// Whole warps of the block call this.
#[inline(always)]
pub(super) unsafe fn convert_behind<T: HopperBackwardTiling, E: MatrixElement>(block: &Block<'_>) {
    let params = block.params;
    if params.dq.address == 0 {
        return;
    }
    let mut section = 0;
    while await_section::<T>(block, section) {
        loop {
            let groups = opaque(params.section_tiles) * (T::SHAPE.q_rows / CONVERTED_ROWS);
            let mut drawn = groups;
            if lane_id() == 0 && !has_ended::<T>(block) {
                let counter = opaque(params.counters.converted) + section;
                drawn = fetch_add_global_u32(block.counter(counter as u64), 1);
            }
            let drawn = uniform(drawn);
            if drawn >= groups {
                break;
            }
            convert_rows::<T, E>(block, section * groups + drawn);
            section = opaque(section);
        }
        section = opaque(section + 1);
    }
}

/// Waits until all works of `section` are done; whether they are, and the block's works have not
/// ended. The last section ends with the kernel.
#[inline(always)]
unsafe fn await_section<T: HopperBackwardTiling>(block: &Block<'_>, section: u32) -> bool {
    let params = block.params;
    if (section + 1) * opaque(params.section_tiles) >= opaque(params.query_tiles) {
        return false;
    }
    loop {
        let mut ready = 0;
        if lane_id() == 0 {
            let done = opaque(params.counters.done) + section;
            ready = load_acquire_global_u32(block.counter(done as u64));
        }
        if uniform(has_ended::<T>(block) as u32) != 0 {
            return false;
        }
        if uniform(ready) >= opaque(params.schedule.section) * opaque(params.schedule.kv_blocks) {
            break;
        }
        pause(PAUSE);
    }
    sync_warp();
    // The copy engine added there.
    fence_proxy_async_global();
    true
}

/// Whether the block has drawn its last work.
#[inline(always)]
unsafe fn has_ended<T: HopperBackwardTiling>(block: &Block<'_>) -> bool {
    load_relaxed_shared_u32(block.section::<T>()) == NO_SECTION
}

/// Converts 16 rows, the `group`-th of all padded rows.
#[inline(always)]
unsafe fn convert_rows<T: HopperBackwardTiling, E: MatrixElement>(block: &Block<'_>, group: u32) {
    let params = block.params;
    let sums = group as u64 * (CONVERTED_ROWS * T::SHAPE.head_dim * 4) as u64;
    let mut sums = params.scratch.dq + sums + (lane_id() * 16) as u64;
    // Opaque, so that nothing is computed ahead and kept.
    let head_groups = opaque(params.scratch.padded_rows) / CONVERTED_ROWS;
    let batch_head = divide(group, head_groups);
    let row = (group - batch_head * head_groups) * CONVERTED_ROWS;
    let batch = divide(batch_head, opaque(params.q_heads));
    let head = batch_head - batch * opaque(params.q_heads);
    // Of four lanes, the first two write a row, the others the one eight further.
    let row = row + lane_id() / 4 + lane_id() % 4 / 2 * 8;
    let first = lane_id() % 2 * 8;
    let offset = params.dq.strides.offset(batch, row, head) as u64 + first as u64;
    let offset = (opaque((offset >> 32) as u32) as u64) << 32 | opaque(offset as u32) as u64;
    let mut target = params.dq.address + offset * 2;
    // Channels from the lane's first on.
    let mut channels = params.dq.channels as i32 - first as i32;
    if row >= params.visibility.q_len {
        channels = 0;
    }
    let mut left = T::SHAPE.head_dim / 16;
    while left > 0 {
        let [a, b, c, d] = load_relaxed_global_v4(sums).map(f32::from_bits);
        let [e, f, g, h] = load_relaxed_global_v4(sums + 512).map(f32::from_bits);
        let scale = params.scale;
        let words = [
            E::pack(a * scale, b * scale),
            E::pack(e * scale, f * scale),
            E::pack(c * scale, d * scale),
            E::pack(g * scale, h * scale),
        ];
        let words = exchange(words, lane_id());
        if channels > 0 {
            store_global_v4(target, words);
        }
        sums += 1024;
        target += 32;
        channels -= 16;
        left = opaque(left - 1);
    }
}

/// Of four neighbouring lanes, gives lane `i` the `i`-th word of each.
#[inline(always)]
unsafe fn exchange(words: [u32; 4], lane: u32) -> [u32; 4] {
    let [a, b, c, d] = words;
    let is_odd = lane % 2 == 1;
    let (a, b) = swap(a, b, is_odd, 1);
    let (c, d) = swap(c, d, is_odd, 1);
    let is_high = lane / 2 % 2 == 1;
    let (a, c) = swap(a, c, is_high, 2);
    let (b, d) = swap(b, d, is_high, 2);
    [a, b, c, d]
}

/// Exchanges the second word of the lower lane for the first one of the `upper`, which is
/// `distance` away.
#[inline(always)]
unsafe fn swap(first: u32, second: u32, upper: bool, distance: u32) -> (u32, u32) {
    let sent = if upper { first } else { second };
    let received = shuffle_xor(f32::from_bits(sent), distance).to_bits();
    if upper { (received, second) } else { (first, received) }
}
