//! What a plan will do, in words and figures.
//!
//! Everything here is modelled from the call, the kernel table and the device's limits; registers
//! are read from the loaded kernel. Nothing is a measurement.

use std::fmt;

use ferroflash_core::axes::{Direction, Dtype};
use serde::Serialize;

use crate::attention::Attention;
use crate::choose::{Choice, RIGHT_SIDE, mask_class, options};
use crate::cuda::backward::{self, Backward};
use crate::cuda::device::Limits;
use crate::cuda::forward;
use crate::cuda::kernel::Kernel;
use crate::cuda::packed_heads::PackedHeads;

/// What a plan will do and why.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The device.
    pub device: String,
    /// The kernel, or the CPU's schedule.
    pub kernel: String,
    /// Why this one.
    pub reason: String,
    /// The mask class that the call needs, and the options that ask for it.
    pub mask: String,
    /// Element type.
    pub dtype: String,
    /// What the products multiply and the sums are of: f32 on a GPU by split products, never by
    /// rounding to TF32.
    pub arithmetic: String,
    /// Floating-point operations of the products over visible keys: 2·(D + Dv) a score forward,
    /// 2·(3·D + 2·Dv) backward. Where items have lengths of their own, as if each were as long as
    /// stated.
    pub flops: f64,
    /// Bytes of q, k, v, o and lse, and backward of their gradients, each moved once.
    pub bytes: f64,
    /// How the query heads of a group share blocks, where they do: as rows of one head. The launch
    /// is of that if it takes no more than the sizes, and else without.
    pub packing: Option<String>,
    /// How it runs on a GPU.
    pub launch: Option<Launch>,
    /// What was passed over, and why.
    pub rejected: Vec<(String, String)>,
    /// Kernels that run before and after, in this order: those of a backward pass.
    pub stages: Vec<String>,
    /// The backward pass, where the plan has one.
    pub backward: Option<Box<Explanation>>,
    /// Why it has none.
    pub no_backward: Option<String>,
}

/// A launch, as the plan will make it.
#[derive(Clone, Debug, Serialize)]
pub struct Launch {
    /// Form the kernel was loaded in.
    pub form: String,
    /// Milliseconds it took to load, once a process.
    pub load_milliseconds: f64,
    /// Blocks, in x.
    pub grid: u64,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread in bytes.
    pub local_bytes: u32,
    /// Query rows and keys of a tile.
    pub tile: (u32, u32),
    /// Why the tile has these sizes.
    pub tile_reason: String,
    /// Blocks a multiprocessor holds, by shared memory and registers.
    pub blocks_per_multiprocessor: u32,
    /// Blocks of work over the blocks that the device holds at once.
    pub waves: f64,
    /// Workspace in bytes.
    pub workspace_bytes: usize,
}

/// Registers of a multiprocessor, compute capability 8.0 to 12.0.
const REGISTERS_PER_MULTIPROCESSOR: u32 = 65_536;

impl Explanation {
    pub(crate) fn of_cpu(attention: &Attention, dtype: Dtype) -> Self {
        let of = |kernel: &str, direction, backward| {
            let (flops, bytes) = work(attention, dtype, direction);
            Self {
                device: "cpu".to_owned(),
                kernel: kernel.to_owned(),
                reason: "the plan was made for the cpu".to_owned(),
                mask: mask(attention),
                dtype: dtype.to_string(),
                arithmetic: "f32 products, f32 sums".to_owned(),
                flops,
                bytes,
                packing: None,
                launch: None,
                rejected: Vec::new(),
                stages: Vec::new(),
                backward,
                no_backward: None,
            }
        };
        let backward = of("cpu_tiled_backward", Direction::Backward, None);
        of("cpu_tiled_forward", Direction::Forward, Some(Box::new(backward)))
    }

    pub(crate) fn of_forward(
        attention: &Attention,
        packed: Option<&PackedHeads>,
        limits: &Limits,
        kernel: &Kernel,
        choice: Choice,
    ) -> Self {
        let certain = packed.filter(|packed| packed.is_certain());
        let launched = certain.map_or(attention, |packed| &packed.attention);
        let schedule = forward::schedule(launched, kernel.spec, limits);
        let blocks = (schedule.blocks(), forward::grid(kernel.spec, &schedule, limits));
        let workspace = forward::workspace_bytes(kernel.spec);
        Self {
            packing: packed.map(PackedHeads::words),
            ..Self::of_kernel(attention, limits, kernel, choice, blocks, workspace)
        }
    }

    pub(crate) fn of_backward(
        attention: &Attention,
        limits: &Limits,
        backward: &Backward,
        choice: Choice,
    ) -> Self {
        let kernel = &backward.main;
        let schedule = backward::schedule(attention, kernel.spec);
        let grid = backward::grid(kernel.spec, &schedule, limits);
        let workspace = backward.workspace_bytes(attention);
        let blocks = (schedule.blocks(), grid);
        let stages = [&backward.preprocess, &backward.convert];
        Self {
            stages: stages.map(|stage| stage.spec.name.to_owned()).to_vec(),
            ..Self::of_kernel(attention, limits, kernel, choice, blocks, workspace)
        }
    }

    fn of_kernel(
        attention: &Attention,
        limits: &Limits,
        kernel: &Kernel,
        choice: Choice,
        (blocks, grid): (u64, u64),
        workspace_bytes: usize,
    ) -> Self {
        let spec = kernel.spec;
        let (flops, bytes) = work(attention, spec.dtype, spec.direction);
        let by_shared = limits.shared_bytes_per_multiprocessor / (spec.shared_bytes + 1024).max(1);
        let by_registers =
            REGISTERS_PER_MULTIPROCESSOR / (kernel.registers.next_multiple_of(8) * spec.threads);
        let resident = by_shared.min(by_registers).max(1);
        Self {
            device: limits.name.clone(),
            kernel: spec.name.to_owned(),
            reason: choice.reason,
            mask: mask(attention),
            dtype: spec.dtype.to_string(),
            arithmetic: spec.dtype.arithmetic().to_owned(),
            flops,
            bytes,
            packing: None,
            launch: Some(Launch {
                form: kernel.form.to_string(),
                load_milliseconds: kernel.load_milliseconds,
                grid,
                block: spec.threads,
                shared_bytes: spec.shared_bytes,
                registers: kernel.registers,
                local_bytes: kernel.local_bytes,
                tile: (spec.tile.q_rows, spec.tile.kv_columns),
                tile_reason: spec.reason.to_owned(),
                blocks_per_multiprocessor: resident,
                waves: blocks as f64 / f64::from(resident * limits.multiprocessors).max(1.0),
                workspace_bytes,
            }),
            rejected: choice
                .rejected
                .into_iter()
                .map(|r| (r.kernel.to_owned(), r.reason))
                .collect(),
            stages: Vec::new(),
            backward: None,
            no_backward: None,
        }
    }
}

/// The mask class of a call and what it is for.
fn mask(attention: &Attention) -> String {
    let class = mask_class(attention).name();
    let mut names: Vec<&str> = options(attention).into_iter().map(|(_, name)| name).collect();
    // The right side of a window is what the class is called after.
    names.retain(|name| *name != RIGHT_SIDE);
    match names.as_slice() {
        [] => class.to_owned(),
        names => format!("{class}: {}", names.join(", ")),
    }
}

/// FLOPs over visible cells and compulsory bytes of a call. Backward, S and dP are formed and dQ,
/// dK and dV; o and lse are read, dO as well, and every gradient is written.
fn work(attention: &Attention, dtype: Dtype, direction: Direction) -> (f64, f64) {
    let shape = &attention.shape;
    let cells = attention.mask.visibility(shape.q_len, shape.kv_len).visible_cells() as f64
        * shape.batch as f64
        * shape.q_heads as f64;
    let elements: f64 = attention
        .tensor_dims()
        .iter()
        .map(|dims| dims.iter().map(|&dim| dim as f64).product::<f64>())
        .sum();
    let lse: f64 = attention.lse_dims().iter().map(|&dim| dim as f64).product();
    let (dim, value_dim) = (shape.head_dim as f64, shape.value_dim as f64);
    let (products, moves) = match direction {
        Direction::Forward => (dim + value_dim, 1.0),
        _ => (3.0 * dim + 2.0 * value_dim, 2.0),
    };
    (2.0 * products * cells, moves * elements * dtype.bytes() as f64 + 4.0 * lse)
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "device    {}", self.device)?;
        self.write_direction(f)?;
        if let Some(backward) = &self.backward {
            writeln!(f)?;
            backward.write_direction(f)?;
        }
        match &self.no_backward {
            Some(why) => writeln!(f, "\nbackward  {why}"),
            None => Ok(()),
        }
    }
}

impl Explanation {
    fn write_direction(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel    {} ({})", self.kernel, self.dtype)?;
        if !self.stages.is_empty() {
            writeln!(f, "around it {}", self.stages.join(", "))?;
        }
        writeln!(f, "because   {}", self.reason)?;
        writeln!(f, "mask      {}", self.mask)?;
        writeln!(f, "computes  {}", self.arithmetic)?;
        if let Some(packing) = &self.packing {
            writeln!(f, "packs     {packing}")?;
        }
        if let Some(launch) = &self.launch {
            writeln!(
                f,
                "launch    {} blocks of {} threads, {} bytes of shared memory, {} registers",
                launch.grid, launch.block, launch.shared_bytes, launch.registers
            )?;
            writeln!(
                f,
                "          {} blocks a multiprocessor, {:.2} waves; loaded as {} in {:.1} ms",
                launch.blocks_per_multiprocessor,
                launch.waves,
                launch.form,
                launch.load_milliseconds
            )?;
            writeln!(
                f,
                "tile      {} query rows x {} keys: {}",
                launch.tile.0, launch.tile.1, launch.tile_reason
            )?;
            writeln!(f, "workspace {} bytes", launch.workspace_bytes)?;
        }
        writeln!(f, "modelled  {:.4e} FLOP, {:.4e} bytes at least", self.flops, self.bytes)?;
        for (kernel, reason) in &self.rejected {
            writeln!(f, "not       {kernel}: {reason}")?;
        }
        Ok(())
    }
}
