//! A plan: one call, validated, its kernel chosen and loaded.

mod check;
mod forward;
mod inspect;
mod validate;

use std::marker::PhantomData;
use std::sync::Arc;

use ferroflash_core::axes::{Direction, Dtype};
use ferroflash_core::table::KERNELS;

use self::forward::Forward;
use crate::attention::{Attention, Gradients, Inputs, Output, Saved};
use crate::choose::choose;
use crate::cpu;
use crate::cuda::artifacts::Form;
use crate::cuda::backward::{self, Backward};
use crate::cuda::device::CudaDevice;
use crate::cuda::forward::{Call, workspace_bytes};
use crate::cuda::options::upload_lengths;
use crate::cuda::packed_heads::PackedHeads;
use crate::cuda::scratch::Scratch;
use crate::device::{Device, Stream};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::explain::Explanation;
use crate::tensor::{Place, Raw, TensorMut, TensorRef};

/// What a plan may be told about its kernel; the default leaves everything to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference<'a> {
    /// A kernel of the table by its name, for its own direction, or a family by its, for tests and
    /// benchmarks. Tied to one kernel, a call that it cannot run is refused.
    pub kernel: Option<&'a str>,
    /// The form to load it in.
    pub form: Option<Form>,
    /// Leaves the backward kernels out: [`Plan::backward_into`] is then refused.
    pub forward_only: bool,
    /// Gives every query head blocks of its own, where the planner would make rows of those that
    /// share a KV head: the results are the same.
    pub heads_apart: bool,
}

/// Bytes of caller-provided memory that each direction needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceBytes {
    /// Of [`Plan::run_into`].
    pub forward: usize,
    /// Of [`Plan::backward_into`]: the f32 sums of dQ and two values a query row, at most
    /// 4·D̂·B·Hq·Sq + 8·B·Hq·Sq with D̂ the compiled head dimension and Sq rounded up to a tile
    /// (of packed items B·Sq is their tokens), and counters: a few, and where sums are ordered one
    /// for each tile of query rows.
    pub backward: usize,
}

/// Memory that a call uses while it runs, on the plan's device.
pub struct Workspace<'a> {
    raw: Option<Raw>,
    /// The tensor, whose guard orders the memory's other uses behind the call.
    _tensor: Option<TensorMut<'a, u8>>,
}

impl Workspace<'_> {
    /// No memory, for a plan that needs none.
    pub const fn none() -> Self {
        Self { raw: None, _tensor: None }
    }

    /// Scratch memory of the library's own, which is freed behind the call.
    fn of(memory: &Scratch) -> Result<Self> {
        Ok(Self { raw: Some(memory.raw()?), _tensor: None })
    }
}

impl<'a> From<TensorMut<'a, u8>> for Workspace<'a> {
    fn from(bytes: TensorMut<'a, u8>) -> Self {
        Self { raw: Some(bytes.raw), _tensor: Some(bytes) }
    }
}

/// What a workspace's address is a multiple of.
pub const WORKSPACE_ALIGNMENT: usize = 16;

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
    Cuda(Kernels),
}

/// The kernels of each direction on a device, or why it has none.
struct Kernels {
    device: Arc<CudaDevice>,
    forward: Forward,
    backward: Result<Backward>,
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
                let (kernels, explanation) = Kernels::new(self, T::DTYPE, cuda, preference)?;
                (Backend::Cuda(kernels), explanation)
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
        match &self.backend {
            Backend::Cpu => WorkspaceBytes::default(),
            Backend::Cuda(kernels) => WorkspaceBytes {
                forward: workspace_bytes(kernels.forward.kernel.spec),
                backward: match &kernels.backward {
                    Ok(backward) => backward.workspace_bytes(&self.attention),
                    Err(_) => 0,
                },
            },
        }
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
        let Backend::Cuda(kernels) = &self.backend else {
            return self.run_into(stream, inputs, output, Workspace::none());
        };
        let handle = stream.handle(self.place)?;
        let _lengths = upload_lengths(&kernels.device, handle, &self.attention, &mut inputs)?;
        match self.workspace().forward {
            0 => self.run_into(stream, inputs, output, Workspace::none()),
            bytes => {
                let memory = Scratch::new(&kernels.device, handle, bytes)?;
                self.run_into(stream, inputs, output, Workspace::of(&memory)?)
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
            Backend::Cuda(kernels) => {
                self.check_forward(&inputs, output, handle)?;
                if output.o.raw.is_empty() {
                    return Ok(());
                }
                let needs = self.workspace().forward;
                let workspace = self.check_workspace(&workspace, needs, handle)?;
                let call = Call::new(&self.attention, &inputs, output, workspace)?;
                // SAFETY: the tensors were checked against the call just now, and their borrows
                // and constructors vouch for their memory; the stream is of the plan's device.
                unsafe { kernels.forward.run(&call, &kernels.device, handle) }
            }
        }
    }

    /// As [`Plan::backward_into`], with a workspace of the library's own where one is needed,
    /// allocated on `stream` for the call. Lengths in host memory are copied to a device in the
    /// stream's order.
    ///
    /// # Errors
    /// As [`Plan::backward_into`], and [`Error::OutOfMemory`]; [`Error::Argument`] for lengths in
    /// host memory while the stream is captured.
    pub fn backward(
        &self,
        stream: &Stream,
        saved: &Saved<'_, T>,
        d_o: &TensorRef<'_, T>,
        d_lse: Option<&TensorRef<'_, f32>>,
        gradients: &mut Gradients<'_, T>,
    ) -> Result<()> {
        let Backend::Cuda(kernels) = &self.backend else {
            return self.backward_into(stream, saved, d_o, d_lse, gradients, Workspace::none());
        };
        let handle = stream.handle(self.place)?;
        let mut saved = saved.reborrow();
        let lengths = &mut saved.inputs;
        let _lengths = upload_lengths(&kernels.device, handle, &self.attention, lengths)?;
        match self.workspace().backward {
            0 => self.backward_into(stream, &saved, d_o, d_lse, gradients, Workspace::none()),
            bytes => {
                self.check_backward(&saved, d_o, d_lse, gradients, handle)?;
                let memory = Scratch::new(&kernels.device, handle, bytes)?;
                let workspace = Workspace::of(&memory)?;
                self.backward_into(stream, &saved, d_o, d_lse, gradients, workspace)
            }
        }
    }

    /// Computes the gradients asked for from the forward's results; `d_lse` is the gradient of lse,
    /// if there is one. On a CUDA device the work is queued on `stream` as three kernels: nothing
    /// is allocated, copied or waited for, so the call may be captured in a graph. `workspace`
    /// holds at least [`Plan::workspace`]'s bytes, whatever is in them; calls that may overlap need
    /// one each. Lengths lie on the device; [`Plan::backward`] copies them there.
    ///
    /// # Errors
    /// As [`Plan::run_into`]; [`Error::Unsupported`] where the plan has no backward kernels, with
    /// the reasons, and for a deterministic gradient of a bias that is summed over an axis, whose
    /// parts a GPU adds in no fixed order.
    pub fn backward_into(
        &self,
        stream: &Stream,
        saved: &Saved<'_, T>,
        d_o: &TensorRef<'_, T>,
        d_lse: Option<&TensorRef<'_, f32>>,
        gradients: &mut Gradients<'_, T>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let handle = stream.handle(self.place)?;
        let kernels = match &self.backend {
            Backend::Cpu => {
                return cpu::tiled::backward(&self.attention, saved, d_o, d_lse, gradients, None);
            }
            Backend::Cuda(kernels) => kernels,
        };
        let backward = kernels.backward.as_ref().map_err(Clone::clone)?;
        self.check_backward(saved, d_o, d_lse, gradients, handle)?;
        let workspace = self.check_workspace(&workspace, self.workspace().backward, handle)?;
        let Gradients { dq, dk, dv, dbias, dsink } = &*gradients;
        let is_wanted = dq.is_some() || dk.is_some() || dv.is_some();
        let is_option_wanted = dbias.is_some() || dsink.is_some();
        let shape = &self.attention.shape;
        let is_empty = shape.batch == 0 || shape.kv_heads == 0;
        if (is_empty || !is_wanted) && !is_option_wanted {
            return Ok(());
        }
        let call = backward::Call::new(&self.attention, saved, d_o, d_lse, gradients, workspace)?;
        // SAFETY: the tensors were checked against the call just now, and their borrows and
        // constructors vouch for their memory; the stream is of the plan's device.
        unsafe { call.run(&kernels.device, backward, handle) }
    }
}

impl Kernels {
    /// Chooses and loads the kernels of both directions.
    fn new(
        attention: &Attention,
        dtype: Dtype,
        device: &Arc<CudaDevice>,
        preference: Preference<'_>,
    ) -> Result<(Self, Explanation)> {
        let limits = &device.limits;
        let load = |spec| device.kernel(spec, preference.form);
        let named = |direction| named_for(direction, preference.kernel);
        let choice =
            choose(attention, dtype, Direction::Forward, limits, named(Direction::Forward))?;
        let packed = match preference.heads_apart {
            true => None,
            false => PackedHeads::of(attention, choice.spec, limits.multiprocessors).map(Box::new),
        };
        let forward = Forward {
            kernel: load(choice.spec)?,
            fallback: choice.fallback.map(load).transpose()?,
            packed,
        };
        let (kernel, packed) = (&forward.kernel, forward.packed.as_deref());
        let mut explanation = Explanation::of_forward(attention, packed, limits, kernel, choice);

        let named = named(Direction::Backward);
        let chosen = if preference.forward_only {
            Err(Error::Unsupported {
                what: "the backward pass".to_owned(),
                device: limits.name.clone(),
                reasons: "the plan was made with `forward_only`".to_owned(),
            })
        } else {
            choose(attention, dtype, Direction::Backward, limits, named)
        };
        let backward = match chosen {
            Ok(choice) => {
                let backward =
                    Backward::load(device, choice.spec, choice.fallback, preference.form)?;
                explanation.backward =
                    Some(Box::new(Explanation::of_backward(attention, limits, &backward, choice)));
                Ok(backward)
            }
            Err(error) if named.is_some_and(|name| !is_family(name)) => return Err(error),
            Err(error) => {
                explanation.no_backward = Some(error.to_string());
                Err(error)
            }
        };
        Ok((Self { device: device.clone(), forward, backward }, explanation))
    }
}

fn is_family(name: &str) -> bool {
    KERNELS.iter().any(|spec| spec.family.name() == name)
}

/// The name that ties `direction`: a kernel's ties its own direction only.
fn named_for(direction: Direction, name: Option<&str>) -> Option<&str> {
    let spec = KERNELS.iter().find(|spec| Some(spec.name) == name);
    match spec {
        Some(spec) if spec.direction != direction => None,
        None if direction != Direction::Forward => name.filter(|name| is_family(name)),
        _ => name,
    }
}
