//! Tensors in slow memory. Every word that leaves or enters one is counted.

use std::ops::Range;

use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};

/// A tensor of `heads` matrices of `rows × width`, one after another.
#[derive(Debug)]
pub(crate) struct Slow<F> {
    tensor: Tensor,
    rows: usize,
    width: usize,
    values: Vec<F>,
}

impl<F: Real> Slow<F> {
    /// A tensor that holds its values already.
    pub(crate) fn holding(tensor: Tensor, rows: usize, width: usize, values: &[F]) -> Self {
        Self { tensor, rows, width, values: values.to_vec() }
    }

    /// Memory that nothing was written to: reading it first gives NaN.
    pub(crate) fn undefined(tensor: Tensor, heads: usize, rows: usize, width: usize) -> Self {
        let values = vec![F::from_f64(f64::NAN); heads * rows * width];
        Self { tensor, rows, width, values }
    }

    /// Fills rows of one head to begin with.
    pub(crate) fn initialise(
        &mut self,
        trace: &mut Trace,
        head: usize,
        rows: Range<usize>,
        value: F,
    ) {
        let at = self.at(head, rows);
        trace.touch(self.tensor).initial += at.len() as u128;
        self.values[at].fill(value);
    }

    /// Copies rows of one head onto the chip.
    pub(crate) fn load<'c>(
        &self,
        chip: &'c Chip,
        trace: &mut Trace,
        head: usize,
        rows: Range<usize>,
    ) -> Tile<'c, F> {
        let at = self.at(head, rows);
        trace.touch(self.tensor).reads += at.len() as u128;
        Tile::new(chip, self.width, self.values[at].to_vec())
    }

    /// Copies a tile to rows of one head.
    pub(crate) fn store(
        &mut self,
        trace: &mut Trace,
        program: u64,
        head: usize,
        rows: Range<usize>,
        tile: &Tile<'_, F>,
    ) {
        trace.produce(self.tensor, head, &rows, program);
        let at = self.at(head, rows);
        trace.touch(self.tensor).writes += at.len() as u128;
        self.values[at].copy_from_slice(&tile.values);
    }

    /// Adds a tile to rows of one head, word by word and each addition whole.
    pub(crate) fn add(
        &mut self,
        trace: &mut Trace,
        program: u64,
        head: usize,
        rows: Range<usize>,
        tile: &Tile<'_, F>,
    ) {
        trace.produce(self.tensor, head, &rows, program);
        let at = self.at(head, rows);
        trace.touch(self.tensor).adds += at.len() as u128;
        if F::HAS_VALUE {
            for (sum, addend) in self.values[at].iter_mut().zip(&tile.values) {
                *sum = *sum + *addend;
            }
        }
    }

    /// Reads every sum, multiplies it by what was left to the end, and writes the gradient: the
    /// kernel after the main one.
    pub(crate) fn convert(self, trace: &mut Trace, gradient: Tensor, factor: F) -> Vec<F> {
        trace.touch(self.tensor).reads += self.values.len() as u128;
        trace.touch(gradient).writes += self.values.len() as u128;
        self.values.into_iter().map(|sum| sum * factor).collect()
    }

    /// The values, when all is done.
    pub(crate) fn into_values(self) -> Vec<F> {
        self.values
    }

    fn at(&self, head: usize, rows: Range<usize>) -> Range<usize> {
        let first = head * self.rows;
        (first + rows.start) * self.width..(first + rows.end) * self.width
    }
}
