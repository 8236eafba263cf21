//! Arithmetic that Rust's operators do not reach.

/// `fma.rn.f32` (PTX ISA, "fma"): `a · b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::intrinsics::fmaf32(a, b, c);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `max.f32` (PTX ISA, "max"): the larger; if one operand is NaN, the other.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger: f32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("max.f32 {0}, {1}, {2};", out(reg32) larger, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack));
    }
    larger
}

/// `add.rn.f32` (PTX ISA, "add"), where it stands: the compiler would move a sum that a later block
/// alone needs there, and keep both operands in registers until then.
#[inline(always)]
pub fn add_here(a: f32, b: f32) -> f32 {
    let sum: f32;
    // SAFETY: a function of registers; not `pure`, so that it stays in its place.
    unsafe {
        ptx_asm!("add.rn.f32 {0}, {1}, {2};", out(reg32) sum, in(reg32) a, in(reg32) b,
            options(nomem, nostack));
    }
    sum
}

/// `ex2.approx.ftz.f32` (PTX ISA, "ex2"): 2 to the power `x`, within 2 units in the last place;
/// exactly 0 for `-∞` and 1 for 0.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let power: f32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("ex2.approx.ftz.f32 {0}, {1};", out(reg32) power, in(reg32) x,
            options(pure, nomem, nostack));
    }
    power
}

/// `lg2.approx.ftz.f32` (PTX ISA, "lg2"): logarithm to base 2, absolute error under 2⁻²² near 1.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    let logarithm: f32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("lg2.approx.ftz.f32 {0}, {1};", out(reg32) logarithm, in(reg32) x,
            options(pure, nomem, nostack));
    }
    logarithm
}

/// `rcp.approx.ftz.f32` (PTX ISA, "rcp"): `1 / x` within 1 unit in the last place; exactly 1 for 1.
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    let inverse: f32;
    // SAFETY: a pure function of registers.
    unsafe {
        ptx_asm!("rcp.approx.ftz.f32 {0}, {1};", out(reg32) inverse, in(reg32) x,
            options(pure, nomem, nostack));
    }
    inverse
}
