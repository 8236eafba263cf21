//! The failures that the seed documents list, each as a program that an oracle rejects.
//!
//! A row of [`MUTATIONS`] is a deliberately wrong implementation or account, the claims it breaks,
//! and the check that must reject it. What no program can hold is a row of `reasons::REASONS`.
//! `fixtures/mutations.json` lists both, by claim; it is compared with the code here, and written
//! anew where `FERROFLASH_WRITE_MUTATIONS` is set.

#[path = "../oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

mod backward;
mod counts;
mod forward;
mod ownership;
mod reasons;
mod schedules;
mod storage;
mod table;

use std::collections::BTreeMap;
use std::path::Path;

use ferroflash::Align;
use serde_json::{Value, json};

use oracle::{Problem, Sight, shape};
use reasons::REASONS;
use table::MUTATIONS;

/// The programs that are broken are right before they are.
#[test]
fn nothing_broken_passes() {
    for problem in table::problems() {
        forward::verdict(&problem, forward::Rules::RIGHT).expect("the right forward");
        backward::verdict(&problem, backward::Rules::RIGHT).expect("the right backward");
        let deferred = backward::Keep::AtTheEnd;
        let deferred = backward::Rules { keep: deferred, ..backward::Rules::RIGHT };
        backward::verdict(&problem, deferred).expect("the factor taken out of the sums");
        let update = backward::Update::Atomic;
        backward::rounded_once(&problem, update).expect("rounded once");
    }
    backward::arrival_orders([1e20, -1e20, 1.0], true).expect("a fixed order");
    for block in [storage::SHARED_V, storage::V_IN_REGISTERS, storage::ONE_Q] {
        storage::whole(&block).expect("every barrier");
    }
    let align = Align::BottomRight;
    let problem = Problem::new(shape(1, (1, 1), (5, 8), (4, 3)), Sight::Causal(align), 5);
    backward::verdict(&problem, backward::Rules::RIGHT).expect("the right backward");
}

#[test]
fn every_mutation_is_rejected_by_its_check() {
    for mutation in MUTATIONS {
        let verdict = (mutation.run)();
        let rejection = match verdict {
            Err(rejection) => rejection,
            Ok(()) => panic!("{}: not rejected", mutation.name),
        };
        assert_eq!(rejection.check, mutation.by, "{}: {}", mutation.name, rejection.why);
    }
}

/// Claim id → what became of it.
fn by_claim() -> BTreeMap<&'static str, Value> {
    let mut rows = BTreeMap::new();
    for mutation in MUTATIONS {
        let rejected_by = format!("{:?}", mutation.by).to_lowercase();
        let row = json!({"mutation": mutation.name, "rejected_by": rejected_by});
        for claim in mutation.claims {
            let twice = rows.insert(*claim, row.clone());
            assert!(twice.is_none(), "{claim} is listed twice");
        }
    }
    for (claim, reason) in REASONS {
        let twice = rows.insert(claim, json!({"reason": reason}));
        assert!(twice.is_none(), "{claim} is listed twice");
    }
    rows
}

#[test]
fn the_list_of_mutations_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/mutations.json");
    let mut text = String::from("{\n \"schema\": \"ferroflash.mutations.v1\",\n \"claims\": {\n");
    let rows = by_claim();
    let lines: Vec<String> =
        rows.iter().map(|(claim, row)| format!("  {}: {row}", json!(claim))).collect();
    text += &lines.join(",\n");
    text += "\n }\n}\n";
    if std::env::var_os("FERROFLASH_WRITE_MUTATIONS").is_some() {
        std::fs::write(&file, text).expect("a writable fixture");
        return;
    }
    let had = std::fs::read_to_string(&file).expect("a readable fixture");
    assert_eq!(had, text, "{} is not what the code says", file.display());
}
