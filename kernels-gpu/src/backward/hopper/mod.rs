//! The hopper backward kernel: a column owner (M4.4 §0x06) on `wgmma` and the copy engine, in the
//! transposed form of FlashAttention-3 (arXiv 2407.08608): keys are the rows of every score tile.
//!
//! **Who owns what.** One persistent block runs on each multiprocessor and draws blocks of keys,
//! *works*, from a counter. Of warpgroup 0 one thread produces: it alone starts copies into shared
//! memory. Two warpgroups consume. For every query tile that sees any of the keys, of every query
//! head of the group, they form Sᵀ and dPᵀ, then Pᵀ and dSᵀ, and add Pᵀ·dO to dV, dSᵀ·Q to dK and
//! dS·K to the f32 sums of dQ. dK and dV stay in registers and are written once.
//!
//! Up to D̂ = 128 each consumer owns 64 keys ([`KeyShare::Keys`]): its Pᵀ and dSᵀ are, packed, the
//! operands of its own products, and only dQ needs both consumers' dS. Wider gradients do not fit
//! so. There both consumers share 64 keys ([`KeyShare::Channels`]): each computes half of the rows
//! of Sᵀ and dPᵀ, passes Pᵀ and dSᵀ through shared memory and computes half of the channels of all
//! three gradients.
//!
//! **Shared memory.** K and V of a work, twice where they fit, so that the next work's come during
//! this one's steps; rings of Q tiles with their rows of lse, and of dO tiles with their rows of
//! delta; two dSᵀ tiles, and two of Pᵀ where keys are shared; dQ on its way out, where there is
//! room. A work's numbers lie beside its K. At its end, dK and dV take the place of K and V on
//! their way out.
//!
//! **What protects what.** Every slot of a ring has two transaction barriers: *full*, when the copy
//! has arrived, and *empty*, when every consuming warp has: for each one lane, after the warp's own
//! reads and, by way of a meeting that followed them, its warpgroup's by `wgmma`. The
//! consumers meet once a step: each arrives when its dS (and P) is stored, and waits for the
//! other's before it starts the products that need both. Of two dS tiles, the one written next is
//! no one's operand any more: its products were waited for before the last arrival. At a work's
//! end two barriers of all consumers stand around the staging of dK and dV, and one of each
//! consumer between its last read and its arrival for K and V.
//!
//! **Overlap.** A step starts dQ and the next S, passes dQ on, and starts dK and the next dP, under
//! which it computes the next P; dV runs under the computation of dS. Where twice as many scores
//! leave fewer registers (`StepOrder`), dK comes before S and dV after dS.
//! Nothing is in flight where the loop closes: the assembler would serialise all products.
//!
//! **Sums of dQ.** A warp's share of a tile is contiguous, in the accumulator's own order, see
//! [`QueryGradientOrder`](ferroflash_core::backward::scratch::QueryGradientOrder). The copy engine
//! adds it from shared memory, while the warp goes on; without room for that the warp adds four
//! values at a time itself. Where additions must come in a fixed order it always does, and another
//! warp, its *keeper*, waits for the tile's turn and passes it on when the additions are complete.
//! Else, without a mask, works start at different tiles of a head, so that blocks do
//! not all add to the same ones.
//!
//! [`KeyShare::Keys`]: ferroflash_core::backward::hopper::KeyShare::Keys
//! [`KeyShare::Channels`]: ferroflash_core::backward::hopper::KeyShare::Channels

mod add;
mod consumer;
mod epilogue;
mod producer;
mod products;
mod weights;

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{
    HopperBackwardBarriers, HopperBackwardPlan, HopperBackwardTiling, WORK_BYTES, d_s_layout,
    part_layout,
};
use ferroflash_core::backward::params::HopperBackwardParams;
use ferroflash_core::backward::schedule::BackwardSchedule;
use ferroflash_core::schedule::divide;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::RegisterSplit;
use ferroflash_core::visibility::Visibility;

use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{fence_mbarrier_init, mbarrier_init};
use crate::ptx::memory::{
    dynamic_shared, load_shared_u32, load_shared_v4, store_shared_u32, store_shared_v4,
};
use crate::ptx::registers::{claim_registers, release_registers};
use crate::ptx::thread::{opaque, sync_threads, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

/// Named barrier of all consumers.
const CONSUMERS_BARRIER: u32 = 1;
/// Named barriers inside a consumer, one each.
const CONSUMER_BARRIER: u32 = 2;
/// Named barriers where a consumer has stored its share of a step's P and dS, two each.
const STORED_BARRIER: u32 = 8;
/// Named barriers where a consumer may add its dQ, one each.
const READY_BARRIER: u32 = 4;
/// Named barriers where a consumer has added its dQ, one each.
const ADDED_BARRIER: u32 = 6;

/// Constants of one specialisation.
struct Kernel<T>(PhantomData<T>);

impl<T: HopperBackwardTiling> Kernel<T> {
    const PLAN: HopperBackwardPlan = HopperBackwardPlan::new(T::SHAPE);
    const BARRIERS: HopperBackwardBarriers =
        HopperBackwardBarriers::new(T::SHAPE, Self::PLAN.kv_stages);
    // Of one part each.
    const Q: PanelLayout = part_layout(&T::SHAPE, T::SHAPE.q_rows, T::SHAPE.head_dim);
    const K: PanelLayout = part_layout(&T::SHAPE, T::SHAPE.kv_columns, T::SHAPE.head_dim);
    const V: PanelLayout = part_layout(&T::SHAPE, T::SHAPE.kv_columns, T::SHAPE.value_dim);
    const D_O: PanelLayout = part_layout(&T::SHAPE, T::SHAPE.q_rows, T::SHAPE.value_dim);
    const D_S: PanelLayout = d_s_layout(&T::SHAPE);
}

/// What every role needs.
#[derive(Clone, Copy)]
struct Block<'a> {
    params: &'a HopperBackwardParams,
    /// Address of the parameters, whose first members are the tensor maps.
    maps: u64,
    /// The block's shared memory.
    shared: u32,
    /// Its transaction barriers.
    barriers: u32,
}

impl Block<'_> {
    /// Address of tensor map `index`: q, k, v, dO.
    #[inline(always)]
    fn map(&self, index: u32) -> u64 {
        self.maps + index as u64 * 128
    }

    /// Address of barrier `number`; see [`HopperBackwardBarriers`].
    #[inline(always)]
    fn barrier(&self, number: u32) -> u32 {
        self.barriers + number * 8
    }

    /// The work on the keys in K slot `slot`; past the slots, the producer's own.
    #[inline(always)]
    fn work<T: HopperBackwardTiling>(&self, slot: u32) -> Work {
        Work { shared: opaque(self.shared) + Kernel::<T>::PLAN.works + slot * WORK_BYTES }
    }
}

/// One block of keys of one KV head. It waits in shared memory, where each value is read again when
/// it is needed: registers are short.
#[derive(Clone, Copy)]
struct Work {
    shared: u32,
}

impl Work {
    /// Leaves work `index` of the call; whether there is one.
    ///
    /// Ordered sums under a causal mask take key blocks from the last, shortest one on: it is also
    /// the first to come to each query tile, so that no block waits long for another.
    #[inline(always)]
    unsafe fn leave<T: HopperBackwardTiling, M: MaskKind>(
        self,
        params: &HopperBackwardParams,
        index: u32,
    ) -> bool {
        // Opaque, so that nothing is computed ahead and kept.
        let schedule = BackwardSchedule {
            kv_blocks: opaque(params.schedule.kv_blocks),
            batch_heads: opaque(params.schedule.batch_heads),
            section: opaque(params.schedule.section),
        };
        if index as u64 >= schedule.blocks() {
            store_shared_v4(self.shared, [u32::MAX, 0, 0, 0]);
            return false;
        }
        let work = schedule.work(index);
        let kv_heads = opaque(params.kv_heads);
        let batch = divide(work.batch_head, kv_heads);
        let kv_head = work.batch_head - batch * kv_heads;
        let ordered = opaque(params.ordered) != 0;
        let kv_block = match M::CLASS {
            MaskClass::Causal if ordered => schedule.kv_blocks - 1 - work.kv_block,
            _ => work.kv_block,
        };
        let first_key = kv_block * T::SHAPE.kv_columns;
        store_shared_v4(self.shared, [batch, kv_head, first_key, 0]);

        let visible = Visibility {
            left: opaque(params.visibility.left as u32) as i32,
            right: opaque(params.visibility.right as u32) as i32,
            ..params.visibility
        };
        let rows = visible.rows_of_any(&(first_key..first_key + T::SHAPE.kv_columns));
        let first_tile = rows.start / T::SHAPE.q_rows;
        let tiles_end = rows.end.div_ceil(T::SHAPE.q_rows);
        let tiles = tiles_end - first_tile;
        // Without a mask, blocks would all add to the same tiles at the same time.
        let start_tile = match M::CLASS {
            MaskClass::Full if !ordered => kv_block - divide(kv_block, tiles) * tiles,
            _ => first_tile,
        };
        let steps = tiles * params.group;
        store_shared_v4(self.shared + 16, [first_tile, tiles_end, steps, start_tile]);
        true
    }

    /// Leaves the same work at `to`.
    #[inline(always)]
    unsafe fn copy(self, to: Self) {
        store_shared_v4(to.shared, load_shared_v4(self.shared));
        store_shared_v4(to.shared + 16, load_shared_v4(self.shared + 16));
    }

    #[inline(always)]
    unsafe fn exists(self) -> bool {
        self.batch() != u32::MAX
    }

    #[inline(always)]
    unsafe fn batch(self) -> u32 {
        load_shared_u32(self.shared)
    }

    #[inline(always)]
    unsafe fn kv_head(self) -> u32 {
        load_shared_u32(self.shared + 4)
    }

    #[inline(always)]
    unsafe fn first_key(self) -> u32 {
        load_shared_u32(self.shared + 8)
    }

    /// The producer's query head.
    #[inline(always)]
    unsafe fn q_head(self) -> u32 {
        load_shared_u32(self.shared + 12)
    }

    #[inline(always)]
    unsafe fn set_q_head(self, q_head: u32) {
        store_shared_u32(self.shared + 12, q_head);
    }

    /// First query tile of a head that sees any of the keys.
    #[inline(always)]
    unsafe fn first_tile(self) -> u32 {
        load_shared_u32(self.shared + 16)
    }

    /// One past the last such tile.
    #[inline(always)]
    unsafe fn tiles_end(self) -> u32 {
        load_shared_u32(self.shared + 20)
    }

    /// The tile that each head's walk starts with.
    #[inline(always)]
    unsafe fn start_tile(self) -> u32 {
        load_shared_u32(self.shared + 28)
    }

    /// The tile after `tile`: from the last the walk goes on with the first.
    #[inline(always)]
    unsafe fn next_tile(self, tile: u32) -> u32 {
        if tile + 1 == self.tiles_end() { self.first_tile() } else { tile + 1 }
    }

    /// Where the work's first step is.
    #[inline(always)]
    unsafe fn first_place<T: HopperBackwardTiling>(self, params: &HopperBackwardParams) -> Place {
        let head = self.batch() * params.q_heads + self.kv_head() * params.group;
        Place { tile: self.start_tile(), head: head * head_tiles::<T>(params) }
    }

    /// Where the step after the one at `place` is.
    #[inline(always)]
    unsafe fn next_place<T: HopperBackwardTiling>(
        self,
        params: &HopperBackwardParams,
        place: Place,
    ) -> Place {
        let tile = self.next_tile(place.tile);
        let next_head = if tile == self.start_tile() { head_tiles::<T>(params) } else { 0 };
        Place { tile, head: place.head + next_head }
    }

    /// Such tiles of all heads of the group.
    #[inline(always)]
    unsafe fn steps(self) -> u32 {
        load_shared_u32(self.shared + 24)
    }
}

/// The query tile of a step.
#[derive(Clone, Copy)]
struct Place {
    /// Its number among the tiles of its head.
    tile: u32,
    /// The number of its head's first tile among the tiles of all heads.
    head: u32,
}

/// Query tiles of a head.
#[inline(always)]
fn head_tiles<T: HopperBackwardTiling>(params: &HopperBackwardParams) -> u32 {
    params.scratch.padded_rows / T::SHAPE.q_rows
}

/// The work of one persistent block.
///
/// # Safety
/// Launched as the kernel table says, with tensors as the parameters describe them, encoded as
/// `ferroflash_core::tensor_map` says; `maps` is the address of the parameters for the copy engine.
#[inline(always)]
pub unsafe fn block<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind>(
    params: &HopperBackwardParams,
    maps: u64,
) where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    let shared = dynamic_shared();
    let barriers = shared + Kernel::<T>::PLAN.barriers;
    let block = Block { params, maps, shared, barriers };
    let thread = thread_idx_x();
    if thread == 0 {
        initialise_barriers::<T>(&block);
    }
    sync_threads();

    // A branch that each warpgroup takes as a whole, as the register split requires.
    let warpgroup = uniform(thread / WARPGROUP_THREADS);
    if warpgroup == 0 {
        release_registers::<{ SPLIT.producer }>();
        let warp = uniform(opaque(thread) / 32);
        if thread == 0 {
            producer::produce::<T, M>(&block);
        } else if warp > 0 && warp <= T::SHAPE.warpgroups() && params.ordered != 0 {
            add::keep_order::<T, M>(&block, warp - 1);
        }
    } else {
        claim_registers::<{ SPLIT.consumer }>();
        // Asked again: the answer above would be kept in memory until here.
        consumer::consume::<T, E, M>(block, uniform(thread / WARPGROUP_THREADS) - 1);
    }
}

/// Registers of a thread: two warpgroups consume.
const SPLIT: RegisterSplit = RegisterSplit::of(2);

#[inline(always)]
unsafe fn initialise_barriers<T: HopperBackwardTiling>(block: &Block<'_>) {
    let numbers = Kernel::<T>::BARRIERS;
    // The keepers of the order read the work as well.
    let readers = T::SHAPE.warpgroups() << (block.params.ordered != 0) as u32;
    let mut number = 0;
    while number < numbers.count {
        let arrivals = if number < numbers.kv_empty {
            1
        } else if number < numbers.q_empty {
            readers
        } else {
            // Each warp gives back a slot for itself.
            T::SHAPE.warps
        };
        mbarrier_init(block.barrier(number), arrivals);
        number += 1;
    }
    fence_mbarrier_init();
}
