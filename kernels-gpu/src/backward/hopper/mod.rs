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
//! their way out; where a work is a part of a group, by way of f32 sums in memory (`parts`).
//!
//! **What protects what.** Every slot of a ring has two transaction barriers: *full*, when the copy
//! has arrived, and *empty*, when every consuming warp has: for each one lane, after the warp's own
//! reads and, by way of a meeting that followed them, its warpgroup's by `wgmma`. The
//! consumers meet once a step: each arrives when its dS (and P) is stored, and waits for the
//! other's before it starts the products that need both. Of two dS tiles, the one written next is
//! no one's operand any more: its products were waited for before the last arrival or, where the
//! product for dQ is deferred, each tells the other when it has read a tile. At a work's end two
//! barriers of all consumers stand around the staging of dK and dV. A work's numbers are written
//! before K is *full*, and again once every warp that reads them has arrived at *empty*.
//!
//! **Overlap.** A step starts dQ and the next S, passes dQ on, and starts dK and the next dP, under
//! which it computes the next P; dV runs under the computation of dS. Where twice as many scores
//! leave fewer registers (`StepOrder`), dK comes before S and dV after dS.
//! There dQ is of the step before, so that a consumer may be ahead of the other by half a step: one
//! multiplies while the other computes.
//! Nothing is in flight where the loop closes: the assembler would serialise all products.
//!
//! **Sums of dQ.** A warp's share of a tile is contiguous, in the accumulator's own order, see
//! [`QueryGradientOrder`](ferroflash_core::backward::scratch::QueryGradientOrder). The copy engine
//! adds it from shared memory, while the warp goes on; without room for that the warp adds four
//! values at a time itself. Where additions must come in a fixed order, another warp of each
//! consumer, its *keeper*, waits for the tile's turn and passes it on when the additions are
//! complete: the consumer's own or, where dQ is deferred, the copy engine's, which the keeper
//! starts when the consumer has staged.
//! Else, without a mask, works start at different tiles of a head, so that blocks do not all add to
//! the same ones. Warps that have nothing else to do clear the sums of the section of heads to come
//! (`clear`), and convert those of the sections that are done (`convert`).
//!
//! [`KeyShare::Keys`]: ferroflash_core::backward::hopper::KeyShare::Keys
//! [`KeyShare::Channels`]: ferroflash_core::backward::hopper::KeyShare::Channels

mod add;
mod clear;
mod consumer;
mod convert;
mod epilogue;
mod masked;
mod meetings;
mod parts;
mod places;
mod producer;
mod products;
mod weights;
mod work;

use core::marker::PhantomData;

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{
    HopperBackwardBarriers, HopperBackwardPlan, HopperBackwardTiling, WORK_BYTES, d_s_layout,
    defers, part_layout,
};
use ferroflash_core::backward::params::HopperBackwardParams;
use ferroflash_core::backward::params::options::HopperBackwardOptions;
#[cfg(doc)]
use ferroflash_core::backward::scratch::HopperCounters;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::RegisterSplit;

use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{fence_mbarrier_init, mbarrier_init};
use crate::ptx::memory::{dynamic_shared, store_relaxed_shared_u32};
use crate::ptx::registers::{claim_registers, release_registers};
use crate::ptx::thread::{opaque, sync_threads, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;
pub use masked::block as masked_block;
use work::{Place, Work};

/// Named barrier of all consumers.
const CONSUMERS_BARRIER: u32 = 1;
/// Named barriers inside a consumer, one each.
const CONSUMER_BARRIER: u32 = 2;
/// Named barriers where a consumer has stored its share of a step's P and dS, two each.
const STORED_BARRIER: u32 = 8;
/// Named barriers where a consumer has read a tile of dS, two each.
const READ_BARRIER: u32 = 12;
/// Named barriers where a consumer may add its dQ, one each.
const READY_BARRIER: u32 = 4;
/// Named barriers where a consumer has added its dQ, one each.
const ADDED_BARRIER: u32 = 6;

/// The section of a work that there is not.
const NO_SECTION: u32 = u32::MAX;

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
    /// Whether the product for dQ is that of the step before, so that consumers need not keep step.
    const DEFERS: bool = defers(&T::SHAPE);
    /// Whether keepers have the copy engine add what consumers stage.
    const KEEPERS_ADD: bool = Self::PLAN.dq_staged && Self::DEFERS;
}

/// What every role needs.
#[derive(Clone, Copy)]
struct Block<'a> {
    params: &'a HopperBackwardParams,
    /// What the options of a kernel that has any add.
    options: Option<&'a HopperBackwardOptions>,
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

    /// Address of counter `number` of the call; see [`HopperCounters`].
    #[inline(always)]
    fn counter(&self, number: u64) -> u64 {
        self.params.scratch.counters + number * 4
    }

    /// Address of the section that the block draws works from, [`NO_SECTION`] past the last work.
    /// Warps look at it while it is written: nothing else is concluded from it.
    #[inline(always)]
    fn section<T: HopperBackwardTiling>(&self) -> u32 {
        opaque(self.shared) + Kernel::<T>::PLAN.section
    }

    /// The work whose numbers are in `slot`; past the slots, the producer's own.
    #[inline(always)]
    fn work<T: HopperBackwardTiling>(&self, slot: u32) -> Work {
        Work { shared: opaque(self.shared) + Kernel::<T>::PLAN.works + slot * WORK_BYTES }
    }
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
    run::<T, E, M>(params, None, maps);
}

/// As [`block`], whatever the class.
#[inline(always)]
unsafe fn run<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind>(
    params: &HopperBackwardParams,
    options: Option<&HopperBackwardOptions>,
    maps: u64,
) where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    let shared = dynamic_shared();
    let barriers = shared + Kernel::<T>::PLAN.barriers;
    let block = Block { params, options, maps, shared, barriers };
    let thread = thread_idx_x();
    if thread == 0 {
        initialise_barriers::<T>(&block);
        store_relaxed_shared_u32(block.section::<T>(), 0);
    }
    sync_threads();

    // A branch that each warpgroup takes as a whole, as the register split requires.
    let warpgroup = uniform(thread / WARPGROUP_THREADS);
    if warpgroup == 0 {
        release_registers::<{ SPLIT.producer }>();
        let warp = uniform(opaque(thread) / 32);
        if thread == 0 {
            producer::produce::<T, M>(&block);
        } else if warp > 0 {
            help::<T, E, M>(&block, warp);
        }
    } else {
        claim_registers::<{ SPLIT.consumer }>();
        // Asked again: the answer above would be kept in memory until here.
        consumer::consume::<T, E, M>(block, uniform(thread / WARPGROUP_THREADS) - 1);
    }
}

/// What a warp beside the producing thread's does: the first ones keep the order of additions, if
/// there is one; the last clears sums; whoever is free converts.
#[inline(always)]
unsafe fn help<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind>(
    block: &Block<'_>,
    warp: u32,
) {
    if warp <= T::SHAPE.warpgroups() && block.params.ordered != 0 {
        add::keep_order::<T, M>(block, warp - 1);
        return;
    }
    if warp > T::SHAPE.warpgroups() {
        clear::clear_ahead::<T>(block);
    }
    convert::convert_behind::<T, E>(block);
}

/// Registers of a thread: two warpgroups consume.
const SPLIT: RegisterSplit = RegisterSplit::of(2);

#[inline(always)]
unsafe fn initialise_barriers<T: HopperBackwardTiling>(block: &Block<'_>) {
    let numbers = Kernel::<T>::BARRIERS;
    // The keepers of the order read the work as well.
    let keepers = if block.params.ordered != 0 { T::SHAPE.warpgroups() } else { 0 };
    let mut number = 0;
    while number < numbers.count {
        // Each warp gives back a slot for itself.
        let arrivals = if number < numbers.kv_empty || number >= numbers.drained {
            1
        } else if number < numbers.q_empty {
            T::SHAPE.warps + keepers
        } else {
            T::SHAPE.warps
        };
        mbarrier_init(block.barrier(number), arrivals);
        number += 1;
    }
    fence_mbarrier_init();
}
