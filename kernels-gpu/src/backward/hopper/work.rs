//! A work: which keys, which query tiles, in which order.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::HopperBackwardTiling;
use ferroflash_core::backward::params::HopperBackwardParams;
use ferroflash_core::backward::schedule::BackwardSchedule;
use ferroflash_core::schedule::divide;
use ferroflash_core::visibility::Visibility;

use super::{Block, NO_SECTION};
use crate::ptx::memory::{
    load_shared_u32, load_shared_v4, store_relaxed_shared_u32, store_shared_u32, store_shared_v4,
};
use crate::ptx::thread::opaque;

/// One block of keys of one KV head. It waits in shared memory, where each value is read again when
/// it is needed: registers are short.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) shared: u32,
}

impl Work {
    /// Leaves work `index` of the call; whether there is one.
    ///
    /// Ordered sums under a causal mask take key blocks from the last, shortest one on: it is also
    /// the first to come to each query tile, so that no block waits long for another.
    #[inline(always)]
    pub(super) unsafe fn leave<T: HopperBackwardTiling, M: MaskKind>(
        self,
        block: &Block<'_>,
        index: u32,
    ) -> bool {
        let params = block.params;
        // Opaque, so that nothing is computed ahead and kept.
        let schedule = BackwardSchedule {
            kv_blocks: opaque(params.schedule.kv_blocks),
            batch_heads: opaque(params.schedule.batch_heads),
            parts: opaque(params.schedule.parts),
            section: opaque(params.schedule.section),
        };
        if index as u64 >= schedule.blocks() {
            store_relaxed_shared_u32(block.section::<T>(), NO_SECTION);
            store_shared_v4(self.shared, [u32::MAX, 0, 0, 0]);
            return false;
        }
        let section = schedule.section_of(index);
        store_relaxed_shared_u32(block.section::<T>(), section);
        let work = schedule.work(index);
        let kv_heads = opaque(params.kv_heads);
        let batch = divide(work.batch_head, kv_heads);
        let head_part = (work.batch_head - batch * kv_heads) * schedule.parts + work.part;
        let ordered = opaque(params.ordered) != 0;
        if let MaskClass::Masked = M::CLASS {
            let kv_block = match ordered {
                true => schedule.kv_blocks - 1 - work.kv_block,
                false => work.kv_block,
            };
            let record = batch * schedule.kv_blocks + kv_block;
            self.leave_record::<T>(block, [batch, head_part, record, section]);
            return true;
        }
        let kv_block = match M::CLASS {
            MaskClass::Causal if ordered => schedule.kv_blocks - 1 - work.kv_block,
            _ => work.kv_block,
        };
        let first_key = kv_block * T::SHAPE.kv_columns;
        store_shared_v4(self.shared, [batch, head_part, first_key, section]);

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
        let steps = tiles * params.work_heads;
        store_shared_v4(self.shared + 16, [first_tile, tiles_end, steps, start_tile]);
        true
    }

    /// Leaves the same work at `to`.
    #[inline(always)]
    pub(super) unsafe fn copy(self, to: Self) {
        store_shared_v4(to.shared, load_shared_v4(self.shared));
        store_shared_v4(to.shared + 16, load_shared_v4(self.shared + 16));
    }

    #[inline(always)]
    pub(super) unsafe fn exists(self) -> bool {
        self.batch() != u32::MAX
    }

    #[inline(always)]
    pub(super) unsafe fn batch(self) -> u32 {
        load_shared_u32(self.shared)
    }

    /// The number of the part among the item's: `kv_head · parts + part`.
    #[inline(always)]
    pub(super) unsafe fn head_part(self) -> u32 {
        load_shared_u32(self.shared + 4)
    }

    #[inline(always)]
    pub(super) unsafe fn kv_head(self, params: &HopperBackwardParams) -> u32 {
        divide(self.head_part(), params.schedule.parts)
    }

    #[inline(always)]
    pub(super) unsafe fn first_key(self) -> u32 {
        load_shared_u32(self.shared + 8)
    }

    /// The section that the work is of; not the producer's own, once it copies queries.
    #[inline(always)]
    pub(super) unsafe fn section(self) -> u32 {
        load_shared_u32(self.shared + 12)
    }

    /// Notes that there has been no work.
    #[inline(always)]
    pub(super) unsafe fn set_no_section(self) {
        store_shared_u32(self.shared + 12, NO_SECTION);
    }

    /// The producer's query head.
    #[inline(always)]
    pub(super) unsafe fn q_head(self) -> u32 {
        load_shared_u32(self.shared + 12)
    }

    #[inline(always)]
    pub(super) unsafe fn set_q_head(self, q_head: u32) {
        store_shared_u32(self.shared + 12, q_head);
    }

    /// First query tile of a head that sees any of the keys.
    #[inline(always)]
    pub(super) unsafe fn first_tile(self) -> u32 {
        load_shared_u32(self.shared + 16)
    }

    /// One past the last such tile.
    #[inline(always)]
    pub(super) unsafe fn tiles_end(self) -> u32 {
        load_shared_u32(self.shared + 20)
    }

    /// The tile that each head's walk starts with.
    #[inline(always)]
    pub(super) unsafe fn start_tile(self) -> u32 {
        load_shared_u32(self.shared + 28)
    }

    /// The tile after `tile`: from the last the walk goes on with the first.
    #[inline(always)]
    pub(super) unsafe fn next_tile(self, tile: u32) -> u32 {
        if tile + 1 == self.tiles_end() { self.first_tile() } else { tile + 1 }
    }

    /// Where the work's first step is.
    #[inline(always)]
    pub(super) unsafe fn first_place<T: HopperBackwardTiling>(
        self,
        params: &HopperBackwardParams,
    ) -> Place {
        let head = self.batch() * params.q_heads + self.head_part() * params.work_heads;
        Place { tile: self.start_tile(), head: head * head_tiles::<T>(params) }
    }

    /// Where the step after the one at `place` is.
    #[inline(always)]
    pub(super) unsafe fn next_place<T: HopperBackwardTiling>(
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
    pub(super) unsafe fn steps(self) -> u32 {
        load_shared_u32(self.shared + 24)
    }
}

/// The query tile of a step.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Its number among the tiles of its head.
    pub(super) tile: u32,
    /// The number of its head's first tile among the tiles of all heads.
    pub(super) head: u32,
}

impl Place {
    /// The tile's number among those of all heads.
    #[inline(always)]
    pub(super) fn index(self) -> u32 {
        self.head + self.tile
    }
}

/// Query tiles of a head.
#[inline(always)]
pub(super) fn head_tiles<T: HopperBackwardTiling>(params: &HopperBackwardParams) -> u32 {
    params.scratch.padded_rows / T::SHAPE.q_rows
}
