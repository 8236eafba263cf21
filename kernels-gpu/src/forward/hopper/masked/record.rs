//! A work with options: found by the producing warp, left in shared memory, read there by all.

use ferroflash_core::items::Item;
use ferroflash_core::params::options::{HeadValues, HopperMaskedParams, HopperScoreOptions};
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS, WORK_RECORD_BYTES};
use ferroflash_core::visibility::Visibility;
use ferroflash_core::walk::{Part, TileWalk, seen_keys, sees_all};

use super::super::{Block, Kernel, Work};
use crate::options::{find_item, read_length};
use crate::ptx::memory::{
    fetch_add_global_u32, load_global_f32, load_shared_u32, load_shared_v4, store_shared_u32,
    store_shared_v4,
};
use crate::ptx::thread::{grid_dim_x, lane_id, opaque};
use crate::ptx::warp::uniform;

/// Where a work's record lies in shared memory; its words are read again each time, since
/// registers are short.
#[derive(Clone, Copy)]
pub(super) struct Record(u32);

impl Record {
    const BATCH: u32 = 0;
    const Q_HEAD: u32 = 1;
    /// The item's first rows, on the row axes of q and o, and of k and v.
    const FIRST_Q: u32 = 2;
    const FIRST_K: u32 = 3;
    /// The work's first row, in the item.
    const FIRST_ROW: u32 = 4;
    /// Rows of the item that are written.
    const Q_ROWS: u32 = 5;
    const Q_LEN: u32 = 6;
    const KV_LEN: u32 = 7;
    const OFFSET: u32 = 8;
    const WALK: u32 = 9;
    /// ALiBi's slope, of powers of two.
    const SLOPE: u32 = 12;
    const SINK: u32 = 13;
    const KV_HEAD: u32 = 14;
    /// Of the records that works are done from, and never copied: parity of the full phase of the
    /// consumer's Q rows, or for the producer of the empty phase.
    const Q_PARITY: u32 = 15;
    /// One part a consumer; of a consuming warp's copy its own.
    const PARTS: u32 = 16;
    const PART_WORDS: u32 = 8;
    const SEEN_KEYS: u32 = Self::PARTS + 6;

    /// Place `number` of the plan: one a V slot, two of the producer's, one a consuming warp.
    #[inline(always)]
    pub(super) fn numbered<T: HopperTiling>(block: &Block<'_>, number: u32) -> Self {
        Self(block.shared + Kernel::<T>::PLAN.works + number * WORK_RECORD_BYTES)
    }

    #[inline(always)]
    unsafe fn word(self, index: u32) -> u32 {
        load_shared_u32(self.0 + index * 4)
    }

    /// Whether there is a work.
    #[inline(always)]
    pub(super) unsafe fn exists(self) -> bool {
        self.word(Self::BATCH) != u32::MAX
    }

    #[inline(always)]
    pub(super) unsafe fn batch(self) -> u32 {
        self.word(Self::BATCH)
    }

    #[inline(always)]
    pub(super) unsafe fn q_head(self) -> u32 {
        self.word(Self::Q_HEAD)
    }

    #[inline(always)]
    pub(super) unsafe fn kv_head(self) -> u32 {
        self.word(Self::KV_HEAD)
    }

    #[inline(always)]
    pub(super) unsafe fn first_q(self) -> u32 {
        self.word(Self::FIRST_Q)
    }

    #[inline(always)]
    pub(super) unsafe fn first_k(self) -> u32 {
        self.word(Self::FIRST_K)
    }

    #[inline(always)]
    pub(super) unsafe fn q_rows(self) -> u32 {
        self.word(Self::Q_ROWS)
    }

    #[inline(always)]
    pub(super) unsafe fn q_len(self) -> u32 {
        self.word(Self::Q_LEN)
    }

    /// First of consumer `index`'s rows, in the item.
    #[inline(always)]
    pub(super) unsafe fn first_row(self, index: u32) -> u32 {
        self.word(Self::FIRST_ROW) + index * WARPGROUP_ROWS
    }

    #[inline(always)]
    pub(super) unsafe fn slope(self) -> f32 {
        f32::from_bits(self.word(Self::SLOPE))
    }

    #[inline(always)]
    pub(super) unsafe fn sink(self) -> f32 {
        f32::from_bits(self.word(Self::SINK))
    }

    #[inline(always)]
    pub(super) unsafe fn q_parity(self) -> u32 {
        self.word(Self::Q_PARITY)
    }

    #[inline(always)]
    pub(super) unsafe fn set_q_parity(self, parity: u32) {
        store_shared_u32(self.0 + Self::Q_PARITY * 4, parity);
    }

    #[inline(always)]
    pub(super) unsafe fn walk(self) -> TileWalk {
        TileWalk {
            first: self.word(Self::WALK),
            count: self.word(Self::WALK + 1),
            nearest: self.word(Self::WALK + 2),
        }
    }

    /// Steps of the walk.
    #[inline(always)]
    pub(super) unsafe fn steps(self) -> u32 {
        self.word(Self::WALK + 1)
    }

    /// What the item's rows see.
    #[inline(always)]
    pub(super) unsafe fn visible(self, params: &HopperMaskedParams) -> Visibility {
        Visibility {
            q_len: self.q_len(),
            kv_len: self.word(Self::KV_LEN),
            offset: self.word(Self::OFFSET) as i32,
            // Opaque, so that what follows from them is not kept in registers.
            left: opaque(params.items.left as u32) as i32,
            right: opaque(params.items.right as u32) as i32,
        }
    }

    /// What the consumer's rows see, of a consuming warp's copy.
    #[inline(always)]
    pub(super) unsafe fn part(self) -> Part {
        let [before, seen, full, full_end] = load_shared_v4(self.0 + Self::PARTS * 4);
        let [straight, straight_from, _, _] = load_shared_v4(self.0 + Self::PARTS * 4 + 16);
        let (full, straight) = ((full, full_end), (straight, straight_from));
        Part { before, seen, full, straight }
    }

    /// The keys that some row of the item sees, of a consuming warp's copy.
    #[inline(always)]
    pub(super) unsafe fn seen_keys(self) -> (u32, u32) {
        (self.word(Self::SEEN_KEYS), self.word(Self::SEEN_KEYS + 1))
    }

    /// The word of a producer's record that `lane` copies for consumer `index`.
    #[inline(always)]
    pub(super) unsafe fn share(self, index: u32, lane: u32) -> u32 {
        let part = if lane < Self::PARTS { 0 } else { index * Self::PART_WORDS };
        self.word(lane % (Self::PARTS + Self::PART_WORDS) + part)
    }

    /// Copies a record of the producer's; the lanes of a warp do it together, each its word.
    #[inline(always)]
    pub(super) unsafe fn take(self, word: u32, lane: u32) {
        if lane < Self::PARTS + Self::PART_WORDS && lane != Self::Q_PARITY {
            store_shared_u32(self.0 + lane * 4, word);
        }
    }

    /// Copies the record to `target`, but for the parity. The lanes of a warp do it together.
    #[inline(always)]
    pub(super) unsafe fn copy_to(self, target: Self, lane: u32) {
        let mut index = lane;
        while index < WORK_RECORD_BYTES / 4 {
            if index != Self::Q_PARITY {
                store_shared_u32(target.0 + index * 4, self.word(index));
            }
            index += 32;
        }
    }

    /// For the plain kernel's copies.
    #[inline(always)]
    pub(super) unsafe fn queries(self) -> Work {
        let first_row = self.first_q() + self.word(Self::FIRST_ROW);
        Work { batch: self.batch(), q_head: self.q_head(), first_row, tiles: 0 }
    }

    /// Finds work `index` of the call, or the next one drawn where that has no rows.
    ///
    /// # Safety
    /// All lanes of the producing warp call this alike.
    #[inline(always)]
    pub(super) unsafe fn find<T: HopperTiling>(self, params: &HopperMaskedParams, index: u32) {
        let (items, forward) = (&params.items, &params.forward);
        let rows = T::SHAPE.q_rows;
        let mut index = index;
        while (index as u64) < forward.schedule.blocks() {
            let work = forward.schedule.work(index);
            let (number, q_head, q_block) = if is_given(items.cu_q) {
                let first_slot = |number| items.first_slot(number, rows, read_length);
                let number = find_item(items, work.q_block, lane_id(), first_slot);
                (number, work.batch_head, work.q_block.wrapping_sub(first_slot(number)))
            } else {
                let number = divide(work.batch_head, forward.q_heads);
                (number, work.batch_head - number * forward.q_heads, work.q_block)
            };
            let mut item = items.item(number, read_length);
            item.visible.left = opaque(item.visible.left as u32) as i32;
            item.visible.right = opaque(item.visible.right as u32) as i32;
            if q_block < item.q_rows.div_ceil(rows) {
                self.store::<T>(params, number, &item, q_head, q_block * rows);
                return;
            }
            index = draw(params);
        }
        if lane_id() == 0 {
            store_shared_v4(self.0, [u32::MAX, 0, 0, 0]);
            store_shared_v4(self.0 + Self::OFFSET * 4, [0; 4]);
        }
    }

    /// Lane i stores what consumer i sees, lane 0 the rest.
    #[inline(always)]
    unsafe fn store<T: HopperTiling>(
        self,
        params: &HopperMaskedParams,
        number: u32,
        item: &Item,
        q_head: u32,
        first_row: u32,
    ) {
        let (options, visible, keys) = (&params.options, &item.visible, T::SHAPE.kv_columns);
        if lane_id() == 0 {
            store_shared_v4(self.0, [item.batch, q_head, item.first_q, item.first_k]);
            store_shared_v4(
                self.0 + Self::FIRST_ROW * 4,
                [first_row, item.q_rows, visible.q_len, visible.kv_len],
            );
            store_shared_u32(self.0 + Self::KV_HEAD * 4, divide(q_head, params.forward.group));
        }
        let rows = first_row..(first_row + T::SHAPE.q_rows).min(visible.q_len);
        let mut walk = TileWalk::of(visible, &rows, keys);
        // Where every row sees every key, those with the shortest distances come first.
        if is_given(options.alibi.address) && sees_all(visible) {
            let last_row = rows.end as i32 - 1;
            walk = walk.from_key(last_row + visible.kv_len as i32 - visible.q_len as i32, keys);
        }
        if lane_id() == 0 {
            store_shared_v4(
                self.0 + Self::OFFSET * 4,
                [visible.offset as u32, walk.first, walk.count, walk.nearest],
            );
        }
        let lane = lane_id();
        if lane < T::SHAPE.warpgroups() {
            let first = first_row + lane * WARPGROUP_ROWS;
            let own = first..(first + WARPGROUP_ROWS).min(visible.q_len);
            let part = walk.part(visible, &own, keys);
            let target = self.0 + (Self::PARTS + lane * Self::PART_WORDS) * 4;
            store_shared_v4(target, [part.before, part.seen, part.full.0, part.full.1]);
            let (start, end) = seen_keys(visible, &(0..visible.q_len));
            store_shared_v4(target + 16, [part.straight.0, part.straight.1, start, end]);
        }
        // Rows past the last packed item see no key, and have neither slope nor sink.
        if lane_id() == 0 {
            let (mut slope, mut sink) = (0.0, f32::NEG_INFINITY);
            if number < params.items.count {
                if is_given(options.alibi.address) {
                    slope = value(&options.alibi, number, q_head) * core::f32::consts::LOG2_E;
                }
                if is_given(options.sink.address) {
                    sink = value(&options.sink, number, q_head);
                }
            }
            store_shared_u32(self.0 + Self::SLOPE * 4, slope.to_bits());
            store_shared_u32(self.0 + Self::SINK * 4, sink.to_bits());
        }
    }
}

/// Whether an option has an address. Asked anew each time: kept, the answers would take registers.
#[inline(always)]
pub(super) fn is_given(address: u64) -> bool {
    opaque(address as u32) | opaque((address >> 32) as u32) != 0
}

#[inline(always)]
unsafe fn value(values: &HeadValues, item: u32, q_head: u32) -> f32 {
    load_global_f32(values.address.wrapping_add((values.offset(item, q_head) * 4) as u64))
}

/// Whether there is a softcap; as [`is_given`].
#[inline(always)]
pub(super) fn has_softcap(options: &HopperScoreOptions) -> bool {
    opaque(options.softcap_scale.to_bits()) != 0
}

/// The number of the next work.
///
/// # Safety
/// All lanes of the producing warp call this alike.
#[inline(always)]
pub(super) unsafe fn draw(params: &HopperMaskedParams) -> u32 {
    let mut index = 0;
    if lane_id() == 0 {
        index = fetch_add_global_u32(params.forward.counter, 1);
    }
    uniform(index).wrapping_add(grid_dim_x())
}
