//! Reading a fixture, and comparing what was computed with it.

use std::path::Path;

use serde_json::{Value, json};

/// Every case of every file under `fixtures/seeds`.
pub(crate) fn cases() -> Vec<Value> {
    let fixtures = std::env::var_os("FERROFLASH_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures"),
        |folder| Path::new(&folder).to_owned(),
    );
    let folder = std::fs::read_dir(fixtures.join("seeds")).expect("fixtures/seeds is a folder");
    let mut files: Vec<_> = folder.map(|entry| entry.expect("a readable folder").path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a readable fixture");
        let fixture: Value = serde_json::from_str(&text).expect("a fixture is JSON");
        assert_eq!(fixture["schema"], "ferroflash.seed-fixture.v1", "{}", file.display());
        all.extend(fixture["cases"].as_array().expect("cases").clone());
    }
    all
}

/// A real: a number, or `"-inf"`, `"inf"`, `"nan"`.
pub(crate) fn real(value: &Value) -> f64 {
    match value {
        Value::String(text) => text.parse().expect("-inf, inf or nan"),
        value => value.as_f64().unwrap_or_else(|| panic!("{value} is no number")),
    }
}

/// The other way.
pub(crate) fn of_real(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}

pub(crate) fn of_reals(values: &[f64]) -> Value {
    values.iter().map(|value| of_real(*value)).collect()
}

/// Every real of nested arrays, in order.
pub(crate) fn reals(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(reals).collect(),
        value => vec![real(value)],
    }
}

/// Rows of reals.
pub(crate) fn matrix(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().expect("rows").iter().map(reals).collect()
}

/// Rows of integers.
pub(crate) fn index_rows(value: &Value) -> Vec<Vec<usize>> {
    let rows = value.as_array().expect("rows").iter();
    rows.map(|row| row.as_array().expect("a row").iter().map(index).collect()).collect()
}

pub(crate) fn index(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count")) as usize
}

/// Sizes of three nested arrays.
pub(crate) fn dims(value: &Value) -> [usize; 3] {
    let len = |value: &Value| value.as_array().map_or(0, Vec::len);
    [len(value), len(&value[0]), len(&value[0][0])]
}

/// Values of a `dims` tensor, nested.
pub(crate) fn nested(values: &[f64], dims: &[usize]) -> Value {
    let Some((&first, inner)) = dims.split_first() else { return of_real(values[0]) };
    let step: usize = inner.iter().product();
    (0..first).map(|part| nested(&values[part * step..(part + 1) * step], inner)).collect()
}

/// Whether two values are alike: reals within `tolerance`, all else equal.
pub(crate) fn alike(had: &Value, expected: &Value, tolerance: f64) -> bool {
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

/// Panics unless `had` has every expected key, alike, and agrees with what the document prints
/// where that is right, and with none of it where it is wrong.
pub(crate) fn compare(case: &Value, had: &Value, omitted: &[&str], tolerance: f64) {
    let expected = case["expected"].as_object().expect("expected is an object");
    for (key, expected) in expected.iter().filter(|(key, _)| !omitted.contains(&key.as_str())) {
        let own = had.get(key).unwrap_or_else(|| panic!("{key} was not computed"));
        assert!(alike(own, expected, tolerance), "{key}: {own}, expected {expected}");
    }
    for printed in case["printed"].as_array().into_iter().flatten() {
        let Some(at) = printed["at"].as_str() else { continue };
        if omitted.iter().any(|key| at.trim_start_matches('/').starts_with(key)) {
            continue;
        }
        let own = had.pointer(at).unwrap_or_else(|| panic!("there is nothing at {at}"));
        let allowed = real(&printed["tolerance"]) + tolerance;
        let agrees = alike(own, &printed["value"], allowed);
        let stated = printed["agrees"].as_bool().expect("agrees is stated");
        assert_eq!(agrees, stated, "{at}: {own}, and the document prints {}", printed["value"]);
    }
}
