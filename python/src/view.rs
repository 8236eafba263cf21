//! Tensors as Python passes them: an address, dimensions and strides.

use std::ptr;

use ferroflash::{Error, Lengths, MAX_RANK, Place, Result, TensorMut, TensorRef};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// `(address, dimensions, strides)` of a tensor; strides of `None` are contiguous ones.
#[derive(FromPyObject)]
pub(crate) struct Tensor<'py>(usize, Bound<'py, PyTuple>, Option<Bound<'py, PyTuple>>);

/// A tensor with its address; strides in elements. Nothing in it belongs to the interpreter.
#[derive(Clone, Copy)]
pub(crate) struct View {
    address: usize,
    rank: usize,
    dims: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
}

impl View {
    /// Reads a tensor, argument `name`, whose strides count `unit`s of an element: 1, or the
    /// bytes of an element where strides count bytes.
    pub(crate) fn read(tensor: &Tensor<'_>, name: &str, unit: usize) -> PyResult<Self> {
        let Tensor(address, dims, strides) = tensor;
        let mut view = Self { address: *address, rank: 0, dims: [1; 4], strides: [0; 4] };
        view.rank = integers(dims, &mut view.dims, name)?;
        match strides {
            None => view.strides = contiguous(&view.dims, view.rank),
            Some(strides) => {
                if integers(strides, &mut view.strides, name)? != view.rank {
                    let (had, needs) = (strides.len(), view.rank);
                    let message = format!("{name}: has {had} strides for {needs} axes");
                    return Err(PyValueError::new_err(message));
                }
                view.in_elements(name, unit as i64)?;
            }
        }
        if view.address == 0 && !view.dims().contains(&0) {
            return Err(PyValueError::new_err(format!("{name}: has no memory of its own")));
        }
        Ok(view)
    }

    /// Turns strides in units of an element into strides in elements.
    fn in_elements(&mut self, name: &str, unit: i64) -> PyResult<()> {
        let axes = self.strides.iter_mut().zip(self.dims).take(self.rank);
        for (stride, dim) in axes {
            if dim > 1 && *stride % unit != 0 {
                return Err(PyValueError::new_err(format!(
                    "{name}: has a stride of {stride} bytes, but it must be a multiple of the \
                     {unit} bytes of an element"
                )));
            }
            *stride /= unit;
        }
        Ok(())
    }

    /// Dimensions.
    fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Strides in elements.
    fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// The tensor, to be read.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn tensor<'a, T>(&self, place: Place) -> Result<TensorRef<'a, T>> {
        let address = ptr::with_exposed_provenance(self.address);
        // SAFETY: the caller's promise.
        unsafe { TensorRef::from_raw(address, self.dims(), self.strides(), place) }
    }

    /// The tensor, to be written.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn tensor_mut<'a, T>(&self, place: Place) -> Result<TensorMut<'a, T>> {
        let address = ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the caller's promise.
        unsafe { TensorMut::from_raw(address, self.dims(), self.strides(), place) }
    }

    /// Lengths or offsets of items: a contiguous tensor of one axis, argument `name`.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`], of `i32`; host memory stays as it is for `'a`.
    pub(crate) unsafe fn lengths<'a>(
        &self,
        place: Place,
        argument: &'static str,
    ) -> Result<Lengths<'a>> {
        if self.rank != 1 || (self.dims[0] > 1 && self.strides[0] != 1) {
            let had = format!("dimensions {:?}, strides {:?}", self.dims(), self.strides());
            let needs = "one axis, contiguous".to_owned();
            return Err(Error::Argument { argument, had, needs });
        }
        if !self.address.is_multiple_of(align_of::<i32>()) {
            let had = format!("address {:#x}", self.address);
            let needs = "aligned to its elements of 4 bytes".to_owned();
            return Err(Error::Argument { argument, had, needs });
        }
        match place {
            // An empty tensor may have no address, which a slice must have.
            Place::Host if self.address == 0 => Ok(Lengths::Host(&[])),
            Place::Host => {
                let values = ptr::with_exposed_provenance(self.address);
                // SAFETY: the caller's promise; the tensor is contiguous.
                Ok(Lengths::Host(unsafe { std::slice::from_raw_parts(values, self.dims[0]) }))
            }
            // SAFETY: the caller's promise.
            Place::Cuda(_) => Ok(Lengths::Device(unsafe { self.tensor(place)? })),
        }
    }
}

/// Strides of a contiguous tensor, in elements.
fn contiguous(dims: &[usize; MAX_RANK], rank: usize) -> [i64; MAX_RANK] {
    let mut strides = [1; MAX_RANK];
    for axis in (1..rank).rev() {
        strides[axis - 1] = i64::saturating_mul(strides[axis], dims[axis] as i64);
    }
    strides
}

/// Reads the integers of a tuple; returns how many there are, 1 to 4.
pub(crate) fn integers<'py, T>(
    tuple: &Bound<'py, PyTuple>,
    values: &mut [T; MAX_RANK],
    name: &str,
) -> PyResult<usize>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let count = tuple.len();
    if !(1..=MAX_RANK).contains(&count) {
        let message = format!("{name}: has {count} axes, but it must have 1 to {MAX_RANK}");
        return Err(PyValueError::new_err(message));
    }
    for (axis, value) in values.iter_mut().enumerate().take(count) {
        *value = field(tuple, axis, name)?;
    }
    Ok(count)
}

/// Element `index` of a tuple; what does not convert is reported as argument `name`.
pub(crate) fn field<'py, T>(tuple: &Bound<'py, PyTuple>, index: usize, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    tuple.get_borrowed_item(index)?.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        PyTypeError::new_err(format!("{name}: {}", error.value(tuple.py())))
    })
}
