//! Tile sizes of a hopper backward kernel and what follows from them.

pub use super::hopper_barriers::HopperBackwardBarriers;
use crate::fragment::Fragment;
use crate::swizzle::PanelLayout;
use crate::tensor_map::PanelBox;
use crate::tile::{
    HOPPER_SHARED_BYTES, TILE_ALIGNMENT, TileShape, Tiling, WARPGROUP_ROWS, WARPGROUP_WARPS,
};

/// How the two warpgroups share a block's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyShare {
    /// Each owns 64 keys: it holds Sᵀ and dPᵀ of them, as operands of its products too, and all
    /// channels of their dK and dV.
    Keys,
    /// Both compute 64 keys: each half of the rows of Sᵀ and dPᵀ, which pass through shared memory,
    /// and half of the channels of dK and dV.
    Channels,
}

impl KeyShare {
    /// How the warpgroups of a tile share its keys.
    pub const fn of(tile: &TileShape) -> Self {
        if tile.kv_columns == WARPGROUP_ROWS { Self::Channels } else { Self::Keys }
    }

    /// Parts that the channels of a tile lie in, one after the other.
    pub const fn channel_parts(self) -> u32 {
        match self {
            Self::Keys => 1,
            Self::Channels => 2,
        }
    }

    /// Query rows of a step whose scores a warpgroup computes.
    pub const fn rows(self, tile: &TileShape) -> u32 {
        match self {
            Self::Keys => tile.q_rows,
            Self::Channels => tile.q_rows / 2,
        }
    }
}

/// How the warpgroups share the product dQ += dS·K of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryShare {
    /// Each computes 64 of the step's query rows.
    Rows,
    /// Each computes half of the channels.
    Channels,
    /// Each computes all of every other step.
    Steps,
}

impl QueryShare {
    /// How the warpgroups of a tile share it: by rows where there are enough, else by channels
    /// where a half is whole panels.
    pub const fn of(tile: &TileShape) -> Self {
        if tile.q_rows == tile.warpgroups() * WARPGROUP_ROWS {
            Self::Rows
        } else if panels(tile, tile.head_dim).is_multiple_of(tile.warpgroups()) {
            Self::Channels
        } else {
            Self::Steps
        }
    }

    /// Warpgroups that each compute a part of a step's dQ.
    pub const fn sharers(self, tile: &TileShape) -> u32 {
        match self {
            Self::Steps => 1,
            Self::Rows | Self::Channels => tile.warpgroups(),
        }
    }
}

/// Whether a step computes the dQ of the one before, so that the warpgroups need not keep step.
/// Measured on an H200 with normal data: at d = 64, 4096 to 16384 rows, 4 to 10 % faster; at 128
/// mixed.
pub const fn defers(tile: &TileShape) -> bool {
    matches!(KeyShare::of(tile), KeyShare::Keys) && tile.q_rows > WARPGROUP_ROWS
}

/// Whether a kernel with options takes a softcap and ALiBi in one call. The softcap's derivative is
/// taken from P, and asks for ALiBi's distances again: at d = 128 that is a register too many.
pub const fn softcap_has_alibi(tile: &TileShape) -> bool {
    tile.head_dim <= 64
}

/// What the hopper backward kernels need to know beyond the tile.
pub trait HopperBackwardTiling: Tiling {
    /// A thread's share of a step's scores.
    type Scores: Fragment;
    /// The same, packed in pairs.
    type Packed: Fragment<u32>;
    /// A thread's share of the dK sums.
    type KeyGradient: Fragment;
    /// A thread's share of the dV sums.
    type ValueGradient: Fragment;
    /// A thread's share of a step's dQ.
    type QueryGradient: Fragment;
    /// Holds when the fragments have the lengths that the shape implies.
    const HOPPER_CHECKED: () = {
        let tile = Self::SHAPE;
        let threads = tile.warps * 32;
        assert!(tile.warpgroups() == 2);
        assert!(tile.kv_columns == WARPGROUP_ROWS || tile.kv_columns == 2 * WARPGROUP_ROWS);
        assert!(Self::Scores::LEN as u32 * threads == tile.kv_columns * tile.q_rows);
        assert!(Self::Packed::LEN * 2 == Self::Scores::LEN);
        assert!(Self::KeyGradient::LEN as u32 * threads == tile.kv_columns * tile.head_dim);
        assert!(Self::ValueGradient::LEN as u32 * threads == tile.kv_columns * tile.value_dim);
        let sharers = QueryShare::of(&tile).sharers(&tile);
        let values = tile.q_rows * tile.head_dim / (sharers * WARPGROUP_WARPS * 32);
        assert!(Self::QueryGradient::LEN as u32 == values);
        assert!(tile.stages >= 2);
    };
}

/// Named offsets, in bytes, into the dynamic shared memory of a hopper backward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperBackwardPlan {
    /// K and V tiles: 2 where they fit, so that the next keys come during this work's steps.
    pub kv_stages: u32,
    /// The K tiles.
    pub k: u32,
    /// Bytes from one K tile to the next.
    pub k_stage: u32,
    /// The V tiles.
    pub v: u32,
    /// Bytes from one V tile to the next.
    pub v_stage: u32,
    /// The ring of Q tiles.
    pub q: u32,
    /// Bytes from one Q tile to the next.
    pub q_stage: u32,
    /// The ring of dO tiles.
    pub d_o: u32,
    /// Bytes from one dO tile to the next.
    pub d_o_stage: u32,
    /// Two dSᵀ tiles.
    pub d_s: u32,
    /// Two Pᵀ tiles, where they are not in registers.
    pub p: u32,
    /// Bytes from one dSᵀ or Pᵀ tile to the next.
    pub d_s_stage: u32,
    /// Whether dQ goes out through shared memory, where there is room for it.
    pub dq_staged: bool,
    /// The place of a step's dQ on its way out, f32, if so.
    pub dq: u32,
    /// The lse rows of each Q tile, f32.
    pub lse: u32,
    /// The delta rows of each dO tile, f32.
    pub delta: u32,
    /// Bytes from one such run of rows to the next.
    pub row_stage: u32,
    /// The transaction barriers, 8 bytes each; see [`HopperBackwardBarriers`].
    pub barriers: u32,
    /// Works, [`WORK_BYTES`] each: one a K tile, and the producer's own.
    pub works: u32,
    /// A u32: the works that the producer has copied.
    pub work_count: u32,
    /// A u32: the steps that the producer has copied.
    pub step_count: u32,
    /// A u32: the section that the producer draws works from; `u32::MAX` past the last. Warps look
    /// at it while it is written.
    pub section: u32,
    /// A u32: the last section that the producer has found clear.
    pub clear_section: u32,
    /// A u32: the section of the work whose end the producer has seen and not told.
    pub done: u32,
    /// [`STEP_BYTES`] of each Q tile, and of as many before them: 1 where its lse is natural, its
    /// number among the tiles of its head, and among those of all heads.
    pub steps: u32,
    /// Bytes of the whole plan.
    pub bytes: u32,
}

impl HopperBackwardPlan {
    /// The plan of a tile: dQ staged if it fits, then K and V twice if they fit.
    pub const fn new(tile: TileShape) -> Self {
        let choices = [(true, 2), (true, 1), (false, 2), (false, 1)];
        let mut choice = 0;
        loop {
            let (dq_staged, kv_stages) = choices[choice];
            let plan = Self::with(tile, dq_staged, kv_stages);
            if plan.bytes <= HOPPER_SHARED_BYTES {
                return plan;
            }
            choice += 1;
            assert!(choice < choices.len(), "the plan exceeds a block's shared memory");
        }
    }

    /// `wgmma` instructions of a kernel: the five products of a step, each written twice, before or
    /// after the loop over steps and in it. Where dQ is deferred there is one dQ more.
    pub const fn matrix_instructions(tile: TileShape) -> u32 {
        let scores = tile.head_dim / 16 + tile.value_dim / 16;
        let gradients = 2 * (tile.q_rows / 16) + tile.kv_columns / 16;
        let deferred = if defers(&tile) { tile.kv_columns / 16 } else { 0 };
        2 * (scores + gradients) + deferred
    }

    /// Barriers of a kernel: at the start; before, in and after the loop over steps, one side of
    /// the consumers' meeting or both; a warp's four where it gives back slots, and one where it
    /// gives back K and V; two around the gradients' way out; in the loop and after it a pair where
    /// dQ is added in order and, where it is staged, a warp's two; two a warp and a pair in the
    /// keeper of that order; three where parts pass sums on; a warp's one each where sums are
    /// cleared and converted. Where dQ is deferred: thirteen more for what of dS has been read and
    /// for one more dQ after the loop, less the three that ordered sums need not if staged.
    pub const fn barriers(tile: TileShape) -> u32 {
        let plan = Self::new(tile);
        if defers(&tile) {
            39
        } else if plan.dq_staged {
            29
        } else {
            25
        }
    }

    /// Bytes of a block with options: behind the plan it has a part of a
    /// [`KeyRecord`](super::record::KeyRecord) for each work.
    pub const fn masked_bytes(&self) -> u32 {
        self.bytes + (self.kv_stages + 1) * HOME_BYTES
    }

    const fn with(tile: TileShape, dq_staged: bool, kv_stages: u32) -> Self {
        let k = 0;
        let k_stage = aligned(tile.k_layout().bytes());
        let v = k + k_stage * kv_stages;
        let v_stage = aligned(tile.v_layout().bytes());
        let q = v + v_stage * kv_stages;
        let q_stage = aligned(tile.q_layout().bytes());
        let d_o = q + q_stage * tile.stages;
        let d_o_stage = aligned(tile.o_layout().bytes());
        let d_s = d_o + d_o_stage * tile.stages;
        let d_s_stage = aligned(d_s_layout(&tile).bytes());
        let p = d_s + d_s_stage * 2;
        let dq = match KeyShare::of(&tile) {
            KeyShare::Keys => p,
            KeyShare::Channels => p + d_s_stage * 2,
        };
        // Each warpgroup has a place of its own.
        let shares = tile.warpgroups() / QueryShare::of(&tile).sharers(&tile);
        let dq_bytes = if dq_staged { tile.q_rows * tile.head_dim * 4 * shares } else { 0 };
        let lse = dq + dq_bytes;
        let row_stage = tile.q_rows * 4;
        let delta = lse + row_stage * tile.stages;
        let barriers = delta + row_stage * tile.stages;
        let count = HopperBackwardBarriers::new(tile, kv_stages).count;
        let works = (barriers + count * 8).next_multiple_of(16);
        let words = works + (kv_stages + 1) * WORK_BYTES;
        Self {
            kv_stages,
            k,
            k_stage,
            v,
            v_stage,
            q,
            q_stage,
            d_o,
            d_o_stage,
            d_s,
            p,
            d_s_stage,
            dq_staged,
            dq,
            lse,
            delta,
            row_stage,
            barriers,
            works,
            work_count: words,
            step_count: words + 4,
            section: words + 8,
            clear_section: words + 12,
            done: words + 16,
            steps: words + 32,
            bytes: words + 32 + 2 * tile.stages * STEP_BYTES,
        }
    }
}

/// Bytes of a work in shared memory.
pub const WORK_BYTES: u32 = 32;

/// Bytes of what a kernel with options knows of a work besides.
pub const HOME_BYTES: u32 = 64;

/// Bytes of what consumers are told of a Q tile.
pub const STEP_BYTES: u32 = 16;

/// Layout of a dSᵀ or Pᵀ tile: keys by query rows.
pub const fn d_s_layout(tile: &TileShape) -> PanelLayout {
    PanelLayout { rows: tile.kv_columns, columns: tile.q_rows }
}

/// Layout of a part of a tile of `rows` by `channels`; see [`KeyShare::channel_parts`]. Where there
/// are two, each warpgroup's channels are whole panels.
pub const fn part_layout(tile: &TileShape, rows: u32, channels: u32) -> PanelLayout {
    PanelLayout { rows, columns: channels / KeyShare::of(tile).channel_parts() }
}

/// Panels of all parts of a tile of `channels`.
pub const fn panels(tile: &TileShape, channels: u32) -> u32 {
    part_layout(tile, tile.q_rows, channels).panels() * KeyShare::of(tile).channel_parts()
}

/// The boxes of q, k, v and dO of a hopper backward kernel: a copy moves one panel of a tile.
pub const fn hopper_backward_boxes(tile: &TileShape) -> [PanelBox; 4] {
    [
        PanelBox::of(part_layout(tile, tile.q_rows, tile.head_dim)),
        PanelBox::of(part_layout(tile, tile.kv_columns, tile.head_dim)),
        PanelBox::of(part_layout(tile, tile.kv_columns, tile.value_dim)),
        PanelBox::of(part_layout(tile, tile.q_rows, tile.value_dim)),
    ]
}

const fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(TILE_ALIGNMENT)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::axes::{Direction, Family};
    use crate::table::KERNELS;
    use crate::tensor_map::MAX_BOX_SIDE;
    use std::vec;

    fn tiles() -> impl Iterator<Item = TileShape> {
        let kernels = KERNELS.iter().filter(|kernel| kernel.family == Family::Hopper);
        kernels.filter(|kernel| kernel.direction == Direction::Backward).map(|kernel| kernel.tile)
    }

    #[test]
    fn places_follow_each_other() {
        for tile in tiles() {
            let plan = HopperBackwardPlan::new(tile);
            let p = match KeyShare::of(&tile) {
                KeyShare::Keys => 0,
                KeyShare::Channels => 2 * plan.d_s_stage,
            };
            let shares = tile.warpgroups() / QueryShare::of(&tile).sharers(&tile);
            let dq = if plan.dq_staged { tile.q_rows * tile.head_dim * 4 * shares } else { 0 };
            let count = HopperBackwardBarriers::new(tile, plan.kv_stages).count;
            let places = vec![
                (plan.k, plan.k_stage * plan.kv_stages),
                (plan.v, plan.v_stage * plan.kv_stages),
                (plan.q, plan.q_stage * tile.stages),
                (plan.d_o, plan.d_o_stage * tile.stages),
                (plan.d_s, plan.d_s_stage * 2),
                (plan.p, p),
                (plan.dq, dq),
                (plan.lse, plan.row_stage * tile.stages),
                (plan.delta, plan.row_stage * tile.stages),
                (plan.barriers, count * 8),
                (plan.works, WORK_BYTES * (plan.kv_stages + 1)),
                (plan.work_count, 4),
                (plan.step_count, 4),
                (plan.section, 4),
                (plan.clear_section, 4),
                (plan.done, 4),
                (plan.steps, 2 * STEP_BYTES * tile.stages),
            ];
            let mut end = 0;
            for (place, bytes) in places {
                assert!(place >= end);
                end = place + bytes;
            }
            assert!(end <= plan.bytes && plan.bytes <= HOPPER_SHARED_BYTES);
            for place in [plan.k, plan.v, plan.q, plan.d_o, plan.d_s, plan.p] {
                assert!(place.is_multiple_of(TILE_ALIGNMENT));
            }
        }
    }

    #[test]
    fn boxes_are_panels_of_whole_warpgroups_channels() {
        for tile in tiles() {
            let channels = [tile.head_dim, tile.head_dim, tile.value_dim, tile.value_dim];
            for (panel, channels) in hopper_backward_boxes(&tile).iter().zip(channels) {
                assert!(panel.rows <= MAX_BOX_SIDE);
                let own = channels / KeyShare::of(&tile).channel_parts();
                assert!(own.is_multiple_of(panel.columns));
            }
        }
    }
}
