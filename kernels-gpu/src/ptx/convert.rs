//! Packing pairs of f32 into 16-bit formats, and unpacking them.

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

/// `prmt.b32` (PTX ISA, "prmt"): the upper halves of two words, `low`'s in the low half. Of f32s
/// these are the bfloat16 next to them towards zero.
#[inline(always)]
pub fn upper_halves(low: u32, high: u32) -> u32 {
    let pair: u32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("prmt.b32 {0}, {1}, {2}, 0x7632;", out(reg32) pair, in(reg32) low,
            in(reg32) high, options(pure, nomem, nostack));
    }
    pair
}

/// The two bfloat16 of a pair, the low one first: their bits are the upper halves of f32s.
#[inline(always)]
pub fn unpack_bf16x2(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// `cvt.f32.f16` (PTX ISA, "cvt"), twice: the two binary16 of a pair, the low one first.
#[inline(always)]
pub fn unpack_f16x2(pair: u32) -> [f32; 2] {
    let (low, high): (f32, f32);
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!(
            "{{",
            ".reg .b16 low, high;",
            "mov.b32 {{low, high}}, {2};",
            "cvt.f32.f16 {0}, low;",
            "cvt.f32.f16 {1}, high;",
            "}}",
            out(reg32) low, out(reg32) high, in(reg32) pair, options(pure, nomem, nostack)
        );
    }
    [low, high]
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
