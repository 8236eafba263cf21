//! A consuming warpgroup: 64 keys, from the scores of each query tile to their dK and dV.

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::WARPGROUP_ROWS;

use super::{Block, CONSUMERS_BARRIER, Kernel, Work};
use crate::ptx::math::{exp2, fma};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::{mbarrier_arrive, mbarrier_wait};
use crate::ptx::memory::load_shared_v2_f32;
use crate::ptx::thread::{opaque, sync_named, thread_idx_x};
use crate::ptx::tma::fence_proxy_async;
use crate::ptx::wgmma::{Accumulator, Operand, Product, wgmma_commit, wgmma_fence, wgmma_wait};
use crate::ring::{Turn, WARPGROUP_THREADS};
use crate::tile::LaneAddress;

/// A thread's share of what the block owns.
pub(super) struct Sums<T: HopperBackwardTiling> {
    /// dSᵀ·Q.
    pub(super) keys: T::KeyGradient,
    /// Pᵀ·dO.
    pub(super) values: T::ValueGradient,
}

/// A thread's share of a step: 64 keys by the rows of a query tile.
struct Step<T: HopperBackwardTiling> {
    /// Sᵀ, then Pᵀ.
    scores: T::Scores,
    /// dPᵀ, then dSᵀ.
    d_p: T::Scores,
}

/// The query tile of a step.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Its number among the tiles of its head.
    pub(super) tile: u32,
    /// The number of its head's first tile among the tiles of all heads.
    pub(super) head: u32,
}

/// One consumer, as each of its threads sees it.
pub(super) struct Consumer<'a, T, E, M> {
    pub(super) block: Block<'a>,
    /// Its number among the consumers.
    pub(super) index: u32,
    /// Position in the Q and dO rings.
    turn: Turn,
    /// Position in the ring of works, K and V.
    pub(super) kv: Turn,
    /// The dSᵀ tile of the step, 0 or 1.
    d_s: u32,
    kinds: PhantomData<(T, E, M)>,
}

/// Computes the consumer's keys of every work this block draws.
///
/// # Safety
/// The four warps of consumer `index` call this alike, once; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind>(
    block: Block<'_>,
    index: u32,
) where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    let (turn, kv) = (Turn::FIRST, Turn::FIRST);
    let mut consumer = Consumer::<T, E, M> { block, index, turn, kv, d_s: 0, kinds: PhantomData };
    loop {
        mbarrier_wait(consumer.k_full(), consumer.kv.parity);
        let work = block.work::<T>(consumer.kv.slot);
        if !work.exists() {
            break;
        }
        let mut sums = Sums { keys: T::KeyGradient::ZERO, values: T::ValueGradient::ZERO };
        if work.steps() > 0 {
            consumer.attend(&mut sums, work);
        } else {
            // The values' place is written to: they must have come.
            mbarrier_wait(consumer.v_full(), consumer.kv.parity);
        }
        consumer.write(&mut sums, work);
        consumer.kv = consumer.kv.next(Kernel::<T>::PLAN.kv_stages);
    }
}

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Whether the product for dV starts before dS is computed: it keeps the tensor cores busy, but
    /// holds the packed probabilities beside everything else.
    const EARLY_VALUES: bool = T::Scores::LEN <= 32;

    /// The thread's number in the warpgroup; asked again each time, since registers are short.
    #[inline(always)]
    pub(super) fn thread(&self) -> u32 {
        opaque(thread_idx_x()) % WARPGROUP_THREADS
    }

    #[inline(always)]
    fn k_full(&self) -> u32 {
        self.block.barrier(Kernel::<T>::BARRIERS.k_full + self.kv.slot)
    }

    #[inline(always)]
    fn v_full(&self) -> u32 {
        self.block.barrier(Kernel::<T>::BARRIERS.v_full + self.kv.slot)
    }

    /// All query tiles of a work, head after head.
    #[inline(always)]
    unsafe fn attend(&mut self, sums: &mut Sums<T>, work: Work) {
        let params = self.block.params;
        let head_tiles = params.scratch.padded_rows / T::SHAPE.q_rows;
        let first_head = work.batch() * params.q_heads + work.kv_head() * params.group;
        let mut place = Place { tile: work.first_tile(), head: first_head * head_tiles };
        let mut left = work.steps();
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        self.start_scores(&mut step, self.turn);
        mbarrier_wait(self.v_full(), self.kv.parity);
        self.start_d_p(&mut step, self.turn);
        let mut d_s = self.weigh(sums, &mut step, work, place);
        while left > 1 {
            let here = place;
            place.tile += 1;
            if place.tile == work.tiles_end() {
                place = Place { tile: work.first_tile(), head: place.head + head_tiles };
            }
            d_s = self.step(sums, &d_s, work, here, place);
            // Opaque, so that the loop stays one.
            left = opaque(left - 1);
        }
        self.finish(sums, &d_s, work, place);
    }

    /// The products of dS at `here`, under which the scores and dP of the step at `next` start and
    /// become its dS.
    #[inline(always)]
    unsafe fn step(
        &mut self,
        sums: &mut Sums<T>,
        d_s: &T::Packed,
        work: Work,
        here: Place,
        next: Place,
    ) -> T::Packed {
        let next_turn = self.turn.next(T::SHAPE.stages);
        let mut step = Step { scores: T::Scores::ZERO, d_p: T::Scores::ZERO };
        let mut queries = T::QueryGradient::ZERO;
        self.start_queries(&mut queries);
        self.start_keys(sums, d_s);
        self.start_scores(&mut step, next_turn);
        wgmma_wait::<2>();
        queries.settle();
        if self.owns_queries() {
            self.add_queries(&queries, work, here);
        }
        if Self::EARLY_VALUES {
            self.start_d_p(&mut step, next_turn);
            wgmma_wait::<2>();
            self.leave(Kernel::<T>::BARRIERS.q_empty);
        } else {
            wgmma_wait::<1>();
            self.leave(Kernel::<T>::BARRIERS.q_empty);
            self.start_d_p(&mut step, next_turn);
        }
        self.turn = next_turn;
        self.d_s ^= 1;
        self.weigh(sums, &mut step, work, next)
    }

    /// The products of the last step's dS.
    #[inline(always)]
    unsafe fn finish(&mut self, sums: &mut Sums<T>, d_s: &T::Packed, work: Work, place: Place) {
        let mut queries = T::QueryGradient::ZERO;
        self.start_queries(&mut queries);
        self.start_keys(sums, d_s);
        wgmma_wait::<1>();
        queries.settle();
        if self.owns_queries() {
            self.add_queries(&queries, work, place);
        }
        wgmma_wait::<0>();
        self.leave(Kernel::<T>::BARRIERS.q_empty);
        sums.keys.settle();
        sums.values.settle();
        self.turn = self.turn.next(T::SHAPE.stages);
        self.d_s ^= 1;
    }

    /// P and dS of a step whose scores and dP are under way; starts dV += Pᵀ·dO and leaves dSᵀ for
    /// all consumers. Returns dSᵀ.
    #[inline(always)]
    unsafe fn weigh(
        &self,
        sums: &mut Sums<T>,
        step: &mut Step<T>,
        work: Work,
        place: Place,
    ) -> T::Packed {
        let masked = self.needs_mask(work, place);
        wgmma_wait::<1>();
        step.scores.settle();
        self.exponentials(&mut step.scores);
        if opaque(masked as u32) != 0 {
            self.hide(&mut step.scores, work, place);
        }
        let d_s = if Self::EARLY_VALUES {
            let p = pack::<T, E>(&step.scores);
            self.start_values(sums, &p);
            wgmma_wait::<1>();
            step.d_p.settle();
            self.differentiate(step);
            if opaque(masked as u32) != 0 {
                self.hide(&mut step.d_p, work, place);
            }
            pack::<T, E>(&step.d_p)
        } else {
            wgmma_wait::<0>();
            step.d_p.settle();
            self.differentiate(step);
            if opaque(masked as u32) != 0 {
                self.hide(&mut step.d_p, work, place);
            }
            let p = pack::<T, E>(&step.scores);
            self.start_values(sums, &p);
            pack::<T, E>(&step.d_p)
        };
        self.store_d_s(&d_s);
        wgmma_wait::<0>();
        fence_proxy_async();
        sync_named(CONSUMERS_BARRIER, T::SHAPE.warpgroups() * WARPGROUP_THREADS);
        self.leave(Kernel::<T>::BARRIERS.d_o_empty);
        d_s
    }

    /// Gives back this step's slot: every read was by `wgmma` and has been waited for, or came
    /// before a barrier of the warpgroup.
    #[inline(always)]
    unsafe fn leave(&self, empty: u32) {
        if self.thread() == 0 {
            mbarrier_arrive(self.block.barrier(empty + self.turn.slot));
        }
    }

    /// Whether this warpgroup computes its share of the step's dQ.
    #[inline(always)]
    fn owns_queries(&self) -> bool {
        match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows | QueryShare::Channels => true,
            QueryShare::Steps => self.d_s == self.index,
        }
    }

    /// Starts Sᵀ = K·Qᵀ.
    #[inline(always)]
    unsafe fn start_scores(&self, step: &mut Step<T>, turn: Turn) {
        let plan = Kernel::<T>::PLAN;
        let (k_layout, q_layout) = (Kernel::<T>::K, Kernel::<T>::Q);
        let own = self.index * WARPGROUP_ROWS * k_layout.row_bytes();
        let shared = opaque(self.block.shared);
        let k = Operand::new(&k_layout, shared + plan.k + self.kv.slot * plan.k_stage + own);
        let q = Operand::new(&q_layout, shared + plan.q + turn.slot * plan.q_stage);
        mbarrier_wait(self.block.barrier(Kernel::<T>::BARRIERS.q_full + turn.slot), turn.parity);
        wgmma_fence();
        let mut channels = 0;
        while channels < T::SHAPE.head_dim / 16 {
            let a = k.columns_step(&k_layout, channels);
            let b = q.columns_step(&q_layout, channels);
            if channels == 0 {
                Product::<E>::start(&mut step.scores, a, b);
            } else {
                Product::<E>::add(&mut step.scores, a, b);
            }
            channels += 1;
        }
        wgmma_commit();
    }

    /// Starts dPᵀ = V·dOᵀ.
    #[inline(always)]
    unsafe fn start_d_p(&self, step: &mut Step<T>, turn: Turn) {
        let plan = Kernel::<T>::PLAN;
        let (v_layout, d_o_layout) = (Kernel::<T>::V, Kernel::<T>::D_O);
        let own = self.index * WARPGROUP_ROWS * v_layout.row_bytes();
        let shared = opaque(self.block.shared);
        let v = Operand::new(&v_layout, shared + plan.v + self.kv.slot * plan.v_stage + own);
        let d_o = Operand::new(&d_o_layout, shared + plan.d_o + turn.slot * plan.d_o_stage);
        mbarrier_wait(self.block.barrier(Kernel::<T>::BARRIERS.d_o_full + turn.slot), turn.parity);
        wgmma_fence();
        let mut channels = 0;
        while channels < T::SHAPE.value_dim / 16 {
            let a = v.columns_step(&v_layout, channels);
            let b = d_o.columns_step(&d_o_layout, channels);
            if channels == 0 {
                Product::<E>::start(&mut step.d_p, a, b);
            } else {
                Product::<E>::add(&mut step.d_p, a, b);
            }
            channels += 1;
        }
        wgmma_commit();
    }

    /// Starts dV += Pᵀ·dO.
    #[inline(always)]
    unsafe fn start_values(&self, sums: &mut Sums<T>, p: &T::Packed) {
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::D_O;
        let d_o = opaque(self.block.shared) + plan.d_o + self.turn.slot * plan.d_o_stage;
        let d_o = Operand::new(&layout, d_o);
        wgmma_fence();
        let mut rows = 0;
        while rows < T::SHAPE.q_rows / 16 {
            let b = d_o.rows_step(&layout, rows);
            Product::<E>::add_registers(&mut sums.values, operand::<T>(p, rows), b);
            rows += 1;
        }
        wgmma_commit();
    }

    /// Starts dK += dSᵀ·Q.
    #[inline(always)]
    unsafe fn start_keys(&self, sums: &mut Sums<T>, d_s: &T::Packed) {
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::Q;
        let q = opaque(self.block.shared) + plan.q + self.turn.slot * plan.q_stage;
        let q = Operand::new(&layout, q);
        wgmma_fence();
        let mut rows = 0;
        while rows < T::SHAPE.q_rows / 16 {
            let b = q.rows_step(&layout, rows);
            Product::<E>::add_registers(&mut sums.keys, operand::<T>(d_s, rows), b);
            rows += 1;
        }
        wgmma_commit();
    }

    /// Starts this warpgroup's share of dQ = dS·K, over all keys of the block.
    #[inline(always)]
    unsafe fn start_queries(&self, queries: &mut T::QueryGradient) {
        let plan = Kernel::<T>::PLAN;
        let (d_s_layout, k_layout) = (Kernel::<T>::D_S, Kernel::<T>::K);
        let mut d_s = opaque(self.block.shared) + plan.d_s + self.d_s * plan.d_s_stage;
        let mut k = opaque(self.block.shared) + plan.k + self.kv.slot * plan.k_stage;
        match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows => d_s += self.index * d_s_layout.panel_bytes(),
            QueryShare::Channels => {
                k += self.index
                    * (k_layout.panels() / T::SHAPE.warpgroups())
                    * k_layout.panel_bytes();
            }
            QueryShare::Steps => {}
        }
        let (d_s, k) = (Operand::new(&d_s_layout, d_s), Operand::new(&k_layout, k));
        wgmma_fence();
        if self.owns_queries() {
            let mut keys = 0;
            while keys < T::SHAPE.kv_columns / 16 {
                let (a, b) = (d_s.rows_step(&d_s_layout, keys), k.rows_step(&k_layout, keys));
                if keys == 0 {
                    Product::<E>::start_rows(queries, a, b);
                } else {
                    Product::<E>::add_rows(queries, a, b);
                }
                keys += 1;
            }
        }
        wgmma_commit();
    }

    /// Pᵀ = 2^(scale·Sᵀ − lse): lse is of a row, a column here.
    #[inline(always)]
    unsafe fn exponentials(&self, scores: &mut T::Scores) {
        let plan = Kernel::<T>::PLAN;
        let scale_log2 = self.block.params.scale_log2;
        let rows = opaque(self.block.shared) + plan.lse + self.turn.slot * plan.row_stage;
        let rows = rows + self.thread() % 4 * 8;
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let lse = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let score = scores.at_mut(group * 4 + value);
                *score = exp2(fma(*score, scale_log2, -lse[value % 2]));
                value += 1;
            }
            group += 1;
        }
    }

    /// dSᵀ = Pᵀ ∘ (dPᵀ − delta).
    #[inline(always)]
    unsafe fn differentiate(&self, step: &mut Step<T>) {
        let plan = Kernel::<T>::PLAN;
        let rows = opaque(self.block.shared) + plan.delta + self.turn.slot * plan.row_stage;
        let rows = rows + self.thread() % 4 * 8;
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let delta = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let index = group * 4 + value;
                let d_p = step.d_p.at_mut(index);
                *d_p = step.scores.at(index) * (*d_p - delta[value % 2]);
                value += 1;
            }
            group += 1;
        }
    }

    /// Whether some row of the tile sees fewer keys than the block has.
    #[inline(always)]
    unsafe fn needs_mask(&self, work: Work, place: Place) -> bool {
        let visible = &self.block.params.visibility;
        let keys_end = match M::CLASS {
            MaskClass::Full => visible.kv_len,
            MaskClass::Causal => visible.keys_end(place.tile * T::SHAPE.q_rows),
        };
        keys_end < work.first_key() + T::SHAPE.kv_columns
    }

    /// Makes zero what belongs to rows that do not see their key.
    #[inline(always)]
    unsafe fn hide(&self, values: &mut T::Scores, work: Work, place: Place) {
        let visible = &self.block.params.visibility;
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let own = self.index * WARPGROUP_ROWS + warp * 16 + lane / 4;
        let own_row = (place.tile * T::SHAPE.q_rows + lane % 4 * 2) as i32;
        let mut half = 0;
        while half < 2 {
            let key = work.first_key() + own + half * 8;
            // The first row that sees the key, counted from the thread's first. Lengths and sides
            // are bounded so that these sums fit; see `MAX_LENGTH`.
            let first = if key >= visible.kv_len {
                i32::MAX
            } else {
                match M::CLASS {
                    MaskClass::Full => 0,
                    MaskClass::Causal => key as i32 - visible.offset - visible.right - own_row,
                }
            };
            let mut group = 0;
            while group < T::SHAPE.q_rows / 8 {
                let index = (group * 4 + half * 2) as usize;
                if (group as i32 * 8) < first {
                    *values.at_mut(index) = 0.0;
                }
                if group as i32 * 8 + 1 < first {
                    *values.at_mut(index + 1) = 0.0;
                }
                group += 1;
            }
            half += 1;
        }
    }

    /// Leaves dSᵀ for the product that needs all keys.
    #[inline(always)]
    unsafe fn store_d_s(&self, d_s: &T::Packed) {
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::D_S;
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let shared = opaque(self.block.shared) + plan.d_s + self.d_s * plan.d_s_stage;
        let target = LaneAddress::rows_first(&layout, shared, lane);
        let row = self.index * WARPGROUP_ROWS + warp * 16;
        let mut pair = 0;
        while pair < T::SHAPE.q_rows / 16 {
            target.store(&layout, row, pair * 16, operand::<T>(d_s, pair));
            pair += 1;
        }
    }
}

/// Rounds values in pairs.
#[inline(always)]
unsafe fn pack<T: HopperBackwardTiling, E: MatrixElement>(values: &T::Scores) -> T::Packed {
    let mut packed = T::Packed::ZERO;
    let mut pair = 0;
    while pair < T::Packed::LEN {
        *packed.at_mut(pair) = E::pack(values.at(pair * 2), values.at(pair * 2 + 1));
        pair += 1;
    }
    packed
}

/// The A operand of 16 query rows.
#[inline(always)]
unsafe fn operand<T: HopperBackwardTiling>(packed: &T::Packed, rows: u32) -> [u32; 4] {
    let first = rows as usize * 4;
    [packed.at(first), packed.at(first + 1), packed.at(first + 2), packed.at(first + 3)]
}
