//! In which order a block of query rows visits its K/V tiles, and which of them need no mask.
//!
//! One thread copies the tiles and others multiply them: both follow a [`TileWalk`], whose steps
//! both count alike. Tiles are numbered from the item's first key. Several groups of rows share a
//! walk; each sees a run of its steps, its [`Part`], and lets the others pass.
//!
//! Sides of a window are bounded here as kernels are given them, so that sums fit 32 bits.

use core::ops::Range;

use crate::visibility::Visibility;

/// The tiles that some row of a block sees, in the order of its steps: from [`Self::nearest`] down
/// to the first, then up from there to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileWalk {
    /// The first of the tiles.
    pub first: u32,
    /// How many there are.
    pub count: u32,
    /// The tile of step 0: the last one, or the one from which ALiBi's distances grow.
    pub nearest: u32,
}

impl TileWalk {
    /// The walk of `rows` over tiles of `keys` keys, from the last tile to the first.
    #[inline(always)]
    pub const fn of(visible: &Visibility, rows: &Range<u32>, keys: u32) -> Self {
        let (start, end) = seen_keys(visible, rows);
        let (first, end) = (start / keys, end.div_ceil(keys));
        Self { first, count: end - first, nearest: end.saturating_sub(1) }
    }

    /// The same tiles from the one of key `key` on, or from the last one where the key lies behind.
    #[inline(always)]
    pub const fn from_key(self, key: i32, keys: u32) -> Self {
        let tile = if key < 0 { 0 } else { key as u32 / keys };
        let nearest = if tile < self.first {
            self.first
        } else if tile < self.nearest {
            tile
        } else {
            self.nearest
        };
        Self { nearest, ..self }
    }

    /// The tile of step `step < count`.
    #[inline(always)]
    pub const fn tile(&self, step: u32) -> u32 {
        if step <= self.nearest - self.first { self.nearest - step } else { self.first + step }
    }

    /// Steps from `step` on, itself among them, whose tiles follow one another inside `tiles`, in
    /// which the step's own tile lies.
    #[inline(always)]
    pub const fn run(&self, step: u32, tiles: &Range<u32>) -> u32 {
        let tile = self.tile(step);
        if step <= self.nearest - self.first {
            let first = if tiles.start > self.first { tiles.start } else { self.first };
            tile + 1 - first
        } else {
            let walked = self.first + self.count;
            let end = if tiles.end < walked { tiles.end } else { walked };
            end - tile
        }
    }

    /// The steps that `rows`, a part of the walk's, see. A walk that does not begin with its last
    /// tile must be of rows that all see all of it.
    #[inline(always)]
    pub const fn part(&self, visible: &Visibility, rows: &Range<u32>, keys: u32) -> Part {
        let own = Self::of(visible, rows, keys);
        if own.count == 0 {
            return Part { before: self.count, seen: 0, full: (0, 0), straight: (0, 0) };
        }
        let after = own.first - self.first;
        let last = rows.end - 1;
        // ALiBi's diagonal is key `row + kv_len − q_len` of each row.
        let shift = visible.kv_len as i32 - visible.q_len as i32;
        let (past_first, of_last) = (rows.start as i32 + shift + 1, last as i32 + shift);
        Part {
            before: self.count - own.count - after,
            seen: own.count,
            full: (start(visible, last).div_ceil(keys), end(visible, rows.start) / keys),
            straight: (
                if past_first > 0 { past_first as u32 / keys } else { 0 },
                if of_last > 0 { (of_last as u32).div_ceil(keys) } else { 0 },
            ),
        }
    }
}

/// What a part of a walk's rows sees of its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Steps before the first one seen; all where none is.
    pub before: u32,
    /// Steps seen; what is left of the walk comes after them.
    pub seen: u32,
    /// In tiles from the first number on no row's keys begin, in those before the second none's
    /// end: where both hold, each row sees every key.
    pub full: (u32, u32),
    /// In tiles before the first number ALiBi's distances fall with the key in every row, from the
    /// second on they grow.
    pub straight: (u32, u32),
}

/// The first key that `row` sees, if there is one before its end.
#[inline(always)]
const fn start(visible: &Visibility, row: u32) -> u32 {
    within(row as i32 + visible.offset - visible.left, visible.kv_len)
}

/// One past the last key that `row` sees.
#[inline(always)]
const fn end(visible: &Visibility, row: u32) -> u32 {
    within(row as i32 + visible.offset + visible.right + 1, visible.kv_len)
}

#[inline(always)]
const fn within(key: i32, kv_len: u32) -> u32 {
    if key < 0 {
        0
    } else if (key as u32) < kv_len {
        key as u32
    } else {
        kv_len
    }
}

/// The first key that some of `rows` sees and one past the last; (0, 0) if there is none.
#[inline(always)]
pub const fn seen_keys(visible: &Visibility, rows: &Range<u32>) -> (u32, u32) {
    if rows.start >= rows.end {
        return (0, 0);
    }
    let (start, end) = (start(visible, rows.start), end(visible, rows.end - 1));
    if start < end { (start, end) } else { (0, 0) }
}

/// Whether every row sees every key.
#[inline(always)]
pub const fn sees_all(visible: &Visibility) -> bool {
    visible.q_len > 0 && start(visible, visible.q_len - 1) == 0 && end(visible, 0) == visible.kv_len
}

impl Part {
    /// The tiles around `tile` that need no mask and, if `is_straight` is asked for, have no row's
    /// diagonal of ALiBi inside; empty where `tile` is none.
    #[inline(always)]
    pub const fn unmasked(&self, tile: u32, is_straight: bool) -> Range<u32> {
        let (mut start, mut end) = self.full;
        if is_straight {
            if tile < self.straight.0 {
                end = if self.straight.0 < end { self.straight.0 } else { end };
            } else {
                start = if self.straight.1 > start { self.straight.1 } else { start };
            }
        }
        if start <= tile && tile < end { start..end } else { 0..0 }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::visibility::Align;
    use proptest::prelude::*;
    use std::vec;

    fn visibility() -> impl Strategy<Value = Visibility> {
        let side = prop_oneof![Just(120), Just(0), 0..40_i32];
        let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
        (1..60_u32, 0..60_u32, side.clone(), side, align).prop_map(
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
        fn every_visible_tile_has_one_step(
            v in visibility(), first in 0..60_u32, rows in 1..20_u32, keys in 1..16_u32,
            near in -10..70_i32,
        ) {
            let rows = first..(first + rows).min(v.q_len).max(first);
            let walk = TileWalk::of(&v, &rows, keys);
            for walk in [walk, walk.from_key(near, keys)] {
                let mut visits = vec![0; 128];
                for step in 0..walk.count {
                    visits[walk.tile(step) as usize] += 1;
                }
                let (start, end) = seen_keys(&v, &rows);
                let all = v.keys_of_any(&rows);
                prop_assert!((start..end) == all || (start == end && all.is_empty()));
                for tile in 0..128_u32 {
                    let mut cells =
                        rows.clone().flat_map(|row| (0..keys).map(move |key| (row, key)));
                    let is_seen = cells.any(|(row, key)| v.sees(row, tile * keys + key));
                    prop_assert!(visits[tile as usize] <= 1);
                    prop_assert!(!is_seen || visits[tile as usize] == 1);
                }
            }
        }

        #[test]
        fn parts_hold_what_their_rows_see(
            v in visibility(), first in 0..60_u32, rows in 1..20_u32, own in 0..20_u32,
            keys in 1..16_u32,
        ) {
            let rows = first..(first + rows).min(v.q_len).max(first);
            let walk = TileWalk::of(&v, &rows, keys);
            let own = (first + own)..(first + own + 6).min(rows.end).max(first + own);
            let part = walk.part(&v, &own, keys);
            let sees_all = (0..v.q_len).all(|row| (0..v.kv_len).all(|key| v.sees(row, key)));
            prop_assert_eq!(super::sees_all(&v), sees_all);
            prop_assert!(part.before + part.seen <= walk.count);
            for row in own.clone() {
                for key in (0..v.kv_len).filter(|key| v.sees(row, *key)) {
                    let step = (0..walk.count).find(|step| walk.tile(*step) == key / keys);
                    let step = step.expect("a visible tile is walked");
                    prop_assert!((part.before..part.before + part.seen).contains(&step));
                }
            }
        }

        #[test]
        fn runs_stay_in_their_tiles(
            v in visibility(), keys in 1..16_u32, near in -10..70_i32, start in 0..20_u32,
            length in 0..20_u32,
        ) {
            let tiles = start..start + length;
            let rows = 0..v.q_len;
            let walk = TileWalk::of(&v, &rows, keys).from_key(near, keys);
            for step in 0..walk.count {
                if !tiles.contains(&walk.tile(step)) {
                    continue;
                }
                let run = walk.run(step, &tiles);
                prop_assert!(run > 0 && step + run <= walk.count);
                for step in step..step + run {
                    prop_assert!(tiles.contains(&walk.tile(step)));
                }
            }
        }

        #[test]
        fn unmasked_tiles_follow_the_cells(
            v in visibility(), first in 0..60_u32, rows in 1..20_u32, keys in 1..16_u32,
        ) {
            let rows = first..(first + rows).min(v.q_len).max(first);
            let walk = TileWalk::of(&v, &rows, keys);
            let part = walk.part(&v, &rows, keys);
            prop_assume!(part.seen > 0);
            for tile in walk.first..walk.first + walk.count {
                let of_tile = || (0..keys).map(|key| tile * keys + key);
                let is_full = rows.clone().all(|row| of_tile().all(|key| v.sees(row, key)));
                prop_assert_eq!(part.unmasked(tile, false).contains(&tile), is_full);
                for row in rows.clone() {
                    // What is hidden at a side is told by its half of the bounds.
                    let hides_start = of_tile().any(|key| key < v.keys_start(row));
                    let hides_end = of_tile().any(|key| key >= v.keys_end(row));
                    prop_assert!(!hides_start || tile < part.full.0);
                    prop_assert!(!hides_end || tile >= part.full.1);
                }
                let distance = |row: u32, key: u32| {
                    row as i64 + i64::from(v.kv_len) - i64::from(v.q_len) - i64::from(key)
                };
                let sides = |tile: u32| {
                    let all = |side: fn(i64) -> bool| {
                        let keys = || (0..keys).map(|key| tile * keys + key);
                        rows.clone().all(|row| keys().all(|key| side(distance(row, key))))
                    };
                    (all(|at| at >= 0), all(|at| at <= 0))
                };
                let (before, behind) = sides(tile);
                let straight = part.unmasked(tile, true);
                prop_assert_eq!(straight.contains(&tile), is_full && (before || behind));
                for tile in straight {
                    prop_assert!(part.unmasked(tile, false).contains(&tile));
                    let (before, behind) = sides(tile);
                    let is_right = if tile < part.straight.0 { before } else { behind };
                    prop_assert!(is_right);
                }
            }
        }
    }
}
