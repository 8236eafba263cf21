//! The transaction barriers of a hopper backward block.

use crate::tile::TileShape;

/// Numbers of the transaction barriers of a hopper backward block, one of each kind a slot; the
/// full ones come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperBackwardBarriers {
    /// K and the work have arrived.
    pub k_full: u32,
    /// V has arrived.
    pub v_full: u32,
    /// Q and its lse rows have arrived.
    pub q_full: u32,
    /// dO and its delta rows have arrived.
    pub d_o_full: u32,
    /// Every warp that reads them has done with K, V and the work.
    pub kv_empty: u32,
    /// Every consuming warp has done with Q and its lse rows.
    pub q_empty: u32,
    /// Every consuming warp has done with dO and its delta rows.
    pub d_o_empty: u32,
    /// Of each warpgroup, where sums are ordered and staged: its last dQ has left its place. One
    /// phase a step.
    pub drained: u32,
    /// Barriers in all.
    pub count: u32,
}

impl HopperBackwardBarriers {
    /// The barriers of a tile with so many K and V tiles in shared memory.
    pub const fn new(tile: TileShape, kv_stages: u32) -> Self {
        let q_full = 2 * kv_stages;
        let kv_empty = q_full + 2 * tile.stages;
        let q_empty = kv_empty + kv_stages;
        let drained = q_empty + 2 * tile.stages;
        Self {
            k_full: 0,
            v_full: kv_stages,
            q_full,
            d_o_full: q_full + tile.stages,
            kv_empty,
            q_empty,
            d_o_empty: q_empty + tile.stages,
            drained,
            count: drained + tile.warpgroups(),
        }
    }
}
