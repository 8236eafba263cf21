//! A consumer's place in the rings and in the circle of turns: passing slots and turns on.
//!
//! What protects what is told at the head of the [parent module](super).

use ferroflash_core::axes::MaskKind;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_WARPS};

use super::consumer::Consumer;
use super::{CONSUMER_BARRIER, Kernel, TURN_BARRIER};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_arrive_many, mbarrier_wait};
use crate::ptx::thread::{arrive_named, opaque, sync_named};
use crate::ptx::tma::wait_stores_read;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

impl<T: HopperTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// Lets the work's tiles from number `tiles` on pass, which none of the consumer's rows sees.
    /// Its turns at issuing pass too, so that every consumer has as many of each work. The output's
    /// turns have been passed.
    #[inline(always)]
    pub(super) unsafe fn skip(&mut self, tiles: u32, work_tiles: u32) {
        let barriers = Kernel::<T>::BARRIERS;
        if tiles == work_tiles {
            return;
        }
        if tiles == 0 {
            self.await_fill(barriers.q_full + self.index, self.q_parity());
            self.arrive_for_all_warps(barriers.q_empty + self.index);
        }
        let mut tile = work_tiles;
        while tile > tiles {
            self.await_fill(barriers.k_full + self.k.slot, self.k.parity);
            self.arrive_for_all_warps(barriers.k_empty + self.k.slot);
            self.k = self.k.next(T::SHAPE.stages);
            self.await_fill(barriers.v_full + self.v.slot, self.v.parity);
            self.leave_values();
            // Opaque, so that the loop stays one.
            tile = opaque(tile - 1);
            if T::PING_PONG && tile > 0 {
                self.await_turn();
                self.pass_turn();
            }
        }
        // The others wait for no phase that might be over, nor for one too far ahead.
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
    }

    /// Waits in the thread that arrives.
    #[inline(always)]
    pub(super) unsafe fn await_fill(&self, barrier: u32, parity: u32) {
        if self.leads() {
            mbarrier_wait(self.block.barrier(barrier), parity);
        }
    }

    /// Arrives in the thread that waited, once for each warp: they have not waited themselves.
    #[inline(always)]
    pub(super) unsafe fn arrive_for_all_warps(&self, barrier: u32) {
        if self.leads() {
            mbarrier_arrive_many(self.block.barrier(barrier), WARPGROUP_WARPS);
        }
    }

    /// Waits for the consumer's turn at issuing.
    #[inline(always)]
    pub(super) unsafe fn await_turn(&self) {
        sync_named(TURN_BARRIER + self.index, 2 * WARPGROUP_THREADS);
    }

    /// The next consumer's turn.
    #[inline(always)]
    pub(super) unsafe fn pass_turn(&self) {
        let next = if self.index + 1 == T::SHAPE.warpgroups() { 0 } else { self.index + 1 };
        arrive_named(TURN_BARRIER + next, 2 * WARPGROUP_THREADS);
    }

    /// The work's last scores have been waited for: the Q rows may go.
    #[inline(always)]
    pub(super) unsafe fn leave_queries(&self) {
        if self.leads_warp() {
            mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.q_empty + self.index));
        }
    }

    /// The newest scores have been waited for: their K tile may go.
    #[inline(always)]
    pub(super) unsafe fn leave_keys(&mut self) {
        if self.leads_warp() {
            mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.k_empty + self.k.slot));
        }
        self.k = self.k.next(T::SHAPE.stages);
    }

    /// The output has been waited for: its V tile may go.
    #[inline(always)]
    pub(super) unsafe fn leave_values(&mut self) {
        if self.leads() {
            mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.v_empty + self.v.slot));
        }
        self.v = self.v.next(T::SHAPE.stages);
    }

    /// Gives back the V slots of the output's turns, once this consumer's rows have been read.
    #[inline(always)]
    pub(super) unsafe fn pass_outputs(&mut self) {
        let mut turn = 0;
        while turn < T::SHAPE.output_turns() {
            self.await_fill(Kernel::<T>::BARRIERS.v_full + self.v.slot, self.v.parity);
            if self.leads() {
                wait_stores_read();
            }
            self.leave_values();
            turn += 1;
        }
    }
}
