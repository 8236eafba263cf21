//! The CUDA side: the driver, the kernels' artifacts, loading and launching.
//!
//! The driver is opened at run time. Building needs no CUDA, and without a driver every call
//! answers [`Error::NoDriver`](crate::Error::NoDriver).

pub(crate) mod artifacts;
pub(crate) mod backward;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod forward;
pub(crate) mod kernel;
pub(crate) mod options;
pub(crate) mod packed_heads;
pub(crate) mod scratch;
pub(crate) mod tensor_map;
