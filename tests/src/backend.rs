//! The implementations, behind one forward and one backward function.
//!
//! Outputs are poisoned before the call and lie in larger poisoned memory. Whatever a backend
//! returns, every output element was written and nothing beside them was; whatever it refuses, it
//! wrote nothing.

use std::fmt;

use ferroflash::cpu::dense::{self, Precision};
use ferroflash::cpu::tiled::{self, CpuTile};
use ferroflash::{Attention, Element, Error, Family, Form, Gradients, Output, Plan, Saved, Stream};

use crate::case::{Case, broadcast_dims};
use crate::element::Real;
use crate::gpu::{Loaded, LoadedBackward, Wanted, plan, plan_of_family};
use crate::memory::{Arrangement, Owned};

/// An implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The dense CPU path in binary64.
    CpuDense,
    /// The tiled CPU path, with tiles of its own choice.
    CpuTiled,
    /// The narrowest portable kernel that runs a call on the first CUDA device, in a form.
    Portable(Form),
    /// What the planner chooses for that device, in a form.
    Planned(Form),
}

impl Backend {
    /// Every one of them.
    pub const ALL: [Self; 6] = [
        Self::CpuDense,
        Self::CpuTiled,
        Self::Portable(Form::Cubin),
        Self::Portable(Form::Ptx),
        Self::Planned(Form::Cubin),
        Self::Planned(Form::Ptx),
    ];

    /// Whether it needs a GPU.
    pub fn is_gpu(self) -> bool {
        self.form().is_some()
    }

    /// The form of its kernels.
    pub fn form(self) -> Option<Form> {
        match self {
            Self::CpuDense | Self::CpuTiled => None,
            Self::Portable(form) | Self::Planned(form) => Some(form),
        }
    }

    /// The plan of a call on a GPU.
    ///
    /// # Errors
    /// The planner's; [`Error::NoDevice`] for a CPU backend.
    pub fn plan<T: Real>(self, attention: &Attention) -> Result<Plan<T>, Error> {
        match self {
            Self::CpuDense | Self::CpuTiled => Err(Error::NoDevice { ordinal: 0, count: 0 }),
            Self::Portable(form) => plan_of_family(attention, Family::Portable, form),
            Self::Planned(form) => plan(attention, None, Some(form)),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CpuDense => f.write_str("cpu_dense"),
            Self::CpuTiled => f.write_str("cpu_tiled"),
            Self::Portable(form) => write!(f, "portable_{form}"),
            Self::Planned(form) => write!(f, "planned_{form}"),
        }
    }
}

/// Results of a forward call, in the order of their axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// `[B, Sq, Hq, Dv]`, or `[Tq, Hq, Dv]` packed.
    pub o: Vec<f64>,
    /// `[B, Hq, Sq]`, or `[Hq, Tq]` packed.
    pub lse: Vec<f64>,
}

/// Gradients of a call, in the order of their axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Grads {
    /// As q.
    pub dq: Vec<f64>,
    /// As k.
    pub dk: Vec<f64>,
    /// As v.
    pub dv: Vec<f64>,
    /// As the bias, if there is one.
    pub dbias: Option<Vec<f64>>,
    /// `[Hq]`, if there are sinks.
    pub dsink: Option<Vec<f64>>,
}

/// The forward pass of a call by a backend.
///
/// # Errors
/// What the backend refuses, or finds wrong.
pub fn forward<T: Real>(backend: Backend, case: &Case<T>) -> Result<Outcome, Error> {
    let (o, lse) = match backend {
        Backend::CpuDense => {
            let result = dense::forward(&case.attention, &case.inputs(), Precision::F64)?;
            return Ok(Outcome { o: result.o, lse: result.lse });
        }
        Backend::CpuTiled => tiled_forward(case, None)?,
        Backend::Portable(_) | Backend::Planned(_) => {
            let plan = backend.plan::<T>(&case.attention)?;
            let stream = Stream::from(crate::gpu::copy_stream());
            let mut loaded = Loaded::new(case, true);
            // Malformed lengths are found on the host alone.
            let mut from_host = None;
            if case.has_lengths() {
                loaded.run_from_host_lengths(&plan, &stream, case)?;
                from_host = Some(loaded.results(&stream).0.bits());
                loaded.poison();
            }
            loaded.run(&plan, &stream)?;
            let (o, lse) = loaded.results(&stream);
            assert!(from_host.is_none_or(|o_bits| o_bits == o.bits()), "lengths differ by place");
            (o, lse.expect("it was asked for"))
        }
    };
    o.assert_written("o");
    lse.assert_written("lse");
    Ok(Outcome { o: o.contents(), lse: lse.contents() })
}

/// o and lse of the tiled path, with the memory around them.
///
/// # Errors
/// The library's; nothing was written then.
pub fn tiled_forward<T: Real>(
    case: &Case<T>,
    tile: Option<CpuTile>,
) -> Result<(Owned<T>, Owned<f32>), Error> {
    let mut o = Owned::poisoned(&case.o_dims, case.results);
    let mut lse = Owned::poisoned(&case.lse_dims, Arrangement::CONTIGUOUS);
    let mut output = Output { o: o.view_mut(), lse: Some(lse.view_mut()) };
    let done = tiled::forward(&case.attention, &case.inputs(), &mut output, tile);
    drop(output);
    if let Err(error) = done {
        assert_untouched(&o, "o");
        assert_untouched(&lse, "lse");
        return Err(error);
    }
    Ok((o, lse))
}

/// The backward pass of a call, every gradient, by a backend from its own forward results. A GPU's
/// is deterministic where it can be, so that equal calls can be compared bit by bit.
///
/// # Errors
/// What the backend refuses, or finds wrong.
pub fn backward<T: Real>(backend: Backend, case: &Case<T>) -> Result<Grads, Error> {
    match backend {
        Backend::CpuDense => dense_backward(case, Precision::F64),
        Backend::CpuTiled => tiled_backward(case, None),
        Backend::Portable(_) | Backend::Planned(_) => {
            let attention = match case.sums_bias_gradient() {
                false => case.attention.deterministic(),
                true => case.attention,
            };
            let plan = backend.plan::<T>(&attention)?;
            let stream = Stream::from(crate::gpu::copy_stream());
            let mut loaded = LoadedBackward::new(case, &plan, Wanted::ALL, &stream)?;
            // Malformed lengths are found on the host alone.
            let mut from_host = None;
            if case.has_lengths() {
                loaded.run_from_host_lengths(&plan, &stream, case)?;
                from_host = Some(loaded.results(&stream).bits());
                loaded.poison();
            }
            loaded.run(&plan, &stream)?;
            let gradients = loaded.results(&stream);
            gradients.assert_written();
            let bits = from_host.filter(|_| !case.sums_bias_gradient());
            assert!(bits.is_none_or(|bits| bits == gradients.bits()), "lengths differ by place");
            let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv]
                .map(|gradient| gradient.as_ref().expect("it was asked for").contents());
            let [dbias, dsink] = [&gradients.dbias, &gradients.dsink]
                .map(|gradient| gradient.as_ref().map(Owned::contents));
            Ok(Grads { dq, dk, dv, dbias, dsink })
        }
    }
}

/// The backward pass of the dense path in a precision.
///
/// # Errors
/// The library's.
pub fn dense_backward<T: Real>(case: &Case<T>, precision: Precision) -> Result<Grads, Error> {
    let d_lse = case.d_lse.as_ref().map(Owned::view);
    let (inputs, d_o) = (case.inputs(), case.d_o.view());
    let result = dense::backward(&case.attention, &inputs, &d_o, d_lse.as_ref(), precision)?;
    let dense::DenseBackward { dq, dk, dv, dbias, dsink } = result;
    Ok(Grads { dq, dk, dv, dbias, dsink })
}

/// The backward pass of the tiled path.
///
/// # Errors
/// The library's; nothing was written then.
pub fn tiled_backward<T: Real>(case: &Case<T>, tile: Option<CpuTile>) -> Result<Grads, Error> {
    let (o, lse) = tiled_forward(case, tile)?;
    let mut dq = Owned::poisoned(case.q.dims(), case.results);
    let mut dk = Owned::poisoned(case.k.dims(), case.results);
    let mut dv = Owned::poisoned(case.v.dims(), case.results);
    let shape = case.attention.shape();
    let contiguous = |dims: &[usize]| Owned::<f32>::poisoned(dims, Arrangement::CONTIGUOUS);
    let mut dbias = case.bias.as_ref().map(|(axes, _)| contiguous(&broadcast_dims(*axes, shape)));
    let mut dsink = case.sink.as_ref().map(|sink| contiguous(sink.dims()));
    let saved = Saved { inputs: case.inputs(), o: o.view(), lse: lse.view() };
    let mut gradients = Gradients {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dbias: dbias.as_mut().map(Owned::view_mut),
        dsink: dsink.as_mut().map(Owned::view_mut),
    };
    let d_lse = case.d_lse.as_ref().map(Owned::view);
    let d_o = case.d_o.view();
    tiled::backward(&case.attention, &saved, &d_o, d_lse.as_ref(), &mut gradients, tile)?;
    drop(gradients);
    for (name, gradient) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
        gradient.assert_written(name);
    }
    for (name, gradient) in [("dbias", &dbias), ("dsink", &dsink)] {
        if let Some(gradient) = gradient {
            gradient.assert_written(name);
        }
    }
    Ok(Grads {
        dq: dq.contents(),
        dk: dk.contents(),
        dv: dv.contents(),
        dbias: dbias.as_ref().map(Owned::contents),
        dsink: dsink.as_ref().map(Owned::contents),
    })
}

/// The forward pass in binary64, and as the element type rounds.
pub fn forward_references<T: Real>(case: &Case<T>) -> [Outcome; 2] {
    [Precision::F64, Precision::Rounded(<T as Element>::DTYPE)].map(|precision| {
        let result = dense::forward(&case.attention, &case.inputs(), precision);
        let result = result.expect("a call that the oracle accepts");
        Outcome { o: result.o, lse: result.lse }
    })
}

/// The gradients in binary64, and as the element type rounds.
pub fn backward_references<T: Real>(case: &Case<T>) -> [Grads; 2] {
    [Precision::F64, Precision::Rounded(<T as Element>::DTYPE)]
        .map(|precision| dense_backward(case, precision).expect("a call that the oracle accepts"))
}

fn assert_untouched<T: Real>(owned: &Owned<T>, name: &str) {
    let touched = owned.values.iter().filter(|value| !value.is_poison()).count();
    assert!(touched == 0, "{name}: the call was refused, yet {touched} elements were written");
}
