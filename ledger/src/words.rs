//! Scalar words that FlashAttention-1's schedules move (M4.3 §0x0A–0x0C).
//!
//! A two-level model: on-chip memory of `M` words, everything else slow. Words count true tile
//! extents, once for each time the schedule asks for them; row maximum and row sum are both kept.
//! Padding, sectors, random states and masks are not counted, and no word is a transaction.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, blocks, positive, product, sum};

/// On-chip words of `bytes` bytes that hold values of one width, `⌊bytes / width⌋`. Where roles
/// have several widths, no one conversion is right.
///
/// # Errors
///
/// A width of 0.
pub fn capacity_words(bytes: u64, width: u64) -> Result<u128> {
    Ok(u128::from(bytes) / positive("width", width)?)
}

/// Block sizes of Algorithm 1, and the on-chip words that its tiles take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PaperBlocks {
    /// Keys a block, `B_c = ⌈M / 4d⌉`.
    pub kv_block: u64,
    /// Query rows a block, `B_r = min(⌈M / 4d⌉, d)`.
    pub q_block: u64,
    /// Words of a K and a V tile, `2·B_c·d`.
    pub kv_words: u128,
    /// Words of a Q and an O tile, `2·B_r·d`.
    pub qo_words: u128,
    /// Words of the score tile, whose place the probabilities take.
    pub score_words: u128,
    /// Words of row maximum and row sum.
    pub state_words: u128,
    /// All of it; it may exceed `M` by a constant factor, since the rule is one of order.
    pub live_words: u128,
}

/// The blocks that Algorithm 1 takes for `on_chip_words` and `head_dim` (M4.3 §0x0AB, §0x0AF).
///
/// # Errors
///
/// A size of 0.
pub fn paper_blocks(on_chip_words: u64, head_dim: u64) -> Result<PaperBlocks> {
    positive("on_chip_words", on_chip_words)?;
    let d = positive("head_dim", head_dim)?;
    let quarter = 4 * d;
    let kv_block = u128::from(on_chip_words).div_ceil(quarter) as u64;
    let q_block = kv_block.min(head_dim);
    let (rows, keys) = (u128::from(q_block), u128::from(kv_block));
    let kv_words = product("kv_words", &[2, keys, d])?;
    let qo_words = product("qo_words", &[2, rows, d])?;
    let score_words = product("score_words", &[rows, keys])?;
    let state_words = 2 * rows;
    let live_words = sum("live_words", &[kv_words, qo_words, score_words, state_words])?;
    Ok(PaperBlocks { kv_block, q_block, kv_words, qo_words, score_words, state_words, live_words })
}

/// Which loop is outermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Blocks of keys: Algorithm 1 of FlashAttention-1.
    KvOuter,
    /// Blocks of query rows, which keep their state on chip.
    QOuter,
}

/// Extents of one head, and its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiled {
    /// Query rows.
    pub q_len: u64,
    /// Keys.
    pub kv_len: u64,
    /// Channels of q, k, v and o.
    pub head_dim: u64,
    /// Query rows a block.
    pub q_block: u64,
    /// Keys a block.
    pub kv_block: u64,
}

impl Tiled {
    /// Query blocks and key blocks.
    ///
    /// # Errors
    ///
    /// A size of 0.
    pub fn blocks(&self) -> Result<(u128, u128)> {
        positive("q_len", self.q_len)?;
        positive("kv_len", self.kv_len)?;
        positive("head_dim", self.head_dim)?;
        let q_blocks = blocks("q_block", self.q_len, self.q_block)?;
        Ok((q_blocks, blocks("kv_block", self.kv_len, self.kv_block)?))
    }
}

/// Words of a forward pass over one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ForwardWords {
    /// Of k and v.
    pub kv_reads: u128,
    /// Of q.
    pub q_reads: u128,
    /// Of o, by a schedule that takes it up again.
    pub o_reads: u128,
    /// Of row maximum and row sum.
    pub state_reads: u128,
    /// Of o.
    pub o_writes: u128,
    /// Of the row state.
    pub state_writes: u128,
    /// Of o and row state before the first block.
    pub initial_writes: u128,
    /// All reads.
    pub reads: u128,
    /// All writes but the initial ones.
    pub writes: u128,
    /// Reads and writes of the nested loop.
    pub transfer: u128,
    /// With the initial writes, `W_fwd`.
    pub total: u128,
}

/// Forward words; a `QOuter` schedule saves `saved_scalars` values a row (2: maximum and sum;
/// 1: lse; 0: inference).
///
/// # Errors
///
/// A size of 0, more than two saved scalars, a product beyond `u128`.
pub fn forward_words(tiled: &Tiled, order: Order, saved_scalars: u64) -> Result<ForwardWords> {
    if saved_scalars > 2 {
        return Err(Error::field("saved_scalars", saved_scalars, "at most 2"));
    }
    let (q_blocks, kv_blocks) = tiled.blocks()?;
    let [rows, keys, d] = [tiled.q_len, tiled.kv_len, tiled.head_dim].map(u128::from);
    let of = |factors: &[u128]| product("words", factors);
    let mut words = match order {
        Order::KvOuter => ForwardWords {
            kv_reads: of(&[2, keys, d])?,
            q_reads: of(&[kv_blocks, rows, d])?,
            o_reads: of(&[kv_blocks, rows, d])?,
            state_reads: of(&[2, kv_blocks, rows])?,
            o_writes: of(&[kv_blocks, rows, d])?,
            state_writes: of(&[2, kv_blocks, rows])?,
            initial_writes: sum("words", &[of(&[rows, d])?, of(&[2, rows])?])?,
            ..ForwardWords::NONE
        },
        Order::QOuter => ForwardWords {
            kv_reads: of(&[2, q_blocks, keys, d])?,
            q_reads: of(&[rows, d])?,
            o_writes: of(&[rows, d])?,
            state_writes: of(&[u128::from(saved_scalars), rows])?,
            ..ForwardWords::NONE
        },
    };
    let reads = [words.kv_reads, words.q_reads, words.o_reads, words.state_reads];
    words.reads = sum("reads", &reads)?;
    words.writes = sum("writes", &[words.o_writes, words.state_writes])?;
    words.transfer = sum("transfer", &[words.reads, words.writes])?;
    words.total = sum("total", &[words.transfer, words.initial_writes])?;
    Ok(words)
}

impl ForwardWords {
    const NONE: Self = Self {
        kv_reads: 0,
        q_reads: 0,
        o_reads: 0,
        state_reads: 0,
        o_writes: 0,
        state_writes: 0,
        initial_writes: 0,
        reads: 0,
        writes: 0,
        transfer: 0,
        total: 0,
    };
}

/// Words of Algorithm 4, the backward pass with blocks of keys outermost, over one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardWords {
    /// Of k and v.
    pub kv_reads: u128,
    /// Of q, o, dO and dQ.
    pub row_reads: u128,
    /// Of row maximum and row sum.
    pub state_reads: u128,
    /// Of dQ, at every visit.
    pub dq_writes: u128,
    /// Of dK and dV, once.
    pub dkv_writes: u128,
    /// Of the zeroed gradients.
    pub initial_writes: u128,
    /// All of it, `W_bwd`.
    pub total: u128,
}

/// Backward words of Algorithm 4 (M4.3 §0x0CC).
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn backward_words(tiled: &Tiled) -> Result<BackwardWords> {
    let (_, kv_blocks) = tiled.blocks()?;
    let [rows, keys, d] = [tiled.q_len, tiled.kv_len, tiled.head_dim].map(u128::from);
    let of = |factors: &[u128]| product("words", factors);
    let mut words = BackwardWords {
        kv_reads: of(&[2, keys, d])?,
        row_reads: of(&[4, kv_blocks, rows, d])?,
        state_reads: of(&[2, kv_blocks, rows])?,
        dq_writes: of(&[kv_blocks, rows, d])?,
        dkv_writes: of(&[2, keys, d])?,
        initial_writes: sum("words", &[of(&[rows, d])?, of(&[2, keys, d])?])?,
        total: 0,
    };
    let BackwardWords { kv_reads, row_reads, state_reads, dq_writes, .. } = words;
    let ends = [words.dkv_writes, words.initial_writes];
    let inner = [kv_reads, row_reads, state_reads, dq_writes];
    words.total = sum("total", &[sum("total", &inner)?, sum("total", &ends)?])?;
    Ok(words)
}
