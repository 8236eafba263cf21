//! FLOPs and bytes of each stage of a call, and their quotients (M4.4 §0x06.3).
//!
//! Source-logical bytes: what the schedule requests, request by request, whether or not a cache
//! serves it. Neither the unique size of a tensor nor what a memory system moved.

use serde::{Deserialize, Serialize};

use crate::error::{Result, positive, product, sum};
use crate::sizes::Sizes;
use crate::tiles::{CausalAlign, TileCounts, TiledMask, tile_counts};

/// Products of the forward pass: scores, and values.
pub const FORWARD_PRODUCTS: u64 = 2;
/// Products of the backward pass: scores, dP, dV, dQ, dK.
pub const BACKWARD_PRODUCTS: u64 = 5;

/// A call, its tiles and the widths of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagedCall {
    /// Sizes.
    pub sizes: Sizes,
    /// Which keys a row sees.
    pub align: CausalAlign,
    /// Query rows a tile.
    pub q_block: u64,
    /// Keys a tile.
    pub kv_block: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Bytes of an accumulator and of row statistics.
    pub accumulator_bytes: u64,
}

impl StagedCall {
    /// The tiles of one head.
    ///
    /// # Errors
    ///
    /// As [`tile_counts`].
    pub fn tiles(&self) -> Result<TileCounts> {
        let Self { sizes, align, q_block, kv_block, .. } = *self;
        let Sizes { q_len, kv_len, .. } = sizes;
        tile_counts(&TiledMask { q_len, kv_len, q_block, kv_block, align })
    }
}

/// FLOPs of one tile pair (M4.4 §0x06.3A).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PairFlops {
    /// One product, `2·B_r·B_c·d`.
    pub product_flops: u128,
    /// The forward pass's two.
    pub forward_flops: u128,
    /// The backward pass's five, `10·B_r·B_c·d`.
    pub backward_flops: u128,
    /// Five halves. A convention of counting, no ratio of times.
    pub backward_per_forward: f64,
}

/// FLOPs of one tile pair.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn pair_flops(q_block: u64, kv_block: u64, head_dim: u64) -> Result<PairFlops> {
    let sizes = [positive("q_block", q_block)?, positive("kv_block", kv_block)?];
    let d = positive("head_dim", head_dim)?;
    let product_flops = product("flops", &[2, sizes[0], sizes[1], d])?;
    Ok(PairFlops {
        product_flops,
        forward_flops: product("flops", &[product_flops, FORWARD_PRODUCTS.into()])?,
        backward_flops: product("flops", &[product_flops, BACKWARD_PRODUCTS.into()])?,
        backward_per_forward: BACKWARD_PRODUCTS as f64 / FORWARD_PRODUCTS as f64,
    })
}

/// FLOPs and bytes of a backward pass by column owners.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BackwardStages {
    /// Tile pairs that a head visits.
    pub pairs: u128,
    /// Valid query rows over those, `R`.
    pub row_visits: u128,
    /// Slots that a head schedules.
    pub scheduled_cells: u128,
    /// Visible cells of a head.
    pub useful_cells: u128,
    /// Scheduled slots that are masked or padding.
    pub excess_cells: u128,
    /// Those as a share of the useful ones.
    pub excess_share: f64,
    /// Five products over the scheduled slots of all heads.
    pub scheduled_flops: u128,
    /// Five products over the useful cells of all heads.
    pub useful_flops: u128,
    /// Reads o and dO, writes delta, zeroes dQ.
    pub preprocess_bytes: u128,
    /// k and v, once for each query head: a column owner each, whatever the KV heads.
    pub kv_bytes: u128,
    /// q and dO, at each visit.
    pub q_and_d_o_bytes: u128,
    /// lse and delta, at each visit.
    pub statistics_bytes: u128,
    /// Payload of the additions into dQ: one accumulator each, not a physical atomic.
    pub dq_update_bytes: u128,
    /// dK and dV of each query head.
    pub dkv_bytes: u128,
    /// The main launch, those five.
    pub main_bytes: u128,
    /// Reads the accumulated dQ, writes it as elements.
    pub convert_bytes: u128,
    /// Reads the expanded dK and dV, writes the grouped ones; 0 where nothing is grouped.
    pub group_bytes: u128,
    /// All stages.
    pub pipeline_bytes: u128,
    /// Scheduled FLOPs a byte of the main launch.
    pub main_intensity: f64,
    /// Scheduled FLOPs a byte of all stages.
    pub scheduled_intensity: f64,
    /// Useful FLOPs a byte of all stages.
    pub useful_intensity: f64,
}

/// Stages of a backward pass whose key columns own dK and dV.
///
/// # Errors
///
/// Sizes as [`Sizes::group`], widths or blocks of 0, a product beyond `u128`.
pub fn backward_stages(call: &StagedCall) -> Result<BackwardStages> {
    backward_stages_of(&call.sizes, &call.tiles()?, call.element_bytes, call.accumulator_bytes)
}

/// The same for tiles that were counted under any mask.
///
/// # Errors
///
/// As [`backward_stages`].
pub fn backward_stages_of(
    sizes: &Sizes,
    tiles: &TileCounts,
    element_bytes: u64,
    accumulator_bytes: u64,
) -> Result<BackwardStages> {
    let group = sizes.group()?;
    let element = positive("element_bytes", element_bytes)?;
    let accumulator = positive("accumulator_bytes", accumulator_bytes)?;
    let of = |factors: &[u128]| product("bytes", factors);
    let heads = of(&[sizes.batch.into(), sizes.q_heads.into()])?;
    let kv_heads = of(&[sizes.batch.into(), sizes.kv_heads.into()])?;
    let [rows, keys] = [sizes.q_len, sizes.kv_len].map(u128::from);
    let (d, dv) = (u128::from(sizes.head_dim), u128::from(sizes.value_dim));
    let both = d + dv;
    // Scores, dQ and dK contract or produce D channels; dP and dV, Dv.
    let per_cell = product("flops", &[2, 3 * d + 2 * dv])?;
    let flops = |cells| product("flops", &[per_cell, heads, cells]);
    let visits = tiles.row_visits;
    let main = [
        of(&[heads, keys, both, element])?,
        of(&[heads, visits, both, element])?,
        of(&[2, heads, visits, accumulator])?,
        of(&[heads, visits, d, accumulator])?,
        of(&[heads, keys, both, element])?,
    ];
    let preprocess = [
        of(&[2, heads, rows, dv, element])?,
        of(&[heads, rows, accumulator])?,
        of(&[heads, rows, d, accumulator])?,
    ];
    let preprocess_bytes = sum("bytes", &preprocess)?;
    let main_bytes = sum("bytes", &main)?;
    let convert_bytes = of(&[heads, rows, d, accumulator + element])?;
    let grouped = sum("bytes", &[heads, kv_heads])?;
    let group_bytes = if group > 1 { of(&[grouped, keys, both, element])? } else { 0 };
    let stages = [preprocess_bytes, main_bytes, convert_bytes, group_bytes];
    let pipeline_bytes = sum("pipeline_bytes", &stages)?;
    let scheduled_flops = flops(tiles.scheduled_cells)?;
    let useful_flops = flops(tiles.visible_cells)?;
    let excess_cells = tiles.scheduled_cells - tiles.visible_cells;
    Ok(BackwardStages {
        pairs: tiles.visited,
        row_visits: visits,
        scheduled_cells: tiles.scheduled_cells,
        useful_cells: tiles.visible_cells,
        excess_cells,
        excess_share: excess_cells as f64 / tiles.visible_cells.max(1) as f64,
        scheduled_flops,
        useful_flops,
        preprocess_bytes,
        kv_bytes: main[0],
        q_and_d_o_bytes: main[1],
        statistics_bytes: main[2],
        dq_update_bytes: main[3],
        dkv_bytes: main[4],
        main_bytes,
        convert_bytes,
        group_bytes,
        pipeline_bytes,
        main_intensity: intensity(scheduled_flops, main_bytes),
        scheduled_intensity: intensity(scheduled_flops, pipeline_bytes),
        useful_intensity: intensity(useful_flops, pipeline_bytes),
    })
}

/// FLOPs and bytes of a forward pass whose blocks own query rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ForwardStages {
    /// Tile pairs that a head visits.
    pub pairs: u128,
    /// Two products over the scheduled slots of all heads.
    pub scheduled_flops: u128,
    /// Two products over the visible cells of all heads.
    pub useful_flops: u128,
    /// q, once.
    pub q_bytes: u128,
    /// k and v, at each visit of a query head's tile.
    pub kv_bytes: u128,
    /// o, once.
    pub o_bytes: u128,
    /// lse, once.
    pub lse_bytes: u128,
    /// All of it.
    pub total_bytes: u128,
    /// Each of q, k, v, o and lse once: what a cache that kept everything would leave.
    pub compulsory_bytes: u128,
    /// Scheduled FLOPs a requested byte.
    pub scheduled_intensity: f64,
    /// Useful FLOPs a compulsory byte.
    pub compulsory_intensity: f64,
}

/// Stages of a forward pass.
///
/// # Errors
///
/// As [`backward_stages`].
pub fn forward_stages(call: &StagedCall) -> Result<ForwardStages> {
    forward_stages_of(&call.sizes, &call.tiles()?, call.element_bytes, call.accumulator_bytes)
}

/// The same for tiles that were counted under any mask.
///
/// # Errors
///
/// As [`backward_stages`].
pub fn forward_stages_of(
    sizes: &Sizes,
    tiles: &TileCounts,
    element_bytes: u64,
    accumulator_bytes: u64,
) -> Result<ForwardStages> {
    let values = sizes.values()?;
    let element = positive("element_bytes", element_bytes)?;
    let accumulator = positive("accumulator_bytes", accumulator_bytes)?;
    let of = |factors: &[u128]| product("bytes", factors);
    let heads = of(&[sizes.batch.into(), sizes.q_heads.into()])?;
    let channels = u128::from(sizes.head_dim) + u128::from(sizes.value_dim);
    let q_bytes = of(&[values.q, element])?;
    let kv_bytes = of(&[heads, tiles.key_visits, channels, element])?;
    let o_bytes = of(&[values.o, element])?;
    let lse_bytes = of(&[values.rows, accumulator])?;
    let total_bytes = sum("total_bytes", &[q_bytes, kv_bytes, o_bytes, lse_bytes])?;
    let kv_once = of(&[sum("bytes", &[values.k, values.v])?, element])?;
    let compulsory_bytes = sum("bytes", &[q_bytes, kv_once, o_bytes, lse_bytes])?;
    let flops = |cells| product("flops", &[2, channels, heads, cells]);
    let (scheduled_flops, useful_flops) =
        (flops(tiles.scheduled_cells)?, flops(tiles.visible_cells)?);
    Ok(ForwardStages {
        pairs: tiles.visited,
        scheduled_flops,
        useful_flops,
        q_bytes,
        kv_bytes,
        o_bytes,
        lse_bytes,
        total_bytes,
        compulsory_bytes,
        scheduled_intensity: intensity(scheduled_flops, total_bytes),
        compulsory_intensity: intensity(useful_flops, compulsory_bytes),
    })
}

/// FLOPs a byte.
fn intensity(flops: u128, bytes: u128) -> f64 {
    crate::error::ratio(flops, bytes)
}
