//! What a warp does where guessed probabilities turn out too high, or no guess was allowed: rarely.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::HopperTiling;

use super::Kernel;
use super::consumer::{Consumer, Rows, scale_rows};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::thread::opaque;
use crate::ptx::wgmma::Product;
use crate::tile::LaneAddress;

impl<T: HopperTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::Output: Product<E>,
{
    /// Makes probabilities and output relative to the rows' true maxima; `sums` are the guess's.
    ///
    /// # Safety
    /// All lanes of a warp call this alike, before the K tile is left and after the output has been
    /// waited for.
    #[inline(always)]
    pub(super) unsafe fn amend(&self, rows: &mut Rows<T>, tile: u32, sums: [f32; 2]) {
        let scale_log2 = self.block.params.scale_log2;
        let rescale = if rows.state.can_rise(sums) {
            rows.state.rise(&mut rows.scores, sums, scale_log2)
        } else {
            self.multiply_scores(rows);
            self.advance(rows)
        };
        self.pack(rows);
        self.bound_guesses(rows, tile);
        scale_rows(&mut rows.output, rescale);
    }

    /// The newest scores once more, where exponentials have taken their place: by the warp alone.
    #[inline(always)]
    pub(super) unsafe fn multiply_scores(&self, rows: &mut Rows<T>) {
        let plan = Kernel::<T>::PLAN;
        let (q_layout, k_layout) = (Kernel::<T>::Q, Kernel::<T>::K);
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let q = self.block.shared + plan.q + self.index * q_layout.bytes();
        let k = self.block.shared + plan.k + self.k.slot * plan.k_stage;
        let q = LaneAddress::rows_first(&q_layout, opaque(q), lane);
        let k = LaneAddress::columns_first(&k_layout, k, lane);
        let mut pair = 0;
        while pair < T::SHAPE.kv_columns / 16 {
            let mut values = [[0.0; 4]; 2];
            let mut step = 0;
            while step < T::SHAPE.head_dim / 16 {
                let a = q.load(&q_layout, warp * 16, step * 16);
                let b = k.load(&k_layout, pair * 16, step * 16);
                values[0] = E::mma(a, [b[0], b[1]], values[0]);
                values[1] = E::mma(a, [b[2], b[3]], values[1]);
                // Opaque, so that the loop stays one in PTX.
                step = opaque(step + 1);
            }
            let mut value = 0;
            while value < 8 {
                *rows.scores.at_mut(pair as usize * 8 + value) = values[value / 4][value % 4];
                value += 1;
            }
            pair += 1;
        }
    }
}
