//! States of one row: three coordinates, any order of merges, and what rounding makes of orders.

use ferroflash_core::row_state::RowState;
use ferroflash_ledger::materialized::{Softmax, softmax_accesses};
use ferroflash_ledger::schedule::state::{Log, Normalized, State, Tree, two_passes};
use ferroflash_ledger::schedule::stored::softmax;
use ferroflash_ledger::schedule::{Binary16, Real};
use half::f16;
use proptest::prelude::*;

/// The row in three scans: maximum, sum, weighted values.
fn dense(scores: &[f64], values: &[Vec<f64>]) -> (Vec<f64>, f64) {
    let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let width = values[0].len();
    if m == f64::NEG_INFINITY {
        return (vec![0.0; width], m);
    }
    let weights: Vec<f64> = scores.iter().map(|score| (score - m).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let channel = |c: usize| {
        let terms = weights.iter().zip(values).map(|(weight, value)| weight * value[c]);
        terms.sum::<f64>() / sum
    };
    ((0..width).map(channel).collect(), m + sum.ln())
}

fn near(had: &[f64], exact: &[f64]) -> bool {
    had.iter().zip(exact).all(|(had, exact)| had == exact || (had - exact).abs() <= 1e-12)
}

/// Scores, some of them masked; a value each; and an order.
fn row() -> impl Strategy<Value = (Vec<f64>, Vec<Vec<f64>>, Vec<usize>)> {
    let score = prop_oneof![4 => -30.0..30.0_f64, 1 => Just(f64::NEG_INFINITY)];
    let key = (score, prop::collection::vec(-3.0..3.0_f64, 3));
    prop::collection::vec(key, 1..12).prop_flat_map(|keys| {
        let order: Vec<usize> = (0..keys.len()).collect();
        let (scores, values) = keys.into_iter().unzip();
        (Just(scores), Just(values), Just(order).prop_shuffle())
    })
}

/// A tree over `order` cut at places that `cuts` say.
fn drawn_tree(order: &[usize], cuts: &mut impl Iterator<Item = usize>) -> Tree {
    match order {
        [leaf] => Tree::Leaf(*leaf),
        _ => {
            let cut = 1 + cuts.next().unwrap_or(0) % (order.len() - 1);
            let left = drawn_tree(&order[..cut], cuts);
            Tree::Join(Box::new(left), Box::new(drawn_tree(&order[cut..], cuts)))
        }
    }
}

proptest! {
    #[test]
    fn any_tree_is_the_row(
        (scores, values, order) in row(), cuts in prop::collection::vec(0..100_usize, 12),
    ) {
        let (o, lse) = dense(&scores, &values);
        let states: Vec<State<f64>> =
            scores.iter().zip(&values).map(|(score, value)| State::key(*score, value)).collect();
        let tree = drawn_tree(&order, &mut cuts.into_iter());
        let whole = tree.merge(&states).expect("a tree of these states");
        prop_assert!(near(&whole.output(), &o) && near(&[whole.lse()], &[lse]));
        for tree in [Tree::chain(&order), Tree::balanced(&order)] {
            let tree = tree.expect("at least one key");
            prop_assert!(near(&tree.merge(&states).expect("a tree").output(), &o));
        }
    }

    #[test]
    fn every_coordinate_is_the_row((scores, values, order) in row()) {
        let (o, lse) = dense(&scores, &values);
        let (state, output) = two_passes(&scores, &values);
        prop_assert!(near(&[f64::lse(state)], &[lse]));
        prop_assert!(near(&output, &o));
        let states = order.iter().map(|key| State::key(scores[*key], &values[*key]));
        let states: Vec<State<f64>> = states.collect();
        let normalized = states.iter().map(State::normalized);
        let normalized: Normalized<f64> = normalized.reduce(|a, b| a.merge(&b)).expect("a key");
        prop_assert!(near(&normalized.output, &o) && near(&[f64::lse(normalized.row)], &[lse]));
        let logs = states.iter().map(|state| Log { lse: state.lse(), output: state.output() });
        let log = logs.reduce(|a, b| a.merge(&b)).expect("a key");
        prop_assert!(near(&log.output, &o) && near(&[log.lse], &[lse]));
    }

    #[test]
    fn a_stored_row_is_scanned_as_often_as_is_said((scores, values, _) in row()) {
        for form in [Softmax::Native, Softmax::Safe, Softmax::Online] {
            let had = softmax(form, &scores);
            let said = softmax_accesses(form, scores.len() as u64).expect("a row");
            prop_assert_eq!(u128::from(had.scans), said.scans);
            prop_assert_eq!(u128::from(had.loads), said.loads);
            prop_assert_eq!(u128::from(had.stores), said.stores);
            let (o, lse) = dense(&scores, &values);
            if form == Softmax::Native && lse == f64::NEG_INFINITY {
                prop_assert!(had.p.iter().all(|p| p.is_nan()));
                continue;
            }
            let mixed = |c: usize| had.p.iter().zip(&values).map(|(p, value)| p * value[c]).sum();
            prop_assert!(near(&[mixed(0), mixed(1), mixed(2)], &o));
        }
    }

    /// In 16 bits an order changes the result, but never by more than its merges can round.
    #[test]
    fn orders_differ_by_roundings_alone((scores, values, order) in row()) {
        let (o, _) = dense(&scores, &values);
        let cast = |(score, value): (&f64, &Vec<f64>)| {
            let value: Vec<Binary16> = value.iter().map(|x| Binary16::from_f64(*x)).collect();
            State::key(Binary16::from_f64(*score), &value)
        };
        let states: Vec<State<Binary16>> = scores.iter().zip(&values).map(cast).collect();
        let forth = Tree::chain(&order).and_then(|tree| tree.merge(&states)).expect("a tree");
        // A score of 30 is rounded by 2⁻⁷, its exponential by about as much; then a few 2⁻¹¹ of
        // values below 3 at each merge.
        let allowed = 3.0 * (2.0 / 64.0 + order.len() as f64 * 4.0 / 2048.0);
        for (had, exact) in forth.output().iter().zip(&o) {
            prop_assert!((had.to_f64() - exact).abs() <= allowed, "{had:?}, exactly {exact}");
        }
    }
}

/// M4.3 §0x06: what a row of exponentials cannot hold, a row relative to its maximum can.
#[test]
fn only_the_native_form_has_a_range() {
    let is_nan = |form, scores: &[f32]| softmax(form, scores).p.iter().any(|p| p.is_nan());
    for scores in [[1000.0, 999.0, -1000.0], [-1000.0, -1001.0, -1002.0]] {
        assert!(is_nan(Softmax::Native, &scores));
        assert!(!is_nan(Softmax::Safe, &scores) && !is_nan(Softmax::Online, &scores));
    }
}

/// M4.3 §0x08G: the same eight keys in three orders.
#[test]
fn an_adversarial_row_in_sixteen_bits() {
    let states: Vec<State<Binary16>> = [2048.0, 1.0, -2048.0, 1.0, 2048.0, 1.0, -2048.0, 1.0]
        .map(|value| State::key(Binary16::ZERO, &[Binary16::from_f64(value)]))
        .to_vec();
    let output = |tree: Tree| tree.merge(&states).expect("a tree").output()[0].to_f64();
    let forth: Vec<usize> = (0..8).collect();
    let back: Vec<usize> = (0..8).rev().collect();
    assert_eq!(output(Tree::chain(&forth).expect("eight keys")), 0.125);
    assert_eq!(output(Tree::balanced(&forth).expect("eight keys")), 0.25);
    assert_eq!(output(Tree::chain(&back).expect("eight keys")), 0.5);
    assert_eq!(Tree::balanced(&forth).expect("eight keys").depth(), 3);
    assert!(Tree::chain(&[]).is_err());
    assert!(Tree::Leaf(8).merge(&states).is_err());
}

/// Every pair of a sample of binary16 numbers, by the operations of the `half` crate.
#[test]
fn binary16_rounds_as_half_does() {
    let sample: Vec<f16> =
        (0..=u16::MAX).step_by(97).map(f16::from_bits).filter(|x| !x.is_nan()).collect();
    let same = |had: Binary16, expected: f16| {
        let (had, expected) = (had.to_f64(), expected.to_f64());
        had == expected || (had.is_nan() && expected.is_nan())
    };
    for a in &sample {
        for b in &sample {
            let [x, y] = [a, b].map(|x| Binary16::from_f64(x.to_f64()));
            assert!(same(x + y, a + b), "{a} + {b}");
            assert!(same(x - y, a - b), "{a} - {b}");
            assert!(same(x * y, a * b), "{a} · {b}");
            assert!(same(x / y, a / b), "{a} / {b}");
        }
    }
    let empty = Binary16::merge(Binary16::EMPTY, Binary16::EMPTY).0;
    assert_eq!(empty, RowState { row_max: Binary16::from_f64(f64::NEG_INFINITY), ..empty });
    assert_eq!(Binary16::lse(empty).to_f64(), f64::NEG_INFINITY);
}
