//! Every tile size of the forward pass, each with its reason. The backward's are in
//! [`backward::tilings`](crate::backward::tilings), and reachable here as well, for the table.
//!
//! A thread has at most 255 registers. The portable forward holds the output accumulator
//! (`rows_per_warp · D̂v / 32`), the scores (`rows_per_warp · kv_columns / 32`) and about sixty
//! addresses, operands and row states. 32 rows a warp halve the shared-memory reads a product
//! needs, since every K and V fragment then serves two `mma` row tiles; from D̂v = 192 on, the
//! output accumulator leaves room for 16 rows only. All plans stay within 101,376 bytes, what a
//! block may have on compute capability 8.6 and 8.9, but one of 512 channels.

pub use crate::backward::hopper_tilings::*;
pub use crate::backward::tilings::*;
use crate::tile::{ForwardTiling, HopperTiling, TileShape, Tiling};

macro_rules! tilings {
    (pieces $pieces:literal;
     $($name:ident: $rows:literal x $keys:literal, dims $dim:literal $value_dim:literal,
       warps $warps:literal, stages $stages:literal, blocks $blocks:literal,
       $reason:literal;)*) => {
        $(
            #[doc = $reason]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Tiling for $name {
                const SHAPE: TileShape = TileShape {
                    q_rows: $rows,
                    kv_columns: $keys,
                    head_dim: $dim,
                    value_dim: $value_dim,
                    warps: $warps,
                    stages: $stages,
                };
                const BLOCKS_PER_SM: u32 = $blocks;
                const REASON: &'static str = $reason;
                const PIECES: u32 = $pieces;
            }

            impl ForwardTiling for $name {
                type Scores = [f32; $rows * $keys / ($warps * 32)];
                type Output = [f32; $rows * $value_dim / ($warps * 32)];
            }

            const _: () = $name::CHECKED;
        )*
    };
}

tilings! {
    pieces 1;
    Portable32: 128 x 64, dims 32 32, warps 4, stages 2, blocks 3,
        "32 rows a warp; 24 KB, so that registers, not memory, set three blocks a multiprocessor.";
    General32: 128 x 64, dims 32 32, warps 4, stages 2, blocks 2,
        "As Portable32; biases and dropout spill in the 168 registers that three blocks leave.";
    Portable64: 128 x 128, dims 64 64, warps 4, stages 1, blocks 2,
        "32 rows a warp; 64 + 128 accumulators fill a thread: half the barriers and maxima; 48 KB.";
    General64: 128 x 64, dims 64 64, warps 4, stages 2, blocks 2,
        "As Portable64, with half the scores: masks, biases and dropout need registers; 48 KB.";
    Portable96: 128 x 64, dims 96 96, warps 4, stages 2, blocks 2,
        "32 rows a warp; 96 + 64 accumulators; 72 KB, two blocks.";
    Portable128: 128 x 48, dims 128 128, warps 4, stages 2, blocks 2,
        "32 rows a warp; 128 + 48 accumulators, since 64 scores spill; 80 KB, two blocks.";
    General128: 128 x 32, dims 128 128, warps 4, stages 2, blocks 2,
        "As Portable128, with the 32 keys of a dropout block: its options need registers; 64 KB.";
    Portable192: 64 x 64, dims 192 192, warps 4, stages 1, blocks 2,
        "16 rows a warp, since 32 would need 192 output values; one stage in 72 KB, two blocks.";
    Portable256: 64 x 64, dims 256 256, warps 4, stages 1, blocks 2,
        "16 rows a warp; 128 output values; 64 keys at one stage in 96 KB beat 32 at two.";
    Portable512: 64 x 16, dims 512 256, warps 4, stages 1, blocks 1,
        "128 output values, so half of 512 at a time; 16 keys beside 64 KB of Q in 88 KB.";
    General512: 64 x 32, dims 512 256, warps 4, stages 1, blocks 1,
        "As Portable512, with the 32 keys of a dropout block: 112 KB.";
    Portable192x128: 128 x 32, dims 192 128, warps 4, stages 2, blocks 2,
        "The output is 128 wide, so 32 rows a warp fit; 32 keys keep two stages in 88 KB.";
    Portable64x256: 64 x 64, dims 64 256, warps 4, stages 2, blocks 2,
        "16 rows a warp for 128 output values; the narrow K leaves 64 keys a tile in 88 KB.";
}

// Of f32, three bf16 pieces an element (see `docs/decisions/0008-f32-by-split-products.md`).
tilings! {
    pieces 3;
    Split64: 64 x 64, dims 64 64, warps 4, stages 1, blocks 0,
        "16 rows a warp: 32 output values, 64 parts of scores; 6 bytes an element, 72 KB.";
    Split128: 64 x 32, dims 128 128, warps 4, stages 1, blocks 0,
        "16 rows a warp: 64 output values; 6 bytes an element leave 32 keys in 96 KB.";
}

macro_rules! hopper_tilings {
    ($($name:ident: $rows:literal x $keys:literal, dims $dim:literal $value_dim:literal,
       stages $stages:literal, ping_pong $ping_pong:literal, $reason:literal;)*) => {
        $(
            #[doc = $reason]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Tiling for $name {
                const SHAPE: TileShape = TileShape {
                    q_rows: $rows,
                    kv_columns: $keys,
                    head_dim: $dim,
                    value_dim: $value_dim,
                    warps: $rows / 16,
                    stages: $stages,
                };
                const BLOCKS_PER_SM: u32 = 1;
                const PING_PONG: bool = $ping_pong;
                const REASON: &'static str = $reason;
            }

            impl ForwardTiling for $name {
                type Scores = [f32; $keys / 2];
                type Output = [f32; $value_dim / 2];
            }

            impl HopperTiling for $name {
                type Packed = [u32; $keys / 4];
            }

            const _: () = $name::CHECKED;
            const _: () = $name::HOPPER_CHECKED;
        )*
    };
}

// A warpgroup owns 64 rows. Its threads hold keys / 2 scores, keys / 4 packed probabilities and
// D̂v / 2 output values: about 200 of 240 registers where two warpgroups consume, 130 of 160 where
// three do. The number of keys then fills what shared memory (227 KB) leaves.
hopper_tilings! {
    Hopper64: 192 x 128, dims 64 64, stages 4, ping_pong true,
        "Exponentials cost as much as products: three warpgroups keep both units busy; 152 KB.";
    HopperMasked64: 192 x 112, dims 64 64, stages 4, ping_pong true,
        "As Hopper64, with fewer scores: options need registers as well; 136 KB.";
    Hopper96: 128 x 192, dims 96 96, stages 2, ping_pong true,
        "96 + 48 + 48 registers; 168 KB.";
    Hopper128: 128 x 176, dims 128 128, stages 2, ping_pong true,
        "88 + 44 + 64 registers; 208 KB; wide tiles amortise the rescaling.";
    Hopper128Causal: 128 x 128, dims 128 128, stages 3, ping_pong true,
        "As many keys as rows, so that the diagonal wastes least; a third stage fits: 224 KB.";
    Hopper192: 128 x 112, dims 192 192, stages 2, ping_pong false,
        "96 output values, 56 + 28 for the scores; 216 KB.";
    Hopper192x128: 128 x 128, dims 192 128, stages 2, ping_pong true,
        "64 output values; the wide K leaves 128 keys in 208 KB.";
    Hopper64x256: 128 x 80, dims 64 256, stages 2, ping_pong false,
        "128 output values and 40 + 20 for the scores; at 96 keys a thread spills.";
    Hopper256: 128 x 80, dims 256 256, stages 2, ping_pong true,
        "128 output values and 40 + 20 for the scores; 224 KB.";
}
