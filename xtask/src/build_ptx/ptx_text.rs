//! The text of a PTX module: taken apart into entries, patched, put together again.
//!
//! rustc writes one module with every kernel of a family. Each kernel ships alone, so the module is
//! split: an entry with the header and only the declarations it uses. The text is normalised on
//! the way (no comments, one space, no numbering that depends on the other kernels), so that a
//! kernel's bytes change only when the kernel does.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};

/// A module, taken apart.
#[derive(Debug)]
pub(crate) struct Module {
    /// `.version`, such as `7.0`.
    pub(crate) version: String,
    /// `.target`, such as `sm_80`.
    pub(crate) target: String,
    declarations: Vec<Declaration>,
    /// Kernels, in the order of the text.
    pub(crate) entries: Vec<Entry>,
}

/// A variable of the module.
#[derive(Debug)]
struct Declaration {
    name: String,
    text: String,
}

/// A kernel of the module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    /// Its name.
    pub(crate) name: String,
    /// What stands between the parentheses.
    parameters: String,
    /// Directives between the parameters and the body.
    directives: Vec<String>,
    /// What stands between the braces, a statement a line.
    pub(crate) body: String,
}

impl Module {
    /// Takes a module apart; refuses functions, which only an inlining failure leaves behind.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let text = without_comments(text);
        let mut module = Self {
            version: String::new(),
            target: String::new(),
            declarations: Vec::new(),
            entries: Vec::new(),
        };
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let line = rest.lines().next().unwrap_or(rest);
            let words: Vec<&str> = line.split_whitespace().collect();
            let length = match words.as_slice() {
                [".version", version] => {
                    module.version = (*version).to_owned();
                    line.len()
                }
                [".target", target] => {
                    module.target = (*target).to_owned();
                    line.len()
                }
                [".address_size", "64"] | [".file", ..] => line.len(),
                _ => module.take(rest)?,
            };
            rest = rest[length..].trim_start();
        }
        if module.version.is_empty() || module.target.is_empty() {
            bail!("the text has no .version or no .target: it is no PTX module");
        }
        Ok(module)
    }

    /// Takes the entry or declaration that `text` begins with; returns how long it is.
    fn take(&mut self, text: &str) -> Result<usize> {
        let mut depth = 0u32;
        let mut opened = None;
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                b'{' => {
                    opened = opened.or(Some(at));
                    depth += 1;
                }
                b'}' => {
                    depth = depth.checked_sub(1).context("a brace closes that none opened")?;
                    let head = &text[..opened.unwrap_or(at)];
                    if depth == 0 && !head.contains('=') {
                        self.take_block(head, &text[head.len() + 1..at])?;
                        return Ok(at + 1);
                    }
                }
                b';' if depth == 0 => {
                    self.take_declaration(&text[..=at])?;
                    return Ok(at + 1);
                }
                _ => {}
            }
        }
        bail!("the text ends inside `{}`", first_words(text))
    }

    fn take_block(&mut self, head: &str, body: &str) -> Result<()> {
        let words: Vec<&str> = head.split_whitespace().collect();
        if words.contains(&".section") {
            return Ok(());
        }
        if words.contains(&".func") {
            bail!("`{}` is a function: everything must be inlined", first_words(head));
        }
        let Some(after) = head.split_once(".entry").map(|(_, after)| after) else {
            bail!("`{}` is neither an entry nor a variable", first_words(head));
        };
        let (name, after) = after.split_once('(').context("an entry without parameters")?;
        let (parameters, directives) =
            after.split_once(')').context("an entry whose parameters do not end")?;
        self.entries.push(Entry {
            name: name.trim().to_owned(),
            parameters: one_spaced(parameters),
            directives: directives.lines().map(one_spaced).filter(|d| !d.is_empty()).collect(),
            body: normalised_lines(body),
        });
        Ok(())
    }

    fn take_declaration(&mut self, text: &str) -> Result<()> {
        if text.split_whitespace().any(|word| word == ".func") {
            bail!("`{}` declares a function: everything must be inlined", first_words(text));
        }
        let head = text.split(['[', '=', ';']).next().unwrap_or(text);
        let name = head.split_whitespace().last().context("an empty declaration")?;
        self.declarations.push(Declaration { name: name.to_owned(), text: one_spaced(text) });
        Ok(())
    }

    /// One kernel as a module of its own.
    pub(crate) fn standalone(&self, entry: &Entry) -> String {
        let mut used = vec![false; self.declarations.len()];
        let mut texts = vec![entry.text()];
        while let Some(text) = texts.pop() {
            for identifier in identifiers(&text) {
                let found = self.declarations.iter().position(|d| d.name == identifier);
                if let Some(index) = found.filter(|&index| !used[index]) {
                    used[index] = true;
                    texts.push(self.declarations[index].text.clone());
                }
            }
        }
        let declarations = self.declarations.iter().zip(used).filter(|(_, used)| *used);
        let declarations: Vec<&Declaration> = declarations.map(|(d, _)| d).collect();

        // A compiler's names for constants hold a hash of the crate: ours hold the kernel's name.
        let own = declarations.iter().filter(|d| !d.text.starts_with(".extern")).enumerate();
        let names: HashMap<&str, String> =
            own.map(|(i, d)| (d.name.as_str(), format!("{}_data_{i}", entry.name))).collect();

        let mut text =
            format!(".version {}\n.target {}\n.address_size 64\n", self.version, self.target);
        for declaration in declarations {
            text.push_str(&renamed(&declaration.text, &names));
            text.push('\n');
        }
        text.push_str(&renamed(&entry.text(), &names));
        text
    }
}

impl Entry {
    /// Writes the launch bounds that rustc has no attribute for.
    pub(crate) fn set_launch_bounds(&mut self, threads: u32, blocks_per_sm: u32) -> Result<()> {
        if let Some(there) = self.directives.first() {
            bail!("{} has `{there}` already: the bounds would be patched twice", self.name);
        }
        self.directives.push(format!(".maxntid {threads}, 1, 1"));
        if blocks_per_sm > 0 {
            self.directives.push(format!(".minnctapersm {blocks_per_sm}"));
        }
        Ok(())
    }

    /// Raises the alignment of the first parameter, which rustc cannot be asked for.
    pub(crate) fn set_parameter_alignment(&mut self, bytes: u32) -> Result<()> {
        let parameter = format!(".b8 {}_param_0[", self.name);
        let found = format!(".param .align 8 {parameter}");
        let times = self.parameters.matches(&found).count();
        if times != 1 {
            bail!("{} has `{found}` {times} times; the alignment patch needs it once", self.name);
        }
        let wanted = format!(".param .align {bytes} {parameter}");
        self.parameters = self.parameters.replacen(&found, &wanted, 1);
        Ok(())
    }

    /// The entry's text.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(".visible .entry {}({})\n", self.name, self.parameters.trim());
        for directive in &self.directives {
            text.push_str(directive);
            text.push('\n');
        }
        text.push_str("{\n");
        text.push_str(&self.body);
        text.push_str("}\n");
        text
    }

    /// The opcodes of the body, in order: no operands, predicates, labels or directives.
    pub(crate) fn opcodes(&self) -> impl Iterator<Item = &str> {
        self.body.split(';').filter_map(|statement| {
            let mut words = statement.split([' ', '\n', '\t', '{', '}']).filter(|w| !w.is_empty());
            let opcode = words.find(|word| !word.starts_with('@') && !word.ends_with(':'))?;
            (!opcode.starts_with('.')).then_some(opcode)
        })
    }
}

fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("/") {
        let (before, comment) = rest.split_at(at);
        kept.push_str(before);
        if comment.starts_with("//") {
            rest = &comment[comment.find('\n').unwrap_or(comment.len())..];
        } else if comment.starts_with("/*") {
            rest = comment.find("*/").map_or("", |end| &comment[end + 2..]);
            kept.push(' ');
        } else {
            kept.push('/');
            rest = &comment[1..];
        }
    }
    kept.push_str(rest);
    kept
}

/// The text with runs of white space made one space.
pub(crate) fn one_spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A body's lines, one-spaced; debug directives left out; branch labels without the number of the
/// function in its module.
fn normalised_lines(body: &str) -> String {
    let lines = body.lines().map(one_spaced);
    let kept = lines.filter(|line| !line.is_empty() && !line.starts_with(".loc "));
    let mut text = String::with_capacity(body.len());
    for line in kept {
        text.push_str(&line);
        text.push('\n');
    }
    map_identifiers(&text, |identifier| {
        let (function, block) = identifier.strip_prefix("$L__BB")?.split_once('_')?;
        let numbered = !function.is_empty() && function.bytes().all(|b| b.is_ascii_digit());
        numbered.then(|| format!("$L{block}"))
    })
}

fn renamed(text: &str, names: &HashMap<&str, String>) -> String {
    map_identifiers(text, |identifier| names.get(identifier).cloned())
}

fn is_identifier(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '$' | '%')
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_identifier(c)).filter(|word| !word.is_empty())
}

fn map_identifiers(text: &str, map: impl Fn(&str) -> Option<String>) -> String {
    let mut mapped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_identifier) {
        mapped.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = rest.find(|c| !is_identifier(c)).unwrap_or(rest.len());
        match map(&rest[..end]) {
            Some(other) => mapped.push_str(&other),
            None => mapped.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    mapped.push_str(rest);
    mapped
}

fn first_words(text: &str) -> String {
    text.split_whitespace().take(6).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "ptx_text_tests.rs"]
mod tests;
