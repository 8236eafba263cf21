//! What a statement about an implementation must rest on (M4.4 §0x06.4).
//!
//! A paper says what its algorithm does, a pinned source what it holds, a trace of its launches
//! what it runs, a profile how fast. None says what another would: each is asked for by name.

use serde::{Deserialize, Serialize};

/// What a statement is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum About {
    /// What a published algorithm does.
    Algorithm,
    /// What a revision of a source holds.
    Source,
    /// Which of it is launched.
    Dispatch,
    /// What one design costs against another.
    Comparison,
    /// Which of two is faster.
    Rank,
}

/// Where a statement comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Authority {
    /// A paper.
    Paper,
    /// A source.
    Source,
}

/// A statement, and what is brought forward for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// What it is about.
    pub about: About,
    /// The version it is about, as a tag, a commit or a paper's number.
    pub version: Option<String>,
    /// Where it comes from.
    pub authority: Option<Authority>,
    /// Whether the launches were traced from the interface down.
    #[serde(default)]
    pub launch_trace: bool,
    /// Whether it says what both designs compute alike.
    #[serde(default)]
    pub invariant: bool,
    /// Whether it says which costs go.
    #[serde(default)]
    pub costs_removed: bool,
    /// Whether it says which costs stay, or move elsewhere.
    #[serde(default)]
    pub costs_kept: bool,
    /// Whether a frozen workload was profiled on a named machine.
    #[serde(default)]
    pub profile: bool,
}

/// What a statement lacks; it holds if that is nothing.
pub fn lacks(statement: &Statement) -> Vec<&'static str> {
    let Statement { about, authority, .. } = statement;
    let compares = matches!(about, About::Comparison | About::Rank);
    let speaks = matches!(
        (about, authority),
        (About::Algorithm, Some(Authority::Paper))
            | (About::Source | About::Dispatch, Some(Authority::Source))
            | (About::Comparison | About::Rank, Some(_))
    );
    let asked = [
        (true, statement.version.is_some(), "a version"),
        (true, speaks, "an authority on it"),
        (*about == About::Dispatch, statement.launch_trace, "a trace of its launches"),
        (compares, statement.invariant, "what both compute alike"),
        (compares, statement.costs_removed, "the costs that go"),
        (compares, statement.costs_kept, "the costs that stay or move"),
        (*about == About::Rank, statement.profile, "a profile of a frozen workload"),
    ];
    asked.iter().filter(|(asked, had, _)| *asked && !had).map(|(.., what)| *what).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_statement_asks_for_its_own() {
        let whole = |about, authority| Statement {
            about,
            version: Some("v2.0.0".to_owned()),
            authority: Some(authority),
            launch_trace: true,
            invariant: true,
            costs_removed: true,
            costs_kept: true,
            profile: true,
        };
        for (about, authority) in [
            (About::Algorithm, Authority::Paper),
            (About::Source, Authority::Source),
            (About::Dispatch, Authority::Source),
            (About::Rank, Authority::Source),
        ] {
            assert!(lacks(&whole(about, authority)).is_empty());
        }
        let helper = Statement { launch_trace: false, ..whole(About::Dispatch, Authority::Source) };
        assert_eq!(lacks(&helper), ["a trace of its launches"]);
        let paper = whole(About::Dispatch, Authority::Paper);
        assert_eq!(lacks(&paper), ["an authority on it"]);
    }
}
