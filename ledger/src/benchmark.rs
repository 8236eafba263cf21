//! What a reported rate divides by what (M4.4 §0x06.5).
//!
//! A rate is a declared numerator over an observed duration. None of these functions observes
//! anything: a duration that a printed rate implies is an inversion of a rounded label.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive, positive_real, product, ratio, sum};

/// Square attention as papers count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SquareAttention {
    /// Independent items.
    pub batch: u64,
    /// Heads.
    pub heads: u64,
    /// Rows and keys.
    pub len: u64,
    /// Channels.
    pub head_dim: u64,
}

/// Declared numerators, in FLOPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Numerators {
    /// Scores, `2·B·H·S²·d`; the value product is as much.
    pub product_flops: u128,
    /// Forward, `4·B·H·S²·d`.
    pub forward_flops: u128,
    /// Forward, causal by the papers' convention: half of it.
    pub causal_forward_flops: u128,
    /// Forward over the cells that a causal mask leaves, `2·B·H·d·S·(S + 1)`.
    pub valid_cell_forward_flops: u128,
    /// What the valid cells have more than the convention, `2·B·H·d·S`.
    pub valid_cell_excess_flops: u128,
    /// Backward, five halves of forward.
    pub backward_flops: u128,
    /// Both, seven halves.
    pub both_flops: u128,
    /// Both, causal by the convention.
    pub causal_both_flops: u128,
}

/// Numerators of square attention.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn numerators(call: &SquareAttention) -> Result<Numerators> {
    let heads = [positive("batch", call.batch)?, positive("heads", call.heads)?];
    let (s, d) = (positive("len", call.len)?, positive("head_dim", call.head_dim)?);
    let line = product("flops", &[2, heads[0], heads[1], d, s])?;
    let product_flops = product("flops", &[line, s])?;
    let forward_flops = product("flops", &[2, product_flops])?;
    let seven = product("flops", &[7, product_flops])?;
    Ok(Numerators {
        product_flops,
        forward_flops,
        causal_forward_flops: product_flops,
        valid_cell_forward_flops: product("flops", &[line, s + 1])?,
        valid_cell_excess_flops: line,
        backward_flops: product("flops", &[5, product_flops])?,
        both_flops: seven,
        causal_both_flops: seven / 2,
    })
}

/// Items of `len` rows that make up `tokens`.
///
/// # Errors
///
/// A length of 0, or one that does not divide the tokens.
pub fn batch_at_fixed_tokens(tokens: u64, len: u64) -> Result<u64> {
    positive("len", len)?;
    positive("tokens", tokens)?;
    if !tokens.is_multiple_of(len) {
        return Err(Error::field("len", len, format!("a divisor of {tokens} tokens")));
    }
    Ok(tokens / len)
}

/// Seconds that a rate implies for a numerator. Not a timing: the rate was rounded when printed.
///
/// # Errors
///
/// A numerator of 0; a rate that is not a finite number above 0.
pub fn implied_seconds(flops: u128, flops_per_second: f64) -> Result<f64> {
    if flops == 0 {
        return Err(Error::Zero { field: "flops" });
    }
    Ok(flops as f64 / positive_real("flops_per_second", flops_per_second)?)
}

/// Operations a second that a numerator makes of a duration.
///
/// # Errors
///
/// As [`implied_seconds`], of the duration.
pub fn declared_rate(flops: u128, seconds: f64) -> Result<f64> {
    implied_seconds(flops, seconds)
}

/// One rate over another: a share of a peak, or a speed-up. Equivalent work over what the hardware
/// could issue, no utilisation of it.
///
/// # Errors
///
/// A rate that is not a finite number above 0.
pub fn rate_ratio(rate: f64, of: f64) -> Result<f64> {
    Ok(positive_real("rate", rate)? / positive_real("of", of)?)
}

/// A model whose training rate is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCall {
    /// Tokens of a sequence, S.
    pub len: u64,
    /// Parameters, N.
    pub parameters: u64,
    /// Layers, L.
    pub layers: u64,
    /// Width, `d_model`.
    pub width: u64,
}

/// A model's numerator a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelFlops {
    /// Of the parameters, forward: `2·S·N`.
    pub forward_parameter_flops: u128,
    /// Of the parameters, backward: `4·S·N`.
    pub backward_parameter_flops: u128,
    /// Of attention, uncut by a causal mask: `12·L·d_model·S²`.
    pub attention_flops: u128,
    /// All of it, `6·S·N + 12·L·d_model·S²`.
    pub total_flops: u128,
    /// Attention's share.
    pub attention_share: f64,
}

/// The numerator of a model's sequence.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn model_flops(model: &ModelCall) -> Result<ModelFlops> {
    let s = positive("len", model.len)?;
    let parameters = product("flops", &[s, positive("parameters", model.parameters)?])?;
    let layers = positive("layers", model.layers)?;
    let width = positive("width", model.width)?;
    let forward = product("flops", &[2, parameters])?;
    let backward = product("flops", &[4, parameters])?;
    let attention = product("flops", &[12, layers, width, s, s])?;
    let total = sum("total_flops", &[forward, backward, attention])?;
    Ok(ModelFlops {
        forward_parameter_flops: forward,
        backward_parameter_flops: backward,
        attention_flops: attention,
        total_flops: total,
        attention_share: ratio(attention, total),
    })
}

/// Operations a second and GPU of a training step.
///
/// # Errors
///
/// A count of 0; a duration that is not a finite number above 0; a product beyond `u128`.
pub fn model_rate(sequence_flops: u128, batch: u64, gpus: u64, step_seconds: f64) -> Result<f64> {
    let step = product("flops", &[sequence_flops, positive("batch", batch)?])?;
    Ok(declared_rate(step, step_seconds)? / positive("gpus", gpus)? as f64)
}
