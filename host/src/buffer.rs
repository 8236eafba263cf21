//! Memory for those who have none of their own: a vector on the host or on a device.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};

use crate::cuda::driver::{Current, failed, words};
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

/// Elements on one device.
pub struct Buffer<T> {
    memory: Memory<T>,
}

enum Memory<T> {
    Host(Vec<T>),
    Cuda { slice: ManuallyDrop<CudaSlice<T>>, elements: usize },
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let Memory::Cuda { slice, .. } = &mut self.memory else { return };
        // cudarc frees in whatever context is current, and the caller may have another or none.
        let context = slice.context().clone();
        let _current = Current::enter(&context);
        // SAFETY: dropped here alone, and never used again.
        unsafe { ManuallyDrop::drop(slice) };
    }
}

impl<T: DeviceRepr + Copy + Default> Buffer<T> {
    /// `elements` default elements on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn new(device: &Device, elements: usize) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory {
            device: device.to_string(),
            bytes: elements.saturating_mul(size_of::<T>()),
        };
        if device.cuda_device().is_some() {
            let mut host = Vec::new();
            host.try_reserve_exact(elements).map_err(|_| out_of_memory())?;
            host.resize(elements, T::default());
            return Self::from_slice(device, &host);
        }
        let mut host = Vec::new();
        host.try_reserve_exact(elements).map_err(|_| out_of_memory())?;
        host.resize(elements, T::default());
        Ok(Self { memory: Memory::Host(host) })
    }

    /// A copy of `data` on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or the driver's.
    pub fn from_slice(device: &Device, data: &[T]) -> Result<Self> {
        let Some(cuda) = device.cuda_device() else {
            return Ok(Self { memory: Memory::Host(data.to_vec()) });
        };
        let _current = cuda.enter()?;
        let stream = cuda.context.default_stream();
        // An empty allocation is refused by the driver; one element stands in for none.
        let slice = if data.is_empty() {
            stream.clone_htod(&[T::default()])
        } else {
            stream.clone_htod(data)
        }
        .map_err(|error| match error.0 {
            cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Error::OutOfMemory { device: device.to_string(), bytes: size_of_val(data) }
            }
            _ => Error::Driver { call: "cuMemcpyHtoDAsync", kernel: None, reason: words(error) },
        })?;
        Ok(Self { memory: Memory::Cuda { slice: ManuallyDrop::new(slice), elements: data.len() } })
    }

    /// Elements held.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Host(data) => data.len(),
            Memory::Cuda { elements, .. } => *elements,
        }
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A contiguous tensor of dimensions `dims`, to read on `stream`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if it holds fewer elements; [`Error::Placement`] if `stream` is of
    /// another device.
    pub fn tensor<'a>(&'a self, stream: &'a Stream, dims: &[usize]) -> Result<TensorRef<'a, T>> {
        match &self.memory {
            Memory::Host(data) => TensorRef::host(data, dims),
            Memory::Cuda { slice, .. } => TensorRef::cuda(&**slice, cudarc_stream(stream)?, dims),
        }
    }

    /// A contiguous tensor of dimensions `dims`, to write on `stream`.
    ///
    /// # Errors
    /// As [`Buffer::tensor`].
    pub fn tensor_mut<'a>(
        &'a mut self,
        stream: &'a Stream,
        dims: &[usize],
    ) -> Result<TensorMut<'a, T>> {
        match &mut self.memory {
            Memory::Host(data) => TensorMut::host(data, dims),
            Memory::Cuda { slice, .. } => {
                TensorMut::cuda(&mut **slice, cudarc_stream(stream)?, dims)
            }
        }
    }

    /// The elements, once everything queued on `stream` has completed.
    ///
    /// # Errors
    /// The driver's, among them a fault of a kernel that ran before.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>> {
        match &self.memory {
            Memory::Host(data) => Ok(data.clone()),
            Memory::Cuda { slice, elements } => {
                stream.synchronize()?;
                let device = slice.context().clone();
                let _current = Current::enter(&device)?;
                let mut data = cudarc_stream(stream)?
                    .clone_dtoh(&**slice)
                    .map_err(failed("cuMemcpyDtoHAsync", None))?;
                stream.synchronize()?;
                data.truncate(*elements);
                Ok(data)
            }
        }
    }
}

fn cudarc_stream(stream: &Stream) -> Result<&Arc<CudaStream>> {
    stream.cudarc().ok_or_else(|| Error::Placement {
        tensor: "stream",
        had: "not a cudarc stream".to_owned(),
        needs: "a stream of the buffer's device, made by cudarc".to_owned(),
    })
}
