//! What kernels of the classes `masked` and `general` take beside the plain parameters. An option
//! that is off is a 0 where its address, its factor or its flag would be.

use super::{DeviceTensor, HopperForwardParams, PortableForwardParams};
use crate::dropout::DropoutMask;
use crate::items::Items;

/// Arguments of a portable forward kernel of class `masked` or `general`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortableMaskedParams {
    /// Tensors, schedule and heads. Where [`ScoreOptions::product_scale`] or a softcap is given,
    /// `scale` is 1: scores leave their options in natural units. The visible cells are those of
    /// the stated maxima.
    pub forward: PortableForwardParams,
    /// Where the items lie.
    pub items: Items,
    /// What happens to a score.
    pub options: ScoreOptions,
}

/// Arguments of a hopper forward kernel of class `masked`. The maps come first, as in the plain
/// kernel's.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperMaskedParams {
    /// Maps, schedule and heads. `scale_log2` and `scale` are those of the scores as the options
    /// leave them: powers of two with ALiBi, with a softcap alone values of tanh.
    pub forward: HopperForwardParams,
    /// Where the items lie.
    pub items: Items,
    /// What happens to a score.
    pub options: HopperScoreOptions,
    /// The output, for blocks of packed items whose rows end inside a box.
    pub o: DeviceTensor,
}

/// What happens to a product of a query and a key before the softmax, in a hopper kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopperScoreOptions {
    /// With ALiBi, the factor that makes a power of two of a product, or of tanh.
    pub bias_scale: f32,
    /// With a softcap, the factor that makes tanh's argument of a product; 0 without.
    pub softcap_scale: f32,
    /// Up to this magnitude of a product, tanh is a polynomial.
    pub softcap_near: f32,
    /// Its coefficients, of the product and of its third and fifth power.
    pub softcap_polynomial: [f32; 3],
    /// f32 slopes of ALiBi at `[item, q_head]`.
    pub alibi: HeadValues,
    /// f32 logits of the sinks at `[item, q_head]`.
    pub sink: HeadValues,
}

/// tanh's arguments that [`tanh_polynomial`] takes: up to this magnitude.
const TANH_NEAR: f64 = 0.25;
/// tanh near zero, an odd polynomial through the Chebyshev nodes of ±[`TANH_NEAR`]: within 10⁻⁷.
const TANH: [f64; 3] = [0.999_999_603_462_653_6, -0.333_218_969_889_932_3, 0.128_414_339_271_555_5];

/// The largest magnitude of x, and the coefficients of x, x³ and x⁵, of a polynomial that is
/// `tanh(scale · x)` within 1.5·10⁻⁷. Where powers of the scale leave f32's range, it takes less or
/// no x.
pub fn tanh_polynomial(scale: f32) -> (f32, [f32; 3]) {
    // The square of x must not overflow.
    const FARTHEST: f32 = 1e18;
    let factor = f64::from(scale);
    let square = factor * factor;
    let fifth = (TANH[2] * factor * square * square) as f32;
    if fifth < 1e-30 {
        return (((1e-3 / factor) as f32).min(FARTHEST), [scale, 0.0, 0.0]);
    }
    if !fifth.is_finite() {
        return (-1.0, [0.0; 3]);
    }
    let (first, third) = ((TANH[0] * factor) as f32, (TANH[1] * factor * square) as f32);
    (((TANH_NEAR / factor) as f32).min(FARTHEST), [first, third, fifth])
}

/// What happens to a product of a query and a key before the softmax, and to a probability after.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreOptions {
    /// Factor of every product, where an option adds to the score; 0 where none does.
    pub product_scale: f32,
    /// c of `c·tanh(x)`, or 0.
    pub softcap: f32,
    /// With a softcap, the factor that makes x of a product: `|scale| / c`.
    pub softcap_scale: f32,
    /// Up to this magnitude of a product, tanh is a polynomial.
    pub softcap_near: f32,
    /// Its coefficients, of the product and of its third and fifth power.
    pub softcap_polynomial: [f32; 3],
    /// 1 where probabilities are dropped.
    pub drops: u32,
    /// Which.
    pub dropout: DropoutMask,
    /// 1 where [`Self::boolean_mask`] has a bit a key, the lowest of a byte first, 0 where it has a
    /// byte a key.
    pub mask_is_bits: u32,
    /// Address of a seed and an offset, two u64 aligned to 8, that take the place of those in
    /// [`Self::dropout`]; 0 where these hold.
    pub dropout_state: u64,
    /// f32 slopes of ALiBi at `[item, q_head]`.
    pub alibi: HeadValues,
    /// f32 logits of the sinks at `[item, q_head]`.
    pub sink: HeadValues,
    /// f32 biases.
    pub bias: ScoreTensor,
    /// u8, zero where a key is hidden; strides are in bytes.
    pub boolean_mask: ScoreTensor,
}

/// One f32 an item and query head.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadValues {
    /// Address of the first; 0 where there are none.
    pub address: u64,
    /// Elements from one item to the next; 0 where all have the same.
    pub batch: i64,
    /// Elements from one head to the next.
    pub head: i64,
}

/// A `[item, q_head, row, key]` tensor with contiguous keys; strides in elements, 0 along an axis
/// that is broadcast.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreTensor {
    /// Address of the first element; 0 where there is no such tensor.
    pub address: u64,
    /// From one item to the next.
    pub batch: i64,
    /// From one head to the next.
    pub head: i64,
    /// From one row to the next.
    pub row: i64,
}

impl HeadValues {
    /// No values.
    pub const NONE: Self = Self { address: 0, batch: 0, head: 0 };

    /// Element offset of a head's value.
    #[inline(always)]
    pub const fn offset(&self, item: u32, q_head: u32) -> i64 {
        self.batch * item as i64 + self.head * q_head as i64
    }
}

impl ScoreTensor {
    /// No tensor.
    pub const NONE: Self = Self { address: 0, batch: 0, head: 0, row: 0 };

    /// Element offset of (`item`, `q_head`, `row`, `key`).
    #[inline(always)]
    pub const fn offset(&self, item: u32, q_head: u32, row: u32, key: u32) -> i64 {
        self.batch * item as i64 + self.head * q_head as i64 + self.row * row as i64 + key as i64
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn the_polynomial_is_tanh_near_zero() {
        let scales = [(1e-12_f32, 1e-3), (0.004, TANH_NEAR), (1.0, TANH_NEAR), (300.0, TANH_NEAR)];
        for (scale, reach) in scales {
            let (near, [a, b, c]) = tanh_polynomial(scale);
            assert!((f64::from(near * scale) - reach).abs() < 1e-6);
            for part in -100..=100 {
                let x = near * part as f32 / 100.0;
                let square = x * x;
                let value = x * c.mul_add(square, b).mul_add(square, a);
                let exact = (f64::from(scale) * f64::from(x)).tanh();
                assert!((f64::from(value) - exact).abs() < 1.5e-7, "{scale} {x}");
            }
        }
        assert!(tanh_polynomial(1e30).0 < 0.0);
        assert_eq!(tanh_polynomial(f32::MIN_POSITIVE).0, 1e18);
    }
}
