//! A column-owner backward whose every rule can be broken; [`Rules::RIGHT`] gives the gradients.

use ferroflash::{Dropout, DropoutState};
use ferroflash_ledger::schedule::{Binary16, Real};

use super::forward::{self, score};
use crate::oracle::{Check, Dense, Problem, Verdict, check_values, reject};

/// Keys of one column owner's tile.
const KV_BLOCK: usize = 3;

/// What the backward makes of dropout.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Replay {
    /// The forward's mask, by coordinates.
    Coordinates,
    /// A mask of another offset.
    Fresh,
    /// The forward's generator from its seed on, drawn from in the order of the backward's visits.
    Stream,
    /// No mask: only lse was kept.
    None,
}

/// How the tiles' shares of dQ come together.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Update {
    /// Added up, each addition whole.
    Atomic,
    /// Every owner reads the sum before any of them stores.
    Racing,
    /// Added up in binary16.
    Rounded,
}

/// Where 1 / (1 − p̂) is applied.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Keep {
    /// To every probability.
    AtOnce,
    /// To dQ, dK and dV at the end, as flash-attention v2.0.0 does: until then dP is masked only,
    /// and delta is multiplied by 1 − p̂. As right as the other.
    AtTheEnd,
    /// At once, and again where dQ is converted.
    Twice,
}

/// What a backward does. Each field has one right value.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) scale_dq: bool,
    pub(crate) scale_dk: bool,
    pub(crate) scale_dv: bool,
    pub(crate) replay: Replay,
    /// P is rebuilt under the forward's mask.
    pub(crate) mask: bool,
    /// dV takes the dropped probabilities.
    pub(crate) drop_for_dv: bool,
    /// dS takes the undropped probabilities.
    pub(crate) undropped_for_ds: bool,
    pub(crate) keep: Keep,
    /// dQ's scratch is cleared before the owners add to it.
    pub(crate) clear: bool,
    pub(crate) update: Update,
    /// dK and dV of a KV head are summed over its query heads; else the last one's stay.
    pub(crate) sum_group: bool,
    /// Owners are launched for every query head; else for every KV head.
    pub(crate) launch_q_heads: bool,
    /// Warps of a block share its rows, and each stores the dK and dV it has.
    pub(crate) warps_store_dkv: bool,
}

impl Rules {
    pub(crate) const RIGHT: Self = Self {
        scale_dq: true,
        scale_dk: true,
        scale_dv: false,
        replay: Replay::Coordinates,
        mask: true,
        drop_for_dv: true,
        undropped_for_ds: true,
        keep: Keep::AtOnce,
        clear: true,
        update: Update::Atomic,
        sum_group: true,
        launch_q_heads: true,
        warps_store_dkv: false,
    };
}

/// Gradients `[head, row, channel]`.
pub(crate) struct Gradients {
    pub(crate) dq: Vec<f64>,
    pub(crate) dk: Vec<f64>,
    pub(crate) dv: Vec<f64>,
}

/// The multiplier of a probability in the backward.
fn multiplier(problem: &Problem, replay: Replay, head: usize, row: usize, key: usize) -> f64 {
    let other = |dropout: Dropout, further: u64| {
        let DropoutState::Value { seed, offset } = dropout.state else { unreachable!("by value") };
        let dropout = Some(Dropout { state: (seed, offset + further).into(), ..dropout });
        Problem { dropout, ..problem.clone() }.multiplier::<f64>()
    };
    match (replay, problem.dropout) {
        (Replay::None, _) | (_, None) => 1.0,
        (Replay::Coordinates, _) => problem.multiplier::<f64>()(head, row, key),
        (Replay::Fresh, Some(dropout)) => other(dropout, 1)(head, row, key),
        // The forward went through rows and then keys, the backward the other way about.
        (Replay::Stream, Some(_)) => {
            let s = problem.shape;
            let drawn = key * s.q_len + row;
            problem.multiplier::<f64>()(head, drawn / s.kv_len, drawn % s.kv_len)
        }
    }
}

/// The gradients of one item by these rules.
pub(crate) fn backward(problem: &Problem, rules: Rules) -> Gradients {
    let s = problem.shape;
    let (o, lse) = forward::forward(problem, forward::Rules::RIGHT);
    let visible = problem.visible();
    let scale = f64::from(problem.scale);
    let tau = |applies: bool| if applies { scale } else { 1.0 };
    let start = if rules.clear { 0.0 } else { f64::NAN };
    let mut dq = vec![start; s.q_heads * s.q_len * s.head_dim];
    let mut dk = vec![0.0; s.kv_heads * s.kv_len * s.head_dim];
    let mut dv = vec![0.0; s.kv_heads * s.kv_len * s.value_dim];
    let row_of = |values: &[f32], row: usize, width: usize| -> Vec<f64> {
        values[row * width..(row + 1) * width].iter().map(|x| f64::from(*x)).collect()
    };
    let kept = 1.0 - problem.dropout_rate();
    let (in_loop, dq_end, end) = match rules.keep {
        Keep::AtOnce => (1.0, 1.0, 1.0),
        Keep::AtTheEnd => (kept, 1.0 / kept, 1.0 / kept),
        Keep::Twice => (1.0, 1.0 / kept, 1.0),
    };
    let launched = if rules.launch_q_heads { s.q_heads } else { s.kv_heads };
    for head in 0..launched {
        let kv_head = s.kv_head(head);
        for first in (0..s.kv_len).step_by(KV_BLOCK) {
            let before = dq.clone();
            for row in 0..s.q_len {
                let at = head * s.q_len + row;
                if lse[at] == f64::NEG_INFINITY {
                    continue;
                }
                let (q, d_o) =
                    (row_of(&problem.q, at, s.head_dim), row_of(&problem.d_o, at, s.value_dim));
                let delta: f64 = (0..s.value_dim).map(|c| d_o[c] * o[at * s.value_dim + c]).sum();
                for key in first..s.kv_len.min(first + KV_BLOCK) {
                    if rules.mask && !visible.sees(row as u32, key as u32) {
                        continue;
                    }
                    let kv = kv_head * s.kv_len + key;
                    let (k, v) =
                        (row_of(&problem.k, kv, s.head_dim), row_of(&problem.v, kv, s.value_dim));
                    let p = (score(problem, head, kv_head, row, key) - lse[at]).exp();
                    let z = in_loop * multiplier(problem, rules.replay, head, row, key);
                    let d_p: f64 = z * d_o.iter().zip(&v).map(|(a, b)| a * b).sum::<f64>();
                    let ds =
                        if rules.undropped_for_ds { p } else { p * z } * (d_p - in_loop * delta);
                    let p = if rules.drop_for_dv { p * z } else { p };
                    let stores = |sum: f64, term: f64| match rules.warps_store_dkv {
                        true if row % 4 == 0 => term,
                        _ => sum + term,
                    };
                    let last_alone = !rules.sum_group && head % s.group() != s.group() - 1;
                    for c in 0..s.head_dim {
                        let own = &mut dq[at * s.head_dim + c];
                        *own = add(*own, tau(rules.scale_dq) * dq_end * ds * k[c], rules);
                        if !last_alone {
                            let own = &mut dk[kv * s.head_dim + c];
                            *own = stores(*own, tau(rules.scale_dk) * end * ds * q[c]);
                        }
                    }
                    for c in (0..s.value_dim).filter(|_| !last_alone) {
                        let own = &mut dv[kv * s.value_dim + c];
                        *own = stores(*own, tau(rules.scale_dv) * end * p * d_o[c]);
                    }
                }
            }
            if rules.update == Update::Racing && first + KV_BLOCK < s.kv_len {
                // The next owner has read the sum already.
                dq = before;
            }
        }
    }
    Gradients { dq, dk, dv }
}

fn add(sum: f64, term: f64, rules: Rules) -> f64 {
    match rules.update {
        Update::Rounded => (Binary16::from_f64(sum) + Binary16::from_f64(term)).to_f64(),
        Update::Atomic | Update::Racing => sum + term,
    }
}

/// The backward by these rules, held against dense gradients.
pub(crate) fn verdict(problem: &Problem, rules: Rules) -> Verdict {
    let Dense { dq, dk, dv, .. } = problem.dense();
    let had = backward(problem, rules);
    check_values("dq", &had.dq, &dq, 1e-12)?;
    check_values("dk", &had.dk, &dk, 1e-12)?;
    check_values("dv", &had.dv, &dv, 1e-12)
}

/// dQ summed up in 16 bits is held to what rounding once to 16 bits costs.
pub(crate) fn rounded_once(problem: &Problem, update: Update) -> Verdict {
    let exact = problem.dense().dq;
    let had = backward(problem, Rules { update, ..Rules::RIGHT }).dq;
    let converted = had.iter().map(|x| Binary16::from_f64(*x).to_f64());
    // Half a unit in the last place of the largest gradient.
    check_values("dq", &converted.collect::<Vec<_>>(), &exact, 0.5 / 1024.0)
}

/// Atomic additions in two orders of arrival, which a fixed order would make one.
pub(crate) fn arrival_orders(terms: [f32; 3], sorted: bool) -> Verdict {
    let sum = |mut terms: [f32; 3], order: [usize; 3]| {
        if sorted {
            terms.sort_by(f32::total_cmp);
            return terms.iter().sum::<f32>();
        }
        order.iter().map(|at| terms[*at]).sum()
    };
    let (one, other) = (sum(terms, [0, 1, 2]), sum(terms, [0, 2, 1]));
    if one.to_bits() == other.to_bits() {
        return Ok(());
    }
    reject(Check::Order, format!("{one} in one order, {other} in another"))
}
