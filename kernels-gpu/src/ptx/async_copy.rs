//! `cp.async`: copies from global to shared memory that a thread starts and waits for in groups.

/// `cp.async.cg.shared.global` of 16 bytes, the first `read` of them from memory and the rest zero
/// (PTX ISA, "cp.async").
///
/// # Safety
/// Both addresses are aligned to 16; `read <= 16` bytes at `global` are readable; the 16 bytes at
/// `shared` are this thread's to write until the group has been waited for.
#[inline(always)]
pub unsafe fn cp_async_16(shared: u32, global: u64, read: u32) {
    ptx_asm!("cp.async.cg.shared.global [{0}], [{1}], 16, {2};", in(reg32) shared,
        in(reg64) global, in(reg32) read, options(nostack));
}

/// `cp.async.ca.shared.global` of 8 bytes; see [`cp_async_16`].
///
/// # Safety
/// As [`cp_async_16`], with 8 for 16.
#[inline(always)]
pub unsafe fn cp_async_8(shared: u32, global: u64, read: u32) {
    ptx_asm!("cp.async.ca.shared.global [{0}], [{1}], 8, {2};", in(reg32) shared,
        in(reg64) global, in(reg32) read, options(nostack));
}

/// `cp.async.ca.shared.global` of 4 bytes; see [`cp_async_16`].
///
/// # Safety
/// As [`cp_async_16`], with 4 for 16.
#[inline(always)]
pub unsafe fn cp_async_4(shared: u32, global: u64, read: u32) {
    ptx_asm!("cp.async.ca.shared.global [{0}], [{1}], 4, {2};", in(reg32) shared,
        in(reg64) global, in(reg32) read, options(nostack));
}

/// `cp.async.commit_group` (PTX ISA, "cp.async.commit_group"): closes the group of this thread's
/// copies so far.
///
/// # Safety
/// None beyond the copies' own.
#[inline(always)]
pub unsafe fn commit_group() {
    ptx_asm!("cp.async.commit_group;", options(nostack));
}

/// `cp.async.wait_group` (PTX ISA, "cp.async.wait_group"): waits until at most `PENDING` of this
/// thread's groups are unfinished. Other threads' copies need a barrier as well.
///
/// # Safety
/// None beyond the copies' own.
#[inline(always)]
pub unsafe fn wait_group<const PENDING: u32>() {
    ptx_asm!("cp.async.wait_group {0};", const PENDING, options(nostack));
}
