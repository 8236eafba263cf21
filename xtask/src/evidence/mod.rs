//! `cargo xtask evidence`: what GPU runs have shown of each kernel.
//!
//! A GPU run writes rows, one JSON object a line; `--import` files them under fixtures/evidence by
//! day and device. `--check` refuses a kernel whose present body no run has shown to be right.

mod check;
mod record;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::workspace::{files_under, read_text, root};
pub(crate) use record::validate_day;
use record::{Record, Report, Row};

/// What `evidence` was asked for.
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
pub(crate) struct Options {
    /// Take in the records that GPU runs wrote
    #[arg(long, value_name = "FILE", num_args = 1..)]
    import: Vec<PathBuf>,
    /// Check that every kernel's present body has passed on a GPU, or is excused by name
    #[arg(long)]
    check: bool,
}

/// Runs `evidence`.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !options.import.is_empty() {
        import(&options.import)?;
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

fn read_record(file: &Path) -> Result<Record> {
    Record::from_json(&read_text(file)?).with_context(|| format!("{}", file.display()))
}

fn import(files: &[PathBuf]) -> Result<()> {
    // Everything is read before anything is written.
    let mut records: Vec<Record> = Vec::new();
    for file in files {
        let reports = record::reports(&read_text(file)?)
            .with_context(|| format!("{} is no evidence", file.display()))?;
        if reports.is_empty() {
            bail!("{} holds no rows", file.display());
        }
        for Report { device, driver, recorded, row } in reports {
            let same = |r: &&mut Record| r.file_name() == record::file_name(&recorded, &device);
            if let Some(record) = records.iter_mut().find(same) {
                record.add(row);
            } else {
                records.push(Record::new(device, driver, recorded, row));
            }
        }
    }
    for new in records {
        let path = folder().join(new.file_name());
        let taken = new.rows.len();
        let merged = if path.is_file() {
            let mut old = read_record(&path)?;
            old.driver = new.driver;
            new.rows.into_iter().for_each(|row| old.add(row));
            old
        } else {
            new
        };
        crate::workspace::write(&path, merged.text()?.as_bytes())?;
        eprintln!("{}: {taken} rows in, {} in all", path.display(), merged.rows.len());
    }
    Ok(())
}
