//! Runs every worked example of the seed documents and writes what came of it, a JSON object a
//! line: for `cargo xtask oracles`, which makes reports of them.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::process::ExitCode;

use ferroflash_tests::seeds::{Case, cases};
use serde_json::{Value, json};

fn main() -> ExitCode {
    // What failed is part of the output.
    set_hook(Box::new(|_| ()));
    let mut failed = false;
    for case in cases() {
        let outcome = catch_unwind(AssertUnwindSafe(|| case.run()));
        failed |= outcome.is_err();
        println!("{}", line(&case, outcome.map_err(|why| message(&*why))));
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

fn line(case: &Case, outcome: Result<Value, String>) -> Value {
    let value = case.value();
    let computed = outcome.as_ref().ok();
    let printed: Vec<Value> = value["printed"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|printed| {
            let at = printed["at"].as_str();
            let own = at.and_then(|at| computed.and_then(|computed| computed.pointer(at)));
            json!({
                "at": at, "value": printed["value"], "agrees": printed["agrees"], "computed": own,
            })
        })
        .collect();
    json!({
        "topic": case.topic, "id": case.id, "kind": case.kind, "claims": value["claims"],
        "source": value["source"], "note": value["note"], "printed": printed,
        "error": outcome.err(),
    })
}
