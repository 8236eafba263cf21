//! The tiled CPU path: the schedules of the GPU kernels in f32, memory linear in the lengths.
//!
//! The forward pass is owned by query rows (M4.4 §0x03), the backward pass by K/V columns (§0x04);
//! both are exact, and bitwise the same for any number of threads. Work runs on the current rayon
//! pool.
//!
//! | module | what it does |
//! | --- | --- |
//! | `forward`, `backward` | the two passes, block by block |
//! | `blocks`, `ordered` | who takes which block, and sums in a fixed order |
//! | `delta` | what the backward pass needs of each row |
//! | `scores` | options and masks of a score tile; parts of a partial tile |
//! | `softmax`, `exponential`, `vector` | the passes over a score tile, vectorised |
//! | `product`, `pack` | matrix products of tiles; tensors to tiles and back |

mod backward;
mod blocks;
mod delta;
mod exponential;
mod forward;
mod ordered;
mod pack;
mod product;
mod scores;
mod softmax;
#[cfg(test)]
mod tests;
mod vector;

use crate::attention::{Attention, Gradients, Inputs, Output, Saved, Shape};
use crate::cpu::problem::{GradientRows, OutputRows, Problem};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::tensor::TensorRef;

/// Tile sizes of the CPU path. Any sizes give the same result up to rounding.
///
/// The defaults keep a worker's tiles, up to 800 KB of them, in a second-level cache of 1 or 2 MB.
/// 192 rows and 256 keys are whole kernels of the AVX-512 product on their long side (64 high) and
/// nearly so on the other (6 wide); from 192 × 192 to 384 × 192 speed differs by a few percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CpuTile {
    /// Query rows of a tile.
    pub q_rows: usize,
    /// Keys of a tile.
    pub kv_columns: usize,
}

impl CpuTile {
    /// Tile sizes of the forward pass.
    pub const FORWARD: Self = Self { q_rows: 192, kv_columns: 256 };
    /// Tile sizes of the backward pass.
    pub const BACKWARD: Self = Self { q_rows: 192, kv_columns: 256 };
    /// The largest side of a tile.
    pub const LARGEST: usize = 4096;

    fn validate(self) -> Result<Self> {
        for (argument, side) in [("q_rows", self.q_rows), ("kv_columns", self.kv_columns)] {
            if !(1..=Self::LARGEST).contains(&side) {
                let needs = format!("between 1 and {}", Self::LARGEST);
                return Err(Error::argument(argument, side, needs));
            }
        }
        Ok(self)
    }

    /// No larger than the call.
    fn clipped(self, shape: &Shape) -> Self {
        Self {
            q_rows: self.q_rows.min(shape.q_len).max(1),
            kv_columns: self.kv_columns.min(shape.kv_len).max(1),
        }
    }
}

/// Told the blocks done and the blocks in all, after each block, by whichever thread ran it.
pub type Progress<'p> = &'p (dyn Fn(usize, usize) + Sync);

/// Computes o, and lse if it is there, from `inputs` in host memory (M4.4 §0x02).
///
/// Shapes as [`Attention`] has them. f32 state and accumulation; each output is rounded once.
/// Bitwise repeatable, whatever the number of threads.
///
/// # Errors
/// Whatever is wrong with an option, a tensor or a length, by name; nothing was written then.
pub fn forward<T: Element>(
    attention: &Attention,
    inputs: &Inputs<'_, T>,
    output: &mut Output<'_, T>,
    tile: Option<CpuTile>,
) -> Result<()> {
    forward_with_progress(attention, inputs, output, tile, &|_, _| ())
}

/// As [`forward`], telling `progress` of every block done.
///
/// # Errors
/// As [`forward`].
pub fn forward_with_progress<T: Element>(
    attention: &Attention,
    inputs: &Inputs<'_, T>,
    output: &mut Output<'_, T>,
    tile: Option<CpuTile>,
    progress: Progress<'_>,
) -> Result<()> {
    let tile = tile.unwrap_or(CpuTile::FORWARD).validate()?;
    let problem = Problem::new(attention, inputs)?;
    let output = OutputRows::new(attention, output)?;
    forward::run(&problem, output, tile, progress);
    Ok(())
}

/// Computes the gradients that are there, from the forward's inputs and results and the gradient
/// `d_o` of o, and `d_lse` of lse (M4.4 §0x04; dimensions and dtype of lse).
///
/// f32 accumulation; each gradient is rounded once. Bitwise repeatable, whatever the number of
/// threads: every sum has a fixed order. If dq is wanted, sums of it are held in f32, at most 4
/// bytes an element of q.
///
/// # Errors
/// Whatever is wrong with an option, a tensor or a length, by name; nothing was written then.
pub fn backward<T: Element>(
    attention: &Attention,
    saved: &Saved<'_, T>,
    d_o: &TensorRef<'_, T>,
    d_lse: Option<&TensorRef<'_, f32>>,
    gradients: &mut Gradients<'_, T>,
    tile: Option<CpuTile>,
) -> Result<()> {
    let tile = tile.unwrap_or(CpuTile::BACKWARD).validate()?;
    let problem = Problem::new(attention, &saved.inputs)?;
    let results = delta::Results::new(attention, saved, d_o, d_lse)?;
    let gradients = GradientRows::new(attention, gradients)?;
    backward::run(&problem, &results, gradients, tile);
    Ok(())
}

impl<T> Problem<'_, T> {
    /// Whether some rows of q, k or v may belong to no item.
    fn leaves_rows_out(&self) -> bool {
        self.attention.layout != crate::attention::Layout::Dense
    }
}
