//! Scores, softmax and output of one query head.

use super::{Head, accumulate, dot, widen};
use crate::element::Element;

/// A key that a row sees.
pub(super) struct Cell {
    pub(super) key: usize,
    /// Its final score: scaled, capped and biased.
    pub(super) score: f64,
    /// Derivative of the score by the scaled product: 1, or `1 − tanh²` under a softcap.
    pub(super) cap_slope: f64,
}

/// The softmax of a row.
pub(super) struct Softmax {
    /// Largest score of a key, −∞ if the row sees none.
    pub(super) row_max: f64,
    /// Log of the sum of every key's exponential and the sink's.
    pub(super) lse: f64,
    /// What `Σ exp(s − row_max)·v` is multiplied by to give o.
    pub(super) normalizer: f64,
    /// Probability of the sink, 0 where there is none.
    pub(super) sink: f64,
}

/// Results of a row.
pub(super) struct Row {
    pub(super) o: Vec<f64>,
    pub(super) lse: f64,
}

impl<T: Element> Head<'_, '_, T> {
    pub(super) fn forward(&self) -> Vec<Row> {
        let result = |row| {
            let cells = self.cells(row);
            let softmax = self.softmax(&cells);
            Row { o: self.output(row, &cells, &softmax), lse: softmax.lse }
        };
        (0..self.item.q_len()).map(result).collect()
    }

    /// The keys that `row` sees, with their scores.
    pub(super) fn cells(&self, row: usize) -> Vec<Cell> {
        let Self { problem, item, q_head, precision, .. } = *self;
        let query = widen(problem.q.row(item.q_index(row, q_head)));
        let scale = f64::from(problem.scale);
        let bias = problem.bias_row(item, q_head, row);
        let mask = problem.mask_row(item, q_head, row, 0..item.kv_len());
        let alibi_slope = problem.alibi_slope(item, q_head);
        let alibi_diagonal = row as f64 + item.kv_len() as f64 - item.q_len() as f64;

        let visibility = &item.visibility;
        let keys = visibility.keys_start(row as u32)..visibility.keys_end(row as u32);
        let cell = |key: u32| {
            let key = key as usize;
            if mask.as_ref().is_some_and(|mask| mask[key] == 0)
                || bias.is_some_and(|bias| bias[key] == f32::NEG_INFINITY)
            {
                return None;
            }
            let mut score = scale * dot(&query, self.key(key));
            let mut cap_slope = 1.0;
            if let Some(cap) = problem.attention.softcap.map(f64::from) {
                let tanh = (score / cap).tanh();
                score = cap * tanh;
                cap_slope = 1.0 - tanh * tanh;
            }
            if let Some(slope) = alibi_slope {
                score -= f64::from(slope) * (alibi_diagonal - key as f64).abs();
            }
            if let Some(bias) = bias {
                score += f64::from(bias[key]);
            }
            let score = precision.state(score);
            (score != f64::NEG_INFINITY).then_some(Cell { key, score, cap_slope })
        };
        keys.filter_map(cell).collect()
    }

    /// The softmax of a row's cells and the head's sink, which joins at the end.
    pub(super) fn softmax(&self, cells: &[Cell]) -> Softmax {
        let row_max = cells.iter().fold(f64::NEG_INFINITY, |max, cell| larger(max, cell.score));
        let row_sum: f64 = cells.iter().map(|cell| (cell.score - row_max).exp()).sum();
        let sink = self.problem.sink(self.q_head).map_or(f64::NEG_INFINITY, f64::from);
        let final_max = larger(row_max, sink);
        if final_max == f64::NEG_INFINITY {
            return Softmax { row_max, lse: final_max, normalizer: 0.0, sink: 0.0 };
        }
        let rescale = (row_max - final_max).exp();
        let sink_sum = (sink - final_max).exp();
        let final_sum = row_sum * rescale + sink_sum;
        Softmax {
            row_max,
            lse: self.precision.state(final_max + final_sum.ln()),
            normalizer: rescale / final_sum,
            sink: sink_sum / final_sum,
        }
    }

    /// o of a row: `Σ Z·exp(s − row_max)·v`, normalised once.
    pub(super) fn output(&self, row: usize, cells: &[Cell], softmax: &Softmax) -> Vec<f64> {
        let mut o = vec![0.0; self.problem.shape().value_dim];
        for cell in cells {
            let factor = self.dropout_factor(row, cell.key);
            if factor != 0.0 {
                let numerator = self.precision.operand((cell.score - softmax.row_max).exp());
                accumulate(&mut o, numerator * factor, self.value(cell.key));
            }
        }
        if !cells.is_empty() {
            o.iter_mut().for_each(|o| *o = self.precision.result(*o * softmax.normalizer));
        }
        o
    }
}

/// The larger of two, NaN if either is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
