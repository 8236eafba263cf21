//! Adding a step's dQ to its sums.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare};
use ferroflash_core::fragment::Fragment;

use super::consumer::{Consumer, Place};
use super::{CONSUMER_BARRIER, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{add_global_v4_f32, load_acquire_global_u32, release_add_global_u32};
use crate::ptx::thread::sync_named;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Adds the warpgroup's share of a query tile's dQ, in the order of the key blocks if asked.
    ///
    /// # Safety
    /// All threads of the consumer call this alike; the values have been waited for.
    #[inline(always)]
    pub(super) unsafe fn add_queries(&self, queries: &T::QueryGradient, work: Work, place: Place) {
        let scratch = &self.block.params.scratch;
        if scratch.dq == 0 {
            return;
        }
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let row_block_bytes = T::SHAPE.head_dim * 16 * 4;
        let offset = match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows => (self.index * 4 + warp) * row_block_bytes,
            QueryShare::Channels => {
                let share = row_block_bytes / T::SHAPE.warpgroups();
                warp * row_block_bytes + self.index * share
            }
            QueryShare::Steps => warp * row_block_bytes,
        };
        let tile = (place.head + place.tile) as u64;
        let tile_bytes = (T::SHAPE.q_rows * T::SHAPE.head_dim * 4) as u64;
        let target = scratch.dq + tile * tile_bytes + (offset + lane * 16) as u64;

        let ordered = self.block.params.ordered != 0;
        let turn = scratch.counters + (tile + 1) * 4;
        if ordered {
            let sharers = match const { QueryShare::of(&T::SHAPE) } {
                QueryShare::Steps => 1,
                QueryShare::Rows | QueryShare::Channels => T::SHAPE.warpgroups(),
            };
            if self.thread() == 0 {
                let earlier = work.first_key() / T::SHAPE.kv_columns * sharers;
                while load_acquire_global_u32(turn) < earlier {}
            }
            sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
        }
        let mut group = 0;
        while group < T::QueryGradient::LEN / 4 {
            let values = [
                queries.at(group * 4),
                queries.at(group * 4 + 1),
                queries.at(group * 4 + 2),
                queries.at(group * 4 + 3),
            ];
            add_global_v4_f32(target + group as u64 * 512, values);
            group += 1;
        }
        if ordered {
            sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
            if self.thread() == 0 {
                release_add_global_u32(turn, 1);
            }
        }
    }
}
