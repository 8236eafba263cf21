//! Bytes that the two forward schedules ask for, one head (M4.4 §0x03J).
//!
//! A declared payload at one width: lanes that a wider specialisation predicates off move nothing,
//! and optional diagnostic tensors are not part of it.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive, product, sum};
use crate::words::Tiled;

/// Bytes of a stored value, by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MovementWidths {
    /// Of q, k and v.
    pub input: u64,
    /// Of o, also while it is partial.
    pub output: u64,
    /// Of row maximum, row sum and lse.
    pub state: u64,
}

/// Bytes of the schedule with blocks of keys outermost and normalised state in slow memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KvOuterBytes {
    /// k and v, once.
    pub kv_bytes: u128,
    /// q, once a key block.
    pub q_bytes: u128,
    /// o, read and written at each visit.
    pub o_bytes: u128,
    /// Row maximum and row sum, read and written at each visit.
    pub state_bytes: u128,
    /// o and row state before the first block.
    pub initial_bytes: u128,
    /// All of it.
    pub total_bytes: u128,
}

/// Bytes of the schedule whose query blocks keep their state on chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct QOuterBytes {
    /// q, once.
    pub q_bytes: u128,
    /// k and v, once a query block.
    pub kv_bytes: u128,
    /// o, once.
    pub o_bytes: u128,
    /// lse, once.
    pub lse_bytes: u128,
    /// All of it.
    pub total_bytes: u128,
}

/// Both ledgers of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Movement {
    /// Query blocks.
    pub q_blocks: u128,
    /// Key blocks.
    pub kv_blocks: u128,
    /// FlashAttention-1's schedule.
    pub kv_outer: KvOuterBytes,
    /// FlashAttention-2's schedule.
    pub q_outer: QOuterBytes,
    /// FlashAttention-2's less FlashAttention-1's.
    pub difference_bytes: i128,
}

/// Bytes of both schedules.
///
/// # Errors
///
/// A size or width of 0, a product beyond `u128`.
pub fn movement(tiled: &Tiled, widths: &MovementWidths) -> Result<Movement> {
    let (q_blocks, kv_blocks) = tiled.blocks()?;
    let [rows, keys, d] = [tiled.q_len, tiled.kv_len, tiled.head_dim].map(u128::from);
    let input = positive("input", widths.input)?;
    let output = positive("output", widths.output)?;
    let state = positive("state", widths.state)?;
    let of = |factors: &[u128]| product("bytes", factors);
    let mut kv_outer = KvOuterBytes {
        kv_bytes: of(&[2, keys, d, input])?,
        q_bytes: of(&[kv_blocks, rows, d, input])?,
        o_bytes: of(&[2, kv_blocks, rows, d, output])?,
        state_bytes: of(&[4, kv_blocks, rows, state])?,
        initial_bytes: sum("bytes", &[of(&[rows, d, output])?, of(&[2, rows, state])?])?,
        total_bytes: 0,
    };
    let KvOuterBytes { kv_bytes, q_bytes, o_bytes, state_bytes, initial_bytes, .. } = kv_outer;
    let terms = [kv_bytes, q_bytes, o_bytes, state_bytes, initial_bytes];
    kv_outer.total_bytes = sum("total_bytes", &terms)?;
    let mut q_outer = QOuterBytes {
        q_bytes: of(&[rows, d, input])?,
        kv_bytes: of(&[2, q_blocks, keys, d, input])?,
        o_bytes: of(&[rows, d, output])?,
        lse_bytes: of(&[rows, state])?,
        total_bytes: 0,
    };
    let QOuterBytes { q_bytes, kv_bytes, o_bytes, lse_bytes, .. } = q_outer;
    q_outer.total_bytes = sum("total_bytes", &[q_bytes, kv_bytes, o_bytes, lse_bytes])?;
    let overflow = |_| Error::Overflow { field: "difference_bytes" };
    let signed = |bytes| i128::try_from(bytes).map_err(overflow);
    let difference_bytes = signed(q_outer.total_bytes)? - signed(kv_outer.total_bytes)?;
    Ok(Movement { q_blocks, kv_blocks, kv_outer, q_outer, difference_bytes })
}

/// What either loop order asks for, in tiles: the owners of a final result, requests for a key
/// tile, and visits that take row state up again (M4.4 §0x06.4C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OrderVisits {
    /// Key tiles that `KvOuter` requests, each once.
    pub kv_outer_requests: u128,
    /// Row states that `KvOuter` takes up.
    pub kv_outer_state_visits: u128,
    /// Query blocks that `QOuter` commits, each once.
    pub q_outer_owners: u128,
    /// Key tiles that `QOuter` requests.
    pub q_outer_requests: u128,
}

/// Visits under either order.
///
/// # Errors
///
/// A size of 0.
pub fn order_visits(tiled: &Tiled) -> Result<OrderVisits> {
    let (q_blocks, kv_blocks) = tiled.blocks()?;
    let pairs = product("visits", &[q_blocks, kv_blocks])?;
    Ok(OrderVisits {
        kv_outer_requests: kv_blocks,
        kv_outer_state_visits: pairs,
        q_outer_owners: q_blocks,
        q_outer_requests: pairs,
    })
}
