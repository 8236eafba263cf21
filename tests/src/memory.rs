//! A tensor in memory that is poisoned all around it.

use ferroflash::{TensorMut, TensorRef};

use crate::element::Real;

/// Poisoned elements before and after every tensor; a multiple of 16 bytes in any element type.
const GUARD: usize = 64;

/// How the axes of a tensor lie in memory. The last three axes are row, head and channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Arrangement {
    /// Elements before element 0, past an address that is aligned to 16 bytes.
    pub offset: usize,
    /// Heads outside rows (`[B, H, S, D]` memory).
    pub heads_first: bool,
    /// Poisoned elements after the channels of each row.
    pub channel_gap: usize,
    /// Poisoned rows after the rows of each item.
    pub row_gap: usize,
    /// One item in memory for all of the batch: stride 0.
    pub repeat_batch: bool,
    /// One head in memory for all heads: stride 0.
    pub repeat_heads: bool,
}

impl Arrangement {
    /// In the order of the axes.
    pub const CONTIGUOUS: Self = Self {
        offset: 0,
        heads_first: false,
        channel_gap: 0,
        row_gap: 0,
        repeat_batch: false,
        repeat_heads: false,
    };

    /// `[B, H, S, D]` memory.
    pub const HEADS_FIRST: Self = Self { heads_first: true, ..Self::CONTIGUOUS };

    /// Strides in elements, and the elements from first to last.
    fn strides(&self, dims: &[usize]) -> (Vec<i64>, usize) {
        let rank = dims.len();
        let mut order: Vec<usize> = (0..rank).collect();
        if self.heads_first && rank >= 3 {
            order.swap(rank - 3, rank - 2);
        }
        let mut strides = vec![0; rank];
        let mut step = 1;
        for &axis in order.iter().rev() {
            let repeated = (self.repeat_heads && rank >= 3 && axis == rank - 2)
                || (self.repeat_batch && rank >= 4 && axis == rank - 4);
            if repeated {
                continue;
            }
            strides[axis] = step as i64;
            let gap = match rank - 1 - axis {
                0 => self.channel_gap,
                2 => self.row_gap,
                _ => 0,
            };
            step *= dims[axis] + gap;
        }
        (strides, step)
    }
}

/// A tensor and the poisoned memory around and between its elements.
#[derive(Clone, Debug)]
pub struct Owned<T> {
    pub(crate) values: Vec<T>,
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: usize,
}

impl<T: Real> Owned<T> {
    /// Poison in every element.
    pub fn poisoned(dims: &[usize], arrangement: Arrangement) -> Self {
        let (strides, span) = arrangement.strides(dims);
        let offset = GUARD + arrangement.offset;
        let values = vec![T::POISON; offset + span + GUARD];
        Self { values, dims: dims.to_vec(), strides, offset }
    }

    /// Values in the order of the axes; where an axis is repeated the last ones stay.
    pub fn new(contents: &[f32], dims: &[usize], arrangement: Arrangement) -> Self {
        let mut owned = Self::poisoned(dims, arrangement);
        assert_eq!(contents.len(), dims.iter().product::<usize>(), "values for {dims:?}");
        let places = owned.places();
        for (place, &value) in places.into_iter().zip(contents) {
            owned.values[place] = T::from_f32(value);
        }
        owned
    }

    /// The same values otherwise arranged.
    pub fn rearranged(&self, arrangement: Arrangement) -> Self {
        let mut owned = Self::poisoned(&self.dims, arrangement);
        for (to, from) in owned.places().into_iter().zip(self.places()) {
            owned.values[to] = self.values[from];
        }
        owned
    }

    /// Dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Elements of the tensor.
    pub fn count(&self) -> usize {
        self.dims.iter().product()
    }

    /// Where the elements lie in `values`, in the order of the axes.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![self.offset];
        for (&dim, &stride) in self.dims.iter().zip(&self.strides) {
            let along = |place: usize| (0..dim).map(move |index| place + index * stride as usize);
            places = places.into_iter().flat_map(along).collect();
        }
        places
    }

    /// The elements in the order of the axes.
    pub fn contents(&self) -> Vec<f64> {
        self.places().into_iter().map(|place| self.values[place].to_f64()).collect()
    }

    /// The bits of the elements in the order of the axes.
    pub fn bits(&self) -> Vec<u32> {
        self.places().into_iter().map(|place| self.values[place].bits()).collect()
    }

    /// Sets each element from its number in the order of the axes and its value.
    pub fn set(&mut self, value: impl Fn(usize, f32) -> f32) {
        for (index, place) in self.places().into_iter().enumerate() {
            self.values[place] = T::from_f32(value(index, self.values[place].to_f32()));
        }
    }

    /// Sets every channel of every head of rows `rows` of item `item` (of the only one, if items
    /// are packed).
    pub fn set_rows(&mut self, item: usize, rows: std::ops::Range<usize>, value: f32) {
        let rank = self.dims.len();
        let row_elements = self.dims[rank - 2] * self.dims[rank - 1];
        let first = item * self.dims[rank - 3];
        let elements = (first + rows.start) * row_elements..(first + rows.end) * row_elements;
        self.set(|index, old| if elements.contains(&index) { value } else { old });
    }

    /// To read.
    pub fn view(&self) -> TensorRef<'_, T> {
        TensorRef::host_strided(&self.values[self.offset..], &self.dims, &self.strides)
            .expect("a view inside its memory")
    }

    /// To write.
    pub fn view_mut(&mut self) -> TensorMut<'_, T> {
        TensorMut::host_strided(&mut self.values[self.offset..], &self.dims, &self.strides)
            .expect("a view inside its memory, with no element twice")
    }

    /// Whether element 0 and every stride that is stepped along are multiples of 16 bytes.
    pub fn is_aligned(&self) -> bool {
        let rows = self.dims.len() - 1;
        let steps = self.dims.iter().zip(&self.strides).take(rows).filter(|(dim, _)| **dim > 1);
        let mut places = steps.map(|(_, stride)| *stride as usize).chain([self.offset]);
        places.all(|elements| (elements * size_of::<T>()).is_multiple_of(16))
    }

    /// Panics unless every element was written and nothing around them was.
    pub fn assert_written(&self, name: &str) {
        let places = self.places();
        let unwritten = places.iter().filter(|place| self.values[**place].is_poison()).count();
        assert!(
            unwritten == 0,
            "{name}: {unwritten} of {} elements were not written",
            places.len()
        );
        self.assert_guards(name);
    }

    /// Panics if anything around the elements was written.
    pub fn assert_guards(&self, name: &str) {
        let mut is_element = vec![false; self.values.len()];
        self.places().into_iter().for_each(|place| is_element[place] = true);
        let around = self.values.iter().zip(&is_element).enumerate();
        let touched = around.filter(|(_, (value, inside))| !**inside && !value.is_poison());
        let touched: Vec<i64> =
            touched.map(|(place, _)| place as i64 - self.offset as i64).take(8).collect();
        assert!(touched.is_empty(), "{name}: written outside, at elements {touched:?}");
    }
}
