//! Schedules that run, and count the words, visits and merges that they take.
//!
//! Each function here is one of the papers' loop nests, written for reading: tiles are loaded from
//! tensors in slow memory, worked on, and stored again, and nothing can be had from slow memory
//! without being counted in the [`Trace`] it returns. What a closed form of this crate predicts, a
//! schedule can therefore confirm.
//!
//! | function | loops | who owns what |
//! | --- | --- | --- |
//! | [`stored::forward`] | three stages, no tiles | a stage; scores and probabilities are stored |
//! | [`fa1::forward`] | K/V tiles outside | nobody: a normalised output goes to and fro |
//! | [`fa1::backward`] | K/V tiles outside | a head's loop owns dK and dV; dQ goes to and fro |
//! | [`fa2::forward`] | query tiles outside | a program owns a query tile |
//! | [`fa2::backward`] | K/V tiles outside | a program owns a K/V tile; dQ is added up |
//! | [`column_owner::backward`] | K/V tiles outside | the same with other reductions |
//! | [`row_owner::backward`] | query tiles outside | a program owns a query tile; dK, dV add up |
//! | [`warps::split_k`] | keys dealt to warps | every warp has a part of every row |
//! | [`warps::split_q`] | rows dealt to warps | a warp owns its rows |
//! | [`hazards::uses`] | one block of the column owner | barriers decide when memory is free |
//!
//! ```
//! use ferroflash_core::{shape::Shape, visibility::Visibility};
//! use ferroflash_ledger::schedule::{Blocks, Call, NoValue, fa1};
//! # fn main() -> ferroflash_ledger::Result<()> {
//! let shape = Shape {
//!     batch: 1, q_heads: 1, kv_heads: 1, q_len: 7, kv_len: 10, head_dim: 4, value_dim: 4,
//! };
//! let (q, k, v) = ([NoValue; 28], [NoValue; 40], [NoValue; 40]);
//! let call = Call::new(shape, Visibility::full(7, 10), NoValue, &q, &k, &v)?;
//! let trace = fa1::forward(&call, Blocks { q_block: 3, kv_block: 4 })?.trace;
//! assert_eq!((trace.reads(), trace.writes(), trace.initial()), (290, 126, 42)); // M4.3 §0x0AE
//! # Ok(())
//! # }
//! ```
//!
//! They are models: words cross one boundary between a slow memory and a chip, without caches,
//! sectors or time. Run on [`NoValue`] they count alone, without arithmetic.

mod call;
pub mod column_owner;
pub mod fa1;
pub mod fa2;
mod gradient;
pub mod hazards;
mod memory;
mod number;
pub mod row_owner;
pub mod state;
pub mod stored;
mod tile;
mod trace;
pub mod warps;

pub use call::{Blocks, Call, Multiplier};
pub use number::{Binary16, NoValue, Real};
pub use trace::{Tensor, Trace, Visit, Words};
