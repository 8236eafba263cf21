//! The hopper backward kernel of the class `masked`: windows, lengths, packed items, ALiBi, softcap
//! and sinks.
//!
//! Products, rings, order of a step and who protects what are those of the plain kernel (see the
//! [parent](super)), whose code this is wherever the class is not asked for. What differs:
//!
//! **Works.** The plain producer computes a work's numbers in 24 registers, which leaves none to
//! search for an item. So the preprocess kernel leaves a [record](KeyRecord) for each block of keys
//! of each item, whatever lengths lie on the device, and the producer copies it beside the work
//! ([`Home`]). Slots of packed items without keys are passed over where works are drawn.
//!
//! **Which tiles.** Query tiles are of the row axis, as the sums of dQ are, and hold rows of
//! several items where these end in them. Rows that are not the item's, or see no key, are zero in
//! shared memory before either product reads them: each consumer clears them for itself, others may
//! do the same at the same time. So are keys that no row of the item sees. Of such a tile's dQ,
//! other rows add −0, which changes no sum; whatever the item's keys hold, they do not reach
//! another's rows.
//!
//! **Which cells.** A tile whose every row sees every key of the block needs no mask: the record
//! says which. Elsewhere a thread's keys have a range of rows each, outside of which P and dS are
//! 0 by selection: whatever lse and dP hold there, nothing comes of it. The producer tells with
//! each step whether its tile is of either kind.
//!
//! **Scores.** Without ALiBi and softcap, exponents are the plain kernel's. With them lse stays
//! natural, and so do scores: the slope of a step's head comes with its tile, from the producer.
//! The softcap's derivative 1 − tanh² is needed when P has taken the place of tanh, and there is no
//! register to keep it in. It is taken from P again: c·tanh is ln P + lse + ALiBi's distance. That
//! is off by few roundings of lse over c; where P is so small that nothing is left, so is dS.
//!
//! **Sinks** are part of lse; their gradient is the convert kernel's.
//!
//! **Order.** Of each item the last key block adds first: a record says how many come before. Tiles
//! that items share have a counter for each of them.

mod clear;
mod scores;

use ferroflash_core::axes::{MaskKind, Masked};
use ferroflash_core::backward::hopper::{HOME_BYTES, HopperBackwardTiling};
use ferroflash_core::backward::params::options::{
    HopperBackwardOptions, HopperMaskedBackwardParams,
};
use ferroflash_core::backward::record::{KeyRecord, later_blocks};
use ferroflash_core::schedule::divide;

use super::consumer::Consumer;
use super::work::head_tiles;
use super::{Block, Kernel, Place, Work, run};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{
    load_global_f32, load_global_v4, load_shared_u32, load_shared_v4, release_add_global_u32,
    store_shared_v4,
};
use crate::ptx::thread::opaque;
use crate::ptx::wgmma::Product;
use crate::ring::Turn;

/// The work of one persistent block.
///
/// # Safety
/// As the plain kernel's [`block`](super::block), after a preprocess kernel that has left the
/// records.
#[inline(always)]
pub unsafe fn block<T: HopperBackwardTiling, E: MatrixElement>(
    params: &HopperMaskedBackwardParams,
    maps: u64,
) where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    run::<T, E, Masked>(&params.backward, Some(&params.options), maps);
}

/// What a work's record says besides, where it lies in shared memory: read again each time, since
/// registers are short.
#[derive(Clone, Copy)]
pub(super) struct Home {
    shared: u32,
}

impl Home {
    const FIRST_Q: u32 = 0;
    const Q_LEN: u32 = 4;
    const SEEN_FROM: u32 = 8;
    const SEEN_UNTIL: u32 = 12;
    const FULL: u32 = 16;
    const KEYS: u32 = 24;
    const SHIFT: u32 = 28;
    const SEEING: u32 = 32;
    const SEEN: u32 = 40;
    const ITEM: u32 = 48;
    const KEY_ROWS: u32 = 52;
    const TURN: u32 = 56;

    #[inline(always)]
    unsafe fn word(self, place: u32) -> u32 {
        load_shared_u32(self.shared + place)
    }

    /// Leaves the same at `to`.
    #[inline(always)]
    pub(super) unsafe fn copy(self, to: Self) {
        let mut place = 0;
        while place < HOME_BYTES {
            store_shared_v4(to.shared + place, load_shared_v4(self.shared + place));
            place = opaque(place + 16);
        }
    }

    /// Rows of dK and dV that the work writes.
    #[inline(always)]
    pub(super) unsafe fn key_rows(self) -> u32 {
        self.word(Self::KEY_ROWS)
    }

    /// Whether there is nothing to do.
    #[inline(always)]
    pub(super) unsafe fn is_empty(self) -> bool {
        self.key_rows() == 0
    }

    /// First row of query tile `tile`, in the item: it may lie before the item's first.
    #[inline(always)]
    unsafe fn first_row<T: HopperBackwardTiling>(self, tile: u32) -> i32 {
        (tile * T::SHAPE.q_rows) as i32 - self.word(Self::FIRST_Q) as i32
    }

    /// The number of the counter of turns at `place`, see [`KeyRecord`].
    #[inline(always)]
    pub(super) unsafe fn turn<T: HopperBackwardTiling>(
        self,
        block: &Block<'_>,
        place: Place,
    ) -> u64 {
        let head = divide(place.head, head_tiles::<T>(block.params));
        let more = head * block.options().more_turns + self.word(Self::TURN);
        place.index() as u64 + more as u64
    }

    /// Additions to query tile `tile` before this work's.
    #[inline(always)]
    pub(super) unsafe fn earlier_additions<T: HopperBackwardTiling>(self, tile: u32) -> u32 {
        use ferroflash_core::backward::hopper::QueryShare;
        let sharers = QueryShare::of(&T::SHAPE).sharers(&T::SHAPE);
        let end = self.first_row::<T>(tile + 1) as u32;
        let last_row = end.min(self.word(Self::Q_LEN)) - 1;
        let seen_from = self.word(Self::SEEN_FROM) as i32;
        later_blocks(seen_from, self.word(Self::KEYS), last_row, T::SHAPE.kv_columns) * sharers
    }
}

impl Block<'_> {
    /// What the options add.
    #[inline(always)]
    unsafe fn options(&self) -> &HopperBackwardOptions {
        // SAFETY: a kernel of this class is given them.
        self.options.unwrap_unchecked()
    }

    /// What belongs to the work in `slot`.
    #[inline(always)]
    pub(super) fn home<T: HopperBackwardTiling>(&self, slot: u32) -> Home {
        Home { shared: opaque(self.shared) + Kernel::<T>::PLAN.bytes + slot * HOME_BYTES }
    }
}

impl Work {
    /// Leaves the producer's own work `[batch, head part, record, section]`, by its record.
    #[inline(always)]
    pub(super) unsafe fn leave_record<T: HopperBackwardTiling>(
        self,
        block: &Block<'_>,
        [batch, head_part, record, section]: [u32; 4],
    ) {
        let from = record as u64 * (KeyRecord::WORDS * 4) as u64;
        let mut from = opaque_wide(block.options().records + from);
        let [first_key, first_tile, tiles_end, start_tile] = load_global_v4(from);
        store_shared_v4(self.shared, [batch, head_part, first_key, section]);
        let steps = (tiles_end - first_tile) * opaque(block.params.work_heads);
        store_shared_v4(self.shared + 16, [first_tile, tiles_end, steps, start_tile]);
        let home = block.home::<T>(Kernel::<T>::PLAN.kv_stages);
        let mut place = 0;
        while place < Home::ITEM {
            from += 16;
            store_shared_v4(home.shared + place, load_global_v4(from));
            place = opaque(place + 16);
        }
        let [item, key_rows, _, _] = load_global_v4(from + 16);
        let turn = if opaque(block.options().more_turns) == 0 { 0 } else { item };
        store_shared_v4(home.shared + Home::ITEM, [item, key_rows, turn, 0]);
    }
}

/// Counts the producer's own work among those done: there is nothing to do.
#[inline(always)]
pub(super) unsafe fn pass_over(block: &Block<'_>, own: Work) {
    let counter = opaque(block.params.counters.done) + own.section();
    release_add_global_u32(block.counter(counter as u64), 1);
}

/// Of a step's first word, beside [`NATURAL`]: some row of its tile does not see all keys of the
/// block.
const PARTIAL: u32 = 2;
/// Some row of its tile is not the item's, or sees no key.
const SHARED: u32 = 4;
/// The lse of its rows is natural.
const NATURAL: u32 = 1;

/// Leaves at `step` what consumers are told of a Q tile: flags, its number among the tiles of its
/// head, and among those of all heads, and ALiBi's slope.
#[inline(always)]
pub(super) unsafe fn tell_step<T: HopperBackwardTiling>(
    block: &Block<'_>,
    own: Work,
    step: u32,
    natural: u32,
    tile: u32,
) {
    let home = block.home::<T>(Kernel::<T>::PLAN.kv_stages);
    let slopes = &block.options().alibi;
    let mut slope = 0;
    if is_given(slopes.address) {
        let offset = opaque_wide(slopes.offset(home.word(Home::ITEM), own.q_head()) as u64) << 2;
        slope = load_global_f32(slopes.address.wrapping_add(offset)).to_bits();
    }
    let mut flags = if natural != 0 { NATURAL } else { 0 };
    if tile < home.word(Home::FULL) || tile >= home.word(Home::FULL + 4) {
        flags |= PARTIAL;
    }
    let first = home.first_row::<T>(tile);
    let end = first + T::SHAPE.q_rows as i32;
    if first < home.word(Home::SEEING) as i32 || end > home.word(Home::SEEING + 4) as i32 {
        flags |= SHARED;
    }
    let head = own.batch() * block.params.q_heads + own.q_head();
    let index = head * head_tiles::<T>(block.params) + tile;
    store_shared_v4(step, [flags, tile, index, slope]);
}

/// As [`opaque`].
#[inline(always)]
fn opaque_wide(value: u64) -> u64 {
    (opaque((value >> 32) as u32) as u64) << 32 | opaque(value as u32) as u64
}

/// Whether an option has an address. Asked anew each time: kept, the answers would take registers.
#[inline(always)]
fn is_given(address: u64) -> bool {
    opaque(address as u32) | opaque((address >> 32) as u32) != 0
}

impl<T: HopperBackwardTiling, E: MatrixElement, M: MaskKind> Consumer<'_, T, E, M>
where
    T::Scores: Product<E>,
    T::KeyGradient: Product<E>,
    T::ValueGradient: Product<E>,
    T::QueryGradient: Product<E>,
{
    /// What belongs to the work at hand.
    #[inline(always)]
    pub(super) fn home(&self) -> Home {
        self.block.home::<T>(self.kv.slot)
    }

    /// The flags of the step whose Q tile is at `turn`.
    #[inline(always)]
    unsafe fn flags(&self, turn: Turn) -> u32 {
        load_shared_u32(self.told_anew(turn))
    }

    /// Whether rows of the tile at `turn` are not the item's, or see no key.
    #[inline(always)]
    pub(super) unsafe fn is_shared(&self, turn: Turn) -> bool {
        self.flags(turn) & SHARED != 0
    }

    /// The number of the query tile at `turn` among those of its head.
    #[inline(always)]
    unsafe fn told_tile(&self, turn: Turn) -> u32 {
        load_shared_u32(self.told_anew(turn) + 4)
    }

    /// As [`Self::told`], computed again each time.
    #[inline(always)]
    fn told_anew(&self, turn: Turn) -> u32 {
        opaque(self.told(Turn { slot: opaque(turn.slot), parity: opaque(turn.parity) }))
    }
}
