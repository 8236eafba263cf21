//! The forward kernels: o and lse from q, k and v.

pub mod hopper;
pub mod portable;
pub mod softmax;
