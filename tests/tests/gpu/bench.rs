//! Times every kernel: B·S = 16384 tokens, H·D = 2048 channels, normal inputs, CUDA events.
//!
//! A sample is a group of launches long enough to be timed, divided by their number; 20 samples
//! follow a warm-up. The last rows of one head are checked against the dense path as well, so that
//! what is timed is known to be right at its real size: o forward, dq backward. FLOPs are
//! 2·B·H·S²·(D + Dv) forward and 2·B·H·S²·(3·D + 2·Dv) for the whole backward pass, half of it
//! where a mask is causal.

use std::sync::OnceLock;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, DevicePtr};
use ferroflash::cpu::dense::{self, Precision};
use ferroflash::{
    Align, Attention, Buffer, Direction, Dtype, Element, Form, Gradients, Inputs, KernelSpec, Mask,
    MaskClass, Output, Place, Saved, Shape, Stream, TensorMut, TensorRef, contiguous_strides,
};
use ferroflash_tests::bound::{Measured, result_error};
use ferroflash_tests::case::shape;
use ferroflash_tests::element::Real;
use ferroflash_tests::evidence;
use ferroflash_tests::gpu::{copy_stream, device, plan};
use ferroflash_tests::random::normal;
use half::{bf16, f16};
use libtest_mimic::Trial;
use serde_json::{Map, json};

use crate::{kernels_and_forms, trial};

/// Tokens of a call.
pub(crate) const TOKENS: usize = 16_384;
/// Channels of all heads of a token, or just under.
pub(crate) const CHANNELS: usize = 2_048;
/// Rows of one head that are checked.
const CHECKED_ROWS: usize = 8;
const SAMPLES: usize = 20;
/// Shortest group of launches, in milliseconds.
const GROUP_MS: f32 = 2.0;

/// `bench/KERNEL/FORM/sLENGTH`.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        if spec.mask > MaskClass::Causal && spec.dtype != Dtype::F32 {
            // What their options cost is timed by `bench_options`; of f32 there are no others.
            continue;
        }
        for len in [1024, 4096, 16_384] {
            let name = format!("bench/{}/{form}/s{len}", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => time::<f16>(spec, form, len),
                Dtype::F32 => time::<f32>(spec, form, len),
                _ => time::<bf16>(spec, form, len),
            }));
        }
    }
    for (spec, form, is_possible) in kernels_and_forms(Direction::Backward) {
        for (len, order) in [1024, 4096, 16_384].map(|len| [(len, ""), (len, "_ordered")]).concat()
        {
            let name = format!("bench/{}/{form}/s{len}{order}", spec.name);
            let is_ordered = !order.is_empty();
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => time_backward::<f16>(spec, form, len, is_ordered),
                Dtype::F32 => time_backward::<f32>(spec, form, len, is_ordered),
                _ => time_backward::<bf16>(spec, form, len, is_ordered),
            }));
        }
    }
    trials
}

/// Random q, k and v, wide enough for every kernel, on the host and on the device.
pub(crate) struct Pool<T> {
    host: [Vec<T>; 3],
    device: [CudaSlice<T>; 3],
}

impl<T: Real> Pool<T> {
    fn new() -> Self {
        // Dv may be four times D.
        let elements = TOKENS * CHANNELS * 4;
        let values = |seed| -> Vec<T> {
            let normal = normal(seed, TOKENS * CHANNELS, 1.0);
            normal.iter().cycle().take(elements).map(|value| T::from_f32(*value)).collect()
        };
        let host = [1, 2, 3].map(values);
        let stream = copy_stream();
        let device = [0, 1, 2].map(|tensor| stream.clone_htod(&host[tensor]).expect("memory"));
        stream.synchronize().expect("a copy");
        Self { host, device }
    }
}

/// An element type's pool, made once.
pub(crate) trait Pooled: Real {
    fn pool() -> &'static Pool<Self>;
}

macro_rules! pooled {
    ($($element:ty)*) => {$(
        impl Pooled for $element {
            fn pool() -> &'static Pool<Self> {
                static POOL: OnceLock<Pool<$element>> = OnceLock::new();
                POOL.get_or_init(Pool::new)
            }
        }
    )*};
}
pooled!(bf16 f16 f32);

/// Sizes and mask of the call that a kernel is timed on.
fn call(spec: &KernelSpec, len: usize) -> (Shape, Mask) {
    let (dim, value_dim) = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let heads = CHANNELS / dim;
    let sizes = shape(TOKENS / len, (heads, heads), (len, len), (dim, value_dim));
    let is_causal = spec.mask != MaskClass::Full;
    (sizes, if is_causal { Mask::causal(Align::BottomRight) } else { Mask::full() })
}

fn time<T: Pooled>(spec: &'static KernelSpec, form: Form, len: usize) {
    let (sizes, mask) = call(spec, len);
    let plan = plan::<T>(&Attention::new(sizes).mask(mask), Some(spec.name), Some(form));
    let plan = plan.expect("it is eligible");
    let queue = copy_stream();
    let o_elements = sizes.o_dims().iter().product();
    let o = queue.clone_htod(&vec![T::POISON; o_elements]).expect("memory");
    queue.synchronize().expect("a copy");

    let stream = Stream::from(queue.clone());
    let (o_dims, o_strides) = (sizes.o_dims(), contiguous_strides(&sizes.o_dims()));
    let milliseconds = samples(|| {
        let address = o.device_ptr(&queue).0 as *mut T;
        // SAFETY: `o` has this many elements and outlives every launch.
        let o = unsafe { TensorMut::from_raw(address, &o_dims, &o_strides, Place::Cuda(0)) };
        let mut output = Output { o: o.expect("four axes"), lse: None };
        plan.run(&stream, inputs(&sizes), &mut output).expect("a launch");
    });
    let had = queue.clone_dtoh(&o).expect("a copy");
    queue.synchronize().expect("a copy");
    let error = check_last_rows(&sizes, &had, sizes.value_dim, |rows, precision| {
        dense::forward(&Attention::new(rows).mask(mask), &last::<T>(&sizes), precision)
            .expect("a call that the oracle accepts")
            .o
    });

    let products = sizes.head_dim + sizes.value_dim;
    report(spec, form, &sizes, products, "", &milliseconds, error);
    error.assert_holds("o of the last rows");
}

/// Prints and records a kernel's rate, with `products` multiplications a visible cell.
fn report(
    spec: &'static KernelSpec,
    form: Form,
    sizes: &Shape,
    products: usize,
    order: &str,
    milliseconds: &[f32],
    error: Measured,
) {
    let (heads, len) = (sizes.q_heads, sizes.q_len);
    let is_causal = spec.mask != MaskClass::Full;
    let cells = (sizes.batch * heads * len * len) as f64 * if is_causal { 0.5 } else { 1.0 };
    let teraflops = 2.0 * cells * products as f64 / (f64::from(median(milliseconds)) * 1e9);
    println!("{:<44} {form:<5} S {len:>5}: {teraflops:>6.1} TFLOP/s {order}", spec.name);
    let mut more = Map::new();
    more.insert("ms".to_owned(), json!(milliseconds));
    more.insert("tflops".to_owned(), json!(teraflops));
    let workload = json!({
        "name": format!("bench{order}"), "batch": sizes.batch, "q_heads": heads,
        "kv_heads": heads, "q_len": len, "kv_len": len,
        "head_dim": sizes.head_dim, "value_dim": sizes.value_dim,
        "mask": if is_causal { "BottomRight, right 0" } else { "full" },
        "checked_rows": CHECKED_ROWS,
    });
    evidence::append(spec, form, workload, error, error.holds(), more);
}

/// A tensor of the pool.
pub(crate) fn read<T: Pooled>(tensor: usize, dims: &[usize]) -> TensorRef<'static, T> {
    let address = T::pool().device[tensor].device_ptr(&copy_stream()).0;
    let strides = contiguous_strides(dims);
    // SAFETY: the pool is larger than any call's tensor and is never freed.
    let view = unsafe { TensorRef::from_raw(address as *const T, dims, &strides, Place::Cuda(0)) };
    view.expect("at most four axes")
}

/// q, k and v.
fn inputs<T: Pooled>(sizes: &Shape) -> Inputs<'static, T> {
    Inputs::new(read(0, &sizes.q_dims()), read(1, &sizes.k_dims()), read(2, &sizes.v_dims()))
}

/// Milliseconds of one launch on the copy stream, once a sample.
fn samples(mut launch: impl FnMut()) -> Vec<f32> {
    let [samples] = alternating([&mut launch]);
    samples
}

/// Milliseconds of one launch of each of some calls on the copy stream. A round takes one sample of
/// each, beginning with another one than the round before.
pub(crate) fn alternating<const N: usize>(mut launches: [&mut dyn FnMut(); N]) -> [Vec<f32>; N] {
    let queue = copy_stream();
    let context = device().expect("a device").context().expect("CUDA").clone();
    let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).expect("an event");
    let (start, end) = (event(), event());
    let group = |launch: &mut dyn FnMut(), count: usize| -> f32 {
        start.record(&queue).expect("recorded");
        (0..count).for_each(|_| launch());
        end.record(&queue).expect("recorded");
        start.elapsed_ms(&end).expect("the kernels ran") / count as f32
    };
    let mut counts = [0; N];
    for (launch, count) in launches.iter_mut().zip(&mut counts) {
        group(&mut **launch, 2);
        *count = (GROUP_MS / group(&mut **launch, 3)).ceil().clamp(1.0, 1000.0) as usize;
        group(&mut **launch, *count);
    }
    let mut samples = std::array::from_fn(|_| Vec::with_capacity(SAMPLES));
    for round in 0..SAMPLES {
        for turn in 0..N {
            let own = (round + turn) % N;
            samples[own].push(group(&mut *launches[own], counts[own]));
        }
    }
    samples
}

/// The whole backward pass, from its first kernel to its last.
fn time_backward<T: Pooled>(spec: &'static KernelSpec, form: Form, len: usize, is_ordered: bool) {
    let (sizes, mask) = call(spec, len);
    let mut attention = Attention::new(sizes).mask(mask);
    if is_ordered {
        attention = attention.deterministic();
    }
    let plan = plan::<T>(&attention, Some(spec.name), Some(form)).expect("it is eligible");
    let queue = copy_stream();
    let stream = Stream::from(queue.clone());
    let like = |dims: [usize; 4]| {
        Buffer::<T>::new(&device().expect("a device"), dims.iter().product()).expect("memory")
    };
    let (mut o, mut dq) = (like(sizes.o_dims()), like(sizes.q_dims()));
    let (mut dk, mut dv) = (like(sizes.k_dims()), like(sizes.v_dims()));
    let lse_elements = sizes.lse_dims().iter().product();
    let mut lse = Buffer::<f32>::new(&device().expect("a device"), lse_elements).expect("memory");
    let bytes = plan.workspace().backward;
    let mut workspace = Buffer::<u8>::new(&device().expect("a device"), bytes).expect("memory");
    let mut output = Output {
        o: o.tensor_mut(&stream, &sizes.o_dims()).expect("o"),
        lse: Some(lse.tensor_mut(&stream, &sizes.lse_dims()).expect("lse")),
    };
    plan.run(&stream, inputs(&sizes), &mut output).expect("a forward pass");
    drop(output);

    let milliseconds = samples(|| {
        let saved = Saved {
            inputs: inputs(&sizes),
            o: o.tensor(&stream, &sizes.o_dims()).expect("o"),
            lse: lse.tensor(&stream, &sizes.lse_dims()).expect("lse"),
        };
        let mut gradients = Gradients {
            dq: Some(dq.tensor_mut(&stream, &sizes.q_dims()).expect("dq")),
            dk: Some(dk.tensor_mut(&stream, &sizes.k_dims()).expect("dk")),
            dv: Some(dv.tensor_mut(&stream, &sizes.v_dims()).expect("dv")),
            ..Gradients::default()
        };
        let workspace = workspace.tensor_mut(&stream, &[bytes]).expect("bytes");
        let d_o = read(1, &sizes.o_dims());
        plan.backward_into(&stream, &saved, &d_o, None, &mut gradients, workspace.into())
            .expect("a launch");
    });
    let had = dq.to_vec(&stream).expect("a copy");
    let error = check_last_rows(&sizes, &had, sizes.head_dim, |rows, precision| {
        let d_o = last_rows::<T>(1, &sizes, CHECKED_ROWS, sizes.value_dim);
        dense::backward(&Attention::new(rows).mask(mask), &last::<T>(&sizes), &d_o, None, precision)
            .expect("a call that the oracle accepts")
            .dq
    });
    let products = 3 * sizes.head_dim + 2 * sizes.value_dim;
    let order = if is_ordered { "_ordered" } else { "" };
    report(spec, form, &sizes, products, order, &milliseconds, error);
    error.assert_holds("dq of the last rows");
}

pub(crate) fn median(samples: &[f32]) -> f32 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted[sorted.len() / 2]
}

/// The last `rows` rows of the last head of the last item of a tensor of the pool.
fn last_rows<'p, T: Pooled>(tensor: usize, s: &Shape, rows: usize, dim: usize) -> TensorRef<'p, T> {
    let row = s.q_heads * dim;
    let first = (s.batch * s.q_len - rows) * row + (s.q_heads - 1) * dim;
    let (dims, strides) = ([1, rows, 1, dim], [0, row as i64, 0, 1]);
    TensorRef::host_strided(&T::pool().host[tensor][first..], &dims, &strides).expect("inside")
}

/// The last rows of q, and all keys, of the last head of the last item.
fn last<'p, T: Pooled>(s: &Shape) -> Inputs<'p, T> {
    Inputs::new(
        last_rows(0, s, CHECKED_ROWS, s.head_dim),
        last_rows(1, s, s.kv_len, s.head_dim),
        last_rows(2, s, s.kv_len, s.value_dim),
    )
}

/// The error of the last rows of a result of `dim` channels: `oracle` computes a call of few rows,
/// bottom-right aligned.
fn check_last_rows<T: Pooled>(
    s: &Shape,
    had: &[T],
    dim: usize,
    oracle: impl Fn(Shape, Precision) -> Vec<f64>,
) -> Measured {
    let rows = Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len: CHECKED_ROWS, ..*s };
    let exact = oracle(rows, Precision::F64);
    let rounded = oracle(rows, Precision::Rounded(<T as Element>::DTYPE));
    let last = had.chunks_exact(s.q_heads * dim).skip(s.batch * s.q_len - CHECKED_ROWS);
    let had: Vec<f64> = last.flat_map(|row| &row[row.len() - dim..]).map(|x| x.to_f64()).collect();
    result_error(&had, &exact, &rounded, T::DTYPE)
}
