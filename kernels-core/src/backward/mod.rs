//! The backward pass: three kernels on one stream (M4.4 §0x06.1).
//!
//! *Preprocess* scales lse, forms delta = ⟨dO, O⟩ − dLSE and clears what the others add to. The
//! *main* kernel is a column owner: a block owns a tile of keys, walks the query rows that see any
//! of them, forms P and dS anew and writes dK and dV once; its part of dQ it adds to f32 sums.
//! *Convert* scales and rounds those sums. What the stages share is a [`BackwardScratch`].
//!
//! | module | what it decides |
//! | --- | --- |
//! | [`params`] | the structures passed to the kernels by value |
//! | [`record`] | which query tiles a block of an item's keys walks, and which need no mask |
//! | [`schedule`] | block index ↔ the keys that block owns |
//! | [`scratch`] | where the shared f32 memory lies, and in which order dQ's sums |
//! | [`portable`], [`hopper`] | shared-memory plans and fragments of a family |
//! | [`tilings`] | every tile size in use, with its reason |
//!
//! [`BackwardScratch`]: params::BackwardScratch

pub mod hopper;
mod hopper_barriers;
pub mod hopper_tilings;
pub mod params;
pub mod portable;
pub mod record;
pub mod schedule;
pub mod scratch;
pub mod tilings;
