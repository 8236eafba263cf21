//! Finding the driver, and calling it without surprises.
//!
//! cudarc panics where the library or one of its symbols is missing. [`probe`] looks both up
//! first, so that a machine without a driver, or with one too old, gets an error instead.

use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::{Error, Result};

/// Every driver function this library reaches, directly or through cudarc.
const SYMBOLS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAllocAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// Checks, once, that the driver is there with every function needed.
pub(crate) fn probe() -> Result<()> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // SAFETY: opens and closes the driver's library, whose initialisers are NVIDIA's own.
            if !unsafe { sys::is_culib_present() } {
                return Err("libcuda was not found; install the NVIDIA driver".to_owned());
            }
            // SAFETY: the library was found just now.
            let library = unsafe { sys::culib() };
            for symbol in SYMBOLS {
                // SAFETY: the symbol is only looked up, not called.
                if unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err() {
                    return Err(format!(
                        "libcuda has no {symbol}; a driver for CUDA 12.0 or later is needed"
                    ));
                }
            }
            result::init().map_err(|error| format!("cuInit: {}", words(error)))
        })
        .clone()
        .map_err(Error::NoDriver)
}

/// The driver's own words for an error.
pub(crate) fn words(error: DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("{:?}", error.0),
    }
}

/// An error of the driver's function `call`.
pub(crate) fn failed(
    call: &'static str,
    kernel: Option<&'static str>,
) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Driver { call, kernel, reason: words(error) }
}

/// `Ok` or the driver's error.
pub(crate) fn checked(code: CUresult) -> std::result::Result<(), DriverError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError(code)) }
}

/// Makes a context current and, when dropped, the caller's again.
pub(crate) struct Current {
    before: Option<sys::CUcontext>,
}

impl Current {
    pub(crate) fn enter(context: &CudaContext) -> Result<Self> {
        let now = result::ctx::get_current().map_err(failed("cuCtxGetCurrent", None))?;
        if now == Some(context.cu_ctx()) {
            return Ok(Self { before: None });
        }
        // SAFETY: the context is alive, as `context` holds it.
        unsafe { result::ctx::set_current(context.cu_ctx()) }
            .map_err(failed("cuCtxSetCurrent", None))?;
        Ok(Self { before: Some(now.unwrap_or(std::ptr::null_mut())) })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current before, or is null, which leaves none current.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}
