//! Sizes of one call, and the values its objects hold (M4.3 §0x02E).

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive, product};

/// Sizes of one dense attention call, all at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Independent items, B.
    pub batch: u64,
    /// Query heads, Hq.
    pub q_heads: u64,
    /// KV heads, Hkv; divides `q_heads`.
    pub kv_heads: u64,
    /// Query rows an item, Sq.
    pub q_len: u64,
    /// Keys an item, Sk.
    pub kv_len: u64,
    /// Channels of a query and of a key, D.
    pub head_dim: u64,
    /// Channels of a value, Dv.
    pub value_dim: u64,
}

impl Sizes {
    /// Query heads that share a KV head, once every size was checked.
    ///
    /// # Errors
    ///
    /// A size that is 0, or KV heads that do not divide the query heads.
    pub fn group(&self) -> Result<u64> {
        for (field, value) in [
            ("batch", self.batch),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("q_len", self.q_len),
            ("kv_len", self.kv_len),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ] {
            positive(field, value)?;
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            let needs = format!("a divisor of the {} query heads", self.q_heads);
            return Err(Error::field("kv_heads", self.kv_heads, needs));
        }
        Ok(self.q_heads / self.kv_heads)
    }

    /// Values of each object: `E_Q = B·Hq·Sq·D`, `E_S = B·Hq·Sq·Sk` and so on.
    ///
    /// # Errors
    ///
    /// As [`Self::group`]; a product beyond `u128`.
    pub fn values(&self) -> Result<Values> {
        self.group()?;
        let of = |field, sizes: [u64; 4]| product(field, &sizes.map(u128::from));
        let Self { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *self;
        Ok(Values {
            q: of("q", [batch, q_heads, q_len, head_dim])?,
            k: of("k", [batch, kv_heads, kv_len, head_dim])?,
            v: of("v", [batch, kv_heads, kv_len, value_dim])?,
            o: of("o", [batch, q_heads, q_len, value_dim])?,
            scores: of("scores", [batch, q_heads, q_len, kv_len])?,
            rows: of("rows", [batch, q_heads, q_len, 1])?,
        })
    }
}

impl From<ferroflash_core::shape::Shape> for Sizes {
    fn from(shape: ferroflash_core::shape::Shape) -> Self {
        Self {
            batch: shape.batch as u64,
            q_heads: shape.q_heads as u64,
            kv_heads: shape.kv_heads as u64,
            q_len: shape.q_len as u64,
            kv_len: shape.kv_len as u64,
            head_dim: shape.head_dim as u64,
            value_dim: shape.value_dim as u64,
        }
    }
}

/// Values that each object holds. That `scores` counts cells does not say that anything stores
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Values {
    /// Values of q.
    pub q: u128,
    /// Values of k.
    pub k: u128,
    /// Values of v.
    pub v: u128,
    /// Values of o.
    pub o: u128,
    /// Cells of the score matrix, as many as probabilities.
    pub scores: u128,
    /// Query rows over all heads; one value each of lse.
    pub rows: u128,
}
