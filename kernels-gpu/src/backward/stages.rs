//! The stages around the main kernel for calls with options: they clear a bias' gradient, leave the
//! records of a hopper main kernel's key blocks, and form the sinks' gradient, besides what they do
//! for every call.

use ferroflash_core::backward::params::options::{
    ConvertMaskedParams, PreprocessMaskedParams, RecordParams,
};
use ferroflash_core::backward::record::KeyRecord;
use ferroflash_core::backward::tilings::BackwardRows;
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::Tiling;

use super::{convert, preprocess};
use crate::options::{find_item, read_length};
use crate::ptx::math::exp2;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    dynamic_shared, load_global_f32, load_shared_v4, store_global_f32, store_global_v4,
    store_shared_u32,
};
use crate::ptx::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};
use crate::ptx::warp::shuffle_xor;

const THREADS: u32 = BackwardRows::SHAPE.warps * 32;

/// The work of one preprocess block: its part of the bias' gradient and of the records, then what
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
    let records = &params.records;
    if records.address != 0 {
        let warps = THREADS / 32;
        let mut number = block_idx_x() * warps + thread_idx_x() / 32;
        while number < records.count {
            leave_record(records, number);
            number += grid_dim_x() * warps;
        }
    }
    preprocess::block::<E>(&params.preprocess);
}

/// Leaves record `number`; the lanes of a warp look for its item together.
#[inline(always)]
unsafe fn leave_record(params: &RecordParams, number: u32) {
    let (items, lane) = (&params.items, thread_idx_x() % 32);
    let (q_rows, columns) = (params.q_rows, params.kv_columns);
    // A kernel has nowhere to panic to.
    if q_rows == 0 || columns == 0 {
        return;
    }
    let find = |slot| {
        let first_slot = |index| items.first_kv_slot(index, columns, read_length);
        let index = find_item(items, slot, lane, first_slot);
        (index, slot.wrapping_sub(first_slot(index)))
    };
    let (index, block) = if items.is_packed() {
        find(number)
    } else {
        let index = divide(number, params.kv_blocks);
        (index, number - index * params.kv_blocks)
    };
    let item = items.item(index, read_length);
    let mut record = KeyRecord::of(&item, index, block, (q_rows, columns), params.ordered == 0);
    // In order a block waits for all later ones of its item. Malformed offsets may leave some of
    // them out: not if the search for the last one, which goes the same way, ends here as well.
    if items.is_packed() && params.ordered != 0 && record.key_rows > 0 {
        let blocks = item.kv_rows.div_ceil(columns);
        let last = number - block + blocks - 1;
        if last >= params.count || find(last).0 != index {
            record = KeyRecord::NONE;
        }
    }
    let words = record.words();
    let mut part = 0;
    while part < words.len() {
        if lane == part as u32 {
            let to = number as u64 * (KeyRecord::WORDS * 4) as u64 + (part * 16) as u64;
            store_global_v4(params.address + to, words[part]);
        }
        part += 1;
    }
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
