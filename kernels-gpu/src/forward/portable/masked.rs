//! The portable forward kernel of the classes `masked` and `general`: windows, lengths, packed
//! items, ALiBi, softcap and sinks; then boolean masks, biases and dropout as well.
//!
//! Rows, warps, ring and barriers are those of the plain kernel (see `mod.rs`). What differs:
//!
//! **Where a block works.** It finds its item and its rows there first ([`Place`]); thread 0 leaves
//! them in shared memory, where they are safe to read after the loop's first barrier, or after the
//! one that ends the loop. A block between two items returns at once, all its threads alike.
//!
//! **Which tiles.** Tiles are counted from the first key that any of the block's rows sees, not
//! from key 0, and end with the last: what a window hides is neither loaded nor multiplied. In a
//! `general` kernel the first tile begins at a multiple of 32 keys, as dropout's blocks do; the
//! keys in front of the block's first, and those past its last, are zero in shared memory.
//!
//! **Scores.** Where an option adds to a score, products are scaled first, and the softmax goes on
//! in natural units; otherwise the scale stays in the exponent as in the plain kernel.
//!
//! **Tiles that a boolean mask hides.** A warp reads what the mask shows of its rows before the
//! product, a bit a score, and keeps it in shared memory; where that is nothing goes on to the next
//! tile: its rows' state stays as it is. The barriers are the block's, and the warp meets the
//! others there all the same.
//!
//! **Rows without a key,** and rows of an item that are not used, come out as exact zeros whatever
//! the accumulator holds.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::dropout::BLOCK_KEYS;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::options::{HeadValues, PortableMaskedParams};
use ferroflash_core::row_state::RowState;
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::{ForwardTiling, SharedPlan};

use super::place::Place;
use super::ring::Ring;
use super::{Kernel, THREADS, Warp, fragment_row};
use crate::forward::softmax::ThreadRows;
use crate::options::{load_dropout, store_dropout};
use crate::pieces::{bring_tile, write_fragment};
use crate::ptx::async_copy::wait_group;
use crate::ptx::math::{exp2, log2};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    dynamic_shared, load_global_u32, load_shared_v4, store_global_f32, store_shared_u32,
    store_shared_v4,
};
use crate::ptx::thread::{opaque, sync_threads, thread_idx_x};
use crate::ptx::warp::{any, shuffle_xor};
use crate::tile::{LaneAddress, Rows, write_tile};

/// The work of one block.
///
/// # Safety
/// Launched as the kernel table says, with one block for each of the schedule's and with tensors as
/// the parameters describe them.
#[inline(always)]
pub unsafe fn block<T: ForwardTiling, E: MatrixElement, M: MaskKind>(
    params: &PortableMaskedParams,
) {
    const { Kernel::<T, E>::CHECKED };
    const {
        let is_general = matches!(M::CLASS, MaskClass::General);
        assert!(!is_general || T::SHAPE.kv_columns.is_multiple_of(BLOCK_KEYS));
        assert!(!is_general || Kernel::<T, E>::SCORE_TILES <= 8);
    };
    let tile = T::SHAPE;
    let plan = const { SharedPlan::portable_masked(T::SHAPE, E::PIECES) };
    let forward = &params.forward;
    let thread = thread_idx_x();
    let shared = dynamic_shared();

    let Some((mut place, first_k)) = Place::find(params, tile.q_rows, thread % 32) else { return };
    let rows = place.first_row..(place.first_row + tile.q_rows).min(place.q_len);
    let keys = place.visible(&params.items).keys_of_any(&rows);
    place.first_key = match M::CLASS {
        MaskClass::General => keys.start / BLOCK_KEYS * BLOCK_KEYS,
        _ => keys.start,
    };
    let (dropout_slot, shown_slot) =
        (shared + plan.works + SharedPlan::DROPOUT, shared + plan.works + SharedPlan::SHOWN);
    if thread == 0 {
        place.store(shared + plan.works);
        if matches!(M::CLASS, MaskClass::General) && params.options.drops != 0 {
            let head = place.item.wrapping_mul(forward.q_heads).wrapping_add(place.q_head);
            store_dropout(&params.options, dropout_slot, head);
        }
    }
    let q_row = place.first_q + place.first_row;
    let q_end = place.first_q + place.q_len;
    let q_rows = Rows::of(&forward.q, place.batch, place.q_head, q_row, q_end);
    bring_tile::<E, THREADS>(Kernel::<T, E>::Q, q_rows, shared + plan.q, thread);
    let kv_head = divide(place.q_head, forward.group);
    let is_general = matches!(M::CLASS, MaskClass::General);
    // Keys are counted from the block's first, here and in the ring.
    let (keys_end, hidden) = (keys.end - place.first_key, keys.start - place.first_key);
    let of_block = |tensor| {
        let rows = Rows::of(tensor, place.batch, kv_head, first_k, first_k + keys.end);
        let rows = rows.from_row(place.first_key);
        // The same number either way, and in one register or two: `general` spills with one.
        let count = if is_general { rows.count } else { keys_end };
        Rows { hidden, count, ..rows }
    };
    let ring = Ring { k: of_block(&forward.k), v: of_block(&forward.v), shared };
    let sources_slot = shared + plan.works + SharedPlan::SOURCES;
    if thread == 0 && !is_general {
        let [k, v] = [ring.k.address, ring.v.address];
        store_shared_v4(sources_slot, [k as u32, (k >> 32) as u32, v as u32, (v >> 32) as u32]);
    }
    // Registers are short: behind the first barrier addresses are read again for each tile, but
    // in `general`, where that spills at 96 channels.
    let ring_again = || {
        if is_general {
            return ring;
        }
        let [k, k_high, v, v_high] = load_shared_v4(sources_slot);
        let address = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        Ring {
            k: Rows { address: address(k, k_high), ..ring.k },
            v: Rows { address: address(v, v_high), ..ring.v },
            shared,
        }
    };

    let mut output = T::Output::ZERO;
    let mut state = ThreadRows::EMPTY;
    let mut kv_tile = 0;
    Kernel::<T, E>::fill(&ring, keys_end, thread);
    if forward.query_sign != 0 {
        Kernel::<T, E>::flip_queries(shared + plan.q, forward.query_sign, thread);
    }
    while kv_tile * tile.kv_columns < keys_end {
        Kernel::<T, E>::await_keys(ring_again, kv_tile, keys_end, thread);
        let slot = Kernel::<T, E>::slot(kv_tile);
        if matches!(M::CLASS, MaskClass::General) && params.options.boolean_mask.address != 0 {
            let (place, warp) = (Place::load(shared + plan.works), Warp::of::<T>(thread));
            let tile_key = opaque(kv_tile) * tile.kv_columns;
            let shown = Kernel::<T, E>::shown(&params.options, &place, tile_key, &warp);
            // The product leaves no register for it; each thread has a place of its own.
            let slot = shown_slot + opaque(thread) * 8;
            store_shared_u32(slot, shown[0]);
            store_shared_u32(slot + 4, shown[1]);
            if !any(shown[0] | shown[1] != 0) {
                Kernel::<T, E>::await_values(ring_again, kv_tile, keys_end, thread);
                kv_tile += 1;
                continue;
            }
        }
        let mut scores = {
            let warp = Warp::of::<T>(thread);
            let k_shared = shared + plan.k + slot * plan.k_stage;
            let q = LaneAddress::rows_first(&Kernel::<T, E>::Q, shared + plan.q, warp.lane);
            let k = LaneAddress::columns_first(&Kernel::<T, E>::K, k_shared, warp.lane);
            Kernel::<T, E>::scores(q, warp.first_row, k)
        };
        let tile_key = kv_tile * tile.kv_columns;
        {
            let (place, warp) = (Place::load(shared + plan.works), Warp::of::<T>(thread));
            let shown = shown_slot + opaque(thread) * 8;
            Kernel::<T, E>::finish_scores::<M>(&mut scores, params, &place, tile_key, &warp, shown);
        }
        Kernel::<T, E>::await_values(ring_again, kv_tile, keys_end, thread);
        let (rows, tiles) = (Kernel::<T, E>::ROWS, Kernel::<T, E>::SCORE_TILES);
        let large = Kernel::<T, E>::LARGE_OFFSET;
        let mut advance = state.advance(&scores, rows, tiles, forward.scale_log2, large);
        if advance.is_needed {
            let mut row = 0;
            while row < rows {
                Kernel::<T, E>::scale_row(&mut output, row, advance.rescale[row]);
                row += 1;
            }
            state.subtract_large(&mut scores, rows, tiles, &mut advance, large);
        }
        let mut probabilities = |scores: &mut T::Scores, step: usize| {
            let scale = forward.scale_log2;
            state.exponentials(scores, rows, tiles, step * 2, &advance.offset, scale);
        };
        let v_shared = shared + plan.v + slot * plan.v_stage;
        let lane = Warp::of::<T>(thread).lane;
        let v = LaneAddress::rows_first(&Kernel::<T, E>::V, v_shared, lane);
        if matches!(M::CLASS, MaskClass::General) {
            let mut step = 0;
            while step < tiles / 2 {
                probabilities(&mut scores, step);
                step += 1;
            }
            if params.options.drops != 0 {
                let (mask, head) = load_dropout(&params.options, dropout_slot);
                let (first_row, first_key) = Place::load_first(shared + plan.works);
                let warp = Warp::of::<T>(thread);
                let first = (first_row + warp.first_row, first_key + tile_key);
                Kernel::<T, E>::drop_probabilities(&mut scores, &mask, head, first, warp.lane);
            }
            Kernel::<T, E>::add_values(&mut output, &mut scores, v, |_, _| {});
        } else {
            Kernel::<T, E>::add_values(&mut output, &mut scores, v, probabilities);
        }
        kv_tile += 1;
    }

    wait_group::<0>();
    sync_threads();
    let place = Place::load(shared + plan.works);
    let warp = Warp::of::<T>(thread);
    let first_lane_row = place.first_row + warp.first_row + warp.lane / 4;
    let first_lse = (place.batch * forward.q_heads + place.q_head) as u64
        * params.items.q_tokens as u64
        + place.first_q as u64;
    let sink = sink_state(&params.options.sink, &place);
    let keep_scale = match M::CLASS {
        MaskClass::General if params.options.drops != 0 => params.options.dropout.keep_scale,
        _ => 1.0,
    };
    let mut row = 0;
    while row < Kernel::<T, E>::ROW_TILES * 2 {
        let (mut normalizer, mut lse) = finish_with_sink(&state, row, forward.scale, sink);
        let q_row = first_lane_row + fragment_row(row);
        if q_row >= place.q_len {
            (normalizer, lse) = (0.0, f32::NEG_INFINITY);
        }
        Kernel::<T, E>::scale_row_or_clear(&mut output, row, normalizer * keep_scale);
        if forward.lse != 0 && warp.lane.is_multiple_of(4) && q_row < place.q_rows {
            store_global_f32(forward.lse + (first_lse + q_row as u64) * 4, lse);
        }
        row += 1;
    }
    if E::PIECES == 1 {
        Kernel::<T, E>::stage_output(&output, shared + plan.o, warp.first_row, warp.lane);
        sync_threads();
    }
    let q_row = place.first_q + place.first_row;
    let q_end = place.first_q + place.q_rows;
    let o_rows = Rows::of(&forward.o, place.batch, place.q_head, q_row, q_end);
    if E::PIECES == 1 {
        write_tile::<THREADS>(Kernel::<T, E>::O, o_rows, shared + plan.o, thread);
    } else {
        write_fragment(&output, 1.0, o_rows, warp.first_row, warp.lane);
    }
}

impl<T: ForwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Multiplies one row's output by `factor`; by 0 it becomes 0, whatever it was.
    #[inline(always)]
    unsafe fn scale_row_or_clear(output: &mut T::Output, row: usize, factor: f32) {
        let first = row / 2 * Self::OUTPUT_TILES * 4 + row % 2 * 2;
        let mut tile = 0;
        while tile < Self::OUTPUT_TILES {
            let index = first + tile * 4;
            let (left, right) = (output.at(index), output.at(index + 1));
            *output.at_mut(index) = if factor == 0.0 { 0.0 } else { left * factor };
            *output.at_mut(index + 1) = if factor == 0.0 { 0.0 } else { right * factor };
            tile += 1;
        }
    }
}

/// A head's sink as the state of one key, or of none.
#[inline(always)]
unsafe fn sink_state(sink: &HeadValues, place: &Place) -> RowState<f32> {
    if sink.address == 0 {
        return RowState::<f32>::EMPTY;
    }
    let offset = sink.offset(place.item, place.q_head) * 4;
    let logit = f32::from_bits(load_global_u32(sink.address.wrapping_add(offset as u64)));
    RowState { row_max: logit, row_sum: 1.0 }
}

/// A row's last step: the factor that normalises its output, and its natural log-sum-exp, after the
/// head's sink has joined. Without either, 0 and −∞.
#[inline(always)]
unsafe fn finish_with_sink(
    state: &ThreadRows,
    row: usize,
    scale: f32,
    sink: RowState<f32>,
) -> (f32, f32) {
    let mut row_sum = state.row_sum[row];
    row_sum += shuffle_xor(row_sum, 1);
    row_sum += shuffle_xor(row_sum, 2);
    let own = RowState { row_max: state.row_max[row] * scale, row_sum };
    let exp = |x: f32| exp2(x * core::f32::consts::LOG2_E);
    let (merged, rescale) = own.merge(sink, exp);
    (merged.normalizer() * rescale.left, merged.lse(|x| log2(x) * core::f32::consts::LN_2))
}
