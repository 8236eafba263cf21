//! Scratch of a backward pass, and accumulators of one of its blocks (M4.4 §0x06.1J, §0x06.2G).

use serde::{Deserialize, Serialize};

use crate::error::{Result, positive, product, ratio, sum};
use crate::residency::WARP_LANES;
use crate::shared::warp_layout;
use crate::sizes::Sizes;

/// Buffers between the launches of a column-owner pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Scratch {
    /// dQ as it is summed.
    pub dq_accumulator_bytes: u128,
    /// delta, a value a row.
    pub delta_bytes: u128,
    /// dK with a head for each query head; 0 where nothing is grouped.
    pub expanded_dk_bytes: u128,
    /// dV likewise.
    pub expanded_dv_bytes: u128,
    /// One of dK and dV as the caller gets it.
    pub grouped_bytes: u128,
    /// The buffers, without the caller's tensors.
    pub total_bytes: u128,
}

/// Scratch for elements and accumulators of these widths; it grows with the length, not its square.
///
/// # Errors
///
/// Sizes as [`Sizes::group`], a width of 0, a product beyond `u128`.
pub fn scratch(sizes: &Sizes, element_bytes: u64, accumulator_bytes: u64) -> Result<Scratch> {
    let group = u128::from(sizes.group()?);
    let values = sizes.values()?;
    let element = positive("element_bytes", element_bytes)?;
    let accumulator = positive("accumulator_bytes", accumulator_bytes)?;
    let expanded = if group > 1 { group } else { 0 };
    let dq_accumulator_bytes = product("bytes", &[values.q, accumulator])?;
    let delta_bytes = product("bytes", &[values.rows, accumulator])?;
    let expanded_dk_bytes = product("bytes", &[values.k, expanded, element])?;
    let expanded_dv_bytes = product("bytes", &[values.v, expanded, element])?;
    let all = [dq_accumulator_bytes, delta_bytes, expanded_dk_bytes, expanded_dv_bytes];
    Ok(Scratch {
        dq_accumulator_bytes,
        delta_bytes,
        expanded_dk_bytes,
        expanded_dv_bytes,
        grouped_bytes: product("bytes", &[values.k, element])?,
        total_bytes: sum("total_bytes", &all)?,
    })
}

/// A backward block's tile and warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccumulatorTile {
    /// Channels.
    pub head_dim: u64,
    /// Query rows, B_r.
    pub q_block: u64,
    /// Keys, B_c.
    pub kv_block: u64,
    /// Warps.
    pub warps: u64,
    /// Warps that divide the rows of the score product; the others divide its keys.
    pub score_warps_along_rows: u64,
}

/// Accumulator values a thread holds on average, f32. A ledger of what lives together, not a
/// compiler's registers: operands, statistics, addresses and spills are not in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Accumulators {
    /// Of the scores.
    pub scores: f64,
    /// Of dP.
    pub dp: f64,
    /// Of dQ.
    pub dq: f64,
    /// Of dK.
    pub dk: f64,
    /// Of dV.
    pub dv: f64,
    /// Of dK and dV, which live throughout.
    pub persistent: f64,
    /// With the scores: `R_S`.
    pub during_scores: f64,
    /// With the scores and dP: `R_dP`.
    pub during_dp: f64,
    /// With dP and dQ: `R_dQ`.
    pub during_dq: f64,
    /// The most of the three, `R_named`.
    pub peak: f64,
    /// The same over the block.
    pub peak_of_block: f64,
    /// Elements of V that each thread holds if V is kept in registers. The score product's warps
    /// along rows each need all of their keys, so that V is held once for each of them.
    pub v_elements: f64,
    /// 32-bit slots of those, two elements each.
    pub v_slots: f64,
    /// The share of a thread if no warp held what another holds: a lower bound.
    pub v_elements_without_replication: f64,
}

/// Accumulators of a backward block.
///
/// # Errors
///
/// A count of 0, warps that `score_warps_along_rows` does not divide, a product beyond `u128`.
pub fn accumulators(tile: &AccumulatorTile) -> Result<Accumulators> {
    let [along_rows, ..] = warp_layout(tile.warps, tile.score_warps_along_rows)?;
    let d = positive("head_dim", tile.head_dim)?;
    let rows = positive("q_block", tile.q_block)?;
    let keys = positive("kv_block", tile.kv_block)?;
    let threads = u128::from(tile.warps) * u128::from(WARP_LANES);
    let of = |a, b| Ok(ratio(product("values", &[a, b])?, threads));
    let (scores, dq, dk) = (of(rows, keys)?, of(rows, d)?, of(keys, d)?);
    let (dp, dv, persistent) = (scores, dk, dk + dk);
    let during_scores = persistent + scores;
    let during_dp = during_scores + dp;
    let during_dq = persistent + dp + dq;
    let peak = during_scores.max(during_dp).max(during_dq);
    let v_elements = dk * along_rows as f64;
    Ok(Accumulators {
        scores,
        dp,
        dq,
        dk,
        dv,
        persistent,
        during_scores,
        during_dp,
        during_dq,
        peak,
        peak_of_block: peak * threads as f64,
        v_elements,
        v_slots: v_elements / 2.0,
        v_elements_without_replication: dk,
    })
}
