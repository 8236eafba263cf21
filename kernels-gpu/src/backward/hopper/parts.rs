//! Works that are parts of a group: the same keys, some of their query heads each.
//!
//! The first part leaves its f32 sums of dK and dV in memory, the next adds its own to them, and
//! the last, which then holds all, writes the gradients. A part waits for the one before it, whose
//! work was drawn before; each consumer does so for its own sums, which lie as its threads hold
//! them. One order whatever the launch: the gradients are the same in every run.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::HopperBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::schedule::divide;

use super::consumer::{Consumer, Sums};
use super::{CONSUMER_BARRIER, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    load_acquire_global_u32, load_relaxed_global_v4, release_add_global_u32, store_global_v4,
};
use crate::ptx::thread::sync_named;
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

/// Bytes from four values of the consumers' first thread to its next four.
const GROUP_BYTES: u32 = 2 * WARPGROUP_THREADS * 16;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Adds the sums of the parts before this one; whether it is the last. Else its sums have been
    /// passed on.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when its sums have been waited for.
    #[inline(always)]
    pub(super) unsafe fn join_parts(&self, sums: &mut Sums<T>, work: Work) -> bool {
        let params = self.block.params;
        let parts = params.schedule.parts;
        let kv_head = work.kv_head(params);
        let part = work.head_part() - kv_head * parts;
        let key_block = divide(work.first_key(), T::SHAPE.kv_columns);
        let keys = (work.batch() * params.kv_heads + kv_head) * params.schedule.kv_blocks;
        let keys = (keys + key_block) as u64;
        let turn = params.counters.parts as u64 + keys * 2 + self.index as u64;
        let turn = self.block.counter(turn);
        let key_bytes = T::KeyGradient::LEN as u64 / 4 * GROUP_BYTES as u64;
        let value_bytes = T::ValueGradient::LEN as u64 / 4 * GROUP_BYTES as u64;
        let thread = (self.index * WARPGROUP_THREADS + self.thread()) as u64;
        let d_k = params.scratch.part_sums + keys * (key_bytes + value_bytes) + thread * 16;
        let d_v = d_k + key_bytes;
        if part > 0 {
            if self.thread() == 0 {
                while load_acquire_global_u32(turn) < part {}
            }
            sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
            add_passed_on(&mut sums.keys, d_k);
            add_passed_on(&mut sums.values, d_v);
        }
        if part + 1 == parts {
            return true;
        }
        pass_on(&sums.keys, d_k);
        pass_on(&sums.values, d_v);
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
        if self.thread() == 0 {
            release_add_global_u32(turn, 1);
        }
        false
    }
}

/// Adds the thread's values at `from`.
#[inline(always)]
unsafe fn add_passed_on<F: Fragment>(sums: &mut F, from: u64) {
    let mut group = 0;
    while group < F::LEN / 4 {
        let values = load_relaxed_global_v4(from + group as u64 * GROUP_BYTES as u64);
        let mut value = 0;
        while value < 4 {
            *sums.at_mut(group * 4 + value) += f32::from_bits(values[value]);
            value += 1;
        }
        group += 1;
    }
}

/// Leaves the thread's values at `to`.
#[inline(always)]
unsafe fn pass_on<F: Fragment>(sums: &F, to: u64) {
    let mut group = 0;
    while group < F::LEN / 4 {
        let mut values = [0; 4];
        let mut value = 0;
        while value < 4 {
            values[value] = sums.at(group * 4 + value).to_bits();
            value += 1;
        }
        store_global_v4(to + group as u64 * GROUP_BYTES as u64, values);
        group += 1;
    }
}
