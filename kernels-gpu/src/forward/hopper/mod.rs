//! The hopper forward kernel: FlashAttention-3's division of labour (arXiv 2407.08608) on `wgmma`
//! and the copy engine.
//!
//! **Who owns what.** One persistent block runs on each multiprocessor and takes blocks of query
//! rows, *works*, in the order of [`ForwardSchedule`](ferroflash_core::schedule::ForwardSchedule):
//! first the one of its own number, then whatever a counter in global memory gives it next. One
//! thread of warpgroup 0 produces: it alone starts copies into shared memory. The other warpgroups
//! consume: each owns 64 of the block's query rows, from their scores to their output.
//! A quad of lanes shares two rows. Consumers walk the same K/V tiles, from the last to the first,
//! so that the tiles that need a mask come first and the rest is one loop without compares; a
//! consumer lets those tiles pass that none of its own rows sees.
//!
//! **Shared memory.** Each consumer has its own Q rows. K and V tiles pass through a ring of slots
//! each. The output takes its turns in the V ring as if it were a tile: when the producer comes to
//! such a turn it waits until the slot is empty, as for a copy, and declares it full; the consumers
//! that the turn belongs to then write their rows there and start copying them out. The same turn
//! brings the next work, in a few words beside the slot: no barriers of its own. The producer draws
//! it as late as it can without keeping anyone waiting, so that blocks end together.
//!
//! **What protects what.** Every slot has two transaction barriers. *Full* ends its phase when the
//! copy has arrived (one arrival, the producer's, and its bytes); *empty* when each consumer has
//! arrived. One thread arrives for a consumer's V, since every read was by `wgmma` and has been
//! waited for; Q and K may also be read by single warps (see below), and each warp arrives. A
//! warpgroup's barrier stands between its reads of the next work and its arrival. Where nothing
//! else keeps a warpgroup's threads together, at the turns of others' outputs and at skipped
//! tiles, one thread waits and arrives for all: another might look when the phase after is over
//! too, and wait forever. The phase's parity flips each time the ring comes round. An output turn
//! is passed late: a consumer that has scores to start arrives only after that, when the copy out
//! has long read the slot. The producer always has K one tile ahead of V, and has the next work's
//! Q and first K under way before it comes to the output's turns, so that no consumer waits for
//! itself.
//!
//! **Overlap.** A consumer starts the scores of the next tile, then the product of this tile's
//! probabilities with V, and computes the next exponentials while that runs. Where
//! [`PING_PONG`](ferroflash_core::tile::Tiling::PING_PONG) holds, consumers issue in turn (named
//! barriers in a circle), so that one's exponentials also run under another's products.
//! Probabilities are packed only once the product that reads the old ones has been waited for; half
//! of the exponentials are left for after that wait, so that packing fits between them.
//!
//! **Guessing.** A softmax may be taken relative to any reference near the row's maximum. Where a
//! tile needs no mask, a consumer takes the references it has: no maximum, no exchange and no
//! vote stand before the first exponential, and the output needs no rescaling. Afterwards it
//! looks at the packed probabilities. If one is above its row's bound, the warp scales this tile
//! and all before to the true maxima; if one overflowed, or a reference is missing or so large
//! that rounding would show, the warp multiplies its scores once more (`mma`, from the tiles in
//! shared memory), and takes the maximum first. Tiles that need a mask, and the first, always do.
//! Without a mask, bounds are made from what the first tile says of each row's sum, and again
//! where a tile was amended: so high that few tiles are, so low that no key which carries much of
//! a row is rounded where true maxima would not round it.

mod amend;
mod consumer;
mod epilogue;
mod masked;
mod producer;
mod slots;
mod softmax;

pub use masked::block as masked_block;

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::params::HopperForwardParams;
use ferroflash_core::schedule::divide;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::{
    HopperBarriers, HopperTiling, RegisterSplit, SharedPlan, WARPGROUP_ROWS, WARPGROUP_WARPS,
};
use ferroflash_core::visibility::Visibility;

use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{fence_mbarrier_init, mbarrier_init};
use crate::ptx::memory::{dynamic_shared, load_shared_v4, store_shared_v4};
use crate::ptx::registers::{claim_registers, release_registers};
use crate::ptx::thread::{sync_threads, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

/// Named barriers of the consumers' turns at issuing products, one a consumer.
const TURN_BARRIER: u32 = 1;
/// Named barriers inside a consumer, one each.
const CONSUMER_BARRIER: u32 = 4;

/// Constants of one specialisation.
struct Kernel<T>(PhantomData<T>);

impl<T: HopperTiling> Kernel<T> {
    const PLAN: SharedPlan = SharedPlan::hopper_forward(T::SHAPE);
    const BARRIERS: HopperBarriers = HopperBarriers::of(T::SHAPE);
    const Q: PanelLayout = T::SHAPE.warpgroup_q_layout();
    const K: PanelLayout = T::SHAPE.k_layout();
    const V: PanelLayout = T::SHAPE.v_layout();
    const O: PanelLayout = T::SHAPE.warpgroup_o_layout();
}

/// What every role needs.
#[derive(Clone, Copy)]
struct Block<'a> {
    params: &'a HopperForwardParams,
    /// Address of the parameters, whose first members are the tensor maps.
    maps: u64,
    /// The block's shared memory.
    shared: u32,
    /// Its transaction barriers.
    barriers: u32,
}

impl Block<'_> {
    /// Address of tensor map `index`: q, k, v, o.
    #[inline(always)]
    fn map(&self, index: u32) -> u64 {
        self.maps + index as u64 * 128
    }

    /// Address of barrier `number`; see [`HopperBarriers`].
    #[inline(always)]
    fn barrier(&self, number: u32) -> u32 {
        self.barriers + number * 8
    }

    /// Where the output's turn in V slot `slot` brings the next work.
    #[inline(always)]
    fn work<T: HopperTiling>(&self, slot: u32) -> u32 {
        self.shared + Kernel::<T>::PLAN.works + slot * 16
    }
}

/// One block of query rows of one head.
#[derive(Clone, Copy)]
struct Work {
    batch: u32,
    q_head: u32,
    first_row: u32,
    /// K/V tiles that some row of the block sees, counted from the first key.
    tiles: u32,
}

impl Work {
    /// No more work.
    const NONE: Self = Self { batch: u32::MAX, q_head: 0, first_row: 0, tiles: 0 };

    /// Work `index` of the call.
    #[inline(always)]
    fn numbered<T: HopperTiling, M: MaskKind>(params: &HopperForwardParams, index: u32) -> Self {
        let schedule = &params.schedule;
        if index as u64 >= schedule.blocks() {
            return Self::NONE;
        }
        let work = schedule.work(index);
        let batch = divide(work.batch_head, params.q_heads);
        let first_row = work.q_block * T::SHAPE.q_rows;
        Self {
            batch,
            q_head: work.batch_head - batch * params.q_heads,
            first_row,
            tiles: tiles_of::<T, M>(&params.visibility, first_row, T::SHAPE.q_rows),
        }
    }

    #[inline(always)]
    fn exists(&self) -> bool {
        self.batch != u32::MAX
    }

    /// Leaves the work at `shared`.
    #[inline(always)]
    unsafe fn leave(&self, shared: u32) {
        store_shared_v4(shared, [self.batch, self.q_head, self.first_row, self.tiles]);
    }

    /// The work left at `shared`.
    #[inline(always)]
    unsafe fn left(shared: u32) -> Self {
        let [batch, q_head, first_row, tiles] = load_shared_v4(shared);
        Self { batch, q_head, first_row, tiles }
    }
}

/// K/V tiles that some of `rows` rows from `first_row` sees, counted from the first key.
#[inline(always)]
fn tiles_of<T: HopperTiling, M: MaskKind>(visible: &Visibility, first_row: u32, rows: u32) -> u32 {
    let rows = first_row..(first_row + rows).min(visible.q_len);
    let keys_end = match M::CLASS {
        MaskClass::Full if rows.start >= rows.end => 0,
        MaskClass::Full => visible.kv_len,
        _ => visible.keys_of_any(&rows).end,
    };
    keys_end.div_ceil(T::SHAPE.kv_columns)
}

/// The work of one persistent block.
///
/// # Safety
/// Launched as the kernel table says, with tensors as the parameters describe them, encoded as
/// `ferroflash_core::tensor_map` says; `maps` is the address of the parameters for the copy engine.
#[inline(always)]
pub unsafe fn block<T: HopperTiling, E: MatrixElement, M: MaskKind>(
    params: &HopperForwardParams,
    maps: u64,
) where
    T::Scores: Product<E>,
    T::Output: Product<E>,
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
        match const { RegisterSplit::of(T::SHAPE.warpgroups()).producer } {
            24 => release_registers::<24>(),
            _ => release_registers::<32>(),
        }
        if thread == 0 {
            producer::produce::<T, M>(&block);
        }
    } else {
        match const { RegisterSplit::of(T::SHAPE.warpgroups()).consumer } {
            240 => claim_registers::<240>(),
            _ => claim_registers::<160>(),
        }
        // Asked again: the answer above would be kept in memory until here.
        consumer::consume::<T, E, M>(block, uniform(thread / WARPGROUP_THREADS) - 1);
    }
}

#[inline(always)]
unsafe fn initialise_barriers<T: HopperTiling>(block: &Block<'_>) {
    let numbers = Kernel::<T>::BARRIERS;
    let consumers = T::SHAPE.warpgroups();
    let mut number = 0;
    while number < numbers.count {
        let arrivals = if numbers.v_empty <= number {
            consumers
        } else if numbers.k_empty <= number && number < numbers.v_full {
            consumers * WARPGROUP_WARPS
        } else if numbers.q_empty <= number && number < numbers.k_full {
            WARPGROUP_WARPS
        } else {
            1
        };
        mbarrier_init(block.barrier(number), arrivals);
        number += 1;
    }
    fence_mbarrier_init();
}

/// Where consumer `consumer` puts its output rows: which of the output's turns, and the offset in
/// its V slot.
#[inline(always)]
const fn output_place<T: HopperTiling>(consumer: u32) -> (u32, u32) {
    let per_turn = T::SHAPE.outputs_per_turn();
    (consumer / per_turn, consumer % per_turn * WARPGROUP_ROWS * T::SHAPE.value_dim * 2)
}
