//! Moving 16-bit tiles between global memory, shared memory and `mma` operands.

use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::swizzle::{CHUNK_BYTES, CHUNK_ELEMENTS, PanelLayout};

use crate::ptx::async_copy::{cp_async_4, cp_async_8, cp_async_16};
use crate::ptx::matrix::{MatrixElement, ldmatrix_x4, ldmatrix_x4_trans, stmatrix_x4};
use crate::ptx::memory::{
    load_global_u16, load_shared_u16, load_shared_v4, store_global_u16, store_global_v4,
    store_shared_u16, store_shared_u32,
};

/// Rows of one head of a tensor, starting at a row that a tile starts at.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Address of the first row.
    pub address: u64,
    /// Bytes from one row to the next.
    pub stride: i64,
    /// Rows that exist; the tile's others read as zero and are not written.
    pub count: u32,
    /// First rows that read as zero all the same.
    pub hidden: u32,
    /// Bytes of a row that exist.
    pub bytes: u32,
    /// Widest access that the rows' alignment allows, in bytes.
    pub access: u32,
}

impl Rows {
    /// The rows of (`batch`, `head`) from `row` on, of a sequence of `rows` rows.
    #[inline(always)]
    pub fn of(tensor: &DeviceTensor, batch: u32, head: u32, row: u32, rows: u32) -> Self {
        Self {
            address: tensor.address + (tensor.strides.offset(batch, row, head) * 2) as u64,
            stride: tensor.strides.row * 2,
            count: rows.saturating_sub(row),
            hidden: 0,
            bytes: tensor.channels * 2,
            access: tensor.access_bytes,
        }
    }

    /// The rows from `row` on.
    #[inline(always)]
    pub fn from_row(self, row: u32) -> Self {
        Self {
            address: self.address.wrapping_add((row as i64 * self.stride) as u64),
            count: self.count.saturating_sub(row),
            hidden: self.hidden.saturating_sub(row),
            ..self
        }
    }
}

/// What one thread of `THREADS` moves of a tile: one 16-byte chunk of every
/// `THREADS / chunks_per_row`-th row of each panel. That distance is a multiple of 8, so that the
/// chunk's swizzled place is the same in each of the thread's rows.
pub(crate) struct Share {
    pub(crate) row: u32,
    pub(crate) chunk: u32,
    pub(crate) row_step: u32,
    pub(crate) offset: u32,
}

impl Share {
    #[inline(always)]
    pub(crate) fn new<const THREADS: u32>(layout: &PanelLayout, thread: u32) -> Self {
        let chunks = layout.panel_columns() / CHUNK_ELEMENTS;
        let (row, chunk) = (thread / chunks, thread % chunks);
        Self { row, chunk, row_step: THREADS / chunks, offset: layout.chunk_offset(row, chunk) }
    }
}

/// Starts copying a tile into shared memory at `shared`; rows and channels that do not exist are
/// filled with zeros, so that memory past a sequence's end never reaches a product.
///
/// # Safety
/// The rows are readable; the tile's shared memory is free to overwrite; all `THREADS` threads call
/// this, and read the tile only after waiting for their copies and a barrier.
#[inline(always)]
pub unsafe fn copy_tile<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    if rows.access == 16 {
        copy_tile_wide::<THREADS>(layout, rows, shared, thread);
    } else {
        copy_tile_narrow::<THREADS>(layout, rows, shared, thread);
    }
}

/// As [`copy_tile`], for a tile of many: nearly all of them are whole, and those need no compare.
///
/// # Safety
/// As [`copy_tile`].
#[inline(always)]
pub unsafe fn copy_ring_tile<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let is_whole = rows.count >= layout.rows
        && rows.hidden == 0
        && rows.bytes >= layout.columns * 2
        && rows.access == 16;
    if is_whole {
        copy_tile_whole::<THREADS>(layout, rows, shared, thread);
    } else {
        copy_tile::<THREADS>(layout, rows, shared, thread);
    }
}

/// Every chunk by one 16-byte copy; each row and channel exists.
#[inline(always)]
unsafe fn copy_tile_whole<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let share = Share::new::<THREADS>(&layout, thread);
    let chunk = (share.chunk * CHUNK_BYTES) as u64;
    let mut source =
        rows.address.wrapping_add((share.row as i64 * rows.stride) as u64).wrapping_add(chunk);
    let step_bytes = (share.row_step as i64 * rows.stride) as u64;
    let target = shared + share.offset;
    let mut step = 0;
    while step < layout.rows / share.row_step {
        let mut panel = 0;
        while panel < layout.panels() {
            let to = target + panel * layout.panel_bytes();
            let from = source.wrapping_add((panel * layout.row_bytes()) as u64);
            cp_async_16(to + step * share.row_step * layout.row_bytes(), from, CHUNK_BYTES);
            panel += 1;
        }
        source = source.wrapping_add(step_bytes);
        step += 1;
    }
}

/// Every chunk by one 16-byte copy, straight-line.
#[inline(always)]
unsafe fn copy_tile_wide<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let share = Share::new::<THREADS>(&layout, thread);
    let row_source = rows.address.wrapping_add((share.row as i64 * rows.stride) as u64);
    let step_bytes = (share.row_step as i64 * rows.stride) as u64;
    let mut panel = 0;
    while panel < layout.panels() {
        let column = panel * layout.row_bytes() + share.chunk * CHUNK_BYTES;
        let exist = rows.bytes.saturating_sub(column).min(CHUNK_BYTES);
        let target = shared + panel * layout.panel_bytes() + share.offset;
        let mut source = row_source + column as u64;
        let mut step = 0;
        while step < layout.rows / share.row_step {
            let row = share.row + step * share.row_step;
            let read = if row < rows.count && row >= rows.hidden { exist } else { 0 };
            // Nothing is read where `read` is 0, yet the address stays inside the tensor.
            let from = if read == 0 { rows.address } else { source };
            cp_async_16(target + step * share.row_step * layout.row_bytes(), from, read);
            source = source.wrapping_add(step_bytes);
            step += 1;
        }
        panel += 1;
    }
}

/// Every chunk by copies of 8, 4 or 2 bytes, in a loop that stays one: rarely taken.
#[inline(always)]
unsafe fn copy_tile_narrow<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let chunks = layout.columns / CHUNK_ELEMENTS;
    let mut index = thread;
    while index < layout.rows * chunks {
        let (row, chunk) = (index / chunks, index % chunks);
        let exist = rows.bytes.saturating_sub(chunk * CHUNK_BYTES).min(CHUNK_BYTES);
        let read = if row < rows.count && row >= rows.hidden { exist } else { 0 };
        let offset = row as i64 * rows.stride + (chunk * CHUNK_BYTES) as i64;
        let from = rows.address.wrapping_add(offset as u64);
        let to = shared + layout.chunk_offset(row, chunk);
        let mut done = 0;
        while done < CHUNK_BYTES {
            let left = read.saturating_sub(done).min(rows.access);
            let source = if left == 0 { rows.address } else { from + done as u64 };
            match rows.access {
                8 => cp_async_8(to + done, source, left),
                4 => cp_async_4(to + done, source, left),
                _ => {
                    let value = if left == 0 { 0 } else { load_global_u16(source) };
                    store_shared_u16(to + done, value);
                }
            }
            done += rows.access;
        }
        index += THREADS;
    }
}

/// Writes a tile from shared memory to the rows and channels that exist.
///
/// # Safety
/// The rows are the block's to write; the tile is complete and visible to all `THREADS` threads,
/// which all call this.
#[inline(always)]
pub unsafe fn write_tile<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let share = Share::new::<THREADS>(&layout, thread);
    let mut panel = 0;
    while panel < layout.panels() {
        let column = panel * layout.row_bytes() + share.chunk * CHUNK_BYTES;
        let exist = rows.bytes.saturating_sub(column).min(CHUNK_BYTES);
        let mut step = 0;
        while step < layout.rows / share.row_step {
            let row = share.row + step * share.row_step;
            let from = shared
                + panel * layout.panel_bytes()
                + share.offset
                + step * share.row_step * layout.row_bytes();
            let to = rows.address.wrapping_add((row as i64 * rows.stride + column as i64) as u64);
            if row < rows.count {
                if exist == CHUNK_BYTES && rows.access == 16 {
                    store_global_v4(to, load_shared_v4(from));
                } else {
                    let mut done = 0;
                    while done < exist {
                        store_global_u16(to + done as u64, load_shared_u16(from + done));
                        done += 2;
                    }
                }
            }
            step += 1;
        }
        panel += 1;
    }
}

/// A lane's way into a tile for `ldmatrix`: where its row and chunk lie when the 16×16 block at the
/// tile's origin is read. Other blocks differ by constants: down by a row multiple of 16, right by
/// an exclusive or inside the panel, since the swizzle is one.
#[derive(Clone, Copy)]
pub struct LaneAddress {
    base: u32,
}

impl LaneAddress {
    /// For operands whose rows are the tile's rows: A of a product, or B stored by columns turned
    /// about (see [`LaneAddress::columns_first`]). Matrices in order: rows 0..8 and 8..16 of the
    /// left chunk, then of the right one.
    #[inline(always)]
    pub fn rows_first(layout: &PanelLayout, shared: u32, lane: u32) -> Self {
        let row = lane % 16;
        Self { base: (shared + layout.chunk_offset(row, 0)) ^ (lane / 16 * CHUNK_BYTES) }
    }

    /// For B operands stored with n as the tile's row: left and right chunk of rows 0..8, then of
    /// rows 8..16.
    #[inline(always)]
    pub fn columns_first(layout: &PanelLayout, shared: u32, lane: u32) -> Self {
        let row = lane % 8 + lane / 16 * 8;
        Self { base: (shared + layout.chunk_offset(row, 0)) ^ (lane / 8 % 2 * CHUNK_BYTES) }
    }

    /// The way into the tile whose origin is (`row`, `column`), multiples of 16 that need not be
    /// constants. Columns read from there add to `column` without a carry inside a panel.
    #[inline(always)]
    pub fn moved(self, layout: &PanelLayout, row: u32, column: u32) -> Self {
        Self { base: self.block(layout, row, column) }
    }

    /// Address in the block `row` (a multiple of 16) rows down and `column` (a multiple of 16)
    /// elements right.
    #[inline(always)]
    pub(crate) fn block(self, layout: &PanelLayout, row: u32, column: u32) -> u32 {
        let (panel, inner) = (column / layout.panel_columns(), column % layout.panel_columns());
        (self.base ^ (inner * 2)) + panel * layout.panel_bytes() + row * layout.row_bytes()
    }

    /// `ldmatrix` of the 16×16 block at (`row`, `column`).
    ///
    /// # Safety
    /// All lanes of the warp call this alike; the block lies in the tile, which is complete.
    #[inline(always)]
    pub unsafe fn load(self, layout: &PanelLayout, row: u32, column: u32) -> [u32; 4] {
        ldmatrix_x4(self.block(layout, row, column))
    }

    /// As [`LaneAddress::load`], each 8×8 matrix transposed.
    ///
    /// # Safety
    /// As [`LaneAddress::load`].
    #[inline(always)]
    pub unsafe fn load_transposed(self, layout: &PanelLayout, row: u32, column: u32) -> [u32; 4] {
        ldmatrix_x4_trans(self.block(layout, row, column))
    }

    /// `stmatrix` of the 16×16 block at (`row`, `column`), as [`LaneAddress::load`] would read it.
    ///
    /// # Safety
    /// As [`LaneAddress::load`]; the block is the warp's to write.
    #[inline(always)]
    pub unsafe fn store(self, layout: &PanelLayout, row: u32, column: u32, values: [u32; 4]) {
        stmatrix_x4(self.block(layout, row, column), values);
    }
}

/// A lane's way into a tile for accumulators: where its pair of the 8×8 block at the tile's origin
/// lies. Other blocks differ by constants, as [`LaneAddress`]'s do.
#[derive(Clone, Copy)]
pub struct PairAddress {
    base: u32,
}

impl PairAddress {
    /// Of the tile at `shared`, from the block at (`row`, `column`) on, a multiple of 8 each.
    #[inline(always)]
    pub fn new(layout: &PanelLayout, shared: u32, row: u32, column: u32, lane: u32) -> Self {
        Self { base: shared + layout.element_offset(row + lane / 4, column + lane % 4 * 2) }
    }

    /// Stores a packed pair into the block `row` rows down and `column` columns right, multiples of
    /// 8 that add to the first block's without a carry inside a panel.
    ///
    /// # Safety
    /// The block lies in the tile, and is the warp's to write.
    #[inline(always)]
    pub unsafe fn store(self, layout: &PanelLayout, row: u32, column: u32, pair: u32) {
        let (panel, inner) = (column / layout.panel_columns(), column % layout.panel_columns());
        let place = (self.base ^ (inner * 2)) + panel * layout.panel_bytes();
        store_shared_u32(place + row * layout.row_bytes(), pair);
    }
}

/// Adds `a · b` to the four accumulator values at `first`.
///
/// # Safety
/// All lanes of the warp call this alike; the accumulator has the values.
#[inline(always)]
pub unsafe fn accumulate<E: MatrixElement, F: Fragment>(
    accumulator: &mut F,
    first: usize,
    a: [u32; 4],
    b: [u32; 2],
) {
    let c = [
        accumulator.at(first),
        accumulator.at(first + 1),
        accumulator.at(first + 2),
        accumulator.at(first + 3),
    ];
    let c = E::mma(a, b, c);
    *accumulator.at_mut(first) = c[0];
    *accumulator.at_mut(first + 1) = c[1];
    *accumulator.at_mut(first + 2) = c[2];
    *accumulator.at_mut(first + 3) = c[3];
}
