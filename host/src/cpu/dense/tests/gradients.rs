//! Every gradient against central differences of the forward.

use proptest::prelude::*;

use super::case::{Case, PackedLengths, shape};
use crate::attention::{Align, Attention, Broadcast, Dropout, Layout, Mask, Scale};

/// A tensor of a case, to perturb.
type Tensor = fn(&mut Case) -> &mut Vec<f32>;

/// Derivative of the loss by one element: central differences of two steps, extrapolated, so that
/// the error is of the fourth order. Steps are exact in f32 on the grid of [`Case::new`].
fn difference(case: &mut Case, tensor: Tensor, index: usize) -> f64 {
    let value = tensor(case)[index];
    let mut central = |step: f32| {
        let mut loss = |value| {
            tensor(case)[index] = value;
            case.loss()
        };
        (loss(value + step) - loss(value - step)) / (2.0 * f64::from(step))
    };
    let (coarse, fine) = (central(1.0 / 512.0), central(1.0 / 1024.0));
    tensor(case)[index] = value;
    (4.0 * fine - coarse) / 3.0
}

fn check(mut case: Case) {
    let gradients = case.backward();
    let mut compare = |name: &str, tensor: Tensor, gradient: &[f64]| {
        assert_eq!(gradient.len(), tensor(&mut case).len(), "{name}");
        for (index, gradient) in gradient.iter().enumerate() {
            if tensor(&mut case)[index] == f32::NEG_INFINITY {
                assert_eq!(*gradient, 0.0, "{name}[{index}] of a masked cell");
                continue;
            }
            let difference = difference(&mut case, tensor, index);
            assert!(
                (gradient - difference).abs() <= 1e-7 * (1.0 + difference.abs()),
                "{name}[{index}]: {gradient}, but differences give {difference}"
            );
        }
    };
    compare("dq", |case| &mut case.q, &gradients.dq);
    compare("dk", |case| &mut case.k, &gradients.dk);
    compare("dv", |case| &mut case.v, &gradients.dv);
    if let Some(dbias) = &gradients.dbias {
        compare("dbias", |case| case.bias.as_mut().expect("a bias"), dbias);
    }
    if let Some(dsink) = &gradients.dsink {
        compare("dsink", |case| case.sink.as_mut().expect("a sink"), dsink);
    }
}

fn small() -> Attention {
    Attention::new(shape(2, (2, 1), (4, 5), (3, 2)))
}

#[test]
fn plain() {
    check(Case::new(small()));
}

#[test]
fn loss_on_lse() {
    check(Case::new(small()).with_d_lse());
}

#[test]
fn softcap_and_scales() {
    for factor in [-0.75, 0.0, 2.0] {
        check(Case::new(small().scale(Scale::Factor(factor)).softcap(1.5)).with_d_lse());
    }
}

#[test]
fn sink_with_rows_that_see_no_key() {
    let attention = Attention::new(shape(1, (2, 2), (5, 3), (3, 3)));
    check(Case::new(attention.mask(Mask::causal(Align::BottomRight)).sink()).with_d_lse());
}

#[test]
fn bias_summed_over_every_kind_of_broadcast() {
    for bits in 0..8 {
        let axes = Broadcast { batch: bits & 1 != 0, heads: bits & 2 != 0, rows: bits & 4 != 0 };
        let mut case = Case::new(small().bias(axes).mask(Mask::causal(Align::TopLeft)));
        if let Some(bias) = &mut case.bias {
            bias[2] = f32::NEG_INFINITY;
        }
        check(case);
    }
}

#[test]
fn dropout() {
    let dropout = Dropout::new(0.4, (3, 1 << 40));
    check(Case::new(small().dropout(dropout).sink()).with_d_lse());
}

#[derive(Clone, Debug)]
struct Options {
    heads: (usize, usize),
    lengths: (usize, usize),
    channels: (usize, usize),
    layout: u8,
    mask: Mask,
    scale: f32,
    softcap: bool,
    alibi: bool,
    bias: Option<Broadcast>,
    boolean_mask: Option<Broadcast>,
    sink: bool,
    dropout: bool,
    d_lse: bool,
}

impl Options {
    fn case(&self) -> Case {
        let mut attention = Attention::new(shape(2, self.heads, self.lengths, self.channels))
            .mask(self.mask)
            .scale(Scale::Factor(self.scale));
        let (q_len, kv_len) = (self.lengths.0 as i32, self.lengths.1 as i32);
        // The second item is shorter than the first, and in one layout both have unused rows.
        let cumulative = |len: i32| vec![0, len, len + len / 2 + 1];
        let used = |len: i32| Some(vec![len - len / 2, len / 2 + 1]);
        let mut packed = PackedLengths {
            cu_q: cumulative(q_len),
            cu_k: cumulative(kv_len),
            ..PackedLengths::default()
        };
        let layout = Layout::Packed {
            q_tokens: packed.cu_q[2] as usize,
            kv_tokens: packed.cu_k[2] as usize,
        };
        if self.layout >= 2 {
            attention = attention.layout(layout);
        }
        if self.layout == 3 {
            (packed.used_q, packed.used_k) = (used(q_len), used(kv_len));
        }
        attention = if self.softcap { attention.softcap(1.25) } else { attention };
        attention = if self.alibi { attention.alibi() } else { attention };
        attention = if self.sink { attention.sink() } else { attention };
        if let Some(axes) = self.bias {
            attention = attention.bias(axes);
        }
        if let Some(axes) = self.boolean_mask {
            attention = attention.boolean_mask(axes);
        }
        if self.dropout {
            attention = attention.dropout(Dropout::new(0.3, (11, 5)));
        }
        let mut case = Case::new(attention);
        if self.layout == 1 {
            case = case.with_key_lengths(&[kv_len, kv_len / 2]);
        }
        if self.layout >= 2 {
            case.packed = Some(packed);
        }
        if self.d_lse { case.with_d_lse() } else { case }
    }
}

prop_compose! {
    fn broadcast()(
        (batch, heads, rows) in any::<(bool, bool, bool)>(),
    ) -> Broadcast {
        Broadcast { batch, heads, rows }
    }
}

prop_compose! {
    fn options()(
        heads in prop_oneof![Just((1, 1)), Just((2, 1)), Just((2, 2)), Just((3, 1))],
        lengths in (1..6_usize, 1..6_usize),
        channels in (1..4_usize, 1..4_usize),
        layout in 0..4_u8,
        align in prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)],
        sides in (prop::option::of(0..4_usize), prop::option::of(0..4_usize)),
        scale in prop_oneof![Just(0.5_f32), Just(-0.5), Just(1.25)],
        (softcap, alibi, sink, dropout, d_lse) in any::<(bool, bool, bool, bool, bool)>(),
        bias in prop::option::of(broadcast()),
        boolean_mask in prop::option::of(broadcast()),
    ) -> Options {
        let mask = Mask::full().aligned(align).window(sides.0, sides.1);
        Options {
            heads, lengths, channels, layout, mask, scale, softcap, alibi, bias, boolean_mask,
            sink, dropout, d_lse,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_combination(options in options()) {
        check(options.case());
    }
}
