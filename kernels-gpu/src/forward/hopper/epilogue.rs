//! The end of a work: normalise, stage in shared memory, copy out.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS};

use super::consumer::{Consumer, Rows, scale_rows};
use super::{CONSUMER_BARRIER, Kernel, Work, output_place};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::memory::store_global_f32;
use crate::ptx::thread::sync_named;
use crate::ptx::tma::{commit_stores, fence_proxy_async, store_box};
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;
use crate::tile::LaneAddress;

impl<T: HopperTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// Writes the consumer's rows of o and lse; returns the next work. The V ring stays at the
    /// output's first turn; see [`Consumer::pass_outputs`].
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when the output has been waited for.
    #[inline(always)]
    pub(super) unsafe fn write(&self, rows: &mut Rows<T>) -> Work {
        let params = self.block.params;
        let work = Work::left(self.kept_work());
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let first_row = work.first_row + self.index * WARPGROUP_ROWS;
        let [(first, first_lse), (second, second_lse)] = rows.state.finish(params.scale);
        scale_rows(&mut rows.output, [first, second]);
        if params.lse != 0 && lane.is_multiple_of(4) {
            let row = first_row + warp * 16 + lane / 4;
            let q_len = params.visibility.q_len;
            let batch_head = work.batch * params.q_heads + work.q_head;
            let index = batch_head as u64 * q_len as u64 + row as u64;
            if row < q_len {
                store_global_f32(params.lse + index * 4, first_lse);
            }
            if row + 8 < q_len {
                store_global_f32(params.lse + index * 4 + 32, second_lse);
            }
        }

        let (turns, offset) = output_place::<T>(self.index);
        let mut place = self.v;
        let mut turn = 0;
        while turn < turns {
            place = place.next(T::SHAPE.stages);
            turn += 1;
        }
        mbarrier_wait(self.block.barrier(Kernel::<T>::BARRIERS.v_full + place.slot), place.parity);
        let next = Work::left(self.block.work::<T>(place.slot));
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::O;
        let shared = self.block.shared + plan.o + place.slot * plan.v_stage + offset;
        let target = LaneAddress::rows_first(&layout, shared, lane);
        let mut pair = 0;
        while pair < T::Output::LEN / 8 {
            let mut values = [0; 4];
            let mut register = 0;
            while register < 4 {
                let index = pair * 8 + register * 2;
                values[register] = E::pack(rows.output.at(index), rows.output.at(index + 1));
                register += 1;
            }
            target.store(&layout, warp * 16, pair as u32 * 16, values);
            pair += 1;
        }
        fence_proxy_async();
        sync_named(CONSUMER_BARRIER + self.index, WARPGROUP_THREADS);
        if self.leads() {
            let mut panel = 0;
            while panel < layout.panels() {
                let column = panel * layout.panel_columns();
                let at = [column, first_row, work.q_head, work.batch];
                store_box(self.block.map(3), shared + panel * layout.panel_bytes(), at);
                panel += 1;
            }
            commit_stores();
        }
        next
    }
}
