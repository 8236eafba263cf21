//! What a schedule did.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A tensor in slow memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tensor {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// All scores, where a schedule stores them.
    Scores,
    /// All probabilities, likewise.
    Probabilities,
    /// Outputs.
    O,
    /// What is kept of a row's softmax: m and l, or lse alone.
    State,
    /// Gradients of the outputs.
    DO,
    /// `⟨dO, O⟩` of each row.
    Delta,
    /// Gradients of the queries.
    DQ,
    /// Gradients of the keys.
    DK,
    /// Gradients of the values.
    DV,
    /// Sums that several programs add to: dQ of a column owner, dK of a row owner; or the dK of
    /// each query head, before the heads of a group are added up.
    Scratch,
    /// The same for dV, where there are two such tensors.
    ScratchV,
}

/// Words that crossed between the chip and one tensor in slow memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Words loaded.
    pub reads: u128,
    /// Words stored, without those of the initialisation.
    pub writes: u128,
    /// Words stored to begin with: zeros, and −∞ for row maxima.
    pub initial: u128,
    /// Words added to what is there, one atomic addition each.
    pub adds: u128,
}

/// One tile of the score matrix, worked on once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Who worked: the number of the program, in order of launch.
    pub program: u64,
    /// Index of the query tile.
    pub q_tile: usize,
    /// Index of the K/V tile.
    pub kv_tile: usize,
    /// Query rows of the tile; fewer in a tail.
    pub rows: usize,
    /// Keys of the tile; fewer in a tail.
    pub keys: usize,
    /// Cells of it that its rows may see.
    pub visible: u64,
}

/// Everything that a schedule did, as counted while it ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Words by tensor.
    pub words: BTreeMap<Tensor, Words>,
    /// Tiles in order of visit.
    pub visits: Vec<Visit>,
    /// Programs launched by the main kernel.
    pub programs: u64,
    /// Merges of a row's state with another one's.
    pub merges: u64,
    /// Divisions of a row's output by its sum.
    pub divisions: u64,
    /// Most words that lay on the chip at once.
    pub peak_words: u64,
    /// Programs that stored, or added to, the tile of a tensor, by (tensor, head, first row).
    pub producers: BTreeMap<(Tensor, usize, usize), BTreeSet<u64>>,
}

impl Trace {
    /// Words of one tensor; none if it was never touched.
    pub fn of(&self, tensor: Tensor) -> Words {
        self.words.get(&tensor).copied().unwrap_or_default()
    }

    /// Words read, of all tensors.
    pub fn reads(&self) -> u128 {
        self.words.values().map(|words| words.reads).sum()
    }

    /// Words written, of all tensors, without initialisation and atomic additions.
    pub fn writes(&self) -> u128 {
        self.words.values().map(|words| words.writes).sum()
    }

    /// Words written to begin with, of all tensors.
    pub fn initial(&self) -> u128 {
        self.words.values().map(|words| words.initial).sum()
    }

    /// Words added, of all tensors.
    pub fn adds(&self) -> u128 {
        self.words.values().map(|words| words.adds).sum()
    }

    /// All words that crossed the boundary, an atomic addition counted once.
    pub fn total(&self) -> u128 {
        self.reads() + self.writes() + self.initial() + self.adds()
    }

    /// How many programs produced each tile of a tensor's head, in order.
    pub fn producers_of(&self, tensor: Tensor, head: usize) -> Vec<usize> {
        let tiles = self.producers.range((tensor, head, 0)..(tensor, head + 1, 0));
        tiles.map(|(_, programs)| programs.len()).collect()
    }

    pub(crate) fn touch(&mut self, tensor: Tensor) -> &mut Words {
        self.words.entry(tensor).or_default()
    }

    pub(crate) fn produce(
        &mut self,
        tensor: Tensor,
        head: usize,
        rows: &Range<usize>,
        program: u64,
    ) {
        self.producers.entry((tensor, head, rows.start)).or_default().insert(program);
    }
}
