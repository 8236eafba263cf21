//! The products over channels: Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ; and from them Pᵀ and dSᵀ.

use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::{Kernel, Place, Step, Variant, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::opaque;
use crate::tile::{LaneAddress, PairAddress, accumulate};

/// Where the scores lie that a warp holds at a time, keys down and queries across. Made where it is
/// needed, as [`Place`] is.
pub(super) struct Corner {
    /// First query of the tile.
    pub(super) tile_row: u32,
    /// First of the warp's keys, in the item.
    pub(super) warp_key: u32,
    /// First of its queries.
    pub(super) warp_row: u32,
    /// First of the lane's keys.
    pub(super) key: u32,
    /// First of its queries.
    pub(super) row: u32,
}

impl Corner {
    /// Of the scores of queries from `query` on, in the step's tile.
    #[inline(always)]
    pub(super) unsafe fn of<T: PortableBackwardTiling, E: MatrixElement>(
        place: &Place,
        step: Step,
        query: u32,
    ) -> Self {
        let lane = opaque(place.lane);
        let tile_row = opaque(step.tile) * T::SHAPE.q_rows;
        let work = Work::load(place.shared + Kernel::<T, E>::PLAN.work);
        let (warp_key, warp_row) = (work.first_key + place.key, tile_row + query);
        let (key, row) = (warp_key + lane / 4, warp_row + lane % 4 * 2);
        Self { tile_row, warp_key, warp_row, key, row }
    }
}

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    pub(super) const QUERIES: u32 = Self::PLAN.queries_at_once;
    /// Tiles of 8 queries held at a time.
    pub(super) const QUERY_TILES: usize = Self::PLAN.queries_at_once as usize / 8;

    /// Index of a lane's score: its key `half`, 8 apart, and its query `column`, of every 8 two.
    #[inline(always)]
    pub(super) const fn cell(half: usize, column: usize) -> usize {
        (half / 2 * Self::QUERY_TILES + column / 2) * 4 + half % 2 * 2 + column % 2
    }

    /// `a · bᵀ` over `channels` channels: rows of `a`, by the step of 16 channels, with
    /// [`Self::QUERIES`] rows of `b`.
    #[inline(always)]
    unsafe fn over_channels(
        a: impl Fn(u32) -> [[u32; 4]; 2],
        b: LaneAddress,
        layout: &PanelLayout,
        first_query: u32,
    ) -> T::Scores {
        let mut scores = T::Scores::ZERO;
        let mut step = 0;
        while step < layout.columns / 16 {
            let rows = a(step);
            let mut pair = 0;
            while pair < Self::QUERY_TILES / 2 {
                let columns = b.load(layout, first_query + pair as u32 * 16, step * 16);
                let mut row_tile = 0;
                while row_tile < Self::ROW_TILES {
                    let first = (row_tile * Self::QUERY_TILES + pair * 2) * 4;
                    let row = rows[row_tile];
                    accumulate::<E, _>(&mut scores, first, row, [columns[0], columns[1]]);
                    accumulate::<E, _>(&mut scores, first + 4, row, [columns[2], columns[3]]);
                    row_tile += 1;
                }
                pair += 1;
            }
            step += 1;
        }
        scores
    }

    /// The warp's rows of a tile in shared memory, as A operands of a step of 16 channels.
    #[inline(always)]
    pub(super) unsafe fn rows_of(
        from: LaneAddress,
        layout: &PanelLayout,
        step: u32,
    ) -> [[u32; 4]; 2] {
        let mut rows = [[0; 4]; 2];
        let mut row_tile = 0;
        while row_tile < Self::ROW_TILES {
            rows[row_tile] = from.load(layout, row_tile as u32 * 16, step * 16);
            row_tile += 1;
        }
        rows
    }

    /// Stores Pᵀ or dSᵀ of the queries from `query` on.
    #[inline(always)]
    unsafe fn store_transposed(values: &T::Scores, to: PairAddress, query: u32) {
        let mut tile = 0;
        while tile < Self::QUERY_TILES {
            let mut half = 0;
            while half < Self::ROW_TILES * 2 {
                let first = (half / 2 * Self::QUERY_TILES + tile) * 4 + half % 2 * 2;
                let pair = E::pack(values.at(first), values.at(first + 1));
                to.store(&Self::D_S, half as u32 * 8, query + tile as u32 * 8, pair);
                half += 1;
            }
            tile += 1;
        }
    }

    /// One step up to the middle barrier: Pᵀ and dSᵀ of the warp's keys and queries, into shared
    /// memory and, where the warp alone owns its keys, into dV and dK.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "a kernel's state, all in registers")]
    pub(super) unsafe fn scores<C: Variant<T, E>>(
        params: &C::Params,
        step: Step,
        slot: u32,
        d_o_slot: u32,
        place: &Place,
        values: &T::Values,
        dk: &mut T::KeyGradient,
        dv: &mut T::ValueGradient,
    ) {
        let (plan, tile) = (&Self::PLAN, &Self::TILE);
        let first_query = place.split * (tile.q_rows / plan.splits);
        let (q, d_o) = Self::query_tiles(place, slot, d_o_slot);
        let rows = place.shared + plan.rows + (slot * 2 * tile.q_rows + first_query) * 4;

        let mut query = 0;
        while query < tile.q_rows / plan.splits {
            // Addresses are computed for each product anew: all of them together would not fit.
            let lane = opaque(place.lane);
            let k = LaneAddress::rows_first(&Self::K, place.shared + plan.k, lane);
            let k = k.moved(&Self::K, place.key, 0);
            let by_query = LaneAddress::columns_first(&Self::Q, q, lane);
            let by_query = by_query.moved(&Self::Q, first_query, 0);
            let from_k = |step| Self::rows_of(k, &Self::K, step);
            let mut p = Self::over_channels(from_k, by_query, &Self::Q, query);

            let lane = opaque(place.lane);
            let v = LaneAddress::rows_first(&Self::V, place.shared + plan.v, lane);
            let v = v.moved(&Self::V, place.key, 0);
            let by_query = LaneAddress::columns_first(&Self::D_O, d_o, lane);
            let by_query = by_query.moved(&Self::D_O, first_query, 0);
            let from_v = |step: u32| {
                if plan.values_in_registers {
                    let first = step as usize * 4;
                    let value = |register| values.at(first + register);
                    [[value(0), value(1), value(2), value(3)], [0; 4]]
                } else {
                    Self::rows_of(v, &Self::V, step)
                }
            };
            let mut ds = Self::over_channels(from_v, by_query, &Self::D_O, query);

            let lane = opaque(place.lane);
            let states = rows + (query + lane % 4 * 2) * 4;
            C::weigh(params, place, step, first_query + query, states, &mut p, &mut ds);
            let pairs = |tile| PairAddress::new(&Self::D_S, tile, place.key, first_query, lane);
            Self::store_transposed(&ds, pairs(place.shared + plan.ds), query);
            if Self::IS_SHARED {
                Self::store_transposed(&p, pairs(place.shared + plan.p), query);
            } else {
                let d_o = LaneAddress::rows_first(&Self::D_O, d_o, opaque(place.lane));
                Self::add_own(dv, &p, d_o, &Self::D_O, query);
                let q = LaneAddress::rows_first(&Self::Q, q, opaque(place.lane));
                Self::add_own(dk, &ds, q, &Self::Q, query);
            }
            query += Self::QUERIES;
        }
    }

    /// Addresses of the step's Q and dO tiles.
    #[inline(always)]
    pub(super) fn query_tiles(place: &Place, slot: u32, d_o_slot: u32) -> (u32, u32) {
        (
            place.shared + Self::PLAN.q + slot * Self::PLAN.q_stage,
            place.shared + Self::PLAN.d_o + d_o_slot * Self::PLAN.d_o_stage,
        )
    }
}
