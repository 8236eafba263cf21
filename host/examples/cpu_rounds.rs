//! One timed call of the CPU path for each line of standard input, so that a driver can alternate
//! it with a peer: `tests/peers/cpu.py` does.
//!
//! Usage: `cpu_rounds [heads] [length] [channels] [q_rows] [kv_columns]`, 8, 2048, 64 and the
//! default tile sizes if left out. Lines are
//! `forward full`, `forward causal`, `backward full` and `backward causal`; each is answered by a
//! line with the milliseconds the call took. Tensors are f32, `[1, heads, length, channels]` in
//! memory. The number of threads is rayon's, `RAYON_NUM_THREADS`.

use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Instant;

use ferroflash::cpu::tiled::{self, CpuTile};
use ferroflash::{Align, Attention, Gradients, Inputs, Mask, Output, Saved, Shape};
use ferroflash::{TensorMut, TensorRef};

/// The tensors of a call, each `[heads, length, channels]`.
struct Data {
    shape: Shape,
    tile: Option<CpuTile>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    lse: Vec<f32>,
    d_o: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

/// Uniform values in -1..1 from a 64-bit linear congruential generator.
fn uniform(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

impl Data {
    fn new(heads: usize, length: usize, channels: usize, tile: Option<CpuTile>) -> Self {
        let shape = Shape {
            batch: 1,
            q_heads: heads,
            kv_heads: heads,
            q_len: length,
            kv_len: length,
            head_dim: channels,
            value_dim: channels,
        };
        let count = heads * length * channels;
        let zeros = || vec![0.0; count];
        Self {
            shape,
            tile,
            q: uniform(1, count),
            k: uniform(2, count),
            v: uniform(3, count),
            o: zeros(),
            lse: vec![0.0; heads * length],
            d_o: uniform(4, count),
            dq: zeros(),
            dk: zeros(),
            dv: zeros(),
        }
    }

    /// Runs one call and gives its milliseconds.
    fn run(&mut self, direction: &str, mask: Mask) -> Result<f64, Box<dyn Error>> {
        let attention = Attention::new(self.shape).mask(mask);
        let (dims, lse_dims) = (self.shape.q_dims(), self.shape.lse_dims());
        let (length, channels) = (dims[1] as i64, dims[3] as i64);
        let strides = [length * channels * dims[2] as i64, channels, length * channels, 1];
        let input = |data| TensorRef::host_strided(data, &dims, &strides);
        let inputs = Inputs::new(input(&self.q)?, input(&self.k)?, input(&self.v)?);
        let start = Instant::now();
        match direction {
            "forward" => {
                let mut output = Output {
                    o: TensorMut::host_strided(&mut self.o, &dims, &strides)?,
                    lse: Some(TensorMut::host(&mut self.lse, &lse_dims)?),
                };
                tiled::forward(&attention, &inputs, &mut output, self.tile)?;
            }
            "backward" => {
                let saved = Saved {
                    inputs,
                    o: input(&self.o)?,
                    lse: TensorRef::host(&self.lse, &lse_dims)?,
                };
                let d_o = input(&self.d_o)?;
                let mut gradients = Gradients {
                    dq: Some(TensorMut::host_strided(&mut self.dq, &dims, &strides)?),
                    dk: Some(TensorMut::host_strided(&mut self.dk, &dims, &strides)?),
                    dv: Some(TensorMut::host_strided(&mut self.dv, &dims, &strides)?),
                    ..Gradients::default()
                };
                tiled::backward(&attention, &saved, &d_o, None, &mut gradients, self.tile)?;
            }
            other => return Err(format!("direction {other:?}: forward or backward").into()),
        }
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let sizes: Vec<usize> =
        std::env::args().skip(1).map(|size| size.parse()).collect::<Result<_, _>>()?;
    let size = |index: usize, otherwise| sizes.get(index).copied().unwrap_or(otherwise);
    let tile = match sizes[..] {
        [_, _, _, q_rows, kv_columns] => Some(CpuTile { q_rows, kv_columns }),
        _ => None,
    };
    let mut data = Data::new(size(0, 8), size(1, 2048), size(2, 64), tile);
    let mut standard_output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mask = match line.split_whitespace().nth(1) {
            Some("full") => Mask::full(),
            Some("causal") => Mask::causal(Align::TopLeft),
            other => return Err(format!("mask {other:?}: full or causal").into()),
        };
        let direction = line.split_whitespace().next().unwrap_or_default();
        // The backward pass needs what the forward pass of the same mask left, which is not timed.
        if direction == "backward" {
            data.run("forward", mask)?;
        }
        writeln!(standard_output, "{}", data.run(direction, mask)?)?;
        standard_output.flush()?;
    }
    Ok(())
}
