//! Where the elements of a 16-bit tile lie in shared memory.
//!
//! A tile of `rows × columns` is stored as panels of 64 columns (128 bytes a row) or, where the
//! width is no multiple of 64, of 32 columns (64 bytes a row). Inside a panel the 16-byte chunks
//! of a row are permuted by an exclusive or with the row, so that eight consecutive rows of one
//! chunk column fall into eight different bank groups: `ldmatrix`, plain stores and the tensor
//! cores read and write without conflicts. The permutations are the ones the copy engine applies
//! as 128-byte and 64-byte swizzle (PTX ISA, "Tensor swizzling modes"), for panels aligned to
//! 1024 bytes.

/// Bytes of one swizzled chunk.
pub const CHUNK_BYTES: u32 = 16;
/// 16-bit elements of one swizzled chunk.
pub const CHUNK_ELEMENTS: u32 = 8;

/// A tile of 16-bit elements in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanelLayout {
    /// Rows of the tile, a multiple of 16.
    pub rows: u32,
    /// Columns of the tile, a multiple of 32.
    pub columns: u32,
}

impl PanelLayout {
    /// Columns of one panel: 64, or 32 where the width is no multiple of 64.
    #[inline(always)]
    pub const fn panel_columns(&self) -> u32 {
        if self.columns.is_multiple_of(64) { 64 } else { 32 }
    }

    /// Panels of the tile.
    #[inline(always)]
    pub const fn panels(&self) -> u32 {
        self.columns / self.panel_columns()
    }

    /// Bytes of one row inside a panel: 128 or 64, which is the swizzle's span.
    #[inline(always)]
    pub const fn row_bytes(&self) -> u32 {
        self.panel_columns() * 2
    }

    /// Bytes of one panel.
    #[inline(always)]
    pub const fn panel_bytes(&self) -> u32 {
        self.rows * self.row_bytes()
    }

    /// Bytes of the tile.
    #[inline(always)]
    pub const fn bytes(&self) -> u32 {
        self.rows * self.columns * 2
    }

    /// The exclusive-or mask of a row's chunk index.
    #[inline(always)]
    pub const fn swizzle(&self, row: u32) -> u32 {
        if self.panel_columns() == 64 { row & 7 } else { (row >> 1) & 3 }
    }

    /// Byte offset of the 16-byte chunk that holds columns `8·chunk ..` of `row`.
    #[inline(always)]
    pub const fn chunk_offset(&self, row: u32, chunk: u32) -> u32 {
        let per_row = self.panel_columns() / CHUNK_ELEMENTS;
        let (panel, inner) = (chunk / per_row, chunk % per_row);
        panel * self.panel_bytes()
            + row * self.row_bytes()
            + (inner ^ self.swizzle(row)) * CHUNK_BYTES
    }

    /// Byte offset of element (`row`, `column`).
    #[inline(always)]
    pub const fn element_offset(&self, row: u32, column: u32) -> u32 {
        self.chunk_offset(row, column / CHUNK_ELEMENTS) + column % CHUNK_ELEMENTS * 2
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    proptest! {
        #[test]
        fn every_byte_pair_has_one_element(rows in 1..9_u32, columns in 1..9_u32) {
            let tile = PanelLayout { rows: rows * 16, columns: columns * 32 };
            let mut seen = vec![false; (tile.bytes() / 2) as usize];
            for row in 0..tile.rows {
                for column in 0..tile.columns {
                    let offset = tile.element_offset(row, column);
                    prop_assert_eq!(offset % 2, 0);
                    let slot = &mut seen[(offset / 2) as usize];
                    prop_assert!(!*slot);
                    *slot = true;
                }
            }
            prop_assert!(seen.iter().all(|taken| *taken));
        }

        #[test]
        fn eight_rows_of_a_chunk_column_never_share_banks(
            columns in 1..9_u32, chunk in 0..32_u32, row in 0..8_u32,
        ) {
            let tile = PanelLayout { rows: 64, columns: columns * 32 };
            let chunk = chunk % (tile.columns / CHUNK_ELEMENTS);
            let mut groups = [false; 8];
            for row in row * 8..row * 8 + 8 {
                let group = tile.chunk_offset(row, chunk) / CHUNK_BYTES % 8;
                prop_assert!(!groups[group as usize]);
                groups[group as usize] = true;
            }
        }

        #[test]
        fn the_copy_engines_swizzle_is_the_same(row in 0..64_u32, column in 0..64_u32) {
            // Address bits 4..7 are xored with bits 7..10 (128 bytes), bits 4..6 with 7..9 (64).
            for (columns, mask) in [(64, 7), (32, 3)] {
                let column = column % columns;
                let linear = row * columns * 2 + column * 2;
                let engine = linear ^ ((linear >> 7 & mask) << 4);
                let tile = PanelLayout { rows: 64, columns };
                prop_assert_eq!(tile.element_offset(row, column), engine);
            }
        }
    }
}
