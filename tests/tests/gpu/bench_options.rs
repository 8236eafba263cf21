//! What each option costs: masked and general kernels at 4096 rows with one option at a time, to be
//! held against the plain kernel of the same dimensions.
//!
//! FLOPs are those of the visible cells. Biases, masks, slopes and lengths are read from memory
//! full of ones: as f32 next to nothing, as bytes true, as lengths past every key and so clamped.

use std::sync::OnceLock;

use cudarc::driver::{CudaSlice, DevicePtr};
use ferroflash::{
    Align, Attention, Broadcast, Direction, Dropout, Dtype, Form, Inputs, KernelSpec, Layout,
    Lengths, Mask, MaskClass, Output, Packed, Place, Shape, Stream, TensorMut, TensorRef,
    contiguous_strides,
};
use ferroflash_tests::case::shape;
use ferroflash_tests::gpu::{copy_stream, plan};
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::bench::{CHANNELS, Pooled, TOKENS, median, read, samples};
use crate::{kernels_and_forms, trial};

/// Query rows and keys of an item.
const LEN: usize = 4096;
/// Keys that a window shows before the diagonal.
const WINDOW: usize = 1024;

const MASKED: &[&str] =
    &["none", "causal", "window", "key_lengths", "packed", "alibi", "softcap", "sink"];
const GENERAL: &[&str] = &["mask", "bias", "dropout"];

/// `bench/KERNEL/FORM/OPTION`.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        let options: Vec<&str> = match spec.mask {
            MaskClass::Full | MaskClass::Causal => continue,
            MaskClass::Masked => MASKED.to_vec(),
            MaskClass::General => ["none"].iter().chain(GENERAL).copied().collect(),
        };
        for option in options {
            let name = format!("bench/{}/{form}/{option}", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => time::<f16>(spec, form, option),
                _ => time::<bf16>(spec, form, option),
            }));
        }
    }
    trials
}

/// Memory that every option reads.
fn ones() -> &'static CudaSlice<u8> {
    static ONES: OnceLock<CudaSlice<u8>> = OnceLock::new();
    ONES.get_or_init(|| {
        let stream = copy_stream();
        let ones = stream.clone_htod(&vec![1_u8; LEN * LEN * 4]).expect("device memory");
        stream.synchronize().expect("a copy");
        ones
    })
}

/// A tensor in that memory.
fn option<V>(dims: &[usize]) -> TensorRef<'static, V> {
    let address = ones().device_ptr(&copy_stream()).0 as *const V;
    // SAFETY: no option of these calls has more elements, and the memory is never freed.
    unsafe { TensorRef::from_raw(address, dims, &contiguous_strides(dims), Place::Cuda(0)) }
        .expect("at most four axes")
}

fn attention(option: &str, sizes: Shape) -> Attention {
    let call = Attention::new(sizes);
    let once = Broadcast { batch: true, heads: true, rows: false };
    let causal = Mask::causal(Align::BottomRight);
    let tokens = sizes.batch * LEN;
    match option {
        "none" => call,
        "causal" => call.mask(causal),
        "window" => call.mask(causal.window(Some(WINDOW), Some(0))),
        "key_lengths" => call.layout(Layout::KeyLengths),
        "packed" => call.layout(Layout::Packed { q_tokens: tokens, kv_tokens: tokens }),
        "alibi" => call.alibi(),
        "softcap" => call.softcap(50.0),
        "sink" => call.sink(),
        "mask" => call.boolean_mask(once),
        "bias" => call.bias(once),
        "dropout" => call.dropout(Dropout { probability: 0.1, seed: 1, offset: 2 }),
        other => panic!("no option {other}"),
    }
}

fn time<T: Pooled>(spec: &'static KernelSpec, form: Form, name: &'static str) {
    let (dim, value_dim) = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let heads = CHANNELS / dim;
    let sizes = shape(TOKENS / LEN, (heads, heads), (LEN, LEN), (dim, value_dim));
    let plan = plan::<T>(&attention(name, sizes), Some(spec.name), Some(form));
    let plan = plan.expect("it is eligible");
    let queue = copy_stream();
    let stream = Stream::from(queue.clone());
    let of_batch = |dims: [usize; 4]| match name {
        "packed" => vec![dims[0] * dims[1], dims[2], dims[3]],
        _ => dims.to_vec(),
    };
    let o_dims = of_batch(sizes.o_dims());
    let o = queue.clone_htod(&vec![T::POISON; o_dims.iter().product()]).expect("memory");
    let offsets: Vec<i32> = (0..=sizes.batch).map(|item| (item * LEN) as i32).collect();
    let offsets = queue.clone_htod(&offsets).expect("memory");
    queue.synchronize().expect("a copy");
    let cumulative = || {
        let address = offsets.device_ptr(&queue).0 as *const i32;
        let dims = [sizes.batch + 1];
        // SAFETY: the offsets outlive every launch.
        let view = unsafe { TensorRef::from_raw(address, &dims, &[1], Place::Cuda(0)) };
        Lengths::Device(view.expect("one axis"))
    };
    let milliseconds = samples(|| {
        let mut inputs = Inputs::new(
            read(0, &of_batch(sizes.q_dims())),
            read(1, &of_batch(sizes.k_dims())),
            read(2, &of_batch(sizes.v_dims())),
        );
        inputs.alibi_slopes = (name == "alibi").then(|| option(&[heads]));
        inputs.sink = (name == "sink").then(|| option(&[heads]));
        inputs.bias = (name == "bias").then(|| option(&[1, 1, LEN, LEN]));
        inputs.boolean_mask = (name == "mask").then(|| option(&[1, 1, LEN, LEN]));
        inputs.key_lengths =
            (name == "key_lengths").then(|| Lengths::Device(option(&[sizes.batch])));
        inputs.packed = (name == "packed").then(|| Packed {
            cu_q: cumulative(),
            cu_k: cumulative(),
            used_q: None,
            used_k: None,
        });
        let address = o.device_ptr(&queue).0 as *mut T;
        let strides = contiguous_strides(&o_dims);
        // SAFETY: `o` has this many elements and outlives every launch.
        let o = unsafe { TensorMut::from_raw(address, &o_dims, &strides, Place::Cuda(0)) };
        let mut output = Output { o: o.expect("at most four axes"), lse: None };
        plan.run(&stream, inputs, &mut output).expect("a launch");
    });
    let cells = match name {
        "causal" => LEN as f64 * (LEN + 1) as f64 / 2.0,
        "window" => (0..LEN).map(|row| row.min(WINDOW) as f64 + 1.0).sum(),
        _ => (LEN * LEN) as f64,
    };
    let flops = 2.0 * cells * (sizes.batch * heads * (dim + value_dim)) as f64;
    let teraflops = flops / (f64::from(median(&milliseconds)) * 1e9);
    println!("{:<40} {form:<5} {name:>11}: {teraflops:>6.1} TFLOP/s", spec.name);
}
