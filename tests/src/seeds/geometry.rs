//! Masks by tile, orders of visit, and head maps.

use std::ops::Range;

use crate::case::shape;
use ferroflash::{Align, Attention, Device};
use ferroflash_core::fragment::c_place;
use ferroflash_core::schedule::ForwardSchedule;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::{TileClass, Visibility};
use serde_json::{Value, json};

use super::json::{index, index_rows, matrix};

fn visibility(inputs: &Value) -> Visibility {
    let [q_len, kv_len] = ["q_len", "kv_len"].map(|name| index(&inputs[name]) as u32);
    match inputs["align"].as_str() {
        Some("top_left") => Visibility::causal(q_len, kv_len, Align::TopLeft),
        Some("bottom_right") => Visibility::causal(q_len, kv_len, Align::BottomRight),
        Some("none") => Visibility::full(q_len, kv_len),
        other => panic!("unknown alignment {other:?}"),
    }
}

/// Half-open tiles of `side` positions.
fn tiles(len: u32, side: u32) -> Vec<Range<u32>> {
    (0..len.div_ceil(side)).map(|tile| tile * side..((tile + 1) * side).min(len)).collect()
}

pub(super) fn causal_tiles(inputs: &Value) -> Value {
    let visible = visibility(inputs);
    let [q_block, kv_block] = ["q_block", "kv_block"].map(|name| index(&inputs[name]) as u32);
    let (q_tiles, kv_tiles) = (tiles(visible.q_len, q_block), tiles(visible.kv_len, kv_block));
    let class = |q: &Range<u32>, kv: &Range<u32>| match visible.class(q, kv) {
        TileClass::Full => 'F',
        TileClass::Partial => 'P',
        TileClass::Skipped => 'S',
    };
    let classes: Vec<String> =
        q_tiles.iter().map(|q| kv_tiles.iter().map(|kv| class(q, kv)).collect()).collect();
    let count = |letter| classes.concat().matches(letter).count();
    let is_visited = |q: usize, kv: usize| classes[q].as_bytes()[kv] != b'S';
    let visits_of_q: Vec<usize> = (0..q_tiles.len())
        .map(|q| (0..kv_tiles.len()).filter(|kv| is_visited(q, *kv)).count())
        .collect();
    let visits_of_kv: Vec<usize> = (0..kv_tiles.len())
        .map(|kv| (0..q_tiles.len()).filter(|q| is_visited(*q, kv)).count())
        .collect();
    let mut visited_cells = 0;
    for (q, rows) in q_tiles.iter().enumerate() {
        let keys = kv_tiles.iter().enumerate().filter(|(kv, _)| is_visited(q, *kv));
        visited_cells += keys.map(|(_, keys)| rows.len() * keys.len()).sum::<usize>();
    }
    let visible_cells = visible.visible_cells();
    let historical = historical_loop(inputs);
    json!({
        "historical_visits": historical["visits"],
        "historical_mask_iterations": historical["mask_iterations"],
        "q_tile_rows": q_tiles.iter().map(Range::len).collect::<Vec<_>>(),
        "kv_tile_rows": kv_tiles.iter().map(Range::len).collect::<Vec<_>>(),
        "offset": (inputs["align"] != "none").then_some(visible.offset),
        "classes": classes,
        "full": count('F'), "partial": count('P'), "skipped": count('S'),
        "visits_of_q_tile": visits_of_q, "visits_of_kv_tile": visits_of_kv,
        "visited": count('F') + count('P'),
        "dense_cells": u64::from(visible.q_len) * u64::from(visible.kv_len),
        "visible_cells": visible_cells,
        "visited_cells": visited_cells,
        "masked_cells": visited_cells as u64 - visible_cells,
    })
}

/// The key loop of v2.0.0, which knew one alignment.
fn historical_loop(inputs: &Value) -> Value {
    if inputs["align"] != "top_left" {
        return Value::Null;
    }
    super::ledger::account("causal_key_loop", inputs)
}

pub(super) fn causal_mask(inputs: &Value) -> Value {
    let visible = visibility(inputs);
    let row = |row| (0..visible.kv_len).map(|key| u8::from(visible.sees(row, key))).collect();
    let cells: Vec<Vec<u8>> = (0..visible.q_len).map(row).collect();
    let keys: Vec<usize> =
        cells.iter().map(|row| row.iter().filter(|cell| **cell == 1).count()).collect();
    let empty: Vec<usize> = (0..keys.len()).filter(|row| keys[*row] == 0).collect();
    json!({
        "offset": visible.offset, "visible": cells, "keys_of_row": keys, "empty_rows": empty,
    })
}

/// Query blocks in the order of the forward schedule, or K/V tiles in that of their owners.
pub(super) fn tile_visits(inputs: &Value) -> Value {
    let number = |name: &str| index(&inputs[name]) as u32;
    let (q_len, kv_len) = (number("q_len"), number("kv_len"));
    let (q_tiles, kv_tiles) = (tiles(q_len, number("q_block")), tiles(kv_len, number("kv_block")));
    let owners = |blocks: usize| {
        let schedule = ForwardSchedule {
            q_blocks: blocks as u32,
            batch_heads: 1,
            section: 1,
            longest_first: 0,
        };
        (0..schedule.blocks() as u32).map(move |block| schedule.work(block).q_block as usize)
    };
    let visits: Vec<[usize; 2]> = match inputs["order"].as_str() {
        Some("q_outer") => {
            owners(q_tiles.len()).flat_map(|q| (0..kv_tiles.len()).map(move |kv| [q, kv])).collect()
        }
        Some("kv_outer") => {
            owners(kv_tiles.len()).flat_map(|kv| (0..q_tiles.len()).map(move |q| [q, kv])).collect()
        }
        other => panic!("unknown order {other:?}"),
    };
    let cells = matrix(&inputs["visible"]);
    let seen = |[q, kv]: &[usize; 2]| {
        let rows = q_tiles[*q].clone().map(|row| &cells[row as usize]);
        let keys = kv_tiles[*kv].start as usize..kv_tiles[*kv].end as usize;
        rows.map(|row| row[keys.clone()].iter().filter(|cell| **cell == 1.0).count()).sum()
    };
    let ranges = |tiles: &[Range<u32>]| -> Vec<[u32; 2]> {
        tiles.iter().map(|tile| [tile.start, tile.end]).collect()
    };
    let shapes: Vec<[usize; 2]> =
        visits.iter().map(|[q, kv]| [q_tiles[*q].len(), kv_tiles[*kv].len()]).collect();
    json!({
        "tiles": visits,
        "q_ranges": ranges(&q_tiles), "kv_ranges": ranges(&kv_tiles),
        "cells": shapes.iter().map(|[rows, keys]| rows * keys).sum::<usize>(),
        "shapes": shapes,
        "visible_cells": visits.iter().map(seen).collect::<Vec<usize>>(),
    })
}

/// Rows of each warp: 16-row `mma` tiles, dealt to the warps in turn.
pub(super) fn warp_rows(inputs: &Value) -> Value {
    let (q_block, warps) = (index(&inputs["q_block"]) as u32, index(&inputs["warps"]) as u32);
    let of_lanes = |warp: u32, lanes: Range<u32>| {
        let mut rows: Vec<u32> = lanes
            .flat_map(|lane| (0..4).map(move |value| c_place(lane, value).row))
            .flat_map(|row| {
                let bands = (warp * 16..q_block).step_by(16 * warps as usize);
                bands.map(move |band| band + row)
            })
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    };
    json!({
        "rows_of_warp": (0..warps).map(|warp| of_lanes(warp, 0..32)).collect::<Vec<_>>(),
        "rows_of_first_lanes": of_lanes(0, 0..4),
    })
}

fn heads(inputs: &Value) -> Shape {
    let (q_heads, kv_heads) = (index(&inputs["q_heads"]), index(&inputs["kv_heads"]));
    shape(1, (q_heads, kv_heads), (1, 1), (8, 8))
}

pub(super) fn head_map(inputs: &Value) -> Value {
    let shape = heads(inputs);
    if Attention::new(shape).plan::<f32>(&Device::cpu()).is_err() {
        return json!({"admissible": false, "group": null, "kv_of_q": null, "q_of_kv": null});
    }
    let kv_of_q: Vec<usize> = (0..shape.q_heads).map(|head| shape.kv_head(head)).collect();
    let q_of_kv: Vec<Vec<usize>> = (0..shape.kv_heads)
        .map(|kv| (0..shape.q_heads).filter(|head| kv_of_q[*head] == kv).collect())
        .collect();
    json!({"admissible": true, "group": shape.group(), "kv_of_q": kv_of_q, "q_of_kv": q_of_kv})
}

/// Gradient rows of query heads that share a KV head add up.
pub(super) fn group_sum(inputs: &Value) -> Value {
    let expanded = index_rows(&inputs["expanded"]);
    let kv_heads = index(&inputs["kv_heads"]);
    let shape = shape(1, (expanded.len(), kv_heads), (1, 1), (8, 8));
    let mut reduced = vec![vec![0; expanded[0].len()]; kv_heads];
    for (head, row) in expanded.iter().enumerate() {
        let sums = &mut reduced[shape.kv_head(head)];
        sums.iter_mut().zip(row).for_each(|(sum, addend)| *sum += addend);
    }
    json!({ "reduced": reduced })
}
