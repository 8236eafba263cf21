//! One row, key by key: the state algebra with its numerator, in three coordinates and in any
//! order of merges (M4.3 §0x08, §0x09; M4.4 §0x02).

use ferroflash_core::row_state::{Rescale, RowState};

use super::number::Real;
use super::tile::add_scaled;
use crate::error::{Error, Result};

/// The state of a set of keys: m, l and the numerator u.
#[derive(Clone, Debug, PartialEq)]
pub struct State<F> {
    /// m and l.
    pub row: RowState<F>,
    /// `Σ exp(s − m)·v`.
    pub numerator: Vec<F>,
}

impl<F: Real> State<F> {
    /// No keys, for values of `width` channels.
    pub fn empty(width: usize) -> Self {
        Self { row: F::EMPTY, numerator: vec![F::ZERO; width] }
    }

    /// One key; none where its score is −∞, a masked one's.
    pub fn key(score: F, value: &[F]) -> Self {
        if score == F::EMPTY.row_max {
            return Self::empty(value.len());
        }
        Self { row: RowState { row_max: score, row_sum: F::ONE }, numerator: value.to_vec() }
    }

    /// The state of both sets, which must share no key, and the factors that were applied.
    pub fn merge(&self, other: &Self) -> (Self, Rescale<F>) {
        let (row, rescale) = F::merge(self.row, other.row);
        let pairs = self.numerator.iter().zip(&other.numerator);
        let numerator = pairs.map(|(a, b)| *a * rescale.left + *b * rescale.right).collect();
        (Self { row, numerator }, rescale)
    }

    /// The output, by dividing; 0 for no keys.
    pub fn output(&self) -> Vec<F> {
        if self.row.row_sum == F::ZERO {
            return vec![F::ZERO; self.numerator.len()];
        }
        self.numerator.iter().map(|value| *value / self.row.row_sum).collect()
    }

    /// Log-sum-exp.
    pub fn lse(&self) -> F {
        F::lse(self.row)
    }

    /// The same state with its output in place of its numerator.
    pub fn normalized(&self) -> Normalized<F> {
        Normalized { row: self.row, output: self.output() }
    }
}

/// m, l and the output `u / l`: what FlashAttention-1 stores after every tile.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalized<F> {
    /// m and l.
    pub row: RowState<F>,
    /// `u / l`.
    pub output: Vec<F>,
}

impl<F: Real> Normalized<F> {
    /// The state of both sets. Outputs weigh what their sums do in the common frame; from outputs
    /// alone that cannot be known.
    pub fn merge(&self, other: &Self) -> Self {
        let (row, rescale) = F::merge(self.row, other.row);
        let normalizer = F::normalizer(row);
        let left = self.row.row_sum * rescale.left * normalizer;
        let right = other.row.row_sum * rescale.right * normalizer;
        let pairs = self.output.iter().zip(&other.output);
        Self { row, output: pairs.map(|(a, b)| *a * left + *b * right).collect() }
    }
}

/// lse and the output: what is kept for the backward, and what split kernels join.
#[derive(Clone, Debug, PartialEq)]
pub struct Log<F> {
    /// Log-sum-exp.
    pub lse: F,
    /// The output.
    pub output: Vec<F>,
}

impl<F: Real> Log<F> {
    /// The state of both sets: that of two keys with scores `lse` and values `output`.
    pub fn merge(&self, other: &Self) -> Self {
        let pair = State::key(self.lse, &self.output).merge(&State::key(other.lse, &other.output));
        Self { lse: pair.0.lse(), output: pair.0.output() }
    }
}

/// In two passes: m and l from all scores, then every score again with its value. Nothing of the
/// row is kept between keys but m, l and the sum.
pub fn two_passes<F: Real>(scores: &[F], values: &[Vec<F>]) -> (RowState<F>, Vec<F>) {
    let of_keys = scores.iter().map(|score| State::key(*score, &[]));
    let row = of_keys.fold(State::empty(0), |sum, key| sum.merge(&key).0).row;
    let mut output = vec![F::ZERO; values.first().map_or(0, Vec::len)];
    for (score, value) in scores.iter().zip(values) {
        if *score != F::EMPTY.row_max {
            add_scaled(&mut output, (*score - row.row_max).exp() / row.row_sum, value);
        }
    }
    (row, output)
}

/// An order of merges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// State number so many.
    Leaf(usize),
    /// The left, then the right.
    Join(Box<Tree>, Box<Tree>),
}

impl Tree {
    /// One after another, in the order given.
    ///
    /// # Errors
    /// Nothing to join.
    pub fn chain(order: &[usize]) -> Result<Self> {
        let (first, rest) = order.split_first().ok_or(Error::Zero { field: "order" })?;
        let join = |tree, leaf: &usize| Self::Join(Box::new(tree), Box::new(Self::Leaf(*leaf)));
        Ok(rest.iter().fold(Self::Leaf(*first), join))
    }

    /// By halves.
    ///
    /// # Errors
    /// Nothing to join.
    pub fn balanced(order: &[usize]) -> Result<Self> {
        match order {
            [] | [_] => Self::chain(order),
            _ => {
                let (left, right) = order.split_at(order.len() / 2);
                Ok(Self::Join(Box::new(Self::balanced(left)?), Box::new(Self::balanced(right)?)))
            }
        }
    }

    /// Merges of which one waits for the other, in the longest chain.
    pub fn depth(&self) -> usize {
        match self {
            Self::Leaf(_) => 0,
            Self::Join(left, right) => left.depth().max(right.depth()) + 1,
        }
    }

    /// The states joined in this order.
    ///
    /// # Errors
    /// A leaf that there is no state for.
    pub fn merge<F: Real>(&self, states: &[State<F>]) -> Result<State<F>> {
        match self {
            Self::Leaf(state) => states.get(*state).cloned().ok_or_else(|| {
                Error::field("tree", state, format!("a state below {}", states.len()))
            }),
            Self::Join(left, right) => Ok(left.merge(states)?.merge(&right.merge(states)?).0),
        }
    }

    /// Plain terms added up in this order.
    ///
    /// # Errors
    /// A leaf that there is no term for.
    pub fn sum<F: Real>(&self, terms: &[F]) -> Result<F> {
        match self {
            Self::Leaf(term) => terms
                .get(*term)
                .copied()
                .ok_or_else(|| Error::field("tree", term, format!("a term below {}", terms.len()))),
            Self::Join(left, right) => Ok(left.sum(terms)? + right.sum(terms)?),
        }
    }
}
