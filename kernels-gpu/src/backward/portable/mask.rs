//! Boolean masks: which scores they hide, and which steps they hide whole.
//!
//! **Steps.** Before a step's first barrier the block's threads share out its cells of the mask, 16
//! keys of a row or, where keys are bits, 8 of them at a time; the barrier itself tells all of them
//! whether anyone found a key that is shown. A step without one ends there: it adds nothing to any
//! gradient. Only its turn at the query tile, where sums are ordered, is passed on.

use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;

use super::masked::Home;
use super::options::{Cells, key_of, row_of};
use super::{Kernel, Step, Work};
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{load_global_u8_if, load_global_v4};

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// Whether this thread's share of a step's cells has one that the mask shows.
    #[inline(always)]
    pub(super) unsafe fn shows(
        params: &PortableMaskedBackwardParams,
        work: &Work,
        home: &Home,
        step: Step,
        thread: u32,
    ) -> bool {
        let mask = &params.options.boolean_mask;
        let (first_row, first_key) = (step.tile * Self::TILE.q_rows, work.first_key);
        let address = |row, column| {
            let offset = mask.offset(home.item, step.q_head, first_row + row, column);
            mask.address.wrapping_add(offset as u64)
        };
        // Rows and keys of the tile that are there.
        let rows = home.q_len.saturating_sub(first_row).min(Self::TILE.q_rows);
        let keys = home.kv_len.saturating_sub(first_key).min(Self::TILE.kv_columns);
        let mut found = 0;
        if params.options.mask_is_bits != 0 {
            let in_row = Self::TILE.kv_columns / 8;
            let mut chunk = thread;
            while chunk < rows * in_row {
                let (row, key) = (chunk / in_row, chunk % in_row * 8);
                let at = address(row, (first_key + key) / 8);
                found |= load_global_u8_if(at, key < keys);
                chunk += Self::TILE.warps * 32;
            }
        } else {
            let in_row = Self::TILE.kv_columns / 16;
            let mut chunk = thread;
            while chunk < rows * in_row {
                let (row, key) = (chunk / in_row, chunk % in_row * 16);
                let at = address(row, first_key + key);
                if at.is_multiple_of(16) && key + 16 <= keys {
                    let [a, b, c, d] = load_global_v4(at);
                    found |= a | b | c | d;
                } else {
                    let mut byte = 0;
                    while byte < 16 {
                        let is_there = key + byte < keys;
                        found |= load_global_u8_if(at.wrapping_add(byte as u64), is_there);
                        byte += 1;
                    }
                }
                chunk += Self::TILE.warps * 32;
            }
        }
        found != 0
    }

    /// Makes scores −∞ where the mask is zero.
    #[inline(always)]
    pub(super) unsafe fn hide_by_mask(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let (mask, is_bits) = (&params.options.boolean_mask, params.options.mask_is_bits != 0);
        // A lane's keys are 8 apart: one bit of bytes that follow one another, or a byte of every
        // 8.
        let (column, shift, bits, stride) = match is_bits {
            true => (corner.key / 8, corner.key % 8, 1, 1),
            false => (corner.key, 0, 0xff, 8),
        };
        let item = Self::home(cells.place.shared).item;
        let first = mask.offset(item, cells.step.q_head, corner.row, column);
        let first = mask.address.wrapping_add(first as u64);
        let mut sees = [0; 16];
        Self::each(cells, |_, at| {
            let (row, key) = (row_of(at % 4), key_of(at / 4));
            let is_there = corner.row + row < visible.q_len && corner.key + key < visible.kv_len;
            let offset = mask.row * row as i64 + (at / 4) as i64 * stride;
            sees[at] = load_global_u8_if(first.wrapping_add(offset as u64), is_there);
        });
        Self::each(cells, |index, at| {
            if sees[at] >> shift & bits == 0 {
                *scores.at_mut(index) = f32::NEG_INFINITY;
            }
        });
    }
}
