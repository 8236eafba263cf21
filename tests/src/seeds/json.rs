//! Reading a fixture, and comparing what was computed with it.

use serde_json::{Value, json};

/// A real: a number, or `"-inf"`, `"inf"`, `"nan"`.
pub(super) fn real(value: &Value) -> f64 {
    match value {
        Value::String(text) => text.parse().expect("-inf, inf or nan"),
        value => value.as_f64().unwrap_or_else(|| panic!("{value} is no number")),
    }
}

/// The other way.
pub(super) fn of_real(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}

pub(super) fn of_reals(values: &[f64]) -> Value {
    values.iter().map(|value| of_real(*value)).collect()
}

/// Every real of nested arrays, in order.
pub(super) fn reals(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(reals).collect(),
        value => vec![real(value)],
    }
}

/// Rows of reals.
pub(super) fn matrix(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().expect("rows").iter().map(reals).collect()
}

/// Rows of integers.
pub(super) fn index_rows(value: &Value) -> Vec<Vec<usize>> {
    let rows = value.as_array().expect("rows").iter();
    rows.map(|row| row.as_array().expect("a row").iter().map(index).collect()).collect()
}

pub(super) fn index(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count")) as usize
}

/// Sizes of three nested arrays.
pub(super) fn dims(value: &Value) -> [usize; 3] {
    let len = |value: &Value| value.as_array().map_or(0, Vec::len);
    [len(value), len(&value[0]), len(&value[0][0])]
}

/// Values of a `dims` tensor, nested.
pub(super) fn nested(values: &[f64], dims: &[usize]) -> Value {
    let Some((&first, inner)) = dims.split_first() else { return of_real(values[0]) };
    let step: usize = inner.iter().product();
    (0..first).map(|part| nested(&values[part * step..(part + 1) * step], inner)).collect()
}

/// Whether two values are alike: reals within `tolerance`, all else equal.
pub(super) fn alike(had: &Value, expected: &Value, tolerance: f64) -> bool {
    match (had, expected) {
        (Value::Array(had), Value::Array(expected)) => {
            had.len() == expected.len()
                && had.iter().zip(expected).all(|(had, expected)| alike(had, expected, tolerance))
        }
        (Value::Object(had), Value::Object(expected)) => expected
            .iter()
            .all(|(key, expected)| had.get(key).is_some_and(|had| alike(had, expected, tolerance))),
        (Value::Number(_), Value::Number(_)) => {
            let (had, expected) = (real(had), real(expected));
            (had - expected).abs() <= tolerance
        }
        _ => had == expected,
    }
}

/// Panics unless `had` has every expected key, alike, agrees with what the document prints where
/// that is right and with none of it where it is wrong, and keeps the relations that are stated.
pub(super) fn compare(case: &Value, had: &Value, tolerance: f64) {
    let expected = case["expected"].as_object().expect("expected is an object");
    for (key, expected) in expected {
        let own = had.get(key).unwrap_or_else(|| panic!("{key} was not computed"));
        assert!(alike(own, expected, tolerance), "{key}: {own}, expected {expected}");
    }
    for printed in case["printed"].as_array().into_iter().flatten() {
        let Some(at) = printed["at"].as_str() else { continue };
        let own = at_pointer(had, at);
        let allowed = real(&printed["tolerance"]) + tolerance;
        let agrees = alike(own, &printed["value"], allowed);
        let stated = printed["agrees"].as_bool().expect("agrees is stated");
        assert_eq!(agrees, stated, "{at}: {own}, and the document prints {}", printed["value"]);
    }
    for relation in case["relations"].as_array().into_iter().flatten() {
        assert_relation(had, relation, tolerance);
    }
}

/// `[left, is, right]`, the outer two pointers into what was computed.
fn assert_relation(had: &Value, relation: &Value, tolerance: f64) {
    let part = |index: usize| relation[index].as_str().expect("a relation is of three strings");
    let (left, right) = (at_pointer(had, part(0)), at_pointer(had, part(2)));
    let holds = match part(1) {
        "equal" => alike(left, right, tolerance),
        "unequal" => !alike(left, right, tolerance),
        "less" => real(left) < real(right),
        unknown => panic!("there is no relation {unknown}"),
    };
    assert!(holds, "{}: {left}, {}: {right}, not {}", part(0), part(2), part(1));
}

fn at_pointer<'a>(had: &'a Value, at: &str) -> &'a Value {
    had.pointer(at).unwrap_or_else(|| panic!("there is nothing at {at}"))
}

/// Panics unless what a schedule gave is alike wherever the case expects something of that name,
/// which it must do at least once.
pub(super) fn compare_run(case: &Value, run: &Value, tolerance: f64) {
    assert!(compared(run, &case["expected"], tolerance) > 0, "nothing to compare a run with");
}

/// How many results were compared, one name after another.
fn compared(run: &Value, expected: &Value, tolerance: f64) -> usize {
    let of = |(key, had): (&String, &Value)| match &expected[key] {
        Value::Null => 0,
        expected if had.is_object() => compared(had, expected, tolerance),
        expected => {
            assert!(alike(had, expected, tolerance), "{key} by running: {had}, not {expected}");
            1
        }
    };
    run.as_object().expect("results by key").iter().map(of).sum()
}
