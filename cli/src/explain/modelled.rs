//! What a call costs by arithmetic, apart from what a plan says of itself and from anything
//! measured.

use std::fmt::Write;

use ferroflash::cpu::tiled::CpuTile;
use ferroflash::{Attention, Dtype, Explanation, KERNELS, KernelSpec, Limits, Visibility};
use ferroflash_ledger::device::DeviceModel;
use ferroflash_ledger::launch::forward_grid;
use ferroflash_ledger::residency::{
    BlockResources, Residency, WARP_LANES, Waves, residency, waves,
};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::stages::{
    BackwardStages, ForwardStages, backward_stages_of, forward_stages_of,
};
use ferroflash_ledger::tiles::{TileCounts, tile_counts_of};
use serde::Serialize;

use crate::failure::{Failure, Result};

/// Bytes of lse, delta and accumulators.
const ACCUMULATOR_BYTES: u64 = 4;

/// The model of a call. Every figure follows from sizes; none was measured.
#[derive(Serialize)]
pub(super) struct Modelled {
    /// The device whose limits were taken, if one was named.
    device: Option<DeviceModel>,
    /// Whose tile sizes were taken.
    kernel: String,
    /// Query rows of a tile.
    pub(super) q_block: u64,
    /// Keys of a tile.
    pub(super) kv_block: u64,
    /// Blocks of work, one a query tile of a head.
    works: u128,
    /// Query heads that a forward tile's rows are of; 1 where each head has tiles of its own.
    packed_heads: u64,
    /// Blocks that a multiprocessor of the named device holds at most; registers are not known.
    residency: Option<Residency>,
    /// How the works fill the named device.
    waves: Option<Waves>,
    /// Tiles and cells of a head.
    pub(super) tiles: TileCounts,
    /// FLOPs and bytes of the forward pass.
    pub(super) forward: ForwardStages,
    /// FLOPs and bytes of a backward pass whose blocks own key tiles of the same sizes.
    pub(super) backward: BackwardStages,
    /// The named device's roofs, by its vendor's figures.
    pub(super) vendor_roofs: Option<Roofs>,
}

/// Two roofs of a device, quoted from its vendor.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Roofs {
    /// Dense 16-bit tensor operations a second.
    pub(super) flops_per_second: f64,
    /// Bytes a second of device memory.
    pub(super) bytes_per_second: f64,
    /// FLOPs a byte where the roofs meet.
    pub(super) ridge: f64,
    /// What a forward pass takes at least under both, in seconds.
    pub(super) forward_least_seconds: f64,
}

/// A tile, and the block that works on it.
struct Tile {
    kernel: String,
    q_block: u64,
    kv_block: u64,
    block: Option<BlockResources>,
}

impl Modelled {
    /// Models a call: on the named device, or else with the plan's tile.
    pub(super) fn new(
        attention: &Attention,
        dtype: Dtype,
        explanation: &Explanation,
        device: Option<DeviceModel>,
    ) -> Result<Self> {
        let shape = attention.shape();
        let spec = match &device {
            Some(device) => Some(attention.kernel_for(dtype, &limits(device)?)?),
            None => KERNELS.iter().find(|spec| spec.name == explanation.kernel),
        };
        let tile = match (&device, spec) {
            (Some(_), Some(spec)) => Tile::of_kernel(spec),
            _ => Tile::of_plan(explanation),
        };
        let sizes = Sizes::from(*shape);
        sizes.group()?;
        // The forward kernel's own view of the call; a backward one has every head.
        let multiprocessors = device.as_ref().and_then(|device| device.multiprocessors);
        let multiprocessors = multiprocessors.map_or(0, |count| count as u32);
        let packed = spec.and_then(|spec| attention.with_packed_heads(spec, multiprocessors));
        let launched = packed.as_ref().unwrap_or(attention);
        let packed = packed.map_or(1, |packed| (shape.q_heads / packed.shape().q_heads) as u64);
        let owned = Sizes::from(*launched.shape());
        let count =
            |call: &Attention| tile_counts_of(&call.visibility(), tile.q_block, tile.kv_block);
        let (tiles, every_head) = (count(launched)?, count(attention)?);
        let width = dtype.bytes() as u64;
        let works = forward_grid(owned.batch, owned.q_heads, owned.q_len, tile.q_block)?.launched;
        let resident = match (&device, &tile.block) {
            (Some(device), Some(block)) => Some(residency(block, device)?),
            _ => None,
        };
        let filled = match (&device, &resident) {
            (Some(DeviceModel { multiprocessors: Some(count), .. }), Some(resident)) => {
                Some(waves(works, *count, resident.blocks_per_sm as u64)?)
            }
            _ => None,
        };
        let forward = forward_stages_of(&owned, &tiles, width, ACCUMULATOR_BYTES)?;
        Ok(Self {
            vendor_roofs: device.as_ref().and_then(|device| Roofs::of(device, &forward)),
            backward: backward_stages_of(&sizes, &every_head, width, ACCUMULATOR_BYTES)?,
            forward,
            tiles,
            works,
            packed_heads: packed,
            residency: resident,
            waves: filled,
            kernel: tile.kernel,
            q_block: tile.q_block,
            kv_block: tile.kv_block,
            device,
        })
    }

    /// The same in words.
    pub(super) fn words(&self, visible: &Visibility) -> String {
        let mut text = String::new();
        let on = self.device.as_ref().map_or("the plan's tile", |device| &*device.name);
        let _ = writeln!(text, "\nmodelled for {on}, by arithmetic: nothing below was measured");
        let Self { q_block, kv_block, kernel, works, .. } = self;
        let _ = writeln!(text, "tile      {q_block} query rows x {kv_block} keys, {kernel}'s");
        let rows = match self.packed_heads {
            1 => String::new(),
            heads => format!(", the rows of {heads} query heads each"),
        };
        let _ = writeln!(text, "grid      {works} blocks of work{rows}{}", self.waves_in_words());
        let t = &self.tiles;
        let all = t.q_tiles * t.kv_tiles;
        let _ = writeln!(
            text,
            "tiles     {} of {all} visited a head: {} full, {} partial; {} skipped",
            t.visited, t.full, t.partial, t.skipped
        );
        let masked = 100.0 * t.masked_cells as f64 / t.visited_cells.max(1) as f64;
        let share = 100.0 * t.visible_share;
        let _ = writeln!(
            text,
            "          {share:.2} % of cells are visible; {masked:.2} % of those visited are masked"
        );
        self.stages_in_words(&mut text);
        if let Some(roofs) = &self.vendor_roofs {
            let Roofs { flops_per_second, bytes_per_second, ridge, forward_least_seconds } = roofs;
            let _ = writeln!(
                text,
                "roofs     {:.0} TFLOP/s and {:.2} TB/s, the vendor's figures, meet at {ridge:.0} \
                 FLOP a byte;\n          under both a forward pass takes {:.3} ms at least",
                flops_per_second / 1e12,
                bytes_per_second / 1e12,
                forward_least_seconds * 1e3
            );
        }
        text.push_str(&super::drawing::map(self, visible));
        text
    }

    fn waves_in_words(&self) -> String {
        let Some(resident) = &self.residency else { return String::new() };
        let blocks = resident.blocks_per_sm;
        let fits = format!(", {blocks} a multiprocessor at most (registers are not known)");
        let Some(waves) = &self.waves else { return fits };
        let last = 100.0 * waves.last_wave_fill;
        format!(
            "{fits},\n          {} waves of {}, the last {last:.0} % full",
            waves.waves, waves.slots
        )
    }

    fn stages_in_words(&self, text: &mut String) {
        let f = &self.forward;
        let _ = writeln!(
            text,
            "forward   {:.4e} FLOP scheduled, {:.4e} of them useful",
            f.scheduled_flops as f64, f.useful_flops as f64
        );
        let _ = writeln!(
            text,
            "          q {}, k and v {}, o {}, lse {}: {} requested, {} at least",
            mib(f.q_bytes),
            mib(f.kv_bytes),
            mib(f.o_bytes),
            mib(f.lse_bytes),
            mib(f.total_bytes),
            mib(f.compulsory_bytes)
        );
        let _ = writeln!(
            text,
            "          {:.0} FLOP a requested byte, {:.0} a byte at least",
            f.scheduled_intensity, f.compulsory_intensity
        );
        let b = &self.backward;
        let _ = writeln!(
            text,
            "backward  if blocks own keys in such tiles: {:.4e} FLOP scheduled, {:.4e} useful",
            b.scheduled_flops as f64, b.useful_flops as f64
        );
        let _ = writeln!(
            text,
            "          before {}, main {}, dQ conversion {}, head groups {}: {}",
            mib(b.preprocess_bytes),
            mib(b.main_bytes),
            mib(b.convert_bytes),
            mib(b.group_bytes),
            mib(b.pipeline_bytes)
        );
        let _ = writeln!(text, "          {:.0} FLOP a requested byte", b.scheduled_intensity);
    }
}

impl Tile {
    fn of_kernel(spec: &KernelSpec) -> Self {
        Self {
            kernel: spec.name.to_owned(),
            q_block: spec.tile.q_rows.into(),
            kv_block: spec.tile.kv_columns.into(),
            block: Some(BlockResources {
                warps: u64::from(spec.threads) / WARP_LANES,
                shared_bytes: spec.shared_bytes.into(),
                registers_per_thread: None,
            }),
        }
    }

    fn of_plan(explanation: &Explanation) -> Self {
        let cpu = (CpuTile::FORWARD.q_rows as u32, CpuTile::FORWARD.kv_columns as u32);
        let (q_block, kv_block) = explanation.launch.as_ref().map_or(cpu, |launch| launch.tile);
        let (q_block, kv_block) = (q_block.into(), kv_block.into());
        Self { kernel: explanation.kernel.clone(), q_block, kv_block, block: None }
    }
}

impl Roofs {
    fn of(device: &DeviceModel, forward: &ForwardStages) -> Option<Self> {
        let flops_per_second = device.vendor_tensor_flops_per_second?;
        let bytes_per_second = device.vendor_bytes_per_second?;
        let by_products = forward.useful_flops as f64 / flops_per_second;
        let by_bytes = forward.compulsory_bytes as f64 / bytes_per_second;
        Some(Self {
            flops_per_second,
            bytes_per_second,
            ridge: flops_per_second / bytes_per_second,
            forward_least_seconds: by_products.max(by_bytes),
        })
    }
}

/// The device as a plan would see it.
fn limits(device: &DeviceModel) -> Result<Limits> {
    device.check()?;
    let narrow = |field, value: u64| {
        let needs = format!("at most {}", u32::MAX);
        u32::try_from(value).map_err(|_| Failure::needs(field, value, needs))
    };
    let [major, minor] = device.compute_capability;
    Ok(Limits {
        name: device.name.to_string(),
        capability: (narrow("compute_capability", major)?, narrow("compute_capability", minor)?),
        multiprocessors: narrow("multiprocessors", device.multiprocessors.unwrap_or(1))?,
        shared_bytes_per_block: narrow("shared_bytes_per_block", device.shared_bytes_per_block)?,
        shared_bytes_per_multiprocessor: narrow("shared_bytes_per_sm", device.shared_bytes_per_sm)?,
        l2_bytes: 0,
        memory_bytes: 0,
        driver_version: 0,
    })
}

fn mib(bytes: u128) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
