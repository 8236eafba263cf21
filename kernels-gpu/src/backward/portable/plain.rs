//! The classes `full` and `causal`: every item alike, and at most a right side.

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::params::PortableBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::schedule::divide;
use ferroflash_core::visibility::Visibility;

use super::{Corner, Kernel, Place, Step, Variant, Work, number};
use crate::ptx::async_copy::cp_async_16;
use crate::ptx::math::{exp2, fma};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{add_global_f32, load_shared_v2_f32};
use crate::ptx::thread::opaque;
use crate::tile::Rows;

/// The variant of a class without options.
pub(super) struct Plain<M>(PhantomData<M>);

impl<T: PortableBackwardTiling, E: MatrixElement, M: MaskKind> Variant<T, E> for Plain<M> {
    type Params = PortableBackwardParams;

    #[inline(always)]
    fn common(params: &PortableBackwardParams) -> &PortableBackwardParams {
        params
    }

    #[inline(always)]
    unsafe fn find_work(params: &PortableBackwardParams, shared: u32, thread: u32) {
        if thread == 0 {
            let columns = T::SHAPE.kv_columns;
            let work = params.schedule.work(number(params));
            let batch = divide(work.batch_head, params.kv_heads);
            let first_key = work.kv_block * columns;
            let visible = &params.visibility;
            let rows = match M::CLASS {
                MaskClass::Full if first_key < visible.kv_len => 0..visible.q_len,
                MaskClass::Full => 0..0,
                _ => visible.rows_of_any(&(first_key..first_key + columns)),
            };
            let kv_head = work.batch_head - batch * params.kv_heads;
            let heads = if rows.start < rows.end { params.group } else { 0 };
            let work = Work {
                batch,
                kv_head,
                first_key,
                end_head: kv_head * params.group + heads,
                first_tile: rows.start / T::SHAPE.q_rows,
                end_tile: rows.end.div_ceil(T::SHAPE.q_rows),
                inside: [0, 0],
            };
            work.store(shared + Kernel::<T, E>::PLAN.work);
        }
    }

    #[inline(always)]
    unsafe fn keys(
        params: &PortableBackwardParams,
        work: &Work,
        _shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        let keys = params.visibility.kv_len;
        Rows::of(tensor, work.batch, work.kv_head, work.first_key, keys)
    }

    #[inline(always)]
    unsafe fn key_gradients(
        params: &PortableBackwardParams,
        work: &Work,
        _shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        Rows::of(tensor, work.batch, work.kv_head, work.first_key, params.kv_rows)
    }

    #[inline(always)]
    unsafe fn queries(
        params: &PortableBackwardParams,
        work: &Work,
        step: Step,
        _shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        let row = step.tile * T::SHAPE.q_rows;
        Rows::of(tensor, work.batch, step.q_head, row, params.visibility.q_len)
    }

    #[inline(always)]
    unsafe fn copy_states(
        params: &PortableBackwardParams,
        work: &Work,
        step: Step,
        _shared: u32,
        rows: u32,
        thread: u32,
    ) {
        let chunks = T::SHAPE.q_rows / 4;
        if thread < 2 * chunks {
            let (array, chunk) = if thread < chunks {
                (params.scratch.lse, thread)
            } else {
                (params.scratch.delta, thread - chunks)
            };
            let row = step.tile * T::SHAPE.q_rows;
            let head = (work.batch * params.q_heads + step.q_head) as u64;
            let first = head * params.scratch.padded_rows as u64 + (row + chunk * 4) as u64;
            cp_async_16(rows + thread * 16, array + first * 4, 16);
        }
    }

    #[inline(always)]
    unsafe fn weigh(
        params: &PortableBackwardParams,
        place: &Place,
        step: Step,
        query: u32,
        states: u32,
        p: &mut T::Scores,
        ds: &mut T::Scores,
    ) {
        Kernel::<T, E>::probabilities(p, states, params.scale);
        let visible = &params.visibility;
        let corner = Corner::of::<T, E>(place, step, query);
        let first_row = corner.tile_row;
        let full_end = match M::CLASS {
            _ if first_row + T::SHAPE.q_rows > visible.q_len => 0,
            MaskClass::Full => visible.kv_len,
            _ => visible.keys_end(first_row),
        };
        let hides = corner.warp_key + Kernel::<T, E>::PLAN.row_tiles * 16 > full_end;
        // A dP that overflowed would make a NaN of dS: one of them is hidden, as registers allow.
        let hides_d_p = Kernel::<T, E>::ROW_TILES > 1;
        if hides {
            Kernel::<T, E>::hide::<M>(p, visible, &corner);
            if hides_d_p {
                Kernel::<T, E>::hide::<M>(ds, visible, &corner);
            }
        }
        Kernel::<T, E>::score_gradients(ds, p, states);
        if !hides_d_p && opaque(hides as u32) != 0 {
            Kernel::<T, E>::hide::<M>(ds, visible, &corner);
        }
    }

    #[inline(always)]
    unsafe fn turn(
        params: &PortableBackwardParams,
        work: &Work,
        step: Step,
        _shared: u32,
    ) -> (u64, u32) {
        let scratch = &params.scratch;
        let head = work.batch * params.q_heads + step.q_head;
        // Counter 0 is the one that numbers are drawn from.
        let head_tiles = scratch.padded_rows / T::SHAPE.q_rows;
        let number = 1 + head as u64 * head_tiles as u64 + step.tile as u64;
        (scratch.counters + number * 4, work.first_key / T::SHAPE.kv_columns)
    }

    #[inline(always)]
    unsafe fn add_sums(
        params: &PortableBackwardParams,
        place: &Place,
        step: Step,
        first_row: u32,
        first_column: u32,
        dq: &T::QueryGradient,
    ) {
        let (plan, tile) = (&Kernel::<T, E>::PLAN, &T::SHAPE);
        let scratch = &params.scratch;
        let work = Work::load(place.shared + plan.work);
        let head = work.batch * params.q_heads + step.q_head;
        let tiles = tile.head_dim / 8;
        let row =
            head as u64 * scratch.padded_rows as u64 + (step.tile * tile.q_rows + first_row) as u64;
        let block = row / 16 * tiles as u64 + (first_column / 8) as u64;
        let sums = scratch.dq + (block * 128 + place.lane as u64) * 4;
        let mut index = 0;
        while index < T::QueryGradient::LEN {
            let (row_tile, column) = Kernel::<T, E>::sum_tile(index / 4);
            let offset = (row_tile * tiles + column) * 512 + index as u32 % 4 * 128;
            add_global_f32(sums + offset as u64, dq.at(index));
            index += 1;
        }
    }
}

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Makes P, dP or dS of hidden cells 0, whatever it was.
    #[inline(always)]
    unsafe fn hide<M: MaskKind>(values: &mut T::Scores, visible: &Visibility, corner: &Corner) {
        let mut column = 0;
        while column < Self::QUERY_TILES * 2 {
            let row = corner.row + (column / 2 * 8 + column % 2) as u32;
            // Lengths and sides are bounded so that this sum fits; see `MAX_LENGTH`.
            let diagonal_end = row as i32 + visible.offset + visible.right + 1;
            let keys_end = match M::CLASS {
                _ if row >= visible.q_len => 0,
                MaskClass::Full => visible.kv_len as i32,
                _ => diagonal_end.min(visible.kv_len as i32),
            };
            let mut half = 0;
            while half < Self::ROW_TILES * 2 {
                if (corner.key + half as u32 * 8) as i32 >= keys_end {
                    *values.at_mut(Self::cell(half, column)) = 0.0;
                }
                half += 1;
            }
            column += 1;
        }
    }

    /// Pᵀ in the place of Sᵀ. `rows` is the address of the first of this lane's rows' lse.
    #[inline(always)]
    unsafe fn probabilities(scores: &mut T::Scores, rows: u32, scale: f32) {
        let mut tile = 0;
        while tile < Self::QUERY_TILES {
            let lse = load_shared_v2_f32(rows + tile as u32 * 32);
            let mut index = 0;
            while index < Self::ROW_TILES * 4 {
                let first = (index / 4 * Self::QUERY_TILES + tile) * 4;
                let value = scores.at_mut(first + index % 4);
                // One rounding near the row's maximum, whatever the magnitude of lse.
                let exponent = fma(*value, scale, -lse[index % 2]);
                *value = exp2(exponent * core::f32::consts::LOG2_E);
                index += 1;
            }
            tile += 1;
        }
    }

    /// dSᵀ = P∘(dP − delta), in the place of dPᵀ.
    #[inline(always)]
    unsafe fn score_gradients(dp: &mut T::Scores, p: &T::Scores, rows: u32) {
        let mut tile = 0;
        while tile < Self::QUERY_TILES {
            let delta = load_shared_v2_f32(rows + Self::TILE.q_rows * 4 + tile as u32 * 32);
            let mut index = 0;
            while index < Self::ROW_TILES * 4 {
                let place = (index / 4 * Self::QUERY_TILES + tile) * 4 + index % 4;
                let value = dp.at_mut(place);
                *value = p.at(place) * (*value - delta[index % 2]);
                index += 1;
            }
            tile += 1;
        }
    }
}
