//! The tensors of a call: checked against one another as the file has them, then viewed as the
//! library wants them.

use ferroflash::{Dtype, Shape, TensorMut, TensorRef};

use crate::failure::{Failure, Result};
use crate::file::{Entry, Stored};
use crate::options::AxisOrder;

/// How the axes of a tensor in a file become `[batch, row, head, channel]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axes {
    order: AxisOrder,
    /// 4, or 3 without a batch axis.
    rank: usize,
}

impl Axes {
    /// `[batch, row, head, channel]`.
    pub(crate) const BSHD: Self = Self { order: AxisOrder::Bshd, rank: 4 };

    /// The file's axes, with the batch axis in any case.
    fn with_batch(self, dims: &[usize]) -> [usize; 4] {
        let mut four = [1; 4];
        four[4 - self.rank..].copy_from_slice(dims);
        four
    }

    /// `[batch, row, head, channel]` from the file's dimensions, or the other way round.
    fn exchanged(self, [batch, a, b, channel]: [usize; 4]) -> [usize; 4] {
        match self.order {
            AxisOrder::Bshd => [batch, a, b, channel],
            AxisOrder::Bhsd => [batch, b, a, channel],
        }
    }

    /// The file's dimensions of a `[batch, row, head, channel]` tensor.
    pub(crate) fn in_file(self, dims: [usize; 4]) -> Vec<usize> {
        self.exchanged(dims)[4 - self.rank..].to_vec()
    }

    /// The file's dimensions of a `[batch, head, row]` tensor.
    pub(crate) fn lse_in_file(self, shape: &Shape) -> Vec<usize> {
        shape.lse_dims()[4 - self.rank..].to_vec()
    }

    /// The names of the file's axes.
    fn names(self) -> &'static str {
        match (self.order, self.rank) {
            (AxisOrder::Bshd, 4) => "[batch, sequence, head, channel]",
            (AxisOrder::Bshd, _) => "[sequence, head, channel]",
            (AxisOrder::Bhsd, 4) => "[batch, head, sequence, channel]",
            (AxisOrder::Bhsd, _) => "[head, sequence, channel]",
        }
    }

    /// A tensor that lies as in the file, as `[batch, row, head, channel]` of dimensions `dims`.
    /// `contiguous` makes it from its dimensions in memory.
    pub(crate) fn view<'a, T>(
        self,
        dims: [usize; 4],
        contiguous: impl FnOnce(&[usize]) -> ferroflash::Result<TensorRef<'a, T>>,
    ) -> ferroflash::Result<TensorRef<'a, T>> {
        let tensor = contiguous(&self.exchanged(dims))?;
        match self.order {
            AxisOrder::Bshd => Ok(tensor),
            AxisOrder::Bhsd => tensor.transposed(1, 2),
        }
    }

    /// The elements of a tensor that lies as in the file, in the order of its `[batch, row, head,
    /// channel]` dimensions `dims`.
    pub(crate) fn in_order<T: Copy>(self, data: &[T], dims: [usize; 4]) -> impl Iterator<Item = T> {
        let [_, rows, heads, channels] = dims;
        let vectors = data.len().checked_div(channels).unwrap_or(0);
        (0..vectors).flat_map(move |vector| {
            let vector = match self.order {
                AxisOrder::Bshd => vector,
                AxisOrder::Bhsd => {
                    let (batch, row, head) =
                        (vector / (rows * heads), vector / heads % rows, vector % heads);
                    (batch * heads + head) * rows + row
                }
            };
            data[vector * channels..(vector + 1) * channels].iter().copied()
        })
    }

    /// As [`Axes::view`], to write.
    pub(crate) fn view_mut<'a, T>(
        self,
        dims: [usize; 4],
        contiguous: impl FnOnce(&[usize]) -> ferroflash::Result<TensorMut<'a, T>>,
    ) -> ferroflash::Result<TensorMut<'a, T>> {
        let tensor = contiguous(&self.exchanged(dims))?;
        match self.order {
            AxisOrder::Bshd => Ok(tensor),
            AxisOrder::Bhsd => tensor.transposed(1, 2),
        }
    }
}

/// q, k and v in their files, of dimensions and types that fit one another.
pub(crate) struct Inputs {
    q: Entry,
    k: Entry,
    v: Entry,
    /// Sizes of the call.
    pub(crate) shape: Shape,
    /// How tensors lie in the files.
    pub(crate) axes: Axes,
}

impl Inputs {
    /// Checks that q, k and v fit one another.
    pub(crate) fn new(q: Entry, k: Entry, v: Entry, order: AxisOrder) -> Result<Self> {
        let axes = Axes { order, rank: q.dims.len() };
        if !(3..=4).contains(&axes.rank) {
            let needs = format!(
                "{} or {}",
                Axes { order, rank: 4 }.names(),
                Axes { order, rank: 3 }.names()
            );
            return Err(Failure::needs("q", format!("has dimensions {:?}", q.dims), needs));
        }
        // Batch and heads of a tensor without elements may be any numbers: no file bounds them.
        if q.dims.contains(&0) {
            let had = format!("has dimensions {:?}, and so no element", q.dims);
            return Err(Failure::needs("q", had, "one query at least"));
        }
        for other in [&k, &v] {
            if other.dims.len() != axes.rank {
                let had = format!("has dimensions {:?}", other.dims);
                let needs = format!("{} as q, {:?}", axes.names(), q.dims);
                return Err(Failure::needs(other.name, had, needs));
            }
            if other.dtype != q.dtype {
                let had = format!("holds {}", other.dtype);
                return Err(Failure::needs(other.name, had, format!("{} as q", q.dtype)));
            }
        }
        let rows = |entry: &Entry| axes.exchanged(axes.with_batch(&entry.dims));
        let [batch, q_len, q_heads, head_dim] = rows(&q);
        let [_, kv_len, kv_heads, _] = rows(&k);
        let [.., value_dim] = rows(&v);
        let shape = Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let inputs = Self { q, k, v, shape, axes };
        inputs.check(&inputs.k, shape.k_dims(), "q's batch and channels")?;
        inputs.check(&inputs.v, shape.v_dims(), "k's batch, sequence and heads")?;
        Ok(inputs)
    }

    /// Checks an entry against `[batch, row, head, channel]` dimensions that come from `origin`.
    pub(crate) fn check(&self, entry: &Entry, dims: [usize; 4], origin: &str) -> Result<()> {
        self.check_in_file(entry, &self.axes.in_file(dims), origin)
    }

    /// Checks an entry against dimensions as the file should have them.
    pub(crate) fn check_in_file(&self, entry: &Entry, dims: &[usize], origin: &str) -> Result<()> {
        if entry.dims == dims {
            return Ok(());
        }
        let had = format!("has dimensions {:?}", entry.dims);
        Err(Failure::needs(entry.name, had, format!("{dims:?} to fit {origin}")))
    }

    /// Element type of all three.
    pub(crate) fn dtype(&self) -> Dtype {
        self.q.dtype
    }

    /// Reads the tensors; `T` is [`Inputs::dtype`].
    pub(crate) fn read<T: Stored>(&self) -> Result<Tensors<T>> {
        Ok(Tensors {
            q: self.q.read()?,
            k: self.k.read()?,
            v: self.v.read()?,
            shape: self.shape,
            axes: self.axes,
        })
    }
}

/// q, k and v in host memory.
pub(crate) struct Tensors<T> {
    pub(crate) q: Vec<T>,
    pub(crate) k: Vec<T>,
    pub(crate) v: Vec<T>,
    pub(crate) shape: Shape,
    pub(crate) axes: Axes,
}

impl<T> Tensors<T> {
    /// Views for a call on the CPU.
    pub(crate) fn inputs(&self) -> ferroflash::Result<ferroflash::Inputs<'_, T>> {
        let view = |data, dims| self.axes.view(dims, |dims| TensorRef::host(data, dims));
        Ok(ferroflash::Inputs::new(
            view(&self.q, self.shape.q_dims())?,
            view(&self.k, self.shape.k_dims())?,
            view(&self.v, self.shape.v_dims())?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_in_either_order() {
        // [batch 2, row 2, head 3, channel 1], each element its place in that order.
        let dims = [2, 2, 3, 1];
        let by_rows: Vec<usize> = (0..12).collect();
        let by_heads = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11];
        for (order, data) in
            [(AxisOrder::Bshd, by_rows.as_slice()), (AxisOrder::Bhsd, by_heads.as_slice())]
        {
            let axes = Axes { order, rank: 4 };
            assert!(axes.in_order(data, dims).eq(0..12));
        }
    }

    #[test]
    fn a_batch_axis_is_put_in_and_taken_out() {
        let axes = Axes { order: AxisOrder::Bhsd, rank: 3 };
        let dims = axes.exchanged(axes.with_batch(&[8, 100, 64]));
        assert_eq!(dims, [1, 100, 8, 64]);
        assert_eq!(axes.in_file(dims), [8, 100, 64]);
    }
}
