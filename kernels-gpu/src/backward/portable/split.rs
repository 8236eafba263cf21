//! The loop for elements of several pieces, f32; see [`crate::pieces`].
//!
//! Who owns what, and what a mask class decides, is as in the [parent module](super): a warp owns
//! 16 keys. Where a thread cannot hold both of their gradients, two warps share them and have
//! roles: both form S, one of them dP, dS and then dK, the other dV and then dQ. What else differs
//! follows from tiles of three planes, which are split on their way in, by ordinary loads and
//! stores:
//!
//! **Shared memory.** K and V stay. There is one Q tile and one dO tile, with the rows' lse and
//! delta, and dSᵀ; where that is too much, dSᵀ takes the place of dO. dK and dV leave from
//! registers.
//!
//! **What protects what.** *Top*: the step's Q and dO are complete, and everyone has done with the
//! last step's dSᵀ. *Middle*: dSᵀ is complete, and everyone has read Q and dO, so that the next
//! ones may come while dQ is formed. Where dSᵀ takes the place of dO there is a barrier before it
//! is stored and one after it was read, before the next Q and dO come.
//!
//! **Sums.** Products of 16 queries are formed apart and then added to dK and dV, whose sums
//! over all queries are thus rounded and not cut off.

use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::{Kernel, Place, Step, Variant, Work};
use crate::pieces::{
    Operand, add_products, add_rows, add_sums, bring_tile, load, load_transposed, split,
    split_operand, write_fragment,
};
use crate::ptx::async_copy::{commit_group, wait_group};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{dynamic_shared, load_acquire_global_u32, release_add_global_u32};
use crate::ptx::thread::{opaque, sync_threads, thread_idx_x};
use crate::tile::{LaneAddress, PairAddress, Rows};

/// Threads of a block.
const THREADS: u32 = 128;
/// Steps of 16 keys that a tile has at most.
const KEY_STEPS: usize = 4;

/// The work of one block; see [`super::run`].
#[inline(always)]
pub(super) unsafe fn run<T: PortableBackwardTiling, E: MatrixElement, V: Variant<T, E>>(
    params: &V::Params,
) {
    const { Kernel::<T, E>::SPLIT_CHECKED };
    let plan = &Kernel::<T, E>::PLAN;
    let (shared, thread) = (dynamic_shared(), thread_idx_x());
    let work_slot = shared + plan.work;
    let common = V::common(params);
    V::find_work(params, shared, thread);
    sync_threads();

    let mut dk = T::KeyGradient::ZERO;
    let mut dv = T::ValueGradient::ZERO;
    let mut step = Step::first(&Work::load(work_slot), common.group);
    if step.is_of(&Work::load(work_slot)) {
        let work = Work::load(work_slot);
        let k = V::keys(params, &work, shared, &common.k);
        Kernel::<T, E>::bring(Kernel::<T, E>::K, k, shared + plan.k, thread);
        let v = V::keys(params, &work, shared, &common.v);
        Kernel::<T, E>::bring(Kernel::<T, E>::V, v, shared + plan.v, thread);
        Kernel::<T, E>::bring_queries::<V>(params, &work, step, shared, thread);
    }
    while step.is_of(&Work::load(work_slot)) {
        wait_group::<0>();
        sync_threads();
        let place = Place::of::<T, E>(shared, thread);
        let ds = Kernel::<T, E>::split_scores::<V>(params, step, &place, &mut dk, &mut dv);
        sync_threads();
        let work = Work::load(work_slot);
        let next = step.next(&work);
        if !plan.replaces_d_o() && next.is_of(&work) {
            Kernel::<T, E>::bring_queries::<V>(params, &work, next, shared, thread);
        }
        let place = Place::of::<T, E>(shared, thread);
        let (counter, turn) = V::turn(params, &work, step, shared);
        let is_ordered = common.ordered != 0 && common.scratch.dq != 0;
        if is_ordered {
            if place.thread == 0 {
                while load_acquire_global_u32(counter) < turn {}
            }
            sync_threads();
        }
        if Kernel::<T, E>::HAS_ROLES && place.split == 0 {
            Kernel::<T, E>::split_add_keys(&place, &ds, &mut dk);
        } else if common.scratch.dq != 0 {
            Kernel::<T, E>::split_add_queries::<V>(params, step, &place);
        }
        if is_ordered {
            sync_threads();
            if place.thread == 0 {
                release_add_global_u32(counter, 1);
            }
        }
        if plan.replaces_d_o() {
            sync_threads();
            let work = Work::load(work_slot);
            let next = step.next(&work);
            if next.is_of(&work) {
                Kernel::<T, E>::bring_queries::<V>(params, &work, next, shared, thread);
            }
        }
        step = step.next(&Work::load(work_slot));
    }
    let work = Work::load(work_slot);
    let place = Place::of::<T, E>(shared, thread);
    let (has_dk, has_dv) = Kernel::<T, E>::roles(&place);
    if has_dk && common.dk.address != 0 {
        let rows = V::key_gradients(params, &work, shared, &common.dk);
        write_fragment(&dk, common.scale, rows, place.key, place.lane);
    }
    if has_dv && common.dv.address != 0 {
        let rows = V::key_gradients(params, &work, shared, &common.dv);
        if Kernel::<T, E>::HAS_ROLES {
            write_fragment(&dk, 1.0, rows, place.key, place.lane);
        } else {
            write_fragment(&dv, 1.0, rows, place.key, place.lane);
        }
    }
}

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Whether two warps share keys, and one forms dK and the other dV and dQ.
    const HAS_ROLES: bool = Self::PLAN.roles > 1;
    const SPLIT_CHECKED: () = {
        let is_whole = E::PIECES == 1;
        assert!(is_whole || (Self::ROW_TILES == 1 && !Self::IS_SHARED && T::SHAPE.stages == 1));
        assert!(is_whole || T::SHAPE.kv_columns as usize <= KEY_STEPS * 16);
        assert!(is_whole || (Self::QUERIES == T::SHAPE.q_rows && Self::PLAN.dq_row_tiles == 1));
        assert!(is_whole || T::SHAPE.warps == 4);
        assert!(is_whole || !Self::HAS_ROLES || Self::PLAN.replaces_d_o());
        // The rows' lse and delta are copied by a thread each.
        assert!(is_whole || 2 * T::SHAPE.q_rows <= T::SHAPE.warps * 32);
    };

    /// [`bring_tile`] by all of the block's threads.
    #[inline(always)]
    unsafe fn bring(layout: PanelLayout, rows: Rows, shared: u32, thread: u32) {
        bring_tile::<E, THREADS>(layout, rows, shared, opaque(thread));
    }

    /// Brings a step's Q and dO rows, and starts copying their lse and delta.
    #[inline(always)]
    unsafe fn bring_queries<C: Variant<T, E>>(
        params: &C::Params,
        work: &Work,
        step: Step,
        shared: u32,
        thread: u32,
    ) {
        let common = C::common(params);
        C::copy_states(params, work, step, shared, shared + Self::PLAN.rows, opaque(thread));
        commit_group();
        let q = C::queries(params, work, step, shared, &common.q);
        Self::bring(Self::Q, q, shared + Self::PLAN.q, thread);
        let d_o = C::queries(params, work, step, shared, &common.d_o);
        Self::bring(Self::D_O, d_o, shared + Self::PLAN.d_o, thread);
    }

    /// `a · bᵀ` over channels: the warp's 16 keys with all queries of the step.
    #[inline(always)]
    unsafe fn split_over_channels(
        (a, a_layout): (LaneAddress, &PanelLayout),
        (b, b_layout): (LaneAddress, &PanelLayout),
    ) -> T::Scores {
        let (mut first, mut rest) = (T::Scores::ZERO, T::Scores::ZERO);
        let mut step = 0;
        while step < b_layout.columns / 16 {
            let rows = load(a, a_layout, 0, step * 16);
            let mut pair = 0;
            while pair < Self::QUERY_TILES / 2 {
                let columns = load(b, b_layout, pair as u32 * 16, step * 16);
                add_products::<E, _>(&mut first, &mut rest, pair * 8, &rows, &columns);
                pair += 1;
            }
            step += 1;
        }
        add_sums(&mut first, 0, &rest);
        first
    }

    /// Adds to a gradient of the warp's keys from Pᵀ or dSᵀ in registers.
    #[inline(always)]
    unsafe fn split_add_own<F: Fragment>(
        gradient: &mut F,
        scores: &T::Scores,
        b: LaneAddress,
        layout: &PanelLayout,
    ) {
        let mut step = 0;
        while step < Self::QUERY_TILES / 2 {
            let a = split_operand(scores, step * 8);
            add_rows::<E, _>(gradient, &a, b, layout, step as u32 * 16);
            step += 1;
        }
    }

    /// dK += dSᵀ·Q.
    #[inline(always)]
    unsafe fn split_add_keys(place: &Place, ds: &T::Scores, dk: &mut T::KeyGradient) {
        let q = place.shared + Self::PLAN.q;
        let q = LaneAddress::rows_first(&Self::Q, q, opaque(place.lane));
        Self::split_add_own(dk, ds, q, &Self::Q);
    }

    /// Whether a warp forms dK, and whether dV: without roles, both.
    #[inline(always)]
    fn roles(place: &Place) -> (bool, bool) {
        (!Self::HAS_ROLES || place.split == 0, !Self::HAS_ROLES || place.split == 1)
    }

    /// One step up to the middle barrier: Pᵀ of the warp's keys into dV, dSᵀ into shared memory
    /// and, without roles, into dK. With roles a warp forms what its own needs; dSᵀ is returned.
    #[inline(always)]
    unsafe fn split_scores<C: Variant<T, E>>(
        params: &C::Params,
        step: Step,
        place: &Place,
        dk: &mut T::KeyGradient,
        dv: &mut T::ValueGradient,
    ) -> T::Scores {
        let plan = &Self::PLAN;
        let (has_dk, has_dv) = Self::roles(place);
        // Addresses are computed for each product anew: all of them together would not fit.
        let rows_of = |layout: &PanelLayout, tile: u32| {
            let lane = opaque(place.lane);
            LaneAddress::rows_first(layout, place.shared + tile, lane)
        };
        let columns_of = |layout: &PanelLayout, tile: u32| {
            let lane = opaque(place.lane);
            LaneAddress::columns_first(layout, place.shared + tile, lane)
        };
        let k = rows_of(&Self::K, plan.k).moved(&Self::K, place.key, 0);
        let q = columns_of(&Self::Q, plan.q);
        let mut p = Self::split_over_channels((k, &Self::K), (q, &Self::Q));
        let mut ds = T::Scores::ZERO;
        if has_dk {
            let v = rows_of(&Self::V, plan.v).moved(&Self::V, place.key, 0);
            let d_o = columns_of(&Self::D_O, plan.d_o);
            ds = Self::split_over_channels((v, &Self::V), (d_o, &Self::D_O));
        }
        let lane = opaque(place.lane);
        let states = place.shared + plan.rows + lane % 4 * 8;
        C::weigh(params, place, step, 0, states, &mut p, &mut ds);
        if has_dv {
            let d_o = rows_of(&Self::D_O, plan.d_o);
            if Self::HAS_ROLES {
                Self::split_add_own(dk, &p, d_o, &Self::D_O);
            } else {
                Self::split_add_own(dv, &p, d_o, &Self::D_O);
            }
        }
        if !Self::HAS_ROLES {
            Self::split_add_keys(place, &ds, dk);
        }
        if plan.replaces_d_o() {
            sync_threads();
        }
        if has_dk {
            let tile = place.shared + plan.ds;
            let to = PairAddress::new(&Self::D_S, tile, place.key, 0, opaque(place.lane));
            Self::store_pieces(&ds, to);
        }
        ds
    }

    /// Stores dSᵀ in planes.
    #[inline(always)]
    unsafe fn store_pieces(values: &T::Scores, to: PairAddress) {
        let mut tile = 0;
        while tile < Self::QUERY_TILES {
            let mut half = 0;
            while half < 2 {
                let first = tile * 4 + half * 2;
                let pieces = split(values.at(first), values.at(first + 1));
                let (row, column) = (half as u32 * 8, tile as u32 * 8);
                to.store(&Self::D_S, row, column, pieces[0]);
                // Rows past a plane's last are the next plane's.
                to.store(&Self::D_S, row + Self::PLANE_ROWS, column, pieces[1]);
                to.store(&Self::D_S, row + 2 * Self::PLANE_ROWS, column, pieces[2]);
                half += 1;
            }
            tile += 1;
        }
    }

    /// Rows of dSᵀ that take as many bytes as a plane, which has one panel.
    const PLANE_ROWS: u32 = Self::D_S.bytes() / Self::D_S.row_bytes();

    /// Adds dS·K of the block's keys to the sums of a query tile.
    #[inline(always)]
    unsafe fn split_add_queries<C: Variant<T, E>>(params: &C::Params, step: Step, place: &Place) {
        let plan = &Self::PLAN;
        let row_groups = Self::TILE.q_rows / 16;
        let column_groups = plan.dq_warps / row_groups;
        let warp = place.warp % plan.dq_warps;
        let first_row = warp % row_groups * 16;
        let own_column = warp / row_groups * 16;
        let steps = Self::TILE.kv_columns as usize / 16;

        let tile = place.shared + plan.ds;
        let ds = LaneAddress::columns_first(&Self::D_S, tile, place.lane);
        let ds = ds.moved(&Self::D_S, 0, first_row);
        let mut a: [Operand; KEY_STEPS] = [[[0; 4]; 3]; KEY_STEPS];
        let mut key = 0;
        while key < steps {
            a[key] = load_transposed(ds, &Self::D_S, key as u32 * 16, 0);
            key += 1;
        }
        let mut group = 0;
        while group < plan.dq_groups(Self::TILE) {
            let first_column = own_column + group * plan.dq_columns * column_groups;
            let k = LaneAddress::rows_first(&Self::K, place.shared + plan.k, place.lane);
            let k = k.moved(&Self::K, 0, first_column);
            let mut dq = T::QueryGradient::ZERO;
            let mut pair = 0;
            while pair < plan.dq_columns as usize / 16 {
                let (mut first, mut rest) = ([0.0; 8], [0.0; 8]);
                let column = pair as u32 * 16 * column_groups;
                let mut key = 0;
                while key < steps {
                    let rows = load_transposed(k, &Self::K, key as u32 * 16, column);
                    add_products::<E, _>(&mut first, &mut rest, 0, &a[key], &rows);
                    key += 1;
                }
                add_sums(&mut first, 0, &rest);
                add_sums(&mut dq, pair * 8, &first);
                pair += 1;
            }
            C::add_sums(params, place, step, first_row, first_column, &dq);
            group += 1;
        }
    }
}
