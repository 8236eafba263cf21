//! Which rows of which item a block owns: found once, kept in shared memory.
//!
//! Two items may be one token long and another thirty thousand, and offsets may lie on the device
//! alone: a block finds its item itself (`ferroflash_core::items`). Every warp searches, so that
//! no barrier is needed; what a tile needs to know is then read from shared memory again and again,
//! since registers are what these kernels lack most.

use ferroflash_core::items::Items;
use ferroflash_core::params::options::PortableMaskedParams;
use ferroflash_core::schedule::divide;
use ferroflash_core::visibility::Visibility;

use crate::options::{find_item, read_length};
use crate::ptx::memory::{load_global_u32, load_shared_u32, load_shared_v4, store_shared_v4};
use crate::ptx::thread::block_idx_x;

/// A block's rows, and what their scores depend on.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Number of the item.
    pub(super) item: u32,
    /// Its coordinate on the batch axis.
    pub(super) batch: u32,
    /// Query head.
    pub(super) q_head: u32,
    /// The item's first row, on the row axis of q and o.
    pub(super) first_q: u32,
    /// The block's first row, in the item.
    pub(super) first_row: u32,
    /// Rows of the item that are written.
    pub(super) q_rows: u32,
    /// Query rows used of the item.
    pub(super) q_len: u32,
    /// Keys used of the item.
    pub(super) kv_len: u32,
    /// The key that the item's row 0 is aligned with.
    pub(super) offset: i32,
    /// First key of the block's first tile, in the item.
    pub(super) first_key: u32,
    /// The head's ALiBi slope.
    pub(super) slope: f32,
}

impl Place {
    /// The place of this block and its item's first key, on the row axis of k and v; `None` for a
    /// block without rows. [`Self::first_key`] is left at 0.
    #[inline(always)]
    pub(super) unsafe fn find(
        params: &PortableMaskedParams,
        q_rows: u32,
        lane: u32,
    ) -> Option<(Self, u32)> {
        let items = &params.items;
        let work = params.forward.schedule.work(block_idx_x());
        let (index, q_head, q_block) = if items.is_packed() {
            let first_slot = |index| items.first_slot(index, q_rows, read_length);
            let index = find_item(items, work.q_block, lane, first_slot);
            (index, work.batch_head, work.q_block.wrapping_sub(first_slot(index)))
        } else {
            let index = divide(work.batch_head, params.forward.q_heads);
            (index, work.batch_head - index * params.forward.q_heads, work.q_block)
        };
        let item = items.item(index, read_length);
        if q_block >= item.q_rows.div_ceil(q_rows) {
            return None;
        }
        let slopes = &params.options.alibi;
        // Rows past the last packed item have no slope, and need none: they see no key.
        let slope = if slopes.address == 0 || index >= items.count {
            0.0
        } else {
            let offset = slopes.offset(index, q_head) * 4;
            f32::from_bits(load_global_u32(slopes.address.wrapping_add(offset as u64)))
        };
        let place = Self {
            item: index,
            batch: item.batch,
            q_head,
            first_q: item.first_q,
            first_row: q_block * q_rows,
            q_rows: item.q_rows,
            q_len: item.visible.q_len,
            kv_len: item.visible.kv_len,
            offset: item.visible.offset,
            first_key: 0,
            slope,
        };
        Some((place, item.first_k))
    }

    /// What the item's rows see.
    #[inline(always)]
    pub(super) fn visible(&self, items: &Items) -> Visibility {
        let Self { q_len, kv_len, offset, .. } = *self;
        Visibility { q_len, kv_len, offset, left: items.left, right: items.right }
    }

    /// Puts it into shared memory.
    #[inline(always)]
    pub(super) unsafe fn store(&self, shared: u32) {
        store_shared_v4(shared, [self.item, self.batch, self.q_head, self.first_q]);
        store_shared_v4(shared + 16, [self.first_row, self.q_rows, self.q_len, self.kv_len]);
        store_shared_v4(shared + 32, [self.offset as u32, self.first_key, self.slope.to_bits(), 0]);
    }

    /// The block's first row and the first key of its first tile, without the registers that all of
    /// it takes.
    #[inline(always)]
    pub(super) unsafe fn load_first(shared: u32) -> (u32, u32) {
        (load_shared_u32(shared + 16), load_shared_u32(shared + 36))
    }

    /// Reads it back.
    #[inline(always)]
    pub(super) unsafe fn load(shared: u32) -> Self {
        let [item, batch, q_head, first_q] = load_shared_v4(shared);
        let [first_row, q_rows, q_len, kv_len] = load_shared_v4(shared + 16);
        let [offset, first_key, slope, _] = load_shared_v4(shared + 32);
        Self {
            item,
            batch,
            q_head,
            first_q,
            first_row,
            q_rows,
            q_len,
            kv_len,
            offset: offset as i32,
            first_key,
            slope: f32::from_bits(slope),
        }
    }
}
