//! The library's errors as Python exceptions.

use ferroflash::Error;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The exception for `error`. `options` names the arguments that a kernel may lack, which an
/// unsupported call is then reported under.
pub(crate) fn exception(error: Error, options: &str) -> PyErr {
    match respelled(error) {
        error @ (Error::Argument { .. }
        | Error::Dimensions { .. }
        | Error::ChannelStride { .. }
        | Error::OutOfBounds { .. }
        | Error::Placement { .. }
        | Error::Presence { .. }
        | Error::Workspace { .. }
        | Error::ElementType { .. }) => PyValueError::new_err(error.to_string()),
        error @ Error::Unsupported { .. } => {
            PyNotImplementedError::new_err(format!("{options}: {error}"))
        }
        error @ Error::OutOfMemory { .. } => PyMemoryError::new_err(error.to_string()),
        error => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The error with its argument's name as a Python caller knows it.
fn respelled(mut error: Error) -> Error {
    match &mut error {
        Error::Argument { argument: name, .. }
        | Error::Dimensions { tensor: name, .. }
        | Error::ChannelStride { tensor: name, .. }
        | Error::OutOfBounds { tensor: name, .. }
        | Error::Placement { tensor: name, .. }
        | Error::Presence { tensor: name, .. }
        | Error::ElementType { tensor: name, .. } => *name = spelled(name),
        _ => {}
    }
    error
}

/// The library's name of an argument as a Python caller knows it.
fn spelled(argument: &'static str) -> &'static str {
    match argument {
        "scale" => "softmax_scale",
        "q_heads" => "q, heads",
        "kv_heads" => "k, heads",
        "q_len" => "q, rows (max_seqlen_q where packed)",
        "kv_len" => "k, rows (max_seqlen_k where packed)",
        "head_dim" => "q, channels",
        "value_dim" => "v, channels",
        "batch or q_heads" => "q, batch and heads",
        "dropout" => "dropout_p",
        "boolean_mask" => "mask",
        "cu_q" => "cu_seqlens_q",
        "cu_k" => "cu_seqlens_k",
        "used_q" => "seqused_q",
        "used_k" => "seqused_k",
        other => other,
    }
}
