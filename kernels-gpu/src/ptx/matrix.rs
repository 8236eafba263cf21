//! Warp-wide matrix instructions. Operand layouts: `ferroflash_core::fragment`.

use ferroflash_core::axes::{Bf16, Element, F16, F32};

use super::convert::{max_bf16x2, max_f16x2, pack_bf16x2, pack_f16x2, unpack_bf16x2, unpack_f16x2};
use super::math::fma;
use super::memory::{load_global_f32, load_global_u16};

/// An element type the tensor cores multiply: whole if it has 16 bits, else in pieces of 16 bits,
/// of which pairs and products are then (see `pieces`).
pub trait MatrixElement: Element {
    /// Pieces of an element.
    const PIECES: u32 = Self::DTYPE.pieces();

    /// Bytes of an element.
    const BYTES: u32 = Self::DTYPE.bytes() as u32;

    /// `sum` and the products of the elements that two times 16 bytes hold.
    #[inline(always)]
    fn dot(a: [u32; 4], b: [u32; 4], sum: f32) -> f32 {
        let mut sum = sum;
        let mut index = 0;
        while index < 4 {
            let (a, b) = (Self::unpack(a[index]), Self::unpack(b[index]));
            sum = fma(a[0], b[0], sum);
            sum = fma(a[1], b[1], sum);
            index += 1;
        }
        sum
    }

    /// One element that no one writes during the kernel.
    ///
    /// # Safety
    /// `address` is aligned to [`Self::BYTES`] and readable.
    #[inline(always)]
    unsafe fn load(address: u64) -> f32 {
        Self::unpack(load_global_u16(address) as u32)[0]
    }

    /// Two values rounded to nearest, `low` in the low half.
    fn pack(low: f32, high: f32) -> u32;

    /// The two values of a pair, the low one first.
    fn unpack(pair: u32) -> [f32; 2];

    /// The larger of each half; if one operand is NaN, the other.
    fn max_pair(a: u32, b: u32) -> u32;

    /// `mma.sync.aligned.m16n8k16.row.col.f32` (PTX ISA, "mma"): `a · b + c`, with a 16×16, b 16×8
    /// and c 16×8 spread over the warp.
    ///
    /// # Safety
    /// All 32 lanes reach the same call.
    unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
}

macro_rules! matrix_element {
    ($element:ty, $name:literal, $pack:ident, $unpack:ident, $max:ident $(, $more:item)*) => {
        impl MatrixElement for $element {
            $($more)*

            #[inline(always)]
            fn pack(low: f32, high: f32) -> u32 {
                $pack(low, high)
            }

            #[inline(always)]
            fn unpack(pair: u32) -> [f32; 2] {
                $unpack(pair)
            }

            #[inline(always)]
            fn max_pair(a: u32, b: u32) -> u32 {
                $max(a, b)
            }

            #[inline(always)]
            unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
                let [mut c0, mut c1, mut c2, mut c3] = c;
                ptx_asm!(
                    concat!(
                        "mma.sync.aligned.m16n8k16.row.col.f32.", $name, ".", $name, ".f32 ",
                        "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, ",
                        "{{{0}, {1}, {2}, {3}}};"
                    ),
                    inout(reg32) c0, inout(reg32) c1, inout(reg32) c2, inout(reg32) c3,
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg32) b[0], in(reg32) b[1],
                    options(nomem, nostack)
                );
                [c0, c1, c2, c3]
            }
        }
    };
}
matrix_element!(Bf16, "bf16", pack_bf16x2, unpack_bf16x2, max_bf16x2);
matrix_element!(F16, "f16", pack_f16x2, unpack_f16x2, max_f16x2);
matrix_element!(
    F32,
    "bf16",
    pack_bf16x2,
    unpack_bf16x2,
    max_bf16x2,
    #[inline(always)]
    fn dot(a: [u32; 4], b: [u32; 4], sum: f32) -> f32 {
        let mut sum = sum;
        let mut index = 0;
        while index < 4 {
            sum = fma(f32::from_bits(a[index]), f32::from_bits(b[index]), sum);
            index += 1;
        }
        sum
    },
    #[inline(always)]
    unsafe fn load(address: u64) -> f32 {
        load_global_f32(address)
    }
);

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16` (PTX ISA, "ldmatrix"): four 8×8 matrices of 16-bit
/// elements; lanes 8i .. 8i+8 give the addresses of the rows of matrix i, and register i holds this
/// lane's pair of it.
///
/// # Safety
/// All 32 lanes reach the same call; each `address` is aligned to 16 with 16 bytes of the block's
/// shared memory behind it.
#[inline(always)]
pub unsafe fn ldmatrix_x4(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
        out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address,
        options(nostack));
    [a, b, c, d]
}

/// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`: as [`ldmatrix_x4`], each matrix transposed.
///
/// # Safety
/// As [`ldmatrix_x4`].
#[inline(always)]
pub unsafe fn ldmatrix_x4_trans(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    ptx_asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
        out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address,
        options(nostack));
    [a, b, c, d]
}

/// `stmatrix.sync.aligned.m8n8.x4.shared.b16` (PTX ISA, "stmatrix"): the inverse of
/// [`ldmatrix_x4`].
///
/// # Safety
/// As [`ldmatrix_x4`], and the 16 bytes at `address` are this lane's to write.
#[inline(always)]
pub unsafe fn stmatrix_x4(address: u32, values: [u32; 4]) {
    ptx_asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{0}], {{{1}, {2}, {3}, {4}}};",
        in(reg32) address, in(reg32) values[0], in(reg32) values[1], in(reg32) values[2],
        in(reg32) values[3], options(nostack));
}
