//! Warpgroup-wide matrix instructions: 64 rows a warpgroup, accumulators in registers, operands in
//! shared memory described by 64-bit descriptors. They run asynchronously: between issue and wait
//! nothing may touch an accumulator or an operand register.

use ferroflash_core::axes::{Bf16, F16};
use ferroflash_core::fragment::Fragment;
use ferroflash_core::swizzle::PanelLayout;

#[cfg(target_arch = "nvptx64")]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn wgmma_fence_sync();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn wgmma_commit_group_sync();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn wgmma_wait_group_sync(pending: u64);
}

/// `wgmma.fence.sync.aligned` (PTX ISA, "wgmma.fence"): orders register accesses before those of
/// the products that follow.
///
/// # Safety
/// All warps of the warpgroup reach the same call.
#[inline(always)]
pub unsafe fn wgmma_fence() {
    #[cfg(target_arch = "nvptx64")]
    wgmma_fence_sync();
}

/// `wgmma.commit_group.sync.aligned` (PTX ISA, "wgmma.commit_group"): closes the group of products
/// so far.
///
/// # Safety
/// All warps of the warpgroup reach the same call.
#[inline(always)]
pub unsafe fn wgmma_commit() {
    #[cfg(target_arch = "nvptx64")]
    wgmma_commit_group_sync();
}

/// `wgmma.wait_group.sync.aligned` (PTX ISA, "wgmma.wait_group"): waits until at most `PENDING`
/// groups are unfinished. Follow it with [`Accumulator::settle`] on what has become readable.
///
/// # Safety
/// All warps of the warpgroup reach the same call.
#[inline(always)]
pub unsafe fn wgmma_wait<const PENDING: u64>() {
    #[cfg(target_arch = "nvptx64")]
    wgmma_wait_group_sync(PENDING);
}

/// A shared-memory operand (PTX ISA, "Matrix descriptor format") of a tile stored in swizzled
/// panels: address, leading and stride byte offsets in units of 16, swizzle mode in the top bits.
#[derive(Clone, Copy)]
pub struct Operand {
    low: u32,
    high: u32,
}

impl Operand {
    /// The operand of `layout` at `shared`. Eight rows of a panel are one swizzle period, so that
    /// is the stride; the leading offset, from panel to panel, is read where columns are not the
    /// product's k dimension.
    #[inline(always)]
    pub fn new(layout: &PanelLayout, shared: u32) -> Self {
        let mode = if layout.panel_columns() == 64 { 1 } else { 2 };
        Self {
            low: (shared & 0x3ffff) >> 4 | layout.panel_bytes() >> 4 << 16,
            high: (layout.row_bytes() * 8) >> 4 | mode << 30,
        }
    }

    /// The operand `bytes` (a multiple of 16) further.
    #[inline(always)]
    pub fn advanced(self, bytes: u32) -> Self {
        Self { low: self.low + (bytes >> 4), high: self.high }
    }

    /// Step `step` of 16 along k where columns are k ("K-major").
    #[inline(always)]
    pub fn columns_step(self, layout: &PanelLayout, step: u32) -> Self {
        let (panel, inner) =
            (step * 16 / layout.panel_columns(), step * 16 % layout.panel_columns());
        self.advanced(panel * layout.panel_bytes() + inner * 2)
    }

    /// Step `step` of 16 along k where rows are k ("MN-major").
    #[inline(always)]
    pub fn rows_step(self, layout: &PanelLayout, step: u32) -> Self {
        self.advanced(step * 16 * layout.row_bytes())
    }

    #[inline(always)]
    fn bits(self) -> u64 {
        (self.high as u64) << 32 | self.low as u64
    }
}

/// Accumulators of a warpgroup's product.
pub trait Accumulator: Fragment {
    /// Makes the compiler believe that the values were just written: none of their uses moves above
    /// this, which stands after the wait for the products that write them.
    fn settle(&mut self);
}

/// Accumulators of products of element type `E`: `wgmma.mma_async.sync.aligned.m64nNk16.f32`
/// (PTX ISA, "wgmma.mma_async"), N twice the values a thread holds.
pub trait Product<E>: Accumulator {
    /// `self = a · bᵀ`, both operands with columns as k.
    ///
    /// # Safety
    /// All warps of the warpgroup reach the same call with the same operands, after
    /// [`wgmma_fence`]; both tiles are complete and stay until the product has been waited for.
    unsafe fn start(&mut self, a: Operand, b: Operand);

    /// `self += a · bᵀ`, both operands with columns as k.
    ///
    /// # Safety
    /// As [`Product::start`].
    unsafe fn add(&mut self, a: Operand, b: Operand);

    /// `self = aᵀ · b`, both operands with rows as k.
    ///
    /// # Safety
    /// As [`Product::start`].
    unsafe fn start_rows(&mut self, a: Operand, b: Operand);

    /// `self += aᵀ · b`, both operands with rows as k.
    ///
    /// # Safety
    /// As [`Product::start`].
    unsafe fn add_rows(&mut self, a: Operand, b: Operand);

    /// `self += a · b`, a with columns as k, b with rows as k.
    ///
    /// # Safety
    /// As [`Product::start`].
    unsafe fn add_columns_rows(&mut self, a: Operand, b: Operand);

    /// `self += a · b`, a from registers (a packed accumulator), b with rows as k.
    ///
    /// # Safety
    /// As [`Product::start`]; `a` stays as it is until the product has been waited for.
    unsafe fn add_registers(&mut self, a: [u32; 4], b: Operand);
}

#[cfg(target_arch = "nvptx64")]
macro_rules! four {
    ($group:literal) => {
        ", {}, {}, {}, {}"
    };
}

macro_rules! products {
    ($($n:literal: $($group:literal)*;)*) => { $(
        impl Accumulator for [f32; $n / 2] {
            #[inline(always)]
            fn settle(&mut self) {
                // SAFETY: changes nothing.
                unsafe {
                    ptx_asm!(
                        concat!("/* {}, {}, {}, {}", $(four!($group),)* " */"),
                        inout(reg32) self[0], inout(reg32) self[1],
                        inout(reg32) self[2], inout(reg32) self[3],
                        $(inout(reg32) self[4 * $group], inout(reg32) self[4 * $group + 1],
                        inout(reg32) self[4 * $group + 2], inout(reg32) self[4 * $group + 3],)*
                        options(nostack)
                    );
                }
            }
        }
        product!(Bf16, "bf16", $n: $($group)*);
        product!(F16, "f16", $n: $($group)*);
    )* };
}

macro_rules! product {
    ($element:ty, $name:literal, $n:literal: $($group:literal)*) => {
        impl Product<$element> for [f32; $n / 2] {
            #[inline(always)]
            unsafe fn start(&mut self, a: Operand, b: Operand) {
                shared_product!(self, a, b, out, "ne", $name, "0, 0", $n: $($group)*);
            }

            #[inline(always)]
            unsafe fn add(&mut self, a: Operand, b: Operand) {
                shared_product!(self, a, b, inout, "eq", $name, "0, 0", $n: $($group)*);
            }

            #[inline(always)]
            unsafe fn start_rows(&mut self, a: Operand, b: Operand) {
                shared_product!(self, a, b, out, "ne", $name, "1, 1", $n: $($group)*);
            }

            #[inline(always)]
            unsafe fn add_rows(&mut self, a: Operand, b: Operand) {
                shared_product!(self, a, b, inout, "eq", $name, "1, 1", $n: $($group)*);
            }

            #[inline(always)]
            unsafe fn add_columns_rows(&mut self, a: Operand, b: Operand) {
                shared_product!(self, a, b, inout, "eq", $name, "0, 1", $n: $($group)*);
            }

            #[inline(always)]
            unsafe fn add_registers(&mut self, a: [u32; 4], b: Operand) {
                ptx_asm!(
                    "{{",
                    ".reg .pred accumulate;",
                    "setp.eq.b32 accumulate, 0, 0;",
                    concat!(
                        "wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $name, ".", $name,
                        " {{{}, {}, {}, {}", $(four!($group),)* "}}, {{{}, {}, {}, {}}}, {}, ",
                        "accumulate, 1, 1, 1;"
                    ),
                    "}}",
                    inout(reg32) self[0], inout(reg32) self[1],
                    inout(reg32) self[2], inout(reg32) self[3],
                    $(inout(reg32) self[4 * $group], inout(reg32) self[4 * $group + 1],
                    inout(reg32) self[4 * $group + 2], inout(reg32) self[4 * $group + 3],)*
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg64) b.bits(), options(nostack)
                );
            }
        }
    };
}

/// The instruction with both operands in shared memory: `$access` is how it takes its accumulators,
/// `$compares` of 0 with 0 whether it adds to them, `$transposed` which operands have rows as k.
macro_rules! shared_product {
    (
        $sums:ident, $a:ident, $b:ident, $access:ident, $compares:literal, $name:literal,
        $transposed:literal, $n:literal: $($group:literal)*
    ) => {
        ptx_asm!(
            "{{",
            ".reg .pred accumulate;",
            concat!("setp.", $compares, ".b32 accumulate, 0, 0;"),
            concat!(
                "wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $name, ".", $name,
                " {{{}, {}, {}, {}", $(four!($group),)* "}}, {}, {}, ",
                "accumulate, 1, 1, ", $transposed, ";"
            ),
            "}}",
            $access(reg32) $sums[0], $access(reg32) $sums[1],
            $access(reg32) $sums[2], $access(reg32) $sums[3],
            $($access(reg32) $sums[4 * $group], $access(reg32) $sums[4 * $group + 1],
            $access(reg32) $sums[4 * $group + 2], $access(reg32) $sums[4 * $group + 3],)*
            in(reg64) $a.bits(), in(reg64) $b.bits(), options(nostack)
        )
    };
}

// N: its groups of eight columns after the first.
products! {
    32: 1 2 3;
    64: 1 2 3 4 5 6 7;
    80: 1 2 3 4 5 6 7 8 9;
    96: 1 2 3 4 5 6 7 8 9 10 11;
    112: 1 2 3 4 5 6 7 8 9 10 11 12 13;
    128: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15;
    144: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17;
    160: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19;
    176: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21;
    192: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23;
    256: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31;
}
