//! A small C interface: one call described, planned once, run as often as needed.
//!
//! The header is `include/ferroflash.h`. A call begins with its size, so that a caller with the
//! header of another version is refused; nothing else here changes within a major version. Calls
//! have the options that are numbers; those that come with tensors (bias, mask, lengths) are the
//! Rust library's alone.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::ptr;

use ferroflash::{
    Align, Attention, Device, Element, Error, Gradients, Inputs, Mask, Output, Place, Result,
    Saved, Scale, Shape, Stream, TensorMut, TensorRef, Workspace, contiguous_strides,
};
use half::{bf16, f16};

mod types;

use types::invalid;
pub use types::{Call, Dtype, Status, Tensor};

/// A validated call with its kernels; any number of threads may use it at once.
pub struct Plan {
    typed: Typed,
    shape: Shape,
    place: Place,
}

enum Typed {
    Bf16(ferroflash::Plan<bf16>),
    F16(ferroflash::Plan<f16>),
    F32(ferroflash::Plan<f32>),
}

/// Runs `$body` with the plan of the plan's element type.
macro_rules! with_plan {
    ($typed:expr, $plan:ident => $body:expr) => {
        match $typed {
            Typed::Bf16($plan) => $body,
            Typed::F16($plan) => $body,
            Typed::F32($plan) => $body,
        }
    };
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Remembers the words of a failure; returns its kind.
fn status(result: Result<()>) -> Status {
    let Err(error) = result else { return Status::Ok };
    let words = CString::new(error.to_string().replace('\0', "")).unwrap_or_default();
    MESSAGE.with_borrow_mut(|message| *message = words);
    match error {
        Error::Unsupported { .. } => Status::Unsupported,
        Error::OutOfMemory { .. } => Status::OutOfMemory,
        Error::NoDriver(_) | Error::NoDevice { .. } | Error::Driver { .. } => Status::Driver,
        _ => Status::Invalid,
    }
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn ferroflash_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Why the calling thread's last failed call failed; valid until its next one fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferroflash_error() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// Validates a call, chooses its kernels and loads them.
///
/// # Safety
/// `call` points to a call whose `size` is true, `plan` to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferroflash_plan_new(call: *const Call, plan: *mut *mut Plan) -> Status {
    if call.is_null() || plan.is_null() {
        return status(Err(invalid("call, plan", "a null pointer", "pointers to both")));
    }
    if !plan.is_aligned() {
        let needs = format!("aligned to {} bytes", align_of::<*mut Plan>());
        return status(Err(invalid("plan", format!("address {plan:p}"), &needs)));
    }
    // SAFETY: the caller's promise: nothing to free unless the call succeeds.
    unsafe { ptr::write(plan, ptr::null_mut()) };
    // SAFETY: the caller's promise.
    status(unsafe { Call::read(call) }.and_then(|call| make(&call)).map(|made| {
        let made = Box::into_raw(Box::new(made));
        // SAFETY: the caller's promise.
        unsafe { ptr::write(plan, made) };
    }))
}

fn make(call: &Call) -> Result<Plan> {
    let shape = Shape {
        batch: call.batch,
        q_heads: call.q_heads,
        kv_heads: call.kv_heads,
        q_len: call.q_len,
        kv_len: call.kv_len,
        head_dim: call.head_dim,
        value_dim: call.value_dim,
    };
    let align = if call.top_left { Align::TopLeft } else { Align::BottomRight };
    let side = |keys: i64| usize::try_from(keys).ok().filter(|_| call.windowed);
    let [left, right] = call.window.map(side);
    let right = if call.causal { Some(0) } else { right };
    let mut attention = Attention::new(shape).mask(Mask::causal(align).window(left, right));
    if call.scaled {
        attention = attention.scale(Scale::Factor(call.scale));
    }
    if call.softcap != 0.0 {
        attention = attention.softcap(call.softcap);
    }
    if call.deterministic {
        attention = attention.deterministic();
    }
    let device = match usize::try_from(call.device) {
        Ok(ordinal) => Device::cuda(ordinal)?,
        Err(_) => Device::cpu(),
    };
    let typed = match call.dtype {
        0 => Typed::Bf16(attention.plan(&device)?),
        1 => Typed::F16(attention.plan(&device)?),
        2 => Typed::F32(attention.plan(&device)?),
        other => return Err(invalid("call.dtype", other, "a ferroflash_dtype")),
    };
    Ok(Plan { typed, shape, place: device.place() })
}

/// Frees a plan, or nothing if it is null.
///
/// # Safety
/// `plan` came from `ferroflash_plan_new` and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferroflash_plan_free(plan: *mut Plan) {
    if !plan.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(plan) });
    }
}

/// Bytes of workspace, aligned to 16, that a forward or a backward call needs.
///
/// # Safety
/// `plan` is a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferroflash_workspace(plan: *const Plan, backward: bool) -> usize {
    // SAFETY: the caller's promise.
    let Some(plan) = (unsafe { plan.as_ref() }) else { return 0 };
    let bytes = with_plan!(&plan.typed, plan => plan.workspace());
    if backward { bytes.backward } else { bytes.forward }
}

/// Computes o and, unless it is null, lse, contiguous f32 [batch, head, row]. On a CUDA device the
/// work is queued on `stream`, a CUstream of its primary context; nothing waits for it.
///
/// # Safety
/// `plan` is a plan. Every tensor has the call's dimensions and lies at its device, valid until the
/// work has completed; nothing else touches o, lse and the workspace of `bytes` until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferroflash_forward(
    plan: *const Plan,
    stream: *mut c_void,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: *mut f32,
    workspace: *mut c_void,
    bytes: usize,
) -> Status {
    // SAFETY: the caller's promise.
    let Some(plan) = (unsafe { plan.as_ref() }) else {
        return status(Err(invalid("plan", "a null pointer", "a plan")));
    };
    // SAFETY: the caller's promise.
    status(with_plan!(&plan.typed, typed => unsafe {
        plan.forward(typed, stream, [q, k, v, o], lse, (workspace, bytes))
    }))
}

/// Computes the gradients of q, k and v, those whose data is not null, from the forward's o and lse
/// and the gradient of o; `d_lse`, that of lse, may be null.
///
/// # Safety
/// As `ferroflash_forward`, for the gradients in place of o and lse.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferroflash_backward(
    plan: *const Plan,
    stream: *mut c_void,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: *const f32,
    d_o: Tensor,
    d_lse: *const f32,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    workspace: *mut c_void,
    bytes: usize,
) -> Status {
    // SAFETY: the caller's promise.
    let Some(plan) = (unsafe { plan.as_ref() }) else {
        return status(Err(invalid("plan", "a null pointer", "a plan")));
    };
    let saved = [q, k, v, o, d_o];
    // SAFETY: the caller's promise.
    status(with_plan!(&plan.typed, typed => unsafe {
        plan.backward(typed, stream, saved, [lse, d_lse], [dq, dk, dv], (workspace, bytes))
    }))
}

impl Plan {
    /// # Safety
    /// As `ferroflash_forward`.
    unsafe fn forward<T: Element>(
        &self,
        plan: &ferroflash::Plan<T>,
        stream: *mut c_void,
        [q, k, v, o]: [Tensor; 4],
        lse: *mut f32,
        workspace: (*mut c_void, usize),
    ) -> Result<()> {
        let Self { shape, place, .. } = *self;
        // SAFETY: the caller's promise, here and below.
        unsafe {
            let inputs = self.inputs([q, k, v])?;
            let lse = match lse.is_null() {
                true => None,
                false => Some(contiguous(lse, &shape.lse_dims(), place)?),
            };
            let o = o.tensor_mut("o", &shape.o_dims(), place)?;
            let mut output = Output { o, lse };
            let workspace = workspace_at(workspace, place)?;
            plan.run_into(&self.stream(stream), inputs, &mut output, workspace)
        }
    }

    /// # Safety
    /// As `ferroflash_backward`.
    unsafe fn backward<T: Element>(
        &self,
        plan: &ferroflash::Plan<T>,
        stream: *mut c_void,
        [q, k, v, o, d_o]: [Tensor; 5],
        [lse, d_lse]: [*const f32; 2],
        gradients: [Tensor; 3],
        workspace: (*mut c_void, usize),
    ) -> Result<()> {
        let Self { shape, place, .. } = *self;
        let (o_dims, lse_dims) = (shape.o_dims(), shape.lse_dims());
        let rows = contiguous_strides(&lse_dims);
        if lse.is_null() {
            return Err(invalid("lse", "a null pointer", "the forward's"));
        }
        let dims = [shape.q_dims(), shape.k_dims(), shape.v_dims()];
        // SAFETY: the caller's promise, here and below.
        unsafe {
            let saved = Saved {
                inputs: self.inputs([q, k, v])?,
                o: o.tensor("o", &o_dims, place)?,
                lse: TensorRef::from_raw(lse, &lse_dims, &rows, place)?,
            };
            let d_o = d_o.tensor("d_o", &o_dims, place)?;
            let d_lse = match d_lse.is_null() {
                true => None,
                false => Some(TensorRef::from_raw(d_lse, &lse_dims, &rows, place)?),
            };
            let mut wanted = [None, None, None];
            let named = gradients.into_iter().zip(["dq", "dk", "dv"]).zip(&dims);
            for (slot, ((tensor, name), dims)) in wanted.iter_mut().zip(named) {
                if !tensor.data.is_null() {
                    *slot = Some(tensor.tensor_mut(name, dims, place)?);
                }
            }
            let [dq, dk, dv] = wanted;
            let mut gradients = Gradients { dq, dk, dv, ..Gradients::default() };
            let (stream, workspace) = (self.stream(stream), workspace_at(workspace, place)?);
            plan.backward_into(&stream, &saved, &d_o, d_lse.as_ref(), &mut gradients, workspace)
        }
    }

    /// # Safety
    /// `stream` is a stream of the plan's device.
    unsafe fn stream(&self, stream: *mut c_void) -> Stream {
        match self.place {
            Place::Host => Stream::host(),
            // SAFETY: the caller's promise.
            Place::Cuda(ordinal) => unsafe { Stream::from_raw(ordinal, stream) },
        }
    }

    /// # Safety
    /// As [`TensorRef::from_raw`].
    unsafe fn inputs<'a, T>(&self, [q, k, v]: [Tensor; 3]) -> Result<Inputs<'a, T>> {
        let Self { shape, place, .. } = *self;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Inputs::new(
                q.tensor("q", &shape.q_dims(), place)?,
                k.tensor("k", &shape.k_dims(), place)?,
                v.tensor("v", &shape.v_dims(), place)?,
            ))
        }
    }
}

/// # Safety
/// As [`TensorMut::from_raw`].
unsafe fn contiguous<'a, T>(
    data: *mut T,
    dims: &[usize],
    place: Place,
) -> Result<TensorMut<'a, T>> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(data, dims, &contiguous_strides(dims), place) }
}

/// # Safety
/// As [`TensorMut::from_raw`].
unsafe fn workspace_at<'a>(
    (data, bytes): (*mut c_void, usize),
    place: Place,
) -> Result<Workspace<'a>> {
    if data.is_null() {
        return Ok(Workspace::none());
    }
    // SAFETY: the caller's promise.
    unsafe { contiguous::<u8>(data.cast(), &[bytes], place) }.map(Workspace::from)
}
