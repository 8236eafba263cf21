//! The hopper forward kernel of the class `masked`: windows, lengths, packed items, ALiBi, softcap
//! and sinks.
//!
//! Products, rings, turns and who protects what are those of the plain kernel (see the
//! [parent](super)). What differs:
//!
//! **Works.** The producing warp finds each work with all its lanes, skips slots without rows, and
//! leaves a record that says all about it: the item, what its rows and each consumer's see, the
//! walk over its tiles, slope and sink. It passes with the output's turn, as the plain kernel's
//! does; each consuming warp keeps a copy. The first record is there before the roles part. So both
//! sides count the same steps whatever the lengths on the device say.
//!
//! **Which tiles.** A [`TileWalk`](ferroflash_core::walk::TileWalk) names the tiles that some of
//! the block's rows see. A consumer lets those at its beginning and its end pass that none of its
//! own rows sees. Where ALiBi shows every key, the walk begins at the nearest, so that distances
//! grow and maxima come first.
//!
//! **Kinds of steps.** A tile whose every key is visible to all of a consumer's rows takes a loop
//! made for the options of the call: none, softcap or ALiBi, whose distances then are a linear
//! function of the key. Those loops guess, as the plain one does. Every other tile, and the first,
//! goes by [`Reader::finish`], which knows all options at once and takes maxima. With a softcap a
//! warp begins with a loop for scores near zero, whose tanh is a polynomial, and goes on in one for
//! any once a score was past its reach.
//!
//! **Units.** Scores are what the kernel multiplies, or values of tanh with a softcap: the factor
//! that makes a power of two of them stays in the exponent. With ALiBi they become powers of two
//! first, so that distances add to them.
//!
//! **What no row sees.** In a tile that holds keys before the first or past the last key that any
//! row of the item sees, a consumer zeroes these rows of V in shared memory, whatever they hold.
//! Others may do the same at the same time.

mod consumer;
mod epilogue;
mod producer;
mod record;
mod scores;

use ferroflash_core::params::options::HopperMaskedParams;
use ferroflash_core::tile::{HopperTiling, RegisterSplit, WARPGROUP_WARPS};

use self::record::Record;
use super::{Block, Kernel, initialise_barriers};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::dynamic_shared;
use crate::ptx::registers::{claim_registers, release_registers};
use crate::ptx::thread::{block_idx_x, lane_id, sync_threads, thread_idx_x};
use crate::ptx::warp::{sync_warp, uniform};
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;

/// The work of one persistent block.
///
/// # Safety
/// As the plain kernel's [`block`](super::block), with packed offsets and lengths that hold a value
/// for each item.
#[inline(always)]
pub unsafe fn block<T: HopperTiling, E: MatrixElement>(params: &HopperMaskedParams, maps: u64)
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    let shared = dynamic_shared();
    let barriers = shared + Kernel::<T>::PLAN.barriers;
    let block = Block { params: &params.forward, maps, shared, barriers };
    let warp = uniform(thread_idx_x() / 32);
    let first = Record::numbered::<T>(&block, T::SHAPE.stages);
    if warp == 0 {
        if lane_id() == 0 {
            initialise_barriers::<T>(&block);
        }
        first.set_q_parity(0);
        sync_warp();
        first.find::<T>(params, block_idx_x());
    }
    sync_threads();
    if warp >= WARPGROUP_WARPS {
        let kept = Record::numbered::<T>(&block, T::SHAPE.stages + 2 + warp - WARPGROUP_WARPS);
        kept.take(first.share(warp / WARPGROUP_WARPS - 1, lane_id()), lane_id());
        kept.set_q_parity(0);
    }
    sync_threads();

    // A branch that each warpgroup takes as a whole, as the register split requires.
    let warpgroup = uniform(thread_idx_x() / WARPGROUP_THREADS);
    if warpgroup == 0 {
        match const { RegisterSplit::masked(T::SHAPE.warpgroups()).producer } {
            40 => release_registers::<40>(),
            _ => release_registers::<32>(),
        }
        if warp == 0 {
            producer::produce::<T>(&block, params);
        }
    } else {
        match const { RegisterSplit::masked(T::SHAPE.warpgroups()).consumer } {
            232 => claim_registers::<232>(),
            _ => claim_registers::<160>(),
        }
        let index = uniform(thread_idx_x() / WARPGROUP_THREADS) - 1;
        consumer::consume::<T, E>(block, params, index);
    }
}
