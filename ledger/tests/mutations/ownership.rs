//! Programs and warps that do not own what they write, and tiles that nobody works on.

use ferroflash::Align;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::Visibility;
use ferroflash_ledger::schedule::fa2::Saved;
use ferroflash_ledger::schedule::warps::{Join, rows_of_warp, split_k};
use ferroflash_ledger::schedule::{Blocks, Call, Tensor, Trace, fa2, row_owner};

use crate::oracle::{Check, Problem, Sight, Verdict, check_owner, check_values, reject, shape};

const BLOCKS: Blocks = Blocks { q_block: 4, kv_block: 3 };

fn problem() -> Problem {
    Problem::new(shape(1, (1, 1), (10, 8), (4, 3)), Sight::Full, 5)
}

/// Each warp's partial state of a row stored as the row.
pub(crate) fn partials_are_rows() -> Verdict {
    let problem = problem();
    let tensors = problem.cast::<f64>();
    let call = problem.call(&tensors);
    let had = split_k(&call, 10, &[0..4, 4..8], Join::Tree).expect("a call");
    let mut trace = Trace::default();
    for (row, warps) in had.exchange.producers.iter().enumerate() {
        let writers = trace.producers.entry((Tensor::O, 0, row)).or_default();
        writers.extend(0..*warps as u64);
    }
    check_owner(&trace, Tensor::O, 1, 10)
}

/// dK and dV of a tile written by whoever has a share of it, as the row owner's would be.
pub(crate) fn two_owners_of_a_column() -> Verdict {
    let problem = problem();
    let tensors = problem.cast::<f64>();
    let call = problem.call(&tensors);
    let saved = fa2::forward(&call, BLOCKS, Saved::Lse).expect("a call");
    let had = row_owner::backward(&call, BLOCKS, &saved, &tensors.d_o).expect("a call");
    check_owner(&had.trace, Tensor::Scratch, 1, 3)
}

/// Output programs for the KV heads alone.
pub(crate) fn programs_over_kv_heads() -> Verdict {
    let grouped = Problem::new(shape(1, (4, 2), (10, 8), (4, 3)), Sight::Full, 5);
    let s = grouped.shape;
    let launched = Shape { q_heads: s.kv_heads, ..s };
    let fewer = Problem::new(launched, Sight::Full, 5);
    let tensors = fewer.cast::<f64>();
    let had = fa2::forward(&fewer.call(&tensors), BLOCKS, Saved::Lse).expect("a call");
    check_owner(&had.trace, Tensor::O, s.q_heads, 3)
}

/// A quarter of the rows to each of four warps, as the paper's figure draws it.
pub(crate) fn quarters_for_bands() -> Verdict {
    for warp in 0..4 {
        let quarter: Vec<usize> = (warp * 32..(warp + 1) * 32).collect();
        let had = rows_of_warp(128, 4, warp);
        if had != quarter {
            return reject(Check::Ownership, format!("warp {warp} owns {had:?}"));
        }
    }
    Ok(())
}

/// Tiles by their ordinals: tile j of row tile i if j ≤ i.
pub(crate) fn tiles_by_ordinals() -> Verdict {
    let problem =
        Problem::new(shape(1, (1, 1), (12, 12), (4, 3)), Sight::Causal(Align::TopLeft), 5);
    let tensors = problem.cast::<f64>();
    let mut trace =
        fa2::forward(&problem.call(&tensors), BLOCKS, Saved::Lse).expect("a call").trace;
    trace.visits.retain(|visit| visit.kv_tile <= visit.q_tile);
    problem.check_coverage(&trace, BLOCKS)
}

/// A packed item of five rows whose diagonal is put where the longest item, of eight, has it.
pub(crate) fn lengths_of_the_longest() -> Verdict {
    let align = Align::BottomRight;
    let item = Problem::new(shape(1, (1, 1), (5, 5), (4, 3)), Sight::Causal(align), 5);
    let tensors = item.cast::<f64>();
    let offset = align.offset(8, 5) as i32;
    let visible = Visibility { offset, ..item.visible() };
    let (q, k, v) = (&tensors.q, &tensors.k, &tensors.v);
    let call = Call::new(item.shape, visible, f64::from(item.scale), q, k, v).expect("a call");
    let had = fa2::forward(&call, BLOCKS, Saved::Lse).expect("a call");
    item.check_coverage(&had.trace, BLOCKS)?;
    check_values("o", &had.o, &item.dense().o, 1e-12)
}

/// The backward said to have no split of the keys, so that one program makes each dQ.
pub(crate) fn no_split_of_keys_anywhere() -> Verdict {
    let problem = problem();
    let tensors = problem.cast::<f64>();
    let call = problem.call(&tensors);
    let saved = fa2::forward(&call, BLOCKS, Saved::Lse).expect("a call");
    let had = fa2::backward(&call, BLOCKS, &saved, &tensors.d_o).expect("a call");
    check_owner(&had.trace, Tensor::Scratch, 1, 3)
}
