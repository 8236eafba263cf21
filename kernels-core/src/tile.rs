//! Tile sizes and what follows from them: registers, shared memory, threads.
//!
//! A [`TileShape`] is a value, so that the CPU path and the property tests can draw any; a
//! [`Tiling`] pins one for a kernel. Offsets in shared memory exist only in a [`SharedPlan`].

use crate::fragment::Fragment;
use crate::swizzle::PanelLayout;

/// Rows of the score matrix a warp's `mma` covers at a time.
pub const MMA_ROWS: u32 = 16;
/// Every tile starts at a multiple of this, as swizzled copies and `wgmma` operands require.
pub const TILE_ALIGNMENT: u32 = 1024;

/// The tile sizes of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows a block owns.
    pub q_rows: u32,
    /// Keys of one K/V tile.
    pub kv_columns: u32,
    /// Compiled channels of q and k, D̂.
    pub head_dim: u32,
    /// Compiled channels of v and o, D̂v.
    pub value_dim: u32,
    /// Warps that own query rows (split-Q: each owns `q_rows / warps`).
    pub warps: u32,
    /// K/V tiles in flight.
    pub stages: u32,
}

impl TileShape {
    /// Query rows one warp owns.
    pub const fn rows_per_warp(&self) -> u32 {
        self.q_rows / self.warps
    }

    /// 16-row `mma` tiles one warp owns.
    pub const fn row_tiles(&self) -> u32 {
        self.rows_per_warp() / MMA_ROWS
    }

    /// Layout of the Q tile.
    pub const fn q_layout(&self) -> PanelLayout {
        PanelLayout { rows: self.q_rows, columns: self.head_dim }
    }

    /// Layout of a K tile.
    pub const fn k_layout(&self) -> PanelLayout {
        PanelLayout { rows: self.kv_columns, columns: self.head_dim }
    }

    /// Layout of a V tile.
    pub const fn v_layout(&self) -> PanelLayout {
        PanelLayout { rows: self.kv_columns, columns: self.value_dim }
    }

    /// Layout of the output tile.
    pub const fn o_layout(&self) -> PanelLayout {
        PanelLayout { rows: self.q_rows, columns: self.value_dim }
    }

    /// f32 values of the score accumulator a thread holds.
    pub const fn score_values(&self) -> usize {
        (self.rows_per_warp() * self.kv_columns / 32) as usize
    }

    /// f32 values of the output accumulator a thread holds.
    pub const fn output_values(&self) -> usize {
        (self.rows_per_warp() * self.value_dim / 32) as usize
    }

    /// Blocks of query rows of a sequence of `q_len` rows.
    pub const fn q_blocks(&self, q_len: usize) -> usize {
        q_len.div_ceil(self.q_rows as usize)
    }
}

/// Named offsets, in bytes, into a block's dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPlan {
    /// The Q tile, loaded once.
    pub q: u32,
    /// The ring of K tiles.
    pub k: u32,
    /// Bytes from one K stage to the next.
    pub k_stage: u32,
    /// The ring of V tiles.
    pub v: u32,
    /// Bytes from one V stage to the next.
    pub v_stage: u32,
    /// The output tile; it takes the place of what the last key tile has done with.
    pub o: u32,
    /// Bytes of the whole plan.
    pub bytes: u32,
}

impl SharedPlan {
    /// The portable forward: Q, then `stages` K tiles, then `stages` V tiles. The output tile is
    /// staged from the start once every warp has read its last V tile.
    pub const fn portable_forward(tile: TileShape) -> Self {
        let q = 0;
        let k = aligned(q + tile.q_layout().bytes());
        let k_stage = aligned(tile.k_layout().bytes());
        let v = k + k_stage * tile.stages;
        let v_stage = aligned(tile.v_layout().bytes());
        let bytes = v + v_stage * tile.stages;
        assert!(tile.o_layout().bytes() <= bytes, "the output tile fits where the inputs lay");
        Self { q, k, k_stage, v, v_stage, o: 0, bytes }
    }
}

const fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(TILE_ALIGNMENT)
}

/// A tile pinned for a kernel.
pub trait Tiling {
    /// The tile sizes.
    const SHAPE: TileShape;
    /// Blocks that should fit one multiprocessor; caps the registers of a thread.
    const BLOCKS_PER_SM: u32;
    /// Why these sizes.
    const REASON: &'static str;
    /// A thread's share of the scores, [`TileShape::score_values`] long.
    type Scores: Fragment;
    /// A thread's share of the output, [`TileShape::output_values`] long.
    type Output: Fragment;
    /// Holds when the fragments have the lengths that the shape implies.
    const CHECKED: () = {
        assert!(Self::Scores::LEN == Self::SHAPE.score_values());
        assert!(Self::Output::LEN == Self::SHAPE.output_values());
        assert!(Self::SHAPE.q_rows.is_multiple_of(Self::SHAPE.warps * MMA_ROWS));
        assert!(Self::SHAPE.kv_columns.is_multiple_of(16));
        assert!(Self::SHAPE.head_dim.is_multiple_of(32));
        assert!(Self::SHAPE.value_dim.is_multiple_of(32));
    };
}
