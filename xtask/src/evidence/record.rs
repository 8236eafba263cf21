//! Records of GPU runs, schema `ferroflash.kernel-evidence.v1`.

use std::collections::HashSet;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::schema::Schema;

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
    /// Clocks seen, where they were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) clocks: Option<String>,
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
    pub(crate) clocks: Option<String>,
    pub(crate) row: Row,
}

/// What came of adding a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// There was none of its case.
    Anew,
    /// There was an equal one.
    Again,
    /// It took the place of one with other results.
    Instead,
}

impl Record {
    /// A record of one row.
    pub(crate) fn new(report: Report) -> Self {
        let Report { device, driver, recorded, clocks, row } = report;
        Self { schema: SCHEMA.to_owned(), device, driver, recorded, clocks, rows: vec![row] }
    }

    /// Reads a record.
    pub(crate) fn from_json(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|why| no_json(&why))?;
        of_this_schema(&value["schema"])?;
        Schema::named("kernel-evidence.v1")?.validate(&value)?;
        let record: Self = serde_json::from_value(value)
            .with_context(|| format!("it does not read as {SCHEMA}"))?;
        record.rows.iter().try_for_each(Row::validate)?;
        Ok(record)
    }

    /// Adds a row, in the place of an older one of the same kernel, form and workload.
    pub(crate) fn add(&mut self, row: Row) -> Added {
        match self.rows.iter_mut().find(|old| old.same_case(&row)) {
            Some(old) if *old == row => Added::Again,
            Some(old) => {
                *old = row;
                Added::Instead
            }
            None => {
                self.rows.push(row);
                Added::Anew
            }
        }
    }

    /// Refuses a record with two rows of one case.
    pub(crate) fn refuse_duplicates(&self) -> Result<()> {
        let mut seen = HashSet::new();
        match self.rows.iter().find(|row| !seen.insert(row.named())) {
            None => Ok(()),
            Some(row) => bail!("{} is there twice", row.named()),
        }
    }

    /// Names of the file it is kept in: the second where the first is of another driver.
    pub(crate) fn names(&self) -> [String; 2] {
        let with_driver = format!("{} driver {}", self.device, self.driver);
        [file_name(&self.recorded, &self.device), file_name(&self.recorded, &with_driver)]
    }

    /// The text to commit: a row a line, so that a change shows as one.
    pub(crate) fn text(&self) -> Result<String> {
        let mut text = String::from("{\n");
        for (name, value) in [
            ("schema", Some(&self.schema)),
            ("device", Some(&self.device)),
            ("driver", Some(&self.driver)),
            ("recorded", Some(&self.recorded)),
            ("clocks", self.clocks.as_ref()),
        ] {
            let Some(value) = value else { continue };
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
        self.kernel == other.kernel
            && self.form == other.form
            && self.workload == other.workload
            && self.other.get("sanitizer") == other.other.get("sanitizer")
    }

    /// Its case: what it is a row of.
    pub(crate) fn named(&self) -> String {
        let workload = serde_json::to_string(&self.workload).unwrap_or_default();
        let under = self.other.get("sanitizer").and_then(Value::as_str);
        let under = under.map(|tool| format!(" under {tool}")).unwrap_or_default();
        format!("{} ({}{under}), {workload}", self.kernel, self.form)
    }

    /// Whether it shows the kernel to be right: by its numbers, not by its word alone.
    pub(crate) fn holds(&self) -> bool {
        self.passed && self.max_error.is_some_and(|error| error <= self.tolerance)
    }

    /// What the schema cannot say.
    fn validate(&self) -> Result<()> {
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
    let first = text.trim_start().lines().next().unwrap_or_default();
    let is_whole = serde_json::from_str::<Value>(first).is_err()
        || serde_json::from_str::<Map<String, Value>>(text)
            .is_ok_and(|record| record.contains_key("rows"));
    if is_whole {
        let record = Record::from_json(text)?;
        record.refuse_duplicates()?;
        let Record { device, driver, recorded, clocks, rows, .. } = record;
        let report = |row| Report {
            device: device.clone(),
            driver: driver.clone(),
            recorded: recorded.clone(),
            clocks: clocks.clone(),
            row,
        };
        return Ok(rows.into_iter().map(report).collect());
    }
    let schema = Schema::named("kernel-evidence.v1")?;
    let mut header = Header::default();
    let mut reports = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let report =
            report(line, &mut header, &schema).with_context(|| format!("line {}", index + 1))?;
        reports.extend(report);
    }
    Ok(reports)
}

/// What a line names for those after it: device, driver, day and clocks.
#[derive(Clone, Default)]
struct Header([Option<String>; 4]);

/// The report of one line; `None` for a line that only names the device.
fn report(line: &str, header: &mut Header, schema: &Schema) -> Result<Option<Report>> {
    let mut object: Map<String, Value> = serde_json::from_str(line).map_err(|why| no_json(&why))?;
    let mut own = header.clone();
    for (name, slot) in ["device", "driver", "recorded", "clocks"].iter().zip(&mut own.0) {
        match object.remove(*name) {
            None => {}
            Some(Value::String(text)) if !text.is_empty() => *slot = Some(text),
            Some(other) => bail!("`{name}` is {other}; it must be a text"),
        }
    }
    if let Some(other) = object.remove("schema") {
        of_this_schema(&other)?;
    }
    if !object.contains_key("kernel") {
        if let Some(field) = object.keys().next() {
            bail!("it has the field `{field}` and no kernel");
        }
        *header = own;
        return Ok(None);
    }
    let row = Value::Object(object);
    schema.validate_as("row", &row)?;
    let row: Row = serde_json::from_value(row).context("it is no row of evidence")?;
    row.validate()?;
    if let (Some(named), Some(device)) = (&header.0[0], &own.0[0])
        && named != device
    {
        bail!("the row is of {device}, and the line before it names {named}: another device");
    }
    let [Some(device), Some(driver), Some(recorded), clocks] = own.0 else {
        bail!("neither the row nor a line before it names device, driver and recorded");
    };
    validate_day(&recorded)?;
    Ok(Some(Report { device, driver, recorded, clocks, row }))
}

/// What is not JSON: cut short, or wrong.
fn no_json(why: &serde_json::Error) -> anyhow::Error {
    match why.is_eof() {
        true => anyhow!("it is cut short: {why}"),
        false => anyhow!("it is no JSON object: {why}"),
    }
}

/// Refuses a record of another schema, or of another version of this one.
fn of_this_schema(schema: &Value) -> Result<()> {
    if schema != SCHEMA {
        bail!("its schema is {schema}, and this program reads {SCHEMA}");
    }
    Ok(())
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
pub(crate) mod tests;
