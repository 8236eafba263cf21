//! Attention in three stages that store scores and probabilities (M4.3 §0x02).
//!
//! Stage 1 reads q and k and writes the scores, stage 2 reads them and writes the probabilities,
//! stage 3 reads those and v and writes o. The figures are scheduled logical transfers: neither
//! what is resident at a time, nor what a memory system moves.

use serde::{Deserialize, Serialize};

use crate::error::{Result, positive, product, sum};
use crate::sizes::Sizes;

/// Bytes a stored value takes, by role; a width is never a count of transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Widths {
    /// Of q, k and v.
    pub qkv: u64,
    /// Of stored scores.
    pub score: u64,
    /// Of stored probabilities.
    pub probability: u64,
    /// Of o.
    pub output: u64,
}

/// Which way an object crosses the slow memory's boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From slow memory.
    Read,
    /// To slow memory.
    Write,
}

/// One directional row of a transfer ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// What is transferred.
    pub object: String,
    /// Bytes of the complete object.
    pub bytes: u128,
}

/// Directional rows; whatever crosses the boundary has a row of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Transfers {
    /// The rows, in order of the schedule.
    pub rows: Vec<Transfer>,
}

impl Transfers {
    /// Adds a row: a mask, a workspace, a spill, another copy.
    pub fn push(&mut self, direction: Direction, object: &str, bytes: u128) {
        self.rows.push(Transfer { direction, object: object.to_owned(), bytes });
    }

    /// The sum of all rows.
    ///
    /// # Errors
    ///
    /// A sum beyond `u128`.
    pub fn total_bytes(&self) -> Result<u128> {
        self.bytes_of(|_| true)
    }

    fn bytes_of(&self, is_meant: impl Fn(&str) -> bool) -> Result<u128> {
        let rows = self.rows.iter().filter(|row| is_meant(&row.object));
        sum("total_bytes", &rows.map(|row| row.bytes).collect::<Vec<_>>())
    }
}

/// Stored payloads, and the transfers of the three stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Materialized {
    /// Bytes of q; o has as many where the widths and the head dimensions agree.
    pub q_bytes: u128,
    /// Bytes of k.
    pub k_bytes: u128,
    /// Bytes of v.
    pub v_bytes: u128,
    /// Bytes of o.
    pub o_bytes: u128,
    /// Bytes of the scores.
    pub score_bytes: u128,
    /// Bytes of the probabilities.
    pub probability_bytes: u128,
    /// Eight rows.
    pub transfers: Transfers,
    /// Scores and probabilities, each written once and read once.
    pub quadratic_bytes: u128,
    /// q, k, v and o, once each.
    pub linear_bytes: u128,
    /// All of it, `𝓑_materialized`.
    pub total_bytes: u128,
    /// Scores and probabilities held together, where stage 2 does not work in place.
    pub softmax_live_bytes: u128,
    /// What stage 2 holds in place, where both have one width.
    pub softmax_in_place_bytes: Option<u128>,
}

/// The ledger of the three stages.
///
/// # Errors
///
/// Sizes as [`Sizes::group`], a width that is 0, a product beyond `u128`.
pub fn materialized(sizes: &Sizes, widths: &Widths) -> Result<Materialized> {
    let values = sizes.values()?;
    let of = |field, values, width| product(field, &[values, positive(field, width)?]);
    let q_bytes = of("qkv", values.q, widths.qkv)?;
    let k_bytes = of("qkv", values.k, widths.qkv)?;
    let v_bytes = of("qkv", values.v, widths.qkv)?;
    let o_bytes = of("output", values.o, widths.output)?;
    let score_bytes = of("score", values.scores, widths.score)?;
    let probability_bytes = of("probability", values.scores, widths.probability)?;
    let mut transfers = Transfers::default();
    transfers.push(Direction::Read, "q", q_bytes);
    transfers.push(Direction::Read, "k", k_bytes);
    transfers.push(Direction::Write, "scores", score_bytes);
    transfers.push(Direction::Read, "scores", score_bytes);
    transfers.push(Direction::Write, "probabilities", probability_bytes);
    transfers.push(Direction::Read, "probabilities", probability_bytes);
    transfers.push(Direction::Read, "v", v_bytes);
    transfers.push(Direction::Write, "o", o_bytes);
    let is_quadratic = |object: &str| ["scores", "probabilities"].contains(&object);
    Ok(Materialized {
        quadratic_bytes: transfers.bytes_of(is_quadratic)?,
        linear_bytes: transfers.bytes_of(|object| !is_quadratic(object))?,
        total_bytes: transfers.total_bytes()?,
        softmax_live_bytes: sum("softmax_live_bytes", &[score_bytes, probability_bytes])?,
        softmax_in_place_bytes: (score_bytes == probability_bytes).then_some(score_bytes),
        q_bytes,
        k_bytes,
        v_bytes,
        o_bytes,
        score_bytes,
        probability_bytes,
        transfers,
    })
}

/// Bytes of `scalars` saved values of `width` bytes a query row and head (M4.3 §0x09F, §0x0B):
/// one for lse, two for row maximum and row sum. o is stored in either case.
///
/// # Errors
///
/// As [`materialized`].
pub fn row_state_bytes(sizes: &Sizes, scalars: u64, width: u64) -> Result<u128> {
    let (scalars, width) = (positive("scalars", scalars)?, positive("width", width)?);
    product("row_state_bytes", &[sizes.values()?.rows, scalars, width])
}

/// How a softmax of one stored row is computed (M4.3 §0x06).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Softmax {
    /// Sums the exponentials, then divides: they overflow.
    Native,
    /// Finds the maximum, sums shifted exponentials, then divides.
    Safe,
    /// Maximum and sum together in one scan, then divides.
    Online,
}

/// Accesses of one row in slow memory, exponentials recomputed and never stored (M4.3 §0x05A).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Accesses {
    /// Scans of the row, the emitting one included.
    pub scans: u128,
    /// Values loaded.
    pub loads: u128,
    /// Values stored.
    pub stores: u128,
    /// Loads and stores together.
    pub accesses: u128,
    /// The same for each value of the row.
    pub accesses_per_value: u128,
}

/// Accesses of a softmax over `row_len` values. A count of values: no cache line, no transaction.
///
/// # Errors
///
/// A row of no values.
pub fn softmax_accesses(form: Softmax, row_len: u64) -> Result<Accesses> {
    let row_len = positive("row_len", row_len)?;
    let scans = if form == Softmax::Safe { 3 } else { 2 };
    let (loads, stores) = (scans * row_len, row_len);
    let accesses = loads + stores;
    Ok(Accesses { scans, loads, stores, accesses, accesses_per_value: scans + 1 })
}
