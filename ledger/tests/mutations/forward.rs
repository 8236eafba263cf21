//! A streamed forward whose every rule can be broken. [`Rules::RIGHT`] is attention; a mutation
//! changes one rule.

use std::ops::Range;

use ferroflash::Align;

use crate::oracle::{Dense, Problem, Sight, Verdict, check_values};

/// When forbidden scores leave the row.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Masking {
    BeforeMaximum,
    AfterSum,
    Inverted,
}

/// How a row's tiles become its output.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Division {
    /// The numerator, once, by the sum.
    AtEnd,
    /// Never: the numerator is called an output.
    Never,
    /// Every key by the sum so far, so that nothing but m and l need be kept.
    AtEachKey,
    /// Every tile by its own sum; the tiles are added up.
    TilesAdded,
    /// Every tile by its own sum; the tiles are averaged.
    TilesAveraged,
}

/// Which tiles are worked on, and how.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Tiles {
    /// All that a row may see part of; every cell is asked for.
    ByRanges,
    /// Tile j of row tile i if j ≤ i, masked if j = i: right for equal tiles of a square alone.
    ByOrdinals,
    /// Without the keys of a last tile that is not whole.
    WholeOnly,
    /// Each starts with the last key of the one before.
    Overlapping,
}

/// What a forward does. Each field has one right value.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    /// Scores are taken relative to the row's maximum.
    pub(crate) subtract_maximum: bool,
    /// The row maximum before the first key.
    pub(crate) start: f64,
    /// The first key's score is the first maximum, and is counted into the sum.
    pub(crate) count_first_key: bool,
    /// A raised maximum rescales the sum.
    pub(crate) rescale_sum: bool,
    /// A raised maximum rescales the numerator.
    pub(crate) rescale_numerator: bool,
    /// A tile without visible keys leaves the state as it is.
    pub(crate) identity_branch: bool,
    pub(crate) masking: Masking,
    pub(crate) division: Division,
    pub(crate) tiles: Tiles,
    /// Dropped probabilities are dropped after the sum was taken.
    pub(crate) drop_after_sum: bool,
    /// Query head h reads KV head h / group; else h mod kv_heads.
    pub(crate) kv_head_by_group: bool,
    /// The diagonal of a rectangle is where the call says.
    pub(crate) own_alignment: bool,
    /// Programs are launched for every query head; else for every KV head.
    pub(crate) launch_q_heads: bool,
}

impl Rules {
    pub(crate) const RIGHT: Self = Self {
        subtract_maximum: true,
        start: f64::NEG_INFINITY,
        count_first_key: true,
        rescale_sum: true,
        rescale_numerator: true,
        identity_branch: true,
        masking: Masking::BeforeMaximum,
        division: Division::AtEnd,
        tiles: Tiles::ByRanges,
        drop_after_sum: true,
        kv_head_by_group: true,
        own_alignment: true,
        launch_q_heads: true,
    };
}

/// Row tiles and key tiles of the faulty forward.
pub(crate) const Q_BLOCK: usize = 4;
pub(crate) const KV_BLOCK: usize = 3;

/// A row as it streams.
struct Row {
    m: f64,
    l: f64,
    u: Vec<f64>,
    tiles: usize,
}

/// Attention of one item by these rules: o and lse, NaN where nothing was written.
pub(crate) fn forward(problem: &Problem, rules: Rules) -> (Vec<f64>, Vec<f64>) {
    let s = problem.shape;
    let mut o = vec![f64::NAN; s.q_heads * s.q_len * s.value_dim];
    let mut lse = vec![f64::NAN; s.q_heads * s.q_len];
    let launched = if rules.launch_q_heads { s.q_heads } else { s.kv_heads };
    for head in 0..launched {
        for row in 0..s.q_len {
            let (output, of_row) = one_row(problem, rules, head, row);
            let at = head * s.q_len + row;
            o[at * s.value_dim..(at + 1) * s.value_dim].copy_from_slice(&output);
            lse[at] = of_row;
        }
    }
    (o, lse)
}

fn one_row(problem: &Problem, rules: Rules, head: usize, row: usize) -> (Vec<f64>, f64) {
    let s = problem.shape;
    let kv_head = if rules.kv_head_by_group { s.kv_head(head) } else { head % s.kv_heads };
    let mut state = Row { m: rules.start, l: 0.0, u: vec![0.0; s.value_dim], tiles: 0 };
    for (tile, keys) in tiles(s.kv_len, rules.tiles).into_iter().enumerate() {
        let ordinal = row / Q_BLOCK;
        if rules.tiles == Tiles::ByOrdinals && tile > ordinal {
            continue;
        }
        let is_seen = |key: usize| match rules.tiles {
            Tiles::ByOrdinals if tile < ordinal => true,
            _ => sees(problem, rules, row, key),
        };
        let scores: Vec<f64> =
            keys.clone().map(|key| score(problem, head, kv_head, row, key)).collect();
        let drop = |key| problem.multiplier::<f64>()(head, row, key);
        add_tile(&mut state, rules, problem, (kv_head, &keys), &scores, &is_seen, &drop);
    }
    let lse = if state.l == 0.0 { f64::NEG_INFINITY } else { state.m + state.l.ln() };
    let by = match rules.division {
        Division::AtEnd if state.l > 0.0 || !rules.subtract_maximum => state.l,
        Division::AtEnd if state.l == 0.0 => 1.0,
        Division::AtEnd => f64::NAN,
        Division::TilesAveraged => state.tiles.max(1) as f64,
        Division::Never | Division::AtEachKey | Division::TilesAdded => 1.0,
    };
    (state.u.iter().map(|value| value / by).collect(), lse)
}

fn add_tile(
    state: &mut Row,
    rules: Rules,
    problem: &Problem,
    (kv_head, keys): (usize, &Range<usize>),
    scores: &[f64],
    is_seen: &dyn Fn(usize) -> bool,
    drop: &dyn Fn(usize) -> f64,
) {
    let s = problem.shape;
    let is_masked = |key: usize| is_seen(key) == (rules.masking == Masking::Inverted);
    let in_maximum = |key: usize| rules.masking == Masking::AfterSum || !is_masked(key);
    let largest = keys.clone().zip(scores).filter(|(key, _)| in_maximum(*key));
    let largest = largest.fold(f64::NEG_INFINITY, |m, (_, score)| m.max(*score));
    if largest == f64::NEG_INFINITY && rules.identity_branch {
        return;
    }
    let m = match (rules.subtract_maximum, rules.count_first_key) {
        (false, _) => 0.0,
        (true, false) if state.tiles == 0 => scores[0],
        (true, _) => state.m.max(largest),
    };
    let alpha = match state.m {
        _ if !rules.subtract_maximum => 1.0,
        f64::NEG_INFINITY if rules.identity_branch => 0.0,
        old => (old - m).exp(),
    };
    state.tiles += 1;
    let (mut tile_sum, mut tile_u) = (0.0, vec![0.0; s.value_dim]);
    for (key, score) in keys.clone().zip(scores) {
        let weight =
            if in_maximum(key) { (score - m).exp() } else { (f64::NEG_INFINITY - m).exp() };
        let is_lost = !rules.count_first_key && key == 0;
        let is_summed = !is_lost && (rules.drop_after_sum || drop(key) > 0.0);
        tile_sum += if is_summed { weight } else { 0.0 };
        if rules.division == Division::AtEachKey {
            state.l += weight;
        }
        let kept = if is_masked(key) || is_lost { 0.0 } else { weight };
        let is_kept = drop(key) > 0.0;
        let kept = kept * if rules.drop_after_sum { drop(key) } else { f64::from(is_kept) };
        let kept = if rules.division == Division::AtEachKey { kept / state.l } else { kept };
        let at = (kv_head * s.kv_len + key) * s.value_dim;
        for (sum, value) in tile_u.iter_mut().zip(&problem.v[at..at + s.value_dim]) {
            *sum += if kept == 0.0 { 0.0 } else { kept * f64::from(*value) };
        }
    }
    match rules.division {
        Division::TilesAdded | Division::TilesAveraged => {
            let shares = state.u.iter_mut().zip(&tile_u);
            shares.for_each(|(sum, value)| *sum += value / tile_sum);
            state.l = state.l * alpha + tile_sum;
        }
        Division::AtEachKey => {
            state.u.iter_mut().zip(&tile_u).for_each(|(sum, value)| *sum += value);
        }
        Division::AtEnd | Division::Never => {
            let alpha_u = if rules.rescale_numerator { alpha } else { 1.0 };
            state.u.iter_mut().zip(&tile_u).for_each(|(sum, value)| *sum = *sum * alpha_u + value);
            state.l = state.l * if rules.rescale_sum { alpha } else { 1.0 } + tile_sum;
        }
    }
    state.m = m;
}

fn tiles(kv_len: usize, rule: Tiles) -> Vec<Range<usize>> {
    let starts = (0..kv_len).step_by(KV_BLOCK);
    let tiles = starts.map(|start| start..kv_len.min(start + KV_BLOCK));
    match rule {
        Tiles::ByRanges | Tiles::ByOrdinals => tiles.collect(),
        Tiles::WholeOnly => tiles.filter(|keys| keys.len() == KV_BLOCK).collect(),
        Tiles::Overlapping => tiles.map(|keys| keys.start.saturating_sub(1)..keys.end).collect(),
    }
}

fn sees(problem: &Problem, rules: Rules, row: usize, key: usize) -> bool {
    let mut problem = problem.clone();
    if !rules.own_alignment {
        problem.sight = match problem.sight {
            Sight::Causal(Align::TopLeft) => Sight::Causal(Align::BottomRight),
            Sight::Causal(Align::BottomRight) => Sight::Causal(Align::TopLeft),
            Sight::Full => Sight::Full,
        };
    }
    problem.visible().sees(row as u32, key as u32)
}

/// The scaled score of a cell.
pub(crate) fn score(problem: &Problem, head: usize, kv_head: usize, row: usize, key: usize) -> f64 {
    let s = problem.shape;
    let q = (head * s.q_len + row) * s.head_dim;
    let k = (kv_head * s.kv_len + key) * s.head_dim;
    let pairs = problem.q[q..q + s.head_dim].iter().zip(&problem.k[k..k + s.head_dim]);
    f64::from(problem.scale) * pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>()
}

/// The forward by these rules, held against dense attention.
pub(crate) fn verdict(problem: &Problem, rules: Rules) -> Verdict {
    let Dense { o, lse, .. } = problem.dense();
    let had = forward(problem, rules);
    check_values("o", &had.0, &o, 1e-12)?;
    check_values("lse", &had.1, &lse, 1e-12)
}
