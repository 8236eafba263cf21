//! The five products of a step, as a warpgroup starts them.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, QueryShare, panels};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

use super::Kernel;
use super::consumer::{Consumer, Step, Sums};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::thread::opaque;
use crate::ptx::wgmma::{Operand, Product, wgmma_commit, wgmma_fence};
use crate::ring::Turn;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Starts Sᵀ = K·Qᵀ.
    #[inline(always)]
    pub(super) unsafe fn start_scores(&self, step: &mut Step<T>, turn: Turn) {
        let plan = Kernel::<T>::PLAN;
        let (k_layout, q_layout) = (Kernel::<T>::K, Kernel::<T>::Q);
        let own_keys = self.first_own_key() * k_layout.row_bytes();
        let own_rows = self.first_own_row() * q_layout.row_bytes();
        let shared = opaque(self.block.shared);
        let k = shared + plan.k + self.kv.slot * plan.k_stage + own_keys;
        let q = shared + plan.q + turn.slot * plan.q_stage + own_rows;
        let (k, q) = (Operand::new(&k_layout, k), Operand::new(&q_layout, q));
        mbarrier_wait(self.barrier(Kernel::<T>::BARRIERS.q_full + turn.slot), turn.parity);
        if let MaskClass::Masked = M::CLASS {
            self.clear_other_rows(&q_layout, plan.q + turn.slot * plan.q_stage, turn);
        }
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
    pub(super) unsafe fn start_d_p(&self, step: &mut Step<T>, turn: Turn) {
        let plan = Kernel::<T>::PLAN;
        let (v_layout, d_o_layout) = (Kernel::<T>::V, Kernel::<T>::D_O);
        let own_keys = self.first_own_key() * v_layout.row_bytes();
        let own_rows = self.first_own_row() * d_o_layout.row_bytes();
        let shared = opaque(self.block.shared);
        let v = shared + plan.v + self.kv.slot * plan.v_stage + own_keys;
        let d_o = shared + plan.d_o + turn.slot * plan.d_o_stage + own_rows;
        let (v, d_o) = (Operand::new(&v_layout, v), Operand::new(&d_o_layout, d_o));
        mbarrier_wait(self.barrier(Kernel::<T>::BARRIERS.d_o_full + turn.slot), turn.parity);
        if let MaskClass::Masked = M::CLASS {
            self.clear_other_rows(&d_o_layout, plan.d_o + turn.slot * plan.d_o_stage, turn);
        }
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
    pub(super) unsafe fn start_values(&self, sums: &mut Sums<T>, p: &T::Packed) {
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
    pub(super) unsafe fn start_keys(&self, sums: &mut Sums<T>, d_s: &T::Packed) {
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

    /// Starts dV += Pᵀ·dO of this warpgroup's channels, P from shared memory.
    #[inline(always)]
    pub(super) unsafe fn start_shared_values(&self, sums: &mut Sums<T>) {
        let plan = Kernel::<T>::PLAN;
        let d_o = plan.d_o + self.turn.slot * plan.d_o_stage;
        self.start_shared(&mut sums.values, plan.p, &Kernel::<T>::D_O, d_o);
    }

    /// Starts dK += dSᵀ·Q of this warpgroup's channels, dS from shared memory.
    #[inline(always)]
    pub(super) unsafe fn start_shared_keys(&self, sums: &mut Sums<T>) {
        let plan = Kernel::<T>::PLAN;
        let q = plan.q + self.turn.slot * plan.q_stage;
        self.start_shared(&mut sums.keys, plan.d_s, &Kernel::<T>::Q, q);
    }

    /// Starts `sums += weights · channels`: `weights` is the place of the first of two tiles of
    /// keys by rows, `rows` that of a tile of rows by channels, of which this warpgroup has a part.
    #[inline(always)]
    unsafe fn start_shared<F: Product<E>>(
        &self,
        sums: &mut F,
        weights: u32,
        layout: &PanelLayout,
        rows: u32,
    ) {
        let (plan, weights_layout) = (Kernel::<T>::PLAN, Kernel::<T>::D_S);
        let shared = opaque(self.block.shared);
        let weights = shared + weights + self.d_s * plan.d_s_stage;
        let rows = shared + rows + self.index * layout.bytes();
        let (weights, rows) = (Operand::new(&weights_layout, weights), Operand::new(layout, rows));
        wgmma_fence();
        let mut step = 0;
        while step < T::SHAPE.q_rows / 16 {
            let a = weights.columns_step(&weights_layout, step);
            sums.add_columns_rows(a, rows.rows_step(layout, step));
            step += 1;
        }
        wgmma_commit();
    }

    /// Starts this warpgroup's share of dQ = dS·K, over all keys of the block, of tile `weights` of
    /// dS, if it `is_due`, which all threads say alike; else no group is committed.
    #[inline(always)]
    pub(super) unsafe fn start_queries(
        &self,
        queries: &mut T::QueryGradient,
        weights: u32,
        is_due: bool,
    ) {
        let plan = Kernel::<T>::PLAN;
        let (d_s_layout, k_layout) = (Kernel::<T>::D_S, Kernel::<T>::K);
        let mut d_s = opaque(self.block.shared) + plan.d_s + weights * plan.d_s_stage;
        let mut k = opaque(self.block.shared) + plan.k + self.kv.slot * plan.k_stage;
        match const { QueryShare::of(&T::SHAPE) } {
            QueryShare::Rows => d_s += self.index * d_s_layout.panel_bytes(),
            QueryShare::Channels => {
                let panels = panels(&T::SHAPE, T::SHAPE.head_dim) / T::SHAPE.warpgroups();
                k += self.index * panels * k_layout.panel_bytes();
            }
            QueryShare::Steps => {}
        }
        let (d_s, k) = (Operand::new(&d_s_layout, d_s), Operand::new(&k_layout, k));
        if self.owns_queries(weights) && is_due {
            wgmma_fence();
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
        if is_due {
            wgmma_commit();
        }
    }
}

/// The A operand of 16 query rows.
#[inline(always)]
pub(super) unsafe fn operand<T: HopperBackwardTiling>(packed: &T::Packed, rows: u32) -> [u32; 4] {
    let first = rows as usize * 4;
    [packed.at(first), packed.at(first + 1), packed.at(first + 2), packed.at(first + 3)]
}
