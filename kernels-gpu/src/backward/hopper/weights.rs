//! P and dS of a step.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, KeyShare};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::tile::WARPGROUP_ROWS;

use super::consumer::{Consumer, Step};
use super::products::operand;
use super::{Kernel, Place};
use crate::ptx::math::{exp2, fma};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_shared_u32, load_shared_v2_f32};
use crate::ptx::thread::{compute_before_waiting, lane_id, opaque};
use crate::ptx::wgmma::Product;
use crate::tile::LaneAddress;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// Pᵀ = exp(scale·Sᵀ − lse): lse is of a row, a column here.
    #[inline(always)]
    pub(super) unsafe fn exponentials(&self, scores: &mut T::Scores) {
        if let MaskClass::Masked = M::CLASS {
            self.exponentials_with_options(scores);
            return;
        }
        if load_shared_u32(self.told(self.turn)) == 0 {
            self.powers::<false>(scores);
        } else {
            self.powers::<true>(scores);
        }
    }

    /// The same, lse being of powers of two or `NATURAL`. Natural it stays until it has been
    /// subtracted: far below or above zero, log2 e would round both sides apart.
    #[inline(always)]
    unsafe fn powers<const NATURAL: bool>(&self, scores: &mut T::Scores) {
        let plan = Kernel::<T>::PLAN;
        let params = self.block.params;
        let scale = if NATURAL { params.scale } else { params.scale_log2 };
        let rows = opaque(self.block.shared) + plan.lse + self.turn.slot * plan.row_stage;
        let rows = rows + self.first_own_row() * 4 + self.thread() % 4 * 8;
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let lse = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let score = scores.at_mut(group * 4 + value);
                let exponent = fma(*score, scale, -lse[value % 2]);
                let factor = if NATURAL { core::f32::consts::LOG2_E } else { 1.0 };
                *score = exp2(exponent * factor);
                value += 1;
            }
            group += 1;
        }
    }

    /// dSᵀ = Pᵀ ∘ (dPᵀ − delta).
    #[inline(always)]
    pub(super) unsafe fn differentiate(&self, step: &mut Step<T>) {
        let plan = Kernel::<T>::PLAN;
        let rows = opaque(self.block.shared) + plan.delta + self.turn.slot * plan.row_stage;
        let rows = rows + self.first_own_row() * 4 + lane_id() % 4 * 8;
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

    /// Whether some row of the tile sees fewer keys than the block has. With options that is asked
    /// where it is needed.
    #[inline(always)]
    pub(super) unsafe fn needs_mask(&self, place: Place) -> bool {
        if let MaskClass::Masked = M::CLASS {
            return false;
        }
        let visible = &self.block.params.visibility;
        let keys_end = match M::CLASS {
            MaskClass::Full => visible.kv_len,
            _ => visible.keys_end(self.tile(place) * T::SHAPE.q_rows),
        };
        keys_end < self.work().first_key() + T::SHAPE.kv_columns
    }

    /// Makes zero what belongs to rows that do not see their key.
    #[inline(always)]
    pub(super) unsafe fn hide(&self, values: &mut T::Scores, place: Place) {
        if let MaskClass::Masked = M::CLASS {
            return;
        }
        let visible = &self.block.params.visibility;
        let own_row = self.tile(place) * T::SHAPE.q_rows + self.first_own_row() + lane_id() % 4 * 2;
        let own = self.first_own_key() + self.thread() / 32 * 16 + lane_id() / 4;
        let mut half = 0;
        while half < 2 {
            let key = self.work().first_key() + own + half * 8;
            // The first row that sees the key, counted from the thread's first. Lengths and sides
            // are bounded so that these sums fit; see `MAX_LENGTH`.
            let first = if key >= visible.kv_len {
                i32::MAX
            } else {
                match M::CLASS {
                    MaskClass::Full => 0,
                    _ => key as i32 - visible.offset - visible.right - own_row as i32,
                }
            };
            let mut group = 0;
            while group < KeyShare::of(&T::SHAPE).rows(&T::SHAPE) / 8 {
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

    /// First of the keys that this warpgroup's scores are of, counted from the block's.
    #[inline(always)]
    pub(super) fn first_own_key(&self) -> u32 {
        match const { KeyShare::of(&T::SHAPE) } {
            KeyShare::Keys => self.index * WARPGROUP_ROWS,
            KeyShare::Channels => 0,
        }
    }

    /// First of the rows that this warpgroup's scores are of, counted from the tile's.
    #[inline(always)]
    pub(super) fn first_own_row(&self) -> u32 {
        match const { KeyShare::of(&T::SHAPE) } {
            KeyShare::Keys => 0,
            KeyShare::Channels => self.index * const { KeyShare::of(&T::SHAPE).rows(&T::SHAPE) },
        }
    }

    /// Leaves packed values for the products of all consumers: `place` is the first of two tiles.
    #[inline(always)]
    pub(super) unsafe fn store(&self, values: &T::Packed, place: u32) {
        let (plan, layout) = (Kernel::<T>::PLAN, Kernel::<T>::D_S);
        let (lane, warp) = (self.thread() % 32, self.thread() / 32);
        let shared = opaque(self.block.shared) + place + self.d_s * plan.d_s_stage;
        let target = LaneAddress::rows_first(&layout, shared, lane);
        let key = self.first_own_key() + warp * 16;
        let mut pair = 0;
        while pair < T::Packed::LEN as u32 / 4 {
            let row = self.first_own_row() + pair * 16;
            target.store(&layout, key, row, operand::<T>(values, pair));
            pair += 1;
        }
    }
}

/// Holds a wait back until all of P is computed.
#[inline(always)]
pub(super) unsafe fn hold<F: Fragment>(p: &F) {
    let mut bits = 0;
    let mut index = 0;
    while index < F::LEN {
        bits |= p.at(index).to_bits();
        index += 1;
    }
    // No sign bit is set, if no value is NaN; then nothing depends on the answer.
    compute_before_waiting(f32::from_bits(bits));
}

/// Rounds values in pairs.
#[inline(always)]
pub(super) unsafe fn pack<T: HopperBackwardTiling, E: MatrixElement>(
    values: &T::Scores,
) -> T::Packed {
    let mut packed = T::Packed::ZERO;
    let mut pair = 0;
    while pair < T::Packed::LEN {
        *packed.at_mut(pair) = E::pack(values.at(pair * 2), values.at(pair * 2 + 1));
        pair += 1;
    }
    packed
}
