//! The portable backward kernel's division of work, shared memory and fragments.

use crate::axes::Dtype;
use crate::fragment::Fragment;
use crate::swizzle::PanelLayout;
use crate::tile::{MMA_ROWS, TILE_ALIGNMENT, TileShape, Tiling};

/// Shared memory that a block may have on compute capability 8.6, 8.9 and 12.0.
pub const CONSUMER_SHARED_BYTES: u32 = 101_376;

/// Bytes that say where a block of a kernel with options works, 48 of them, and its dropout's seed
/// and offset, behind [`PortableBackwardPlan`]'s.
pub const PLACE_BYTES: u32 = DROPOUT_IN_PLACE + 16;

/// Where in them the dropout's seed and offset begin.
pub const DROPOUT_IN_PLACE: u32 = 48;

/// Q tiles in flight.
pub const QUERY_STAGES: u32 = 2;

/// How the warps of a block divide a tile's five products, and named offsets, in bytes, into its
/// dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortableBackwardPlan {
    /// Key rows a warp owns of Sᵀ, dPᵀ, dK and dV, in 16-row `mma` tiles.
    pub row_tiles: u32,
    /// Warps that own the same keys: each forms Sᵀ and dPᵀ for a part of the queries, and dK and
    /// dV for a part of the channels.
    pub splits: u32,
    /// Groups of warps that own the same keys, of which one forms dK and one dV and dQ; else 1.
    pub roles: u32,
    /// Queries whose scores a warp holds at a time.
    pub queries_at_once: u32,
    /// Warps that form dQ.
    pub dq_warps: u32,
    /// 16-row tiles of dQ that a warp forms.
    pub dq_row_tiles: u32,
    /// Channels of dQ that a warp forms.
    pub dq_columns: u32,
    /// Whether a warp keeps its V rows in registers: V then lies in shared memory at the start
    /// only, where the Q and dO rings will.
    pub values_in_registers: bool,
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
    /// Pᵀ alike, where warps share keys.
    pub p: u32,
    /// lse and delta of a Q stage's rows, then of the next's.
    pub rows: u32,
    /// The block's work, 32 bytes.
    pub work: u32,
    /// Bytes of the whole plan.
    pub bytes: u32,
}

impl PortableBackwardPlan {
    /// The plan of a tile. Two row tiles a warp halve its reads of Q and dO, and are taken where a
    /// warp then still owns its keys alone, or where warps that share them still hold 16 queries at
    /// a time and the block fits a consumer card. Else one row tile with V in registers, if so it
    /// fits one; a larger block has two row tiles, and warps that share keys. Of elements of
    /// several `pieces`, see `split`.
    pub const fn new(tile: TileShape, pieces: u32) -> Self {
        if pieces > 1 {
            return Self::split(tile, pieces);
        }
        let paired = Self::with(tile, 2, false);
        let fits = paired.bytes + PLACE_BYTES <= CONSUMER_SHARED_BYTES;
        if paired.splits == 1 || (fits && paired.queries_at_once == 16) {
            return paired;
        }
        let lean = Self::with(tile, 1, true);
        if lean.bytes + PLACE_BYTES <= CONSUMER_SHARED_BYTES { lean } else { paired }
    }

    const fn with(tile: TileShape, row_tiles: u32, values_in_registers: bool) -> Self {
        let splits = tile.warps * row_tiles * MMA_ROWS / tile.kv_columns;
        let queries = tile.q_rows / splits;
        let most = 32 / row_tiles;
        let queries_at_once = if queries < most { queries } else { most };
        let pairs = tile.q_rows / (2 * MMA_ROWS);
        let paired = tile.head_dim * pairs / tile.warps;
        let (dq_row_tiles, dq_columns) =
            if paired.is_multiple_of(16) { (2, paired) } else { (1, paired * 2) };

        let k = 0;
        let v = aligned(k + tile.k_layout().bytes());
        let q = if values_in_registers { v } else { aligned(v + tile.v_layout().bytes()) };
        let q_stage = aligned(tile.q_layout().bytes());
        let d_o = q + QUERY_STAGES * q_stage;
        let d_o_stage = aligned(tile.o_layout().bytes());
        let ds = d_o + tile.stages * d_o_stage;
        let p = aligned(ds + Self::transposed_layout(tile).bytes());
        let rows = if splits > 1 { aligned(p + Self::transposed_layout(tile).bytes()) } else { p };
        let work = rows + QUERY_STAGES * 2 * tile.q_rows * 4;
        let bytes = work + 32;
        assert!(v + tile.v_layout().bytes() <= ds, "V fits where the Q and dO rings will be");
        assert!(tile.k_layout().bytes() + tile.v_layout().bytes() <= bytes, "dK and dV fit");
        Self {
            row_tiles,
            splits,
            roles: 1,
            queries_at_once,
            dq_warps: tile.warps,
            dq_row_tiles,
            dq_columns,
            values_in_registers,
            k,
            v,
            q,
            q_stage,
            d_o,
            d_o_stage,
            ds,
            p,
            rows,
            work,
            bytes,
        }
    }

    /// The plan for elements of several pieces, each a plane: one row tile, K and V, one Q and one
    /// dO tile, and dSᵀ. Where that is more than a consumer card has, dSᵀ takes the place of dO
    /// once dV is formed. Twice as many warps as 16 keys have roles, where a thread cannot hold the
    /// gradients of both K and V. A warp's dQ is formed 32 channels at a time.
    const fn split(tile: TileShape, pieces: u32) -> Self {
        let roles = tile.warps * MMA_ROWS / tile.kv_columns;
        let k = 0;
        let v = aligned(k + pieces * tile.k_layout().bytes());
        let q = aligned(v + pieces * tile.v_layout().bytes());
        let q_stage = aligned(pieces * tile.q_layout().bytes());
        let d_o = q + q_stage;
        let d_o_stage = aligned(pieces * tile.o_layout().bytes());
        let end = d_o + d_o_stage;
        let ds_bytes = aligned(pieces * Self::transposed_layout(tile).bytes());
        let state_bytes = 2 * tile.q_rows * 4 + 32;
        let fits = end + ds_bytes + state_bytes + PLACE_BYTES <= CONSUMER_SHARED_BYTES;
        assert!(ds_bytes <= d_o_stage, "dS fits where dO has been");
        let (ds, rows) = if fits { (end, end + ds_bytes) } else { (d_o, end) };
        Self {
            row_tiles: 1,
            splits: 1,
            roles,
            queries_at_once: tile.q_rows,
            dq_warps: tile.warps / roles,
            dq_row_tiles: 1,
            dq_columns: 32,
            values_in_registers: false,
            k,
            v,
            q,
            q_stage,
            d_o,
            d_o_stage,
            ds,
            p: ds,
            rows,
            work: rows + state_bytes - 32,
            bytes: rows + state_bytes,
        }
    }

    /// Whether dSᵀ lies where dO has been.
    pub const fn replaces_d_o(&self) -> bool {
        self.ds == self.d_o
    }

    /// Groups of channels of dQ, [`Self::dq_columns`] each, that a warp forms one after the other.
    pub const fn dq_groups(&self, tile: TileShape) -> u32 {
        let row_groups = tile.q_rows / (MMA_ROWS * self.dq_row_tiles);
        tile.head_dim * row_groups / (self.dq_warps * self.dq_columns)
    }

    /// Layout of Pᵀ and of dSᵀ.
    pub const fn transposed_layout(tile: TileShape) -> PanelLayout {
        PanelLayout { rows: tile.kv_columns, columns: tile.q_rows }
    }

    /// Channels of dK (or of dV, of `channels`) that a warp owns.
    pub const fn owned(&self, channels: u32) -> u32 {
        channels / self.splits
    }

    /// `mma` instructions of a warp: the five products of one step, unrolled, written once.
    pub const fn matrix_instructions(tile: TileShape, dtype: Dtype) -> u32 {
        let plan = Self::new(tile, dtype.pieces());
        let channels = tile.head_dim + tile.value_dim;
        let scores = plan.row_tiles * (tile.q_rows / plan.splits / 8) * (channels / 16);
        let keys = plan.row_tiles * (plan.owned(channels) / 8) * (tile.q_rows / 16);
        let groups = if dtype.pieces() > 1 { plan.dq_groups(tile) } else { 1 };
        let dq_columns = groups * plan.dq_columns;
        let queries = plan.dq_row_tiles * (dq_columns / 8) * (tile.kv_columns / 16);
        dtype.products() * (scores + keys + queries)
    }

    /// Block-wide barriers in the body.
    pub const fn barriers(tile: TileShape, dtype: Dtype) -> u32 {
        let plan = Self::new(tile, dtype.pieces());
        if dtype.pieces() > 1 {
            // The block's work; two a step, and two around dS where dO has been; two around an
            // ordered sum.
            return 1 + 2 + 2 * plan.replaces_d_o() as u32 + 2;
        }
        // The block's work; two around V's way into registers; two a step, and one more where a
        // lone dO tile must be free early; two around an ordered sum; two around dK and dV.
        let values = if plan.values_in_registers { 2 } else { 0 };
        let lone = if plan.splits > 1 && tile.stages == 1 { 1 } else { 0 };
        1 + values + 2 + lone + 2 + 2
    }
}

const fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(TILE_ALIGNMENT)
}

/// What the portable backward kernels need to know beyond the tile.
pub trait PortableBackwardTiling: Tiling {
    /// A thread's share of the scores that a warp holds at a time.
    type Scores: Fragment;
    /// Of dK; with roles, of dK or dV.
    type KeyGradient: Fragment;
    /// Of dV; with roles, nothing.
    type ValueGradient: Fragment;
    /// Of dQ.
    type QueryGradient: Fragment;
    /// Of V, as A operands; empty where V stays in shared memory.
    type Values: Fragment<u32>;
    /// Holds when the fragments have the lengths that the shape implies.
    const PORTABLE_CHECKED: () = {
        let tile = Self::SHAPE;
        let plan = PortableBackwardPlan::new(tile, Self::PIECES);
        let row = plan.row_tiles * 4;
        assert!(Self::Scores::LEN as u32 == row * plan.queries_at_once / 8);
        assert!(Self::KeyGradient::LEN as u32 == row * plan.owned(tile.head_dim) / 8);
        let dv = if plan.roles > 1 { 0 } else { row * plan.owned(tile.value_dim) / 8 };
        assert!(Self::ValueGradient::LEN as u32 == dv);
        assert!(plan.roles == 1 || (plan.roles == 2 && tile.head_dim == tile.value_dim));
        let dq = plan.dq_row_tiles * 4 * plan.dq_columns / 8;
        assert!(Self::QueryGradient::LEN as u32 == dq);
        let values = if plan.values_in_registers { tile.value_dim / 4 } else { 0 };
        assert!(Self::Values::LEN as u32 == values);
        let owners = tile.warps / plan.roles;
        assert!(tile.kv_columns * plan.splits == owners * plan.row_tiles * MMA_ROWS);
        assert!(plan.owned(tile.head_dim).is_multiple_of(16));
        assert!(plan.owned(tile.value_dim).is_multiple_of(16));
        assert!(plan.dq_columns.is_multiple_of(16));
        assert!(tile.q_rows.is_multiple_of(plan.splits * plan.queries_at_once));
        assert!(tile.stages == 1 || tile.stages == 2);
    };
}
