//! What a schedule is held against: the library's dense attention in binary64, and what must be
//! true of any schedule's trace. A check that fails says which it was.

use std::collections::BTreeMap;
use std::ops::Range;

use ferroflash::cpu::dense::{self, Precision};
use ferroflash::{Align, Attention, Dropout, DropoutState, Inputs, Mask, Scale, TensorRef};
use ferroflash_core::dropout::DropoutMask;
use ferroflash_core::shape::Shape;
use ferroflash_core::visibility::Visibility;
use ferroflash_ledger::schedule::{Blocks, Call, Real, Tensor, Trace};

/// Which check a result did not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// A number differs from the dense reference, or is NaN.
    Values,
    /// A visible cell was visited never, or more than once.
    Coverage,
    /// An output tile has no producer, or several.
    Ownership,
    /// A claimed count is not what was counted.
    Counts,
    /// Two warps use the same shared memory without a barrier between them.
    Hazard,
    /// Another order of the same merges gives another number.
    Order,
}

/// What a check found wrong.
#[derive(Clone, Debug)]
pub(crate) struct Rejection {
    /// The check.
    pub(crate) check: Check,
    /// What it found.
    pub(crate) why: String,
}

/// The outcome of a check.
pub(crate) type Verdict = Result<(), Rejection>;

/// The rejection by one check.
pub(crate) fn reject(check: Check, why: impl Into<String>) -> Verdict {
    Err(Rejection { check, why: why.into() })
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// All.
    Full,
    /// Those up to its diagonal.
    Causal(Align),
}

/// A call with numbers that f32 holds, in the schedules' layout `[batch, head, row, channel]`.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) shape: Shape,
    pub(crate) sight: Sight,
    pub(crate) scale: f32,
    pub(crate) dropout: Option<Dropout>,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) d_o: Vec<f32>,
}

/// What dense attention gives, in the schedules' layout.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    pub(crate) o: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    pub(crate) dq: Vec<f64>,
    pub(crate) dk: Vec<f64>,
    pub(crate) dv: Vec<f64>,
}

/// A problem's tensors in the scalars of a schedule.
pub(crate) struct Tensors<F> {
    pub(crate) q: Vec<F>,
    pub(crate) k: Vec<F>,
    pub(crate) v: Vec<F>,
    pub(crate) d_o: Vec<F>,
}

impl Problem {
    /// Numbers between −2 and 2 that depend on `seed` alone.
    pub(crate) fn new(shape: Shape, sight: Sight, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut draw = |dims: [usize; 4]| -> Vec<f32> {
            let next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 22) as f32 - 2.0
            };
            std::iter::repeat_with(next).take(dims.iter().product()).collect()
        };
        let (q, k, v) = (draw(shape.q_dims()), draw(shape.k_dims()), draw(shape.v_dims()));
        let d_o = draw(shape.o_dims());
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        Self { shape, sight, scale, dropout: None, q, k, v, d_o }
    }

    pub(crate) fn with_dropout(mut self, probability: f32) -> Self {
        self.dropout = Some(Dropout::new(probability, (7, 3)));
        self
    }

    /// The share of probabilities that is dropped, as rounded to 16 bits.
    pub(crate) fn dropout_rate(&self) -> f64 {
        self.dropout.map_or(0.0, |d| (f64::from(d.probability) * 65536.0).round() / 65536.0)
    }

    pub(crate) fn visible(&self) -> Visibility {
        let (q_len, kv_len) = (self.shape.q_len as u32, self.shape.kv_len as u32);
        match self.sight {
            Sight::Full => Visibility::full(q_len, kv_len),
            Sight::Causal(align) => Visibility::causal(q_len, kv_len, align),
        }
    }

    pub(crate) fn cast<F: Real>(&self) -> Tensors<F> {
        let cast = |values: &[f32]| values.iter().map(|x| F::from_f64(f64::from(*x))).collect();
        Tensors { q: cast(&self.q), k: cast(&self.k), v: cast(&self.v), d_o: cast(&self.d_o) }
    }

    /// The multiplier of a probability, as the library's generator has it.
    pub(crate) fn multiplier<F: Real>(&self) -> impl Fn(usize, usize, usize) -> F + use<F> {
        let dropout = self.dropout;
        move |head, row, key| {
            let Some(Dropout { probability, state: DropoutState::Value { seed, offset } }) =
                dropout
            else {
                return F::ONE;
            };
            let mask = DropoutMask::new(probability, seed, offset);
            let keeps = mask.keeps(head as u32, row as u32, key as u32);
            F::from_f64(if keeps { mask.keep_scale_f64() } else { 0.0 })
        }
    }

    pub(crate) fn call<'a, F: Real>(&self, tensors: &'a Tensors<F>) -> Call<'a, F> {
        let scale = F::from_f64(f64::from(self.scale));
        let Tensors { q, k, v, .. } = tensors;
        Call::new(self.shape, self.visible(), scale, q, k, v).expect("a valid call")
    }

    /// Everything in binary64, by the definition.
    pub(crate) fn dense(&self) -> Dense {
        let s = self.shape;
        let mask = match self.sight {
            Sight::Full => Mask::full(),
            Sight::Causal(align) => Mask::causal(align),
        };
        let mut attention = Attention::new(s).mask(mask).scale(Scale::Factor(self.scale));
        if let Some(dropout) = self.dropout {
            attention = attention.dropout(dropout);
        }
        let tensor = |values, [batch, rows, heads, channels]: [usize; 4]| {
            let by_head = TensorRef::host(values, &[batch, heads, rows, channels]);
            by_head.and_then(|tensor| tensor.transposed(1, 2)).expect("a tensor")
        };
        let inputs = Inputs::new(
            tensor(&self.q, s.q_dims()),
            tensor(&self.k, s.k_dims()),
            tensor(&self.v, s.v_dims()),
        );
        let d_o = tensor(&self.d_o, s.o_dims());
        let forward = dense::forward(&attention, &inputs, Precision::F64).expect("a valid call");
        let backward = dense::backward(&attention, &inputs, &d_o, None, Precision::F64);
        let backward = backward.expect("a valid call");
        Dense {
            o: by_head(&forward.o, s.o_dims()),
            lse: forward.lse,
            dq: by_head(&backward.dq, s.q_dims()),
            dk: by_head(&backward.dk, s.k_dims()),
            dv: by_head(&backward.dv, s.v_dims()),
        }
    }

    /// Every visible cell of every head was visited once, and no cell twice.
    pub(crate) fn check_coverage(&self, trace: &Trace, blocks: Blocks) -> Verdict {
        let visible = self.visible();
        let mut visits = vec![0_usize; self.shape.q_len * self.shape.kv_len];
        for visit in &trace.visits {
            for row in range(visit.q_tile * blocks.q_block, visit.rows) {
                for key in range(visit.kv_tile * blocks.kv_block, visit.keys) {
                    visits[row * self.shape.kv_len + key] += 1;
                }
            }
        }
        let heads = self.shape.batch * self.shape.q_heads;
        for (cell, visits) in visits.iter().enumerate() {
            let (row, key) = (cell / self.shape.kv_len, cell % self.shape.kv_len);
            let sees = visible.sees(row as u32, key as u32);
            if *visits > heads || (sees && *visits < heads) {
                let why = format!("row {row}, key {key}: {visits} visits for {heads} heads");
                return reject(Check::Coverage, why);
            }
        }
        Ok(())
    }
}

fn range(start: usize, len: usize) -> Range<usize> {
    start..start + len
}

/// `[batch, row, head, channel]` to `[batch, head, row, channel]`.
pub(crate) fn by_head(values: &[f64], [batch, rows, heads, channels]: [usize; 4]) -> Vec<f64> {
    let mut moved = Vec::with_capacity(values.len());
    for item in 0..batch {
        for head in 0..heads {
            for row in 0..rows {
                let at = ((item * rows + row) * heads + head) * channels;
                moved.extend_from_slice(&values[at..at + channels]);
            }
        }
    }
    moved
}

/// Every number within `tolerance` of the largest exact one; −∞ where it is −∞.
pub(crate) fn check_values<F: Real>(
    tensor: &str,
    had: &[F],
    exact: &[f64],
    tolerance: f64,
) -> Verdict {
    if had.len() != exact.len() {
        let why = format!("{tensor}: {} values of {}", had.len(), exact.len());
        return reject(Check::Values, why);
    }
    let finite = exact.iter().filter(|value| value.is_finite());
    let allowed = tolerance * finite.fold(1.0, |largest: f64, value| largest.max(value.abs()));
    for (at, (had, exact)) in had.iter().zip(exact).enumerate() {
        let had = had.to_f64();
        let difference = (had - exact).abs();
        if had != *exact && (difference.is_nan() || difference > allowed) {
            return reject(Check::Values, format!("{tensor}[{at}]: {had}, exactly {exact}"));
        }
    }
    Ok(())
}

/// Every tile of a tensor was produced by one program, and there are as many as there should be.
pub(crate) fn check_owner(trace: &Trace, tensor: Tensor, heads: usize, tiles: usize) -> Verdict {
    for head in 0..heads {
        let producers = trace.producers_of(tensor, head);
        if producers.len() != tiles || producers.iter().any(|count| *count != 1) {
            let why = format!("{tensor:?} of head {head}: {producers:?} producers a tile");
            return reject(Check::Ownership, why);
        }
    }
    Ok(())
}

/// What is claimed is what was counted.
pub(crate) fn check_counts<const N: usize>(pairs: [(&str, u128, u128); N]) -> Verdict {
    let names: BTreeMap<&str, (u128, u128)> =
        pairs.into_iter().map(|(name, claimed, counted)| (name, (claimed, counted))).collect();
    for (name, (claimed, counted)) in names {
        if claimed != counted {
            return reject(Check::Counts, format!("{name}: {claimed} claimed, {counted} counted"));
        }
    }
    Ok(())
}

/// A shape of one item with value_dim channels of its own.
pub(crate) fn shape(
    batch: usize,
    (q_heads, kv_heads): (usize, usize),
    (q_len, kv_len): (usize, usize),
    (head_dim, value_dim): (usize, usize),
) -> Shape {
    Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}
