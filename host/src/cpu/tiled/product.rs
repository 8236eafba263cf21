//! Matrix products of tiles, by the `gemm` crate.
//!
//! `gemm` has the speed of a vendor library on single-threaded products of 64 to 256 rows, picks
//! AVX-512, AVX2 or NEON at run time, and takes strides, a scale and an addend. Its kernels are 64
//! rows high and 6 columns wide on AVX-512 and prefer a left side whose rows are contiguous, which
//! decides how scores lie in scratch and which tile sizes are good.

use std::marker::PhantomData;

use gemm::Parallelism;

/// A matrix to read: element (i, j) is at `i · row_stride + j · column_stride`.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    start: *const f32,
    row_stride: isize,
    column_stride: isize,
    extent: Extent,
    _life: PhantomData<&'a [f32]>,
}

/// What may be read of a matrix.
#[derive(Clone, Copy)]
enum Extent {
    /// This many elements from its start.
    Elements(usize),
    /// This many contiguous columns (of channels), wherever they lie.
    Columns { channels: usize, count: usize },
}

impl<'a> View<'a> {
    /// Rows of scratch are contiguous, `row_stride` apart.
    pub(super) fn rows(values: &'a [f32], row_stride: usize) -> Self {
        Self { row_stride: row_stride as isize, column_stride: 1, ..Self::columns(values, 1) }
    }

    /// Columns of scratch are contiguous, `column_stride` apart.
    pub(super) fn columns(values: &'a [f32], column_stride: usize) -> Self {
        Self {
            start: values.as_ptr(),
            row_stride: 1,
            column_stride: column_stride as isize,
            extent: Extent::Elements(values.len()),
            _life: PhantomData,
        }
    }

    /// Rows of a tensor where they lie, each a column here.
    ///
    /// # Safety
    /// From `start`, with the address's own provenance, `count` runs of `channels` elements, each
    /// `stride` after the last, can be read for `'a`.
    pub(super) unsafe fn of_tensor(
        start: *const f32,
        stride: isize,
        channels: usize,
        count: usize,
    ) -> Self {
        let extent = Extent::Columns { channels, count };
        Self { start, row_stride: 1, column_stride: stride, extent, _life: PhantomData }
    }

    fn assert_holds(&self, rows: usize, columns: usize) {
        assert!(match self.extent {
            Extent::Elements(len) => {
                let strides = (self.row_stride.unsigned_abs(), self.column_stride.unsigned_abs());
                holds(len, rows, strides.0, columns, strides.1)
            }
            Extent::Columns { channels, count } => rows <= channels && columns <= count,
        });
    }
}

fn holds(len: usize, rows: usize, row_stride: usize, columns: usize, column_stride: usize) -> bool {
    rows == 0 || columns == 0 || (rows - 1) * row_stride + (columns - 1) * column_stride < len
}

/// Sizes of a product: `[rows, depth] · [depth, columns]`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) depth: usize,
}

/// What becomes of the target's old contents.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Target {
    /// They are overwritten, and never read.
    Replace,
    /// The product is added to them.
    Add,
}

/// Products of channels that one sum is of before it is added to the others: its rounding grows
/// with the root of their number, and more than this is more than a vendor library's.
const CHAIN: usize = 128;

/// `target = scale · left · right`, or `target += …`. The target's columns are contiguous,
/// `target_stride` apart.
///
/// # Panics
/// If a matrix reaches outside its slice.
pub(super) fn product(
    sizes: Sizes,
    (target, target_stride): (&mut [f32], usize),
    mode: Target,
    scale: f32,
    left: View<'_>,
    right: View<'_>,
) {
    let Sizes { rows, columns, depth } = sizes;
    left.assert_holds(rows, depth);
    right.assert_holds(depth, columns);
    assert!(holds(target.len(), rows, 1, columns, target_stride));
    assert!(target_stride >= rows || columns <= 1);
    // To `gemm` a single column is a matrix-vector product, of which it rounds `scale` times each
    // element; its sums are scaled instead, as those of a matrix are.
    let is_vector = columns == 1 && mode == Target::Replace;
    // Channels are the depth where a target is replaced; keys or rows, where it is added to.
    let step = if mode == Target::Replace { CHAIN } else { depth.max(1) };
    for first in (0..depth.max(1)).step_by(step) {
        let is_added = mode == Target::Add || first > 0;
        // SAFETY: by the assertions, every element that the sizes and strides reach lies in its
        // slice, or in the rows that `View::of_tensor` was vouched for, and target columns do not
        // overlap. `gemm` reads the target only if asked to add.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                step.min(depth - first),
                target.as_mut_ptr(),
                target_stride as isize,
                1,
                is_added,
                left.start.offset(first as isize * left.column_stride),
                left.column_stride,
                left.row_stride,
                right.start.offset(first as isize * right.row_stride),
                right.column_stride,
                right.row_stride,
                1.0,
                if is_vector { 1.0 } else { scale },
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
    if is_vector {
        target[..rows].iter_mut().for_each(|sum| *sum *= scale);
    }
}
