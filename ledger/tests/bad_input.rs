//! No sizes make a function of the ledger panic: it has a figure, or an error that names a field.

use ferroflash_ledger::backward::{AccumulatorTile, accumulators, scratch};
use ferroflash_ledger::benchmark::{ModelCall, SquareAttention};
use ferroflash_ledger::bounds::{TwoLevel, bounds};
use ferroflash_ledger::device::DEVICES;
use ferroflash_ledger::materialized::{Softmax, Widths, materialized};
use ferroflash_ledger::movement::{MovementWidths, movement, order_visits};
use ferroflash_ledger::residency::{BlockResources, residency};
use ferroflash_ledger::row_work::{Normalization, RowTiles, delayed_saving, retained_work};
use ferroflash_ledger::shared::{BackwardTile, ForwardTile, backward_shared, forward_shared};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::split::{SplitTile, split_keys};
use ferroflash_ledger::stages::{StagedCall, backward_stages, forward_stages, pair_flops};
use ferroflash_ledger::tiles::{CausalAlign, TiledMask, gradient_producers};
use ferroflash_ledger::v2_0_0::{BackwardLoop, barriers, causal_key_loop, head_widths};
use ferroflash_ledger::words::{Order, Tiled, backward_words, forward_words, paper_blocks};
use ferroflash_ledger::{Result, benchmark, launch, materialized as stored, residency as fill};
use proptest::prelude::*;

/// Nothing, little, more than a kernel takes, and as much as there is.
fn size() -> impl Strategy<Value = u64> {
    let ends = [0, 1, 2, 3, 64, 1000, (1 << 28) + 1, 1 << 32, 1 << 63, u64::MAX];
    prop::sample::select(ends.to_vec())
}

fn align() -> impl Strategy<Value = CausalAlign> {
    let all = [CausalAlign::None, CausalAlign::TopLeft, CausalAlign::BottomRight];
    prop::sample::select(all.to_vec())
}

/// A figure, or words that begin with a field's name.
fn sound<T>(result: Result<T>) -> std::result::Result<(), TestCaseError> {
    if let Err(why) = result {
        let words = why.to_string();
        let field = words.split(':').next().unwrap_or_default();
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        prop_assert!(!field.is_empty() && field.chars().all(is_name), "{words}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn calls(s in prop::array::uniform7(size()), w in prop::array::uniform4(size()),
        align in align()) {
        let [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim] = s;
        let sizes = Sizes { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let [a, b, c, d] = w;
        sound(sizes.values())?;
        sound(materialized(&sizes, &Widths { qkv: a, score: b, probability: c, output: d }))?;
        sound(stored::row_state_bytes(&sizes, a, b))?;
        sound(launch::head_programs(&sizes, a, b))?;
        sound(launch::surfaces(&sizes, a, b))?;
        sound(launch::backward_grids(&sizes, a, b))?;
        sound(scratch(&sizes, a, b))?;
        let call = StagedCall {
            sizes, align, q_block: a, kv_block: b, element_bytes: c, accumulator_bytes: d,
        };
        sound(forward_stages(&call))?;
        sound(backward_stages(&call))?;
        let mask = TiledMask { q_len, kv_len, q_block: a, kv_block: b, align };
        sound(gradient_producers(&mask, &sizes))?;
        sound(causal_key_loop(&mask))?;
    }

    #[test]
    fn tiles(s in prop::array::uniform5(size()), w in prop::array::uniform3(size()),
        flags in any::<[bool; 2]>()) {
        let [q_len, kv_len, head_dim, q_block, kv_block] = s;
        let tiled = Tiled { q_len, kv_len, head_dim, q_block, kv_block };
        let [input, output, state] = w;
        sound(movement(&tiled, &MovementWidths { input, output, state }))?;
        sound(order_visits(&tiled))?;
        sound(forward_words(&tiled, Order::KvOuter, input))?;
        sound(forward_words(&tiled, Order::QOuter, 2))?;
        sound(backward_words(&tiled))?;
        sound(paper_blocks(q_len, head_dim))?;
        sound(bounds(&TwoLevel { len: q_len, head_dim, on_chip_words: kv_len }))?;
        sound(stored::softmax_accesses(Softmax::Safe, q_len))?;
        let row = RowTiles { kv_tiles: q_len, kv_block, value_dim: head_dim };
        sound(retained_work(&row))?;
        sound(delayed_saving(&row, Normalization::Product))?;
        sound(pair_flops(q_block, kv_block, head_dim))?;
        let [share_q_and_k, v_in_registers] = flags;
        sound(forward_shared(&ForwardTile {
            head_dim, q_block, kv_block, element_bytes: input, share_q_and_k,
        }))?;
        sound(backward_shared(&BackwardTile {
            head_dim, q_block, kv_block, element_bytes: input,
            double_buffered_q: share_q_and_k, v_in_registers,
        }))?;
        sound(accumulators(&AccumulatorTile {
            head_dim, q_block, kv_block, warps: output, score_warps_along_rows: state,
        }))?;
        sound(split_keys(&SplitTile {
            q_block, value_dim: head_dim, warps: input, scalar_bytes: output,
        }))?;
        sound(head_widths(head_dim))?;
        sound(barriers(&BackwardLoop {
            q_tiles: q_len, double_buffered_q: share_q_and_k, v_in_registers,
        }))?;
    }

    #[test]
    fn launches_and_rates(s in prop::array::uniform5(size()), seconds in any::<f64>(),
        device in 0..DEVICES.len()) {
        let [a, b, c, d, e] = s;
        let device = &DEVICES[device];
        let block =
            BlockResources { warps: a, shared_bytes: b, registers_per_thread: Some(c) };
        sound(residency(&block, device))?;
        sound(fill::register_budget(a, b, device))?;
        sound(fill::waves(u128::from(a) * u128::from(b), c, d))?;
        sound(fill::first_wave(a, b, c))?;
        sound(launch::forward_grid(a, b, c, d))?;
        sound(launch::populations(&launch::Packed {
            q_heads: a, q_block: b, q_lens: vec![c, d], kv_lens: vec![e, c],
        }))?;
        sound(benchmark::numerators(&SquareAttention { batch: a, heads: b, len: c, head_dim: d }))?;
        sound(benchmark::batch_at_fixed_tokens(a, b))?;
        sound(benchmark::implied_seconds(a.into(), seconds))?;
        sound(benchmark::rate_ratio(seconds, seconds))?;
        sound(benchmark::model_flops(&ModelCall { len: a, parameters: b, layers: c, width: d }))?;
        sound(benchmark::model_rate(a.into(), b, c, seconds))?;
    }
}
