//! A plan as Python holds it: one kind of call, validated, its kernels chosen and loaded.

use std::sync::OnceLock;

use ferroflash::{
    Align, Attention, Broadcast, Device, Direction, Dropout, DropoutState, Dtype, Element, Error,
    Explanation, Layout, Mask, Place, Plan, Preference, Result, Scale, Shape, WorkspaceBytes,
};
use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::exception;
use crate::view::{field, integers};

/// What is asked for besides q, k and v, under the names that Python has for it.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) shape: Shape,
    pub(crate) layout: Layout,
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: f32,
    pub(crate) alibi: bool,
    pub(crate) bias: Option<Broadcast>,
    pub(crate) boolean_mask: Option<Broadcast>,
    pub(crate) bit_mask: Option<Broadcast>,
    pub(crate) sink: bool,
    pub(crate) dropout: Option<Dropout>,
    /// Whether the backward pass must give the same bits every time.
    pub(crate) deterministic: bool,
}

impl Options {
    /// Attention of `shape` without options.
    pub(crate) const fn of(shape: Shape) -> Self {
        Self {
            shape,
            layout: Layout::Dense,
            mask: Mask::full(),
            scale: None,
            softcap: 0.0,
            alibi: false,
            bias: None,
            boolean_mask: None,
            bit_mask: None,
            sink: false,
            dropout: None,
            deterministic: false,
        }
    }

    /// The options that a kernel may lack, each with the name of its argument and whether it was
    /// given.
    fn named(&self) -> [(&'static str, bool); 9] {
        let plain = [Mask::full(), Mask::causal(Align::TopLeft)];
        let is_plain = plain.contains(&self.mask.aligned(Align::TopLeft));
        let layout = match self.layout {
            Layout::KeyLengths => "key_lengths",
            Layout::Dense | Layout::Packed { .. } => "cu_seqlens_q",
        };
        [
            ("window_size", !is_plain),
            (layout, self.layout != Layout::Dense),
            ("softcap", self.softcap != 0.0),
            ("alibi_slopes", self.alibi),
            ("bias", self.bias.is_some()),
            ("mask", self.boolean_mask.is_some()),
            ("mask_bits", self.bit_mask.is_some()),
            ("sink", self.sink),
            ("dropout_p", self.dropout.is_some()),
        ]
    }

    /// The call with those of [`Options::named`] whose name `wanted` accepts.
    fn attention(&self, wanted: impl Fn(&str) -> bool) -> Attention {
        let mut attention = Attention::new(self.shape);
        if let Some(factor) = self.scale {
            attention = attention.scale(Scale::Factor(factor));
        }
        if self.deterministic {
            attention = attention.deterministic();
        }
        let named = self.named();
        if !named[0].1 || wanted("window_size") {
            attention = attention.mask(self.mask);
        }
        for (name, _) in named.into_iter().filter(|(name, given)| *given && wanted(name)) {
            attention = match name {
                "softcap" => attention.softcap(self.softcap),
                "alibi_slopes" => attention.alibi(),
                "bias" => self.bias.map_or(attention, |axes| attention.bias(axes)),
                "mask" => self.boolean_mask.map_or(attention, |axes| attention.boolean_mask(axes)),
                "mask_bits" => self.bit_mask.map_or(attention, |axes| attention.bit_mask(axes)),
                "sink" => attention.sink(),
                "dropout_p" => self.dropout.map_or(attention, |dropout| attention.dropout(dropout)),
                "window_size" => attention,
                _ => attention.layout(self.layout),
            };
        }
        attention
    }

    /// Makes the plan, which loads its kernels.
    pub(crate) fn plan(&self, dtype: Dtype, place: Place) -> Result<Typed> {
        typed(&self.attention(|_| true), dtype, place)
    }

    /// The names of the arguments that no kernel at `place` does, forward or backward.
    fn unsupported(&self, direction: Direction, dtype: Dtype, place: Place) -> String {
        let lacks = |attention: Attention| match typed(&attention, dtype, place) {
            Err(Error::Unsupported { .. }) => true,
            Ok(typed) => direction == Direction::Backward && typed.explain().no_backward.is_some(),
            Err(_) => false,
        };
        if lacks(self.attention(|_| false)) {
            return "q, k, v".to_owned();
        }
        let given = self.named().into_iter().filter(|(_, given)| *given).map(|(name, _)| name);
        let (alone, rest): (Vec<&str>, Vec<&str>) =
            given.partition(|name| lacks(self.attention(|wanted| wanted == *name)));
        // Each may be had alone, and only all of them together not.
        if alone.is_empty() { rest } else { alone }.join(", ")
    }
}

/// A plan of any element type.
pub(crate) enum Typed {
    /// bfloat16.
    Bf16(Plan<bf16>),
    /// float16.
    F16(Plan<f16>),
    /// float32.
    F32(Plan<f32>),
}

impl Typed {
    /// What will run, and why.
    pub(crate) fn explain(&self) -> &Explanation {
        match self {
            Typed::Bf16(plan) => plan.explain(),
            Typed::F16(plan) => plan.explain(),
            Typed::F32(plan) => plan.explain(),
        }
    }

    /// Bytes of workspace of each direction.
    fn workspace(&self) -> WorkspaceBytes {
        match self {
            Typed::Bf16(plan) => plan.workspace(),
            Typed::F16(plan) => plan.workspace(),
            Typed::F32(plan) => plan.workspace(),
        }
    }
}

fn typed(attention: &Attention, dtype: Dtype, place: Place) -> Result<Typed> {
    fn make<T: Element>(attention: &Attention, place: Place) -> Result<Plan<T>> {
        let device = match place {
            Place::Host => Device::cpu(),
            Place::Cuda(ordinal) => Device::cuda(ordinal)?,
        };
        let kernel = preferred_kernel();
        attention.plan_with(&device, Preference { kernel, ..Preference::default() })
    }
    Ok(match dtype {
        Dtype::Bf16 => Typed::Bf16(make(attention, place)?),
        Dtype::F16 => Typed::F16(make(attention, place)?),
        Dtype::F32 => Typed::F32(make(attention, place)?),
    })
}

/// A kernel, or a family of them, that benchmarks insist on: `FERROFLASH_KERNEL`, read once.
fn preferred_kernel() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    NAME.get_or_init(|| std::env::var("FERROFLASH_KERNEL").ok()).as_deref()
}

/// One kind of call, with its kernels.
#[pyclass(frozen, module = "ferroflash._native", name = "Plan")]
pub(crate) struct PyPlan {
    pub(crate) typed: Typed,
    pub(crate) place: Place,
    /// Bytes of workspace that a forward call needs.
    #[pyo3(get)]
    forward_bytes: usize,
    /// Bytes of workspace that a backward call needs.
    #[pyo3(get)]
    backward_bytes: usize,
    /// The arguments that leave the call without a backward pass, and why, where there is none.
    #[pyo3(get)]
    no_backward: Option<String>,
    /// Whether a forward call is faster where q and o have a head's rows one after another.
    #[pyo3(get)]
    heads_first: bool,
}

#[pymethods]
impl PyPlan {
    /// `Plan(dtype, device, q, k, v, options, declared)`.
    ///
    /// `dtype` is 0 for bf16, 1 for f16, 2 for f32; `device` the CUDA ordinal, or −1 for the CPU;
    /// q, k and v are dimensions. `options` is `(softmax_scale, top_left, left, right, softcap,
    /// deterministic)`; `declared` is `None` or `(alibi, bias, mask, sink, key_lengths, packed,
    /// dropout, mask_bits)`: whether there are slopes, the dimensions of bias and mask, whether
    /// there are a sink and key lengths, `(items, longest q, longest k)`, the probability of a
    /// dropout whose state comes with each call, and the dimensions of a mask with a bit a key.
    #[new]
    #[pyo3(signature = (dtype, device, q, k, v, options, declared, /))]
    #[expect(clippy::too_many_arguments, reason = "they are what a plan depends on")]
    fn new(
        py: Python<'_>,
        dtype: u8,
        device: i32,
        q: &Bound<'_, PyTuple>,
        k: &Bound<'_, PyTuple>,
        v: &Bound<'_, PyTuple>,
        options: &Bound<'_, PyTuple>,
        declared: Option<&Bound<'_, PyTuple>>,
    ) -> PyResult<Self> {
        let dtype = match dtype {
            0 => Dtype::Bf16,
            1 => Dtype::F16,
            2 => Dtype::F32,
            other => return Err(PyValueError::new_err(format!("dtype: no element type {other}"))),
        };
        let place = usize::try_from(device).map_or(Place::Host, Place::Cuda);
        let options = read_options([q, k, v], options, declared)?;
        let typed = py.detach(|| {
            options.plan(dtype, place).map_err(|error| match error {
                Error::Unsupported { .. } => {
                    (error, options.unsupported(Direction::Forward, dtype, place))
                }
                other => (other, String::new()),
            })
        });
        let typed = typed.map_err(|(error, names)| exception(error, &names))?;
        let WorkspaceBytes { forward, backward } = typed.workspace();
        let no_backward = typed.explain().no_backward.as_ref().map(|why| {
            let names = options.unsupported(Direction::Backward, dtype, place);
            format!("{names}: no gradients: {why}")
        });
        Ok(Self {
            // One row a head is packed in any layout.
            heads_first: typed.explain().packing.is_some() && options.shape.q_len > 1,
            typed,
            place,
            forward_bytes: forward,
            backward_bytes: backward,
            no_backward,
        })
    }

    /// What will run and why, in words.
    fn explain(&self) -> String {
        self.typed.explain().to_string()
    }
}

/// Reads the arguments of [`PyPlan::new`].
fn read_options(
    [q, k, v]: [&Bound<'_, PyTuple>; 3],
    options: &Bound<'_, PyTuple>,
    declared: Option<&Bound<'_, PyTuple>>,
) -> PyResult<Options> {
    let dims = |tuple: &Bound<'_, PyTuple>, name| -> PyResult<([usize; 4], usize)> {
        let mut dims = [1; 4];
        let rank = integers(tuple, &mut dims, name)?;
        Ok((dims, rank))
    };
    let packed: Option<(usize, usize, usize)> = match declared {
        Some(declared) => field(declared, 5, "max_seqlen_q, max_seqlen_k")?,
        None => None,
    };
    let (needs, axes) = match packed {
        Some(_) => (3, "[token, head, channel]"),
        None => (4, "[batch, row, head, channel]"),
    };
    let mut sizes = [[1; 4]; 3];
    for ((size, tuple), name) in sizes.iter_mut().zip([q, k, v]).zip(["q", "k", "v"]) {
        let had = tuple.len();
        if had != needs {
            let message = format!("{name}: has {had} axes, but it must have {needs}: {axes}");
            return Err(PyValueError::new_err(message));
        }
        *size = dims(tuple, name)?.0;
        if needs == 3 {
            size.rotate_right(1);
        }
    }
    let [q, k, v] = sizes;
    // In the order of the caller's axes, as the plan itself would say it at the first call.
    let in_order = |size: [usize; 4]| size[4 - needs..].to_vec();
    for (tensor, had, channels) in [("k", k, q[3]), ("v", v, v[3])] {
        let needs = [if packed.is_some() { 1 } else { q[0] }, k[1], k[2], channels];
        if had != needs {
            let (had, needs) = (in_order(had), in_order(needs));
            return Err(exception(Error::Dimensions { tensor, had, needs }, ""));
        }
    }
    let mut shape = Shape {
        batch: q[0],
        q_heads: q[2],
        kv_heads: k[2],
        q_len: q[1],
        kv_len: k[1],
        head_dim: q[3],
        value_dim: v[3],
    };
    let mut layout = Layout::Dense;
    if let Some((items, longest_q, longest_k)) = packed {
        layout = Layout::Packed { q_tokens: q[1], kv_tokens: k[1] };
        shape = Shape { batch: items, q_len: longest_q, kv_len: longest_k, ..shape };
    }
    let align = match field(options, 1, "align")? {
        true => Align::TopLeft,
        false => Align::BottomRight,
    };
    let left = side(field(options, 2, "window_size")?)?;
    let right = side(field(options, 3, "window_size")?)?;
    let softcap: f64 = field(options, 4, "softcap")?;
    let read = Options {
        layout,
        mask: Mask::causal(align).window(left, right),
        scale: field::<Option<f64>>(options, 0, "softmax_scale")?.map(|scale| scale as f32),
        softcap: softcap as f32,
        deterministic: field(options, 5, "deterministic")?,
        ..Options::of(shape)
    };
    let Some(declared) = declared else { return Ok(read) };
    let broadcast = |index, name| -> PyResult<Option<Broadcast>> {
        let Some(had) = field::<Option<Bound<'_, PyTuple>>>(declared, index, name)? else {
            return Ok(None);
        };
        let (had, rank) = dims(&had, name)?;
        let last = if name == "mask_bits" { shape.kv_len.div_ceil(8) } else { shape.kv_len };
        let needs = [shape.batch, shape.q_heads, shape.q_len, last];
        let fits = |axis: usize| had[axis] == needs[axis] || (axis < 3 && had[axis] == 1);
        if rank != 4 || !(0..4).all(fits) {
            return Err(PyValueError::new_err(format!(
                "{name}: has dimensions {:?}, but it must have {needs:?}, or 1 in place of any but \
                 the last",
                &had[..rank]
            )));
        }
        let [batch, heads, rows] = [0, 1, 2].map(|axis| had[axis] == 1 && needs[axis] != 1);
        Ok(Some(Broadcast { batch, heads, rows }))
    };
    let dropout: Option<f64> = field(declared, 6, "dropout_p")?;
    Ok(Options {
        alibi: field(declared, 0, "alibi_slopes")?,
        bias: broadcast(1, "bias")?,
        boolean_mask: broadcast(2, "mask")?,
        bit_mask: broadcast(7, "mask_bits")?,
        sink: field(declared, 3, "sink")?,
        layout: match field(declared, 4, "key_lengths")? {
            true => Layout::KeyLengths,
            false => layout,
        },
        dropout: dropout.map(|p| Dropout::new(p as f32, DropoutState::Given)),
        ..read
    })
}

/// Refuses a mask side under −1, which means unbounded.
fn side(keys: i64) -> PyResult<Option<usize>> {
    match keys {
        -1 => Ok(None),
        _ => usize::try_from(keys).map(Some).map_err(|_| {
            PyValueError::new_err(format!(
                "window_size: a side of {keys}, but it must be two integers: keys before and after \
                 the diagonal, -1 for all"
            ))
        }),
    }
}
