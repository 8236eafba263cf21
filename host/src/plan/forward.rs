//! The forward pass of a plan on a device: what may be launched, and which of it a call's tensors
//! allow.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use ferroflash_core::axes::Family;

use crate::cuda::device::CudaDevice;
use crate::cuda::forward::Call;
use crate::cuda::kernel::Kernel;
use crate::cuda::packed_heads::PackedHeads;
use crate::error::{Error, Result};

/// The forward kernel, and the one that takes over for tensors which the copy engine cannot
/// address: their addresses and strides are known at the call only.
pub(super) struct Forward {
    pub(super) kernel: Arc<Kernel>,
    pub(super) fallback: Option<Arc<Kernel>>,
    /// The call with the heads of a group as rows, where that makes fewer works.
    pub(super) packed: Option<Box<PackedHeads>>,
}

impl Forward {
    /// Queues the call on `stream`.
    ///
    /// # Safety
    /// As [`Call::launch_portable`].
    pub(super) unsafe fn run(
        &self,
        call: &Call<'_>,
        device: &CudaDevice,
        stream: CUstream,
    ) -> Result<()> {
        let packed = self.packed.as_deref().and_then(|heads| call.packed(heads));
        let call = packed.as_ref().unwrap_or(call);
        let kernel = match self.kernel.spec.family {
            Family::Portable => &self.kernel,
            Family::Hopper => match (call.tensor_maps(self.kernel.spec), &self.fallback) {
                (Ok(plans), _) => {
                    // SAFETY: the caller's promise.
                    return unsafe { call.launch_hopper(device, &self.kernel, stream, &plans) };
                }
                (Err(_), Some(fallback)) => fallback,
                (Err((tensor, refusal)), None) => {
                    return Err(Error::Unsupported {
                        what: format!("{tensor} by {}", self.kernel.spec.name),
                        device: device.limits.name.clone(),
                        reasons: refusal.reason().to_owned(),
                    });
                }
            },
        };
        // SAFETY: the caller's promise.
        unsafe { call.launch_portable(device, kernel, stream) }
    }
}
