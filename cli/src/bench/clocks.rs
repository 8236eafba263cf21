//! What a GPU says of its clocks, through NVML where its library is; no setting is touched.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::CUdevice_attribute as A;
use ferroflash::Device;
use libloading::Library;

use super::record::Clock;

/// Why clocks are held down, by the bits of NVML's `nvmlClocksEventReasons`. An idle GPU and a
/// clock that was asked for are no throttling.
const REASONS: &[(c_ulonglong, &str)] = &[
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal, by software"),
    (0x40, "thermal, by hardware"),
    (0x80, "power brake"),
];
/// `NVML_CLOCK_SM` and `NVML_CLOCK_MEM`.
const CLOCKS: [c_int; 2] = [1, 2];
/// Bytes of a version, `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const VERSION_BYTES: usize = 80;

/// An `nvmlDevice_t`.
type Handle = *mut c_void;

/// One GPU through NVML, or why not.
pub(super) struct Clocks {
    found: Result<Nvml, String>,
}

/// The library, initialised, and a device of it.
struct Nvml {
    library: Library,
    device: Handle,
}

impl Clocks {
    /// Looks for the device's clocks.
    pub(super) fn of(device: &Device) -> Self {
        Self { found: Nvml::open(device) }
    }

    /// How clocks are read, or why they are not.
    pub(super) fn words(&self) -> String {
        match &self.found {
            Ok(_) => "read through NVML while the device worked".to_owned(),
            Err(why) => format!("not read: {why}"),
        }
    }

    /// The driver's version.
    pub(super) fn driver(&self) -> Option<String> {
        self.found.as_ref().ok().and_then(Nvml::driver)
    }

    /// The device now.
    pub(super) fn read(&self) -> Option<Clock> {
        self.found.as_ref().ok().map(Nvml::clock)
    }
}

impl Nvml {
    fn open(device: &Device) -> Result<Self, String> {
        let context = device.context().ok_or("the device is a CPU")?;
        let part = |attribute| context.attribute(attribute).map_err(|why| why.to_string());
        let bus = format!(
            "{:08x}:{:02x}:{:02x}.0",
            part(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            part(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            part(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
        );
        let bus = CString::new(bus).map_err(|why| why.to_string())?;
        let name = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
        // SAFETY: the library's initialisers are NVIDIA's own, as the driver's are.
        let library = unsafe { Library::new(name) }.map_err(|_| format!("{name} was not found"))?;
        let mut found = Self { library, device: std::ptr::null_mut() };
        // SAFETY: the function has this type, and takes nothing.
        unsafe {
            let init = found.function::<unsafe extern "C" fn() -> c_int>("nvmlInit_v2")?;
            success("nvmlInit_v2", init())?;
        }
        let name = "nvmlDeviceGetHandleByPciBusId_v2";
        type ByBus = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the function has this type, reads a string and writes one handle.
        unsafe {
            let by_bus = found.function::<ByBus>(name)?;
            success(name, by_bus(bus.as_ptr(), &raw mut handle))?;
        }
        found.device = handle;
        Ok(found)
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` is the type of the function.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: the caller's promise.
        let function = unsafe { self.library.get::<F>(name.as_bytes()) };
        function.map(|function| *function).map_err(|_| format!("NVML has no {name}"))
    }

    fn clock(&self) -> Clock {
        let [sm_mhz, memory_mhz] =
            CLOCKS.map(|kind| self.number("nvmlDeviceGetClockInfo", Some(kind)));
        let milliwatts = self.number("nvmlDeviceGetPowerUsage", None);
        Clock {
            sm_mhz,
            memory_mhz,
            celsius: self.number("nvmlDeviceGetTemperature", Some(0)),
            watts: milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3),
            throttled_by: reasons(self.reasons().unwrap_or(0)),
        }
    }

    /// What a function of the device, and of a kind if it takes one, says.
    fn number(&self, name: &str, kind: Option<c_int>) -> Option<u32> {
        type Plain = unsafe extern "C" fn(Handle, *mut c_uint) -> c_int;
        type Kinded = unsafe extern "C" fn(Handle, c_int, *mut c_uint) -> c_int;
        let mut number = 0;
        // SAFETY: NVML's functions of one number have these types; the handle is its own, and one
        // number is written.
        let code = unsafe {
            match kind {
                None => self.function::<Plain>(name).ok()?(self.device, &raw mut number),
                Some(kind) => {
                    self.function::<Kinded>(name).ok()?(self.device, kind, &raw mut number)
                }
            }
        };
        (code == 0).then_some(number)
    }

    fn reasons(&self) -> Option<c_ulonglong> {
        type Reasons = unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int;
        let name = "nvmlDeviceGetCurrentClocksThrottleReasons";
        let mut bits = 0;
        // SAFETY: the function has this type; the handle is NVML's own, and one number is written.
        let code = unsafe { self.function::<Reasons>(name).ok()?(self.device, &raw mut bits) };
        (code == 0).then_some(bits)
    }

    fn driver(&self) -> Option<String> {
        type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        let mut text = [0_u8; VERSION_BYTES];
        // SAFETY: the function has this type, and writes a string no longer than it is told.
        let code = unsafe {
            let version = self.function::<Version>("nvmlSystemGetDriverVersion").ok()?;
            version(text.as_mut_ptr().cast(), VERSION_BYTES as c_uint)
        };
        let end = text.iter().position(|byte| *byte == 0)?;
        (code == 0).then(|| String::from_utf8_lossy(&text[..end]).into_owned())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the function has this type, and the library is not used again; one that was never
        // initialised says so by its code.
        unsafe {
            if let Ok(shutdown) = self.function::<unsafe extern "C" fn() -> c_int>("nvmlShutdown") {
                shutdown();
            }
        }
    }
}

fn success(name: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{name} failed with {code}")) }
}

fn reasons(bits: c_ulonglong) -> Vec<String> {
    let set = REASONS.iter().filter(|(bit, _)| bits & bit != 0);
    set.map(|(_, words)| (*words).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_named() {
        assert_eq!(reasons(0x01 | 0x02), Vec::<String>::new());
        assert_eq!(reasons(0x04 | 0x40), ["power cap", "thermal, by hardware"]);
    }

    #[test]
    fn a_cpu_has_no_clocks_to_read() {
        let clocks = Clocks::of(&Device::cpu());
        assert_eq!(clocks.words(), "not read: the device is a CPU");
        assert!(clocks.read().is_none() && clocks.driver().is_none());
    }
}
