//! A plan: one call, validated, its kernel chosen and loaded.

mod validate;

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use ferroflash_core::axes::{Direction, Family};

use crate::attention::{Attention, Gradients, Inputs, Output, Saved};
use crate::choose::choose;
use crate::cpu;
use crate::cuda::artifacts::Form;
use crate::cuda::device::CudaDevice;
use crate::cuda::forward::{Call, workspace_bytes};
use crate::cuda::kernel::Kernel;
use crate::cuda::options::upload_lengths;
use crate::cuda::scratch::Scratch;
use crate::device::{Device, Stream};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::explain::Explanation;
use crate::options::OptionTensors;
use crate::tensor::{Place, Raw, TensorMut, TensorRef};

/// What a plan may be told about its kernel; the default leaves everything to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference<'a> {
    /// A kernel of the table by its name, or a family by its, for tests and benchmarks. Tied to one
    /// kernel, a call that it cannot run is refused.
    pub kernel: Option<&'a str>,
    /// The form to load it in.
    pub form: Option<Form>,
}

/// Bytes of caller-provided memory that each direction needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceBytes {
    /// Of [`Plan::run_into`].
    pub forward: usize,
}

/// Memory that a call uses while it runs, on the plan's device.
pub struct Workspace<'a> {
    raw: Option<Raw>,
    _life: PhantomData<&'a mut [u8]>,
}

impl Workspace<'_> {
    /// No memory, for a plan that needs none.
    pub const fn none() -> Self {
        Self { raw: None, _life: PhantomData }
    }
}

impl<'a> From<TensorMut<'a, u8>> for Workspace<'a> {
    fn from(bytes: TensorMut<'a, u8>) -> Self {
        Self { raw: Some(bytes.raw), _life: PhantomData }
    }
}

/// What a workspace's address is a multiple of.
pub const WORKSPACE_ALIGNMENT: usize = 4;

/// A validated call with its kernel: immutable, and usable from any thread.
pub struct Plan<T> {
    attention: Attention,
    place: Place,
    backend: Backend,
    explanation: Explanation,
    _element: PhantomData<fn(T)>,
}

enum Backend {
    Cpu,
    Cuda(Forward),
}

/// The forward kernel, and the one that takes over for tensors which the copy engine cannot
/// address: their addresses and strides are known at the call only.
struct Forward {
    device: Arc<CudaDevice>,
    kernel: Arc<Kernel>,
    fallback: Option<Arc<Kernel>>,
}

impl Attention {
    /// Validates the call, chooses its kernel on `device` and loads it.
    ///
    /// # Errors
    /// [`Error::Argument`] for options outside the contract, [`Error::Unsupported`] where no kernel
    /// does what is asked, with what would.
    pub fn plan<T: Element>(&self, device: &Device) -> Result<Plan<T>> {
        self.plan_with(device, Preference::default())
    }

    /// As [`Attention::plan`], with a say in the choice of the kernel.
    ///
    /// # Errors
    /// As [`Attention::plan`].
    pub fn plan_with<T: Element>(
        &self,
        device: &Device,
        preference: Preference<'_>,
    ) -> Result<Plan<T>> {
        self.validate()?;
        let (backend, explanation) = match device.cuda_device() {
            None => (Backend::Cpu, Explanation::of_cpu(self, T::DTYPE)),
            Some(cuda) => {
                let choice =
                    choose(self, T::DTYPE, Direction::Forward, &cuda.limits, preference.kernel)?;
                let kernel = cuda.kernel(choice.spec, preference.form)?;
                let fallback =
                    choice.fallback.map(|spec| cuda.kernel(spec, preference.form)).transpose()?;
                let explanation = Explanation::of_kernel(self, &cuda.limits, &kernel, choice);
                let forward = Forward { device: cuda.clone(), kernel, fallback };
                (Backend::Cuda(forward), explanation)
            }
        };
        Ok(Plan {
            attention: *self,
            place: device.place(),
            backend,
            explanation,
            _element: PhantomData,
        })
    }
}

impl<T: Element> Plan<T> {
    /// The call it was made for.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// What will run, and why.
    pub fn explain(&self) -> &Explanation {
        &self.explanation
    }

    /// Bytes of workspace that each direction needs.
    pub fn workspace(&self) -> WorkspaceBytes {
        let forward = match &self.backend {
            Backend::Cpu => 0,
            Backend::Cuda(forward) => workspace_bytes(forward.kernel.spec),
        };
        WorkspaceBytes { forward }
    }

    /// As [`Plan::run_into`], with a workspace of the library's own where one is needed, allocated
    /// on `stream` for the call. Lengths in host memory are copied to a device in the stream's
    /// order.
    ///
    /// # Errors
    /// As [`Plan::run_into`], and [`Error::OutOfMemory`]; [`Error::Argument`] for lengths in host
    /// memory while the stream is captured.
    pub fn run(
        &self,
        stream: &Stream,
        mut inputs: Inputs<'_, T>,
        output: &mut Output<'_, T>,
    ) -> Result<()> {
        let Backend::Cuda(forward) = &self.backend else {
            return self.run_into(stream, inputs, output, Workspace::none());
        };
        let handle = stream.handle(self.place)?;
        let _lengths = upload_lengths(&forward.device, handle, &self.attention, &mut inputs)?;
        match self.workspace().forward {
            0 => self.run_into(stream, inputs, output, Workspace::none()),
            bytes => {
                let memory = Scratch::new(&forward.device, handle, bytes)?;
                let workspace = Workspace { raw: Some(memory.raw()?), _life: PhantomData };
                self.run_into(stream, inputs, output, workspace)
            }
        }
    }

    /// Computes o and, where asked for, lse. On a CUDA device the work is queued on `stream`:
    /// nothing is allocated, copied or waited for, so the call may be captured in a graph.
    /// `workspace` holds at least [`Plan::workspace`]'s bytes, whatever is in them; calls that may
    /// overlap need one each. Lengths lie on the device; [`Plan::run`] copies them there.
    ///
    /// # Errors
    /// The first tensor that does not fit the call, by name; nothing is written then. A fault of
    /// the launch, with the kernel's name.
    pub fn run_into(
        &self,
        stream: &Stream,
        inputs: Inputs<'_, T>,
        output: &mut Output<'_, T>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let handle = stream.handle(self.place)?;
        match &self.backend {
            Backend::Cpu => cpu::tiled::forward(&self.attention, &inputs, output, None),
            Backend::Cuda(forward) => {
                self.check_forward(&inputs, output, handle)?;
                if output.o.raw.is_empty() {
                    return Ok(());
                }
                let workspace = self.check_workspace(&workspace, handle)?;
                let call = Call::new(&self.attention, &inputs, output, workspace);
                // SAFETY: the tensors were checked against the call just now, and their borrows
                // and constructors vouch for their memory; the stream is of the plan's device.
                unsafe { forward.run(&call, handle) }
            }
        }
    }

    /// Computes the gradients asked for from the forward's results; `d_lse` is the gradient of lse,
    /// if there is one.
    ///
    /// # Errors
    /// As [`Plan::run_into`]; [`Error::Unsupported`] on a CUDA device, which has no backward
    /// kernels yet.
    pub fn backward_into(
        &self,
        stream: &Stream,
        saved: &Saved<'_, T>,
        d_o: &TensorRef<'_, T>,
        d_lse: Option<&TensorRef<'_, f32>>,
        gradients: &mut Gradients<'_, T>,
    ) -> Result<()> {
        stream.handle(self.place)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::tiled::backward(&self.attention, saved, d_o, d_lse, gradients, None)
            }
            Backend::Cuda(forward) => Err(Error::Unsupported {
                what: "the backward pass".to_owned(),
                device: forward.device.limits.name.clone(),
                reasons: "there are no backward kernels yet; the cpu computes it".to_owned(),
            }),
        }
    }

    /// Checks the tensors of a forward call that runs on a device.
    fn check_forward(
        &self,
        inputs: &Inputs<'_, T>,
        output: &Output<'_, T>,
        stream: CUstream,
    ) -> Result<()> {
        let [q, k, v, o] = self.attention.tensor_dims();
        self.check("q", &inputs.q.raw, &q, size_of::<T>(), stream)?;
        self.check("k", &inputs.k.raw, &k, size_of::<T>(), stream)?;
        self.check("v", &inputs.v.raw, &v, size_of::<T>(), stream)?;
        self.check("o", &output.o.raw, &o, size_of::<T>(), stream)?;
        if let Some(lse) = &output.lse {
            let dims = self.attention.lse_dims();
            self.check("lse", &lse.raw, &dims, size_of::<f32>(), stream)?;
            if !lse.raw.is_contiguous() {
                return Err(Error::argument(
                    "lse",
                    format!("strides {:?}", lse.strides()),
                    "contiguous",
                ));
            }
        }
        let given = OptionTensors::new(&self.attention, inputs)?;
        given.check_on_device(&self.attention, self.place, |name, raw, dims, element_bytes| {
            self.check(name, raw, dims, element_bytes, stream)
        })
    }

    /// The address of a workspace that is large enough, or 0 where none is needed.
    fn check_workspace(&self, workspace: &Workspace<'_>, stream: CUstream) -> Result<u64> {
        let needs = self.workspace().forward;
        let Some(raw) = workspace.raw.filter(|_| needs > 0) else {
            return if needs == 0 { Ok(0) } else { Err(Error::Workspace { had: 0, needs }) };
        };
        let had = raw.dims().iter().fold(1, |all: usize, dim| all.saturating_mul(*dim));
        if !raw.is_contiguous() {
            return Err(Error::argument(
                "workspace",
                format!("strides {:?}", raw.strides()),
                "contiguous",
            ));
        }
        if had < needs {
            return Err(Error::Workspace { had, needs });
        }
        if raw.place != self.place {
            return Err(Error::Placement {
                tensor: "workspace",
                had: raw.place.to_string(),
                needs: self.place.to_string(),
            });
        }
        if !raw.address.is_multiple_of(WORKSPACE_ALIGNMENT) {
            return Err(Error::argument(
                "workspace",
                format!("address {:#x}", raw.address),
                format!("a multiple of {WORKSPACE_ALIGNMENT}"),
            ));
        }
        check_order("workspace", &raw, stream)?;
        Ok(raw.address as u64)
    }

    fn check(
        &self,
        tensor: &'static str,
        raw: &Raw,
        dims: &[usize],
        element_bytes: usize,
        stream: CUstream,
    ) -> Result<()> {
        if raw.dims() != dims {
            return Err(Error::Dimensions {
                tensor,
                had: raw.dims().to_vec(),
                needs: dims.to_vec(),
            });
        }
        let last = dims.len() - 1;
        if raw.strides()[last] != 1 && dims[last] > 1 {
            return Err(Error::ChannelStride { tensor, had: raw.strides()[last] });
        }
        if raw.place != self.place && !raw.is_empty() {
            return Err(Error::Placement {
                tensor,
                had: raw.place.to_string(),
                needs: self.place.to_string(),
            });
        }
        if !raw.address.is_multiple_of(element_bytes) {
            return Err(Error::argument(
                tensor,
                format!("address {:#x}", raw.address),
                format!("aligned to its elements of {element_bytes} bytes"),
            ));
        }
        check_order(tensor, raw, stream)
    }
}

/// cudarc orders a tensor's accesses on one stream; work on another would race with it.
fn check_order(tensor: &'static str, raw: &Raw, stream: CUstream) -> Result<()> {
    match raw.stream {
        Some(ordered) if ordered != stream as usize => Err(Error::Placement {
            tensor,
            had: "another stream, by cudarc's events".to_owned(),
            needs: "the stream that the plan runs on".to_owned(),
        }),
        _ => Ok(()),
    }
}

impl Forward {
    /// Queues the call on `stream`.
    ///
    /// # Safety
    /// As [`Call::launch_portable`].
    unsafe fn run(&self, call: &Call<'_>, stream: CUstream) -> Result<()> {
        let kernel = match self.kernel.spec.family {
            Family::Portable => &self.kernel,
            Family::Hopper => match (call.tensor_maps(self.kernel.spec), &self.fallback) {
                (Ok(plans), _) => {
                    // SAFETY: the caller's promise.
                    return unsafe {
                        call.launch_hopper(&self.device, &self.kernel, stream, &plans)
                    };
                }
                (Err(_), Some(fallback)) => fallback,
                (Err((tensor, refusal)), None) => {
                    return Err(Error::Unsupported {
                        what: format!("{tensor} by {}", self.kernel.spec.name),
                        device: self.device.limits.name.clone(),
                        reasons: refusal.reason().to_owned(),
                    });
                }
            },
        };
        // SAFETY: the caller's promise.
        unsafe { call.launch_portable(&self.device, kernel, stream) }
    }
}
