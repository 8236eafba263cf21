//! One attention call: reading what Python passes, and running it.

use std::ffi::c_void;
use std::ptr;

use ferroflash::{
    Align, Dtype, Error, Inputs, Mask, Output, Place, Result, Shape, Stream, TensorMut, TensorRef,
    contiguous_strides,
};
use half::{bf16, f16};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::exception;
use crate::plans::{Description, Planned, side};
use crate::pool;

/// `(address, dimensions, strides)` of a tensor; strides of `None` are contiguous ones.
#[derive(FromPyObject)]
pub(crate) struct Tensor<'py>(usize, Bound<'py, PyTuple>, Option<Bound<'py, PyTuple>>);

/// `(dtype, device, stream, strides_in_bytes)`: 0 bf16, 1 f16, 2 f32; the CUDA ordinal, or −1 for
/// the CPU; the `CUstream`; whether strides count bytes, as numpy's do, or elements.
#[derive(FromPyObject)]
pub(crate) struct Where(u8, i32, usize, bool);

impl Where {
    fn dtype(&self) -> PyResult<Dtype> {
        match self.0 {
            0 => Ok(Dtype::Bf16),
            1 => Ok(Dtype::F16),
            2 => Ok(Dtype::F32),
            other => Err(PyValueError::new_err(format!("dtype: no element type {other}"))),
        }
    }

    fn place(&self) -> Place {
        usize::try_from(self.1).map_or(Place::Host, Place::Cuda)
    }
}

/// A tensor with its address; strides in elements.
struct View<const N: usize> {
    address: usize,
    dims: [usize; N],
    strides: [i64; N],
}

impl<const N: usize> View<N> {
    /// Reads a tensor of `N` axes, whose strides count `unit`s of an element.
    fn read(tensor: &Tensor<'_>, name: &str, unit: i64) -> PyResult<Self> {
        let Tensor(address, dims, strides) = tensor;
        let dims: [usize; N] = integers(dims, name)?;
        if *address == 0 && !dims.contains(&0) {
            return Err(PyValueError::new_err(format!("{name}: has no memory of its own")));
        }
        let strides = match strides {
            Some(strides) => {
                let mut strides: [i64; N] = integers(strides, name)?;
                for (stride, dim) in strides.iter_mut().zip(dims) {
                    if dim > 1 && *stride % unit != 0 {
                        return Err(PyValueError::new_err(format!(
                            "{name}: has a stride of {stride} bytes, but it must be a multiple of \
                             the {unit} bytes of an element"
                        )));
                    }
                    *stride /= unit;
                }
                strides
            }
            None => {
                let mut strides = [1; N];
                strides.copy_from_slice(&contiguous_strides(&dims));
                strides
            }
        };
        Ok(Self { address: *address, dims, strides })
    }

    /// The tensor, to be read.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    unsafe fn tensor<'a, T>(&self, place: Place) -> Result<TensorRef<'a, T>> {
        let address = ptr::with_exposed_provenance(self.address);
        // SAFETY: the caller's promise.
        unsafe { TensorRef::from_raw(address, &self.dims, &self.strides, place) }
    }
}

/// The integers of a tuple of `N`.
fn integers<'py, T, const N: usize>(tuple: &Bound<'py, PyTuple>, name: &str) -> PyResult<[T; N]>
where
    T: Default + Copy + for<'a> FromPyObject<'a, 'py>,
{
    if tuple.len() != N {
        let had = tuple.len();
        return Err(PyValueError::new_err(format!("{name}: has {had} axes, but it needs {N}")));
    }
    let mut values = [T::default(); N];
    for (axis, value) in values.iter_mut().enumerate() {
        *value = field(tuple, axis, name)?;
    }
    Ok(values)
}

/// Element `index` of a tuple; what does not convert is reported as argument `name`.
fn field<'py, T>(tuple: &Bound<'py, PyTuple>, index: usize, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    tuple.get_borrowed_item(index)?.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        PyTypeError::new_err(format!("{name}: {}", error.value(tuple.py())))
    })
}

/// The slopes of a call, `[Hq]` or `[B, Hq]`.
enum Slopes {
    None,
    OfHeads(View<1>),
    OfItems(View<2>),
}

/// A call, read; nothing in it belongs to the interpreter.
struct Call {
    description: Description,
    stream: usize,
    q: View<4>,
    k: View<4>,
    v: View<4>,
    slopes: Slopes,
    /// Whether `window_size`, `softcap` and `alibi_slopes` were given, which a kernel may lack.
    given: [bool; 3],
}

impl Call {
    /// Reads a call. `options` is `(softmax_scale, causal, left, right, softcap, alibi_slopes)`.
    fn read(
        [q, k, v]: [&Tensor<'_>; 3],
        place: &Where,
        options: &Bound<'_, PyTuple>,
    ) -> PyResult<Self> {
        let unit = |bytes: usize| if place.3 { bytes as i64 } else { 1 };
        let element = unit(place.dtype()?.bytes());
        let q = View::<4>::read(q, "q", element)?;
        let k = View::<4>::read(k, "k", element)?;
        let v = View::<4>::read(v, "v", element)?;
        let scale: Option<f64> = field(options, 0, "softmax_scale")?;
        let causal: bool = field(options, 1, "causal")?;
        let left = side(field(options, 2, "window_size")?);
        let right = side(field(options, 3, "window_size")?);
        let softcap: f64 = field(options, 4, "softcap")?;
        let slopes: Option<Tensor<'_>> = field(options, 5, "alibi_slopes")?;
        let (left, right) = left
            .and_then(|left| Ok((left, right?)))
            .map_err(|error| exception(error, "window_size"))?;
        let given = [left.is_some() || right.is_some(), softcap != 0.0, slopes.is_some()];
        let slopes = match slopes {
            None => Slopes::None,
            Some(slopes) if slopes.1.len() == 2 => {
                Slopes::OfItems(View::read(&slopes, "alibi_slopes", unit(4))?)
            }
            Some(slopes) => Slopes::OfHeads(View::read(&slopes, "alibi_slopes", unit(4))?),
        };
        let mask = match (causal, left, right) {
            (false, None, None) => Mask::full(),
            // Causal and a window: a key must be inside both.
            (true, left, _) => Mask::causal(Align::BottomRight).window(left, Some(0)),
            (false, left, right) => Mask::causal(Align::BottomRight).window(left, right),
        };
        let description = Description {
            shape: Shape {
                batch: q.dims[0],
                q_heads: q.dims[2],
                kv_heads: k.dims[2],
                q_len: q.dims[1],
                kv_len: k.dims[1],
                head_dim: q.dims[3],
                value_dim: v.dims[3],
            },
            mask,
            scale: scale.map(|scale| scale as f32),
            softcap: softcap as f32,
            alibi: !matches!(slopes, Slopes::None),
            place: place.place(),
        };
        Ok(Self { description, stream: place.2, q, k, v, slopes, given })
    }

    /// The exception for `error`, under the names of the options given if no kernel has them.
    fn exception(&self, error: Error) -> PyErr {
        let names = ["window_size", "softcap", "alibi_slopes"].into_iter().zip(self.given);
        let given: Vec<&str> = names.filter(|(_, given)| *given).map(|(name, _)| name).collect();
        exception(
            error,
            if given.is_empty() { "q, k, v".into() } else { given.join(", ") }.as_str(),
        )
    }

    /// Computes o, contiguous `[B, Sq, Hq, Dv]`, and lse, contiguous `[B, Hq, Sq]` f32, unless its
    /// address is 0.
    ///
    /// # Safety
    /// Every address is that of a tensor at the call's place with the dimensions and strides
    /// given, valid until the work has completed on the call's stream; nothing else touches the
    /// outputs until then. The stream belongs to the device's primary context.
    unsafe fn run<T: Planned>(&self, [o, lse, workspace]: [usize; 3]) -> Result<()> {
        let plan = T::plans().get(&self.description)?;
        let Description { shape, place, .. } = self.description;
        let stream = match place {
            Place::Host => Stream::host(),
            Place::Cuda(ordinal) => {
                let handle: *mut c_void = ptr::with_exposed_provenance_mut(self.stream);
                // SAFETY: the caller's promise.
                unsafe { Stream::from_raw(ordinal, handle) }
            }
        };
        // SAFETY: as the caller promises, here and below.
        let (q, k, v) =
            unsafe { (self.q.tensor::<T>(place)?, self.k.tensor(place)?, self.v.tensor(place)?) };
        let mut inputs = Inputs::new(q, k, v);
        inputs.alibi_slopes = match &self.slopes {
            Slopes::None => None,
            // SAFETY: as above.
            Slopes::OfHeads(slopes) => Some(unsafe { slopes.tensor(place)? }),
            // SAFETY: as above.
            Slopes::OfItems(slopes) => Some(unsafe { slopes.tensor(place)? }),
        };
        // SAFETY: as above.
        let o = unsafe { output(o, &shape.o_dims(), place)? };
        let lse = match lse {
            0 => None,
            // SAFETY: as above.
            address => Some(unsafe { output(address, &shape.lse_dims(), place)? }),
        };
        let mut output = Output { o, lse };
        if workspace == 0 {
            return plan.run(&stream, inputs, &mut output);
        }
        // SAFETY: as above.
        let workspace = unsafe { self::output::<u8>(workspace, &[WORKSPACE_BYTES], place)? };
        plan.run_into(&stream, inputs, &mut output, workspace.into())
    }
}

/// Bytes of the workspace that a caller gives, more than any forward kernel needs.
const WORKSPACE_BYTES: usize = 64;

/// A contiguous tensor to write.
///
/// # Safety
/// As [`TensorMut::from_raw`].
unsafe fn output<'a, T>(address: usize, dims: &[usize], place: Place) -> Result<TensorMut<'a, T>> {
    let strides = contiguous_strides(dims);
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(ptr::with_exposed_provenance_mut(address), dims, &strides, place) }
}

/// `forward(q, k, v, output, place, options)`: attention into memory that Python allocated.
///
/// `output` holds the addresses of o, contiguous `[B, Sq, Hq, Dv]`, and of lse, contiguous
/// `[B, Hq, Sq]` f32, or 0 for none, and of a workspace of 64 bytes, or 0 to have one allocated.
/// Addresses are taken at their word: only the package's own
/// Python calls this.
#[pyfunction]
#[pyo3(signature = (q, k, v, output, place, options, /))]
pub(crate) fn forward(
    py: Python<'_>,
    q: Tensor<'_>,
    k: Tensor<'_>,
    v: Tensor<'_>,
    output: (usize, usize, usize),
    place: Where,
    options: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let call = Call::read([&q, &k, &v], &place, options)?;
    let dtype = place.dtype()?;
    let output = [output.0, output.1, output.2];
    let run = || -> Result<()> {
        // SAFETY: the Python side passes addresses, dimensions and strides of live tensors of
        // this element type and device, holds them for the call, and allocates o and lse of the
        // dimensions that the call implies; CUDA memory is ordered by the stream it passes.
        unsafe {
            match dtype {
                Dtype::Bf16 => call.run::<bf16>(output),
                Dtype::F16 => call.run::<f16>(output),
                Dtype::F32 => call.run::<f32>(output),
            }
        }
    };
    let done = py.detach(|| match call.description.place {
        Place::Host => pool::with_threads(run),
        Place::Cuda(_) => run(),
    });
    done.map_err(|error| call.exception(error))
}

/// `explain(q, k, v, place, options)`: what `forward` would do, in words; nothing is computed.
#[pyfunction]
#[pyo3(signature = (q, k, v, place, options, /))]
pub(crate) fn explain(
    py: Python<'_>,
    q: Tensor<'_>,
    k: Tensor<'_>,
    v: Tensor<'_>,
    place: Where,
    options: &Bound<'_, PyTuple>,
) -> PyResult<String> {
    let call = Call::read([&q, &k, &v], &place, options)?;
    let Shape { batch, kv_heads, kv_len, head_dim, .. } = call.description.shape;
    for (tensor, had, head_dim) in [("k", &call.k, head_dim), ("v", &call.v, call.v.dims[3])] {
        let needs = [batch, kv_len, kv_heads, head_dim];
        if had.dims != needs {
            let (had, needs) = (had.dims.to_vec(), needs.to_vec());
            return Err(exception(Error::Dimensions { tensor, had, needs }, ""));
        }
    }
    let dtype = place.dtype()?;
    let text = py.detach(|| {
        let description = &call.description;
        Ok(match dtype {
            Dtype::Bf16 => bf16::plans().get(description)?.explain().to_string(),
            Dtype::F16 => f16::plans().get(description)?.explain().to_string(),
            Dtype::F32 => f32::plans().get(description)?.explain().to_string(),
        })
    });
    text.map_err(|error| call.exception(error))
}
