//! Loading one kernel, and launching it.

use std::ffi::c_void;
use std::time::Instant;

use cudarc::driver::result::module;
use cudarc::driver::sys::{self, CUfunction_attribute};
use cudarc::driver::{DriverError, result};
use ferroflash_core::table::KernelSpec;

use super::artifacts::{self, Form};
use super::device::CudaDevice;
use super::driver::{checked, failed};
use crate::error::{Error, Result};

/// A kernel loaded on one device.
pub(crate) struct Kernel {
    pub(crate) spec: &'static KernelSpec,
    pub(crate) form: Form,
    /// How long the driver took to load it.
    pub(crate) load_milliseconds: f64,
    /// Registers of a thread, as loaded.
    pub(crate) registers: u32,
    /// Local memory of a thread, in bytes, as loaded.
    pub(crate) local_bytes: u32,
    function: sys::CUfunction,
}

// SAFETY: a function handle may be used from any thread; its module is never unloaded, since the
// device that holds it lives as long as the process.
unsafe impl Send for Kernel {}
// SAFETY: as above; launching does not change the handle.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub(crate) fn load(device: &CudaDevice, spec: &'static KernelSpec, form: Form) -> Result<Self> {
        let name = Some(spec.name);
        let image = artifacts::image(spec.name, form).ok_or_else(|| Error::Driver {
            call: "decompress",
            kernel: name,
            reason: "the embedded artifact is damaged".to_owned(),
        })?;
        let entry = std::ffi::CString::new(spec.name).map_err(|_| Error::Driver {
            call: "cuModuleGetFunction",
            kernel: name,
            reason: "the kernel's name holds a zero byte".to_owned(),
        })?;
        let _current = device.enter()?;
        let start = Instant::now();
        // SAFETY: the image is a whole cubin or zero-terminated PTX.
        let module = unsafe { module::load_data(image.as_ptr().cast()) }
            .map_err(failed("cuModuleLoadData", name))?;
        // SAFETY: the module was loaded just now and stays so.
        let function = unsafe { module::get_function(module, entry) }
            .map_err(failed("cuModuleGetFunction", name))?;
        // SAFETY: the function is alive; the value was checked against the device's limit.
        unsafe {
            result::function::set_function_attribute(
                function,
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                spec.shared_bytes as i32,
            )
        }
        .map_err(failed("cuFuncSetAttribute", name))?;
        let load_milliseconds = start.elapsed().as_secs_f64() * 1e3;
        let read = |attribute| -> Result<u32> {
            // SAFETY: the function is alive.
            let value = unsafe { result::function::get_function_attribute(function, attribute) }
                .map_err(failed("cuFuncGetAttribute", name))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(Self {
            spec,
            form,
            load_milliseconds,
            registers: read(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: read(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            function,
        })
    }

    /// Sets `bytes` bytes at `address` to zero, on `stream`.
    ///
    /// # Safety
    /// The bytes are valid on the device until then, and `stream` belongs to its context.
    pub(crate) unsafe fn clear(
        &self,
        device: &CudaDevice,
        stream: sys::CUstream,
        address: u64,
        bytes: usize,
    ) -> Result<()> {
        let _current = device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(address, 0, bytes, stream) }
            .map_err(failed("cuMemsetD8Async", Some(self.spec.name)))
    }

    /// Launches `blocks` blocks on `stream` with `params` by value.
    ///
    /// # Safety
    /// `P` is the kernel's parameter structure, and what its addresses reach is valid until the
    /// launch has completed on `stream`, which belongs to the device's context.
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        device: &CudaDevice,
        stream: sys::CUstream,
        blocks: u32,
        params: &P,
    ) -> Result<()> {
        let _current = device.enter()?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let launched: std::result::Result<(), DriverError> = checked(
            // SAFETY: the driver copies the parameters before it returns; the rest is the caller's
            // promise.
            unsafe {
                sys::cuLaunchKernel(
                    self.function,
                    blocks,
                    1,
                    1,
                    self.spec.threads,
                    1,
                    1,
                    self.spec.shared_bytes,
                    stream,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            },
        );
        launched.map_err(failed("cuLaunchKernel", Some(self.spec.name)))
    }
}
