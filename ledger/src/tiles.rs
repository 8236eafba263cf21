//! Tiles of a masked score matrix: full, partial and skipped, and the cells in them (M4.4 §0x05.1).
//!
//! Counted a row of tiles at a time from the predicate's extremes, so that nothing is as large as
//! the matrix.

use ferroflash_core::shape::MAX_LENGTH;
use ferroflash_core::visibility::{Align, Visibility};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, blocks, positive, product, ratio};

/// Which keys a row may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CausalAlign {
    /// Every key.
    None,
    /// Those up to the row's own index.
    TopLeft,
    /// Those up to the row's own index, the last row meeting the last key.
    BottomRight,
}

/// A score matrix and its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TiledMask {
    /// Query rows.
    pub q_len: u64,
    /// Keys.
    pub kv_len: u64,
    /// Query rows a tile.
    pub q_block: u64,
    /// Keys a tile.
    pub kv_block: u64,
    /// Which keys a row sees.
    pub align: CausalAlign,
}

/// Tiles and cells of one head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TileCounts {
    /// Rows of tiles.
    pub q_tiles: u128,
    /// Columns of tiles.
    pub kv_tiles: u128,
    /// Tiles all of whose cells are visible.
    pub full: u128,
    /// Tiles some of whose cells are.
    pub partial: u128,
    /// Tiles none of whose cells are.
    pub skipped: u128,
    /// Full and partial tiles.
    pub visited: u128,
    /// Cells of the matrix.
    pub dense_cells: u128,
    /// Visible cells, `A_useful`.
    pub visible_cells: u128,
    /// Cells of visited tiles that exist.
    pub visited_cells: u128,
    /// Visited cells that are masked.
    pub masked_cells: u128,
    /// Slots of visited tiles, tails counted whole, `A_sched`.
    pub scheduled_cells: u128,
    /// Query rows of visited tiles that exist, summed over tiles, `R`.
    pub row_visits: u128,
    /// Keys of visited tiles that exist, summed over tiles.
    pub key_visits: u128,
    /// Visits of the query tile with the fewest, and with the most.
    pub visits_of_q_tile: [u128; 2],
    /// Visits of the key tile with the fewest, and with the most.
    pub visits_of_kv_tile: [u128; 2],
    /// Visible cells as a share of the matrix.
    pub visible_share: f64,
    /// Visited tiles as a share of all.
    pub visited_share: f64,
}

impl TiledMask {
    /// The visible cells.
    ///
    /// # Errors
    ///
    /// A length of 0, or beyond [`MAX_LENGTH`].
    pub fn visibility(&self) -> Result<Visibility> {
        let length = |field, len: u64| -> Result<u32> {
            positive(field, len)?;
            let fits = u32::try_from(len).ok().filter(|len| *len as usize <= MAX_LENGTH);
            fits.ok_or_else(|| Error::field(field, len, format!("at most {MAX_LENGTH}")))
        };
        let (q_len, kv_len) = (length("q_len", self.q_len)?, length("kv_len", self.kv_len)?);
        Ok(match self.align {
            CausalAlign::None => Visibility::full(q_len, kv_len),
            CausalAlign::TopLeft => Visibility::causal(q_len, kv_len, Align::TopLeft),
            CausalAlign::BottomRight => Visibility::causal(q_len, kv_len, Align::BottomRight),
        })
    }
}

/// Half-open range of tile `index`, clipped.
fn range(index: u64, block: u64, len: u64) -> std::ops::Range<u64> {
    let start = index.saturating_mul(block).min(len);
    start..start.saturating_add(block).min(len)
}

/// Tiles and cells of a masked head.
///
/// # Errors
///
/// A size of 0, a length beyond [`MAX_LENGTH`], a product beyond `u128`.
pub fn tile_counts(mask: &TiledMask) -> Result<TileCounts> {
    tile_counts_of(&mask.visibility()?, mask.q_block, mask.kv_block)
}

/// Tiles and cells of a head under any mask by position.
///
/// # Errors
///
/// As [`tile_counts`].
pub fn tile_counts_of(visible: &Visibility, q_block: u64, kv_block: u64) -> Result<TileCounts> {
    let mask = Tiles::new(visible, q_block, kv_block)?;
    let Tiles { q_tiles, kv_tiles, .. } = mask;
    let (mut full, mut visited) = (0_u128, 0_u128);
    let (mut visited_cells, mut row_visits, mut key_visits) = (0_u128, 0_u128, 0_u128);
    let mut of_q = [u128::MAX, 0];
    for tile in 0..q_tiles {
        let rows = range(tile, mask.q_block, mask.q_len);
        let narrow = rows.start as u32..rows.end as u32;
        let all = visible.keys_of_all(&narrow);
        let (first, end) = mask.key_tiles(tile);
        let visits = u128::from(end - first);
        let keys = (end.saturating_mul(mask.kv_block).min(mask.kv_len))
            .saturating_sub(first * mask.kv_block);
        let reaches_end = u64::from(all.end) == mask.kv_len;
        let last_full = if reaches_end { kv_tiles } else { u64::from(all.end) / mask.kv_block };
        let first_full = u64::from(all.start).div_ceil(mask.kv_block);
        full += u128::from(if all.is_empty() { 0 } else { last_full.saturating_sub(first_full) });
        visited += visits;
        key_visits += u128::from(keys);
        visited_cells += u128::from(keys) * u128::from(rows.end - rows.start);
        row_visits += visits * u128::from(rows.end - rows.start);
        of_q = [of_q[0].min(visits), of_q[1].max(visits)];
    }
    let mut of_kv = [u128::MAX, 0];
    for tile in 0..kv_tiles {
        let visits = u128::from(mask.visits_of_key_tile(tile));
        of_kv = [of_kv[0].min(visits), of_kv[1].max(visits)];
    }
    let all = u128::from(q_tiles) * u128::from(kv_tiles);
    let dense_cells = u128::from(mask.q_len) * u128::from(mask.kv_len);
    let visible_cells = u128::from(visible.visible_cells());
    let slots = [visited, mask.q_block.into(), mask.kv_block.into()];
    Ok(TileCounts {
        q_tiles: q_tiles.into(),
        kv_tiles: kv_tiles.into(),
        full,
        partial: visited - full,
        skipped: all - visited,
        visited,
        dense_cells,
        visible_cells,
        visited_cells,
        masked_cells: visited_cells - visible_cells,
        scheduled_cells: product("scheduled_cells", &slots)?,
        row_visits,
        key_visits,
        visits_of_q_tile: of_q,
        visits_of_kv_tile: of_kv,
        visible_share: ratio(visible_cells, dense_cells),
        visited_share: ratio(visited, all),
    })
}

/// A masked head cut into tiles.
struct Tiles<'a> {
    visible: &'a Visibility,
    q_len: u64,
    kv_len: u64,
    q_block: u64,
    kv_block: u64,
    q_tiles: u64,
    kv_tiles: u64,
}

impl<'a> Tiles<'a> {
    fn new(visible: &'a Visibility, q_block: u64, kv_block: u64) -> Result<Self> {
        let (q_len, kv_len) = (u64::from(visible.q_len), u64::from(visible.kv_len));
        positive("q_len", q_len)?;
        positive("kv_len", kv_len)?;
        let q_tiles = blocks("q_block", q_len, q_block)? as u64;
        let kv_tiles = blocks("kv_block", kv_len, kv_block)? as u64;
        Ok(Self { visible, q_len, kv_len, q_block, kv_block, q_tiles, kv_tiles })
    }

    /// First key tile that query tile `tile` sees, and one past the last; equal if none.
    fn key_tiles(&self, tile: u64) -> (u64, u64) {
        let rows = range(tile, self.q_block, self.q_len);
        let keys = self.visible.keys_of_any(&(rows.start as u32..rows.end as u32));
        let first = u64::from(keys.start) / self.kv_block;
        let end = u64::from(keys.end).div_ceil(self.kv_block);
        (first, if keys.is_empty() { first } else { end })
    }

    /// Query tiles that see a key of key tile `tile`.
    fn visits_of_key_tile(&self, tile: u64) -> u64 {
        let keys = range(tile, self.kv_block, self.kv_len);
        let rows = self.visible.rows_of_any(&(keys.start as u32..keys.end as u32));
        if rows.is_empty() {
            return 0;
        }
        u64::from(rows.end).div_ceil(self.q_block) - u64::from(rows.start) / self.q_block
    }
}

/// Blocks that add into each gradient tile, by who owns what (M4.4 §0x06.1G–0x06.1J).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GradientProducers {
    /// Key columns that add into each dQ tile, if columns own dK and dV.
    pub column_owner_dq: Vec<u128>,
    /// Blocks that write each dK and dV tile of a query head then.
    pub column_owner_dkv: Vec<u128>,
    /// Blocks that add into each grouped dK and dV tile, if query rows own dQ.
    pub row_owner_dkv: Vec<u128>,
    /// Scalars added into dQ by column owners, the rows of a tail as many as they are.
    pub dq_updates: u128,
}

/// Producers of each gradient tile. Allocates in proportion to the number of tiles of one side.
///
/// # Errors
///
/// As [`tile_counts`]; KV heads that do not divide the query heads.
pub fn gradient_producers(
    mask: &TiledMask,
    sizes: &crate::sizes::Sizes,
) -> Result<GradientProducers> {
    let group = u128::from(sizes.group()?);
    let visible = mask.visibility()?;
    let tiles = Tiles::new(&visible, mask.q_block, mask.kv_block)?;
    let (mut column_owner_dq, mut row_visits) = (Vec::new(), 0);
    for tile in 0..tiles.q_tiles {
        let (first, end) = tiles.key_tiles(tile);
        let rows = range(tile, mask.q_block, mask.q_len);
        row_visits += u128::from(end - first) * u128::from(rows.end - rows.start);
        column_owner_dq.push(u128::from(end - first));
    }
    let heads = [sizes.batch, sizes.q_heads, sizes.head_dim].map(u128::from);
    let owners = (0..tiles.kv_tiles).map(|tile| u128::from(tiles.visits_of_key_tile(tile)));
    Ok(GradientProducers {
        dq_updates: product("dq_updates", &[&[row_visits][..], &heads].concat())?,
        column_owner_dkv: vec![1; tiles.kv_tiles as usize],
        row_owner_dkv: owners.map(|visits| visits * group).collect(),
        column_owner_dq,
    })
}

#[cfg(test)]
mod tests {
    use ferroflash_core::visibility::UNBOUNDED;
    use proptest::prelude::*;

    use super::*;
    use crate::sizes::Sizes;

    fn mask() -> impl Strategy<Value = TiledMask> {
        let align = prop_oneof![
            Just(CausalAlign::None),
            Just(CausalAlign::TopLeft),
            Just(CausalAlign::BottomRight)
        ];
        (1..40_u64, 1..40_u64, 1..12_u64, 1..12_u64, align).prop_map(
            |(q_len, kv_len, q_block, kv_block, align)| TiledMask {
                q_len,
                kv_len,
                q_block,
                kv_block,
                align,
            },
        )
    }

    /// Visible cells and all cells of a tile, one by one.
    fn cells(tiles: &Tiles<'_>, q: u64, kv: u64) -> (u128, u128) {
        let rows = range(q, tiles.q_block, tiles.q_len);
        let keys = range(kv, tiles.kv_block, tiles.kv_len);
        let seen = rows.clone().flat_map(|row| keys.clone().map(move |key| (row, key)));
        let sees = |(row, key): &(u64, u64)| tiles.visible.sees(*row as u32, *key as u32);
        let all = u128::from(rows.end - rows.start) * u128::from(keys.end - keys.start);
        (seen.filter(sees).count() as u128, all)
    }

    /// Any window as well.
    fn windowed() -> impl Strategy<Value = (Visibility, u64, u64)> {
        let side = prop_oneof![Just(UNBOUNDED), 0..20_i32];
        (mask(), side.clone(), side).prop_map(|(mask, left, right)| {
            let visible = Visibility { left, right, ..mask.visibility().unwrap() };
            (visible, mask.q_block, mask.kv_block)
        })
    }

    proptest! {
        #[test]
        fn counts_are_those_of_the_cells((visible, q_block, kv_block) in windowed()) {
            let counts = tile_counts_of(&visible, q_block, kv_block).unwrap();
            let tiles = Tiles::new(&visible, q_block, kv_block).unwrap();
            let (q_tiles, kv_tiles) = (tiles.q_tiles, tiles.kv_tiles);
            let (mut full, mut visited, mut seen, mut walked) = (0_u128, 0_u128, 0, 0);
            for (q, kv) in (0..q_tiles).flat_map(|q| (0..kv_tiles).map(move |kv| (q, kv))) {
                let (inside, all) = cells(&tiles, q, kv);
                full += u128::from(inside == all);
                visited += u128::from(inside > 0);
                seen += inside;
                walked += if inside > 0 { all } else { 0 };
            }
            prop_assert_eq!(counts.full, full);
            prop_assert_eq!(counts.visited, visited);
            prop_assert_eq!(counts.skipped, u128::from(q_tiles * kv_tiles) - visited);
            prop_assert_eq!((counts.visible_cells, counts.visited_cells), (seen, walked));
            prop_assert_eq!(counts.masked_cells, walked - seen);
        }

        #[test]
        fn producers_are_the_visited_pairs(mask in mask()) {
            let TiledMask { q_len, kv_len, .. } = mask;
            let sizes = Sizes {
                batch: 1, q_heads: 6, kv_heads: 2, q_len, kv_len, head_dim: 4, value_dim: 4,
            };
            let producers = gradient_producers(&mask, &sizes).unwrap();
            let visited = tile_counts(&mask).unwrap().visited;
            prop_assert_eq!(producers.column_owner_dq.iter().sum::<u128>(), visited);
            prop_assert_eq!(producers.row_owner_dkv.iter().sum::<u128>(), 3 * visited);
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_by_name() {
        let mask = TiledMask {
            q_len: 5,
            kv_len: u64::MAX,
            q_block: 0,
            kv_block: 1,
            align: CausalAlign::TopLeft,
        };
        let message = tile_counts(&mask).unwrap_err().to_string();
        assert!(message.starts_with("kv_len: is 18446744073709551615"), "{message}");
        let message = tile_counts(&TiledMask { kv_len: 5, ..mask }).unwrap_err().to_string();
        assert_eq!(message, "q_block: is 0, but must be at least 1");
    }
}
