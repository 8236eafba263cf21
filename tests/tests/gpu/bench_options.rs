//! What each option costs: masked and general kernels beside the plain kernel of the same family
//! and dimensions, in alternating rounds of one process.
//!
//! Rates are of the visible cells, so that a ratio says what the option itself costs, and what its
//! tiles waste. `FERROFLASH_ROWS=FILE` collects rows of raw times, one JSON object a line, in the
//! form of `docs/benchmarks/h200.json`, the plain kernel's beside them. Biases, masks and lengths
//! are read from memory full of ones: as f32 next to nothing, as bytes true, as lengths past every
//! key and so clamped.

use std::cell::RefCell;
use std::io::Write;
use std::sync::OnceLock;

use cudarc::driver::{CudaSlice, DevicePtr};
use ferroflash::{
    Align, Attention, Broadcast, Buffer, Direction, Dropout, Dtype, Form, Gradients, Inputs,
    KernelSpec, Layout, Lengths, Mask, MaskClass, Output, Packed, Place, Plan, Saved, Shape,
    Stream, TensorRef, contiguous_strides,
};
use ferroflash_tests::case::shape;
use ferroflash_tests::gpu::{copy_stream, device, plan};
use half::{bf16, f16};
use libtest_mimic::Trial;
use serde_json::json;

use crate::bench::{CHANNELS, Pooled, TOKENS, alternating, median, read};
use crate::{kernels_and_forms, trial};

/// Query rows and keys of an item, where nothing else is said.
const LEN: usize = 4096;
/// Lengths of which few have most of the tokens.
const HEAVY_TAILED: &[usize] = &[8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1];

/// One option, and the call that it is timed on.
#[derive(Clone, Copy, Debug)]
struct Point {
    name: &'static str,
    is_causal: bool,
    len: usize,
    /// Keys before the diagonal that a window shows.
    window: Option<usize>,
    softcap: Option<f32>,
    /// Lengths of packed items.
    packed: Option<&'static [usize]>,
}

impl Point {
    const fn new(name: &'static str, is_causal: bool) -> Self {
        Self { name, is_causal, len: LEN, window: None, softcap: None, packed: None }
    }

    const fn window(name: &'static str, window: usize, len: usize) -> Self {
        Self { window: Some(window), len, ..Self::new(name, true) }
    }

    const fn softcap(name: &'static str, cap: f32, is_causal: bool) -> Self {
        Self { softcap: Some(cap), ..Self::new(name, is_causal) }
    }

    const fn packed(name: &'static str, lengths: &'static [usize], is_causal: bool) -> Self {
        Self { packed: Some(lengths), ..Self::new(name, is_causal) }
    }

    /// The same sizes without the option.
    const fn plain(&self) -> Self {
        Self { len: self.len, ..Self::new("none", self.is_causal) }
    }

    /// Visible cells of all items, of one head.
    fn cells(&self) -> f64 {
        let of_item = |len: usize| -> f64 {
            let row = |row: usize| match (self.is_causal, self.window) {
                (false, _) => len,
                (true, None) => row + 1,
                (true, Some(window)) => row.min(window) + 1,
            };
            (0..len).map(|index| row(index) as f64).sum()
        };
        match self.packed {
            Some(lengths) => lengths.iter().copied().map(of_item).sum(),
            None => (TOKENS / self.len) as f64 * of_item(self.len),
        }
    }

    fn attention(&self, sizes: Shape) -> Attention {
        let mask = match self.is_causal {
            true => Mask::causal(Align::BottomRight),
            false => Mask::full(),
        };
        let mask = match self.window {
            Some(window) => mask.window(Some(window), Some(0)),
            None => mask,
        };
        let call = Attention::new(sizes).mask(mask);
        let once = Broadcast { batch: true, heads: true, rows: false };
        match self.name {
            "key lengths" => call.layout(Layout::KeyLengths),
            "alibi" => call.alibi(),
            "sink" => call.sink(),
            "mask" => call.boolean_mask(once),
            "bias" => call.bias(once),
            "dropout" => call.dropout(Dropout::new(0.1, (1, 2))),
            _ if self.packed.is_some() => {
                call.layout(Layout::Packed { q_tokens: TOKENS, kv_tokens: TOKENS })
            }
            _ => self.softcap.map_or(call, |cap| call.softcap(cap)),
        }
    }
}

const MASKED: &[Point] = &[
    Point::new("alibi", true),
    Point::new("alibi", false),
    Point::window("window 1024", 1024, LEN),
    Point::window("window 1024", 1024, TOKENS),
    Point::softcap("softcap 30", 30.0, true),
    Point::softcap("softcap 30", 30.0, false),
    // Most scores are past what the polynomial takes.
    Point::softcap("softcap 1", 1.0, false),
    Point::new("sink", true),
    Point::new("key lengths", false),
    Point::packed("packed equal", &[LEN; TOKENS / LEN], true),
    Point::packed("packed equal", &[LEN; TOKENS / LEN], false),
    Point::packed("packed heavy-tailed", HEAVY_TAILED, true),
    Point::packed("packed heavy-tailed", HEAVY_TAILED, false),
];
const GENERAL: &[Point] =
    &[Point::new("mask", false), Point::new("bias", false), Point::new("dropout", false)];

/// `bench/KERNEL/FORM/OPTION/MASK/sLENGTH`.
pub(crate) fn trials() -> Vec<Trial> {
    let directions = [Direction::Forward, Direction::Backward];
    let mut trials = Vec::new();
    for (spec, form, is_possible) in directions.into_iter().flat_map(kernels_and_forms) {
        let points = match spec.mask {
            MaskClass::Full | MaskClass::Causal => continue,
            MaskClass::Masked => MASKED,
            MaskClass::General => GENERAL,
        };
        let dims = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
        for point in points {
            let (option, len) = (point.name.replace(' ', "_"), point.len);
            let mask = if point.is_causal { "causal" } else { "full" };
            let name = format!("bench/{}/{form}/{option}/{mask}/s{len}", spec.name);
            trials.push(trial(name, is_possible, move || match spec.dtype {
                Dtype::F16 => time::<f16>(spec, form, point, dims),
                Dtype::F32 => time::<f32>(spec, form, point, dims),
                _ => time::<bf16>(spec, form, point, dims),
            }));
        }
    }
    trials
}

/// Memory that every option but slopes reads.
fn ones() -> &'static CudaSlice<u8> {
    static ONES: OnceLock<CudaSlice<u8>> = OnceLock::new();
    ONES.get_or_init(|| on_device(&vec![1_u8; LEN * LEN * 4]))
}

fn on_device<V: cudarc::driver::DeviceRepr>(values: &[V]) -> CudaSlice<V> {
    let stream = copy_stream();
    let copy = stream.clone_htod(values).expect("device memory");
    stream.synchronize().expect("a copy");
    copy
}

/// A tensor in memory that is never freed before its last launch, and has at least its elements.
fn view<S, V>(memory: &CudaSlice<S>, dims: &[usize]) -> TensorRef<'static, V> {
    let address = memory.device_ptr(&copy_stream()).0 as *const V;
    // SAFETY: the memory outlives every launch and is as large, as the caller knows.
    unsafe { TensorRef::from_raw(address, dims, &contiguous_strides(dims), Place::Cuda(0)) }
        .expect("at most four axes")
}

/// A call, ready to be launched.
struct Call<T> {
    point: Point,
    direction: Direction,
    sizes: Shape,
    plan: Plan<T>,
    offsets: CudaSlice<i32>,
    slopes: CudaSlice<f32>,
    results: RefCell<Results<T>>,
}

/// What a call writes: o and lse, and if it is a backward one, the gradients and its workspace.
struct Results<T> {
    o: Buffer<T>,
    lse: Buffer<f32>,
    gradients: Option<([Buffer<T>; 3], Buffer<u8>)>,
}

impl<T: Pooled> Call<T> {
    fn new(
        point: Point,
        spec: &KernelSpec,
        kernel: &str,
        form: Form,
        dims: (usize, usize),
    ) -> Self {
        let heads = CHANNELS / dims.0;
        let (batch, len) = match point.packed {
            Some(lengths) => (lengths.len(), lengths.iter().copied().max().unwrap_or(0)),
            None => (TOKENS / point.len, point.len),
        };
        let sizes = shape(batch, (heads, heads), (len, len), dims);
        let plan = plan::<T>(&point.attention(sizes), Some(kernel), Some(form));
        let plan = plan.expect("it is eligible");
        let mut offsets = vec![0_i32];
        for length in point.packed.unwrap_or_default() {
            offsets.push(offsets[offsets.len() - 1] + *length as i32);
        }
        // The usual ones: a geometric series that ends at 1/256.
        let slope = |head: usize| (-8.0 * (head + 1) as f32 / heads as f32).exp2();
        let tensor = |channels: usize| buffer::<T>(TOKENS * heads * channels);
        let gradients = || {
            let gradients = [tensor(dims.0), tensor(dims.0), tensor(dims.1)];
            (gradients, buffer(plan.workspace().backward))
        };
        let results = Results {
            o: tensor(dims.1),
            lse: buffer(TOKENS * heads),
            gradients: (spec.direction == Direction::Backward).then(gradients),
        };
        let call = Self {
            point,
            direction: spec.direction,
            sizes,
            plan,
            offsets: on_device(&offsets),
            slopes: on_device(&(0..heads).map(slope).collect::<Vec<_>>()),
            results: RefCell::new(results),
        };
        call.forward(&Stream::from(copy_stream()));
        call
    }

    /// Dimensions of a tensor of the call, which has one axis less where items are packed.
    fn dims(&self, dims: [usize; 4]) -> Vec<usize> {
        match self.point.packed {
            Some(_) => vec![TOKENS, dims[2], dims[3]],
            None => dims.to_vec(),
        }
    }

    fn lse_dims(&self) -> Vec<usize> {
        match self.point.packed {
            Some(_) => vec![self.sizes.q_heads, TOKENS],
            None => self.sizes.lse_dims().to_vec(),
        }
    }

    fn inputs(&self) -> Inputs<'static, T> {
        let (sizes, name) = (&self.sizes, self.point.name);
        let mut inputs = Inputs::new(
            read(0, &self.dims(sizes.q_dims())),
            read(1, &self.dims(sizes.k_dims())),
            read(2, &self.dims(sizes.v_dims())),
        );
        inputs.alibi_slopes = (name == "alibi").then(|| view(&self.slopes, &[sizes.q_heads]));
        inputs.sink = (name == "sink").then(|| view(ones(), &[sizes.q_heads]));
        inputs.bias = (name == "bias").then(|| view(ones(), &[1, 1, LEN, LEN]));
        inputs.boolean_mask = (name == "mask").then(|| view(ones(), &[1, 1, LEN, LEN]));
        inputs.key_lengths =
            (name == "key lengths").then(|| Lengths::Device(view(ones(), &[sizes.batch])));
        let offsets = || Lengths::Device(view(&self.offsets, &[sizes.batch + 1]));
        inputs.packed = self.point.packed.map(|_| Packed {
            cu_q: offsets(),
            cu_k: offsets(),
            used_q: None,
            used_k: None,
        });
        inputs
    }

    fn launch(&self, stream: &Stream) {
        match self.direction {
            Direction::Forward => self.forward(stream),
            _ => self.backward(stream),
        }
    }

    /// What is timed is without lse; a backward pass needs it.
    fn forward(&self, stream: &Stream) {
        let (o_dims, lse_dims) = (self.dims(self.sizes.o_dims()), self.lse_dims());
        let Results { o, lse, gradients } = &mut *self.results.borrow_mut();
        let lse = gradients.as_ref().map(|_| lse.tensor_mut(stream, &lse_dims).expect("lse"));
        let mut output = Output { o: o.tensor_mut(stream, &o_dims).expect("o"), lse };
        self.plan.run(stream, self.inputs(), &mut output).expect("a launch");
    }

    fn backward(&self, stream: &Stream) {
        let sizes = &self.sizes;
        let (o_dims, lse_dims) = (self.dims(sizes.o_dims()), self.lse_dims());
        let Results { o, lse, gradients } = &mut *self.results.borrow_mut();
        let ([dq, dk, dv], workspace) = gradients.as_mut().expect("it is a backward call");
        let saved = Saved {
            inputs: self.inputs(),
            o: o.tensor(stream, &o_dims).expect("o"),
            lse: lse.tensor(stream, &lse_dims).expect("lse"),
        };
        let mut gradients = Gradients {
            dq: Some(dq.tensor_mut(stream, &self.dims(sizes.q_dims())).expect("dq")),
            dk: Some(dk.tensor_mut(stream, &self.dims(sizes.k_dims())).expect("dk")),
            dv: Some(dv.tensor_mut(stream, &self.dims(sizes.v_dims())).expect("dv")),
            ..Gradients::default()
        };
        let bytes = self.plan.workspace().backward;
        let workspace = workspace.tensor_mut(stream, &[bytes]).expect("bytes");
        let d_o = read(1, &o_dims);
        self.plan
            .backward_into(stream, &saved, &d_o, None, &mut gradients, workspace.into())
            .expect("a launch");
    }

    /// TFLOP/s of the visible cells.
    fn rate(&self, milliseconds: &[f32]) -> f64 {
        let sizes = &self.sizes;
        let products = match self.direction {
            Direction::Forward => sizes.head_dim + sizes.value_dim,
            _ => 3 * sizes.head_dim + 2 * sizes.value_dim,
        };
        let operations = 2.0 * self.point.cells() * (sizes.q_heads * products) as f64;
        operations / (f64::from(median(milliseconds)) * 1e9)
    }
}

fn buffer<V: cudarc::driver::DeviceRepr + Copy + Default>(elements: usize) -> Buffer<V> {
    Buffer::new(&device().expect("a device"), elements).expect("memory")
}

fn time<T: Pooled>(spec: &'static KernelSpec, form: Form, point: &Point, dims: (usize, usize)) {
    let stream = Stream::from(copy_stream());
    let own = Call::<T>::new(*point, spec, spec.name, form, dims);
    let plain = Call::<T>::new(point.plain(), spec, spec.family.name(), form, dims);
    let [own_ms, plain_ms] =
        alternating([&mut || own.launch(&stream), &mut || plain.launch(&stream)]);
    let (rate, plain_rate) = (own.rate(&own_ms), plain.rate(&plain_ms));
    let mask = if point.is_causal { "causal" } else { "full" };
    println!(
        "{:<36} {form:<5} {:>19} {mask:>6} D {:>3} S {:>5}: {rate:>6.1} of {plain_rate:>6.1} \
         TFLOP/s: {:.3}",
        spec.name,
        point.name,
        dims.0,
        point.len,
        rate / plain_rate
    );
    let Some(file) = std::env::var_os("FERROFLASH_ROWS") else { return };
    let mut row = json!({
        "direction": spec.direction.name(), "d": own.sizes.head_dim, "s": point.len,
        "b": TOKENS / point.len, "heads": own.sizes.q_heads, "kv_heads": own.sizes.kv_heads,
        "dtype": spec.dtype.to_string(), "causal": point.is_causal, "deterministic": false,
        "kernel": spec.name, "options": point.name,
        "tflops": { "ferroflash": rate, "plain": plain_rate },
        "ms": { "ferroflash": own_ms, "plain": plain_ms },
    });
    if let Some(lengths) = point.packed {
        row["lengths"] = json!(lengths);
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
    writeln!(file.expect("FERROFLASH_ROWS is writable"), "{row}").expect("a row is written");
}
