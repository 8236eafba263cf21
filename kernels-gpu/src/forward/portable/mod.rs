//! The portable forward kernel: FlashAttention-2 (M4.4 §0x03, Algorithm 1) on `mma.sync`.
//!
//! **Who owns what.** A block owns one block of query rows of one head, from its scores to its
//! output; nobody else writes those rows. Inside it the rows are split over the warps (split-Q,
//! M4.4 §0x05C): each warp owns 16 or 32 rows for good, so no warp ever needs another's maximum,
//! sum or output. A quad of lanes shares a row; two shuffles give all four its maximum.
//!
//! **Shared memory.** Q is loaded once. K and V tiles pass through a ring of one or two slots each,
//! filled by `cp.async` while earlier tiles are multiplied. Scores, probabilities and the output
//! numerator never leave registers. Rows past the end of the keys, and channels past the tensor's,
//! are zero in shared memory, so nothing beyond the tensors can reach a product.
//!
//! **What protects what.** With two slots, each tile costs one block-wide barrier. A thread first
//! waits for its own copies of tile j, then all meet: from there on everyone sees tile j, and
//! everyone has finished reading tile j − 1, whose slot the next copy, of tile j + 1, may take.
//! With one slot all meet twice: before the scores, when K of tile j has come and V's slot is free
//! for V of tile j; and after them, when that V has come and K's slot is free for K of tile j + 1.
//! Two more barriers surround the output tile, which is staged where the inputs lay so that it
//! leaves in 16-byte rows.
//!
//! **Overlap.** Each copy runs under a product, and the two blocks of a multiprocessor under each
//! other. In a warp, the exponentials of 16 keys stand just before their product with V, so that
//! the next ones run under it; maxima and their exchanges are taken of all rows at once, since each
//! waits for the one before.
//!
//! **Masks.** Only tiles that are not full pay a compare a score: a key at or past its row's end
//! becomes −∞ before the maximum is taken. Tiles that no row of the block sees are never loaded.
//! The classes `masked` and `general` have a loop of their own, over the same products; see
//! `masked.rs`.

mod masked;
mod options;
mod place;
mod ring;
mod split;

pub use masked::block as masked_block;

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::PortableForwardParams;
use ferroflash_core::schedule::divide;
use ferroflash_core::swizzle::{CHUNK_BYTES, PanelLayout};
use ferroflash_core::tile::{ForwardTiling, SharedPlan, TileShape};
use ferroflash_core::visibility::Visibility;

use self::ring::Ring;
use super::softmax::{LARGE_F32_OFFSET, LARGE_OFFSET, ThreadRows, finish};
use crate::ptx::async_copy::wait_group;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    dynamic_shared, load_shared_v4, store_global_f32, store_shared_u32, store_shared_v4,
};
use crate::ptx::thread::{block_idx_x, opaque, sync_threads, thread_idx_x};
use crate::tile::{LaneAddress, Rows, accumulate, copy_tile, write_tile};

/// Threads of a block: four warps, whatever the tile.
const THREADS: u32 = 128;

/// Constants of one specialisation.
struct Kernel<T, E>(PhantomData<(T, E)>);

impl<T: ForwardTiling, E: MatrixElement> Kernel<T, E> {
    const TILE: TileShape = T::SHAPE;
    const PLAN: SharedPlan = SharedPlan::portable_forward(T::SHAPE, E::PIECES);
    const Q: PanelLayout = T::SHAPE.q_layout();
    const K: PanelLayout = T::SHAPE.k_layout();
    const V: PanelLayout = T::SHAPE.v_layout();
    const O: PanelLayout = T::SHAPE.o_layout();
    const ROW_TILES: usize = T::SHAPE.row_tiles() as usize;
    const ROWS: usize = Self::ROW_TILES * 2;
    const SCORE_TILES: usize = T::SHAPE.kv_columns as usize / 8;
    const OUTPUT_TILES: usize = T::SHAPE.value_dim as usize / 8;
    const LARGE_OFFSET: f32 = if E::PIECES > 1 { LARGE_F32_OFFSET } else { LARGE_OFFSET };
    const CHECKED: () = {
        assert!(T::PIECES == E::PIECES);
        assert!(T::SHAPE.warps * 32 == THREADS);
        assert!(T::SHAPE.row_tiles() <= 2);
        assert!(T::SHAPE.stages <= 2, "each wait is for all copies");
    };

    /// Turns the sign of the Q tile, for a negative scale; the first tile's barrier follows.
    #[inline(always)]
    unsafe fn flip_queries(shared: u32, sign: u32, thread: u32) {
        wait_group::<0>();
        sync_threads();
        let mut offset = thread * CHUNK_BYTES;
        while offset < E::PIECES * Self::Q.bytes() {
            let [a, b, c, d] = load_shared_v4(shared + offset);
            store_shared_v4(shared + offset, [a ^ sign, b ^ sign, c ^ sign, d ^ sign]);
            offset += THREADS * CHUNK_BYTES;
        }
    }

    /// S = Q·Kᵀ for this warp's rows.
    #[inline(always)]
    unsafe fn scores(q: LaneAddress, warp_row: u32, k: LaneAddress) -> T::Scores {
        if E::PIECES > 1 {
            return Self::split_scores(q, warp_row, k);
        }
        let mut scores = T::Scores::ZERO;
        let mut step = 0;
        while step < Self::TILE.head_dim / 16 {
            let mut a = [[0; 4]; 2];
            let mut row_tile = 0;
            while row_tile < Self::ROW_TILES {
                a[row_tile] = q.load(&Self::Q, warp_row + row_tile as u32 * 16, step * 16);
                row_tile += 1;
            }
            let mut pair = 0;
            while pair < Self::SCORE_TILES / 2 {
                let b = k.load(&Self::K, pair as u32 * 16, step * 16);
                let mut row_tile = 0;
                while row_tile < Self::ROW_TILES {
                    let first = (row_tile * Self::SCORE_TILES + pair * 2) * 4;
                    accumulate::<E, _>(&mut scores, first, a[row_tile], [b[0], b[1]]);
                    accumulate::<E, _>(&mut scores, first + 4, a[row_tile], [b[2], b[3]]);
                    row_tile += 1;
                }
                pair += 1;
            }
            step += 1;
        }
        scores
    }

    /// O += P·V: a packed score fragment is already an A operand. `prepare` makes probabilities of
    /// the 16 keys of a step, just before their product, so that the next ones' run under it.
    #[inline(always)]
    unsafe fn add_values(
        output: &mut T::Output,
        p: &mut T::Scores,
        v: LaneAddress,
        mut prepare: impl FnMut(&mut T::Scores, usize),
    ) {
        if E::PIECES > 1 {
            return Self::split_add_values(output, p, v, prepare);
        }
        let mut step = 0;
        while step < Self::SCORE_TILES / 2 {
            prepare(p, step);
            let mut a = [[0; 4]; 2];
            let mut row_tile = 0;
            while row_tile < Self::ROW_TILES {
                let first = (row_tile * Self::SCORE_TILES + step * 2) * 4;
                let mut register = 0;
                while register < 4 {
                    a[row_tile][register] =
                        E::pack(p.at(first + register * 2), p.at(first + register * 2 + 1));
                    register += 1;
                }
                row_tile += 1;
            }
            let mut pair = 0;
            while pair < Self::OUTPUT_TILES / 2 {
                let b = v.load_transposed(&Self::V, step as u32 * 16, pair as u32 * 16);
                let mut row_tile = 0;
                while row_tile < Self::ROW_TILES {
                    let first = (row_tile * Self::OUTPUT_TILES + pair * 2) * 4;
                    accumulate::<E, _>(output, first, a[row_tile], [b[0], b[1]]);
                    accumulate::<E, _>(output, first + 4, a[row_tile], [b[2], b[3]]);
                    row_tile += 1;
                }
                pair += 1;
            }
            step += 1;
        }
    }

    /// Multiplies one row's output by `factor`.
    #[inline(always)]
    unsafe fn scale_row(output: &mut T::Output, row: usize, factor: f32) {
        let first = row / 2 * Self::OUTPUT_TILES * 4 + row % 2 * 2;
        let mut tile = 0;
        while tile < Self::OUTPUT_TILES {
            *output.at_mut(first + tile * 4) *= factor;
            *output.at_mut(first + tile * 4 + 1) *= factor;
            tile += 1;
        }
    }

    /// Makes the scores of keys at or past each row's end −∞. The first of this lane's rows and
    /// keys are given; its others follow from the fragment's shape.
    #[inline(always)]
    unsafe fn hide<M: MaskKind>(
        scores: &mut T::Scores,
        visible: &Visibility,
        first_row: u32,
        first_key: u32,
    ) {
        // Lengths and sides are bounded so that this sum fits; see `MAX_LENGTH`.
        let diagonal_end = first_row as i32 + visible.offset + visible.right + 1;
        let mut row = 0;
        while row < Self::ROW_TILES * 2 {
            let keys_end = match M::CLASS {
                MaskClass::Full => visible.kv_len as i32,
                _ => (diagonal_end + fragment_row(row) as i32).min(visible.kv_len as i32),
            };
            let mut tile = 0;
            while tile < Self::SCORE_TILES {
                let index = (row / 2 * Self::SCORE_TILES + tile) * 4 + row % 2 * 2;
                let key = (first_key + tile as u32 * 8) as i32;
                if key >= keys_end {
                    *scores.at_mut(index) = f32::NEG_INFINITY;
                }
                if key + 1 >= keys_end {
                    *scores.at_mut(index + 1) = f32::NEG_INFINITY;
                }
                tile += 1;
            }
            row += 1;
        }
    }

    /// Rounds the output and puts this warp's rows into the staged output tile.
    #[inline(always)]
    unsafe fn stage_output(output: &T::Output, shared: u32, warp_row: u32, lane: u32) {
        let mut row = 0;
        while row < Self::ROW_TILES * 2 {
            let tile_row = warp_row + fragment_row(row) + lane / 4;
            let mut tile = 0;
            while tile < Self::OUTPUT_TILES {
                let index = (row / 2 * Self::OUTPUT_TILES + tile) * 4 + row % 2 * 2;
                let place = Self::O.element_offset(tile_row, tile as u32 * 8 + lane % 4 * 2);
                let pair = E::pack(output.at(index), output.at(index + 1));
                store_shared_u32(shared + place, pair);
                tile += 1;
            }
            row += 1;
        }
    }
}

/// Rows from a thread's first row to its `row`-th: a row tile has two of its rows, 8 apart.
#[inline(always)]
const fn fragment_row(row: usize) -> u32 {
    (row / 2 * 16 + row % 2 * 8) as u32
}

/// Which rows of which head a block owns; made afresh at the end, as [`Warp`] is.
struct Head {
    batch: u32,
    q_head: u32,
    batch_head: u32,
    first_row: u32,
}

impl Head {
    #[inline(always)]
    fn of_block(params: &PortableForwardParams, q_rows: u32) -> Self {
        let work = params.schedule.work(opaque(block_idx_x()));
        let batch = divide(work.batch_head, params.q_heads);
        Self {
            batch,
            q_head: work.batch_head - batch * params.q_heads,
            batch_head: work.batch_head,
            first_row: work.q_block * q_rows,
        }
    }
}

/// A thread's place in its block. Made where it is needed: computing it again costs two
/// instructions, keeping it costs a register through the loop.
struct Warp {
    lane: u32,
    /// First of the warp's rows in the block.
    first_row: u32,
}

impl Warp {
    #[inline(always)]
    fn of<T: ForwardTiling>(thread: u32) -> Self {
        let thread = opaque(thread);
        Self { lane: thread % 32, first_row: thread / 32 * T::SHAPE.rows_per_warp() }
    }
}

/// One past the last key that any of a block's rows sees. The bounds of lengths and window sides
/// keep the sum in range; see `MAX_LENGTH`.
#[inline(always)]
fn block_keys_end<M: MaskKind>(visible: &Visibility, first_row: u32, q_rows: u32) -> u32 {
    match M::CLASS {
        MaskClass::Full => visible.kv_len,
        _ => {
            let last_row = (first_row + q_rows).min(visible.q_len) as i32 - 1;
            let end = last_row + visible.offset + visible.right + 1;
            end.max(0).min(visible.kv_len as i32) as u32
        }
    }
}

/// The work of one block.
///
/// # Safety
/// Launched as the kernel table says, with one block for each of the schedule's and with tensors as
/// the parameters describe them.
#[inline(always)]
pub unsafe fn block<T: ForwardTiling, E: MatrixElement, M: MaskKind>(
    params: &PortableForwardParams,
) {
    const { Kernel::<T, E>::CHECKED };
    let tile = T::SHAPE;
    let plan = Kernel::<T, E>::PLAN;
    let thread = thread_idx_x();

    let Head { batch, q_head, first_row, .. } = Head::of_block(params, tile.q_rows);
    let kv_head = divide(q_head, params.group);

    let visible = params.visibility;
    let shared = dynamic_shared();
    let q_rows = Rows::of(&params.q, batch, q_head, first_row, visible.q_len);
    copy_tile::<THREADS>(Kernel::<T, E>::Q, q_rows, shared + plan.q, thread);
    let k_rows = Rows::of(&params.k, batch, kv_head, 0, visible.kv_len);
    let v_rows = Rows::of(&params.v, batch, kv_head, 0, visible.kv_len);
    let mut output = T::Output::ZERO;
    let mut state = ThreadRows::EMPTY;
    // K/V tile t is keys t · kv_columns .., in slot t mod stages.
    let ring = Ring { k: k_rows, v: v_rows, shared };
    let keys_end = block_keys_end::<M>(&visible, first_row, tile.q_rows);
    let mut kv_tile = 0;
    Kernel::<T, E>::fill(&ring, keys_end, thread);
    if params.query_sign != 0 {
        Kernel::<T, E>::flip_queries(shared + plan.q, params.query_sign, thread);
    }
    while kv_tile * tile.kv_columns < keys_end {
        Kernel::<T, E>::await_keys(|| ring, kv_tile, keys_end, thread);
        let slot = Kernel::<T, E>::slot(kv_tile);
        let mut scores = {
            let warp = Warp::of::<T>(thread);
            let q = LaneAddress::rows_first(&Kernel::<T, E>::Q, shared + plan.q, warp.lane);
            let k_shared = shared + plan.k + slot * plan.k_stage;
            let k = LaneAddress::columns_first(&Kernel::<T, E>::K, k_shared, warp.lane);
            Kernel::<T, E>::scores(q, warp.first_row, k)
        };
        let key = kv_tile * tile.kv_columns;
        let warp = Warp::of::<T>(thread);
        let warp_row = first_row + warp.first_row;
        // A warp's own first row, not the block's: fewer warps compare.
        let full_keys_end = match M::CLASS {
            MaskClass::Full => visible.kv_len,
            _ => visible.keys_end(warp_row),
        };
        if key + tile.kv_columns > full_keys_end {
            let lane_key = key + warp.lane % 4 * 2;
            let lane_row = warp_row + warp.lane / 4;
            Kernel::<T, E>::hide::<M>(&mut scores, &visible, lane_row, lane_key);
        }
        Kernel::<T, E>::await_values(|| ring, kv_tile, keys_end, thread);
        let (rows, tiles) = (Kernel::<T, E>::ROWS, Kernel::<T, E>::SCORE_TILES);
        let large = Kernel::<T, E>::LARGE_OFFSET;
        let mut advance = state.advance(&scores, rows, tiles, params.scale_log2, large);
        if advance.is_needed {
            let mut row = 0;
            while row < rows {
                Kernel::<T, E>::scale_row(&mut output, row, advance.rescale[row]);
                row += 1;
            }
            state.subtract_large(&mut scores, rows, tiles, &mut advance, large);
        }
        let v_shared = shared + plan.v + slot * plan.v_stage;
        let lane = Warp::of::<T>(thread).lane;
        let v = LaneAddress::rows_first(&Kernel::<T, E>::V, v_shared, lane);
        Kernel::<T, E>::add_values(&mut output, &mut scores, v, |scores, step| {
            let scale = params.scale_log2;
            state.exponentials(scores, rows, tiles, step * 2, &advance.offset, scale);
        });
        kv_tile += 1;
    }

    let warp = Warp::of::<T>(thread);
    let Head { batch, q_head, batch_head, first_row } = Head::of_block(params, tile.q_rows);
    let first_lane_row = first_row + warp.first_row + warp.lane / 4;
    let mut row = 0;
    while row < Kernel::<T, E>::ROW_TILES * 2 {
        let (normalizer, lse) = finish(&state, row, params.scale);
        Kernel::<T, E>::scale_row(&mut output, row, normalizer);
        let q_row = first_lane_row + fragment_row(row);
        if params.lse != 0 && warp.lane.is_multiple_of(4) && q_row < visible.q_len {
            let index = batch_head as u64 * visible.q_len as u64 + q_row as u64;
            store_global_f32(params.lse + index * 4, lse);
        }
        row += 1;
    }
    wait_group::<0>();
    sync_threads();
    Kernel::<T, E>::stage_output(&output, shared + plan.o, warp.first_row, warp.lane);
    sync_threads();
    let o_rows = Rows::of(&params.o, batch, q_head, first_row, visible.q_len);
    write_tile::<THREADS>(Kernel::<T, E>::O, o_rows, shared + plan.o, thread);
}
