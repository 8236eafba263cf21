//! What the command says on stdout.

use std::io::{ErrorKind, Write};

use ferroflash::Shape;
use serde::Serialize;

use crate::failure::{Failure, Result, one_line};

/// Sizes of a call, for JSON.
#[derive(Serialize)]
pub(crate) struct Sizes {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    value_dim: usize,
}

impl From<Shape> for Sizes {
    fn from(shape: Shape) -> Self {
        let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        Self { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
    }
}

/// Sizes of a call in words.
pub(crate) fn sizes(shape: &Shape) -> String {
    let pair = |one: usize, other: usize| match one == other {
        true => one.to_string(),
        false => format!("{one}/{other}"),
    };
    format!(
        "batch {}, heads {}, length {}, channels {}",
        shape.batch,
        pair(shape.q_heads, shape.kv_heads),
        pair(shape.q_len, shape.kv_len),
        pair(shape.head_dim, shape.value_dim)
    )
}

/// Lines of a name and what there is to say.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<(String, String)>,
}

impl Table {
    /// Adds a line.
    pub(crate) fn row(&mut self, name: impl Into<String>, value: impl AsRef<str>) {
        self.rows.push((name.into(), one_line(value.as_ref())));
    }

    /// Prints it, the second column aligned.
    pub(crate) fn print(&self) -> Result<()> {
        let width = self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let lines = self.rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n"));
        print(&lines.collect::<String>())
    }
}

/// Prints a value as one line of JSON; numbers that JSON has not become null.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    let text =
        serde_json::to_string(value).map_err(|error| Failure::Run(format!("--json: {error}")))?;
    print(&(text + "\n"))
}

/// Writes to stdout. A reader that has gone, as `head` does, is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Run(format!("stdout: {error}")))
        }
        _ => Ok(()),
    }
}
