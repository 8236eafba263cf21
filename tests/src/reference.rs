//! Attention and its gradients by definition, one cell at a time, in binary64.
//!
//! Written without the library's CPU code, so that the oracle itself is compared with something.

use ferroflash_core::dropout::DropoutMask;

use crate::backend::{Grads, Outcome};
use crate::case::Case;
use crate::element::Real;
use crate::memory::Owned;

/// An item: its number, its first rows of q and k, and its lengths.
struct Item {
    number: usize,
    first: [usize; 2],
    q_len: usize,
    kv_len: usize,
}

fn items<T: Real>(case: &Case<T>) -> Vec<Item> {
    let s = case.attention.shape();
    let item = |number: usize| {
        if let Some(packed) = &case.packed {
            let span = |offsets: &[i32], used: &Option<Vec<i32>>| {
                let (first, end) = (offsets[number] as usize, offsets[number + 1] as usize);
                (first, used.as_ref().map_or(end - first, |used| used[number] as usize))
            };
            let (q, k) = (span(&packed.cu_q, &packed.used_q), span(&packed.cu_k, &packed.used_k));
            return Item { number, first: [q.0, k.0], q_len: q.1, kv_len: k.1 };
        }
        let kv_len = case.key_lengths.as_ref().map_or(s.kv_len, |keys| keys[number] as usize);
        Item { number, first: [number * s.q_len, number * s.kv_len], q_len: s.q_len, kv_len }
    };
    (0..s.batch).map(item).collect()
}

/// A case's numbers, and results that are filled in row by row.
struct Sums<'c, T> {
    case: &'c Case<T>,
    keep: Option<&'c [f64]>,
    dropout: Option<DropoutMask>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    bias: Vec<f64>,
    slopes: Vec<f64>,
    sink: Vec<f64>,
    d_o: Vec<f64>,
    d_lse: Vec<f64>,
    outcome: Outcome,
    grads: Grads,
}

/// o, lse and every gradient. Cubic in plain loops: for small calls.
pub fn attend<T: Real>(case: &Case<T>) -> (Outcome, Grads) {
    attend_with(case, None)
}

/// The same under a dropout mask that is written out: the factor of each `[head, row, key]` of the
/// only item.
pub fn attend_with<T: Real>(case: &Case<T>, keep: Option<&[f64]>) -> (Outcome, Grads) {
    let contents = |owned: &Option<&Owned<f32>>| owned.map(Owned::contents).unwrap_or_default();
    let bias = case.bias.as_ref().map(|(_, bias)| bias);
    let zeros = |count: usize| vec![0.0; count];
    let mut sums = Sums {
        case,
        keep,
        dropout: case.dropout_mask(),
        q: case.q.contents(),
        k: case.k.contents(),
        v: case.v.contents(),
        bias: contents(&bias),
        slopes: contents(&case.alibi_slopes.as_ref()),
        sink: contents(&case.sink.as_ref()),
        d_o: case.d_o.contents(),
        d_lse: contents(&case.d_lse.as_ref()),
        outcome: Outcome {
            o: zeros(case.o_dims.iter().product()),
            lse: vec![f64::NEG_INFINITY; case.lse_dims.iter().product()],
        },
        grads: Grads {
            dq: zeros(case.q.count()),
            dk: zeros(case.k.count()),
            dv: zeros(case.v.count()),
            dbias: bias.map(|bias| zeros(bias.count())),
            dsink: case.sink.as_ref().map(|sink| zeros(sink.count())),
        },
    };
    for item in items(case) {
        for head in 0..case.attention.shape().q_heads {
            for row in 0..item.q_len {
                sums.row(&item, head, row);
            }
        }
    }
    (sums.outcome, sums.grads)
}

/// A visible cell of a row.
struct Cell {
    /// Offset of the key's channels in k, and of its value's in v.
    at: [usize; 2],
    /// Offset of its bias.
    bias: usize,
    score: f64,
    /// Derivative of the score by the scaled product.
    slope: f64,
    /// Dropout factor.
    keep: f64,
}

impl<T: Real> Sums<'_, T> {
    fn row(&mut self, item: &Item, head: usize, row: usize) {
        let s = *self.case.attention.shape();
        let at_q = ((item.first[0] + row) * s.q_heads + head) * s.head_dim;
        let at_o = ((item.first[0] + row) * s.q_heads + head) * s.value_dim;
        let at_lse = match self.case.packed {
            Some(_) => head * self.case.lse_dims[1] + item.first[0] + row,
            None => (item.number * s.q_heads + head) * s.q_len + row,
        };
        let cells: Vec<Cell> =
            (0..item.kv_len).filter_map(|key| self.cell(item, head, row, key, at_q)).collect();
        let sink = self.sink.get(head).copied();
        let max = cells.iter().map(|cell| cell.score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return;
        }
        let total: f64 =
            cells.iter().map(|cell| cell.score).chain(sink).map(|s| (s - max).exp()).sum();
        let lse = max + total.ln();
        self.outcome.lse[at_lse] = lse;
        let d_o = self.d_o[at_o..][..s.value_dim].to_vec();
        for cell in &cells {
            let p = (cell.score - lse).exp() * cell.keep;
            for (channel, d_o) in d_o.iter().enumerate() {
                self.outcome.o[at_o + channel] += p * self.v[cell.at[1] + channel];
                self.grads.dv[cell.at[1] + channel] += p * d_o;
            }
        }
        let o = &self.outcome.o[at_o..][..s.value_dim];
        let delta = dot(&d_o, o) - self.d_lse.get(at_lse).copied().unwrap_or(0.0);
        for cell in &cells {
            let p = (cell.score - lse).exp();
            let d_p = cell.keep * dot(&d_o, &self.v[cell.at[1]..][..s.value_dim]);
            let d_score = p * (d_p - delta);
            if let Some(dbias) = &mut self.grads.dbias {
                dbias[cell.bias] += d_score;
            }
            let d_product = d_score * cell.slope * f64::from(self.case.scale);
            for channel in 0..s.head_dim {
                self.grads.dq[at_q + channel] += d_product * self.k[cell.at[0] + channel];
                self.grads.dk[cell.at[0] + channel] += d_product * self.q[at_q + channel];
            }
        }
        if let (Some(dsink), Some(sink)) = (&mut self.grads.dsink, sink) {
            dsink[head] -= (sink - lse).exp() * delta;
        }
    }

    fn cell(&self, item: &Item, head: usize, row: usize, key: usize, at_q: usize) -> Option<Cell> {
        let s = self.case.attention.shape();
        let broadcast = |axes: ferroflash::Broadcast| {
            let axis = |one: bool, index: usize| if one { 0 } else { index };
            let heads = if axes.heads { 1 } else { s.q_heads };
            let rows = if axes.rows { 1 } else { s.q_len };
            let head = axis(axes.batch, item.number) * heads + axis(axes.heads, head);
            (head * rows + axis(axes.rows, row)) * s.kv_len + key
        };
        if !self.case.sight.sees(row, key, item.q_len, item.kv_len) {
            return None;
        }
        if let Some((axes, mask)) = &self.case.boolean_mask
            && mask[broadcast(*axes)] == 0
        {
            return None;
        }
        let bias = self.case.bias.as_ref().map(|(axes, _)| broadcast(*axes));
        let kv_row = (item.first[1] + key) * s.kv_heads + head / (s.q_heads / s.kv_heads);
        let at = [kv_row * s.head_dim, kv_row * s.value_dim];
        let product = dot(&self.q[at_q..][..s.head_dim], &self.k[at[0]..][..s.head_dim]);
        let mut score = f64::from(self.case.scale) * product;
        let mut slope = 1.0;
        if let Some(cap) = self.case.softcap.map(f64::from) {
            let tanh = (score / cap).tanh();
            (score, slope) = (cap * tanh, 1.0 - tanh * tanh);
        }
        if !self.slopes.is_empty() {
            let own = (item.number * s.q_heads + head) % self.slopes.len();
            let distance = row as f64 + item.kv_len as f64 - item.q_len as f64 - key as f64;
            score -= self.slopes[own] * distance.abs();
        }
        score += bias.map_or(0.0, |bias| self.bias[bias]);
        let keep = self.dropout.map_or(1.0, |mask| {
            let kept = mask.keeps((item.number * s.q_heads + head) as u32, row as u32, key as u32);
            if kept { mask.keep_scale_f64() } else { 0.0 }
        });
        let keep =
            self.keep.map_or(keep, |factors| factors[(head * s.q_len + row) * s.kv_len + key]);
        let cell = Cell { at, bias: bias.unwrap_or(0), score, slope, keep };
        (score != f64::NEG_INFINITY).then_some(cell)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
