//! Loads and stores with their state space spelled out.
//!
//! An address that comes from a parameter structure is generic to the compiler; these say global or
//! shared, which saves the hardware the question.

#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

/// Shared-space address of the block's dynamic shared memory, aligned to 1024 bytes.
#[inline(always)]
pub fn dynamic_shared() -> u32 {
    let address: u32;
    // SAFETY: takes the address of the symbol declared above.
    unsafe {
        ptx_asm!("mov.u32 {0}, dyn_smem;", out(reg32) address, options(pure, nomem, nostack));
    }
    address
}

/// `ld.global.nc.u16` (PTX ISA, "ld.global.nc"): two bytes that no one writes during the kernel.
///
/// # Safety
/// `address` is aligned to 2 and readable.
#[inline(always)]
pub unsafe fn load_global_u16(address: u64) -> u16 {
    let value: u16;
    ptx_asm!("ld.global.nc.u16 {0}, [{1}];", out(reg16) value, in(reg64) address,
        options(nostack, readonly));
    value
}

/// `ld.global.nc.f32` (PTX ISA, "ld.global.nc"): a value that no one writes during the kernel.
///
/// # Safety
/// `address` is aligned to 4 and readable.
#[inline(always)]
pub unsafe fn load_global_f32(address: u64) -> f32 {
    let value: f32;
    ptx_asm!("ld.global.nc.f32 {0}, [{1}];", out(reg32) value, in(reg64) address,
        options(nostack, readonly));
    value
}

/// `ld.global.nc.u32` (PTX ISA, "ld.global.nc"): four bytes that no one writes during the kernel.
///
/// # Safety
/// `address` is aligned to 4 and readable.
#[inline(always)]
pub unsafe fn load_global_u32(address: u64) -> u32 {
    let value: u32;
    ptx_asm!("ld.global.nc.u32 {0}, [{1}];", out(reg32) value, in(reg64) address,
        options(nostack, readonly));
    value
}

/// `ld.global.nc.v4.u32` (PTX ISA, "ld.global.nc"): 16 bytes that no one writes during the kernel.
///
/// # Safety
/// `address` is aligned to 16 and readable.
#[inline(always)]
pub unsafe fn load_global_v4(address: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!("ld.global.nc.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) a, out(reg32) b,
        out(reg32) c, out(reg32) d, in(reg64) address, options(nostack, readonly));
    [a, b, c, d]
}

/// An f32 that no one writes during the kernel where `is_there`, else 0: a predicated
/// `ld.global.nc.f32` (PTX ISA, "ld.global.nc"), without a branch, so that many may be under way at
/// once.
///
/// # Safety
/// `address` is aligned to 4 and, where `is_there`, readable.
#[inline(always)]
pub unsafe fn load_global_f32_if(address: u64, is_there: bool) -> f32 {
    let value: f32;
    ptx_asm!(
        "{{",
        ".reg .pred there;",
        "setp.ne.u32 there, {2}, 0;",
        "mov.f32 {0}, 0f00000000;",
        "@there ld.global.nc.f32 {0}, [{1}];",
        "}}",
        out(reg32) value, in(reg64) address, in(reg32) is_there as u32,
        options(nostack, readonly)
    );
    value
}

/// 16 bytes; as [`load_global_f32_if`], with `ld.global.nc.v4.u32`.
///
/// # Safety
/// `address` is aligned to 16 and, where `is_there`, readable.
#[inline(always)]
pub unsafe fn load_global_v4_if(address: u64, is_there: bool) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!(
        "{{",
        ".reg .pred there;",
        "setp.ne.u32 there, {5}, 0;",
        "mov.u32 {0}, 0;",
        "mov.u32 {1}, 0;",
        "mov.u32 {2}, 0;",
        "mov.u32 {3}, 0;",
        "@there ld.global.nc.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
        "}}",
        out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address,
        in(reg32) is_there as u32, options(nostack, readonly)
    );
    [a, b, c, d]
}

/// A byte; as [`load_global_f32_if`], with `ld.global.nc.u8`.
///
/// # Safety
/// Where `is_there`, the byte is readable.
#[inline(always)]
pub unsafe fn load_global_u8_if(address: u64, is_there: bool) -> u32 {
    let value: u32;
    ptx_asm!(
        "{{",
        ".reg .pred there;",
        "setp.ne.u32 there, {2}, 0;",
        "mov.u32 {0}, 0;",
        "@there ld.global.nc.u8 {0}, [{1}];",
        "}}",
        out(reg32) value, in(reg64) address, in(reg32) is_there as u32,
        options(nostack, readonly)
    );
    value
}

/// Two neighbouring f32 that no one writes during the kernel, the first `available` of them from
/// memory and the rest zero: predicated `ld.global.nc.f32` (PTX ISA, "ld.global.nc"), without a
/// branch, so that many may be under way at once.
///
/// # Safety
/// `address` is aligned to 4, and the first `available` of the two are readable.
#[inline(always)]
pub unsafe fn load_global_pair_f32(address: u64, available: u32) -> [f32; 2] {
    let (first, second): (f32, f32);
    ptx_asm!(
        "{{",
        ".reg .pred one, two;",
        "setp.gt.u32 one, {3}, 0;",
        "setp.gt.u32 two, {3}, 1;",
        "mov.f32 {0}, 0f00000000;",
        "mov.f32 {1}, 0f00000000;",
        "@one ld.global.nc.f32 {0}, [{2}];",
        "@two ld.global.nc.f32 {1}, [{2} + 4];",
        "}}",
        out(reg32) first, out(reg32) second, in(reg64) address, in(reg32) available,
        options(nostack, readonly)
    );
    [first, second]
}

/// Two neighbouring bytes; as [`load_global_pair_f32`], with `ld.global.nc.u8`.
///
/// # Safety
/// The first `available` of the two are readable.
#[inline(always)]
pub unsafe fn load_global_pair_u8(address: u64, available: u32) -> [u32; 2] {
    let (first, second): (u32, u32);
    ptx_asm!(
        "{{",
        ".reg .pred one, two;",
        "setp.gt.u32 one, {3}, 0;",
        "setp.gt.u32 two, {3}, 1;",
        "mov.u32 {0}, 0;",
        "mov.u32 {1}, 0;",
        "@one ld.global.nc.u8 {0}, [{2}];",
        "@two ld.global.nc.u8 {1}, [{2} + 1];",
        "}}",
        out(reg32) first, out(reg32) second, in(reg64) address, in(reg32) available,
        options(nostack, readonly)
    );
    [first, second]
}

/// `st.global.u16` (PTX ISA, "st").
///
/// # Safety
/// `address` is aligned to 2, and this thread's to write.
#[inline(always)]
pub unsafe fn store_global_u16(address: u64, value: u16) {
    ptx_asm!("st.global.u16 [{0}], {1};", in(reg64) address, in(reg16) value, options(nostack));
}

/// `st.global.f32` (PTX ISA, "st").
///
/// # Safety
/// `address` is aligned to 4, and this thread's to write.
#[inline(always)]
pub unsafe fn store_global_f32(address: u64, value: f32) {
    ptx_asm!("st.global.f32 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack));
}

/// `st.global.v2.f32` (PTX ISA, "st"): 8 bytes.
///
/// # Safety
/// `address` is aligned to 8, and this thread's to write.
#[inline(always)]
pub unsafe fn store_global_v2_f32(address: u64, value: [f32; 2]) {
    ptx_asm!("st.global.v2.f32 [{0}], {{{1}, {2}}};", in(reg64) address, in(reg32) value[0],
        in(reg32) value[1], options(nostack));
}

/// `st.global.v4.u32` (PTX ISA, "st"): 16 bytes.
///
/// # Safety
/// `address` is aligned to 16, and this thread's to write.
#[inline(always)]
pub unsafe fn store_global_v4(address: u64, value: [u32; 4]) {
    ptx_asm!("st.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};", in(reg64) address,
        in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3],
        options(nostack));
}

/// `st.shared.u16` (PTX ISA, "st").
///
/// # Safety
/// `address` is aligned to 2, inside the block's shared memory and this thread's to write.
#[inline(always)]
pub unsafe fn store_shared_u16(address: u32, value: u16) {
    ptx_asm!("st.shared.u16 [{0}], {1};", in(reg32) address, in(reg16) value, options(nostack));
}

/// `st.shared.u32` (PTX ISA, "st").
///
/// # Safety
/// `address` is aligned to 4, inside the block's shared memory and this thread's to write.
#[inline(always)]
pub unsafe fn store_shared_u32(address: u32, value: u32) {
    ptx_asm!("st.shared.u32 [{0}], {1};", in(reg32) address, in(reg32) value, options(nostack));
}

/// `st.relaxed.cta.shared.u32` (PTX ISA, "st"): for words that other threads look at meanwhile by
/// [`load_relaxed_shared_u32`]. Nothing else is ordered by it.
///
/// # Safety
/// As [`store_shared_u32`].
#[inline(always)]
pub unsafe fn store_relaxed_shared_u32(address: u32, value: u32) {
    ptx_asm!("st.relaxed.cta.shared.u32 [{0}], {1};", in(reg32) address, in(reg32) value,
        options(nostack));
}

/// `st.shared.v4.u32` (PTX ISA, "st"): 16 bytes.
///
/// # Safety
/// `address` is aligned to 16, inside the block's shared memory and this thread's to write.
#[inline(always)]
pub unsafe fn store_shared_v4(address: u32, value: [u32; 4]) {
    ptx_asm!("st.shared.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};", in(reg32) address,
        in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3],
        options(nostack));
}

/// `red.relaxed.gpu.global.add.v4.f32` (PTX ISA, "red"): adds to four values, each by itself.
///
/// # Safety
/// `address` is aligned to 16; every thread that touches the values during the kernel does so by
/// atomics.
#[inline(always)]
pub unsafe fn add_global_v4_f32(address: u64, values: [f32; 4]) {
    ptx_asm!("red.relaxed.gpu.global.add.v4.f32 [{0}], {{{1}, {2}, {3}, {4}}};",
        in(reg64) address, in(reg32) values[0], in(reg32) values[1], in(reg32) values[2],
        in(reg32) values[3], options(nostack));
}

/// `red.release.gpu.global.add.u32` (PTX ISA, "red"): adds, after all writes that this thread has
/// made or, through a barrier, seen.
///
/// # Safety
/// `address` is aligned to 4; every thread that touches it during the kernel does so by atomics.
#[inline(always)]
pub unsafe fn release_add_global_u32(address: u64, value: u32) {
    ptx_asm!("red.release.gpu.global.add.u32 [{0}], {1};", in(reg64) address, in(reg32) value,
        options(nostack));
}

/// `ld.acquire.gpu.global.u32` (PTX ISA, "ld"): with what was written before the releases that
/// made the value.
///
/// # Safety
/// `address` is aligned to 4 and readable.
#[inline(always)]
pub unsafe fn load_acquire_global_u32(address: u64) -> u32 {
    let value: u32;
    ptx_asm!("ld.acquire.gpu.global.u32 {0}, [{1}];", out(reg32) value, in(reg64) address,
        options(nostack));
    value
}

/// `ld.relaxed.gpu.global.v4.u32` (PTX ISA, "ld"): 16 bytes that others write during the kernel,
/// after what makes their writes visible.
///
/// # Safety
/// `address` is a multiple of 16 and valid for reading.
#[inline(always)]
pub unsafe fn load_relaxed_global_v4(address: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!("ld.relaxed.gpu.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) a,
        out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(nostack));
    [a, b, c, d]
}

/// `atom.relaxed.gpu.global.add.u32` (PTX ISA, "atom"): adds, and returns what was there.
///
/// # Safety
/// `address` is aligned to 4; every thread that touches it during the kernel does so by atomics.
#[inline(always)]
pub unsafe fn fetch_add_global_u32(address: u64, value: u32) -> u32 {
    let old: u32;
    ptx_asm!("atom.relaxed.gpu.global.add.u32 {0}, [{1}], {2};", out(reg32) old, in(reg64) address,
        in(reg32) value, options(nostack));
    old
}

/// `red.relaxed.gpu.global.add.f32` (PTX ISA, "red"): adds, and returns nothing.
///
/// # Safety
/// As [`fetch_add_global_u32`].
#[inline(always)]
pub unsafe fn add_global_f32(address: u64, value: f32) {
    ptx_asm!("red.relaxed.gpu.global.add.f32 [{0}], {1};", in(reg64) address, in(reg32) value,
        options(nostack));
}

/// `ld.shared.v2.f32` (PTX ISA, "ld"): 8 bytes.
///
/// # Safety
/// `address` is aligned to 8 and inside the block's shared memory.
#[inline(always)]
pub unsafe fn load_shared_v2_f32(address: u32) -> [f32; 2] {
    let (a, b): (f32, f32);
    ptx_asm!("ld.shared.v2.f32 {{{0}, {1}}}, [{2}];", out(reg32) a, out(reg32) b,
        in(reg32) address, options(nostack));
    [a, b]
}

/// `ld.shared.u16` (PTX ISA, "ld").
///
/// # Safety
/// `address` is aligned to 2 and inside the block's shared memory.
#[inline(always)]
pub unsafe fn load_shared_u16(address: u32) -> u16 {
    let value: u16;
    ptx_asm!("ld.shared.u16 {0}, [{1}];", out(reg16) value, in(reg32) address, options(nostack));
    value
}

/// `ld.shared.u32` (PTX ISA, "ld").
///
/// # Safety
/// `address` is aligned to 4 and inside the block's shared memory.
#[inline(always)]
pub unsafe fn load_shared_u32(address: u32) -> u32 {
    let value: u32;
    ptx_asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) address, options(nostack));
    value
}

/// `ld.relaxed.cta.shared.u32` (PTX ISA, "ld"): as it may be while others write it by
/// [`store_relaxed_shared_u32`].
///
/// # Safety
/// As [`load_shared_u32`].
#[inline(always)]
pub unsafe fn load_relaxed_shared_u32(address: u32) -> u32 {
    let value: u32;
    ptx_asm!("ld.relaxed.cta.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) address,
        options(nostack));
    value
}

/// `ld.shared.v4.u32` (PTX ISA, "ld"): 16 bytes.
///
/// # Safety
/// `address` is aligned to 16 and inside the block's shared memory.
#[inline(always)]
pub unsafe fn load_shared_v4(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!("ld.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];", out(reg32) a, out(reg32) b,
        out(reg32) c, out(reg32) d, in(reg32) address, options(nostack));
    [a, b, c, d]
}
