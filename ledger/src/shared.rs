//! Shared memory of a block, by what lives at the same time (M4.4 §0x04D, §0x06.2C, §0x06.2D).

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive, product, sum};

/// A forward tile whose Q, one K and one V lie in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardTile {
    /// Channels.
    pub head_dim: u64,
    /// Query rows, B_r.
    pub q_block: u64,
    /// Keys, B_c.
    pub kv_block: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Whether K and V take Q's place, which must then live in registers.
    pub share_q_and_k: bool,
}

/// Shared memory of a forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ForwardShared {
    /// The Q tile.
    pub q_bytes: u128,
    /// One K and one V tile.
    pub kv_bytes: u128,
    /// The output tile, staged where the inputs lay.
    pub o_bytes: u128,
    /// What the block asks for: the most that lives at a time.
    pub block_bytes: u128,
    /// Every tile that has a name, as if none took another's place.
    pub sum_of_names_bytes: u128,
    /// Whether Q must be in registers.
    pub q_in_registers: bool,
}

/// Shared memory of the forward tile.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn forward_shared(tile: &ForwardTile) -> Result<ForwardShared> {
    let d = positive("head_dim", tile.head_dim)?;
    let rows = positive("q_block", tile.q_block)?;
    let keys = positive("kv_block", tile.kv_block)?;
    let width = positive("element_bytes", tile.element_bytes)?;
    let q_bytes = product("q_bytes", &[rows, d, width])?;
    let kv_bytes = product("kv_bytes", &[2, keys, d, width])?;
    let both = sum("block_bytes", &[q_bytes, kv_bytes])?;
    let inputs = if tile.share_q_and_k { q_bytes.max(kv_bytes) } else { both };
    Ok(ForwardShared {
        q_bytes,
        kv_bytes,
        o_bytes: q_bytes,
        block_bytes: inputs.max(q_bytes),
        sum_of_names_bytes: sum("sum_of_names_bytes", &[both, q_bytes])?,
        q_in_registers: tile.share_q_and_k,
    })
}

/// A backward tile of a key-column owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackwardTile {
    /// Channels.
    pub head_dim: u64,
    /// Query rows, B_r.
    pub q_block: u64,
    /// Keys, B_c.
    pub kv_block: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Whether two Q tiles are in flight.
    pub double_buffered_q: bool,
    /// Whether V is kept in registers, so that dS may take its place.
    pub v_in_registers: bool,
}

/// Shared memory of a backward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardShared {
    /// Q tiles and the dO tile.
    pub q_and_d_o_bytes: u128,
    /// K and V.
    pub kv_bytes: u128,
    /// K alone.
    pub k_bytes: u128,
    /// dS.
    pub ds_bytes: u128,
    /// P, whose place an unused dQ tile of the source shares.
    pub p_bytes: u128,
    /// What follows Q and dO.
    pub rest_bytes: u128,
    /// What the block asks for.
    pub block_bytes: u128,
    /// Every tile that has a name, dQ included, as if none took another's place.
    pub sum_of_names_bytes: u128,
    /// Where each tile begins.
    pub offsets: BackwardOffsets,
}

/// Offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardOffsets {
    /// The first Q tile.
    pub q0: u128,
    /// The second, if there is one.
    pub q1: Option<u128>,
    /// dO.
    pub d_o: u128,
    /// K; the epilogue's dK.
    pub k: u128,
    /// V; the epilogue's dV.
    pub v: u128,
    /// dS: V's place where V is in registers.
    pub ds: u128,
    /// P.
    pub p: u128,
    /// Where dK ends and dV begins in the epilogue.
    pub epilogue_dv: u128,
    /// The end.
    pub end: u128,
}

/// Shared memory of the backward tile.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`, an epilogue that does not fit.
pub fn backward_shared(tile: &BackwardTile) -> Result<BackwardShared> {
    let d = positive("head_dim", tile.head_dim)?;
    let rows = positive("q_block", tile.q_block)?;
    let keys = positive("kv_block", tile.kv_block)?;
    let width = positive("element_bytes", tile.element_bytes)?;
    let of = |factors: &[u128]| product("bytes", factors);
    let q_bytes = of(&[rows, d, width])?;
    let stages: u128 = if tile.double_buffered_q { 2 } else { 1 };
    let q_and_d_o_bytes = of(&[stages + 1, q_bytes])?;
    let k_bytes = of(&[keys, d, width])?;
    let kv_bytes = of(&[2, k_bytes])?;
    let ds_bytes = of(&[rows, keys, width])?;
    let p_bytes = ds_bytes;
    let d_o = of(&[stages, q_bytes])?;
    let k = sum("bytes", &[d_o, q_bytes])?;
    let v = sum("bytes", &[k, k_bytes])?;
    let ds = if tile.v_in_registers { v } else { sum("bytes", &[v, k_bytes])? };
    let p = sum("bytes", &[ds, ds_bytes])?;
    let after_p = sum("bytes", &[p, p_bytes])?;
    let after_v = sum("bytes", &[v, k_bytes])?;
    let end = after_p.max(after_v);
    let names = [q_and_d_o_bytes, kv_bytes, ds_bytes, p_bytes, q_bytes];
    Ok(BackwardShared {
        q_and_d_o_bytes,
        kv_bytes,
        k_bytes,
        ds_bytes,
        p_bytes,
        rest_bytes: end - k,
        block_bytes: end,
        sum_of_names_bytes: sum("sum_of_names_bytes", &names)?,
        offsets: BackwardOffsets {
            q0: 0,
            q1: tile.double_buffered_q.then_some(q_bytes),
            d_o,
            k,
            v,
            ds,
            p,
            epilogue_dv: v,
            end,
        },
    })
}

/// Bytes of a tile of `rows` rows of `channels` channels, `tiles` of them.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn tile_bytes(tiles: u64, rows: u64, channels: u64, element_bytes: u64) -> Result<u128> {
    let tiles = positive("tiles", tiles)?;
    let (rows, channels) = (positive("rows", rows)?, positive("channels", channels)?);
    product("tile_bytes", &[tiles, rows, channels, positive("element_bytes", element_bytes)?])
}

/// Warps of a block that share a matrix product, `[rows, columns, depth]`; `along_rows` of them
/// divide the rows (M4.4 §0x06.2B).
///
/// # Errors
///
/// A count of 0; warps that `along_rows` does not divide.
pub fn warp_layout(warps: u64, along_rows: u64) -> Result<[u64; 3]> {
    positive("warps", warps)?;
    positive("along_rows", along_rows)?;
    if !warps.is_multiple_of(along_rows) {
        return Err(Error::field("along_rows", along_rows, format!("a divisor of {warps} warps")));
    }
    Ok([along_rows, warps / along_rows, 1])
}
