//! A backward call on a CUDA device.

use cudarc::driver::{CudaSlice, DevicePtr};
use ferroflash::{Error, Gradients, Inputs, Place, Plan, Saved, Stream, TensorMut, TensorRef};

use super::{Loaded, OnDevice, copy_stream};
use crate::case::Case;
use crate::element::Real;
use crate::memory::{Arrangement, Owned};

/// Which gradients a call asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Of the queries.
    pub dq: bool,
    /// Of the keys.
    pub dk: bool,
    /// Of the values.
    pub dv: bool,
    /// Of the bias and the sinks, where there are any.
    pub options: bool,
}

impl Wanted {
    /// Every one.
    pub const ALL: Self = Self { dq: true, dk: true, dv: true, options: true };
}

/// A backward call on the device: the forward's tensors, its own, and gradients that hold poison.
pub struct LoadedBackward<T> {
    forward: Loaded<T>,
    d_o: OnDevice<T>,
    d_lse: Option<OnDevice<f32>>,
    dq: Option<OnDevice<T>>,
    dk: Option<OnDevice<T>>,
    dv: Option<OnDevice<T>>,
    dbias: Option<OnDevice<f32>>,
    dsink: Option<OnDevice<f32>>,
    /// Whether dO is read as its first row, repeated for all rows, heads and items.
    repeats_d_o: bool,
    workspace: CudaSlice<u8>,
    workspace_address: u64,
}

/// Poisoned bytes after a workspace.
const WORKSPACE_GUARD: usize = 256;

/// The gradients that a call wrote.
pub struct GradientsOf<T> {
    /// Of the queries, if asked for.
    pub dq: Option<Owned<T>>,
    /// Of the keys.
    pub dk: Option<Owned<T>>,
    /// Of the values.
    pub dv: Option<Owned<T>>,
    /// Of the bias.
    pub dbias: Option<Owned<f32>>,
    /// Of the sinks.
    pub dsink: Option<Owned<f32>>,
}

impl<T: Real> LoadedBackward<T> {
    /// Copies the tensors of a call, and runs its forward pass by `plan`.
    ///
    /// # Errors
    /// The forward pass's.
    pub fn new(
        case: &Case<T>,
        plan: &Plan<T>,
        wanted: Wanted,
        stream: &Stream,
    ) -> Result<Self, Error> {
        let mut forward = Loaded::new(case, true);
        forward.run(plan, stream)?;
        stream.synchronize().expect("the kernel ran");
        let like = |owned: &Owned<T>, is_wanted: bool| {
            let gradient = || OnDevice::upload(&Owned::poisoned(owned.dims(), case.results));
            is_wanted.then(gradient)
        };
        let option = |owned: Option<&Owned<f32>>, arrangement| {
            let gradient = |owned: &Owned<f32>| Owned::poisoned(owned.dims(), arrangement);
            owned.filter(|_| wanted.options).map(|owned| OnDevice::upload(&gradient(owned)))
        };
        let queue = copy_stream();
        let poison = vec![0xff_u8; plan.workspace().backward + WORKSPACE_GUARD];
        let workspace = queue.clone_htod(&poison).expect("device memory");
        queue.synchronize().expect("a copy");
        let workspace_address = workspace.device_ptr(&queue).0;
        Ok(Self {
            d_o: OnDevice::upload(&case.d_o),
            d_lse: case.d_lse.as_ref().map(OnDevice::upload),
            dq: like(&case.q, wanted.dq),
            dk: like(&case.k, wanted.dk),
            dv: like(&case.v, wanted.dv),
            dbias: option(case.bias.as_ref().map(|(_, bias)| bias), case.results),
            dsink: option(case.sink.as_ref(), Arrangement::CONTIGUOUS),
            repeats_d_o: false,
            forward,
            workspace,
            workspace_address,
        })
    }

    /// From now on dO is its first row, repeated: every stride but the channels' is 0.
    pub fn repeat_d_o(&mut self) {
        self.repeats_d_o = true;
    }

    /// Queues the call on `stream`, with everything on the device.
    ///
    /// # Errors
    /// The library's.
    pub fn run(&mut self, plan: &Plan<T>, stream: &Stream) -> Result<(), Error> {
        let bytes = [plan.workspace().backward];
        let address = self.workspace_address as *mut u8;
        // SAFETY: the bytes are this call's alone and outlive it, as its tensors do.
        let workspace = unsafe { TensorMut::from_raw(address, &bytes, &[1], Place::Cuda(0)) }?;
        self.call(None, |saved, d_o, d_lse, gradients| {
            plan.backward_into(stream, saved, d_o, d_lse, gradients, workspace.into())
        })
    }

    /// Queues the forward pass, then this one.
    ///
    /// # Errors
    /// The library's.
    pub fn run_both(&mut self, plan: &Plan<T>, stream: &Stream) -> Result<(), Error> {
        self.forward.run(plan, stream)?;
        self.run(plan, stream)
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
        self.call(Some(case), |saved, d_o, d_lse, gradients| {
            plan.backward(stream, saved, d_o, d_lse, gradients)
        })
    }

    /// `run` with the call's tensors; with lengths of `on_host`, if it is given.
    fn call(
        &mut self,
        on_host: Option<&Case<T>>,
        run: impl FnOnce(
            &Saved<'_, T>,
            &TensorRef<'_, T>,
            Option<&TensorRef<'_, f32>>,
            &mut Gradients<'_, T>,
        ) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Self { forward, d_o, d_lse, dq, dk, dv, dbias, dsink, .. } = self;
        let lse = forward.lse.as_ref().expect("it was asked for");
        let mut inputs = Inputs::new(forward.q.view(), forward.k.view(), forward.v.view());
        forward.options.give(&mut inputs);
        if let Some(case) = on_host {
            let on_host = case.inputs();
            (inputs.key_lengths, inputs.packed) = (on_host.key_lengths, on_host.packed);
        }
        let saved = Saved { inputs, o: forward.o.view(), lse: lse.view() };
        let d_o = match self.repeats_d_o {
            false => d_o.view(),
            // SAFETY: the first row is inside the memory.
            true => unsafe {
                let (address, place) = (d_o.address as *const T, Place::Cuda(0));
                TensorRef::from_raw(address, &d_o.dims, &[0, 0, 0, 1], place)
            }?,
        };
        let d_lse = d_lse.as_ref().map(OnDevice::view);
        let mut gradients = Gradients {
            dq: dq.as_mut().map(OnDevice::view_mut),
            dk: dk.as_mut().map(OnDevice::view_mut),
            dv: dv.as_mut().map(OnDevice::view_mut),
            dbias: dbias.as_mut().map(OnDevice::view_mut),
            dsink: dsink.as_mut().map(OnDevice::view_mut),
        };
        run(&saved, &d_o, d_lse.as_ref(), &mut gradients)
    }

    /// Another seed and offset of the dropout, where the call reads them on the device, for both
    /// passes; the forward pass does not run again.
    pub fn replace_dropout_state(&mut self, state: [u64; 2]) {
        self.forward.replace_dropout_state(state);
    }

    /// Poison in every gradient and in the workspace again.
    pub fn poison(&mut self) {
        let gradients = [&mut self.dq, &mut self.dk, &mut self.dv];
        gradients.into_iter().flatten().for_each(OnDevice::fill_with_poison);
        let options = [&mut self.dbias, &mut self.dsink];
        options.into_iter().flatten().for_each(OnDevice::fill_with_poison);
        let stream = copy_stream();
        let poison = vec![0xff_u8; self.workspace.len()];
        stream.memcpy_htod(&poison, &mut self.workspace).expect("a copy");
        stream.synchronize().expect("a copy");
    }

    /// The gradients, once what was queued on `stream` has completed; panics if anything was
    /// written past the workspace.
    pub fn results(&self, stream: &Stream) -> GradientsOf<T> {
        stream.synchronize().expect("the kernels ran");
        let queue = copy_stream();
        let workspace = queue.clone_dtoh(&self.workspace).expect("a copy");
        queue.synchronize().expect("a copy");
        let guard = &workspace[workspace.len() - WORKSPACE_GUARD..];
        assert!(guard.iter().all(|byte| *byte == 0xff), "written past the workspace");
        let download = |gradient: &Option<OnDevice<T>>| gradient.as_ref().map(OnDevice::download);
        GradientsOf {
            dq: download(&self.dq),
            dk: download(&self.dk),
            dv: download(&self.dv),
            dbias: self.dbias.as_ref().map(OnDevice::download),
            dsink: self.dsink.as_ref().map(OnDevice::download),
        }
    }
}

impl<T: Real> GradientsOf<T> {
    /// Those of q, k and v that were asked for, by name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &Owned<T>)> {
        let all = [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)];
        all.into_iter().filter_map(|(name, gradient)| Some((name, gradient.as_ref()?)))
    }

    /// Those of options that were asked for, by name.
    pub fn of_options(&self) -> impl Iterator<Item = (&'static str, &Owned<f32>)> {
        let all = [("dbias", &self.dbias), ("dsink", &self.dsink)];
        all.into_iter().filter_map(|(name, gradient)| Some((name, gradient.as_ref()?)))
    }

    /// Panics unless each was written, and nothing beside it.
    pub fn assert_written(&self) {
        self.named().for_each(|(name, gradient)| gradient.assert_written(name));
        self.of_options().for_each(|(name, gradient)| gradient.assert_written(name));
    }

    /// The values of each that was asked for, by name.
    pub fn contents(&self) -> Vec<(&'static str, Vec<f64>)> {
        let own = self.named().map(|(name, gradient)| (name, gradient.contents()));
        own.chain(self.of_options().map(|(name, gradient)| (name, gradient.contents()))).collect()
    }

    /// Their bits.
    pub fn bits(&self) -> Vec<Vec<u32>> {
        let own = self.named().map(|(_, gradient)| gradient.bits());
        own.chain(self.of_options().map(|(_, gradient)| gradient.bits())).collect()
    }
}
