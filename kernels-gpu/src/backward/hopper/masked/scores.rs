//! What the options do to a step's scores and to their gradients.
//!
//! A thread holds two keys, 8 apart, and of every 8 rows two neighbours. So the distances of its
//! scores differ from its first by constants.

use ferroflash_core::axes::MaskKind;
use ferroflash_core::backward::hopper::{HopperBackwardTiling, softcap_has_alibi};
use ferroflash_core::fragment::Fragment;

use super::super::Kernel;
use super::super::consumer::{Consumer, Step};
use super::{Home, NATURAL, PARTIAL};
use crate::options::tanh;
use crate::ptx::math::{exp2, fma, log2, max};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_shared_u32, load_shared_v2_f32};
use crate::ptx::thread::{lane_id, opaque};
use crate::ptx::wgmma::Product;

/// A derivative of the softcap that is taken for 0: tanh is known from P to fewer digits.
const LEAST_SLOPE: f32 = 1.0 / (1 << 18) as f32;

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// First of the thread's keys, in the block.
    #[inline(always)]
    fn own_key(&self) -> u32 {
        self.first_own_key() + self.thread() / 32 * 16 + lane_id() / 4
    }

    /// First of the thread's rows, in the item.
    #[inline(always)]
    unsafe fn own_row(&self) -> i32 {
        let first = self.home().first_row::<T>(self.told_tile(self.turn));
        first + (self.first_own_row() + lane_id() % 4 * 2) as i32
    }

    /// Makes dS 0 where rows do not see their key.
    #[inline(always)]
    pub(in super::super) unsafe fn hide_gradients(&self, d_s: &mut T::Scores) {
        if self.flags(self.turn) & PARTIAL != 0 {
            self.hide_outside(d_s, 0.0);
        }
    }

    /// Makes `hidden` what belongs to rows that do not see their key.
    #[inline(always)]
    unsafe fn hide_outside(&self, values: &mut T::Scores, hidden: f32) {
        let home = self.home();
        let (row, key) = (self.own_row(), self.own_key());
        let mut half = 0;
        while half < 2 {
            let own = key + half * 8;
            let from = (home.word(Home::SEEN_FROM) as i32 + own as i32).max(0);
            let until = home.word(Home::SEEN_UNTIL) as i32 + own as i32;
            let until = until.min(home.word(Home::Q_LEN) as i32);
            let until = if own < home.word(Home::KEYS) { until } else { from };
            // One compare for both sides: a row before the first wraps to a large number.
            let (first, seen) = ((row - from) as u32, (until - from).max(0) as u32);
            let mut group = 0;
            while group < T::SHAPE.q_rows / 8 {
                let index = (group * 4 + half * 2) as usize;
                if first.wrapping_add(group * 8) >= seen {
                    *values.at_mut(index) = hidden;
                }
                if first.wrapping_add(group * 8 + 1) >= seen {
                    *values.at_mut(index + 1) = hidden;
                }
                group += 1;
            }
            half += 1;
        }
    }

    /// Whether there is a softcap.
    #[inline(always)]
    unsafe fn has_softcap(&self) -> bool {
        opaque(self.block.options().softcap_scale.to_bits()) != 0
    }

    /// ALiBi's slope in the step's head, and the thread's first row's distance before the diagonal
    /// of its first key; 0 without.
    #[inline(always)]
    unsafe fn slope_and_distance(&self) -> (f32, f32) {
        let slope = f32::from_bits(load_shared_u32(self.told_anew(self.turn) + 12));
        let shift = self.home().word(Home::SHIFT) as i32;
        (slope, (self.own_row() + shift - self.own_key() as i32) as f32)
    }

    /// Pᵀ = exp(score − lse) of scores after softcap and ALiBi, in this order; 0 by selection
    /// where rows do not see their key.
    #[inline(always)]
    pub(in super::super) unsafe fn exponentials_with_options(&self, scores: &mut T::Scores) {
        let flags = self.flags(self.turn);
        if flags & NATURAL == 0 {
            self.exponents(scores);
        } else {
            self.natural_exponents(scores);
        }
        if flags & PARTIAL != 0 {
            let hidden = if Self::RAISES_AT_ONCE { 0.0 } else { f32::NEG_INFINITY };
            self.hide_outside(scores, hidden);
        }
        if Self::RAISES_AT_ONCE {
            return;
        }
        let mut index = 0;
        while index < T::Scores::LEN {
            *scores.at_mut(index) = exp2(scores.at(index));
            index += 1;
        }
    }

    /// Whether exponents become powers where they are computed, which is faster, or after the
    /// hidden ones have become −∞, which takes fewer registers.
    const RAISES_AT_ONCE: bool = T::Scores::LEN > 32;

    /// The exponent, or its power.
    #[inline(always)]
    unsafe fn raised(exponent: f32) -> f32 {
        if Self::RAISES_AT_ONCE { exp2(exponent) } else { exponent }
    }

    /// Exponents of two, of products and lse alone.
    #[inline(always)]
    unsafe fn exponents(&self, scores: &mut T::Scores) {
        let scale = self.block.params.scale_log2;
        let rows = self.lse_rows();
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let lse = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let score = scores.at_mut(group * 4 + value);
                *score = Self::raised(fma(*score, scale, -lse[value % 2]));
                value += 1;
            }
            group += 1;
        }
    }

    /// The same, lse being natural: of all options.
    #[inline(always)]
    unsafe fn natural_exponents(&self, scores: &mut T::Scores) {
        let options = self.block.options();
        if self.has_softcap() {
            let mut index = 0;
            while index < T::Scores::LEN {
                *scores.at_mut(index) = tanh(scores.at(index) * options.softcap_scale);
                index += 1;
            }
        }
        let (slope, distance) = self.slope_and_distance();
        let rows = self.lse_rows();
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let lse = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let index = group * 4 + value;
                let at = distance + distance_from_first(index);
                let offset = fma(-slope, at.abs(), -lse[value % 2]);
                let exponent = fma(scores.at(index), options.score_scale, offset);
                *scores.at_mut(index) = Self::raised(exponent * core::f32::consts::LOG2_E);
                value += 1;
            }
            group += 1;
        }
    }

    /// Takes the softcap's derivative 1 − tanh² into P if that `is_packed` already, else into dS:
    /// the gradients of capped scores become those of products, but for the scale.
    #[inline(always)]
    pub(in super::super) unsafe fn differentiate_softcap(
        &self,
        step: &mut Step<T>,
        is_packed: bool,
    ) {
        if !self.has_softcap() {
            return;
        }
        let inverse = self.block.options().softcap_inverse;
        let has_distances = const { softcap_has_alibi(&T::SHAPE) };
        let (slope, distance) = if has_distances { self.slope_and_distance() } else { (0.0, 0.0) };
        let rows = self.lse_rows();
        let mut group = 0;
        while group < T::Scores::LEN / 4 {
            let lse = load_shared_v2_f32(rows + group as u32 * 32);
            let mut value = 0;
            while value < 4 {
                let index = group * 4 + value;
                let power = log2(step.scores.at(index));
                let mut score = fma(power, core::f32::consts::LN_2, lse[value % 2]);
                if has_distances {
                    let at = distance + distance_from_first(index);
                    score = fma(slope, at.abs(), score);
                }
                // A P of 0 says nothing, and its dS is 0.
                let tanh = max(score * inverse, -1.0).min(1.0);
                let derivative = fma(-tanh, tanh, 1.0);
                let derivative = if derivative < LEAST_SLOPE { 0.0 } else { derivative };
                let taken_into = if is_packed { &mut step.scores } else { &mut step.d_p };
                *taken_into.at_mut(index) *= derivative;
                value += 1;
            }
            group += 1;
        }
    }

    /// Where the step's rows of lse lie that the thread holds.
    #[inline(always)]
    fn lse_rows(&self) -> u32 {
        let plan = Kernel::<T>::PLAN;
        let rows = opaque(self.block.shared) + plan.lse + self.turn.slot * plan.row_stage;
        rows + self.first_own_row() * 4 + lane_id() % 4 * 8
    }
}

/// The distance of score `index` before the diagonal, counted from the thread's first.
const fn distance_from_first(index: usize) -> f32 {
    let (row, key) = (index / 4 * 8 + index % 2, index / 2 % 2 * 8);
    row as f32 - key as f32
}
