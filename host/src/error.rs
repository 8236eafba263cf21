//! The one error type of the library.

use ferroflash_core::axes::Dtype;

/// What a call may come back with.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused or failed. Each variant names what was at fault, what it had and what it
/// needed; nothing was written when one is returned.
#[non_exhaustive]
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// An argument is outside what attention is defined for.
    #[error("{argument}: {had}, but it must be {needs}")]
    Argument {
        /// Name of the argument.
        argument: &'static str,
        /// What was given.
        had: String,
        /// What is needed.
        needs: String,
    },

    /// A tensor's dimensions are not those the call implies.
    #[error("{tensor}: has dimensions {had:?}, but the call needs {needs:?}")]
    Dimensions {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its dimensions.
        had: Vec<usize>,
        /// The dimensions needed.
        needs: Vec<usize>,
    },

    /// A tensor's last axis is not contiguous.
    #[error("{tensor}: its last axis has stride {had}, but channels must be contiguous (stride 1)")]
    ChannelStride {
        /// Name of the tensor.
        tensor: &'static str,
        /// Stride of the last axis in elements.
        had: i64,
    },

    /// A view reaches outside the memory it was made from.
    #[error("{tensor}: reaches elements {first}..={last}, but its memory holds {elements}")]
    OutOfBounds {
        /// Name of the tensor.
        tensor: &'static str,
        /// Lowest element offset reached.
        first: i64,
        /// Highest element offset reached.
        last: i64,
        /// Elements that are there.
        elements: usize,
    },

    /// A tensor lies on another device than the plan's.
    #[error("{tensor}: lies on {had}, but the plan runs on {needs}")]
    Placement {
        /// Name of the tensor.
        tensor: &'static str,
        /// Where it is.
        had: String,
        /// Where it must be.
        needs: String,
    },

    /// A tensor that the call's options ask for was not given, or one was given that no option
    /// asks for.
    #[error("{tensor}: {problem}")]
    Presence {
        /// Name of the tensor.
        tensor: &'static str,
        /// Which of the two, and what would resolve it.
        problem: &'static str,
    },

    /// The workspace is smaller than the plan's.
    #[error("workspace: has {had} bytes, but the plan needs {needs}")]
    Workspace {
        /// Bytes given.
        had: usize,
        /// Bytes needed; see the plan's `workspace()`.
        needs: usize,
    },

    /// No kernel does what was asked on this device.
    #[error("no kernel runs {what} on {device}: {reasons}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// The device.
        device: String,
        /// Every candidate and why it does not, and what would make it supported.
        reasons: String,
    },

    /// The plan was made for another element type.
    #[error("{tensor}: holds {had}, but the plan was made for {needs}")]
    ElementType {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its element type.
        had: Dtype,
        /// The plan's.
        needs: Dtype,
    },

    /// There is no usable NVIDIA driver.
    #[error("no usable NVIDIA driver: {0}")]
    NoDriver(String),

    /// There is no such device.
    #[error("device: cuda:{ordinal} was asked for, but the driver sees {count} device(s)")]
    NoDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// Devices there are.
        count: usize,
    },

    /// Memory could not be had.
    #[error("out of memory on {device}: {bytes} bytes were asked for")]
    OutOfMemory {
        /// Where.
        device: String,
        /// How many bytes.
        bytes: usize,
    },

    /// The driver refused a call, or a kernel faulted.
    #[error("{call} failed{}: {reason}", kernel.map(|k| format!(" for {k}")).unwrap_or_default())]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The kernel concerned, if one is.
        kernel: Option<&'static str>,
        /// The driver's own words.
        reason: String,
    },
}

impl Error {
    pub(crate) fn argument(
        argument: &'static str,
        had: impl std::fmt::Display,
        needs: impl std::fmt::Display,
    ) -> Self {
        Self::Argument { argument, had: had.to_string(), needs: needs.to_string() }
    }
}
