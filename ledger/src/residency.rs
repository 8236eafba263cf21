//! How many blocks a multiprocessor could hold, and how a grid fills a device (M4.4 §0x04E–0x04H).
//!
//! A static ceiling from stated limits. What a compiled kernel gets also depends on how registers
//! and shared memory are granted, which the driver says; what it achieves, a profiler.

use serde::{Deserialize, Serialize};

use crate::device::DeviceModel;
use crate::error::{Error, Result, positive, product, ratio};

/// Lanes of a warp.
pub const WARP_LANES: u64 = 32;

/// What one block asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockResources {
    /// Warps of 32 threads.
    pub warps: u64,
    /// Dynamic shared memory in bytes; 0 for none.
    pub shared_bytes: u64,
    /// Registers a thread, once a compiler has said so.
    pub registers_per_thread: Option<u64>,
}

/// What bounds the blocks of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limiter {
    /// Shared memory.
    SharedMemory,
    /// Registers, by the unrounded model.
    Registers,
    /// Threads.
    Threads,
    /// Warps.
    Warps,
    /// Blocks.
    Blocks,
}

/// A static ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Residency {
    /// Threads of a block.
    pub threads: u128,
    /// Whether the block may be launched at all; otherwise the ceiling is 0.
    pub launches: bool,
    /// Whether the launch must first raise its limit of dynamic shared memory, as from 48 KiB.
    pub needs_opt_in: bool,
    /// Blocks that fit, `min` over the limits.
    pub blocks_per_sm: u128,
    /// Which limit is met first.
    pub limiter: Limiter,
    /// Resident warps as a share of those that may be.
    pub warp_occupancy: f64,
}

/// The most blocks of `block` that `device` could hold.
///
/// # Errors
///
/// A block of no warps or registers; a device that [`DeviceModel::check`] refuses.
pub fn residency(block: &BlockResources, device: &DeviceModel) -> Result<Residency> {
    device.check()?;
    let warps = positive("warps", block.warps)?;
    let threads = warps * u128::from(WARP_LANES);
    let registers = block.registers_per_thread.map(|n| positive("registers_per_thread", n));
    let per_block = registers.transpose()?.map(|n| product("registers", &[n, threads]));
    let shared = u128::from(block.shared_bytes);
    let mut ceilings = vec![
        (u128::from(device.blocks_per_sm), Limiter::Blocks),
        (u128::from(device.threads_per_sm) / threads, Limiter::Threads),
        (u128::from(device.warps_per_sm) / warps, Limiter::Warps),
    ];
    if let Some(fit) = u128::from(device.shared_bytes_per_sm).checked_div(shared) {
        ceilings.push((fit, Limiter::SharedMemory));
    }
    if let Some(registers) = per_block.transpose()? {
        ceilings.push((u128::from(device.registers_per_sm) / registers, Limiter::Registers));
    }
    let least = ceilings.iter().rev().min_by_key(|(fit, _)| *fit).copied();
    let (fit, limiter) = least.unwrap_or((0, Limiter::Blocks));
    let launches = threads <= u128::from(device.threads_per_block)
        && block.shared_bytes <= device.shared_bytes_per_block
        && block.registers_per_thread.is_none_or(|n| n <= device.registers_per_thread);
    let blocks_per_sm = if launches { fit } else { 0 };
    Ok(Residency {
        threads,
        launches: launches && fit > 0,
        needs_opt_in: block.shared_bytes >= 48 * 1024,
        blocks_per_sm,
        limiter,
        warp_occupancy: ratio(blocks_per_sm * warps, device.warps_per_sm.into()),
    })
}

/// Registers a thread may have if `blocks` blocks of `threads` threads are to be resident, before
/// any rounding, and within what a thread can have at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RegisterBudget {
    /// `⌊registers / (blocks · threads)⌋`.
    pub threshold: u128,
    /// The threshold, or the most a thread can have.
    pub usable: u128,
}

/// The register budget of a residency.
///
/// # Errors
///
/// A count of 0; a device that [`DeviceModel::check`] refuses.
pub fn register_budget(blocks: u64, threads: u64, device: &DeviceModel) -> Result<RegisterBudget> {
    device.check()?;
    let resident = [positive("blocks", blocks)?, positive("threads", threads)?];
    let threshold = u128::from(device.registers_per_sm) / product("threads", &resident)?;
    Ok(RegisterBudget { threshold, usable: threshold.min(device.registers_per_thread.into()) })
}

/// How a grid fills a device in turns, if blocks took equally long. Not a latency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Waves {
    /// Blocks at a time.
    pub slots: u128,
    /// Turns.
    pub waves: u128,
    /// Blocks of the last turn.
    pub last_wave_blocks: u128,
    /// Those as a share of the slots.
    pub last_wave_fill: f64,
    /// All blocks as a share of the slots of all turns.
    pub fill: f64,
}

/// Waves of `launched` blocks.
///
/// # Errors
///
/// A count of 0; a product beyond `u128`.
pub fn waves(launched: u128, multiprocessors: u64, blocks_per_sm: u64) -> Result<Waves> {
    if launched == 0 {
        return Err(Error::Zero { field: "launched" });
    }
    let multiprocessors = positive("multiprocessors", multiprocessors)?;
    let slots = product("slots", &[multiprocessors, positive("blocks_per_sm", blocks_per_sm)?])?;
    let waves = launched.div_ceil(slots);
    let last = launched - (waves - 1) * slots;
    Ok(Waves {
        slots,
        waves,
        last_wave_blocks: last,
        last_wave_fill: ratio(last, slots),
        fill: ratio(launched, product("slots", &[waves, slots])?),
    })
}

/// The shortest sequence whose query tiles fill the first wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FirstWave {
    /// Query tiles a head that it takes.
    pub q_tiles: u128,
    /// The fewest rows that have so many.
    pub q_len: u128,
}

/// What fills `slots` with `heads` heads (batch included) of tiles of `q_block` rows.
///
/// # Errors
///
/// A count of 0; a product beyond `u128`.
pub fn first_wave(slots: u64, heads: u64, q_block: u64) -> Result<FirstWave> {
    let q_tiles = positive("slots", slots)?.div_ceil(positive("heads", heads)?);
    let before = product("q_len", &[q_tiles - 1, positive("q_block", q_block)?])?;
    Ok(FirstWave { q_tiles, q_len: before + 1 })
}
