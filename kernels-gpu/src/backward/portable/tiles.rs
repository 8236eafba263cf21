//! What moves between global and shared memory: K and V at the start, Q, dO and the rows' states
//! each step, dK and dV at the end.

use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::{Kernel, Place, Step, Variant, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::opaque;
use crate::tile::{LaneAddress, PairAddress, Rows, copy_tile, write_tile};

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// [`copy_tile`] by all of the block's threads.
    #[inline(always)]
    unsafe fn copy(layout: PanelLayout, rows: Rows, shared: u32, thread: u32) {
        if Self::TILE.warps == 4 {
            copy_tile::<128>(layout, rows, shared, thread);
        } else {
            copy_tile::<256>(layout, rows, shared, thread);
        }
    }

    /// Starts copying the block's K and V.
    #[inline(always)]
    pub(super) unsafe fn copy_keys<C: Variant<T, E>>(
        params: &C::Params,
        work: &Work,
        shared: u32,
        thread: u32,
    ) {
        let common = C::common(params);
        let k = C::keys(params, work, shared, &common.k);
        let v = C::keys(params, work, shared, &common.v);
        Self::copy(Self::K, k, shared + Self::PLAN.k, thread);
        Self::copy(Self::V, v, shared + Self::PLAN.v, thread);
    }

    /// The warp's V rows as A operands.
    #[inline(always)]
    pub(super) unsafe fn load_values(place: &Place) -> T::Values {
        let mut values = T::Values::ZERO;
        let tile = place.shared + Self::PLAN.v;
        let v = LaneAddress::rows_first(&Self::V, tile, place.lane).moved(&Self::V, place.key, 0);
        let mut step = 0;
        while step < Self::TILE.value_dim / 16 {
            let loaded = v.load(&Self::V, 0, step * 16);
            let mut register = 0;
            while register < 4 {
                *values.at_mut(step as usize * 4 + register) = loaded[register];
                register += 1;
            }
            step += 1;
        }
        values
    }

    /// Starts copying a step's Q rows, their lse and their delta.
    #[inline(always)]
    pub(super) unsafe fn copy_queries<C: Variant<T, E>>(
        params: &C::Params,
        work: &Work,
        step: Step,
        slot: u32,
        shared: u32,
        thread: u32,
    ) {
        let thread = opaque(thread);
        let q = C::queries(params, work, step, shared, &C::common(params).q);
        Self::copy(Self::Q, q, shared + Self::PLAN.q + slot * Self::PLAN.q_stage, thread);
        let rows = shared + Self::PLAN.rows + slot * 2 * Self::TILE.q_rows * 4;
        C::copy_states(params, work, step, shared, rows, thread);
    }

    /// Starts copying a step's dO rows.
    #[inline(always)]
    pub(super) unsafe fn copy_d_o<C: Variant<T, E>>(
        params: &C::Params,
        work: &Work,
        step: Step,
        slot: u32,
        shared: u32,
        thread: u32,
    ) {
        let d_o = C::queries(params, work, step, shared, &C::common(params).d_o);
        let tile = shared + Self::PLAN.d_o + slot * Self::PLAN.d_o_stage;
        Self::copy(Self::D_O, d_o, tile, opaque(thread));
    }

    /// Rounds one gradient, times `factor`, and puts the warp's part into its staged tile.
    #[inline(always)]
    unsafe fn stage<F: Fragment>(
        layout: &PanelLayout,
        shared: u32,
        place: &Place,
        factor: f32,
        gradient: &F,
    ) {
        let pairs = layout.columns / Self::PLAN.splits / 16;
        let to = PairAddress::new(layout, shared, place.key, place.split * 16, place.lane);
        let mut row_tile = 0;
        while row_tile < Self::ROW_TILES {
            let mut tile = 0;
            while tile < pairs * 2 {
                let first = (row_tile * pairs as usize * 2 + tile as usize) * 4;
                let column = tile / 2 * 16 * Self::PLAN.splits + tile % 2 * 8;
                let mut half = 0;
                while half < 2 {
                    let pair = E::pack(
                        gradient.at(first + half * 2) * factor,
                        gradient.at(first + half * 2 + 1) * factor,
                    );
                    to.store(layout, row_tile as u32 * 16 + half as u32 * 8, column, pair);
                    half += 1;
                }
                tile += 1;
            }
            row_tile += 1;
        }
    }

    /// Puts dK = scale · dSᵀ·Q and dV, rounded, where the tiles lay.
    #[inline(always)]
    pub(super) unsafe fn stage_gradients(
        place: &Place,
        scale: f32,
        dk: &T::KeyGradient,
        dv: &T::ValueGradient,
    ) {
        Self::stage(&Self::K, place.shared, place, scale, dk);
        Self::stage(&Self::V, place.shared + Self::K.bytes(), place, 1.0, dv);
    }

    /// Writes the staged gradients that are wanted.
    #[inline(always)]
    pub(super) unsafe fn write_gradients<C: Variant<T, E>>(
        params: &C::Params,
        work: &Work,
        shared: u32,
        thread: u32,
    ) {
        let write = |layout, rows, from| {
            if Self::TILE.warps == 4 {
                write_tile::<128>(layout, rows, from, thread);
            } else {
                write_tile::<256>(layout, rows, from, thread);
            }
        };
        let common = C::common(params);
        if common.dk.address != 0 {
            write(Self::K, C::key_gradients(params, work, shared, &common.dk), shared);
        }
        if common.dv.address != 0 {
            let rows = C::key_gradients(params, work, shared, &common.dv);
            write(Self::V, rows, shared + Self::K.bytes());
        }
    }
}
