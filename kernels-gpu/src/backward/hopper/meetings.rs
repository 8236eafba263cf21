//! Where consumers meet each other and the producer.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare};

use super::consumer::Consumer;
use super::{Kernel, READ_BARRIER, STORED_BARRIER};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_arrive;
use crate::ptx::thread::{arrive_named, lane_id, opaque, sync_named};
use crate::ptx::warp::sync_warp;
use crate::ptx::wgmma::Product;
use crate::ring::{Turn, WARPGROUP_THREADS};

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// The named barrier where `consumer` has stored its share of tile `weights` of dS. Steps take
    /// turns at two: a consumer may come to the next one before the other has seen this.
    #[inline(always)]
    pub(super) fn stored(&self, weights: u32, consumer: u32) -> u32 {
        let number = weights * 2 + consumer;
        STORED_BARRIER + if Kernel::<T>::DEFERS { opaque(number) } else { number }
    }

    /// Waits until the other consumer has stored what this one's products need.
    #[inline(always)]
    pub(super) unsafe fn meet(&self, weights: u32) {
        sync_named(self.stored(weights, self.index ^ 1), 2 * WARPGROUP_THREADS);
    }

    /// Tells that this consumer has read tile `weights` of dS.
    #[inline(always)]
    pub(super) unsafe fn tell_read(&self, weights: u32) {
        arrive_named(READ_BARRIER + opaque(weights * 2 + self.index), 2 * WARPGROUP_THREADS);
    }

    /// Waits until the other consumer has read tile `weights` of dS.
    #[inline(always)]
    pub(super) unsafe fn await_read(&self, weights: u32) {
        sync_named(READ_BARRIER + opaque(weights * 2 + (self.index ^ 1)), 2 * WARPGROUP_THREADS);
    }

    /// Gives back the slot at `turn` for a warp, whose reads by `wgmma` have been waited for.
    #[inline(always)]
    pub(super) unsafe fn leave(&self, empty: u32, turn: Turn) {
        sync_warp();
        if lane_id() == 0 {
            mbarrier_arrive(self.barrier(empty + turn.slot));
        }
    }

    /// Gives back K, V and the work for a warp.
    #[inline(always)]
    pub(super) unsafe fn give_back(&self) {
        self.leave(Kernel::<T>::BARRIERS.kv_empty, self.kv);
    }

    /// Whether this warpgroup computes its share of the dQ of the step of tile `weights` of dS.
    #[inline(always)]
    pub(super) fn owns_queries(&self, weights: u32) -> bool {
        match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows | QueryShare::Channels => true,
            QueryShare::Steps => weights == self.index,
        }
    }
}
