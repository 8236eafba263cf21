//! The classes `masked` and `general`: items of their own lengths, packed or not, windows of two
//! sides, and what `options.rs` does to a score.
//!
//! **Where a block works.** Warp 0 finds the item that the block's keys belong to and leaves it in
//! shared memory behind the block's [`Work`] ([`Home`]). Key blocks of packed items are numbered by
//! slots, as the forward's query blocks are (`ferroflash_core::items`): a block between two items
//! has no step and no row to write. Keys past an item's last, and past the last item, have a block
//! that writes zeros.
//!
//! **What is read.** Keys that no row of the item sees and rows that see no key are zero in shared
//! memory, as those past the item's ends are: whatever they hold, their products are 0.
//!
//! **Dropout.** The same warp leaves the dropout's seed and offset behind the item.
//!
//! **Sums.** Rows of packed items are rows of the scratch: a tile begins anywhere in the sums'
//! blocks of 16 rows, and each lane finds its own rows' places there. Rows past the item's end are
//! the next item's and are not added to.
//!
//! **Order.** The key blocks that add to a query tile follow one another; the first of them is the
//! one that holds the first key any of the tile's rows sees. Tiles of packed items have counters by
//! slots. Malformed offsets may give two items one counter, so that a turn has passed already, or
//! leave an item without its first blocks: then the others do nothing.

use core::marker::PhantomData;

use ferroflash_core::axes::{MaskClass, MaskKind};
use ferroflash_core::backward::params::PortableBackwardParams;
use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::{DROPOUT_IN_PLACE, PortableBackwardTiling};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::items::Items;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::schedule::divide;
use ferroflash_core::visibility::Visibility;

use super::options::Cells;
use super::{Kernel, Place, Step, Variant, Work, number};
use crate::options::{find_whole_item, read_length, store_dropout};
use crate::ptx::async_copy::cp_async_4;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{add_global_f32, load_shared_v4, store_shared_v4};
use crate::ptx::warp::uniform;
use crate::tile::Rows;

/// The variant of a class with options.
pub(super) struct WithOptions<M>(PhantomData<M>);

/// The item that a block's keys belong to.
pub(super) struct Home {
    /// Its number.
    pub(super) item: u32,
    /// Its first row, on the row axis of q.
    first_q: u32,
    /// Its first key, on the row axis of k.
    first_k: u32,
    /// Its rows of k, used or not.
    kv_rows: u32,
    /// Rows used of it.
    pub(super) q_len: u32,
    /// Keys used of it.
    pub(super) kv_len: u32,
    /// The key that its row 0 is aligned with.
    offset: i32,
    /// First slot of its query blocks, where items are packed.
    first_slot: u32,
    /// First row that sees a key, and one past the last.
    seeing: [u32; 2],
    /// First key that a row sees, and one past the last.
    seen: [u32; 2],
}

impl Home {
    #[inline(always)]
    unsafe fn store(&self, slot: u32) {
        store_shared_v4(slot, [self.item, self.first_q, self.first_k, self.kv_rows]);
        let offset = self.offset as u32;
        store_shared_v4(slot + 16, [self.q_len, self.kv_len, offset, self.first_slot]);
        let ([first, end], [first_key, end_key]) = (self.seeing, self.seen);
        store_shared_v4(slot + 32, [first, end, first_key, end_key]);
    }

    #[inline(always)]
    pub(super) unsafe fn load(slot: u32) -> Self {
        let [item, first_q, first_k, kv_rows] = load_shared_v4(slot);
        let [q_len, kv_len, offset, first_slot] = load_shared_v4(slot + 16);
        let [first, end, first_key, end_key] = load_shared_v4(slot + 32);
        Self {
            item,
            first_q,
            first_k,
            kv_rows,
            q_len,
            kv_len,
            offset: offset as i32,
            first_slot,
            seeing: [first, end],
            seen: [first_key, end_key],
        }
    }

    /// What the item's rows see.
    #[inline(always)]
    pub(super) fn visible(&self, items: &Items) -> Visibility {
        let Self { q_len, kv_len, offset, .. } = *self;
        Visibility { q_len, kv_len, offset, left: items.left, right: items.right }
    }
}

/// A block's [`Work`] and [`Home`].
#[inline(always)]
unsafe fn find(
    params: &PortableMaskedBackwardParams,
    number: u32,
    (q_rows, kv_columns): (u32, u32),
    lane: u32,
) -> (Work, Home) {
    let (backward, items) = (&params.backward, &params.items);
    let work = backward.schedule.work(number);
    let (index, kv_head, kv_block) = if items.is_packed() {
        let first_slot = |index| items.first_kv_slot(index, kv_columns, read_length);
        let (index, is_whole) = find_whole_item(items, work.kv_block, lane, first_slot);
        // Of an item without its first blocks the others would wait for them in vain.
        let index = if is_whole { index } else { items.count };
        (index, work.batch_head, work.kv_block.wrapping_sub(first_slot(index)))
    } else {
        let index = divide(work.batch_head, backward.kv_heads);
        (index, work.batch_head - index * backward.kv_heads, work.kv_block)
    };
    let item = items.item(index, read_length);
    let visible = &item.visible;
    // Between two items, or where offsets are malformed, there is nothing to do.
    let is_there = kv_block < item.kv_rows.div_ceil(kv_columns);
    let first_key = if is_there { kv_block * kv_columns } else { 0 };
    let rows = match is_there {
        true => visible.rows_of_any(&(first_key..first_key + kv_columns)),
        false => 0..0,
    };
    let inside = match is_there {
        true => visible.rows_of_all(&(first_key..first_key + kv_columns)),
        false => 0..0,
    };
    let heads = if rows.start < rows.end { backward.group } else { 0 };
    let first_slot = match items.is_packed() {
        true => items.first_slot(index, q_rows, read_length),
        false => 0,
    };
    let seeing = visible.rows_of_any(&(0..visible.kv_len));
    let seen = visible.keys_of_any(&(0..visible.q_len));
    let home = Home {
        item: index,
        first_q: item.first_q,
        first_k: item.first_k,
        kv_rows: if is_there { item.kv_rows } else { 0 },
        q_len: visible.q_len,
        kv_len: visible.kv_len,
        offset: visible.offset,
        first_slot,
        seeing: [seeing.start, seeing.end],
        seen: [seen.start, seen.end],
    };
    let work = Work {
        batch: item.batch,
        kv_head,
        first_key,
        end_head: kv_head * backward.group + heads,
        first_tile: rows.start / q_rows,
        end_tile: rows.end.div_ceil(q_rows),
        inside: [inside.start.div_ceil(q_rows), inside.end / q_rows],
    };
    (work, home)
}

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// The block's item.
    #[inline(always)]
    pub(super) unsafe fn home(shared: u32) -> Home {
        Home::load(shared + Self::PLAN.bytes)
    }

    /// Where the dropout's seed and offset lie.
    #[inline(always)]
    pub(super) const fn dropout_slot(shared: u32) -> u32 {
        shared + Self::PLAN.bytes + DROPOUT_IN_PLACE
    }
}

impl<T: PortableBackwardTiling, E: MatrixElement, M: MaskKind> Variant<T, E> for WithOptions<M> {
    type Params = PortableMaskedBackwardParams;

    #[inline(always)]
    fn common(params: &PortableMaskedBackwardParams) -> &PortableBackwardParams {
        &params.backward
    }

    #[inline(always)]
    unsafe fn find_work(params: &PortableMaskedBackwardParams, shared: u32, thread: u32) {
        if thread < 32 {
            let drawn = if thread == 0 { number(&params.backward) } else { 0 };
            let tile = (T::SHAPE.q_rows, T::SHAPE.kv_columns);
            let (work, home) = find(params, uniform(drawn), tile, thread);
            if thread == 0 {
                work.store(shared + Kernel::<T, E>::PLAN.work);
                home.store(shared + Kernel::<T, E>::PLAN.bytes);
                if matches!(M::CLASS, MaskClass::General) && params.options.drops != 0 {
                    store_dropout(&params.options, Kernel::<T, E>::dropout_slot(shared), 0);
                }
            }
        }
    }

    #[inline(always)]
    fn has_mask(params: &PortableMaskedBackwardParams) -> bool {
        matches!(M::CLASS, MaskClass::General) && params.options.boolean_mask.address != 0
    }

    #[inline(always)]
    unsafe fn shows(
        params: &PortableMaskedBackwardParams,
        step: Step,
        shared: u32,
        thread: u32,
    ) -> bool {
        let work = Work::load(shared + Kernel::<T, E>::PLAN.work);
        let home = Kernel::<T, E>::home(shared);
        Kernel::<T, E>::shows(params, &work, &home, step, thread)
    }

    #[inline(always)]
    unsafe fn keys(
        _params: &PortableMaskedBackwardParams,
        work: &Work,
        shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        let home = Kernel::<T, E>::home(shared);
        let ([start, end], key) = (home.seen, work.first_key);
        let rows =
            Rows::of(tensor, work.batch, work.kv_head, home.first_k + key, home.first_k + end);
        Rows { hidden: start.saturating_sub(key), ..rows }
    }

    #[inline(always)]
    unsafe fn key_gradients(
        _params: &PortableMaskedBackwardParams,
        work: &Work,
        shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        let home = Kernel::<T, E>::home(shared);
        let end = home.first_k + home.kv_rows;
        Rows::of(tensor, work.batch, work.kv_head, home.first_k + work.first_key, end)
    }

    #[inline(always)]
    unsafe fn queries(
        _params: &PortableMaskedBackwardParams,
        work: &Work,
        step: Step,
        shared: u32,
        tensor: &DeviceTensor,
    ) -> Rows {
        let home = Kernel::<T, E>::home(shared);
        let ([start, end], row) = (home.seeing, step.tile * T::SHAPE.q_rows);
        let rows =
            Rows::of(tensor, work.batch, step.q_head, home.first_q + row, home.first_q + end);
        Rows { hidden: start.saturating_sub(row), ..rows }
    }

    #[inline(always)]
    unsafe fn copy_states(
        params: &PortableMaskedBackwardParams,
        work: &Work,
        step: Step,
        shared: u32,
        rows: u32,
        thread: u32,
    ) {
        if thread < 2 * T::SHAPE.q_rows {
            let home = Kernel::<T, E>::home(shared);
            let (scratch, in_tile) = (&params.backward.scratch, thread % T::SHAPE.q_rows);
            let array = if thread < T::SHAPE.q_rows { scratch.lse } else { scratch.delta };
            let row = step.tile * T::SHAPE.q_rows + in_tile;
            let head = (work.batch * params.backward.q_heads + step.q_head) as u64;
            let place = head * scratch.padded_rows as u64 + (home.first_q + row) as u64;
            // Past the item's end are other items' rows, or nothing.
            let (from, bytes) = if row < home.q_len { (array + place * 4, 4) } else { (array, 0) };
            cp_async_4(rows + thread * 4, from, bytes);
        }
    }

    #[inline(always)]
    unsafe fn weigh(
        params: &PortableMaskedBackwardParams,
        place: &Place,
        step: Step,
        query: u32,
        states: u32,
        p: &mut T::Scores,
        ds: &mut T::Scores,
    ) {
        let cells = Cells { place, step, query, tile: 0 };
        Kernel::<T, E>::weigh_with_options::<M>(params, &cells, states, p, ds);
    }

    #[inline(always)]
    unsafe fn turn(
        params: &PortableMaskedBackwardParams,
        work: &Work,
        step: Step,
        shared: u32,
    ) -> (u64, u32) {
        let (scratch, items) = (&params.backward.scratch, &params.items);
        let (q_rows, columns) = (T::SHAPE.q_rows, T::SHAPE.kv_columns);
        let home = Kernel::<T, E>::home(shared);
        let head = work.batch * params.backward.q_heads + step.q_head;
        let head_tiles = match items.is_packed() {
            true => items.slots(q_rows) as u32,
            false => scratch.padded_rows / q_rows,
        };
        let tile = home.first_slot + step.tile;
        // Counter 0 is the one that numbers are drawn from.
        let number = 1 + head as u64 * head_tiles as u64 + tile as u64;
        let rows = step.tile * q_rows..((step.tile + 1) * q_rows).min(home.q_len);
        let first = home.visible(items).keys_of_any(&rows).start / columns;
        (scratch.counters + number * 4, work.first_key / columns - first)
    }

    #[inline(always)]
    unsafe fn add_sums(
        params: &PortableMaskedBackwardParams,
        place: &Place,
        step: Step,
        first_row: u32,
        first_column: u32,
        dq: &T::QueryGradient,
    ) {
        let (plan, scratch) = (&Kernel::<T, E>::PLAN, &params.backward.scratch);
        let work = Work::load(place.shared + plan.work);
        let home = Kernel::<T, E>::home(place.shared);
        let head = work.batch * params.backward.q_heads + step.q_head;
        let head_row = head as u64 * scratch.padded_rows as u64;
        let tiles = T::SHAPE.head_dim / 8;
        let column_tiles = plan.dq_columns as usize / 8;
        let mut half = 0;
        while half < plan.dq_row_tiles as usize * 2 {
            let own = step.tile * T::SHAPE.q_rows + first_row + half as u32 * 8 + place.lane / 4;
            if own < home.q_len {
                let row = head_row + (home.first_q + own) as u64;
                let block = row / 16 * tiles as u64 + (first_column / 8) as u64;
                // As `QueryGradientOrder::Values` has it: rows 8 apart are two values apart.
                let in_block = row as u32 % 16;
                let lane = in_block % 8 * 4 + place.lane % 4;
                let value = block * 128 + (in_block / 8 * 64 + lane) as u64;
                let sums = scratch.dq + value * 4;
                let mut tile = 0;
                while tile < column_tiles {
                    let (_, column) = Kernel::<T, E>::sum_tile(tile);
                    let index = (half / 2 * column_tiles + tile) * 4 + half % 2 * 2;
                    let sum = sums + (column * 512) as u64;
                    add_global_f32(sum, dq.at(index));
                    add_global_f32(sum + 128, dq.at(index + 1));
                    tile += 1;
                }
            }
            half += 1;
        }
    }
}
