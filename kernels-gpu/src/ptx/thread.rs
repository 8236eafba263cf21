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

/// `%laneid` (PTX ISA, "Special Registers: %laneid"): the thread's number in its warp.
#[inline(always)]
pub fn lane_id() -> u32 {
    let lane: u32;
    // SAFETY: reads a special register.
    unsafe {
        ptx_asm!("mov.u32 {0}, %laneid;", out(reg32) lane, options(nomem, nostack));
    }
    lane
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

/// `%nctaid.x` (PTX ISA, "Special Registers: %nctaid").
#[inline(always)]
pub fn grid_dim_x() -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: reads a special register.
    return unsafe { core::arch::nvptx::_grid_dim_x() as u32 };
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

#[cfg(target_arch = "nvptx64")]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
    fn barrier_cta_red_or_aligned_all(barrier: u32, condition: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_cta_sync_aligned_count(barrier: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn barrier_cta_arrive_aligned_count(barrier: u32, threads: u32);
}

/// `barrier.cta.red.or.aligned.pred 0` (PTX ISA, "barrier"): as [`sync_threads`], and whether any
/// thread's condition holds.
///
/// # Safety
/// Every thread of the block reaches the same call.
#[inline(always)]
pub unsafe fn sync_threads_or(condition: bool) -> bool {
    #[cfg(target_arch = "nvptx64")]
    return barrier_cta_red_or_aligned_all(0, condition);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `barrier.cta.sync.aligned` (PTX ISA, "barrier"): waits until `threads` threads have arrived at
/// named barrier `barrier` (1 to 15; 0 is [`sync_threads`]'s), this one's warp among them.
///
/// # Safety
/// All lanes of the warp reach the same call; `threads` is a multiple of 32 and arrives in all.
#[inline(always)]
pub unsafe fn sync_named(barrier: u32, threads: u32) {
    #[cfg(target_arch = "nvptx64")]
    barrier_cta_sync_aligned_count(barrier, threads);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `barrier.cta.arrive.aligned` (PTX ISA, "barrier"): as [`sync_named`], without waiting.
///
/// # Safety
/// As [`sync_named`].
#[inline(always)]
pub unsafe fn arrive_named(barrier: u32, threads: u32) {
    #[cfg(target_arch = "nvptx64")]
    barrier_cta_arrive_aligned_count(barrier, threads);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// Holds back what follows, where the assembler keeps order (waits, barriers, memory), until
/// `value`, which is never negative, is computed: without this it moves arithmetic below a wait
/// that the arithmetic should hide. A `pmevent` (PTX ISA, "pmevent") that never runs.
#[inline(always)]
pub fn compute_before_waiting(value: f32) {
    // SAFETY: triggers a monitor event, if anything.
    unsafe {
        ptx_asm!(
            "{{",
            ".reg .pred negative;",
            "setp.lt.f32 negative, {0}, 0f00000000;",
            "@negative pmevent 0;",
            "}}",
            in(reg32) value, options(nostack)
        );
    }
}

/// `nanosleep.u32` (PTX ISA, "nanosleep"): pauses for about `nanoseconds`, twice as long at most.
#[inline(always)]
pub fn pause(nanoseconds: u32) {
    // SAFETY: takes time, if anything.
    unsafe { ptx_asm!("nanosleep.u32 {0};", in(reg32) nanoseconds, options(nomem, nostack)) };
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
