//! Choosing a kernel: which rows of the table could run a call, which does, and why not the others.

use std::cmp::Reverse;

use ferroflash_core::axes::{Direction, Dtype, Family, MaskClass};
use ferroflash_core::table::{KERNELS, KernelSpec};
use ferroflash_core::visibility::Visibility;

use crate::attention::{Attention, Layout};
use crate::cuda::backward::most_blocks;
use crate::cuda::device::Limits;
use crate::cuda::forward::query_blocks;
use crate::error::{Error, Result};

/// A kernel that was not taken, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Why it was not taken.
    pub reason: String,
}

/// The chosen kernel, and what was passed over for it.
pub(crate) struct Choice {
    pub(crate) spec: &'static KernelSpec,
    /// What runs instead where the copy engine cannot address a tensor.
    pub(crate) fallback: Option<&'static KernelSpec>,
    pub(crate) reason: String,
    pub(crate) rejected: Vec<Rejection>,
}

/// Largest linear grid.
const MAX_BLOCKS: usize = i32::MAX as usize;

/// Chooses the kernel for one direction of a call on a device.
pub(crate) fn choose(
    attention: &Attention,
    dtype: Dtype,
    direction: Direction,
    limits: &Limits,
    by_name: Option<&str>,
) -> Result<Choice> {
    let mut rejected = Vec::new();
    let mut eligible: Vec<&'static KernelSpec> = Vec::new();
    let candidates = KERNELS.iter().filter(|spec| spec.direction == direction);
    let is_named = |spec: &KernelSpec| {
        by_name.is_none_or(|name| name == spec.name || name == spec.family.name())
    };
    for spec in candidates.filter(|spec| is_named(spec)) {
        match obstacle(attention, dtype, spec, limits) {
            None => eligible.push(spec),
            Some(reason) => rejected.push(Rejection { kernel: spec.name, reason }),
        }
    }
    eligible.sort_by_key(|spec| preference(spec, attention.shape.kv_len));
    let Some((&spec, others)) = eligible.split_first() else {
        return Err(unsupported(attention, dtype, direction, limits, by_name, &rejected));
    };
    let fallback = match spec.family {
        Family::Portable => None,
        Family::Hopper => others.iter().find(|other| other.family == Family::Portable).copied(),
    };
    rejected.extend(others.iter().map(|other| Rejection {
        kernel: other.name,
        reason: if other.family != spec.family {
            match fallback {
                Some(fallback) if fallback.name == other.name => {
                    "runs where an address or a stride is no multiple of 16 bytes".to_owned()
                }
                _ => format!("would do, but {} is made for this device", spec.name),
            }
        } else if (other.tile.head_dim, other.tile.value_dim)
            == (spec.tile.head_dim, spec.tile.value_dim)
        {
            let is_larger = other.shared_bytes < spec.shared_bytes;
            let more = if spec.direction == Direction::Forward && other.mask == spec.mask {
                "has the better tiles for this many keys"
            } else if is_larger {
                "has more in flight"
            } else {
                "needs no wider masks"
            };
            format!("would do, but {} {more}", spec.name)
        } else {
            format!("would do, but {} pads fewer channels", spec.name)
        },
    }));
    let reason = match by_name {
        Some(_) => "asked for by name".to_owned(),
        None => format!(
            "the narrowest compiled head dimensions ({}, {}) that hold ({}, {}){}",
            spec.tile.head_dim,
            spec.tile.value_dim,
            attention.shape.head_dim,
            attention.shape.value_dim,
            match attention.shape.value_dim.div_ceil(spec.tile.value_dim as usize) {
                0 | 1 => String::new(),
                launches => format!(", in {launches} launches of {} values", spec.tile.value_dim),
            }
        ),
    };
    Ok(Choice { spec, fallback, reason, rejected })
}

/// Keys from which wider tiles of a forward kernel are the faster ones. Measured on an H200 at
/// d = 128, causal: 176 keys a tile for 128 lose 11 % at 512 keys and 3 % at 2048, where the
/// diagonal is much of the work, and gain 1 % at 4096 and 3 to 6 % from 8192 on.
const MANY_KEYS: usize = 4096;

/// Smaller is better: the family made for the device, then padded channels, then none of the
/// options, then, of backward kernels, more shared memory, then the mask class, then, of forward
/// kernels, the width of a tile.
fn preference(spec: &KernelSpec, keys: usize) -> (u32, u32, bool, Reverse<u32>, MaskClass, u32) {
    let family = match spec.family {
        Family::Hopper => 0,
        Family::Portable => 1,
    };
    let channels = spec.tile.head_dim + spec.tile.value_dim;
    // Forward, shared memory follows the mask class.
    let shared = if spec.direction == Direction::Forward { 0 } else { spec.shared_bytes };
    let width = spec.tile.kv_columns;
    let width = if keys < MANY_KEYS { width } else { u32::MAX - width };
    (family, channels, spec.has_options(), Reverse(shared), spec.mask, width)
}

/// What a kernel of class `full` lacks first.
pub(crate) const RIGHT_SIDE: &str = "mask but the end of the keys";

/// Whether the mask hides keys at the left and at the right of some row. A side that hides nothing
/// is no option; that of a packed item may, whatever the longest is. An item with fewer keys than
/// the call's has no row that sees less of them.
pub(crate) fn hidden_sides(attention: &Attention) -> (bool, bool) {
    let visible = attention.visibility();
    let is_packed = matches!(attention.layout, Layout::Packed { .. });
    let (mut left, mut right) =
        (is_packed && attention.mask.left.is_some(), is_packed && attention.mask.right.is_some());
    if let Some(last_row) = visible.q_len.checked_sub(1) {
        left |= visible.keys_start(last_row) > 0;
        right |= visible.keys_end(0) < visible.kv_len;
    }
    (left, right)
}

/// The options of a call, each with the narrowest mask class that has it, in the words of errors
/// and plans.
pub(crate) fn options(attention: &Attention) -> Vec<(MaskClass, &'static str)> {
    use MaskClass::{Causal, General, Masked};
    let is_packed = matches!(attention.layout, Layout::Packed { .. });
    let (hides_left, hides_right) = hidden_sides(attention);
    let options = [
        (hides_right, Causal, RIGHT_SIDE),
        (hides_left, Masked, "left window"),
        (attention.layout == Layout::KeyLengths, Masked, "key lengths"),
        (is_packed, Masked, "packed sequences"),
        (attention.softcap.is_some(), Masked, "softcap"),
        (attention.alibi, Masked, "ALiBi"),
        (attention.sink, Masked, "sink"),
        (attention.bias.is_some(), General, "bias"),
        (attention.boolean_mask.is_some(), General, "boolean mask"),
        (attention.dropout.is_some(), General, "dropout"),
    ];
    options.into_iter().filter(|(given, ..)| *given).map(|(_, class, name)| (class, name)).collect()
}

/// The mask class a call needs.
pub(crate) fn mask_class(attention: &Attention) -> MaskClass {
    options(attention).into_iter().map(|(class, _)| class).max().unwrap_or(MaskClass::Full)
}

/// Why `spec` cannot run the call, or `None`.
fn obstacle(
    attention: &Attention,
    dtype: Dtype,
    spec: &KernelSpec,
    limits: &Limits,
) -> Option<String> {
    let shape = &attention.shape;
    let tile = &spec.tile;
    if spec.dtype != dtype {
        return Some(format!("computes {}, the call is {dtype}", spec.dtype));
    }
    let most_value_channels = spec.most_value_channels();
    if shape.head_dim > tile.head_dim as usize || shape.value_dim > most_value_channels as usize {
        return Some(format!(
            "holds head dimensions up to ({}, {most_value_channels}), the call has ({}, {})",
            tile.head_dim, shape.head_dim, shape.value_dim
        ));
    }
    if let Some((_, option)) = options(attention).iter().find(|(class, _)| *class > spec.mask) {
        return Some(format!("has no {option}"));
    }
    if attention.softcap.is_some() && attention.alibi && !spec.softcap_has_alibi() {
        return Some("has no registers for a softcap and ALiBi together".to_owned());
    }
    let (major, minor) = limits.capability;
    if !spec.family.runs_on(major, minor) {
        return Some(format!(
            "needs {}, the device is sm_{major}{minor}",
            match spec.family {
                Family::Portable => "compute capability 8.0 or later",
                Family::Hopper => "compute capability 9.0",
            }
        ));
    }
    if spec.shared_bytes > limits.shared_bytes_per_block {
        return Some(format!(
            "needs {} bytes of shared memory a block, the device grants {}",
            spec.shared_bytes, limits.shared_bytes_per_block
        ));
    }
    if let Layout::Packed { q_tokens, kv_tokens } = attention.layout
        && q_tokens.max(kv_tokens) > i32::MAX as usize
    {
        return Some("offsets of packed items are 32-bit: split the batch".to_owned());
    }
    let blocks = match spec.direction {
        Direction::Forward => query_blocks(attention, spec).map(|(blocks, heads)| blocks * heads),
        _ => most_blocks(attention, spec),
    };
    if blocks.is_none_or(|blocks| blocks > MAX_BLOCKS) {
        return Some(format!("the grid would have more than {MAX_BLOCKS} blocks; split the batch"));
    }
    None
}

fn unsupported(
    attention: &Attention,
    dtype: Dtype,
    direction: Direction,
    limits: &Limits,
    by_name: Option<&str>,
    rejected: &[Rejection],
) -> Error {
    let shape = &attention.shape;
    let named = by_name.map(|name| format!(" by kernel {name}")).unwrap_or_default();
    let mut reasons: Vec<&str> = rejected.iter().map(|r| r.reason.as_str()).collect();
    // Kernels of other element types say nothing where there are some of the call's.
    let is_of_dtype = |reason: &&str| !reason.starts_with("computes ");
    if reasons.iter().any(is_of_dtype) {
        reasons.retain(is_of_dtype);
    }
    reasons.sort_unstable();
    reasons.dedup();
    if reasons.is_empty() {
        reasons.push("the kernel table has no such kernel");
    }
    Error::Unsupported {
        what: format!(
            "{direction:?} of {dtype} with head dimensions ({}, {}){named}",
            shape.head_dim, shape.value_dim
        )
        .to_lowercase(),
        device: limits.name.clone(),
        reasons: reasons.join("; "),
    }
}

impl Attention {
    /// The forward kernel that a device of these limits would be given. The device need not be
    /// here, and nothing is loaded.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] with every candidate's reason.
    pub fn kernel_for(&self, dtype: Dtype, limits: &Limits) -> Result<&'static KernelSpec> {
        choose(self, dtype, Direction::Forward, limits, None).map(|choice| choice.spec)
    }

    /// The cells that the mask leaves by position; key lengths and boolean masks hide more.
    pub fn visibility(&self) -> Visibility {
        self.mask.visibility(self.shape.q_len, self.shape.kv_len)
    }
}

#[cfg(test)]
mod tests;
