//! `cargo xtask readme`: the README's table of what is supported, from the library's own answers.

use std::fmt::Write;

use anyhow::{Context, Result, bail};

use crate::facts::{Answer, Feature, facts};
use crate::measured::Options;
use crate::workspace::{read_text, root, write_or_compare};

const FILE: &str = "README.md";
const BEGIN: &str = "<!-- support: written by `cargo xtask readme`, from the library's answers -->";
const END: &str = "<!-- support: end -->";

/// What stands above the table.
const WORDS: &str = "\
Who computes what: `tiled` on the CPU, where a call of each row has been run; on GPUs of compute
capability 9.0, and of 8.0 or any later one, the family of the kernel that the planner gives, or
why it refuses.

";

/// A column: its title, and the backends that must agree in it.
const COLUMNS: [(&str, &[&str]); 3] =
    [("CPU", &["cpu"]), ("9.0", &["h200"]), ("8.0", &["a100", "cc8.6"])];
/// Longest reason that is written in its cell.
const MOST_IN_CELL: usize = 30;
const DIRECTIONS: [&str; 2] = ["forward", "backward"];

/// Runs `readme`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let path = root().join(FILE);
    let text = replaced(&read_text(&path)?, &table(&facts()?.support)?)?;
    write_or_compare(&path, &text, options.check, "readme")
}

/// Fails where the table is not what the library says.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

/// The page with the table between its markers.
fn replaced(page: &str, table: &str) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("{FILE} lacks {BEGIN}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("{FILE} lacks {END}"))?;
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

fn table(features: &[Feature]) -> Result<String> {
    let mut text = format!("{WORDS}| |");
    for (title, _) in COLUMNS {
        DIRECTIONS.iter().for_each(|direction| text += &format!(" {title} {direction} |"));
    }
    text += "\n| --- |";
    text += &" --- |".repeat(COLUMNS.len() * DIRECTIONS.len());
    let mut reasons: Vec<String> = Vec::new();
    for feature in features {
        let _ = write!(text, "\n| {} |", feature.feature);
        for (title, backends) in COLUMNS {
            for direction in DIRECTIONS {
                let answer = agreed(feature, backends, direction)
                    .with_context(|| format!("{}, {title}", feature.feature))?;
                let _ = write!(text, " {} |", cell(answer, &mut reasons));
            }
        }
    }
    text += "\n";
    if !reasons.is_empty() {
        text += "\n";
        for (index, reason) in reasons.iter().enumerate() {
            let _ = writeln!(text, "{}. {reason}", index + 1);
        }
    }
    Ok(text)
}

/// What the backends of a column say in one voice; none where the question does not arise.
fn agreed<'f>(
    feature: &'f Feature,
    backends: &[&str],
    direction: &str,
) -> Result<Option<&'f Answer>> {
    let of = |backend: &&str| {
        let mut answers = feature.answers.iter();
        answers.find(|answer| answer.backend == *backend && answer.direction == direction)
    };
    let mut answers = backends.iter().map(of);
    let first = answers.next().flatten();
    let says = |answer: Option<&'f Answer>| answer.map(|answer| (&answer.by, &answer.refused));
    if answers.any(|answer| says(answer) != says(first)) {
        bail!("{} do not agree {direction}: give them columns of their own", backends.join(", "));
    }
    Ok(first)
}

/// Who computes it, or the reason why nobody does, or the reason's number if it is long.
fn cell(answer: Option<&Answer>, reasons: &mut Vec<String>) -> String {
    let Some(answer) = answer else { return String::new() };
    if let Some(by) = &answer.by {
        return by.clone();
    }
    let reason = answer.refused.clone().unwrap_or_default();
    if reason.len() <= MOST_IN_CELL {
        return format!("no: {reason}");
    }
    let number = reasons.iter().position(|known| *known == reason).unwrap_or_else(|| {
        reasons.push(reason);
        reasons.len() - 1
    });
    format!("no ({})", number + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str = "GPU kernels compute other types; cast the tensors or use the cpu";

    fn answer(backend: &str, direction: &str, by: Option<&str>) -> Answer {
        let why = if direction == "forward" { LONG } else { "has no such thing" };
        let refused = by.is_none().then(|| why.to_owned());
        let [backend, direction] = [backend, direction].map(str::to_owned);
        Answer { backend, direction, by: by.map(str::to_owned), refused }
    }

    fn feature(portable: [Option<&str>; 2]) -> Feature {
        let mut answers = Vec::new();
        for direction in DIRECTIONS {
            answers.push(answer("cpu", direction, Some("tiled")));
            answers.push(answer("h200", direction, None));
            answers.push(answer("a100", direction, portable[0]));
            answers.push(answer("cc8.6", direction, portable[1]));
        }
        Feature { feature: "sink".to_owned(), answers }
    }

    #[test]
    fn a_table_names_who_computes_and_why_not() {
        let text = table(&[feature([Some("portable"); 2])]).expect("they agree");
        let line =
            "| sink | tiled | tiled | no (1) | no: has no such thing | portable | portable |\n";
        assert!(text.contains(line), "{text}");
        assert!(text.ends_with(&format!("1. {LONG}\n")));
    }

    #[test]
    fn devices_of_one_column_must_agree() {
        let why = table(&[feature([Some("portable"), None])]).expect_err("they do not");
        assert!(format!("{why:#}").contains("a100, cc8.6 do not agree forward"));
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let page = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let expected = format!("before\n{BEGIN}\n\nnew\n\n{END}\nafter\n");
        assert_eq!(replaced(&page, "new\n").expect("it has markers"), expected);
        assert!(replaced("no markers", "new").is_err());
    }
}
