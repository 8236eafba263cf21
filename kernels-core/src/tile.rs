//! Tile sizes and what follows from them: registers, shared memory, threads.
//!
//! A [`TileShape`] is a value, so that the CPU path and the property tests can draw any; a
//! [`Tiling`] pins one for a kernel. Offsets in shared memory exist only in a [`SharedPlan`].

use crate::fragment::Fragment;
use crate::swizzle::PanelLayout;

/// Rows of the score matrix a warp's `mma` covers at a time.
pub const MMA_ROWS: u32 = 16;
/// Warps of a warpgroup.
pub const WARPGROUP_WARPS: u32 = 4;
/// Rows of the score matrix that a warpgroup's `wgmma` covers.
pub const WARPGROUP_ROWS: u32 = 64;
/// Every tile starts at a multiple of this, as swizzled copies and `wgmma` operands require.
pub const TILE_ALIGNMENT: u32 = 1024;

/// The tile sizes of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Query rows a forward block owns, or a backward block takes at a time.
    pub q_rows: u32,
    /// Keys of one K/V tile, which a backward block owns.
    pub kv_columns: u32,
    /// Compiled channels of q and k, D̂.
    pub head_dim: u32,
    /// Compiled channels of v and o, D̂v.
    pub value_dim: u32,
    /// Warps that multiply. Of a forward block each owns `q_rows / warps` rows (split-Q).
    pub warps: u32,
    /// K/V tiles in flight; of a backward block, dO tiles.
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

    /// Warpgroups that own query rows; four consecutive warps are one.
    pub const fn warpgroups(&self) -> u32 {
        self.warps / WARPGROUP_WARPS
    }

    /// Layout of the Q rows of one warpgroup, a box of the copy engine.
    pub const fn warpgroup_q_layout(&self) -> PanelLayout {
        PanelLayout { rows: WARPGROUP_ROWS, columns: self.head_dim }
    }

    /// Layout of the output rows of one warpgroup, a box of the copy engine.
    pub const fn warpgroup_o_layout(&self) -> PanelLayout {
        PanelLayout { rows: WARPGROUP_ROWS, columns: self.value_dim }
    }

    /// Warpgroups whose output rows one V slot holds.
    pub const fn outputs_per_turn(&self) -> u32 {
        let fit = self.kv_columns / WARPGROUP_ROWS;
        if fit < self.warpgroups() { fit } else { self.warpgroups() }
    }

    /// Turns in the V ring that the output rows of all warpgroups take.
    pub const fn output_turns(&self) -> u32 {
        self.warpgroups().div_ceil(self.outputs_per_turn())
    }

    /// Blocks of query rows of a sequence of `q_len` rows.
    pub const fn q_blocks(&self, q_len: usize) -> usize {
        q_len.div_ceil(self.q_rows as usize)
    }

    /// Blocks of keys of a sequence of `kv_len` keys.
    pub const fn kv_blocks(&self, kv_len: usize) -> usize {
        kv_len.div_ceil(self.kv_columns as usize)
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
    /// The transaction barriers, 8 bytes each; see [`HopperBarriers`].
    pub barriers: u32,
    /// Works, 16 bytes each: the block's next one a V slot, which an output's turn brings; two of
    /// the producer's own; and the one that each consuming warp attends to.
    pub works: u32,
    /// Bytes of the whole plan.
    pub bytes: u32,
}

impl SharedPlan {
    /// The portable forward: Q, then `stages` K tiles, then `stages` V tiles. The output tile is
    /// staged from the start once every warp has read its last V tile.
    /// Each tile has `pieces` planes (`Dtype::pieces`), one after the other.
    pub const fn portable_forward(tile: TileShape, pieces: u32) -> Self {
        let q = 0;
        let k = aligned(q + pieces * tile.q_layout().bytes());
        let k_stage = aligned(pieces * tile.k_layout().bytes());
        let v = k + k_stage * tile.stages;
        let v_stage = aligned(pieces * tile.v_layout().bytes());
        let bytes = v + v_stage * tile.stages;
        assert!(tile.o_layout().bytes() <= bytes, "the output tile fits where the inputs lay");
        Self { q, k, k_stage, v, v_stage, o: 0, barriers: bytes, works: bytes, bytes }
    }

    /// From [`Self::works`] of a portable kernel with options, where the block's place among the
    /// items takes 48 bytes, to its dropout's seed and offset, which take 16.
    pub const DROPOUT: u32 = 48;
    /// From [`Self::works`] to where K and V of the block begin, 16 bytes.
    pub const SOURCES: u32 = 64;
    /// From [`Self::works`] to what a boolean mask shows, 8 bytes a thread of a `general` kernel.
    pub const SHOWN: u32 = 80;

    /// As the portable forward, with [`Self::works`], [`Self::DROPOUT`] and
    /// [`Self::SOURCES`] behind it.
    pub const fn portable_masked(tile: TileShape, pieces: u32) -> Self {
        let plan = Self::portable_forward(tile, pieces);
        Self { bytes: plan.works + Self::SHOWN, ..plan }
    }

    /// As the portable forward of class `masked`, with [`Self::SHOWN`] behind it.
    pub const fn portable_general(tile: TileShape, pieces: u32) -> Self {
        let plan = Self::portable_masked(tile, pieces);
        Self { bytes: plan.bytes + tile.warps * 32 * 8, ..plan }
    }

    /// The hopper forward: the Q rows of each warpgroup, the K ring, the V ring, the barriers,
    /// the next work. The output tile takes turns in the V ring; see [`TileShape::output_turns`].
    pub const fn hopper_forward(tile: TileShape) -> Self {
        let q = 0;
        let k = q + tile.warpgroups() * aligned(tile.warpgroup_q_layout().bytes());
        let k_stage = aligned(tile.k_layout().bytes());
        let v = k + k_stage * tile.stages;
        let v_stage = aligned(tile.v_layout().bytes());
        let barriers = v + v_stage * tile.stages;
        let works = (barriers + HopperBarriers::of(tile).count * 8).next_multiple_of(16);
        let bytes = works + (tile.stages + 2 + tile.warps) * 16;
        assert!(bytes <= HOPPER_SHARED_BYTES, "the plan exceeds a block's shared memory");
        Self { q, k, k_stage, v, v_stage, o: v, barriers, works, bytes }
    }

    /// As the hopper forward, with works of [`WORK_RECORD_BYTES`] each.
    pub const fn hopper_masked(tile: TileShape) -> Self {
        let plan = Self::hopper_forward(tile);
        let bytes = plan.works + (tile.stages + 2 + tile.warps) * WORK_RECORD_BYTES;
        assert!(bytes <= HOPPER_SHARED_BYTES, "the plan exceeds a block's shared memory");
        Self { bytes, ..plan }
    }
}

/// Bytes of a work as kernels with options leave it in shared memory.
pub const WORK_RECORD_BYTES: u32 = 160;

/// Shared memory that a block may have on compute capability 9.0: 227 KB.
pub const HOPPER_SHARED_BYTES: u32 = 232_448;

/// Numbers of the transaction barriers of a hopper forward block: a full and an empty one for each
/// warpgroup's Q rows and for each slot of the K and V rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperBarriers {
    /// First of the Q barriers, one a warpgroup: the rows have arrived.
    pub q_full: u32,
    /// The rows may be overwritten.
    pub q_empty: u32,
    /// First of the K barriers, one a slot: the tile has arrived.
    pub k_full: u32,
    /// Every warpgroup has read the tile.
    pub k_empty: u32,
    /// First of the V barriers, one a slot: the tile has arrived, or the slot is the output's.
    pub v_full: u32,
    /// Every warpgroup has read the tile, and the output has been copied out.
    pub v_empty: u32,
    /// Barriers in all.
    pub count: u32,
}

impl HopperBarriers {
    /// The barriers of a tile.
    pub const fn of(tile: TileShape) -> Self {
        let (warpgroups, stages) = (tile.warpgroups(), tile.stages);
        let k_full = 2 * warpgroups;
        Self {
            q_full: 0,
            q_empty: warpgroups,
            k_full,
            k_empty: k_full + stages,
            v_full: k_full + 2 * stages,
            v_empty: k_full + 3 * stages,
            count: k_full + 4 * stages,
        }
    }
}

const fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(TILE_ALIGNMENT)
}

/// A tile pinned for a kernel.
pub trait Tiling {
    /// The tile sizes.
    const SHAPE: TileShape;
    /// Blocks that should fit one multiprocessor; caps the registers of a thread. 0 leaves both to
    /// the assembler.
    const BLOCKS_PER_SM: u32;
    /// Why these sizes.
    const REASON: &'static str;
    /// 16-bit pieces of an element that the kernels on this tile compute with (`Dtype::pieces`).
    const PIECES: u32 = 1;
    /// Whether the warpgroups take turns at issuing products, so that one's products run under
    /// another's softmax.
    const PING_PONG: bool = false;
}

/// What the forward kernels need to know beyond the tile.
pub trait ForwardTiling: Tiling {
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

/// What the hopper forward kernels need to know beyond the tile.
pub trait HopperTiling: ForwardTiling {
    /// A thread's probabilities, packed in pairs: half as many registers as scores.
    type Packed: Fragment<u32>;
    /// Holds when the fragments have the lengths that the shape implies.
    const HOPPER_CHECKED: () = {
        assert!(Self::Packed::LEN * 2 == Self::SHAPE.score_values());
        assert!(Self::SHAPE.q_rows == Self::SHAPE.warpgroups() * WARPGROUP_ROWS);
        assert!(Self::SHAPE.kv_columns >= WARPGROUP_ROWS && Self::SHAPE.kv_columns <= 256);
        assert!(Self::SHAPE.stages >= 2 && Self::SHAPE.warpgroups() <= 3);
        // A slot that two of the output's turns share would be waited for by its own holder.
        assert!(Self::SHAPE.output_turns() <= Self::SHAPE.stages);
    };
}

/// Registers of a thread before and after the warpgroups have divided them anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterSplit {
    /// Of a thread of the producing warpgroup.
    pub producer: u32,
    /// Of a thread of a consuming warpgroup.
    pub consumer: u32,
}

impl RegisterSplit {
    /// The split among one producing and `warpgroups` consuming warpgroups: a multiprocessor has
    /// 65,536 registers, and `setmaxnreg` deals in eights.
    pub const fn of(warpgroups: u32) -> Self {
        match warpgroups {
            1 | 2 => Self { producer: 24, consumer: 240 },
            _ => Self { producer: 32, consumer: 160 },
        }
    }

    /// As [`Self::of`], with more for a producing warp that looks for works among items.
    pub const fn masked(warpgroups: u32) -> Self {
        match warpgroups {
            1 | 2 => Self { producer: 40, consumer: 232 },
            _ => Self::of(warpgroups),
        }
    }
}
