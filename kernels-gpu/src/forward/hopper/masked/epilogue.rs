//! The end of a work: the sink joins, rows are normalised and leave, the next record is taken up.

use ferroflash_core::fragment::Fragment;
use ferroflash_core::row_state::RowState;
use ferroflash_core::tile::{HopperTiling, WARPGROUP_ROWS};

use super::super::consumer::Rows;
use super::super::{CONSUMER_BARRIER, Kernel, output_place};
use super::consumer::Reader;
use super::record::{Record, is_given};
use crate::ptx::math::{exp2, log2, reciprocal};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::mbarrier::mbarrier_wait;
use crate::ptx::memory::store_global_f32;
use crate::ptx::thread::{lane_id, sync_named};
use crate::ptx::tma::{commit_stores, fence_proxy_async, store_box};
use crate::ptx::warp::{any, shuffle_xor, sync_warp};
use crate::ptx::wgmma::Product;
use crate::ring::WARPGROUP_THREADS;
use crate::tile::{LaneAddress, Rows as TensorRows, write_tile};

impl<T: HopperTiling, E: MatrixElement> Reader<'_, T, E>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// Writes the consumer's rows of o and lse; the warp's record is then the next work's. The V
    /// ring stays at the output's first turn.
    ///
    /// # Safety
    /// All threads of the consumer call this alike, when the output has been waited for.
    #[inline(always)]
    pub(super) unsafe fn write(&mut self, rows: &mut Rows<T>) {
        let (consumer, record) = (&self.consumer, self.record());
        let forward = &self.params.forward;
        let (lane, warp) = (lane_id(), consumer.thread() / 32);
        let first_row = record.first_row(consumer.index);
        let sink = RowState { row_max: record.sink(), row_sum: 1.0 };
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            let row = first_row + warp * 16 + lane / 4 + half as u32 * 8;
            let (mut factor, mut lse) = self.finish_row(rows, half, sink);
            if row >= record.q_len() {
                (factor, lse) = (0.0, f32::NEG_INFINITY);
            }
            factors[half] = factor;
            if forward.lse != 0 && lane.is_multiple_of(4) && row < record.q_rows() {
                let batch_head = record.batch() * forward.q_heads + record.q_head();
                let index = batch_head as u64 * self.params.items.q_tokens as u64
                    + (record.first_q() + row) as u64;
                store_global_f32(forward.lse + index * 4, lse);
            }
            half += 1;
        }
        scale_rows_or_clear(&mut rows.output, factors);

        let (turns, offset) = output_place::<T>(consumer.index);
        let mut place = consumer.v;
        let mut turn = 0;
        while turn < turns {
            place = place.next(T::SHAPE.stages);
            turn += 1;
        }
        mbarrier_wait(
            consumer.block.barrier(Kernel::<T>::BARRIERS.v_full + place.slot),
            place.parity,
        );
        let next = Record::numbered::<T>(&consumer.block, place.slot);
        let next = next.share(consumer.index, lane);
        let plan = Kernel::<T>::PLAN;
        let layout = Kernel::<T>::O;
        let shared = consumer.block.shared + plan.o + place.slot * plan.v_stage + offset;
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
        sync_named(CONSUMER_BARRIER + consumer.index, WARPGROUP_THREADS);
        let (row, end) = (record.first_q() + first_row, record.first_q() + record.q_rows());
        if is_given(self.params.items.cu_q) && row + WARPGROUP_ROWS > end {
            // The rows behind are another item's.
            let to = TensorRows::of(&self.params.o, record.batch(), record.q_head(), row, end);
            write_tile::<WARPGROUP_THREADS>(layout, to, shared, consumer.thread());
            sync_named(CONSUMER_BARRIER + consumer.index, WARPGROUP_THREADS);
        } else if consumer.leads() {
            let mut panel = 0;
            while panel < layout.panels() {
                let column = panel * layout.panel_columns();
                let at = [column, row, record.q_head(), record.batch()];
                store_box(consumer.block.map(3), shared + panel * layout.panel_bytes(), at);
                panel += 1;
            }
            commit_stores();
        }
        let parity = record.q_parity() ^ (record.steps() > 0) as u32;
        sync_warp();
        record.take(next, lane);
        record.set_q_parity(parity);
        sync_warp();
    }

    /// What normalises a row's output, and its natural log-sum-exp, after the sink has joined.
    /// Without either, 0 and −∞.
    #[inline(always)]
    unsafe fn finish_row(&self, rows: &Rows<T>, half: usize, sink: RowState<f32>) -> (f32, f32) {
        let mut row_sum = rows.state.row_sum[half];
        row_sum += shuffle_xor(row_sum, 1);
        row_sum += shuffle_xor(row_sum, 2);
        let mut own =
            RowState { row_max: rows.state.row_max[half] * self.params.forward.scale, row_sum };
        let mut rescale = 1.0;
        if is_given(self.params.options.sink.address) && sink.row_max != f32::NEG_INFINITY {
            let (merged, factors) = own.merge(sink, |x| exp2(x * core::f32::consts::LOG2_E));
            (own, rescale) = (merged, factors.left);
        }
        if own.row_sum == 0.0 {
            return (0.0, f32::NEG_INFINITY);
        }
        let lse = own.row_max + log2(own.row_sum) * core::f32::consts::LN_2;
        (reciprocal(own.row_sum) * rescale, lse)
    }
}

/// Multiplies each row's output by its factor; by 0 it becomes 0, whatever it was.
#[inline(always)]
unsafe fn scale_rows_or_clear<O: Fragment>(output: &mut O, factors: [f32; 2]) {
    let mut index = 0;
    while index < O::LEN {
        *output.at_mut(index) *= factors[index / 2 % 2];
        index += 1;
    }
    if any(factors[0] == 0.0 || factors[1] == 0.0) {
        let mut index = 0;
        while index < O::LEN {
            if factors[index / 2 % 2] == 0.0 {
                *output.at_mut(index) = 0.0;
            }
            index += 1;
        }
    }
}
