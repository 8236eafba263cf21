//! What a device would be given that need not be here: for models, tables and tests. Nothing is
//! loaded.

use ferroflash_core::axes::{Direction, Dtype};
use ferroflash_core::table::KernelSpec;

use crate::attention::Attention;
use crate::choose::choose;
use crate::cuda::device::Limits;
use crate::cuda::{backward, forward};
use crate::error::Result;
use crate::plan::WorkspaceBytes;

impl Attention {
    /// The main backward kernel that a device of these limits would be given, as
    /// [`Attention::kernel_for`] says of forward.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for options outside the contract,
    /// [`Error::Unsupported`](crate::Error::Unsupported) with every candidate's reason.
    pub fn backward_kernel_for(
        &self,
        dtype: Dtype,
        limits: &Limits,
    ) -> Result<&'static KernelSpec> {
        self.validate()?;
        choose(self, dtype, Direction::Backward, limits, None).map(|choice| choice.spec)
    }

    /// Bytes of workspace that a plan for a device of these limits would ask for, as
    /// [`Plan::workspace`](crate::Plan::workspace) says of one that is here: 0 for a direction
    /// that it would not have.
    ///
    /// # Errors
    /// As [`Attention::plan`], for the forward pass.
    pub fn workspace_for(&self, dtype: Dtype, limits: &Limits) -> Result<WorkspaceBytes> {
        self.validate()?;
        let choice = |direction| choose(self, dtype, direction, limits, None);
        let forward = forward::workspace_bytes(choice(Direction::Forward)?.spec);
        let backward = choice(Direction::Backward).map_or(0, |choice| {
            let of = |spec| backward::workspace_bytes(self, spec);
            of(choice.spec).max(choice.fallback.map_or(0, of))
        });
        Ok(WorkspaceBytes { forward, backward })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Mask, Shape};
    use ferroflash_core::axes::Family;
    use ferroflash_core::visibility::Align;

    #[test]
    fn a_hopper_device_is_given_both_directions_and_their_workspace() {
        let hopper = Limits {
            name: "a device".to_owned(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            shared_bytes_per_multiprocessor: 233_472,
            l2_bytes: 0,
            memory_bytes: 0,
            driver_version: 0,
        };
        let shape = Shape {
            batch: 2,
            q_heads: 4,
            kv_heads: 4,
            q_len: 300,
            kv_len: 300,
            head_dim: 100,
            value_dim: 100,
        };
        let attention = Attention::new(shape).mask(Mask::causal(Align::BottomRight));
        let spec = attention.backward_kernel_for(Dtype::Bf16, &hopper).expect("it is supported");
        assert_eq!((spec.family, spec.tile.head_dim), (Family::Hopper, 128));
        let bytes = attention.workspace_for(Dtype::Bf16, &hopper).expect("it is supported");
        // f32 sums of dQ and two values a row, rows rounded up to a tile; then counters.
        let least = 2 * 4 * 300 * (4 * 128 + 8);
        assert!((least..2 * least).contains(&bytes.backward), "{bytes:?}");

        let spec = attention.backward_kernel_for(Dtype::F32, &hopper).expect("it is supported");
        assert_eq!((spec.family, spec.tile.head_dim), (Family::Portable, 128));
        let wide = Attention::new(Shape { head_dim: 160, ..shape });
        let refused = wide.backward_kernel_for(Dtype::F32, &hopper);
        let why = refused.map(|spec| spec.name).expect_err("no f32 kernel is as wide").to_string();
        assert!(why.contains("up to (128, 128), the call has (160, 100)"), "{why}");
        assert!(!why.contains("computes"), "{why}");
        let wrong = attention.softcap(-1.0).workspace_for(Dtype::Bf16, &hopper);
        assert!(wrong.is_err_and(|why| why.to_string().contains("softcap")));
    }
}
