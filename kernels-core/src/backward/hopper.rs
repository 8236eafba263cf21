//! The hopper backward kernel's shared memory.

use crate::tile::{HOPPER_SHARED_BYTES, TILE_ALIGNMENT, TileShape};

/// Named offsets, in bytes, into a block's dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperBackwardPlan {
    /// The K tile.
    pub k: u32,
    /// The V tile.
    pub v: u32,
    /// The ring of Q tiles.
    pub q: u32,
    /// Bytes from one Q stage to the next.
    pub q_stage: u32,
    /// The ring of dO tiles.
    pub d_o: u32,
    /// Bytes from one dO stage to the next.
    pub d_o_stage: u32,
    /// dSᵀ, keys by queries, in the element type.
    pub ds: u32,
    /// lse and delta of a stage's rows, f32, stage after stage.
    pub rows: u32,
    /// The transaction barriers, 8 bytes each.
    pub barriers: u32,
    /// Bytes of the whole plan.
    pub bytes: u32,
}

impl HopperBackwardPlan {
    /// The plan of a tile.
    pub const fn new(tile: TileShape) -> Self {
        let k = 0;
        let v = aligned(k + tile.k_layout().bytes());
        let q = aligned(v + tile.v_layout().bytes());
        let q_stage = aligned(tile.q_layout().bytes());
        let d_o = q + q_stage * tile.stages;
        let d_o_stage = aligned(tile.o_layout().bytes());
        let ds = d_o + d_o_stage * tile.stages;
        let rows = aligned(ds + tile.kv_columns * tile.q_rows * 2);
        let barriers = rows + tile.stages * 2 * tile.q_rows * 4;
        let bytes = barriers + 256;
        assert!(bytes <= HOPPER_SHARED_BYTES, "the plan exceeds a block's shared memory");
        Self { k, v, q, q_stage, d_o, d_o_stage, ds, rows, barriers, bytes }
    }
}

const fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(TILE_ALIGNMENT)
}
