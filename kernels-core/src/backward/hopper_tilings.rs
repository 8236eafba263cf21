//! Every tile size of the hopper backward kernels, each with its reason.
//!
//! Two warpgroups compute; a thread of theirs has 240 registers. Throughout it holds its share of
//! dK and dV, `(D̂ + D̂v) · keys / 256` values; in a step first its share of Sᵀ and dPᵀ, which
//! shrink to packed operands, then its share of dQ beside the next step's Sᵀ. Shared memory (227
//! KB) goes to two or three Q and dO tiles, then to staging dQ, then to a second K and V.

use super::hopper::{HopperBackwardTiling, QueryShare};
use crate::tile::{TileShape, Tiling};

macro_rules! hopper_tilings {
    ($($name:ident: $rows:literal x $keys:literal, dims $dim:literal $value_dim:literal,
       stages $stages:literal, $reason:literal;)*) => {
        $(
            #[doc = $reason]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl $name {
                /// Warpgroups that each compute a part of a step's dQ.
                const SHARERS: usize =
                    QueryShare::of(&Self::SHAPE).sharers(&Self::SHAPE) as usize;
            }

            impl Tiling for $name {
                const SHAPE: TileShape = TileShape {
                    q_rows: $rows,
                    kv_columns: $keys,
                    head_dim: $dim,
                    value_dim: $value_dim,
                    warps: 8,
                    stages: $stages,
                };
                const BLOCKS_PER_SM: u32 = 1;
                const REASON: &'static str = $reason;
            }

            impl HopperBackwardTiling for $name {
                type Scores = [f32; $rows * $keys / 256];
                type Packed = [u32; $rows * $keys / 512];
                type KeyGradient = [f32; $dim * $keys / 256];
                type ValueGradient = [f32; $value_dim * $keys / 256];
                type QueryGradient = [f32; $rows * $dim / (128 * $name::SHARERS)];
            }

            const _: () = $name::HOPPER_CHECKED;
        )*
    };
}

hopper_tilings! {
    HopperBackward64: 128 x 128, dims 64 64, stages 2,
        "64 gradients leave room for 64 + 64 scores: as many rows as keys read least; 226 KB.";
    HopperBackward96: 64 x 128, dims 96 96, stages 2,
        "96 gradients; half of three panels is none, so that dQ takes turns: 48 a thread; 225 KB.";
    HopperBackward128: 64 x 128, dims 128 128, stages 3,
        "128 gradients leave room for 32 + 32 scores, dK's operand and P's; 226 KB.";
    HopperBackward192: 64 x 64, dims 192 192, stages 2,
        "Shared keys: 96 gradients and 48 of dQ; 128 keys would take 192 gradients; 225 KB.";
    HopperBackward256: 64 x 64, dims 256 256, stages 2,
        "Shared keys: 128 gradients and 64 of dQ, which is not staged for want of room; 225 KB.";
    HopperBackward192x128: 64 x 64, dims 192 128, stages 2,
        "Shared keys: 80 gradients and 48 of dQ; 128 keys would take 160 gradients; 201 KB.";
    HopperBackward64x256: 64 x 64, dims 64 256, stages 2,
        "Shared keys: 80 gradients and 16 of dQ; 128 keys would take 160 gradients; 209 KB.";
}
