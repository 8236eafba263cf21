//! What the hopper kernels share: rings of shared-memory slots that one thread fills.

use ferroflash_core::swizzle::PanelLayout;

use crate::ptx::mbarrier::mbarrier_arrive_expect;
use crate::ptx::tma::load_box;

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
}

/// Starts copying a tile, one panel at a time; `place` is the tile's first channel, row, head and
/// batch item. Against `full` it also expects `more` bytes, of copies that the caller starts.
///
/// # Safety
/// `map` is the address of a map whose box is a panel of `layout`; the tile's place is free; this
/// is the one arrival that the phase of `full` waits for.
#[inline(always)]
pub unsafe fn copy_panels(
    layout: &PanelLayout,
    shared: u32,
    map: u64,
    full: u32,
    place: [u32; 4],
    more: u32,
) {
    mbarrier_arrive_expect(full, layout.bytes() + more);
    let mut panel = 0;
    while panel < layout.panels() {
        let at = [place[0] + panel * layout.panel_columns(), place[1], place[2], place[3]];
        load_box(shared + panel * layout.panel_bytes(), map, full, at);
        panel += 1;
    }
}
