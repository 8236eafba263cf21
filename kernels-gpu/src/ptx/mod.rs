//! One function per PTX instruction, named as PTX (or `cuda_std`) names it.
//!
//! No wrapper knows attention, and no other module contains `asm!`. Operations that all threads of
//! a warp or block must reach together go through LLVM's convergent intrinsics where LLVM has one,
//! because `asm!` may be duplicated; the others stand under warp-uniform control flow only.
//!
//! On the host, `asm!` becomes a panic that nothing can reach: the kernels are never called there.

#![cfg_attr(
    not(target_arch = "nvptx64"),
    allow(unused_variables, unused_mut, unused_unsafe, unreachable_code, dead_code)
)]

/// `asm!` on the device, unreachable on the host.
macro_rules! ptx_asm {
    ($($tokens:tt)*) => {{
        #[cfg(target_arch = "nvptx64")]
        core::arch::asm!($($tokens)*);
        #[cfg(not(target_arch = "nvptx64"))]
        $crate::ptx::not_on_host();
    }};
}

pub mod async_copy;
pub mod convert;
pub mod math;
pub mod matrix;
pub mod mbarrier;
pub mod memory;
pub mod registers;
pub mod thread;
pub mod tma;
pub mod warp;
pub mod wgmma;

#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn not_on_host() -> ! {
    unreachable!("kernels run on a device")
}
