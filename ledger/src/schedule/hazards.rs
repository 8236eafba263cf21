//! Shared memory of one backward block: who uses it when, and what only a barrier keeps apart
//! (M4.4 §0x06.2D–0x06.2F).
//!
//! The block owns a K/V tile and runs a fixed list of uses; every warp runs the whole list, each at
//! its own pace. Two warps are ordered only by a barrier. A copy that was started is done when its
//! own warp has waited for it, and for the others at the next barrier after that: committing a
//! group of copies orders nothing. Buffers overlap where the plan lays one over another.

use crate::v2_0_0::BackwardLoop;

/// A tile in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// Queries, by stage.
    Q(u64),
    /// Gradients of the outputs.
    DO,
    /// Keys.
    K,
    /// Values.
    V,
    /// Gradients of the scores.
    DS,
    /// Probabilities.
    P,
    /// dK on its way out, over K.
    DK,
    /// dV on its way out, over V and what follows it.
    DV,
}

/// What a barrier is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Barrier {
    /// Copied V is there to be taken into registers.
    CaptureV,
    /// Copied operands are there.
    Operands,
    /// P and dS of every warp are there.
    Scores,
    /// dO was read by every warp, and may be copied over.
    DO,
    /// Q was read by every warp, and may be copied over.
    Q,
    /// K, V, P and dS were read by every warp, and the results may be laid over them.
    Epilogue,
    /// The results of every warp are there to be copied out.
    Results,
}

/// One step of every warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Starts to copy its part of a tile from global memory.
    Copy(Buffer),
    /// Makes a group of the copies started.
    Commit,
    /// Waits for its own groups.
    Wait,
    /// Waits for all warps.
    Barrier(Barrier),
    /// Reads a tile, also other warps' parts.
    Read(Buffer),
    /// Writes its part of a tile.
    Write(Buffer),
}

/// The uses of one block in the order of flash-attention v2.0.0, with the barrier before the
/// epilogue wherever it is needed: v2.0.0 has it only where V is in registers.
pub fn uses(block: &BackwardLoop) -> Vec<Use> {
    let stage = |tile: u64| if block.double_buffered_q { tile % 2 } else { 0 };
    let mut uses = Vec::new();
    if block.v_in_registers {
        uses.extend([Use::Copy(Buffer::V), Use::Commit, Use::Wait]);
        uses.extend([Use::Barrier(Barrier::CaptureV), Use::Read(Buffer::V)]);
    } else {
        uses.push(Use::Copy(Buffer::V));
    }
    uses.extend([Use::Copy(Buffer::Q(0)), Use::Copy(Buffer::DO), Use::Copy(Buffer::K)]);
    uses.push(Use::Commit);
    for tile in 0..block.q_tiles {
        let (q, next, is_last) = (stage(tile), stage(tile + 1), tile + 1 == block.q_tiles);
        uses.extend([Use::Wait, Use::Barrier(Barrier::Operands)]);
        // S = Q·Kᵀ, then P; dP = dO·Vᵀ, then dS.
        uses.extend([Use::Read(Buffer::Q(q)), Use::Read(Buffer::K), Use::Write(Buffer::P)]);
        uses.push(Use::Read(Buffer::DO));
        if !block.v_in_registers {
            uses.push(Use::Read(Buffer::V));
        }
        if block.double_buffered_q && !is_last {
            uses.extend([Use::Copy(Buffer::Q(next)), Use::Commit]);
        }
        uses.extend([Use::Write(Buffer::DS), Use::Barrier(Barrier::Scores)]);
        // dV += Pᵀ·dO.
        uses.extend([Use::Read(Buffer::P), Use::Read(Buffer::DO), Use::Barrier(Barrier::DO)]);
        if !is_last {
            uses.extend([Use::Copy(Buffer::DO), Use::Commit]);
        }
        // dQ = dS·K, then dK += dSᵀ·Q.
        uses.extend([Use::Read(Buffer::DS), Use::Read(Buffer::K), Use::Read(Buffer::Q(q))]);
        if !block.double_buffered_q && !is_last {
            uses.extend([Use::Barrier(Barrier::Q), Use::Copy(Buffer::Q(next)), Use::Commit]);
        }
    }
    uses.push(Use::Barrier(Barrier::Epilogue));
    uses.extend([Use::Write(Buffer::DK), Use::Write(Buffer::DV)]);
    uses.extend([Use::Barrier(Barrier::Results), Use::Read(Buffer::DK), Use::Read(Buffer::DV)]);
    uses
}

/// The uses without barriers of one kind.
pub fn without(uses: &[Use], barrier: Barrier) -> Vec<Use> {
    uses.iter().copied().filter(|step| *step != Use::Barrier(barrier)).collect()
}

/// How many barriers a warp passes.
pub fn barriers(uses: &[Use]) -> u128 {
    uses.iter().filter(|step| matches!(step, Use::Barrier(_))).count() as u128
}

/// Two uses of the same memory that nothing keeps apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Race {
    /// The use that comes first in the list.
    pub first: Use,
    /// The use that another warp may get to before the first is done.
    pub second: Use,
}

/// Every pair of uses that race; `v_in_registers` says whether dS lies over V.
pub fn races(uses: &[Use], v_in_registers: bool) -> Vec<Race> {
    let mut races = Vec::new();
    for (at, first) in uses.iter().enumerate() {
        let Some(done) = done(uses, at) else { continue };
        for (place, second) in uses.iter().enumerate().skip(at + 1) {
            let between = uses.get(done + 1..place).unwrap_or_default();
            let is_ordered = between.iter().any(|step| matches!(step, Use::Barrier(_)));
            if conflict(*first, *second, v_in_registers) && !is_ordered {
                races.push(Race { first: *first, second: *second });
            }
        }
    }
    races
}

/// The step with which the use at `at` is done for its own warp; none for what uses no memory.
fn done(uses: &[Use], at: usize) -> Option<usize> {
    match uses[at] {
        Use::Read(_) | Use::Write(_) => Some(at),
        Use::Copy(_) => {
            let after = |from: usize, step: Use| {
                (from..uses.len()).find(|at| uses[*at] == step).unwrap_or(uses.len())
            };
            Some(after(after(at, Use::Commit), Use::Wait))
        }
        Use::Commit | Use::Wait | Use::Barrier(_) => None,
    }
}

/// Whether two warps must not be at these uses together. Warps write parts of their own of one
/// buffer, but not of two that overlap.
fn conflict(first: Use, second: Use, v_in_registers: bool) -> bool {
    let memory = |step| match step {
        Use::Read(buffer) => Some((buffer, false)),
        Use::Write(buffer) | Use::Copy(buffer) => Some((buffer, true)),
        Use::Commit | Use::Wait | Use::Barrier(_) => None,
    };
    let (Some((a, writes_a)), Some((b, writes_b))) = (memory(first), memory(second)) else {
        return false;
    };
    if a == b {
        writes_a != writes_b
    } else {
        (writes_a || writes_b) && overlap(a, b, v_in_registers)
    }
}

fn overlap(a: Buffer, b: Buffer, v_in_registers: bool) -> bool {
    let pair = |x, y| (a, b) == (x, y) || (b, a) == (x, y);
    let ds_over_v = v_in_registers && pair(Buffer::V, Buffer::DS);
    let results = pair(Buffer::K, Buffer::DK) || pair(Buffer::V, Buffer::DV);
    ds_over_v || results || (v_in_registers && pair(Buffer::DS, Buffer::DV))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every branch, with a few query tiles.
    fn blocks() -> impl Iterator<Item = BackwardLoop> {
        (0..12).map(|n| BackwardLoop {
            q_tiles: 1 + n / 4,
            double_buffered_q: n % 2 == 0,
            v_in_registers: n / 2 % 2 == 0,
        })
    }

    #[test]
    fn the_ledger_counts_what_no_race_is_left_with() {
        let long = blocks().take(4).map(|block| BackwardLoop { q_tiles: 32, ..block });
        for block in blocks().chain(long) {
            let uses = uses(&block);
            assert_eq!(races(&uses, block.v_in_registers), [], "{block:?}");
            let ledger = crate::v2_0_0::barriers(&block).expect("a loop");
            assert_eq!(barriers(&uses), ledger.race_free, "{block:?}");
            let historical =
                if block.v_in_registers { uses } else { without(&uses, Barrier::Epilogue) };
            assert_eq!(barriers(&historical), ledger.total, "{block:?}");
            // v2.0.0 lays dK over a K that the last dQ product of another warp still reads.
            let is_read = Race { first: Use::Read(Buffer::K), second: Use::Write(Buffer::DK) };
            let historical = races(&historical, block.v_in_registers);
            assert_eq!(historical.contains(&is_read), !block.v_in_registers, "{block:?}");
        }
    }

    #[test]
    fn every_barrier_is_needed_in_some_branch_and_none_without_reason() {
        let kinds = [
            Barrier::CaptureV,
            Barrier::Operands,
            Barrier::Scores,
            Barrier::DO,
            Barrier::Q,
            Barrier::Epilogue,
            Barrier::Results,
        ];
        for barrier in kinds {
            for block in blocks().filter(|block| block.q_tiles > 1) {
                let whole = uses(&block);
                let fewer = without(&whole, barrier);
                let is_raced = !races(&fewer, block.v_in_registers).is_empty();
                assert_eq!(is_raced, fewer != whole, "{barrier:?} of {block:?}");
            }
        }
    }

    /// M4.4 §0x06.2E, with what its table leaves out: the barrier after P and dS is what P's
    /// readers need, while dQ and dK would be kept from dS by the next one.
    #[test]
    fn each_barrier_keeps_apart_what_it_is_for() {
        use Buffer::{DK, DO, DS, K, P, Q, V};
        let block = |double_buffered_q, v_in_registers| BackwardLoop {
            q_tiles: 3,
            double_buffered_q,
            v_in_registers,
        };
        let (shared, registers, one_q) =
            (block(true, false), block(true, true), block(false, false));
        for (block, barrier, first, second) in [
            (registers, Barrier::CaptureV, Use::Copy(V), Use::Read(V)),
            (shared, Barrier::Operands, Use::Copy(DO), Use::Read(DO)),
            (shared, Barrier::Scores, Use::Write(P), Use::Read(P)),
            (shared, Barrier::DO, Use::Read(DO), Use::Copy(DO)),
            (one_q, Barrier::Q, Use::Read(Q(0)), Use::Copy(Q(0))),
            (shared, Barrier::Epilogue, Use::Read(K), Use::Write(DK)),
            (shared, Barrier::Results, Use::Write(DK), Use::Read(DK)),
        ] {
            let left = races(&without(&uses(&block), barrier), block.v_in_registers);
            assert!(left.contains(&Race { first, second }), "{barrier:?}: {left:?}");
        }
        let of_ds = Race { first: Use::Write(DS), second: Use::Read(DS) };
        let without_scores = without(&uses(&shared), Barrier::Scores);
        assert!(!races(&without_scores, false).contains(&of_ds));
        assert!(races(&without(&without_scores, Barrier::DO), false).contains(&of_ds));
    }
}
