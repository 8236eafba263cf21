//! What the copy engine must be told of a tensor (PTX ISA, "Tensor-map").
//!
//! The host encodes a [`TensorMapPlan`] (`cuTensorMapEncodeTiled`), the kernel gives coordinates in
//! the same order: channel, row, head, batch. What lies outside a dimension reads as zero and is
//! not written, which is how tails of rows and channels between compiled sizes are handled.

use crate::shape::Strides;
use crate::swizzle::PanelLayout;
use crate::tile::TileShape;

/// An encoded tensor map, opaque to everyone but the copy engine. It must lie at a multiple of 64
/// bytes; see [`KernelSpec::parameter_alignment`](crate::table::KernelSpec::parameter_alignment).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

/// Largest side of a box, in elements.
pub const MAX_BOX_SIDE: u32 = 256;
/// Bytes that the base must be a multiple of, and every stride as well.
pub const MAP_ALIGNMENT: u64 = 16;
/// Strides are below this many bytes.
pub const MAX_STRIDE_BYTES: u64 = 1 << 40;

/// One panel of a tile, as one copy moves it: `columns × rows` elements of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanelBox {
    /// Channels.
    pub columns: u32,
    /// Rows.
    pub rows: u32,
    /// Span of the swizzle: 128 or 64 bytes.
    pub swizzle_bytes: u32,
}

impl PanelBox {
    /// The box of one panel of `layout`.
    pub const fn of(layout: PanelLayout) -> Self {
        Self {
            columns: layout.panel_columns(),
            rows: layout.rows,
            swizzle_bytes: layout.row_bytes(),
        }
    }
}

/// The boxes of q, k, v and o of a hopper forward kernel. A copy moves 64 rows of q or o, those of
/// one warpgroup, or a whole K or V tile, one panel at a time.
pub const fn hopper_forward_boxes(tile: &TileShape) -> [PanelBox; 4] {
    [
        PanelBox::of(tile.warpgroup_q_layout()),
        PanelBox::of(tile.k_layout()),
        PanelBox::of(tile.v_layout()),
        PanelBox::of(tile.warpgroup_o_layout()),
    ]
}

/// A coordinate's mask: `u32::MAX` for an axis that the map steps along, 0 for one that repeats.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisMasks {
    /// Of the head coordinate.
    pub head: u32,
    /// Of the batch coordinate.
    pub batch: u32,
}

/// The arguments of `cuTensorMapEncodeTiled` for a tensor of 16-bit elements, innermost dimension
/// first: channel, row, head, batch. Element strides are 1, nothing is interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapPlan {
    /// Sizes in elements.
    pub dims: [u64; 4],
    /// Strides of row, head and batch, in bytes.
    pub strides: [u64; 3],
    /// The box.
    pub panel: PanelBox,
    /// What the kernel masks its coordinates with.
    pub axes: AxisMasks,
}

/// Why the copy engine cannot address a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapRefusal {
    /// The address of element 0 is no multiple of 16.
    MisalignedAddress,
    /// The stride of this axis (`"row"`, `"head"` or `"batch"`), in bytes, is no multiple of 16.
    MisalignedStride(&'static str, i64),
    /// The stride of this axis is negative, 2⁴⁰ bytes or more, or zero where rows must differ.
    StrideOutOfRange(&'static str, i64),
    /// The tensor has no elements.
    Empty,
    /// A side of the box is longer than 256 elements.
    BoxTooLong(u32),
}

impl MapRefusal {
    /// The reason in words.
    pub const fn reason(self) -> &'static str {
        match self {
            MapRefusal::MisalignedAddress => "the address is no multiple of 16 bytes",
            MapRefusal::MisalignedStride(..) => "a stride is no multiple of 16 bytes",
            MapRefusal::StrideOutOfRange(..) => {
                "a stride is negative, 2^40 bytes or more, or repeats rows"
            }
            MapRefusal::Empty => "the tensor is empty",
            MapRefusal::BoxTooLong(_) => "a side of the copy engine's box exceeds 256 elements",
        }
    }
}

impl TensorMapPlan {
    /// The map of a `[batch, row, head, channel]` tensor of 16-bit elements at `address`, or why
    /// there is none. An axis of one element has any stride; batch items and heads may repeat
    /// (stride 0), and then become one.
    pub const fn new(
        address: u64,
        dims: [usize; 4],
        strides: Strides,
        panel: PanelBox,
    ) -> Result<Self, MapRefusal> {
        let [batch, rows, heads, channels] = dims;
        if batch == 0 || rows == 0 || heads == 0 || channels == 0 {
            return Err(MapRefusal::Empty);
        }
        if !address.is_multiple_of(MAP_ALIGNMENT) {
            return Err(MapRefusal::MisalignedAddress);
        }
        if panel.rows > MAX_BOX_SIDE || panel.columns > MAX_BOX_SIDE {
            let longer = if panel.rows > panel.columns { panel.rows } else { panel.columns };
            return Err(MapRefusal::BoxTooLong(longer));
        }
        if rows > 1 && strides.row == 0 {
            return Err(MapRefusal::StrideOutOfRange("row", 0));
        }
        let row = match stride("row", strides.row, rows) {
            Ok(bytes) => bytes,
            Err(refusal) => return Err(refusal),
        };
        let head = match stride("head", strides.head, heads) {
            Ok(bytes) => bytes,
            Err(refusal) => return Err(refusal),
        };
        let batch_stride = match stride("batch", strides.batch, batch) {
            Ok(bytes) => bytes,
            Err(refusal) => return Err(refusal),
        };
        let head_mask = if strides.head == 0 { 0 } else { u32::MAX };
        let batch_mask = if strides.batch == 0 { 0 } else { u32::MAX };
        Ok(Self {
            dims: [
                channels as u64,
                rows as u64,
                if head_mask == 0 { 1 } else { heads as u64 },
                if batch_mask == 0 { 1 } else { batch as u64 },
            ],
            strides: [row, head, batch_stride],
            panel,
            axes: AxisMasks { head: head_mask, batch: batch_mask },
        })
    }
}

/// A stride in bytes; 16 where the axis is never stepped along.
const fn stride(axis: &'static str, elements: i64, size: usize) -> Result<u64, MapRefusal> {
    if size == 1 || elements == 0 {
        return Ok(MAP_ALIGNMENT);
    }
    if elements < 0 || elements >= (MAX_STRIDE_BYTES / 2) as i64 {
        return Err(MapRefusal::StrideOutOfRange(axis, elements.saturating_mul(2)));
    }
    let bytes = elements as u64 * 2;
    if !bytes.is_multiple_of(MAP_ALIGNMENT) {
        return Err(MapRefusal::MisalignedStride(axis, bytes as i64));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: PanelBox = PanelBox { columns: 64, rows: 176, swizzle_bytes: 128 };
    const DIMS: [usize; 4] = [2, 100, 4, 72];

    #[test]
    fn dimensions_are_innermost_first() {
        let plan = TensorMapPlan::new(4096, DIMS, Strides::contiguous(DIMS), PANEL).unwrap();
        assert_eq!(plan.dims, [72, 100, 4, 2]);
        assert_eq!(plan.strides, [576, 144, 57_600]);
        assert_eq!(plan.axes, AxisMasks { head: u32::MAX, batch: u32::MAX });
    }

    #[test]
    fn repeated_axes_become_one() {
        let strides = Strides { batch: 0, row: 72, head: 0 };
        let plan = TensorMapPlan::new(4096, DIMS, strides, PANEL).unwrap();
        assert_eq!(plan.dims, [72, 100, 1, 1]);
        assert_eq!(plan.axes, AxisMasks { head: 0, batch: 0 });
    }

    #[test]
    fn what_cannot_be_addressed_is_refused_by_name() {
        let good = Strides::contiguous(DIMS);
        let of = |address, dims, strides, panel| TensorMapPlan::new(address, dims, strides, panel);
        assert_eq!(of(8, DIMS, good, PANEL), Err(MapRefusal::MisalignedAddress));
        assert_eq!(of(0, [0, 1, 1, 1], good, PANEL), Err(MapRefusal::Empty));
        let odd = Strides { head: 73, ..good };
        assert_eq!(of(0, DIMS, odd, PANEL), Err(MapRefusal::MisalignedStride("head", 146)));
        let back = Strides { batch: -8, ..good };
        assert_eq!(of(0, DIMS, back, PANEL), Err(MapRefusal::StrideOutOfRange("batch", -16)));
        let same = Strides { row: 0, ..good };
        assert_eq!(of(0, DIMS, same, PANEL), Err(MapRefusal::StrideOutOfRange("row", 0)));
        let long = PanelBox { rows: 257, ..PANEL };
        assert_eq!(of(0, DIMS, good, long), Err(MapRefusal::BoxTooLong(257)));
        // An axis of one element is never stepped along.
        assert!(of(0, [1, 100, 4, 72], Strides { batch: 3, ..good }, PANEL).is_ok());
    }
}
