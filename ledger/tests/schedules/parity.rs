//! Every schedule is dense attention, in any tiles, and every output has the owner it should.

use ferroflash::Align;
use ferroflash_core::shape::Shape;
use ferroflash_ledger::schedule::column_owner::{self, Reductions};
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::stored;
use ferroflash_ledger::schedule::warps::{Join, rows_of_warp, split_k, split_q};
use ferroflash_ledger::schedule::{Blocks, Call, Real, Tensor, Trace, fa1, fa2, row_owner};
use proptest::prelude::*;

use crate::oracle::{Problem, Sight, Verdict, check_owner, check_values, shape};

/// A call without shared heads if `groups` says so, in tiles that leave tails.
fn problem(groups: bool) -> impl Strategy<Value = (Problem, Blocks)> {
    let group = if groups { 1..4_usize } else { 1..2 };
    let sight = prop_oneof![
        Just(Sight::Full),
        Just(Sight::Causal(Align::TopLeft)),
        Just(Sight::Causal(Align::BottomRight)),
    ];
    let sizes = (1..3_usize, 1..3_usize, group, 1..40_usize, 1..40_usize, 1..9_usize, 1..9_usize);
    let tiles = (1..20_usize, 1..20_usize);
    let dropout = prop_oneof![Just(0.0), 0.1..0.6_f32];
    (sizes, sight, tiles, dropout, any::<u64>()).prop_map(|(sizes, sight, tiles, p, seed)| {
        let (batch, kv_heads, group, q_len, kv_len, head_dim, value_dim) = sizes;
        let heads = (kv_heads * group, kv_heads);
        let shape = shape(batch, heads, (q_len, kv_len), (head_dim, value_dim));
        let problem = Problem::new(shape, sight, seed);
        let problem = if p > 0.0 { problem.with_dropout(p) } else { problem };
        (problem, Blocks { q_block: tiles.0, kv_block: tiles.1 })
    })
}

fn pass(verdict: Verdict) -> Result<(), TestCaseError> {
    verdict.map_err(|rejection| TestCaseError::fail(format!("{rejection:?}")))
}

fn heads(shape: &Shape) -> (usize, usize) {
    (shape.batch * shape.q_heads, shape.batch * shape.kv_heads)
}

/// Runs `test` on the problem's call, dropout included.
fn with_call<F: Real, R>(problem: &Problem, test: impl FnOnce(&Call<'_, F>, &[F]) -> R) -> R {
    let (tensors, multiplier) = (problem.cast::<F>(), problem.multiplier::<F>());
    test(&problem.call(&tensors).with_dropout(&multiplier), &tensors.d_o)
}

fn forwards<F: Real>(problem: &Problem, blocks: Blocks, tolerance: f64) -> Verdict {
    let exact = problem.dense();
    with_call::<F, _>(problem, |call, _| {
        let (heads, _) = heads(&problem.shape);
        let by_columns = fa1::forward(call, blocks).expect("a valid call");
        check_values("fa1 o", &by_columns.o, &exact.o, tolerance)?;
        let lse: Vec<F> = by_columns.states.iter().map(|state| F::lse(*state)).collect();
        check_values("fa1 lse", &lse, &exact.lse, tolerance)?;
        problem.check_coverage(&by_columns.trace, blocks)?;
        let stored = stored::forward(call);
        check_values("stored o", &stored.o, &exact.o, tolerance)?;
        for saved in [Saved::Lse, Saved::MaximumAndSum] {
            let by_rows = fa2::forward(call, blocks, saved).expect("a valid call");
            check_values("fa2 o", &by_rows.o, &exact.o, tolerance)?;
            check_values("fa2 lse", &by_rows.lse, &exact.lse, tolerance)?;
            problem.check_coverage(&by_rows.trace, blocks)?;
            let tiles = problem.shape.q_len.div_ceil(blocks.q_block);
            check_owner(&by_rows.trace, Tensor::O, heads, tiles)?;
            // Divided once a row; FlashAttention-1 divides at every visit of a row.
            let rows = (heads * problem.shape.q_len) as u64;
            assert_eq!(by_rows.trace.divisions, rows);
            let kv_tiles = problem.shape.kv_len.div_ceil(blocks.kv_block) as u64;
            assert_eq!(by_columns.trace.divisions, rows * kv_tiles);
        }
        Ok(())
    })
}

fn backwards<F: Real>(problem: &Problem, blocks: Blocks, tolerance: f64) -> Verdict {
    let exact = problem.dense();
    let s = problem.shape;
    let (q_heads, kv_heads) = heads(&s);
    let (q_tiles, kv_tiles) =
        (s.q_len.div_ceil(blocks.q_block), s.kv_len.div_ceil(blocks.kv_block));
    with_call::<F, _>(problem, |call, d_o| {
        let compare = |name: &str, had: &fa1::Backward<F>| {
            check_values(&format!("{name} dq"), &had.dq, &exact.dq, tolerance)?;
            check_values(&format!("{name} dk"), &had.dk, &exact.dk, tolerance)?;
            check_values(&format!("{name} dv"), &had.dv, &exact.dv, tolerance)?;
            problem.check_coverage(&had.trace, blocks)
        };
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
        let columns = fa2::backward(call, blocks, &saved, d_o).expect("a valid call");
        compare("column owner", &columns)?;
        check_owner(&columns.trace, Tensor::DK, q_heads, kv_tiles)?;
        check_owner(&columns.trace, Tensor::DV, q_heads, kv_tiles)?;
        let with = |reductions| {
            column_owner::backward(call, blocks, &saved, d_o, &reductions).expect("a valid call")
        };
        let ordered = with(Reductions::ORDERED);
        compare("ordered column owner", &ordered)?;
        check_owner(&ordered.trace, Tensor::DQ, q_heads, q_tiles)?;
        assert_eq!((ordered.trace.adds(), ordered.trace.initial()), (0, 0));
        let looped = with(Reductions::LOOPED);
        compare("column owner of a group", &looped)?;
        check_owner(&looped.trace, Tensor::DK, kv_heads, kv_tiles)?;
        check_owner(&looped.trace, Tensor::DV, kv_heads, kv_tiles)?;
        // K and V come once a KV head, not once a query head.
        let reads = |trace: &Trace| trace.of(Tensor::K).reads + trace.of(Tensor::V).reads;
        assert_eq!(reads(&columns.trace), reads(&looped.trace) * s.group() as u128);
        let rows = row_owner::backward(call, blocks, &saved, d_o).expect("a valid call");
        compare("row owner", &rows)?;
        check_owner(&rows.trace, Tensor::DQ, q_heads, q_tiles)?;
        if q_heads == kv_heads {
            let saved = fa1::forward(call, blocks).expect("a valid call");
            let first = fa1::backward(call, blocks, &saved, d_o).expect("a valid call");
            compare("fa1", &first)?;
            check_owner(&first.trace, Tensor::DK, q_heads, kv_tiles)?;
        } else {
            let saved = fa1::forward(call, blocks).expect("a valid call");
            assert!(fa1::backward(call, blocks, &saved, d_o).is_err(), "the paper has no groups");
        }
        Ok(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn forwards_are_dense((problem, blocks) in problem(true)) {
        pass(forwards::<f64>(&problem, blocks, 1e-13))?;
        pass(forwards::<f32>(&problem, blocks, 4e-6))?;
    }

    #[test]
    fn backwards_are_dense((problem, blocks) in problem(true)) {
        pass(backwards::<f64>(&problem, blocks, 1e-12))?;
        pass(backwards::<f32>(&problem, blocks, 4e-5))?;
    }

    #[test]
    fn the_first_backward_is_dense((problem, blocks) in problem(false)) {
        pass(backwards::<f64>(&problem, blocks, 1e-12))?;
    }

    #[test]
    fn warps_are_dense(
        (problem, blocks) in problem(true), cuts in prop::collection::vec(0..40_usize, 0..5),
    ) {
        let (exact, s) = (problem.dense(), problem.shape);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(s.kv_len)).collect();
        cuts.extend([0, s.kv_len]);
        cuts.sort_unstable();
        let slices: Vec<_> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        with_call::<f64, _>(&problem, |call, _| {
            let rows = (heads(&s).0 * s.q_len) as u128;
            let warps = slices.len();
            for join in [Join::Chain, Join::Tree] {
                let had = split_k(call, blocks.q_block, &slices, join).expect("a valid call");
                pass(check_values("split-K o", &had.o, &exact.o, 1e-13))?;
                pass(check_values("split-K lse", &had.lse, &exact.lse, 1e-13))?;
                prop_assert_eq!(had.exchange.partial_states, rows * warps as u128);
                prop_assert_eq!(had.exchange.merges, rows * (warps as u128 - 1));
                prop_assert_eq!(had.exchange.handed_states, had.exchange.merges);
                prop_assert!(had.exchange.producers.iter().all(|count| *count == warps));
                let depth = match join {
                    Join::Chain => warps as u32 - 1,
                    Join::Tree => warps.next_power_of_two().ilog2(),
                };
                prop_assert_eq!(had.exchange.depth, u128::from(depth));
            }
            let had = split_q(call, blocks.q_block, blocks.kv_block, warps).expect("a valid call");
            pass(check_values("split-Q o", &had.o, &exact.o, 1e-13))?;
            pass(check_values("split-Q lse", &had.lse, &exact.lse, 1e-13))?;
            prop_assert_eq!((had.exchange.merges, had.exchange.handed_states), (0, 0));
            prop_assert!(had.exchange.producers.iter().all(|count| *count <= 1));
            // K and V are brought in as often as without warps: once a block and tile.
            let plain = fa2::forward(call, blocks, Saved::Lse).expect("a valid call").trace;
            prop_assert_eq!(had.trace.words, plain.words);
            Ok(())
        })?;
    }

    /// What the mask hides may hold anything.
    #[test]
    fn what_is_hidden_is_never_used((problem, blocks) in problem(true)) {
        let mut problem = problem;
        let visible = problem.visible();
        let s = problem.shape;
        let exact = problem.dense();
        for key in 0..s.kv_len {
            if (0..s.q_len).all(|row| !visible.sees(row as u32, key as u32)) {
                for head in 0..s.batch * s.kv_heads {
                    let row = head * s.kv_len + key;
                    problem.k[row * s.head_dim..(row + 1) * s.head_dim].fill(f32::NAN);
                    problem.v[row * s.value_dim..(row + 1) * s.value_dim].fill(f32::NAN);
                }
            }
        }
        with_call::<f64, _>(&problem, |call, d_o| {
            let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
            pass(check_values("o", &saved.o, &exact.o, 1e-13))?;
            let had = fa2::backward(call, blocks, &saved, d_o).expect("a valid call");
            pass(check_values("dq", &had.dq, &exact.dq, 1e-12))?;
            pass(check_values("dv", &had.dv, &exact.dv, 1e-12))
        })?;
    }
}

/// Shares of dQ that are added as they come depend on it; those that are kept apart do not.
#[test]
fn only_a_fixed_order_repeats() {
    let problem = Problem::new(shape(1, (2, 1), (24, 96), (8, 8)), Sight::Full, 11);
    let blocks = Blocks { q_block: 8, kv_block: 8 };
    let forth: Vec<usize> = (0..12).collect();
    let back: Vec<usize> = (0..12).rev().collect();
    with_call::<f32, _>(&problem, |call, d_o| {
        let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
        let dq = |reductions: Reductions<'_>, arrival| {
            let reductions = Reductions { arrival: Some(arrival), ..reductions };
            column_owner::backward(call, blocks, &saved, d_o, &reductions).expect("a call").dq
        };
        assert_ne!(dq(Reductions::ATOMIC, &forth), dq(Reductions::ATOMIC, &back));
        assert_eq!(dq(Reductions::ORDERED, &forth), dq(Reductions::ORDERED, &back));
        let twice = Reductions { arrival: Some(&[0, 0]), ..Reductions::ATOMIC };
        let refused = column_owner::backward(call, blocks, &saved, d_o, &twice).map(drop);
        assert!(refused.is_err_and(|error| error.to_string().starts_with("arrival")));
    });
}

#[test]
fn warps_own_bands_in_turn() {
    assert_eq!(rows_of_warp(128, 4, 1), (16..32).chain(80..96).collect::<Vec<_>>());
    assert_eq!(rows_of_warp(64, 4, 3), (48..64).collect::<Vec<_>>());
    assert_eq!(rows_of_warp(64, 0, 0), Vec::<usize>::new());
}

#[test]
fn bad_input_is_refused_by_name() {
    let problem = Problem::new(shape(1, (2, 1), (4, 4), (2, 2)), Sight::Full, 1);
    let tensors = problem.cast::<f64>();
    let call = problem.call(&tensors);
    let refused = |result: Result<(), ferroflash_ledger::Error>, field: &str| {
        let error = result.expect_err("a wrong call").to_string();
        assert!(error.starts_with(field), "{error}");
    };
    let blocks = |q_block, kv_block| Blocks { q_block, kv_block };
    refused(fa1::forward(&call, blocks(0, 1)).map(drop), "q_block");
    refused(fa2::forward(&call, blocks(1, 0), Saved::Lse).map(drop), "kv_block");
    let saved = fa2::forward(&call, blocks(3, usize::MAX), Saved::Lse).expect("one tile of keys");
    refused(fa2::backward(&call, blocks(1, 1), &saved, &[0.0]).map(drop), "d_o");
    refused(split_q(&call, 1, 1, 0).map(drop), "warps");
    let (first, second) = (0..2, 3..4);
    refused(split_k(&call, 1, &[first, second], Join::Tree).map(drop), "slices");
    refused(fa1::blocks(0, 64).map(drop), "chip_words");
    refused(fa1::blocks(1 << 20, usize::MAX).map(drop), "head_dim");
    let wrong = Shape { kv_heads: 3, ..problem.shape };
    let (q, k, v) = (&tensors.q, &tensors.k, &tensors.v);
    refused(Call::new(wrong, problem.visible(), 1.0, q, k, v).map(drop), "q_heads");
    refused(Call::new(problem.shape, problem.visible(), 1.0, q, q, v).map(drop), "k");
    let endless = Shape { value_dim: usize::MAX, ..problem.shape };
    refused(Call::new(endless, problem.visible(), 1.0, q, k, v).map(drop), "v");
    let no_rows = Shape { q_len: 0, ..problem.shape };
    refused(Call::new(no_rows, problem.visible(), 1.0, q, k, v).map(drop), "q_len");
}
