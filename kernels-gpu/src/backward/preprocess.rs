//! The first backward kernel: lse padded, delta = ⟨dO, O⟩ − dLSE, sums and counters cleared (M4.4
//! §0x06.1).
//!
//! **Who owns what.** A block owns 64 padded rows of one (batch, query head), a warp 16 of them.
//! Nothing is shared and nothing is waited for: all of it is moving memory once. Rows of O and dO
//! are read in 16-byte chunks, as many lanes a row as it has chunks (rounded up to a power of two)
//! and four rows a lane before any is used, so that enough loads are under way; tensors that do not
//! allow such accesses are read value by value.
//!
//! **Powers of two.** A main kernel that saves a multiplication a score takes lse times log2 e.
//! Where lse is large its rounding would be felt: the block's rows then stay natural, and a word
//! says so.
//!
//! **What the main kernel relies on.** For rows past the end, and rows that saw no key, lse is +∞
//! and delta 0: P = exp(s − lse) and dS = P·(dP − delta) are then 0 for every finite s and dP.

use ferroflash_core::backward::params::PreprocessParams;
use ferroflash_core::backward::scratch::{LARGEST_SCALED_LSE, LSE_ROWS};
use ferroflash_core::backward::tilings::BackwardRows;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::schedule::divide;
use ferroflash_core::tile::Tiling;

use crate::ptx::math::fma;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_global_f32, load_global_v4, store_global_f32, store_global_v4};
use crate::ptx::thread::{block_idx_x, grid_dim_x, thread_idx_x};
use crate::ptx::warp::{any, shuffle_xor};
use crate::tile::Rows;

const ROWS: u32 = BackwardRows::SHAPE.q_rows;
const THREADS: u32 = BackwardRows::SHAPE.warps * 32;
// A block's rows share one scale of lse.
const _: () = assert!(ROWS == LSE_ROWS);
const ROWS_PER_WARP: u32 = BackwardRows::SHAPE.rows_per_warp();
/// Rows that a lane reads before it uses any.
const AT_ONCE: usize = 4;

/// One warp's rows.
struct Warp<'a> {
    params: &'a PreprocessParams,
    batch_head: u32,
    /// First of its rows.
    first_row: u32,
    lane: u32,
    /// What lse is multiplied by.
    lse_factor: f32,
}

impl Warp<'_> {
    /// Writes lse and delta of `row`, whose ⟨dO, O⟩ is `sum`.
    #[inline(always)]
    unsafe fn finish(&self, row: u32, sum: f32) {
        let params = self.params;
        if row >= params.scratch.padded_rows {
            return;
        }
        let (mut lse, mut delta) = (f32::INFINITY, 0.0);
        if row < params.q_len {
            let index = self.batch_head as u64 * params.q_len as u64 + row as u64;
            let natural = load_global_f32(params.lse + index * 4);
            if natural != f32::NEG_INFINITY {
                lse = natural * self.lse_factor;
                delta = sum;
                if params.d_lse != 0 {
                    delta -= load_global_f32(params.d_lse + index * 4);
                }
            }
        }
        let index = self.batch_head as u64 * params.scratch.padded_rows as u64 + row as u64;
        store_global_f32(params.scratch.lse + index * 4, lse);
        store_global_f32(params.scratch.delta + index * 4, delta);
    }

    /// Rows whose every chunk of 16 bytes may be read at once.
    #[inline(always)]
    unsafe fn wide<E: MatrixElement>(&self, o: Rows, d_o: Rows) {
        let chunks = o.bytes / 16;
        let lanes = chunks.next_power_of_two().min(32);
        let (row_of_lane, chunk) = (divide(self.lane, lanes), self.lane % lanes);
        let rows_at_once = divide(32, lanes);
        let mut first = 0;
        while first < ROWS_PER_WARP {
            let mut read = [([0; 4], [0; 4]); AT_ONCE];
            let mut step = 0;
            while step < AT_ONCE {
                let row = first + step as u32 * rows_at_once + row_of_lane;
                if row < ROWS_PER_WARP.min(o.count) && chunk < chunks {
                    let (o, d_o) = (o.from_row(row), d_o.from_row(row));
                    read[step].0 = load_global_v4(o.address + (chunk * 16) as u64);
                    read[step].1 = load_global_v4(d_o.address + (chunk * 16) as u64);
                }
                step += 1;
            }
            let mut step = 0;
            while step < AT_ONCE {
                let mut sum = E::dot(read[step].0, read[step].1, 0.0);
                let mut distance = 16;
                while distance > 0 {
                    // Beyond a row's lanes are another's.
                    if distance < lanes {
                        sum += shuffle_xor(sum, distance);
                    }
                    distance /= 2;
                }
                let row = first + step as u32 * rows_at_once + row_of_lane;
                if chunk == 0 && row < ROWS_PER_WARP {
                    self.finish(self.first_row + row, sum);
                }
                step += 1;
            }
            first += AT_ONCE as u32 * rows_at_once;
        }
    }

    /// Any rows, a value at a time.
    #[inline(always)]
    unsafe fn narrow<E: MatrixElement>(&self, o: Rows, d_o: Rows) {
        let mut row = 0;
        while row < ROWS_PER_WARP {
            let mut sum = 0.0;
            let (from, gradient) = (o.from_row(row), d_o.from_row(row));
            let mut byte = self.lane * E::BYTES;
            while byte < o.bytes && row < o.count {
                let a = E::load(from.address + byte as u64);
                let b = E::load(gradient.address + byte as u64);
                sum = fma(a, b, sum);
                byte += 32 * E::BYTES;
            }
            let mut distance = 16;
            while distance > 0 {
                sum += shuffle_xor(sum, distance);
                distance /= 2;
            }
            if self.lane == 0 {
                self.finish(self.first_row + row, sum);
            }
            row += 1;
        }
    }
}

/// Whether every row is a whole number of 16-byte chunks at addresses that allow them.
#[inline(always)]
fn is_wide(tensor: &DeviceTensor) -> bool {
    tensor.access_bytes == 16 && tensor.channels.is_multiple_of(8)
}

/// Clears this block's rows of the sums of dQ, and its part of the counters.
#[inline(always)]
unsafe fn clear(params: &PreprocessParams, batch_head: u32, first_row: u32, thread: u32) {
    let scratch = &params.scratch;
    if scratch.dq != 0 && batch_head < params.cleared_heads {
        let row = batch_head as u64 * scratch.padded_rows as u64 + first_row as u64;
        let rows = ROWS.min(scratch.padded_rows - first_row);
        let start = scratch.dq + row * (scratch.dq_channels * 4) as u64;
        let bytes = rows * scratch.dq_channels * 4;
        let mut byte = thread * 16;
        while byte < bytes {
            store_global_v4(start + byte as u64, [0; 4]);
            byte += THREADS * 16;
        }
    }
    let mut counter = block_idx_x() as u64 * THREADS as u64 + thread as u64;
    while counter < params.counters as u64 {
        store_global_f32(scratch.counters + counter * 4, 0.0);
        counter += grid_dim_x() as u64 * THREADS as u64;
    }
}

/// Whether some lse of the block's rows is large. Then their lse stays natural, which is noted.
///
/// # Safety
/// All threads of the block call this; `row` is the first of its rows.
#[inline(always)]
unsafe fn stays_natural(params: &PreprocessParams, batch_head: u32, row: u32, thread: u32) -> bool {
    let mut is_large = params.lse_factor == 0.0;
    let mut own = thread % 32;
    while own < ROWS {
        if row + own < params.q_len {
            let index = batch_head as u64 * params.q_len as u64 + (row + own) as u64;
            let lse = load_global_f32(params.lse + index * 4);
            is_large |= lse.abs() > LARGEST_SCALED_LSE && lse != f32::NEG_INFINITY;
        }
        own += 32;
    }
    let is_large = any(is_large);
    if thread == 0 {
        let word = params.scratch.natural + block_idx_x() as u64 * 4;
        store_global_f32(word, f32::from_bits(is_large as u32));
    }
    is_large
}

/// The work of one block.
///
/// # Safety
/// Launched as the kernel table says, with a block for every 64 padded rows of every (batch, query
/// head), and with tensors and scratch as the parameters describe them.
#[inline(always)]
pub unsafe fn block<E: MatrixElement>(params: &PreprocessParams) {
    let thread = thread_idx_x();
    let row_blocks = params.scratch.padded_rows.div_ceil(ROWS);
    let batch_head = divide(block_idx_x(), row_blocks);
    let block_row = (block_idx_x() - batch_head * row_blocks) * ROWS;
    clear(params, batch_head, block_row, thread);

    let batch = divide(batch_head, params.q_heads);
    let head = batch_head - batch * params.q_heads;
    let first_row = block_row + thread / 32 * ROWS_PER_WARP;
    let is_natural =
        params.scratch.natural == 0 || stays_natural(params, batch_head, block_row, thread);
    let lse_factor = if is_natural { 1.0 } else { params.lse_factor };
    let warp = Warp { params, batch_head, first_row, lane: thread % 32, lse_factor };
    let o = Rows::of(&params.o, batch, head, first_row, params.q_len);
    let d_o = Rows::of(&params.d_o, batch, head, first_row, params.q_len);
    if is_wide(&params.o) && is_wide(&params.d_o) {
        warp.wide::<E>(o, d_o);
    } else {
        warp.narrow::<E>(o, d_o);
    }
}
