//! A consuming warpgroup: the steps of a work, each by the loop of its kind.

use core::marker::PhantomData;

use ferroflash_core::axes::Masked;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::options::HopperMaskedParams;
use ferroflash_core::swizzle::CHUNK_BYTES;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_WARPS};

use super::super::consumer::{Consumer, Rows, scale_rows};
use super::super::softmax::RowPair;
use super::super::{Block, CONSUMER_BARRIER, Kernel, TURN_BARRIER};
use super::record::{Record, has_softcap, is_given};
use super::scores::FAR_SCALE;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::memory::store_shared_v4;
use crate::ptx::thread::{arrive_named, opaque, sync_named};
use crate::ptx::tma::{fence_proxy_async, wait_stores_read};
use crate::ptx::warp::any;
use crate::ptx::wgmma::{Accumulator, Product, wgmma_wait};
use crate::ring::{Turn, WARPGROUP_THREADS};

/// Kinds of runs of unmasked tiles, each with a loop of its own: no option, a softcap by tanh near
/// zero, one by tanh of any score, ALiBi.
pub(super) const PLAIN: u32 = 0;
pub(super) const NEAR: u32 = 1;
pub(super) const FAR: u32 = 2;
pub(super) const ALIBI: u32 = 3;

/// One consumer, and the options of the call.
pub(super) struct Reader<'a, T, E> {
    pub(super) consumer: Consumer<'a, T, E, Masked>,
    pub(super) params: &'a HopperMaskedParams,
    /// With a softcap, whether the newest scores of the warp leave the reach of tanh's polynomial
    /// near zero.
    pub(super) is_far: bool,
}

/// Computes the consumer's rows of every work this block draws.
///
/// # Safety
/// The four warps of consumer `index` call this alike, once, each with the first work's record in
/// its place; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<T: HopperTiling, E: MatrixElement>(
    block: Block<'_>,
    params: &HopperMaskedParams,
    index: u32,
) where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    let consumer = Consumer::<T, E, Masked> {
        block,
        index,
        k: Turn::FIRST,
        v: Turn::FIRST,
        kinds: PhantomData,
    };
    let mut reader = Reader { consumer, params, is_far: false };
    if T::PING_PONG && index == 0 {
        // The first turn at issuing is consumer 0's; no one comes before it.
        arrive_named(TURN_BARRIER, 2 * WARPGROUP_THREADS);
    }
    let mut outputs_pending = false;
    while reader.record().exists() {
        let mut rows = Rows {
            scores: T::Scores::ZERO,
            packed: T::Packed::ZERO,
            output: T::Output::ZERO,
            state: RowPair::EMPTY,
        };
        let part = reader.record().part();
        if outputs_pending && (part.before > 0 || part.seen == 0) {
            reader.consumer.pass_outputs();
            outputs_pending = false;
        }
        if part.seen > 0 {
            reader.pass_steps(part.before);
            reader.attend(&mut rows, part.before, part.before + part.seen, outputs_pending);
            let part = reader.record().part();
            reader.pass_steps(reader.record().steps() - part.before - part.seen);
        } else if part.before > 0 {
            reader.pass_queries();
            reader.pass_steps(part.before - 1);
            reader.pass_tile();
            // The others wait for no phase that might be over, nor for one too far ahead.
            sync_named(CONSUMER_BARRIER + index, WARPGROUP_THREADS);
        }
        reader.write(&mut rows);
        outputs_pending = true;
    }
    // Shared memory must outlive the copies out of it.
    if reader.consumer.leads() {
        wait_stores_read();
    }
}

impl<T: HopperTiling, E: MatrixElement> Reader<'_, T, E>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// The record of the work that the warp attends to.
    #[inline(always)]
    pub(super) fn record(&self) -> Record {
        let warp = self.consumer.index * WARPGROUP_WARPS + self.consumer.thread() / 32;
        Record::numbered::<T>(&self.consumer.block, T::SHAPE.stages + 2 + warp)
    }

    /// Lets steps pass that none of the consumer's rows sees, and as many turns at issuing: every
    /// consumer has one for each step of a work but the first. The output's turns have been passed.
    #[inline(always)]
    unsafe fn pass_steps(&mut self, steps: u32) {
        if steps == 0 {
            return;
        }
        let mut left = steps;
        while left > 0 {
            self.pass_tile();
            if T::PING_PONG {
                self.consumer.await_turn();
                self.consumer.pass_turn();
            }
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
        // The others wait for no phase that might be over, nor for one too far ahead.
        sync_named(CONSUMER_BARRIER + self.consumer.index, WARPGROUP_THREADS);
    }

    /// Lets one K and V tile pass.
    #[inline(always)]
    unsafe fn pass_tile(&mut self) {
        let (barriers, consumer) = (Kernel::<T>::BARRIERS, &mut self.consumer);
        consumer.await_fill(barriers.k_full + consumer.k.slot, consumer.k.parity);
        consumer.arrive_for_all_warps(barriers.k_empty + consumer.k.slot);
        consumer.k = consumer.k.next(T::SHAPE.stages);
        consumer.await_fill(barriers.v_full + consumer.v.slot, consumer.v.parity);
        consumer.leave_values();
    }

    /// Lets the Q rows pass.
    #[inline(always)]
    unsafe fn pass_queries(&mut self) {
        let (barriers, consumer) = (Kernel::<T>::BARRIERS, &self.consumer);
        consumer.await_fill(barriers.q_full + consumer.index, self.record().q_parity());
        consumer.arrive_for_all_warps(barriers.q_empty + consumer.index);
    }

    /// Steps `first..end` of the work.
    #[inline(always)]
    unsafe fn attend(&mut self, rows: &mut Rows<T>, first: u32, end: u32, outputs_pending: bool) {
        let q_full = Kernel::<T>::BARRIERS.q_full + self.consumer.index;
        mbarrier_wait(self.consumer.block.barrier(q_full), self.record().q_parity());
        if self.params.forward.query_sign != 0 {
            self.consumer.flip_queries();
        }
        self.consumer.start_scores(rows);
        if outputs_pending {
            self.consumer.pass_outputs();
        }
        wgmma_wait::<0>();
        rows.scores.settle();
        self.leave_keys(first, end);
        self.finish(rows, first);
        self.consumer.pack(rows);
        self.clean_values(first);

        let mut step = first + 1;
        while step < end {
            let options = &self.params.options;
            let (has_alibi, has_softcap) = (is_given(options.alibi.address), has_softcap(options));
            let run_end = self.run_end(step).min(end);
            step = if run_end > step {
                if has_alibi {
                    self.run::<ALIBI>(rows, step, run_end, end)
                } else if !has_softcap {
                    self.run::<PLAIN>(rows, step, run_end, end)
                } else if self.is_far {
                    self.run::<FAR>(rows, step, run_end, end)
                } else {
                    self.run::<NEAR>(rows, step, run_end, end)
                }
            } else {
                self.edge_step(rows, step, end)
            };
        }

        self.consumer.start_output(rows);
        wgmma_wait::<0>();
        rows.output.settle();
        self.consumer.leave_values();
    }

    /// The step that ends the run of unmasked tiles which `step` begins; itself where it needs
    /// [`Self::finish`].
    #[inline(always)]
    unsafe fn run_end(&self, step: u32) -> u32 {
        let (walk, part) = (self.record().walk(), self.record().part());
        let options = &self.params.options;
        let has_alibi = is_given(options.alibi.address);
        let is_coarse = self.params.forward.scale_log2 > FAR_SCALE;
        if has_softcap(options) && (has_alibi || self.is_far && is_coarse) {
            // Left to `finish`.
            return step;
        }
        let tile = walk.tile(step);
        let tiles = part.unmasked(tile, has_alibi);
        if tiles.start < tiles.end { step + walk.run(step, &tiles) } else { step }
    }

    /// Starts a step's products, when its turn has come, and waits for the scores.
    #[inline(always)]
    unsafe fn multiply(&mut self, rows: &mut Rows<T>) {
        if T::PING_PONG {
            self.consumer.await_turn();
        }
        self.consumer.start_scores(rows);
        self.consumer.start_output(rows);
        if T::PING_PONG {
            self.consumer.pass_turn();
        }
        wgmma_wait::<1>();
        rows.scores.settle();
    }

    /// The tiles of steps `step..run_end`, by guesses. Returns the step after them, or an earlier
    /// one where a softcap's scores went too far.
    #[inline(always)]
    unsafe fn run<const KIND: u32>(
        &mut self,
        rows: &mut Rows<T>,
        step: u32,
        run_end: u32,
        end: u32,
    ) -> u32 {
        let (mut step, mut run_end) = (step, run_end);
        while step < run_end {
            self.multiply(rows);
            let mut largest = 0.0;
            let sums = match KIND {
                ALIBI => self.guess_sloped(rows, step),
                FAR => self.guess_far(rows),
                NEAR => {
                    let sums;
                    (sums, largest) = self.guess_near(rows);
                    sums
                }
                _ => rows.state.guess(&mut rows.scores, self.params.forward.scale_log2),
            };
            let mut is_worthless = KIND == NEAR && largest > self.params.options.softcap_near;
            self.consumer.wait_output(rows);
            self.consumer.pack(rows);
            if KIND == NEAR {
                is_worthless = any(is_worthless);
            }
            if is_worthless || rows.state.needs_amending::<E, Masked, _>(&rows.packed) {
                if KIND == NEAR && is_worthless {
                    (self.is_far, run_end) = (true, step + 1);
                }
                self.amend::<KIND>(rows, sums, step, is_worthless);
            } else {
                rows.state.take(sums);
            }
            // `amend` may have read the keys, and the queries.
            self.leave_keys(step, end);
            // Opaque, so that the loop stays one.
            step = opaque(step + 1);
        }
        step
    }

    /// A tile that needs a mask, or more than one kind of option.
    #[inline(always)]
    unsafe fn edge_step(&mut self, rows: &mut Rows<T>, step: u32, end: u32) -> u32 {
        self.multiply(rows);
        self.leave_keys(step, end);
        let rescale = self.finish(rows, step);
        self.consumer.wait_output(rows);
        self.consumer.pack(rows);
        if any(rescale[0] != 1.0 || rescale[1] != 1.0) {
            scale_rows(&mut rows.output, rescale);
        }
        self.clean_values(step);
        step + 1
    }

    /// Makes probabilities and output relative to the rows' true maxima; `sums` are the guess's.
    #[inline(always)]
    unsafe fn amend<const KIND: u32>(
        &self,
        rows: &mut Rows<T>,
        sums: [f32; 2],
        step: u32,
        is_worthless: bool,
    ) {
        let scale_log2 = self.params.forward.scale_log2;
        let rescale = if !is_worthless && rows.state.can_rise(sums) {
            rows.state.rise(&mut rows.scores, sums, scale_log2)
        } else {
            self.consumer.multiply_scores(rows);
            match KIND {
                ALIBI => self.subtract_distances(rows, step),
                NEAR | FAR => {
                    let _ = self.cap(rows);
                }
                _ => {}
            }
            rows.state.advance(&mut rows.scores, scale_log2)
        };
        self.consumer.pack(rows);
        scale_rows(&mut rows.output, rescale);
    }

    /// The K tile of `step` may go, and after the last one the Q rows.
    #[inline(always)]
    unsafe fn leave_keys(&mut self, step: u32, end: u32) {
        self.consumer.leave_keys();
        if step + 1 == end {
            self.consumer.leave_queries();
        }
    }

    /// Zeroes the rows of the ring's next V tile, that of `step`, whose keys no row of the item
    /// sees.
    #[inline(always)]
    unsafe fn clean_values(&self, step: u32) {
        let (record, keys) = (self.record(), T::SHAPE.kv_columns);
        let (start, end) = record.seen_keys();
        let first = record.walk().tile(step) * keys;
        if start <= first && first + keys <= end {
            return;
        }
        let (layout, block) = (Kernel::<T>::V, &self.consumer.block);
        let turn = self.consumer.v;
        mbarrier_wait(block.barrier(Kernel::<T>::BARRIERS.v_full + turn.slot), turn.parity);
        let plan = Kernel::<T>::PLAN;
        let tile = block.shared + plan.v + turn.slot * plan.v_stage;
        let chunks = layout.row_bytes() / CHUNK_BYTES;
        let mut chunk = self.consumer.thread();
        while chunk < layout.bytes() / CHUNK_BYTES {
            let key = first + chunk / chunks % keys;
            if key < start || key >= end {
                store_shared_v4(tile + chunk * CHUNK_BYTES, [0; 4]);
            }
            // Opaque, so that the loop stays one.
            chunk = opaque(chunk + WARPGROUP_THREADS);
        }
        fence_proxy_async();
        sync_named(CONSUMER_BARRIER + self.consumer.index, WARPGROUP_THREADS);
    }
}
