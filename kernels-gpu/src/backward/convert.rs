//! The last backward kernel: dQ = scale · sums, rounded to the element type (M4.4 §0x06.1).
//!
//! **Who owns what.** A block owns 64 rows by 64 channels of one (batch, query head), a warp 16
//! rows of them: eight blocks of 16×8 sums, each read by the whole warp as one run of 512 bytes,
//! all of them before any is used.
//!
//! **Shared memory.** The sums lie in accumulator order; the rounded tile is staged in shared
//! memory so that it leaves in 16-byte rows. One barrier stands between staging and writing.

use ferroflash_core::backward::params::ConvertParams;
use ferroflash_core::backward::scratch::{CONVERTED_ROWS, QueryGradientOrder};
use ferroflash_core::backward::tilings::BackwardRows;
use ferroflash_core::schedule::divide;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::Tiling;

use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    dynamic_shared, load_global_u32, load_global_v4, store_global_f32, store_shared_u16,
    store_shared_u32,
};
use crate::ptx::thread::{block_idx_x, sync_threads, thread_idx_x};
use crate::ptx::warp::shuffle_xor;
use crate::tile::{Rows, write_tile};

const ROWS: u32 = BackwardRows::SHAPE.q_rows;
const COLUMNS: u32 = 64;
const THREADS: u32 = BackwardRows::SHAPE.warps * 32;
const ROWS_PER_WARP: u32 = BackwardRows::SHAPE.rows_per_warp();
const TILE: PanelLayout = PanelLayout { rows: ROWS, columns: COLUMNS };
/// Blocks of 128 sums that a warp converts.
const BLOCKS: usize = (ROWS_PER_WARP * COLUMNS / 128) as usize;

/// Puts one block of 16 rows by 8 channels, in lanes' order, at (`row`, `column`) of the tile.
#[inline(always)]
unsafe fn stage_lanes<E: MatrixElement>(
    sums: [f32; 4],
    shared: u32,
    row: u32,
    column: u32,
    lane: u32,
) {
    let (row, column) = (row + lane / 4, column + lane % 4 * 2);
    store_shared_u32(shared + TILE.element_offset(row, column), E::pack(sums[0], sums[1]));
    store_shared_u32(shared + TILE.element_offset(row + 8, column), E::pack(sums[2], sums[3]));
}

/// The same in values' order: a lane read four even or four odd channels of one row, and the lane
/// eight further the others.
#[inline(always)]
unsafe fn stage_values<E: MatrixElement>(
    sums: [f32; 4],
    shared: u32,
    row: u32,
    column: u32,
    lane: u32,
) {
    let is_odd = lane / 8 % 2 == 1;
    let others = [
        shuffle_xor(sums[0], 8),
        shuffle_xor(sums[1], 8),
        shuffle_xor(sums[2], 8),
        shuffle_xor(sums[3], 8),
    ];
    let row = row + lane % 8 + lane / 16 * 8;
    let (first, pairs) = if is_odd {
        (4, [E::pack(others[2], sums[2]), E::pack(others[3], sums[3])])
    } else {
        (0, [E::pack(sums[0], others[0]), E::pack(sums[1], others[1])])
    };
    let place = shared + TILE.element_offset(row, column + first);
    store_shared_u32(place, pairs[0]);
    store_shared_u32(place + 4, pairs[1]);
}

/// Writes such a block of f32, in values' order, to the rows and channels that exist.
#[inline(always)]
unsafe fn write_values(sums: [f32; 4], rows: Rows, row: u32, column: u32, lane: u32) {
    let (row, column) = (row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2);
    if row >= rows.count {
        return;
    }
    let to = rows.address.wrapping_add((row as i64 * rows.stride) as u64);
    let mut index = 0;
    while index < 4 {
        let byte = (column + index as u32 * 2) * 4;
        if byte < rows.bytes {
            store_global_f32(to.wrapping_add(byte as u64), sums[index]);
        }
        index += 1;
    }
}

/// A block of 16 channels by 8 rows.
#[inline(always)]
unsafe fn stage_transposed<E: MatrixElement>(
    sums: [f32; 4],
    shared: u32,
    row: u32,
    column: u32,
    lane: u32,
) {
    let (row, column) = (row + lane % 4 * 2, column + lane / 4);
    let (left, right) = (E::pack(sums[0], sums[1]), E::pack(sums[2], sums[3]));
    store_shared_u16(shared + TILE.element_offset(row, column), left as u16);
    store_shared_u16(shared + TILE.element_offset(row + 1, column), (left >> 16) as u16);
    store_shared_u16(shared + TILE.element_offset(row, column + 8), right as u16);
    store_shared_u16(shared + TILE.element_offset(row + 1, column + 8), (right >> 16) as u16);
}

/// Whether the main kernel has converted the block's rows, the last of them as well.
#[inline(always)]
unsafe fn is_converted(params: &ConvertParams, batch_head: u32, first_row: u32) -> bool {
    if params.converted == 0 {
        return false;
    }
    let padded_rows = params.scratch.padded_rows;
    let end = (first_row + ROWS).min(padded_rows);
    let end = (batch_head as u64 * padded_rows as u64 + end as u64) / CONVERTED_ROWS as u64;
    let section = divide((end - 1) as u32, params.section_groups);
    let groups = load_global_u32(params.converted + section as u64 * 4);
    groups >= end as u32 - section * params.section_groups
}

/// The work of one block.
///
/// # Safety
/// Launched as the kernel table says, with a block for every 64 channels of every 64 padded rows of
/// every (batch, query head), and with the scratch and dQ as the parameters describe them.
#[inline(always)]
pub unsafe fn block<E: MatrixElement>(params: &ConvertParams) {
    let (scratch, thread) = (&params.scratch, thread_idx_x());
    let (lane, warp) = (thread % 32, thread / 32);
    let panels = scratch.dq_channels.div_ceil(COLUMNS);
    let row_blocks = scratch.padded_rows.div_ceil(ROWS);
    let row_block = divide(block_idx_x(), panels);
    let first_column = (block_idx_x() - row_block * panels) * COLUMNS;
    let batch_head = divide(row_block, row_blocks);
    let first_row = (row_block - batch_head * row_blocks) * ROWS;
    if is_converted(params, batch_head, first_row) {
        return;
    }
    let shared = dynamic_shared();

    let is_transposed = matches!(params.order, QueryGradientOrder::Transposed);
    // The warp's blocks are `across` channels wide, and as many rows high as 128 sums fill.
    let (high, wide) = if is_transposed { (8, 16) } else { (16, 8) };
    let warp_row = warp * ROWS_PER_WARP;
    let head_rows = batch_head as u64 * scratch.padded_rows as u64;
    let mut sums = [[0.0; 4]; BLOCKS];
    let mut index = 0;
    while index < BLOCKS {
        let (row, column) = place(index as u32, is_transposed);
        let (row, column) = (first_row + warp_row + row, first_column + column);
        if row < scratch.padded_rows && column < scratch.dq_channels {
            let blocks_before = (row / high) as u64 * (scratch.dq_channels / wide) as u64;
            let block = blocks_before + (column / wide) as u64;
            let sum = head_rows * scratch.dq_channels as u64 + block * 128 + (lane * 4) as u64;
            let read = load_global_v4(scratch.dq + sum * 4);
            sums[index] = [
                f32::from_bits(read[0]) * params.scale,
                f32::from_bits(read[1]) * params.scale,
                f32::from_bits(read[2]) * params.scale,
                f32::from_bits(read[3]) * params.scale,
            ];
        }
        index += 1;
    }
    let batch = divide(batch_head, params.q_heads);
    let head = batch_head - batch * params.q_heads;
    let rows = Rows::of(&params.dq, batch, head, first_row, params.q_len);
    if E::PIECES > 1 {
        let mut index = 0;
        while index < BLOCKS {
            let (row, column) = place(index as u32, is_transposed);
            write_values(sums[index], rows, warp_row + row, first_column + column, lane);
            index += 1;
        }
        return;
    }
    let mut index = 0;
    while index < BLOCKS {
        let (row, column) = place(index as u32, is_transposed);
        let row = warp_row + row;
        match params.order {
            QueryGradientOrder::Lanes => stage_lanes::<E>(sums[index], shared, row, column, lane),
            QueryGradientOrder::Values => stage_values::<E>(sums[index], shared, row, column, lane),
            QueryGradientOrder::Transposed => {
                stage_transposed::<E>(sums[index], shared, row, column, lane);
            }
        }
        index += 1;
    }
    sync_threads();
    let rows = Rows {
        address: rows.address + (first_column * 2) as u64,
        bytes: rows.bytes.saturating_sub(first_column * 2),
        ..rows
    };
    write_tile::<THREADS>(TILE, rows, shared, thread);
}

/// Where block `index` of a warp lies in its rows.
#[inline(always)]
const fn place(index: u32, is_transposed: bool) -> (u32, u32) {
    if is_transposed { (index % 2 * 8, index / 2 * 16) } else { (0, index * 8) }
}
