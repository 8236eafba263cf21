//! The record that a GPU run leaves: one JSON object a line, in the file that
//! `FERROFLASH_EVIDENCE` names.

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use ferroflash::{Form, KernelSpec};
use serde_json::{Map, Value, json};

use crate::bound::Measured;

/// Appends a row for one kernel, form and workload; `more` is merged into it.
pub fn append(
    spec: &KernelSpec,
    form: Form,
    workload: Value,
    measured: Measured,
    passed: bool,
    more: Map<String, Value>,
) {
    let Some(path) = std::env::var_os("FERROFLASH_EVIDENCE") else { return };
    let device = crate::gpu::device().expect("a device that a kernel ran on");
    let limits = device.limits().expect("a CUDA device");
    let mut row = json!({
        "kernel": spec.name,
        "direction": spec.direction.name(),
        "form": form.to_string(),
        "body_hash": ferroflash::record(spec.name).map(|record| record.body_hash.clone()),
        "workload": workload,
        "reference": "cpu dense f64",
        "tolerance": measured.tolerance,
        "max_error": measured.max_error,
        "passed": passed,
        "device": limits.name,
        "driver": driver(limits.driver_version),
        "recorded": today(),
    });
    if let Some(row) = row.as_object_mut() {
        row.extend(more);
    }
    static FILE: Mutex<()> = Mutex::new(());
    let _alone = FILE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let file = OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(format!("{row}\n").as_bytes()));
    written.expect("FERROFLASH_EVIDENCE names a file that can be written");
}

/// The driver's version, as the kernel module gives it; else the CUDA version it offers.
fn driver(cuda: u32) -> String {
    match std::fs::read_to_string("/sys/module/nvidia/version") {
        Ok(version) => version.trim().to_owned(),
        Err(_) => format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10),
    }
}

/// The day in UTC, `YYYY-MM-DD`.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date((seconds / 86_400) as i64)
}

/// The date of a day counted from 1970-01-01, by the proleptic Gregorian calendar.
fn date(days: i64) -> String {
    // Years are counted from March, so that the leap day is the last of its year.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_follow_the_calendar() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (19_722, "2023-12-31"),
            (19_723, "2024-01-01"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
