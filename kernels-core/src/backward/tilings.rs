//! Every tile size of the backward pass, each with its reason.
//!
//! Of a backward tiling, `q_rows` are the query rows of one step, `kv_columns` the keys that a
//! block owns, `warps` those that multiply, and `stages` the dO tiles in flight.
//!
//! A portable thread holds dK and dV (`row_tiles · (D̂ + D̂v) / splits / 2` values), its V rows as
//! operands where it owns one row tile (D̂v / 4), Sᵀ and dPᵀ of the queries at once, and about
//! forty addresses and operands, of 255 registers. Plans stay within 101,376 bytes, what a block
//! may have on compute capability 8.6 and 8.9.

use super::portable::{PortableBackwardPlan, PortableBackwardTiling};
use crate::tile::{TileShape, Tiling};

/// Rows of the preprocess and convert kernels, which take any head dimension.
#[derive(Clone, Copy, Debug)]
pub struct BackwardRows;

impl Tiling for BackwardRows {
    const SHAPE: TileShape = TileShape {
        q_rows: 64,
        kv_columns: 64,
        head_dim: 256,
        value_dim: 256,
        warps: 4,
        stages: 1,
    };
    const BLOCKS_PER_SM: u32 = 8;
    const REASON: &'static str =
        "64 rows by 64 channels: four warps move them in whole cache lines, many blocks at a time.";
}

macro_rules! portable_tilings {
    (pieces $pieces:literal;
     $($name:ident: $rows:literal x $keys:literal, dims $dim:literal $value_dim:literal,
       warps $warps:literal, stages $stages:literal, blocks $blocks:literal,
       $reason:literal;)*) => {
        $(
            #[doc = $reason]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl $name {
                const PLAN: PortableBackwardPlan =
                    PortableBackwardPlan::new(Self::SHAPE, $pieces);
            }

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

            impl PortableBackwardTiling for $name {
                type Scores =
                    [f32; ($name::PLAN.row_tiles * $name::PLAN.queries_at_once / 2) as usize];
                type KeyGradient =
                    [f32; ($name::PLAN.row_tiles * $name::PLAN.owned($dim) / 2) as usize];
                type ValueGradient = [f32; if $name::PLAN.roles > 1 {
                    0
                } else {
                    ($name::PLAN.row_tiles * $name::PLAN.owned($value_dim) / 2) as usize
                }];
                type QueryGradient =
                    [f32; ($name::PLAN.dq_row_tiles * $name::PLAN.dq_columns / 2) as usize];
                type Values =
                    [u32; if $name::PLAN.values_in_registers { $value_dim / 4 } else { 0 }];
            }

            const _: () = $name::PORTABLE_CHECKED;
        )*
    };
}

portable_tilings! {
    pieces 1;
    PortableBackward32: 64 x 128, dims 32 32, warps 4, stages 2, blocks 2,
        "32 keys a warp: every Q and dO fragment serves two products; 58 KB, two blocks.";
    PortableBackward64: 64 x 128, dims 64 64, warps 4, stages 2, blocks 2,
        "32 keys a warp: every Q and dO fragment serves two products; 83 KB, two blocks on Hopper.";
    PortableBackward96: 64 x 128, dims 96 96, warps 8, stages 2, blocks 1,
        "16 keys a warp; 96 gradients and 24 operands of V leave room for two dO tiles in 91 KB.";
    PortableBackward128: 64 x 128, dims 128 128, warps 8, stages 1, blocks 1,
        "16 keys a warp; 128 gradients and 32 operands of V; one dO tile, so that 98 KB hold it.";
    PortableBackward128Shared: 64 x 64, dims 128 128, warps 4, stages 1, blocks 2,
        "Two warps share 32 keys: V in shared memory leaves options their registers; 97 KB.";
    PortableBackward192: 32 x 64, dims 192 192, warps 8, stages 2, blocks 1,
        "Two warps share 16 keys, 96 channels of dK and dV each; 32 rows keep it within 82 KB.";
    PortableBackward256: 32 x 64, dims 256 256, warps 8, stages 1, blocks 1,
        "Two warps share 16 keys, 128 channels of dK and dV each; one dO tile; 90 KB.";
    PortableBackward256Large: 64 x 64, dims 256 256, warps 8, stages 1, blocks 1,
        "Four warps share 32 keys: every Q and dO fragment serves two products; 181 KB.";
    PortableBackward192x128: 32 x 64, dims 192 128, warps 8, stages 2, blocks 1,
        "Two warps share 16 keys, since a lone one would hold 160 gradients; 74 KB.";
    PortableBackward64x256: 32 x 64, dims 64 256, warps 8, stages 2, blocks 1,
        "Two warps share 16 keys, since a lone one would hold 160 gradients; 57 KB.";
}

// Of f32, three bf16 pieces an element (see `docs/decisions/0008-f32-by-split-products.md`).
portable_tilings! {
    pieces 3;
    SplitBackward64: 32 x 64, dims 64 64, warps 4, stages 1, blocks 0,
        "16 keys a warp, 64 gradients; 6 bytes an element, one Q and one dO tile: 85 KB.";
    SplitBackward128: 32 x 32, dims 128 128, warps 4, stages 1, blocks 0,
        "Two warps share 16 keys, dK one's and dV the other's; dS lies where dO was, in 97 KB.";
}
