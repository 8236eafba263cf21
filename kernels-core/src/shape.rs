//! Sizes of one attention call, and how a tensor lies in memory.

/// The longest sequence accepted on either side, so that `i32` coordinates never overflow in a
/// kernel: sums of two lengths and a window side, itself under two lengths, stay below 2³¹.
pub const MAX_LENGTH: usize = 1 << 28;

/// The sizes of one dense attention call.
///
/// Tensors are q `[batch, q_len, q_heads, head_dim]`, k `[batch, kv_len, kv_heads, head_dim]`,
/// v `[batch, kv_len, kv_heads, value_dim]`, o `[batch, q_len, q_heads, value_dim]` and
/// lse `[batch, q_heads, q_len]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Independent items, B.
    pub batch: usize,
    /// Query heads, Hq.
    pub q_heads: usize,
    /// Key and value heads, Hkv; divides `q_heads`.
    pub kv_heads: usize,
    /// Query rows an item, Sq.
    pub q_len: usize,
    /// Keys an item, Sk.
    pub kv_len: usize,
    /// Channels of a query and of a key, D.
    pub head_dim: usize,
    /// Channels of a value, Dv.
    pub value_dim: usize,
}

impl Shape {
    /// Query heads that share one KV head (M4.4 §0x06A); 0 where there are no heads.
    pub const fn group(&self) -> usize {
        match self.q_heads.checked_div(self.kv_heads) {
            Some(group) => group,
            None => 0,
        }
    }

    /// The KV head that query head `q_head` reads: `q_head / group` (M4.4 §0x06A).
    pub const fn kv_head(&self, q_head: usize) -> usize {
        q_head / self.group()
    }

    /// Dimensions of q as `[batch, row, head, channel]`.
    pub const fn q_dims(&self) -> [usize; 4] {
        [self.batch, self.q_len, self.q_heads, self.head_dim]
    }

    /// Dimensions of k as `[batch, row, head, channel]`.
    pub const fn k_dims(&self) -> [usize; 4] {
        [self.batch, self.kv_len, self.kv_heads, self.head_dim]
    }

    /// Dimensions of v as `[batch, row, head, channel]`.
    pub const fn v_dims(&self) -> [usize; 4] {
        [self.batch, self.kv_len, self.kv_heads, self.value_dim]
    }

    /// Dimensions of o as `[batch, row, head, channel]`.
    pub const fn o_dims(&self) -> [usize; 4] {
        [self.batch, self.q_len, self.q_heads, self.value_dim]
    }

    /// Dimensions of lse as `[batch, head, row]`.
    pub const fn lse_dims(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }
}

/// Strides of a `[batch, row, head, channel]` tensor in elements; the channel stride is 1.
///
/// A stride of 0 repeats an axis; negative strides walk backwards.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// From one batch item to the next.
    pub batch: i64,
    /// From one row (token) to the next.
    pub row: i64,
    /// From one head to the next.
    pub head: i64,
}

impl Strides {
    /// Strides of a contiguous `[batch, row, head, channel]` tensor of dimensions `dims`.
    pub const fn contiguous(dims: [usize; 4]) -> Self {
        let head = dims[3] as i64;
        let row = head * dims[2] as i64;
        Self { batch: row * dims[1] as i64, row, head }
    }

    /// Element offset of channel 0 of (`batch`, `row`, `head`), in 64 bits throughout.
    #[inline(always)]
    pub const fn offset(&self, batch: u32, row: u32, head: u32) -> i64 {
        self.batch * batch as i64 + self.row * row as i64 + self.head * head as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_need_more_than_32_bits() {
        let strides = Strides::contiguous([3, 1 << 20, 64, 128]);
        assert_eq!(strides.offset(2, 5, 7), 2 * (1_i64 << 33) + 5 * 8192 + 7 * 128);
    }

    #[test]
    fn query_heads_of_a_group_share_their_kv_head() {
        let shape = Shape {
            batch: 1,
            q_heads: 21,
            kv_heads: 7,
            q_len: 1,
            kv_len: 1,
            head_dim: 1,
            value_dim: 1,
        };
        assert_eq!(shape.group(), 3);
        let readers: [usize; 21] = core::array::from_fn(|head| shape.kv_head(head));
        assert_eq!(readers[..7], [0, 0, 0, 1, 1, 1, 2]);
        assert_eq!(readers[20], 6);
    }
}
