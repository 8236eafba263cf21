//! Attention and its gradients: by the oracle, by tiles of the sizes given, and cell by cell.

use crate::backend::tiled_forward;
use crate::backend::{Backend, Grads, Outcome, backward, forward, tiled_backward};
use crate::bound::{max_difference, max_magnitude};
use crate::case::{Case, Sight, shape};
use crate::element::Real;
use crate::memory::{Arrangement, Owned};
use crate::reference::{attend, attend_with};
use ferroflash::cpu::tiled::CpuTile;
use ferroflash::{Align, Broadcast};
use serde_json::{Value, json};

use super::json::{compare, dims, index, nested, real, reals};

/// What f32 makes of inputs that it does not hold.
const INEXACT: f64 = 1e-6;

/// A tensor with zeros after its channels, up to a multiple of `multiple`.
fn tensor<T: Real>(value: &Value, multiple: usize) -> Owned<T> {
    let [rows, heads, channels] = dims(value);
    let contents: Vec<f32> =
        padded(value, multiple).into_iter().map(|value| value as f32).collect();
    let dims = [1, rows, heads, channels.next_multiple_of(multiple)];
    Owned::new(&contents, &dims, Arrangement::CONTIGUOUS)
}

/// The values of a tensor, zeros among them as [`tensor`] has them.
pub(super) fn padded(value: &Value, multiple: usize) -> Vec<f64> {
    let [_, _, channels] = dims(value);
    let zeros = vec![0.0; channels.next_multiple_of(multiple) - channels];
    let values = reals(value);
    values.chunks_exact(channels).flat_map(|row| [row, &zeros].concat()).collect()
}

fn case(inputs: &Value) -> Case<f32> {
    case_of(inputs, 1)
}

/// The call of an example, its channels padded to multiples of `multiple`, which changes none of
/// its numbers.
pub(super) fn case_of<T: Real>(inputs: &Value, multiple: usize) -> Case<T> {
    let [q_len, q_heads, head_dim] = dims(&inputs["q"]);
    let [kv_len, kv_heads, value_dim] = dims(&inputs["v"]);
    let channels = [head_dim, value_dim].map(|channels| channels.next_multiple_of(multiple));
    let shape = shape(1, (q_heads, kv_heads), (q_len, kv_len), (channels[0], channels[1]));
    let sight = match inputs["align"].as_str() {
        Some("top_left") => Sight { align: Align::TopLeft, ..Sight::BOTTOM_RIGHT },
        Some("bottom_right") => Sight::BOTTOM_RIGHT,
        _ => Sight::FULL,
    };
    let visible = reals(&inputs["visible"]);
    let mut case = Case::<T>::new(shape, sight, 1, 1.0).with_scale(real(&inputs["scale"]) as f32);
    if inputs["align"] == "custom" {
        let axes = Broadcast { batch: true, heads: true, rows: false };
        case = case.with_boolean_mask(axes, |[_, _, row, key]| visible[row * kv_len + key] == 1.0);
    } else {
        for (cell, visible) in visible.iter().enumerate() {
            let sees = sight.sees(cell / kv_len, cell % kv_len, q_len, kv_len);
            assert_eq!(sees, *visible == 1.0, "`visible` and `align` differ at cell {cell}");
        }
    }
    case.q = tensor(&inputs["q"], multiple);
    case.k = tensor(&inputs["k"], multiple);
    case.v = tensor(&inputs["v"], multiple);
    if inputs["d_o"].is_array() {
        case.d_o = tensor(&inputs["d_o"], multiple);
    }
    case
}

/// The case's tolerance, or what f32 inputs cost where it cannot hold them.
fn tolerance(example: &Value) -> f64 {
    let inputs = &example["inputs"];
    let is_exact = ["q", "k", "v", "d_o", "scale"].iter().all(|name| {
        let value = &inputs[*name];
        value.is_null() || reals(value).iter().all(|value| f64::from(*value as f32) == *value)
    });
    if is_exact { real(&example["tolerance"]) } else { INEXACT }
}

fn tile(inputs: &Value) -> Option<CpuTile> {
    let (q_rows, kv_columns) = (index(&inputs["q_block"]), index(&inputs["kv_block"]));
    Some(CpuTile { q_rows, kv_columns })
}

fn o_and_lse(case: &Case<f32>, outcome: &Outcome) -> Value {
    json!({
        "o": nested(&outcome.o, &case.o_dims[1..]),
        "lse": nested(&outcome.lse, &case.lse_dims[1..]),
    })
}

/// The tiled path in tiles of the case's sizes is the oracle within what f32 rounds.
fn assert_tiled_is_dense(case: &Case<f32>, exact: &Outcome, tile: Option<CpuTile>) {
    let (o, lse) = tiled_forward(case, tile).expect("a valid call");
    o.assert_written("o");
    lse.assert_written("lse");
    for (name, had, exact) in [("o", o.contents(), &exact.o), ("lse", lse.contents(), &exact.lse)] {
        let allowed = 2e-6 * max_magnitude(exact).max(1.0);
        let difference = max_difference(&had, exact);
        assert!(difference <= allowed, "{name} in tiles: off by {difference:e}");
    }
}

pub(super) fn attention(example: &Value) -> Value {
    let case = case(&example["inputs"]);
    let exact = forward(Backend::CpuDense, &case).expect("a valid call");
    let had = o_and_lse(&case, &exact);
    compare(example, &had, tolerance(example));
    assert_tiled_is_dense(&case, &exact, tile(&example["inputs"]));
    had
}

/// Query head h reads KV head h / group; h mod kv_heads is a different computation.
pub(super) fn head_map_parity(example: &Value) -> Value {
    let inputs = &example["inputs"];
    let right = case(inputs);
    let exact = forward(Backend::CpuDense, &right).expect("a valid call");
    let mut had = o_and_lse(&right, &exact);
    let s = *right.attention.shape();
    // Every head with a KV head of its own, taken by the wrong map.
    let sizes = shape(1, (s.q_heads, s.q_heads), (s.q_len, s.kv_len), (s.head_dim, s.value_dim));
    let mut wrong = Case::<f32>::new(sizes, right.sight, 1, 1.0).with_scale(right.scale);
    wrong.q = right.q.clone();
    let by_modulo = |own: &Owned<f32>, to: &mut Owned<f32>, channels: usize| {
        let own = own.contents();
        to.set(|at, _| {
            let (row, head) = (at / channels / s.q_heads, at / channels % s.q_heads);
            own[(row * s.kv_heads + head % s.kv_heads) * channels + at % channels] as f32
        });
    };
    by_modulo(&right.k, &mut wrong.k, s.head_dim);
    by_modulo(&right.v, &mut wrong.v, s.value_dim);
    let modulo = forward(Backend::CpuDense, &wrong).expect("a valid call");
    had["modulo_o"] = nested(&modulo.o, &right.o_dims[1..]);
    had["modulo_max_error"] = json!(max_difference(&modulo.o, &exact.o));
    compare(example, &had, tolerance(example));
    assert_tiled_is_dense(&right, &exact, tile(inputs));
    had
}

/// delta of each row, `⟨dO, o⟩`.
fn delta(case: &Case<f32>, outcome: &Outcome) -> Vec<f64> {
    let s = case.attention.shape();
    let d_o = case.d_o.contents();
    let of_row = |head: usize, row: usize| -> f64 {
        let at = (row * s.q_heads + head) * s.value_dim;
        (at..at + s.value_dim).map(|channel| d_o[channel] * outcome.o[channel]).sum()
    };
    (0..s.q_heads).flat_map(|head| (0..s.q_len).map(move |row| of_row(head, row))).collect()
}

fn gradients(case: &Case<f32>, outcome: &Outcome, grads: &Grads) -> Value {
    let mut had = o_and_lse(case, outcome);
    had["delta"] = nested(&delta(case, outcome), &case.lse_dims[1..]);
    had["dq"] = nested(&grads.dq, &case.q.dims()[1..]);
    had["dk"] = nested(&grads.dk, &case.k.dims()[1..]);
    had["dv"] = nested(&grads.dv, &case.v.dims()[1..]);
    had
}

pub(super) fn backward_pass(example: &Value) -> Value {
    let case = case(&example["inputs"]);
    let keep = &example["inputs"]["dropout_multiplier"];
    if !keep.is_null() {
        // A mask that is written out is none of the generator's: plain loops take it as it is.
        let (outcome, grads) = attend_with(&case, Some(&reals(keep)));
        let had = gradients(&case, &outcome, &grads);
        compare(example, &had, tolerance(example));
        return had;
    }
    let outcome = forward(Backend::CpuDense, &case).expect("a valid call");
    let grads = backward(Backend::CpuDense, &case).expect("a valid call");
    let had = gradients(&case, &outcome, &grads);
    compare(example, &had, tolerance(example));
    let (outcome, plain) = attend(&case);
    compare(example, &gradients(&case, &outcome, &plain), tolerance(example));
    assert_tiled_is_dense(&case, &outcome, tile(&example["inputs"]));
    let tiled = tiled_backward(&case, tile(&example["inputs"])).expect("a valid call");
    for (name, own, exact) in
        [("dq", &tiled.dq, &grads.dq), ("dk", &tiled.dk, &grads.dk), ("dv", &tiled.dv, &grads.dv)]
    {
        let difference = max_difference(own, exact);
        assert!(difference <= 5e-6, "{name} in tiles: off by {difference:e}");
        let zeros = own.iter().zip(exact).filter(|(_, exact)| **exact == 0.0);
        zeros.for_each(|(own, _)| assert!(own.abs() <= 1e-7, "{name} of what is not visible"));
    }
    had
}
