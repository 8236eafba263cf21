//! One call on the CPU, validated: what both `dense` and `tiled` start from.
//!
//! A [`Problem`] splits a call into [`Item`]s, independent sequences with their effective lengths,
//! and hands out rows of their tensors. Rows that belong to no item (past an item's used length)
//! are not attended: their o is 0, their lse −∞ and their gradients 0. So every output is filled
//! with those first, and items then write their own rows.

use std::borrow::Cow;
use std::ops::Range;

use ferroflash_core::dropout::DropoutMask;
use ferroflash_core::visibility::Visibility;

use crate::attention::{Attention, Gradients, Inputs, Layout, Output, Shape};
use crate::cpu::rows::{Rows, RowsMut, contiguous_mut};
use crate::error::{Error, Result};
use crate::lengths;
use crate::options::{OptionTensors, read_state};
use crate::tensor::TensorRef;

/// One independent sequence of a call.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    /// Its number, 0 to B: what bias, boolean mask, slopes and dropout are indexed by.
    pub(crate) index: usize,
    /// Coordinate on the batch axis of q, k, v and o; 0 where items are packed.
    batch: usize,
    /// Its query rows, as coordinates on the row axis of q and o.
    q_rows: Range<usize>,
    /// Its keys, as coordinates on the row axis of k and v.
    kv_rows: Range<usize>,
    /// The keys each of its rows may see by position; holds the effective lengths too.
    pub(crate) visibility: Visibility,
}

impl Item {
    /// Effective query rows, Sq.
    pub(crate) fn q_len(&self) -> usize {
        self.q_rows.len()
    }

    /// Effective keys, Sk.
    pub(crate) fn kv_len(&self) -> usize {
        self.kv_rows.len()
    }

    /// Index of row `row` of query head `q_head` in q, o and their gradients.
    pub(crate) fn q_index(&self, row: usize, q_head: usize) -> [usize; 3] {
        debug_assert!(row < self.q_len());
        [self.batch, self.q_rows.start + row, q_head]
    }

    /// Index of key `key` of KV head `kv_head` in k, v and their gradients.
    pub(crate) fn kv_index(&self, key: usize, kv_head: usize) -> [usize; 3] {
        debug_assert!(key < self.kv_len());
        [self.batch, self.kv_rows.start + key, kv_head]
    }
}

/// A validated call: its options as numbers, its items, and its tensors as rows.
pub(crate) struct Problem<'a, T> {
    pub(crate) attention: Attention,
    /// Factor of every score.
    pub(crate) scale: f32,
    /// The dropout mask, if the call drops anything.
    pub(crate) dropout: Option<DropoutMask>,
    /// Every item, in order.
    pub(crate) items: Vec<Item>,
    /// Rows of q at [`Item::q_index`], of k and v at [`Item::kv_index`].
    pub(crate) q: Rows<'a, T>,
    pub(crate) k: Rows<'a, T>,
    pub(crate) v: Rows<'a, T>,
    bias: Option<Rows<'a, f32>>,
    boolean_mask: Option<Rows<'a, u8>>,
    alibi_slopes: Option<Rows<'a, f32>>,
    sink: Option<Rows<'a, f32>>,
}

impl<'a, T> Problem<'a, T> {
    /// Checks a call: options, tensors against them, and the contents of lengths.
    ///
    /// # Errors
    /// The first thing wrong, by the name of its argument.
    pub(crate) fn new(attention: &Attention, inputs: &Inputs<'a, T>) -> Result<Self> {
        attention.validate()?;
        let [q_dims, k_dims, v_dims, _] = attention.tensor_dims();
        let options = OptionTensors::new(attention, inputs)?;
        Ok(Self {
            attention: *attention,
            scale: attention.scale_factor(),
            dropout: attention.dropout_mask(state_on_host(options.dropout_state)?)?,
            q: Rows::new(&inputs.q, "q", &q_dims)?,
            k: Rows::new(&inputs.k, "k", &k_dims)?,
            v: Rows::new(&inputs.v, "v", &v_dims)?,
            bias: rows(&options.bias, "bias")?,
            boolean_mask: rows(&options.boolean_mask, "boolean_mask")?,
            alibi_slopes: rows(&options.alibi_slopes, "alibi_slopes")?,
            sink: rows(&options.sink, "sink")?,
            items: items(attention, &options)?,
        })
    }

    /// The sizes of the call.
    pub(crate) fn shape(&self) -> &Shape {
        &self.attention.shape
    }

    /// Index of a row in lse (and in any other f32 value a row), `[B, Hq, Sq]` or `[Hq, Tq]`.
    pub(crate) fn lse_index(&self, item: &Item, q_head: usize, row: usize) -> usize {
        let [batch, row, head] = item.q_index(row, q_head);
        (batch * self.shape().q_heads + head) * self.q_axis() + row
    }

    /// Number of a row of q among all rows of all heads, in the order of its dimensions.
    pub(crate) fn q_ordinal(&self, item: &Item, q_head: usize, row: usize) -> usize {
        let [batch, row, head] = item.q_index(row, q_head);
        (batch * self.q_axis() + row) * self.shape().q_heads + head
    }

    /// Number of a row of k among all rows of all heads, in the order of its dimensions.
    pub(crate) fn kv_ordinal(&self, item: &Item, kv_head: usize, key: usize) -> usize {
        let [batch, key, head] = item.kv_index(key, kv_head);
        let keys = match self.attention.layout {
            Layout::Dense | Layout::KeyLengths => self.shape().kv_len,
            Layout::Packed { kv_tokens, .. } => kv_tokens,
        };
        (batch * keys + key) * self.shape().kv_heads + head
    }

    /// Size of the row axis of q and o.
    fn q_axis(&self) -> usize {
        match self.attention.layout {
            Layout::Dense | Layout::KeyLengths => self.shape().q_len,
            Layout::Packed { q_tokens, .. } => q_tokens,
        }
    }

    /// `b · Hq + h`, as the dropout mask counts it.
    pub(crate) fn batch_head(&self, item: &Item, q_head: usize) -> u32 {
        (item.index * self.shape().q_heads + q_head) as u32
    }

    /// Bias of a row, one value a key of the item.
    pub(crate) fn bias_row(&self, item: &Item, q_head: usize, row: usize) -> Option<&'a [f32]> {
        let bias = self.bias.as_ref()?.broadcast_row([item.index, q_head, row]);
        Some(&bias[..item.kv_len()])
    }

    /// Where [`Self::bias_row`] lies in a contiguous gradient of the bias; empty without a bias.
    pub(crate) fn bias_elements(&self, item: &Item, q_head: usize, row: usize) -> Range<usize> {
        let Some(axes) = self.attention.bias else { return 0..0 };
        let index = |one: bool, index: usize| if one { 0 } else { index };
        let [_, heads, rows, keys] = axes.dims(self.shape());
        let head = index(axes.batch, item.index) * heads + index(axes.heads, q_head);
        let start = (head * rows + index(axes.rows, row)) * keys;
        start..start + item.kv_len()
    }

    /// Boolean mask of a row, non-zero where one of some keys of the item may be seen.
    pub(crate) fn mask_row(
        &self,
        item: &Item,
        q_head: usize,
        row: usize,
        keys: Range<usize>,
    ) -> Option<Cow<'a, [u8]>> {
        let mask = self.boolean_mask.as_ref()?.broadcast_row([item.index, q_head, row]);
        if self.attention.mask_is_bits {
            return Some(keys.map(|key| mask[key / 8] >> (key % 8) & 1).collect());
        }
        Some(Cow::Borrowed(&mask[keys]))
    }

    /// ALiBi slope of a head: a score loses `slope · |row + Sk − Sq − key|`, lengths being the
    /// item's.
    pub(crate) fn alibi_slope(&self, item: &Item, q_head: usize) -> Option<f32> {
        let slopes = self.alibi_slopes.as_ref()?;
        Some(slopes.broadcast_row([0, 0, item.index])[q_head])
    }

    /// Sink logit of a head.
    pub(crate) fn sink(&self, q_head: usize) -> Option<f32> {
        Some(self.sink.as_ref()?.row([0; 3])[q_head])
    }
}

/// A forward's checked outputs; see [`Problem`] for the rows of no item.
pub(crate) struct OutputRows<'a, T> {
    /// Rows at [`Item::q_index`].
    pub(crate) o: RowsMut<'a, T>,
    /// Values at [`Problem::lse_index`].
    pub(crate) lse: Option<&'a mut [f32]>,
}

impl<'a, T: Copy> OutputRows<'a, T> {
    /// Checks dimensions, placement and strides; writes nothing.
    pub(crate) fn new(attention: &Attention, output: &'a mut Output<'_, T>) -> Result<Self> {
        let [.., o_dims] = attention.tensor_dims();
        let lse = match &mut output.lse {
            Some(lse) => Some(contiguous_mut(lse, "lse", &attention.lse_dims())?),
            None => None,
        };
        Ok(Self { o: RowsMut::new(&mut output.o, "o", &o_dims)?, lse })
    }
}

/// A backward's checked outputs.
pub(crate) struct GradientRows<'a, T> {
    /// Rows at [`Item::q_index`].
    pub(crate) dq: Option<RowsMut<'a, T>>,
    /// Rows at [`Item::kv_index`].
    pub(crate) dk: Option<RowsMut<'a, T>>,
    /// Rows at [`Item::kv_index`].
    pub(crate) dv: Option<RowsMut<'a, T>>,
    /// Rows of keys at `[item, q_head, row]`, or 0 on a broadcast axis.
    pub(crate) dbias: Option<RowsMut<'a, f32>>,
    /// One value a query head.
    pub(crate) dsink: Option<&'a mut [f32]>,
}

impl<'a, T: Copy> GradientRows<'a, T> {
    /// Checks dimensions, placement and strides, and that bias and sink are there if their
    /// gradients are asked for; writes nothing.
    pub(crate) fn new(attention: &Attention, gradients: &'a mut Gradients<'_, T>) -> Result<Self> {
        let shape = &attention.shape;
        let [q_dims, k_dims, v_dims, _] = attention.tensor_dims();
        let Gradients { dq, dk, dv, dbias, dsink } = gradients;
        let no_such = |tensor| Error::Presence {
            tensor,
            problem: "its gradient is asked for, but the call declares no such option",
        };
        let dbias = match (dbias, attention.bias) {
            (Some(dbias), Some(axes)) => Some(RowsMut::new(dbias, "dbias", &axes.dims(shape))?),
            (Some(_), None) => return Err(no_such("dbias")),
            (None, _) => None,
        };
        let dsink = match (dsink, attention.sink) {
            (Some(dsink), true) => Some(contiguous_mut(dsink, "dsink", &[shape.q_heads])?),
            (Some(_), false) => return Err(no_such("dsink")),
            (None, _) => None,
        };
        Ok(Self {
            dq: dq.as_mut().map(|dq| RowsMut::new(dq, "dq", &q_dims)).transpose()?,
            dk: dk.as_mut().map(|dk| RowsMut::new(dk, "dk", &k_dims)).transpose()?,
            dv: dv.as_mut().map(|dv| RowsMut::new(dv, "dv", &v_dims)).transpose()?,
            dbias,
            dsink,
        })
    }
}

/// A dropout's state, which must lie in host memory.
fn state_on_host<'t, 'a>(
    state: Option<&'t TensorRef<'a, u64>>,
) -> Result<Option<&'t TensorRef<'a, u64>>> {
    state.map(|state| read_state(state).map(|_| state)).transpose()
}

/// The rows of an option's tensor, if there is one.
fn rows<'a, V>(
    tensor: &Option<(&TensorRef<'a, V>, Vec<usize>)>,
    name: &'static str,
) -> Result<Option<Rows<'a, V>>> {
    tensor.as_ref().map(|(tensor, dims)| Rows::new(tensor, name, dims)).transpose()
}

/// The items of a call, from validated lengths.
fn items(attention: &Attention, options: &OptionTensors<'_, '_>) -> Result<Vec<Item>> {
    let shape = &attention.shape;
    let item = |index, batch, q_rows: Range<usize>, kv_rows: Range<usize>| Item {
        index,
        batch,
        visibility: attention.mask.visibility(q_rows.len(), kv_rows.len()),
        q_rows,
        kv_rows,
    };
    if let (Some(packed), Layout::Packed { q_tokens, kv_tokens }) =
        (options.packed, attention.layout)
    {
        let (q_spans, kv_spans) = lengths::packed_spans(shape, packed, q_tokens, kv_tokens)?;
        let spans = q_spans.into_iter().zip(kv_spans).enumerate();
        return Ok(spans.map(|(index, (q, kv))| item(index, 0, q, kv)).collect());
    }
    let kv_lens = match options.key_lengths {
        Some(given) => {
            let given = lengths::on_host(given, "key_lengths", shape.batch)?;
            lengths::within("key_lengths", given, shape.kv_len)?
        }
        None => {
            let mut kv_lens = room_for(shape.batch)?;
            kv_lens.resize(shape.batch, shape.kv_len);
            kv_lens
        }
    };
    let mut items = room_for(shape.batch)?;
    let kv_lens = kv_lens.into_iter().enumerate();
    items.extend(kv_lens.map(|(batch, kv_len)| item(batch, batch, 0..shape.q_len, 0..kv_len)));
    Ok(items)
}

/// Room for one value an item; a batch may be large even where its tensors are empty.
fn room_for<T>(items: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(items).map_err(|_| Error::OutOfMemory {
        device: "cpu".to_owned(),
        bytes: items.saturating_mul(size_of::<T>()),
    })?;
    Ok(room)
}
