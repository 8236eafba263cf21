//! The worked examples of the seed documents (`fixtures/seeds`), each run by the code that claims
//! to do what it shows. Tests are named `KIND/ID`.

mod attention;
mod geometry;
mod json;
mod states;

use libtest_mimic::{Arguments, Trial};
use serde_json::Value;

/// Kinds that count words, bytes or programs; they are ignored by name until something counts.
const ACCOUNTING: &[&str] = &[
    "forward_words",
    "backward_words",
    "split_k_ledger",
    "head_programs",
    "gradient_producers",
    "lost_update",
];
const ACCOUNTING_REASON: &str = "accounting: ledger";

/// Results that describe a loop we do not have: the K/V loop of flash-attention v2.0.0.
const HISTORICAL: &[&str] = &["historical_visits", "historical_mask_iterations"];

fn main() {
    let arguments = Arguments::from_args();
    let trials = json::cases().into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(case: Value) -> Trial {
    let text = |key: &str| case[key].as_str().unwrap_or("unnamed").to_owned();
    let (kind, id) = (text("kind"), text("id"));
    if ACCOUNTING.contains(&kind.as_str()) {
        let name = format!("{kind}/{id}: {ACCOUNTING_REASON}");
        return Trial::test(name, || Ok(())).with_ignored_flag(true);
    }
    Trial::test(format!("{kind}/{id}"), move || {
        run(&kind, &case);
        Ok(())
    })
}

fn run(kind: &str, case: &Value) {
    let inputs = &case["inputs"];
    let mut omitted: &[&str] = &[];
    let had = match kind {
        "attention" => return attention::attention(case),
        "head_map_parity" => return attention::head_map_parity(case),
        "backward" => return attention::backward_pass(case),
        "row_state" => states::row_state(inputs),
        "local_normalization" => states::local_normalization(inputs),
        "softmax_row" => states::softmax_row(inputs),
        "denominator_fault" => states::denominator_fault(inputs),
        "merge" => states::merge(inputs),
        "lse_merge" => states::lse_merge(inputs),
        "overlap" => states::overlap(inputs),
        "rounded_merge" => states::rounded_merge(inputs),
        "rounded_sum" => states::rounded_sum(inputs),
        "split_k" => states::split_k(inputs),
        "warp_rows" => geometry::warp_rows(inputs),
        "causal_tiles" => {
            omitted = HISTORICAL;
            geometry::causal_tiles(inputs)
        }
        "causal_mask" => geometry::causal_mask(inputs),
        "tile_visits" => geometry::tile_visits(inputs),
        "head_map" => geometry::head_map(inputs),
        "group_sum" => geometry::group_sum(inputs),
        unknown => panic!("nothing runs kind {unknown}"),
    };
    json::compare(case, &had, omitted, json::real(&case["tolerance"]));
}
