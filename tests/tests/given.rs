//! Two ways to give the same: a mask with a byte or a bit a key, a dropout's seed and offset in the
//! description or with the call; and the call that shows what is dropped.

use ferroflash::cpu::dropout_mask;
use ferroflash::{Align, Broadcast, Dropout};
use ferroflash_tests::backend::{Backend, backward, forward, forward_references};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::reference::attend;
use proptest::prelude::*;

/// Rows that see every key, or keys near their diagonal.
fn sights() -> impl Strategy<Value = Sight> {
    let near = (0..40_usize, 0..20_usize);
    let near = near.prop_map(|(left, right)| Sight::window(Some(left), Some(right)));
    prop_oneof![Just(Sight::FULL), Just(Sight::BOTTOM_RIGHT), near]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The same mask with a bit a key, and a seed and an offset that come with the call.
    #[test]
    fn how_masks_and_states_are_given_does_not_matter(
        heads in (1..3_usize, 1..3_usize),
        lengths in (1..70_usize, 1..90_usize),
        sight in sights(),
        seed in 0..1000_u64,
        bits in 0..8_u8,
        probability in prop_oneof![Just(0.0_f32), Just(0.3), Just(1.0)],
    ) {
        let axes =
            Broadcast { batch: bits & 4 != 0, heads: bits & 2 != 0, rows: bits & 1 != 0 };
        let (group, kv_heads) = heads;
        let shape = shape(2, (group * kv_heads, kv_heads), lengths, (20, 12));
        let masked = Case::<f32>::new(shape, sight, seed, 1.0).with_boolean_mask(axes, |[b, h, row, key]| {
            !(b + h + row * 3 + key * 5 + key / 9).is_multiple_of(4)
        });
        let state = [seed << 33 | 5, seed << 32 | 9];
        let by_value = masked.clone().with_dropout(Dropout::new(probability, (state[0], state[1])));
        let given = masked.with_bits().with_dropout_given(probability, state);
        let tiled = Backend::CpuTiled;
        prop_assert_eq!(forward(tiled, &by_value), forward(tiled, &given));
        prop_assert_eq!(backward(tiled, &by_value), backward(tiled, &given));
        let [expected, _] = forward_references(&by_value);
        let [had, _] = forward_references(&given);
        prop_assert_eq!(had, expected);
        let view = given.inputs().dropout_state;
        let kept = dropout_mask(&given.attention, view.as_ref()).expect("a valid call");
        prop_assert_eq!(&kept, &dropout_mask(&by_value.attention, None).expect("a valid call"));
        let defined = given.dropout_mask().expect("it drops");
        for (at, kept) in kept.into_iter().enumerate() {
            let (key, row) = (at % shape.kv_len, at / shape.kv_len % shape.q_len);
            let head = (at / shape.kv_len / shape.q_len) as u32;
            prop_assert_eq!(kept != 0, defined.keeps(head, row as u32, key as u32));
        }
    }
}

/// Packed items, whose rows and keys are counted from their own first: held against sums that are
/// written out.
#[test]
fn bits_and_states_of_packed_items() {
    let packed = PackedLengths {
        cu_q: vec![0, 33, 33, 40, 59],
        cu_k: vec![0, 50, 53, 53, 70],
        used_q: None,
        used_k: Some(vec![47, 3, 0, 9]),
    };
    let sight = Sight { align: Align::BottomRight, left: Some(30), right: Some(4) };
    let axes = Broadcast { batch: false, heads: true, rows: false };
    let case = Case::<f32>::packed((4, 2), (16, 24), packed, sight, 5, 1.0)
        .with_boolean_mask(axes, |[b, _, row, key]| !(b + row * 3 + key).is_multiple_of(5))
        .with_bits()
        .with_dropout_given(0.4, [7 << 40, 3 << 35]);
    let (outcome, grads) = attend(&case);
    let close = |had: &[f64], expected: &[f64]| {
        let pairs = had.iter().zip(expected);
        pairs
            .for_each(|(had, expected)| assert!((had - expected).abs() < 1e-5, "{had} {expected}"));
    };
    for backend in [Backend::CpuDense, Backend::CpuTiled] {
        close(&forward(backend, &case).expect("a valid call").o, &outcome.o);
        let had = backward(backend, &case).expect("a valid call");
        close(&had.dq, &grads.dq);
        close(&had.dk, &grads.dk);
        close(&had.dv, &grads.dv);
    }
}
