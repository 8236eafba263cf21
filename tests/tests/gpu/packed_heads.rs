//! Few query rows of many heads on few KV heads, which run as rows of the same blocks where strides
//! allow it: against the dense path in binary64, and timed beside blocks of their own.

use std::io::Write;

use cudarc::driver::{CudaSlice, DevicePtr};
use ferroflash::{
    Align, Attention, Broadcast, Direction, Dtype, Family, Form, Inputs, KERNELS, KernelSpec, Mask,
    MaskClass, Output, Place, Preference, Shape, Stream, TensorMut, TensorRef, contiguous_strides,
};
use ferroflash_tests::case::{Sight, shape};
use ferroflash_tests::gpu::{copy_stream, device};
use ferroflash_tests::memory::Arrangement;
use ferroflash_tests::random::normal;
use half::{bf16, f16};
use libtest_mimic::Trial;
use serde_json::json;

use crate::bench::{alternating, median};
use crate::kernels::{ON_THE_CPU, compare, compare_on_the_cpu};
use crate::options::Options;
use crate::workloads::{Workload, tile};
use crate::{kernels_and_forms, trial};

const GROUPS: [usize; 4] = [2, 4, 8, 64];

/// `KERNEL/FORM/packed_heads_GROUP`, and `packed_heads_are_fewer_blocks`.
pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        for group in GROUPS {
            let name = format!("{}/{form}/packed_heads_{group}", spec.name);
            trials.push(trial(name, is_possible, move || {
                workloads(spec, group).iter().for_each(|workload| compare(spec, form, workload));
            }));
        }
    }
    // What kernels are held to can be met.
    for (name, group) in ON_THE_CPU.iter().flat_map(|name| GROUPS.map(|group| (name, group))) {
        let spec = KERNELS.iter().find(|spec| spec.name == *name).expect("it is in the table");
        trials.push(Trial::test(format!("cpu_tiled/{name}/packed_heads_{group}"), move || {
            for workload in workloads(spec, group) {
                match spec.dtype {
                    Dtype::F16 => compare_on_the_cpu::<f16>(&workload),
                    Dtype::F32 => compare_on_the_cpu::<f32>(&workload),
                    Dtype::Bf16 => compare_on_the_cpu::<bf16>(&workload),
                }
            }
            Ok(())
        }));
    }
    trials.push(trial("packed_heads_are_fewer_blocks".to_owned(), true, fewer_blocks));
    trials
}

/// 1, 2, 3 and 7 rows in every layout, of heads on two KV heads, and of all on one; and with what
/// all rows share, if the kernel has it.
fn workloads(spec: &KernelSpec, group: usize) -> Vec<Workload> {
    let (dims, (_, keys)) = tile(spec);
    let plain = Arrangement::CONTIGUOUS;
    let arrangements = [
        plain,
        Arrangement::HEADS_FIRST,
        Arrangement { channel_gap: 8, offset: 8, ..Arrangement::HEADS_FIRST },
        Arrangement { channel_gap: 1, ..Arrangement::HEADS_FIRST },
        Arrangement { channel_gap: 3, offset: 1, ..plain },
        // Heads that follow their rows at a distance stay apart.
        Arrangement { row_gap: 2, ..Arrangement::HEADS_FIRST },
        Arrangement { repeat_heads: true, ..plain },
    ];
    let sized = |name: &str, batch, rows, kv_heads| {
        let name = format!("packed_heads_{group}_{name}");
        let shape = shape(batch, (group * kv_heads, kv_heads), (rows, keys + 9), dims);
        let workload = Workload::new(&name, shape, spec.mask);
        let sight = if rows == 1 { workload.sight } else { Sight::FULL };
        Workload { sight, ..workload }
    };
    let mut all = Vec::new();
    for rows in [1, 2, 3, 7] {
        for (at, arranged) in arrangements.into_iter().enumerate() {
            // Large groups in the layouts in turn.
            if group == 64 && at > 1 && at != rows % 4 + 2 {
                continue;
            }
            let results = Arrangement { repeat_heads: false, ..arranged };
            let name = format!("{rows}_{at}");
            all.push(Workload {
                arranged: [arranged, plain, Arrangement::HEADS_FIRST, results],
                ..sized(&name, 1 + at % 2, rows, 1 + rows % 2)
            });
        }
    }
    let of_all_rows = Broadcast { batch: false, heads: true, rows: true };
    let with = |name: &str, rows, options| Workload {
        options,
        arranged: [Arrangement::HEADS_FIRST, plain, plain, Arrangement::HEADS_FIRST],
        ..sized(name, 3, rows, 2)
    };
    if spec.mask >= MaskClass::Masked {
        let lengths = Some(vec![keys as i32 + 9, 0, 5]);
        for rows in [1, 3] {
            let key_lengths = lengths.clone();
            let options = Options { key_lengths, softcap: Some(2.0), ..Options::default() };
            all.push(with(&format!("lengths_{rows}"), rows, options));
        }
    }
    if spec.mask >= MaskClass::General {
        let bias = Some((of_all_rows, plain));
        let boolean_mask = Some(of_all_rows);
        all.push(with("bias", 3, Options { bias, ..Options::default() }));
        all.push(with("mask", 1, Options { boolean_mask, ..Options::default() }));
        let options = Options { boolean_mask, mask_is_bits: true, ..Options::default() };
        all.push(with("mask_bits", 7, options));
    }
    all
}

/// The plan's launch has the blocks of packed heads, and of heads apart where that is asked for.
fn fewer_blocks() {
    let sizes = shape(2, (64, 8), (1, 4096), (128, 128));
    let call = Attention::new(sizes).mask(Mask::causal(Align::BottomRight));
    for family in [Family::Portable, Family::Hopper] {
        let blocks = |heads_apart| {
            let kernel = Some(family.name());
            let preference = Preference { kernel, heads_apart, ..Preference::default() };
            let plan = call.plan_with::<bf16>(&device().expect("a device"), preference);
            let Ok(plan) = plan else { return None };
            let explanation = plan.explain();
            assert_eq!(explanation.packing.is_some(), !heads_apart, "{explanation}");
            explanation.launch.as_ref().map(|launch| launch.grid)
        };
        let Some(packed) = blocks(false) else { continue };
        assert_eq!(packed, 16, "{family:?}");
        assert!(blocks(true) > Some(16), "{family:?}");
    }
}

/// `bench/packed_heads/KERNEL/FORM/HEADSxKV_HEADS/bBATCH/sKEYS`, with `FERROFLASH_ROWS` as
/// `bench_options` has it.
pub(crate) fn bench_trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (spec, form, is_possible) in kernels_and_forms(Direction::Forward) {
        let is_timed =
            spec.dtype == Dtype::Bf16 && spec.mask == MaskClass::Full && tile(spec).0 == (128, 128);
        for (heads, batch, keys) in POINTS.iter().filter(|_| is_timed) {
            let name = format!(
                "bench/packed_heads/{}/{form}/{}x{}/b{batch}/s{keys}",
                spec.name, heads.0, heads.1
            );
            let sizes = shape(*batch, *heads, (1, *keys), tile(spec).0);
            trials.push(trial(name, is_possible, move || time(spec, form, sizes)));
        }
    }
    trials
}

/// (Query and KV heads), items and keys of one row each.
const POINTS: &[((usize, usize), usize, usize)] = &[
    ((64, 8), 1, 4096),
    ((64, 8), 8, 4096),
    ((64, 8), 32, 4096),
    ((64, 8), 1, 32_768),
    ((64, 8), 8, 32_768),
    ((64, 8), 32, 32_768),
    ((32, 8), 1, 4096),
    ((32, 8), 8, 4096),
    ((32, 8), 32, 4096),
    ((32, 8), 1, 32_768),
    ((32, 8), 8, 32_768),
    ((32, 8), 32, 32_768),
];

/// Device memory of `elements` normal values, of which a million differ.
fn normals(seed: u64, elements: usize) -> CudaSlice<bf16> {
    let values: Vec<bf16> = normal(seed, 1 << 20, 1.0).into_iter().map(bf16::from_f32).collect();
    let stream = copy_stream();
    let mut memory = stream.alloc_zeros::<bf16>(elements).expect("device memory");
    for first in (0..elements).step_by(values.len()) {
        let end = elements.min(first + values.len());
        stream
            .memcpy_htod(&values[..end - first], &mut memory.slice_mut(first..end))
            .expect("a copy");
    }
    stream.synchronize().expect("a copy");
    memory
}

fn time(spec: &'static KernelSpec, form: Form, sizes: Shape) {
    let elements = |dims: [usize; 4]| dims.iter().product::<usize>();
    let dims = [sizes.q_dims(), sizes.k_dims(), sizes.v_dims(), sizes.o_dims()];
    let memory: [CudaSlice<bf16>; 4] =
        std::array::from_fn(|tensor| normals(tensor as u64 + 1, elements(dims[tensor])));
    let queue = copy_stream();
    let address = |tensor: usize| memory[tensor].device_ptr(&queue).0;
    let stream = Stream::from(queue.clone());
    let of = |heads_apart| {
        let kernel = Some(spec.name);
        let preference = Preference { kernel, form: Some(form), forward_only: true, heads_apart };
        Attention::new(sizes)
            .plan_with::<bf16>(&device().expect("a device"), preference)
            .expect("it is eligible")
    };
    let plans = [of(false), of(true)];
    let launch = |apart: usize| {
        let view = |tensor: usize| -> TensorRef<'_, bf16> {
            let (dims, strides) = (dims[tensor], contiguous_strides(&dims[tensor]));
            let address = address(tensor) as *const bf16;
            // SAFETY: the memory has this many elements and outlives every launch.
            unsafe { TensorRef::from_raw(address, &dims, &strides, Place::Cuda(0)) }.expect("four")
        };
        let strides = contiguous_strides(&dims[3]);
        // SAFETY: as above; nothing else uses the output.
        let o = unsafe {
            TensorMut::from_raw(address(3) as *mut bf16, &dims[3], &strides, Place::Cuda(0))
        };
        let mut output = Output { o: o.expect("four axes"), lse: None };
        let inputs = Inputs::new(view(0), view(1), view(2));
        plans[apart].run(&stream, inputs, &mut output).expect("a launch");
    };
    let result = |apart: usize| {
        launch(apart);
        let o = queue.clone_dtoh(&memory[3]).expect("a copy");
        queue.synchronize().expect("a copy");
        o.iter().map(|value| value.to_f32()).collect::<Vec<f32>>()
    };
    let (packed, apart) = (result(0), result(1));
    let differ = packed.iter().zip(&apart).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let most = apart.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    assert!(differ <= most / 128.0, "packed and apart differ by {differ} of {most}");

    let ms = alternating([&mut || launch(0), &mut || launch(1)]);
    let [packed_ms, apart_ms] = [&ms[0], &ms[1]].map(|ms| median(ms));
    let bytes = 2.0 * (elements(sizes.k_dims()) + elements(sizes.v_dims())) as f64;
    println!(
        "{:<32} {form:<5} {:>2}/{} heads B {:>2} Sk {:>5}: packed {packed_ms:.4} ms, apart \
         {apart_ms:.4} ms: {:.2} times the rate; K and V at {:.2} TB/s",
        spec.name,
        sizes.q_heads,
        sizes.kv_heads,
        sizes.batch,
        sizes.kv_len,
        apart_ms / packed_ms,
        bytes / (f64::from(packed_ms) * 1e9)
    );
    let Some(file) = std::env::var_os("FERROFLASH_ROWS") else { return };
    let row = json!({
        "direction": "forward", "d": sizes.head_dim, "s": [1, sizes.kv_len], "b": sizes.batch,
        "heads": sizes.q_heads, "kv_heads": sizes.kv_heads, "dtype": "bf16", "causal": false,
        "kernel": spec.name, "ms": { "packed": ms[0], "apart": ms[1] },
    });
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
    writeln!(file.expect("FERROFLASH_ROWS is writable"), "{row}").expect("a row is written");
}
