//! The largest error where two keys carry much of a row, beside 16-bit arithmetic relative to the
//! true maxima. There the heaviest key's probability is 1, which rounds to nothing; relative to a
//! reference below it, it has a rounding error like any other, times its share of the row.
//!
//! A key of the last tile, which kernels take first, raises the reference; key 0 is heavier, 1.3
//! to 7 times, carries 15 to 45 % of the row, and comes last. The rest of V cancels it, since the
//! output's own rounding would hide an error in a sum of its size. With a bound of 8 for guessed
//! probabilities, the error is 2.1 to 2.7 times that with true maxima, with bounds by shares at
//! most 1.1 times.

use ferroflash::{Direction, Dtype, Form, KernelSpec, MaskClass, Stream};
use ferroflash_tests::backend::forward_references;
use ferroflash_tests::bound::max_difference;
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::{Loaded, copy_stream, plan};
use ferroflash_tests::random::uniform;
use half::{bf16, f16};
use libtest_mimic::Trial;

use crate::{kernels_and_forms, trial};

/// Largest error, of the same with true maxima.
const MOST: f64 = 1.2;
const ROWS: usize = 192;
const KEYS: usize = 512;
/// How far the second heavy key's score is below the first's, a head.
const BELOW: [f32; 4] = [0.05, 0.12, 0.2, 0.3];
/// Score of the heaviest key in the middle, of other keys on average e^0.5.
const SCORE: f32 = 6.0;
/// Weight of the heaviest key for one of the others, as V cancels it.
const WEIGHT: f32 = 0.45;

/// `KERNEL/FORM/two_heavy_keys`.
pub(crate) fn trials() -> Vec<Trial> {
    let kernels = kernels_and_forms(Direction::Forward).into_iter();
    let full = kernels.filter(|(spec, ..)| spec.mask == MaskClass::Full);
    full.map(|(spec, form, is_possible)| {
        trial(format!("{}/{form}/two_heavy_keys", spec.name), is_possible, move || {
            match spec.dtype {
                Dtype::F16 => two_heavy_keys::<f16>(spec, form),
                _ => two_heavy_keys::<bf16>(spec, form),
            }
        })
    })
    .collect()
}

fn two_heavy_keys<T: Real>(spec: &'static KernelSpec, form: Form) {
    let (dim, value_dim) = (spec.tile.head_dim as usize, spec.tile.value_dim as usize);
    let heads = BELOW.len();
    let shape = shape(1, (heads, heads), (ROWS, KEYS), (dim, value_dim));
    let mut case = Case::<T>::new(shape, Sight::FULL, 1, 1.0);

    // Channel 0 makes the heavy keys' scores, and differs from row to row.
    let strengths = uniform(2, ROWS * heads, 0.9, 1.1);
    case.q.set(|index, old| if index % dim == 0 { 4.0 * strengths[index / dim] } else { old });
    let unit = SCORE / 4.0 * (dim as f32).sqrt();
    case.k.set(|index, old| {
        let (row, head, channel) = (index / dim / heads, index / dim % heads, index % dim);
        match (row, channel) {
            (0, 0) => unit,
            (row, 0) if row == KEYS - 1 => unit * (1.0 - BELOW[head]),
            (row, channel) if channel == 0 || row == 0 || row == KEYS - 1 => 0.0,
            _ => old,
        }
    });
    let values = case.v.contents();
    case.v.set(|index, old| match index / value_dim / heads {
        0 => old,
        row if row == KEYS - 1 => 0.0,
        _ => -WEIGHT * values[index % (value_dim * heads)] as f32,
    });

    let plan = plan::<T>(&case.attention, Some(spec.name), Some(form)).expect("it is eligible");
    let stream = Stream::from(copy_stream());
    let mut loaded = Loaded::new(&case, true);
    loaded.run(&plan, &stream).expect("a launch");
    let had = loaded.results(&stream).0.contents();
    let [exact, rounded] = forward_references(&case).map(|outcome| outcome.o);
    let (error, baseline) = (max_difference(&had, &exact), max_difference(&rounded, &exact));
    assert!(error <= MOST * baseline, "error {error:e}, {baseline:e} with true maxima");
}
