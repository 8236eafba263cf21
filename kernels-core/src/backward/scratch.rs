//! Where the f32 memory of a backward call lies, and in which order the sums of dQ.

use super::params::BackwardScratch;
use super::schedule::BackwardSchedule;

/// Order of the f32 sums of dQ. Each is the accumulator order of the product that adds to them, so
/// that a warp adds whole cache lines: blocks of 16×8 values, in which lane `4g + t` holds values
/// 0..4 at (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryGradientOrder {
    /// `[batch · q_heads][padded_rows / 16][channels / 8][lane][value]`: 16 rows by 8 channels; a
    /// lane adds four values at once.
    Lanes = 0,
    /// `[batch · q_heads][padded_rows / 16][channels / 8][value][lane]`: 16 rows by 8 channels; a
    /// warp adds one value a lane at a time.
    Values = 1,
    /// `[batch · q_heads][padded_rows / 8][channels / 16][lane][value]`: 16 channels by 8 rows, of
    /// a product that forms dQᵀ.
    Transposed = 2,
}

impl QueryGradientOrder {
    /// Index, inside one (batch, query head), of the sum for (`row`, `channel`).
    pub const fn index(self, row: u32, channel: u32, channels: u32) -> u64 {
        let (row_block, column_block, g, column, blocks) = match self {
            Self::Lanes | Self::Values => {
                (row / 16, channel / 8, row % 16, channel % 8, channels / 8)
            }
            Self::Transposed => (row / 8, channel / 16, channel % 16, row % 8, channels / 16),
        };
        let (lane, value) = (g % 8 * 4 + column / 2, g / 8 * 2 + column % 2);
        let within = match self {
            Self::Values => value * 32 + lane,
            Self::Lanes | Self::Transposed => lane * 4 + value,
        };
        (row_block as u64 * blocks as u64 + column_block as u64) * 128 + within as u64
    }
}

/// Rows whose lse is scaled alike.
pub const LSE_ROWS: u32 = 64;

/// Rows of dQ that are converted together.
pub const CONVERTED_ROWS: u32 = 16;

/// Largest |lse| that is scaled to powers of two. An exponent is then off by 3 roundings of at most
/// 369 · 2⁻²⁴, and P by 2⁻¹⁴·⁴ of itself, a sixth of what rounding it to binary16 costs.
pub const LARGEST_SCALED_LSE: f32 = 256.0;

/// Numbers of a hopper kernel's counters. Blocks draw their work from the first, and what they
/// clear from the second.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperCounters {
    /// Of each section, the query tiles whose sums of dQ have been cleared.
    pub cleared: u32,
    /// Of each section, the works that are done: what they added to dQ is there.
    pub done: u32,
    /// Of each section, the [`CONVERTED_ROWS`] of dQ that blocks have taken to convert.
    pub converted: u32,
    /// Of each key block of each KV head, for each consumer, the parts that have passed on.
    pub parts: u32,
    /// Of each query tile, the additions that were made in order.
    pub turns: u32,
}

impl HopperCounters {
    /// The first counter that clearing is drawn from.
    pub const CLEAR: u32 = 1;

    /// The counters of a call.
    pub const fn new(schedule: &BackwardSchedule) -> Self {
        let cleared = Self::CLEAR + 1;
        let done = cleared + schedule.sections();
        let converted = done + schedule.sections();
        let parts = converted + schedule.sections();
        let passed_on = match schedule.parts {
            1 => 0,
            _ => 2 * schedule.batch_heads * schedule.kv_blocks,
        };
        Self { cleared, done, converted, parts, turns: parts + passed_on }
    }

    /// How many there are, for `query_tiles` in all.
    pub const fn count(&self, query_tiles: u64, ordered: bool) -> u64 {
        self.turns as u64 + if ordered { query_tiles } else { 0 }
    }
}

/// What a scratch must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchSizes {
    /// Batch items × query heads.
    pub batch_heads: u64,
    /// Rows of a (batch, query head), a multiple of the main kernel's query rows and of 16.
    pub padded_rows: u32,
    /// The main kernel's compiled head dimension, or 0 where dQ is not wanted.
    pub dq_channels: u32,
    /// Whether lse is scaled to powers of two where it is small enough.
    pub powers_of_two: bool,
    /// Counters.
    pub counters: u64,
    /// Sums of dK and dV that parts of a group pass on, f32.
    pub part_sums: u64,
}

impl ScratchSizes {
    /// Bytes of the whole: 4·D̂ + 8 a padded row, a word for [`LSE_ROWS`] rows, the counters, and 4
    /// for a sum that parts pass on.
    pub const fn bytes(&self) -> u64 {
        let rows = self.batch_heads * self.padded_rows as u64;
        let rows = rows * (8 + 4 * self.dq_channels as u64);
        rows + self.natural_bytes() + self.counter_bytes() + 4 * self.part_sums
    }

    const fn natural_bytes(&self) -> u64 {
        let row_blocks = self.padded_rows.div_ceil(LSE_ROWS) as u64;
        if self.powers_of_two {
            (self.batch_heads * row_blocks * 4).next_multiple_of(16)
        } else {
            0
        }
    }

    const fn counter_bytes(&self) -> u64 {
        (self.counters * 4).next_multiple_of(16)
    }

    /// The arrays in memory at `address`, a multiple of 16: dQ, lse, delta, which lse is natural,
    /// counters, sums of parts.
    pub const fn at(&self, address: u64) -> BackwardScratch {
        let rows = self.batch_heads * self.padded_rows as u64;
        let lse = address + rows * 4 * self.dq_channels as u64;
        let delta = lse + rows * 4;
        let natural = delta + rows * 4;
        let counters = natural + self.natural_bytes();
        BackwardScratch {
            lse,
            delta,
            dq: if self.dq_channels == 0 { 0 } else { address },
            natural: if self.powers_of_two { natural } else { 0 },
            counters: if self.counters == 0 { 0 } else { counters },
            part_sums: if self.part_sums == 0 { 0 } else { counters + self.counter_bytes() },
            padded_rows: self.padded_rows,
            dq_channels: self.dq_channels,
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec;

    #[test]
    fn every_sum_has_one_place() {
        for order in
            [QueryGradientOrder::Lanes, QueryGradientOrder::Values, QueryGradientOrder::Transposed]
        {
            let (rows, channels) = (48, 96);
            let mut seen = vec![false; (rows * channels) as usize];
            for row in 0..rows {
                for channel in 0..channels {
                    let slot = &mut seen[order.index(row, channel, channels) as usize];
                    assert!(!*slot);
                    *slot = true;
                }
            }
        }
    }

    #[test]
    fn a_block_is_an_accumulator() {
        let order = QueryGradientOrder::Values;
        for lane in 0..32 {
            for value in 0..4 {
                let place = crate::fragment::c_place(lane, value);
                let index = u64::from(value * 32 + lane);
                assert_eq!(order.index(place.row, place.column, 8), index);
                let lanes = QueryGradientOrder::Lanes.index(place.row, place.column, 8);
                assert_eq!(lanes, u64::from(lane * 4 + value));
                let turned = QueryGradientOrder::Transposed.index(place.column, place.row, 16);
                assert_eq!(turned, u64::from(lane * 4 + value));
            }
        }
    }

    #[test]
    fn counters_of_a_call_do_not_overlap() {
        let schedule = BackwardSchedule { kv_blocks: 5, batch_heads: 6, parts: 2, section: 5 };
        let counters = HopperCounters::new(&schedule);
        let (done, converted, parts) = (5, 8, 11);
        let expected = HopperCounters { cleared: 2, done, converted, parts, turns: 71 };
        assert_eq!(counters, expected);
        assert_eq!((counters.count(7, true), counters.count(7, false)), (78, 71));
        let whole = HopperCounters::new(&BackwardSchedule { parts: 1, ..schedule });
        assert_eq!((whole.parts, whole.turns), (8, 8));
    }

    #[test]
    fn arrays_do_not_overlap_and_fill_the_bytes() {
        let sizes = ScratchSizes {
            batch_heads: 6,
            padded_rows: 80,
            dq_channels: 96,
            powers_of_two: true,
            counters: 7,
            part_sums: 8,
        };
        let scratch = sizes.at(4096);
        assert_eq!(scratch.dq, 4096);
        assert_eq!(scratch.lse, 4096 + 6 * 80 * 96 * 4);
        assert_eq!(scratch.delta, scratch.lse + 6 * 80 * 4);
        assert_eq!(scratch.natural, scratch.delta + 6 * 80 * 4);
        assert_eq!(scratch.counters, scratch.natural + 6 * 2 * 4);
        assert_eq!(scratch.part_sums, scratch.counters + 32);
        assert_eq!(4096 + sizes.bytes(), scratch.part_sums + 32);
    }
}
