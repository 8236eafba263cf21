//! Matrices on the chip, and the products of a tile of scores.

use std::cell::Cell;

use super::number::Real;

/// The chip of one program: how many words lie on it, and how many there were at most.
#[derive(Debug, Default)]
pub(crate) struct Chip {
    live: Cell<u64>,
    peak: Cell<u64>,
}

impl Chip {
    pub(crate) fn peak(&self) -> u64 {
        self.peak.get()
    }
}

/// A `rows × width` matrix on a chip, which it leaves when it is dropped.
#[derive(Debug)]
pub(crate) struct Tile<'c, F> {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) values: Vec<F>,
    chip: &'c Chip,
}

impl<'c, F: Real> Tile<'c, F> {
    pub(crate) fn new(chip: &'c Chip, width: usize, values: Vec<F>) -> Self {
        let live = chip.live.get() + values.len() as u64;
        chip.live.set(live);
        chip.peak.set(chip.peak.get().max(live));
        let rows = values.len().checked_div(width).unwrap_or(0);
        Self { rows, width, values, chip }
    }

    pub(crate) fn filled(chip: &'c Chip, rows: usize, width: usize, value: F) -> Self {
        Self::new(chip, width, vec![value; rows * width])
    }

    pub(crate) fn row(&self, row: usize) -> &[F] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [F] {
        &mut self.values[row * self.width..(row + 1) * self.width]
    }

    /// `self · otherᵀ · factor`.
    pub(crate) fn times_transposed(&self, other: &Self, factor: F) -> Self {
        let mut product = Self::filled(self.chip, self.rows, other.rows, F::ZERO);
        if F::HAS_VALUE {
            for row in 0..self.rows {
                for column in 0..other.rows {
                    let pairs = self.row(row).iter().zip(other.row(column));
                    let sum = pairs.fold(F::ZERO, |sum, (a, b)| sum + *a * *b);
                    product.row_mut(row)[column] = factor * sum;
                }
            }
        }
        product
    }

    /// `self += factor · other`.
    pub(crate) fn add_scaled(&mut self, factor: F, other: &Self) {
        if F::HAS_VALUE {
            add_scaled(&mut self.values, factor, &other.values);
        }
    }

    /// `self += factor · left · right`.
    pub(crate) fn add_product(&mut self, factor: F, left: &Self, right: &Self) {
        if F::HAS_VALUE {
            for row in 0..left.rows {
                for (inner, weight) in left.row(row).iter().enumerate() {
                    add_scaled(self.row_mut(row), factor * *weight, right.row(inner));
                }
            }
        }
    }

    /// `self += factor · leftᵀ · right`.
    pub(crate) fn add_transposed_product(&mut self, factor: F, left: &Self, right: &Self) {
        if F::HAS_VALUE {
            for inner in 0..left.rows {
                for (row, weight) in left.row(inner).iter().enumerate() {
                    add_scaled(self.row_mut(row), factor * *weight, right.row(inner));
                }
            }
        }
    }
}

impl<F> Drop for Tile<'_, F> {
    fn drop(&mut self) {
        self.chip.live.set(self.chip.live.get() - self.values.len() as u64);
    }
}

/// `sum += factor · addend`, and nothing where the factor is 0: what a row does not see may hold
/// anything.
pub(crate) fn add_scaled<F: Real>(sum: &mut [F], factor: F, addend: &[F]) {
    if factor != F::ZERO {
        for (sum, addend) in sum.iter_mut().zip(addend) {
            *sum = *sum + factor * *addend;
        }
    }
}
