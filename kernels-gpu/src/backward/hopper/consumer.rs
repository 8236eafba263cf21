//! A consuming warpgroup: 64 keys, from the scores of each query tile to their dK and dV.

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, KeyShare};
use ferroflash_core::fragment::Fragment;

use super::weights::{hold, pack};
use super::{Block, Kernel, Place, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::memory::load_shared_u32;
use crate::ptx::thread::{arrive_named, opaque, thread_idx_x};
use crate::ptx::tma::{fence_proxy_async, wait_stores_read};
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
    if Kernel::<T>::DEFERS {
        // No one reads either tile of dS yet.
        consumer.tell_read(0);
        consumer.tell_read(1);
    }
    loop {
        mbarrier_wait(consumer.k_full(), consumer.kv.parity);
        if !consumer.work().exists() {
            break;
        }
        if let MaskClass::Masked = M::CLASS {
            consumer.clear_hidden_keys();
        }
        let mut sums = Sums { keys: T::KeyGradient::ZERO, values: T::ValueGradient::ZERO };
        if consumer.work().steps() > 0 {
            consumer.attend(&mut sums);
        } else {
            // The values' place is written to: they must have come.
            mbarrier_wait(consumer.v_full(), consumer.kv.parity);
        }
        consumer.write(&mut sums);
        consumer.kv = consumer.kv.next(Kernel::<T>::PLAN.kv_stages);
    }
    if Kernel::<T>::DEFERS {
        consumer.await_read(0);
        consumer.await_read(1);
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

    /// Address of barrier `number`; computed again each time where registers are shortest.
    #[inline(always)]
    pub(super) fn barrier(&self, number: u32) -> u32 {
        if !Self::IS_TOLD {
            return self.block.barrier(number);
        }
        opaque(self.block.shared) + Kernel::<T>::PLAN.barriers + number * 8
    }

    #[inline(always)]
    fn k_full(&self) -> u32 {
        self.barrier(Kernel::<T>::BARRIERS.k_full + self.kv.slot)
    }

    #[inline(always)]
    fn v_full(&self) -> u32 {
        self.barrier(Kernel::<T>::BARRIERS.v_full + self.kv.slot)
    }

    /// The work at hand.
    #[inline(always)]
    pub(super) fn work(&self) -> Work {
        self.block.work::<T>(self.kv.slot)
    }

    /// All query tiles of a work, head after head.
    #[inline(always)]
    unsafe fn attend(&mut self, sums: &mut Sums<T>) {
        let mut place = self.first_place();
        let mut left = self.work().steps();
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        self.start_scores(&mut step, self.turn);
        mbarrier_wait(self.v_full(), self.kv.parity);
        self.start_d_p(&mut step, self.turn);
        let mut d_s = self.weigh::<true>(sums, &mut step, place, self.turn);
        while left > 1 {
            let here = place;
            place = self.next_place(place);
            d_s = self.step(sums, &d_s, left, here, place);
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
        self.finish(sums, &d_s, place);
    }

    /// The products of the step's dS, under which the scores and dP of the next step start and
    /// become its dS; `left` steps are left with this one. The product for dQ is of this step or,
    /// where it is [deferred](Kernel::DEFERS), of the one before: a first step then has none.
    #[inline(always)]
    unsafe fn step(
        &mut self,
        sums: &mut Sums<T>,
        d_s: &T::Packed,
        left: u32,
        here: Place,
        next: Place,
    ) -> T::Packed {
        let (turn, next_turn) = (self.turn, self.turn.next(T::SHAPE.stages));
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        let mut queries = T::QueryGradient::ZERO;
        let weights = if Kernel::<T>::DEFERS { self.d_s ^ 1 } else { self.d_s };
        let is_due = self.is_due(left);
        if is_due {
            self.meet(weights);
        }
        self.start_queries(&mut queries, weights, is_due);
        // Asked before the product is waited for.
        let is_shared = match M::CLASS {
            MaskClass::Masked => self.is_shared(self.turn_of_queries()),
            _ => false,
        };
        match Self::ORDER {
            StepOrder::KeysLast => {
                self.leave(Kernel::<T>::BARRIERS.d_o_empty, turn);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<1>();
                if self.is_due(left) {
                    self.pass_on(&mut queries, weights, here, is_shared);
                }
                self.start_keys(sums, d_s);
            }
            StepOrder::KeysFirst => {
                self.leave(Kernel::<T>::BARRIERS.d_o_empty, turn);
                self.start_keys(sums, d_s);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<2>();
                if self.is_due(left) {
                    self.pass_on(&mut queries, weights, here, is_shared);
                }
                wgmma_wait::<1>();
                self.leave(Kernel::<T>::BARRIERS.q_empty, turn);
            }
            StepOrder::Shared => {
                self.start_shared_values(sums);
                self.start_scores(&mut step, next_turn);
                wgmma_wait::<2>();
                self.pass_on(&mut queries, weights, here, is_shared);
                self.start_shared_keys(sums);
            }
        }
        self.start_d_p(&mut step, next_turn);
        self.turn = next_turn;
        self.d_s ^= 1;
        self.weigh::<false>(sums, &mut step, next, turn)
    }

    /// Passes on the step's dQ or, where it is deferred, that of the one before, whose product has
    /// been waited for: `weights` is its tile of dS.
    #[inline(always)]
    unsafe fn pass_on(
        &self,
        queries: &mut T::QueryGradient,
        weights: u32,
        here: Place,
        is_shared: bool,
    ) {
        if let MaskClass::Masked = M::CLASS
            && is_shared
        {
            self.keep_own_rows(queries, self.turn_of_queries());
        }
        if Kernel::<T>::DEFERS {
            self.tell_read(weights);
            let before = self.told(self.turn.previous(T::SHAPE.stages));
            self.add_queries(queries, weights, load_shared_u32(before + 8));
        } else {
            self.add_queries(queries, weights, self.tile_of_all(here));
        }
    }

    /// The products of the last step's dS, and for dQ also that of the step
    /// before, where it is deferred.
    #[inline(always)]
    unsafe fn finish(&mut self, sums: &mut Sums<T>, d_s: &T::Packed, place: Place) {
        let weights = self.d_s;
        if Kernel::<T>::DEFERS && self.work().steps() > 1 {
            let mut queries = T::QueryGradient::ZERO;
            self.meet(weights ^ 1);
            self.start_queries(&mut queries, weights ^ 1, true);
            let is_shared = match M::CLASS {
                MaskClass::Masked => self.is_shared(self.turn_of_queries()),
                _ => false,
            };
            wgmma_wait::<0>();
            self.pass_on(&mut queries, weights ^ 1, place, is_shared);
        }
        let mut queries = T::QueryGradient::ZERO;
        self.meet(weights);
        self.start_queries(&mut queries, weights, true);
        if matches!(Self::ORDER, StepOrder::Shared) {
            self.start_shared_values(sums);
            self.start_shared_keys(sums);
            wgmma_wait::<2>();
        } else {
            self.start_keys(sums, d_s);
            wgmma_wait::<1>();
        }
        if let MaskClass::Masked = M::CLASS
            && self.is_shared(self.turn)
        {
            self.keep_own_rows(&mut queries, self.turn);
        }
        if Kernel::<T>::DEFERS {
            self.tell_read(weights);
        }
        self.add_queries(&mut queries, weights, self.tile_of_all(place));
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
        place: Place,
        previous: Turn,
    ) -> T::Packed {
        let plan = Kernel::<T>::PLAN;
        let masked = self.needs_mask(place);
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
            self.hide(&mut step.scores, place);
        }
        match Self::ORDER {
            StepOrder::KeysLast => {
                let p = pack::<T, E>(&step.scores);
                self.start_values(sums, &p);
                if let MaskClass::Masked = M::CLASS {
                    self.differentiate_softcap(step, true);
                }
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
        if let (StepOrder::KeysFirst, MaskClass::Masked) = (Self::ORDER, M::CLASS) {
            self.differentiate_softcap(step, false);
        }
        if opaque(masked as u32) != 0 {
            self.hide(&mut step.d_p, place);
        }
        if let MaskClass::Masked = M::CLASS {
            self.hide_gradients(&mut step.d_p);
        }
        if matches!(Self::ORDER, StepOrder::KeysFirst) {
            let p = pack::<T, E>(&step.scores);
            self.start_values(sums, &p);
        }
        let d_s = pack::<T, E>(&step.d_p);
        if Kernel::<T>::DEFERS {
            self.await_read(self.d_s);
        }
        self.store(&d_s, plan.d_s);
        fence_proxy_async();
        arrive_named(self.stored(self.d_s, self.index), 2 * WARPGROUP_THREADS);
        // Nothing is in flight where the loop closes.
        wgmma_wait::<0>();
        d_s
    }
}
