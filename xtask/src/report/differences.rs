//! Errors beside the peers': root mean square differences from f64 as parts of the values, points
//! on a line a contender; and every figure.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::svg::{Axis, escaped};
use super::tables::scale_line;
use crate::measured::errors::Call;
use crate::measured::{OURS, PEERS, geometric_mean, length};

const TENSORS: [&str; 4] = ["o", "dq", "dk", "dv"];

/// The lines of every tensor, and the figures behind them.
pub(super) fn beside_peers(calls: &[Call]) -> String {
    let contenders = contenders(calls);
    let scale = scale(calls);
    let mut html = format!("<div class=\"strips\">{}", scale_line(&scale));
    for tensor in TENSORS {
        for (id, name) in &contenders {
            let points: Vec<(f64, String)> =
                calls.iter().filter_map(|call| point(call, id, tensor)).collect();
            if !points.is_empty() {
                html += &line(&format!("{tensor}, {name}"), id, &points, &scale);
            }
        }
    }
    html + "</div>" + &figures(calls, &contenders)
}

/// Device, days, calls and seeds.
pub(super) fn source(calls: &[Call]) -> String {
    let set = |of: &dyn Fn(&Call) -> String| {
        let words: BTreeSet<String> = calls.iter().map(of).collect();
        escaped(&words.into_iter().collect::<Vec<_>>().join(", "))
    };
    format!(
        "{}; {}; {} passes of {} heads, {}, {} seeds each; the reference is attention in f64 of the \
         same rounded numbers.",
        set(&|call| call.device.clone()),
        set(&|call| call.day.clone()),
        calls.len(),
        set(&|call| (call.b * call.heads).to_string()),
        set(&|call| call.dtype.clone()),
        set(&|call| call.seeds.to_string())
    )
}

/// Who has figures, we first.
fn contenders(calls: &[Call]) -> Vec<(&'static str, &'static str)> {
    let is_there = |(id, _): &(&str, &str)| calls.iter().any(|call| call.errors.contains_key(*id));
    let all = std::iter::once((OURS, "ferroflash")).chain(PEERS);
    all.filter(is_there).collect()
}

/// A contender's error of a tensor over the tensor's own size, and what is said of it.
fn point(call: &Call, contender: &str, tensor: &str) -> Option<(f64, String)> {
    let size = call.reference.get(tensor)?.rms();
    let part = call.errors.get(contender)?.get(tensor)?.rms() / size;
    let said = format!("{}, {}: {}", call.place(), length(call.s), thousandths(part));
    (part.is_finite() && part > 0.0).then_some((part, said))
}

/// Half a power of two beyond all points on each side.
fn scale(calls: &[Call]) -> Axis {
    let ids: Vec<&str> = contenders(calls).into_iter().map(|(id, _)| id).collect();
    let of_call = |call| ids.iter().flat_map(move |id| TENSORS.map(|t| point(call, id, t)));
    let parts: Vec<f64> = calls.iter().flat_map(of_call).flatten().map(|(part, _)| part).collect();
    let least = parts.iter().copied().fold(f64::INFINITY, f64::min);
    let most = parts.iter().copied().fold(0.0, f64::max);
    let [least, most] = if parts.is_empty() { [1e-3, 1e-2] } else { [least * 0.9, most * 1.1] };
    let steps = (-40..40).map(|power: i32| 10_f64.powi(power));
    let ticks = steps.flat_map(|step| [1.0, 1.5, 2.0, 2.5, 3.0, 5.0].map(|factor| factor * step));
    let inside = ticks.filter(|tick| (least..=most).contains(tick));
    Axis {
        name: String::new(),
        range: [least, most],
        is_logarithmic: true,
        ticks: inside.map(|tick| (tick, thousandths(tick))).collect(),
    }
}

fn line(name: &str, id: &str, points: &[(f64, String)], scale: &Axis) -> String {
    let percent = |value: f64| format!("{:.2}%", 100.0 * scale.at(value));
    let parts: Vec<f64> = points.iter().map(|(part, _)| *part).collect();
    let mean = geometric_mean(&parts).unwrap_or(f64::NAN);
    let most = parts.iter().copied().fold(0.0, f64::max);
    let mut svg = format!(
        "<svg class=\"strip s-{id}\" width=\"100%\" height=\"22\" role=\"img\" \
         aria-label=\"errors\"><line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"11\" y2=\"11\"/>"
    );
    for (part, said) in points {
        let _ = write!(
            svg,
            "<circle class=\"dot\" cx=\"{}\" cy=\"11\" r=\"3.4\"><title>{}</title></circle>",
            percent(*part),
            escaped(said)
        );
    }
    let _ = write!(
        svg,
        "<line class=\"mean\" x1=\"{0}\" x2=\"{0}\" y1=\"4\" y2=\"18\"/></svg>",
        percent(mean)
    );
    format!(
        "<div class=\"bar open\"><p class=\"what\">{}</p><p class=\"asks\">{} calls</p>{svg}\
         <p class=\"got\"><b>{}</b> mean, most {}</p></div>",
        escaped(name),
        points.len(),
        thousandths(mean),
        thousandths(most)
    )
}

/// A part as it is written: three digits, in thousandths.
fn thousandths(part: f64) -> String {
    let value = part * 1e3;
    let digits = (2 - value.log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} ‰")
}

/// Every figure, behind a line that opens.
fn figures(calls: &[Call], contenders: &[(&str, &str)]) -> String {
    let mut html = String::from(
        "<details><summary>Every figure</summary><div class=\"scroll\"><table><thead><tr>\
         <th>call</th><th>values</th>",
    );
    for (_, name) in contenders {
        let _ = write!(html, "<th>{}</th>", escaped(name));
    }
    html += "</tr></thead><tbody>";
    let mut sorted: Vec<&Call> = calls.iter().collect();
    sorted.sort_by_key(|call| (call.d, call.causal, call.s));
    for call in sorted {
        let kernel = escaped(call.kernel.as_deref().unwrap_or_default());
        for tensor in TENSORS {
            let Some(values) = call.reference.get(tensor) else { continue };
            let place = format!("{}, {}, {tensor}", call.place(), length(call.s));
            let _ = write!(
                html,
                "<tr title=\"{kernel}\"><th>{place}</th><td>{:.2e} ({:.1})</td>",
                values.rms(),
                values.max()
            );
            for (id, _) in contenders {
                let figures = call.errors.get(*id).and_then(|tensors| tensors.get(tensor));
                let cell = figures.map(|f| format!("{:.3e} ({:.1e})", f.rms(), f.max()));
                let _ = write!(html, "<td>{}</td>", cell.unwrap_or_else(|| "–".to_owned()));
            }
            html += "</tr>";
        }
    }
    html + "</tbody></table></div><p class=\"note\">Root mean square over all elements and seeds, \
            and the largest magnitude.</p></details>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_three_digits() {
        let texts = [2e-3, 2.3456e-3, 1.2e-6, 0.5].map(thousandths);
        assert_eq!(texts, ["2 ‰", "2.35 ‰", "0.0012 ‰", "500 ‰"]);
    }

    #[test]
    fn errors_are_parts_of_the_values() {
        let calls = crate::measured::errors::calls().expect("they read");
        assert!(!calls.is_empty(), "docs/benchmarks has no errors beside peers");
        let html = beside_peers(&calls);
        assert!(html.contains("o, ferroflash") && html.contains("dq, cuDNN"));
        // Sixteen bits keep 8 or 11 of them: a part in some hundreds, whoever computes.
        let (part, _) = point(&calls[0], OURS, "o").expect("the forward pass has o");
        assert!((1e-4..1e-2).contains(&part), "{part}");
        assert!(source(&calls).contains("3 seeds"));
    }
}
