//! What a backward call through a hopper kernel needs besides: tensor maps, the scale of exponents,
//! what the main kernel takes over from the stages around it.

use cudarc::driver::sys;
use ferroflash_core::axes::Family;
use ferroflash_core::backward::hopper::hopper_backward_boxes;
use ferroflash_core::backward::params::options::RecordParams;
use ferroflash_core::backward::params::{BackwardScratch, HopperBackwardParams};
use ferroflash_core::backward::schedule::BackwardSchedule;
use ferroflash_core::backward::scratch::{CONVERTED_ROWS, HopperCounters};
use ferroflash_core::table::KernelSpec;
use ferroflash_core::tensor_map::{MapRefusal, TensorMapPlan};
use ferroflash_core::visibility::Visibility;

use super::sizes::{is_causal, records, scratch_sizes};
use super::{Call, grid, schedule, wanted};
use crate::attention::Layout;
use crate::cuda::device::CudaDevice;
use crate::cuda::forward::{device_tensor, device_visibility, strides};
use crate::cuda::kernel::Kernel;
use crate::cuda::tensor_map;
use crate::error::Result;
use crate::tensor::Raw;

/// Query rows of the longest work, under a causal mask, up to which it costs more than it gains
/// that the main kernel converts: 1 to 3 % of a call on an H200; at 1024 rows it gains up to 4 %.
const SHORT_WORK_ROWS: usize = 512;

impl Call<'_> {
    /// Launches `kernel` with the plans that [`Self::tensor_maps`] made.
    ///
    /// # Safety
    /// As [`Self::run`]; `kernel` is a hopper backward kernel.
    pub(super) unsafe fn launch_hopper(
        &self,
        device: &CudaDevice,
        kernel: &Kernel,
        stream: sys::CUstream,
        scratch: BackwardScratch,
        plans: &[TensorMapPlan; 4],
    ) -> Result<()> {
        // Encoding a tensor map needs a context, which the caller may not have.
        let _current = device.enter()?;
        let shape = &self.attention.shape;
        let schedule = schedule(self.attention, kernel.spec);
        let scale = self.attention.scale_factor();
        let head_tiles = scratch.padded_rows / kernel.spec.tile.q_rows;
        let size = self.dtype.bytes();
        let map = |raw: &Raw, plan| {
            tensor_map::encode(kernel.spec.name, raw.address as u64, plan, self.dtype)
        };
        let [q, k, v, d_o] = self.mapped();
        let params = HopperBackwardParams {
            maps: [
                map(q, &plans[0])?,
                map(k, &plans[1])?,
                map(v, &plans[2])?,
                map(d_o, &plans[3])?,
            ],
            dk: wanted(self.dk, size),
            dv: wanted(self.dv, size),
            dq: wanted(self.converts_behind(kernel.spec), size),
            scratch,
            counters: HopperCounters::new(&schedule),
            schedule,
            visibility: device_visibility(self.attention),
            kv_rows: shape.kv_len as u32,
            q_heads: shape.q_heads as u32,
            kv_heads: shape.kv_heads as u32,
            section_tiles: schedule.section * self.work_heads(&schedule) * head_tiles,
            query_tiles: self.query_rows().1 * head_tiles,
            work_heads: self.work_heads(&schedule),
            axes: [plans[0].axes, plans[1].axes, plans[2].axes, plans[3].axes],
            scale,
            scale_log2: self.scale_log2(),
            ordered: self.ordered(),
        };
        let blocks = grid(kernel.spec, &schedule, &device.limits);
        // SAFETY: these are the parameters of a hopper backward kernel of the class; the rest is
        // the caller's promise.
        unsafe {
            if !kernel.spec.has_options() {
                return kernel.launch(device, stream, blocks as u32, &params);
            }
            let rows = Visibility { q_len: self.query_rows().0, ..params.visibility };
            let params = HopperBackwardParams { visibility: rows, ..params };
            let records = self.record_params(kernel.spec).address;
            let q_rows = kernel.spec.tile.q_rows;
            let params =
                self.options.hopper_backward_params(self.attention, params, q_rows, records);
            kernel.launch(device, stream, blocks as u32, &params)
        }
    }

    /// The records that the preprocess kernel leaves for `main`, behind the scratch; at address 0
    /// if it wants none.
    pub(super) fn record_params(&self, main: &KernelSpec) -> RecordParams {
        let sizes = scratch_sizes(self.attention, main);
        let count = records(self.attention, main);
        RecordParams {
            address: if count == 0 { 0 } else { self.workspace + sizes.bytes() },
            count: count as u32,
            kv_blocks: schedule(self.attention, main).kv_blocks,
            q_rows: main.tile.q_rows,
            kv_columns: main.tile.kv_columns,
            ordered: self.ordered(),
            items: self.options.items(self.attention),
        }
    }

    /// Query heads of a hopper kernel's work.
    pub(super) fn work_heads(&self, schedule: &BackwardSchedule) -> u32 {
        self.attention.shape.group() as u32 / schedule.parts
    }

    /// What the convert kernel is told of the main kernel's own conversion: the counters of what it
    /// has converted of each section, or 0, and how many a whole section has.
    pub(super) fn converted(&self, main: &KernelSpec, scratch: &BackwardScratch) -> (u64, u32) {
        if self.converts_behind(main).is_none() {
            return (0, 1);
        }
        let schedule = schedule(self.attention, main);
        let counters = HopperCounters::new(&schedule);
        let address = scratch.counters + u64::from(counters.converted) * 4;
        let head_groups = scratch.padded_rows / CONVERTED_ROWS;
        (address, schedule.section * self.work_heads(&schedule) * head_groups)
    }

    /// (Batch, query head)s whose sums the preprocess kernel clears.
    pub(super) fn cleared_heads(&self, main: &KernelSpec) -> u32 {
        match main.family {
            Family::Portable => self.query_rows().1,
            Family::Hopper => {
                let schedule = schedule(self.attention, main);
                schedule.section * self.work_heads(&schedule)
            }
        }
    }

    /// dQ, if the main kernel itself converts what is done of it: where it writes whole chunks, and
    /// works are not short.
    fn converts_behind(&self, main: &KernelSpec) -> Option<&Raw> {
        let schedule = schedule(self.attention, main);
        let rows = self.attention.shape.q_len * self.work_heads(&schedule) as usize;
        let is_short = is_causal(self.attention, main) && rows <= SHORT_WORK_ROWS;
        self.dq.filter(|dq| {
            let dq = device_tensor(dq, self.dtype.bytes());
            let is_wide = dq.access_bytes == 16 && dq.channels.is_multiple_of(8);
            main.family == Family::Hopper && is_wide && !is_short
        })
    }

    /// The scale of exponents of two.
    fn scale_log2(&self) -> f32 {
        self.attention.scale_factor() * std::f32::consts::LOG2_E
    }

    /// What makes lse one of powers of two: log2 e, but for the rounding of their scale; 0 where
    /// that is of no use, and where lse must stay natural: for scores that are more than products,
    /// and for the gradient of a sink.
    pub(super) fn lse_factor(&self) -> f32 {
        let call = self.attention;
        if call.softcap.is_some() || call.alibi || call.sink {
            return 0.0;
        }
        let factor = self.scale_log2() / self.attention.scale_factor();
        if factor.is_finite() { factor } else { 0.0 }
    }

    /// What the copy engine is told of q, k, v and dO, or the tensor that it cannot address and
    /// why.
    pub(super) fn tensor_maps(
        &self,
        spec: &KernelSpec,
    ) -> std::result::Result<[TensorMapPlan; 4], (&'static str, MapRefusal)> {
        let boxes = hopper_backward_boxes(&spec.tile);
        // Keys that no row sees are cut off; those of packed items are told by offsets.
        let keys = match self.attention.layout {
            Layout::Packed { .. } => None,
            Layout::Dense | Layout::KeyLengths => {
                Some(device_visibility(self.attention).kv_len as usize)
            }
        };
        let plan = |name, raw: &Raw, keys: Option<usize>, panel| {
            // Packed items lie on one row axis: a batch of one.
            let (batch, [rows, heads, channels]) = match *raw.dims() {
                [batch, rows, heads, channels] => (batch, [rows, heads, channels]),
                [rows, heads, channels] => (1, [rows, heads, channels]),
                _ => (0, [0; 3]),
            };
            let dims = [batch, keys.unwrap_or(rows), heads, channels];
            TensorMapPlan::new(raw.address as u64, dims, strides(raw), panel)
                .map_err(|refusal| (name, refusal))
        };
        let [q, k, v, d_o] = self.mapped();
        Ok([
            plan("q", q, None, boxes[0])?,
            plan("k", k, keys, boxes[1])?,
            plan("v", v, keys, boxes[2])?,
            plan("d_o", d_o, None, boxes[3])?,
        ])
    }

    /// What the maps of q, k, v and dO show. Where packed items have no keys at all, no tile is
    /// copied, but a map needs elements: q and dO, of as many channels, stand in.
    fn mapped(&self) -> [&Raw; 4] {
        match self.attention.layout {
            Layout::Packed { kv_tokens: 0, .. } => [self.q, self.q, self.d_o, self.d_o],
            _ => [self.q, self.k, self.v, self.d_o],
        }
    }
}
