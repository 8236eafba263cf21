//! The calls that every kernel is tried on: tile edges, ratios of lengths and heads, channels that
//! the tile pads, memory orders and starts, scales and extremes.
//! Whatever surrounds a tensor is NaN, and so are keys that no row may see.

use ferroflash::{Align, Dtype, Family, KernelSpec, MaskClass, Shape};
use ferroflash_tests::case::{Case, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::gpu::Wanted;
use ferroflash_tests::memory::Arrangement;
use serde_json::{Value, json};

use crate::options::Options;

/// What q, k and v hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fill {
    /// Normal values of this standard deviation.
    Normal(f32),
    /// q = 64, k = −64, v = 1: every product far below zero, a multiple of 4096.
    FarBelow,
    /// The same with 63 and −65 in the last channel, which makes it odd.
    FarBelowOdd,
    /// Backward: dP of the last key overflows, but in the last row, its only one, whose dO is zero.
    HiddenOverflow,
}

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// Its name.
    pub(crate) name: String,
    /// Its sizes.
    pub(crate) shape: Shape,
    /// Which keys a row sees.
    pub(crate) sight: Sight,
    /// Factor of the scores, if not the usual one.
    pub(crate) scale: Option<f32>,
    /// Contents.
    pub(crate) fill: Fill,
    /// What masked and general kernels are given beside.
    pub(crate) options: Options,
    /// Arrangements of q, k, v and o.
    pub(crate) arranged: [Arrangement; 4],
    /// Whether lse is asked for.
    pub(crate) with_lse: bool,
    /// Seed of the contents.
    pub(crate) seed: u64,
    pub(crate) backward: Backward,
}

/// What a backward call adds to a workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// Arrangement of dO.
    pub(crate) d_o: Arrangement,
    /// Whether dO is one row for all.
    pub(crate) repeats_d_o: bool,
    /// Whether lse has a gradient.
    pub(crate) with_d_lse: bool,
    /// Which gradients are asked for.
    pub(crate) wanted: Wanted,
    /// Whether the sums of dQ are ordered.
    pub(crate) deterministic: bool,
}

impl Backward {
    const PLAIN: Self = Self {
        d_o: Arrangement::CONTIGUOUS,
        repeats_d_o: false,
        with_d_lse: false,
        wanted: Wanted::ALL,
        deterministic: false,
    };
}

impl Workload {
    pub(crate) fn new(name: &str, shape: Shape, mask: MaskClass) -> Self {
        let workload = Self {
            name: name.to_owned(),
            shape,
            sight: Sight::BOTTOM_RIGHT,
            scale: None,
            fill: Fill::Normal(1.0),
            options: Options::default(),
            arranged: [Arrangement::CONTIGUOUS; 4],
            with_lse: true,
            backward: Backward::PLAIN,
            seed: name.bytes().fold(7, |seed, byte| (seed * 31 + u64::from(byte)) % 1_000_003),
        };
        match mask {
            MaskClass::Full => Self { sight: Sight::FULL, ..workload },
            _ => workload,
        }
    }

    pub(crate) fn masked(self, align: Align, right: usize) -> Self {
        Self { sight: Sight { align, left: None, right: Some(right) }, ..self }
    }

    fn arranged(self, arrangement: Arrangement) -> Self {
        Self { arranged: [arrangement; 4], ..self }
    }

    /// The call with its tensors; keys that no row sees and rows that are not used are NaN.
    pub(crate) fn case<T: Real>(&self) -> Case<T> {
        let deviation = match self.fill {
            Fill::Normal(deviation) => deviation,
            Fill::FarBelow | Fill::FarBelowOdd | Fill::HiddenOverflow => 1.0,
        };
        let s = &self.shape;
        let mut case = match &self.options.packed {
            None => Case::<T>::new(self.shape, self.sight, self.seed, deviation),
            Some(packed) => {
                let (heads, dims) = ((s.q_heads, s.kv_heads), (s.head_dim, s.value_dim));
                Case::packed(heads, dims, packed.clone(), self.sight, self.seed, deviation)
            }
        };
        if let Some(scale) = self.scale {
            case = case.with_scale(scale);
        }
        if self.fill == Fill::HiddenOverflow {
            let (last_key, last_row) = (s.kv_len - 1, s.q_len - 1);
            let (keys, rows) = (s.kv_heads * s.value_dim, s.q_heads * s.value_dim);
            case.v.set(|at, value| if at / keys % s.kv_len == last_key { 1e30 } else { value });
            let is_last = |at: usize| at / rows % s.q_len == last_row;
            case.d_o.set(|at, value| if is_last(at) { 0.0 } else { value.abs() * 1e10 });
        }
        if matches!(self.fill, Fill::FarBelow | Fill::FarBelowOdd) {
            let dim = s.head_dim;
            let is_odd = |index| self.fill == Fill::FarBelowOdd && index % dim == dim - 1;
            case.q.set(|index, _| if is_odd(index) { 63.0 } else { 64.0 });
            case.k.set(|index, _| if is_odd(index) { -65.0 } else { -64.0 });
            case.v.set(|_, _| 1.0);
        }
        let mut case = self.options.given_to(case.arranged(self.arranged), self.seed);
        let backward = self.backward;
        if backward.with_d_lse {
            case = case.with_d_lse(self.seed + 1);
        }
        if backward.repeats_d_o {
            let dim = self.shape.value_dim;
            let row = |index: usize| (index % dim) as f32 / dim as f32 - 0.4;
            case.d_o.set(|index, _| row(index));
        }
        case.d_o = case.d_o.rearranged(backward.d_o);
        if backward.deterministic {
            case.attention = case.attention.deterministic();
        }
        self.hide_what_is_unseen(&mut case);
        case
    }

    fn hide_what_is_unseen<T: Real>(&self, case: &mut Case<T>) {
        let rank = case.k.dims().len();
        let (rows, keys) = (case.q.dims()[rank - 3], case.k.dims()[rank - 3]);
        let batch = if rank == 4 { case.k.dims()[0] } else { 1 };
        let mut is_used = vec![vec![false; rows]; batch];
        let mut is_seen = vec![vec![false; keys]; batch];
        for item in case.items() {
            let (q_len, kv_len) = (item.rows.len(), item.keys.len());
            is_used[item.batch][item.rows.clone()].fill(true);
            for key in 0..kv_len {
                is_seen[item.batch][item.keys.start + key] =
                    (0..q_len).any(|row| self.sight.sees(row, key, q_len, kv_len));
            }
        }
        for batch in 0..batch {
            for row in (0..rows).filter(|row| !is_used[batch][*row]) {
                case.q.set_rows(batch, row..row + 1, f32::NAN);
                case.d_o.set_rows(batch, row..row + 1, f32::NAN);
            }
            for key in (0..keys).filter(|key| !is_seen[batch][*key]) {
                case.k.set_rows(batch, key..key + 1, f32::NAN);
                case.v.set_rows(batch, key..key + 1, f32::NAN);
            }
        }
    }

    /// For the record.
    pub(crate) fn describe(&self) -> Value {
        let s = &self.shape;
        let mask = match self.sight.right {
            None => "full".to_owned(),
            Some(right) => format!("{:?}, right {right}", self.sight.align),
        };
        let mask = match self.sight.left {
            None => mask,
            Some(left) => format!("{:?}, left {left}, {mask}", self.sight.align),
        };
        json!({
            "name": self.name,
            "batch": s.batch, "q_heads": s.q_heads, "kv_heads": s.kv_heads,
            "q_len": s.q_len, "kv_len": s.kv_len,
            "head_dim": s.head_dim, "value_dim": s.value_dim,
            "mask": mask, "options": self.options.describe(),
            "fill": format!("{:?}", self.fill), "seed": self.seed,
            "deterministic": self.backward.deterministic,
        })
    }
}

/// Every workload of a kernel.
pub(crate) fn workloads(spec: &KernelSpec) -> Vec<Workload> {
    let mut all = lengths_and_heads(spec);
    all.extend(channels(spec));
    all.extend(memory(spec));
    all.extend(scales(spec));
    if spec.mask != MaskClass::Full {
        all.extend(diagonals(spec));
    }
    all.extend(crate::options::workloads(spec));
    all
}

/// Every workload of a backward kernel: of each kind of a forward's some, and what only a backward
/// call has.
pub(crate) fn backward_workloads(spec: &KernelSpec) -> Vec<Workload> {
    const LEFT_OUT: &[&str] = &[
        "without_lse",
        "start_3",
        "start_5",
        // dQ and dK are sums of 64 · (dP − delta) with dP = delta: what is left is the rounding of
        // numbers that the bound does not know of. The public fault r4 is of this kind.
        "r1_one_key_far_below",
        "r1_odd_sum_far_below",
        "all_keys_far_below",
    ];
    let ((dim, value_dim), (rows, keys)) = tile(spec);
    let mut all: Vec<Workload> = workloads(spec);
    let edges = [(dim - 8, value_dim - 8), (dim - 3, value_dim - 3), (1, 1), (dim, 8)];
    let some = edges.into_iter().chain([(8, value_dim), (72, 72), (112, 112), (144, 144)]);
    let some: Vec<String> = some.map(|(d, dv)| format!("channels_{d}x{dv}")).collect();
    all.retain(|w| !LEFT_OUT.contains(&w.name.as_str()));
    all.retain(|w| !w.name.starts_with("channels_") || some.contains(&w.name));

    let plain = Arrangement::CONTIGUOUS;
    let sized = |name: &str, backward: Backward| {
        let lengths = (2 * rows + rows / 2 + 7, 2 * keys + 9);
        let shape = shape(2, (4, 2), lengths, (dim, value_dim));
        Workload { backward, ..Workload::new(name, shape, spec.mask) }
    };
    let wanted =
        |dq, dk, dv| Backward { wanted: Wanted { dq, dk, dv, options: false }, ..Backward::PLAIN };
    let d_o = |d_o| Backward { d_o, ..Backward::PLAIN };
    all.extend([
        sized("d_lse", Backward { with_d_lse: true, ..Backward::PLAIN }),
        sized("ordered", Backward { deterministic: true, ..Backward::PLAIN }),
        sized("dq_alone", wanted(true, false, false)),
        sized("dk_alone", wanted(false, true, false)),
        sized("dv_alone", wanted(false, false, true)),
        sized("dk_and_dv", wanted(false, true, true)),
        sized("d_o_repeated", Backward { repeats_d_o: true, ..Backward::PLAIN }),
        sized("d_o_heads_first", d_o(Arrangement::HEADS_FIRST)),
        sized("d_o_start_1", d_o(Arrangement { offset: 1, ..plain })),
        sized("d_o_gap_of_4", d_o(Arrangement { channel_gap: 4, ..plain })),
        sized("d_o_rows_past_the_end", d_o(Arrangement { row_gap: 2 * rows, ..plain })),
    ]);
    if spec.mask != MaskClass::Full && spec.family == Family::Portable && spec.dtype == Dtype::Bf16
    {
        let fill = Fill::HiddenOverflow;
        let square = shape(1, (2, 1), (keys + 9, keys + 9), (dim, value_dim));
        all.push(Workload { fill, ..Workload::new("hidden_overflow", square, spec.mask) });
    }
    all.extend(crate::options::backward_workloads(spec));
    let sees_one_key = |w: &&mut Workload| {
        let names = ["window_of_a_key", "packed_ones", "packed_ones_ordered"];
        w.shape.kv_len == 1 || names.contains(&w.name.as_str())
    };
    for workload in all.iter_mut().filter(sees_one_key) {
        // dP = delta here as well; smaller values keep what f32 leaves of it within the bound.
        workload.fill = Fill::Normal(0.25);
    }
    all
}

/// The compiled (D, Dv) and (query rows, keys) of a tile.
pub(crate) fn tile(spec: &KernelSpec) -> ((usize, usize), (usize, usize)) {
    let t = &spec.tile;
    ((t.head_dim as usize, t.value_dim as usize), (t.q_rows as usize, t.kv_columns as usize))
}

fn lengths_and_heads(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized = |name, batch, heads, lengths| {
        Workload::new(name, shape(batch, heads, lengths, dims), spec.mask)
    };
    vec![
        sized("tiles", 1, (2, 2), (2 * rows, 3 * keys)),
        sized("one_tile", 1, (1, 1), (rows, keys)),
        sized("tails", 2, (3, 3), (rows + rows / 2 + 5, 2 * keys + keys / 2 + 3)),
        sized("few_rows", 2, (2, 2), (37, 5 * keys + 7)),
        sized("few_keys", 2, (2, 2), (2 * rows + 9, keys - 11)),
        sized("one_row", 3, (2, 2), (1, 3 * keys + 1)),
        sized("one_key", 1, (2, 2), (rows + 3, 1)),
        sized("one_cell", 1, (1, 1), (1, 1)),
        sized("many_keys", 1, (1, 1), (rows, 12 * keys - 1)),
        sized("grouped_4", 1, (8, 2), (rows + 7, 2 * keys + 1)),
        sized("grouped_3", 2, (9, 3), (70, keys + 9)),
        sized("one_kv_head", 1, (7, 1), (rows + 1, keys + 1)),
        sized("many_heads", 5, (13, 13), (17, 19)),
        Workload { with_lse: false, ..sized("without_lse", 1, (2, 1), (rows + 1, keys + 1)) },
    ]
}

/// Channels below the compiled ones: every width that a library user may have, and Dv ≠ D.
fn channels(spec: &KernelSpec) -> Vec<Workload> {
    let ((dim, value_dim), (rows, keys)) = tile(spec);
    let narrower = |dim: usize| [dim - 8, dim - 16, dim - 24, dim - 2, dim - 3, 1];
    let mut all: Vec<(usize, usize)> = narrower(dim).into_iter().zip(narrower(value_dim)).collect();
    all.extend([40, 72, 80, 112, 136, 144, 160, 176].map(|d| (d, d)));
    all.extend([(dim, 8), (8, value_dim), (dim, value_dim - 8), (dim - 5, value_dim)]);
    let most_values = spec.most_value_channels() as usize;
    if most_values > value_dim {
        // In two launches, the second of them whole, short or of a single channel.
        all.extend([most_values, most_values - 20, value_dim + 1].map(|dv| (dim, dv)));
    }
    all.retain(|(d, dv)| *d <= dim && *dv <= most_values);
    all.sort_unstable();
    all.dedup();
    let sized = |dims: (usize, usize)| {
        let name = format!("channels_{}x{}", dims.0, dims.1);
        // The bound compares two maxima: of a lone channel and head there are too few values.
        let heads = if dims.0.min(dims.1) < 8 { (16, 8) } else { (2, 1) };
        Workload::new(&name, shape(1, heads, (rows + 3, keys + 5), dims), spec.mask)
    };
    all.into_iter().map(sized).collect()
}

fn memory(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized = |name: &str, heads, batch| {
        Workload::new(name, shape(batch, heads, (rows + 6, keys + 10), dims), spec.mask)
    };
    let plain = Arrangement::CONTIGUOUS;
    let mut all = vec![
        sized("heads_first", (4, 2), 2).arranged(Arrangement::HEADS_FIRST),
        sized("gap_of_8", (2, 2), 2).arranged(Arrangement { channel_gap: 8, ..plain }),
        sized("gap_of_2", (2, 2), 2).arranged(Arrangement { channel_gap: 2, ..plain }),
        sized("odd_strides", (2, 2), 2).arranged(Arrangement { channel_gap: 1, ..plain }),
        sized("rows_past_the_end", (2, 2), 2)
            .arranged(Arrangement { row_gap: rows + 2 * keys, ..plain }),
    ];
    for offset in 1..8 {
        let arrangement = Arrangement { offset, ..plain };
        all.push(sized(&format!("start_{offset}"), (2, 2), 1).arranged(arrangement));
    }
    let repeated = |name, arrangement| Workload {
        arranged: [plain, arrangement, arrangement, plain],
        ..sized(name, (4, 4), 3)
    };
    all.push(repeated("repeated_heads", Arrangement { repeat_heads: true, ..plain }));
    all.push(repeated("repeated_batch", Arrangement { repeat_batch: true, ..plain }));
    all.push(Workload {
        arranged: [
            Arrangement { offset: 3, ..plain },
            Arrangement::HEADS_FIRST,
            Arrangement { channel_gap: 4, ..plain },
            Arrangement { heads_first: true, channel_gap: 2, offset: 2, ..plain },
        ],
        ..sized("each_otherwise", (2, 1), 2)
    });
    all
}

fn scales(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized =
        |name: &str, lengths| Workload::new(name, shape(1, (2, 1), lengths, dims), spec.mask);
    let lengths = (rows + 11, 2 * keys + 13);
    let scaled = |name, factor| Workload { scale: Some(factor), ..sized(name, lengths) };
    let far = |name, fill, lengths| Workload { fill, ..sized(name, lengths) };
    vec![
        scaled("negative_scale", -0.125),
        scaled("zero_scale", 0.0),
        Workload { fill: Fill::Normal(3.0), ..sized("large_scores", lengths) },
        far("r1_one_key_far_below", Fill::FarBelow, (1, 1)),
        far("r1_odd_sum_far_below", Fill::FarBelowOdd, (1, 1)),
        far("all_keys_far_below", Fill::FarBelow, lengths),
    ]
}

/// Alignments and right sides; masked kernels run unmasked calls as well.
fn diagonals(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized =
        |name: &str, lengths| Workload::new(name, shape(2, (2, 1), lengths, dims), spec.mask);
    let (short, long) = (keys + 5, rows + 2 * keys + 9);
    let (top, bottom) = (Align::TopLeft, Align::BottomRight);
    vec![
        sized("top_left_square", (rows + 5, rows + 5)).masked(top, 0),
        sized("top_left_more_keys", (short, long)).masked(top, 0),
        sized("top_left_more_rows", (long, short)).masked(top, 0),
        sized("empty_rows", (rows + 70, 40)).masked(bottom, 0),
        sized("empty_tiles", (3 * rows + 1, 2)).masked(bottom, 0),
        sized("right_5", (rows + 9, rows + 31)).masked(top, 5),
        sized("right_of_a_tile", (long, long)).masked(bottom, keys),
        sized("right_in_empty_rows", (rows + 90, 60)).masked(bottom, 17),
        Workload { sight: Sight::FULL, ..sized("unmasked", (rows + 3, keys + 9)) },
    ]
}
