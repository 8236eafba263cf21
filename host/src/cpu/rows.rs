//! Host tensors as rows of contiguous channels: the only place where the CPU path turns a checked
//! view into slices.

use std::marker::PhantomData;
use std::ptr;
use std::slice;

use crate::error::{Error, Result};
use crate::tensor::{Place, Raw, TensorMut, TensorRef, contiguous_strides};

/// Sizes and strides of `[outer.0, outer.1, outer.2, channel]`. A tensor of fewer axes has outer
/// axes of size 1 in front.
#[derive(Clone, Copy)]
struct Grid {
    outer: [usize; 3],
    strides: [i64; 3],
    channels: usize,
}

impl Grid {
    /// Checks placement, dimensions, alignment and the channel stride.
    fn new<T>(raw: &Raw, tensor: &'static str, needs: &[usize]) -> Result<Self> {
        check::<T>(raw, tensor, needs)?;
        let (dims, strides) = (raw.dims(), raw.strides());
        let Some(last) = dims.len().checked_sub(1) else {
            return Err(Error::argument(tensor, "no axes", "at least one"));
        };
        if dims[last] > 1 && strides[last] != 1 {
            return Err(Error::ChannelStride { tensor, had: strides[last] });
        }
        let mut grid = Self { outer: [1; 3], strides: [0; 3], channels: dims[last] };
        grid.outer[3 - last..].copy_from_slice(&dims[..last]);
        grid.strides[3 - last..].copy_from_slice(&strides[..last]);
        Ok(grid)
    }

    /// Element offset of channel 0 of the row at `index`.
    ///
    /// # Panics
    /// If `index` is outside the tensor; callers index by the problem's own ranges.
    #[inline]
    fn offset(&self, index: [usize; 3]) -> isize {
        let mut offset = 0_i64;
        for axis in 0..3 {
            assert!(index[axis] < self.outer[axis], "row {index:?} of {:?}", self.outer);
            offset += index[axis] as i64 * self.strides[axis];
        }
        offset as isize
    }
}

/// Placement, dimensions and alignment.
fn check<T>(raw: &Raw, tensor: &'static str, needs: &[usize]) -> Result<()> {
    if raw.place != Place::Host {
        return Err(Error::Placement {
            tensor,
            had: raw.place.to_string(),
            needs: Place::Host.to_string(),
        });
    }
    if raw.dims() != needs {
        return Err(Error::Dimensions { tensor, had: raw.dims().to_vec(), needs: needs.to_vec() });
    }
    if !raw.is_empty() && !raw.address.is_multiple_of(align_of::<T>()) {
        return Err(Error::argument(
            tensor,
            format!("at address {:#x}", raw.address),
            format!("aligned to its elements' {} bytes", align_of::<T>()),
        ));
    }
    Ok(())
}

/// Whether the elements follow one another in memory.
fn check_contiguous(raw: &Raw, tensor: &'static str) -> Result<()> {
    let needs = contiguous_strides(raw.dims());
    let axes = raw.dims().iter().zip(raw.strides()).zip(&needs);
    if !raw.is_empty() && axes.clone().any(|((&dim, had), needs)| dim > 1 && had != needs) {
        return Err(Error::argument(
            tensor,
            format!("strides {:?} for dimensions {:?}", raw.strides(), raw.dims()),
            format!("contiguous, with strides {needs:?}"),
        ));
    }
    Ok(())
}

/// A tensor to read, `[outer.0, outer.1, outer.2, channel]` with contiguous channels.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    address: *const T,
    grid: Grid,
    _life: PhantomData<&'a [T]>,
}

// SAFETY: a shared borrow of elements, as `&[T]` is.
unsafe impl<T: Sync> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Checks that `tensor` lies in host memory, has dimensions `needs` and contiguous
    /// channels.
    pub(crate) fn new(
        tensor: &TensorRef<'a, T>,
        name: &'static str,
        needs: &[usize],
    ) -> Result<Self> {
        let grid = Grid::new::<T>(&tensor.raw, name, needs)?;
        let address = ptr::with_exposed_provenance(tensor.raw.address);
        Ok(Self { address, grid, _life: PhantomData })
    }

    /// The channels of the row at `index`; a tensor of fewer than four axes has zeros in front.
    #[inline]
    pub(crate) fn row(&self, index: [usize; 3]) -> &'a [T] {
        if self.grid.channels == 0 {
            return &[];
        }
        let offset = self.grid.offset(index);
        // SAFETY: `offset` asserts that the row is inside the dimensions; a `TensorRef` vouches
        // for 'a that every element its dimensions and strides reach can be read. Alignment and
        // the channel stride of 1 were checked in `Grid::new`.
        unsafe { slice::from_raw_parts(self.address.offset(offset), self.grid.channels) }
    }

    /// As [`Self::row`], where axes of size 1 repeat.
    #[inline]
    pub(crate) fn broadcast_row(&self, index: [usize; 3]) -> &'a [T] {
        let mut clipped = index;
        for (axis, place) in clipped.iter_mut().enumerate() {
            if self.grid.outer[axis] == 1 {
                *place = 0;
            }
        }
        self.row(clipped)
    }
}

/// A tensor to write, `[outer.0, outer.1, outer.2, channel]` with contiguous channels; no two
/// elements share an address.
pub(crate) struct RowsMut<'a, T> {
    address: *mut T,
    grid: Grid,
    _life: PhantomData<&'a mut [T]>,
}

// SAFETY: an exclusive borrow of elements, as `&mut [T]` is.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: a shared reference gives access only through `row_unshared`, whose caller promises that
// no two threads hold one row.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<'a, T: Copy> RowsMut<'a, T> {
    /// As [`Rows::new`]; the view lasts as long as the borrow of `tensor`.
    pub(crate) fn new(
        tensor: &'a mut TensorMut<'_, T>,
        name: &'static str,
        needs: &[usize],
    ) -> Result<Self> {
        let grid = Grid::new::<T>(&tensor.raw, name, needs)?;
        let address = ptr::with_exposed_provenance_mut(tensor.raw.address);
        Ok(Self { address, grid, _life: PhantomData })
    }

    /// The channels of the row at `index`, as [`Rows::row`].
    #[inline]
    pub(crate) fn row_mut(&mut self, index: [usize; 3]) -> &mut [T] {
        // SAFETY: the exclusive borrow of `self` keeps every other row slice away.
        unsafe { self.row_unshared(index) }
    }

    /// As [`Self::row_mut`], for blocks that each own some rows.
    ///
    /// # Safety
    /// While the slice lives, no other slice of the same row does, on any thread.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row_unshared(&self, index: [usize; 3]) -> &mut [T] {
        if self.grid.channels == 0 {
            return &mut [];
        }
        let offset = self.grid.offset(index);
        // SAFETY: as in `Rows::row`, with a `TensorMut`'s promise that its elements can be written
        // and do not overlap; the caller keeps this row to one slice.
        unsafe { slice::from_raw_parts_mut(self.address.offset(offset), self.grid.channels) }
    }

    /// Writes `value` everywhere.
    pub(crate) fn fill(&mut self, value: T) {
        let [first, second, third] = self.grid.outer;
        for a in 0..first {
            for b in 0..second {
                for c in 0..third {
                    self.row_mut([a, b, c]).fill(value);
                }
            }
        }
    }
}

/// A contiguous tensor to read, as one slice.
pub(crate) fn contiguous<'a, T>(
    tensor: &TensorRef<'a, T>,
    name: &'static str,
    needs: &[usize],
) -> Result<&'a [T]> {
    check::<T>(&tensor.raw, name, needs)?;
    check_contiguous(&tensor.raw, name)?;
    if tensor.raw.is_empty() {
        return Ok(&[]);
    }
    let elements = needs.iter().product();
    // SAFETY: a `TensorRef` vouches for 'a that the elements its dimensions and strides reach can
    // be read, and these are contiguous and aligned.
    Ok(unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(tensor.raw.address), elements) })
}

/// A contiguous tensor to write, as one slice.
pub(crate) fn contiguous_mut<'a, T>(
    tensor: &'a mut TensorMut<'_, T>,
    name: &'static str,
    needs: &[usize],
) -> Result<&'a mut [T]> {
    check::<T>(&tensor.raw, name, needs)?;
    check_contiguous(&tensor.raw, name)?;
    if tensor.raw.is_empty() {
        return Ok(&mut []);
    }
    let elements = needs.iter().product();
    // SAFETY: as in `contiguous`; a `TensorMut` is the only way to its elements, and it is borrowed
    // for 'a.
    Ok(unsafe {
        slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(tensor.raw.address), elements)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_strides_and_broadcast_axes() {
        let data: Vec<f32> = (0..24).map(|value| value as f32).collect();
        let dims = [1, 3, 2, 2];
        let view = TensorRef::host_strided(&data, &dims, &[0, 8, 2, 1]).unwrap();
        let rows = Rows::new(&view, "q", &dims).unwrap();
        assert_eq!(rows.row([0, 2, 1]), [18.0, 19.0]);
        assert_eq!(rows.broadcast_row([5, 1, 0]), [8.0, 9.0]);
        // Three axes: [token, head, channel].
        let view = TensorRef::host(&data, &[4, 2, 3]).unwrap();
        let rows = Rows::new(&view, "q", &[4, 2, 3]).unwrap();
        assert_eq!(rows.row([0, 3, 1]), [21.0, 22.0, 23.0]);
    }

    #[test]
    fn rows_of_an_output_are_written_where_its_strides_say() {
        let mut data = [0.0_f32; 12];
        let dims = [2, 1, 2, 2];
        let mut view = TensorMut::host_strided(&mut data, &dims, &[2, 0, 6, 1]).unwrap();
        let mut rows = RowsMut::new(&mut view, "o", &dims).unwrap();
        rows.fill(-1.0);
        rows.row_mut([1, 0, 1]).copy_from_slice(&[5.0, 6.0]);
        drop(view);
        assert_eq!(data, [-1.0, -1.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0, 5.0, 6.0, 0.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let data = [0.0_f32; 24];
        let view = |strides: &[i64]| TensorRef::host_strided(&data, &[2, 3, 2], strides).unwrap();
        let refused = Rows::new(&view(&[6, 2, 1]), "q", &[2, 3, 3]).err();
        assert!(matches!(refused, Some(Error::Dimensions { tensor: "q", .. })));
        let refused = Rows::new(&view(&[6, 2, 2]), "q", &[2, 3, 2]).err();
        assert_eq!(refused, Some(Error::ChannelStride { tensor: "q", had: 2 }));
        assert!(contiguous(&view(&[6, 2, 1]), "lse", &[2, 3, 2]).is_ok());
        let refused = contiguous(&view(&[7, 2, 1]), "lse", &[2, 3, 2]).err();
        assert!(matches!(refused, Some(Error::Argument { argument: "lse", .. })));
        let odd = data.as_ptr().cast::<u8>().wrapping_add(1).cast::<f32>();
        // SAFETY: the view is refused before anything is read through it.
        let unaligned = unsafe { TensorRef::from_raw(odd, &[2, 3], &[3, 1], Place::Host) };
        let refused = Rows::new(&unaligned.unwrap(), "k", &[2, 3]).err();
        assert!(matches!(refused, Some(Error::Argument { argument: "k", .. })));
    }
}
