//! Rows that must not reach a product, or the sums: other items', and those that nothing sees.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::{CHUNK_ELEMENTS, PanelLayout};
use ferroflash_core::tile::WARPGROUP_ROWS;

use super::super::consumer::Consumer;
use super::super::{CONSUMER_BARRIER, Kernel};
use super::Home;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::store_shared_v4;
use crate::ptx::thread::{lane_id, opaque, sync_named};
use crate::ptx::tma::fence_proxy_async;
use crate::ptx::wgmma::{Accumulator, Product};
use crate::ring::{Turn, WARPGROUP_THREADS};

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Clears the keys of the block that no row of the item sees. Values are of no sum over keys.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when K is there and before they use it.
    #[inline(always)]
    pub(in super::super) unsafe fn clear_hidden_keys(&self) {
        let (home, plan) = (self.home(), Kernel::<T>::PLAN);
        let (start, end) = (home.word(Home::SEEN), home.word(Home::SEEN + 4));
        if end - start < T::SHAPE.kv_columns {
            let k = plan.k + self.kv.slot * plan.k_stage;
            self.clear_outside(&Kernel::<T>::K, k, start as i32, end as i32);
        }
    }

    /// Clears the rows of the tile of `layout` at `place` in shared memory, Q's or dO's at `turn`,
    /// that are not the item's or see no key.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when the tile is there and before they use it.
    #[inline(always)]
    pub(in super::super) unsafe fn clear_other_rows(
        &self,
        layout: &PanelLayout,
        place: u32,
        turn: Turn,
    ) {
        if self.is_shared(turn) {
            let (start, end) = self.own_rows(turn);
            self.clear_outside(layout, place, start, end);
        }
    }

    /// The rows of the tile at `turn` that are the item's and see a key, from the tile's first on:
    /// the first, and one past the last. They may lie outside.
    #[inline(always)]
    unsafe fn own_rows(&self, turn: Turn) -> (i32, i32) {
        let home = self.home();
        let first = home.first_row::<T>(self.told_tile(turn));
        let (start, end) = (home.word(Home::SEEING) as i32, home.word(Home::SEEING + 4) as i32);
        (start - first, end - first)
    }

    /// Clears all rows of a tile but those of `start..end`, for the products of this consumer.
    #[inline(always)]
    unsafe fn clear_outside(&self, layout: &PanelLayout, place: u32, start: i32, end: i32) {
        let shared = opaque(self.block.shared) + place;
        let chunks = layout.columns / CHUNK_ELEMENTS;
        let mut index = self.thread();
        while index < layout.rows * chunks {
            let row = index / chunks;
            if (row as i32) < start || row as i32 >= end {
                store_shared_v4(shared + layout.chunk_offset(row, index % chunks), [0; 4]);
            }
            index = opaque(index + WARPGROUP_THREADS);
        }
        fence_proxy_async();
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
    }

    /// Makes −0 of the dQ of the tile at `turn` in rows that are not the item's: added, it changes
    /// nothing.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when the product has been waited for.
    #[inline(always)]
    pub(in super::super) unsafe fn keep_own_rows(
        &self,
        queries: &mut T::QueryGradient,
        turn: Turn,
    ) {
        queries.settle();
        let (start, end) = self.own_rows(turn);
        let share = match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows => self.index * WARPGROUP_ROWS,
            QueryShare::Channels | QueryShare::Steps => 0,
        };
        let own = (share + self.thread() / 32 * 16 + lane_id() / 4) as i32;
        let mut half = 0;
        while half < 2 {
            let row = own + half as i32 * 8;
            let is_other = row < start || row >= end;
            let mut group = 0;
            while group < T::QueryGradient::LEN / 4 {
                let index = group * 4 + half * 2;
                if is_other {
                    *queries.at_mut(index) = -0.0;
                    *queries.at_mut(index + 1) = -0.0;
                }
                group += 1;
            }
            half += 1;
        }
    }
}
