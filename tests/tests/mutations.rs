//! The backward schedule, walked block by block as the kernels walk it, and what breaking it does.
//!
//! Blocks take turns, one phase each, so that what a GPU runs at once is interleaved here: scores
//! of a step, with dSᵀ left in one of two places, then dQ of the step before added to shared sums.
//! The walk as it is gives the gradients; each mutation is a fault that a kernel could have, and
//! the bound that kernels are held to must catch it.

use ferroflash::Dtype;
use ferroflash_core::backward::schedule::{BackwardSchedule, BackwardWork};
use ferroflash_core::backward::scratch::QueryGradientOrder;
use ferroflash_core::visibility::{UNBOUNDED, Visibility};
use ferroflash_tests::backend::{Grads, Outcome};
use ferroflash_tests::bound::result_error;
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::reference::attend;

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutation {
    /// Sums of dQ are read, and written a phase later.
    NonAtomicSums,
    /// Sums of dQ hold what was there before.
    UnclearScratch,
    /// Two blocks own the same keys, for half of the query tiles each.
    SecondWriter,
    /// A block walks one query head of its group.
    NoGroupLoop,
    /// dSᵀ has one place, which the next step's scores take before dQ has read it.
    EarlyOverwrite,
}

/// Rows and keys of a tile.
const ROWS: u32 = 16;
const KEYS: u32 = 16;
const ORDER: QueryGradientOrder = QueryGradientOrder::Values;

/// The call and what its blocks share.
struct Walk<'c> {
    case: &'c Case<f32>,
    outcome: &'c Outcome,
    mutation: Option<Mutation>,
    visible: Visibility,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    sums: Vec<f64>,
    grads: Grads,
}

/// One block between two phases.
struct Block {
    work: BackwardWork,
    steps: Vec<(usize, u32)>,
    next: usize,
    ds: [Vec<f64>; 2],
    dk: Vec<f64>,
    dv: Vec<f64>,
    /// Sums that were read and are yet to be written.
    pending: Vec<(usize, f64)>,
    is_done: bool,
}

impl<'c> Walk<'c> {
    fn new(case: &'c Case<f32>, outcome: &'c Outcome, mutation: Option<Mutation>) -> Self {
        let s = case.attention.shape();
        let (rows, keys) = (s.q_len as u32, s.kv_len as u32);
        let visible = Visibility {
            q_len: rows,
            kv_len: keys,
            offset: case.sight.align.offset(s.q_len, s.kv_len) as i32,
            left: UNBOUNDED,
            right: case.sight.right.map_or(UNBOUNDED, |right| right as i32),
        };
        let sums = s.batch * s.q_heads * padded(s.q_len) * s.head_dim;
        let before = if mutation == Some(Mutation::UnclearScratch) { 7.0 } else { 0.0 };
        Self {
            case,
            outcome,
            mutation,
            visible,
            q: case.q.contents(),
            k: case.k.contents(),
            v: case.v.contents(),
            d_o: case.d_o.contents(),
            sums: vec![before; sums],
            grads: Grads {
                dq: vec![f64::NAN; case.q.count()],
                dk: vec![f64::NAN; case.k.count()],
                dv: vec![f64::NAN; case.v.count()],
                dbias: None,
                dsink: None,
            },
        }
    }

    /// The blocks of the call, in the order of their numbers.
    fn blocks(&self) -> Vec<Block> {
        let s = self.case.attention.shape();
        let batch_heads = (s.batch * s.kv_heads) as u32;
        let schedule = BackwardSchedule {
            kv_blocks: (s.kv_len as u32).div_ceil(KEYS),
            batch_heads,
            parts: 1,
            section: BackwardSchedule::section_for(batch_heads),
        };
        let works = (0..schedule.blocks() as u32).map(|index| schedule.work(index));
        let blocks = works.flat_map(|work| {
            let first_key = work.kv_block * KEYS;
            let rows = self.visible.rows_of_any(&(first_key..first_key + KEYS));
            let heads = match self.mutation {
                Some(Mutation::NoGroupLoop) => 1,
                _ => s.group(),
            };
            let first_head = work.batch_head as usize % s.kv_heads * s.group();
            let tiles = rows.start / ROWS..rows.end.div_ceil(ROWS);
            let steps = (first_head..first_head + heads)
                .flat_map(|head| tiles.clone().map(move |tile| (head, tile)));
            let steps: Vec<_> = steps.collect();
            if self.mutation == Some(Mutation::SecondWriter) {
                let (left, right) = steps.split_at(steps.len() / 2);
                return vec![Block::new(work, left, s), Block::new(work, right, s)];
            }
            vec![Block::new(work, &steps, s)]
        });
        blocks.collect()
    }

    /// Runs every block, a phase at a time in turn; then converts dQ.
    fn run(mut self) -> Grads {
        let mut blocks = self.blocks();
        while blocks.iter().any(|block| !block.is_done) {
            for block in &mut blocks {
                self.phase(block);
            }
        }
        self.convert();
        self.grads
    }

    /// The next phase of a block: what it read before is written; then dQ of the last step and the
    /// scores of the next, or its gradients.
    fn phase(&mut self, block: &mut Block) {
        if block.is_done {
            return;
        }
        for (place, value) in block.pending.drain(..) {
            self.sums[place] = value;
        }
        let overwrites = self.mutation == Some(Mutation::EarlyOverwrite);
        let (step, steps) = (block.next, block.steps.len());
        if overwrites && step < steps {
            self.scores(block, step);
        }
        if (1..=steps).contains(&step) {
            self.add_queries(block, step - 1);
        }
        if !overwrites && step < steps {
            self.scores(block, step);
        }
        if step >= steps && block.pending.is_empty() {
            self.write(block);
            block.is_done = true;
        }
        block.next = step + 1;
    }

    fn slot(&self, step: usize) -> usize {
        if self.mutation == Some(Mutation::EarlyOverwrite) { 0 } else { step % 2 }
    }

    /// P and dS of a step; dS into its place, dK and dV into the block.
    fn scores(&mut self, block: &mut Block, step: usize) {
        let s = *self.case.attention.shape();
        let (batch, kv_head) = self.place(block);
        let (head, tile) = block.steps[step];
        let slot = self.slot(step);
        for at_key in 0..KEYS {
            for at_row in 0..ROWS {
                let (key, row) = (block.work.kv_block * KEYS + at_key, tile * ROWS + at_row);
                let cell = (at_key * ROWS + at_row) as usize;
                block.ds[slot][cell] = 0.0;
                let lse = (batch * s.q_heads + head) * s.q_len + row as usize;
                if row as usize >= s.q_len || !self.visible.sees(row, key) {
                    continue;
                }
                let q = ((batch * s.q_len + row as usize) * s.q_heads + head) * s.head_dim;
                let o = ((batch * s.q_len + row as usize) * s.q_heads + head) * s.value_dim;
                let kv = (batch * s.kv_len + key as usize) * s.kv_heads + kv_head;
                let (k, v) = (kv * s.head_dim, kv * s.value_dim);
                let dot =
                    |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
                let score = dot(&self.q[q..][..s.head_dim], &self.k[k..][..s.head_dim]);
                let p = (f64::from(self.case.scale) * score - self.outcome.lse[lse]).exp();
                let d_o = &self.d_o[o..][..s.value_dim];
                let delta = dot(d_o, &self.outcome.o[o..][..s.value_dim]);
                let ds = p * (dot(d_o, &self.v[v..][..s.value_dim]) - delta);
                block.ds[slot][cell] = ds;
                for (channel, d_o) in d_o.iter().enumerate() {
                    block.dv[at_key as usize * s.value_dim + channel] += p * d_o;
                }
                for channel in 0..s.head_dim {
                    block.dk[at_key as usize * s.head_dim + channel] += ds * self.q[q + channel];
                }
            }
        }
    }

    /// Adds a step's dQ to the sums.
    fn add_queries(&mut self, block: &mut Block, step: usize) {
        let s = *self.case.attention.shape();
        let (batch, kv_head) = self.place(block);
        let (head, tile) = block.steps[step];
        let head_sums = (batch * s.q_heads + head) * padded(s.q_len) * s.head_dim;
        for at_row in 0..ROWS {
            for channel in 0..s.head_dim {
                let part: f64 = (0..KEYS)
                    .map(|at_key| {
                        let key = (block.work.kv_block * KEYS + at_key) as usize;
                        let k = ((batch * s.kv_len + key) * s.kv_heads + kv_head) * s.head_dim;
                        let ds = block.ds[self.slot(step)][(at_key * ROWS + at_row) as usize];
                        if key < s.kv_len { ds * self.k[k + channel] } else { 0.0 }
                    })
                    .sum();
                let row = tile * ROWS + at_row;
                let index = ORDER.index(row, channel as u32, s.head_dim as u32);
                let place = head_sums + index as usize;
                if self.mutation == Some(Mutation::NonAtomicSums) {
                    block.pending.push((place, self.sums[place] + part));
                } else {
                    self.sums[place] += part;
                }
            }
        }
    }

    /// Writes a block's dK and dV.
    fn write(&mut self, block: &Block) {
        let s = *self.case.attention.shape();
        let (batch, kv_head) = self.place(block);
        for at_key in 0..KEYS as usize {
            let key = block.work.kv_block as usize * KEYS as usize + at_key;
            if key >= s.kv_len {
                continue;
            }
            let kv = (batch * s.kv_len + key) * s.kv_heads + kv_head;
            for channel in 0..s.head_dim {
                let dk = block.dk[at_key * s.head_dim + channel] * f64::from(self.case.scale);
                self.grads.dk[kv * s.head_dim + channel] = dk;
            }
            let dv = &block.dv[at_key * s.value_dim..][..s.value_dim];
            self.grads.dv[kv * s.value_dim..][..s.value_dim].copy_from_slice(dv);
        }
    }

    fn convert(&mut self) {
        let s = *self.case.attention.shape();
        for (index, dq) in self.grads.dq.iter_mut().enumerate() {
            let (rest, channel) = (index / s.head_dim, index % s.head_dim);
            let (rest, head) = (rest / s.q_heads, rest % s.q_heads);
            let (batch, row) = (rest / s.q_len, rest % s.q_len);
            let head_sums = (batch * s.q_heads + head) * padded(s.q_len) * s.head_dim;
            let place = ORDER.index(row as u32, channel as u32, s.head_dim as u32);
            *dq = self.sums[head_sums + place as usize] * f64::from(self.case.scale);
        }
    }

    /// A block's item and KV head.
    fn place(&self, block: &Block) -> (usize, usize) {
        let kv_heads = self.case.attention.shape().kv_heads;
        let batch_head = block.work.batch_head as usize;
        (batch_head / kv_heads, batch_head % kv_heads)
    }
}

impl Block {
    fn new(work: BackwardWork, steps: &[(usize, u32)], s: &ferroflash::Shape) -> Self {
        let zeros = |channels: usize| vec![0.0; KEYS as usize * channels];
        Self {
            work,
            steps: steps.to_vec(),
            next: 0,
            ds: [zeros(ROWS as usize), zeros(ROWS as usize)],
            dk: zeros(s.head_dim),
            dv: zeros(s.value_dim),
            pending: Vec::new(),
            is_done: false,
        }
    }
}

fn padded(rows: usize) -> usize {
    rows.next_multiple_of(ROWS as usize)
}

/// Whether the gradients are within the bound that kernels of 16-bit elements are held to.
fn passes(had: &Grads, exact: &Grads) -> bool {
    let pairs = [(&had.dq, &exact.dq), (&had.dk, &exact.dk), (&had.dv, &exact.dv)];
    pairs.into_iter().all(|(had, exact)| result_error(had, exact, exact, Dtype::Bf16).holds())
}

/// Grouped heads, tails on both sides, several tiles of each.
fn cases() -> Vec<Case<f32>> {
    let sights = [Sight::FULL, Sight::BOTTOM_RIGHT, Sight::TOP_LEFT];
    sights.map(|sight| Case::new(shape(2, (4, 2), (57, 71), (16, 16)), sight, 90, 1.0)).to_vec()
}

#[test]
fn the_walk_gives_the_gradients() {
    for case in cases() {
        let (outcome, exact) = attend(&case);
        assert!(passes(&Walk::new(&case, &outcome, None).run(), &exact));
    }
}

#[test]
fn every_mutation_is_caught() {
    for mutation in [
        Mutation::NonAtomicSums,
        Mutation::UnclearScratch,
        Mutation::SecondWriter,
        Mutation::NoGroupLoop,
        Mutation::EarlyOverwrite,
    ] {
        for case in cases() {
            let (outcome, exact) = attend(&case);
            let had = Walk::new(&case, &outcome, Some(mutation)).run();
            assert!(!passes(&had, &exact), "{mutation:?} passes");
        }
    }
}
