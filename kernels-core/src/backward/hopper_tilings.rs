//! Every tile size of the hopper backward kernels, each with its reason.
//!
//! Two warpgroups own 64 keys each. A thread has 240 registers: it holds `D̂ / 2` values of dK and
//! `D̂v / 2` of dV throughout, twice `q_rows / 2` values of Sᵀ and dPᵀ, of which half as many packed
//! operands take over, and then its share of dQ beside the next step's Sᵀ.

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
        "As many rows as keys, so that no product is bound by shared memory; 64 gradients leave room.";
    HopperBackward96: 64 x 128, dims 96 96, stages 2,
        "96 gradients; 64 rows leave room to overlap steps.";
    HopperBackward128: 64 x 128, dims 128 128, stages 2,
        "128 gradients; 64 rows leave room to overlap steps.";
    HopperBackward192: 64 x 64, dims 192 192, stages 2,
        "96 gradients of dK and dV each; 216 KB.";
    HopperBackward256: 64 x 64, dims 256 256, stages 2,
        "128 gradients; two Q and dO tiles beside K and V fill 225 KB.";
    HopperBackward192x128: 64 x 64, dims 192 128, stages 2,
        "80 gradients.";
    HopperBackward64x256: 64 x 64, dims 64 256, stages 2,
        "80 gradients.";
}
