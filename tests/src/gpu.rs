//! A call's tensors on a CUDA device.

mod backward;
mod options;

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use ferroflash::{
    Attention, Device, Error, Family, Form, Inputs, Output, Place, Plan, Preference, Stream,
    TensorMut, TensorRef,
};

pub use self::backward::{GradientsOf, LoadedBackward, Wanted};
use self::options::OptionsOnDevice;
use crate::case::Case;
use crate::element::Real;
use crate::memory::{Arrangement, Owned};

/// The device that GPU tests run on.
///
/// # Errors
/// [`Error::NoDriver`] or [`Error::NoDevice`] where there is none.
pub fn device() -> Result<Device, Error> {
    static DEVICE: OnceLock<Result<Device, Error>> = OnceLock::new();
    DEVICE.get_or_init(|| Device::cuda(0)).clone()
}

/// Whether GPU tests are to run. With `FERROFLASH_REQUIRE_GPU=1` they always are, and fail where
/// there is no GPU.
pub fn is_present_or_required() -> bool {
    std::env::var("FERROFLASH_REQUIRE_GPU").is_ok_and(|value| value == "1") || device().is_ok()
}

/// The forms to test: both, or the one that `FERROFLASH_ARTIFACT` names.
pub fn forms() -> Vec<Form> {
    match std::env::var("FERROFLASH_ARTIFACT").as_deref() {
        Ok("cubin") => vec![Form::Cubin],
        Ok("ptx") => vec![Form::Ptx],
        _ => vec![Form::Cubin, Form::Ptx],
    }
}

/// The plan of a call by a kernel's name and form, or the planner's choice.
///
/// # Errors
/// The planner's.
pub fn plan<T: Real>(
    attention: &Attention,
    kernel: Option<&str>,
    form: Option<Form>,
) -> Result<Plan<T>, Error> {
    attention.plan_with(&device()?, Preference { kernel, form, ..Preference::default() })
}

/// The plan of a call by the narrowest kernels of a family that run it.
///
/// # Errors
/// The planner's.
pub fn plan_of_family<T: Real>(
    attention: &Attention,
    family: Family,
    form: Form,
) -> Result<Plan<T>, Error> {
    plan(attention, Some(family.name()), Some(form))
}

/// The device's default cudarc stream, on which tensors are copied.
pub fn copy_stream() -> Arc<CudaStream> {
    let device = device().expect("a device");
    device.context().expect("a CUDA device").default_stream()
}

/// A tensor and its surroundings on the device.
pub struct OnDevice<T> {
    memory: CudaSlice<T>,
    address: u64,
    dims: Vec<usize>,
    strides: Vec<i64>,
    offset: usize,
}

impl<T: Real> OnDevice<T> {
    /// Copies a tensor with everything around it.
    pub fn upload(owned: &Owned<T>) -> Self {
        let stream = copy_stream();
        let memory = stream.clone_htod(&owned.values).expect("device memory");
        stream.synchronize().expect("a copy");
        let address = memory.device_ptr(&stream).0 + (owned.offset * size_of::<T>()) as u64;
        let (dims, strides) = (owned.dims.clone(), owned.strides.clone());
        Self { memory, address, dims, strides, offset: owned.offset }
    }

    /// Copies it back.
    pub fn download(&self) -> Owned<T> {
        let stream = copy_stream();
        let values = stream.clone_dtoh(&self.memory).expect("a copy");
        stream.synchronize().expect("a copy");
        let (dims, strides) = (self.dims.clone(), self.strides.clone());
        Owned { values, dims, strides, offset: self.offset }
    }

    fn replace(&mut self, values: &[T]) {
        let stream = copy_stream();
        stream.memcpy_htod(values, &mut self.memory).expect("a copy");
        stream.synchronize().expect("a copy");
    }

    fn fill_with_poison(&mut self) {
        self.replace(&vec![T::POISON; self.memory.len()]);
    }

    /// To read.
    pub fn view(&self) -> TensorRef<'_, T> {
        // SAFETY: the memory was allocated for exactly these elements, and tests synchronise before
        // they drop it.
        unsafe {
            TensorRef::from_raw(self.address as *const T, &self.dims, &self.strides, Place::Cuda(0))
        }
        .expect("at most four axes")
    }

    /// To write.
    pub fn view_mut(&mut self) -> TensorMut<'_, T> {
        // SAFETY: as in `view`; the borrow is exclusive.
        unsafe {
            TensorMut::from_raw(self.address as *mut T, &self.dims, &self.strides, Place::Cuda(0))
        }
        .expect("at most four axes, no element twice")
    }
}

/// A forward call on the device: its inputs, and outputs that hold poison.
pub struct Loaded<T> {
    q: OnDevice<T>,
    k: OnDevice<T>,
    v: OnDevice<T>,
    o: OnDevice<T>,
    lse: Option<OnDevice<f32>>,
    options: OptionsOnDevice,
    /// More than any forward kernel needs; what is in it must not matter.
    _workspace: CudaSlice<u8>,
    workspace_address: u64,
}

/// Bytes of the workspace that calls are given.
const WORKSPACE_BYTES: usize = 64;

impl<T: Real> Loaded<T> {
    /// Copies the tensors of a call.
    pub fn new(case: &Case<T>, with_lse: bool) -> Self {
        let lse = || OnDevice::upload(&Owned::poisoned(&case.lse_dims, Arrangement::CONTIGUOUS));
        let stream = copy_stream();
        let workspace = stream.clone_htod(&[0xff_u8; WORKSPACE_BYTES]).expect("device memory");
        let workspace_address = workspace.device_ptr(&stream).0;
        Self {
            q: OnDevice::upload(&case.q),
            k: OnDevice::upload(&case.k),
            v: OnDevice::upload(&case.v),
            o: OnDevice::upload(&Owned::poisoned(&case.o_dims, case.results)),
            lse: with_lse.then(lse),
            options: OptionsOnDevice::upload(case),
            _workspace: workspace,
            workspace_address,
        }
    }

    /// Queues the call on `stream`, with everything on the device.
    ///
    /// # Errors
    /// The library's.
    pub fn run(&mut self, plan: &Plan<T>, stream: &Stream) -> Result<(), Error> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        self.options.give(&mut inputs);
        let lse = self.lse.as_mut().map(OnDevice::view_mut);
        let mut output = Output { o: self.o.view_mut(), lse };
        let address = self.workspace_address as *mut u8;
        // SAFETY: the bytes are this call's alone and outlive it, as its tensors do.
        let workspace =
            unsafe { TensorMut::from_raw(address, &[WORKSPACE_BYTES], &[1], Place::Cuda(0)) }?;
        plan.run_into(stream, inputs, &mut output, workspace.into())
    }

    /// Queues the call with its lengths on the host and a workspace of the library's own.
    ///
    /// # Errors
    /// The library's.
    pub fn run_from_host_lengths(
        &mut self,
        plan: &Plan<T>,
        stream: &Stream,
        case: &Case<T>,
    ) -> Result<(), Error> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        self.options.give(&mut inputs);
        let on_host = case.inputs();
        (inputs.key_lengths, inputs.packed) = (on_host.key_lengths, on_host.packed);
        let lse = self.lse.as_mut().map(OnDevice::view_mut);
        plan.run(stream, inputs, &mut Output { o: self.o.view_mut(), lse })
    }

    /// What [`Plan::validate`] says of the lengths on the device.
    ///
    /// # Errors
    /// The library's.
    pub fn validate(&self, plan: &Plan<T>, stream: &Stream) -> Result<(), Error> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        self.options.give(&mut inputs);
        plan.validate(stream, &inputs)
    }

    /// What [`Plan::dropout_mask`] says of the call, by its state on the device if it has one.
    ///
    /// # Errors
    /// The library's.
    pub fn dropout_mask(&self, plan: &Plan<T>, stream: &Stream) -> Result<Vec<u8>, Error> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        self.options.give(&mut inputs);
        plan.dropout_mask(stream, inputs.dropout_state.as_ref())
    }

    /// Poison in every output again.
    pub fn poison(&mut self) {
        self.o.fill_with_poison();
        if let Some(lse) = &mut self.lse {
            lse.fill_with_poison();
        }
    }

    /// Another seed and offset of the dropout, where the call reads them on the device.
    pub fn replace_dropout_state(&mut self, state: [u64; 2]) {
        self.options.replace_dropout_state(state);
    }

    /// Copies the q, k and v of another case of the same arrangements.
    pub fn replace_inputs(&mut self, case: &Case<T>) {
        self.q.replace(&case.q.values);
        self.k.replace(&case.k.values);
        self.v.replace(&case.v.values);
    }

    /// The outputs, once what was queued on `stream` has completed.
    pub fn results(&self, stream: &Stream) -> (Owned<T>, Option<Owned<f32>>) {
        stream.synchronize().expect("the kernel ran");
        (self.o.download(), self.lse.as_ref().map(OnDevice::download))
    }
}
