//! Adding a step's dQ to its sums, and the order in which blocks do.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::WARPGROUP_WARPS;

use super::consumer::Consumer;
use super::{ADDED_BARRIER, Block, Kernel, READY_BARRIER, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_wait};
use crate::ptx::memory::{
    add_global_v4_f32, load_acquire_global_u32, release_add_global_u32, store_shared_v4,
};
use crate::ptx::thread::{arrive_named, opaque, sync_named, thread_idx_x};
use crate::ptx::tma::{
    add_bytes_f32, commit_stores, fence_proxy_async, fence_proxy_async_global, wait_stores,
    wait_stores_read,
};
use crate::ptx::warp::sync_warp;
use crate::ptx::wgmma::{Accumulator, Product};
use crate::ring::{Turn, WARPGROUP_THREADS};

/// Bytes of four values of each lane.
const GROUP_BYTES: u32 = 512;
/// Threads that meet where a consumer may add, and where it has added: its own, and its keeper's.
const MEETING_THREADS: u32 = WARPGROUP_THREADS + 32;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Adds the warpgroup's share of the dQ of query tile `tile` of all heads', whose tile of dS is
    /// `weights`; if the sums are ordered, when its keeper says so, or by its keeper.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when the product has been waited for.
    #[inline(always)]
    pub(super) unsafe fn add_queries(
        &self,
        queries: &mut T::QueryGradient,
        weights: u32,
        tile: u32,
    ) {
        queries.settle();
        let scratch = &self.block.params.scratch;
        if scratch.dq == 0 || !self.owns_queries(weights) {
            return;
        }
        let warp = self.thread() / 32;
        let target = sums_of::<T>(scratch.dq, tile, self.index, warp);
        let is_ordered = opaque(self.block.params.ordered) != 0;
        if is_ordered && Kernel::<T>::KEEPERS_ADD {
            mbarrier_wait(self.drained(), weights ^ 1);
            self.stage_queries(queries);
            arrive_named(ADDED_BARRIER + self.index, MEETING_THREADS);
        } else if is_ordered {
            sync_named(READY_BARRIER + self.index, MEETING_THREADS);
            self.add_from_registers(queries, target);
            arrive_named(ADDED_BARRIER + self.index, MEETING_THREADS);
        } else if Kernel::<T>::PLAN.dq_staged {
            self.add_from_shared(queries, target);
        } else {
            self.add_from_registers(queries, target);
        }
    }

    /// The barrier that tells when the consumer's staged dQ has left its place, if sums are
    /// ordered. Its phases are steps, which take turns at two tiles of dS.
    #[inline(always)]
    pub(super) fn drained(&self) -> u32 {
        self.barrier(Kernel::<T>::BARRIERS.drained + self.index)
    }

    /// Adds a warp's values to the sums at `target` and after.
    #[inline(always)]
    unsafe fn add_from_registers(&self, queries: &T::QueryGradient, target: u64) {
        let lane = self.thread() % 32;
        let target = target + (lane * 16) as u64;
        let mut group = 0;
        while group < T::QueryGradient::LEN / 4 {
            add_global_v4_f32(target + group as u64 * GROUP_BYTES as u64, four(queries, group));
            group += 1;
        }
    }

    /// As [`Self::add_from_registers`], but the copy engine adds: the warp goes on at once.
    #[inline(always)]
    unsafe fn add_from_shared(&self, queries: &T::QueryGradient, target: u64) {
        let leads = self.thread().is_multiple_of(32);
        if leads {
            wait_stores_read();
        }
        sync_warp();
        self.stage_queries(queries);
        sync_warp();
        if leads {
            let (shared, bytes) = staged::<T>(&self.block, self.index, self.thread() / 32);
            add_bytes_f32(target, shared, bytes);
            commit_stores();
        }
    }

    /// Puts a warp's values where the copy engine reads them.
    #[inline(always)]
    unsafe fn stage_queries(&self, queries: &T::QueryGradient) {
        let lane = self.thread() % 32;
        let (shared, _) = staged::<T>(&self.block, self.index, self.thread() / 32);
        let mut group = 0;
        while group < T::QueryGradient::LEN / 4 {
            let place = shared + group as u32 * GROUP_BYTES + lane * 16;
            store_shared_v4(place, four(queries, group).map(f32::to_bits));
            group += 1;
        }
        fence_proxy_async();
    }
}

/// Where the sums lie that `warp` of consumer `index` adds to, of a query tile among all heads'.
#[inline(always)]
fn sums_of<T: HopperBackwardTiling>(dq: u64, tile: u32, index: u32, warp: u32) -> u64 {
    let row_block_bytes = T::SHAPE.head_dim * 16 * 4;
    let offset = match const { QueryShare::of(&T::SHAPE) } {
        QueryShare::Rows => (index * 4 + warp) * row_block_bytes,
        QueryShare::Channels => {
            let share = row_block_bytes / T::SHAPE.warpgroups();
            warp * row_block_bytes + index * share
        }
        QueryShare::Steps => warp * row_block_bytes,
    };
    let tile_bytes = (T::SHAPE.q_rows * T::SHAPE.head_dim * 4) as u64;
    dq + tile as u64 * tile_bytes + offset as u64
}

/// Where the staged dQ of `warp` of consumer `index` lies, and its bytes.
#[inline(always)]
fn staged<T: HopperBackwardTiling>(block: &Block<'_>, index: u32, warp: u32) -> (u32, u32) {
    let bytes = T::QueryGradient::LEN as u32 / 4 * GROUP_BYTES;
    let number = index * WARPGROUP_WARPS + warp;
    (opaque(block.shared) + Kernel::<T>::PLAN.dq + number * bytes, bytes)
}

/// Four values of an accumulator: a warp's are 16 rows by 8 channels.
#[inline(always)]
unsafe fn four<F: Fragment>(values: &F, group: usize) -> [f32; 4] {
    let first = group * 4;
    [values.at(first), values.at(first + 1), values.at(first + 2), values.at(first + 3)]
}

/// Keeps the order of consumer `index`'s additions: waits for the turn of each query tile before
/// they start and passes it on when they are complete, so that the consumer itself never waits for
/// memory. What is staged it has added itself.
///
/// # Safety
/// One warp of the block calls this for each consumer, if the sums are ordered; the barriers are
/// initialised.
#[inline(always)]
pub(super) unsafe fn keep_order<T: HopperBackwardTiling, M: MaskKind>(
    block: &Block<'_>,
    index: u32,
) {
    let barriers = Kernel::<T>::BARRIERS;
    let leads = opaque(thread_idx_x()).is_multiple_of(32);
    let (mut works, mut steps) = (0, 0);
    loop {
        let kv = Turn::after(works, Kernel::<T>::PLAN.kv_stages);
        mbarrier_wait(block.barrier(barriers.k_full + kv.slot), kv.parity);
        let work = block.work::<T>(kv.slot);
        if !work.exists() {
            break;
        }
        let mut left = if block.params.scratch.dq == 0 { 0 } else { work.steps() };
        let mut place = work.first_place::<T>(block.params);
        while left > 0 {
            let skips = match const { QueryShare::of(&T::SHAPE) } {
                QueryShare::Rows | QueryShare::Channels => false,
                QueryShare::Steps => steps % 2 != index,
            };
            if !skips {
                let counter = match M::CLASS {
                    MaskClass::Masked => block.home::<T>(kv.slot).turn::<T>(block, place),
                    _ => place.index() as u64,
                };
                let turn = block.counter(block.params.counters.turns as u64 + counter);
                if leads {
                    let earlier = match M::CLASS {
                        MaskClass::Masked => {
                            block.home::<T>(kv.slot).earlier_additions::<T>(place.tile)
                        }
                        _ => earlier_additions::<T, M>(block, work, place.tile),
                    };
                    while load_acquire_global_u32(turn) < earlier {}
                }
                sync_warp();
                if !Kernel::<T>::KEEPERS_ADD {
                    arrive_named(READY_BARRIER + index, MEETING_THREADS);
                }
                sync_named(ADDED_BARRIER + index, MEETING_THREADS);
                if leads {
                    if Kernel::<T>::KEEPERS_ADD {
                        add_staged::<T>(block, index, place.index());
                    }
                    release_add_global_u32(turn, 1);
                }
                sync_warp();
            } else if Kernel::<T>::KEEPERS_ADD && leads {
                mbarrier_arrive(block.barrier(barriers.drained + index));
            }
            place = work.next_place::<T>(block.params, place);
            steps = opaque(steps + 1);
            left = opaque(left - 1);
        }
        // The work has been read.
        if leads {
            mbarrier_arrive(block.barrier(barriers.kv_empty + kv.slot));
        }
        works = opaque(works + 1);
    }
}

/// Adds what consumer `index` has staged, tells when its place is free, and waits until the sums
/// are there.
#[inline(always)]
unsafe fn add_staged<T: HopperBackwardTiling>(block: &Block<'_>, index: u32, tile: u32) {
    // Other blocks' copy engines added there before.
    fence_proxy_async_global();
    let mut warp = 0;
    while warp < WARPGROUP_WARPS {
        let (shared, bytes) = staged::<T>(block, index, warp);
        add_bytes_f32(sums_of::<T>(block.params.scratch.dq, tile, index, warp), shared, bytes);
        warp = opaque(warp + 1);
    }
    commit_stores();
    wait_stores_read();
    mbarrier_arrive(block.barrier(Kernel::<T>::BARRIERS.drained + index));
    wait_stores();
}

/// Additions to a query tile before this work's: of the key blocks that come before it in the order
/// of works, see [`Work::leave`].
#[inline(always)]
unsafe fn earlier_additions<T: HopperBackwardTiling, M: MaskKind>(
    block: &Block<'_>,
    work: Work,
    tile: u32,
) -> u32 {
    let sharers = QueryShare::of(&T::SHAPE).sharers(&T::SHAPE);
    let key_block = divide(work.first_key(), T::SHAPE.kv_columns);
    let earlier = match M::CLASS {
        MaskClass::Full => key_block,
        _ => {
            let visible = &block.params.visibility;
            let last_row = ((tile + 1) * T::SHAPE.q_rows).min(visible.q_len) - 1;
            (visible.keys_end(last_row) - 1) / T::SHAPE.kv_columns - key_block
        }
    };
    earlier * sharers
}
