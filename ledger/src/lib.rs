//! What exact attention costs, by plain arithmetic: no GPU, no clock, no measurement.
//!
//! Every figure here is *modelled*: it follows from sizes by a formula that its function states.
//! A model says what a schedule asks for, never what a device did; nothing in this crate may be
//! shown in a column of measured figures.
//!
//! # Units
//!
//! | name ends in | type | unit |
//! | --- | --- | --- |
//! | `_bytes` | `u128` | bytes; KiB, MiB and GiB are 2¹⁰, 2²⁰ and 2³⁰ of them |
//! | `_words`, `_values` | `u128` | scalars, whatever their width |
//! | `_flops` | `u128` | floating-point operations; a multiply-add is two |
//! | `_cells` | `u128` | pairs of a query row and a key |
//! | `_visits`, `_tiles`, `_blocks`, `_waves` | `u128` | counts |
//! | `_seconds`, `_per_second`, ratios | `f64` | seconds, rates, pure numbers |
//!
//! Counts are exact: a product that exceeds `u128` is an [`Error`], never a wrapped number. No
//! function allocates in proportion to the number of scores.
//!
//! # Sources
//!
//! `M4.3` is the document on FlashAttention-1, `M4.4` that on FlashAttention-2; `§` names a
//! section of theirs. What only the released v2.0.0 of flash-attention did is historical and kept
//! apart from this project's own kernels.

mod error;
pub mod schedule;

pub use error::{Error, Result};
