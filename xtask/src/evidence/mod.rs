//! `cargo xtask evidence`: what GPU runs have shown of each kernel.
//!
//! A GPU run writes rows, one JSON object a line; `--import` files them under fixtures/evidence by
//! day and device. `--check` refuses a kernel whose present body no run has shown to be right. What
//! a record may hold is fixtures/schemas/kernel-evidence.v1.json.

mod check;
mod import;
mod record;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::workspace::{files_under, read_text, root};
use record::{Record, Row};
pub(crate) use record::{file_name, validate_day};

/// What `evidence` was asked for.
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
pub(crate) struct Options {
    /// Take in the records that GPU runs wrote
    #[arg(long, value_name = "FILE", num_args = 1..)]
    import: Vec<PathBuf>,
    /// Put imported rows in the place of others of the same kernel, form and workload
    #[arg(long, requires = "import")]
    force: bool,
    /// Check that every kernel's present body has passed on a GPU, or is excused by name
    #[arg(long)]
    check: bool,
}

/// Runs `evidence`.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !options.import.is_empty() {
        import::run(&options.import, options.force)?;
    }
    if options.check { check() } else { Ok(()) }
}

/// Runs `evidence --check`.
pub(crate) fn check() -> Result<()> {
    check::run(&committed()?)
}

fn folder() -> PathBuf {
    root().join("fixtures").join("evidence")
}

/// The committed records, with their files.
fn committed() -> Result<Vec<(PathBuf, Record)>> {
    let folder = folder();
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut records = Vec::new();
    for file in files_under(&folder)? {
        if file.extension().is_some_and(|extension| extension == "json") {
            records.push((file.clone(), read_record(&file)?));
        }
    }
    Ok(records)
}

/// Every committed row, with the device and day of its record.
pub(crate) fn committed_rows() -> Result<Vec<(String, Row)>> {
    let records = committed()?.into_iter();
    let rows = records.flat_map(|(_, record)| {
        let source = format!("{}, {}", record.device, record.recorded);
        record.rows.into_iter().map(move |row| (source.clone(), row))
    });
    Ok(rows.collect())
}

/// Reads a record, and finds out one that is not what its name says.
fn read_record(file: &Path) -> Result<Record> {
    let read = || {
        let record = Record::from_json(&read_text(file)?)?;
        record.refuse_duplicates()?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if !record.names().iter().any(|own| *own == name) {
            bail!(
                "it is of another device or day than its name says: {}, {}",
                record.device,
                record.recorded
            );
        }
        Ok(record)
    };
    read().with_context(|| file.display().to_string())
}
