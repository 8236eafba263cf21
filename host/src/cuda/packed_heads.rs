//! The query heads of a group as rows of one block.
//!
//! Where every row of a group of query heads sees the same keys, a head is nothing but more rows:
//! the group's heads, one after another, are a single head of as many rows, whose KV head is its
//! own. Where a few rows share many keys, that fills tiles which would be empty, and K and V are
//! read once a group. It takes no kernel of its own: with one row a head, the stride of heads
//! becomes that of rows; with more, row and head are one axis where a head's stride is its rows
//! times theirs. lse, `[batch, head, row]`, is the same memory either way.

use ferroflash_core::shape::MAX_LENGTH;
use ferroflash_core::table::KernelSpec;

use super::forward::query_blocks;
use crate::attention::{Attention, Broadcast, Layout, Mask, Shape};
use crate::choose::hidden_sides;
use crate::tensor::Raw;

/// Rows of a block that take the time of one: those of a warpgroup. Measured on an H200, 128 take a
/// third more.
const ROWS_FOR_NOTHING: usize = 64;

/// A call whose query heads can be rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PackedHeads {
    /// The call as kernels see it then: a query head for each KV head, and no diagonal.
    pub(crate) attention: Attention,
    /// Query heads of a KV head.
    group: usize,
    /// Rows of a head.
    q_len: usize,
    /// Query blocks then, and without.
    works: (usize, usize),
}

impl PackedHeads {
    /// The packed form of a call for `spec` on a device: where rows are alike, and query blocks
    /// become fewer. That is never slower, since a block takes the time of its keys; only where all
    /// blocks run at once anyhow, and would have the rows of several warpgroups, they stay apart.
    pub(crate) fn of(attention: &Attention, spec: &KernelSpec, processors: u32) -> Option<Self> {
        let shape = attention.shape;
        let group = shape.group();
        let rows = shape.q_len.checked_mul(group).filter(|rows| *rows <= MAX_LENGTH)?;
        if !rows_are_alike(attention) {
            return None;
        }
        let of_all_rows = |axes: Broadcast| Broadcast { heads: true, rows: true, ..axes };
        let packed = Attention {
            shape: Shape { q_heads: shape.kv_heads, q_len: rows, ..shape },
            mask: Mask::full(),
            bias: attention.bias.map(of_all_rows),
            boolean_mask: attention.boolean_mask.map(of_all_rows),
            ..*attention
        };
        let count = |attention| query_blocks(attention, spec).map(|(blocks, heads)| blocks * heads);
        let works = (count(&packed)?, count(attention)?);
        let gains = rows <= ROWS_FOR_NOTHING || works.1 > processors as usize;
        (gains && works.0 < works.1).then_some(Self {
            attention: packed,
            group,
            q_len: shape.q_len,
            works,
        })
    }

    /// q or o as the packed call has it, `[batch, head · row, KV head, channel]`, where strides
    /// allow it. Heads that repeat stay apart: the copy engine takes no rows that do.
    pub(crate) fn view(&self, raw: &Raw) -> Option<Raw> {
        let (&[batch, rows, heads, channels], &[item, row, head, channel]) =
            (raw.dims(), raw.strides())
        else {
            return None;
        };
        let is_one_axis = rows == 1 || row.checked_mul(rows as i64) == Some(head);
        let step = if rows == 1 { head } else { row };
        if !is_one_axis || step == 0 {
            return None;
        }
        let dims = [batch, rows * self.group, heads / self.group, channels];
        let strides = [item, step, head.checked_mul(self.group as i64)?, channel];
        Raw::new(raw.address, &dims, &strides, raw.place).ok()
    }

    /// Whether it holds of any strides.
    pub(crate) fn is_certain(&self) -> bool {
        self.q_len == 1
    }

    /// What is packed, and what that saves.
    pub(crate) fn words(&self) -> String {
        let (group, (packed, apart)) = (self.group, self.works);
        let what = format!("the {group} query heads of a KV head are rows of the same blocks");
        match self.q_len {
            1 => format!("{what}: {packed} works for {apart}"),
            rows => format!(
                "{what} where a head's stride, of q and of o, is {rows} rows' ([batch, head, row, \
                 channel]): {packed} works for {apart}"
            ),
        }
    }
}

impl Attention {
    /// The call as a forward kernel runs it whatever the strides, where it makes rows of one head
    /// of the query heads that share a KV head; on a device of so many multiprocessors.
    pub fn with_packed_heads(&self, kernel: &KernelSpec, multiprocessors: u32) -> Option<Self> {
        let packed = PackedHeads::of(self, kernel, multiprocessors).filter(PackedHeads::is_certain);
        packed.map(|packed| packed.attention)
    }
}

/// Whether all rows of all heads of a group see the same keys and add the same to their scores.
fn rows_are_alike(attention: &Attention) -> bool {
    let is_of_all_rows = |axes: &Option<Broadcast>| {
        axes.is_none_or(|axes| axes.heads && (axes.rows || attention.shape.q_len == 1))
    };
    !matches!(attention.layout, Layout::Packed { .. })
        && hidden_sides(attention) == (false, false)
        && !attention.alibi
        && !attention.sink
        && attention.dropout.is_none()
        && is_of_all_rows(&attention.bias)
        && is_of_all_rows(&attention.boolean_mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Align, Dropout};
    use crate::tensor::{Place, contiguous_strides};
    use ferroflash_core::table::KERNELS;

    fn shape(q_len: usize, heads: (usize, usize)) -> Shape {
        let (q_heads, kv_heads) = heads;
        Shape { batch: 2, q_heads, kv_heads, q_len, kv_len: 500, head_dim: 128, value_dim: 128 }
    }

    fn packed(attention: &Attention) -> Option<PackedHeads> {
        let name = "hopper_forward_d128_bf16_full";
        let spec = KERNELS.iter().find(|spec| spec.name == name).expect("it is in the table");
        assert_eq!(spec.tile.q_rows, 128);
        PackedHeads::of(attention, spec, 132)
    }

    #[test]
    fn heads_are_rows_where_that_makes_fewer_works() {
        for (q_len, heads, works) in [
            (1, (64, 8), (2 * 8, 2 * 64)),
            (1, (64, 1), (2, 2 * 64)),
            (7, (32, 8), (2 * 8, 2 * 32)),
            (64, (128, 32), (2 * 32 * 2, 2 * 128)),
            (130, (128, 32), (2 * 32 * 5, 2 * 128 * 2)),
        ] {
            let attention = Attention::new(shape(q_len, heads));
            let packed = packed(&attention).expect("it is packed");
            assert_eq!(packed.works, works, "{q_len} rows, {heads:?} heads");
            let had = &packed.attention.shape;
            assert_eq!((had.q_heads, had.group()), (heads.1, 1));
            assert_eq!(had.q_len, q_len * heads.0 / heads.1);
            assert_eq!(had.q_len * had.q_heads, q_len * heads.0);
        }
        // Heads of their own, full tiles, no rows, more than kernels count, and more rows than a
        // warpgroup's in blocks that all run at once.
        for (q_len, heads) in [
            (1, (8, 8)),
            (128, (128, 32)),
            (0, (32, 8)),
            (MAX_LENGTH, (32, 8)),
            (16, (64, 8)),
            (1, (65, 1)),
        ] {
            assert_eq!(packed(&Attention::new(shape(q_len, heads))), None, "{q_len}, {heads:?}");
        }
    }

    #[test]
    fn rows_that_differ_are_left_apart() {
        let (one, few) = (Attention::new(shape(1, (8, 2))), Attention::new(shape(3, (8, 2))));
        let (top, bottom) = (Mask::causal(Align::TopLeft), Mask::causal(Align::BottomRight));
        let by = |batch, heads, rows| Broadcast { batch, heads, rows };
        let lengths = Layout::KeyLengths;
        for attention in [
            one.mask(bottom),
            one.mask(bottom).layout(lengths),
            one.mask(bottom.window(Some(499), Some(3))),
            few,
            few.layout(lengths),
            few.softcap(3.0).deterministic(),
            few.mask(bottom.window(None, Some(2))),
            few.bias(by(false, true, true)),
            few.boolean_mask(by(true, true, true)),
            one.bit_mask(by(false, true, false)),
        ] {
            let packed = packed(&attention).expect("it is packed");
            assert_eq!(packed.attention.mask, Mask::full(), "{attention:?}");
            assert_eq!(packed.attention.layout, attention.layout);
            assert_eq!(packed.attention.softcap, attention.softcap);
            let dims = |attention: &Attention| {
                [attention.bias.map(|axes| axes.dims(&attention.shape)), attention.mask_dims()]
            };
            assert_eq!(dims(&packed.attention), dims(&attention), "{attention:?}");
        }
        for attention in [
            one.mask(top),
            one.mask(bottom.window(Some(498), None)),
            few.mask(bottom),
            few.mask(bottom.window(None, Some(1))),
            few.mask(bottom).layout(lengths),
            few.layout(Layout::Packed { q_tokens: 6, kv_tokens: 1000 }),
            one.alibi(),
            one.sink(),
            one.dropout(Dropout::new(0.1, (1, 2))),
            one.bias(by(true, false, true)),
            few.bias(by(true, true, false)),
            few.boolean_mask(by(true, false, true)),
        ] {
            assert_eq!(packed(&attention), None, "{attention:?}");
        }
    }

    /// Every element keeps its address: row r of KV head h is row r % Sq of head h·group + r / Sq.
    #[test]
    fn views_reach_the_same_elements() {
        let place = Place::Cuda(0);
        for (rows, strides, fits) in [
            (1, [8192, 8192, 128, 1], true),
            (1, [1, 17, 136, 1], true),
            (1, [8192, 3, -128, 1], true),
            (3, contiguous_strides(&[2, 3, 16, 128])[..].try_into().expect("four"), false),
            (3, [16 * 3 * 128, 128, 3 * 128, 1], true),
            (3, [16 * 3 * 129, 129, 3 * 129, 1], true),
            (3, [0, -128, -3 * 128, 1], true),
            (3, [16 * 4 * 128, 128, 4 * 128, 1], false),
            (3, [16 * 3 * 128, 0, 0, 1], false),
            (1, [128, 128, 0, 1], false),
            (3, [0, i64::MAX, 1, 1], false),
            (1, [0, 0, i64::MAX / 2, 1], false),
        ] {
            let heads = packed(&Attention::new(shape(rows, (16, 4)))).expect("it is packed");
            let raw = Raw::new(1 << 20, &[2, rows, 16, 128], &strides, place).expect("four axes");
            let view = heads.view(&raw);
            assert_eq!(view.is_some(), fits, "{rows} rows, strides {strides:?}");
            let Some(view) = view else { continue };
            assert_eq!((view.dims(), view.address), (&[2, rows * 4, 4, 128][..], 1 << 20));
            let at = |raw: &Raw, row: usize, head: usize| {
                row as i64 * raw.strides()[1] + head as i64 * raw.strides()[2]
            };
            for (head, row) in (0..4).flat_map(|head| (0..4 * rows).map(move |row| (head, row))) {
                let apart = at(&raw, row % rows, head * 4 + row / rows);
                assert_eq!(at(&view, row, head), apart, "row {row} of head {head}");
            }
        }
    }
}
