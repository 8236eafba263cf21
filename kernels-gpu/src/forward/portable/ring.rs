//! The ring of K and V tiles, and which barrier lets which copy start; see the
//! [parent module](super).

use ferroflash_core::tile::ForwardTiling;

use super::{Kernel, THREADS};
use crate::pieces::bring_ring_tile;
use crate::ptx::async_copy::{commit_group, wait_group};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::{opaque, sync_threads};
use crate::tile::Rows;

/// Where K and V tiles come from, and the ring they go to.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) shared: u32,
}

impl<T: ForwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Starts copying what the first tile needs; see [`Self::await_keys`].
    #[inline(always)]
    pub(super) unsafe fn fill(ring: &Ring, keys_end: u32, thread: u32) {
        Self::copy_keys(ring, 0, keys_end, thread);
        if T::SHAPE.stages > 1 {
            Self::copy_values(ring, 0, keys_end, thread);
        }
        commit_group();
    }

    /// Waits for K tile `kv_tile`, and starts the copies whose slots are free from here on. The
    /// ring is made after the barrier, so that it may lie in shared memory.
    #[inline(always)]
    pub(super) unsafe fn await_keys(
        ring: impl Fn() -> Ring,
        kv_tile: u32,
        keys_end: u32,
        thread: u32,
    ) {
        wait_group::<0>();
        sync_threads();
        let ring = &ring();
        if T::SHAPE.stages > 1 {
            Self::copy_keys(ring, kv_tile + 1, keys_end, thread);
            Self::copy_values(ring, kv_tile + 1, keys_end, thread);
        } else {
            Self::copy_values(ring, kv_tile, keys_end, thread);
        }
        commit_group();
    }

    /// Waits for V tile `kv_tile`; where K has one slot, its next tile may then come.
    #[inline(always)]
    pub(super) unsafe fn await_values(
        ring: impl Fn() -> Ring,
        kv_tile: u32,
        keys_end: u32,
        thread: u32,
    ) {
        if T::SHAPE.stages == 1 {
            wait_group::<0>();
            sync_threads();
            Self::copy_keys(&ring(), kv_tile + 1, keys_end, thread);
            commit_group();
        }
    }

    /// Starts copying K tile `kv_tile` into its slot; past the last key, nothing.
    #[inline(always)]
    unsafe fn copy_keys(ring: &Ring, kv_tile: u32, keys_end: u32, thread: u32) {
        let key = kv_tile * Self::TILE.kv_columns;
        if key < keys_end {
            let shared = ring.shared + Self::PLAN.k + Self::slot(kv_tile) * Self::PLAN.k_stage;
            bring_ring_tile::<E, THREADS>(Self::K, ring.k.from_row(key), shared, opaque(thread));
        }
    }

    /// As [`Self::copy_keys`], of V.
    #[inline(always)]
    unsafe fn copy_values(ring: &Ring, kv_tile: u32, keys_end: u32, thread: u32) {
        let key = kv_tile * Self::TILE.kv_columns;
        if key < keys_end {
            let shared = ring.shared + Self::PLAN.v + Self::slot(kv_tile) * Self::PLAN.v_stage;
            bring_ring_tile::<E, THREADS>(Self::V, ring.v.from_row(key), shared, opaque(thread));
        }
    }

    /// The ring's slot of a tile.
    #[inline(always)]
    pub(super) const fn slot(kv_tile: u32) -> u32 {
        kv_tile % T::SHAPE.stages
    }
}
