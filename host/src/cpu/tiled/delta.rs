//! `delta = ⟨dO, O⟩ − dLSE` of every row, and the gradient of the sinks, which needs nothing else
//! (M4.4 §0x04).

use rayon::prelude::*;

use super::exponential::exp;
use super::pack::widen;
use super::softmax::finite_lse;
use super::vector::{LANES, Separate};
use crate::attention::{Attention, Layout, Saved};
use crate::cpu::problem::Problem;
use crate::cpu::rows::{Rows, contiguous};
use crate::element::Element;
use crate::error::Result;
use crate::tensor::TensorRef;

/// What a backward call reads besides its inputs, checked.
pub(super) struct Results<'a, T> {
    o: Rows<'a, T>,
    pub(super) d_o: Rows<'a, T>,
    /// At [`Problem::lse_index`].
    pub(super) lse: &'a [f32],
    d_lse: Option<&'a [f32]>,
}

impl<'a, T> Results<'a, T> {
    pub(super) fn new(
        attention: &Attention,
        saved: &Saved<'a, T>,
        d_o: &TensorRef<'a, T>,
        d_lse: Option<&TensorRef<'a, f32>>,
    ) -> Result<Self> {
        let [.., o_dims] = attention.tensor_dims();
        let lse_dims = attention.lse_dims();
        Ok(Self {
            o: Rows::new(&saved.o, "o", &o_dims)?,
            d_o: Rows::new(d_o, "d_o", &o_dims)?,
            lse: contiguous(&saved.lse, "lse", &lse_dims)?,
            d_lse: d_lse.map(|d_lse| contiguous(d_lse, "d_lse", &lse_dims)).transpose()?,
        })
    }
}

/// Delta of every row, at [`Problem::lse_index`]; writes `dsink`, if it is wanted.
pub(super) fn of_all_rows<T: Element>(
    problem: &Problem<'_, T>,
    results: &Results<'_, T>,
    dsink: Option<&mut [f32]>,
) -> Vec<f32> {
    let q_heads = problem.shape().q_heads;
    let mut delta = vec![0.0; results.lse.len()];
    // lse is `[batch, head, row]` (batch 1 where items are packed): a chunk a head.
    let last_axis = problem.attention.lse_dims().last().copied().unwrap_or(1);
    let chunks = delta.par_chunks_mut(last_axis.max(1)).enumerate();
    let d_sinks: Vec<f64> =
        chunks.map(|(chunk, delta)| of_head(problem, results, chunk, delta)).collect();
    if let Some(dsink) = dsink {
        for (q_head, dsink) in dsink.iter_mut().enumerate() {
            *dsink = d_sinks.iter().skip(q_head).step_by(q_heads).sum::<f64>() as f32;
        }
    }
    delta
}

/// Delta of the rows of one chunk of lse, and their `-Σ p_sink · delta`.
fn of_head<T: Element>(
    problem: &Problem<'_, T>,
    results: &Results<'_, T>,
    chunk: usize,
    delta: &mut [f32],
) -> f64 {
    let shape = problem.shape();
    let (batch, q_head) = (chunk / shape.q_heads, chunk % shape.q_heads);
    let sink = problem.sink(q_head);
    let width = shape.value_dim.next_multiple_of(LANES);
    let (mut o, mut d_o) = (vec![0.0; width], vec![0.0; width]);
    let mut d_sink = 0.0;
    // Packed items share one batch; others are one a batch.
    let items = match problem.attention.layout {
        Layout::Packed { .. } => &problem.items[..],
        Layout::Dense | Layout::KeyLengths => &problem.items[batch..=batch],
    };
    for item in items {
        for row in 0..item.q_len() {
            let index = item.q_index(row, q_head);
            widen(results.o.row(index), &mut o[..shape.value_dim]);
            widen(results.d_o.row(index), &mut d_o[..shape.value_dim]);
            let place = problem.lse_index(item, q_head, row);
            let d_lse = results.d_lse.map_or(0.0, |d_lse| d_lse[place]);
            let row_delta = dot(&d_o, &o) - d_lse;
            delta[place - chunk * delta.len()] = row_delta;
            if let Some(sink) = sink {
                let probability = exp::<Separate>(sink - finite_lse(results.lse[place]));
                d_sink -= f64::from(probability) * f64::from(row_delta);
            }
        }
    }
    d_sink
}

/// `⟨a, b⟩` of whole groups of lanes.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum()
}
