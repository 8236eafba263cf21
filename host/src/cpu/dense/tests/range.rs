//! Large, equal and extreme scores.

use half::{bf16, f16};

use super::case::{Case, normal, shape};
use super::{assert_close, assert_zero};
use crate::attention::{Align, Attention, Broadcast, Mask, Scale};
use crate::cpu::dense::Precision;

fn finite(values: &[f64]) -> bool {
    values.iter().all(|value| value.is_finite())
}

#[test]
fn r1_one_key_far_below_zero() {
    // 128 channels of 64 · -64, and the same with one product 1 smaller in magnitude.
    for (last, dot) in [(64.0, -524_288.0), (63.984_375, -524_287.0)] {
        let mut case = Case::new(Attention::new(shape(1, (1, 1), (1, 1), (128, 128))));
        case.q.fill(64.0);
        case.k.fill(-64.0);
        case.q[127] = last;
        case.v.fill(1.0);
        let result = case.forward();
        assert_eq!(result.o, [1.0; 128]);
        let scale = f64::from((1.0 / 128_f64.sqrt()) as f32);
        assert_close(&result.lse, &[dot * scale], 1e-9, "lse");
        assert_eq!(case.forward_as::<bf16>(Precision::Rounded(bf16_dtype())).o, [1.0; 128]);
    }
}

fn bf16_dtype() -> ferroflash_core::axes::Dtype {
    ferroflash_core::axes::Dtype::Bf16
}

#[test]
fn r2_every_score_near_minus_120() {
    for (len, dim) in [(64, 32), (192, 64), (100, 128)] {
        let mut case = Case::new(Attention::new(shape(1, (1, 1), (len, len), (dim, dim))));
        (case.q, case.k) = (normal(1, len * dim, 0.1), normal(2, len * dim, 0.1));
        for row in 0..len {
            case.q[row * dim] = 1.0;
            case.k[row * dim] = -120.0 * (dim as f32).sqrt();
        }
        let shifted = {
            let mut shifted = case.clone();
            (0..len).for_each(|row| shifted.k[row * dim] += 119.0 * (dim as f32).sqrt());
            shifted
        };
        let (gradients, reference) = (case.backward(), shifted.backward());
        assert!(finite(&gradients.dq) && finite(&gradients.dk) && finite(&gradients.dv));
        assert_close(&gradients.dk, &reference.dk, 1e-4, "dk under a shift of every score");
        assert_close(&gradients.dv, &reference.dv, 1e-4, "dv under a shift of every score");
        let half = case.backward_as::<f16>(Precision::Rounded(ferroflash_core::axes::Dtype::F16));
        assert!(finite(&half.dq) && finite(&half.dk) && finite(&half.dv));
    }
}

#[test]
fn r3_one_key_has_no_gradient_but_its_value() {
    let case = Case::normal3(Attention::new(shape(1, (1, 1), (1, 1), (16, 16))));
    let gradients = case.backward();
    assert_close(&gradients.dq, &[0.0; 16], 1e-12, "dq");
    assert_close(&gradients.dk, &[0.0; 16], 1e-12, "dk");
    assert_eq!(gradients.dv, [1.0; 16]);
    let attention = Attention::new(shape(1, (1, 1), (256, 256), (128, 128)));
    let large = Case::normal3(attention.mask(Mask::causal(Align::TopLeft))).backward();
    assert!(finite(&large.dq) && finite(&large.dk) && finite(&large.dv));
}

#[test]
fn r4_equal_large_rows_average_equal_values() {
    let mut case = Case::new(Attention::new(shape(1, (2, 2), (32, 32), (64, 64))));
    for tensor in [&mut case.q, &mut case.k, &mut case.v] {
        tensor.fill(1000.0);
    }
    let result = case.forward();
    assert_close(&result.o, &[1000.0; 4096], 1e-9, "o");
    let gradients = case.backward();
    assert!(finite(&gradients.dq) && finite(&gradients.dk));
    let sum = |values: &[f64]| values.iter().sum::<f64>();
    let d_o: f64 = case.d_o.iter().map(|value| f64::from(*value)).sum();
    assert!((sum(&gradients.dv) - d_o).abs() < 1e-6, "P sums to 1 over keys");
}

#[test]
fn r5_a_softcap_saturates_without_gradient() {
    let mut case = Case::new(
        Attention::new(shape(1, (1, 1), (4, 4), (1, 3))).scale(Scale::Factor(1.0)).softcap(50.0),
    );
    case.q = vec![1.0, -1.0, 10.0, -10.0];
    case.k = vec![2000.0; 4];
    let result = case.forward();
    let lse = [50.0, -50.0, 50.0, -50.0].map(|score| score + 4_f64.ln());
    assert_close(&result.lse, &lse, 1e-12, "lse");
    let gradients = case.backward();
    assert_zero(&gradients.dq, "dq");
    assert_zero(&gradients.dk, "dk");
}

#[test]
fn r7_a_loss_on_lse_alone() {
    let mut case = Case::new(Attention::new(shape(1, (1, 1), (4, 5), (3, 3)))).with_d_lse();
    case.d_o.fill(0.0);
    let gradients = case.backward();
    assert_zero(&gradients.dv, "dv");
    // dq = scale · dL_i · Σ P_ij k_j: attention to the keys as values.
    let mut keys_as_values = case.clone();
    keys_as_values.v = case.k.clone();
    let scale = f64::from(case.attention.scale_factor());
    let d_lse = case.d_lse.clone().unwrap_or_default();
    let mean_keys = keys_as_values.forward().o;
    let expected: Vec<f64> =
        mean_keys.iter().enumerate().map(|(i, k)| scale * f64::from(d_lse[i / 3]) * k).collect();
    assert_close(&gradients.dq, &expected, 1e-12, "dq");
}

#[test]
fn r9_a_negative_scale_is_a_negated_query() {
    let attention = Attention::new(shape(1, (2, 1), (6, 7), (4, 4)));
    let negative = Case::new(attention.scale(Scale::Factor(-0.125)));
    let mut negated = Case::new(attention.scale(Scale::Factor(0.125)));
    negated.q.iter_mut().for_each(|q| *q = -*q);
    assert_eq!(negative.forward(), negated.forward());
    let (negative, negated) = (negative.backward(), negated.backward());
    assert_eq!((negative.dk, negative.dv), (negated.dk, negated.dv));
    let dq: Vec<f64> = negated.dq.iter().map(|dq| -dq).collect();
    assert_eq!(negative.dq, dq);
}

#[test]
fn nan_and_infinity_in_visible_inputs_propagate() {
    let attention = Attention::new(shape(1, (1, 1), (3, 3), (2, 2)));
    let causal = Case::new(attention.mask(Mask::causal(Align::TopLeft)));
    let clean = causal.forward();
    let poisons: [fn(&mut Case); 4] = [
        |case| case.q[2] = f32::NAN,
        |case| case.k[2] = f32::NAN,
        |case| case.v[2] = f32::NAN,
        |case| case.v[2] = f32::INFINITY,
    ];
    for poison in poisons {
        let mut case = causal.clone();
        poison(&mut case);
        let o = case.forward().o;
        assert_eq!(o[..2], clean.o[..2], "row 0 sees none of it");
        assert!(!o[2].is_finite(), "row 1 does");
    }
    let mut all = causal.clone();
    all.q.fill(f32::NAN);
    assert!(all.forward().lse.iter().all(|lse| lse.is_nan()));
}

#[test]
fn a_bias_of_minus_infinity_is_a_mask() {
    let attention = Attention::new(shape(1, (1, 1), (2, 3), (2, 2)));
    let mut biased = Case::new(attention.bias(Broadcast::NONE));
    biased.bias = Some(vec![0.0, f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY, 0.0]);
    let mut masked = Case::new(attention.boolean_mask(Broadcast::NONE));
    masked.boolean_mask = Some(vec![1, 0, 1, 1, 0, 1]);
    for case in [&mut biased, &mut masked] {
        case.k[2..4].fill(f32::NAN);
        case.v[2..4].fill(f32::INFINITY);
    }
    assert_eq!(biased.forward(), masked.forward());
    assert_eq!(biased.backward().dq, masked.backward().dq);
    biased.bias = Some(vec![f32::NEG_INFINITY; 6]);
    assert_zero(&biased.forward().o, "o");
    assert_zero(&biased.backward().dk, "dk");
}
