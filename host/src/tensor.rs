//! Borrowed views of tensors, on the host or on a device.

use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use crate::error::{Error, Result};

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("cpu"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The most axes a tensor may have.
pub const MAX_RANK: usize = 4;

/// Address, dimensions and strides, without type or lifetime.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Raw {
    pub(crate) address: usize,
    dims: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
    rank: usize,
    pub(crate) place: Place,
    /// The stream whose events order accesses, where cudarc keeps them.
    pub(crate) stream: Option<usize>,
}

impl Raw {
    pub(crate) fn new(
        address: usize,
        dims: &[usize],
        strides: &[i64],
        place: Place,
    ) -> Result<Self> {
        if dims.is_empty() || dims.len() > MAX_RANK {
            return Err(Error::argument(
                "dims",
                format!("{} axes", dims.len()),
                format!("1 to {MAX_RANK} axes"),
            ));
        }
        if strides.len() != dims.len() {
            return Err(Error::argument(
                "strides",
                format!("{} strides for {} axes", strides.len(), dims.len()),
                "one stride an axis",
            ));
        }
        let mut raw = Self {
            address,
            dims: [1; MAX_RANK],
            strides: [0; MAX_RANK],
            rank: dims.len(),
            place,
            stream: None,
        };
        raw.dims[..dims.len()].copy_from_slice(dims);
        raw.strides[..dims.len()].copy_from_slice(strides);
        Ok(raw)
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.dims().contains(&0)
    }

    /// Whether elements follow one another in the order of the axes.
    pub(crate) fn is_contiguous(&self) -> bool {
        let packed = contiguous_strides(self.dims());
        let axes = self.dims().iter().zip(self.strides()).zip(&packed);
        self.is_empty() || axes.into_iter().all(|((dim, had), packed)| *dim == 1 || had == packed)
    }

    /// Lowest and highest element offset reached; `None` if there are no elements. In 128 bits,
    /// so that absurd strides are found out rather than wrapped.
    fn reach(&self) -> Option<(i128, i128)> {
        if self.is_empty() {
            return None;
        }
        let mut reach = (0, 0);
        for (&dim, &stride) in self.dims().iter().zip(self.strides()) {
            let step = (dim as i128 - 1) * stride as i128;
            let side = if step < 0 { &mut reach.0 } else { &mut reach.1 };
            *side = i128::saturating_add(*side, step);
        }
        Some(reach)
    }

    fn within(self, tensor: &'static str, elements: usize) -> Result<Self> {
        match self.reach() {
            Some((first, last)) if first < 0 || last >= elements as i128 => {
                let clip = |x: i128| x.clamp(i64::MIN as i128, i64::MAX as i128) as i64;
                Err(Error::OutOfBounds { tensor, first: clip(first), last: clip(last), elements })
            }
            _ => Ok(self),
        }
    }

    fn ordered_on(self, stream: &CudaStream) -> Self {
        Self { stream: Some(stream.cu_stream() as usize), ..self }
    }

    /// Whether two elements share an address, which an output may not.
    fn overlaps_itself(&self) -> bool {
        let mut axes: Vec<(i128, usize)> = self
            .dims()
            .iter()
            .zip(self.strides())
            .filter(|(dim, _)| **dim > 1)
            .map(|(&dim, &stride)| ((stride as i128).abs(), dim))
            .collect();
        axes.sort_unstable();
        let mut reach = 0;
        for (stride, dim) in axes {
            if stride <= reach {
                return true;
            }
            reach = i128::saturating_add(reach, stride.saturating_mul(dim as i128 - 1));
        }
        false
    }
}

/// The device of memory and of the stream that is to use it.
fn shared_place(memory: &CudaStream, stream: &CudaStream) -> Result<Place> {
    let [had, needs] = [memory, stream].map(|stream| Place::Cuda(stream.context().ordinal()));
    if had != needs {
        let (had, needs) = (had.to_string(), needs.to_string());
        return Err(Error::Placement { tensor: "data", had, needs });
    }
    Ok(had)
}

/// Strides of a contiguous tensor of dimensions `dims`, in elements.
pub fn contiguous_strides(dims: &[usize]) -> Vec<i64> {
    let mut strides = vec![1_i64; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(dims[axis] as i64);
    }
    strides
}

/// A tensor to read: up to four axes, strides in elements, on the host or on a device.
pub struct TensorRef<'a, T> {
    pub(crate) raw: Raw,
    _order: Option<SyncOnDrop<'a>>,
    _life: PhantomData<&'a [T]>,
}

/// A tensor to write: as [`TensorRef`], with no two elements at one address.
pub struct TensorMut<'a, T> {
    pub(crate) raw: Raw,
    _order: Option<SyncOnDrop<'a>>,
    _life: PhantomData<&'a mut [T]>,
}

// SAFETY: a TensorRef is a shared borrow of elements; the guard it may hold only records an event
// on a stream when it is dropped, which the driver allows from any thread.
unsafe impl<T: Sync> Send for TensorRef<'_, T> {}
// SAFETY: as above; no method changes anything through a shared reference.
unsafe impl<T: Sync> Sync for TensorRef<'_, T> {}
// SAFETY: a TensorMut is an exclusive borrow of elements.
unsafe impl<T: Send> Send for TensorMut<'_, T> {}

impl<'a, T> TensorRef<'a, T> {
    /// A contiguous host tensor.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if `data` holds fewer elements than `dims` needs.
    pub fn host(data: &'a [T], dims: &[usize]) -> Result<Self> {
        Self::host_strided(data, dims, &contiguous_strides(dims))
    }

    /// A host tensor with strides in elements; 0 repeats an axis.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if a stride reaches outside `data`.
    pub fn host_strided(data: &'a [T], dims: &[usize], strides: &[i64]) -> Result<Self> {
        let raw = Raw::new(data.as_ptr() as usize, dims, strides, Place::Host)?
            .within("tensor", data.len())?;
        Ok(Self { raw, _order: None, _life: PhantomData })
    }

    /// A contiguous tensor in a cudarc slice or view. The read is ordered after the slice's last
    /// write and before its next one, by cudarc's own events; the plan must run on `stream`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the slice holds fewer elements than `dims` needs;
    /// [`Error::Placement`] if it lies on another device than `stream`.
    pub fn cuda<S: DevicePtr<T>>(
        data: &'a S,
        stream: &'a CudaStream,
        dims: &[usize],
    ) -> Result<Self> {
        let place = shared_place(data.stream(), stream)?;
        let (address, order) = data.device_ptr(stream);
        let raw = Raw::new(address as usize, dims, &contiguous_strides(dims), place)?
            .within("tensor", data.len())?
            .ordered_on(stream);
        Ok(Self { raw, _order: Some(order), _life: PhantomData })
    }

    /// A tensor at an address that the caller vouches for.
    ///
    /// # Errors
    /// [`Error::Argument`] for no axes, more than four, or strides of another number.
    ///
    /// # Safety
    /// Every element that `dims` and `strides` reach is valid to read at `place` for `'a`, until
    /// the work that reads it has completed on its stream.
    pub unsafe fn from_raw(
        address: *const T,
        dims: &[usize],
        strides: &[i64],
        place: Place,
    ) -> Result<Self> {
        let raw = Raw::new(address as usize, dims, strides, place)?;
        Ok(Self { raw, _order: None, _life: PhantomData })
    }

    /// The same tensor for a shorter time; this one keeps the guard that orders its accesses.
    pub(crate) fn reborrow(&self) -> TensorRef<'_, T> {
        TensorRef { raw: self.raw, _order: None, _life: PhantomData }
    }

    /// Dimensions.
    pub fn dims(&self) -> &[usize] {
        self.raw.dims()
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        self.raw.strides()
    }

    /// Where the tensor lies.
    pub fn place(&self) -> Place {
        self.raw.place
    }

    /// The same tensor with axes `a` and `b` exchanged.
    ///
    /// # Errors
    /// [`Error::Argument`] if the tensor has no such axis.
    pub fn transposed(mut self, a: usize, b: usize) -> Result<Self> {
        if a.max(b) >= self.raw.rank {
            return Err(Error::argument("axis", a.max(b), format!("under {}", self.raw.rank)));
        }
        self.raw.dims.swap(a, b);
        self.raw.strides.swap(a, b);
        Ok(self)
    }
}

impl<'a, T> TensorMut<'a, T> {
    /// A contiguous host tensor.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if `data` holds fewer elements than `dims` needs.
    pub fn host(data: &'a mut [T], dims: &[usize]) -> Result<Self> {
        Self::host_strided(data, dims, &contiguous_strides(dims))
    }

    /// A host tensor with strides in elements.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if a stride reaches outside `data`; [`Error::Argument`] if two
    /// elements would share an address.
    pub fn host_strided(data: &'a mut [T], dims: &[usize], strides: &[i64]) -> Result<Self> {
        let raw = Raw::new(data.as_ptr() as usize, dims, strides, Place::Host)?
            .within("tensor", data.len())?;
        Self::exclusive(raw, None)
    }

    /// A contiguous tensor in a cudarc slice; ordered as [`TensorRef::cuda`].
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the slice holds fewer elements than `dims` needs;
    /// [`Error::Placement`] if it lies on another device than `stream`.
    pub fn cuda<S: DevicePtrMut<T>>(
        data: &'a mut S,
        stream: &'a CudaStream,
        dims: &[usize],
    ) -> Result<Self> {
        let elements = data.len();
        let place = shared_place(data.stream(), stream)?;
        let (address, order) = data.device_ptr_mut(stream);
        let raw = Raw::new(address as usize, dims, &contiguous_strides(dims), place)?
            .within("tensor", elements)?
            .ordered_on(stream);
        Self::exclusive(raw, Some(order))
    }

    /// A tensor at an address that the caller vouches for.
    ///
    /// # Errors
    /// [`Error::Argument`] for no axes, more than four, strides of another number, or two elements
    /// at one address.
    ///
    /// # Safety
    /// Every element that `dims` and `strides` reach is valid to write at `place` for `'a`, and
    /// nothing else reads or writes it until the work that writes it has completed on its stream.
    pub unsafe fn from_raw(
        address: *mut T,
        dims: &[usize],
        strides: &[i64],
        place: Place,
    ) -> Result<Self> {
        Self::exclusive(Raw::new(address as usize, dims, strides, place)?, None)
    }

    fn exclusive(raw: Raw, order: Option<SyncOnDrop<'a>>) -> Result<Self> {
        if !raw.is_empty() && raw.overlaps_itself() {
            return Err(Error::argument(
                "strides",
                format!("{:?} for dimensions {:?}, which overlap", raw.strides(), raw.dims()),
                "such that no two elements of an output share an address",
            ));
        }
        Ok(Self { raw, _order: order, _life: PhantomData })
    }

    /// Dimensions.
    pub fn dims(&self) -> &[usize] {
        self.raw.dims()
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        self.raw.strides()
    }

    /// Where the tensor lies.
    pub fn place(&self) -> Place {
        self.raw.place
    }

    /// The same tensor with axes `a` and `b` exchanged.
    ///
    /// # Errors
    /// [`Error::Argument`] if the tensor has no such axis.
    pub fn transposed(mut self, a: usize, b: usize) -> Result<Self> {
        if a.max(b) >= self.raw.rank {
            return Err(Error::argument("axis", a.max(b), format!("under {}", self.raw.rank)));
        }
        self.raw.dims.swap(a, b);
        self.raw.strides.swap(a, b);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_stay_inside_their_memory() {
        let data = [0.0_f32; 24];
        assert!(TensorRef::host(&data, &[2, 3, 4]).is_ok());
        assert!(TensorRef::host_strided(&data, &[5, 4], &[0, 1]).is_ok());
        let outside = TensorRef::host_strided(&data, &[2, 4], &[21, 1]).err();
        let error = Error::OutOfBounds { tensor: "tensor", first: 0, last: 24, elements: 24 };
        assert_eq!(outside, Some(error));
        let huge = TensorRef::host_strided(&data, &[3, 4], &[i64::MAX, 1]).err();
        assert!(matches!(huge, Some(Error::OutOfBounds { .. })));
        assert!(TensorRef::host_strided(&data, &[2, 4], &[-4, 1]).is_err());
        let absurd = TensorRef::host_strided(&data, &[usize::MAX; 2], &[i64::MAX; 2]).err();
        assert!(matches!(absurd, Some(Error::OutOfBounds { .. })));
    }

    #[test]
    fn outputs_may_not_overlap_themselves() {
        let mut data = [0.0_f32; 24];
        assert!(TensorMut::host_strided(&mut data, &[3, 2, 4], &[4, 12, 1]).is_ok());
        assert!(TensorMut::host_strided(&mut data, &[3, 4], &[0, 1]).is_err());
        assert!(TensorMut::host_strided(&mut data, &[3, 4], &[3, 1]).is_err());
    }
}
