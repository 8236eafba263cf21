//! The worked examples of the seed documents (fixtures/seeds): attention and its gradients.

use std::path::Path;

use serde_json::Value;

use super::assert_close;
use super::case::{Case, shape};
use crate::attention::{Align, Attention, Broadcast, Mask, Scale};

fn number(value: &Value) -> f64 {
    match value {
        Value::String(text) => text.parse().expect("-inf, inf or nan"),
        value => value.as_f64().expect("a number"),
    }
}

/// Every number of nested arrays, in order.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        value => vec![number(value)],
    }
}

fn dims(value: &Value) -> [usize; 3] {
    let len = |value: &Value| value.as_array().map_or(0, Vec::len);
    [len(value), len(&value[0]), len(&value[0][0])]
}

fn tensor(value: &Value) -> Vec<f32> {
    numbers(value).into_iter().map(|value| value as f32).collect()
}

fn case(inputs: &Value) -> Case {
    let [q_len, q_heads, head_dim] = dims(&inputs["q"]);
    let [kv_len, kv_heads, value_dim] = dims(&inputs["v"]);
    let shape = shape(1, (q_heads, kv_heads), (q_len, kv_len), (head_dim, value_dim));
    let attention = Attention::new(shape).scale(Scale::Factor(number(&inputs["scale"]) as f32));
    let every_head = Broadcast { batch: true, heads: true, rows: false };
    let attention = match inputs["align"].as_str() {
        Some("top_left") => attention.mask(Mask::causal(Align::TopLeft)),
        Some("bottom_right") => attention.mask(Mask::causal(Align::BottomRight)),
        Some("custom") => attention.boolean_mask(every_head),
        _ => attention,
    };
    let mut case = Case::new(attention);
    (case.q, case.k, case.v) = (tensor(&inputs["q"]), tensor(&inputs["k"]), tensor(&inputs["v"]));
    if let Some(mask) = &mut case.boolean_mask {
        *mask = numbers(&inputs["visible"]).into_iter().map(|seen| seen as u8).collect();
    }
    if !inputs["d_o"].is_null() {
        case.d_o = tensor(&inputs["d_o"]);
    }
    case
}

/// Whether f32 holds every input exactly; if not, the result is that of nearby inputs.
fn is_exact(inputs: &Value) -> bool {
    let exact = |name: &str| {
        let value = &inputs[name];
        value.is_null() || numbers(value).iter().all(|value| f64::from(*value as f32) == *value)
    };
    ["q", "k", "v", "d_o", "scale"].into_iter().all(exact)
}

#[test]
fn worked_examples_of_the_seeds() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/seeds");
    let mut ran = 0;
    for topic in ["attention", "backward", "head-map"] {
        let text = std::fs::read_to_string(directory.join(format!("{topic}.json")));
        let fixture: Value = serde_json::from_str(&text.expect("readable")).expect("JSON");
        for example in fixture["cases"].as_array().expect("cases") {
            let kind = example["kind"].as_str().unwrap_or_default();
            let (inputs, expected) = (&example["inputs"], &example["expected"]);
            // A dropout mask written out is no mask of the generator's.
            if !matches!(kind, "attention" | "backward" | "head_map_parity")
                || inputs["dropout_multiplier"].is_array()
            {
                continue;
            }
            let tolerance = if is_exact(inputs) { number(&example["tolerance"]) } else { 1e-6 };
            let id = example["id"].as_str().unwrap_or_default();
            let case = case(inputs);
            let result = case.forward();
            let check = |name: &str, actual: &[f64]| {
                let what = format!("{id} {name}");
                assert_close(actual, &numbers(&expected[name]), tolerance, &what);
            };
            check("o", &result.o);
            check("lse", &result.lse);
            if kind == "backward" {
                let gradients = case.backward();
                check("dq", &gradients.dq);
                check("dk", &gradients.dk);
                check("dv", &gradients.dv);
            }
            ran += 1;
        }
    }
    assert!(ran >= 14, "only {ran} examples were found");
}
