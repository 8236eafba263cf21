//! The structures of the interface, and tensors as the library takes them.

use std::ffi::c_void;
use std::ptr;

use ferroflash::{Error, Place, Result, TensorMut, TensorRef};

/// How a function ended; `ferroflash_error` has the words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// All went well.
    Ok = 0,
    /// An argument is wrong, or does not fit the others.
    Invalid = 1,
    /// No kernel does this on the device.
    Unsupported = 2,
    /// Memory could not be had.
    OutOfMemory = 3,
    /// There is no usable driver or device, or it failed.
    Driver = 4,
}

/// Element type of q, k, v, o and their gradients.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// IEEE single precision.
    F32 = 2,
}

/// What a call computes. A caller sets `size` to the size of this structure, and zeros what it does
/// not set.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// sizeof(ferroflash_call) where the caller was compiled.
    pub size: usize,
    /// A `ferroflash_dtype`.
    pub dtype: u32,
    /// Ordinal of the CUDA device, or -1 for the CPU.
    pub device: i32,
    /// Items.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads, which divide the query heads.
    pub kv_heads: usize,
    /// Rows of an item.
    pub q_len: usize,
    /// Keys of an item.
    pub kv_len: usize,
    /// Channels of q and k.
    pub head_dim: usize,
    /// Channels of v and o.
    pub value_dim: usize,
    /// Factor of every score, if `scaled`.
    pub scale: f32,
    /// Each scaled score s becomes softcap * tanh(s / softcap); 0 for none.
    pub softcap: f32,
    /// Whether `scale` is in force, and not 1 / sqrt(head_dim).
    pub scaled: bool,
    /// Row i sees no key past i + kv_len - q_len, or past i with `top_left`.
    pub causal: bool,
    /// Aligns the diagonal with the first key, not with the last.
    pub top_left: bool,
    /// Whether the backward pass gives the same bits every time.
    pub deterministic: bool,
    /// Whether `window` is in force.
    pub windowed: bool,
    /// Keys before and after the diagonal that a row sees; negative for all.
    pub window: [i64; 2],
}

impl Call {
    /// The call at `call`, for whose flags a C program may have left any byte.
    ///
    /// # Safety
    /// `call` points to as many bytes that can be read as its `size` says.
    pub(crate) unsafe fn read(call: *const Self) -> Result<Self> {
        if !call.is_aligned() {
            let needs = format!("aligned to {} bytes", align_of::<Self>());
            return Err(invalid("call", format!("address {call:p}"), &needs));
        }
        // SAFETY: the caller's promise; the size comes first in every version.
        let size = unsafe { ptr::read(call.cast::<usize>()) };
        // A larger one may ask for what this version would leave out.
        if size != size_of::<Self>() {
            let needs = format!("{}, as in this version's header", size_of::<Self>());
            return Err(invalid("call.size", size, &needs));
        }
        // SAFETY: the structure is this version's; addresses alone are made of its fields.
        let flags = unsafe {
            [
                ("call.scaled", &raw const (*call).scaled),
                ("call.causal", &raw const (*call).causal),
                ("call.top_left", &raw const (*call).top_left),
                ("call.deterministic", &raw const (*call).deterministic),
                ("call.windowed", &raw const (*call).windowed),
            ]
        };
        for (name, flag) in flags {
            // SAFETY: a field of the structure, read as a byte, of which any value is one.
            let byte = unsafe { ptr::read(flag.cast::<u8>()) };
            if byte > 1 {
                return Err(invalid(name, byte, "true or false, 1 or 0"));
            }
        }
        // SAFETY: as above, and each flag is a bool.
        let read = unsafe { ptr::read(call) };
        if read.device < -1 {
            return Err(invalid("call.device", read.device, "an ordinal, or -1 for the CPU"));
        }
        Ok(read)
    }
}

/// A tensor [batch, row, head, channel] at the call's device; channels are contiguous.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Its first element.
    pub data: *mut c_void,
    /// Elements between neighbours along batch, row and head.
    pub strides: [i64; 3],
}

impl Tensor {
    /// The tensor as argument `name`, which may be null only if it has no elements.
    fn checked(&self, name: &'static str, dims: &[usize; 4]) -> Result<[i64; 4]> {
        if self.data.is_null() && !dims.contains(&0) {
            return Err(invalid(name, "a null pointer", "a tensor"));
        }
        let [batch, row, head] = self.strides;
        Ok([batch, row, head, 1])
    }

    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn tensor<'a, T>(
        &self,
        name: &'static str,
        dims: &[usize; 4],
        place: Place,
    ) -> Result<TensorRef<'a, T>> {
        let strides = self.checked(name, dims)?;
        // SAFETY: the caller's promise.
        unsafe { TensorRef::from_raw(self.data.cast(), dims, &strides, place) }
    }

    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn tensor_mut<'a, T>(
        &self,
        name: &'static str,
        dims: &[usize; 4],
        place: Place,
    ) -> Result<TensorMut<'a, T>> {
        let strides = self.checked(name, dims)?;
        // SAFETY: the caller's promise.
        let made = unsafe { TensorMut::from_raw(self.data.cast(), dims, &strides, place) };
        made.map_err(|error| match error {
            Error::Argument { had, needs, .. } => Error::Argument { argument: name, had, needs },
            other => other,
        })
    }
}

/// The error of a wrong argument.
pub(crate) fn invalid(argument: &'static str, had: impl ToString, needs: &str) -> Error {
    Error::Argument { argument, had: had.to_string(), needs: needs.to_owned() }
}
