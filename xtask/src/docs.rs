//! Links of the documentation: every local one leads somewhere.
//!
//! A link is checked where it is relative: the file exists in the workspace; `#section` is a
//! heading of that page, by the rules of the common forges; `#id` of a fixture under
//! `fixtures/seeds` is one of its cases. The text of a link to a case is the case's id. Every page
//! and figure under docs can be reached from `docs/README.md`. What lies on the network is left
//! alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{files_under, read_text, root};

/// Folders whose pages are checked, with all folders in them.
const TREES: &[&str] = &["docs", "fixtures"];

/// Folders of which only the pages themselves are checked.
const FOLDERS: &[&str] = &["", "python"];

/// Where a reader begins.
const INDEX: &str = "docs/README.md";

/// A link as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    text: String,
    target: String,
}

/// Checks every page.
pub(crate) fn check() -> Result<()> {
    let root = root();
    let mut pages = Vec::new();
    for tree in TREES {
        pages.extend(files_under(&root.join(tree))?);
    }
    for folder in FOLDERS {
        let entries = std::fs::read_dir(root.join(folder));
        for entry in entries.with_context(|| format!("cannot list {folder:?}"))? {
            pages.push(entry.with_context(|| format!("cannot list {folder:?}"))?.path());
        }
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    let mut wrong = Vec::new();
    let mut leads: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
    let mut count = 0;
    for page in &pages {
        let name = page.strip_prefix(&root).unwrap_or(page);
        for link in links(&read_text(page)?) {
            count += 1;
            match follow(&root, name, &link) {
                Ok(Some(file)) => drop(leads.entry(name.to_path_buf()).or_default().insert(file)),
                Ok(None) => {}
                Err(why) => wrong.push(format!("{}:{}: {why:#}", name.display(), link.line)),
            }
        }
    }
    let reached = reached(&leads, Path::new(INDEX));
    for file in files_under(&root.join("docs"))? {
        let name = file.strip_prefix(&root).unwrap_or(&file);
        let is_page =
            name.extension().is_some_and(|kind| kind == "md" || kind == "svg" || kind == "html");
        if is_page && !reached.contains(name) {
            wrong.push(format!("{}: no way leads there from {INDEX}", name.display()));
        }
    }
    if !wrong.is_empty() {
        bail!("{} of {count} links:\n{}", wrong.len(), wrong.join("\n"));
    }
    eprintln!("{count} links of {} pages", pages.len());
    Ok(())
}

/// The file that a link of `page` leads to, relative to the root; none for other places.
fn follow(root: &Path, page: &Path, link: &Link) -> Result<Option<PathBuf>> {
    let is_elsewhere = ["http:", "https:", "mailto:"].iter().any(|at| link.target.starts_with(at));
    if is_elsewhere {
        return Ok(None);
    }
    let (path, fragment) = link.target.split_once('#').unwrap_or((&link.target, ""));
    let file = if path.is_empty() {
        page.to_path_buf()
    } else {
        let folder = page.parent().unwrap_or(Path::new(""));
        normal(&folder.join(path)).with_context(|| format!("{path} leaves the workspace"))?
    };
    let place = root.join(&file);
    if !place.exists() {
        bail!("there is no {}", file.display());
    }
    if fragment.is_empty() {
        return Ok(Some(file));
    }
    match place.extension().and_then(|extension| extension.to_str()) {
        Some("md") => {
            if !anchors(&read_text(&place)?).contains(fragment) {
                bail!("{} has no section #{fragment}", file.display());
            }
        }
        Some("json") => {
            if !cases(&read_text(&place)?)?.contains(fragment) {
                bail!("{} has no case {fragment}", file.display());
            }
            if link.text != fragment {
                bail!("a link to case {fragment} is called {:?}", link.text);
            }
        }
        _ => bail!("{} has no sections", file.display()),
    }
    Ok(Some(file))
}

/// A relative path without `.` and `..`; none if it leaves its root.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !normal.pop() {
                    return None;
                }
            }
            Component::Normal(part) => normal.push(part),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

/// Everything that links lead to from `start`, itself included.
fn reached(leads: &BTreeMap<PathBuf, BTreeSet<PathBuf>>, start: &Path) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::from([start.to_path_buf()]);
    let mut left = vec![start.to_path_buf()];
    while let Some(page) = left.pop() {
        for next in leads.get(&page).into_iter().flatten() {
            if reached.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    reached
}

/// The ids of a fixture's cases.
fn cases(fixture: &str) -> Result<BTreeSet<String>> {
    let fixture: Value = serde_json::from_str(fixture).context("the fixture is not JSON")?;
    let cases = fixture["cases"].as_array().context("the fixture has no cases")?;
    Ok(cases.iter().filter_map(|case| case["id"].as_str()).map(str::to_owned).collect())
}

/// Anchors of a page's headings: lower case, words joined by hyphens, a number after the second of
/// a name.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(page) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.flat_map(char::to_lowercase).collect();
        let anchor = anchor.replace(' ', "-");
        let mut numbered = anchor.clone();
        let mut number = 0;
        while !anchors.insert(numbered.clone()) {
            number += 1;
            numbered = format!("{anchor}-{number}");
        }
    }
    anchors
}

/// Lines outside fenced code, with their numbers.
fn prose(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    page.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((at + 1, line))
    })
}

/// Every `[text](target)` of a page, images included; the two halves may be on two lines, as may
/// the text. What stands between backquotes is code, where it is not the text itself.
fn links(page: &str) -> Vec<Link> {
    let mut text = String::new();
    let mut starts = Vec::new();
    for (line, content) in prose(page) {
        starts.push((text.len(), line));
        text.push_str(&without_code(content));
        text.push('\n');
    }
    let line_of = |at: usize| {
        let after = starts.partition_point(|(start, _)| *start <= at);
        starts.get(after.saturating_sub(1)).map_or(0, |(_, line)| *line)
    };
    let mut found = Vec::new();
    let mut rest = 0;
    while let Some(middle) = text[rest..].find("](").map(|at| rest + at) {
        rest = middle + 2;
        let (Some(open), Some(end)) = (text[..middle].rfind('['), text[rest..].find(')')) else {
            continue;
        };
        let target = text[rest..rest + end].trim();
        let words: Vec<&str> = text[open + 1..middle].split_whitespace().collect();
        found.push(Link {
            line: line_of(middle),
            text: words.join(" "),
            target: target.split_whitespace().next().unwrap_or_default().to_owned(),
        });
    }
    found
}

/// A line with the brackets of its inline code taken out.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    let parts = parts.map(|(at, part)| match at % 2 {
        0 => part.to_owned(),
        _ => part.replace(['[', ']', '(', ')'], ""),
    });
    parts.collect::<Vec<_>>().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# One, two\n\nSee [the table](a.md#b) and\n[both\nhalves](b.md), \
        `[code](c.md)`.\n\n```\n[more](d.md)\n```\n\n## Q·Kᵀ again\n## One, two\n\
        ![figure](e.svg)\n";

    #[test]
    fn links_are_found_outside_code() {
        let link = |line, text: &str, target: &str| Link {
            line,
            text: text.to_owned(),
            target: target.to_owned(),
        };
        let expected = [
            link(3, "the table", "a.md#b"),
            link(5, "both halves", "b.md"),
            link(13, "figure", "e.svg"),
        ];
        assert_eq!(links(PAGE), expected);
    }

    #[test]
    fn anchors_are_those_of_forges() {
        let expected = ["one-two", "one-two-1", "qkᵀ-again"].map(str::to_owned);
        assert_eq!(anchors(PAGE), BTreeSet::from(expected));
    }

    #[test]
    fn wrong_links_are_found_out() {
        let root = root();
        let page = Path::new("docs/how-it-works/1-denominator.md");
        let follow = |text: &str, target: &str| {
            let link = Link { line: 1, text: text.to_owned(), target: target.to_owned() };
            follow(&root, page, &link).map_err(|why| why.to_string())
        };
        let fixture = "../../fixtures/seeds/schedule.json#m43-0x0AE-kv";
        let file = Some(PathBuf::from("fixtures/seeds/schedule.json"));
        assert_eq!(follow("m43-0x0AE-kv", fixture), Ok(file));
        assert!(follow("458 words", fixture).is_err_and(|why| why.contains("is called")));
        assert_eq!(follow("", "https://example.org"), Ok(None));
        for (target, why) in [
            ("2-none.md", "there is no"),
            ("2-state.md#nothing", "no section"),
            ("../../fixtures/seeds/schedule.json#m43-none", "no case"),
            ("../../../outside.md", "leaves"),
            ("figures/mass.svg#x", "no sections"),
        ] {
            assert!(follow("", target).is_err_and(|error| error.contains(why)), "{target}");
        }
    }

    #[test]
    fn the_documentation_is_sound() {
        check().expect("every link leads somewhere");
    }
}
