//! Dense attention in binary64: the oracle that every kernel is compared with.
//!
//! Written for reading. A row's scores are computed, its softmax is taken in three scans (M4.3
//! §0x06C), its gradients follow the equations as they stand, and nothing is tiled or streamed.
//! With i a query row, j a key it sees, c the softcap, a the ALiBi slope and Z the dropout mask
//! divided by 1 − p̂ (M4.3 §0x02A gives the order of the steps):
//!
//! ```text
//! s_ij   = c·tanh(scale·⟨q_i, k_j⟩ / c) − a·|i + Sk − Sq − j| + bias_ij
//! lse_i  = log(Σ_j exp(s_ij) + exp(sink))
//! P_ij   = exp(s_ij − lse_i)
//! o_i    = Σ_j Z_ij P_ij v_j
//! ```
//!
//! and, for upstream gradients dO and dLSE (M4.3 §0x0DB):
//!
//! ```text
//! delta_i = ⟨dO_i, o_i⟩ − dLSE_i
//! dS_ij   = P_ij (Z_ij ⟨dO_i, v_j⟩ − delta_i)            the gradient of the bias
//! dL_ij   = dS_ij (1 − tanh²)                            of the scaled product
//! dv_j    = Σ_i Z_ij P_ij dO_i
//! dq_i    = scale·Σ_j dL_ij k_j
//! dk_j    = scale·Σ_i dL_ij q_i
//! dsink   = −Σ_i exp(sink − lse_i) delta_i
//! ```
//!
//! Keys that a row does not see, by position, boolean mask or a bias of −∞, take no part in it at
//! all, whatever they hold; a key whose score comes out as −∞ counts as one of them. A row that
//! sees no key has o = 0, lse = −∞ (or the sink's logit) and zero gradients, and so has a row that
//! belongs to no packed item.

mod backward;
mod forward;
mod precision;

#[cfg(test)]
mod tests;

pub use precision::Precision;

use rayon::prelude::*;

use crate::attention::{Attention, Inputs};
use crate::cpu::problem::{Item, Problem};
use crate::cpu::rows::{Rows, contiguous};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::tensor::{Place, TensorRef};

/// What [`forward()`] gives.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseForward {
    /// `[B, Sq, Hq, Dv]`, or `[Tq, Hq, Dv]` packed; contiguous.
    pub o: Vec<f64>,
    /// Natural log-sum-exp of each row, `[B, Hq, Sq]`, or `[Hq, Tq]` packed; contiguous.
    pub lse: Vec<f64>,
}

/// What [`backward()`] gives: each gradient contiguous, in the dimensions of its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseBackward {
    /// Of the queries, as q.
    pub dq: Vec<f64>,
    /// Of the keys, as k; a KV head sums over the query heads that share it.
    pub dk: Vec<f64>,
    /// Of the values, as v.
    pub dv: Vec<f64>,
    /// Of the bias, if there is one, summed over its broadcast axes.
    pub dbias: Option<Vec<f64>>,
    /// Of the sink logits, if there are any, `[Hq]`.
    pub dsink: Option<Vec<f64>>,
}

/// Attention of host tensors.
///
/// # Errors
/// Anything wrong with the call, by the name of the argument: options out of range, a tensor
/// missing, of other dimensions or not in host memory, malformed lengths; [`Error::OutOfMemory`]
/// where results do not fit, as repeated axes of the inputs can imply.
pub fn forward<T: Element>(
    attention: &Attention,
    inputs: &Inputs<'_, T>,
    precision: Precision,
) -> Result<DenseForward> {
    let problem = Problem::new(attention, inputs)?;
    let [.., o_dims] = attention.tensor_dims();
    let mut o = filled(&o_dims, 0.0)?;
    let mut lse = filled(&attention.lse_dims(), f64::NEG_INFINITY)?;
    let value_dim = problem.shape().value_dim;
    let heads: Vec<_> = tasks(&problem, problem.shape().q_heads)
        .into_par_iter()
        .map(|(item, q_head)| {
            let kv = KvHead::new(&problem, item, problem.shape().kv_head(q_head));
            (item, q_head, Head::new(&problem, item, q_head, &kv, precision).forward())
        })
        .collect();
    for (item, q_head, rows) in heads {
        for (row, result) in rows.into_iter().enumerate() {
            lse[problem.lse_index(item, q_head, row)] = result.lse;
            place(&mut o, problem.q_ordinal(item, q_head, row), value_dim, &result.o);
        }
    }
    Ok(DenseForward { o, lse })
}

/// Every gradient of attention of host tensors, for `d_o`, the gradient of o, and `d_lse`, that of
/// lse (contiguous; none is zero). The forward's results are computed anew.
///
/// # Errors
/// As [`forward()`].
pub fn backward<T: Element>(
    attention: &Attention,
    inputs: &Inputs<'_, T>,
    d_o: &TensorRef<'_, T>,
    d_lse: Option<&TensorRef<'_, f32>>,
    precision: Precision,
) -> Result<DenseBackward> {
    let problem = Problem::new(attention, inputs)?;
    let shape = *problem.shape();
    let [q_dims, k_dims, v_dims, o_dims] = attention.tensor_dims();
    let upstream = Upstream {
        d_o: Rows::new(d_o, "d_o", &o_dims)?,
        d_lse: match d_lse {
            Some(d_lse) => Some(contiguous(d_lse, "d_lse", &attention.lse_dims())?),
            None => None,
        },
    };
    let zeros = |dims: &[usize]| filled(dims, 0.0);
    let (mut dq, mut dk, mut dv) = (zeros(&q_dims)?, zeros(&k_dims)?, zeros(&v_dims)?);
    let mut dbias = attention.bias.map(|axes| zeros(&axes.dims(&shape))).transpose()?;
    let mut dsink = attention.sink.then(|| zeros(&[shape.q_heads])).transpose()?;

    let kv_heads: Vec<_> = tasks(&problem, shape.kv_heads)
        .into_par_iter()
        .map(|(item, kv_head)| {
            let kv = KvHead::new(&problem, item, kv_head);
            let group = kv_head * shape.group()..(kv_head + 1) * shape.group();
            let heads = group.map(|q_head| Head::new(&problem, item, q_head, &kv, precision));
            (item, kv_head, kv.backward(heads, &upstream))
        })
        .collect();

    for (item, kv_head, gradients) in kv_heads {
        for key in 0..item.kv_len() {
            let row = problem.kv_ordinal(item, kv_head, key);
            place(&mut dk, row, shape.head_dim, channels(&gradients.dk, key, shape.head_dim));
            place(&mut dv, row, shape.value_dim, channels(&gradients.dv, key, shape.value_dim));
        }
        for head in gradients.heads {
            for row in 0..item.q_len() {
                let ordinal = problem.q_ordinal(item, head.q_head, row);
                place(&mut dq, ordinal, shape.head_dim, channels(&head.dq, row, shape.head_dim));
                if let (Some(dbias), Some(d_scores)) = (&mut dbias, &head.d_scores) {
                    let keys = problem.bias_elements(item, head.q_head, row);
                    let d_scores = channels(d_scores, row, item.kv_len());
                    for (sum, d_score) in dbias[keys].iter_mut().zip(d_scores) {
                        *sum += d_score;
                    }
                }
            }
            if let Some(dsink) = &mut dsink {
                dsink[head.q_head] += head.dsink;
            }
        }
    }
    for gradient in [&mut dq, &mut dk, &mut dv] {
        gradient.iter_mut().for_each(|value| *value = precision.result(*value));
    }
    for gradient in [&mut dbias, &mut dsink].into_iter().flatten() {
        gradient.iter_mut().for_each(|value| *value = precision.state(*value));
    }
    Ok(DenseBackward { dq, dk, dv, dbias, dsink })
}

/// The gradients that come from above.
struct Upstream<'a, T> {
    /// Of o.
    d_o: Rows<'a, T>,
    /// Of lse, at [`Problem::lse_index`].
    d_lse: Option<&'a [f32]>,
}

/// Keys and values of one item and KV head, `[key, channel]`.
struct KvHead {
    kv_len: usize,
    keys: Vec<f64>,
    values: Vec<f64>,
}

impl KvHead {
    fn new<T: Element>(problem: &Problem<'_, T>, item: &Item, kv_head: usize) -> Self {
        let gather = |tensor: &Rows<'_, T>| {
            let rows = (0..item.kv_len()).map(|key| tensor.row(item.kv_index(key, kv_head)));
            rows.flatten().map(|channel| channel.to_f64()).collect()
        };
        Self { kv_len: item.kv_len(), keys: gather(&problem.k), values: gather(&problem.v) }
    }
}

/// One query head of one item.
struct Head<'p, 'a, T> {
    problem: &'p Problem<'a, T>,
    item: &'p Item,
    q_head: usize,
    kv: &'p KvHead,
    precision: Precision,
}

impl<'p, 'a, T: Element> Head<'p, 'a, T> {
    fn new(
        problem: &'p Problem<'a, T>,
        item: &'p Item,
        q_head: usize,
        kv: &'p KvHead,
        precision: Precision,
    ) -> Self {
        Self { problem, item, q_head, kv, precision }
    }

    /// Key `key`.
    fn key(&self, key: usize) -> &'p [f64] {
        channels(&self.kv.keys, key, self.problem.shape().head_dim)
    }

    /// Value `key`.
    fn value(&self, key: usize) -> &'p [f64] {
        channels(&self.kv.values, key, self.problem.shape().value_dim)
    }

    /// Z of one cell: 0 where dropout drops it, else 1 / (1 − p̂).
    fn dropout_factor(&self, row: usize, key: usize) -> f64 {
        let Some(mask) = &self.problem.dropout else { return 1.0 };
        let batch_head = self.problem.batch_head(self.item, self.q_head);
        if mask.keeps(batch_head, row as u32, key as u32) { mask.keep_scale_f64() } else { 0.0 }
    }
}

/// A contiguous tensor of `dims` with one value everywhere.
fn filled(dims: &[usize], value: f64) -> Result<Vec<f64>> {
    let elements = dims.iter().fold(1_usize, |product, dim| product.saturating_mul(*dim));
    let mut tensor = Vec::new();
    if dims.contains(&0) {
        return Ok(tensor);
    }
    tensor.try_reserve_exact(elements).map_err(|_| Error::OutOfMemory {
        device: Place::Host.to_string(),
        bytes: elements.saturating_mul(size_of::<f64>()),
    })?;
    tensor.resize(elements, value);
    Ok(tensor)
}

/// Every item with each of `heads` heads.
fn tasks<'p, T>(problem: &'p Problem<'_, T>, heads: usize) -> Vec<(&'p Item, usize)> {
    problem.items.iter().flat_map(|item| (0..heads).map(move |head| (item, head))).collect()
}

fn widen<T: Element>(row: &[T]) -> Vec<f64> {
    row.iter().map(|channel| channel.to_f64()).collect()
}

/// Row `row` of a contiguous `[row, channel]` matrix.
fn channels(matrix: &[f64], row: usize, width: usize) -> &[f64] {
    &matrix[row * width..(row + 1) * width]
}

fn place(matrix: &mut [f64], row: usize, width: usize, values: &[f64]) {
    matrix[row * width..(row + 1) * width].copy_from_slice(values);
}

/// `⟨a, b⟩`, in eight partial sums so that the compiler can vectorise it.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// `sum += factor · addend`.
fn accumulate(sum: &mut [f64], factor: f64, addend: &[f64]) {
    for (sum, addend) in sum.iter_mut().zip(addend) {
        *sum += factor * addend;
    }
}
