//! Which block owns which keys.
//!
//! The grid is linear. Consecutive blocks walk the heads of one *section*, a set of KV heads, then
//! move to the next key block of that section. Key blocks are walked from the first to the last:
//! under a causal mask the first keys are seen by most rows, so that the longest work comes first
//! (M4.4 §0x04I). Ordered sums of dQ need one order of each head's key blocks, and that a block
//! waits for lower indices only: this one, or, in the causal hopper kernels, the key blocks
//! numbered from the last.
//!
//! Where works are few and a KV head has several query heads, these are dealt out in equal *parts*:
//! blocks of the same keys, whose sums of dK and dV meet in memory.

use crate::axes::{Family, MaskClass};
use crate::schedule::{ForwardSchedule, divide};
use crate::shape::Shape;
use crate::table::KernelSpec;
use crate::tile::WARPGROUP_ROWS;

/// One block of keys of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardWork {
    /// Index of the key block: keys `kv_block · kv_columns ..`.
    pub kv_block: u32,
    /// Batch item and KV head, `batch · kv_heads + kv_head`.
    pub batch_head: u32,
    /// Which part of the KV head's query heads.
    pub part: u32,
}

/// Block index ↔ key block, for a whole backward call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardSchedule {
    /// Key blocks of one head.
    pub kv_blocks: u32,
    /// Batch items × KV heads.
    pub batch_heads: u32,
    /// Parts that the query heads of a KV head are dealt out in; at least 1.
    pub parts: u32,
    /// Parts (of `batch_heads · parts`) walked together; at least 1.
    pub section: u32,
}

impl BackwardSchedule {
    /// Blocks of work; the caller checks it against the device's grid limit.
    pub const fn blocks(&self) -> u64 {
        self.kv_blocks as u64 * (self.batch_heads * self.parts) as u64
    }

    /// Sections of the walk.
    pub const fn sections(&self) -> u32 {
        (self.batch_heads * self.parts).div_ceil(self.section)
    }

    /// The section of block `index < self.blocks()`.
    #[inline(always)]
    pub const fn section_of(&self, index: u32) -> u32 {
        divide(index, self.section * self.kv_blocks)
    }

    /// The work of block `index < self.blocks()`.
    #[inline(always)]
    pub const fn work(&self, index: u32) -> BackwardWork {
        let section = self.section_of(index);
        let within = index - section * self.section * self.kv_blocks;
        let first_head = section * self.section;
        let left = self.batch_heads * self.parts - first_head;
        let heads = if left < self.section { left } else { self.section };
        let kv_block = divide(within, heads);
        let head_part = first_head + within - kv_block * heads;
        let batch_head = divide(head_part, self.parts);
        BackwardWork { kv_block, batch_head, part: head_part - batch_head * self.parts }
    }

    /// Heads walked together: at most [`Self::MOST_HEADS`], and in every section about as many,
    /// since a small last one would leave most of the device idle.
    pub const fn section_for(batch_heads: u32) -> u32 {
        let sections = batch_heads.div_ceil(Self::MOST_HEADS);
        if sections == 0 { 1 } else { batch_heads.div_ceil(sections) }
    }

    /// The order in which the blocks of `spec` take the key blocks of a call.
    pub const fn of(shape: &Shape, spec: &KernelSpec) -> Self {
        let batch_heads = shape.batch.saturating_mul(shape.kv_heads) as u32;
        let kv_blocks = spec.tile.kv_blocks(shape.kv_len) as u32;
        let (parts, section) = match spec.family {
            Family::Portable => (1, Self::section_for(batch_heads)),
            Family::Hopper => {
                let works = kv_blocks as u64 * batch_heads as u64;
                let parts = Self::parts_for(works, shape.group() as u32);
                let rows = (shape.q_len as u64).saturating_mul(shape.group() as u64);
                let rows = rows / parts as u64;
                (parts, Self::shared_section(batch_heads * parts, kv_blocks, rows, spec))
            }
        };
        Self { kv_blocks, batch_heads, parts, section }
    }

    /// Heads, or parts of a group, walked together by a hopper kernel's blocks, of `rows` query
    /// rows each.
    pub const fn shared_section(
        batch_heads: u32,
        kv_blocks: u32,
        rows: u64,
        spec: &KernelSpec,
    ) -> u32 {
        // Of a row: Q and dO in 16 bits, sums of dQ in 32.
        let row_bytes = (6 * spec.tile.head_dim + 2 * spec.tile.value_dim) as u64;
        let uneven = matches!(spec.mask, MaskClass::Causal);
        let bytes = rows.saturating_mul(row_bytes);
        // Where warpgroups share 64 keys, twice as many works read each row. Measured on an H200,
        // d = 256, full: 8 MB for 16 are 1 to 4 % faster at 1024 to 4096 rows.
        let is_shared = spec.tile.kv_columns == WARPGROUP_ROWS && !uneven;
        let bytes = if is_shared { bytes.saturating_mul(2) } else { bytes };
        Self::shared_section_for(batch_heads, kv_blocks, bytes, uneven)
    }

    /// Parts that a `group` of query heads is dealt out in, equal ones, where there are so many
    /// `works` of whole groups: as many as find an idle multiprocessor, and if works are few
    /// nevertheless two, which balance.
    const fn parts_for(works: u64, group: u32) -> u32 {
        let mut parts = 1;
        while group.is_multiple_of(parts * 2) && group > 0 {
            let works = works * parts as u64;
            let idle = works * 2 <= Self::MULTIPROCESSORS;
            if !(idle || parts == 1 && works < Self::MANY_WORKS) {
                break;
            }
            parts *= 2;
        }
        parts
    }

    /// Heads walked together by blocks that share works among themselves: as many as fit in
    /// [`Self::SECTION_BYTES`] of Q, dO and dQ sums, `bytes_per_head` each; of `uneven` works so
    /// many that the short ones fill up the end.
    const fn shared_section_for(
        batch_heads: u32,
        kv_blocks: u32,
        bytes_per_head: u64,
        uneven: bool,
    ) -> u32 {
        let fitting =
            ForwardSchedule::section_for(batch_heads, bytes_per_head, Self::SECTION_BYTES);
        let enough = match Self::BALANCED_WORKS.checked_div(kv_blocks) {
            Some(heads) if uneven => heads,
            _ => 0,
        };
        let least = if enough < batch_heads { enough } else { batch_heads };
        if fitting < least { least } else { fitting }
    }

    /// Bytes of Q, dO and dQ sums that the heads of a shared section should hold at most. Measured
    /// on an H200: 32 heads of 2048 rows at d = 128, 64 MB, take 14 % longer than 8 of them.
    pub const SECTION_BYTES: u64 = 16 << 20;

    /// Works of a shared section that balance uneven ones, two for each of an H200's
    /// multiprocessors: 8 query heads a KV head, 4096 rows, run 1.4 times as fast as with 96.
    pub const BALANCED_WORKS: u32 = 264;

    /// Multiprocessors of an H200.
    pub const MULTIPROCESSORS: u64 = 132;

    /// Works that whole groups balance as well as halves. Measured on an H200, 8 query heads a KV
    /// head, causal: 128 works take 1.68 times as long as their halves, 256 1.06 times, 512 as
    /// long; quarters of 128 take 1.10 times as long as halves, since each waits for the one
    /// before.
    pub const MANY_WORKS: u64 = 512;

    /// Most heads of a section. Measured on an H200 from 1024 to 16384 rows, causal: one head takes
    /// 3 to 8 % longer, 32 to 64 are equal, and more gain nothing.
    pub const MOST_HEADS: u32 = 32;
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::visibility::{Align, Visibility};
    use proptest::prelude::*;
    use std::vec;

    #[test]
    fn shared_sections_fit_the_cache_and_balance_uneven_works() {
        let section = BackwardSchedule::shared_section_for;
        let megabyte = 1 << 20;
        assert_eq!(section(512, 4, megabyte / 2, false), 32);
        assert_eq!(section(16, 128, 16 * megabyte, false), 1);
        // 32 key blocks a head: eight heads, all there are, rather than one.
        assert_eq!(section(8, 32, 32 * megabyte, true), 8);
        assert_eq!(section(8, 256, 256 * megabyte, true), 1);
        assert_eq!(section(0, 0, 0, true), 1);
    }

    #[test]
    fn few_works_are_dealt_out_in_equal_parts() {
        let parts = BackwardSchedule::parts_for;
        assert_eq!((parts(16, 8), parts(64, 8), parts(128, 8)), (8, 2, 2));
        assert_eq!((parts(511, 8), parts(512, 8)), (2, 1));
        assert_eq!((parts(1, 12), parts(1, 1), parts(128, 3)), (4, 1, 1));
        assert_eq!((parts(0, 0), parts(0, 8)), (1, 8));
    }

    proptest! {
        #[test]
        fn every_key_block_has_one_owner_and_heads_rise(
            kv_blocks in 1..20_u32, batch_heads in 1..30_u32, parts in 1..5_u32,
            section in 1..40_u32,
        ) {
            let schedule = BackwardSchedule { kv_blocks, batch_heads, parts, section };
            // Of each head and part, the key block that comes next: ordered sums wait on lower
            // indices only. Of each key block, the part that comes next: so do sums of parts.
            let mut next = vec![0; (batch_heads * parts) as usize];
            let mut next_part = vec![0; (batch_heads * kv_blocks) as usize];
            for index in 0..schedule.blocks() as u32 {
                let work = schedule.work(index);
                let head_part = (work.batch_head * parts + work.part) as usize;
                prop_assert_eq!(work.kv_block, next[head_part]);
                next[head_part] += 1;
                let keys = (work.batch_head * kv_blocks + work.kv_block) as usize;
                prop_assert_eq!(work.part, next_part[keys]);
                next_part[keys] += 1;
            }
            prop_assert!(next.iter().all(|count| *count == kv_blocks));
        }

        #[test]
        fn the_longest_work_comes_first(
            q_len in 1..200_u32, kv_len in 1..200_u32, columns in 1..40_u32, right in 0..9_i32,
            bottom in any::<bool>(),
        ) {
            let align = if bottom { Align::BottomRight } else { Align::TopLeft };
            let causal = Visibility { right, ..Visibility::causal(q_len, kv_len, align) };
            let rows = |block: u32| {
                let rows = causal.rows_of_any(&(block * columns..(block + 1) * columns));
                rows.end - rows.start
            };
            for block in 1..kv_len.div_ceil(columns) {
                prop_assert!(rows(block - 1) >= rows(block));
            }
        }

        /// The key blocks that add to a query tile follow one another without a gap, from the one
        /// that holds the first key any of its rows sees, which without a left side is the first
        /// of all: a block's turn is its number from there.
        #[test]
        fn a_query_tiles_key_blocks_follow_one_another(
            q_len in 1..100_u32, kv_len in 1..100_u32, rows in 1..30_u32, columns in 1..30_u32,
            right in prop_oneof![Just(crate::visibility::UNBOUNDED), 0..9_i32],
            left in prop_oneof![Just(crate::visibility::UNBOUNDED), 0..40_i32],
            bottom in any::<bool>(),
        ) {
            let align = if bottom { Align::BottomRight } else { Align::TopLeft };
            let visible = Visibility { left, right, ..Visibility::causal(q_len, kv_len, align) };
            for tile in 0..q_len.div_ceil(rows) {
                let own = tile * rows..((tile + 1) * rows).min(q_len);
                let mut turn = visible.keys_of_any(&own).start / columns;
                prop_assert!(left != crate::visibility::UNBOUNDED || turn == 0);
                for block in 0..kv_len.div_ceil(columns) {
                    let seen = visible.rows_of_any(&(block * columns..(block + 1) * columns));
                    if seen.start < (tile + 1) * rows && tile * rows < seen.end {
                        prop_assert_eq!(block, turn);
                        turn += 1;
                    }
                }
            }
        }
    }
}
