//! What moves between global and shared memory: K and V at the start, Q, dO and the rows' states
//! each step, dK and dV at the end.

use ferroflash_core::backward::params::PortableBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::{Kernel, Place, Step, Work};
use crate::ptx::async_copy::cp_async_16;
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
    pub(super) unsafe fn copy_keys(
        params: &PortableBackwardParams,
        work: &Work,
        shared: u32,
        thread: u32,
    ) {
        let keys = params.visibility.kv_len;
        let k = Rows::of(&params.k, work.batch, work.kv_head, work.first_key, keys);
        let v = Rows::of(&params.v, work.batch, work.kv_head, work.first_key, keys);
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
    pub(super) unsafe fn copy_queries(
        params: &PortableBackwardParams,
        work: &Work,
        step: Step,
        slot: u32,
        shared: u32,
        thread: u32,
    ) {
        let thread = opaque(thread);
        let row = step.tile * Self::TILE.q_rows;
        let q = Rows::of(&params.q, work.batch, step.q_head, row, params.visibility.q_len);
        Self::copy(Self::Q, q, shared + Self::PLAN.q + slot * Self::PLAN.q_stage, thread);
        let chunks = Self::TILE.q_rows / 4;
        if thread < 2 * chunks {
            let (array, chunk) = if thread < chunks {
                (params.scratch.lse, thread)
            } else {
                (params.scratch.delta, thread - chunks)
            };
            let head = (work.batch * params.q_heads + step.q_head) as u64;
            let first = head * params.scratch.padded_rows as u64 + (row + chunk * 4) as u64;
            let rows = shared + Self::PLAN.rows + slot * 2 * Self::TILE.q_rows * 4;
            cp_async_16(rows + thread * 16, array + first * 4, 16);
        }
    }

    /// Starts copying a step's dO rows.
    #[inline(always)]
    pub(super) unsafe fn copy_d_o(
        params: &PortableBackwardParams,
        work: &Work,
        step: Step,
        slot: u32,
        shared: u32,
        thread: u32,
    ) {
        let row = step.tile * Self::TILE.q_rows;
        let d_o = Rows::of(&params.d_o, work.batch, step.q_head, row, params.visibility.q_len);
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
    pub(super) unsafe fn write_gradients(
        params: &PortableBackwardParams,
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
        let (batch, head, key) = (work.batch, work.kv_head, work.first_key);
        if params.dk.address != 0 {
            write(Self::K, Rows::of(&params.dk, batch, head, key, params.kv_rows), shared);
        }
        if params.dv.address != 0 {
            let rows = Rows::of(&params.dv, batch, head, key, params.kv_rows);
            write(Self::V, rows, shared + Self::K.bytes());
        }
    }
}
