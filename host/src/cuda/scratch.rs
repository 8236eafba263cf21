//! Device memory for the length of one call.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::CudaDevice;
use super::driver::words;
use crate::error::{Error, Result};
use crate::tensor::{Place, Raw};

/// Bytes allocated in a stream's order and freed in it.
pub(crate) struct Scratch {
    device: Arc<CudaDevice>,
    stream: sys::CUstream,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Scratch {
    pub(crate) fn new(
        device: &Arc<CudaDevice>,
        stream: sys::CUstream,
        bytes: usize,
    ) -> Result<Self> {
        let _current = device.enter()?;
        // SAFETY: the stream is of the device's context.
        let address = unsafe { result::malloc_async(stream, bytes) }.map_err(|error| {
            if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                Error::OutOfMemory { device: device.limits.name.clone(), bytes }
            } else {
                Error::Driver { call: "cuMemAllocAsync", kernel: None, reason: words(error) }
            }
        })?;
        Ok(Self { device: device.clone(), stream, address, bytes })
    }

    /// The bytes as a tensor.
    pub(crate) fn raw(&self) -> Result<Raw> {
        let place = Place::Cuda(self.device.context.ordinal());
        Raw::new(self.address as usize, &[self.bytes], &[1], place)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: the address came from the same stream, and what used it was queued before.
            let _ = unsafe { result::free_async(self.address, self.stream) };
        }
    }
}
