//! Which probabilities a dropout mask keeps: a function of seed, offset and position alone, the
//! same on every device, for every tile shape, in both passes and in every replay.
//!
//! Element (row i, key j) of query head h of item b takes 16 bits of one Philox4x32 call of
//! [`DROPOUT_ROUNDS`] rounds:
//!
//! | | |
//! | --- | --- |
//! | key | `seed_lo`, `seed_hi ^ offset_hi` |
//! | counter | row group, column group, `b · q_heads + h` (in 32 bits), `offset_lo` |
//! | row group | `i / 16 · 8 + i % 8` |
//! | column group | `j / 32 · 8 + j % 8` |
//! | word | `j / 8 % 4` |
//! | half | `i / 8 % 2`: 0 is the low 16 bits |
//!
//! So one call serves rows `{i, i + 8}` × keys `{j, j + 8, j + 16, j + 24}` of a 16×32 block. A
//! thread holds exactly these together in a score accumulator (see
//! [`c_place`](crate::fragment::c_place)), and also where rows and keys are exchanged, as in the
//! backward pass. Packed items count rows and keys from their own first, and are b themselves.
//!
//! An element is dropped iff its 16 bits, as an integer, are less than `round(p · 2¹⁶)`: the
//! probability that applies is `p̂ = round(p · 2¹⁶) / 2¹⁶`. What is kept is multiplied by
//! `1 / (1 - p̂)`.

use crate::philox::{DROPOUT_ROUNDS, philox4x32};

/// Rows of a block whose two halves share a call.
pub const BLOCK_ROWS: u32 = 16;

/// Keys of a block whose four quarters share a call.
pub const BLOCK_KEYS: u32 = 32;

/// Equally likely values of an element's bits.
const LEVELS: u32 = 1 << 16;

/// The dropout mask of one call; passed to kernels by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    /// Key of the generator.
    pub key: [u32; 2],
    /// Last word of every counter.
    pub offset_low: u32,
    /// An element is dropped iff its bits are below this, 0 to 2¹⁶.
    pub threshold: u32,
    /// Factor of what is kept: `1 / (1 - p̂)`, 1 where nothing is dropped, 0 where all is.
    pub keep_scale: f32,
}

impl DropoutMask {
    /// The mask of `probability` (0 to 1) for a seed and an offset.
    pub const fn new(probability: f32, seed: u64, offset: u64) -> Self {
        let threshold = (probability as f64 * LEVELS as f64 + 0.5) as u32;
        let threshold = if threshold < LEVELS { threshold } else { LEVELS };
        let mask = Self { key: [0; 2], offset_low: 0, threshold, keep_scale: 0.0 };
        Self { keep_scale: mask.keep_scale_f64() as f32, ..mask }.advanced(seed, offset)
    }

    /// The same mask for another seed and offset, as a kernel reads them from memory.
    #[inline(always)]
    pub const fn advanced(self, seed: u64, offset: u64) -> Self {
        let key = [seed as u32, (seed >> 32) as u32 ^ (offset >> 32) as u32];
        Self { key, offset_low: offset as u32, ..self }
    }

    /// [`Self::keep_scale`] before it is rounded to f32.
    pub const fn keep_scale_f64(&self) -> f64 {
        if self.threshold >= LEVELS {
            return 0.0;
        }
        LEVELS as f64 / (LEVELS - self.threshold) as f64
    }

    /// The bits of one call: word q has keys `8q` further, low half the first row, high half the
    /// row 8 below. `batch_head` is `b · q_heads + h`.
    #[inline(always)]
    pub const fn words(&self, batch_head: u32, row_group: u32, column_group: u32) -> [u32; 4] {
        let counter = [row_group, column_group, batch_head, self.offset_low];
        philox4x32::<DROPOUT_ROUNDS>(counter, self.key)
    }

    /// Whether an element with the low 16 bits of `bits` is kept.
    #[inline(always)]
    pub const fn keeps_bits(&self, bits: u32) -> bool {
        bits & 0xffff >= self.threshold
    }

    /// Whether element (`row`, `key`) is kept: the definition, a call an element.
    #[inline(always)]
    pub const fn keeps(&self, batch_head: u32, row: u32, key: u32) -> bool {
        let words = self.words(batch_head, row_group(row), column_group(key));
        self.keeps_bits(words[word(key)] >> (half(row) * 16))
    }
}

/// The row group of a row; rows 8 apart in a block of 16 share it.
#[inline(always)]
pub const fn row_group(row: u32) -> u32 {
    row / BLOCK_ROWS * 8 + row % 8
}

/// The column group of a key; keys 8, 16 and 24 apart in a block of 32 share it.
#[inline(always)]
pub const fn column_group(key: u32) -> u32 {
    key / BLOCK_KEYS * 8 + key % 8
}

/// The word of a call that serves a key, 0 to 3.
#[inline(always)]
pub const fn word(key: u32) -> usize {
    (key / 8 % 4) as usize
}

/// The half of a word that serves a row, 0 (low) or 1 (high).
#[inline(always)]
pub const fn half(row: u32) -> u32 {
    row / 8 % 2
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::fragment::c_place;
    use std::collections::HashSet;

    #[test]
    fn every_element_has_bits_of_its_own() {
        let mut places = HashSet::new();
        for row in 0..48 {
            for key in 0..96 {
                let place = (row_group(row), column_group(key), word(key), half(row));
                assert!(places.insert(place), "row {row}, key {key}");
            }
        }
        // Groups are numbered without gaps: as many places as elements.
        assert!(places.iter().all(|&(rows, columns, ..)| rows < 24 && columns < 24));
        assert_eq!(places.len(), 24 * 24 * 4 * 2);
    }

    /// A lane's accumulators of a 16×32 score block (rows of queries), and of the same block held
    /// as scores transposed (two 16-row tiles of keys), come from two calls.
    #[test]
    fn a_lane_needs_two_calls_a_block_in_either_orientation() {
        for lane in 0..32 {
            let mut calls = HashSet::new();
            let mut transposed_calls = HashSet::new();
            for value in 0..16 {
                let place = c_place(lane, value);
                calls.insert((row_group(place.row), column_group(place.column)));
                let place = c_place(lane, value % 8);
                let key = place.row + value / 8 * 16;
                transposed_calls.insert((row_group(place.column), column_group(key)));
            }
            assert_eq!((calls.len(), transposed_calls.len()), (2, 2));
        }
    }

    #[test]
    fn kept_entries_make_up_for_dropped_ones() {
        let nothing = DropoutMask::new(0.0, 1, 2);
        assert_eq!((nothing.threshold, nothing.keep_scale), (0, 1.0));
        let everything = DropoutMask::new(1.0, 1, 2);
        assert_eq!((everything.threshold, everything.keep_scale), (1 << 16, 0.0));
        assert_eq!(DropoutMask::new(0.5, 1, 2).keep_scale, 2.0);
        assert_eq!(DropoutMask::new(0.1, 1, 2).threshold, 6554);
        for row in 0..32 {
            for key in 0..64 {
                assert!(nothing.keeps(3, row, key));
                assert!(!everything.keeps(3, row, key));
            }
        }
    }

    /// The share dropped is binomial: within five standard deviations of p̂, over all elements and
    /// over each place in a block.
    #[test]
    fn the_share_dropped_is_the_probability() {
        for (probability, seed) in [(0.1, 7_u64), (0.5, 1 << 40), (0.9, u64::MAX)] {
            let mask = DropoutMask::new(probability, seed, 5);
            let expected = f64::from(mask.threshold) / f64::from(LEVELS);
            let mut by_place = [[0_u32; 32]; 16];
            let blocks = 40;
            for row in 0..16 * blocks {
                for key in 0..32 * blocks {
                    let dropped = !mask.keeps(1, row, key);
                    by_place[row as usize % 16][key as usize % 32] += u32::from(dropped);
                }
            }
            let check = |dropped: u32, trials: u32| {
                let deviation = (expected * (1.0 - expected) / f64::from(trials)).sqrt();
                let share = f64::from(dropped) / f64::from(trials);
                assert!((share - expected).abs() < 5.0 * deviation, "{share} for {expected}");
            };
            for dropped in by_place.as_flattened() {
                check(*dropped, blocks * blocks);
            }
            check(by_place.as_flattened().iter().sum(), 512 * blocks * blocks);
        }
    }

    /// Seed, offset (both halves), head, row and key each give other bits, and half of the
    /// elements of two independent masks agree.
    #[test]
    fn every_coordinate_changes_the_mask() {
        let mask = DropoutMask::new(0.5, 42, 0);
        let others = [
            DropoutMask::new(0.5, 43, 0),
            DropoutMask::new(0.5, 42 | 1 << 32, 0),
            DropoutMask::new(0.5, 42, 1),
            DropoutMask::new(0.5, 42, 1 << 32),
        ];
        let agreement = |other: &DropoutMask, head: u32, rows: u32, keys: u32| {
            let cells = (0..64).flat_map(|row| (0..64).map(move |key| (row, key)));
            let same = cells.filter(|&(row, key)| {
                mask.keeps(0, row, key) == other.keeps(head, row + rows, key + keys)
            });
            same.count()
        };
        for (other, head, rows, keys) in others.iter().map(|other| (other, 0, 0, 0)).chain(
            [(1, 0, 0), (0, 8, 0), (0, 16, 0), (0, 0, 8), (0, 0, 32)]
                .map(|(h, r, k)| (&mask, h, r, k)),
        ) {
            let same = agreement(other, head, rows, keys);
            assert!((1888..2208).contains(&same), "{same} of 4096");
        }
        assert_eq!(agreement(&mask, 0, 0, 0), 4096);
    }
}
