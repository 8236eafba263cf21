//! Looking at what a call drops, on any device.

use cudarc::driver::result;

use super::{Backend, Plan};
use crate::cpu;
use crate::cuda::driver::failed;
use crate::device::Stream;
use crate::element::Element;
use crate::error::Result;
use crate::tensor::{Place, TensorRef};

impl<T: Element> Plan<T> {
    /// The dropout mask of a call with this state, as [`cpu::dropout_mask`] has it: `[B, Hq, Sq,
    /// Sk]`, 1 where a probability is kept. It is computed on the CPU, whatever the plan's device:
    /// the mask is a function of the state, the same everywhere. A state in device memory is
    /// copied, and `stream` waited for: for tests and for finding faults, not for every call.
    ///
    /// # Errors
    /// As [`cpu::dropout_mask`], and the driver's.
    pub fn dropout_mask(
        &self,
        stream: &Stream,
        dropout_state: Option<&TensorRef<'_, u64>>,
    ) -> Result<Vec<u8>> {
        let handle = stream.handle(self.place)?;
        let on_device = dropout_state.filter(|state| state.place() != Place::Host);
        let (Backend::Cuda(kernels), Some(state)) = (&self.backend, on_device) else {
            return cpu::dropout_mask(&self.attention, dropout_state);
        };
        self.attention.declared_state(Some(state))?;
        self.check("dropout_state", &state.raw, &[2], size_of::<u64>(), handle)?;
        let _current = kernels.device.enter()?;
        let mut values = [0_u64; 2];
        // SAFETY: the tensor was checked to hold two values on this device, and its constructor
        // vouches for them; the copy is waited for below.
        unsafe {
            result::memcpy_dtoh_async(&mut values, state.raw.address as u64, handle)
                .map_err(failed("cuMemcpyDtoHAsync", None))?;
            result::stream::synchronize(handle).map_err(failed("cuStreamSynchronize", None))?;
        }
        cpu::dropout_mask(&self.attention, Some(&TensorRef::host(&values, &[2])?))
    }
}
