//! The producing thread: it keeps the rings full.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS};

use super::{Block, Kernel, Turn, Work};
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_arrive_expect, mbarrier_wait};
use crate::ptx::thread::opaque;
use crate::ptx::tma::{load_box, prefetch_tensor_map};

/// The producer's positions.
struct Producer<'a> {
    block: &'a Block<'a>,
    k: Turn,
    v: Turn,
    q_parity: u32,
}

/// Copies every tile of every work this block is dealt.
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
    let mut turn = 0;
    let mut work = Work::dealt::<T, M>(block.params, turn);
    if work.tiles > 0 {
        producer.copy_queries::<T>(&work);
        producer.copy_keys::<T>(&work, work.tiles - 1);
    }
    while work.exists() {
        turn += 1;
        let next = Work::dealt::<T, M>(block.params, turn);
        let mut tile = work.tiles;
        while tile > 1 {
            producer.copy_keys::<T>(&work, tile - 2);
            producer.copy_values::<T>(&work, tile - 1);
            // Opaque, so that the loop stays one.
            tile = opaque(tile - 1);
        }
        if next.tiles > 0 {
            producer.copy_keys::<T>(&next, next.tiles - 1);
        }
        if work.tiles > 0 {
            producer.copy_values::<T>(&work, 0);
        }
        if next.tiles > 0 {
            producer.copy_queries::<T>(&next);
        }
        producer.offer_output::<T>();
        work = next;
    }
}

impl Producer<'_> {
    /// Each consumer's Q rows, as soon as that consumer has done with the last ones.
    #[inline(always)]
    unsafe fn copy_queries<T: HopperTiling>(&mut self, work: &Work) {
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
    unsafe fn copy_keys<T: HopperTiling>(&mut self, work: &Work, tile: u32) {
        let block = self.block;
        let axes = block.params.axes[1];
        mbarrier_wait(
            block.barrier(Kernel::<T>::BARRIERS.k_empty + self.k.slot),
            self.k.parity ^ 1,
        );
        let full = block.barrier(Kernel::<T>::BARRIERS.k_full + self.k.slot);
        let plan = Kernel::<T>::PLAN;
        let shared = block.shared + plan.k + self.k.slot * plan.k_stage;
        let place =
            [0, tile * T::SHAPE.kv_columns, work.kv_head & axes.head, work.batch & axes.batch];
        copy_panels(&Kernel::<T>::K, shared, block.map(1), full, place);
        self.k = self.k.next(T::SHAPE.stages);
    }

    #[inline(always)]
    unsafe fn copy_values<T: HopperTiling>(&mut self, work: &Work, tile: u32) {
        let block = self.block;
        let axes = block.params.axes[2];
        mbarrier_wait(
            block.barrier(Kernel::<T>::BARRIERS.v_empty + self.v.slot),
            self.v.parity ^ 1,
        );
        let full = block.barrier(Kernel::<T>::BARRIERS.v_full + self.v.slot);
        let plan = Kernel::<T>::PLAN;
        let shared = block.shared + plan.v + self.v.slot * plan.v_stage;
        let place =
            [0, tile * T::SHAPE.kv_columns, work.kv_head & axes.head, work.batch & axes.batch];
        copy_panels(&Kernel::<T>::V, shared, block.map(2), full, place);
        self.v = self.v.next(T::SHAPE.stages);
    }

    /// Gives the consumers the V slots of the output's turns.
    #[inline(always)]
    unsafe fn offer_output<T: HopperTiling>(&mut self) {
        let mut turn = 0;
        while turn < T::SHAPE.output_turns() {
            let empty = self.block.barrier(Kernel::<T>::BARRIERS.v_empty + self.v.slot);
            mbarrier_wait(empty, self.v.parity ^ 1);
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
