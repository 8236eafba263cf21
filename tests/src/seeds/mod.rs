//! The worked examples of the seed documents (`fixtures/seeds`), each run by the code that claims
//! to do what it shows.

mod attention;
mod geometry;
mod json;
mod ledger;
mod schedules;
mod states;

use std::path::Path;

use serde_json::Value;

use crate::element::Real;

/// A case of a fixture.
#[derive(Clone, Debug)]
pub struct Case {
    /// The topic of its file.
    pub topic: String,
    /// Which function runs it.
    pub kind: String,
    /// Unique over all files.
    pub id: String,
    value: Value,
}

impl Case {
    /// Computes the case and compares it with what the fixture expects; returns what was computed.
    ///
    /// # Panics
    ///
    /// On anything that differs.
    pub fn run(&self) -> Value {
        let had = self.compute();
        // What describes an algorithm is also run, and must give the same.
        for run in schedules::run(&self.kind, &self.value["inputs"]) {
            json::compare_run(&self.value, &run, json::real(&self.value["tolerance"]));
        }
        had
    }

    fn compute(&self) -> Value {
        let inputs = &self.value["inputs"];
        let had = match self.kind.as_str() {
            "attention" => return attention::attention(&self.value),
            "head_map_parity" => return attention::head_map_parity(&self.value),
            "backward" => return attention::backward_pass(&self.value),
            "row_state" => states::row_state(inputs),
            "local_normalization" => states::local_normalization(inputs),
            "softmax_row" => states::softmax_row(inputs),
            "denominator_fault" => states::denominator_fault(inputs),
            "merge" => states::merge(inputs),
            "lse_merge" => states::lse_merge(inputs),
            "overlap" => states::overlap(inputs),
            "rounded_merge" => states::rounded_merge(inputs),
            "rounded_sum" => states::rounded_sum(inputs),
            "lost_update" => states::lost_update(inputs),
            "split_k" => states::split_k(inputs),
            "warp_rows" => geometry::warp_rows(inputs),
            "causal_tiles" => geometry::causal_tiles(inputs),
            "causal_mask" => geometry::causal_mask(inputs),
            "tile_visits" => geometry::tile_visits(inputs),
            "head_map" => geometry::head_map(inputs),
            "group_sum" => geometry::group_sum(inputs),
            kind => ledger::account(kind, inputs),
        };
        json::compare(&self.value, &had, json::real(&self.value["tolerance"]));
        had
    }

    /// The call of a case of attention or its gradients, its channels padded with zeros to
    /// multiples of `multiple`; none where a dropout mask is written out, which is no generator's.
    pub fn call<T: Real>(&self, multiple: usize) -> Option<crate::case::Case<T>> {
        let inputs = &self.value["inputs"];
        let is_call = ["attention", "backward"].contains(&self.kind.as_str());
        let is_plain = is_call && inputs["dropout_multiplier"].is_null();
        is_plain.then(|| attention::case_of(inputs, multiple))
    }

    /// The tensor that the fixture expects under this name, padded as [`Self::call`]'s are.
    pub fn expected(&self, name: &str, multiple: usize) -> Vec<f64> {
        attention::padded(&self.value["expected"][name], multiple)
    }

    /// The case as the fixture has it.
    pub fn value(&self) -> &Value {
        &self.value
    }
}

/// Every case of every file under `fixtures/seeds`.
///
/// # Panics
///
/// On a folder or a file that does not read, or is of another schema.
pub fn cases() -> Vec<Case> {
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
        let text = |value: &Value| value.as_str().unwrap_or("unnamed").to_owned();
        for value in fixture["cases"].as_array().expect("cases") {
            let (kind, id) = (text(&value["kind"]), text(&value["id"]));
            all.push(Case { topic: text(&fixture["topic"]), kind, id, value: value.clone() });
        }
    }
    all
}
