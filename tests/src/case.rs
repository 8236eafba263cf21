//! One call with everything that it reads.

mod given;

use ferroflash::{
    Align, Attention, Broadcast, Dropout, Inputs, Layout, Lengths, Mask, Packed, Scale, Shape,
    TensorRef,
};

use crate::element::Real;
use crate::memory::{Arrangement, Owned};
use crate::random::normal;

/// Shorthand: batch, (query heads, KV heads), (query rows, keys), (head, value channels).
pub fn shape(
    batch: usize,
    (q_heads, kv_heads): (usize, usize),
    (q_len, kv_len): (usize, usize),
    (head_dim, value_dim): (usize, usize),
) -> Shape {
    Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

/// Offsets and used lengths of packed items.
#[derive(Clone, Debug, Default)]
pub struct PackedLengths {
    /// Cumulative query offsets.
    pub cu_q: Vec<i32>,
    /// Cumulative key offsets.
    pub cu_k: Vec<i32>,
    /// Rows used of each item.
    pub used_q: Option<Vec<i32>>,
    /// Keys used of each item.
    pub used_k: Option<Vec<i32>>,
}

/// Which keys a row sees by position: the sides of the window, readable where a [`Mask`] is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Alignment of the diagonal.
    pub align: Align,
    /// Keys before the diagonal.
    pub left: Option<usize>,
    /// Keys after it.
    pub right: Option<usize>,
}

impl Sight {
    /// Every key.
    pub const FULL: Self = Self { align: Align::BottomRight, left: None, right: None };
    /// Up to the diagonal from the upper left corner.
    pub const TOP_LEFT: Self = Self { align: Align::TopLeft, left: None, right: Some(0) };
    /// Up to the diagonal to the lower right corner.
    pub const BOTTOM_RIGHT: Self = Self { align: Align::BottomRight, left: None, right: Some(0) };

    /// A window around the diagonal to the lower right corner.
    pub const fn window(left: Option<usize>, right: Option<usize>) -> Self {
        Self { align: Align::BottomRight, left, right }
    }

    /// As the library takes it.
    pub const fn mask(self) -> Mask {
        Mask::full().aligned(self.align).window(self.left, self.right)
    }

    /// Whether `row` sees `key`, by definition.
    pub fn sees(self, row: usize, key: usize, q_len: usize, kv_len: usize) -> bool {
        let diagonal = row as i64 + self.align.offset(q_len, kv_len);
        let distance = key as i64 - diagonal;
        self.left.is_none_or(|left| distance >= -(left as i64))
            && self.right.is_none_or(|right| distance <= right as i64)
    }
}

/// A call, its tensors, and the arrangement of its results. The options are here once more, to be
/// read.
#[derive(Clone, Debug)]
pub struct Case<T> {
    /// The call.
    pub attention: Attention,
    /// Which keys a row sees.
    pub sight: Sight,
    /// Factor of the scores.
    pub scale: f32,
    /// Softcap.
    pub softcap: Option<f32>,
    /// Dropout.
    pub dropout: Option<Dropout>,
    /// Seed and offset of the dropout, where they are given with the call.
    pub dropout_state: Option<[u64; 2]>,
    /// Queries.
    pub q: Owned<T>,
    /// Keys.
    pub k: Owned<T>,
    /// Values.
    pub v: Owned<T>,
    /// Bias and its broadcast axes.
    pub bias: Option<(Broadcast, Owned<f32>)>,
    /// Boolean mask, contiguous, a byte a key, and its broadcast axes.
    pub boolean_mask: Option<(Broadcast, Vec<u8>)>,
    /// The same with a bit a key, where the call is given that.
    pub bit_mask: Option<Vec<u8>>,
    /// ALiBi slopes, `[Hq]` or `[B, Hq]`.
    pub alibi_slopes: Option<Owned<f32>>,
    /// Sink logits, `[Hq]`.
    pub sink: Option<Owned<f32>>,
    /// Keys of each item.
    pub key_lengths: Option<Vec<i32>>,
    /// Offsets of packed items.
    pub packed: Option<PackedLengths>,
    /// Gradient of o.
    pub d_o: Owned<T>,
    /// Gradient of lse.
    pub d_lse: Option<Owned<f32>>,
    /// Arrangement of o and of the gradients of q, k and v.
    pub results: Arrangement,
    /// Dimensions of lse.
    pub lse_dims: Vec<usize>,
    /// Dimensions of o.
    pub o_dims: Vec<usize>,
}

impl<T: Real> Case<T> {
    /// Normal q, k, v and dO of standard deviation `deviation`, contiguous; no option, the usual
    /// scale.
    pub fn new(shape: Shape, sight: Sight, seed: u64, deviation: f32) -> Self {
        let s = shape;
        let dims = [s.q_dims(), s.k_dims(), s.v_dims(), s.o_dims()].map(|dims| dims.to_vec());
        Self::with_dims(shape, sight, dims, s.lse_dims().to_vec(), seed, deviation)
    }

    /// As [`Case::new`], for items packed one after another; q, k and v end with the last item, and
    /// the stated maxima are the longest items.
    pub fn packed(
        heads: (usize, usize),
        channels: (usize, usize),
        packed: PackedLengths,
        sight: Sight,
        seed: u64,
        deviation: f32,
    ) -> Self {
        let longest = |offsets: &[i32]| offsets.windows(2).map(|pair| pair[1] - pair[0]).max();
        let lengths =
            [&packed.cu_q, &packed.cu_k].map(|offsets| longest(offsets).unwrap_or(0) as usize);
        let tokens = [&packed.cu_q, &packed.cu_k].map(|cu| cu.last().map_or(0, |t| *t as usize));
        let s = shape(packed.cu_q.len() - 1, heads, (lengths[0], lengths[1]), channels);
        let dims = [
            vec![tokens[0], s.q_heads, s.head_dim],
            vec![tokens[1], s.kv_heads, s.head_dim],
            vec![tokens[1], s.kv_heads, s.value_dim],
            vec![tokens[0], s.q_heads, s.value_dim],
        ];
        let lse_dims = vec![s.q_heads, tokens[0]];
        let case = Self::with_dims(s, sight, dims, lse_dims, seed, deviation);
        let layout = Layout::Packed { q_tokens: tokens[0], kv_tokens: tokens[1] };
        Self { packed: Some(packed), attention: case.attention.layout(layout), ..case }
    }

    fn with_dims(
        shape: Shape,
        sight: Sight,
        [q, k, v, o]: [Vec<usize>; 4],
        lse_dims: Vec<usize>,
        seed: u64,
        deviation: f32,
    ) -> Self {
        let random = |stream: u64, dims: &[usize]| {
            let values = normal(seed * 16 + stream, dims.iter().product(), deviation);
            Owned::new(&values, dims, Arrangement::CONTIGUOUS)
        };
        Self {
            attention: Attention::new(shape).mask(sight.mask()),
            sight,
            scale: (1.0 / (shape.head_dim as f64).sqrt()) as f32,
            softcap: None,
            dropout: None,
            dropout_state: None,
            q: random(1, &q),
            k: random(2, &k),
            v: random(3, &v),
            d_o: random(4, &o),
            bias: None,
            boolean_mask: None,
            bit_mask: None,
            alibi_slopes: None,
            sink: None,
            key_lengths: None,
            packed: None,
            d_lse: None,
            results: Arrangement::CONTIGUOUS,
            lse_dims,
            o_dims: o,
        }
    }

    /// With another factor of the scores.
    pub fn with_scale(self, scale: f32) -> Self {
        Self { attention: self.attention.scale(Scale::Factor(scale)), scale, ..self }
    }

    /// With a softcap.
    pub fn with_softcap(self, cap: f32) -> Self {
        Self { attention: self.attention.softcap(cap), softcap: Some(cap), ..self }
    }

    /// With dropout.
    pub fn with_dropout(self, dropout: Dropout) -> Self {
        let attention = self.attention.dropout(dropout);
        Self { attention, dropout: Some(dropout), dropout_state: None, ..self }
    }

    /// With a bias of normal values.
    pub fn with_bias(mut self, axes: Broadcast, arrangement: Arrangement, seed: u64) -> Self {
        let dims = broadcast_dims(axes, self.attention.shape());
        let values = normal(seed, dims.iter().product(), 1.0);
        self.attention = self.attention.bias(axes);
        self.bias = Some((axes, Owned::new(&values, &dims, arrangement)));
        self
    }

    /// With a boolean mask; `visible` is asked for (item, head, row, key).
    pub fn with_boolean_mask(
        mut self,
        axes: Broadcast,
        visible: impl Fn([usize; 4]) -> bool,
    ) -> Self {
        let [batch, heads, rows, keys] = broadcast_dims(axes, self.attention.shape());
        let count = batch * heads * rows * keys;
        let cell = |index: usize| {
            [
                index / keys / rows / heads,
                index / keys / rows % heads,
                index / keys % rows,
                index % keys,
            ]
        };
        let values = (0..count).map(|index| u8::from(visible(cell(index)))).collect();
        self.attention = self.attention.boolean_mask(axes);
        self.boolean_mask = Some((axes, values));
        self
    }

    /// With ALiBi slopes, one a head or one an item and head.
    pub fn with_alibi(mut self, slopes: &[f32]) -> Self {
        let s = *self.attention.shape();
        let dims =
            if slopes.len() == s.q_heads { vec![s.q_heads] } else { vec![s.batch, s.q_heads] };
        self.attention = self.attention.alibi();
        self.alibi_slopes = Some(Owned::new(slopes, &dims, Arrangement::CONTIGUOUS));
        self
    }

    /// With sink logits.
    pub fn with_sink(mut self, logits: &[f32]) -> Self {
        self.attention = self.attention.sink();
        self.sink = Some(Owned::new(logits, &[logits.len()], Arrangement::CONTIGUOUS));
        self
    }

    /// With the keys of each item.
    pub fn with_key_lengths(mut self, lengths: &[i32]) -> Self {
        self.attention = self.attention.layout(Layout::KeyLengths);
        self.key_lengths = Some(lengths.to_vec());
        self
    }

    /// With a normal gradient of lse.
    pub fn with_d_lse(mut self, seed: u64) -> Self {
        let values = normal(seed, self.lse_dims.iter().product(), 1.0);
        self.d_lse = Some(Owned::new(&values, &self.lse_dims, Arrangement::CONTIGUOUS));
        self
    }

    /// With q, k and v arranged so, and the results as the last.
    pub fn arranged(mut self, [q, k, v, results]: [Arrangement; 4]) -> Self {
        self.q = self.q.rearranged(q);
        self.k = self.k.rearranged(k);
        self.v = self.v.rearranged(v);
        self.results = results;
        self
    }

    /// Whether q, k, v and o lie at multiples of 16 bytes, row by row.
    pub fn is_aligned(&self) -> bool {
        let o = Owned::<T>::poisoned(&self.o_dims, self.results);
        [&self.q, &self.k, &self.v, &o].into_iter().all(Owned::is_aligned)
    }

    /// Whether items have lengths of their own.
    pub fn has_lengths(&self) -> bool {
        self.key_lengths.is_some() || self.packed.is_some()
    }

    /// Whether cells share an element of the bias' gradient, whose parts a GPU adds in no order.
    pub fn sums_bias_gradient(&self) -> bool {
        let s = self.attention.shape();
        self.bias.as_ref().is_some_and(|(axes, _)| {
            (axes.batch && s.batch > 1)
                || (axes.heads && s.q_heads > 1)
                || (axes.rows && s.q_len > 1)
        })
    }

    /// Where each item lies.
    pub fn items(&self) -> Vec<Item> {
        let s = self.attention.shape();
        let item = |batch: usize| match &self.packed {
            Some(packed) => {
                let span = |offsets: &[i32], used: &Option<Vec<i32>>| {
                    let (first, end) = (offsets[batch] as usize, offsets[batch + 1] as usize);
                    first..used.as_ref().map_or(end, |used| first + used[batch] as usize)
                };
                let rows = span(&packed.cu_q, &packed.used_q);
                Item { batch: 0, rows, keys: span(&packed.cu_k, &packed.used_k) }
            }
            None => {
                let keys = self.key_lengths.as_ref().map_or(s.kv_len, |keys| keys[batch] as usize);
                Item { batch, rows: 0..s.q_len, keys: 0..keys }
            }
        };
        (0..s.batch).map(item).collect()
    }

    /// The tensors, in host memory.
    pub fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.bias = self.bias.as_ref().map(|(_, bias)| bias.view());
        inputs.boolean_mask = self
            .given_mask()
            .map(|(mask, dims)| TensorRef::host(mask, &dims).expect("a mask of these dimensions"));
        let state = self.dropout_state.as_ref();
        inputs.dropout_state =
            state.map(|state| TensorRef::host(state, &[2]).expect("two integers"));
        inputs.alibi_slopes = self.alibi_slopes.as_ref().map(Owned::view);
        inputs.sink = self.sink.as_ref().map(Owned::view);
        inputs.key_lengths = self.key_lengths.as_deref().map(Lengths::Host);
        inputs.packed = self.packed.as_ref().map(|packed| Packed {
            cu_q: Lengths::Host(&packed.cu_q),
            cu_k: Lengths::Host(&packed.cu_k),
            used_q: packed.used_q.as_deref().map(Lengths::Host),
            used_k: packed.used_k.as_deref().map(Lengths::Host),
        });
        inputs
    }
}

/// Where an item of a call lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Coordinate on the batch axis; 0 where items are packed.
    pub batch: usize,
    /// Rows used, on the row axis of q.
    pub rows: std::ops::Range<usize>,
    /// Keys used, on the row axis of k.
    pub keys: std::ops::Range<usize>,
}

/// Dimensions of a `[B or 1, Hq or 1, Sq or 1, Sk]` tensor.
pub fn broadcast_dims(axes: Broadcast, shape: &Shape) -> [usize; 4] {
    let axis = |one: bool, size: usize| if one { 1 } else { size };
    [
        axis(axes.batch, shape.batch),
        axis(axes.heads, shape.q_heads),
        axis(axes.rows, shape.q_len),
        shape.kv_len,
    ]
}
