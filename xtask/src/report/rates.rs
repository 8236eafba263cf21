//! Rate against length, a panel a head dimension and mask; and the same as tables.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::svg::{Axis, Line, Panel, escaped};
use crate::measured::{DETERMINISTIC, OURS, PEERS, Row, length};

/// The panels of a direction.
pub(super) fn panels(rows: &[&Row]) -> String {
    let most = rows.iter().flat_map(|row| row.ms.keys().filter_map(|name| row.rate(name)));
    let most = most.fold(0.0, f64::max);
    let mut groups: BTreeMap<(u64, bool), Vec<&Row>> = BTreeMap::new();
    for row in rows {
        groups.entry((row.d, row.causal)).or_default().push(row);
    }
    let mut html = String::from("<div class=\"panels\">");
    for mask in [false, true] {
        for ((d, _), rows) in groups.iter().filter(|((_, causal), _)| *causal == mask) {
            let word = if mask { "causal" } else { "full" };
            let panel = Panel {
                title: format!("d = {d}, {word}"),
                x: lengths(rows),
                y: Axis::from_zero("TFLOP/s", most, 200.0),
                lines: lines(rows),
            };
            html += &panel.svg();
        }
    }
    html + "</div>"
}

/// The axis of the lengths of some rows.
fn lengths(rows: &[&Row]) -> Axis {
    let mut lengths: Vec<u64> = rows.iter().map(|row| row.s).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let (first, last) = (lengths.first().copied(), lengths.last().copied());
    let range = [first.unwrap_or(1), last.unwrap_or(2)].map(|s| s as f64);
    Axis {
        name: "query rows and keys".to_owned(),
        range: if range[0] == range[1] { [range[0] / 2.0, range[1] * 2.0] } else { range },
        is_logarithmic: true,
        ticks: lengths.iter().map(|s| (*s as f64, length(*s))).collect(),
    }
}

/// Contenders of some rows and their names, ours last.
fn contenders(rows: &[&Row]) -> Vec<(&'static str, &'static str)> {
    let is_there = |(id, _): &(&str, &str)| rows.iter().any(|row| row.ms.contains_key(*id));
    let mut contenders: Vec<_> = PEERS.into_iter().filter(is_there).collect();
    contenders.push((OURS, "ferroflash"));
    contenders
}

fn lines(rows: &[&Row]) -> Vec<Line> {
    let line = |(id, name): (&str, &str)| {
        let mut points: Vec<(f64, f64, String)> = rows
            .iter()
            .filter_map(|row| {
                let rate = row.rate(id)?;
                let said = format!("{name}, {}: {rate:.0} TFLOP/s", length(row.s));
                Some((row.s as f64, rate, said))
            })
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let name = short(name);
        Line { class: format!("s-{id}"), name, points, is_joined: true }
    };
    contenders(rows).into_iter().map(line).collect()
}

/// A name that fits beside a panel.
fn short(name: &str) -> String {
    name.replace("FlashAttention-", "FA")
}

/// Every median, with the spread of its rounds, behind a line that opens.
pub(super) fn figures(rows: &[&Row]) -> String {
    let mut all = contenders(rows);
    if rows.iter().any(|row| row.ms.contains_key(DETERMINISTIC)) {
        all.push((DETERMINISTIC, "ferroflash, deterministic"));
    }
    let mut html = String::from(
        "<details><summary>Every figure</summary><div class=\"scroll\"><table><thead><tr>\
         <th>call</th>",
    );
    for (_, name) in &all {
        let _ = write!(html, "<th>{}</th>", escaped(name));
    }
    html += "</tr></thead><tbody>";
    let mut sorted = rows.to_vec();
    sorted.sort_by_key(|row| (row.d, row.causal, row.s));
    for row in sorted {
        let kernel = escaped(row.kernel.as_deref().unwrap_or_default());
        let call = format!("{}, {}", row.place(), length(row.s));
        let _ = write!(html, "<tr title=\"{kernel}\"><th>{call}</th>");
        for (id, _) in &all {
            let cell = row.rate(id).map(|rate| format!("{rate:.0} ± {:.0}", spread(row, id)));
            let _ = write!(html, "<td>{}</td>", cell.unwrap_or_else(|| "–".to_owned()));
        }
        html += "</tr>";
    }
    html + "</tbody></table></div><p class=\"note\">TFLOP/s of the median round ± half the \
            distance between the first and third quarter of the rounds.</p></details>"
}

/// Half the distance between the quartiles of a contender's rate.
fn spread(row: &Row, contender: &str) -> f64 {
    let Some(rounds) = row.ms.get(contender) else { return 0.0 };
    let mut rates: Vec<f64> = rounds.iter().map(|time| row.flops() / time / 1e9).collect();
    rates.sort_by(f64::total_cmp);
    let at = |quarter: usize| rates[(rates.len() - 1) * quarter / 4];
    (at(3) - at(1)) / 2.0
}
