//! The tensors that go with a call.

use crate::tensor::{TensorMut, TensorRef};

/// Lengths or cumulative offsets of items, as 32-bit integers.
pub enum Lengths<'a> {
    /// In host memory: their contents are validated before anything runs.
    Host(&'a [i32]),
    /// In device memory: kernels clamp every offset to the tensors.
    Device(TensorRef<'a, i32>),
}

impl Lengths<'_> {
    fn reborrow(&self) -> Lengths<'_> {
        match self {
            Self::Host(values) => Lengths::Host(values),
            Self::Device(tensor) => Lengths::Device(tensor.reborrow()),
        }
    }
}

/// Where packed items begin and end.
pub struct Packed<'a> {
    /// `batch + 1` cumulative query offsets, from 0 to `q_tokens`.
    pub cu_q: Lengths<'a>,
    /// `batch + 1` cumulative key offsets, from 0 to `kv_tokens`.
    pub cu_k: Lengths<'a>,
    /// Rows really used of each item, if fewer than its offsets span.
    pub used_q: Option<Lengths<'a>>,
    /// Keys really used of each item, if fewer than its offsets span.
    pub used_k: Option<Lengths<'a>>,
}

/// The tensors of a call. Dimensions as [`Shape`](super::Shape) has them, any strides with
/// contiguous channels.
pub struct Inputs<'a, T> {
    /// Queries.
    pub q: TensorRef<'a, T>,
    /// Keys.
    pub k: TensorRef<'a, T>,
    /// Values.
    pub v: TensorRef<'a, T>,
    /// Additive bias, if declared by [`Attention::bias`](super::Attention::bias).
    pub bias: Option<TensorRef<'a, f32>>,
    /// True (non-zero) where a key is visible, if declared by
    /// [`Attention::boolean_mask`](super::Attention::boolean_mask) or, a bit a key, by
    /// [`Attention::bit_mask`](super::Attention::bit_mask).
    pub boolean_mask: Option<TensorRef<'a, u8>>,
    /// ALiBi slopes, `[Hq]` or `[B, Hq]`, if declared by
    /// [`Attention::alibi`](super::Attention::alibi).
    pub alibi_slopes: Option<TensorRef<'a, f32>>,
    /// Sink logits, `[Hq]`, if declared by [`Attention::sink`](super::Attention::sink).
    pub sink: Option<TensorRef<'a, f32>>,
    /// `[2]`, contiguous: seed and offset of the dropout, if its state is
    /// [`DropoutState::Given`](super::DropoutState::Given). On the plan's device, where kernels
    /// read them as they run, so that a captured graph may change them from one replay to the next;
    /// or in host memory, where the call reads them. The backward pass needs what the forward pass
    /// had.
    pub dropout_state: Option<TensorRef<'a, u64>>,
    /// Keys of each item, `[B]`, if the layout is
    /// [`Layout::KeyLengths`](super::Layout::KeyLengths).
    pub key_lengths: Option<Lengths<'a>>,
    /// Offsets of the items, if the layout is [`Layout::Packed`](super::Layout::Packed).
    pub packed: Option<Packed<'a>>,
}

impl<'a, T> Inputs<'a, T> {
    /// q, k and v alone.
    pub fn new(q: TensorRef<'a, T>, k: TensorRef<'a, T>, v: TensorRef<'a, T>) -> Self {
        Self {
            q,
            k,
            v,
            bias: None,
            boolean_mask: None,
            alibi_slopes: None,
            sink: None,
            dropout_state: None,
            key_lengths: None,
            packed: None,
        }
    }
}

impl<T> Inputs<'_, T> {
    fn reborrow(&self) -> Inputs<'_, T> {
        let Self { q, k, v, bias, boolean_mask, alibi_slopes, sink, .. } = self;
        let Self { dropout_state, key_lengths, packed, .. } = self;
        Inputs {
            q: q.reborrow(),
            k: k.reborrow(),
            v: v.reborrow(),
            bias: bias.as_ref().map(TensorRef::reborrow),
            boolean_mask: boolean_mask.as_ref().map(TensorRef::reborrow),
            alibi_slopes: alibi_slopes.as_ref().map(TensorRef::reborrow),
            sink: sink.as_ref().map(TensorRef::reborrow),
            dropout_state: dropout_state.as_ref().map(TensorRef::reborrow),
            key_lengths: key_lengths.as_ref().map(Lengths::reborrow),
            packed: packed.as_ref().map(|Packed { cu_q, cu_k, used_q, used_k }| Packed {
                cu_q: cu_q.reborrow(),
                cu_k: cu_k.reborrow(),
                used_q: used_q.as_ref().map(Lengths::reborrow),
                used_k: used_k.as_ref().map(Lengths::reborrow),
            }),
        }
    }
}

/// Where a forward call writes.
pub struct Output<'a, T> {
    /// `[B, Sq, Hq, Dv]`, or `[Tq, Hq, Dv]` packed.
    pub o: TensorMut<'a, T>,
    /// Natural log-sum-exp of each row's final scores, f32 `[B, Hq, Sq]` or `[Hq, Tq]` packed,
    /// contiguous; the backward pass needs it.
    pub lse: Option<TensorMut<'a, f32>>,
}

/// What a backward call reads besides its inputs: the forward's results.
pub struct Saved<'a, T> {
    /// The forward's inputs.
    pub inputs: Inputs<'a, T>,
    /// The forward's output.
    pub o: TensorRef<'a, T>,
    /// The forward's log-sum-exp, contiguous.
    pub lse: TensorRef<'a, f32>,
}

impl<T> Saved<'_, T> {
    /// The same tensors, for a shorter time.
    pub(crate) fn reborrow(&self) -> Saved<'_, T> {
        Saved { inputs: self.inputs.reborrow(), o: self.o.reborrow(), lse: self.lse.reborrow() }
    }
}

/// Gradients to write; those left out are not computed. Dimensions are those of the inputs.
pub struct Gradients<'a, T> {
    /// Of the queries.
    pub dq: Option<TensorMut<'a, T>>,
    /// Of the keys.
    pub dk: Option<TensorMut<'a, T>>,
    /// Of the values.
    pub dv: Option<TensorMut<'a, T>>,
    /// Of the bias, summed over its broadcast axes.
    pub dbias: Option<TensorMut<'a, f32>>,
    /// Of the sink logits, `[Hq]`.
    pub dsink: Option<TensorMut<'a, f32>>,
}

impl<T> Default for Gradients<'_, T> {
    fn default() -> Self {
        Self { dq: None, dk: None, dv: None, dbias: None, dsink: None }
    }
}
