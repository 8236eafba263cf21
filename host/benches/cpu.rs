//! The CPU path, f32, one head: forward and backward, full and causal.
//!
//! For the comparison with PyTorch see `tests/peers/cpu.py`.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ferroflash::cpu::tiled;
use ferroflash::{
    Align, Attention, Gradients, Inputs, Mask, Output, Saved, Shape, TensorMut, TensorRef,
};

const LENGTH: usize = 1024;
const CHANNELS: usize = 64;

fn passes(criterion: &mut Criterion) {
    let shape = Shape {
        batch: 1,
        q_heads: 1,
        kv_heads: 1,
        q_len: LENGTH,
        kv_len: LENGTH,
        head_dim: CHANNELS,
        value_dim: CHANNELS,
    };
    let (dims, lse_dims) = (shape.q_dims(), shape.lse_dims());
    let count = LENGTH * CHANNELS;
    let data: Vec<f32> = (0..count).map(|index| (index as f32 * 0.37).sin()).collect();
    let (mut o, mut lse) = (vec![0.0; count], vec![0.0; LENGTH]);
    let (mut dq, mut dk, mut dv) = (o.clone(), o.clone(), o.clone());
    let read = || TensorRef::host(&data, &dims).expect("the data has these dimensions");
    for (name, mask) in [("full", Mask::full()), ("causal", Mask::causal(Align::TopLeft))] {
        let attention = Attention::new(shape).mask(mask);
        let cells = (LENGTH * LENGTH) as u64 / if name == "causal" { 2 } else { 1 };
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20);
        group.throughput(Throughput::Elements(4 * cells * CHANNELS as u64));
        group.bench_function("forward", |bencher| {
            let mut output = Output {
                o: TensorMut::host(&mut o, &dims).expect("dimensions"),
                lse: Some(TensorMut::host(&mut lse, &lse_dims).expect("dimensions")),
            };
            let inputs = Inputs::new(read(), read(), read());
            bencher.iter(|| {
                tiled::forward(&attention, black_box(&inputs), &mut output, None).expect("valid")
            });
        });
        group.throughput(Throughput::Elements(10 * cells * CHANNELS as u64));
        group.bench_function("backward", |bencher| {
            let saved = Saved {
                inputs: Inputs::new(read(), read(), read()),
                o: TensorRef::host(&o, &dims).expect("dimensions"),
                lse: TensorRef::host(&lse, &lse_dims).expect("dimensions"),
            };
            let mut gradients = Gradients {
                dq: Some(TensorMut::host(&mut dq, &dims).expect("dimensions")),
                dk: Some(TensorMut::host(&mut dk, &dims).expect("dimensions")),
                dv: Some(TensorMut::host(&mut dv, &dims).expect("dimensions")),
                ..Gradients::default()
            };
            bencher.iter(|| {
                let saved = black_box(&saved);
                tiled::backward(&attention, saved, &read(), None, &mut gradients, None)
                    .expect("valid")
            });
        });
        group.finish();
    }
}

criterion_group!(benches, passes);
criterion_main!(benches);
