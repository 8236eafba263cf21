//! Cases that describe an algorithm, run by the ledger's executable schedules in binary64, or
//! without values where only words, visits and programs are asked for.

mod counts;

use ferroflash::Align;
use ferroflash_core::row_state::RowState;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::Visibility;
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::state::{Log, State, Tree};
use ferroflash_ledger::schedule::warps::{Join, Outcome, split_k, split_q};
use ferroflash_ledger::schedule::{Binary16, Blocks, Call, Real, fa1, fa2, row_owner};
use serde_json::{Value, json};

use super::json::{dims, index, index_rows, matrix, nested, of_real, real, reals};

/// What running the case gives, once a schedule that it describes; none for other kinds.
pub(super) fn run(kind: &str, inputs: &Value) -> Vec<Value> {
    match kind {
        "attention" => forwards(inputs),
        "backward" => backwards(inputs),
        "forward_words" => counts::forward_words(inputs),
        "backward_words" => vec![counts::backward_words(inputs)],
        "tile_visits" => vec![counts::tile_visits(inputs)],
        "paper_blocks" => vec![counts::paper_blocks(inputs)],
        "movement" => vec![counts::movement(inputs)],
        "tile_counts" => vec![counts::tile_counts(inputs)],
        "backward_stages" => vec![counts::backward_stages(inputs)],
        "materialized" => counts::materialized(inputs),
        "softmax_accesses" => vec![counts::softmax_accesses(inputs)],
        "backward_grids" => vec![counts::backward_grids(inputs)],
        "scratch" => vec![counts::scratch(inputs)],
        "row_work" => vec![counts::row_work(inputs)],
        "gradient_producers" => vec![counts::gradient_producers(inputs)],
        "head_programs" => vec![counts::head_programs(inputs)],
        "split_k_ledger" => vec![counts::split_k_ledger(inputs)],
        "split_k" => split_keys(inputs),
        "merge" => merges(inputs),
        "lse_merge" => log_merges(inputs),
        "rounded_merge" => vec![rounded_merge(inputs)],
        "rounded_sum" => vec![rounded_sum(inputs)],
        "lost_update" => vec![lost_update(inputs)],
        "warp_rows" => vec![counts::warp_rows(inputs)],
        "barriers" => vec![counts::barriers(inputs)],
        _ => Vec::new(),
    }
}

fn visibility(inputs: &Value) -> Visibility {
    let [q_len, kv_len] = [dims(&inputs["q"])[0], dims(&inputs["k"])[0]].map(|len| len as u32);
    let visible = reals(&inputs["visible"]);
    let all = [
        Visibility::full(q_len, kv_len),
        Visibility::causal(q_len, kv_len, Align::TopLeft),
        Visibility::causal(q_len, kv_len, Align::BottomRight),
    ];
    let fits = |mask: &Visibility| {
        let cells = (0..q_len).flat_map(|row| (0..kv_len).map(move |key| (row, key)));
        cells.zip(&visible).all(|((row, key), cell)| mask.sees(row, key) == (*cell == 1.0))
    };
    all.into_iter().find(fits).expect("`visible` is no mask by position")
}

/// `[position][head][component]` as `[head, position, component]`.
fn by_head(value: &Value) -> Vec<f64> {
    let [rows, heads, channels] = dims(value);
    let values = reals(value);
    let of = |head: usize, row: usize| {
        let at = (row * heads + head) * channels;
        values[at..at + channels].to_vec()
    };
    (0..heads).flat_map(|head| (0..rows).flat_map(move |row| of(head, row))).collect()
}

/// The other way.
fn by_position(values: &[f64], [heads, rows, channels]: [usize; 3]) -> Value {
    let of = |row: usize, head: usize| {
        let at = (head * rows + row) * channels;
        nested(&values[at..at + channels], &[channels])
    };
    (0..rows).map(|row| (0..heads).map(|head| of(row, head)).collect::<Value>()).collect()
}

fn blocks(inputs: &Value) -> Blocks {
    Blocks { q_block: index(&inputs["q_block"]), kv_block: index(&inputs["kv_block"]) }
}

fn shape_of(inputs: &Value) -> Shape {
    let [q_len, q_heads, head_dim] = dims(&inputs["q"]);
    let [kv_len, kv_heads, value_dim] = dims(&inputs["v"]);
    Shape { batch: 1, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

/// Runs `test` on the case's call.
fn with_call<R>(inputs: &Value, test: impl FnOnce(&Call<'_, f64>, Blocks) -> R) -> R {
    let [q, k, v] = ["q", "k", "v"].map(|name| by_head(&inputs[name]));
    let shape = shape_of(inputs);
    let scale = real(&inputs["scale"]);
    let call = Call::new(shape, visibility(inputs), scale, &q, &k, &v).expect("a call");
    let keep = &inputs["dropout_multiplier"];
    if keep.is_null() {
        return test(&call, blocks(inputs));
    }
    let keep = reals(keep);
    let multiplier =
        |head: usize, row: usize, key: usize| keep[(head * shape.q_len + row) * shape.kv_len + key];
    test(&call.with_dropout(&multiplier), blocks(inputs))
}

fn o_and_lse(shape: Shape, o: &[f64], lse: &[f64]) -> Value {
    let o = by_position(o, [shape.q_heads, shape.q_len, shape.value_dim]);
    json!({"o": o, "lse": nested(lse, &[shape.q_heads, shape.q_len])})
}

fn forwards(inputs: &Value) -> Vec<Value> {
    let s = shape_of(inputs);
    with_call(inputs, |call, blocks| {
        let first = fa1::forward(call, blocks).expect("a call");
        let lse: Vec<f64> = first.states.iter().map(|state| f64::lse(*state)).collect();
        let second = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        let by_rows = split_q(call, blocks.q_block, blocks.kv_block, 2).expect("a call");
        let halves = [0..s.kv_len / 2, s.kv_len / 2..s.kv_len];
        let by_keys = split_k(call, blocks.q_block, &halves, Join::Tree).expect("a call");
        vec![
            o_and_lse(s, &first.o, &lse),
            o_and_lse(s, &second.o, &second.lse),
            o_and_lse(s, &by_rows.o, &by_rows.lse),
            o_and_lse(s, &by_keys.o, &by_keys.lse),
        ]
    })
}

fn backwards(inputs: &Value) -> Vec<Value> {
    let s = shape_of(inputs);
    let d_o = by_head(&inputs["d_o"]);
    let mut all = forwards(inputs);
    let gradients = |had: &fa1::Backward<f64>| {
        json!({
            "dq": by_position(&had.dq, [s.q_heads, s.q_len, s.head_dim]),
            "dk": by_position(&had.dk, [s.kv_heads, s.kv_len, s.head_dim]),
            "dv": by_position(&had.dv, [s.kv_heads, s.kv_len, s.value_dim]),
        })
    };
    with_call(inputs, |call, blocks| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a call");
        let columns = fa2::backward(call, blocks, &saved, &d_o).expect("a call");
        let rows = row_owner::backward(call, blocks, &saved, &d_o).expect("a call");
        all.extend([gradients(&columns), gradients(&rows)]);
        if s.q_heads == s.kv_heads {
            let saved = fa1::forward(call, blocks).expect("a call");
            let first = fa1::backward(call, blocks, &saved, &d_o).expect("a call");
            all.push(gradients(&first));
        }
    });
    all
}

/// Scores as they stand: queries are the rows of scores, keys the rows of the identity. Keys that
/// are masked are the last ones.
fn split_keys(inputs: &Value) -> Vec<Value> {
    let scores = matrix(&inputs["scores"]);
    let values = matrix(&inputs["values"]);
    let (q_len, kv_len, value_dim) = (scores.len(), values.len(), values[0].len());
    let seen = scores[0].iter().filter(|score| score.is_finite()).count();
    let in_order = |row: &Vec<f64>| row.iter().zip(0..).all(|(s, at)| s.is_finite() == (at < seen));
    assert!(scores.iter().all(in_order), "every row sees the same first keys");
    let shape =
        Shape { batch: 1, q_heads: 1, kv_heads: 1, q_len, kv_len, head_dim: kv_len, value_dim };
    let q: Vec<f64> =
        scores.concat().iter().map(|s| if s.is_finite() { *s } else { 0.0 }).collect();
    let k: Vec<f64> =
        (0..kv_len * kv_len).map(|at| if at / kv_len == at % kv_len { 1.0 } else { 0.0 }).collect();
    let v = values.concat();
    let slices: Vec<_> = index_rows(&inputs["slices"])
        .iter()
        .map(|keys| keys[0]..keys[keys.len() - 1] + 1)
        .collect();
    // Row by row: a row alone sees the first keys, as many as `seen`.
    let first_keys =
        Visibility { offset: seen as i32 - 1, right: 0, ..Visibility::full(1, kv_len as u32) };
    let rows: Vec<[Outcome<f64>; 2]> = (0..q_len)
        .map(|row| {
            let shape = Shape { q_len: 1, ..shape };
            let q = &q[row * kv_len..(row + 1) * kv_len];
            let call = Call::new(shape, first_keys, 1.0, q, &k, &v).expect("a call");
            [Join::Chain, Join::Tree].map(|join| split_k(&call, 1, &slices, join).expect("a call"))
        })
        .collect();
    (0..2)
        .map(|join| {
            let depth = if join == 0 { "serial_depth" } else { "tree_depth" };
            let exchange = &rows[0][join].exchange;
            json!({
                "o": rows.iter().map(|row| row[join].o.clone()).collect::<Vec<_>>(),
                "lse": rows.iter().map(|row| of_real(row[join].lse[0])).collect::<Vec<_>>(),
                "producers_per_row": exchange.producers[0],
                "merges_per_row": exchange.merges as u64,
                depth: exchange.depth as u64,
            })
        })
        .collect()
}

fn tree(value: &Value) -> Tree {
    match value.as_array() {
        None => Tree::Leaf(index(value)),
        Some(pair) => Tree::Join(Box::new(tree(&pair[0])), Box::new(tree(&pair[1]))),
    }
}

fn trees(inputs: &Value) -> impl Iterator<Item = Tree> {
    inputs["trees"].as_array().expect("trees").iter().map(tree)
}

fn merges(inputs: &Value) -> Vec<Value> {
    let state = |state: &Value| State {
        row: RowState { row_max: real(&state["m"]), row_sum: real(&state["l"]) },
        numerator: reals(&state["u"]),
    };
    let states: Vec<State<f64>> =
        inputs["states"].as_array().expect("states").iter().map(state).collect();
    let by_tree = trees(inputs).map(|tree| tree.merge(&states).expect("a tree"));
    let mut all: Vec<Value> =
        by_tree.map(|whole| json!({"o": whole.output(), "lse": of_real(whole.lse())})).collect();
    let parts = states.iter().map(State::normalized);
    let whole = parts.reduce(|whole, part| whole.merge(&part)).expect("a state");
    all.push(json!({"o": whole.output, "lse": of_real(f64::lse(whole.row))}));
    all
}

fn log_merges(inputs: &Value) -> Vec<Value> {
    let parts = inputs["parts"].as_array().expect("parts").iter();
    let parts = parts.map(|part| Log { lse: real(&part["lse"]), output: reals(&part["o"]) });
    let whole = parts.reduce(|whole, part| whole.merge(&part)).expect("a part");
    vec![json!({"o": whole.output, "lse": of_real(whole.lse)})]
}

/// One state a key, all of score 0, by whole state merges in the format.
fn rounded_merge(inputs: &Value) -> Value {
    fn output<F: Real>(inputs: &Value) -> f64 {
        let value = |value: f64| State::key(F::ZERO, &[F::from_f64(value)]);
        let states: Vec<State<F>> = reals(&inputs["values"]).into_iter().map(value).collect();
        tree(&inputs["tree"]).merge(&states).expect("a tree").output()[0].to_f64()
    }
    json!({"output": match inputs["format"].as_str() {
        Some("binary16") => output::<Binary16>(inputs),
        Some("binary32") => output::<f32>(inputs),
        _ => output::<f64>(inputs),
    }})
}

fn rounded_sum(inputs: &Value) -> Value {
    fn sum<F: Real>(inputs: &Value) -> f64 {
        let terms: Vec<F> = reals(&inputs["terms"]).into_iter().map(F::from_f64).collect();
        tree(&inputs["tree"]).sum(&terms).expect("a tree").to_f64()
    }
    json!({"sum": match inputs["format"].as_str() {
        Some("binary16") => sum::<Binary16>(inputs),
        Some("binary32") => sum::<f32>(inputs),
        _ => sum::<f64>(inputs),
    }})
}

/// Every program reads before any of them stores.
fn lost_update(inputs: &Value) -> Value {
    let mut memory = real(&inputs["initial"]);
    let contributions = reals(&inputs["contributions"]);
    let read: Vec<f64> = contributions.iter().map(|_| memory).collect();
    for (read, contribution) in read.iter().zip(&contributions) {
        memory = read + contribution;
    }
    json!({"last_store": memory})
}
