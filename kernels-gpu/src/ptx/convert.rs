//! Packing pairs of f32 into 16-bit formats.

/// `cvt.rn.bf16x2.f32` (PTX ISA, "cvt"): two bfloat16, `low` in the low half.
#[inline(always)]
pub fn pack_bf16x2(low: f32, high: f32) -> u32 {
    let pair: u32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("cvt.rn.bf16x2.f32 {0}, {1}, {2};", out(reg32) pair, in(reg32) high,
            in(reg32) low, options(pure, nomem, nostack));
    }
    pair
}

/// `cvt.rn.f16x2.f32` (PTX ISA, "cvt"): two binary16, `low` in the low half.
#[inline(always)]
pub fn pack_f16x2(low: f32, high: f32) -> u32 {
    let pair: u32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("cvt.rn.f16x2.f32 {0}, {1}, {2};", out(reg32) pair, in(reg32) high,
            in(reg32) low, options(pure, nomem, nostack));
    }
    pair
}

/// `max.bf16x2` (PTX ISA, "Half Precision Floating-Point Instructions: max"): the larger of each
/// half;
/// if one operand is NaN, the other.
#[inline(always)]
pub fn max_bf16x2(a: u32, b: u32) -> u32 {
    let larger: u32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("max.bf16x2 {0}, {1}, {2};", out(reg32) larger, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack));
    }
    larger
}

/// `max.f16x2` (PTX ISA, "Half Precision Floating-Point Instructions: max"): the larger of each
/// half;
/// if one operand is NaN, the other.
#[inline(always)]
pub fn max_f16x2(a: u32, b: u32) -> u32 {
    let larger: u32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("max.f16x2 {0}, {1}, {2};", out(reg32) larger, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack));
    }
    larger
}
