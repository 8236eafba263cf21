//! Looking into lengths that lie on a device, for those who would rather wait than guess.

use cudarc::driver::result;

use super::{Backend, Plan};
use crate::attention::{Inputs, Lengths, Packed};
use crate::cuda::driver::failed;
use crate::device::Stream;
use crate::element::Element;
use crate::error::Result;
use crate::lengths;
use crate::options::OptionTensors;

impl<T: Element> Plan<T> {
    /// Checks the contents of every length and offset, those in device memory too, as a call checks
    /// those in host memory. Copies them and waits for `stream`: for tests and for finding faults,
    /// not for every call. A call itself never looks: its kernel keeps malformed offsets inside the
    /// tensors, and gives wrong numbers; a deterministic backward pass, whose blocks wait for one
    /// another, may then never end.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) by the name of the first that is malformed.
    pub fn validate(&self, stream: &Stream, inputs: &Inputs<'_, T>) -> Result<()> {
        let handle = stream.handle(self.place)?;
        let given = OptionTensors::new(&self.attention, inputs)?;
        let Backend::Cuda(kernels) = &self.backend else {
            return lengths::check_on_host(&self.attention, given.key_lengths, given.packed);
        };
        let batch = self.attention.shape.batch;
        let _current = kernels.device.enter()?;
        let read = |name, lengths: &Lengths<'_>, count: usize| -> Result<Vec<i32>> {
            let tensor = match lengths {
                Lengths::Host(values) => return Ok(values.to_vec()),
                Lengths::Device(tensor) => tensor,
            };
            self.check(name, &tensor.raw, &[count], size_of::<i32>(), handle)?;
            let mut values = vec![0; count];
            if count > 0 {
                // SAFETY: the tensor was checked to hold `count` values on this device, and its
                // constructor vouches for them; the copy is waited for below.
                unsafe {
                    result::memcpy_dtoh_async(&mut values, tensor.raw.address as u64, handle)
                        .map_err(failed("cuMemcpyDtoHAsync", None))?;
                    result::stream::synchronize(handle)
                        .map_err(failed("cuStreamSynchronize", None))?;
                }
            }
            Ok(values)
        };
        let used = |name, lengths: Option<&Lengths<'_>>| {
            lengths.map(|lengths| read(name, lengths, batch)).transpose()
        };
        let key_lengths = used("key_lengths", given.key_lengths)?;
        let key_lengths = key_lengths.as_deref().map(Lengths::Host);
        let Some(packed) = given.packed else {
            return lengths::check_on_host(&self.attention, key_lengths.as_ref(), None);
        };
        let cu_q = read("cu_q", &packed.cu_q, batch + 1)?;
        let cu_k = read("cu_k", &packed.cu_k, batch + 1)?;
        let used_q = used("used_q", packed.used_q.as_ref())?;
        let used_k = used("used_k", packed.used_k.as_ref())?;
        let packed = Packed {
            cu_q: Lengths::Host(&cu_q),
            cu_k: Lengths::Host(&cu_k),
            used_q: used_q.as_deref().map(Lengths::Host),
            used_k: used_k.as_deref().map(Lengths::Host),
        };
        lengths::check_on_host(&self.attention, None, Some(&packed))
    }
}
