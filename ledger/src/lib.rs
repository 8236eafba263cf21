//! What exact attention costs, by plain arithmetic: no GPU, no clock, no measurement.
//!
//! Every figure here is *modelled*: it follows from sizes by a formula that its function states.
//! A model says what a schedule asks for, never what a device did; nothing in this crate may be
//! shown in a column of measured figures.
//!
//! | module | what it counts |
//! | --- | --- |
//! | [`sizes`] | values of each object of a call |
//! | [`materialized`] | bytes of the three stages that store scores; accesses of a softmax |
//! | [`words`], [`bounds`] | words of FlashAttention-1's schedules; what must be moved at least |
//! | [`movement`] | bytes of FlashAttention-1's and FlashAttention-2's forward schedules |
//! | [`row_work`] | what a row costs besides its matrix products |
//! | [`launch`] | grids, and who in them has work |
//! | [`shared`] | shared memory by what lives at the same time |
//! | [`device`], [`residency`] | limits of devices, blocks that fit them, waves |
//! | [`split`] | rows with several producers |
//! | [`tiles`] | full, partial and skipped tiles, cells, gradient producers |
//! | [`backward`] | scratch and accumulators of a backward pass |
//! | [`stages`] | FLOPs and bytes by stage, and intensities |
//! | [`benchmark`] | numerators and what they make of a rate |
//! | [`contracts`] | what a statement about an implementation must rest on |
//! | [`evidence`] | what may be said of a run, from what was recorded of it |
//! | [`v2_0_0`] | historical: what flash-attention v2.0.0 launched |
//! | [`schedule`] | schedules that run, and count what they do |
//!
//! # Units
//!
//! | name ends in | type | unit |
//! | --- | --- | --- |
//! | `_bytes` | `u128` | bytes; KiB, MiB and GiB are 2¹⁰, 2²⁰ and 2³⁰ of them |
//! | `_words`, `_values`, `_reads`, `_writes` | `u128` | scalars, whatever their width |
//! | `_flops` | `u128` | floating-point operations; a multiply-add is two |
//! | `_cells` | `u128` | pairs of a query row and a key |
//! | `_visits`, `_tiles`, `_blocks`, `waves` | `u128` | counts |
//! | `_seconds`, `_per_second`, ratios, shares | `f64` | seconds, rates, pure numbers |
//!
//! Counts are exact: a product that exceeds `u128` is an [`Error`], never a wrapped number. No
//! function allocates in proportion to the number of scores.
//!
//! # Sources
//!
//! `M4.3` is the document on FlashAttention-1, `M4.4` that on FlashAttention-2; `§` names a
//! section of theirs. `fixtures/coverage.md` says which test checks which of their claims.

pub mod backward;
pub mod benchmark;
pub mod bounds;
pub mod contracts;
pub mod device;
mod error;
pub mod evidence;
pub mod launch;
pub mod materialized;
pub mod movement;
pub mod residency;
pub mod row_work;
pub mod schedule;
pub mod shared;
pub mod sizes;
pub mod split;
pub mod stages;
pub mod tiles;
pub mod v2_0_0;
pub mod words;

pub use error::{Error, Result};
