//! Historical: what flash-attention v2.0.0 launched (commit 4f285b35), as M4.4 describes it.
//!
//! None of it describes a kernel of this project, nor what a later release does. Tile sizes are
//! facts of that source; what follows from them is computed by the same functions as everything
//! else here.

use serde::{Deserialize, Serialize};

use crate::backward::AccumulatorTile;
use crate::error::{Result, blocks, positive, product, sum};
use crate::shared::{BackwardTile, ForwardTile};
use crate::tiles::{CausalAlign, TiledMask};

/// Bytes of the element types that v2.0.0 takes, f16 and bf16.
pub const ELEMENT_BYTES: u64 = 2;

/// A forward specialisation (M4.4 §0x04C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ForwardTrait {
    /// When it is dispatched.
    pub branch: &'static str,
    /// Compiled channels.
    pub head_dim: u64,
    /// Query rows.
    pub q_block: u64,
    /// Keys.
    pub kv_block: u64,
    /// Warps.
    pub warps: u64,
}

const fn forward(branch: &'static str, sizes: [u64; 4]) -> ForwardTrait {
    let [head_dim, q_block, kv_block, warps] = sizes;
    ForwardTrait { branch, head_dim, q_block, kv_block, warps }
}

/// The forward specialisations that M4.4 lists, and the fallback for 256 channels.
pub const FORWARD: &[ForwardTrait] = &[
    forward("d64", [64, 128, 128, 4]),
    forward("d128-sm80", [128, 128, 64, 4]),
    forward("d128-sm86-full", [128, 128, 32, 4]),
    forward("d128-sm86-causal", [128, 64, 64, 4]),
    forward("d224-high", [224, 128, 64, 8]),
    forward("d224-fallback", [224, 64, 64, 4]),
    forward("d256-a100", [256, 128, 64, 8]),
    forward("d256-fallback", [256, 64, 64, 4]),
];

impl ForwardTrait {
    /// The tile, for [`crate::shared::forward_shared`].
    pub const fn tile(&self) -> ForwardTile {
        ForwardTile {
            head_dim: self.head_dim,
            q_block: self.q_block,
            kv_block: self.kv_block,
            element_bytes: ELEMENT_BYTES,
            share_q_and_k: false,
        }
    }
}

/// A backward specialisation (M4.4 §0x06.2H).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardTrait {
    /// When it is dispatched.
    pub branch: &'static str,
    /// Compiled channels.
    pub head_dim: u64,
    /// Query rows.
    pub q_block: u64,
    /// Keys.
    pub kv_block: u64,
    /// Warps.
    pub warps: u64,
    /// Warps along the rows of the score and dP products.
    pub score_warps: u64,
    /// Warps along the keys of the dK and dV products.
    pub dkv_warps: u64,
    /// Warps along the rows of the dQ product.
    pub dq_warps: u64,
    /// Whether V is kept in registers.
    pub v_in_registers: bool,
    /// Whether two Q tiles are in flight.
    pub double_buffered_q: bool,
}

const fn backward(
    branch: &'static str,
    [head_dim, q_block, kv_block]: [u64; 3],
    [score_warps, dkv_warps, dq_warps]: [u64; 3],
    v_in_registers: bool,
    double_buffered_q: bool,
) -> BackwardTrait {
    BackwardTrait {
        branch,
        head_dim,
        q_block,
        kv_block,
        warps: 8,
        score_warps,
        dkv_warps,
        dq_warps,
        v_in_registers,
        double_buffered_q,
    }
}

/// The fifteen backward specialisations that the seventeen dispatch calls name.
pub const BACKWARD: &[BackwardTrait] = &[
    backward("d32", [32, 128, 128], [4, 4, 4], true, true),
    backward("d32-dropout", [32, 128, 128], [4, 4, 4], false, true),
    backward("d64-high", [64, 128, 128], [4, 4, 4], false, true),
    backward("d64-fallback", [64, 64, 128], [2, 4, 4], true, true),
    backward("d96", [96, 64, 128], [2, 4, 4], true, true),
    backward("d96-dropout", [96, 64, 128], [2, 4, 4], false, true),
    backward("d128-high", [128, 64, 128], [2, 4, 2], false, true),
    backward("d128-fallback", [128, 64, 64], [4, 2, 2], true, true),
    backward("d160-high", [160, 64, 64], [4, 4, 4], false, true),
    backward("d160-fallback", [160, 64, 64], [4, 4, 4], false, false),
    backward("d192-high", [192, 64, 64], [4, 2, 2], false, true),
    backward("d192-fallback", [192, 64, 64], [4, 2, 2], true, false),
    backward("d224", [224, 64, 64], [4, 4, 4], false, true),
    backward("d256-high", [256, 64, 64], [4, 2, 2], false, true),
    backward("d256-fallback", [256, 64, 64], [4, 2, 2], false, false),
];

impl BackwardTrait {
    /// The tile, for [`crate::shared::backward_shared`].
    pub const fn tile(&self) -> BackwardTile {
        BackwardTile {
            head_dim: self.head_dim,
            q_block: self.q_block,
            kv_block: self.kv_block,
            element_bytes: ELEMENT_BYTES,
            double_buffered_q: self.double_buffered_q,
            v_in_registers: self.v_in_registers,
        }
    }

    /// The tile, for [`crate::backward::accumulators`].
    pub const fn accumulator_tile(&self) -> AccumulatorTile {
        AccumulatorTile {
            head_dim: self.head_dim,
            q_block: self.q_block,
            kv_block: self.kv_block,
            warps: self.warps,
            score_warps_along_rows: self.score_warps,
        }
    }
}

/// Widths of one head (M4.4 §0x03G): three coordinates, only the second of which is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HeadWidths {
    /// What the caller has.
    pub logical: u128,
    /// What the wrapper pads to, a multiple of 8.
    pub stored: u128,
    /// What the kernel is compiled for, a multiple of 32.
    pub compiled: u128,
    /// Lanes of the kernel past the stored width, predicated off.
    pub predicated_lanes: u128,
}

/// The widths of a head of `head_dim` channels.
///
/// # Errors
///
/// A width of 0.
pub fn head_widths(head_dim: u64) -> Result<HeadWidths> {
    let logical = positive("head_dim", head_dim)?;
    let stored = logical.next_multiple_of(8);
    let compiled = stored.next_multiple_of(32);
    Ok(HeadWidths { logical, stored, compiled, predicated_lanes: compiled - stored })
}

/// Rows or keys that workspaces are made for: a multiple of 128.
///
/// # Errors
///
/// A length of 0.
pub fn workspace_extent(len: u64) -> Result<u128> {
    Ok(positive("len", len)?.next_multiple_of(128))
}

/// The forward loop over key tiles, which runs from the last to the first (M4.4 §0x05.1D).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyLoop {
    /// Key tiles that each query tile walks.
    pub visits: Vec<u128>,
    /// Their sum.
    pub total_visits: u128,
    /// Iterations that compare each cell: a fixed band at the diagonal, whatever its tiles' class.
    pub mask_iterations: u128,
}

/// The loop of a causal call, aligned at the top left as v2.0.0 was.
///
/// # Errors
///
/// A size of 0, a length too long for a kernel; another alignment.
pub fn causal_key_loop(mask: &TiledMask) -> Result<KeyLoop> {
    if mask.align != CausalAlign::TopLeft {
        return Err(crate::Error::field("align", format!("{:?}", mask.align), "top_left"));
    }
    mask.visibility()?;
    let kv_tiles = blocks("kv_block", mask.kv_len, mask.kv_block)?;
    let q_tiles = blocks("q_block", mask.q_len, mask.q_block)?;
    let [rows, keys] = [mask.q_block, mask.kv_block].map(u128::from);
    let band = rows.div_ceil(keys);
    let visits: Vec<u128> =
        (1..=q_tiles).map(|tile| kv_tiles.min((tile * rows).div_ceil(keys))).collect();
    Ok(KeyLoop {
        total_visits: sum("total_visits", &visits)?,
        mask_iterations: visits.iter().map(|visits| band.min(*visits)).sum(),
        visits,
    })
}

/// A backward block's loop, for [`barriers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackwardLoop {
    /// Query tiles it visits, T.
    pub q_tiles: u64,
    /// Whether two Q tiles are in flight.
    pub double_buffered_q: bool,
    /// Whether V is kept in registers.
    pub v_in_registers: bool,
}

/// Executions of the block barrier (M4.4 §0x06.2F), by what each protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Barriers {
    /// Copied operands before their readers: T.
    pub operands: u128,
    /// Stored P and dS before their readers: T.
    pub p_and_ds: u128,
    /// dO's readers before the next copy: T.
    pub d_o: u128,
    /// dK and dV before they are copied out: 1.
    pub epilogue: u128,
    /// V read by all before dS takes its place: 1 where V is in registers.
    pub v_capture: u128,
    /// The loop's last readers before the epilogue's tiles: v2.0.0 has it only where V is in
    /// registers.
    pub alias_guard: u128,
    /// The sole Q tile's readers before the next copy: T − 1 where Q is not double-buffered.
    pub q_reuse: u128,
    /// As v2.0.0 executes them.
    pub total: u128,
    /// What it takes without a race: the last dQ product still reads K when the epilogue writes
    /// dK over it, so the alias guard is always needed (added upstream in v2.0.4).
    pub race_free: u128,
}

/// Barriers of a backward block.
///
/// # Errors
///
/// No query tile; a sum beyond `u128`.
pub fn barriers(block: &BackwardLoop) -> Result<Barriers> {
    let tiles = positive("q_tiles", block.q_tiles)?;
    let of_v = u128::from(block.v_in_registers);
    let q_reuse = if block.double_buffered_q { 0 } else { tiles - 1 };
    let total = sum("total", &[product("total", &[3, tiles])?, 1, 2 * of_v, q_reuse])?;
    Ok(Barriers {
        operands: tiles,
        p_and_ds: tiles,
        d_o: tiles,
        epilogue: 1,
        v_capture: of_v,
        alias_guard: of_v,
        q_reuse,
        total,
        race_free: total + (1 - of_v),
    })
}
