//! `cargo xtask`: what cargo alone does not do for this workspace.

mod build_ptx;
mod ci;
mod docs;
mod evidence;
mod facts;
mod gpu_bundle;
mod measured;
mod minimal_versions;
mod oracles;
mod profile;
mod public_api;
mod readme;
mod report;
mod resources;
mod schema;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, checks and gathers what cargo alone does not.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile the kernels to PTX and cubins, check them, and write host/artifacts
    BuildPtx(build_ptx::Options),
    /// Check the committed PTX and cubins; needs ptxas alone
    CheckPtx,
    /// Run every test that needs no GPU
    Test,
    /// Run the worked examples of the seeds, and write or check their reports and coverage
    Oracles(oracles::Options),
    /// Gather what a GPU run needs into target/gpu-bundle
    GpuBundle,
    /// File what GPU runs showed, or check that they showed every kernel to be right
    Evidence(evidence::Options),
    /// Write docs/bars.md, what was to be reached and what was, from the raw rounds
    Bars(measured::Options),
    /// Write the README's table of what is supported, from the library's own answers
    Readme(measured::Options),
    /// Write docs/report.html: what was measured, drawn
    Report(measured::Options),
    /// Write fixtures/resources.txt: registers, shared memory and spills of each kernel
    Resources(measured::Options),
    /// Write the recipe for Nsight Compute, or reconcile what it counted with the ledger
    Profile(profile::Options),
    /// Write fixtures/public-api.txt: everything public of the library
    PublicApi(measured::Options),
    /// Check that the least versions that manifests name are enough to build with
    MinimalVersions,
    /// Check the links of the documentation
    Docs,
    /// Everything a change must pass: format, lints, documentation, tests, kernels, evidence
    Ci,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::BuildPtx(options) => build_ptx::run(&options),
        Task::CheckPtx => build_ptx::check_committed(),
        Task::Test => test::run(),
        Task::Oracles(options) => oracles::run(&options),
        Task::GpuBundle => gpu_bundle::run(),
        Task::Evidence(options) => evidence::run(&options),
        Task::Bars(options) => measured::run(&options),
        Task::Readme(options) => readme::run(&options),
        Task::Report(options) => report::run(&options),
        Task::Resources(options) => resources::run(&options),
        Task::Profile(options) => profile::run(&options),
        Task::PublicApi(options) => public_api::run(&options),
        Task::MinimalVersions => minimal_versions::check(),
        Task::Docs => docs::check(),
        Task::Ci => ci::all(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why:#}");
            ExitCode::FAILURE
        }
    }
}
