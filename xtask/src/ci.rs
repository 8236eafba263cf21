//! `cargo xtask ci`: everything a change must pass besides `cargo xtask test`, in one run.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::workspace::{cargo, on_path, run};
use crate::{
    build_ptx, docs, evidence, measured, minimal_versions, oracles, public_api, readme, report,
    resources,
};

/// A step and what it runs.
type Step = (&'static str, fn() -> Result<()>);

const STEPS: &[Step] = &[
    ("format", || run(cargo().args(["fmt", "--all", "--check"]))),
    ("clippy", || {
        let lint = ["clippy", "--quiet", "--workspace", "--all-targets"];
        run(cargo().args(lint).args(["--", "-D", "warnings"]))
    }),
    ("documentation", || {
        let document = ["doc", "--quiet", "--workspace", "--no-deps"];
        run(cargo().args(document).env("RUSTDOCFLAGS", "-D warnings"))
    }),
    ("public interface", public_api::check),
    ("least versions", minimal_versions::check),
    ("links", docs::check),
    ("dependencies", dependencies),
    ("kernels", || build_ptx::run(&build_ptx::Options { check: true, ..Default::default() })),
    ("resources", resources::check),
    ("oracles", oracles::check),
    ("evidence", evidence::check),
    ("bars", measured::check),
    ("support table", readme::check),
    ("report", report::check),
];

/// Runs every step, also after one that failed, and names those that did.
pub(crate) fn all() -> Result<()> {
    let begun = Instant::now();
    let mut failed = Vec::new();
    for (name, step) in STEPS {
        eprintln!("[{:>4.0} s] {name}", begun.elapsed().as_secs_f32());
        if let Err(why) = step() {
            eprintln!("error: {name}: {why:#}");
            failed.push(*name);
        }
    }
    eprintln!("[{:>4.0} s] done", begun.elapsed().as_secs_f32());
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Licences, sources and duplicates, where cargo-deny is installed.
fn dependencies() -> Result<()> {
    if on_path("cargo-deny").is_none() {
        eprintln!("skipped: cargo-deny is not installed (cargo install cargo-deny)");
        return Ok(());
    }
    run(cargo().args(["deny", "check", "bans", "licenses", "sources"]))
}
