//! The portable backward kernel: column owner (M4.4 §0x06, Algorithm 2) on `mma.sync`.
//!
//! **Who owns what.** A block owns a tile of keys of one KV head. It walks the query tiles that see
//! any of them, of every query head of the group, and nobody else writes its dK and dV: they stay
//! in registers and are rounded once. Scores are formed transposed, Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, with
//! keys as the product's rows. A warp owns 16 or 32 keys for good: its Pᵀ and dSᵀ, once packed, are
//! already the A operands of dV += Pᵀ·dO and dK += dSᵀ·Q. From head dimension 192 on a warp's
//! registers do not hold both gradients of 16 keys, and two warps share them: each forms the scores
//! of half the queries and the gradients of half the channels, interleaved in steps of 16.
//!
//! Only dQ = dS·K needs the keys of all warps. dSᵀ passes through shared memory, each warp forms a
//! part of the dQ tile and adds it to the f32 sums by atomics, a cache line at a time.
//!
//! **Shared memory.** K stays. V rows move into registers where a warp owns 16 keys. Q tiles, with
//! the rows' lse and delta, pass through a ring of two slots; dO tiles through one of two or, where
//! memory is short, through a lone slot. dSᵀ, and Pᵀ where warps share keys, are rewritten each
//! step. Rows past the end and channels past the tensors' are zero, so nothing beyond the tensors
//! reaches a product. At the end dK and dV are staged where the tiles lay.
//!
//! **What protects what.** A step has two barriers. *Top*: everyone's copies of this step's Q and
//! dO have arrived, and everyone has done with the last step's Q and dSᵀ, so that the next Q may be
//! copied and dSᵀ written. *Middle*: dSᵀ (and Pᵀ) are complete, and everyone has read the scores'
//! operands. A lone dO slot is filled again after the last product that reads it: that is before
//! the middle barrier or, where warps share keys, before one more barrier.
//!
//! **Masks.** P and dS of a hidden cell, of a row past the end among them, are made 0 by selection,
//! never by arithmetic. Tiles that hold none skip the compares, and tiles with nothing visible are
//! never loaded. What a mask class decides is behind `Variant`: `plain.rs` has the classes `full`
//! and `causal`, `masked.rs`, `options.rs` and `mask.rs` the classes `masked` and `general`.
//!
//! **Ordered sums.** Where equal runs must be equal bits, blocks draw their number from a counter
//! and a block adds to a dQ tile when those of lower keys that visit it have: it waits for the
//! tile's turn, adds, and passes the turn on once every thread has added. Whoever it waits for drew
//! a lower number, so it has started, and in turn waits for lower numbers only: the lowest never
//! waits.

mod bias;
mod gradients;
mod mask;
mod masked;
mod options;
mod plain;
mod scores;
mod split;
mod tiles;

use core::marker::PhantomData;

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::params::PortableBackwardParams;
use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::{PortableBackwardPlan, PortableBackwardTiling};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::TileShape;

use self::masked::WithOptions;
use self::plain::Plain;
use self::scores::Corner;

use crate::ptx::async_copy::{commit_group, wait_group};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{dynamic_shared, fetch_add_global_u32, load_shared_v4, store_shared_v4};
use crate::ptx::thread::{block_idx_x, opaque, sync_threads, sync_threads_or, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::tile::Rows;

/// Constants of one specialisation.
struct Kernel<T, E>(PhantomData<(T, E)>);

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    const TILE: TileShape = T::SHAPE;
    const PLAN: PortableBackwardPlan = PortableBackwardPlan::new(T::SHAPE, E::PIECES);
    const Q: PanelLayout = T::SHAPE.q_layout();
    const K: PanelLayout = T::SHAPE.k_layout();
    const V: PanelLayout = T::SHAPE.v_layout();
    const D_O: PanelLayout = T::SHAPE.o_layout();
    const D_S: PanelLayout = PortableBackwardPlan::transposed_layout(T::SHAPE);
    const ROW_TILES: usize = Self::PLAN.row_tiles as usize;
    const IS_SHARED: bool = Self::PLAN.splits > 1;
    const CHECKED: () = {
        assert!(T::PIECES == E::PIECES);
        assert!(T::SHAPE.warps == 4 || T::SHAPE.warps == 8 || E::PIECES > 1);
        assert!(Self::ROW_TILES <= 2 && Self::PLAN.dq_row_tiles <= 2);
        // A thread's copies step whole groups of rows.
        assert!(T::SHAPE.q_rows * 8 >= T::SHAPE.warps * 32 || T::SHAPE.q_rows * 4 >= 128);
    };
}

/// What a block owns, and the steps it takes. It lies in shared memory and is read where it is
/// needed: the loop has no registers to keep it in.
struct Work {
    batch: u32,
    kv_head: u32,
    first_key: u32,
    /// One past the last query head.
    end_head: u32,
    /// First query tile that sees any of the keys.
    first_tile: u32,
    /// One past the last.
    end_tile: u32,
    /// The first query tile, and one past the last, whose rows all see every one of the keys, where
    /// a class with options asks.
    inside: [u32; 2],
}

impl Work {
    #[inline(always)]
    unsafe fn store(self, slot: u32) {
        store_shared_v4(slot, [self.batch, self.kv_head, self.first_key, self.end_head]);
        let [inside, end_inside] = self.inside;
        store_shared_v4(slot + 16, [self.first_tile, self.end_tile, inside, end_inside]);
    }

    #[inline(always)]
    unsafe fn load(slot: u32) -> Self {
        let [batch, kv_head, first_key, end_head] = load_shared_v4(slot);
        let [first_tile, end_tile, inside, end_inside] = load_shared_v4(slot + 16);
        let inside = [inside, end_inside];
        Self { batch, kv_head, first_key, end_head, first_tile, end_tile, inside }
    }

    /// [`Self::inside`] alone.
    #[inline(always)]
    unsafe fn load_inside(slot: u32) -> [u32; 2] {
        let [.., inside, end_inside] = load_shared_v4(slot + 16);
        [inside, end_inside]
    }
}

/// One query tile of one query head.
#[derive(Clone, Copy)]
struct Step {
    q_head: u32,
    tile: u32,
}

impl Step {
    #[inline(always)]
    fn first(work: &Work, group: u32) -> Self {
        Self { q_head: work.kv_head * group, tile: work.first_tile }
    }

    /// Whether the block takes this step.
    #[inline(always)]
    fn is_of(self, work: &Work) -> bool {
        self.q_head < work.end_head
    }

    #[inline(always)]
    fn next(self, work: &Work) -> Self {
        if self.tile + 1 < work.end_tile {
            Self { tile: self.tile + 1, ..self }
        } else {
            Self { q_head: self.q_head + 1, tile: work.first_tile }
        }
    }
}

/// What a mask class decides. Rows and keys are counted from their item's first.
trait Variant<T: PortableBackwardTiling, E: MatrixElement> {
    /// The kernel's parameters.
    type Params;

    /// The part of them that all kernels have.
    fn common(params: &Self::Params) -> &PortableBackwardParams;

    /// Finds the block's work and leaves it in shared memory, to be read after a barrier. All
    /// threads call this.
    unsafe fn find_work(params: &Self::Params, shared: u32, thread: u32);

    /// Whether each step is to be asked for by [`Self::shows`]: the same for all threads.
    #[inline(always)]
    fn has_mask(_params: &Self::Params) -> bool {
        false
    }

    /// Whether this thread's share of a step's cells has a visible one.
    #[inline(always)]
    unsafe fn shows(_params: &Self::Params, _step: Step, _shared: u32, _thread: u32) -> bool {
        true
    }

    /// The block's rows of k or v; zero where no row sees the key.
    unsafe fn keys(params: &Self::Params, work: &Work, shared: u32, tensor: &DeviceTensor) -> Rows;

    /// The block's rows of a gradient of k or v, seen or not.
    unsafe fn key_gradients(
        params: &Self::Params,
        work: &Work,
        shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows;

    /// A step's rows of q or dO.
    unsafe fn queries(
        params: &Self::Params,
        work: &Work,
        step: Step,
        shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows;

    /// Starts copying the step's lse, then its delta, to shared memory at `rows`.
    unsafe fn copy_states(
        params: &Self::Params,
        work: &Work,
        step: Step,
        shared: u32,
        rows: u32,
        thread: u32,
    );

    /// From products of queries and keys in `p` and of dO and values in `ds`: Pᵀ, what dV is made
    /// of, and dSᵀ. `query` is the first of the queries in the step's tile, `states` the address
    /// of the lane's first lse.
    unsafe fn weigh(
        params: &Self::Params,
        place: &Place,
        step: Step,
        query: u32,
        states: u32,
        p: &mut T::Scores,
        ds: &mut T::Scores,
    );

    /// The address of a query tile's counter, and its value when the block may add to the tile.
    unsafe fn turn(params: &Self::Params, work: &Work, step: Step, shared: u32) -> (u64, u32);

    /// Adds a warp's part of dQ to the sums; its first row is in the tile.
    unsafe fn add_sums(
        params: &Self::Params,
        place: &Place,
        step: Step,
        first_row: u32,
        first_column: u32,
        dq: &T::QueryGradient,
    );
}

/// A thread's place in its block.
struct Place {
    shared: u32,
    thread: u32,
    lane: u32,
    /// First of the warp's keys in the tile.
    key: u32,
    /// Which part of the queries and channels is the warp's, or which role it has (0: dK, 1: dV and
    /// dQ), where warps share keys.
    split: u32,
    warp: u32,
}

impl Place {
    /// Made where it is needed: computing it again costs less than keeping it in registers.
    #[inline(always)]
    unsafe fn of<T: PortableBackwardTiling, E: MatrixElement>(shared: u32, thread: u32) -> Self {
        let thread = opaque(thread);
        let warp = uniform(thread / 32);
        let rows = Kernel::<T, E>::PLAN.row_tiles * 16;
        let groups = T::SHAPE.kv_columns / rows;
        let key = warp % groups * rows;
        Self { shared, thread, lane: thread % 32, key, split: warp / groups, warp }
    }
}

/// The number of this block: its own or, where sums are ordered, the next that none has drawn.
#[inline(always)]
unsafe fn number(params: &PortableBackwardParams) -> u32 {
    if params.ordered != 0 {
        fetch_add_global_u32(params.scratch.counters, 1)
    } else {
        block_idx_x()
    }
}

/// The work of one block of a kernel without options.
///
/// # Safety
/// Launched as the kernel table says, with one block for each of the schedule's, after a preprocess
/// kernel filled the scratch, and with tensors as the parameters describe them.
#[inline(always)]
pub unsafe fn block<T: PortableBackwardTiling, E: MatrixElement, M: MaskKind>(
    params: &PortableBackwardParams,
) {
    run::<T, E, Plain<M>>(params);
}

/// The work of one block of a kernel with options.
///
/// # Safety
/// As [`block`].
#[inline(always)]
pub unsafe fn masked_block<T: PortableBackwardTiling, E: MatrixElement, M: MaskKind>(
    params: &PortableMaskedBackwardParams,
) {
    run::<T, E, WithOptions<M>>(params);
}

#[inline(always)]
unsafe fn run<T: PortableBackwardTiling, E: MatrixElement, V: Variant<T, E>>(params: &V::Params) {
    const { Kernel::<T, E>::CHECKED };
    if E::PIECES > 1 {
        return split::run::<T, E, V>(params);
    }
    let (plan, tile) = (&Kernel::<T, E>::PLAN, &T::SHAPE);
    let (shared, thread) = (dynamic_shared(), thread_idx_x());
    let work_slot = shared + plan.work;
    let common = V::common(params);
    V::find_work(params, shared, thread);
    sync_threads();

    let mut dk = T::KeyGradient::ZERO;
    let mut dv = T::ValueGradient::ZERO;
    let mut values = T::Values::ZERO;
    let (mut step, mut slot) = (Step::first(&Work::load(work_slot), common.group), 0);
    if step.is_of(&Work::load(work_slot)) {
        let work = Work::load(work_slot);
        Kernel::<T, E>::copy_keys::<V>(params, &work, shared, thread);
        if plan.values_in_registers {
            commit_group();
            wait_group::<0>();
            sync_threads();
            values = Kernel::<T, E>::load_values(&Place::of::<T, E>(shared, thread));
            sync_threads();
        }
        Kernel::<T, E>::copy_queries::<V>(params, &work, step, slot, shared, thread);
        Kernel::<T, E>::copy_d_o::<V>(params, &work, step, slot, shared, thread);
        commit_group();
    }
    while step.is_of(&Work::load(work_slot)) {
        let mut is_shown = true;
        if V::has_mask(params) {
            let shows = V::shows(params, step, shared, opaque(thread));
            wait_group::<0>();
            is_shown = sync_threads_or(shows);
        } else {
            wait_group::<0>();
            sync_threads();
        }
        let work = Work::load(work_slot);
        let next = step.next(&work);
        if next.is_of(&work) {
            Kernel::<T, E>::copy_queries::<V>(params, &work, next, slot ^ 1, shared, thread);
            if tile.stages == 2 {
                Kernel::<T, E>::copy_d_o::<V>(params, &work, next, slot ^ 1, shared, thread);
            }
        }
        commit_group();

        let d_o_slot = if tile.stages == 2 { slot } else { 0 };
        if is_shown {
            let place = Place::of::<T, E>(shared, thread);
            Kernel::<T, E>::scores::<V>(
                params, step, slot, d_o_slot, &place, &values, &mut dk, &mut dv,
            );
            sync_threads();
            if Kernel::<T, E>::IS_SHARED {
                let place = Place::of::<T, E>(shared, thread);
                Kernel::<T, E>::add_shared_values(&place, d_o_slot, &mut dv);
                if tile.stages == 1 {
                    sync_threads();
                }
            }
        }
        if tile.stages == 1 {
            let work = Work::load(work_slot);
            let next = step.next(&work);
            if next.is_of(&work) {
                Kernel::<T, E>::copy_d_o::<V>(params, &work, next, 0, shared, thread);
            }
            commit_group();
        }
        let place = Place::of::<T, E>(shared, thread);
        if is_shown && Kernel::<T, E>::IS_SHARED {
            Kernel::<T, E>::add_shared_keys(&place, slot, &mut dk);
        }
        if common.scratch.dq != 0 {
            if is_shown {
                Kernel::<T, E>::add_queries::<V>(params, step, &place);
            } else {
                Kernel::<T, E>::pass_turn::<V>(params, step, &place);
            }
        }
        step = step.next(&Work::load(work_slot));
        slot ^= 1;
    }
    wait_group::<0>();
    let work = Work::load(work_slot);
    sync_threads();
    let place = Place::of::<T, E>(shared, thread);
    Kernel::<T, E>::stage_gradients(&place, common.scale, &dk, &dv);
    sync_threads();
    Kernel::<T, E>::write_gradients::<V>(params, &work, shared, thread);
}
