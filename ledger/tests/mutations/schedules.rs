//! One schedule's counts taken for another's.

use ferroflash::Align;
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::warps::{Join, split_k};
use ferroflash_ledger::schedule::{Blocks, NoValue, Tensor, fa1, fa2};

use crate::oracle::{Problem, Sight, Verdict, check_counts, shape};

const BLOCKS: Blocks = Blocks { q_block: 3, kv_block: 4 };

fn problem(len: usize, sight: Sight) -> Problem {
    Problem::new(shape(1, (1, 1), (len, len), (4, 4)), sight, 1)
}

/// Tiles that a mask leaves out, left out by every schedule.
pub(crate) fn a_mask_skips_by_itself() -> Verdict {
    let problem = problem(24, Sight::Causal(Align::TopLeft));
    let tensors = problem.cast::<NoValue>();
    let call = problem.call(&tensors);
    let first = fa1::forward(&call, BLOCKS).expect("a call").trace.visits.len();
    let second = fa2::forward(&call, BLOCKS, Saved::Lse).expect("a call").trace.visits.len();
    check_counts([("visits", second as u128, first as u128)])
}

/// Twice the length taken for twice the cells.
pub(crate) fn tiles_make_it_linear() -> Verdict {
    let [short, long] = [24, 48].map(|len| {
        let problem = problem(len, Sight::Full);
        let tensors = problem.cast::<NoValue>();
        let trace =
            fa2::forward(&problem.call(&tensors), BLOCKS, Saved::Lse).expect("a call").trace;
        trace.visits.iter().map(|visit| visit.visible).sum::<u64>()
    });
    check_counts([("cells", u128::from(2 * short), u128::from(long))])
}

/// The row-owned loop called Algorithm 1.
pub(crate) fn the_row_owner_is_algorithm_1() -> Verdict {
    let problem = Problem::new(shape(1, (1, 1), (7, 10), (4, 4)), Sight::Full, 1);
    let tensors = problem.cast::<NoValue>();
    let call = problem.call(&tensors);
    let rows = fa2::forward(&call, BLOCKS, Saved::MaximumAndSum).expect("a call").trace;
    let paper = fa1::forward(&call, BLOCKS).expect("a call").trace;
    check_counts([("words", rows.total(), paper.total())])
}

/// More splits said to cost nothing.
pub(crate) fn splits_are_free() -> Verdict {
    let problem = problem(24, Sight::Full);
    let tensors = problem.cast::<NoValue>();
    let call = problem.call(&tensors);
    let all = std::slice::from_ref(&(0..24));
    let whole = split_k(&call, 8, all, Join::Tree).expect("a call").exchange;
    let split = split_k(&call, 8, &[0..12, 12..24], Join::Tree).expect("a call").exchange;
    check_counts([("merges", whole.merges, split.merges)])
}

/// Shared KV heads said to be loaded once for their group.
pub(crate) fn sharing_is_reuse() -> Verdict {
    let grouped = Problem::new(shape(1, (4, 1), (9, 8), (4, 4)), Sight::Full, 1);
    let tensors = grouped.cast::<NoValue>();
    let trace = fa2::forward(&grouped.call(&tensors), BLOCKS, Saved::Lse).expect("a call").trace;
    check_counts([("words of K", 3 * 8 * 4, trace.of(Tensor::K).reads)])
}
