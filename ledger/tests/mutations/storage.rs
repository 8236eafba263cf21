//! Backward blocks that lack an edge between two uses of shared memory.

use ferroflash_ledger::schedule::hazards::{Barrier, Buffer, Use, races, uses, without};
use ferroflash_ledger::v2_0_0::BackwardLoop;

use crate::oracle::{Check, Verdict, reject};

pub(crate) const SHARED_V: BackwardLoop =
    BackwardLoop { q_tiles: 4, double_buffered_q: true, v_in_registers: false };
pub(crate) const V_IN_REGISTERS: BackwardLoop = BackwardLoop { v_in_registers: true, ..SHARED_V };
pub(crate) const ONE_Q: BackwardLoop = BackwardLoop { double_buffered_q: false, ..SHARED_V };

fn verdict(uses: &[Use], block: &BackwardLoop) -> Verdict {
    match races(uses, block.v_in_registers).first() {
        None => Ok(()),
        Some(race) => reject(Check::Hazard, format!("{race:?}")),
    }
}

/// The block as it should be.
pub(crate) fn whole(block: &BackwardLoop) -> Verdict {
    verdict(&uses(block), block)
}

/// The block without one kind of barrier.
pub(crate) fn lacking(block: &BackwardLoop, barrier: Barrier) -> Verdict {
    verdict(&without(&uses(block), barrier), block)
}

/// dS is stored over V before the warps have waited for V and taken it.
pub(crate) fn ds_before_v_is_taken() -> Verdict {
    let block = V_IN_REGISTERS;
    let mut steps = uses(&block);
    let taken = steps.iter().position(|step| *step == Use::Read(Buffer::V));
    let step = steps.remove(taken.expect("V is read"));
    let stored = steps.iter().position(|step| *step == Use::Write(Buffer::DS));
    steps.insert(stored.expect("dS is written"), step);
    verdict(&steps, &block)
}

/// Copies are committed, and read without waiting.
pub(crate) fn a_commit_publishes() -> Verdict {
    let steps: Vec<Use> = uses(&SHARED_V).into_iter().filter(|step| *step != Use::Wait).collect();
    verdict(&steps, &SHARED_V)
}

/// A block of warps that own their rows, and therefore need no barrier.
pub(crate) fn no_communication() -> Verdict {
    let is_kept = |step: &Use| !matches!(step, Use::Barrier(_));
    let steps: Vec<Use> = uses(&SHARED_V).into_iter().filter(is_kept).collect();
    verdict(&steps, &SHARED_V)
}
