//! Between a call's tensors, of any element and stride, and contiguous f32 tiles in scratch.
//!
//! Tiles of f32 tensors are read where they lie (`gemm` packs what it needs packed); others are
//! widened into scratch. Either way a tile is a [`View`] of one column a row.

use std::ptr;

use ferroflash_core::axes::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::product::View;
use super::vector::LANES;
use crate::element::Element;

/// A slice of `T` as the element type that `T` is.
enum Typed<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Typed<'a> {
    fn new<T: Element>(values: &'a [T]) -> Self {
        let (address, len) = (values.as_ptr(), values.len());
        // SAFETY: `Element` is sealed and its `DTYPE` names the very type, so this is a cast of a
        // slice to its own type.
        unsafe {
            match T::DTYPE {
                Dtype::F32 => Self::F32(std::slice::from_raw_parts(address.cast(), len)),
                Dtype::F16 => Self::F16(std::slice::from_raw_parts(address.cast(), len)),
                Dtype::Bf16 => Self::Bf16(std::slice::from_raw_parts(address.cast(), len)),
            }
        }
    }
}

/// Widens `from` into `to`, of the same length.
pub(super) fn widen<T: Element>(from: &[T], to: &mut [f32]) {
    match Typed::new(from) {
        Typed::F32(values) => to.copy_from_slice(values),
        Typed::F16(values) => values.convert_to_f32_slice(to),
        Typed::Bf16(values) => values.convert_to_f32_slice(to),
    }
}

/// Rounds `from`, times `factor`, into `to`.
pub(super) fn narrow<T: Element>(from: &[f32], factor: f32, to: &mut [T]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = T::from_f32(from * factor);
    }
}

/// Widens `count` rows of `channels` into the start of `to`, one after another.
pub(super) fn pack_rows<'t, T: Element>(
    count: usize,
    channels: usize,
    row: impl Fn(usize) -> &'t [T],
    to: &mut [f32],
) {
    for (index, to) in to.chunks_exact_mut(channels).take(count).enumerate() {
        widen(row(index), to);
    }
}

/// `count` rows of `channels`, as columns: where they lie if they are f32, else widened into
/// `scratch`.
///
/// # Safety
/// `row(0), row(1), …` are rows of one tensor, evenly spaced, that can be read for `'t`.
pub(super) unsafe fn tile<'t, T: Element>(
    count: usize,
    channels: usize,
    row: impl Fn(usize) -> &'t [T],
    scratch: &'t mut [f32],
) -> View<'t> {
    if count == 0 || !matches!(T::DTYPE, Dtype::F32) {
        pack_rows(count, channels, row, scratch);
        return View::columns(scratch, channels);
    }
    let first = row(0).as_ptr().addr();
    let second = if count > 1 { row(1).as_ptr().addr() } else { first };
    let stride = second.wrapping_sub(first).cast_signed() / size_of::<f32>() as isize;
    // SAFETY: T is f32; the caller vouches for the rows and their spacing. The tensor's address was
    // exposed when its view was made.
    unsafe { View::of_tensor(ptr::with_exposed_provenance(first), stride, channels, count) }
}

/// Transposes `count` contiguous rows of `channels` into lines of `stride` lanes, one line a
/// channel; lanes from `count` on become 0. `stride` is a multiple of [`LANES`].
pub(super) fn transpose(
    rows: &[f32],
    count: usize,
    channels: usize,
    to: &mut [f32],
    stride: usize,
) {
    for first in (0..stride).step_by(LANES) {
        let present = count.saturating_sub(first).min(LANES);
        for channel in 0..channels {
            let line = &mut to[channel * stride + first..][..LANES];
            for (lane, value) in line.iter_mut().enumerate() {
                let inside = lane < present;
                *value = if inside { rows[(first + lane) * channels + channel] } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_transposed_and_padded() {
        let rows: Vec<f32> = (0..51).map(|value| value as f32).collect();
        let mut to = vec![f32::NAN; 96];
        transpose(&rows, 17, 3, &mut to, 32);
        for (at, value) in to.iter().enumerate() {
            let (channel, lane) = (at / 32, at % 32);
            let needs = if lane < 17 { (lane * 3 + channel) as f32 } else { 0.0 };
            assert_eq!(*value, needs);
        }
    }

    #[test]
    fn elements_survive_a_round_trip() {
        fn check<T: Element + PartialEq>() {
            let values: Vec<T> = (-40..40).map(|value| T::from_f32(value as f32 / 8.0)).collect();
            let mut wide = vec![0.0; values.len()];
            widen(&values, &mut wide);
            let mut back = vec![T::default(); values.len()];
            narrow(&wide, 1.0, &mut back);
            assert!(back == values);
        }
        check::<f32>();
        check::<f16>();
        check::<bf16>();
    }
}
