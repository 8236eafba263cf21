//! One CUDA device: what it is, and the kernels loaded on it so far.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, DriverError, result};
use ferroflash_core::table::KernelSpec;

use super::artifacts::Form;
use super::driver::{Current, checked, failed, probe};
use super::kernel::Kernel;
use crate::error::{Error, Result};

/// A device's limits, as planning needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Name, as the driver gives it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory a block may ask for, in bytes.
    pub shared_bytes_per_block: u32,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_bytes_per_multiprocessor: u32,
    /// Second-level cache, in bytes.
    pub l2_bytes: u64,
    /// Device memory, in bytes.
    pub memory_bytes: u64,
    /// CUDA version of the driver, as 1000 · major + 10 · minor.
    pub driver_version: u32,
}

/// A device and its loaded kernels. One a process and ordinal.
pub(crate) struct CudaDevice {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) limits: Limits,
    kernels: Mutex<HashMap<(&'static str, Form), Arc<Kernel>>>,
}

/// Devices the driver sees.
pub(crate) fn count() -> Result<usize> {
    probe()?;
    let count = CudaContext::device_count().map_err(failed("cuDeviceGetCount", None))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl CudaDevice {
    pub(crate) fn get(ordinal: usize) -> Result<Arc<Self>> {
        static DEVICES: OnceLock<Mutex<HashMap<usize, Arc<CudaDevice>>>> = OnceLock::new();
        let count = count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let devices = DEVICES.get_or_init(Mutex::default);
        let mut devices = devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Arc::new(Self::open(ordinal)?);
        devices.insert(ordinal, device.clone());
        Ok(device)
    }

    fn open(ordinal: usize) -> Result<Self> {
        // Creating a context makes it current; the caller's is put back.
        let before = result::ctx::get_current().map_err(failed("cuCtxGetCurrent", None))?;
        let context =
            CudaContext::new(ordinal).map_err(failed("cuDevicePrimaryCtxRetain", None))?;
        let limits = limits(&context).map_err(failed("cuDeviceGetAttribute", None));
        // SAFETY: it was current before, or is null, which leaves none current.
        unsafe { result::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) }
            .map_err(failed("cuCtxSetCurrent", None))?;
        Ok(Self { context, limits: limits?, kernels: Mutex::default() })
    }

    pub(crate) fn enter(&self) -> Result<Current> {
        Current::enter(&self.context)
    }

    /// The kernel, loaded at its first use. Machine code is preferred where it is this device's;
    /// `form` insists on one.
    pub(crate) fn kernel(
        &self,
        spec: &'static KernelSpec,
        form: Option<Form>,
    ) -> Result<Arc<Kernel>> {
        let (major, minor) = self.limits.capability;
        let forms: &[Form] = match form {
            Some(Form::Cubin) => &[Form::Cubin],
            Some(Form::Ptx) => &[Form::Ptx],
            None if spec.family.cubin_runs_on(major, minor) => &[Form::Cubin, Form::Ptx],
            None => &[Form::Ptx],
        };
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut failure = None;
        for &form in forms {
            if let Some(kernel) = kernels.get(&(spec.name, form)) {
                return Ok(kernel.clone());
            }
            match Kernel::load(self, spec, form) {
                Ok(kernel) => {
                    let kernel = Arc::new(kernel);
                    kernels.insert((spec.name, form), kernel.clone());
                    return Ok(kernel);
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| Error::NoDriver("no form of the kernel loads".to_owned())))
    }
}

fn limits(context: &CudaContext) -> std::result::Result<Limits, DriverError> {
    let attribute = |attribute| -> std::result::Result<u32, DriverError> {
        Ok(u32::try_from(context.attribute(attribute)?).unwrap_or(0))
    };
    let mut driver_version = 0;
    // SAFETY: writes one integer.
    checked(unsafe { sys::cuDriverGetVersion(&raw mut driver_version) })?;
    use CUdevice_attribute as A;
    Ok(Limits {
        name: context.name()?,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: attribute(
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        shared_bytes_per_multiprocessor: attribute(
            A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        l2_bytes: u64::from(attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: context.total_mem()? as u64,
        driver_version: u32::try_from(driver_version).unwrap_or(0),
    })
}
