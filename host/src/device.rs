//! Where a call runs: a device, and a stream of it.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};

use crate::cuda::device::{self, CudaDevice, Limits};
use crate::error::{Error, Result};
use crate::tensor::Place;

/// A device that attention runs on. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Cpu,
    Cuda(Arc<CudaDevice>),
}

impl Device {
    /// The CPU.
    pub const fn cpu() -> Self {
        Self { kind: Kind::Cpu }
    }

    /// The CUDA device with this ordinal.
    ///
    /// # Errors
    /// [`Error::NoDriver`] without a usable driver, [`Error::NoDevice`] for an ordinal it does not
    /// see.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Ok(Self { kind: Kind::Cuda(CudaDevice::get(ordinal)?) })
    }

    /// The first CUDA device, or the CPU where there is none.
    pub fn best() -> Self {
        Self::cuda(0).unwrap_or_else(|_| Self::cpu())
    }

    /// CUDA devices the driver sees.
    ///
    /// # Errors
    /// [`Error::NoDriver`] without a usable driver.
    pub fn cuda_count() -> Result<usize> {
        device::count()
    }

    /// Where its tensors lie.
    pub fn place(&self) -> Place {
        match &self.kind {
            Kind::Cpu => Place::Host,
            Kind::Cuda(device) => Place::Cuda(device.context.ordinal()),
        }
    }

    /// What a CUDA device can do; `None` for the CPU.
    pub fn limits(&self) -> Option<&Limits> {
        match &self.kind {
            Kind::Cpu => None,
            Kind::Cuda(device) => Some(&device.limits),
        }
    }

    /// cudarc's context of a CUDA device, to make slices and streams with; `None` for the CPU.
    pub fn context(&self) -> Option<&Arc<CudaContext>> {
        self.cuda_device().map(|device| &device.context)
    }

    /// The stream that work goes to if the caller has none: the CUDA default stream, or the calling
    /// thread on the CPU.
    pub fn default_stream(&self) -> Stream {
        match &self.kind {
            Kind::Cpu => Stream::host(),
            Kind::Cuda(device) => Stream::from(device.context.default_stream()),
        }
    }

    pub(crate) fn cuda_device(&self) -> Option<&Arc<CudaDevice>> {
        match &self.kind {
            Kind::Cpu => None,
            Kind::Cuda(device) => Some(device),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Cpu => f.write_str("cpu"),
            Kind::Cuda(device) => write!(f, "{} ({})", self.place(), device.limits.name),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}

/// The queue a call's work goes to. CPU work is done when the call returns.
#[derive(Clone)]
pub struct Stream {
    place: Place,
    raw: sys::CUstream,
    owner: Option<Arc<CudaStream>>,
}

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders concurrent launches itself.
unsafe impl Sync for Stream {}

impl Stream {
    /// The calling thread.
    pub const fn host() -> Self {
        Self { place: Place::Host, raw: std::ptr::null_mut(), owner: None }
    }

    /// A stream made elsewhere, by its `CUstream` handle; null is the default stream.
    ///
    /// # Safety
    /// `handle` is a stream of the primary context of device `ordinal` and outlives this value.
    pub const unsafe fn from_raw(ordinal: usize, handle: *mut c_void) -> Self {
        Self { place: Place::Cuda(ordinal), raw: handle.cast(), owner: None }
    }

    /// Waits until everything queued so far has completed.
    ///
    /// # Errors
    /// The driver's, among them a fault of a kernel that ran before.
    pub fn synchronize(&self) -> Result<()> {
        let Place::Cuda(ordinal) = self.place else { return Ok(()) };
        let device = CudaDevice::get(ordinal)?;
        let _current = device.enter()?;
        // SAFETY: the stream is alive: it is owned, or its maker promised so.
        unsafe { cudarc::driver::result::stream::synchronize(self.raw) }
            .map_err(crate::cuda::driver::failed("cuStreamSynchronize", None))
    }

    /// The `CUstream` handle of a stream of `place`.
    pub(crate) fn handle(&self, place: Place) -> Result<sys::CUstream> {
        if self.place == place {
            Ok(self.raw)
        } else {
            Err(Error::Placement {
                tensor: "stream",
                had: self.place.to_string(),
                needs: place.to_string(),
            })
        }
    }

    /// The cudarc stream, where this was made from one.
    pub fn cudarc(&self) -> Option<&Arc<CudaStream>> {
        self.owner.as_ref()
    }
}

impl From<Arc<CudaStream>> for Stream {
    fn from(stream: Arc<CudaStream>) -> Self {
        Self {
            place: Place::Cuda(stream.context().ordinal()),
            raw: stream.cu_stream(),
            owner: Some(stream),
        }
    }
}
