//! The CPU backend.

pub mod dense;
mod inspect;
pub(crate) mod problem;
pub(crate) mod rows;
pub mod tiled;

pub use inspect::dropout_mask;
