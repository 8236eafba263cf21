//! The executable schedules against dense attention, closed forms and the worked examples.

#[path = "../oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

mod closed_forms;
mod parity;
mod states;
