//! Dividing a multiprocessor's registers among warpgroups.

/// `setmaxnreg.dec.sync.aligned.u32` (PTX ISA, "setmaxnreg"): gives registers back, down to
/// `COUNT` a thread.
///
/// # Safety
/// All warps of the warpgroup reach the same call; the kernel has a register cap at entry; the
/// code that follows fits `COUNT` registers.
#[inline(always)]
pub unsafe fn release_registers<const COUNT: u32>() {
    ptx_asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const COUNT, options(nostack));
}

/// `setmaxnreg.inc.sync.aligned.u32` (PTX ISA, "setmaxnreg"): waits for and takes registers, up to
/// `COUNT` a thread.
///
/// # Safety
/// As [`release_registers`]; other warpgroups release what this one asks for.
#[inline(always)]
pub unsafe fn claim_registers<const COUNT: u32>() {
    ptx_asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const COUNT, options(nostack));
}
