//! Rows that several warps produce, and rows that one warp owns (M4.4 §0x05).

use serde::{Deserialize, Serialize};

use crate::error::{Result, positive, product};

/// A row tile whose keys are divided among warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitTile {
    /// Query rows.
    pub q_block: u64,
    /// Channels of a value.
    pub value_dim: u64,
    /// Warps, W.
    pub warps: u64,
    /// Bytes of a state's scalar.
    pub scalar_bytes: u64,
}

/// What joining the partial states of a tile takes. A semantic volume: no measured traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SplitKeys {
    /// Warps that produce each row.
    pub producers_per_row: u128,
    /// Scalars of a state: maximum, sum and numerator.
    pub state_values: u128,
    /// Partial states of the tile, `B_r·W`.
    pub partial_states: u128,
    /// Merges of two states, `B_r·(W − 1)` by any tree.
    pub merges: u128,
    /// Bytes if the states of all but the collecting warp move once.
    pub non_owner_bytes: u128,
    /// Bytes if every partial state is written once.
    pub all_partials_bytes: u128,
    /// Levels of a chain, `W − 1`.
    pub serial_depth: u128,
    /// Levels of a balanced tree, `⌈log₂ W⌉`.
    pub tree_depth: u128,
    /// What the same tile takes if each warp owns rows: one producer a row, and no merge.
    pub split_rows_merges: u128,
}

/// Joining costs of a tile whose keys are split.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn split_keys(tile: &SplitTile) -> Result<SplitKeys> {
    let rows = positive("q_block", tile.q_block)?;
    let state_values = positive("value_dim", tile.value_dim)? + 2;
    let warps = positive("warps", tile.warps)?;
    let width = positive("scalar_bytes", tile.scalar_bytes)?;
    let partial_states = product("partial_states", &[rows, warps])?;
    let merges = product("merges", &[rows, warps - 1])?;
    Ok(SplitKeys {
        producers_per_row: warps,
        state_values,
        partial_states,
        merges,
        non_owner_bytes: product("bytes", &[merges, state_values, width])?,
        all_partials_bytes: product("bytes", &[partial_states, state_values, width])?,
        serial_depth: warps - 1,
        tree_depth: u128::from(warps.next_power_of_two().trailing_zeros()),
        split_rows_merges: 0,
    })
}
