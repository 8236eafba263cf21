//! The backward call on a device: from checked tensors to its launches (M4.4 §0x06.1).

mod hopper;
mod sizes;

use std::sync::Arc;

use cudarc::driver::sys;
use ferroflash_core::axes::{Direction, Dtype, Family};
use ferroflash_core::backward::params::options::{ConvertMaskedParams, PreprocessMaskedParams};
use ferroflash_core::backward::params::{
    BackwardScratch, ConvertParams, PortableBackwardParams, PreprocessParams,
};
use ferroflash_core::backward::scratch::ScratchSizes;
use ferroflash_core::params::DeviceTensor;
use ferroflash_core::shape::Strides;
use ferroflash_core::table::{KERNELS, KernelSpec};

use self::sizes::{STAGE_TILE, query_rows, scratch_sizes};
pub(crate) use self::sizes::{grid, most_blocks, schedule, workspace_bytes};
use super::artifacts::Form;
use super::device::CudaDevice;
use super::forward::{device_tensor, device_visibility};
use super::kernel::Kernel;
use super::options::{DeviceOptions, score_tensor};
use crate::attention::{Attention, Gradients, Saved};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::tensor::{Raw, TensorRef};

/// The kernels of a backward call, and the main one that takes over for tensors which the copy
/// engine cannot address.
pub(crate) struct Backward {
    pub(crate) preprocess: Arc<Kernel>,
    pub(crate) main: Arc<Kernel>,
    pub(crate) fallback: Option<Arc<Kernel>>,
    pub(crate) convert: Arc<Kernel>,
}

impl Backward {
    /// Loads the kernels around `main`.
    pub(crate) fn load(
        device: &CudaDevice,
        main: &'static KernelSpec,
        fallback: Option<&'static KernelSpec>,
        form: Option<Form>,
    ) -> Result<Self> {
        let stage = |direction: Direction| {
            let is_alike = |spec: &&KernelSpec| {
                (spec.direction, spec.dtype) == (direction, main.dtype)
                    && spec.has_options() == main.has_options()
            };
            let spec = KERNELS.iter().find(is_alike);
            let spec = spec.ok_or_else(|| Error::Unsupported {
                what: format!("{} of {}", direction.name(), main.dtype),
                device: device.limits.name.clone(),
                reasons: "the kernel table has no such kernel".to_owned(),
            })?;
            device.kernel(spec, form)
        };
        Ok(Self {
            preprocess: stage(Direction::Preprocess)?,
            main: device.kernel(main, form)?,
            fallback: fallback.map(|spec| device.kernel(spec, form)).transpose()?,
            convert: stage(Direction::Convert)?,
        })
    }

    /// Bytes of workspace, whichever main kernel runs.
    pub(crate) fn workspace_bytes(&self, attention: &Attention) -> usize {
        let of = |kernel: &Arc<Kernel>| workspace_bytes(attention, kernel.spec);
        of(&self.main).max(self.fallback.as_ref().map_or(0, of))
    }
}

/// A backward call with its tensors, checked against each other.
pub(crate) struct Call<'a> {
    attention: &'a Attention,
    dtype: Dtype,
    q: &'a Raw,
    k: &'a Raw,
    v: &'a Raw,
    o: &'a Raw,
    d_o: &'a Raw,
    /// Address of lse.
    lse: u64,
    /// Address of its gradient, or 0.
    d_lse: u64,
    dq: Option<&'a Raw>,
    dk: Option<&'a Raw>,
    dv: Option<&'a Raw>,
    dbias: Option<&'a Raw>,
    dsink: Option<&'a Raw>,
    /// The options, where the kernel takes any.
    options: DeviceOptions,
    /// Address of the workspace, as large as [`Backward::workspace_bytes`] says.
    workspace: u64,
}

impl<'a> Call<'a> {
    pub(crate) fn new<T: Element>(
        attention: &'a Attention,
        saved: &'a Saved<'_, T>,
        d_o: &'a TensorRef<'_, T>,
        d_lse: Option<&TensorRef<'_, f32>>,
        gradients: &'a Gradients<'_, T>,
        workspace: u64,
    ) -> Result<Self> {
        Ok(Self {
            attention,
            dtype: T::DTYPE,
            q: &saved.inputs.q.raw,
            k: &saved.inputs.k.raw,
            v: &saved.inputs.v.raw,
            o: &saved.o.raw,
            d_o: &d_o.raw,
            lse: saved.lse.raw.address as u64,
            d_lse: d_lse.map_or(0, |d_lse| d_lse.raw.address as u64),
            dq: gradients.dq.as_ref().map(|dq| &dq.raw),
            dk: gradients.dk.as_ref().map(|dk| &dk.raw),
            dv: gradients.dv.as_ref().map(|dv| &dv.raw),
            dbias: gradients.dbias.as_ref().map(|dbias| &dbias.raw),
            dsink: gradients.dsink.as_ref().map(|dsink| &dsink.raw),
            options: DeviceOptions::new(attention, &saved.inputs)?,
            workspace,
        })
    }

    /// Queues the stages on `stream`.
    ///
    /// # Safety
    /// The tensors and the workspace are valid on the device until the launches have completed on
    /// `stream`, which belongs to the device's context.
    pub(crate) unsafe fn run(
        &self,
        device: &CudaDevice,
        backward: &Backward,
        stream: sys::CUstream,
    ) -> Result<()> {
        let maps = match backward.main.spec.family {
            Family::Portable => None,
            Family::Hopper => match (self.tensor_maps(backward.main.spec), &backward.fallback) {
                (Ok(plans), _) => Some(plans),
                (Err(_), Some(_)) => None,
                (Err((tensor, refusal)), None) => {
                    return Err(Error::Unsupported {
                        what: format!("{tensor} by {}", backward.main.spec.name),
                        device: device.limits.name.clone(),
                        reasons: refusal.reason().to_owned(),
                    });
                }
            },
        };
        let is_fallback = backward.main.spec.family == Family::Hopper && maps.is_none();
        let main = match &backward.fallback {
            Some(fallback) if is_fallback => fallback,
            _ => &backward.main,
        };
        let sizes = scratch_sizes(self.attention, main.spec);
        let dq_channels = if self.dq.is_some() { sizes.dq_channels } else { 0 };
        let scratch = ScratchSizes { dq_channels, ..sizes }.at(self.workspace);
        // SAFETY: the caller's promise; each stage is given its own kernel.
        unsafe {
            self.preprocess(device, &backward.preprocess, main.spec, stream, &sizes, scratch)?;
            match maps {
                Some(plans) => self.launch_hopper(device, main, stream, scratch, &plans)?,
                None => self.launch_portable(device, main, stream, scratch)?,
            }
            self.convert(device, &backward.convert, main.spec, stream, scratch)
        }
    }

    /// Query rows of a head, and heads, as [`query_rows`] has them.
    fn query_rows(&self) -> (u32, u32) {
        let (rows, heads) = query_rows(self.attention);
        (rows as u32, heads as u32)
    }

    /// Whether there are query rows: without any, dK and dV are zero and nothing is summed.
    fn has_rows(&self) -> bool {
        self.query_rows().0 > 0 && self.query_rows().1 > 0
    }

    /// # Safety
    /// As [`Self::run`]; `kernel` is a preprocess kernel.
    unsafe fn preprocess(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        main: &KernelSpec,
        stream: sys::CUstream,
        sizes: &ScratchSizes,
        scratch: BackwardScratch,
    ) -> Result<()> {
        let records = self.record_params(main);
        if !self.has_rows() && self.dbias.is_none() && records.address == 0 {
            return Ok(());
        }
        let size = self.dtype.bytes();
        // Without rows a block still clears the bias' gradient and leaves records, and must look at
        // nothing else.
        let (scratch, (q_len, batch_heads)) = match self.has_rows() {
            true => (scratch, self.query_rows()),
            false => (BackwardScratch { padded_rows: 0, ..scratch }, (0, 0)),
        };
        let params = PreprocessParams {
            o: device_tensor(self.o, size),
            d_o: device_tensor(self.d_o, size),
            lse: self.lse,
            d_lse: self.d_lse,
            scratch,
            lse_factor: self.lse_factor(),
            cleared_heads: self.cleared_heads(main),
            counters: sizes.counters as u32,
            q_len,
            q_heads: self.attention.shape.q_heads as u32,
            batch_heads,
        };
        let blocks = scratch.padded_rows.div_ceil(STAGE_TILE as u32) * batch_heads;
        // SAFETY: these are the parameters of a preprocess kernel of the main kernel's kind; the
        // rest is the caller's promise. The planner checked that the blocks fit the grid.
        unsafe {
            if !kernel.spec.has_options() {
                return kernel.launch(device, stream, blocks, &params);
            }
            let dims = |raw: &Raw| [0, 1, 2, 3].map(|axis| raw.dims()[axis] as u32);
            let params = PreprocessMaskedParams {
                preprocess: params,
                bias_gradient: score_tensor(self.dbias),
                bias_dims: self.dbias.map_or([0; 4], dims),
                records,
            };
            kernel.launch(device, stream, blocks.max(1), &params)
        }
    }

    /// # Safety
    /// As [`Self::run`]; `kernel` is a convert kernel.
    unsafe fn convert(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        main: &KernelSpec,
        stream: sys::CUstream,
        scratch: BackwardScratch,
    ) -> Result<()> {
        let dq = self.dq.filter(|_| self.has_rows());
        let q_heads = self.attention.shape.q_heads as u32;
        let sinks = self.dsink.map_or(0, |_| q_heads);
        if dq.is_none() && sinks == 0 {
            return Ok(());
        }
        let (q_len, batch_heads) = self.query_rows();
        let (converted, section_groups) = self.converted(main, &scratch);
        let params = ConvertParams {
            scratch,
            dq: wanted(dq, self.dtype.bytes()),
            converted,
            section_groups,
            order: main.query_gradient_order(),
            q_len,
            q_heads,
            batch_heads,
            scale: self.attention.scale_factor(),
        };
        let tile = STAGE_TILE as u32;
        let panels = scratch.dq_channels.div_ceil(tile);
        let blocks = match dq {
            Some(_) => scratch.padded_rows.div_ceil(tile) * panels * batch_heads,
            None => 0,
        };
        // SAFETY: these are the parameters of a convert kernel of the main kernel's kind; the rest
        // is the caller's promise. The planner checked that the blocks fit the grid.
        unsafe {
            if !kernel.spec.has_options() {
                return kernel.launch(device, stream, blocks, &params);
            }
            let params = ConvertMaskedParams {
                convert: params,
                blocks,
                sink: self.options.sink(),
                sink_gradient: self.dsink.map_or(0, |dsink| dsink.address as u64),
            };
            kernel.launch(device, stream, blocks + sinks, &params)
        }
    }

    /// # Safety
    /// As [`Self::run`]; `kernel` is a portable backward kernel.
    unsafe fn launch_portable(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        stream: sys::CUstream,
        scratch: BackwardScratch,
    ) -> Result<()> {
        let shape = &self.attention.shape;
        let schedule = schedule(self.attention, kernel.spec);
        if schedule.blocks() == 0 {
            return Ok(());
        }
        let size = self.dtype.bytes();
        let params = PortableBackwardParams {
            q: device_tensor(self.q, size),
            k: device_tensor(self.k, size),
            v: device_tensor(self.v, size),
            d_o: device_tensor(self.d_o, size),
            dk: wanted(self.dk, size),
            dv: wanted(self.dv, size),
            scratch,
            schedule,
            visibility: device_visibility(self.attention),
            kv_rows: shape.kv_len as u32,
            q_heads: shape.q_heads as u32,
            kv_heads: shape.kv_heads as u32,
            group: shape.group() as u32,
            scale: self.attention.scale_factor(),
            ordered: self.ordered(),
        };
        let blocks = schedule.blocks() as u32;
        // SAFETY: these are the parameters of a portable backward kernel of the mask class; the
        // rest is the caller's promise. The planner checked that the blocks fit the grid.
        unsafe {
            if !kernel.spec.has_options() {
                return kernel.launch(device, stream, blocks, &params);
            }
            let params = self.options.backward_params(self.attention, params, self.dbias);
            kernel.launch(device, stream, blocks, &params)
        }
    }

    fn ordered(&self) -> u32 {
        u32::from(self.attention.deterministic && self.has_rows())
    }
}

/// A gradient as kernels take it, at address 0 where it is not wanted.
fn wanted(raw: Option<&Raw>, size: usize) -> DeviceTensor {
    let nothing = Strides { batch: 0, row: 0, head: 0 };
    let none = DeviceTensor { address: 0, strides: nothing, channels: 0, access_bytes: 16 };
    raw.map_or(none, |raw| device_tensor(raw, size))
}
