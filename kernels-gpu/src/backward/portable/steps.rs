//! The walk over a block's query tiles.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::params::PortableBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;

use super::{Kernel, Place, Step, Sums, Work};
use crate::ptx::async_copy::{commit_group, wait_group};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::sync_threads;

/// No query tile's number.
const NONE: u32 = u32::MAX;

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Starts copying the tiles of the step after `step`, if there is one, and closes the group.
    #[inline(always)]
    unsafe fn copy_next(
        params: &PortableBackwardParams,
        step: Step,
        slot: u32,
        shared: u32,
        thread: u32,
    ) {
        let work = Work::load(shared + Self::PLAN.work);
        let next = step.next(&work);
        if next.is_of(&work) {
            Self::copy_queries(params, &work, next, slot ^ 1, shared, thread);
            if Self::TILE.stages == 2 {
                Self::copy_d_o(params, &work, next, slot ^ 1, shared, thread);
            }
        }
        commit_group();
    }

    /// Steps with two barriers; see the module's essay.
    #[inline(always)]
    pub(super) unsafe fn steps<M: MaskKind>(
        params: &PortableBackwardParams,
        first: Step,
        shared: u32,
        thread: u32,
        values: &T::Values,
        sums: &mut Sums<T>,
    ) {
        let work_slot = shared + Self::PLAN.work;
        let (mut step, mut slot) = (first, 0);
        while step.is_of(&Work::load(work_slot)) {
            wait_group::<0>();
            sync_threads();
            Self::copy_next(params, step, slot, shared, thread);

            let d_o_slot = if Self::TILE.stages == 2 { slot } else { 0 };
            let place = Place::of::<T, E>(shared, thread);
            Self::scores::<M>(params, step, [slot, d_o_slot], &place, values, sums);
            sync_threads();
            if Self::IS_SHARED {
                let place = Place::of::<T, E>(shared, thread);
                Self::add_shared_values(&place, d_o_slot, &mut sums.dv);
                if Self::TILE.stages == 1 {
                    sync_threads();
                }
            }
            if Self::TILE.stages == 1 {
                let work = Work::load(work_slot);
                let next = step.next(&work);
                if next.is_of(&work) {
                    Self::copy_d_o(params, &work, next, 0, shared, thread);
                }
                commit_group();
            }
            let place = Place::of::<T, E>(shared, thread);
            if Self::IS_SHARED {
                Self::add_shared_keys(&place, slot, &mut sums.dk);
            }
            if params.scratch.dq != 0 {
                let query_tile = Self::query_tile(params, step, shared);
                Self::add_queries(params, query_tile, 0, &place);
            }
            step = step.next(&Work::load(work_slot));
            slot ^= 1;
        }
    }

    /// Steps with one barrier: each forms dQ of the step before it, and one more forms the last.
    #[inline(always)]
    pub(super) unsafe fn overlapping_steps<M: MaskKind>(
        params: &PortableBackwardParams,
        first: Step,
        shared: u32,
        thread: u32,
        values: &T::Values,
        sums: &mut Sums<T>,
    ) {
        let work_slot = shared + Self::PLAN.work;
        let (mut step, mut slot) = (first, 0);
        let mut last = NONE;
        loop {
            let is_left = step.is_of(&Work::load(work_slot));
            if !is_left && last == NONE {
                break;
            }
            wait_group::<0>();
            sync_threads();
            if is_left {
                Self::copy_next(params, step, slot, shared, thread);
            }
            if last != NONE && params.scratch.dq != 0 {
                let place = Place::of::<T, E>(shared, thread);
                Self::add_queries(params, last, slot ^ 1, &place);
            }
            if !is_left {
                break;
            }
            let place = Place::of::<T, E>(shared, thread);
            Self::scores::<M>(params, step, [slot; 2], &place, values, sums);
            last = Self::query_tile(params, step, shared);
            step = step.next(&Work::load(work_slot));
            slot ^= 1;
        }
    }
}
