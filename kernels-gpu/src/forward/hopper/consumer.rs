//! A consuming warpgroup: 64 query rows, from their scores to their output.

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::CHUNK_BYTES;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS, WARPGROUP_WARPS};

use super::softmax::RowPair;
use super::{Block, CONSUMER_BARRIER, Kernel, TURN_BARRIER, Work, tiles_of};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::memory::{load_shared_v4, store_shared_v4};
use crate::ptx::thread::{arrive_named, block_idx_x, opaque, sync_named, thread_idx_x};
use crate::ptx::tma::{fence_proxy_async, wait_stores_read};
use crate::ptx::warp::{any, sync_warp};
use crate::ptx::wgmma::{Accumulator, Operand, Product, wgmma_commit, wgmma_fence, wgmma_wait};
use crate::ring::{Turn, WARPGROUP_THREADS};

/// A thread's share of the consumer's rows.
pub(super) struct Rows<T: HopperTiling> {
    /// Raw scores of the newest tile, then its probabilities.
    pub(super) scores: T::Scores,
    /// Probabilities of the tile before, an operand.
    pub(super) packed: T::Packed,
    /// Output numerator.
    pub(super) output: T::Output,
    /// Reference and sum of each row.
    pub(super) state: RowPair,
}

/// One consumer, as each of its threads sees it.
pub(super) struct Consumer<'a, T, E, M> {
    pub(super) block: Block<'a>,
    /// Its number among the consumers.
    pub(super) index: u32,
    /// Position in the K ring.
    pub(super) k: Turn,
    /// Position in the V ring; between an epilogue and [`Self::pass_outputs`], of the first of the
    /// output's turns.
    pub(super) v: Turn,
    pub(super) kinds: PhantomData<(T, E, M)>,
}

/// Computes the consumer's rows of every work this block draws.
///
/// # Safety
/// The four warps of consumer `index` call this alike, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<T: HopperTiling, E: MatrixElement, M: MaskKind>(
    block: Block<'_>,
    index: u32,
) where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    let mut consumer =
        Consumer::<T, E, M> { block, index, k: Turn::FIRST, v: Turn::FIRST, kinds: PhantomData };
    if T::PING_PONG && index == 0 {
        // The first turn at issuing is consumer 0's; no one comes before it.
        arrive_named(TURN_BARRIER, 2 * WARPGROUP_THREADS);
    }
    let mut work = Work::numbered::<T, M>(block.params, block_idx_x());
    let mut outputs_pending = false;
    let mut q_parity = 0;
    while work.exists() {
        let next_parity = if work.tiles > 0 { q_parity ^ 1 } else { q_parity };
        sync_warp();
        Work { tiles: q_parity | next_parity << 1, ..work }.leave(consumer.kept_work());
        sync_warp();
        let mut rows = Rows {
            scores: T::Scores::ZERO,
            packed: T::Packed::ZERO,
            output: T::Output::ZERO,
            state: RowPair::EMPTY,
        };
        let first_row = work.first_row + index * WARPGROUP_ROWS;
        let tiles = tiles_of::<T, M>(&block.params.visibility, first_row, WARPGROUP_ROWS);
        if outputs_pending && tiles < work.tiles.max(1) {
            consumer.pass_outputs();
            outputs_pending = false;
        }
        consumer.skip(tiles, work.tiles);
        if tiles > 0 {
            consumer.attend(&mut rows, tiles, outputs_pending);
        }
        work = consumer.write(&mut rows);
        q_parity = Work::left(consumer.kept_work()).tiles >> 1;
        outputs_pending = true;
    }
    // Shared memory must outlive the copies out of it.
    if consumer.leads() {
        wait_stores_read();
    }
}

impl<T: HopperTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// The thread's number in the warpgroup; asked again each time, since registers are short.
    #[inline(always)]
    pub(super) fn thread(&self) -> u32 {
        opaque(thread_idx_x()) % WARPGROUP_THREADS
    }

    /// Where each warp keeps its work while it attends: registers are needed for scores.
    #[inline(always)]
    pub(super) fn kept_work(&self) -> u32 {
        let warp = self.index * WARPGROUP_WARPS + self.thread() / 32;
        self.block.work::<T>(T::SHAPE.stages + 2 + warp)
    }

    /// Parity of the full phase of the Q rows; kept in the place of the work's tiles, with the one
    /// after it in bit 1.
    #[inline(always)]
    pub(super) unsafe fn q_parity(&self) -> u32 {
        Work::left(self.kept_work()).tiles & 1
    }

    /// First of the consumer's rows in the work it attends to.
    #[inline(always)]
    unsafe fn first_row(&self) -> u32 {
        Work::left(self.kept_work()).first_row + self.index * WARPGROUP_ROWS
    }

    /// Whether this thread arrives for its warpgroup.
    #[inline(always)]
    pub(super) fn leads(&self) -> bool {
        self.thread() == 0
    }

    /// Whether this thread arrives for its warp.
    #[inline(always)]
    pub(super) fn leads_warp(&self) -> bool {
        self.thread().is_multiple_of(32)
    }

    /// The first `tiles` tiles of a work, from the last to the first.
    #[inline(always)]
    unsafe fn attend(&mut self, rows: &mut Rows<T>, tiles: u32, outputs_pending: bool) {
        let visible = &self.block.params.visibility;
        let keys = T::SHAPE.kv_columns;
        let full_keys_end = match M::CLASS {
            MaskClass::Full => visible.kv_len,
            _ => visible.keys_end(self.first_row()),
        };
        let q_full = self.block.barrier(Kernel::<T>::BARRIERS.q_full + self.index);
        mbarrier_wait(q_full, self.q_parity());
        if self.block.params.query_sign != 0 {
            self.flip_queries();
        }

        let mut tile = tiles - 1;
        self.start_scores(rows);
        if outputs_pending {
            self.pass_outputs();
        }
        wgmma_wait::<0>();
        rows.scores.settle();
        self.leave_keys();
        if tile == 0 {
            self.leave_queries();
        }
        if (tile + 1) * keys > full_keys_end {
            self.hide(rows, tile);
        }
        self.advance(rows);
        self.pack(rows);
        self.bound_guesses(rows, tile);

        if matches!(M::CLASS, MaskClass::Causal) {
            while tile > 0 && tile * keys > full_keys_end {
                tile -= 1;
                self.step::<true>(rows, tile);
            }
        }
        while tile > 0 {
            tile -= 1;
            self.step::<false>(rows, tile);
        }

        self.start_output(rows);
        wgmma_wait::<0>();
        rows.output.settle();
        self.leave_values();
    }

    /// Scores of tile `tile`, and the output of the tile after it.
    #[inline(always)]
    unsafe fn step<const MASKED: bool>(&mut self, rows: &mut Rows<T>, tile: u32) {
        if T::PING_PONG {
            self.await_turn();
        }
        self.start_scores(rows);
        self.start_output(rows);
        if T::PING_PONG {
            self.pass_turn();
        }
        wgmma_wait::<1>();
        rows.scores.settle();
        if MASKED {
            self.leave_keys();
            self.hide(rows, tile);
            let rescale = self.advance(rows);
            self.wait_output(rows);
            self.pack(rows);
            if any(rescale[0] != 1.0 || rescale[1] != 1.0) {
                scale_rows(&mut rows.output, rescale);
            }
        } else {
            let sums = rows.state.guess(&mut rows.scores, self.block.params.scale_log2);
            self.wait_output(rows);
            self.pack(rows);
            if rows.state.needs_amending::<E, M, _>(&rows.packed) {
                self.amend(rows, tile, sums);
            } else {
                rows.state.take(sums);
            }
            // `amend` may have read the keys, and the queries.
            self.leave_keys();
        }
        if tile == 0 {
            self.leave_queries();
        }
    }

    /// Waits for the output; after it, the old probabilities may be overwritten, not before.
    #[inline(always)]
    pub(super) unsafe fn wait_output(&mut self, rows: &mut Rows<T>) {
        wgmma_wait::<0>();
        rows.output.settle();
        self.leave_values();
        rows.scores.settle();
    }

    /// Starts S = Q·Kᵀ with the ring's next K tile.
    #[inline(always)]
    pub(super) unsafe fn start_scores(&mut self, rows: &mut Rows<T>) {
        let plan = Kernel::<T>::PLAN;
        let (q_layout, k_layout) = (Kernel::<T>::Q, Kernel::<T>::K);
        let shared = self.block.shared;
        let mut q = shared + plan.q + self.index * q_layout.bytes();
        if T::SHAPE.head_dim > 128 || matches!(M::CLASS, MaskClass::Masked) {
            // Opaque, so that its many descriptors are not kept in registers.
            q = opaque(q);
        }
        let q = Operand::new(&q_layout, q);
        let k = Operand::new(&k_layout, shared + plan.k + self.k.slot * plan.k_stage);
        mbarrier_wait(
            self.block.barrier(Kernel::<T>::BARRIERS.k_full + self.k.slot),
            self.k.parity,
        );
        wgmma_fence();
        let mut step = 0;
        while step < T::SHAPE.head_dim / 16 {
            let a = q.columns_step(&q_layout, step);
            let b = k.columns_step(&k_layout, step);
            if step == 0 {
                Product::<E>::start(&mut rows.scores, a, b);
            } else {
                Product::<E>::add(&mut rows.scores, a, b);
            }
            step += 1;
        }
        wgmma_commit();
    }

    /// Starts O += P·V with the ring's next V tile.
    #[inline(always)]
    pub(super) unsafe fn start_output(&mut self, rows: &mut Rows<T>) {
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::V;
        let v = Operand::new(&layout, self.block.shared + plan.v + self.v.slot * plan.v_stage);
        mbarrier_wait(
            self.block.barrier(Kernel::<T>::BARRIERS.v_full + self.v.slot),
            self.v.parity,
        );
        wgmma_fence();
        let mut step = 0;
        while step < T::SHAPE.kv_columns / 16 {
            let first = step as usize * 4;
            let a = [
                rows.packed.at(first),
                rows.packed.at(first + 1),
                rows.packed.at(first + 2),
                rows.packed.at(first + 3),
            ];
            Product::<E>::add_registers(&mut rows.output, a, v.rows_step(&layout, step));
            step += 1;
        }
        wgmma_commit();
    }

    /// Softmax of the newest scores, relative to the rows' true maxima.
    #[inline(always)]
    pub(super) unsafe fn advance(&self, rows: &mut Rows<T>) -> [f32; 2] {
        rows.state.advance(&mut rows.scores, self.block.params.scale_log2)
    }

    /// Bounds later guesses, where tiles down to `tile` have been seen.
    #[inline(always)]
    pub(super) unsafe fn bound_guesses(&self, rows: &mut Rows<T>, tile: u32) {
        if matches!(M::CLASS, MaskClass::Full) {
            let keys = self.block.params.visibility.kv_len;
            rows.state.bound_shares::<E>(keys - tile * T::SHAPE.kv_columns, keys);
        }
    }

    /// Rounds the newest probabilities into the operand of their product.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, rows: &mut Rows<T>) {
        let mut pair = 0;
        while pair < T::Packed::LEN {
            *rows.packed.at_mut(pair) =
                E::pack(rows.scores.at(pair * 2), rows.scores.at(pair * 2 + 1));
            pair += 1;
        }
    }

    /// Makes the scores of keys at or past each row's end −∞.
    #[inline(always)]
    unsafe fn hide(&self, rows: &mut Rows<T>, tile: u32) {
        let visible = &self.block.params.visibility;
        let lane = self.thread() % 32;
        let row = self.first_row() + self.thread() / 32 * 16 + lane / 4;
        let first_key = (tile * T::SHAPE.kv_columns + lane % 4 * 2) as i32;
        let mut half = 0;
        while half < 2 {
            // Lengths and sides are bounded so that this sum fits; see `MAX_LENGTH`.
            let diagonal_end = (row + half * 8) as i32 + visible.offset + visible.right + 1;
            let keys_end = match M::CLASS {
                MaskClass::Full => visible.kv_len as i32,
                _ => diagonal_end.min(visible.kv_len as i32),
            };
            let left = keys_end - first_key;
            let mut group = 0;
            while group < T::SHAPE.kv_columns / 8 {
                let index = (group * 4 + half * 2) as usize;
                if group as i32 * 8 >= left {
                    *rows.scores.at_mut(index) = f32::NEG_INFINITY;
                }
                if group as i32 * 8 + 1 >= left {
                    *rows.scores.at_mut(index + 1) = f32::NEG_INFINITY;
                }
                group += 1;
            }
            half += 1;
        }
    }

    /// Turns the sign of the consumer's Q rows, for a negative scale.
    #[inline(always)]
    pub(super) unsafe fn flip_queries(&self) {
        let sign = self.block.params.query_sign;
        let bytes = Kernel::<T>::Q.bytes();
        let base = self.block.shared + Kernel::<T>::PLAN.q + self.index * bytes;
        let mut offset = self.thread() * CHUNK_BYTES;
        while offset < bytes {
            let [a, b, c, d] = load_shared_v4(base + offset);
            store_shared_v4(base + offset, [a ^ sign, b ^ sign, c ^ sign, d ^ sign]);
            offset += WARPGROUP_THREADS * CHUNK_BYTES;
        }
        fence_proxy_async();
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
    }
}

/// Multiplies each row's output by its factor.
#[inline(always)]
pub(super) unsafe fn scale_rows<O: Fragment>(output: &mut O, factors: [f32; 2]) {
    let mut index = 0;
    while index < O::LEN {
        *output.at_mut(index) *= factors[index / 2 % 2];
        index += 1;
    }
}
