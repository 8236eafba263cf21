//! The producing thread: it keeps the rings full.

use ferroflash_core::backward::hopper::HopperBackwardTiling;

use super::{Block, Kernel, Work};
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_wait};
use crate::ptx::memory::fetch_add_global_u32;
use crate::ptx::thread::opaque;
use crate::ptx::tma::{load_bytes, prefetch_tensor_map};
use crate::ring::{Turn, copy_panels};

/// Draws works until there are no more, and copies every tile of each.
///
/// # Safety
/// One thread of the block calls this, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn produce<T: HopperBackwardTiling>(block: &Block<'_>) {
    let mut map = 0;
    while map < 4 {
        prefetch_tensor_map(block.map(map));
        map += 1;
    }
    // Counts take fewer registers than turns.
    let (mut works, mut steps) = (0, 0);
    // This thread has 24 registers: what it knows of its work waits in shared memory.
    let own = || block.work::<T>(Kernel::<T>::PLAN.kv_stages);
    // Work is drawn by every block from the first on: one that waits for another's part of dQ
    // waits for a block that runs.
    while own().leave::<T>(block.params, fetch_add_global_u32(block.params.scratch.counters, 1)) {
        copy_keys_and_values::<T>(block, Turn::after(works, Kernel::<T>::PLAN.kv_stages), own());
        works = opaque(works + 1);
        let mut left = own().steps();
        own().set_q_head(own().kv_head() * block.params.group);
        let mut tile = own().first_tile();
        while left > 0 {
            copy_queries::<T>(block, Turn::after(steps, T::SHAPE.stages), own(), tile);
            // Opaque here as well: what they share would be kept.
            let (step, same_tile) = (opaque(steps), opaque(tile));
            copy_d_o::<T>(block, Turn::after(step, T::SHAPE.stages), own(), same_tile);
            steps = opaque(steps + 1);
            tile += 1;
            if tile == own().tiles_end() {
                tile = own().first_tile();
                own().set_q_head(own().q_head() + 1);
            }
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
    }
    let barriers = Kernel::<T>::BARRIERS;
    let kv = Turn::after(works, Kernel::<T>::PLAN.kv_stages);
    mbarrier_wait(block.barrier(barriers.kv_empty + kv.slot), kv.parity ^ 1);
    own().copy(block.work::<T>(kv.slot));
    mbarrier_arrive(block.barrier(barriers.k_full + kv.slot));
}

/// The keys and values of a work, and the work itself.
#[inline(always)]
unsafe fn copy_keys_and_values<T: HopperBackwardTiling>(block: &Block<'_>, kv: Turn, own: Work) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let params = block.params;
    mbarrier_wait(block.barrier(barriers.kv_empty + kv.slot), kv.parity ^ 1);
    own.copy(block.work::<T>(kv.slot));
    let axes = params.axes[1];
    let place = [0, own.first_key(), own.kv_head() & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.k + kv.slot * plan.k_stage;
    let full = block.barrier(barriers.k_full + kv.slot);
    copy_panels(&Kernel::<T>::K, shared, block.map(1), full, place, 0);
    let axes = params.axes[2];
    let place = [0, own.first_key(), own.kv_head() & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.v + kv.slot * plan.v_stage;
    let full = block.barrier(barriers.v_full + kv.slot);
    copy_panels(&Kernel::<T>::V, shared, block.map(2), full, place, 0);
}

/// One tile of Q, with its rows of lse.
#[inline(always)]
unsafe fn copy_queries<T: HopperBackwardTiling>(
    block: &Block<'_>,
    turn: Turn,
    own: Work,
    tile: u32,
) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let (row, axes) = (tile * T::SHAPE.q_rows, block.params.axes[0]);
    let full = block.barrier(barriers.q_full + turn.slot);
    mbarrier_wait(block.barrier(barriers.q_empty + turn.slot), turn.parity ^ 1);
    let place = [0, row, own.q_head() & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.q + turn.slot * plan.q_stage;
    copy_panels(&Kernel::<T>::Q, shared, block.map(0), full, place, plan.row_stage);
    let rows = block.params.scratch.lse + rows_offset(block, own, opaque(row));
    let shared = opaque(block.shared) + plan.lse + turn.slot * plan.row_stage;
    load_bytes(shared, rows, plan.row_stage, full);
}

/// One tile of dO, with its rows of delta.
#[inline(always)]
unsafe fn copy_d_o<T: HopperBackwardTiling>(block: &Block<'_>, turn: Turn, own: Work, tile: u32) {
    let (plan, barriers) = (Kernel::<T>::PLAN, Kernel::<T>::BARRIERS);
    let (row, axes) = (tile * T::SHAPE.q_rows, block.params.axes[3]);
    let full = block.barrier(barriers.d_o_full + turn.slot);
    mbarrier_wait(block.barrier(barriers.d_o_empty + turn.slot), turn.parity ^ 1);
    let place = [0, row, own.q_head() & axes.head, own.batch() & axes.batch];
    let shared = opaque(block.shared) + plan.d_o + turn.slot * plan.d_o_stage;
    copy_panels(&Kernel::<T>::D_O, shared, block.map(3), full, place, plan.row_stage);
    let rows = block.params.scratch.delta + rows_offset(block, own, opaque(row));
    let shared = opaque(block.shared) + plan.delta + turn.slot * plan.row_stage;
    load_bytes(shared, rows, plan.row_stage, full);
}

/// Bytes from the first of the scratch's rows to `row` of the work's query head.
#[inline(always)]
unsafe fn rows_offset(block: &Block<'_>, own: Work, row: u32) -> u64 {
    let head = own.batch() * block.params.q_heads + own.q_head();
    (head as u64 * block.params.scratch.padded_rows as u64 + row as u64) * 4
}
