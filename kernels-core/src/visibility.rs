//! Which keys a query row may see, cell by cell and tile by tile (M4.4 §0x05.1).
//!
//! One predicate decides everything: key `j` is visible to row `i` iff
//! `-left <= j - (i + offset) <= right` and `j < kv_len`. Ranges are half-open. The tile classes
//! and loop bounds below are derived from the predicate's extremes, and the tests compare them
//! with the predicate itself.

use core::ops::Range;

/// Which corner of a rectangular score matrix the diagonal passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Align {
    /// Row 0 meets key 0: the offset is 0.
    TopLeft,
    /// The last row meets the last key: the offset is `kv_len - q_len`.
    BottomRight,
}

impl Align {
    /// The key that row 0 is aligned with.
    pub const fn offset(self, q_len: usize, kv_len: usize) -> i64 {
        match self {
            Align::TopLeft => 0,
            Align::BottomRight => kv_len as i64 - q_len as i64,
        }
    }
}

/// What a tile of the score matrix needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileClass {
    /// Every cell is visible: no compares.
    Full,
    /// Some cells are visible: a compare a cell.
    Partial,
    /// No cell is visible: no work at all.
    Skipped,
}

/// A side of the window that reaches past every key of every sequence.
pub const UNBOUNDED: i32 = i32::MAX;

/// The visible cells of one item's `q_len × kv_len` score matrix.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Visibility {
    /// Query rows of the item.
    pub q_len: u32,
    /// Keys of the item.
    pub kv_len: u32,
    /// The key row 0 is aligned with; see [`Align::offset`].
    pub offset: i32,
    /// Keys visible before the diagonal, or [`UNBOUNDED`].
    pub left: i32,
    /// Keys visible after the diagonal, or [`UNBOUNDED`]; 0 is causal.
    pub right: i32,
}

impl Visibility {
    /// Every key is visible to every row.
    pub const fn full(q_len: u32, kv_len: u32) -> Self {
        Self { q_len, kv_len, offset: 0, left: UNBOUNDED, right: UNBOUNDED }
    }

    /// Causal: a row sees the keys up to its diagonal.
    pub const fn causal(q_len: u32, kv_len: u32, align: Align) -> Self {
        let offset = align.offset(q_len as usize, kv_len as usize) as i32;
        Self { q_len, kv_len, offset, left: UNBOUNDED, right: 0 }
    }

    /// One past the last key visible to `row`; the visible keys are contiguous.
    #[inline(always)]
    pub const fn keys_end(&self, row: u32) -> u32 {
        if self.right == UNBOUNDED {
            return self.kv_len;
        }
        clamp(row as i32 + self.offset, self.right, 1, self.kv_len)
    }

    /// The first key visible to `row`, if there is one before [`Self::keys_end`].
    #[inline(always)]
    pub const fn keys_start(&self, row: u32) -> u32 {
        if self.left == UNBOUNDED {
            return 0;
        }
        clamp(row as i32 + self.offset, -self.left, 0, self.kv_len)
    }

    /// Whether `row` sees `key`.
    #[inline(always)]
    pub const fn sees(&self, row: u32, key: u32) -> bool {
        self.keys_start(row) <= key && key < self.keys_end(row)
    }

    /// The keys that at least one of `rows` may see; empty (`start == end`) if none.
    #[inline(always)]
    pub const fn keys_of_any(&self, rows: &Range<u32>) -> Range<u32> {
        if rows.start >= rows.end {
            return 0..0;
        }
        ordered(self.keys_start(rows.start), self.keys_end(rows.end - 1))
    }

    /// The keys that every one of `rows` sees; empty if none.
    #[inline(always)]
    pub const fn keys_of_all(&self, rows: &Range<u32>) -> Range<u32> {
        if rows.start >= rows.end {
            return 0..0;
        }
        ordered(self.keys_start(rows.end - 1), self.keys_end(rows.start))
    }

    /// The rows that may see at least one of `keys`; empty if none.
    #[inline(always)]
    pub const fn rows_of_any(&self, keys: &Range<u32>) -> Range<u32> {
        if keys.start >= keys.end || keys.start >= self.kv_len {
            return 0..0;
        }
        let last = if keys.end < self.kv_len { keys.end } else { self.kv_len } - 1;
        let start = if self.right == UNBOUNDED {
            0
        } else {
            clamp(keys.start as i32 - self.offset, -self.right, 0, self.q_len)
        };
        let end = if self.left == UNBOUNDED {
            self.q_len
        } else {
            clamp(last as i32 - self.offset, self.left, 1, self.q_len)
        };
        ordered(start, end)
    }

    /// The rows that see every one of `keys`; empty if none, or if a key is past the last.
    #[inline(always)]
    pub const fn rows_of_all(&self, keys: &Range<u32>) -> Range<u32> {
        if keys.start >= keys.end || keys.end > self.kv_len {
            return 0..0;
        }
        let start = if self.right == UNBOUNDED {
            0
        } else {
            clamp(keys.end as i32 - 1 - self.offset, -self.right, 0, self.q_len)
        };
        let end = if self.left == UNBOUNDED {
            self.q_len
        } else {
            clamp(keys.start as i32 - self.offset, self.left, 1, self.q_len)
        };
        ordered(start, end)
    }

    /// The class of the tile `rows × keys`, both clipped to the item. Rows and keys past the
    /// item's end make a tile partial, never full, so that tails are masked.
    pub const fn class(&self, rows: &Range<u32>, keys: &Range<u32>) -> TileClass {
        let inside = rows.start..min(rows.end, self.q_len);
        let any = self.keys_of_any(&inside);
        if any.start >= min(keys.end, any.end) || keys.start >= any.end || keys.end <= any.start {
            return TileClass::Skipped;
        }
        let all = self.keys_of_all(&inside);
        if all.start <= keys.start && keys.end <= all.end && rows.end <= self.q_len {
            return TileClass::Full;
        }
        // A window narrower than the tile's rows can leave a gap between two rows' keys only if
        // the rows' ranges are disjoint; ranges move one key a row, so their union has no gap.
        TileClass::Partial
    }

    /// Visible cells of the whole matrix, for ledgers.
    pub const fn visible_cells(&self) -> u64 {
        let mut cells = 0;
        let mut row = 0;
        while row < self.q_len {
            let (start, end) = (self.keys_start(row), self.keys_end(row));
            if start < end {
                cells += (end - start) as u64;
            }
            row += 1;
        }
        cells
    }
}

const fn min(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

/// `position + reach + extra`, saturated to `0..=limit`. In 64 bits: a window of nearly `i32::MAX`
/// is legal.
#[inline(always)]
const fn clamp(position: i32, reach: i32, extra: i32, limit: u32) -> u32 {
    let end = position as i64 + reach as i64 + extra as i64;
    if end <= 0 {
        0
    } else if end >= limit as i64 {
        limit
    } else {
        end as u32
    }
}

#[inline(always)]
const fn ordered(start: u32, end: u32) -> Range<u32> {
    if start < end { start..end } else { 0..0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The predicate as the contract words it, in 64 bits.
    fn by_definition(v: &Visibility, row: u32, key: u32) -> bool {
        let distance = key as i64 - (row as i64 + v.offset as i64);
        (v.left == UNBOUNDED || distance >= -(v.left as i64))
            && (v.right == UNBOUNDED || distance <= v.right as i64)
            && key < v.kv_len
    }

    fn visibility() -> impl Strategy<Value = Visibility> {
        let side = prop_oneof![Just(UNBOUNDED), Just(0), 0..40_i32, Just(i32::MAX - 1)];
        let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
        (0..40_u32, 0..40_u32, side.clone(), side, align).prop_map(
            |(q_len, kv_len, left, right, align)| Visibility {
                q_len,
                kv_len,
                offset: align.offset(q_len as usize, kv_len as usize) as i32,
                left,
                right,
            },
        )
    }

    proptest! {
        #[test]
        fn ranges_follow_the_predicate(
            v in visibility(), rows in (0..40_u32, 1..20_u32), keys in (0..40_u32, 1..20_u32),
        ) {
            let rows = rows.0..(rows.0 + rows.1).min(v.q_len);
            let keys = keys.0..keys.0 + keys.1;
            for row in rows.clone() {
                for key in 0..v.kv_len + 2 {
                    prop_assert_eq!(v.sees(row, key), by_definition(&v, row, key));
                }
            }
            let seen_by_any = |key| rows.clone().any(|row| by_definition(&v, row, key));
            let seen_by_all = |key| rows.clone().all(|row| by_definition(&v, row, key));
            let any = v.keys_of_any(&rows);
            let all = v.keys_of_all(&rows);
            for key in 0..v.kv_len {
                prop_assert!(!seen_by_any(key) || any.contains(&key));
                if !rows.is_empty() {
                    prop_assert_eq!(seen_by_all(key), all.contains(&key));
                }
            }
            let readers = v.rows_of_any(&keys);
            for row in 0..v.q_len {
                let reads = keys.clone().any(|key| by_definition(&v, row, key));
                prop_assert!(!reads || readers.contains(&row));
            }
            let readers_of_all = v.rows_of_all(&keys);
            for row in 0..v.q_len {
                let reads_all = keys.clone().all(|key| by_definition(&v, row, key));
                prop_assert_eq!(reads_all, readers_of_all.contains(&row));
            }
        }

        #[test]
        fn classes_follow_the_predicate(
            v in visibility(), rows in (0..40_u32, 1..20_u32), keys in (0..40_u32, 1..20_u32),
        ) {
            let rows = rows.0..rows.0 + rows.1;
            let keys = keys.0..keys.0 + keys.1;
            let cell = |row, key| row < v.q_len && by_definition(&v, row, key);
            let any = rows.clone().any(|row| keys.clone().any(|key| cell(row, key)));
            let all = rows.clone().all(|row| keys.clone().all(|key| cell(row, key)));
            match v.class(&rows, &keys) {
                TileClass::Full => prop_assert!(all),
                TileClass::Partial => prop_assert!(any && !all),
                TileClass::Skipped => prop_assert!(!any),
            }
        }
    }

    #[test]
    fn cells_of_a_causal_square() {
        let v = Visibility::causal(4096, 4096, Align::TopLeft);
        assert_eq!(v.visible_cells(), 4096 * 4097 / 2);
    }
}
