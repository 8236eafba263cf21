//! A run in words, for a terminal.

use std::fmt::Write;

use super::record::{OURS, Roof, RoofKind, Row, Run};
use super::statistics::Spread;

/// A queued call that takes the host as long as the device is bound by the host.
const HOST_BOUND: f64 = 0.9;

/// The whole run.
pub(super) fn words(run: &Run) -> String {
    let mut text = String::new();
    let on = &run.device;
    let driver = on.driver.as_ref().map_or_else(String::new, |driver| format!(", driver {driver}"));
    let units = if on.backend == "cpu" { "threads" } else { "multiprocessors" };
    let _ = writeln!(text, "device  {}{driver}, {} {units}", on.name, on.units);
    let _ = writeln!(text, "date    {}, ferroflash {}", run.date, run.ferroflash);
    let _ = writeln!(text, "method  {}", run.method);
    let _ = writeln!(text, "clocks  {}", run.clocks);
    for (name, version) in &run.peers {
        let _ = writeln!(text, "peer    {name} {version}");
    }
    for roof in &run.roofs {
        let _ = writeln!(text, "roof    {}", roof_in_words(roof));
    }
    if !run.rows.is_empty() {
        text.push('\n');
        text.push_str(&columns(&cells(run)));
    }
    for left in &run.left_out {
        let _ = writeln!(text, "left out: {}: {}", left.what, left.why);
    }
    text
}

/// A roof's rate and what was done.
pub(crate) fn roof_in_words(roof: &Roof) -> String {
    let spread = Spread::of(&roof.ms);
    let rate = rate_in_words(roof.kind, roof.per_second());
    let share = 100.0 * spread.interquartile / spread.median;
    format!("{rate} (quartiles {share:.1} % apart): {}", roof.method)
}

/// A rate in units that suit it.
pub(crate) fn rate_in_words(kind: RoofKind, per_second: f64) -> String {
    let (unit, large) = match kind {
        RoofKind::Copy => ("B/s", 1e12),
        RoofKind::Matrix => ("FLOP/s", 1e12),
    };
    if per_second >= large {
        format!("{:.2} T{unit}", per_second / 1e12)
    } else {
        format!("{:.1} G{unit}", per_second / 1e9)
    }
}

/// The table's cells, its head first.
fn cells(run: &Run) -> Vec<Vec<String>> {
    let contenders = run.contenders();
    let giga = run.rows.iter().all(|row| contenders.iter().all(|who| row.tera(who) < Some(1.0)));
    let unit = if giga { "GFLOP/s" } else { "TFLOP/s" };
    let mut head: Vec<String> =
        ["type", "pass", "d", "s", "b", "heads", "ms", "least", "most", "iqr %"]
            .map(str::to_owned)
            .to_vec();
    head.extend(contenders.iter().map(|who| match *who {
        OURS => unit.to_owned(),
        who => who.to_owned(),
    }));
    let has_peers = contenders.len() > 1;
    if has_peers {
        head.push("÷ best".to_owned());
    }
    let has_clocks = run.rows.iter().any(|row| row.clock.is_some());
    if has_clocks {
        head.push("MHz".to_owned());
    }
    head.push("notes".to_owned());
    let mut lines = vec![head];
    for row in &run.rows {
        let workload = &row.workload;
        let who = if row.ms.contains_key(OURS) { Some(OURS) } else { None };
        let spread = who.and_then(|who| row.ms.get(who)).map(|ms| Spread::of(ms));
        let of = |value: fn(&Spread) -> f64| {
            spread.as_ref().map_or_else(String::new, |spread| milliseconds(value(spread)))
        };
        let mut line = vec![
            workload.dtype.clone(),
            workload.kind(),
            workload.channels(),
            workload.lengths(),
            workload.b.to_string(),
            workload.heads(),
            of(|spread| spread.median),
            of(|spread| spread.least),
            of(|spread| spread.most),
            spread.as_ref().map_or_else(String::new, |spread| {
                format!("{:.1}", 100.0 * spread.interquartile / spread.median)
            }),
        ];
        let scale = if giga { 1e3 } else { 1.0 };
        line.extend(contenders.iter().map(|who| match row.tera(who) {
            Some(rate) => format!("{:.1}", rate * scale),
            None => "-".to_owned(),
        }));
        if has_peers {
            line.push(row.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")));
        }
        if has_clocks {
            let mhz = row.clock.as_ref().and_then(|clock| clock.sm_mhz);
            line.push(mhz.map_or_else(|| "-".to_owned(), |mhz| mhz.to_string()));
        }
        line.push(notes(row, &run.device.backend));
        lines.push(line);
    }
    lines
}

impl Row {
    /// 10¹² operations a second.
    pub(super) fn tera(&self, contender: &str) -> Option<f64> {
        self.rate(contender).map(|rate| rate * 1e-12)
    }

    /// This library's rate over the best of the others'.
    pub(super) fn ratio(&self) -> Option<f64> {
        let others = self.ms.keys().filter(|who| *who != OURS).filter_map(|who| self.rate(who));
        let best = others.fold(0.0, f64::max);
        if best > 0.0 { Some(self.rate(OURS)? / best) } else { None }
    }
}

/// The kernel, and what to know about the times.
fn notes(row: &Row, backend: &str) -> String {
    let mut notes = Vec::new();
    notes.extend(row.kernel.clone());
    if let (Some(ms), Some(host)) = (row.ms.get(OURS), row.host_ms.get(OURS))
        && backend == "cuda"
        && *host > HOST_BOUND * Spread::of(ms).median
    {
        notes.push(format!("the host needs {} ms a call", milliseconds(*host)));
    }
    if let Some(clock) = &row.clock
        && !clock.throttled_by.is_empty()
    {
        notes.push(format!("throttled: {}", clock.throttled_by.join(", ")));
    }
    notes.join("; ")
}

/// Four significant digits or so.
pub(super) fn milliseconds(ms: f64) -> String {
    match ms {
        ms if ms >= 100.0 => format!("{ms:.1}"),
        ms if ms >= 1.0 => format!("{ms:.3}"),
        ms => format!("{ms:.4}"),
    }
}

/// Columns as wide as they need; names on the left, numbers on the right.
fn columns(lines: &[Vec<String>]) -> String {
    let Some(head) = lines.first() else { return String::new() };
    let of = |line: &[String], column: usize| line.get(column).map_or(0, |c| c.chars().count());
    let widths: Vec<usize> = (0..head.len())
        .map(|column| lines.iter().map(|line| of(line, column)).max().unwrap_or(0))
        .collect();
    let is_text = |column: usize| column < 2 || column + 1 == head.len();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if is_text(column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;

    #[test]
    fn columns_line_up() {
        let mut run = run(&[2.0; 20]);
        let said = words(&run);
        assert!(said.contains("GFLOP/s") && said.contains("cpu_tiled_forward"), "{said}");
        run.rows[0].ms.insert("torch".to_owned(), vec![4.0; 20]);
        let said = words(&run);
        let lines: Vec<&str> = said.lines().collect();
        let head = lines.iter().position(|line| line.starts_with("type")).expect("a head");
        assert!(lines[head].contains("torch  ÷ best"), "{said}");
        let end = |line: &str, word: &str| line[..line.find(word).expect(word)].chars().count();
        let (torch, rate) = (end(lines[head], "torch") + 5, end(lines[head + 1], "8.4") + 3);
        assert_eq!(torch, rate, "{said}");
        assert!(lines[head + 1].contains("2.000"), "{said}");
    }

    #[test]
    fn what_held_the_clock_down_is_said() {
        let mut run = run(&[2.0; 20]);
        run.rows[0].clock = Some(crate::bench::record::Clock {
            sm_mhz: Some(1980),
            memory_mhz: None,
            celsius: None,
            watts: None,
            throttled_by: vec!["power cap".to_owned()],
        });
        let said = words(&run);
        assert!(said.contains("1980") && said.contains("throttled: power cap"), "{said}");
    }
}
