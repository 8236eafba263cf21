//! Where the items of a call lie, and which item a block's query rows belong to.
//!
//! Lengths and offsets are read where the kernel runs: nothing waits for them on the host, and
//! nothing is as large as items × longest. What is read is clamped to the tensors and to the stated
//! maxima, so that malformed contents give wrong numbers and never an access outside.
//!
//! **Packed items and their blocks.** Query blocks of `q_rows` rows are numbered by *slots*: those
//! of item i begin at slot `cu_q[i] / q_rows + i`, rounded down. An item of n rows takes
//! `⌈n / q_rows⌉` slots, and since `⌊a⌋ + ⌈b⌉ ≤ ⌊a + b⌋ + 1` the next item's first slot lies past
//! them: no two blocks share rows. Tokens / q_rows + items + 1 slots are enough, whatever the
//! lengths; a slot between two items has nothing to do. The last one more is for rows past
//! `cu_q[items]`, which belong to no item, see no key, and are written like any other. Key blocks,
//! which backward kernels own, are numbered alike by `cu_k`.

use crate::visibility::{Align, Visibility};

/// The items of a call, as kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Items {
    /// i32 `[count + 1]`: cumulative query offsets; 0 where items are not packed.
    pub cu_q: u64,
    /// i32 `[count + 1]`: cumulative key offsets, of packed items.
    pub cu_k: u64,
    /// i32 `[count]`: rows used of each item; 0 where all are.
    pub used_q: u64,
    /// i32 `[count]`: keys used of each item; 0 where all are.
    pub used_k: u64,
    /// Items.
    pub count: u32,
    /// Rows of the row axis of q and o.
    pub q_tokens: u32,
    /// Rows of the row axis of k and v.
    pub kv_tokens: u32,
    /// Most query rows of an item; its rows where items are not packed.
    pub q_len: u32,
    /// Most keys of an item; its keys where neither packing nor a length says fewer.
    pub kv_len: u32,
    /// Keys visible before the diagonal; at most `q_len + kv_len`, which stands for all.
    pub left: i32,
    /// Keys visible after the diagonal, likewise.
    pub right: i32,
    /// 1 where the diagonal ends in the lower right corner, 0 where it begins in the upper left.
    pub bottom_right: u32,
}

/// One item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its coordinate on the batch axis of q, k, v and o.
    pub batch: u32,
    /// Its first row, on the row axis of q and o.
    pub first_q: u32,
    /// Its rows of q and o, used or not: all are written.
    pub q_rows: u32,
    /// Its first key, on the row axis of k and v.
    pub first_k: u32,
    /// Its rows of k and v, used or not: all of their gradients are written.
    pub kv_rows: u32,
    /// What its rows see; holds the lengths used.
    pub visible: Visibility,
}

impl Items {
    /// Whether items follow one another on the row axis.
    #[inline(always)]
    pub const fn is_packed(&self) -> bool {
        self.cu_q != 0
    }

    /// Slots of the query blocks of all packed items.
    pub const fn slots(&self, q_rows: u32) -> u64 {
        self.q_tokens as u64 / q_rows as u64 + self.count as u64 + 1
    }

    /// Slots of the key blocks of all packed items.
    pub const fn kv_slots(&self, kv_columns: u32) -> u64 {
        self.kv_tokens as u64 / kv_columns as u64 + self.count as u64 + 1
    }

    /// First slot of the query blocks of packed item `index`, up to `count`. `read` gives value `i`
    /// of the i32 array at an address.
    #[inline(always)]
    pub fn first_slot(&self, index: u32, q_rows: u32, read: impl Fn(u64, u32) -> i32) -> u32 {
        clamp(read(self.cu_q, index), 0, self.q_tokens) / q_rows + index
    }

    /// First slot of the key blocks of packed item `index`, as [`Self::first_slot`].
    #[inline(always)]
    pub fn first_kv_slot(
        &self,
        index: u32,
        kv_columns: u32,
        read: impl Fn(u64, u32) -> i32,
    ) -> u32 {
        clamp(read(self.cu_k, index), 0, self.kv_tokens) / kv_columns + index
    }

    /// Item `index`. Number `count` is the rows past the last packed item, which see nothing.
    #[inline(always)]
    pub fn item(&self, index: u32, read: impl Fn(u64, u32) -> i32) -> Item {
        let used = |array: u64, length: u32| {
            if array == 0 { length } else { clamp(read(array, index), 0, length) }
        };
        if !self.is_packed() {
            let kv_len = used(self.used_k, self.kv_len);
            let visible = self.visible(self.q_len, kv_len);
            let (q_rows, kv_rows) = (self.q_len, self.kv_len);
            return Item { batch: index, first_q: 0, q_rows, first_k: 0, kv_rows, visible };
        }
        let first_q = clamp(read(self.cu_q, index), 0, self.q_tokens);
        let first_k = clamp(read(self.cu_k, index), 0, self.kv_tokens);
        if index >= self.count {
            let (q_rows, kv_rows) = (self.q_tokens - first_q, self.kv_tokens - first_k);
            let visible = self.visible(0, 0);
            return Item { batch: 0, first_q, q_rows, first_k, kv_rows, visible };
        }
        let q_rows = clamp(read(self.cu_q, index + 1), first_q, self.q_tokens) - first_q;
        let kv_rows = clamp(read(self.cu_k, index + 1), first_k, self.kv_tokens) - first_k;
        let q_len = used(self.used_q, q_rows).min(self.q_len);
        let kv_len = used(self.used_k, kv_rows).min(self.kv_len);
        let visible = self.visible(q_len, kv_len);
        Item { batch: 0, first_q, q_rows, first_k, kv_rows, visible }
    }

    #[inline(always)]
    fn visible(&self, q_len: u32, kv_len: u32) -> Visibility {
        let align = if self.bottom_right != 0 { Align::BottomRight } else { Align::TopLeft };
        let offset = align.offset(q_len as usize, kv_len as usize) as i32;
        Visibility { q_len, kv_len, offset, left: self.left, right: self.right }
    }
}

/// The search for the item of a slot, by 32 lanes at once: in each step every lane looks at one of
/// 32 evenly spaced items, and their votes leave one gap. 65,537 items take four steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemSearch {
    /// The item, once it is the only one left.
    pub first: u32,
    /// Items left, at least 1.
    pub count: u32,
}

impl ItemSearch {
    /// All items, and the rows past them.
    #[inline(always)]
    pub const fn new(items: &Items) -> Self {
        Self { first: 0, count: items.count + 1 }
    }

    /// The item that `lane` looks at next, if there is one: it votes for it if the item's first
    /// slot is not past the one that is looked for.
    #[inline(always)]
    pub const fn candidate(&self, lane: u32) -> Option<u32> {
        let step = lane * self.count.div_ceil(32);
        if step < self.count { Some(self.first + step) } else { None }
    }

    /// What is left after a vote; bit i is lane i's. Lane 0's is taken for granted.
    #[inline(always)]
    pub const fn narrowed(self, votes: u32) -> Self {
        let step = self.count.div_ceil(32);
        let passed = (31 - (votes | 1).leading_zeros()) * step;
        let left = self.count - passed;
        Self { first: self.first + passed, count: if left < step { left } else { step } }
    }
}

#[inline(always)]
fn clamp(value: i32, low: u32, high: u32) -> u32 {
    (value.max(0) as u32).clamp(low, high)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;

    const TOKENS: u32 = 1000;

    fn items(count: usize) -> Items {
        Items {
            cu_q: 1,
            cu_k: 2,
            used_q: 3,
            used_k: 4,
            count: count as u32,
            q_tokens: TOKENS,
            kv_tokens: TOKENS,
            q_len: TOKENS,
            kv_len: TOKENS,
            left: 2 * TOKENS as i32,
            right: 0,
            bottom_right: 1,
        }
    }

    /// The item of a slot of query blocks, as the lanes of a warp find it.
    fn find(items: &Items, slot: u32, q_rows: u32, read: impl Fn(u64, u32) -> i32 + Copy) -> u32 {
        find_by(items, slot, |item| items.first_slot(item, q_rows, read))
    }

    fn find_by(items: &Items, slot: u32, first_slot: impl Fn(u32) -> u32) -> u32 {
        let mut search = ItemSearch::new(items);
        while search.count > 1 {
            let votes = (0..32).fold(0, |votes, lane| {
                let is_reached = |item| first_slot(item) <= slot;
                votes | u32::from(search.candidate(lane).is_some_and(is_reached)) << lane
            });
            search = search.narrowed(votes);
        }
        search.first
    }

    proptest! {
        /// Every row of every item, and every row past them, is in exactly one block; every key,
        /// in exactly one block of keys.
        #[test]
        fn every_row_has_one_block(
            lengths in prop::collection::vec(prop_oneof![Just(0_i32), 0..40_i32], 0..90),
            q_rows in prop_oneof![Just(16_u32), Just(64)],
        ) {
            let mut offsets = vec![0];
            for length in &lengths {
                offsets.push((offsets[offsets.len() - 1] + length).min(TOKENS as i32));
            }
            let items = items(lengths.len());
            let read = |array: u64, index: u32| match array {
                1 | 2 => offsets[index as usize],
                _ => i32::MAX,
            };
            let mut owners = vec![0; TOKENS as usize];
            let mut key_owners = vec![0; TOKENS as usize];
            for slot in 0..items.kv_slots(q_rows) as u32 {
                let first_slot = |item| items.first_kv_slot(item, q_rows, read);
                let index = find_by(&items, slot, first_slot);
                let item = items.item(index, read);
                let kv_block = slot - first_slot(index);
                let keys = [kv_block, kv_block + 1].map(|b| (b * q_rows).min(item.kv_rows));
                for key in keys[0]..keys[1] {
                    key_owners[(item.first_k + key) as usize] += 1;
                }
            }
            prop_assert!(key_owners.iter().all(|owners| *owners == 1));
            for slot in 0..items.slots(q_rows) as u32 {
                let index = find(&items, slot, q_rows, read);
                let item = items.item(index, read);
                let q_block = slot - items.first_slot(index, q_rows, read);
                let rows = [q_block, q_block + 1].map(|block| (block * q_rows).min(item.q_rows));
                for row in rows[0]..rows[1] {
                    owners[(item.first_q + row) as usize] += 1;
                    prop_assert!(row < item.visible.q_len || index == items.count);
                }
            }
            prop_assert!(owners.iter().all(|owners| *owners == 1));
        }

        /// Whatever the arrays hold, items stay inside the tensors.
        #[test]
        fn malformed_contents_stay_inside(
            contents in prop::collection::vec(
                prop_oneof![any::<i32>(), -10..1200_i32], 40),
            count in 1..9_usize, slot in 0..100_u32,
        ) {
            let items = items(count);
            let read = |array: u64, index: u32| contents[array as usize * 9 - 9 + index as usize];
            let index = find(&items, slot, 16, read);
            prop_assert!(index <= items.count);
            let item = items.item(index, read);
            prop_assert!(item.first_q + item.q_rows <= TOKENS);
            prop_assert!(item.visible.q_len <= item.q_rows);
            prop_assert!(item.first_k + item.kv_rows <= TOKENS);
            prop_assert!(item.visible.kv_len <= item.kv_rows);
        }
    }

    #[test]
    fn many_short_items_are_found_in_four_steps() {
        let count = 65_537;
        let items = Items { q_tokens: count, ..items(count as usize) };
        let read = |_: u64, index: u32| index as i32;
        for index in [0, 1, 31, 32, 4095, 65_535, 65_536] {
            let slot = items.first_slot(index, 64, read);
            assert_eq!(find(&items, slot, 64, read), index);
        }
        let mut search = ItemSearch::new(&items);
        let mut steps = 0;
        while search.count > 1 {
            search = search.narrowed(1);
            steps += 1;
        }
        assert_eq!(steps, 4);
    }

    #[test]
    fn used_lengths_shorten_items_of_either_layout() {
        let values = |array: u64| -> Vec<i32> {
            match array {
                1 => vec![0, 3, 7, 9],
                2 => vec![0, 4, 8, 9],
                3 => vec![2, 9, -1],
                _ => vec![1, 2, 1],
            }
        };
        let read = |array: u64, index: u32| values(array)[index as usize];
        let packed = items(3);
        let item = packed.item(0, read);
        assert_eq!((item.q_rows, item.visible.q_len, item.visible.kv_len), (3, 2, 1));
        assert_eq!(item.visible.offset, -1);
        assert_eq!(packed.item(1, read).visible.q_len, 4);
        assert_eq!(packed.item(2, read).visible.q_len, 0);
        let past = packed.item(3, read);
        assert_eq!((past.first_q, past.q_rows, past.visible.kv_len), (9, TOKENS - 9, 0));
        let dense = Items { cu_q: 0, used_q: 0, q_len: 5, kv_len: 1, ..packed };
        let item = dense.item(1, read);
        assert_eq!((item.batch, item.first_k, item.q_rows, item.visible.kv_len), (1, 0, 5, 1));
    }
}
