//! Points of the bars: one ratio a call.

use ferroflash_core::table::KERNELS;
use ferroflash_core::visibility::{UNBOUNDED, Visibility};
use ferroflash_ledger::tiles::tile_counts_of;

use super::{DETERMINISTIC, OURS, Row};

/// Dimensions that have kernels of their own, so that one between them takes the next one's.
const COMPILED: [u64; 6] = [32, 64, 96, 128, 192, 256];
/// The convention's lengths.
pub(super) const LENGTHS: [u64; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Its head dimensions.
pub(super) const DIMENSIONS: [u64; 3] = [64, 128, 256];
/// Its tokens in all: items × rows.
const TOKENS: u64 = 16384;
/// Its channels in all: heads × channels.
const CHANNELS: u64 = 2048;

/// One figure of a bar, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    /// The row of a table it belongs in: `d 64 causal`.
    pub(crate) place: String,
    /// Query rows and keys.
    pub(crate) s: u64,
    /// The figure.
    pub(crate) ratio: f64,
}

/// Points of the rows that `take` has a figure for.
pub(crate) fn points(rows: &[Row], take: impl Fn(&Row) -> Option<f64>) -> Vec<Point> {
    let point = |row: &Row| Some(Point { place: row.place(), s: row.s, ratio: take(row)? });
    sorted(rows.iter().filter_map(point).collect())
}

/// Points in the order of tables.
pub(super) fn sorted(mut points: Vec<Point>) -> Vec<Point> {
    let key = |point: &Point| {
        let digits: String = point.place.chars().filter(char::is_ascii_digit).collect();
        let d = digits.parse::<u64>().unwrap_or(0);
        (d, point.place.contains("causal"), point.place.clone(), point.s)
    };
    points.sort_by_key(key);
    points
}

/// Whether a row is one of the convention's points: bf16, plain, as many KV heads as query heads.
pub(crate) fn is_conventional(row: &Row) -> bool {
    row.options.is_none()
        && row.dtype() == "bf16"
        && row.heads == row.kv_heads()
        && row.b * row.s == TOKENS
        && row.heads * row.d == CHANNELS
        && DIMENSIONS.contains(&row.d)
        && LENGTHS.contains(&row.s)
}

/// Whether a row has 64 query heads on 8 KV heads, d = 128, one item.
pub(crate) fn is_grouped(row: &Row) -> bool {
    row.options.is_none() && row.dtype() == "bf16" && (row.heads, row.kv_heads()) == (64, 8)
}

/// Our fixed-order rate over our own default's.
pub(crate) fn deterministic(row: &Row) -> Option<f64> {
    Some(row.median(OURS)? / row.median(DETERMINISTIC)?)
}

/// Our time at a dimension between compiled ones over the time at the next compiled one.
pub(super) fn between(rows: &[Row]) -> Vec<Point> {
    points(rows, |row| {
        let next = COMPILED.into_iter().find(|compiled| *compiled >= row.d)?;
        if next == row.d || row.is_of_cpu() || row.options.is_some() {
            return None;
        }
        let next = Row { d: next, ..row.clone() };
        // Times of different days are not of one process.
        let is_next = |other: &&Row| other.is_same_call(&next) && other.recorded == row.recorded;
        let wider = rows.iter().find(is_next);
        Some(row.median(OURS)? / wider?.median(OURS)?)
    })
}

/// Our rate in binary16 over ours in bfloat16, each over cuDNN's of its own process where both rows
/// have it: the two are of different processes, and the clock is not the same in both.
pub(super) fn half(rows: &[Row]) -> Vec<Point> {
    points(rows, |row| {
        let other = Row { dtype: "bf16".to_owned(), ..row.clone() };
        (row.dtype() == "f16").then_some(())?;
        let other = rows.iter().find(|row| row.is_same_call(&other))?;
        match (row.ratio_to(&["cudnn"]), other.ratio_to(&["cudnn"])) {
            (Some(half), Some(brain)) => Some(half / brain),
            _ => Some(other.median(OURS)? / row.median(OURS)?),
        }
    })
}

/// A row with an option, and our time without it over our time with it.
pub(crate) struct Cost<'a> {
    /// The row.
    pub(crate) row: &'a Row,
    /// Time without ÷ time with; of packed items, which have other cells to see, rate with ÷ rate
    /// without.
    pub(crate) ratio: f64,
}

/// What options cost beside the same call without: where the row has a contender `plain`, from its
/// own rounds, else from the plain row of the same call.
pub(crate) fn option_costs(rows: &[Row]) -> Vec<Cost<'_>> {
    let cost = |row| -> Option<Cost<'_>> {
        let row: &Row = row;
        row.options.as_ref()?;
        let plain = Row { options: None, ..row.clone() };
        let is_plain = |other: &&Row| other.is_same_call(&plain) && !other.is_of_cpu();
        // The planner's choice for the device comes first where several families ran the call.
        let mut others: Vec<&Row> = rows.iter().filter(is_plain).collect();
        others.sort_by_key(|other| !other.is_of("hopper"));
        let beside = || others.first().and_then(|other| other.median(OURS));
        let without = row.median("plain").or_else(beside)?;
        Some(Cost { row, ratio: without / row.median(OURS)? * row.packed_share() })
    };
    rows.iter().filter_map(cost).collect()
}

/// Points of a family's options whose names begin with `option`.
pub(super) fn with_option(
    rows: &[Row],
    family: &str,
    option: &str,
    wanted: impl Fn(&Row) -> bool,
) -> Vec<Point> {
    let costs = option_costs(rows).into_iter().filter(|cost| cost.row.is_of(family));
    let costs = costs.filter(|cost| {
        cost.row.options.as_ref().is_some_and(|name| name.starts_with(option)) && wanted(cost.row)
    });
    sorted(costs.map(|c| Point { place: c.row.place(), s: c.row.s, ratio: c.ratio }).collect())
}

/// Window: time with ÷ time without, over the share of the tiles that the window leaves.
pub(super) fn window(rows: &[Row], family: &str) -> Vec<Point> {
    let costs = option_costs(rows).into_iter().filter(|cost| cost.row.is_of(family));
    let points = costs.filter_map(|cost| {
        let row = cost.row;
        let keys: u32 = row.options.as_ref()?.strip_prefix("window ")?.trim().parse().ok()?;
        let spec = KERNELS.iter().find(|spec| Some(spec.name) == row.kernel.as_deref())?;
        let share = tile_share(row, keys, spec.tile.q_rows, spec.tile.kv_columns)?;
        Some(Point { place: row.place(), s: row.s, ratio: 1.0 / cost.ratio / share })
    });
    sorted(points.collect())
}

/// Tiles that a window of `keys` before the diagonal (and after it, unless causal) leaves, of those
/// that the call has without it.
fn tile_share(row: &Row, keys: u32, q_rows: u32, kv_columns: u32) -> Option<f64> {
    let length = u32::try_from(row.s).ok()?;
    let keys = i32::try_from(keys).ok()?;
    let visited = |left, right| {
        let visible = Visibility { left, right, ..Visibility::full(length, length) };
        let counts = tile_counts_of(&visible, q_rows.into(), kv_columns.into()).ok()?;
        Some(counts.visited as f64)
    };
    let [with, without] = if row.causal { [0, 0] } else { [keys, UNBOUNDED] };
    Some(visited(keys, with)? / visited(UNBOUNDED, without)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::tests::row;

    #[test]
    fn options_are_compared_with_the_plain_call() {
        let plain = row(2.0, &[]);
        let with = |options: &str, ours: f64, more: &[(&str, f64)]| Row {
            options: Some(options.to_owned()),
            ..row(ours, more)
        };
        let rows = [
            plain.clone(),
            with("alibi", 2.5, &[]),
            with("softcap 30", 4.0, &[("plain", 3.0)]),
            Row { d: 64, ..with("alibi", 1.0, &[]) },
        ];
        let ratios: Vec<f64> = option_costs(&rows).iter().map(|cost| cost.ratio).collect();
        assert_eq!(ratios, [0.8, 0.75]);
        let alibi = with_option(&rows, "hopper", "alibi", |_| true);
        assert_eq!(alibi, [Point { place: "d 128 causal".to_owned(), s: 1024, ratio: 0.8 }]);
        assert!(with_option(&rows, "portable", "alibi", |_| true).is_empty());
    }

    #[test]
    fn packed_items_are_compared_by_what_they_see() {
        // Two items of 1024 and one of 2048: 2·1024² cells beside 2048².
        let of = |causal| Row {
            options: Some("packed heavy-tailed".to_owned()),
            lengths: Some(vec![2048]),
            causal,
            ..row(3.0, &[("plain", 2.0)])
        };
        let ratio = |row: Row| option_costs(&[row]).first().map(|cost| cost.ratio);
        assert_eq!(ratio(of(false)), Some(2.0 / 3.0 * 2.0));
        let share = 2048.0 * 2049.0 / (2.0 * 1024.0 * 1025.0);
        assert_eq!(ratio(of(true)), Some(2.0 / 3.0 * share));
        let other = Row { lengths: Some(vec![1024]), ..of(false) };
        assert!(other.validate().expect_err("tokens are missing").to_string().contains("tokens"));
    }

    #[test]
    fn tiles_of_a_window_are_counted() {
        let of = |s, causal| Row { s, causal, ..row(1.0, &[]) };
        // Eight tiles a side. Causal: 1 + 2 + … + 8 tiles without, a diagonal and one below with.
        assert_eq!(tile_share(&of(512, true), 1, 64, 64), Some(15.0 / 36.0));
        assert_eq!(tile_share(&of(512, false), 1, 64, 64), Some(22.0 / 64.0));
        assert_eq!(tile_share(&of(512, false), 512, 64, 64), Some(1.0));
    }

    #[test]
    fn dimensions_and_types_are_compared_at_equal_sizes() {
        let rows = [
            row(2.0, &[]),
            Row { d: 112, ..row(1.9, &[]) },
            Row { dtype: "fp16".to_owned(), ..row(2.5, &[]) },
        ];
        let ratios = |points: Vec<Point>| points.iter().map(|p| p.ratio).collect::<Vec<_>>();
        assert_eq!(ratios(between(&rows)), [0.95]);
        assert_eq!(ratios(half(&rows)), [0.8]);
    }
}
