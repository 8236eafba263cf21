//! `cargo xtask evidence --import`: from the lines of GPU runs to records.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::record::{self, Record, Report};
use super::{folder, read_record};
use crate::workspace::{read_text, write};

/// Takes in `files`. Everything is read, and every record that would be written is complete,
/// before anything is written.
pub(super) fn run(files: &[PathBuf], force: bool) -> Result<()> {
    let mut records: Vec<Record> = Vec::new();
    for file in files {
        let text = read_text(file)?;
        record::reports(&text)
            .and_then(|reports| gather(&mut records, reports, force))
            .with_context(|| file.display().to_string())?;
    }
    let mut written = Vec::new();
    for new in records {
        let rows = new.rows.len();
        let (path, merged) = merge(new, &folder(), force)?;
        written.push((path, merged.text()?, rows, merged.rows.len()));
    }
    for (path, text, taken, all) in written {
        write(&path, text.as_bytes())?;
        eprintln!("{}: {taken} rows in, {all} in all", path.display());
    }
    Ok(())
}

/// Adds rows to the records of their device, driver and day.
fn gather(records: &mut Vec<Record>, reports: Vec<Report>, force: bool) -> Result<()> {
    if reports.is_empty() {
        bail!("it holds no rows");
    }
    let mut equal = 0;
    for report in reports {
        let is_of = |r: &&mut Record| {
            (&r.device, &r.driver, &r.recorded)
                == (&report.device, &report.driver, &report.recorded)
        };
        let Some(record) = records.iter_mut().find(is_of) else {
            records.push(Record::new(report));
            continue;
        };
        record.clocks = report.clocks.or(record.clocks.take());
        let named = report.row.named();
        match record.add(report.row) {
            record::Added::Anew => {}
            record::Added::Again => equal += 1,
            record::Added::Instead if force => {}
            record::Added::Instead => bail!(
                "{named} is there twice, with other results; with --force the later one counts"
            ),
        }
    }
    if equal > 0 {
        eprintln!("note: {equal} rows are there more than once, and equal");
    }
    Ok(())
}

/// A record with those of its rows that are kept already, and the file it belongs in.
fn merge(new: Record, folder: &Path, force: bool) -> Result<(PathBuf, Record)> {
    for name in new.names() {
        let path = folder.join(name);
        if !path.is_file() {
            return Ok((path, new));
        }
        let mut old = read_record(&path)?;
        if old.device != new.device {
            bail!(
                "{} is of {}, and the rows are of {}: another device",
                path.display(),
                old.device,
                new.device
            );
        }
        // Another driver of the same day has a file of its own.
        if old.driver != new.driver {
            continue;
        }
        old.clocks = new.clocks.or(old.clocks);
        let mut replaced = Vec::new();
        for row in new.rows {
            let named = row.named();
            if old.add(row) == record::Added::Instead {
                replaced.push(named);
            }
        }
        if let (Some(first), false) = (replaced.first(), force) {
            bail!(
                "{} has {} of these rows with other results, first {first}; with --force the new \
                 ones take their place",
                path.display(),
                replaced.len()
            );
        }
        return Ok((path, old));
    }
    bail!("{}, driver {}: its file is of another driver", new.device, new.driver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::record::tests::{HEADER, line};

    fn gathered(text: &str, force: bool) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        gather(&mut records, record::reports(text)?, force)?;
        Ok(records)
    }

    #[test]
    fn equal_rows_count_once_and_others_need_force() {
        let equal = format!("{HEADER}\n{}\n{}", line("a", "0.25"), line("a", "0.25"));
        assert_eq!(gathered(&equal, false).expect("they are equal")[0].rows.len(), 1);
        let other = format!("{HEADER}\n{}\n{}", line("a", "0.25"), line("a", "0.125"));
        let why = gathered(&other, false).expect_err("they are not").to_string();
        assert!(why.contains("a (cubin), {\"q_len\":7} is there twice"), "{why}");
        let records = gathered(&other, true).expect("the later counts");
        assert_eq!(records[0].rows[0].max_error, Some(0.125));
        assert!(gathered(HEADER, false).is_err_and(|why| why.to_string().contains("no rows")));
    }

    #[test]
    fn nothing_kept_is_overwritten_without_force() {
        let folder =
            std::env::temp_dir().join(format!("ferroflash-evidence-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let one = |error: &str, header: &str| {
            let text = format!("{header}\n{}", line("a", error));
            gathered(&text, false).expect("it reads").remove(0)
        };
        let keep = |record: Record, force: bool| -> Result<PathBuf> {
            let (path, merged) = merge(record, &folder, force)?;
            std::fs::write(&path, merged.text()?)?;
            Ok(path)
        };
        let path = keep(one("0.25", HEADER), false).expect("it is new");
        assert_eq!(keep(one("0.25", HEADER), false).expect("it is equal"), path);
        let why = keep(one("0.125", HEADER), false).expect_err("it is another").to_string();
        assert!(why.contains("1 of these rows with other results"), "{why}");
        assert_eq!(read_record(&path).expect("it reads").rows[0].max_error, Some(0.25));
        keep(one("0.125", HEADER), true).expect("it is forced");
        assert_eq!(read_record(&path).expect("it reads").rows[0].max_error, Some(0.125));
        // Another driver has a file of its own; another device of the same file name is refused.
        let driver = keep(one("0.5", &HEADER.replace("580.1", "590.2")), false);
        assert!(driver.expect("it is new").ends_with("2026-01-31-nvidia-h200-driver-590-2.json"));
        let why = keep(one("0.5", &HEADER.replace("H200", "h200")), false);
        assert!(why.expect_err("it is not").to_string().contains("another device"));
        std::fs::remove_dir_all(&folder).expect("the test's folder");
    }

    #[test]
    fn a_record_under_another_name_is_found_out() {
        let folder = std::env::temp_dir().join(format!("ferroflash-named-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let text = format!("{HEADER}\n{}", line("a", "0.25"));
        let record = gathered(&text, false).expect("it reads").remove(0);
        let path = folder.join("2026-01-31-nvidia-a100.json");
        std::fs::write(&path, record.text().expect("it is JSON")).expect("it is written");
        let why = read_record(&path).expect_err("it is of another device");
        assert!(format!("{why:#}").contains("another device or day than its name says"));
        std::fs::remove_dir_all(&folder).expect("the test's folder");
    }
}
