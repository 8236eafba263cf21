//! Which lane of a warp holds which element of a matrix operand.
//!
//! The maps of `mma.sync.m16n8k16` with 16-bit operands and f32 accumulators (PTX ISA, "Matrix
//! fragments for mma.m16n8k16 with floating point type"). A warpgroup's `wgmma` accumulator is the
//! same C map, four warps high and N/8 tiles wide, which is why a packed score fragment is already
//! an A operand.

/// An element's place in a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Row.
    pub row: u32,
    /// Column.
    pub column: u32,
}

/// Place of half `half` (0 or 1) of register `register` (0..4) of `lane`'s A operand, 16×16.
#[inline(always)]
pub const fn a_place(lane: u32, register: u32, half: u32) -> Place {
    Place { row: lane / 4 + register % 2 * 8, column: lane % 4 * 2 + half + register / 2 * 8 }
}

/// Place (k, n) of half `half` of register `register` (0..2) of `lane`'s B operand, 16×8.
#[inline(always)]
pub const fn b_place(lane: u32, register: u32, half: u32) -> Place {
    Place { row: lane % 4 * 2 + half + register * 8, column: lane / 4 }
}

/// Place of value `value` of `lane`'s accumulator: 16 rows, tiles of 8 columns, four values a tile.
#[inline(always)]
pub const fn c_place(lane: u32, value: u32) -> Place {
    Place { row: lane / 4 + value / 2 % 2 * 8, column: value / 4 * 8 + lane % 4 * 2 + value % 2 }
}

/// Registers that a thread holds: f32 values, or packed pairs of 16-bit ones as `u32`.
///
/// Kernels are generic over the tile, and an array's length cannot be computed from a trait
/// constant on stable Rust: a tiling names its arrays, and code reaches them through this.
pub trait Fragment<V: Copy = f32>: Copy {
    /// Values held.
    const LEN: usize;
    /// All values zero.
    const ZERO: Self;
    /// Value `index`.
    ///
    /// # Safety
    /// `index < LEN`. On the device, `index` must become a constant when loops are unrolled.
    unsafe fn at(&self, index: usize) -> V;
    /// Value `index`, to write.
    ///
    /// # Safety
    /// As [`Fragment::at`].
    unsafe fn at_mut(&mut self, index: usize) -> &mut V;
}

macro_rules! fragment {
    ($value:ty, $zero:literal) => {
        impl<const N: usize> Fragment<$value> for [$value; N] {
            const LEN: usize = N;
            const ZERO: Self = [$zero; N];

            #[inline(always)]
            unsafe fn at(&self, index: usize) -> $value {
                // SAFETY: the caller promises that index < N.
                unsafe { *self.get_unchecked(index) }
            }

            #[inline(always)]
            unsafe fn at_mut(&mut self, index: usize) -> &mut $value {
                // SAFETY: the caller promises that index < N.
                unsafe { self.get_unchecked_mut(index) }
            }
        }
    };
}
fragment!(f32, 0.0);
fragment!(u32, 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn covers_once<const ROWS: usize, const COLUMNS: usize>(places: impl Iterator<Item = Place>) {
        let mut seen = [[0; COLUMNS]; ROWS];
        places.for_each(|p| seen[p.row as usize][p.column as usize] += 1);
        assert_eq!(seen, [[1; COLUMNS]; ROWS]);
    }

    fn lanes_and(values: u32) -> impl Iterator<Item = (u32, u32)> {
        (0..32).flat_map(move |lane| (0..values).map(move |value| (lane, value)))
    }

    #[test]
    fn the_maps_are_bijections() {
        covers_once::<16, 16>(lanes_and(8).map(|(lane, i)| a_place(lane, i / 2, i % 2)));
        covers_once::<16, 8>(lanes_and(4).map(|(lane, i)| b_place(lane, i / 2, i % 2)));
        covers_once::<16, 64>(lanes_and(32).map(|(lane, i)| c_place(lane, i)));
    }

    #[test]
    fn a_packed_accumulator_is_an_a_operand() {
        for (lane, i) in lanes_and(8) {
            // Register r of k-step 0 packs accumulator values 2r and 2r + 1.
            assert_eq!(a_place(lane, i / 2, i % 2), c_place(lane, i));
        }
    }
}
