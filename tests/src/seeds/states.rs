//! Row states, their merges and their rounding.

use ferroflash_core::row_state::RowState;
use half::f16;
use serde_json::{Value, json};

use super::json::{index_rows, matrix, of_real, of_reals, real, reals};

/// A row state with its numerator and the visible keys in it.
#[derive(Clone)]
struct State {
    row: RowState<f64>,
    numerator: Vec<f64>,
    keys: usize,
}

impl State {
    fn empty(width: usize) -> Self {
        Self { row: RowState::<f64>::EMPTY, numerator: vec![0.0; width], keys: 0 }
    }

    /// The state of one key.
    fn key(score: f64, value: &[f64]) -> Self {
        if score == f64::NEG_INFINITY {
            return Self::empty(value.len());
        }
        let row = RowState { row_max: score, row_sum: 1.0 };
        Self { row, numerator: value.to_vec(), keys: 1 }
    }

    fn of(scores: &[f64], values: &[Vec<f64>], keys: &[usize]) -> Self {
        let width = values.first().map_or(0, Vec::len);
        let states = keys.iter().map(|key| Self::key(scores[*key], &values[*key]));
        states.fold(Self::empty(width), |sum, key| sum.merge(&key).0)
    }

    /// The merged state, and the two factors (none where a side is empty).
    fn merge(&self, other: &Self) -> (Self, Option<[f64; 2]>) {
        let (row, rescale) = self.row.merge(other.row, f64::exp);
        let pairs = self.numerator.iter().zip(&other.numerator);
        let numerator = pairs.map(|(a, b)| a * rescale.left + b * rescale.right).collect();
        let factors = (self.keys > 0 && other.keys > 0).then_some([rescale.left, rescale.right]);
        (Self { row, numerator, keys: self.keys + other.keys }, factors)
    }

    fn o(&self) -> Vec<f64> {
        self.numerator.iter().map(|value| value * self.row.normalizer()).collect()
    }

    fn lse(&self) -> f64 {
        self.row.lse(f64::ln)
    }

    /// The share of `part` in this state.
    fn mass(&self, part: &Self) -> f64 {
        if part.keys == 0 { 0.0 } else { (part.lse() - self.lse()).exp() }
    }

    fn json(&self) -> Value {
        json!({
            "m": of_real(self.row.row_max), "l": self.row.row_sum, "u": self.numerator,
            "n": self.keys,
        })
    }
}

fn merge_all(states: &[State], width: usize) -> State {
    states.iter().fold(State::empty(width), |sum, state| sum.merge(state).0)
}

/// The states joined along a tree of their numbers.
fn along(tree: &Value, states: &[State]) -> State {
    match tree.as_array() {
        None => states[super::json::index(tree)].clone(),
        Some(pair) => along(&pair[0], states).merge(&along(&pair[1], states)).0,
    }
}

fn blocks(inputs: &Value) -> (Vec<State>, State) {
    let (scores, values) = (reals(&inputs["scores"]), matrix(&inputs["values"]));
    let width = values.first().map_or(0, Vec::len);
    let blocks: Vec<State> = index_rows(&inputs["blocks"])
        .iter()
        .map(|keys| State::of(&scores, &values, keys))
        .collect();
    let whole = merge_all(&blocks, width);
    (blocks, whole)
}

pub(super) fn row_state(inputs: &Value) -> Value {
    let (blocks, whole) = blocks(inputs);
    let mut prefixes: Vec<Value> = Vec::new();
    let mut rescales: Vec<Value> = Vec::new();
    let mut running = State::empty(whole.numerator.len());
    for block in &blocks {
        let (merged, factors) = running.merge(block);
        running = merged;
        prefixes.push(running.json());
        rescales.push(match factors {
            None => json!({"alpha": null, "beta": null}),
            Some([alpha, beta]) => json!({"alpha": alpha, "beta": beta}),
        });
    }
    json!({
        "block_states": blocks.iter().map(State::json).collect::<Vec<_>>(),
        "prefix_states": prefixes,
        "rescales": rescales,
        "o": running.o(),
        "lse": of_real(running.lse()),
        "masses": blocks.iter().map(|block| whole.mass(block)).collect::<Vec<_>>(),
    })
}

pub(super) fn local_normalization(inputs: &Value) -> Value {
    let (blocks, whole) = blocks(inputs);
    let local: Vec<Vec<f64>> = blocks.iter().map(State::o).collect();
    let sum: Vec<f64> =
        (0..whole.numerator.len()).map(|c| local.iter().map(|o| o[c]).sum()).collect();
    let mean: Vec<f64> = sum.iter().map(|sum| sum / local.len() as f64).collect();
    json!({
        "o": whole.o(),
        "masses": blocks.iter().map(|block| whole.mass(block)).collect::<Vec<_>>(),
        "local_o": local, "local_sum": sum, "local_mean": mean,
    })
}

pub(super) fn softmax_row(inputs: &Value) -> Value {
    let scores = reals(&inputs["scores"]);
    let undefined = |row: &str| {
        json!({
            "row": row, "m": null, "l": null, "lse": null, "p": null, "unshifted_finite": null,
        })
    };
    if scores.is_empty() {
        return undefined("empty");
    }
    if scores.iter().any(|score| score.is_nan() || *score == f64::INFINITY) {
        return undefined("exceptional");
    }
    let states: Vec<State> = scores.iter().map(|score| State::key(*score, &[])).collect();
    let State { row, keys, .. } = merge_all(&states, 0);
    let p: Vec<f64> = scores
        .iter()
        .map(|score| if keys == 0 { 0.0 } else { (score - row.row_max).exp() * row.normalizer() })
        .collect();
    let unshifted: f64 = scores.iter().map(|score| score.exp()).sum();
    json!({
        "row": if keys == 0 { "all_masked" } else { "finite" },
        "m": of_real(row.row_max), "l": row.row_sum, "lse": of_real(row.lse(f64::ln)),
        "p": p,
        "unshifted_finite": (keys > 0).then_some(unshifted.is_finite() && unshifted > 0.0),
    })
}

/// The row by [`RowState`], and the sum that the fault makes.
pub(super) fn denominator_fault(inputs: &Value) -> Value {
    let scores = reals(&inputs["scores"]);
    let states: Vec<State> = scores.iter().map(|score| State::key(*score, &[])).collect();
    let row = merge_all(&states, 0).row;
    let (start, rescales) = match inputs["fault"].as_str() {
        Some("stale_denominator") => ((f64::NEG_INFINITY, 0.0, 0), false),
        Some("first_key_lost") => ((scores[0], 0.0, 1), true),
        Some("finite_sentinel") => ((-1000.0, 0.0, 0), true),
        other => panic!("unknown fault {other:?}"),
    };
    let (mut m, mut l, first): (f64, f64, usize) = start;
    for score in &scores[first..] {
        let raised = m.max(*score);
        let factor = if rescales { (m - raised).exp() } else { 1.0 };
        l = l * factor + (score - raised).exp();
        m = raised;
    }
    json!({"m": row.row_max, "l": row.row_sum, "faulty_m": m, "faulty_l": l})
}

/// Every tree gives the same: the first one's result, once the others were compared with it.
fn every_tree(inputs: &Value, states: &[State], tolerance: f64) -> State {
    let trees = inputs["trees"].as_array().expect("trees");
    let first = along(&trees[0], states);
    for tree in trees {
        let other = along(tree, states);
        assert!(super::json::alike(&other.json(), &first.json(), tolerance), "tree {tree}");
    }
    first
}

pub(super) fn merge(inputs: &Value) -> Value {
    let state = |state: &Value| State {
        row: RowState { row_max: real(&state["m"]), row_sum: real(&state["l"]) },
        numerator: reals(&state["u"]),
        keys: super::json::index(&state["n"]),
    };
    let states: Vec<State> =
        inputs["states"].as_array().expect("states").iter().map(state).collect();
    let whole = every_tree(inputs, &states, 1e-12);
    json!({
        "state": whole.json(), "o": whole.o(), "lse": of_real(whole.lse()),
        "masses": states.iter().map(|part| whole.mass(part)).collect::<Vec<_>>(),
    })
}

/// A part (lse, o) is the state (m = lse, l = 1, u = o).
pub(super) fn lse_merge(inputs: &Value) -> Value {
    let part = |part: &Value| State::key(real(&part["lse"]), &reals(&part["o"]));
    let states: Vec<State> = inputs["parts"].as_array().expect("parts").iter().map(part).collect();
    let whole = every_tree(inputs, &states, 1e-12);
    json!({
        "lse": of_real(whole.lse()), "o": whole.o(),
        "masses": states.iter().map(|part| whole.mass(part)).collect::<Vec<_>>(),
    })
}

pub(super) fn overlap(inputs: &Value) -> Value {
    let (scores, values) = (reals(&inputs["scores"]), matrix(&inputs["values"]));
    let keys: Vec<usize> = (0..scores.len()).collect();
    let (_, merged) = blocks(inputs);
    let row = State::of(&scores, &values, &keys);
    json!({
        "merged": merged.json(), "row": row.json(),
        "merged_o": merged.o(), "row_o": row.o(),
    })
}

fn rounding(format: &Value) -> fn(f64) -> f64 {
    match format.as_str() {
        Some("binary16") => |value| f16::from_f64(value).to_f64(),
        Some("binary32") => |value| f64::from(value as f32),
        Some("binary64") => |value| value,
        other => panic!("unknown format {other:?}"),
    }
}

/// A sum along a tree, rounded at every step.
fn rounded(tree: &Value, terms: &[f64], round: fn(f64) -> f64) -> f64 {
    match tree.as_array() {
        None => round(terms[super::json::index(tree)]),
        Some(pair) => round(rounded(&pair[0], terms, round) + rounded(&pair[1], terms, round)),
    }
}

/// Scores are equal, so that states merge by plain sums of u and of l.
pub(super) fn rounded_merge(inputs: &Value) -> Value {
    let values = reals(&inputs["values"]);
    let (round, ones) = (rounding(&inputs["format"]), vec![1.0; values.len()]);
    let numerator = rounded(&inputs["tree"], &values, round);
    let row_sum = rounded(&inputs["tree"], &ones, round);
    let exact = values.iter().sum::<f64>() / values.len() as f64;
    json!({"output": round(numerator / row_sum), "exact": exact})
}

pub(super) fn rounded_sum(inputs: &Value) -> Value {
    let round = rounding(&inputs["format"]);
    json!({"sum": rounded(&inputs["tree"], &reals(&inputs["terms"]), round)})
}

/// Producers that each see a slice of the keys, joined in a chain and in a balanced tree.
pub(super) fn split_k(inputs: &Value) -> Value {
    let values = matrix(&inputs["values"]);
    let slices = index_rows(&inputs["slices"]);
    let width = values[0].len();
    let rows: Vec<Vec<State>> = matrix(&inputs["scores"])
        .iter()
        .map(|scores| slices.iter().map(|keys| State::of(scores, &values, keys)).collect())
        .collect();
    let (mut worst, mut depths) = (0.0_f64, (0, 0));
    let (mut o, mut lse, mut masses, mut locals, mut means) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for parts in &rows {
        let whole = merge_all(parts, width);
        let (joined, tree_depth) = balanced(parts);
        assert!(super::json::alike(&joined.json(), &whole.json(), 1e-12), "a tree differs");
        depths = (parts.len() - 1, tree_depth);
        let local: Vec<Vec<f64>> = parts.iter().map(State::o).collect();
        let mean: Vec<f64> = (0..width)
            .map(|c| local.iter().map(|o| o[c]).sum::<f64>() / parts.len() as f64)
            .collect();
        let errors = mean.iter().zip(whole.o()).map(|(mean, o)| (mean - o).abs());
        worst = errors.fold(worst, f64::max);
        masses.push(of_reals(&parts.iter().map(|part| whole.mass(part)).collect::<Vec<_>>()));
        o.push(whole.o());
        lse.push(of_real(whole.lse()));
        locals.push(local);
        means.push(mean);
    }
    json!({
        "o": o, "lse": lse, "masses": masses, "local_o": locals, "local_mean": means,
        "local_mean_max_error": worst,
        "producers_per_row": slices.len(), "merges_per_row": slices.len() - 1,
        "serial_depth": depths.0, "tree_depth": depths.1,
    })
}

/// The states joined by halves, and the levels of the tree.
fn balanced(states: &[State]) -> (State, usize) {
    if let [state] = states {
        return (state.clone(), 0);
    }
    let (left, right) = states.split_at(states.len() / 2);
    let ((left, left_depth), (right, right_depth)) = (balanced(left), balanced(right));
    (left.merge(&right).0, left_depth.max(right_depth) + 1)
}

/// Contributors that each read the start and store: the last store is all that is left.
pub(super) fn lost_update(inputs: &Value) -> Value {
    let initial = real(&inputs["initial"]);
    let contributions = reals(&inputs["contributions"]);
    let sum = contributions.iter().fold(initial, |sum, term| sum + term);
    let last = initial + contributions.last().expect("a contribution");
    json!({"sum": sum, "last_store": last, "abs_error": (sum - last).abs()})
}
