use ferroflash_core::axes::Dtype;
use half::{bf16, f16};

use super::case::{Case, shape};
use crate::attention::{Align, Attention, Dropout, Mask};
use crate::cpu::dense::Precision;
use crate::element::Element;

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Rounding errs by about the type's own precision: not by less (it does happen), nor by much more.
fn baseline_of<T: Element>(ulp: f64) {
    let attention = Attention::new(shape(1, (2, 1), (96, 96), (32, 32)))
        .mask(Mask::causal(Align::TopLeft))
        .dropout(Dropout::new(0.1, (2, 0)));
    let case = Case::normal3(attention);
    let rounded = Precision::Rounded(T::DTYPE);
    let (exact, baseline) = (case.forward_as::<T>(Precision::F64), case.forward_as::<T>(rounded));
    let magnitude = exact.o.iter().fold(0.0_f64, |max, o| max.max(o.abs()));
    let error = largest_difference(&exact.o, &baseline.o);
    assert!(error > magnitude * ulp / 16.0 && error < magnitude * ulp * 64.0, "o: {error}");
    assert!(baseline.o.iter().all(|o| T::from_f64(*o).to_f64() == *o), "results are of the type");
    let (exact, baseline) = (case.backward_as::<T>(Precision::F64), case.backward_as::<T>(rounded));
    for (exact, baseline) in
        [(&exact.dq, &baseline.dq), (&exact.dk, &baseline.dk), (&exact.dv, &baseline.dv)]
    {
        let magnitude = exact.iter().fold(0.0_f64, |max, value| max.max(value.abs()));
        let error = largest_difference(exact, baseline);
        assert!(error > 0.0 && error < magnitude * ulp * 64.0, "{error} of {magnitude}");
    }
}

#[test]
fn rounding_costs_what_the_type_costs() {
    baseline_of::<bf16>(2_f64.powi(-8));
    baseline_of::<f16>(2_f64.powi(-11));
    baseline_of::<f32>(2_f64.powi(-24));
}

#[test]
fn exact_arithmetic_on_16_bit_inputs_is_that_of_their_values() {
    let case = Case::new(Attention::new(shape(1, (1, 1), (5, 6), (4, 4))));
    // The grid's values have 8 significant bits: every type holds them exactly.
    assert_eq!(case.forward_as::<f16>(Precision::F64), case.forward());
    assert_eq!(case.forward_as::<bf16>(Precision::F64), case.forward());
    assert_eq!(<bf16 as Element>::DTYPE, Dtype::Bf16);
}
