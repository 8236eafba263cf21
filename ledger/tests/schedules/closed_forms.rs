//! What the ledger's formulas say, counted by running the schedules without values.

use ferroflash::Align;
use ferroflash_ledger::backward::scratch;
use ferroflash_ledger::launch::{backward_grids, head_programs};
use ferroflash_ledger::materialized::{Widths, materialized};
use ferroflash_ledger::movement::{MovementWidths, movement, order_visits};
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::warps::{Join, split_k};
use ferroflash_ledger::schedule::{Blocks, Call, NoValue, Tensor, fa1, fa2, row_owner, stored};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::split::{SplitTile, split_keys};
use ferroflash_ledger::stages::{StagedCall, backward_stages};
use ferroflash_ledger::tiles::{CausalAlign, TiledMask, gradient_producers, tile_counts};
use ferroflash_ledger::words::{Order, Tiled, backward_words, forward_words, paper_blocks};
use proptest::prelude::*;

use crate::oracle::{Problem, Sight, shape};

/// Sizes, mask and tiles; one head dimension for keys and values.
#[derive(Clone, Debug)]
struct Drawn {
    problem: Problem,
    blocks: Blocks,
}

fn drawn(one_head: bool) -> impl Strategy<Value = Drawn> {
    let sight = prop_oneof![
        Just(Sight::Full),
        Just(Sight::Causal(Align::TopLeft)),
        Just(Sight::Causal(Align::BottomRight)),
    ];
    let heads = if one_head { 1..2_usize } else { 1..4 };
    let sizes = (heads.clone(), heads.clone(), heads, 1..70_usize, 1..70_usize, 1..9_usize);
    (sizes, sight, 1..30_usize, 1..30_usize).prop_map(|(sizes, sight, q_block, kv_block)| {
        let (batch, kv_heads, group, q_len, kv_len, dim) = sizes;
        let shape = shape(batch, (kv_heads * group, kv_heads), (q_len, kv_len), (dim, dim));
        Drawn { problem: Problem::new(shape, sight, 1), blocks: Blocks { q_block, kv_block } }
    })
}

impl Drawn {
    fn tiled(&self) -> Tiled {
        let s = self.problem.shape;
        Tiled {
            q_len: s.q_len as u64,
            kv_len: s.kv_len as u64,
            head_dim: s.head_dim as u64,
            q_block: self.blocks.q_block as u64,
            kv_block: self.blocks.kv_block as u64,
        }
    }

    fn align(&self) -> CausalAlign {
        match self.problem.sight {
            Sight::Full => CausalAlign::None,
            Sight::Causal(Align::TopLeft) => CausalAlign::TopLeft,
            Sight::Causal(Align::BottomRight) => CausalAlign::BottomRight,
        }
    }

    fn mask(&self) -> TiledMask {
        let Tiled { q_len, kv_len, q_block, kv_block, .. } = self.tiled();
        TiledMask { q_len, kv_len, q_block, kv_block, align: self.align() }
    }

    fn sizes(&self) -> Sizes {
        let s = self.problem.shape;
        Sizes {
            batch: s.batch as u64,
            q_heads: s.q_heads as u64,
            kv_heads: s.kv_heads as u64,
            q_len: s.q_len as u64,
            kv_len: s.kv_len as u64,
            head_dim: s.head_dim as u64,
            value_dim: s.value_dim as u64,
        }
    }

    fn run<R>(&self, test: impl FnOnce(&Call<'_, NoValue>, Blocks, &[NoValue]) -> R) -> R {
        let tensors = self.problem.cast::<NoValue>();
        test(&self.problem.call(&tensors), self.blocks, &tensors.d_o)
    }
}

proptest! {
    #[test]
    fn forward_words_are_counted(drawn in drawn(true)) {
        drawn.run(|call, blocks, _| {
            let had = fa1::forward(call, blocks).expect("a valid call").trace;
            let words = forward_words(&drawn.tiled(), Order::KvOuter, 2).expect("sizes");
            let (o, state) = (had.of(Tensor::O), had.of(Tensor::State));
            prop_assert_eq!(had.of(Tensor::K).reads + had.of(Tensor::V).reads, words.kv_reads);
            prop_assert_eq!(had.of(Tensor::Q).reads, words.q_reads);
            prop_assert_eq!((o.reads, o.writes), (words.o_reads, words.o_writes));
            prop_assert_eq!((state.reads, state.writes), (words.state_reads, words.state_writes));
            prop_assert_eq!(had.initial(), words.initial_writes);
            prop_assert_eq!(had.total(), words.total);
            let visits = order_visits(&drawn.tiled()).expect("sizes");
            prop_assert_eq!(had.visits.len() as u128, visits.kv_outer_state_visits);
            Ok(())
        })?;
    }

    #[test]
    fn stored_scores_move_what_the_ledger_says(drawn in drawn(true)) {
        drawn.run(|call, _, _| {
            let had = stored::forward(call).trace;
            let widths = Widths { qkv: 1, score: 1, probability: 1, output: 1 };
            let ledger = materialized(&drawn.sizes(), &widths).expect("sizes");
            for (tensor, words) in [
                (Tensor::Scores, ledger.score_bytes),
                (Tensor::Probabilities, ledger.probability_bytes),
            ] {
                prop_assert_eq!((had.of(tensor).reads, had.of(tensor).writes), (words, words));
            }
            prop_assert_eq!(had.total(), ledger.total_bytes);
            // No tiled schedule has either matrix.
            let tiled = fa2::forward(call, drawn.blocks, Saved::Lse).expect("a valid call").trace;
            prop_assert_eq!(tiled.of(Tensor::Scores), Default::default());
            prop_assert_eq!(tiled.of(Tensor::Probabilities), Default::default());
            Ok(())
        })?;
    }

    #[test]
    fn unmasked_query_tiles_move_what_the_ledger_says(drawn in drawn(true)) {
        let problem = Problem { sight: Sight::Full, ..drawn.problem.clone() };
        let drawn = Drawn { problem, ..drawn };
        drawn.run(|call, blocks, _| {
            for (saved, scalars) in [(Saved::Lse, 1), (Saved::MaximumAndSum, 2)] {
                let had = fa2::forward(call, blocks, saved).expect("a valid call").trace;
                let words = forward_words(&drawn.tiled(), Order::QOuter, scalars).expect("sizes");
                prop_assert_eq!((had.reads(), had.writes()), (words.reads, words.writes));
                prop_assert_eq!((had.initial(), had.adds()), (0, 0));
            }
            let widths = MovementWidths { input: 2, output: 2, state: 4 };
            let bytes = movement(&drawn.tiled(), &widths).expect("sizes");
            let by_rows = fa2::forward(call, blocks, Saved::Lse).expect("a valid call").trace;
            let by_keys = fa1::forward(call, blocks).expect("a valid call").trace;
            for (trace, total) in
                [(by_rows, bytes.q_outer.total_bytes), (by_keys, bytes.kv_outer.total_bytes)]
            {
                prop_assert_eq!(2 * trace.total() + 2 * state_words(&trace), total);
            }
            Ok(())
        })?;
    }

    #[test]
    fn first_backward_words_are_counted(drawn in drawn(true)) {
        drawn.run(|call, blocks, d_o| {
            let saved = fa1::forward(call, blocks).expect("a valid call");
            let had = fa1::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            let words = backward_words(&drawn.tiled()).expect("sizes");
            let reads = |tensors: &[Tensor]| -> u128 {
                tensors.iter().map(|tensor| had.of(*tensor).reads).sum()
            };
            let rows = [Tensor::Q, Tensor::O, Tensor::DO, Tensor::DQ];
            prop_assert_eq!(reads(&[Tensor::K, Tensor::V]), words.kv_reads);
            prop_assert_eq!(reads(&rows), words.row_reads);
            prop_assert_eq!(reads(&[Tensor::State]), words.state_reads);
            prop_assert_eq!(had.of(Tensor::DQ).writes, words.dq_writes);
            let dkv_writes = had.of(Tensor::DK).writes + had.of(Tensor::DV).writes;
            prop_assert_eq!(dkv_writes, words.dkv_writes);
            prop_assert_eq!(had.initial(), words.initial_writes);
            prop_assert_eq!(had.total(), words.total);
            Ok(())
        })?;
    }

    #[test]
    fn visits_and_programs_are_counted(drawn in drawn(false)) {
        drawn.run(|call, blocks, d_o| {
            let s = drawn.problem.shape;
            let heads = (s.batch * s.q_heads) as u128;
            let tiles = tile_counts(&drawn.mask()).expect("sizes");
            let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
            let columns = fa2::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            let rows = row_owner::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            for trace in [&saved.trace, &columns, &rows] {
                prop_assert_eq!(trace.visits.len() as u128, heads * tiles.visited);
                let visible: u64 = trace.visits.iter().map(|visit| visit.visible).sum();
                prop_assert_eq!(u128::from(visible), heads * tiles.visible_cells);
                let cells = trace.visits.iter().map(|visit| visit.rows * visit.keys);
                prop_assert_eq!(cells.sum::<usize>() as u128, heads * tiles.visited_cells);
            }
            let sides = (blocks.q_block as u64, blocks.kv_block as u64);
            let programs = head_programs(&drawn.sizes(), sides.0, sides.1).expect("sizes");
            prop_assert_eq!(u128::from(saved.trace.programs), programs.programs);
            let grids = backward_grids(&drawn.sizes(), sides.0, sides.1).expect("sizes");
            prop_assert_eq!(u128::from(columns.programs), grids.column_owners);
            prop_assert_eq!(u128::from(rows.programs), grids.row_owners);
            Ok(())
        })?;
    }

    #[test]
    fn producers_and_scratch_are_counted(drawn in drawn(false)) {
        drawn.run(|call, blocks, d_o| {
            let s = drawn.problem.shape;
            let expected = gradient_producers(&drawn.mask(), &drawn.sizes()).expect("sizes");
            let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
            let columns = fa2::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            let rows = row_owner::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            // A tile that nobody contributes to is absent from a trace.
            let present = |counts: &[u128]| -> Vec<usize> {
                counts.iter().filter(|count| **count > 0).map(|count| *count as usize).collect()
            };
            for head in 0..s.batch * s.q_heads {
                let dq = columns.producers_of(Tensor::Scratch, head);
                prop_assert_eq!(dq, present(&expected.column_owner_dq));
                let dk = columns.producers_of(Tensor::DK, head);
                prop_assert!(dk.iter().all(|count| *count == 1));
            }
            for kv_head in 0..s.batch * s.kv_heads {
                for tensor in [Tensor::Scratch, Tensor::ScratchV] {
                    let had = rows.producers_of(tensor, kv_head);
                    prop_assert_eq!(had, present(&expected.row_owner_dkv));
                }
            }
            let scratch = scratch(&drawn.sizes(), 1, 1).expect("sizes");
            prop_assert_eq!(columns.initial(), scratch.dq_accumulator_bytes);
            prop_assert_eq!(columns.of(Tensor::Delta).writes, scratch.delta_bytes);
            Ok(())
        })?;
    }

    #[test]
    fn stages_of_the_column_owner_are_counted(drawn in drawn(false)) {
        drawn.run(|call, blocks, d_o| {
            let staged = StagedCall {
                sizes: drawn.sizes(),
                align: drawn.align(),
                q_block: blocks.q_block as u64,
                kv_block: blocks.kv_block as u64,
                element_bytes: 1,
                accumulator_bytes: 1,
            };
            let stages = backward_stages(&staged).expect("sizes");
            let saved = fa2::forward(call, blocks, Saved::Lse).expect("a valid call");
            let had = fa2::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
            prop_assert_eq!(had.of(Tensor::K).reads + had.of(Tensor::V).reads, stages.kv_bytes);
            prop_assert_eq!(had.adds(), stages.dq_update_bytes);
            let statistics = had.of(Tensor::State).reads + had.of(Tensor::Delta).reads;
            prop_assert_eq!(statistics, stages.statistics_bytes);
            prop_assert_eq!(had.total(), stages.pipeline_bytes);
            Ok(())
        })?;
    }

    #[test]
    fn joining_warps_is_counted(q_len in 1..40_usize, dim in 1..9_usize, warps in 1..9_usize) {
        let problem = Problem::new(shape(1, (1, 1), (q_len, 40), (dim, dim)), Sight::Full, 1);
        let drawn = Drawn { problem, blocks: Blocks { q_block: q_len, kv_block: 40 } };
        let cut = |warp: usize| warp * 40 / warps;
        let slices: Vec<_> = (0..warps).map(|warp| cut(warp)..cut(warp + 1)).collect();
        let tile = SplitTile {
            q_block: q_len as u64,
            value_dim: dim as u64,
            warps: warps as u64,
            scalar_bytes: 4,
        };
        let ledger = split_keys(&tile).expect("sizes");
        drawn.run(|call, blocks, _| {
            for (join, depth) in
                [(Join::Chain, ledger.serial_depth), (Join::Tree, ledger.tree_depth)]
            {
                let had = split_k(call, blocks.q_block, &slices, join).expect("a valid call");
                let had = had.exchange;
                prop_assert_eq!(had.state_words, ledger.state_values);
                prop_assert_eq!(had.partial_states, ledger.partial_states);
                prop_assert_eq!((had.merges, had.depth), (ledger.merges, depth));
                let handed = 4 * had.handed_states * had.state_words;
                prop_assert_eq!(handed, ledger.non_owner_bytes);
                let all = 4 * had.partial_states * had.state_words;
                prop_assert_eq!(all, ledger.all_partials_bytes);
            }
            Ok(())
        })?;
    }

    /// What a program keeps on its chip is what its tiles take, whatever the sequences.
    #[test]
    fn the_chip_holds_tiles_alone(drawn in drawn(true)) {
        drawn.run(|call, blocks, _| {
            let s = drawn.problem.shape;
            let (rows, keys) = (blocks.q_block.min(s.q_len), blocks.kv_block.min(s.kv_len));
            let operands = 2 * keys * s.head_dim + 2 * rows * s.head_dim;
            let by_keys = fa1::forward(call, blocks).expect("a valid call").trace;
            let expected = operands + rows * keys + 2 * rows;
            prop_assert_eq!(by_keys.peak_words as usize, expected);
            Ok(())
        })?;
    }
}

/// Words of m, l or lse, which are twice as wide.
fn state_words(trace: &ferroflash_ledger::schedule::Trace) -> u128 {
    let state = trace.of(Tensor::State);
    state.reads + state.writes + state.initial
}

/// M4.3 §0x0CB and §0x0CC at N = 4096, by running every load and store.
#[test]
fn the_sensitivity_fixture_is_run() {
    let blocks = fa1::blocks(65_536, 64).expect("sizes");
    assert_eq!(blocks, Blocks { q_block: 64, kv_block: 256 });
    let paper = paper_blocks(65_536, 64).expect("sizes");
    assert_eq!((paper.q_block, paper.kv_block), (64, 256));
    let problem = Problem::new(shape(1, (1, 1), (4096, 4096), (64, 64)), Sight::Full, 1);
    Drawn { problem, blocks }.run(|call, blocks, d_o| {
        let saved = fa1::forward(call, blocks).expect("a valid call");
        assert_eq!(saved.trace.total(), 13_639_680);
        let had = fa1::backward(call, blocks, &saved, d_o).expect("a valid call").trace;
        assert_eq!(had.total(), 22_937_600);
        assert_eq!(u128::from(saved.trace.peak_words), paper.live_words);
    });
}
