//! The producing thread: it keeps the rings full.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, KeyShare, STEP_BYTES};
use ferroflash_core::backward::scratch::LSE_ROWS;
use ferroflash_core::swizzle::PanelLayout;

use super::places::told_place;
use super::work::head_tiles;
use super::{Block, Kernel, NO_SECTION, Work, clear, masked};
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_arrive_expect, mbarrier_wait};
use crate::ptx::memory::{
    fetch_add_global_u32, load_global_u32, load_shared_u32, release_add_global_u32,
    store_shared_u32, store_shared_v4,
};
use crate::ptx::thread::opaque;
use crate::ptx::tma::{load_box, load_bytes, prefetch_tensor_map};
use crate::ring::Turn;

/// Draws works until there are no more, and copies every tile of each.
///
/// # Safety
/// One thread of the block calls this, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn produce<T: HopperBackwardTiling, M: MaskKind>(block: &Block<'_>) {
    let mut map = 0;
    while map < 4 {
        prefetch_tensor_map(block.map(map));
        map += 1;
    }
    store_shared_u32(block.shared + Kernel::<T>::PLAN.work_count, 0);
    store_shared_u32(block.shared + Kernel::<T>::PLAN.step_count, 0);
    store_shared_u32(block.shared + Kernel::<T>::PLAN.clear_section, 0);
    let mut slot = 0;
    while slot < Kernel::<T>::PLAN.kv_stages {
        block.work::<T>(slot).set_no_section();
        slot += 1;
    }
    // This thread has 24 registers: what it knows of its work waits in shared memory.
    let own = || block.work::<T>(Kernel::<T>::PLAN.kv_stages);
    // Work is drawn by every block from the first on: one that waits for another's part of dQ
    // waits for a block that runs.
    while own().leave::<T, M>(block, fetch_add_global_u32(block.params.scratch.counters, 1)) {
        if let MaskClass::Masked = M::CLASS
            && block.home::<T>(Kernel::<T>::PLAN.kv_stages).is_empty()
        {
            masked::pass_over(block, own());
            continue;
        }
        clear::await_section::<T>(block, own().section());
        copy_keys_and_values::<T, M>(block, next_slot::<T>(block), own());
        let mut left = own().steps();
        own().set_q_head(own().head_part() * block.params.work_heads);
        let mut tile = own().start_tile();
        while left > 0 {
            let steps = counted(block, Kernel::<T>::PLAN.step_count);
            copy_queries::<T, M>(block, Turn::after(steps, T::SHAPE.stages), own(), tile);
            // Opaque here as well: what they share would be kept.
            let (steps, tile_again) = (opaque(steps), opaque(tile));
            copy_d_o::<T>(block, Turn::after(steps, T::SHAPE.stages), own(), tile_again);
            tile = own().next_tile(tile);
            if tile == own().start_tile() {
                own().set_q_head(own().q_head() + 1);
            }
            let steps = own().steps();
            if steps - left == (steps > 1) as u32 {
                tell_done::<T>(block);
            }
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
        if let MaskClass::Masked = M::CLASS
            && own().steps() == 0
        {
            tell_done::<T>(block);
        }
    }
    let barriers = Kernel::<T>::BARRIERS;
    let kv = next_slot::<T>(block);
    mbarrier_wait(block.barrier(barriers.kv_empty + kv.slot), kv.parity ^ 1);
    own().copy(block.work::<T>(kv.slot));
    mbarrier_arrive(block.barrier(barriers.k_full + kv.slot));
}

/// The next position in the ring of works.
#[inline(always)]
unsafe fn next_slot<T: HopperBackwardTiling>(block: &Block<'_>) -> Turn {
    let works = counted(block, Kernel::<T>::PLAN.work_count);
    Turn::after(works, Kernel::<T>::PLAN.kv_stages)
}

/// Counts one more at `place` in shared memory; how many there were.
#[inline(always)]
unsafe fn counted(block: &Block<'_>, place: u32) -> u32 {
    let counter = opaque(block.shared) + place;
    let count = load_shared_u32(counter);
    store_shared_u32(counter, count + 1);
    count
}

/// The keys and values of a work, and the work itself.
#[inline(always)]
unsafe fn copy_keys_and_values<T: HopperBackwardTiling, M: MaskKind>(
    block: &Block<'_>,
    kv: Turn,
    own: Work,
) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let params = block.params;
    // Opaque, or the barriers' addresses would be kept.
    let block = &Block { barriers: opaque(block.barriers), ..*block };
    mbarrier_wait(block.barrier(barriers.kv_empty + kv.slot), kv.parity ^ 1);
    let work = block.work::<T>(kv.slot);
    // Of the work that was there, with which everyone has done.
    store_shared_u32(opaque(block.shared) + plan.done, work.section());
    own.copy(work);
    if let MaskClass::Masked = M::CLASS {
        block.home::<T>(plan.kv_stages).copy(block.home::<T>(kv.slot));
    }
    let kv_head = own.kv_head(params);
    let axes = params.axes[1];
    let place = [own.first_key(), kv_head & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.k + kv.slot * plan.k_stage;
    let full = block.barrier(barriers.k_full + kv.slot);
    copy_tile::<T>(&Kernel::<T>::K, shared, block.map(1), full, place, 0);
    let axes = params.axes[2];
    let place = [own.first_key(), kv_head & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.v + kv.slot * plan.v_stage;
    let full = block.barrier(barriers.v_full + kv.slot);
    copy_tile::<T>(&Kernel::<T>::V, shared, block.map(2), full, place, 0);
}

/// Tells that the work whose numbers were in this one's place is done. The fence in this takes as
/// long as a copy, so that some of those come first.
#[inline(always)]
unsafe fn tell_done<T: HopperBackwardTiling>(block: &Block<'_>) {
    let done = load_shared_u32(opaque(block.shared) + Kernel::<T>::PLAN.done);
    if done != NO_SECTION {
        let counter = opaque(block.params.counters.done) + done;
        release_add_global_u32(block.counter(counter as u64), 1);
    }
}

/// One tile of Q, with its rows of lse.
#[inline(always)]
unsafe fn copy_queries<T: HopperBackwardTiling, M: MaskKind>(
    block: &Block<'_>,
    turn: Turn,
    own: Work,
    tile: u32,
) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let (row, axes) = (tile * T::SHAPE.q_rows, block.params.axes[0]);
    let full = block.barrier(barriers.q_full + turn.slot);
    let natural = is_natural::<T>(block, own, row);
    mbarrier_wait(block.barrier(barriers.q_empty + turn.slot), turn.parity ^ 1);
    let step = opaque(block.shared) + plan.steps + told_place::<T, M>(turn) * STEP_BYTES;
    if let MaskClass::Masked = M::CLASS {
        masked::tell_step::<T>(block, own, step, natural, tile);
    } else if Kernel::<T>::DEFERS {
        let head = own.batch() * block.params.q_heads + own.q_head();
        let index = head * head_tiles::<T>(block.params) + tile;
        store_shared_v4(step, [natural, tile, index, 0]);
    } else {
        store_shared_u32(step, natural);
    }
    let place = [row, own.q_head() & axes.head, own.batch() & axes.batch];
    let rows = block.params.scratch.lse + rows_offset(block, own, row);
    let shared = opaque(block.shared) + plan.q + turn.slot * plan.q_stage;
    copy_tile::<T>(&Kernel::<T>::Q, shared, block.map(0), full, place, plan.row_stage);
    let shared = opaque(block.shared) + plan.lse + turn.slot * plan.row_stage;
    load_bytes(shared, rows, plan.row_stage, full);
}

/// 1 if the lse of a tile's rows is natural, else 0.
#[inline(always)]
unsafe fn is_natural<T: HopperBackwardTiling>(block: &Block<'_>, own: Work, row: u32) -> u32 {
    let head = own.batch() * block.params.q_heads + own.q_head();
    let row = head as u64 * block.params.scratch.padded_rows as u64 + row as u64;
    let words = block.params.scratch.natural + row / LSE_ROWS as u64 * 4;
    let mut natural = load_global_u32(words);
    if T::SHAPE.q_rows > LSE_ROWS {
        natural |= load_global_u32(words + 4);
    }
    natural
}

/// One tile of dO, with its rows of delta.
#[inline(always)]
unsafe fn copy_d_o<T: HopperBackwardTiling>(block: &Block<'_>, turn: Turn, own: Work, tile: u32) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let (row, axes) = (tile * T::SHAPE.q_rows, block.params.axes[3]);
    let full = block.barrier(barriers.d_o_full + turn.slot);
    mbarrier_wait(block.barrier(barriers.d_o_empty + turn.slot), turn.parity ^ 1);
    let place = [row, own.q_head() & axes.head, own.batch() & axes.batch];
    let rows = block.params.scratch.delta + rows_offset(block, own, row);
    let shared = opaque(block.shared) + plan.d_o + turn.slot * plan.d_o_stage;
    copy_tile::<T>(&Kernel::<T>::D_O, shared, block.map(3), full, place, plan.row_stage);
    let shared = opaque(block.shared) + plan.delta + turn.slot * plan.row_stage;
    load_bytes(shared, rows, plan.row_stage, full);
}

/// Starts copying a tile, part after part, and expects `more` bytes besides.
#[inline(always)]
unsafe fn copy_tile<T: HopperBackwardTiling>(
    layout: &PanelLayout,
    shared: u32,
    map: u64,
    full: u32,
    place: [u32; 3],
    more: u32,
) {
    let parts = const { KeyShare::of(&T::SHAPE).channel_parts() };
    mbarrier_arrive_expect(full, layout.bytes() * parts + more);
    let mut panel = 0;
    while panel < layout.panels() * parts {
        let at = [panel * layout.panel_columns(), place[0], place[1], place[2]];
        load_box(shared + panel * layout.panel_bytes(), map, full, at);
        // Opaque where the loop had better stay one.
        panel = if layout.panels() * parts > 2 { opaque(panel + 1) } else { panel + 1 };
    }
}

/// Bytes from the first of the scratch's rows to `row` of the work's query head.
#[inline(always)]
unsafe fn rows_offset(block: &Block<'_>, own: Work, row: u32) -> u64 {
    let head = own.batch() * block.params.q_heads + own.q_head();
    (head as u64 * block.params.scratch.padded_rows as u64 + row as u64) * 4
}
