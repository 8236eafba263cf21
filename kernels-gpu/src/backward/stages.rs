//! The stages around the main kernel for calls with options: they clear a bias' gradient, and form
//! the sinks', besides what they do for every call.

use ferroflash_core::backward::params::options::{ConvertMaskedParams, PreprocessMaskedParams};
use ferroflash_core::backward::tilings::BackwardRows;
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::Tiling;

use super::{convert, preprocess};
use crate::ptx::math::exp2;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    dynamic_shared, load_global_f32, load_shared_v4, store_global_f32, store_shared_u32,
};
use crate::ptx::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};
use crate::ptx::warp::shuffle_xor;

const THREADS: u32 = BackwardRows::SHAPE.warps * 32;

/// The work of one preprocess block: its part of the bias' gradient, then what
/// [`preprocess::block`] does.
///
/// # Safety
/// As [`preprocess::block`], with at least one block; the bias' gradient is as the parameters
/// describe it.
#[inline(always)]
pub unsafe fn preprocess<E: MatrixElement>(params: &PreprocessMaskedParams) {
    let gradient = &params.bias_gradient;
    if gradient.address != 0 {
        let [items, heads, rows, keys] = params.bias_dims;
        let mut row = block_idx_x() as u64;
        while row < items as u64 * heads as u64 * rows as u64 {
            let (head, own) = (quotient(row, rows), remainder(row, rows));
            let (item, head) = (quotient(head, heads), remainder(head, heads));
            let offset = gradient.offset(item as u32, head as u32, own as u32, 0) * 4;
            let first = gradient.address.wrapping_add(offset as u64);
            let mut key = thread_idx_x();
            while key < keys {
                store_global_f32(first + key as u64 * 4, 0.0);
                key += THREADS;
            }
            row += grid_dim_x() as u64;
        }
    }
    preprocess::block::<E>(&params.preprocess);
}

/// `a / b`, or 0 for `b = 0`: a kernel has nowhere to panic to.
#[inline(always)]
fn quotient(a: u64, b: u32) -> u64 {
    a.checked_div(b as u64).unwrap_or(0)
}

#[inline(always)]
fn remainder(a: u64, b: u32) -> u64 {
    a.checked_rem(b as u64).unwrap_or(0)
}

/// The work of one convert block: of dQ, as [`convert::block`], or one head's sink.
///
/// # Safety
/// As [`convert::block`] for the first blocks; after them one a query head, where the sinks'
/// gradient is wanted, with the logits and the gradient as the parameters describe them.
#[inline(always)]
pub unsafe fn convert<E: MatrixElement>(params: &ConvertMaskedParams) {
    if block_idx_x() < params.blocks {
        convert::block::<E>(&params.convert);
    } else {
        sink_gradient(params, block_idx_x() - params.blocks);
    }
}

/// dsink = −Σ exp(sink − lse)·delta over the rows of every item, in one order. Rows past the end,
/// and those without a key or a sink, have an lse of +∞.
#[inline(always)]
unsafe fn sink_gradient(params: &ConvertMaskedParams, head: u32) {
    let (scratch, heads) = (&params.convert.scratch, params.convert.q_heads);
    let items = divide(params.convert.batch_heads, heads);
    let offset = params.sink.offset(0, head) * 4;
    let sink = load_global_f32(params.sink.address.wrapping_add(offset as u64));
    let thread = thread_idx_x();
    let mut sum = 0.0;
    let mut item = 0;
    while item < items {
        let first = (item * heads + head) as u64 * scratch.padded_rows as u64;
        let mut row = thread;
        while row < scratch.padded_rows {
            let place = (first + row as u64) * 4;
            let lse = load_global_f32(scratch.lse + place);
            let delta = load_global_f32(scratch.delta + place);
            let p = exp2((sink - lse) * core::f32::consts::LOG2_E);
            sum -= p * delta;
            row += THREADS;
        }
        item += 1;
    }
    let mut distance = 16;
    while distance > 0 {
        sum += shuffle_xor(sum, distance);
        distance /= 2;
    }
    let shared = dynamic_shared();
    if thread.is_multiple_of(32) {
        store_shared_u32(shared + thread / 8, sum.to_bits());
    }
    sync_threads();
    if thread == 0 {
        let sums = load_shared_v4(shared);
        let of = |warp: usize| f32::from_bits(sums[warp]);
        let sum = (of(0) + of(1)) + (of(2) + of(3));
        store_global_f32(params.sink_gradient + head as u64 * 4, sum);
    }
}
