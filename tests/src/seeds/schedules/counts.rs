//! Words, visits, programs and barriers, counted by running the schedules without values.

use ferroflash::Align;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::Visibility;
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::hazards::{self, Barrier};
use ferroflash_ledger::schedule::warps::{Join, rows_of_warp, split_k};
use ferroflash_ledger::schedule::{
    Blocks, Call, NoValue, Tensor, Trace, Visit, fa1, fa2, row_owner, stored,
};
use serde_json::{Value, json};

use super::blocks;
use crate::seeds::json::{index, reals};

/// Runs `test` on a call of these sizes that has no values.
fn without_values<R>(
    shape: Shape,
    visible: Visibility,
    test: impl FnOnce(&Call<'_, NoValue>, &[NoValue]) -> R,
) -> R {
    let values = |dims: [usize; 4]| vec![NoValue; dims.iter().product()];
    let [q, k, v] = [shape.q_dims(), shape.k_dims(), shape.v_dims()].map(values);
    let call = Call::new(shape, visible, NoValue, &q, &k, &v).expect("a call");
    test(&call, &values(shape.o_dims()))
}

fn one_head(inputs: &Value) -> Shape {
    let number = |name: &str| inputs[name].as_u64().unwrap_or(1) as usize;
    let (head_dim, q_len, kv_len) = (number("head_dim"), number("q_len"), number("kv_len"));
    Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len, kv_len, head_dim, value_dim: head_dim }
}

fn full(shape: Shape) -> Visibility {
    Visibility::full(shape.q_len as u32, shape.kv_len as u32)
}

fn forward_words_of(trace: &Trace) -> Value {
    let of = |tensor| trace.of(tensor);
    json!({
        "kv_reads": of(Tensor::K).reads as u64 + of(Tensor::V).reads as u64,
        "q_reads": of(Tensor::Q).reads as u64,
        "o_reads": of(Tensor::O).reads as u64,
        "state_reads": of(Tensor::State).reads as u64,
        "o_writes": of(Tensor::O).writes as u64,
        "state_writes": of(Tensor::State).writes as u64,
        "initial_writes": trace.initial() as u64,
        "reads": trace.reads() as u64,
        "writes": trace.writes() as u64,
        "transfer": (trace.reads() + trace.writes()) as u64,
        "total": trace.total() as u64,
    })
}

/// Nothing is run where a schedule would save no state at all: there is no such schedule.
pub(super) fn forward_words(inputs: &Value) -> Vec<Value> {
    let (shape, blocks) = (one_head(inputs), blocks(inputs));
    let saved = match (inputs["order"].as_str(), inputs["saved_scalars"].as_u64().unwrap_or(2)) {
        (Some("kv_outer"), _) => None,
        (_, 1) => Some(Saved::Lse),
        (_, 2) => Some(Saved::MaximumAndSum),
        _ => return Vec::new(),
    };
    let trace = without_values(shape, full(shape), |call, _| match saved {
        None => fa1::forward(call, blocks).expect("a call").trace,
        Some(saved) => fa2::forward(call, blocks, saved).expect("a call").trace,
    });
    vec![forward_words_of(&trace)]
}

fn first_backward(shape: Shape, blocks: Blocks) -> Trace {
    without_values(shape, full(shape), |call, d_o| {
        let saved = fa1::forward(call, blocks).expect("a call");
        fa1::backward(call, blocks, &saved, d_o).expect("a call").trace
    })
}

fn backward_words_of(trace: &Trace) -> Value {
    let reads = |tensors: &[Tensor]| -> u64 {
        tensors.iter().map(|tensor| trace.of(*tensor).reads as u64).sum()
    };
    json!({
        "kv_reads": reads(&[Tensor::K, Tensor::V]),
        "row_reads": reads(&[Tensor::Q, Tensor::O, Tensor::DO, Tensor::DQ]),
        "state_reads": reads(&[Tensor::State]),
        "dq_writes": trace.of(Tensor::DQ).writes as u64,
        "dkv_writes": (trace.of(Tensor::DK).writes + trace.of(Tensor::DV).writes) as u64,
        "initial_writes": trace.initial() as u64,
        "total": trace.total() as u64,
    })
}

/// The three stages with stored scores, each transfer at its width.
pub(super) fn materialized(inputs: &Value) -> Vec<Value> {
    let shape = many_heads(&inputs["sizes"]);
    if shape.group() != 1 {
        // The account has a stage read shared keys once, this schedule once a query head.
        return Vec::new();
    }
    let trace = without_values(shape, full(shape), |call, _| stored::forward(call).trace);
    let width = |role: &str| index(&inputs["widths"][role]) as u128;
    let bytes = |tensor, role: &str| {
        let words = trace.of(tensor);
        width(role) * (words.reads + words.writes)
    };
    let quadratic = bytes(Tensor::Scores, "score") + bytes(Tensor::Probabilities, "probability");
    let inputs = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| bytes(tensor, "qkv"));
    let linear = inputs.iter().sum::<u128>() + bytes(Tensor::O, "output");
    vec![json!({
        "quadratic_bytes": quadratic as u64,
        "linear_bytes": linear as u64,
        "total_bytes": (quadratic + linear) as u64,
    })]
}

pub(super) fn softmax_accesses(inputs: &Value) -> Value {
    let form = serde_json::from_value(inputs["form"].clone()).expect("a form");
    let row = stored::softmax(form, &vec![NoValue; index(&inputs["row_len"])]);
    json!({"scans": row.scans, "loads": row.loads, "stores": row.stores})
}

pub(super) fn backward_words(inputs: &Value) -> Value {
    backward_words_of(&first_backward(one_head(inputs), blocks(inputs)))
}

/// Both of FlashAttention-1's algorithms in the tiles that it cuts for a chip.
pub(super) fn paper_blocks(inputs: &Value) -> Value {
    let number = |name: &str| index(&inputs[name]);
    let blocks = fa1::blocks(number("on_chip_words"), number("head_dim")).expect("sizes");
    let lens = json!({
        "q_len": inputs["len"], "kv_len": inputs["len"], "head_dim": inputs["head_dim"],
    });
    let shape = one_head(&lens);
    let forward = without_values(shape, full(shape), |call, _| {
        fa1::forward(call, blocks).expect("a call").trace
    });
    json!({
        "q_block": blocks.q_block,
        "kv_block": blocks.kv_block,
        "forward": forward_words_of(&forward),
        "backward": backward_words_of(&first_backward(shape, blocks)),
    })
}

/// Bytes of both forward schedules, at a width for each role.
pub(super) fn movement(inputs: &Value) -> Value {
    let (shape, blocks) = (one_head(inputs), blocks(inputs));
    let [input, output, state] =
        ["input", "output", "state"].map(|role| index(&inputs["widths"][role]) as u128);
    let [by_keys, by_rows] = without_values(shape, full(shape), |call, _| {
        let by_keys = fa1::forward(call, blocks).expect("a call").trace;
        [by_keys, fa2::forward(call, blocks, Saved::Lse).expect("a call").trace]
    });
    let bytes = |trace: &Trace, tensor, width: u128| {
        let words = trace.of(tensor);
        (width * (words.reads + words.writes)) as u64
    };
    let kv = |trace| bytes(trace, Tensor::K, input) + bytes(trace, Tensor::V, input);
    let initial = |tensor, width: u128| (width * by_keys.of(tensor).initial) as u64;
    json!({
        "kv_outer": {
            "kv_bytes": kv(&by_keys),
            "q_bytes": bytes(&by_keys, Tensor::Q, input),
            "o_bytes": bytes(&by_keys, Tensor::O, output),
            "state_bytes": bytes(&by_keys, Tensor::State, state),
            "initial_bytes": initial(Tensor::O, output) + initial(Tensor::State, state),
        },
        "q_outer": {
            "kv_bytes": kv(&by_rows),
            "q_bytes": bytes(&by_rows, Tensor::Q, input),
            "o_bytes": bytes(&by_rows, Tensor::O, output),
            "lse_bytes": bytes(&by_rows, Tensor::State, state),
        },
        "q_outer_owners": by_rows.programs,
        "q_outer_requests": by_rows.visits.len(),
        "kv_outer_state_visits": by_keys.visits.len(),
    })
}

/// The visits of Algorithm 1, K/V tiles outside, or of the query tiles' owners. The paper visits
/// every tile; FlashAttention-2 leaves out what no row sees, and there is no such case.
pub(super) fn tile_visits(inputs: &Value) -> Value {
    let (shape, blocks) = (one_head(inputs), blocks(inputs));
    let visible = reals(&inputs["visible"]);
    let (q_len, kv_len) = (shape.q_len as u32, shape.kv_len as u32);
    let mask = if visible.contains(&0.0) {
        Visibility::causal(q_len, kv_len, Align::TopLeft)
    } else {
        Visibility::full(q_len, kv_len)
    };
    let trace: Trace = without_values(shape, mask, |call, _| match inputs["order"].as_str() {
        Some("kv_outer") => fa1::forward(call, blocks).expect("a call").trace,
        _ => fa2::forward(call, blocks, Saved::Lse).expect("a call").trace,
    });
    let visits = &trace.visits;
    json!({
        "tiles": visits.iter().map(|visit| [visit.q_tile, visit.kv_tile]).collect::<Vec<_>>(),
        "shapes": visits.iter().map(|visit| [visit.rows, visit.keys]).collect::<Vec<_>>(),
        "visible_cells": visits.iter().map(|visit| visit.visible).collect::<Vec<_>>(),
        "cells": visits.iter().map(|visit| visit.rows * visit.keys).sum::<usize>(),
    })
}

fn many_heads(inputs: &Value) -> Shape {
    let number = |name: &str| inputs[name].as_u64().unwrap_or(1) as usize;
    Shape {
        batch: number("batch"),
        q_heads: number("q_heads"),
        kv_heads: number("kv_heads"),
        ..one_head(inputs)
    }
}

/// Blocks of the main kernel, by who owns what.
pub(super) fn backward_grids(inputs: &Value) -> Value {
    let (shape, blocks) = (many_heads(inputs), blocks(inputs));
    without_values(shape, full(shape), |call, d_o| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        let columns = fa2::backward(call, blocks, &saved, d_o).expect("a call").trace;
        let rows = row_owner::backward(call, blocks, &saved, d_o).expect("a call").trace;
        json!({"column_owners": columns.programs, "row_owners": rows.programs})
    })
}

/// The scratch that is cleared, and what is kept of each row. No byte depends on the tiles.
pub(super) fn scratch(inputs: &Value) -> Value {
    let shape = many_heads(inputs);
    let blocks = Blocks { q_block: shape.q_len, kv_block: shape.kv_len };
    let width = index(&inputs["accumulator_bytes"]) as u128;
    let trace = without_values(shape, full(shape), |call, d_o| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        fa2::backward(call, blocks, &saved, d_o).expect("a call").trace
    });
    json!({
        "dq_accumulator_bytes": (width * trace.initial()) as u64,
        "delta_bytes": (width * trace.of(Tensor::Delta).writes) as u64,
    })
}

/// Merges and divisions of one row, by the schedule that divides at every tile and the one that
/// divides in the end. The first tile meets the empty state, which costs nothing.
pub(super) fn row_work(inputs: &Value) -> Value {
    let number = |name: &str| index(&inputs[name]);
    let blocks = Blocks { q_block: 1, kv_block: number("kv_block") };
    let kv_len = number("kv_tiles") * blocks.kv_block;
    let sizes = json!({"q_len": 1, "kv_len": kv_len, "head_dim": inputs["value_dim"]});
    let shape = one_head(&sizes);
    let [first, second] = without_values(shape, full(shape), |call, _| {
        let first = fa1::forward(call, blocks).expect("a call").trace;
        [first, fa2::forward(call, blocks, Saved::Lse).expect("a call").trace]
    });
    json!({
        "retained": {
            "running_max_comparisons": second.merges - 1,
            "row_sum_updates": second.merges - 1,
        },
        "product": {"reciprocals": first.divisions},
        "delayed": {"reciprocals": second.divisions},
    })
}

fn aligned(inputs: &Value, shape: Shape) -> Visibility {
    let (q_len, kv_len) = (shape.q_len as u32, shape.kv_len as u32);
    match inputs["align"].as_str() {
        Some("top_left") => Visibility::causal(q_len, kv_len, Align::TopLeft),
        Some("bottom_right") => Visibility::causal(q_len, kv_len, Align::BottomRight),
        _ => Visibility::full(q_len, kv_len),
    }
}

/// Tiles and cells of the query tiles' owners.
pub(super) fn tile_counts(inputs: &Value) -> Value {
    let (shape, blocks) = (one_head(inputs), blocks(inputs));
    let trace = without_values(shape, aligned(inputs, shape), |call, _| {
        fa2::forward(call, blocks, Saved::Lse).expect("a call").trace
    });
    let sum = |of: fn(&Visit) -> u64| trace.visits.iter().map(of).sum::<u64>();
    let cells = |visit: &Visit| (visit.rows * visit.keys) as u64;
    let mut of_q = vec![0_u64; shape.q_len.div_ceil(blocks.q_block)];
    trace.visits.iter().for_each(|visit| of_q[visit.q_tile] += 1);
    json!({
        "visits_of_q_tile": [of_q.iter().min(), of_q.iter().max()],
        "visited": trace.visits.len(),
        "full": sum(|visit| u64::from(visit.visible == (visit.rows * visit.keys) as u64)),
        "visible_cells": sum(|visit| visit.visible),
        "visited_cells": sum(cells),
        "row_visits": sum(|visit| visit.rows as u64),
        "key_visits": sum(|visit| visit.keys as u64),
    })
}

/// Bytes of the column owner's kernels; what is no accumulator has the elements' width.
pub(super) fn backward_stages(inputs: &Value) -> Value {
    let (shape, blocks) = (many_heads(&inputs["sizes"]), blocks(inputs));
    let [element, accumulator] =
        ["element_bytes", "accumulator_bytes"].map(|name| index(&inputs[name]) as u128);
    let trace = without_values(shape, aligned(inputs, shape), |call, d_o| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        fa2::backward(call, blocks, &saved, d_o).expect("a call").trace
    });
    let bytes = trace.words.iter().map(|(tensor, words)| {
        let width = match tensor {
            Tensor::State | Tensor::Delta | Tensor::Scratch => accumulator,
            _ => element,
        };
        width * (words.reads + words.writes + words.initial + words.adds)
    });
    let (state, delta) = (trace.of(Tensor::State), trace.of(Tensor::Delta));
    let heads = shape.batch * shape.q_heads;
    json!({
        "pairs": trace.visits.len() / heads,
        "row_visits": trace.visits.iter().map(|visit| visit.rows).sum::<usize>() / heads,
        "kv_bytes": (element * (trace.of(Tensor::K).reads + trace.of(Tensor::V).reads)) as u64,
        "statistics_bytes": (accumulator * (state.reads + delta.reads)) as u64,
        "dq_update_bytes": (accumulator * trace.adds()) as u64,
        "pipeline_bytes": bytes.sum::<u128>() as u64,
    })
}

pub(super) fn gradient_producers(inputs: &Value) -> Value {
    let (shape, blocks) = (many_heads(inputs), blocks(inputs));
    without_values(shape, aligned(inputs, shape), |call, d_o| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        let columns = fa2::backward(call, blocks, &saved, d_o).expect("a call").trace;
        let rows = row_owner::backward(call, blocks, &saved, d_o).expect("a call").trace;
        json!({
            "column_owner_dq": columns.producers_of(Tensor::Scratch, 0),
            "column_owner_dkv": columns.producers_of(Tensor::DK, 0),
            "row_owner_dkv": rows.producers_of(Tensor::Scratch, 0),
            "dq_updates": columns.adds() as u64,
        })
    })
}

pub(super) fn head_programs(inputs: &Value) -> Value {
    let (shape, blocks) = (many_heads(inputs), blocks(inputs));
    let trace = without_values(shape, full(shape), |call, _| {
        fa2::forward(call, blocks, Saved::Lse).expect("a call").trace
    });
    json!({"programs": trace.programs, "kv_tile_visits": trace.visits.len()})
}

pub(super) fn split_k_ledger(inputs: &Value) -> Value {
    let number = |name: &str| index(&inputs[name]);
    let (q_len, warps, width) = (number("q_block"), number("warps"), number("scalar_bytes"));
    let shape = Shape { q_len, kv_len: warps, value_dim: number("value_dim"), ..one_head(inputs) };
    let slices: Vec<_> = (0..warps).map(|warp| warp..warp + 1).collect();
    without_values(shape, full(shape), |call, _| {
        let [chain, tree] = [Join::Chain, Join::Tree]
            .map(|join| split_k(call, q_len, &slices, join).expect("a call").exchange);
        let bytes = |states: u128| (states * chain.state_words) as u64 * width as u64;
        json!({
            "state_values": chain.state_words as u64,
            "partial_states": chain.partial_states as u64,
            "merges": chain.merges as u64,
            "non_owner_bytes": bytes(chain.handed_states),
            "all_partials_bytes": bytes(chain.partial_states),
            "serial_depth": chain.depth as u64,
            "tree_depth": tree.depth as u64,
        })
    })
}

pub(super) fn warp_rows(inputs: &Value) -> Value {
    let (q_block, warps) = (index(&inputs["q_block"]), index(&inputs["warps"]));
    let rows: Vec<_> = (0..warps).map(|warp| rows_of_warp(q_block, warps, warp)).collect();
    json!({"rows_of_warp": rows})
}

pub(super) fn barriers(inputs: &Value) -> Value {
    let block = serde_json::from_value(inputs.clone()).expect("a loop");
    let uses = hazards::uses(&block);
    let historical = match block.v_in_registers {
        true => uses.clone(),
        false => hazards::without(&uses, Barrier::Epilogue),
    };
    assert!(hazards::races(&uses, block.v_in_registers).is_empty());
    json!({
        "race_free": hazards::barriers(&uses) as u64,
        "total": hazards::barriers(&historical) as u64,
    })
}
