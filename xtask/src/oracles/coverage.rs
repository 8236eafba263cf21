//! The table of what checks which claim of the seed documents.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::Outcome;
use super::report::cell;
use crate::workspace::root;

const CLAIMS: &str = "fixtures/claims.json";
const MUTATIONS: &str = "fixtures/mutations.json";

const PREAMBLE: &str = "\
# Coverage

Written by `cargo xtask oracles` from `fixtures/claims.json`, the cases of `fixtures/seeds` and
`fixtures/mutations.json`. A claim is checked by cases (`topic/case`, run at every check), by tests
(`file::name`) and by mutations (wrong programs that a check must reject), or the table says why no
program can; `open` means that none does yet. Claims are in our own words.
";

#[derive(Deserialize)]
struct Claims {
    schema: String,
    documents: Vec<Document>,
}

#[derive(Deserialize)]
struct Document {
    name: String,
    title: String,
    headings: Vec<Heading>,
    claims: Vec<Claim>,
}

/// A numbered heading, by a title of our own.
#[derive(Deserialize)]
struct Heading {
    section: String,
    title: String,
    /// Why nothing under it can be checked, where that is so.
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Claim {
    id: String,
    section: String,
    claim: String,
    /// Tests besides the fixtures' cases, `file::name`.
    #[serde(default)]
    tests: Vec<String>,
    /// Why no program checks it, where none can.
    reason: Option<String>,
}

/// What became of the failures that the documents list, by claim.
#[derive(Deserialize)]
struct Mutations {
    claims: HashMap<String, Mutation>,
}

/// A wrong program that a check rejects, or why there is none.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
struct Mutation {
    mutation: Option<String>,
    rejected_by: Option<String>,
    reason: Option<String>,
}

/// How far a claim is checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Case,
    Test,
    Reason,
    Open,
}

const STATES: [(State, &str); 4] = [
    (State::Case, "run as a case"),
    (State::Test, "by a test or a mutation"),
    (State::Reason, "cannot be run, with the reason"),
    (State::Open, "open"),
];

impl Claim {
    fn state(&self, cases: &[&str]) -> State {
        match (cases.is_empty(), self.tests.is_empty(), &self.reason) {
            (false, ..) => State::Case,
            (true, false, _) => State::Test,
            (true, true, Some(_)) => State::Reason,
            (true, true, None) => State::Open,
        }
    }
}

/// Cases of each claim, `topic/id`.
type Cases<'a> = HashMap<&'a str, Vec<String>>;

/// The whole table, once the claims, the cases and the tests were found to fit together.
pub(super) fn table(outcomes: &[Outcome]) -> Result<String> {
    let text = std::fs::read_to_string(root().join(CLAIMS)).context(CLAIMS)?;
    let mut claims: Claims = serde_json::from_str(&text).context(CLAIMS)?;
    if claims.schema != "ferroflash.seed-claims.v1" {
        bail!("{CLAIMS}: its schema is {:?}", claims.schema);
    }
    let mut cases: Cases = HashMap::new();
    for case in outcomes {
        for claim in &case.claims {
            cases.entry(claim).or_default().push(format!("{}/{}", case.topic, case.id));
        }
    }
    check(&claims, outcomes)?;
    let listed = std::fs::read_to_string(root().join(MUTATIONS)).context(MUTATIONS)?;
    let listed: Mutations = serde_json::from_str(&listed).context(MUTATIONS)?;
    add_mutations(&mut claims, listed)?;
    let mut text = PREAMBLE.to_owned();
    for document in &claims.documents {
        document.write(&mut text, &cases);
    }
    Ok(text)
}

/// Counts what the mutations say of a claim among its tests and reasons.
fn add_mutations(claims: &mut Claims, mut listed: Mutations) -> Result<()> {
    for claim in claims.documents.iter_mut().flat_map(|document| &mut document.claims) {
        let Some(mutation) = listed.claims.remove(&claim.id) else { continue };
        if let (Some(name), Some(by)) = (mutation.mutation, mutation.rejected_by) {
            claim.tests.push(format!("mutation: {name}, rejected by {by}"));
        }
        claim.reason = claim.reason.take().or(mutation.reason);
    }
    let mut unknown: Vec<String> = listed.claims.into_keys().collect();
    unknown.sort();
    if unknown.is_empty() {
        return Ok(());
    }
    bail!("{MUTATIONS} names claims that {CLAIMS} has not: {}", unknown.join(", "))
}

impl Document {
    fn write(&self, text: &mut String, cases: &Cases) {
        let of = |claim: &Claim| -> Vec<&str> {
            let found = cases.get(claim.id.as_str()).into_iter().flatten();
            found.map(String::as_str).collect()
        };
        let mut counts: BTreeMap<State, usize> = BTreeMap::new();
        for claim in &self.claims {
            *counts.entry(claim.state(&of(claim))).or_default() += 1;
        }
        let _ = write!(text, "\n## {}: {}\n\n", self.name, self.title);
        let _ = writeln!(text, "| {} claims | |\n| --- | --- |", self.claims.len());
        for (state, name) in STATES {
            let _ = writeln!(text, "| {name} | {} |", counts.get(&state).unwrap_or(&0));
        }
        let _ = writeln!(text, "\n| | | checked by |\n| --- | --- | --- |");
        for heading in &self.headings {
            let own: Vec<&Claim> =
                self.claims.iter().filter(|claim| claim.section == heading.section).collect();
            let status = match &heading.reason {
                Some(reason) if own.is_empty() => format!("no claim: {reason}"),
                _ if own.is_empty() => "no claim of its own; see the sections below it".to_owned(),
                _ if own.len() == 1 => "1 claim".to_owned(),
                _ => format!("{} claims", own.len()),
            };
            let (section, title) = (&heading.section, cell(&heading.title));
            let _ = writeln!(text, "| **§{section}** | **{title}** | {status} |");
            for claim in own {
                let cases = of(claim);
                let checked = checked_by(claim, &cases);
                let _ = writeln!(text, "| {} | {} | {checked} |", claim.id, cell(&claim.claim));
            }
        }
    }
}

fn checked_by(claim: &Claim, cases: &[&str]) -> String {
    let named = cases.iter().map(|case| format!("`{case}`"));
    let named = named.chain(claim.tests.iter().map(|test| format!("`{test}`")));
    let named: Vec<String> = named.collect();
    match (&claim.reason, named.is_empty()) {
        (Some(reason), true) => format!("not run: {}", cell(reason)),
        (None, true) => "open".to_owned(),
        (_, false) => named.join(" "),
    }
}

/// Fails on claims that cases name and no list has, on claims without a heading, and on tests
/// that are not where they are said to be.
fn check(claims: &Claims, outcomes: &[Outcome]) -> Result<()> {
    let mut known = HashMap::new();
    let mut wrong = Vec::new();
    for document in &claims.documents {
        for claim in &document.claims {
            if known.insert(claim.id.as_str(), ()).is_some() {
                wrong.push(format!("{} is listed twice", claim.id));
            }
            if !document.headings.iter().any(|heading| heading.section == claim.section) {
                wrong.push(format!("{}: there is no heading {}", claim.id, claim.section));
            }
            wrong.extend(
                claim
                    .tests
                    .iter()
                    .filter(|test| !is_there(test))
                    .map(|test| format!("{}: there is no test {test}", claim.id)),
            );
        }
    }
    for case in outcomes {
        let unknown = case.claims.iter().filter(|claim| !known.contains_key(claim.as_str()));
        wrong.extend(unknown.map(|claim| format!("{}: there is no claim {claim}", case.id)));
    }
    if !wrong.is_empty() {
        bail!("{CLAIMS} does not fit the cases:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

/// Whether the file of `file::name` has a function or a trial of that name.
fn is_there(test: &str) -> bool {
    let Some((file, name)) = test.split_once("::") else { return false };
    let Ok(text) = std::fs::read_to_string(root().join(file)) else { return false };
    text.contains(&format!("fn {name}(")) || text.contains(&format!("\"{name}\""))
}
