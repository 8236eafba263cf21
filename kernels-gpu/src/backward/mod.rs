//! The kernels of the backward pass: preprocess, main and convert.
