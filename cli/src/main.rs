//! The `ferroflash` command: exact attention from file to file, plans explained, machines examined
//! and measured.
//!
//! Exit codes: 0, done; 1, a check or the driver failed; 2, bad input; 3, slower than the run it
//! was compared with. Files are written whole or not at all.

mod attend;
mod bench;
mod call;
mod check;
mod doctor;
mod explain;
mod failure;
mod file;
mod forward;
mod grad;
mod options;
mod progress;
mod report;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exact attention, forward and backward, on NVIDIA GPUs and on the CPU
#[derive(Parser)]
#[command(name = "ferroflash", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compute attention of the q, k and v in files
    Attend(Box<attend::Arguments>),
    /// Measure how fast attention is here, and what the device reaches
    Bench(Box<bench::Arguments>),
    /// Say which kernel would run a call, and why
    Explain(Box<explain::Arguments>),
    /// Compute the gradients of q, k and v for a given gradient of o
    Grad(Box<grad::Arguments>),
    /// Look at the driver, the devices, the kernels and the compilers that are here
    Doctor(doctor::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Attend(arguments) => attend::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Grad(arguments) => grad::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // With stderr closed the exit code has to do.
            let _ = writeln!(std::io::stderr(), "error: {}", failure.line());
            ExitCode::from(failure.exit_code())
        }
    }
}
