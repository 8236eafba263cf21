//! A bar for work that takes long, where someone is watching.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_millis(700);

/// Progress of one piece of work, on stderr if that is a terminal.
pub(crate) struct Progress {
    what: &'static str,
    begun: Instant,
    watched: bool,
    bar: OnceLock<ProgressBar>,
}

impl Progress {
    /// Of work in words, such as `attention on the cpu`.
    pub(crate) fn of(what: &'static str) -> Self {
        let watched = std::io::stderr().is_terminal();
        Self { what, begun: Instant::now(), watched, bar: OnceLock::new() }
    }

    /// Says that `done` parts of `total` are done; from any thread.
    pub(crate) fn tell(&self, done: usize, total: usize) {
        if !self.watched || self.begun.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_init(|| {
            let template = "{msg} [{wide_bar}] {pos}/{len}, {eta} left";
            let style = ProgressStyle::with_template(template);
            ProgressBar::new(total as u64)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(Cow::Borrowed(self.what))
        });
        // Threads report in no order; the bar only grows.
        if done as u64 > bar.position() {
            bar.set_position(done as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}
