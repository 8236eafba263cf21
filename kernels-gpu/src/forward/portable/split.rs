//! The two products for elements of several pieces; see [`crate::pieces`].
//!
//! A warp owns 16 rows. Q·Kᵀ is formed in two accumulators, of the first pieces and of the other
//! products. P·V of 16 keys is formed apart and then added to the output: so the tensor cores,
//! which cut off what an f32 sum cannot hold, never sum over many keys.

use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::ForwardTiling;

use super::Kernel;
use crate::pieces::{add_products, add_rows, add_sums, load, split_operand};
use crate::ptx::matrix::MatrixElement;
use crate::tile::LaneAddress;

impl<T: ForwardTiling, E: MatrixElement> Kernel<T, E> {
    const SPLIT_CHECKED: () = {
        assert!(E::PIECES == 1 || (Self::ROW_TILES == 1 && T::SHAPE.stages == 1));
    };

    /// S = Q·Kᵀ for this warp's rows.
    #[inline(always)]
    pub(super) unsafe fn split_scores(q: LaneAddress, warp_row: u32, k: LaneAddress) -> T::Scores {
        const { Self::SPLIT_CHECKED };
        let (mut first, mut rest) = (T::Scores::ZERO, T::Scores::ZERO);
        let mut step = 0;
        while step < Self::TILE.head_dim / 16 {
            let a = load(q, &Self::Q, warp_row, step * 16);
            let mut pair = 0;
            while pair < Self::SCORE_TILES / 2 {
                let b = load(k, &Self::K, pair as u32 * 16, step * 16);
                add_products::<E, _>(&mut first, &mut rest, pair * 8, &a, &b);
                pair += 1;
            }
            step += 1;
        }
        add_sums(&mut first, 0, &rest);
        first
    }

    /// O += P·V, with `prepare` as in [`Self::add_values`].
    #[inline(always)]
    pub(super) unsafe fn split_add_values(
        output: &mut T::Output,
        p: &mut T::Scores,
        v: LaneAddress,
        mut prepare: impl FnMut(&mut T::Scores, usize),
    ) {
        let mut step = 0;
        while step < Self::SCORE_TILES / 2 {
            prepare(p, step);
            let a = split_operand(p, step * 8);
            add_rows::<E, _>(output, &a, v, &Self::V, step as u32 * 16);
            step += 1;
        }
    }
}
