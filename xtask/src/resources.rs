//! `cargo xtask resources`: what each kernel takes of a multiprocessor, as a text that a review can
//! read, from the manifest of the artifacts.

use std::fmt::Write;

use anyhow::Result;

use crate::build_ptx::manifest::{Kernel, Manifest};
use crate::measured::Options;
use crate::workspace::{root, write_or_compare};

const FILE: &str = "fixtures/resources.txt";
const HEAD: &str = "\
# What each kernel takes, from host/artifacts/manifest.json; written by `cargo xtask resources`.
# Registers and stack of a thread; threads and dynamic shared bytes of a block; bytes of spills.
";

/// Runs `resources`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let text = table(&Manifest::committed()?.kernels);
    write_or_compare(&root().join(FILE), &text, options.check, "resources")
}

/// Fails where the text is not the manifest's.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

fn table(kernels: &[Kernel]) -> String {
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0);
    let mut text = format!("{HEAD}{:width$} registers threads  shared spills  stack\n", "kernel");
    for kernel in kernels {
        let Kernel { name, registers, threads, shared_bytes, spill_bytes, stack_bytes, .. } =
            kernel;
        let _ = writeln!(
            text,
            "{name:width$} {registers:>9} {threads:>7} {shared_bytes:>7} {spill_bytes:>6} \
             {stack_bytes:>6}"
        );
    }
    text
}
