//! Elements that tensor cores cannot multiply whole: f32 as the sum of three bfloat16 pieces.
//!
//! The first piece is the upper half of an f32's bits, the second the rest rounded to 8 bits, and
//! the third what is left, which has 8 bits at most: the sum is exact for every finite value. (An
//! infinity has no rest, so that it multiplies as a NaN.) A product of two values is six products
//! of pieces; the other three are under 2⁻²² of it. A tile lies in shared memory as three planes of
//! the 16-bit layout, one after the other: it is split once, on its way in, and read by `ldmatrix`
//! as a 16-bit tile is.
//!
//! Tensor cores cut off, rather than round, what an f32 sum cannot hold. The five small products
//! have an accumulator of their own, where what is cut off is 2⁻⁷ of what it would be beside the
//! first; and whoever sums over many keys or queries sums a tile at a time (see the callers).

use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::{CHUNK_ELEMENTS, PanelLayout};

use crate::ptx::convert::{pack_bf16x2, unpack_bf16x2, upper_halves};
use crate::ptx::math::add_here;
use crate::ptx::matrix::{MatrixElement, ldmatrix_x4, ldmatrix_x4_trans};
use crate::ptx::memory::{
    load_global_f32_if, load_global_v4_if, store_global_f32, store_global_v2_f32, store_shared_u32,
    store_shared_v4,
};
use crate::tile::{LaneAddress, Rows, Share, accumulate, copy_ring_tile, copy_tile};

/// Pieces of an f32.
const PIECES: usize = 3;

/// A 16×16 operand in pieces.
pub type Operand = [[u32; 4]; PIECES];

/// The pieces of two values, each piece a pair.
#[inline(always)]
pub fn split(low: f32, high: f32) -> [u32; PIECES] {
    const UPPER: u32 = 0xffff_0000;
    let first = upper_halves(low.to_bits(), high.to_bits());
    let low = low - f32::from_bits(low.to_bits() & UPPER);
    let high = high - f32::from_bits(high.to_bits() & UPPER);
    let second = pack_bf16x2(low, high);
    let [second_low, second_high] = unpack_bf16x2(second);
    let (low, high) = (low - second_low, high - second_high);
    [first, second, upper_halves(low.to_bits(), high.to_bits())]
}

/// The accumulator values of 16 columns, from `first` on, as an A operand.
///
/// # Safety
/// The fragment has the values.
#[inline(always)]
pub unsafe fn split_operand<F: Fragment>(values: &F, first: usize) -> Operand {
    let mut operand = [[0; 4]; PIECES];
    let mut register = 0;
    while register < 4 {
        let place = first + register * 2;
        let pieces = split(values.at(place), values.at(place + 1));
        operand[0][register] = pieces[0];
        operand[1][register] = pieces[1];
        operand[2][register] = pieces[2];
        register += 1;
    }
    operand
}

/// The 16×16 block at (`row`, `column`) of each plane; see [`LaneAddress::load`].
///
/// # Safety
/// As [`LaneAddress::load`].
#[inline(always)]
pub unsafe fn load(from: LaneAddress, layout: &PanelLayout, row: u32, column: u32) -> Operand {
    let of = |plane| ldmatrix_x4(from.block(layout, row, column) + plane * layout.bytes());
    [of(0), of(1), of(2)]
}

/// As [`load`], each 8×8 matrix transposed.
///
/// # Safety
/// As [`LaneAddress::load`].
#[inline(always)]
pub unsafe fn load_transposed(
    from: LaneAddress,
    layout: &PanelLayout,
    row: u32,
    column: u32,
) -> Operand {
    let of = |plane| ldmatrix_x4_trans(from.block(layout, row, column) + plane * layout.bytes());
    [of(0), of(1), of(2)]
}

/// Adds `a · b`, 16 rows by 16 columns, to the eight accumulator values at `at`: the product of the
/// first pieces to `first`, the others to `rest`, the smallest first.
///
/// # Safety
/// All lanes of the warp call this alike; the accumulators have the values.
#[inline(always)]
pub unsafe fn add_products<E: MatrixElement, F: Fragment>(
    first: &mut F,
    rest: &mut F,
    at: usize,
    a: &Operand,
    b: &Operand,
) {
    let product = |sums: &mut F, a: [u32; 4], b: [u32; 4]| {
        accumulate::<E, _>(sums, at, a, [b[0], b[1]]);
        accumulate::<E, _>(sums, at + 4, a, [b[2], b[3]]);
    };
    product(rest, a[2], b[0]);
    product(rest, a[0], b[2]);
    product(first, a[0], b[0]);
    product(rest, a[1], b[1]);
    product(rest, a[1], b[0]);
    product(rest, a[0], b[1]);
}

/// Adds the product of `a` and of 16 rows of a tile, from `row` on, to an accumulator as wide as
/// the tile: formed apart, 16 columns at a time, and then added.
///
/// # Safety
/// As [`add_products`]; `b` is a way into the tile with its rows first.
#[inline(always)]
pub unsafe fn add_rows<E: MatrixElement, F: Fragment>(
    accumulator: &mut F,
    a: &Operand,
    b: LaneAddress,
    layout: &PanelLayout,
    row: u32,
) {
    let mut pair = 0;
    while pair < layout.columns / 16 {
        let (mut first, mut rest) = ([0.0; 8], [0.0; 8]);
        let rows = load_transposed(b, layout, row, pair * 16);
        add_products::<E, _>(&mut first, &mut rest, 0, a, &rows);
        add_sums(&mut first, 0, &rest);
        add_sums(accumulator, pair as usize * 8, &first);
        pair += 1;
    }
}

/// Adds all of `values` to the accumulator from `first` on.
///
/// # Safety
/// The accumulator has as many values from there on.
#[inline(always)]
pub unsafe fn add_sums<F: Fragment, V: Fragment>(accumulator: &mut F, first: usize, values: &V) {
    let mut index = 0;
    while index < V::LEN {
        let sum = add_here(accumulator.at(first + index), values.at(index));
        *accumulator.at_mut(first + index) = sum;
        index += 1;
    }
}

/// Brings a tile into shared memory at `shared`, in planes if the element has pieces; as
/// [`copy_tile`].
///
/// # Safety
/// As [`copy_tile`].
#[inline(always)]
pub unsafe fn bring_tile<E: MatrixElement, const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    if E::PIECES > 1 {
        split_tile::<THREADS>(layout, rows, shared, thread);
    } else {
        copy_tile::<THREADS>(layout, rows, shared, thread);
    }
}

/// As [`bring_tile`], for a tile of many; as [`copy_ring_tile`].
///
/// # Safety
/// As [`copy_tile`].
#[inline(always)]
pub unsafe fn bring_ring_tile<E: MatrixElement, const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    if E::PIECES > 1 {
        split_tile::<THREADS>(layout, rows, shared, thread);
    } else {
        copy_ring_tile::<THREADS>(layout, rows, shared, thread);
    }
}

/// Reads f32 rows and writes their planes, which are there after a barrier.
///
/// # Safety
/// As [`copy_tile`], but that nothing is left under way.
#[inline(always)]
unsafe fn split_tile<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    if rows.access == 16 && rows.bytes.is_multiple_of(16) {
        split_tile_wide::<THREADS>(layout, rows, shared, thread);
    } else {
        split_tile_narrow::<THREADS>(layout, rows, shared, thread);
    }
}

/// Stores the pieces of eight values at a chunk's place in each plane.
#[inline(always)]
unsafe fn store_chunk(layout: &PanelLayout, place: u32, values: [u32; 8]) {
    let pair = |index: usize| {
        split(f32::from_bits(values[index * 2]), f32::from_bits(values[index * 2 + 1]))
    };
    let [a, b, c, d] = [pair(0), pair(1), pair(2), pair(3)];
    store_shared_v4(place, [a[0], b[0], c[0], d[0]]);
    store_shared_v4(place + layout.bytes(), [a[1], b[1], c[1], d[1]]);
    store_shared_v4(place + 2 * layout.bytes(), [a[2], b[2], c[2], d[2]]);
}

/// Four chunks of eight values at a time, all read before any is split.
#[inline(always)]
unsafe fn split_tile_wide<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    const AT_ONCE: u32 = 4;
    let share = Share::new::<THREADS>(&layout, thread);
    let steps = layout.rows / share.row_step;
    let first_source = rows.address.wrapping_add((share.row as i64 * rows.stride) as u64);
    let chunks = steps * layout.panels();
    let mut index = 0;
    while index < chunks {
        let mut read = [[0; 8]; AT_ONCE as usize];
        let mut own = 0;
        while own < AT_ONCE && index + own < chunks {
            let (panel, step) = ((index + own) / steps, (index + own) % steps);
            let row = share.row + step * share.row_step;
            let column = (panel * layout.panel_columns() + share.chunk * CHUNK_ELEMENTS) * 4;
            let is_there = row < rows.count && row >= rows.hidden;
            let offset = (step * share.row_step) as i64 * rows.stride + column as i64;
            let from = first_source.wrapping_add(offset as u64);
            let left = load_global_v4_if(from, is_there && column < rows.bytes);
            let right =
                load_global_v4_if(from.wrapping_add(16), is_there && column + 16 < rows.bytes);
            read[own as usize] =
                [left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]];
            own += 1;
        }
        let mut own = 0;
        while own < AT_ONCE && index + own < chunks {
            let (panel, step) = ((index + own) / steps, (index + own) % steps);
            let offset = share.offset + step * share.row_step * layout.row_bytes();
            let place = shared + panel * layout.panel_bytes() + offset;
            store_chunk(&layout, place, read[own as usize]);
            own += 1;
        }
        index += AT_ONCE;
    }
}

/// Any rows, a value at a time, in a loop that stays one: rarely taken.
#[inline(always)]
unsafe fn split_tile_narrow<const THREADS: u32>(
    layout: PanelLayout,
    rows: Rows,
    shared: u32,
    thread: u32,
) {
    let pairs = layout.columns / 2;
    let mut index = thread;
    while index < layout.rows * pairs {
        let (row, column) = (index / pairs, index % pairs * 2);
        let is_there = row < rows.count && row >= rows.hidden;
        let offset = row as i64 * rows.stride + (column * 4) as i64;
        let from = rows.address.wrapping_add(offset as u64);
        let low = load_global_f32_if(from, is_there && column * 4 < rows.bytes);
        let high =
            load_global_f32_if(from.wrapping_add(4), is_there && column * 4 + 4 < rows.bytes);
        let pieces = split(low, high);
        let place = shared + layout.element_offset(row, column);
        store_shared_u32(place, pieces[0]);
        store_shared_u32(place + layout.bytes(), pieces[1]);
        store_shared_u32(place + 2 * layout.bytes(), pieces[2]);
        index += THREADS;
    }
}

/// Writes an accumulator of 16 rows, times `factor`, to the f32 rows and channels that exist; its
/// first row is `first_row` of them.
///
/// # Safety
/// The rows are the warp's to write; all its lanes call this.
#[inline(always)]
pub unsafe fn write_fragment<F: Fragment>(
    values: &F,
    factor: f32,
    rows: Rows,
    first_row: u32,
    lane: u32,
) {
    let mut half = 0;
    while half < 2 {
        let row = first_row + half as u32 * 8 + lane / 4;
        let to = rows.address.wrapping_add((row as i64 * rows.stride) as u64);
        let mut tile = 0;
        while tile < F::LEN / 4 && row < rows.count {
            let index = tile * 4 + half * 2;
            let pair = [values.at(index) * factor, values.at(index + 1) * factor];
            let byte = (tile as u32 * 8 + lane % 4 * 2) * 4;
            let place = to.wrapping_add(byte as u64);
            if rows.access >= 8 && byte + 8 <= rows.bytes {
                store_global_v2_f32(place, pair);
            } else {
                if byte < rows.bytes {
                    store_global_f32(place, pair[0]);
                }
                if byte + 4 < rows.bytes {
                    store_global_f32(place + 4, pair[1]);
                }
            }
            tile += 1;
        }
        half += 1;
    }
}
