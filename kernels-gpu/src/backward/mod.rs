//! The kernels of the backward pass: preprocess, main and convert.

pub mod convert;
pub mod hopper;
pub mod portable;
pub mod preprocess;
pub mod stages;
