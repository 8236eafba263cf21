//! Empty rows, containment, packing and bias, on the small inputs of public reports.

use super::case::{Case, normal, shape};
use super::{assert_close, assert_zero};
use crate::attention::{Align, Attention, Broadcast, Dropout, Layout, Mask};

const BOTTOM: Mask = Mask::causal(Align::BottomRight);

/// Rows `rows` of a `[1, S, H, width]` tensor.
fn rows(tensor: &[f64], rows: std::ops::Range<usize>, row_elements: usize) -> &[f64] {
    &tensor[rows.start * row_elements..rows.end * row_elements]
}

#[test]
fn m1_one_key_is_seen_by_the_last_query_only() {
    let mut case = Case::packed((1, 1), (32, 32), &[0, 76, 110, 256], &[0, 1, 2, 3], BOTTOM);
    (case.q, case.k, case.v) = (normal(1, 8192, 3.0), normal(2, 96, 3.0), normal(3, 96, 3.0));
    case.d_o.fill(1.0);
    let (result, gradients) = (case.forward(), case.backward());
    for row in 0..256 {
        let o = rows(&result.o, row..row + 1, 32);
        match [75, 109, 255].iter().position(|last| *last == row) {
            None => assert_zero(o, "o of an empty row"),
            Some(item) => {
                let value: Vec<f64> =
                    case.v[item * 32..][..32].iter().map(|v| f64::from(*v)).collect();
                assert_close(o, &value, 0.0, "o is the only value");
            }
        }
    }
    assert_close(&gradients.dq, &[0.0; 8192], 1e-12, "dq");
    assert_close(&gradients.dk, &[0.0; 96], 1e-12, "dk");
    assert_close(&gradients.dv, &[1.0; 96], 1e-12, "dv");
}

#[test]
fn m2_rows_before_the_first_key_are_zero() {
    for (q_len, kv_len) in [(130, 2), (200, 70)] {
        let empty = q_len - kv_len;
        let shape = shape(1, (1, 1), (q_len, kv_len), (8, 8));
        let dense = Case::new(Attention::new(shape).mask(BOTTOM)).with_d_lse();
        let lengths = [q_len, kv_len].map(|len| [0, len as i32]);
        let mut packed = Case::packed((1, 1), (8, 8), &lengths[0], &lengths[1], BOTTOM);
        packed.d_lse = dense.d_lse.clone();
        for case in [dense, packed] {
            let (result, gradients) = (case.forward(), case.backward());
            assert_zero(rows(&result.o, 0..empty, 8), "o");
            assert_zero(rows(&gradients.dq, 0..empty, 8), "dq");
            assert!(result.lse[..empty].iter().all(|lse| *lse == f64::NEG_INFINITY));
            assert!(result.lse[empty..].iter().all(|lse| lse.is_finite()));
        }
    }
}

#[test]
fn m3_the_alignment_decides_what_one_row_sees() {
    let attention = Attention::new(shape(1, (1, 1), (1, 8), (4, 4)));
    let top = Case::new(attention.mask(Mask::causal(Align::TopLeft)));
    let first: Vec<f64> = top.v[..4].iter().map(|v| f64::from(*v)).collect();
    assert_close(&top.forward().o, &first, 0.0, "top left");
    assert_eq!(Case::new(attention.mask(BOTTOM)).forward(), Case::new(attention).forward());
}

#[test]
fn m4_groups_equal_repeated_heads() {
    for (q_heads, kv_heads) in [(4, 1), (6, 2), (9, 3), (21, 7), (7, 1)] {
        let sizes = |kv_heads| shape(2, (q_heads, kv_heads), (9, 9), (4, 3));
        let grouped = Case::new(Attention::new(sizes(kv_heads)).mask(BOTTOM));
        let mut repeated = Case::new(Attention::new(sizes(q_heads)).mask(BOTTOM));
        let group = q_heads / kv_heads;
        let repeat = |tensor: &[f32], width| -> Vec<f32> {
            tensor.chunks(width).flat_map(|head| head.repeat(group)).collect()
        };
        (repeated.k, repeated.v) = (repeat(&grouped.k, 4), repeat(&grouped.v, 3));
        assert_eq!(grouped.forward(), repeated.forward());
        let (grouped, repeated) = (grouped.backward(), repeated.backward());
        assert_eq!(grouped.dq, repeated.dq);
        let sum = |tensor: &[f64], width: usize| -> Vec<f64> {
            let sum = |heads: &[f64]| -> Vec<f64> {
                (0..width).map(|c| heads.iter().skip(c).step_by(width).sum()).collect()
            };
            tensor.chunks(width * group).flat_map(sum).collect()
        };
        assert_close(&grouped.dk, &sum(&repeated.dk, 4), 1e-12, "dk");
        assert_close(&grouped.dv, &sum(&repeated.dv, 3), 1e-12, "dv");
    }
}

#[test]
fn m5_a_mask_may_hide_a_whole_row() {
    let attention = Attention::new(shape(1, (2, 2), (6, 10), (8, 8)));
    let axes = Broadcast { batch: true, heads: true, rows: false };
    let mut case = Case::new(attention.boolean_mask(axes));
    case.boolean_mask = Some((0..60).map(|cell| u8::from(cell < 50)).collect());
    let (result, gradients) = (case.forward(), case.backward());
    assert_zero(rows(&result.o, 5..6, 16), "o");
    assert_zero(rows(&gradients.dq, 5..6, 16), "dq");
    case.d_o[80..].fill(f32::NAN);
    let unaffected = case.backward();
    assert_eq!((unaffected.dk, unaffected.dv), (gradients.dk, gradients.dv));
}

#[test]
fn m6_a_window_keeps_its_left_keys_and_the_diagonal() {
    let attention = Attention::new(shape(1, (1, 1), (8, 8), (4, 4)));
    let window =
        |left, right| Case::new(attention.mask(Mask::full().window(left, right))).forward();
    let case = Case::new(attention);
    let values: Vec<f64> = case.v.iter().map(|v| f64::from(*v)).collect();
    assert_eq!(window(Some(0), Some(0)).o, values);
    let causal = Case::new(attention.mask(BOTTOM)).forward();
    for left in [None, Some(8), Some(7), Some(usize::MAX)] {
        assert_eq!(window(left, Some(0)), causal);
    }
    let two_keys = window(Some(1), Some(0));
    let axes = Broadcast { batch: true, heads: true, rows: false };
    let mut masked = Case::new(attention.boolean_mask(axes));
    let band = |cell: usize| u8::from(matches!((cell / 8).checked_sub(cell % 8), Some(0 | 1)));
    masked.boolean_mask = Some((0..64).map(band).collect());
    assert_eq!(two_keys, masked.forward());
}

#[test]
fn m7_keys_of_items_without_queries_have_zero_gradients() {
    let (cu_q, cu_k) = ([0, 0, 12, 20, 20], [0, 25, 42, 51, 81]);
    let case = Case::packed((4, 1), (16, 16), &cu_q, &cu_k, BOTTOM).with_d_lse();
    let gradients = case.backward();
    for gradient in [&gradients.dk, &gradients.dv] {
        assert_zero(rows(gradient, 0..25, 16), "keys of item 0");
        assert_zero(rows(gradient, 51..81, 16), "keys of item 3");
        assert!(rows(gradient, 25..51, 16).iter().any(|value| *value != 0.0));
    }
}

#[test]
fn m8_nothing_to_attend_to_or_for() {
    for mask in [Mask::full(), BOTTOM] {
        let case = Case::new(Attention::new(shape(1, (1, 1), (5, 0), (4, 4))).mask(mask));
        let result = case.forward();
        assert_zero(&result.o, "o");
        assert_eq!(result.lse, [f64::NEG_INFINITY; 5]);
        assert_zero(&case.backward().dq, "dq");
    }
    for empty in [
        shape(0, (2, 1), (3, 4), (2, 2)),
        shape(2, (0, 0), (3, 4), (2, 2)),
        shape(2, (0, 1), (3, 4), (2, 2)),
        shape(2, (2, 1), (0, 4), (2, 2)),
    ] {
        let case = Case::new(Attention::new(empty).sink()).with_d_lse();
        assert!(case.forward().o.is_empty());
        assert_zero(&case.backward().dk, "dk");
    }
    assert!(Case::packed((2, 1), (3, 3), &[0], &[0], BOTTOM).forward().o.is_empty());
}

#[test]
fn m9_packed_items_do_not_see_each_other() {
    let cu = [0, 30, 110, 204];
    let packed = Case::packed((2, 1), (8, 6), &cu, &cu, BOTTOM).with_d_lse();
    let mut masked =
        Case::new(
            Attention::new(shape(1, (2, 1), (204, 204), (8, 6)))
                .mask(BOTTOM)
                .boolean_mask(Broadcast { batch: true, heads: true, rows: false }),
        );
    let item = |row: usize| cu.iter().position(|end| row < *end as usize);
    masked.boolean_mask =
        Some((0..204 * 204).map(|cell| u8::from(item(cell / 204) == item(cell % 204))).collect());
    masked.d_lse = packed.d_lse.clone();
    assert_eq!(packed.forward(), masked.forward());
    assert_eq!(packed.backward(), masked.backward());
}

#[test]
fn m11_rows_past_the_used_length_are_zero() {
    let mut case = Case::packed((2, 2), (4, 4), &[0, 3, 7, 9], &[0, 3, 7, 9], BOTTOM);
    let tight = Case::packed((2, 2), (4, 4), &[0, 2, 5, 6], &[0, 2, 5, 6], BOTTOM);
    if let Some(packed) = &mut case.packed {
        (packed.used_q, packed.used_k) = (Some(vec![2, 3, 1]), Some(vec![2, 3, 1]));
    }
    let used = [0, 1, 3, 4, 5, 7];
    for (to, from) in used.into_iter().enumerate() {
        for (gaps, tight) in [(&mut case.q, &tight.q), (&mut case.k, &tight.k)] {
            gaps[from * 8..][..8].copy_from_slice(&tight[to * 8..][..8]);
        }
        for (gaps, tight) in [(&mut case.v, &tight.v), (&mut case.d_o, &tight.d_o)] {
            gaps[from * 8..][..8].copy_from_slice(&tight[to * 8..][..8]);
        }
    }
    for gap in [2, 6, 8] {
        for tensor in [&mut case.q, &mut case.k, &mut case.v, &mut case.d_o] {
            tensor[gap * 8..][..8].fill(f32::NAN);
        }
    }
    let (o, tight_o) = (case.forward().o, tight.forward().o);
    let (gradients, tight_gradients) = (case.backward(), tight.backward());
    for (tensor, tight) in [
        (&o, &tight_o),
        (&gradients.dq, &tight_gradients.dq),
        (&gradients.dk, &tight_gradients.dk),
        (&gradients.dv, &tight_gradients.dv),
    ] {
        for gap in [2, 6, 8] {
            assert_zero(rows(tensor, gap..gap + 1, 8), "a gap");
        }
        for (to, from) in used.into_iter().enumerate() {
            assert_eq!(rows(tensor, from..from + 1, 8), rows(tight, to..to + 1, 8));
        }
    }
    assert_eq!(case.attention.layout, Layout::Packed { q_tokens: 9, kv_tokens: 9 });
}

#[test]
fn b1_alibi_is_a_bias_by_distance_from_the_bottom_right_diagonal() {
    for (q_len, kv_len) in [(1, 17), (5, 9), (9, 5)] {
        for mask in [Mask::full(), BOTTOM, Mask::causal(Align::TopLeft)] {
            let attention = Attention::new(shape(2, (12, 4), (q_len, kv_len), (4, 4))).mask(mask);
            let mut alibi = Case::new(attention.alibi());
            for per_item in [false, true] {
                // Slopes with few bits, so that their products with distances are exact.
                let slopes = super::case::grid(3, if per_item { 24 } else { 12 });
                let mut biased = Case::new(attention.bias(Broadcast::NONE));
                let bias = |cell: usize| {
                    let (key, row) = (cell % kv_len, cell / kv_len % q_len);
                    let head = cell / kv_len / q_len % slopes.len();
                    -slopes[head] * ((row + kv_len) as f32 - (q_len + key) as f32).abs()
                };
                biased.bias = Some((0..24 * q_len * kv_len).map(bias).collect());
                alibi.slopes = Some(slopes.clone());
                assert_eq!(alibi.forward(), biased.forward());
                assert_eq!(alibi.backward().dk, biased.backward().dk);
            }
        }
    }
}

#[test]
fn b1_alibi_distances_are_of_effective_lengths() {
    let attention = Attention::new(shape(2, (2, 2), (3, 9), (4, 4))).alibi();
    let whole = Case::new(attention).with_key_lengths(&[9, 4]);
    let mut short = Case::new(Attention::new(shape(1, (2, 2), (3, 4), (4, 4))).alibi());
    short.q = whole.q[24..].to_vec();
    (short.k, short.v) = (whole.k[72..][..32].to_vec(), whole.v[72..][..32].to_vec());
    assert_eq!(whole.forward().o[24..], short.forward().o);
}

#[test]
fn p1_p2_rows_past_the_lengths_never_matter() {
    let attention = Attention::new(shape(3, (8, 1), (12, 64), (16, 16))).mask(BOTTOM);
    let lengths = [20, 15, 4];
    let mut zeros = Case::new(attention).with_key_lengths(&lengths).with_d_lse();
    let mut poisoned = zeros.clone();
    for (item, length) in lengths.into_iter().enumerate() {
        let tail = (item * 64 + length as usize) * 16..(item + 1) * 64 * 16;
        for (case, fill) in [(&mut zeros, 0.0), (&mut poisoned, f32::NAN)] {
            case.k[tail.clone()].fill(fill);
            case.v[tail.clone()].fill(fill);
        }
    }
    assert_eq!(zeros.forward(), poisoned.forward());
    assert_eq!(zeros.backward(), poisoned.backward());
    assert!(poisoned.forward().o.iter().all(|o| o.is_finite()));
}

#[test]
fn p3_a_key_outside_every_range_never_matters() {
    let dropout = Dropout::new(0.2, (1, 1));
    let mask = Mask::causal(Align::TopLeft).window(Some(3), Some(0));
    let clean =
        Case::new(Attention::new(shape(1, (2, 1), (6, 9), (4, 4))).mask(mask).dropout(dropout));
    let mut poisoned = clean.clone();
    poisoned.k[6 * 4..].fill(f32::NAN);
    poisoned.v[6 * 4..].fill(f32::INFINITY);
    assert_eq!(clean.forward(), poisoned.forward());
    assert_eq!(clean.backward(), poisoned.backward());
}
