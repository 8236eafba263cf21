//! The producing thread: it keeps the rings full.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::params::HopperForwardParams;
use ferroflash_core::schedule::divide;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS};

use super::{Block, Kernel, Work};
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_arrive_expect, mbarrier_wait};
use crate::ptx::memory::{fetch_add_global_u32, load_shared_v4, store_shared_v4};
use crate::ptx::thread::{block_idx_x, grid_dim_x, opaque};
use crate::ptx::tma::{load_box, prefetch_tensor_map};
use crate::ring::Turn;

/// The producer's positions.
pub(super) struct Producer<'a> {
    pub(super) block: &'a Block<'a>,
    pub(super) k: Turn,
    pub(super) v: Turn,
    pub(super) q_parity: u32,
}

/// The head whose keys and values a work reads.
#[derive(Clone, Copy)]
pub(super) struct KeyHead {
    pub(super) batch: u32,
    pub(super) kv_head: u32,
    /// As [`Work::tiles`].
    pub(super) tiles: u32,
}

impl KeyHead {
    #[inline(always)]
    fn of(work: &Work, params: &HopperForwardParams) -> Self {
        let kv_head = divide(work.q_head, params.group);
        Self { batch: work.batch, kv_head, tiles: work.tiles }
    }

    #[inline(always)]
    unsafe fn keep(self, shared: u32) {
        store_shared_v4(shared, [self.batch, self.kv_head, self.tiles, 0]);
    }

    #[inline(always)]
    unsafe fn kept(shared: u32) -> Self {
        let [batch, kv_head, tiles, _] = load_shared_v4(shared);
        Self { batch, kv_head, tiles }
    }
}

/// Copies every tile of every work this block draws.
///
/// # Safety
/// One thread of the block calls this, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn produce<T: HopperTiling, M: MaskKind>(block: &Block<'_>) {
    let mut map = 0;
    while map < 4 {
        prefetch_tensor_map(block.map(map));
        map += 1;
    }
    let mut producer = Producer { block, k: Turn::FIRST, v: Turn::FIRST, q_parity: 0 };
    // This thread has 24 registers: what it knows of works waits in shared memory.
    let own = block.work::<T>(T::SHAPE.stages);
    let mut work = Work::numbered::<T, M>(block.params, block_idx_x());
    let mut tile = work.tiles;
    if tile > 0 {
        producer.copy_queries::<T>(&work);
        producer.copy_keys::<T>(KeyHead::of(&work, block.params), tile - 1);
    }
    while work.exists() {
        KeyHead::of(&work, block.params).keep(own);
        while tile > 1 {
            producer.copy_keys::<T>(KeyHead::kept(own), tile - 2);
            producer.copy_values::<T>(KeyHead::kept(own), tile - 1);
            // Opaque, so that the loop stays one.
            tile = opaque(tile - 1);
        }
        // Drawn late, so that no one takes work long before it can begin; the answer is here before
        // the consumers have done with the tiles in flight.
        let index = fetch_add_global_u32(block.params.counter, 1) + grid_dim_x();
        work = Work::numbered::<T, M>(block.params, index);
        work.leave(own + 16);
        if work.tiles > 0 {
            producer.copy_keys::<T>(KeyHead::of(&work, block.params), work.tiles - 1);
        }
        let head = KeyHead::kept(own);
        if head.tiles > 0 {
            producer.copy_values::<T>(head, 0);
        }
        work = Work::left(own + 16);
        tile = work.tiles;
        if tile > 0 {
            producer.copy_queries::<T>(&work);
        }
        producer.offer_output::<T>(&work);
    }
}

impl Producer<'_> {
    /// Each consumer's Q rows, as soon as that consumer has done with the last ones.
    #[inline(always)]
    pub(super) unsafe fn copy_queries<T: HopperTiling>(&mut self, work: &Work) {
        let block = self.block;
        let axes = block.params.axes[0];
        let mut consumer = 0;
        while consumer < T::SHAPE.warpgroups() {
            let full = block.barrier(Kernel::<T>::BARRIERS.q_full + consumer);
            let empty = block.barrier(Kernel::<T>::BARRIERS.q_empty + consumer);
            mbarrier_wait(empty, self.q_parity ^ 1);
            let layout = Kernel::<T>::Q;
            let shared = block.shared + Kernel::<T>::PLAN.q + consumer * layout.bytes();
            let row = work.first_row + consumer * WARPGROUP_ROWS;
            let place = [0, row, work.q_head & axes.head, work.batch & axes.batch];
            copy_panels(&layout, shared, block.map(0), full, place);
            consumer += 1;
        }
        self.q_parity ^= 1;
    }

    #[inline(always)]
    unsafe fn copy_keys<T: HopperTiling>(&mut self, head: KeyHead, tile: u32) {
        self.copy_keys_from::<T>(head, || tile * T::SHAPE.kv_columns);
    }

    /// The tile that begins with row `row()` of the row axis.
    #[inline(always)]
    pub(super) unsafe fn copy_keys_from<T: HopperTiling>(
        &mut self,
        head: KeyHead,
        row: impl FnOnce() -> u32,
    ) {
        let block = self.block;
        let axes = block.params.axes[1];
        mbarrier_wait(
            block.barrier(Kernel::<T>::BARRIERS.k_empty + self.k.slot),
            self.k.parity ^ 1,
        );
        let full = block.barrier(Kernel::<T>::BARRIERS.k_full + self.k.slot);
        let plan = Kernel::<T>::PLAN;
        let shared = block.shared + plan.k + self.k.slot * plan.k_stage;
        let place = [0, row(), head.kv_head & axes.head, head.batch & axes.batch];
        copy_panels(&Kernel::<T>::K, shared, block.map(1), full, place);
        self.k = self.k.next(T::SHAPE.stages);
    }

    #[inline(always)]
    unsafe fn copy_values<T: HopperTiling>(&mut self, head: KeyHead, tile: u32) {
        self.copy_values_from::<T>(head, || tile * T::SHAPE.kv_columns);
    }

    /// The tile that begins with row `row()` of the row axis.
    #[inline(always)]
    pub(super) unsafe fn copy_values_from<T: HopperTiling>(
        &mut self,
        head: KeyHead,
        row: impl FnOnce() -> u32,
    ) {
        let block = self.block;
        let axes = block.params.axes[2];
        mbarrier_wait(
            block.barrier(Kernel::<T>::BARRIERS.v_empty + self.v.slot),
            self.v.parity ^ 1,
        );
        let full = block.barrier(Kernel::<T>::BARRIERS.v_full + self.v.slot);
        let plan = Kernel::<T>::PLAN;
        let shared = block.shared + plan.v + self.v.slot * plan.v_stage;
        let place = [0, row(), head.kv_head & axes.head, head.batch & axes.batch];
        copy_panels(&Kernel::<T>::V, shared, block.map(2), full, place);
        self.v = self.v.next(T::SHAPE.stages);
    }

    /// Gives the consumers the V slots of the output's turns, and with each the next work.
    #[inline(always)]
    unsafe fn offer_output<T: HopperTiling>(&mut self, next: &Work) {
        let mut turn = 0;
        while turn < T::SHAPE.output_turns() {
            let empty = self.block.barrier(Kernel::<T>::BARRIERS.v_empty + self.v.slot);
            mbarrier_wait(empty, self.v.parity ^ 1);
            next.leave(self.block.work::<T>(self.v.slot));
            mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.v_full + self.v.slot));
            self.v = self.v.next(T::SHAPE.stages);
            turn += 1;
        }
    }
}

/// Starts copying a tile, one panel at a time; `place` is the tile's first channel, row, head and
/// batch item.
#[inline(always)]
unsafe fn copy_panels(layout: &PanelLayout, shared: u32, map: u64, full: u32, place: [u32; 4]) {
    mbarrier_arrive_expect(full, layout.bytes());
    let mut panel = 0;
    while panel < layout.panels() {
        let at = [place[0] + panel * layout.panel_columns(), place[1], place[2], place[3]];
        load_box(shared + panel * layout.panel_bytes(), map, full, at);
        panel += 1;
    }
}
