//! The two directions of a planned call, on memory that Python allocated.
//!
//! Addresses are taken at their word: only the package's own Python calls these functions.

use std::ffi::c_void;
use std::ptr;

use ferroflash::{
    Attention, Dropout, Element, Gradients, Inputs, Output, Packed, Place, Plan, Result, Saved,
    Shape, Stream, TensorMut, TensorRef, Workspace, contiguous_strides, cpu,
};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyTuple};

use crate::error::exception;
use crate::plan::{PyPlan, Typed};
use crate::pool;
use crate::view::{Tensor, View, field};

/// `(stream, strides_in_bytes)`: the `CUstream`, 0 on the CPU; whether strides count bytes, as
/// numpy's do, or elements.
#[derive(FromPyObject)]
pub(crate) struct Where(usize, bool);

/// The tensors of a call, read; nothing in them belongs to the interpreter.
struct Call {
    place: Place,
    stream: usize,
    q: View,
    k: View,
    v: View,
    options: OptionTensors,
}

/// The tensors that options come with.
#[derive(Clone, Copy, Default)]
struct OptionTensors {
    alibi_slopes: Option<View>,
    bias: Option<View>,
    mask: Option<View>,
    sink: Option<View>,
    key_lengths: Option<View>,
    cu_q: Option<View>,
    cu_k: Option<View>,
    used_q: Option<View>,
    used_k: Option<View>,
    state: Option<State>,
}

/// Seed and offset of a dropout.
#[derive(Clone, Copy)]
enum State {
    Value([u64; 2]),
    OnDevice(View),
}

/// The same, as Python passes it.
#[derive(FromPyObject)]
enum GivenState<'py> {
    OnDevice(Tensor<'py>),
    Value((u64, u64)),
}

impl OptionTensors {
    /// Reads `(alibi_slopes, bias, mask, sink, key_lengths, cu_seqlens_q, cu_seqlens_k, seqused_q,
    /// seqused_k, mask_bits, dropout_state)`, each a tensor or `None`; the last may be `(seed,
    /// offset)`.
    fn read(tuple: Option<&Bound<'_, PyTuple>>, bytes: bool) -> PyResult<Self> {
        let Some(tuple) = tuple else { return Ok(Self::default()) };
        let read = |index, name, element| -> PyResult<Option<View>> {
            let unit = if bytes { element } else { 1 };
            let tensor: Option<Tensor<'_>> = field(tuple, index, name)?;
            tensor.map(|tensor| View::read(&tensor, name, unit)).transpose()
        };
        let state = match field(tuple, 10, "dropout_state")? {
            None => None,
            Some(GivenState::Value((seed, offset))) => Some(State::Value([seed, offset])),
            Some(GivenState::OnDevice(tensor)) => {
                Some(State::OnDevice(View::read(&tensor, "dropout_state", 1)?))
            }
        };
        Ok(Self {
            alibi_slopes: read(0, "alibi_slopes", 4)?,
            bias: read(1, "bias", 4)?,
            mask: read(2, "mask", 1)?.or(read(9, "mask_bits", 1)?),
            sink: read(3, "sink", 4)?,
            key_lengths: read(4, "key_lengths", 4)?,
            cu_q: read(5, "cu_seqlens_q", 4)?,
            cu_k: read(6, "cu_seqlens_k", 4)?,
            used_q: read(7, "seqused_q", 4)?,
            used_k: read(8, "seqused_k", 4)?,
            state,
        })
    }
}

impl Call {
    fn read(
        plan: &PyPlan,
        place: &Where,
        [q, k, v]: [&Tensor<'_>; 3],
        options: Option<&Bound<'_, PyTuple>>,
    ) -> PyResult<Self> {
        let Where(stream, bytes) = *place;
        let unit = plan.unit(bytes);
        Ok(Self {
            place: plan.place,
            stream,
            q: View::read(q, "q", unit)?,
            k: View::read(k, "k", unit)?,
            v: View::read(v, "v", unit)?,
            options: OptionTensors::read(options, bytes)?,
        })
    }

    /// # Safety
    /// The stream belongs to the device's primary context and outlives the value.
    unsafe fn stream(&self) -> Stream {
        match self.place {
            Place::Host => Stream::host(),
            Place::Cuda(ordinal) => {
                let handle: *mut c_void = ptr::with_exposed_provenance_mut(self.stream);
                // SAFETY: the caller's promise.
                unsafe { Stream::from_raw(ordinal, handle) }
            }
        }
    }

    /// # Safety
    /// Every address is that of a tensor at the call's place with the dimensions and strides
    /// given and the element type the plan's attention has there, valid for `'a`.
    unsafe fn inputs<'a, T>(&'a self) -> Result<Inputs<'a, T>> {
        let (place, options) = (self.place, &self.options);
        // SAFETY: the caller's promise, here and for every tensor below.
        let (q, k, v) =
            unsafe { (self.q.tensor(place)?, self.k.tensor(place)?, self.v.tensor(place)?) };
        let mut inputs = Inputs::new(q, k, v);
        // SAFETY: as above.
        unsafe {
            inputs.alibi_slopes = options.alibi_slopes.map(|x| x.tensor(place)).transpose()?;
            inputs.bias = options.bias.map(|x| x.tensor(place)).transpose()?;
            inputs.boolean_mask = options.mask.map(|x| x.tensor(place)).transpose()?;
            inputs.sink = options.sink.map(|x| x.tensor(place)).transpose()?;
            inputs.dropout_state = match &options.state {
                None => None,
                Some(State::Value(state)) => Some(TensorRef::host(state, &[2])?),
                Some(State::OnDevice(state)) => Some(state.tensor(place)?),
            };
            inputs.key_lengths =
                options.key_lengths.map(|x| x.lengths(place, "key_lengths")).transpose()?;
            if let (Some(cu_q), Some(cu_k)) = (options.cu_q, options.cu_k) {
                inputs.packed = Some(Packed {
                    cu_q: cu_q.lengths(place, "cu_seqlens_q")?,
                    cu_k: cu_k.lengths(place, "cu_seqlens_k")?,
                    used_q: options.used_q.map(|x| x.lengths(place, "seqused_q")).transpose()?,
                    used_k: options.used_k.map(|x| x.lengths(place, "seqused_k")).transpose()?,
                });
            }
        }
        Ok(inputs)
    }

    /// Runs `work` without the interpreter's lock, on threads that exist.
    fn run(&self, py: Python<'_>, work: impl FnOnce() -> Result<()> + Send) -> PyResult<()> {
        let done = py.detach(|| match self.place {
            Place::Host => pool::with_threads(work),
            Place::Cuda(_) => work(),
        });
        done.map_err(|error| exception(error, "q, k, v"))
    }
}

impl PyPlan {
    /// What strides of q, k and v count an element as.
    fn unit(&self, bytes: bool) -> usize {
        match (bytes, &self.typed) {
            (false, _) => 1,
            (true, Typed::Bf16(_) | Typed::F16(_)) => 2,
            (true, Typed::F32(_)) => 4,
        }
    }
}

/// The workspace at `address`, of `bytes`; none at address 0.
///
/// # Safety
/// As [`TensorMut::from_raw`].
unsafe fn workspace<'a>(address: usize, bytes: usize, place: Place) -> Result<Workspace<'a>> {
    if address == 0 {
        return Ok(Workspace::none());
    }
    // SAFETY: the caller's promise.
    unsafe { contiguous::<u8>(address, &[bytes], place) }.map(Workspace::from)
}

/// A contiguous tensor to write.
///
/// # Safety
/// As [`TensorMut::from_raw`].
unsafe fn contiguous<'a, T>(
    address: usize,
    dims: &[usize],
    place: Place,
) -> Result<TensorMut<'a, T>> {
    let strides = contiguous_strides(dims);
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(ptr::with_exposed_provenance_mut(address), dims, &strides, place) }
}

/// `forward(plan, place, q, k, v, options, o, lse, workspace)`: attention.
///
/// o and lse, f32, are tensors, lse contiguous or `None`; `workspace` is the address of the bytes
/// that the plan asks for, or 0 where it asks for none.
#[pyfunction]
#[pyo3(signature = (plan, place, q, k, v, options, o, lse, workspace, /))]
#[expect(clippy::too_many_arguments, reason = "a tuple less to build for every call")]
pub(crate) fn forward(
    py: Python<'_>,
    plan: &Bound<'_, PyPlan>,
    place: Where,
    q: Tensor<'_>,
    k: Tensor<'_>,
    v: Tensor<'_>,
    options: Option<&Bound<'_, PyTuple>>,
    o: Tensor<'_>,
    lse: Option<Tensor<'_>>,
    workspace: usize,
) -> PyResult<()> {
    let plan = plan.get();
    let call = Call::read(plan, &place, [&q, &k, &v], options)?;
    let o = View::read(&o, "o", plan.unit(place.1))?;
    let lse = lse.map(|lse| View::read(&lse, "lse", if place.1 { 4 } else { 1 })).transpose()?;
    call.run(py, || {
        // SAFETY: the Python side passes addresses, dimensions and strides of live tensors of
        // the plan's element types and device, holds them for the call, and lets nothing else
        // touch o and lse; CUDA memory is ordered by the stream it passes.
        unsafe {
            match &plan.typed {
                Typed::Bf16(plan) => run_forward(plan, &call, o, lse, workspace),
                Typed::F16(plan) => run_forward(plan, &call, o, lse, workspace),
                Typed::F32(plan) => run_forward(plan, &call, o, lse, workspace),
            }
        }
    })
}

/// # Safety
/// As [`Call::stream`] and [`Call::inputs`]; nothing else touches o, lse and the workspace until
/// the work has completed.
unsafe fn run_forward<T: Element>(
    plan: &Plan<T>,
    call: &Call,
    o: View,
    lse: Option<View>,
    scratch: usize,
) -> Result<()> {
    let place = call.place;
    // SAFETY: the caller's promise.
    unsafe {
        let lse = lse.map(|lse| lse.tensor_mut(place)).transpose()?;
        let mut output = Output { o: o.tensor_mut(place)?, lse };
        let scratch = workspace(scratch, plan.workspace().forward, place)?;
        plan.run_into(&call.stream(), call.inputs()?, &mut output, scratch)
    }
}

/// What a backward call reads besides its inputs.
struct Upstream {
    o: View,
    lse: View,
    d_o: View,
    d_lse: Option<View>,
}

/// `backward(plan, place, q, k, v, options, (o, lse, d_o, d_lse), (dq, dk, dv, dbias, dsink),
/// workspace)`.
///
/// lse and d_lse, which may be `None`, are contiguous f32. Gradients that are `None` are not
/// computed; dbias and dsink are contiguous f32. `workspace` is as in [`forward`].
#[pyfunction]
#[pyo3(signature = (plan, place, q, k, v, options, saved, gradients, workspace, /))]
#[expect(clippy::too_many_arguments, reason = "as forward has them")]
pub(crate) fn backward(
    py: Python<'_>,
    plan: &Bound<'_, PyPlan>,
    place: Where,
    q: Tensor<'_>,
    k: Tensor<'_>,
    v: Tensor<'_>,
    options: Option<&Bound<'_, PyTuple>>,
    saved: (Tensor<'_>, Tensor<'_>, Tensor<'_>, Option<Tensor<'_>>),
    gradients: &Bound<'_, PyTuple>,
    workspace: usize,
) -> PyResult<()> {
    let plan = plan.get();
    let call = Call::read(plan, &place, [&q, &k, &v], options)?;
    let [unit, unit_f32] = [plan.unit(place.1), if place.1 { 4 } else { 1 }];
    let (o, lse, d_o, d_lse) = saved;
    let upstream = Upstream {
        o: View::read(&o, "o", unit)?,
        lse: View::read(&lse, "lse", unit_f32)?,
        d_o: View::read(&d_o, "d_o", unit)?,
        d_lse: d_lse.map(|d_lse| View::read(&d_lse, "d_lse", unit_f32)).transpose()?,
    };
    let mut wanted = [None; 5];
    let names = ["dq", "dk", "dv", "dbias", "dsink"];
    for (index, (view, name)) in wanted.iter_mut().zip(names).enumerate() {
        let tensor: Option<Tensor<'_>> = field(gradients, index, name)?;
        let unit = if index < 3 { unit } else { unit_f32 };
        *view = tensor.map(|tensor| View::read(&tensor, name, unit)).transpose()?;
    }
    call.run(py, || {
        // SAFETY: as in `forward`, the gradients being what nothing else touches.
        unsafe {
            match &plan.typed {
                Typed::Bf16(plan) => run_backward(plan, &call, &upstream, wanted, workspace),
                Typed::F16(plan) => run_backward(plan, &call, &upstream, wanted, workspace),
                Typed::F32(plan) => run_backward(plan, &call, &upstream, wanted, workspace),
            }
        }
    })
}

/// # Safety
/// As [`run_forward`], of the gradients and the workspace.
unsafe fn run_backward<T: Element>(
    plan: &Plan<T>,
    call: &Call,
    upstream: &Upstream,
    [dq, dk, dv, dbias, dsink]: [Option<View>; 5],
    scratch: usize,
) -> Result<()> {
    let place = call.place;
    // SAFETY: the caller's promise.
    unsafe {
        let saved = Saved {
            inputs: call.inputs()?,
            o: upstream.o.tensor(place)?,
            lse: upstream.lse.tensor(place)?,
        };
        let mut gradients = Gradients {
            dq: dq.map(|x| x.tensor_mut(place)).transpose()?,
            dk: dk.map(|x| x.tensor_mut(place)).transpose()?,
            dv: dv.map(|x| x.tensor_mut(place)).transpose()?,
            dbias: dbias.map(|x| x.tensor_mut(place)).transpose()?,
            dsink: dsink.map(|x| x.tensor_mut(place)).transpose()?,
        };
        let d_lse = upstream.d_lse.map(|x| x.tensor(place)).transpose()?;
        let d_o = upstream.d_o.tensor(place)?;
        let scratch = workspace(scratch, plan.workspace().backward, place)?;
        plan.backward_into(&call.stream(), &saved, &d_o, d_lse.as_ref(), &mut gradients, scratch)
    }
}

/// `dropout_mask(probability, (seed, offset), (batch, q_heads, q_len, kv_len))`: a byte a weight, 1
/// where it is kept.
#[pyfunction]
#[pyo3(signature = (probability, state, dims, /))]
pub(crate) fn dropout_mask<'py>(
    py: Python<'py>,
    probability: f64,
    state: (u64, u64),
    dims: (usize, usize, usize, usize),
) -> PyResult<Bound<'py, PyByteArray>> {
    let (batch, heads, q_len, kv_len) = dims;
    let (q_heads, kv_heads) = (heads, heads);
    let shape = Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim: 1, value_dim: 1 };
    let attention = Attention::new(shape).dropout(Dropout::new(probability as f32, state));
    let kept = py.detach(|| pool::with_threads(|| cpu::dropout_mask(&attention, None)));
    Ok(PyByteArray::new(py, &kept.map_err(|error| exception(error, "q, k"))?))
}
