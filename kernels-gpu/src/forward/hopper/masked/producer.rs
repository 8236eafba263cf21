//! The producing warp: all its lanes look for works, its first one keeps the rings full.

use ferroflash_core::params::options::HopperMaskedParams;
use ferroflash_core::tile::HopperTiling;

use super::super::producer::{KeyHead, Producer};
use super::super::{Block, Kernel};
use super::record::{Record, draw};
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_wait};
use crate::ptx::thread::{lane_id, opaque};
use crate::ptx::tma::prefetch_tensor_map;
use crate::ptx::warp::{sync_warp, uniform};
use crate::ring::Turn;

/// Copies every tile of every work this block draws; the first lies in the producer's own record.
///
/// # Safety
/// One warp of the block calls this, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn produce<T: HopperTiling>(block: &Block<'_>, params: &HopperMaskedParams) {
    let own = Record::numbered::<T>(block, T::SHAPE.stages);
    let next = Record::numbered::<T>(block, T::SHAPE.stages + 1);
    let mut producer = Producer { block, k: Turn::FIRST, v: Turn::FIRST, q_parity: 0 };
    if lane_id() == 0 {
        let mut map = 0;
        while map < 4 {
            prefetch_tensor_map(block.map(map));
            map += 1;
        }
        producer.copy_work_queries::<T>(own);
        if own.steps() > 0 {
            producer.copy_step_keys::<T>(own, 0);
        }
    }
    while own.exists() {
        if lane_id() == 0 {
            let mut step = 0;
            while step + 1 < own.steps() {
                producer.copy_step_keys::<T>(own, step + 1);
                producer.copy_step_values::<T>(own, step);
                // Opaque, so that the loop stays one.
                step = opaque(step + 1);
            }
        }
        sync_warp();
        // Drawn late, so that no one takes work long before it can begin. The search leaves one
        // register for the places in the rings.
        let places = opaque(packed(producer.k) | packed(producer.v) << 16);
        next.find::<T>(params, draw(params));
        (producer.k, producer.v) = (unpacked(places & 0xffff), unpacked(places >> 16));
        sync_warp();
        if lane_id() == 0 {
            if next.steps() > 0 {
                producer.copy_step_keys::<T>(next, 0);
            }
            let steps = own.steps();
            if steps > 0 {
                producer.copy_step_values::<T>(own, steps - 1);
            }
        }
        sync_warp();
        next.copy_to(own, lane_id());
        sync_warp();
        if lane_id() == 0 {
            producer.copy_work_queries::<T>(own);
        }
        producer.offer_output_and::<T>(own);
    }
}

#[inline(always)]
fn packed(turn: Turn) -> u32 {
    turn.slot << 1 | turn.parity
}

#[inline(always)]
fn unpacked(turn: u32) -> Turn {
    Turn { slot: turn >> 1, parity: turn & 1 }
}

impl Producer<'_> {
    #[inline(always)]
    unsafe fn head(record: Record) -> KeyHead {
        KeyHead { batch: record.batch(), kv_head: record.kv_head(), tiles: 0 }
    }

    /// A work's Q rows, if it has steps. The parity waits in shared memory: registers are short.
    #[inline(always)]
    unsafe fn copy_work_queries<T: HopperTiling>(&mut self, record: Record) {
        if record.steps() > 0 {
            self.q_parity = record.q_parity();
            self.copy_queries::<T>(&record.queries());
            record.set_q_parity(self.q_parity);
        }
    }

    #[inline(always)]
    unsafe fn copy_step_keys<T: HopperTiling>(&mut self, record: Record, step: u32) {
        let row = record.first_k() + record.walk().tile(step) * T::SHAPE.kv_columns;
        self.copy_keys_from::<T>(Self::head(record), || row);
    }

    #[inline(always)]
    unsafe fn copy_step_values<T: HopperTiling>(&mut self, record: Record, step: u32) {
        let row = record.first_k() + record.walk().tile(step) * T::SHAPE.kv_columns;
        self.copy_values_from::<T>(Self::head(record), || row);
    }

    /// Gives the consumers the V slots of the output's turns, and with each the next work.
    #[inline(always)]
    unsafe fn offer_output_and<T: HopperTiling>(&mut self, next: Record) {
        // The other lanes follow the first one's place in the ring.
        let mut v = Turn { slot: uniform(self.v.slot), parity: uniform(self.v.parity) };
        let mut turn = 0;
        while turn < T::SHAPE.output_turns() {
            let empty = self.block.barrier(Kernel::<T>::BARRIERS.v_empty + v.slot);
            mbarrier_wait(empty, v.parity ^ 1);
            next.copy_to(Record::numbered::<T>(self.block, v.slot), lane_id());
            sync_warp();
            if lane_id() == 0 {
                mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.v_full + v.slot));
            }
            v = v.next(T::SHAPE.stages);
            turn += 1;
        }
        self.v = v;
    }
}
