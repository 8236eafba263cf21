//! Special registers and block-wide barriers.

/// `%tid.x` (PTX ISA, "Special Registers: %tid").
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: reads a special register.
    return unsafe { core::arch::nvptx::_thread_idx_x() as u32 };
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `%ctaid.x` (PTX ISA, "Special Registers: %ctaid").
#[inline(always)]
pub fn block_idx_x() -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: reads a special register.
    return unsafe { core::arch::nvptx::_block_idx_x() as u32 };
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `bar.sync 0` (PTX ISA, "bar"): waits for every thread of the block and makes their shared and
/// global writes visible to one another.
///
/// # Safety
/// Every thread of the block reaches the same call.
#[inline(always)]
pub unsafe fn sync_threads() {
    #[cfg(target_arch = "nvptx64")]
    core::arch::nvptx::_syncthreads();
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `value`, unknown to the compiler: what depends on it is computed again where it is needed rather
/// than kept in registers across a loop.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let mut value = value;
    // SAFETY: changes nothing.
    unsafe { ptx_asm!("/* {0} */", inout(reg32) value, options(nomem, nostack)) };
    value
}
