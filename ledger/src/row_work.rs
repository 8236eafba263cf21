//! What a row costs besides its matrix products (M4.4 §0x02G).
//!
//! A division of a vector counts as one reciprocal and a multiply a value. Products, masks, loads
//! and the fusion of instructions are not counted.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive, product, sum};

/// The key tiles that one valid row walks, all full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowTiles {
    /// Key tiles, T_c.
    pub kv_tiles: u64,
    /// Keys a tile, B_c.
    pub kv_block: u64,
    /// Channels of a value, Dv.
    pub value_dim: u64,
}

/// Scalar operations that every online softmax keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RetainedWork {
    /// Subtractions of the maximum, `T_c·B_c`.
    pub score_shifts: u128,
    /// Exponentials of scores, `T_c·B_c`.
    pub score_exponentials: u128,
    /// Comparisons within a tile, `T_c·(B_c − 1)`.
    pub tile_max_comparisons: u128,
    /// Additions within a tile, `T_c·(B_c − 1)`.
    pub tile_sum_additions: u128,
    /// Comparisons with the running maximum, `T_c − 1`.
    pub running_max_comparisons: u128,
    /// Exponentials of rescales, `T_c − 1`.
    pub rescale_exponentials: u128,
    /// Multiply-adds of the running sum, `T_c − 1`.
    pub row_sum_updates: u128,
    /// Multiplies of the old output or numerator, `(T_c − 1)·Dv`.
    pub rescale_multiplies: u128,
}

/// Where a row is divided by its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalization {
    /// At each tile, before the value product.
    Probabilities,
    /// At each tile, after the value product.
    Product,
    /// Once, after the last tile: FlashAttention-2.
    Delayed,
}

/// Operations that depend on where a row is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NormalizationWork {
    /// Reciprocals of the row sum.
    pub reciprocals: u128,
    /// Multiplies within the loop.
    pub normalization_multiplies: u128,
    /// Multiplies that make the coefficient of the old output.
    pub old_mass_multiplies: u128,
    /// Multiplies after the loop.
    pub final_multiplies: u128,
}

impl NormalizationWork {
    fn multiplies(&self) -> Result<u128> {
        let each = [self.normalization_multiplies, self.old_mass_multiplies, self.final_multiplies];
        sum("multiplies", &each)
    }
}

/// What dividing once saves against dividing at every tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DelayedSaving {
    /// Reciprocals fewer.
    pub reciprocals_removed: u128,
    /// Multiplies within the loop fewer.
    pub normalization_multiplies_removed: u128,
    /// Multiplies for coefficients fewer.
    pub old_mass_multiplies_removed: u128,
    /// Multiplies after the loop more.
    pub final_multiplies_added: u128,
    /// Multiplies fewer in all; below 0 where the final ones outweigh the rest.
    pub net_multiplies_removed: i128,
}

/// What every form keeps.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn retained_work(row: &RowTiles) -> Result<RetainedWork> {
    let [tiles, keys, channels] = row.sizes()?;
    let (cells, inner) = (product("work", &[tiles, keys])?, product("work", &[tiles, keys - 1])?);
    Ok(RetainedWork {
        score_shifts: cells,
        score_exponentials: cells,
        tile_max_comparisons: inner,
        tile_sum_additions: inner,
        running_max_comparisons: tiles - 1,
        rescale_exponentials: tiles - 1,
        row_sum_updates: tiles - 1,
        rescale_multiplies: product("work", &[tiles - 1, channels])?,
    })
}

/// What one form adds.
///
/// # Errors
///
/// As [`retained_work`].
pub fn normalization_work(row: &RowTiles, form: Normalization) -> Result<NormalizationWork> {
    let [tiles, keys, channels] = row.sizes()?;
    let within = |width| -> Result<NormalizationWork> {
        Ok(NormalizationWork {
            reciprocals: tiles,
            normalization_multiplies: product("work", &[tiles, width])?,
            old_mass_multiplies: product("work", &[2, tiles - 1])?,
            final_multiplies: 0,
        })
    };
    match form {
        Normalization::Probabilities => within(keys),
        Normalization::Product => within(channels),
        Normalization::Delayed => Ok(NormalizationWork {
            reciprocals: 1,
            normalization_multiplies: 0,
            old_mass_multiplies: 0,
            final_multiplies: channels,
        }),
    }
}

/// What [`Normalization::Delayed`] saves against `form`.
///
/// # Errors
///
/// As [`retained_work`].
pub fn delayed_saving(row: &RowTiles, form: Normalization) -> Result<DelayedSaving> {
    let each = normalization_work(row, form)?;
    let once = normalization_work(row, Normalization::Delayed)?;
    let final_added = once.final_multiplies - each.final_multiplies.min(once.final_multiplies);
    Ok(DelayedSaving {
        reciprocals_removed: each.reciprocals - once.reciprocals,
        normalization_multiplies_removed: each.normalization_multiplies,
        old_mass_multiplies_removed: each.old_mass_multiplies,
        final_multiplies_added: final_added,
        net_multiplies_removed: signed(each.multiplies()?)? - signed(once.multiplies()?)?,
    })
}

fn signed(count: u128) -> Result<i128> {
    i128::try_from(count).map_err(|_| Error::Overflow { field: "net_multiplies_removed" })
}

impl RowTiles {
    fn sizes(&self) -> Result<[u128; 3]> {
        Ok([
            positive("kv_tiles", self.kv_tiles)?,
            positive("kv_block", self.kv_block)?,
            positive("value_dim", self.value_dim)?,
        ])
    }
}
