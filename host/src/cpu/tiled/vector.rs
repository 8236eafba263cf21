//! One source, several instruction sets: plain loops that the compiler vectorises.
//!
//! A stable build targets the oldest processor of its architecture. [`vectorised!`] compiles a
//! function once more for each wider instruction set and picks one at run time, so that the same
//! plain code runs 16 lanes wide where the processor has them. Loops inside work on whole groups of
//! [`LANES`] values, so no scalar tails are left.

/// Values in a group: one AVX-512 register of f32. Scratch rows are padded to it.
pub(super) const LANES: usize = 16;

/// `values` rounded up to whole groups of [`LANES`].
pub(super) const fn padded(values: usize) -> usize {
    values.next_multiple_of(LANES)
}

/// `a · b + c` as the instruction set does it best.
pub(super) trait MultiplyAdd {
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
}

/// With one rounding, where that is one instruction.
pub(super) enum Fused {}

impl MultiplyAdd for Fused {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// With two roundings, where one would be a call into the C library.
#[cfg_attr(target_arch = "aarch64", allow(dead_code))]
pub(super) enum Separate {}

impl MultiplyAdd for Separate {
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Defines functions whose bodies are compiled for AVX-512, for AVX2 and portably, generic over
/// the [`MultiplyAdd`] named in brackets.
macro_rules! vectorised {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident<$fma:ident>($($argument:ident: $type:ty),* $(,)?) $body:block
    )*) => { $(
        $(#[$attribute])*
        pub(super) fn $name($($argument: $type),*) {
            #[inline(always)]
            fn generic<$fma: MultiplyAdd>($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
                fn avx512($($argument: $type),*) {
                    generic::<Fused>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) {
                    generic::<Fused>($($argument),*)
                }
                use std::arch::is_x86_feature_detected as has;
                if has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") {
                    // SAFETY: the processor has these features; AVX-512 implies AVX2 and FMA.
                    return unsafe { avx512($($argument),*) };
                }
                if has!("avx2") && has!("fma") {
                    // SAFETY: the processor has both features.
                    return unsafe { avx2($($argument),*) };
                }
                generic::<Separate>($($argument),*)
            }
            #[cfg(target_arch = "aarch64")]
            generic::<Fused>($($argument),*);
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            generic::<Separate>($($argument),*);
        }
    )* };
}
pub(super) use vectorised;
