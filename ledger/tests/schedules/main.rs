//! The executable schedules against dense attention, closed forms and the worked examples.

#[path = "../oracle/mod.rs"]
#[allow(dead_code)]
mod oracle;

mod fixtures;
mod parity;
mod states;
