//! Records of GPU runs, schema `ferroflash.kernel-evidence.v1`.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The schema this program reads and writes.
pub(crate) const SCHEMA: &str = "ferroflash.kernel-evidence.v1";

/// What one device showed on one day.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// [`SCHEMA`].
    pub(crate) schema: String,
    /// The GPU, as its driver names it.
    pub(crate) device: String,
    /// Version of the driver.
    pub(crate) driver: String,
    /// The day, `YYYY-MM-DD`.
    pub(crate) recorded: String,
    /// One a kernel, form and workload.
    pub(crate) rows: Vec<Row>,
}

/// One kernel, in one form, on one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The kernel.
    pub(crate) kernel: String,
    /// `cubin` or `ptx`.
    pub(crate) form: String,
    /// Hash of its body, from the manifest of the artifacts.
    pub(crate) body_hash: String,
    /// Shape, mask, dtype and seed.
    pub(crate) workload: Map<String, Value>,
    /// Whether the error was within the tolerance.
    pub(crate) passed: bool,
    /// Largest error; absent where it was not finite.
    pub(crate) max_error: Option<f64>,
    /// Largest error that passes.
    pub(crate) tolerance: f64,
    /// Everything else: the reference, timing samples, peers.
    #[serde(flatten)]
    pub(crate) other: Map<String, Value>,
}

/// A row and the device it is from.
#[derive(Debug, PartialEq)]
pub(crate) struct Report {
    pub(crate) device: String,
    pub(crate) driver: String,
    pub(crate) recorded: String,
    pub(crate) row: Row,
}

impl Record {
    /// A record of one row.
    pub(crate) fn new(device: String, driver: String, recorded: String, row: Row) -> Self {
        Self { schema: SCHEMA.to_owned(), device, driver, recorded, rows: vec![row] }
    }

    /// Reads a record.
    pub(crate) fn from_json(text: &str) -> Result<Self> {
        let record: Self =
            serde_json::from_str(text).with_context(|| format!("it does not read as {SCHEMA}"))?;
        if record.schema != SCHEMA {
            bail!("its schema is {}, and this program reads {SCHEMA}", record.schema);
        }
        record.rows.iter().try_for_each(Row::validate)?;
        Ok(record)
    }

    /// Adds a row, in the place of an older one of the same kernel, form and workload.
    pub(crate) fn add(&mut self, row: Row) {
        match self.rows.iter_mut().find(|old| old.same_case(&row)) {
            Some(old) => *old = row,
            None => self.rows.push(row),
        }
    }

    /// Name of the file it is kept in.
    pub(crate) fn file_name(&self) -> String {
        file_name(&self.recorded, &self.device)
    }

    /// The text to commit: a row a line, so that a change shows as one.
    pub(crate) fn text(&self) -> Result<String> {
        let mut text = String::from("{\n");
        for (name, value) in [
            ("schema", &self.schema),
            ("device", &self.device),
            ("driver", &self.driver),
            ("recorded", &self.recorded),
        ] {
            text.push_str(&format!("  \"{name}\": {},\n", serde_json::to_string(value)?));
        }
        text.push_str("  \"rows\": [\n");
        let rows: Result<Vec<String>, _> = self.rows.iter().map(serde_json::to_string).collect();
        let rows: Vec<String> = rows?.iter().map(|row| format!("    {row}")).collect();
        text.push_str(&rows.join(",\n"));
        text.push_str("\n  ]\n}\n");
        Ok(text)
    }
}

impl Row {
    fn same_case(&self, other: &Self) -> bool {
        self.kernel == other.kernel && self.form == other.form && self.workload == other.workload
    }

    /// Whether it shows the kernel to be right: by its numbers, not by its word alone.
    pub(crate) fn holds(&self) -> bool {
        self.passed && self.max_error.is_some_and(|error| error <= self.tolerance)
    }

    fn validate(&self) -> Result<()> {
        if !matches!(self.form.as_str(), "cubin" | "ptx") {
            bail!("{}: form is `{}`; it must be cubin or ptx", self.kernel, self.form);
        }
        let hexadecimal = self.body_hash.bytes().all(|b| b.is_ascii_hexdigit());
        if self.body_hash.len() != 64 || !hexadecimal {
            bail!("{}: body_hash `{}` is no SHA-256", self.kernel, self.body_hash);
        }
        if self.workload.is_empty() {
            bail!("{}: the workload is empty", self.kernel);
        }
        if self.passed && !self.holds() {
            bail!(
                "{}: it says `passed` with max_error {:?} against a tolerance of {}",
                self.kernel,
                self.max_error,
                self.tolerance
            );
        }
        Ok(())
    }
}

/// `2026-01-31-nvidia-h200.json`.
pub(crate) fn file_name(recorded: &str, device: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let device: String = device.chars().map(plain).collect();
    let device: Vec<&str> = device.split('-').filter(|word| !word.is_empty()).collect();
    format!("{}-{}.json", recorded, device.join("-"))
}

/// Reads a whole record, or lines: rows that name device, driver and day themselves, or follow a
/// line that names them for those after it.
pub(crate) fn reports(text: &str) -> Result<Vec<Report>> {
    if let Ok(record) = serde_json::from_str::<Map<String, Value>>(text)
        && record.contains_key("rows")
    {
        let Record { device, driver, recorded, rows, .. } = Record::from_json(text)?;
        validate_day(&recorded)?;
        let report = |row| Report {
            device: device.clone(),
            driver: driver.clone(),
            recorded: recorded.clone(),
            row,
        };
        return Ok(rows.into_iter().map(report).collect());
    }
    let mut header: [Option<String>; 3] = [None, None, None];
    let mut reports = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let report = report(line, &mut header).with_context(|| format!("line {}", index + 1))?;
        reports.extend(report);
    }
    Ok(reports)
}

/// The report of one line; `None` for a line that only names the device.
fn report(line: &str, header: &mut [Option<String>; 3]) -> Result<Option<Report>> {
    let mut object: Map<String, Value> =
        serde_json::from_str(line).context("it is no JSON object")?;
    let names = ["device", "driver", "recorded"];
    let mut own = header.clone();
    for (name, slot) in names.iter().zip(&mut own) {
        match object.remove(*name) {
            None => {}
            Some(Value::String(text)) if !text.is_empty() => *slot = Some(text),
            Some(other) => bail!("`{name}` is {other}; it must be a text"),
        }
    }
    if let Some(schema) = object.remove("schema")
        && schema != SCHEMA
    {
        bail!("its schema is {schema}, and this program reads {SCHEMA}");
    }
    if !object.contains_key("kernel") {
        *header = own;
        return Ok(None);
    }
    let row: Row =
        serde_json::from_value(Value::Object(object)).context("it is no row of evidence")?;
    row.validate()?;
    let [Some(device), Some(driver), Some(recorded)] = own else {
        bail!("neither the row nor a line before it names device, driver and recorded");
    };
    validate_day(&recorded)?;
    Ok(Some(Report { device, driver, recorded, row }))
}

/// Refuses what is no day, `YYYY-MM-DD`.
pub(crate) fn validate_day(day: &str) -> Result<()> {
    let pattern = b"dddd-dd-dd";
    let fits = day.len() == pattern.len()
        && day.bytes().zip(pattern).all(|(byte, wanted)| match wanted {
            b'd' => byte.is_ascii_digit(),
            other => byte == *other,
        });
    if !fits {
        bail!("recorded is `{day}`; it must be a day, as in 2026-01-31");
    }
    Ok(())
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
