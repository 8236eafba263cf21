//! Every kernel there is, once.
//!
//! [`kernel_table!`](crate::kernel_table) hands its rows to a macro of the caller's choosing: the
//! kernels crate expands them to entry points, the host to [`KernelSpec`]s and to the artifacts it
//! embeds, the build to the launch bounds it writes into the PTX. Grid, threads and bytes cannot
//! drift from the kernel, and a row that names what does not exist does not compile.

#[macro_use]
mod rows;

use crate::axes::{Direction, Dtype, Element, Family, MaskClass, MaskKind};
use crate::backward::hopper::{HopperBackwardPlan, softcap_has_alibi};
use crate::backward::portable::{PLACE_BYTES, PortableBackwardPlan};
use crate::backward::schedule::BackwardSchedule;
use crate::backward::scratch::{HopperCounters, QueryGradientOrder};
use crate::tile::{SharedPlan, TileShape, Tiling, WARPGROUP_WARPS};

/// Channels of the widest output tile: more would not fit a thread's registers.
const WIDEST_OUTPUT: u32 = 256;

/// One row of the table, as the host sees it.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpec {
    /// Name of the entry point and of the artifact.
    pub name: &'static str,
    /// Machine it is written for.
    pub family: Family,
    /// What it computes.
    pub direction: Direction,
    /// Element type.
    pub dtype: Dtype,
    /// Masks it can express.
    pub mask: MaskClass,
    /// Tile sizes.
    pub tile: TileShape,
    /// Why these sizes.
    pub reason: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks a multiprocessor should hold.
    pub blocks_per_sm: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether its warpgroups take turns at issuing products.
    pub ping_pong: bool,
}

impl KernelSpec {
    /// The row of a kernel generic over a tiling, an element type and a mask class.
    pub const fn new<T: Tiling, E: Element, M: MaskKind>(
        name: &'static str,
        family: Family,
        direction: Direction,
    ) -> Self {
        let (threads, shared_bytes) = match (family, direction) {
            (Family::Portable, Direction::Forward) => {
                let plan = match M::CLASS {
                    MaskClass::Full | MaskClass::Causal => {
                        SharedPlan::portable_forward(T::SHAPE, T::PIECES)
                    }
                    MaskClass::Masked => SharedPlan::portable_masked(T::SHAPE, T::PIECES),
                    MaskClass::General => SharedPlan::portable_general(T::SHAPE, T::PIECES),
                };
                (T::SHAPE.warps * 32, plan.bytes)
            }
            // One more warpgroup produces.
            (Family::Hopper, Direction::Forward) => {
                let plan = match M::CLASS {
                    MaskClass::Full | MaskClass::Causal => SharedPlan::hopper_forward(T::SHAPE),
                    MaskClass::Masked | MaskClass::General => SharedPlan::hopper_masked(T::SHAPE),
                };
                ((T::SHAPE.warps + WARPGROUP_WARPS) * 32, plan.bytes)
            }
            (_, Direction::Preprocess) => (T::SHAPE.warps * 32, 0),
            // The tile on its way out.
            (_, Direction::Convert) => (T::SHAPE.warps * 32, T::SHAPE.q_rows * 64 * 2),
            (Family::Portable, Direction::Backward) => {
                let place = match M::CLASS {
                    MaskClass::Full | MaskClass::Causal => 0,
                    MaskClass::Masked | MaskClass::General => PLACE_BYTES,
                };
                (T::SHAPE.warps * 32, PortableBackwardPlan::new(T::SHAPE, T::PIECES).bytes + place)
            }
            (Family::Hopper, Direction::Backward) => {
                let plan = HopperBackwardPlan::new(T::SHAPE);
                let bytes = match M::CLASS {
                    MaskClass::Full | MaskClass::Causal => plan.bytes,
                    MaskClass::Masked | MaskClass::General => plan.masked_bytes(),
                };
                ((T::SHAPE.warps + WARPGROUP_WARPS) * 32, bytes)
            }
        };
        Self {
            name,
            family,
            direction,
            dtype: E::DTYPE,
            mask: M::CLASS,
            tile: T::SHAPE,
            reason: T::REASON,
            threads,
            blocks_per_sm: T::BLOCKS_PER_SM,
            shared_bytes,
            ping_pong: T::PING_PONG,
        }
    }

    /// Whether it is of a class that has options: it then takes the parameters of such kernels.
    pub const fn has_options(&self) -> bool {
        matches!(self.mask, MaskClass::Masked | MaskClass::General)
    }

    /// Whether it takes a softcap and ALiBi in one call, if it takes either.
    pub const fn softcap_has_alibi(&self) -> bool {
        match (self.family, self.direction) {
            (Family::Hopper, Direction::Backward) => softcap_has_alibi(&self.tile),
            _ => true,
        }
    }

    /// Channels of v and o that it can be given: a portable forward kernel of the widest output
    /// tile computes twice as many in two launches, each with scores of its own.
    pub const fn most_value_channels(&self) -> u32 {
        match (self.family, self.direction, self.tile.value_dim) {
            (Family::Portable, Direction::Forward, WIDEST_OUTPUT) => 2 * WIDEST_OUTPUT,
            (.., value_dim) => value_dim,
        }
    }

    /// The part of the build that compiles it: kernels of one unit share a module, and a feature of
    /// the kernels crate.
    pub const fn unit(&self) -> &'static str {
        if let Dtype::F32 = self.dtype {
            return "portable_f32";
        }
        match (self.family, self.direction, self.has_options()) {
            (Family::Portable, Direction::Forward, false) => "portable_forward",
            (Family::Portable, Direction::Forward, true) => "portable_forward_options",
            (Family::Portable, _, false) => "portable_backward",
            (Family::Portable, _, true) => "portable_backward_options",
            (Family::Hopper, Direction::Forward, false) => "hopper_forward",
            (Family::Hopper, Direction::Forward, true) => "hopper_forward_options",
            (Family::Hopper, _, false) => "hopper_backward",
            (Family::Hopper, _, true) => "hopper_backward_options",
        }
    }

    /// Loops of a hopper forward kernel that guess: with options one for each kind of run.
    const fn guessing_loops(&self) -> u32 {
        if self.has_options() { 4 } else { 1 }
    }

    /// `mma` (or `wgmma`) instructions in the body: the two products of one K/V tile, unrolled,
    /// and written once.
    pub const fn matrix_instructions(&self) -> u32 {
        let tile = &self.tile;
        match (self.family, self.direction) {
            (Family::Portable, Direction::Forward) => {
                let scores = tile.kv_columns / 8 * (tile.head_dim / 16);
                let output = tile.value_dim / 8 * (tile.kv_columns / 16);
                tile.row_tiles() * (scores + output) * self.dtype.products()
            }
            // Each product is written twice, around and in the loop, and once more in the loop of
            // the tiles that need a mask where there is one.
            (Family::Hopper, Direction::Forward) => {
                let copies = match self.mask {
                    MaskClass::Full => 2,
                    MaskClass::Causal => 3,
                    MaskClass::Masked | MaskClass::General => 2 + self.guessing_loops(),
                };
                let products = copies * (tile.head_dim / 16 + tile.kv_columns / 16);
                // And a warp's own `mma` of one tile's scores, for guesses that were too low: one a
                // loop that guesses.
                products + self.guessing_loops() * (tile.kv_columns / 8)
            }
            (_, Direction::Preprocess | Direction::Convert) => 0,
            (Family::Portable, Direction::Backward) => {
                PortableBackwardPlan::matrix_instructions(self.tile, self.dtype)
            }
            (Family::Hopper, Direction::Backward) => {
                HopperBackwardPlan::matrix_instructions(self.tile)
            }
        }
    }

    /// Barriers in the body, block-wide and named.
    pub const fn barriers(&self) -> u32 {
        match (self.family, self.direction) {
            // Before turning the queries' sign; one a K/V tile, or two with one stage, the second
            // once more for tiles that a mask hides; two around the staging of the output, which
            // of elements in pieces is not staged.
            (Family::Portable, Direction::Forward) => {
                let second = 2 - self.tile.stages;
                let staging = if self.dtype.pieces() > 1 { 1 } else { 2 };
                let hidden = second * matches!(self.mask, MaskClass::General) as u32;
                1 + staging + 1 + second + hidden
            }
            // As below; and two more at the start, around the search for a work and with each of
            // the output's turns, where steps pass before and behind a consumer's own, where values
            // are cleaned, and around the output that other items border on.
            (Family::Hopper, Direction::Forward) if self.has_options() => {
                let always = 18 + self.tile.output_turns();
                if self.ping_pong { 9 + 2 * self.guessing_loops() + always } else { always }
            }
            // At the start, after turning the queries' sign, after skipped tiles, before the output
            // is copied out, and a warp's two around its work; for the turns, one before the first
            // and a pair in each loop.
            (Family::Hopper, Direction::Forward) => {
                let loops = match self.mask {
                    MaskClass::Full => 2,
                    _ => 3,
                };
                if self.ping_pong { 7 + 2 * loops } else { 6 }
            }
            (_, Direction::Preprocess) => 0,
            // Between staging a tile and writing it; between the parts of a sink's gradient.
            (_, Direction::Convert) => {
                (self.dtype.pieces() == 1) as u32 + self.has_options() as u32
            }
            // A step's first asks for the mask as well, or does not; of elements in pieces it never
            // does.
            (Family::Portable, Direction::Backward) => {
                let is_general = matches!(self.mask, MaskClass::General);
                let asks = (is_general && self.dtype.pieces() == 1) as u32;
                PortableBackwardPlan::barriers(self.tile, self.dtype) + asks
            }
            // With options one more where K is cleared, and where Q and dO are, before the loop and
            // in it.
            (Family::Hopper, Direction::Backward) => {
                HopperBackwardPlan::barriers(self.tile) + 5 * self.has_options() as u32
            }
        }
    }

    /// In which order a backward kernel adds to the sums of dQ: the order of its accumulators, by
    /// the widest addition that its instruction set has.
    pub const fn query_gradient_order(&self) -> QueryGradientOrder {
        match self.family {
            Family::Portable => QueryGradientOrder::Values,
            Family::Hopper => QueryGradientOrder::Lanes,
        }
    }

    /// Counters of a backward kernel whose query heads have so many `query_tiles` in all: of a
    /// portable one, where sums are ordered, the one that blocks draw their work from and the turn
    /// of each query tile.
    pub const fn counters(
        &self,
        schedule: &BackwardSchedule,
        query_tiles: u64,
        ordered: bool,
    ) -> u64 {
        match (self.family, ordered) {
            (Family::Hopper, _) => HopperCounters::new(schedule).count(query_tiles, ordered),
            (Family::Portable, true) => 1 + query_tiles,
            (Family::Portable, false) => 0,
        }
    }

    /// Alignment of the parameter structure in bytes: tensor maps by value need 64, which the build
    /// writes into the PTX, since rustc can't.
    pub const fn parameter_alignment(&self) -> u32 {
        match self.family {
            Family::Portable => 8,
            Family::Hopper => 64,
        }
    }
}

macro_rules! specs {
    (
        $($name:ident = $family:ident
            $direction:ident<$tiling:ident, $element:ident, $mask:ident>;)*
    ) => {
        /// Every kernel, in the order of the table.
        pub const KERNELS: &[KernelSpec] = &[$(KernelSpec::new::<
            crate::tilings::$tiling, crate::axes::$element, crate::axes::$mask,
        >(stringify!($name), Family::$family, Direction::$direction)),*];
    };
}
kernel_table!(specs);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_what_the_kernel_is() {
        for (index, kernel) in KERNELS.iter().enumerate() {
            assert!(KERNELS[..index].iter().all(|other| other.name != kernel.name));
            assert!(kernel.name.starts_with(kernel.family.name()));
        }
        assert!(KERNELS.len() <= 256);
    }

    #[test]
    fn a_portable_kernel_of_each_kind_fits_consumer_cards() {
        let kind =
            |k: &KernelSpec| (k.direction, k.dtype, k.mask, k.tile.head_dim, k.tile.value_dim);
        let portable = || KERNELS.iter().filter(|k| k.family == Family::Portable);
        // With every option, the registers of a smaller tile of 256 channels spill, and 32 keys of
        // 512 channels take more beside their queries.
        let large = ["portable_backward_d256_large", "portable_forward_d512"];
        let is_left_out = |k: &&KernelSpec| {
            k.mask == MaskClass::General && large.iter().any(|name| k.name.starts_with(name))
        };
        for kernel in portable().filter(|k| !is_left_out(k)) {
            let fits = |k: &&KernelSpec| kind(k) == kind(kernel) && k.shared_bytes <= 101_376;
            assert!(portable().any(|k| fits(&k)), "{}", kernel.name);
        }
    }
}
