//! Which block owns which work.
//!
//! The grid is linear, so that no grid limit on y or z leaks into shapes. Consecutive blocks walk
//! the heads of one *section*, a set of heads whose K and V fit in L2 together, then move to the
//! next query block of that section. Under a causal mask the query blocks are walked from the last
//! (the longest) to the first, so that short work fills the end of the grid (M4.4 §0x04I).
//!
//! Persistent blocks take the first work each by their number, then draw from a counter, in
//! this order. That keeps them equally busy whatever the lengths.

/// One block of query rows of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardWork {
    /// Index of the query block: rows `q_block · q_rows ..`.
    pub q_block: u32,
    /// Batch item and query head, `batch · q_heads + q_head`.
    pub batch_head: u32,
}

/// Block index ↔ query block, for a whole forward call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardSchedule {
    /// Query blocks of one head.
    pub q_blocks: u32,
    /// Batch items × query heads.
    pub batch_heads: u32,
    /// Heads (of `batch_heads`) walked together; at least 1.
    pub section: u32,
    /// 1 to walk query blocks from the last to the first.
    pub longest_first: u32,
}

impl ForwardSchedule {
    /// Blocks of work; the caller checks it against the device's grid limit.
    pub const fn blocks(&self) -> u64 {
        self.q_blocks as u64 * self.batch_heads as u64
    }

    /// The work of block `index < self.blocks()`.
    #[inline(always)]
    pub const fn work(&self, index: u32) -> ForwardWork {
        let section = divide(index, self.section * self.q_blocks);
        let within = index - section * self.section * self.q_blocks;
        let first_head = section * self.section;
        let left = self.batch_heads - first_head;
        let heads = if left < self.section { left } else { self.section };
        let step = divide(within, heads);
        let q_block = if self.longest_first != 0 { self.q_blocks - 1 - step } else { step };
        ForwardWork { q_block, batch_head: first_head + within - step * heads }
    }

    /// Bytes of K and V that the heads of a section should hold at most. Measured on an H200, whose
    /// L2 is two halves of 30 MB that both keep what both read: beyond this the query blocks of a
    /// short head come too far apart to find it there; below, too few heads start with long work.
    pub const SECTION_BYTES: u64 = 16 << 20;

    /// Heads whose K and V, of `bytes_per_head` each, fit into `cache_bytes` together.
    pub const fn section_for(batch_heads: u32, bytes_per_head: u64, cache_bytes: u64) -> u32 {
        let fitting = match cache_bytes.checked_div(bytes_per_head) {
            Some(heads) => heads,
            None => batch_heads as u64,
        };
        let at_most = if batch_heads == 0 { 1 } else { batch_heads };
        if fitting < 1 {
            1
        } else if fitting > at_most as u64 {
            at_most
        } else {
            fitting as u32
        }
    }
}

/// `a / b`, or 0 for `b = 0`: a kernel has nowhere to panic to.
#[inline(always)]
pub const fn divide(a: u32, b: u32) -> u32 {
    match a.checked_div(b) {
        Some(quotient) => quotient,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    proptest! {
        #[test]
        fn every_query_block_has_one_owner(
            q_blocks in 1..20_u32, batch_heads in 1..30_u32, section in 1..40_u32,
            longest_first in 0..2_u32,
        ) {
            let schedule = ForwardSchedule { q_blocks, batch_heads, section, longest_first };
            let mut owners = vec![0; schedule.blocks() as usize];
            let mut last = None;
            for index in 0..schedule.blocks() as u32 {
                let work = schedule.work(index);
                owners[(work.batch_head * q_blocks + work.q_block) as usize] += 1;
                if section >= batch_heads {
                    let backwards = q_blocks - work.q_block;
                    let step = if longest_first == 1 { backwards } else { work.q_block };
                    prop_assert!(last <= Some(step));
                    last = Some(step);
                }
            }
            prop_assert!(owners.iter().all(|count| *count == 1));
        }
    }
}
