//! How many blocks a launch has, and how many have work (M4.4 §0x04A, §0x04B, §0x06D, §0x07).
//!
//! A population of a grid is no occupancy and no time.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, blocks, positive, product, ratio, sum};
use crate::sizes::Sizes;

/// A grid of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Grid {
    /// Query blocks, batch items, query heads.
    pub grid: [u128; 3],
    /// Blocks launched.
    pub launched: u128,
}

/// The forward grid: a block for each query tile of each query head, whatever the KV heads.
///
/// # Errors
///
/// A size of 0, a product beyond `u128`.
pub fn forward_grid(batch: u64, q_heads: u64, q_len: u64, q_block: u64) -> Result<Grid> {
    positive("q_len", q_len)?;
    let q_blocks = blocks("q_block", q_len, q_block)?;
    let grid = [q_blocks, positive("batch", batch)?, positive("q_heads", q_heads)?];
    Ok(Grid { grid, launched: product("launched", &grid)? })
}

/// Sequences packed into one launch whose grid is that of the longest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packed {
    /// Query heads.
    pub q_heads: u64,
    /// Query rows a block.
    pub q_block: u64,
    /// Query rows of each sequence; may be 0.
    pub q_lens: Vec<u64>,
    /// Keys of each sequence; may be 0.
    pub kv_lens: Vec<u64>,
}

/// Who in a grid does something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Populations {
    /// Query blocks of the longest, sequences, heads.
    pub grid: [u128; 3],
    /// Blocks launched.
    pub launched: u128,
    /// Blocks that start within their sequence and have a key.
    pub active: u128,
    /// Blocks that leave at once.
    pub early_return: u128,
    /// Active blocks all of whose rows are valid.
    pub full: u128,
    /// Active blocks with fewer.
    pub tail: u128,
    /// Rows that the active blocks have room for.
    pub row_slots: u128,
    /// Rows among them that exist.
    pub valid_rows: u128,
    /// Rows that are predicated off, all of them in tail blocks.
    pub invalid_rows: u128,
}

/// The populations of a packed launch (M4.4 §0x04B).
///
/// # Errors
///
/// No sequence, lists of two lengths, a head count or block of 0, a product beyond `u128`.
pub fn populations(packed: &Packed) -> Result<Populations> {
    let heads = positive("q_heads", packed.q_heads)?;
    let block = positive("q_block", packed.q_block)?;
    let sequences = packed.q_lens.len();
    if packed.kv_lens.len() != sequences {
        let needs = format!("as long as q_lens, {sequences}");
        return Err(Error::field("kv_lens", format!("{} long", packed.kv_lens.len()), needs));
    }
    positive("q_lens", sequences as u64)?;
    let longest = packed.q_lens.iter().max().copied().unwrap_or(0);
    let grid = [blocks("q_block", longest, packed.q_block)?, sequences as u128, heads];
    let launched = product("launched", &grid)?;
    let (mut active, mut full, mut rows) = (0_u128, 0_u128, 0_u128);
    for (q_len, kv_len) in packed.q_lens.iter().zip(&packed.kv_lens) {
        if *kv_len > 0 {
            let q_len = u128::from(*q_len);
            active += q_len.div_ceil(block);
            full += q_len / block;
            rows += q_len;
        }
    }
    let of_heads = |count| product("blocks", &[count, heads]);
    let (active, full, valid_rows) = (of_heads(active)?, of_heads(full)?, of_heads(rows)?);
    let row_slots = product("row_slots", &[active, block])?;
    Ok(Populations {
        grid,
        launched,
        active,
        early_return: launched - active,
        full,
        tail: active - full,
        row_slots,
        valid_rows,
        invalid_rows: row_slots - valid_rows,
    })
}

/// Blocks of a forward launch by KV head (M4.4 §0x06D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HeadPrograms {
    /// Query tiles.
    pub q_tiles: u128,
    /// Key tiles, which each block walks.
    pub kv_tiles: u128,
    /// Blocks.
    pub programs: u128,
    /// Pairs of KV head and query tile.
    pub unique_coordinates: u128,
    /// Blocks that share one, the query heads of a group.
    pub programs_per_coordinate: u128,
    /// Visits to a key tile, unmasked.
    pub kv_tile_visits: u128,
    /// What they would be if the heads of a group shared each. An opportunity, not traffic.
    pub unique_kv_tile_visits: u128,
}

/// Blocks and key tile visits of grouped heads.
///
/// # Errors
///
/// Sizes as [`Sizes::group`], a block of 0, a product beyond `u128`.
pub fn head_programs(sizes: &Sizes, q_block: u64, kv_block: u64) -> Result<HeadPrograms> {
    let group = u128::from(sizes.group()?);
    let q_tiles = blocks("q_block", sizes.q_len, q_block)?;
    let kv_tiles = blocks("kv_block", sizes.kv_len, kv_block)?;
    let batch = u128::from(sizes.batch);
    let unique = product("programs", &[batch, u128::from(sizes.kv_heads), q_tiles])?;
    let programs = product("programs", &[unique, group])?;
    Ok(HeadPrograms {
        q_tiles,
        kv_tiles,
        programs,
        unique_coordinates: unique,
        programs_per_coordinate: group,
        kv_tile_visits: product("kv_tile_visits", &[programs, kv_tiles])?,
        unique_kv_tile_visits: product("kv_tile_visits", &[unique, kv_tiles])?,
    })
}

/// Blocks that a prefill and a decode step of one call expose (M4.4 §0x01, §0x07).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Surfaces {
    /// One block a batch item and query head, FlashAttention-1's simple grid.
    pub head_blocks: u128,
    /// Query tiles of the prefill.
    pub q_tiles: u128,
    /// Blocks of the prefill.
    pub prefill_blocks: u128,
    /// Blocks of one query row, unsplit.
    pub decode_blocks: u128,
    /// Blocks of one query row whose keys are split, and whose chunks must then be merged.
    pub split_decode_blocks: u128,
    /// Merges of chunks, one fewer than chunks for each head.
    pub split_decode_merges: u128,
    /// How many times as many blocks the prefill has.
    pub loss: f64,
    /// Query heads a block must take if there is only one block a KV head.
    pub heads_per_kv_block: u128,
    /// Outputs that a grid over KV heads leaves out if a block takes only one query head.
    pub heads_missing: u128,
}

/// Surfaces of a call with `kv_chunks` chunks of keys.
///
/// # Errors
///
/// As [`head_programs`]; no chunk.
pub fn surfaces(sizes: &Sizes, q_block: u64, kv_chunks: u64) -> Result<Surfaces> {
    let group = u128::from(sizes.group()?);
    let q_tiles = blocks("q_block", sizes.q_len, q_block)?;
    let chunks = positive("kv_chunks", kv_chunks)?;
    let head_blocks = product("blocks", &[sizes.batch.into(), sizes.q_heads.into()])?;
    let prefill_blocks = product("blocks", &[head_blocks, q_tiles])?;
    Ok(Surfaces {
        head_blocks,
        q_tiles,
        prefill_blocks,
        decode_blocks: head_blocks,
        split_decode_blocks: product("blocks", &[head_blocks, chunks])?,
        split_decode_merges: product("merges", &[head_blocks, chunks - 1])?,
        loss: ratio(prefill_blocks, head_blocks),
        heads_per_kv_block: group,
        heads_missing: u128::from(sizes.q_heads - sizes.kv_heads),
    })
}

/// Owners of a backward launch, by design (M4.4 §0x06.1D, §0x06.1I).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BackwardGrids {
    /// Blocks that make delta and zero dQ: a query tile of a query head each.
    pub preprocess: u128,
    /// Blocks that own a key tile of a query head.
    pub column_owners: u128,
    /// Blocks that own a query tile of a query head.
    pub row_owners: u128,
    /// Blocks that own a whole query head.
    pub head_owners: u128,
    /// Blocks that convert dQ once it is whole.
    pub convert: u128,
    /// Blocks that zero the grouped dK and dV of the row-owner plan: a key tile of a KV head each.
    pub clear_grouped: u128,
    /// Grids over KV heads would leave out this many gradient paths.
    pub heads_missing: u128,
    /// Launches in one stream; a fourth sums the group where there is one.
    pub launches: u128,
}

/// Grids of the backward pass.
///
/// # Errors
///
/// As [`head_programs`].
pub fn backward_grids(sizes: &Sizes, q_block: u64, kv_block: u64) -> Result<BackwardGrids> {
    let group = sizes.group()?;
    let q_tiles = blocks("q_block", sizes.q_len, q_block)?;
    let kv_tiles = blocks("kv_block", sizes.kv_len, kv_block)?;
    let heads = product("blocks", &[sizes.batch.into(), sizes.q_heads.into()])?;
    let kv_heads = product("blocks", &[sizes.batch.into(), sizes.kv_heads.into()])?;
    let rows = product("blocks", &[heads, q_tiles])?;
    Ok(BackwardGrids {
        preprocess: rows,
        column_owners: product("blocks", &[heads, kv_tiles])?,
        row_owners: rows,
        head_owners: heads,
        convert: rows,
        clear_grouped: product("blocks", &[kv_heads, kv_tiles])?,
        heads_missing: u128::from(sizes.q_heads - sizes.kv_heads),
        launches: sum("launches", &[3, u128::from(group > 1)])?,
    })
}
