//! What a hopper backward block of class `masked` knows of its keys: a record for each block of
//! keys of each item, made before the main kernel runs.
//!
//! **Tiles are of the row axis, not of the item.** Query tile t holds rows `t · q_rows ..` of the
//! row axis of q, whichever items they belong to: so its sums of dQ are contiguous, its rows of lse
//! aligned, and the stages around the main kernel see one long item. A block of keys walks the
//! tiles that hold rows of its item; rows of other items in its first and last tile are hidden.
//!
//! **Turns.** In order, the key blocks of an item that visit a tile add to it one after the other,
//! from the last to the first. Tile t has a counter for each item with rows in it, at `t + item`:
//! the items' tiles do not meet there, since the next one's first tile is its last one's or a later
//! one. Others' rows are not changed, so that items need no order among themselves.

use crate::items::Item;
use crate::walk::sees_all;

/// What is known of a block of keys. Rows are those of the item where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// The item's number.
    pub item: u32,
    /// The block's first key, on the row axis of k.
    pub first_key: u32,
    /// Keys of the block that the item has, used or not: rows of dK and dV to write. 0 where there
    /// is nothing to do.
    pub key_rows: u32,
    /// The query tiles that hold a row which sees a key of the block.
    pub tiles: (u32, u32),
    /// The one of them that a walk begins with.
    pub start_tile: u32,
    /// The item's first row, on the row axis of q.
    pub first_q: u32,
    /// Rows used of the item.
    pub q_len: u32,
    /// The first row that sees key `i` of the block is `seen_from + i`, one past the last
    /// `seen_until + i`, where these are rows of the item.
    pub seen_from: i32,
    /// See [`Self::seen_from`].
    pub seen_until: i32,
    /// Tiles whose every row sees every key of the block.
    pub full: (u32, u32),
    /// Keys used of the item, counted from the block's first.
    pub keys: u32,
    /// Row `r` is `r + shift - i` before ALiBi's diagonal of key `i` of the block.
    pub shift: i32,
    /// First row that sees a key, and one past the last.
    pub seeing: (u32, u32),
    /// First key of the block that a row sees, and one past the last, at most its keys.
    pub seen: (u32, u32),
}

impl KeyRecord {
    /// Words of a record in memory.
    pub const WORDS: u32 = 20;

    /// Nothing to do.
    pub const NONE: Self = Self {
        item: 0,
        first_key: 0,
        key_rows: 0,
        tiles: (0, 0),
        start_tile: 0,
        first_q: 0,
        q_len: 0,
        seen_from: 0,
        seen_until: 0,
        full: (0, 0),
        keys: 0,
        shift: 0,
        seeing: (0, 0),
        seen: (0, 0),
    };

    /// The record of key block `block` of `item`, number `number` of the call, for tiles of
    /// `(q_rows, kv_columns)`; [`Self::NONE`] where the item has no such block.
    ///
    /// Without a mask all of an item's blocks would walk the same tiles at the same time: if
    /// `staggers`, they begin at different ones.
    #[inline(always)]
    pub const fn of(
        item: &Item,
        number: u32,
        block: u32,
        (q_rows, columns): (u32, u32),
        staggers: bool,
    ) -> Self {
        if block >= item.kv_rows.div_ceil(columns) {
            return Self::NONE;
        }
        let visible = &item.visible;
        let first = block * columns;
        let own = first..first + columns;
        let (rows, all) = (visible.rows_of_any(&own), visible.rows_of_all(&own));
        let tiles = match rows.start < rows.end {
            true => {
                ((item.first_q + rows.start) / q_rows, (item.first_q + rows.end).div_ceil(q_rows))
            }
            false => (0, 0),
        };
        let full = match all.start < all.end {
            true => {
                ((item.first_q + all.start).div_ceil(q_rows), (item.first_q + all.end) / q_rows)
            }
            false => (0, 0),
        };
        let count = tiles.1 - tiles.0;
        let start_tile = match count > 0 && staggers && sees_all(visible) {
            true => tiles.0 + block % count,
            false => tiles.0,
        };
        let seeing = visible.rows_of_any(&(0..visible.kv_len));
        let seen = visible.keys_of_any(&(0..visible.q_len));
        let left_keys = item.kv_rows - first;
        let diagonal = first as i32 - visible.offset;
        Self {
            item: number,
            first_key: item.first_k + first,
            key_rows: if left_keys < columns { left_keys } else { columns },
            tiles,
            start_tile,
            first_q: item.first_q,
            q_len: visible.q_len,
            seen_from: diagonal - visible.right,
            seen_until: diagonal + visible.left + 1,
            full,
            keys: visible.kv_len.saturating_sub(first),
            shift: visible.kv_len as i32 - visible.q_len as i32 - first as i32,
            seeing: (seeing.start, seeing.end),
            seen: (in_block(seen.start, first, columns), in_block(seen.end, first, columns)),
        }
    }

    /// The record as it lies in memory.
    #[inline(always)]
    pub const fn words(&self) -> [[u32; 4]; Self::WORDS as usize / 4] {
        [
            [self.first_key, self.tiles.0, self.tiles.1, self.start_tile],
            [self.first_q, self.q_len, self.seen_from as u32, self.seen_until as u32],
            [self.full.0, self.full.1, self.keys, self.shift as u32],
            [self.seeing.0, self.seeing.1, self.seen.0, self.seen.1],
            [self.item, self.key_rows, 0, 0],
        ]
    }
}

#[inline(always)]
const fn in_block(key: u32, first: u32, columns: u32) -> u32 {
    let own = key.saturating_sub(first);
    if own < columns { own } else { columns }
}

/// Key blocks after one that see a row of those up to `last_row`, which is the last row of a tile
/// that belongs to the item: as many are to add to the tile before it. `seen_from` and `keys` are
/// those of the block's record.
#[inline(always)]
pub const fn later_blocks(seen_from: i32, keys: u32, last_row: u32, columns: u32) -> u32 {
    let last_key = last_row as i32 - seen_from;
    let last_key = if last_key < keys as i32 { last_key } else { keys as i32 - 1 };
    if last_key < 0 { 0 } else { last_key as u32 / columns }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::visibility::{Align, Visibility};
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::vec::Vec;

    fn item() -> impl Strategy<Value = Item> {
        let side = prop_oneof![Just(200), Just(0), 0..40_i32];
        let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
        (
            0..60_u32,
            0..60_u32,
            0..90_u32,
            0..90_u32,
            (0..5_u32, 0..5_u32),
            side.clone(),
            side,
            align,
        )
            .prop_map(|(q_len, kv_len, first_q, first_k, unused, left, right, align)| {
                Item {
                    batch: 0,
                    first_q,
                    q_rows: q_len + unused.0,
                    first_k,
                    kv_rows: kv_len + unused.1,
                    visible: Visibility {
                        q_len,
                        kv_len,
                        offset: align.offset(q_len as usize, kv_len as usize) as i32,
                        left,
                        right,
                    },
                }
            })
    }

    proptest! {
        #[test]
        fn records_say_what_is_visible(
            item in item(), rows in 1..20_u32, columns in 1..20_u32, staggers in any::<bool>(),
        ) {
            let v = &item.visible;
            let mut written = 0;
            for block in 0..10 {
                let record = KeyRecord::of(&item, 3, block, (rows, columns), staggers);
                written += record.key_rows;
                if record.key_rows == 0 {
                    prop_assert_eq!(record, KeyRecord::NONE);
                    continue;
                }
                prop_assert_eq!(record.first_key, item.first_k + block * columns);
                let walked = record.tiles.0..record.tiles.1;
                prop_assert!(walked.is_empty() || walked.contains(&record.start_tile));
                for tile in 0..20_u32 {
                    let of_item = |at: u32| (tile * rows + at) as i64 - item.first_q as i64;
                    let sees = |row: i64, key: u32| {
                        let is_row = 0 <= row && row < v.q_len as i64;
                        is_row && v.sees(row as u32, block * columns + key)
                    };
                    let (mut any, mut all) = (false, true);
                    for (at, key) in (0..rows).flat_map(|at| (0..columns).map(move |key| (at, key)))
                    {
                        let row = of_item(at);
                        let is_seen = sees(row, key);
                        (any, all) = (any | is_seen, all & is_seen);
                        let from = (record.seen_from + key as i32).max(0) as i64;
                        let until =
                            (record.seen_until as i64 + key as i64).min(record.q_len as i64);
                        let by_record = key < record.keys && (from..until).contains(&row);
                        prop_assert_eq!(is_seen, by_record);
                        let distance = row + v.kv_len as i64
                            - v.q_len as i64
                            - (block * columns + key) as i64;
                        prop_assert_eq!(distance, row + (record.shift - key as i32) as i64);
                    }
                    prop_assert!(!any || walked.contains(&tile));
                    prop_assert_eq!(all, (record.full.0..record.full.1).contains(&tile));
                }
                for row in 0..v.q_len {
                    let sees_one = (0..v.kv_len).any(|key| v.sees(row, key));
                    prop_assert_eq!(sees_one, (record.seeing.0..record.seeing.1).contains(&row));
                }
                for key in 0..columns {
                    let seen = (0..v.q_len).any(|row| v.sees(row, block * columns + key));
                    prop_assert_eq!(seen, (record.seen.0..record.seen.1).contains(&key));
                }
            }
            prop_assert_eq!(written, item.kv_rows.min(10 * columns));
        }

        /// Whoever visits a tile waits for just as many as come before it.
        #[test]
        fn turns_count_down_to_the_first_block(
            item in item(), rows in 1..20_u32, columns in 1..20_u32,
        ) {
            for tile in 0..20_u32 {
                let mut before = 0;
                for block in (0..item.kv_rows.div_ceil(columns)).rev() {
                    let record = KeyRecord::of(&item, 0, block, (rows, columns), false);
                    if !(record.tiles.0..record.tiles.1).contains(&tile) {
                        continue;
                    }
                    let end = (tile + 1) * rows - record.first_q;
                    let last_row = end.min(record.q_len) - 1;
                    let later = later_blocks(record.seen_from, record.keys, last_row, columns);
                    prop_assert_eq!(later, before);
                    before += 1;
                }
            }
        }

        #[test]
        fn every_item_has_counters_of_its_own(
            lengths in prop::collection::vec(0..40_u32, 1..20), rows in 1..20_u32,
        ) {
            let mut taken = HashSet::new();
            let mut first = 0;
            for (number, length) in lengths.iter().enumerate() {
                let tiles = first / rows..(first + length).div_ceil(rows);
                for tile in tiles.filter(|_| *length > 0) {
                    prop_assert!(taken.insert(tile + number as u32));
                }
                first += length;
            }
            let most = first / rows + lengths.len() as u32 + 1;
            let all: Vec<u32> = taken.into_iter().collect();
            prop_assert!(all.iter().all(|counter| *counter < most));
        }
    }
}
