//! The library's errors as Python exceptions.

use ferroflash::Error;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The exception for `error`. `options` names the arguments that a kernel may lack, which an
/// unsupported call is then reported under.
pub(crate) fn exception(error: Error, options: &str) -> PyErr {
    match error {
        Error::Argument { argument, had, needs } => {
            PyValueError::new_err(format!("{}: {had}, but it must be {needs}", spelled(argument)))
        }
        Error::Dimensions { .. }
        | Error::ChannelStride { .. }
        | Error::OutOfBounds { .. }
        | Error::Placement { .. }
        | Error::Presence { .. }
        | Error::Workspace { .. }
        | Error::ElementType { .. } => PyValueError::new_err(error.to_string()),
        Error::Unsupported { .. } => PyNotImplementedError::new_err(format!("{options}: {error}")),
        Error::OutOfMemory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The library's name of an argument as a Python caller knows it.
fn spelled(argument: &str) -> &str {
    match argument {
        "scale" => "softmax_scale",
        "q_heads" => "q, axis 2 (heads)",
        "kv_heads" => "k, axis 2 (heads)",
        "q_len" => "q, axis 1 (rows)",
        "kv_len" => "k, axis 1 (rows)",
        "head_dim" => "q, axis 3 (head dimension)",
        "value_dim" => "v, axis 3 (head dimension)",
        "batch or q_heads" => "q, axes 0 and 2 (batch, heads)",
        other => other,
    }
}
