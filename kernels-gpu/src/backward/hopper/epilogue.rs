//! The end of a work: dK and dV, rounded once, by way of the places of K and V.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, KeyShare};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::swizzle::PanelLayout;

use super::consumer::{Consumer, Sums};
use super::{CONSUMERS_BARRIER, Kernel, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::{opaque, sync_named, thread_idx_x};
use crate::ptx::tma::{fence_proxy_async, wait_stores};
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;
use crate::tile::{LaneAddress, Rows, write_tile};

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Writes the block's rows of dK and dV and ends the work.
    ///
    /// # Safety
    /// All consumers call this alike, each when its sums have been waited for.
    #[inline(always)]
    pub(super) unsafe fn write(&self, sums: &mut Sums<T>) {
        let params = self.block.params;
        if opaque(params.schedule.parts) > 1 && !self.join_parts(sums, self.work()) {
            self.end();
            return;
        }
        let plan = Kernel::<T>::PLAN;
        let k = opaque(self.block.shared) + plan.k + self.kv.slot * plan.k_stage;
        let v = opaque(self.block.shared) + plan.v + self.kv.slot * plan.v_stage;
        let mut index = 0;
        while index < T::KeyGradient::LEN {
            *sums.keys.at_mut(index) *= params.scale;
            index += 1;
        }
        // Everyone has done with K and V.
        self.meet_all();
        self.stage(&sums.values, &Kernel::<T>::V, v);
        self.stage(&sums.keys, &Kernel::<T>::K, k);
        self.meet_all();
        self.copy_out(&Kernel::<T>::V, v, &params.dv, self.work());
        self.copy_out(&Kernel::<T>::K, k, &params.dk, self.work());
        // The copy engine writes there next.
        fence_proxy_async();
        self.end();
    }

    /// Ends the work, when all that it added to dQ is there.
    #[inline(always)]
    unsafe fn end(&self) {
        if Kernel::<T>::PLAN.dq_staged && self.thread().is_multiple_of(32) {
            wait_stores();
        }
        self.give_back();
    }

    /// Meets the other consumer.
    #[inline(always)]
    unsafe fn meet_all(&self) {
        sync_named(CONSUMERS_BARRIER, T::SHAPE.warpgroups() * WARPGROUP_THREADS);
    }

    /// Rounds the warpgroup's keys, or channels of all keys, into the tile at `shared`.
    #[inline(always)]
    unsafe fn stage<F: Fragment>(&self, values: &F, layout: &PanelLayout, shared: u32) {
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let part = match const { KeyShare::of(&T::SHAPE) } {
            KeyShare::Keys => 0,
            KeyShare::Channels => self.index * layout.bytes(),
        };
        let target = LaneAddress::rows_first(layout, shared + part, lane);
        let row = self.first_own_key() + warp * 16;
        let mut pair = 0;
        while pair < F::LEN / 8 {
            let mut packed = [0; 4];
            let mut register = 0;
            while register < 4 {
                let index = pair * 8 + register * 2;
                packed[register] = E::pack(values.at(index), values.at(index + 1));
                register += 1;
            }
            target.store(layout, row, pair as u32 * 16, packed);
            pair += 1;
        }
    }

    /// Writes the tile at `shared` to the work's rows of a gradient, if it is wanted.
    #[inline(always)]
    unsafe fn copy_out(
        &self,
        layout: &PanelLayout,
        shared: u32,
        gradient: &DeviceTensor,
        work: Work,
    ) {
        if gradient.address == 0 {
            return;
        }
        let thread = opaque(thread_idx_x()) - WARPGROUP_THREADS;
        let kv_rows = match M::CLASS {
            MaskClass::Masked => work.first_key() + self.home().key_rows(),
            _ => self.block.params.kv_rows,
        };
        let kv_head = work.kv_head(self.block.params);
        let rows = Rows::of(gradient, work.batch(), kv_head, work.first_key(), kv_rows);
        let mut part = 0;
        while part < KeyShare::of(&T::SHAPE).channel_parts() {
            let offset = part * layout.columns * 2;
            let rows = Rows {
                address: rows.address + offset as u64,
                bytes: rows.bytes.saturating_sub(offset),
                ..rows
            };
            write_tile::<{ 2 * WARPGROUP_THREADS }>(
                *layout,
                rows,
                shared + part * layout.bytes(),
                thread,
            );
            part += 1;
        }
    }
}
