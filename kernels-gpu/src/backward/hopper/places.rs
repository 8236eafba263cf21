//! Where a consumer's steps are, as it computes it or as the producer tells.

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::hopper::{HopperBackwardTiling, STEP_BYTES};

use super::consumer::Consumer;
use super::{Kernel, Place};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::load_shared_u32;
use crate::ptx::thread::opaque;
use crate::ptx::wgmma::Product;
use crate::ring::Turn;

/// Whether the producer tells each step's tile, so that no register holds it.
const fn is_told<T: HopperBackwardTiling, M: MaskKind>() -> bool {
    Kernel::<T>::DEFERS || matches!(M::CLASS, MaskClass::Masked)
}

/// Which of the places for what the producer tells is that of `turn`. A step's tile stays for as
/// many steps more as there are Q tiles.
#[inline(always)]
pub(super) fn told_place<T: HopperBackwardTiling, M: MaskKind>(turn: Turn) -> u32 {
    turn.slot + if is_told::<T, M>() { turn.parity * T::SHAPE.stages } else { 0 }
}

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// As [`is_told`].
    pub(super) const IS_TOLD: bool = is_told::<T, M>();

    /// Where the producer has left what it tells of the Q tile at `turn`.
    #[inline(always)]
    pub(super) fn told(&self, turn: Turn) -> u32 {
        opaque(self.block.shared) + Kernel::<T>::PLAN.steps + told_place::<T, M>(turn) * STEP_BYTES
    }

    /// The number of the step's query tile, at `place`, among those of its head.
    #[inline(always)]
    pub(super) unsafe fn tile(&self, place: Place) -> u32 {
        if Self::IS_TOLD { load_shared_u32(self.told(self.turn) + 4) } else { place.tile }
    }

    /// The number of the step's query tile, at `place`, among those of all heads.
    #[inline(always)]
    pub(super) unsafe fn tile_of_all(&self, place: Place) -> u32 {
        if Self::IS_TOLD { load_shared_u32(self.told(self.turn) + 8) } else { place.index() }
    }

    /// The place of the first step; where the producer tells it, that is looked up instead, since
    /// registers are short.
    #[inline(always)]
    pub(super) unsafe fn first_place(&self) -> Place {
        if Self::IS_TOLD {
            return Place { tile: 0, head: 0 };
        }
        self.work().first_place::<T>(self.block.params)
    }

    /// The place of the step after the one at `place`, alike.
    #[inline(always)]
    pub(super) unsafe fn next_place(&self, place: Place) -> Place {
        if Self::IS_TOLD {
            return place;
        }
        self.work().next_place::<T>(self.block.params, place)
    }

    /// The turn of the step whose dQ a step passes on: its own or, where dQ is deferred, the one
    /// before.
    #[inline(always)]
    pub(super) fn turn_of_queries(&self) -> Turn {
        if Kernel::<T>::DEFERS { self.turn.previous(T::SHAPE.stages) } else { self.turn }
    }

    /// Whether there is a dQ to pass on, when `left` steps are left.
    #[inline(always)]
    pub(super) unsafe fn is_due(&self, left: u32) -> bool {
        !Kernel::<T>::DEFERS || opaque(self.work().steps()) != left
    }
}
