//! Leading terms of what must be moved for an `N × N` head of `d` channels through `M` on-chip
//! words (M4.3 §0x0CD, §0x0CE). Orders of growth without their constants: none is a word count.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive};

/// The sizes that the bounds are stated in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwoLevel {
    /// Rows and keys, N.
    pub len: u64,
    /// Channels, d.
    pub head_dim: u64,
    /// On-chip memory in values, M: of one multiprocessor, not of a device.
    pub on_chip_words: u64,
}

/// On which side of `M = d²` a call lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// `M ≥ d²`: `N²d²/M` is the least, and FlashAttention's order is optimal.
    LargeCache,
    /// `M < d²`: `N²d/√M` is less.
    SmallCache,
}

/// Leading terms in words.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Which side of `M = d²`.
    pub regime: Regime,
    /// `N²d²/M`, the repeated traversals of FlashAttention.
    pub flash_term: f64,
    /// `Nd + N²d²/M`, FlashAttention with inputs and outputs (Θ).
    pub flash_order: f64,
    /// `N²d/√M`, a blocked matrix product's.
    pub product_term: f64,
    /// `min(N²d/√M, N²d²/M)`, the bound of Saha and Ye for products by the standard method.
    pub forward_bound: f64,
    /// `min((N²d² + Nd³)/M, (N²d + Nd²)/√M)`, the bound of Li and others for the backward pass.
    pub backward_bound: f64,
    /// Stored scores: `Nd + N²`, which holds only for `M` of order d² or more.
    pub materialized_order: Option<f64>,
    /// Whether `d ≤ M ≤ Nd`, where `N²d²/M` is at least `Nd` and stands alone.
    pub flash_term_dominates: bool,
}

/// The leading terms.
///
/// # Errors
///
/// A size of 0; sizes whose product a real does not hold.
pub fn bounds(sizes: &TwoLevel) -> Result<Bounds> {
    let n = positive("len", sizes.len)? as f64;
    let d = positive("head_dim", sizes.head_dim)? as f64;
    let m = positive("on_chip_words", sizes.on_chip_words)? as f64;
    let square = u128::from(sizes.head_dim).pow(2);
    let is_large = u128::from(sizes.on_chip_words) >= square;
    let flash_term = n * n * d * d / m;
    let product_term = n * n * d / m.sqrt();
    let backward = [(n * n * d * d + n * d * d * d) / m, (n * n * d + n * d * d) / m.sqrt()];
    if !(backward[0] + backward[1] + flash_term).is_finite() {
        return Err(Error::Overflow { field: "bounds" });
    }
    Ok(Bounds {
        regime: if is_large { Regime::LargeCache } else { Regime::SmallCache },
        flash_term,
        flash_order: n * d + flash_term,
        product_term,
        forward_bound: flash_term.min(product_term),
        backward_bound: backward[0].min(backward[1]),
        materialized_order: is_large.then_some(n * d + n * n),
        flash_term_dominates: d <= m && m <= n * d,
    })
}
