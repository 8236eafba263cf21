//! Owned tensors of one call, in f32.

use ferroflash_core::philox::philox4x32;

use super::super::{DenseBackward, DenseForward, Precision, backward, forward};
use crate::attention::{Attention, Broadcast, Inputs, Layout, Lengths, Mask, Packed, Shape};
use crate::element::Element;
use crate::error::Result;
use crate::tensor::TensorRef;

/// Shorthand: batch, (query heads, KV heads), (query rows, keys), (head, value channels).
pub(super) fn shape(
    batch: usize,
    (q_heads, kv_heads): (usize, usize),
    (q_len, kv_len): (usize, usize),
    (head_dim, value_dim): (usize, usize),
) -> Shape {
    Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

/// Offsets and used lengths of packed items.
#[derive(Clone, Debug, Default)]
pub(super) struct PackedLengths {
    pub(super) cu_q: Vec<i32>,
    pub(super) cu_k: Vec<i32>,
    pub(super) used_q: Option<Vec<i32>>,
    pub(super) used_k: Option<Vec<i32>>,
}

/// Everything that a call reads, forward and backward.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) attention: Attention,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) boolean_mask: Option<Vec<u8>>,
    pub(super) slopes: Option<Vec<f32>>,
    pub(super) sink: Option<Vec<f32>>,
    pub(super) key_lengths: Option<Vec<i32>>,
    pub(super) packed: Option<PackedLengths>,
    pub(super) d_o: Vec<f32>,
    pub(super) d_lse: Option<Vec<f32>>,
}

/// `count` uniform values in -1.5..1.5, multiples of 2⁻⁶, so that steps of 2⁻¹⁰ are exact in f32.
pub(super) fn grid(stream: u32, count: usize) -> Vec<f32> {
    let value = |bits: u32| (bits % 192) as f32 / 64.0 - 1.5;
    words(stream, count).into_iter().map(value).collect()
}

/// `count` normal values of standard deviation `deviation`.
pub(super) fn normal(stream: u32, count: usize, deviation: f32) -> Vec<f32> {
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / 4_294_967_296.0;
    let normal = |pair: &[u32]| {
        let radius = (-2.0 * uniform(pair[0]).ln()).sqrt();
        (radius * (std::f64::consts::TAU * uniform(pair[1])).cos()) as f32 * deviation
    };
    words(stream, 2 * count).chunks_exact(2).map(normal).collect()
}

fn words(stream: u32, count: usize) -> Vec<u32> {
    let call = |call| philox4x32::<10>([call, 0, 0, 0], [stream, 9]);
    let calls = (0..count.div_ceil(4) as u32).map(call);
    calls.flatten().take(count).collect()
}

impl Case {
    /// Grid values in every tensor that the options ask for, without lengths.
    pub(super) fn new(attention: Attention) -> Self {
        let shape = attention.shape;
        let sizes = attention.tensor_dims().map(|dims| dims.iter().product::<usize>());
        let cells = |axes: Broadcast| axes.dims(&shape).iter().product::<usize>();
        Self {
            q: grid(1, sizes[0]),
            k: grid(2, sizes[1]),
            v: grid(3, sizes[2]),
            d_o: grid(4, sizes[3]),
            d_lse: None,
            bias: attention.bias.map(|axes| grid(5, cells(axes))),
            boolean_mask: attention.boolean_mask.map(|axes| {
                words(6, cells(axes)).iter().map(|bits| u8::from(bits % 4 != 0)).collect()
            }),
            slopes: attention.alibi.then(|| grid(7, shape.q_heads)),
            sink: attention.sink.then(|| grid(8, shape.q_heads)),
            key_lengths: None,
            packed: None,
            attention,
        }
    }

    /// Normal values of standard deviation 3 in q, k and v, ones in dO.
    pub(super) fn normal3(attention: Attention) -> Self {
        let case = Self::new(attention);
        let (q, k, v) = (case.q.len(), case.k.len(), case.v.len());
        let d_o = vec![1.0; case.d_o.len()];
        Self { q: normal(1, q, 3.0), k: normal(2, k, 3.0), v: normal(3, v, 3.0), d_o, ..case }
    }

    /// A packed call of grid values; maxima are the longest items'.
    pub(super) fn packed(
        heads: (usize, usize),
        channels: (usize, usize),
        cu_q: &[i32],
        cu_k: &[i32],
        mask: Mask,
    ) -> Self {
        let longest = |cu: &[i32]| cu.windows(2).map(|pair| pair[1] - pair[0]).max();
        let lengths = [cu_q, cu_k].map(|cu| longest(cu).unwrap_or(0) as usize);
        let tokens = [cu_q, cu_k].map(|cu| cu[cu.len() - 1] as usize);
        let layout = Layout::Packed { q_tokens: tokens[0], kv_tokens: tokens[1] };
        let shape = shape(cu_q.len() - 1, heads, (lengths[0], lengths[1]), channels);
        let packed =
            PackedLengths { cu_q: cu_q.to_vec(), cu_k: cu_k.to_vec(), ..PackedLengths::default() };
        let case = Self::new(Attention::new(shape).layout(layout).mask(mask));
        Self { packed: Some(packed), ..case }
    }

    pub(super) fn with_d_lse(self) -> Self {
        let rows = self.attention.lse_dims().iter().product();
        Self { d_lse: Some(grid(9, rows)), ..self }
    }

    pub(super) fn with_key_lengths(mut self, lengths: &[i32]) -> Self {
        self.attention = self.attention.layout(Layout::KeyLengths);
        Self { key_lengths: Some(lengths.to_vec()), ..self }
    }

    pub(super) fn inputs(&self) -> Result<Inputs<'_, f32>> {
        self.inputs_as(&self.q, &self.k, &self.v)
    }

    fn inputs_as<'a, T>(&'a self, q: &'a [T], k: &'a [T], v: &'a [T]) -> Result<Inputs<'a, T>> {
        let [q_dims, k_dims, v_dims, _] = self.attention.tensor_dims();
        let shape = self.attention.shape;
        let mut inputs = Inputs::new(
            TensorRef::host(q, &q_dims)?,
            TensorRef::host(k, &k_dims)?,
            TensorRef::host(v, &v_dims)?,
        );
        let dims = |axes: Option<Broadcast>| axes.unwrap_or(Broadcast::NONE).dims(&shape);
        if let Some(bias) = &self.bias {
            inputs.bias = Some(TensorRef::host(bias, &dims(self.attention.bias))?);
        }
        if let Some(mask) = &self.boolean_mask {
            inputs.boolean_mask = Some(TensorRef::host(mask, &dims(self.attention.boolean_mask))?);
        }
        if let Some(slopes) = &self.slopes {
            let per_item = [shape.batch, shape.q_heads];
            let axes = if slopes.len() == shape.q_heads { &per_item[1..] } else { &per_item };
            inputs.alibi_slopes = Some(TensorRef::host(slopes, axes)?);
        }
        if let Some(sink) = &self.sink {
            inputs.sink = Some(TensorRef::host(sink, &[shape.q_heads])?);
        }
        inputs.key_lengths = self.key_lengths.as_deref().map(Lengths::Host);
        inputs.packed = self.packed.as_ref().map(|packed| Packed {
            cu_q: Lengths::Host(&packed.cu_q),
            cu_k: Lengths::Host(&packed.cu_k),
            used_q: packed.used_q.as_deref().map(Lengths::Host),
            used_k: packed.used_k.as_deref().map(Lengths::Host),
        });
        Ok(inputs)
    }

    pub(super) fn try_forward(&self) -> Result<DenseForward> {
        forward(&self.attention, &self.inputs()?, Precision::F64)
    }

    pub(super) fn forward(&self) -> DenseForward {
        self.try_forward().expect("a valid call")
    }

    pub(super) fn backward(&self) -> DenseBackward {
        self.backward_as::<f32>(Precision::F64)
    }

    /// Both directions with the tensors rounded to `T`.
    pub(super) fn forward_as<T: Element>(&self, precision: Precision) -> DenseForward {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|tensor| rounded::<T>(tensor));
        let inputs = self.inputs_as(&q, &k, &v).expect("valid tensors");
        forward(&self.attention, &inputs, precision).expect("a valid call")
    }

    pub(super) fn backward_as<T: Element>(&self, precision: Precision) -> DenseBackward {
        let [q, k, v, d_o] =
            [&self.q, &self.k, &self.v, &self.d_o].map(|tensor| rounded::<T>(tensor));
        let inputs = self.inputs_as(&q, &k, &v).expect("valid tensors");
        let [.., o_dims] = self.attention.tensor_dims();
        let d_o = TensorRef::host(&d_o, &o_dims).expect("as o");
        let d_lse = self
            .d_lse
            .as_ref()
            .map(|d_lse| TensorRef::host(d_lse, &self.attention.lse_dims()).expect("as lse"));
        backward(&self.attention, &inputs, &d_o, d_lse.as_ref(), precision).expect("a valid call")
    }

    /// `⟨dO, o⟩ + ⟨dLSE, lse⟩`, whose gradients [`Case::backward`] gives.
    pub(super) fn loss(&self) -> f64 {
        let DenseForward { o, lse } = self.forward();
        let product = |a: &[f32], b: &[f64]| -> f64 {
            let finite = a.iter().zip(b).filter(|(_, b)| b.is_finite());
            finite.map(|(a, b)| f64::from(*a) * b).sum()
        };
        product(&self.d_o, &o) + self.d_lse.as_ref().map_or(0.0, |d_lse| product(d_lse, &lse))
    }
}

fn rounded<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|value| T::from_f32(*value)).collect()
}
