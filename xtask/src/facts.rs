//! What the library says of itself: from `ferroflash-tests`' program `facts`. This program does not
//! link the library, since that embeds the kernels which `build-ptx` is there to write.

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::workspace::{cargo, printed};

/// Everything that is asked.
#[derive(Debug, Deserialize)]
pub(crate) struct Facts {
    /// A line a feature.
    pub(crate) support: Vec<Feature>,
    /// A line a call of the convention.
    pub(crate) workspace: Vec<Workspace>,
}

/// What the backends make of a feature.
#[derive(Debug, Deserialize)]
pub(crate) struct Feature {
    /// Its name.
    pub(crate) feature: String,
    /// One a backend and direction.
    pub(crate) answers: Vec<Answer>,
}

/// Who computes a feature, or why nobody does.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Answer {
    /// `cpu`, or a device of the ledger's table.
    pub(crate) backend: String,
    /// `forward` or `backward`.
    pub(crate) direction: String,
    /// The family of kernels, `tiled` on the CPU, or the range that is taken.
    pub(crate) by: Option<String>,
    /// The reason, where the call is refused.
    pub(crate) refused: Option<String>,
}

/// Bytes of workspace of a call on an H200, by its planner.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Workspace {
    /// Channels of a head.
    pub(crate) d: u64,
    /// Query rows and keys.
    pub(crate) s: u64,
    /// Items.
    pub(crate) b: u64,
    /// Heads.
    pub(crate) heads: u64,
    /// Of the backward pass; forward takes a few bytes.
    pub(crate) backward: u64,
}

/// Asks.
pub(crate) fn facts() -> Result<Facts> {
    let text = printed(cargo().args([
        "run",
        "--quiet",
        "--package",
        "ferroflash-tests",
        "--bin",
        "facts",
    ]))?;
    serde_json::from_str(&text).context("the program `facts` wrote what does not read")
}
