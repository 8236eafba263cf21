//! A consuming warpgroup: 64 keys, from the scores of each query tile to their dK and dV.

use core::marker::PhantomData;

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{HopperBackwardTiling, KeyShare, QueryShare};
use ferroflash_core::fragment::Fragment;

use super::weights::{hold, pack};
use super::{Block, Kernel, Place, STORED_BARRIER, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_wait};
use crate::ptx::thread::{arrive_named, lane_id, opaque, sync_named, thread_idx_x};
use crate::ptx::tma::{fence_proxy_async, wait_stores_read};
use crate::ptx::warp::sync_warp;
use crate::ptx::wgmma::{Accumulator, Product, wgmma_wait};
use crate::ring::{Turn, WARPGROUP_THREADS};

/// A thread's share of what the block owns.
pub(super) struct Sums<T: HopperBackwardTiling> {
    /// dSᵀ·Q.
    pub(super) keys: T::KeyGradient,
    /// Pᵀ·dO.
    pub(super) values: T::ValueGradient,
}

/// A thread's share of a step.
pub(super) struct Step<T: HopperBackwardTiling> {
    /// Sᵀ, then Pᵀ.
    pub(super) scores: T::Scores,
    /// dPᵀ, then dSᵀ.
    pub(super) d_p: T::Scores,
}

/// In which order a step's products start, by what fits in registers.
#[derive(Clone, Copy)]
pub(super) enum StepOrder {
    /// dQ, the next S, dK, the next dP; after P, dV.
    KeysLast,
    /// dQ, dK, the next S, the next dP; after dS, dV.
    KeysFirst,
    /// All of shared operands: dQ, dV, the next S, dK, the next dP.
    Shared,
}

/// One consumer, as each of its threads sees it.
pub(super) struct Consumer<'a, T, E, M> {
    pub(super) block: Block<'a>,
    /// Its number among the consumers.
    pub(super) index: u32,
    /// Position in the Q and dO rings.
    pub(super) turn: Turn,
    /// Position in the ring of works, K and V.
    pub(super) kv: Turn,
    /// The dSᵀ tile of the step, 0 or 1.
    pub(super) d_s: u32,
    kinds: PhantomData<(T, E, M)>,
}

/// Computes the consumer's keys of every work this block draws.
///
/// # Safety
/// The four warps of consumer `index` call this alike, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind>(
    block: Block<'_>,
    index: u32,
) where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    let (turn, kv) = (Turn::FIRST, Turn::FIRST);
    let mut consumer = Consumer::<T, E, M> { block, index, turn, kv, d_s: 0, kinds: PhantomData };
    loop {
        mbarrier_wait(consumer.k_full(), consumer.kv.parity);
        let work = block.work::<T>(consumer.kv.slot);
        if !work.exists() {
            break;
        }
        let mut sums = Sums { keys: T::KeyGradient::ZERO, values: T::ValueGradient::ZERO };
        if work.steps() > 0 {
            consumer.attend(&mut sums, work);
        } else {
            // The values' place is written to: they must have come.
            mbarrier_wait(consumer.v_full(), consumer.kv.parity);
        }
        consumer.write(&mut sums, work);
        consumer.kv = consumer.kv.next(Kernel::<T>::PLAN.kv_stages);
    }
    // Shared memory must outlive the copies out of it.
    wait_stores_read();
}

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// The order of this kernel's steps.
    const ORDER: StepOrder = match KeyShare::of(&T::SHAPE) {
        KeyShare::Channels => StepOrder::Shared,
        KeyShare::Keys if T::Scores::LEN <= 32 => StepOrder::KeysLast,
        KeyShare::Keys => StepOrder::KeysFirst,
    };

    /// The thread's number in the warpgroup; asked again each time, since registers are short.
    #[inline(always)]
    pub(super) fn thread(&self) -> u32 {
        opaque(thread_idx_x()) % WARPGROUP_THREADS
    }

    #[inline(always)]
    fn k_full(&self) -> u32 {
        self.block.barrier(Kernel::<T>::BARRIERS.k_full + self.kv.slot)
    }

    #[inline(always)]
    fn v_full(&self) -> u32 {
        self.block.barrier(Kernel::<T>::BARRIERS.v_full + self.kv.slot)
    }

    /// All query tiles of a work, head after head.
    #[inline(always)]
    unsafe fn attend(&mut self, sums: &mut Sums<T>, work: Work) {
        let mut place = work.first_place::<T>(self.block.params);
        let mut left = work.steps();
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        self.start_scores(&mut step, self.turn);
        mbarrier_wait(self.v_full(), self.kv.parity);
        self.start_d_p(&mut step, self.turn);
        let mut d_s = self.weigh::<true>(sums, &mut step, work, place, self.turn);
        while left > 1 {
            let here = place;
            place = work.next_place::<T>(self.block.params, place);
            d_s = self.step(sums, &d_s, work, here, place);
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
        self.finish(sums, &d_s, place);
    }

    /// The products of dS at `here`, under which the scores and dP of the step at `next` start and
    /// become its dS.
    #[inline(always)]
    unsafe fn step(
        &mut self,
        sums: &mut Sums<T>,
        d_s: &T::Packed,
        work: Work,
        here: Place,
        next: Place,
    ) -> T::Packed {
        let (turn, next_turn) = (self.turn, self.turn.next(T::SHAPE.stages));
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        let mut queries = T::QueryGradient::ZERO;
        self.meet();
        self.start_queries(&mut queries);
        match Self::ORDER {
            StepOrder::KeysLast => {
                self.leave(Kernel::<T>::BARRIERS.d_o_empty, turn);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<1>();
                self.add_queries(&mut queries, here);
                self.start_keys(sums, d_s);
            }
            StepOrder::KeysFirst => {
                self.leave(Kernel::<T>::BARRIERS.d_o_empty, turn);
                self.start_keys(sums, d_s);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<2>();
                self.add_queries(&mut queries, here);
                wgmma_wait::<1>();
                self.leave(Kernel::<T>::BARRIERS.q_empty, turn);
            }
            StepOrder::Shared => {
                self.start_shared_values(sums);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<2>();
                self.add_queries(&mut queries, here);
                self.start_shared_keys(sums);
            }
        }
        self.start_d_p(&mut step, next_turn);
        self.turn = next_turn;
        self.d_s ^= 1;
        self.weigh::<false>(sums, &mut step, work, next, turn)
    }

    /// The products of the last step's dS.
    #[inline(always)]
    unsafe fn finish(&mut self, sums: &mut Sums<T>, d_s: &T::Packed, place: Place) {
        let mut queries = T::QueryGradient::ZERO;
        self.meet();
        self.start_queries(&mut queries);
        match Self::ORDER {
            StepOrder::KeysLast | StepOrder::KeysFirst => {
                self.start_keys(sums, d_s);
                wgmma_wait::<1>();
            }
            StepOrder::Shared => {
                self.start_shared_values(sums);
                self.start_shared_keys(sums);
                wgmma_wait::<2>();
            }
        }
        self.add_queries(&mut queries, place);
        wgmma_wait::<0>();
        self.leave(Kernel::<T>::BARRIERS.d_o_empty, self.turn);
        self.leave(Kernel::<T>::BARRIERS.q_empty, self.turn);
        sums.keys.settle();
        sums.values.settle();
        self.turn = self.turn.next(T::SHAPE.stages);
        self.d_s ^= 1;
    }

    /// P and dS of a step whose scores and dP are under way, left for the other consumer; where P
    /// is an operand from registers, also its product for dV. Returns dSᵀ. But for the `FIRST` step
    /// of a work, the product for dK of the one before, at `previous` in the rings, may still run.
    #[inline(always)]
    unsafe fn weigh<const FIRST: bool>(
        &self,
        sums: &mut Sums<T>,
        step: &mut Step<T>,
        work: Work,
        place: Place,
        previous: Turn,
    ) -> T::Packed {
        let plan = Kernel::<T>::PLAN;
        let masked = self.needs_mask(work, place);
        let keys_run = !FIRST && !matches!(Self::ORDER, StepOrder::KeysFirst);
        if keys_run {
            wgmma_wait::<2>();
        } else {
            wgmma_wait::<1>();
        }
        step.scores.settle();
        self.exponentials(&mut step.scores);
        if keys_run {
            hold(&step.scores);
            wgmma_wait::<1>();
            self.leave(Kernel::<T>::BARRIERS.q_empty, previous);
            if matches!(Self::ORDER, StepOrder::Shared) {
                self.leave(Kernel::<T>::BARRIERS.d_o_empty, previous);
            }
        }
        if opaque(masked as u32) != 0 {
            self.hide(&mut step.scores, work, place);
        }
        match Self::ORDER {
            StepOrder::KeysLast => {
                let p = pack::<T, E>(&step.scores);
                self.start_values(sums, &p);
                wgmma_wait::<1>();
            }
            StepOrder::KeysFirst => wgmma_wait::<0>(),
            StepOrder::Shared => {
                let p = pack::<T, E>(&step.scores);
                self.store(&p, plan.p);
                wgmma_wait::<0>();
            }
        }
        step.d_p.settle();
        self.differentiate(step);
        if opaque(masked as u32) != 0 {
            self.hide(&mut step.d_p, work, place);
        }
        if matches!(Self::ORDER, StepOrder::KeysFirst) {
            let p = pack::<T, E>(&step.scores);
            self.start_values(sums, &p);
        }
        let d_s = pack::<T, E>(&step.d_p);
        self.store(&d_s, plan.d_s);
        fence_proxy_async();
        arrive_named(self.stored(self.index), 2 * WARPGROUP_THREADS);
        // Nothing is in flight where the loop closes.
        wgmma_wait::<0>();
        d_s
    }

    /// The named barrier where `consumer` has stored its share of the step. Steps take turns at
    /// two: a consumer may come to the next one before the other has seen this.
    #[inline(always)]
    fn stored(&self, consumer: u32) -> u32 {
        STORED_BARRIER + self.d_s * 2 + consumer
    }

    /// Waits until the other consumer has stored what this one's products need.
    #[inline(always)]
    unsafe fn meet(&self) {
        sync_named(self.stored(self.index ^ 1), 2 * WARPGROUP_THREADS);
    }

    /// Gives back the slot at `turn` for a warp, whose reads by `wgmma` have been waited for.
    #[inline(always)]
    unsafe fn leave(&self, empty: u32, turn: Turn) {
        sync_warp();
        if lane_id() == 0 {
            mbarrier_arrive(self.block.barrier(empty + turn.slot));
        }
    }

    /// Whether this warpgroup computes its share of the step's dQ.
    #[inline(always)]
    pub(super) fn owns_queries(&self) -> bool {
        match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows | QueryShare::Channels => true,
            QueryShare::Steps => self.d_s == self.index,
        }
    }
}
