//! Random calls, as owned tensors.

use std::ops::Range;

use ferroflash_core::philox::philox4x32;
use proptest::prelude::*;

use super::super::{CpuTile, backward, forward};
use crate::attention::{
    Align, Attention, Broadcast, Dropout, Gradients, Inputs, Layout, Lengths, Mask, Output, Packed,
    Saved, Scale, Shape,
};
use crate::element::Element;
use crate::tensor::{TensorMut, TensorRef, contiguous_strides};

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Memory {
    /// In the order of its axes.
    Contiguous,
    /// Heads before rows.
    HeadsFirst,
    /// Three elements between rows that no one may read or write.
    Gaps,
}

/// A tensor and what is not of it, which holds NaN.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Owned<T> {
    pub(super) values: Vec<T>,
    pub(super) dims: Vec<usize>,
    strides: Vec<i64>,
}

impl<T: Element> Owned<T> {
    /// All NaN.
    pub(super) fn poisoned(dims: &[usize], memory: Memory) -> Self {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        if memory == Memory::HeadsFirst && dims.len() >= 3 {
            order.swap(dims.len() - 3, dims.len() - 2);
        }
        let mut ordered: Vec<usize> = order.iter().map(|&axis| dims[axis]).collect();
        if let (Memory::Gaps, Some(last)) = (memory, ordered.last_mut()) {
            *last += 3;
        }
        let mut strides = vec![0; dims.len()];
        for (&axis, stride) in order.iter().zip(contiguous_strides(&ordered)) {
            strides[axis] = stride;
        }
        let values = vec![T::from_f32(f32::NAN); ordered.iter().product()];
        Self { values, dims: dims.to_vec(), strides }
    }

    pub(super) fn new(contents: &[f32], dims: &[usize], memory: Memory) -> Self {
        let mut owned = Self::poisoned(dims, memory);
        for (place, &value) in owned.places().into_iter().zip(contents) {
            owned.values[place] = T::from_f32(value);
        }
        owned
    }

    /// Offsets of the elements in the order of the axes.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![0];
        for (&dim, &stride) in self.dims.iter().zip(&self.strides) {
            let next = |place: usize| (0..dim).map(move |index| place + index * stride as usize);
            places = places.into_iter().flat_map(next).collect();
        }
        places
    }

    pub(super) fn contents(&self) -> Vec<f64> {
        self.places().into_iter().map(|place| self.values[place].to_f64()).collect()
    }

    pub(super) fn view(&self) -> TensorRef<'_, T> {
        TensorRef::host_strided(&self.values, &self.dims, &self.strides).unwrap()
    }

    pub(super) fn view_mut(&mut self) -> TensorMut<'_, T> {
        TensorMut::host_strided(&mut self.values, &self.dims, &self.strides).unwrap()
    }
}

/// `count` uniform values in -1.5..1.5.
pub(super) fn uniform(stream: u32, count: usize) -> Vec<f32> {
    let word = |index: usize| philox4x32::<10>([index as u32, 0, 0, 0], [stream, 77])[0];
    (0..count).map(|index| (word(index) >> 8) as f32 * (3.0 / 16_777_216.0) - 1.5).collect()
}

/// A call with everything it reads.
pub(super) struct Case<T> {
    pub(super) attention: Attention,
    pub(super) tile: CpuTile,
    pub(super) q: Owned<T>,
    pub(super) k: Owned<T>,
    pub(super) v: Owned<T>,
    pub(super) bias: Option<Owned<f32>>,
    pub(super) boolean_mask: Option<Vec<u8>>,
    pub(super) slopes: Option<Owned<f32>>,
    pub(super) sink: Option<Owned<f32>>,
    pub(super) key_lengths: Vec<i32>,
    pub(super) cumulative: [Vec<i32>; 2],
    pub(super) used: [Vec<i32>; 2],
    pub(super) d_o: Owned<T>,
    pub(super) d_lse: Option<Owned<f32>>,
    memory: Memory,
}

/// What a case is drawn from.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) batch: usize,
    pub(super) heads: (usize, usize),
    pub(super) lengths: (usize, usize),
    pub(super) channels: (usize, usize),
    pub(super) layout: u8,
    pub(super) mask: Mask,
    pub(super) scale: Scale,
    pub(super) softcap: bool,
    pub(super) alibi: bool,
    pub(super) bias: Option<Broadcast>,
    pub(super) boolean_mask: Option<Broadcast>,
    pub(super) sink: bool,
    pub(super) dropout: bool,
    pub(super) d_lse: bool,
    pub(super) memory: Memory,
    pub(super) tile: CpuTile,
    pub(super) seed: u32,
}

/// The results of both passes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Results<T> {
    pub(super) o: Owned<T>,
    pub(super) lse: Owned<f32>,
    pub(super) dq: Owned<T>,
    pub(super) dk: Owned<T>,
    pub(super) dv: Owned<T>,
    pub(super) dbias: Option<Owned<f32>>,
    pub(super) dsink: Option<Owned<f32>>,
}

/// Offsets of `batch` items of different lengths that sum to at most `batch · length`.
fn cumulative(batch: usize, length: usize, seed: u32) -> Vec<i32> {
    let mut offsets = vec![0];
    for item in 0..batch {
        let bits = philox4x32::<10>([item as u32, 1, 0, 0], [seed, 5])[0] as usize;
        offsets.push(offsets[item] + (bits % (length + 1)) as i32);
    }
    offsets
}

impl Options {
    pub(super) fn case<T: Element>(&self) -> Case<T> {
        let shape = Shape {
            batch: self.batch,
            q_heads: self.heads.0 * self.heads.1,
            kv_heads: self.heads.1,
            q_len: self.lengths.0,
            kv_len: self.lengths.1,
            head_dim: self.channels.0,
            value_dim: self.channels.1,
        };
        let offsets = [
            cumulative(self.batch, shape.q_len, self.seed),
            cumulative(self.batch, shape.kv_len, self.seed + 1),
        ];
        let [q_tokens, kv_tokens] = [0, 1].map(|side| offsets[side][self.batch] as usize);
        let spans = |offsets: &Vec<i32>| offsets.windows(2).map(|w| w[1] - w[0]).collect();
        let mut used: [Vec<i32>; 2] = [spans(&offsets[0]), spans(&offsets[1])];
        if self.layout == 3 {
            used.iter_mut().flatten().for_each(|length| *length -= *length / 3);
        }
        let mut attention = Attention::new(shape).mask(self.mask).scale(self.scale);
        attention = attention.layout(match self.layout {
            0 => Layout::Dense,
            1 => Layout::KeyLengths,
            _ => Layout::Packed { q_tokens, kv_tokens },
        });
        attention.softcap = self.softcap.then_some(1.25);
        (attention.alibi, attention.sink) = (self.alibi, self.sink);
        (attention.bias, attention.boolean_mask) = (self.bias, self.boolean_mask);
        attention.dropout =
            self.dropout.then(|| Dropout::new(0.3, (u64::from(self.seed), 1 << 33)));
        let [q_dims, k_dims, v_dims, o_dims] = attention.tensor_dims();
        let filled = |stream, dims: &[usize]| uniform(stream + self.seed, dims.iter().product());
        let tensor = |stream, dims: &[usize]| Owned::new(&filled(stream, dims), dims, self.memory);
        let plain = |stream, dims: &[usize]| {
            Owned::<f32>::new(&filled(stream, dims), dims, Memory::Contiguous)
        };
        let cells = |axes: Broadcast| axes.dims(&shape);
        Case {
            tile: self.tile,
            q: tensor(1, &q_dims),
            k: tensor(2, &k_dims),
            v: tensor(3, &v_dims),
            d_o: tensor(4, &o_dims),
            d_lse: self.d_lse.then(|| plain(5, &attention.lse_dims())),
            bias: self.bias.map(|axes| {
                let mut bias = plain(6, &cells(axes));
                bias.values.iter_mut().skip(3).step_by(17).for_each(|b| *b = f32::NEG_INFINITY);
                bias
            }),
            boolean_mask: self.boolean_mask.map(|axes| {
                filled(7, &cells(axes)).iter().map(|value| u8::from(*value > -0.9)).collect()
            }),
            slopes: self.alibi.then(|| {
                // Scores of a size whose rounding in f32 stays below what is tested for.
                let mut slopes = plain(8, &[self.batch, shape.q_heads]);
                slopes.values.iter_mut().for_each(|slope| *slope /= 64.0);
                slopes
            }),
            sink: self.sink.then(|| plain(9, &[shape.q_heads])),
            key_lengths: (0..self.batch)
                .map(|item| (item * 7 + self.seed as usize) % (shape.kv_len + 1))
                .map(|length| length as i32)
                .collect(),
            cumulative: offsets,
            used,
            attention,
            memory: self.memory,
        }
    }
}

impl<T: Element> Case<T> {
    pub(super) fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.bias = self.bias.as_ref().map(Owned::view);
        inputs.alibi_slopes = self.slopes.as_ref().map(Owned::view);
        inputs.sink = self.sink.as_ref().map(Owned::view);
        if let (Some(mask), Some(axes)) = (&self.boolean_mask, self.attention.boolean_mask) {
            let dims = axes.dims(&self.attention.shape);
            inputs.boolean_mask = Some(TensorRef::host(mask, &dims).unwrap());
        }
        match self.attention.layout {
            Layout::Dense => {}
            Layout::KeyLengths => inputs.key_lengths = Some(Lengths::Host(&self.key_lengths)),
            Layout::Packed { .. } => {
                inputs.packed = Some(Packed {
                    cu_q: Lengths::Host(&self.cumulative[0]),
                    cu_k: Lengths::Host(&self.cumulative[1]),
                    used_q: Some(Lengths::Host(&self.used[0])),
                    used_k: Some(Lengths::Host(&self.used[1])),
                });
            }
        }
        inputs
    }

    /// Rows of k and v that no item has, as coordinates on their row axis, for each batch item.
    pub(super) fn unused_keys(&self) -> Vec<(usize, Range<usize>)> {
        match self.attention.layout {
            Layout::Dense => Vec::new(),
            Layout::KeyLengths => {
                let kv_len = self.attention.shape.kv_len;
                let items = self.key_lengths.iter().enumerate();
                items.map(|(item, &length)| (item, length as usize..kv_len)).collect()
            }
            Layout::Packed { .. } => {
                let starts = self.cumulative[1].windows(2).zip(&self.used[1]);
                starts.map(|(w, &used)| (0, (w[0] + used) as usize..w[1] as usize)).collect()
            }
        }
    }

    /// Both passes, every gradient, into NaN.
    pub(super) fn run(&self) -> Results<T> {
        let [q_dims, k_dims, v_dims, o_dims] = self.attention.tensor_dims();
        let like = |input: &Option<Owned<f32>>| {
            input.as_ref().map(|input| Owned::poisoned(&input.dims, Memory::Contiguous))
        };
        let mut results = Results {
            o: Owned::poisoned(&o_dims, self.memory),
            lse: Owned::poisoned(&self.attention.lse_dims(), Memory::Contiguous),
            dq: Owned::poisoned(&q_dims, self.memory),
            dk: Owned::poisoned(&k_dims, self.memory),
            dv: Owned::poisoned(&v_dims, self.memory),
            dbias: like(&self.bias),
            dsink: like(&self.sink),
        };
        let Results { o, lse, dq, dk, dv, dbias, dsink } = &mut results;
        let mut output = Output { o: o.view_mut(), lse: Some(lse.view_mut()) };
        forward(&self.attention, &self.inputs(), &mut output, Some(self.tile)).unwrap();
        drop(output);
        let saved = Saved { inputs: self.inputs(), o: o.view(), lse: lse.view() };
        let mut gradients = Gradients {
            dq: Some(dq.view_mut()),
            dk: Some(dk.view_mut()),
            dv: Some(dv.view_mut()),
            dbias: dbias.as_mut().map(Owned::view_mut),
            dsink: dsink.as_mut().map(Owned::view_mut),
        };
        let d_lse = self.d_lse.as_ref().map(Owned::view);
        let (d_o, tile) = (self.d_o.view(), Some(self.tile));
        backward(&self.attention, &saved, &d_o, d_lse.as_ref(), &mut gradients, tile).unwrap();
        drop((gradients, saved));
        results
    }
}

fn broadcast() -> impl Strategy<Value = Option<Broadcast>> {
    let axes = any::<[bool; 3]>();
    proptest::option::weighted(
        0.3,
        axes.prop_map(|[batch, heads, rows]| Broadcast { batch, heads, rows }),
    )
}

fn mask() -> impl Strategy<Value = Mask> {
    let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
    let side = || proptest::option::weighted(0.6, 0..40_usize);
    prop_oneof![
        Just(Mask::full()),
        align.clone().prop_map(Mask::causal),
        (align, side(), side())
            .prop_map(|(align, left, right)| { Mask::full().aligned(align).window(left, right) }),
    ]
}

pub(super) fn options() -> impl Strategy<Value = Options> {
    let channels = || prop_oneof![Just(1), Just(8), Just(20), Just(33), Just(64)];
    let scale = prop_oneof![
        Just(Scale::InvSqrtHeadDim),
        Just(Scale::Factor(0.0)),
        Just(Scale::Factor(-0.3)),
    ];
    let memory =
        prop_oneof![Just(Memory::Contiguous), Just(Memory::HeadsFirst), Just(Memory::Gaps)];
    let side = || prop_oneof![Just(16), Just(32), Just(48), 1..70_usize];
    let tile = (side(), side()).prop_map(|(q_rows, kv_columns)| CpuTile { q_rows, kv_columns });
    let sizes = (1..4_usize, (1..4_usize, 1..3_usize), (0..100_usize, 0..140_usize));
    let rest = (0..4_u8, mask(), scale, broadcast(), broadcast(), memory, tile, 0..1000_u32);
    let flag = || proptest::bool::weighted(0.3);
    let flags = (flag(), flag(), flag(), flag(), flag());
    (sizes, (channels(), channels()), rest, flags).prop_map(
        |((batch, heads, lengths), channels, rest, flags)| {
            let (layout, mask, scale, bias, boolean_mask, memory, tile, seed) = rest;
            let (softcap, alibi, sink, dropout, d_lse) = flags;
            Options {
                batch,
                heads,
                lengths,
                channels,
                layout,
                mask,
                scale,
                softcap,
                alibi,
                bias,
                boolean_mask,
                sink,
                dropout,
                d_lse,
                memory,
                tile,
                seed,
            }
        },
    )
}
