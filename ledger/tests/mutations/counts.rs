//! Wrong accounts, held against what running a schedule counts, or against the ledger where the
//! claim is about a budget.

use ferroflash_ledger::benchmark::{SquareAttention, implied_seconds, numerators, rate_ratio};
use ferroflash_ledger::bounds::{TwoLevel, bounds};
use ferroflash_ledger::device::device;
use ferroflash_ledger::launch::{Packed, backward_grids, forward_grid, populations};
use ferroflash_ledger::materialized::{Widths, materialized, row_state_bytes};
use ferroflash_ledger::residency::{BlockResources, residency};
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::{Blocks, NoValue, Tensor, Trace, fa1, fa2};
use ferroflash_ledger::shared::{BackwardTile, ForwardTile, backward_shared, forward_shared};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::stages::{BackwardStages, StagedCall, backward_stages};
use ferroflash_ledger::tiles::{CausalAlign, TiledMask, tile_counts};
use ferroflash_ledger::v2_0_0::{BackwardLoop, barriers, causal_key_loop};
use ferroflash_ledger::words::{Order, Tiled, capacity_words, forward_words, paper_blocks};

use crate::oracle::{Problem, Sight, Verdict, check_counts, check_values, shape};

/// The fixture of M4.3 §0x02F: one item, 32 heads, 4096 rows and keys, 128 channels.
const MHA: Sizes = Sizes {
    batch: 1,
    q_heads: 32,
    kv_heads: 32,
    q_len: 4096,
    kv_len: 4096,
    head_dim: 128,
    value_dim: 128,
};
const BF16: Widths = Widths { qkv: 2, score: 2, probability: 2, output: 2 };

/// The tiles of M4.4 §0x03J.
const SQUARE: Blocks = Blocks { q_block: 128, kv_block: 64 };

fn square() -> Problem {
    Problem::new(shape(1, (1, 1), (256, 256), (64, 64)), Sight::Full, 1)
}

fn by_rows(problem: &Problem, blocks: Blocks) -> Trace {
    let tensors = problem.cast::<NoValue>();
    fa2::forward(&problem.call(&tensors), blocks, Saved::Lse).expect("a call").trace
}

fn by_keys(problem: &Problem, blocks: Blocks) -> Trace {
    let tensors = problem.cast::<NoValue>();
    fa1::forward(&problem.call(&tensors), blocks).expect("a call").trace
}

/// A factor 2 of the ledger, one store and one load, taken for a width of two bytes.
pub(crate) fn a_factor_is_a_width() -> Verdict {
    let widths = Widths { score: 4, ..BF16 };
    let ledger = materialized(&MHA, &widths).expect("sizes");
    let rows = ledger.transfers.rows.iter().filter(|row| row.object == "scores");
    let cells = 32 * 4096 * 4096;
    check_counts([("bytes of scores", 2 * cells, rows.map(|row| row.bytes).sum())])
}

/// A mask byte, read once a cell, folded into the width of a score, which is stored and loaded.
pub(crate) fn a_mask_widens_the_scores() -> Verdict {
    let of = |score| materialized(&MHA, &Widths { score, ..BF16 }).expect("sizes").total_bytes;
    check_counts([("bytes with a mask", of(3), of(2) + 32 * 4096 * 4096)])
}

/// All transfers called what is resident at once.
pub(crate) fn transfers_are_resident() -> Verdict {
    let ledger = materialized(&MHA, &BF16).expect("sizes");
    check_counts([("resident bytes", ledger.total_bytes, ledger.softmax_live_bytes)])
}

/// All transfers called what is saved for the backward: inputs, O and one of the two matrices.
pub(crate) fn transfers_are_saved() -> Verdict {
    let ledger = materialized(&MHA, &BF16).expect("sizes");
    let inputs = ledger.q_bytes + ledger.k_bytes + ledger.v_bytes;
    let saved = inputs + ledger.o_bytes + ledger.probability_bytes;
    check_counts([("saved bytes", ledger.total_bytes, saved)])
}

/// LSE counted in the place of O.
pub(crate) fn lse_replaces_the_output() -> Verdict {
    let trace = by_rows(&square(), SQUARE);
    check_counts([("words written", trace.of(Tensor::State).writes, trace.writes())])
}

/// One width for operands of 2 bytes and states of 4.
pub(crate) fn one_width_for_all() -> Verdict {
    let trace = by_rows(&square(), SQUARE);
    let states = trace.of(Tensor::State).writes;
    check_counts([("bytes", 2 * trace.total(), 2 * (trace.total() - states) + 4 * states)])
}

/// Bytes of the chip taken for its words.
pub(crate) fn bytes_for_words() -> Verdict {
    let words = capacity_words(131_072, 2).expect("a width") as u64;
    let [claimed, blocks] =
        [131_072, words].map(|chip| u128::from(paper_blocks(chip, 64).expect("sizes").kv_block));
    check_counts([("keys a block", claimed, blocks)])
}

/// What is saved, 0.5 MiB, called what is moved.
pub(crate) fn saved_state_is_traffic() -> Verdict {
    let saved = row_state_bytes(&MHA, 1, 4).expect("sizes");
    let one_head = Problem::new(shape(1, (1, 1), (4096, 4096), (128, 128)), Sight::Full, 1);
    let moved = by_rows(&one_head, Blocks { q_block: 128, kv_block: 128 }).total();
    check_counts([("bytes", saved, 32 * 2 * moved)])
}

/// Every input read once and every output written once.
pub(crate) fn everything_moves_once() -> Verdict {
    let trace = by_rows(&square(), SQUARE);
    let sizes = 4 * 256 * 64 + 256;
    check_counts([("words", sizes, trace.total())])
}

/// K and V read once by FlashAttention-2, whose every query tile streams them.
pub(crate) fn keys_stream_once() -> Verdict {
    let trace = by_rows(&square(), SQUARE);
    let reads = trace.of(Tensor::K).reads + trace.of(Tensor::V).reads;
    check_counts([("words of K and V", 2 * 256 * 64, reads)])
}

/// FlashAttention-1's words taken for a lower bound on any chip.
pub(crate) fn optimal_on_any_chip() -> Verdict {
    let small = TwoLevel { len: 4096, head_dim: 64, on_chip_words: 1024 };
    let bounds = bounds(&small).expect("sizes");
    check_counts([("words", bounds.flash_term as u128, bounds.forward_bound as u128)])
}

/// Rows cut by B_c and keys by B_r.
pub(crate) fn blocks_are_swapped() -> Verdict {
    let problem = Problem::new(shape(1, (1, 1), (7, 10), (4, 4)), Sight::Full, 1);
    let trace = by_keys(&problem, Blocks { q_block: 4, kv_block: 3 });
    let (q_len, kv_len, head_dim) = (7, 10, 4);
    let tiled = Tiled { q_len, kv_len, head_dim, q_block: 3, kv_block: 4 };
    let words = forward_words(&tiled, Order::KvOuter, 2).expect("sizes").total;
    check_counts([("words", trace.total(), words)])
}

/// A tail counted as a whole tile.
pub(crate) fn tails_are_padded() -> Verdict {
    let problem = Problem::new(shape(1, (1, 1), (7, 10), (4, 4)), Sight::Full, 1);
    let trace = by_keys(&problem, Blocks { q_block: 3, kv_block: 4 });
    let cells: usize = trace.visits.iter().map(|visit| visit.rows * visit.keys).sum();
    check_counts([("cells", 9 * 3 * 4, cells as u128)])
}

/// Slots of the specialised tiles, 96 channels wide, called bytes in memory.
pub(crate) fn slots_are_traffic() -> Verdict {
    let problem = Problem::new(shape(1, (1, 1), (257, 193), (78, 78)), Sight::Full, 1);
    let trace = by_rows(&problem, SQUARE);
    let slots: usize = trace.visits.iter().map(|_| 2 * 64 * 96).sum();
    let reads = trace.of(Tensor::K).reads + trace.of(Tensor::V).reads;
    check_counts([("words of K and V", slots as u128, reads)])
}

/// The diagnostic matrix of dropout added to what every call moves.
pub(crate) fn diagnostics_are_traffic() -> Verdict {
    let trace = by_rows(&square(), SQUARE);
    check_counts([("words", trace.total() + 256 * 256, trace.total())])
}

/// Every warp of a block brings K and V for itself.
pub(crate) fn every_warp_loads_keys() -> Verdict {
    let problem = square();
    let tensors = problem.cast::<NoValue>();
    let call = problem.call(&tensors);
    let warps = ferroflash_ledger::schedule::warps::split_q(&call, 128, 64, 4).expect("a call");
    let reads = warps.trace.of(Tensor::K).reads + warps.trace.of(Tensor::V).reads;
    check_counts([("words of K and V", 4 * 2 * 2 * 256 * 64, reads)])
}

/// Blocks of the grid called blocks that are resident.
pub(crate) fn a_grid_is_occupancy() -> Verdict {
    let grid = forward_grid(8, 16, 4096, 128).expect("sizes");
    let block = BlockResources { warps: 4, shared_bytes: 65_536, registers_per_thread: None };
    let a100 = device("a100", &[]).expect("a known device");
    let resident = residency(&block, a100).expect("a block");
    let on_device = resident.blocks_per_sm * u128::from(a100.multiprocessors.unwrap_or(0));
    check_counts([("resident blocks", grid.launched, on_device)])
}

/// Q, K, V and the output's tile added up as if they lived together.
pub(crate) fn the_output_tile_is_extra() -> Verdict {
    let (head_dim, q_block, kv_block) = (128, 128, 64);
    let tile = ForwardTile { head_dim, q_block, kv_block, element_bytes: 2, share_q_and_k: false };
    let shared = forward_shared(&tile).expect("sizes");
    check_counts([("shared bytes", shared.sum_of_names_bytes, shared.block_bytes)])
}

/// Every pointer the backward declares counted as live.
pub(crate) fn every_pointer_is_live() -> Verdict {
    let tile = BackwardTile {
        head_dim: 128,
        q_block: 64,
        kv_block: 64,
        element_bytes: 2,
        double_buffered_q: true,
        v_in_registers: true,
    };
    let shared = backward_shared(&tile).expect("sizes");
    check_counts([("shared bytes", shared.sum_of_names_bytes, shared.block_bytes)])
}

/// Blocks launched for packed items called blocks with work.
pub(crate) fn every_packed_block_works() -> Verdict {
    let packed =
        Packed { q_heads: 4, q_block: 128, q_lens: vec![512, 100, 0], kv_lens: vec![512; 3] };
    let packed = populations(&packed).expect("sizes");
    check_counts([("active blocks", packed.launched, packed.active)])
}

/// Every causal block given half the tiles.
pub(crate) fn causal_halves_every_block() -> Verdict {
    let mask = causal(4096, 128, 64);
    let counts = tile_counts(&mask).expect("sizes");
    let [first, last] = counts.visits_of_q_tile;
    check_counts([("tiles of the first block", 32, first), ("tiles of the last block", 32, last)])
}

fn causal(len: u64, q_block: u64, kv_block: u64) -> TiledMask {
    TiledMask { q_len: len, kv_len: len, q_block, kv_block, align: CausalAlign::TopLeft }
}

/// Every tile that v2.0.0 masks called partial.
pub(crate) fn masked_iterations_are_partial() -> Verdict {
    let mask = causal(257, 128, 64);
    let historical = causal_key_loop(&mask).expect("a loop").mask_iterations;
    check_counts([("partial tiles", historical, tile_counts(&mask).expect("sizes").partial)])
}

/// Eight programs, one a KV head, for a decoding step of 32 query heads.
pub(crate) fn decode_over_kv_heads() -> Verdict {
    let problem = Problem::new(shape(1, (32, 8), (1, 256), (4, 4)), Sight::Full, 1);
    let programs = by_rows(&problem, SQUARE).programs;
    check_counts([("programs", 8, u128::from(programs))])
}

/// V in registers declared cheaper in everything.
pub(crate) fn registers_are_free() -> Verdict {
    let of = |v_in_registers| {
        let block = BackwardLoop { q_tiles: 32, double_buffered_q: true, v_in_registers };
        barriers(&block).expect("a loop").race_free
    };
    check_counts([("barriers", of(false), of(true))])
}

/// The call of M4.4 §0x06.3D.
fn staged(q_block: u64, kv_block: u64, head_dim: u64, kv_heads: u64) -> BackwardStages {
    let sizes = Sizes { kv_heads, head_dim, value_dim: head_dim, ..MHA };
    let align = CausalAlign::TopLeft;
    let call =
        StagedCall { sizes, align, q_block, kv_block, element_bytes: 2, accumulator_bytes: 4 };
    backward_stages(&call).expect("sizes")
}

/// Every tensor counted at its size.
pub(crate) fn sizes_are_traffic() -> Verdict {
    let unique = 2 * (4096 * 128) * (2 * 32 + 2 * 8);
    let stages = staged(64, 128, 128, 8);
    check_counts([("bytes of Q, dO, K and V", unique, stages.q_and_d_o_bytes + stages.kv_bytes)])
}

/// K and V counted for the KV heads, though every query head has a column owner.
pub(crate) fn owners_over_kv_heads() -> Verdict {
    let programs = backward_grids(&Sizes { kv_heads: 8, ..MHA }, 64, 128).expect("sizes");
    let tile = 2 * 128 * 128 * 2;
    let kv_heads_alone = programs.column_owners / 4 * tile;
    check_counts([("bytes of K and V", kv_heads_alone, staged(64, 128, 128, 8).kv_bytes)])
}

/// Cells that rows may see taken for cells that are worked on.
pub(crate) fn useful_cells_are_worked() -> Verdict {
    let stages = staged(64, 128, 128, 8);
    check_counts([("cells", stages.useful_cells, stages.scheduled_cells)])
}

/// Smaller key tiles said to move no more.
pub(crate) fn smaller_tiles_move_less() -> Verdict {
    let [large, small] = [128, 64].map(|kv_block| staged(64, kv_block, 128, 8).main_bytes);
    check_counts([("bytes", large, small.max(large))])
}

/// The shared memory that one branch saves subtracted from what it moves.
pub(crate) fn shared_savings_are_traffic() -> Verdict {
    let of = |double_buffered_q| {
        let (q_block, kv_block, element_bytes) = (64, 64, 2);
        let tile = BackwardTile {
            head_dim: 256,
            q_block,
            kv_block,
            element_bytes,
            double_buffered_q,
            v_in_registers: false,
        };
        backward_shared(&tile).expect("sizes").block_bytes
    };
    let bytes = staged(64, 64, 256, 32).main_bytes;
    check_counts([("bytes", bytes - (of(true) - of(false)), bytes)])
}

/// The main kernel alone called the backward.
pub(crate) fn only_the_main_kernel() -> Verdict {
    let stages = staged(64, 128, 128, 8);
    check_counts([("bytes", stages.main_bytes, stages.pipeline_bytes)])
}

/// The paper's row of 64 channels and 16384 tokens at length 512.
const ROW: SquareAttention = SquareAttention { batch: 32, heads: 32, len: 512, head_dim: 64 };

/// Two rates in the same unit compared although one counts backward too.
pub(crate) fn numerators_are_one() -> Verdict {
    let flops = numerators(&ROW).expect("sizes");
    check_counts([("operations", flops.forward_flops, flops.both_flops)])
}

/// The exact triangle in place of the paper's half.
pub(crate) fn triangles_for_halves() -> Verdict {
    let flops = numerators(&ROW).expect("sizes");
    check_counts([("operations", flops.valid_cell_forward_flops, flops.causal_forward_flops)])
}

/// 203 of 312 TFLOP/s called the 73 percent.
pub(crate) fn combined_is_forward() -> Verdict {
    let percent = 100.0 * rate_ratio(203e12, 312e12).expect("rates");
    check_counts([("percent", 73, percent.round() as u128)])
}

/// A duration implied by a label of three digits read to the microsecond.
pub(crate) fn implied_durations_are_timings() -> Verdict {
    let flops = numerators(&ROW).expect("sizes").both_flops;
    let microseconds = |rate| (1e6 * implied_seconds(flops, rate).expect("a rate")) as u128;
    check_counts([("microseconds", microseconds(91.4e12), microseconds(90.6e12))])
}

/// The prose's 2.8 in place of the table's ratio.
pub(crate) fn prose_for_table() -> Verdict {
    let ratio = rate_ratio(220.0, 72.0).expect("rates");
    check_counts([("thousandths", 2800, (1000.0 * ratio).round() as u128)])
}

/// A softmax in binary32, shifted by its maximum, said to round nothing.
pub(crate) fn f32_is_exact() -> Verdict {
    let problem = square();
    let tensors = problem.cast::<f32>();
    let had = fa2::forward(&problem.call(&tensors), SQUARE, Saved::Lse).expect("a call");
    check_values("o", &had.o, &problem.dense().o, 0.0)
}

/// Many key tiles with shares of dQ that nearly cancel.
pub(crate) fn long_sum() -> Problem {
    Problem::new(shape(1, (1, 1), (4, 600), (4, 3)), Sight::Full, 9)
}
