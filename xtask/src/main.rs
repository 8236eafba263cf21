//! `cargo xtask`: what cargo alone does not do for this workspace.

mod build_ptx;
mod ci;
mod docs;
mod evidence;
mod facts;
mod gpu_bundle;
mod measured;
mod oracles;
mod readme;
mod report;
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
