//! Gradients of one KV head: the query heads that share it, row by row.

use super::{Head, KvHead, Upstream, accumulate, dot, widen};
use crate::element::Element;

/// Gradients of one KV head of one item.
pub(super) struct KvHeadGradients {
    /// `[key, head_dim]`.
    pub(super) dk: Vec<f64>,
    /// `[key, value_dim]`.
    pub(super) dv: Vec<f64>,
    /// Those of the query heads that share it.
    pub(super) heads: Vec<HeadGradients>,
}

/// Gradients of one query head of one item.
pub(super) struct HeadGradients {
    pub(super) q_head: usize,
    /// `[row, head_dim]`.
    pub(super) dq: Vec<f64>,
    /// dS, `[row, key]`, if there is a bias that it is the gradient of.
    pub(super) d_scores: Option<Vec<f64>>,
    pub(super) dsink: f64,
}

impl KvHead {
    /// Gradients of the heads' inputs, with dk and dv summed over the heads.
    pub(super) fn backward<'p, 'a: 'p, T: Element>(
        &self,
        heads: impl Iterator<Item = Head<'p, 'a, T>>,
        upstream: &Upstream<'_, T>,
    ) -> KvHeadGradients {
        let mut dk = vec![0.0; self.keys.len()];
        let mut dv = vec![0.0; self.values.len()];
        let heads = heads.map(|head| head.backward(upstream, &mut dk, &mut dv)).collect();
        KvHeadGradients { dk, dv, heads }
    }
}

impl<T: Element> Head<'_, '_, T> {
    fn backward(
        &self,
        upstream: &Upstream<'_, T>,
        dk: &mut [f64],
        dv: &mut [f64],
    ) -> HeadGradients {
        let Self { problem, item, q_head, kv, precision } = *self;
        let (q_len, kv_len) = (item.q_len(), kv.kv_len);
        let (head_dim, value_dim) = (problem.shape().head_dim, problem.shape().value_dim);
        let scale = f64::from(problem.scale);
        let mut dq = vec![0.0; q_len * head_dim];
        let mut d_scores = problem.attention.bias.map(|_| vec![0.0; q_len * kv_len]);
        let mut dsink = 0.0;

        for row in 0..q_len {
            let index = item.q_index(row, q_head);
            let d_lse = upstream
                .d_lse
                .map_or(0.0, |d_lse| f64::from(d_lse[problem.lse_index(item, q_head, row)]));
            let cells = self.cells(row);
            let softmax = self.softmax(&cells);
            if cells.is_empty() {
                // o is 0 whatever dO is, and lse is the sink's logit, if there is one.
                dsink += softmax.sink * d_lse;
                continue;
            }
            let query = widen(problem.q.row(index));
            let d_o = widen(upstream.d_o.row(index));
            let o = self.output(row, &cells, &softmax);
            let delta = precision.state(dot(&d_o, &o) - d_lse);
            dsink -= softmax.sink * delta;

            let dq = &mut dq[row * head_dim..(row + 1) * head_dim];
            for cell in &cells {
                let key = cell.key;
                let p = (cell.score - softmax.lse).exp();
                let factor = self.dropout_factor(row, key);
                let mut d_p = 0.0;
                if factor != 0.0 {
                    d_p = factor * dot(&d_o, self.value(key));
                    let dv = &mut dv[key * value_dim..(key + 1) * value_dim];
                    accumulate(dv, precision.operand(p) * factor, &d_o);
                }
                let d_score = p * (d_p - delta);
                if let Some(d_scores) = &mut d_scores {
                    d_scores[row * kv_len + key] = d_score;
                }
                let d_product = scale * precision.operand(d_score * cell.cap_slope);
                accumulate(dq, d_product, self.key(key));
                accumulate(&mut dk[key * head_dim..(key + 1) * head_dim], d_product, &query);
            }
        }
        HeadGradients { q_head, dq, d_scores, dsink }
    }
}
