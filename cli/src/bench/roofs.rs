//! Roofs: what the device reaches on work simpler than attention. Each says what was done.
//!
//! On a GPU the matrix roof is the highest rate that a kernel of this library reached, since it
//! carries no other product: less than what the chip could do, and said so.

use std::time::Instant;

use cudarc::driver::CudaContext;
use ferroflash::{Attention, Dtype};
use half::bf16;

use super::grid::Case;
use super::measure::{Bench, threads};
use super::record::{Features, Pass, Roof, RoofKind, Workload};
use super::statistics::median;
use super::tensors::{Normals, Tensors};
use super::timer::driver;
use crate::failure::Result;
use crate::progress::Progress;

/// Bytes that a GPU copies at once: many times its second-level cache.
const GPU_COPY_BYTES: usize = 1 << 30;
/// Bytes that a CPU copies at once, all threads together.
const CPU_COPY_BYTES: usize = 512 << 20;
/// Rows, columns and depth of the CPU's product: a tile of the tiled path.
const TILE: [usize; 3] = [256, 192, 256];
/// Products of a sample and thread.
const TILES: usize = 64;
/// Rows of the GPU's largest workload, one item; channels of all its heads.
const GPU_ROWS: usize = 16_384;
const GPU_WIDTH: usize = 2048;

impl Bench {
    /// Measures the roofs of the device.
    pub(super) fn roofs(&mut self) -> Result<Vec<Roof>> {
        let progress = Progress::of("measuring roofs");
        let context = self.device.context().cloned();
        let copy = match &context {
            Some(context) => self.copy_on_gpu(context)?,
            None => copy_on_cpu(self.rounds)?,
        };
        progress.tell(1, 2);
        let matrix = match context {
            Some(_) => self.best_kernel()?,
            None => Some(products_on_cpu(self.rounds)?),
        };
        Ok([Some(copy), matrix].into_iter().flatten().collect())
    }

    fn copy_on_gpu(&mut self, context: &std::sync::Arc<CudaContext>) -> Result<Roof> {
        let stream = context.default_stream();
        let data = Normals::<f32>::new().take(GPU_COPY_BYTES / size_of::<f32>())?;
        let source = stream.clone_htod(&data).map_err(driver("cuMemcpyHtoDAsync"))?;
        drop(data);
        let mut target = stream.alloc_zeros::<f32>(source.len()).map_err(driver("cuMemAlloc"))?;
        let samples = self.samples(&mut || {
            stream.memcpy_dtod(&source, &mut target).map_err(driver("cuMemcpyDtoDAsync"))
        })?;
        Ok(Roof {
            kind: RoofKind::Copy,
            dtype: None,
            method: "cuMemcpyDtoDAsync of 1 GiB of random numbers; bytes read and written"
                .to_owned(),
            work: 2.0 * GPU_COPY_BYTES as f64,
            ms: samples.ms,
        })
    }

    /// The fastest of the forward kernels for long rows; `None` where none runs.
    fn best_kernel(&mut self) -> Result<Option<Roof>> {
        let mut best: Option<Roof> = None;
        for d in [128, 256] {
            let case = long(d);
            let Ok(plan) = case.attention.plan::<bf16>(&self.device) else { continue };
            let shape = *case.attention.shape();
            let mut tensors = Tensors::<bf16>::new(&self.device, shape, false, false)?;
            let row = self.row(&case, &plan, &mut tensors)?;
            let ms = row.ms.into_values().next().unwrap_or_default();
            let rate = row.flops / median(&ms);
            if best.as_ref().is_none_or(|best| rate > best.work / median(&best.ms)) {
                best = Some(Roof {
                    kind: RoofKind::Matrix,
                    dtype: Some(Dtype::Bf16.to_string()),
                    method: format!(
                        "{}, {}: the highest rate that a kernel of this library reached here, not \
                         the chip's own",
                        plan.explain().kernel,
                        row.workload.words()
                    ),
                    work: row.flops,
                    ms,
                });
            }
        }
        Ok(best)
    }
}

fn long(d: usize) -> Case {
    let heads = GPU_WIDTH / d;
    let workload = Workload {
        direction: Pass::Forward,
        d,
        dv: d,
        s: GPU_ROWS,
        sk: GPU_ROWS,
        b: 1,
        heads,
        kv_heads: heads,
        dtype: Dtype::Bf16.to_string(),
        causal: false,
        deterministic: false,
        options: Features::default(),
    };
    Case { attention: Attention::new(workload.shape()), workload }
}

/// Milliseconds of `work` by every thread at once on its own part, after a warm-up.
fn in_threads<P: Send>(rounds: usize, parts: &mut [P], work: impl Fn(&mut P) + Sync) -> Vec<f64> {
    let once = |parts: &mut [P]| {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for part in parts {
                scope.spawn(|| work(part));
            }
        });
        begun.elapsed().as_secs_f64() * 1e3
    };
    once(parts);
    (0..rounds).map(|_| once(parts)).collect()
}

fn copy_on_cpu(rounds: usize) -> Result<Roof> {
    let threads = threads();
    let each = CPU_COPY_BYTES / size_of::<f32>() / threads;
    let mut normals = Normals::<f32>::new();
    let parts: Result<Vec<(Vec<f32>, Vec<f32>)>> =
        (0..threads).map(|_| Ok((normals.take(each)?, normals.take(each)?))).collect();
    let ms = in_threads(rounds, &mut parts?, |(from, to)| {
        to.copy_from_slice(from);
        std::hint::black_box(to);
    });
    Ok(Roof {
        kind: RoofKind::Copy,
        dtype: None,
        method: format!(
            "copies of {} MiB of random numbers by {threads} threads; bytes read and written, \
             without those that a cache reads to write",
            CPU_COPY_BYTES >> 20
        ),
        work: 2.0 * (each * threads * size_of::<f32>()) as f64,
        ms,
    })
}

fn products_on_cpu(rounds: usize) -> Result<Roof> {
    let threads = threads();
    let [rows, columns, depth] = TILE;
    let mut normals = Normals::<f32>::new();
    let mut part = || {
        let left = normals.take(rows * depth)?;
        Ok((left, normals.take(depth * columns)?, vec![0.0; rows * columns]))
    };
    let parts: Result<Vec<_>> = (0..threads).map(|_| part()).collect();
    let ms = in_threads(rounds, &mut parts?, |(left, right, target)| {
        for _ in 0..TILES {
            product(target, left, right);
            std::hint::black_box(&mut *target);
        }
    });
    Ok(Roof {
        kind: RoofKind::Matrix,
        dtype: Some(Dtype::F32.to_string()),
        method: format!(
            "f32 products of {rows}×{depth} and {depth}×{columns} by {threads} threads, in cache, \
             by the micro-kernel of the tiled path"
        ),
        work: 2.0 * (rows * columns * depth * TILES * threads) as f64,
        ms,
    })
}

/// The product of two matrices of [`TILE`]'s sizes whose columns are contiguous.
fn product(target: &mut [f32], left: &[f32], right: &[f32]) {
    let [rows, columns, depth] = TILE;
    assert!(left.len() >= rows * depth && right.len() >= depth * columns);
    assert!(target.len() >= rows * columns);
    // SAFETY: by the assertions, every element that the sizes and strides reach lies in its slice;
    // the target is written and not read.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            depth,
            target.as_mut_ptr(),
            rows as isize,
            1,
            false,
            left.as_ptr(),
            rows as isize,
            1,
            right.as_ptr(),
            depth as isize,
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_one() {
        let [rows, columns, depth] = TILE;
        let mut normals = Normals::<f32>::new();
        let left = normals.take(rows * depth).expect("some");
        let right = normals.take(depth * columns).expect("some");
        let mut target = vec![f32::NAN; rows * columns];
        product(&mut target, &left, &right);
        for (i, j) in [(0, 0), (rows - 1, columns - 1), (17, 101)] {
            let sum: f64 = (0..depth)
                .map(|k| f64::from(left[k * rows + i]) * f64::from(right[j * depth + k]))
                .sum();
            assert!((f64::from(target[j * rows + i]) - sum).abs() < 1e-3);
        }
    }

    #[test]
    fn every_part_is_worked_on() {
        let mut parts = [0; 3];
        let samples = in_threads(7, &mut parts, |part| *part += 1);
        assert_eq!((parts, samples.len()), ([8; 3], 7));
    }
}
