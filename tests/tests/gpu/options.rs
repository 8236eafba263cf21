//! Calls with options, for the kernels that take them: each option alone at the edges of tiles,
//! then all of them together.

mod backward;

use ferroflash::{Align, Broadcast, Dropout, KernelSpec, MaskClass, Shape};
use ferroflash_tests::case::{Case, PackedLengths, Sight, shape};
use ferroflash_tests::element::Real;
use ferroflash_tests::memory::Arrangement;
use ferroflash_tests::random::{below, normal, uniform};
use serde_json::Value;

pub(crate) use self::backward::backward_workloads;
use crate::workloads::{Fill, Workload, tile};

/// The options of a workload.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) softcap: Option<f32>,
    /// Slopes of ALiBi; whether each item has its own.
    pub(crate) alibi: Option<bool>,
    pub(crate) sink: bool,
    pub(crate) bias: Option<(Broadcast, Arrangement)>,
    pub(crate) boolean_mask: Option<Broadcast>,
    /// Whether the mask has a bit a key.
    pub(crate) mask_is_bits: bool,
    /// Whether the mask hides whole tiles, and shows others whole.
    pub(crate) mask_is_blocks: bool,
    /// Probability of being dropped.
    pub(crate) dropout: Option<f32>,
    /// Whether the dropout's seed and offset lie on the device.
    pub(crate) state_is_given: bool,
    pub(crate) key_lengths: Option<Vec<i32>>,
    pub(crate) packed: Option<PackedLengths>,
}

impl Options {
    /// `case` with these options.
    pub(crate) fn given_to<T: Real>(&self, mut case: Case<T>, seed: u64) -> Case<T> {
        let s = *case.attention.shape();
        if let Some(lengths) = &self.key_lengths {
            case = case.with_key_lengths(lengths);
        }
        if let Some(cap) = self.softcap {
            case = case.with_softcap(cap);
        }
        if let Some(is_each_item) = self.alibi {
            let count = if is_each_item { s.batch * s.q_heads } else { s.q_heads };
            case = case.with_alibi(&uniform(seed + 1, count, 0.0, 0.5));
        }
        if self.sink {
            case = case.with_sink(&normal(seed + 2, s.q_heads, 2.0));
        }
        if let Some((axes, arrangement)) = self.bias {
            case = case.with_bias(axes, arrangement, seed + 3);
            if let Some((_, bias)) = &mut case.bias {
                // Some keys are hidden by a bias of −∞.
                bias.set(|at, bias| if at % 13 == 5 { f32::NEG_INFINITY } else { bias });
            }
        }
        if let Some(axes) = self.boolean_mask {
            let count = s.batch * s.q_heads * s.q_len * s.kv_len;
            let draws = below(seed + 4, count, 4);
            // A quarter of the cells, every seventh row and most of 70 keys are hidden.
            case = case.with_boolean_mask(axes, |[item, head, row, key]| {
                let at = ((item * s.q_heads + head) * s.q_len + row) * s.kv_len + key;
                match self.mask_is_blocks {
                    true => (row / 150 + key / 150 + head) % 2 == 0,
                    false => draws[at] != 0 && row % 7 != 3 && !(30..100).contains(&key),
                }
            });
            if self.mask_is_bits {
                case = case.with_bits();
            }
        }
        if let Some(probability) = self.dropout {
            let state = [seed << 20 | 7, seed << 34 | 5];
            case = match self.state_is_given {
                true => case.with_dropout_given(probability, state),
                false => case.with_dropout(Dropout::new(probability, (state[0], state[1]))),
            };
        }
        case
    }

    /// For the record.
    pub(crate) fn describe(&self) -> Value {
        let nothing = format!("{:?}", Self::default());
        match format!("{self:?}") {
            options if options == nothing => Value::Null,
            options => Value::String(options),
        }
    }
}

/// Offsets of items of these lengths.
fn cumulative(lengths: &[usize]) -> Vec<i32> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + *length as i32);
    }
    offsets
}

pub(crate) fn packed(items: &[(usize, usize)]) -> PackedLengths {
    let side =
        |side: fn(&(usize, usize)) -> usize| -> Vec<usize> { items.iter().map(side).collect() };
    let (cu_q, cu_k) = (cumulative(&side(|item| item.0)), cumulative(&side(|item| item.1)));
    PackedLengths { cu_q, cu_k, ..PackedLengths::default() }
}

/// The workloads of a masked or general kernel.
pub(crate) fn workloads(spec: &KernelSpec) -> Vec<Workload> {
    let mut all = Vec::new();
    if spec.mask >= MaskClass::Masked {
        all.extend(windows(spec));
        all.extend(lengths(spec));
        all.extend(scores(spec));
    }
    if spec.mask >= MaskClass::General {
        all.extend(masks_and_biases(spec));
        all.extend(dropout(spec));
    }
    if spec.mask >= MaskClass::Masked {
        all.push(everything(spec));
    }
    all
}

fn windows(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized = |name, lengths, align, left, right| Workload {
        sight: Sight { align, left, right },
        ..Workload::new(name, shape(2, (2, 1), lengths, dims), spec.mask)
    };
    let (top, bottom) = (Align::TopLeft, Align::BottomRight);
    let (short, long) = (keys + 5, rows + 2 * keys + 9);
    vec![
        sized("window_of_a_key", (rows + 9, rows + 9), bottom, Some(0), Some(0)),
        sized("window_5_3", (long, long), top, Some(5), Some(3)),
        sized("window_of_a_tile", (2 * rows + 5, 2 * rows + 5), bottom, Some(keys), Some(0)),
        sized("window_more_keys", (rows + 5, long + 3 * keys), bottom, Some(keys + 7), Some(2)),
        sized("window_skips_keys", (37, 6 * keys + 1), bottom, Some(keys / 2), Some(0)),
        sized("window_more_rows", (long, short), bottom, Some(11), Some(0)),
        sized("window_past_the_keys", (long, short), top, Some(9), Some(4)),
        sized("window_left_alone", (long, long + 8), top, Some(30), None),
        sized("window_left_of_all", (rows + 5, rows + 5), bottom, Some(4096), Some(0)),
    ]
}

fn lengths(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let heads = (2, 1);
    let uneven = |name, sight| {
        let lengths = [0, 1, keys, 2 * keys + 3, keys - 1].map(|length| length as i32);
        Workload {
            sight,
            options: Options { key_lengths: Some(lengths.to_vec()), ..Options::default() },
            ..Workload::new(name, shape(5, heads, (rows + 3, 3 * keys), dims), spec.mask)
        }
    };
    let items = |name, items: &[(usize, usize)], sight| Workload {
        sight,
        options: Options { packed: Some(packed(items)), ..Options::default() },
        ..Workload::new(name, shape(items.len(), heads, (0, 0), dims), spec.mask)
    };
    let some: &[(usize, usize)] = &[
        (0, 5),
        (rows + 7, 2 * keys + 9),
        (3, 0),
        (rows, keys),
        (0, 0),
        (1, 1),
        (2 * rows + 1, keys - 5),
        (5, 3 * keys + 1),
        (0, 0),
    ];
    let ones = vec![(1, 1); 3 * rows / 2 + 70];
    let mut used = items("packed_used", some, Sight::BOTTOM_RIGHT);
    if let Some(packed) = &mut used.options.packed {
        let part = |offsets: &[i32]| -> Vec<i32> {
            offsets.windows(2).map(|pair| (pair[1] - pair[0]) * 2 / 3).collect()
        };
        (packed.used_q, packed.used_k) = (Some(part(&packed.cu_q)), Some(part(&packed.cu_k)));
    }
    vec![
        uneven("key_lengths_full", Sight::FULL),
        uneven("key_lengths_causal", Sight::BOTTOM_RIGHT),
        uneven("key_lengths_window", Sight::window(Some(keys), Some(3))),
        items("packed_full", some, Sight::FULL),
        items("packed_causal", some, Sight::BOTTOM_RIGHT),
        items("packed_top_left", some, Sight::TOP_LEFT),
        items("packed_window", some, Sight::window(Some(20), Some(1))),
        items("packed_ones", &ones, Sight::BOTTOM_RIGHT),
        items("packed_one_item", &[(rows + 9, keys + 3)], Sight::BOTTOM_RIGHT),
        items("packed_without_keys", &[(rows, 0), (7, 0)], Sight::FULL),
        used,
    ]
}

fn scores(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let lengths = (rows + 11, 2 * keys + 13);
    let sized = |name, options: Options| Workload {
        options,
        ..Workload::new(name, shape(2, (2, 1), lengths, dims), spec.mask)
    };
    let none = Options::default;
    let empty_rows = |name, options: Options| Workload {
        options,
        ..Workload::new(name, shape(1, (2, 1), (rows + 70, 40), dims), MaskClass::Causal)
    };
    let far = |name, fill, softcap| Workload {
        fill,
        scale: Some(1.0),
        ..sized(name, Options { softcap: Some(softcap), ..none() })
    };
    let of_items = Some(packed(&[(rows + 1, keys), (0, 3), (70, 2 * keys + 5)]));
    vec![
        Workload {
            fill: Fill::Normal(3.0),
            ..sized("softcap_50", Options { softcap: Some(50.0), ..none() })
        },
        sized("softcap_2", Options { softcap: Some(2.0), ..none() }),
        sized("softcap_1000000", Options { softcap: Some(1e6), ..none() }),
        far("softcap_saturates", Fill::FarBelowOdd, 30.0),
        Workload {
            scale: Some(-0.25),
            ..sized("softcap_negative_scale", Options { softcap: Some(4.0), ..none() })
        },
        Workload {
            scale: Some(0.0),
            ..sized("softcap_zero_scale", Options { softcap: Some(4.0), ..none() })
        },
        sized("alibi", Options { alibi: Some(false), ..none() }),
        sized("alibi_of_each_item", Options { alibi: Some(true), ..none() }),
        Workload {
            options: Options { alibi: Some(true), packed: of_items.clone(), ..none() },
            ..Workload::new("alibi_packed", shape(3, (2, 1), (0, 0), dims), spec.mask)
        },
        many_heads(sized("sink", Options { sink: true, ..none() })),
        many_heads(empty_rows("sink_alone", Options { sink: true, ..none() })),
        many_heads(Workload {
            options: Options { sink: true, packed: of_items, ..none() },
            ..Workload::new("sink_packed", shape(3, (2, 1), (0, 0), dims), spec.mask)
        }),
    ]
}

/// With 16 query heads: the bound on the gradient of a sink, one value a head, compares two maxima,
/// and of two heads there are too few.
fn many_heads(workload: Workload) -> Workload {
    let shape = Shape { q_heads: 16, kv_heads: 8, ..workload.shape };
    Workload { shape, ..workload }
}

/// Every way to broadcast the first three axes.
fn broadcasts() -> impl Iterator<Item = (String, Broadcast)> {
    (0..8).map(|bits| {
        let axes = Broadcast { batch: bits & 4 != 0, heads: bits & 2 != 0, rows: bits & 1 != 0 };
        let axis = |one: bool, letter: char| if one { '1' } else { letter };
        (
            format!("{}{}{}", axis(axes.batch, 'b'), axis(axes.heads, 'h'), axis(axes.rows, 's')),
            axes,
        )
    })
}

fn masks_and_biases(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized = |name: &str, options: Options| Workload {
        options,
        ..Workload::new(name, shape(2, (2, 1), (rows + 5, 3 * keys + 13), dims), spec.mask)
    };
    let none = Options::default;
    let plain = Arrangement::CONTIGUOUS;
    let mut all = Vec::new();
    for (name, axes) in broadcasts() {
        let mask = Options { boolean_mask: Some(axes), ..none() };
        let bias = Options { bias: Some((axes, plain)), ..none() };
        let bits = Options { mask_is_bits: true, ..mask.clone() };
        all.push(sized(&format!("mask_{name}"), mask));
        all.push(sized(&format!("bits_{name}"), bits));
        all.push(sized(&format!("bias_{name}"), bias));
    }
    let once = Broadcast { batch: true, ..Broadcast::NONE };
    for (name, mask_is_bits, keys) in
        [("", false, 1000), ("_aligned", false, 1024), ("_of_bits", true, 1000)]
    {
        all.push(Workload {
            options: Options {
                boolean_mask: Some(once),
                mask_is_blocks: true,
                mask_is_bits,
                ..none()
            },
            ..Workload::new(
                &format!("mask_hides_tiles{name}"),
                shape(1, (2, 1), (500, keys), dims),
                spec.mask,
            )
        });
    }
    let wide = Arrangement { channel_gap: 9, offset: 3, ..plain };
    let arranged = |arrangement| Options { bias: Some((Broadcast::NONE, arrangement)), ..none() };
    let of_items = Some(packed(&[(rows + 1, keys), (0, 3), (70, 2 * keys + 5)]));
    all.push(sized("bias_in_wide_rows", arranged(wide)));
    all.push(sized("bias_otherwise", arranged(Arrangement::HEADS_FIRST)));
    all.push(Workload {
        options: Options {
            bias: Some((Broadcast::NONE, wide)),
            boolean_mask: Some(Broadcast { heads: true, ..Broadcast::NONE }),
            packed: of_items.clone(),
            ..none()
        },
        ..Workload::new("mask_and_bias_packed", shape(3, (2, 1), (0, 0), dims), spec.mask)
    });
    all.push(Workload {
        options: Options {
            boolean_mask: Some(Broadcast { heads: true, ..Broadcast::NONE }),
            mask_is_bits: true,
            packed: of_items,
            ..none()
        },
        ..Workload::new("bits_packed", shape(3, (2, 1), (0, 0), dims), spec.mask)
    });
    all
}

fn dropout(spec: &KernelSpec) -> Vec<Workload> {
    let (dims, (rows, keys)) = tile(spec);
    let sized = |name, dropout, sight| Workload {
        sight,
        options: Options { dropout: Some(dropout), ..Options::default() },
        ..Workload::new(name, shape(2, (2, 1), (rows + 37, 3 * keys + 21), dims), spec.mask)
    };
    let window = Sight::window(Some(keys + 5), Some(7));
    let of_items = Some(packed(&[(rows + 1, keys), (0, 3), (70, 2 * keys + 5)]));
    vec![
        sized("dropout_of_nothing", 0.0, Sight::FULL),
        sized("dropout_tenth", 0.1, Sight::FULL),
        sized("dropout_half", 0.5, Sight::BOTTOM_RIGHT),
        sized("dropout_of_all", 1.0, Sight::FULL),
        sized("dropout_window", 0.3, window),
        Workload {
            options: Options { dropout: Some(0.3), packed: of_items, ..Options::default() },
            ..Workload::new("dropout_packed", shape(3, (2, 1), (0, 0), dims), spec.mask)
        },
        Workload {
            options: Options { dropout: Some(0.3), state_is_given: true, ..Options::default() },
            ..sized("dropout_of_a_state_on_the_device", 0.3, Sight::BOTTOM_RIGHT)
        },
    ]
}

/// All that the class has, at once.
fn everything(spec: &KernelSpec) -> Workload {
    let (dims, (rows, keys)) = tile(spec);
    let items = [(rows + 9, 2 * keys + 11), (0, 4), (9, 70), (33, 0), (70, keys + 1)];
    let masked = Options {
        // With ALiBi, where the kernel takes both.
        softcap: spec.softcap_has_alibi().then_some(5.0),
        alibi: Some(true),
        sink: true,
        packed: Some(packed(&items)),
        ..Options::default()
    };
    let options = match spec.mask {
        MaskClass::General => Options {
            bias: Some((Broadcast { rows: true, ..Broadcast::NONE }, Arrangement::CONTIGUOUS)),
            boolean_mask: Some(Broadcast { batch: true, ..Broadcast::NONE }),
            dropout: Some(0.2),
            state_is_given: true,
            mask_is_bits: true,
            ..masked
        },
        _ => masked,
    };
    Workload {
        sight: Sight::window(Some(2 * keys), Some(5)),
        options,
        ..Workload::new("everything", shape(items.len(), (16, 4), (0, 0), dims), spec.mask)
    }
}
