//! What the hopper kernels share: rings of shared-memory slots that one thread fills.

/// Threads of a warpgroup.
pub const WARPGROUP_THREADS: u32 = 128;

/// A position in a ring, which both sides advance alike.
#[derive(Clone, Copy)]
pub struct Turn {
    /// The slot.
    pub slot: u32,
    /// Parity of the slot's full phase; the empty phase before it has the other.
    pub parity: u32,
}

impl Turn {
    /// Where a ring starts.
    pub const FIRST: Self = Self { slot: 0, parity: 0 };

    /// The position after `count` others in a ring of `slots`.
    #[inline(always)]
    pub fn after(count: u32, slots: u32) -> Self {
        Self { slot: count % slots, parity: count / slots % 2 }
    }

    /// The next position in a ring of `slots`.
    #[inline(always)]
    pub fn next(self, slots: u32) -> Self {
        if self.slot + 1 == slots {
            Self { slot: 0, parity: self.parity ^ 1 }
        } else {
            Self { slot: self.slot + 1, parity: self.parity }
        }
    }

    /// The position before this one in a ring of `slots`.
    #[inline(always)]
    pub fn previous(self, slots: u32) -> Self {
        if self.slot == 0 {
            Self { slot: slots - 1, parity: self.parity ^ 1 }
        } else {
            Self { slot: self.slot - 1, parity: self.parity }
        }
    }
}
