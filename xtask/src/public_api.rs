//! `cargo xtask public-api`: everything that users of the library can name, as a text that a review
//! can read.
//!
//! From rustdoc's pages, which every compiler writes: its JSON is another form with every release,
//! and only unstable compilers give it. Pages hold each item's declaration, methods and trait
//! implementations, written as Rust; what follows from traits for all types is left out.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use regex_lite::Regex;

use crate::measured::Options;
use crate::workspace::{cargo, read_text, root, run as run_command, target, write_or_compare};

const FILE: &str = "fixtures/public-api.txt";
const CRATE: &str = "ferroflash";
const HEAD: &str = "\
# Everything public of the crate ferroflash; written by `cargo xtask public-api`. A change here is a
# change for users.
";
/// Where the implementations begin that no one wrote.
const UNWRITTEN: [&str; 2] =
    ["id=\"synthetic-implementations-list\"", "id=\"blanket-implementations-list\""];
/// Where the implementations of traits begin.
const OF_TRAITS: &str = "id=\"trait-implementations-list\"";

/// Runs `public-api`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let document = ["doc", "--quiet", "--no-deps", "--lib", "--package", CRATE];
    run_command(cargo().args(document).env("RUSTDOCFLAGS", "-D warnings"))?;
    let text = snapshot(&target().join("doc").join(CRATE))?;
    write_or_compare(&root().join(FILE), &text, options.check, "public-api")
}

/// Fails where the text is not the library's.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

/// Every item of the list of all items, with what its page declares.
fn snapshot(folder: &Path) -> Result<String> {
    let list = read_text(&folder.join("all.html"))?;
    let mut pages: Vec<&str> = expression(r#"href="([a-z_/]*[a-z]+\.\w+\.html)""#)?
        .captures_iter(&list)
        .filter_map(|found| found.get(1).map(|page| page.as_str()))
        .collect();
    pages.sort_unstable();
    pages.dedup();
    if pages.is_empty() {
        bail!("{} lists no items", folder.join("all.html").display());
    }
    let mut text = HEAD.to_owned();
    for page in pages {
        let (path, name) = page.rsplit_once('/').unwrap_or(("", page));
        let mut words = name.split('.');
        let (kind, name) = (words.next(), words.next());
        let (kind, name) = kind.zip(name).with_context(|| format!("{page} names no item"))?;
        let modules = path.split('/').filter(|module| !module.is_empty());
        let path: Vec<&str> = [CRATE].into_iter().chain(modules).chain([name]).collect();
        let _ = writeln!(text, "\n{kind} {}", path.join("::"));
        for line in declarations(&read_text(&folder.join(page))?)? {
            let _ = writeln!(text, "    {line}");
        }
    }
    Ok(text)
}

/// What a page declares, a line each.
fn declarations(page: &str) -> Result<Vec<String>> {
    let end = UNWRITTEN.iter().filter_map(|mark| page.find(mark)).min().unwrap_or(page.len());
    let written = &page[..end];
    let (own, of_traits) = written.split_at(written.find(OF_TRAITS).unwrap_or(written.len()));
    let find = |text: &str, pattern: &str| -> Result<Vec<String>> {
        let found = expression(pattern)?;
        let found = found.captures_iter(text).filter_map(|found| found.get(1));
        found.map(|inner| plain(inner.as_str())).collect()
    };
    let mut lines = find(own, r#"(?s)<pre class="rust item-decl">(.*?)</pre>"#)?;
    lines.extend(find(own, r#"(?s)<h[34] class="code-header">(.*?)</h[34]>"#)?);
    // Methods of traits are the trait's; that it is implemented is what counts.
    let mut traits = find(of_traits, r#"(?s)<h3 class="code-header">(.*?)</h3>"#)?;
    // What the compiler marks patterns with is nobody's to use.
    traits.retain(|line| !line.contains("StructuralPartialEq"));
    traits.sort_unstable();
    lines.extend(traits);
    if lines.is_empty() {
        bail!("a page declares nothing: rustdoc writes pages otherwise than is known here");
    }
    Ok(lines)
}

/// HTML as text, in one line.
fn plain(html: &str) -> Result<String> {
    let without = expression(r"(?s)<summary.*?</summary>")?.replace_all(html, "");
    let text = expression(r"<[^>]*>")?.replace_all(&without, "").into_owned();
    let text = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&nbsp;", " ")]
        .into_iter()
        .fold(text, |text, (escaped, c)| text.replace(escaped, c))
        .replace("&amp;", "&")
        .replace('ⓘ', "");
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn expression(pattern: &str) -> Result<Regex> {
    Regex::new(pattern).with_context(|| format!("the pattern {pattern}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_give_declarations_methods_and_traits() {
        let page = r#"<pre class="rust item-decl"><code>pub struct A&lt;'a&gt; {
            <details><summary>Show 1 field</summary>pub b: <a href="x">B</a>,</details>}</code>
            </pre><h3 class="code-header">impl A</h3><h4 class="code-header">pub fn new() -&gt;
            &amp;Self<a class="tooltip">ⓘ</a></h4><div id="trait-implementations-list">
            <h3 class="code-header">impl Drop for A</h3><h4 class="code-header">fn drop()</h4>
            <h3 class="code-header">impl Clone for A</h3>
            <div id="synthetic-implementations-list"><h3 class="code-header">impl Send</h3>"#;
        let expected = [
            "pub struct A<'a> { pub b: B,}",
            "impl A",
            "pub fn new() -> &Self",
            "impl Clone for A",
            "impl Drop for A",
        ];
        assert_eq!(declarations(page).expect("it declares something"), expected);
        assert!(declarations("<p>nothing</p>").is_err());
    }
}
