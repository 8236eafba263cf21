//! The end of a work: dK and dV, rounded once, by way of the places of K and V.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::HopperBackwardTiling;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;
use ferroflash_core::tile::WARPGROUP_ROWS;

use super::consumer::{Consumer, Sums};
use super::{CONSUMER_BARRIER, CONSUMERS_BARRIER, Kernel, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_arrive;
use crate::ptx::thread::{opaque, sync_named, thread_idx_x};
use crate::ptx::tma::fence_proxy_async;
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
    /// Writes the block's rows of dK and dV and gives back the work's slot.
    ///
    /// # Safety
    /// All consumers call this alike, each when its sums have been waited for.
    #[inline(always)]
    pub(super) unsafe fn write(&self, sums: &mut Sums<T>, work: Work) {
        let params = self.block.params;
        let plan = Kernel::<T>::PLAN;
        let consumers = T::SHAPE.warpgroups() * WARPGROUP_THREADS;
        let k = opaque(self.block.shared) + plan.k + self.kv.slot * plan.k_stage;
        let v = opaque(self.block.shared) + plan.v + self.kv.slot * plan.v_stage;
        // Only this consumer has read its values; keys are read by all, to the last step's end.
        self.stage(&sums.values, &Kernel::<T>::V, v);
        let mut index = 0;
        while index < T::KeyGradient::LEN {
            *sums.keys.at_mut(index) *= params.scale;
            index += 1;
        }
        sync_named(CONSUMERS_BARRIER, consumers);
        self.stage(&sums.keys, &Kernel::<T>::K, k);
        sync_named(CONSUMERS_BARRIER, consumers);
        let thread = opaque(thread_idx_x()) - WARPGROUP_THREADS;
        let (batch, head, row) = (work.batch(), work.kv_head(), work.first_key());
        if params.dv.address != 0 {
            let rows = Rows::of(&params.dv, batch, head, row, params.kv_rows);
            write_tile::<256>(Kernel::<T>::V, rows, v, thread);
        }
        if params.dk.address != 0 {
            let rows = Rows::of(&params.dk, batch, head, row, params.kv_rows);
            write_tile::<256>(Kernel::<T>::K, rows, k, thread);
        }
        // The copy engine writes there next.
        fence_proxy_async();
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
        if self.thread() == 0 {
            mbarrier_arrive(self.block.barrier(Kernel::<T>::BARRIERS.kv_empty + self.kv.slot));
        }
    }

    /// Rounds the warpgroup's 64 rows into the tile at `shared`.
    #[inline(always)]
    unsafe fn stage<F: Fragment>(&self, values: &F, layout: &PanelLayout, shared: u32) {
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let target = LaneAddress::rows_first(layout, shared, lane);
        let row = self.index * WARPGROUP_ROWS + warp * 16;
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
}
