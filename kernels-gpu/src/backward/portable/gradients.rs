//! The products over queries, dV += Pᵀ·dO and dK += dSᵀ·Q, and over keys, dQ += dS·K.

use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::{Kernel, Place, Step, Variant, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_acquire_global_u32, release_add_global_u32};
use crate::ptx::thread::sync_threads;
use crate::tile::{LaneAddress, accumulate};

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Adds the product of 16 queries, from `query` on, to a gradient of the warp's keys: `a` holds
    /// Pᵀ or dSᵀ, the tile that `b` reads dO or Q. Where warps share keys, `b` has been moved to
    /// the warp's first channels.
    #[inline(always)]
    unsafe fn add_queries_16<F: Fragment>(
        gradient: &mut F,
        a: [[u32; 4]; 2],
        b: LaneAddress,
        layout: &PanelLayout,
        query: u32,
    ) {
        let pairs = layout.columns / Self::PLAN.splits / 16;
        let mut pair = 0;
        while pair < pairs {
            let rows = b.load_transposed(layout, query, pair * 16 * Self::PLAN.splits);
            let mut row_tile = 0;
            while row_tile < Self::ROW_TILES {
                let first = (row_tile * pairs as usize + pair as usize) * 8;
                accumulate::<E, _>(gradient, first, a[row_tile], [rows[0], rows[1]]);
                accumulate::<E, _>(gradient, first + 4, a[row_tile], [rows[2], rows[3]]);
                row_tile += 1;
            }
            pair += 1;
        }
    }

    /// Adds to a gradient from Pᵀ or dSᵀ in registers: a packed accumulator is an A operand.
    #[inline(always)]
    pub(super) unsafe fn add_own<F: Fragment>(
        gradient: &mut F,
        scores: &T::Scores,
        b: LaneAddress,
        layout: &PanelLayout,
        query: u32,
    ) {
        let tiles = Self::QUERY_TILES;
        let mut step = 0;
        while step < tiles / 2 {
            let mut a = [[0; 4]; 2];
            let mut row_tile = 0;
            while row_tile < Self::ROW_TILES {
                let first = (row_tile * tiles + step * 2) * 4;
                let mut register = 0;
                while register < 4 {
                    let place = first + register * 2;
                    a[row_tile][register] = E::pack(scores.at(place), scores.at(place + 1));
                    register += 1;
                }
                row_tile += 1;
            }
            Self::add_queries_16(gradient, a, b, layout, query + step as u32 * 16);
            step += 1;
        }
    }

    /// Adds to a gradient from a whole Pᵀ or dSᵀ tile in shared memory.
    #[inline(always)]
    unsafe fn add_shared<F: Fragment>(
        gradient: &mut F,
        scores: u32,
        tile: u32,
        layout: &PanelLayout,
        place: &Place,
    ) {
        let a = LaneAddress::rows_first(&Self::D_S, scores, place.lane);
        let a = a.moved(&Self::D_S, place.key, 0);
        let b = LaneAddress::rows_first(layout, tile, place.lane);
        let b = b.moved(layout, 0, place.split * 16);
        let mut query = 0;
        while query < Self::TILE.q_rows {
            let rows = Self::rows_of(a, &Self::D_S, query / 16);
            Self::add_queries_16(gradient, rows, b, layout, query);
            query += 16;
        }
    }

    /// dV += Pᵀ·dO, where warps share keys.
    #[inline(always)]
    pub(super) unsafe fn add_shared_values(
        place: &Place,
        d_o_slot: u32,
        dv: &mut T::ValueGradient,
    ) {
        let (_, d_o) = Self::query_tiles(place, 0, d_o_slot);
        Self::add_shared(dv, place.shared + Self::PLAN.p, d_o, &Self::D_O, place);
    }

    /// dK += dSᵀ·Q, where warps share keys.
    #[inline(always)]
    pub(super) unsafe fn add_shared_keys(place: &Place, slot: u32, dk: &mut T::KeyGradient) {
        let (q, _) = Self::query_tiles(place, slot, 0);
        Self::add_shared(dk, place.shared + Self::PLAN.ds, q, &Self::Q, place);
    }

    /// Row tile and, in tiles of 8, column of accumulator tile `tile` of dQ, from the warp's first.
    #[inline(always)]
    pub(super) const fn sum_tile(tile: usize) -> (u32, u32) {
        let pairs = Self::PLAN.dq_columns as usize / 16;
        let row_groups = Self::TILE.q_rows / (16 * Self::PLAN.dq_row_tiles);
        let column_groups = Self::PLAN.dq_warps / row_groups;
        let (row_tile, within) = (tile / (2 * pairs), tile % (2 * pairs));
        (row_tile as u32, within as u32 / 2 * 2 * column_groups + within as u32 % 2)
    }

    /// Adds dS·K of the block's keys to the sums of a query tile.
    #[inline(always)]
    pub(super) unsafe fn add_queries<C: Variant<T, E>>(
        params: &C::Params,
        step: Step,
        place: &Place,
    ) {
        let plan = &Self::PLAN;
        let row_groups = Self::TILE.q_rows / (16 * plan.dq_row_tiles);
        let column_groups = Self::TILE.warps / row_groups;
        let first_row = place.warp % row_groups * 16 * plan.dq_row_tiles;
        let first_column = place.warp / row_groups * 16;
        let pairs = plan.dq_columns as usize / 16;

        let ds = LaneAddress::columns_first(&Self::D_S, place.shared + plan.ds, place.lane);
        let ds = ds.moved(&Self::D_S, 0, first_row);
        let k = LaneAddress::rows_first(&Self::K, place.shared + plan.k, place.lane);
        let k = k.moved(&Self::K, 0, first_column);
        let mut dq = T::QueryGradient::ZERO;
        let mut key = 0;
        while key < Self::TILE.kv_columns {
            let mut a = [[0; 4]; 2];
            let mut row_tile = 0;
            while row_tile < plan.dq_row_tiles as usize {
                a[row_tile] = ds.load_transposed(&Self::D_S, key, row_tile as u32 * 16);
                row_tile += 1;
            }
            let mut pair = 0;
            while pair < pairs {
                let column = pair as u32 * 16 * column_groups;
                let rows = k.load_transposed(&Self::K, key, column);
                let mut row_tile = 0;
                while row_tile < plan.dq_row_tiles as usize {
                    let first = (row_tile * pairs + pair) * 8;
                    accumulate::<E, _>(&mut dq, first, a[row_tile], [rows[0], rows[1]]);
                    accumulate::<E, _>(&mut dq, first + 4, a[row_tile], [rows[2], rows[3]]);
                    row_tile += 1;
                }
                pair += 1;
            }
            key += 16;
        }

        let common = C::common(params);
        let work = Work::load(place.shared + plan.work);
        let (counter, turn) = C::turn(params, &work, step, place.shared);
        if common.ordered != 0 {
            if place.thread == 0 {
                while load_acquire_global_u32(counter) < turn {}
            }
            sync_threads();
        }
        C::add_sums(params, place, step, first_row, first_column, &dq);
        if common.ordered != 0 {
            sync_threads();
            if place.thread == 0 {
                release_add_global_u32(counter, 1);
            }
        }
    }

    /// Passes on the turn at a query tile to which the block has nothing to add.
    #[inline(always)]
    pub(super) unsafe fn pass_turn<C: Variant<T, E>>(
        params: &C::Params,
        step: Step,
        place: &Place,
    ) {
        if C::common(params).ordered != 0 && place.thread == 0 {
            let work = Work::load(place.shared + Self::PLAN.work);
            let (counter, turn) = C::turn(params, &work, step, place.shared);
            while load_acquire_global_u32(counter) < turn {}
            release_add_global_u32(counter, 1);
        }
    }
}
