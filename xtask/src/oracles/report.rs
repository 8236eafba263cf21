//! The report of a topic: what each case is, and what the documents print beside what is computed.

use std::fmt::Write;

use serde_json::Value;

use super::{Outcome, Printed};

/// Longest value that a table shows whole.
const SHOWN: usize = 72;

pub(super) fn of_topic(topic: &str, cases: &[&Outcome]) -> String {
    let mut text = format!(
        "# {topic}\n\n\
         Written by `cargo xtask oracles` from `fixtures/seeds/{topic}.json`: each case was run\n\
         and is what the fixture expects. Everything is computed, nothing is measured.\n\n\
         | case | kind | of | claims | note |\n| --- | --- | --- | --- | --- |\n"
    );
    for case in cases {
        let Outcome { id, kind, source, .. } = case;
        let note = case.note.as_deref().unwrap_or("");
        let claims = case.claims.join(" ");
        let _ = writeln!(text, "| {id} | {kind} | {source} | {claims} | {} |", cell(note));
    }
    let printed = cases.iter().flat_map(|case| case.printed.iter().map(move |p| (case, p)));
    let rows: Vec<String> = printed.map(|(case, printed)| row(&case.id, printed)).collect();
    if !rows.is_empty() {
        text.push_str(
            "\n## What the document prints\n\n\
             | case | figure | printed | computed | |\n| --- | --- | --- | --- | --- |\n",
        );
        text.push_str(&rows.concat());
    }
    text
}

fn row(id: &str, printed: &Printed) -> String {
    let at = printed.at.as_deref().unwrap_or("").trim_start_matches('/').replace('/', ".");
    let computed = printed.computed.as_ref().map_or_else(String::new, shown);
    let verdict = match printed.agrees {
        Some(true) => "agrees",
        Some(false) => "**differs**",
        None => "quoted",
    };
    format!("| {id} | {at} | {} | {computed} | {verdict} |\n", shown(&printed.value))
}

/// A value as a table has it: reals to six digits, since the last ones depend on the machine.
fn shown(value: &Value) -> String {
    let text = rounded(value);
    if text.len() <= SHOWN { cell(&text) } else { "(list)".to_owned() }
}

fn rounded(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => real(number.as_f64().unwrap_or(f64::NAN)),
        Value::Array(values) => {
            format!("[{}]", values.iter().map(rounded).collect::<Vec<_>>().join(", "))
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name} {}", rounded(value));
            fields.iter().map(field).collect::<Vec<_>>().join(", ")
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn real(value: f64) -> String {
    if value == 0.0 || (1e-4..1e15).contains(&value.abs()) {
        let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
        let text = format!("{value:.*}", (5 - digits).max(0) as usize);
        if !text.contains('.') {
            return text;
        }
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    // Rounding noise: its size, not its digits.
    format!("{value:.0e}")
}

pub(super) fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reals_have_six_digits() {
        let values = [0.0, 2.5, 1.0 / 3.0, -1234.5678, 1e20, 4.44e-16];
        let texts = ["0", "2.5", "0.333333", "-1234.57", "1e20", "4e-16"];
        assert_eq!(values.map(real), texts);
    }
}
