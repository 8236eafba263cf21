//! The CPU backend.

pub mod dense;
pub(crate) mod problem;
pub(crate) mod rows;
pub mod tiled;
