//! How many blocks a backward call takes and how much memory, by its sizes alone.

use ferroflash_core::axes::{Family, MaskClass};
use ferroflash_core::backward::record::KeyRecord;
use ferroflash_core::backward::schedule::BackwardSchedule;
use ferroflash_core::backward::scratch::ScratchSizes;
use ferroflash_core::table::KernelSpec;

use crate::attention::{Attention, Layout};
use crate::cuda::device::Limits;

/// Rows and channels that a preprocess or convert block takes.
pub(super) const STAGE_TILE: usize = 64;

/// The query rows of a call as the stages take them, in which packed items are one: how many rows,
/// and heads of all items.
pub(super) fn query_rows(attention: &Attention) -> (usize, usize) {
    let shape = &attention.shape;
    match attention.layout {
        Layout::Packed { q_tokens, .. } => (q_tokens, shape.q_heads),
        Layout::Dense | Layout::KeyLengths => {
            (shape.q_len, shape.batch.saturating_mul(shape.q_heads))
        }
    }
}

/// What the stages share, for a call that wants every gradient.
pub(super) fn scratch_sizes(attention: &Attention, spec: &KernelSpec) -> ScratchSizes {
    let (rows, heads) = query_rows(attention);
    let tile_rows = spec.tile.q_rows as usize;
    let tiles = rows.div_ceil(tile_rows);
    // Each packed item begins a tile of its own.
    let item_tiles = match attention.layout {
        Layout::Packed { .. } => rows / tile_rows + attention.shape.batch + 1,
        Layout::Dense | Layout::KeyLengths => tiles,
    };
    let schedule = schedule(attention, spec);
    let counters = match (heads * tiles, heads as u64 * item_tiles as u64) {
        (0, _) => 0,
        (_, query_tiles) => spec.counters(&schedule, query_tiles, attention.deterministic),
    };
    let part_sums = match schedule.parts {
        1 => 0,
        _ => {
            let keys = u64::from(schedule.kv_blocks) * u64::from(spec.tile.kv_columns);
            let channels = u64::from(spec.tile.head_dim + spec.tile.value_dim);
            u64::from(schedule.batch_heads) * keys * channels
        }
    };
    ScratchSizes {
        batch_heads: heads as u64,
        padded_rows: (tiles * tile_rows) as u32,
        dq_channels: spec.tile.head_dim,
        powers_of_two: spec.family == Family::Hopper,
        counters,
        part_sums,
    }
}

/// Bytes of workspace that a backward call through `spec` needs.
pub(crate) fn workspace_bytes(attention: &Attention, spec: &KernelSpec) -> usize {
    let records = records(attention, spec).saturating_mul(KeyRecord::WORDS as usize * 4);
    let bytes = usize::try_from(scratch_sizes(attention, spec).bytes()).unwrap_or(usize::MAX);
    bytes.saturating_add(records)
}

/// Records of key blocks that a hopper kernel with options wants: of every item, or of the slots of
/// packed ones.
pub(super) fn records(attention: &Attention, spec: &KernelSpec) -> usize {
    if spec.family == Family::Portable || !spec.has_options() {
        return 0;
    }
    let (blocks, _) = key_blocks(attention, spec);
    match attention.layout {
        Layout::Packed { .. } => blocks,
        Layout::Dense | Layout::KeyLengths => blocks.saturating_mul(attention.shape.batch),
    }
}

/// Key blocks of a head, and heads: of every item, or of all packed items together (see
/// `ferroflash_core::items`).
fn key_blocks(attention: &Attention, spec: &KernelSpec) -> (usize, usize) {
    let shape = &attention.shape;
    match attention.layout {
        Layout::Packed { kv_tokens, .. } => {
            let slots = kv_tokens / spec.tile.kv_columns as usize + 1;
            (slots.saturating_add(shape.batch), shape.kv_heads)
        }
        Layout::Dense | Layout::KeyLengths => {
            (spec.tile.kv_blocks(shape.kv_len), shape.batch.saturating_mul(shape.kv_heads))
        }
    }
}

/// The largest grid among the stages of a backward call through `spec`; `None` past 64 bits.
pub(crate) fn most_blocks(attention: &Attention, spec: &KernelSpec) -> Option<usize> {
    let (rows, heads) = query_rows(attention);
    let tile_rows = spec.tile.q_rows as usize;
    let padded = rows.div_ceil(tile_rows) * tile_rows;
    let panels = (spec.tile.head_dim as usize).div_ceil(STAGE_TILE);
    let stages = padded.div_ceil(STAGE_TILE) * panels;
    // One more block a query head, for its sink.
    let stages = stages.checked_mul(heads)?.checked_add(attention.shape.q_heads)?;
    let (blocks, kv_heads) = key_blocks(attention, spec);
    Some(stages.max(blocks.checked_mul(kv_heads)?))
}

/// The order in which blocks of `spec` take a call's key blocks.
pub(crate) fn schedule(attention: &Attention, spec: &KernelSpec) -> BackwardSchedule {
    // Works are as uneven as the right side makes them.
    let mask = if is_causal(attention, spec) { MaskClass::Causal } else { MaskClass::Full };
    let plain = KernelSpec { mask, ..*spec };
    match attention.layout {
        Layout::Packed { .. } => {
            let (kv_blocks, heads) = key_blocks(attention, spec);
            let (kv_blocks, batch_heads) = (kv_blocks as u32, heads as u32);
            let section = match spec.family {
                Family::Portable => BackwardSchedule::section_for(batch_heads),
                // As one long item.
                Family::Hopper => {
                    let rows = query_rows(attention).0 * attention.shape.group();
                    BackwardSchedule::shared_section(batch_heads, kv_blocks, rows as u64, &plain)
                }
            };
            BackwardSchedule { kv_blocks, batch_heads, parts: 1, section }
        }
        Layout::Dense | Layout::KeyLengths => BackwardSchedule::of(&attention.shape, &plain),
    }
}

/// Whether a call through `spec` has rows that see fewer keys than the last one.
pub(super) fn is_causal(attention: &Attention, spec: &KernelSpec) -> bool {
    match spec.mask {
        MaskClass::Full => false,
        MaskClass::Causal => true,
        MaskClass::Masked | MaskClass::General => attention.mask.right.is_some(),
    }
}

/// Blocks that the main kernel is launched with: persistent ones fill the device once.
pub(crate) fn grid(spec: &KernelSpec, schedule: &BackwardSchedule, limits: &Limits) -> u64 {
    match spec.family {
        Family::Portable => schedule.blocks(),
        Family::Hopper => schedule.blocks().min(u64::from(limits.multiprocessors)),
    }
}
