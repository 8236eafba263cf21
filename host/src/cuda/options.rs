//! The options of a call on a device: checked tensors as masked kernels take them, and lengths from
//! the host on their way there.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use ferroflash_core::backward::params::options::{
    HopperBackwardOptions, HopperMaskedBackwardParams, PortableMaskedBackwardParams,
};
use ferroflash_core::backward::params::{HopperBackwardParams, PortableBackwardParams};
use ferroflash_core::dropout::DropoutMask;
use ferroflash_core::items::Items;
use ferroflash_core::params::options::{
    HeadValues, HopperMaskedParams, HopperScoreOptions, PortableMaskedParams, ScoreOptions,
    ScoreTensor, tanh_polynomial,
};
use ferroflash_core::params::{
    DeviceTensor, HopperForwardParams, PortableForwardParams, ZERO_SCALE,
};
use ferroflash_core::visibility::Align;

use super::device::CudaDevice;
use super::driver::failed;
use super::scratch::Scratch;
use crate::attention::{Attention, Inputs, Layout, Lengths, Packed};
use crate::error::{Error, Result};
use crate::lengths;
use crate::options::OptionTensors;
use crate::tensor::{Place, Raw, TensorRef};

/// Addresses and strides of a call's options, once its tensors have been checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceOptions {
    cu_q: u64,
    cu_k: u64,
    used_q: u64,
    used_k: u64,
    alibi: HeadValues,
    sink: HeadValues,
    bias: ScoreTensor,
    boolean_mask: ScoreTensor,
    /// What is dropped; of another seed and offset where these lie on the device.
    dropout: Option<DropoutMask>,
    /// Where they lie there, or 0.
    dropout_state: u64,
}

impl DeviceOptions {
    pub(crate) fn new<T>(attention: &Attention, inputs: &Inputs<'_, T>) -> Result<Self> {
        let packed = inputs.packed.as_ref();
        let used_q = packed.and_then(|packed| packed.used_q.as_ref());
        let used_k = packed.and_then(|packed| packed.used_k.as_ref());
        let state = inputs.dropout_state.as_ref();
        let on_device = state.filter(|state| state.place() != Place::Host);
        Ok(Self {
            cu_q: address(packed.map(|packed| &packed.cu_q)),
            cu_k: address(packed.map(|packed| &packed.cu_k)),
            used_q: address(used_q),
            used_k: address(used_k.or(inputs.key_lengths.as_ref())),
            alibi: head_values(inputs.alibi_slopes.as_ref().map(|slopes| &slopes.raw)),
            sink: head_values(inputs.sink.as_ref().map(|sink| &sink.raw)),
            bias: score_tensor(inputs.bias.as_ref().map(|bias| &bias.raw)),
            boolean_mask: score_tensor(inputs.boolean_mask.as_ref().map(|mask| &mask.raw)),
            dropout: attention.dropout_mask(state)?,
            dropout_state: on_device.map_or(0, |state| state.raw.address as u64),
        })
    }

    /// The parameters of a masked forward kernel, from those that it shares with the plain ones.
    pub(crate) fn params(
        &self,
        attention: &Attention,
        forward: PortableForwardParams,
    ) -> PortableMaskedParams {
        let options = self.score_options(attention, forward.scale);
        let forward = match is_natural(attention) {
            true => PortableForwardParams {
                scale: 1.0,
                scale_log2: std::f32::consts::LOG2_E,
                ..forward
            },
            false => forward,
        };
        PortableMaskedParams { forward, items: self.items(attention), options }
    }

    /// The parameters of a masked hopper forward kernel, likewise. Scores leave a softcap as tanh,
    /// and ALiBi as powers of two: the state's units follow.
    pub(crate) fn hopper_params(
        &self,
        attention: &Attention,
        forward: HopperForwardParams,
        o: DeviceTensor,
    ) -> HopperMaskedParams {
        use std::f32::consts::{LN_2, LOG2_E};
        // Beyond, tanh leaves scores as they are, and the factor of powers of two must not
        // overflow.
        let cap = attention.softcap.map(|cap| cap.min(1e38));
        let softcap_scale = cap.map_or(0.0, |cap| (forward.scale / cap).max(f32::MIN_POSITIVE));
        let (softcap_near, softcap_polynomial) = tanh_polynomial(softcap_scale);
        let natural = cap.unwrap_or(forward.scale);
        let (scale, scale_log2) = match (attention.alibi, cap) {
            (true, _) => (LN_2, 1.0),
            (false, Some(cap)) => (cap, cap * LOG2_E),
            (false, None) => (forward.scale, forward.scale_log2),
        };
        HopperMaskedParams {
            forward: HopperForwardParams { scale, scale_log2, ..forward },
            items: self.items(attention),
            options: HopperScoreOptions {
                bias_scale: natural * LOG2_E,
                softcap_scale,
                softcap_near,
                softcap_polynomial,
                alibi: self.alibi,
                sink: self.sink,
            },
            o,
        }
    }

    /// The parameters of a masked backward kernel, likewise; `dbias` is the gradient of the bias.
    pub(crate) fn backward_params(
        &self,
        attention: &Attention,
        backward: PortableBackwardParams,
        dbias: Option<&Raw>,
    ) -> PortableMaskedBackwardParams {
        // As in `ZERO_SCALE`'s use forward: a product's factor of 0 would stand for none.
        let scale = if backward.scale == 0.0 { ZERO_SCALE } else { backward.scale };
        PortableMaskedBackwardParams {
            items: self.items(attention),
            options: self.score_options(attention, scale),
            exponent_scale: if is_natural(attention) { 1.0 } else { backward.scale },
            bias_gradient_is_sum: u32::from(sums_bias_gradient(attention)),
            bias_gradient: score_tensor(dbias),
            backward,
        }
    }

    /// The parameters of a masked hopper backward kernel of tiles of `q_rows`, likewise; its
    /// records lie at `records`.
    pub(crate) fn hopper_backward_params(
        &self,
        attention: &Attention,
        backward: HopperBackwardParams,
        q_rows: u32,
        records: u64,
    ) -> HopperMaskedBackwardParams {
        // As forward.
        let cap = attention.softcap.map_or(0.0, |cap| cap.min(1e38));
        let softcap_scale = match cap > 0.0 {
            true => {
                let scale = backward.scale / cap;
                scale.abs().max(f32::MIN_POSITIVE).copysign(scale)
            }
            false => 0.0,
        };
        let items = self.items(attention);
        let more_turns = match items.is_packed() {
            true => items.slots(q_rows) as u32 - backward.scratch.padded_rows / q_rows,
            false => 0,
        };
        HopperMaskedBackwardParams {
            backward,
            options: HopperBackwardOptions {
                records,
                more_turns,
                softcap_scale,
                score_scale: if cap > 0.0 { cap } else { backward.scale },
                softcap_inverse: if cap > 0.0 { cap.recip() } else { 0.0 },
                alibi: self.alibi,
            },
        }
    }

    /// What happens to a product that is to be multiplied by `scale`.
    fn score_options(&self, attention: &Attention, scale: f32) -> ScoreOptions {
        let cap = attention.softcap.unwrap_or(0.0);
        let softcap_scale = if cap > 0.0 { scale / cap } else { 0.0 };
        let (softcap_near, softcap_polynomial) = tanh_polynomial(softcap_scale);
        ScoreOptions {
            product_scale: if is_natural(attention) { scale } else { 0.0 },
            softcap: cap,
            softcap_scale,
            softcap_near,
            softcap_polynomial,
            drops: u32::from(self.dropout.is_some()),
            dropout: self.dropout.unwrap_or(DropoutMask::new(0.0, 0, 0)),
            mask_is_bits: u32::from(attention.mask_is_bits),
            dropout_state: self.dropout_state,
            alibi: self.alibi,
            sink: self.sink,
            bias: self.bias,
            boolean_mask: self.boolean_mask,
        }
    }

    /// The logits of the sinks.
    pub(crate) fn sink(&self) -> HeadValues {
        self.sink
    }

    pub(crate) fn items(&self, attention: &Attention) -> Items {
        let shape = &attention.shape;
        let (q_len, kv_len) = (shape.q_len as u32, shape.kv_len as u32);
        let (q_tokens, kv_tokens) = match attention.layout {
            Layout::Packed { q_tokens, kv_tokens } => (q_tokens as u32, kv_tokens as u32),
            Layout::Dense | Layout::KeyLengths => (q_len, kv_len),
        };
        let everything = shape.q_len + shape.kv_len;
        let side = |side: Option<usize>| side.map_or(everything, |keys| keys.min(everything));
        Items {
            cu_q: self.cu_q,
            cu_k: self.cu_k,
            used_q: self.used_q,
            used_k: self.used_k,
            count: shape.batch as u32,
            q_tokens,
            kv_tokens,
            q_len,
            kv_len,
            left: side(attention.mask.left) as i32,
            right: side(attention.mask.right) as i32,
            bottom_right: u32::from(attention.mask.align == Align::BottomRight),
        }
    }
}

/// Whether an option adds to scores, so that kernels go on in natural units.
fn is_natural(attention: &Attention) -> bool {
    attention.softcap.is_some() || attention.alibi || attention.bias.is_some()
}

/// Whether cells share an element of the bias' gradient: it is then a sum.
pub(crate) fn sums_bias_gradient(attention: &Attention) -> bool {
    let shape = &attention.shape;
    attention.bias.is_some_and(|axes| {
        let shared = |one: bool, size: usize| one && size > 1;
        shared(axes.batch, shape.batch)
            || shared(axes.heads, shape.q_heads)
            || shared(axes.rows, shape.q_len)
    })
}

/// Where lengths lie on the device; 0 where there are none.
fn address(lengths: Option<&Lengths<'_>>) -> u64 {
    match lengths {
        Some(Lengths::Device(tensor)) => tensor.raw.address as u64,
        Some(Lengths::Host(_)) | None => 0,
    }
}

/// Stride of an axis, 0 where it has one element.
fn stride(raw: &Raw, axis: usize) -> i64 {
    if raw.dims()[axis] > 1 { raw.strides()[axis] } else { 0 }
}

/// `[Hq]` or `[B, Hq]`.
fn head_values(raw: Option<&Raw>) -> HeadValues {
    let Some(raw) = raw else { return HeadValues::NONE };
    let last = raw.dims().len() - 1;
    let batch = if last == 1 { stride(raw, 0) } else { 0 };
    HeadValues { address: raw.address as u64, batch, head: stride(raw, last) }
}

/// `[B or 1, Hq or 1, Sq or 1, Sk]`.
pub(super) fn score_tensor(raw: Option<&Raw>) -> ScoreTensor {
    let Some(raw) = raw else { return ScoreTensor::NONE };
    ScoreTensor {
        address: raw.address as u64,
        batch: stride(raw, 0),
        head: stride(raw, 1),
        row: stride(raw, 2),
    }
}

/// Checks lengths that lie in host memory, copies them to the device in the stream's order and puts
/// the copies in their place. The memory is theirs for as long as the result lives.
///
/// The driver has read pageable memory when its copy returns. While a stream is captured it would
/// read it at each replay, so that is refused.
///
/// # Errors
/// [`Error::Presence`] and [`Error::Argument`] by the name of what is wrong;
/// [`Error::OutOfMemory`], or the driver's.
pub(crate) fn upload_lengths<T>(
    device: &Arc<CudaDevice>,
    stream: sys::CUstream,
    attention: &Attention,
    inputs: &mut Inputs<'_, T>,
) -> Result<Option<Scratch>> {
    let given = OptionTensors::new(attention, inputs)?;
    lengths::check_on_host(attention, given.key_lengths, given.packed)?;
    let mut on_host: Vec<(&'static str, &mut Lengths<'_>)> = Vec::new();
    if let Some(lengths) = &mut inputs.key_lengths {
        on_host.push(("key_lengths", lengths));
    }
    if let Some(Packed { cu_q, cu_k, used_q, used_k }) = &mut inputs.packed {
        on_host.extend([("cu_q", cu_q), ("cu_k", cu_k)]);
        on_host.extend(used_q.as_mut().map(|used| ("used_q", used)));
        on_host.extend(used_k.as_mut().map(|used| ("used_k", used)));
    }
    on_host.retain(|(_, lengths)| matches!(lengths, Lengths::Host(_)));
    let Some(&(name, _)) = on_host.first() else { return Ok(None) };
    let _current = device.enter()?;
    // SAFETY: the stream is of the device's context, by the caller's own check.
    let capture = unsafe { result::stream::is_capturing(stream) }
        .map_err(failed("cuStreamIsCapturing", None))?;
    if capture != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Err(Error::argument(
            name,
            "lengths in host memory while the stream is captured",
            "lengths in device memory (Lengths::Device), which a replay can read",
        ));
    }
    let count: usize = on_host.iter().map(|(_, lengths)| host_values(lengths).len()).sum();
    let scratch = Scratch::new(device, stream, (count * size_of::<i32>()).max(1))?;
    let memory = scratch.raw()?;
    // From pageable memory of our own, which the driver has read when its copy returns: what the
    // caller gave may be page-locked, and read later.
    let all: Vec<i32> =
        on_host.iter().flat_map(|(_, lengths)| host_values(lengths)).copied().collect();
    // SAFETY: the scratch was sized for all of them.
    unsafe { result::memcpy_htod_async(memory.address as sys::CUdeviceptr, &all, stream) }
        .map_err(failed("cuMemcpyHtoDAsync", None))?;
    let mut next = memory.address;
    for (_, lengths) in on_host {
        let Lengths::Host(values) = &*lengths else { continue };
        let (count, bytes) = (values.len(), size_of_val(*values));
        // SAFETY: the scratch outlives the call that reads this, and is freed in its order.
        let copy = unsafe {
            TensorRef::from_raw(std::ptr::without_provenance(next), &[count], &[1], memory.place)
        };
        *lengths = Lengths::Device(copy?);
        next += bytes;
    }
    Ok(Some(scratch))
}

/// The values that lie in host memory.
fn host_values<'l>(lengths: &'l Lengths<'_>) -> &'l [i32] {
    match lengths {
        Lengths::Host(values) => values,
        Lengths::Device(_) => &[],
    }
}
