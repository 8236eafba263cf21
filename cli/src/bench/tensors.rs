//! The tensors of a workload: pseudo-random normal ones, in as many sets as calls take in turn.

use std::sync::OnceLock;

use ferroflash::{
    Buffer, Device, Gradients, Inputs, Output, Plan, Saved, Shape, Stream, Workspace,
};

use super::record::Pass;
use super::statistics::Random;
use crate::failure::{Failure, Result};
use crate::file::{Stored, reserve};

/// Numbers that are drawn: a prime, so that rows of no length repeat within as many rows.
const DRAWN: usize = 1_048_583;
/// Sets at most.
const MOST_SETS: usize = 256;

/// The numbers, drawn once a process; the same every time.
fn numbers() -> &'static [f32] {
    static NUMBERS: OnceLock<Vec<f32>> = OnceLock::new();
    NUMBERS.get_or_init(|| {
        let mut random = Random(42);
        (0..DRAWN).map(|_| random.normal() as f32).collect()
    })
}

/// Standard normal numbers, laid out again and again from changing starts.
pub(super) struct Normals<T> {
    drawn: Vec<T>,
    next: usize,
}

impl<T: Stored> Normals<T> {
    /// The numbers in an element type.
    pub(super) fn new() -> Self {
        Self { drawn: numbers().iter().map(|&x| T::from_f32(x)).collect(), next: 0 }
    }

    /// The next `count` numbers.
    pub(super) fn take(&mut self, count: usize) -> Result<Vec<T>> {
        let mut taken = reserve("inputs", count)?;
        let mut start = self.next;
        while taken.len() < count {
            let some = (count - taken.len()).min(DRAWN - start);
            taken.extend_from_slice(&self.drawn[start..start + some]);
            start = 0;
        }
        // Tensors of equal size begin at different numbers.
        self.next = (self.next + count + 7919) % DRAWN;
        Ok(taken)
    }

    fn buffer(&mut self, device: &Device, dims: [usize; 4]) -> Result<Buffer<T>> {
        Ok(Buffer::from_slice(device, &self.take(count(&dims)?)?)?)
    }
}

/// The tensors of one call.
struct Set<T> {
    q: Buffer<T>,
    k: Buffer<T>,
    v: Buffer<T>,
    o: Buffer<T>,
    backward: Option<Backward<T>>,
}

/// What the backward pass reads and writes besides.
struct Backward<T> {
    lse: Buffer<f32>,
    d_o: Buffer<T>,
    dq: Buffer<T>,
    dk: Buffer<T>,
    dv: Buffer<T>,
}

/// Sets of tensors of one shape.
pub(super) struct Tensors<T> {
    device: Device,
    stream: Stream,
    sets: Vec<Set<T>>,
    /// ALiBi slopes, where calls take any.
    slopes: Option<Buffer<f32>>,
    next: usize,
}

impl<T: Stored> Tensors<T> {
    /// As many sets as exceed twice the device's second-level cache; one on the CPU.
    pub(super) fn new(
        device: &Device,
        shape: Shape,
        with_backward: bool,
        with_slopes: bool,
    ) -> Result<Self> {
        let mut normals = Normals::new();
        let dims = [shape.q_dims(), shape.k_dims(), shape.v_dims(), shape.o_dims()];
        let mut bytes = 1_usize;
        for dims in dims {
            bytes = bytes.saturating_add(count(&dims)?.saturating_mul(size_of::<T>()));
        }
        let cache = device.limits().map_or(0, |limits| limits.l2_bytes as usize);
        let sets = (2 * cache).div_ceil(bytes).clamp(1, MOST_SETS);
        let sets: Result<Vec<Set<T>>> =
            (0..sets).map(|_| Set::new(device, &mut normals, &shape, with_backward)).collect();
        let heads = shape.q_heads as f32;
        let slope = |head| (-8.0 * head as f32 / heads).exp2();
        let slopes: Option<Vec<f32>> =
            with_slopes.then(|| (1..=shape.q_heads).map(slope).collect());
        Ok(Self {
            device: device.clone(),
            stream: device.default_stream(),
            sets: sets?,
            slopes: slopes.map(|slopes| Buffer::from_slice(device, &slopes)).transpose()?,
            next: 0,
        })
    }

    /// Sets that there are.
    pub(super) fn count(&self) -> usize {
        self.sets.len()
    }

    /// Memory that `plan` needs for a pass.
    pub(super) fn workspace(&self, plan: &Plan<T>, pass: Pass) -> Result<Buffer<u8>> {
        let bytes = match pass {
            Pass::Forward => plan.workspace().forward,
            Pass::Backward => plan.workspace().backward,
        };
        Ok(Buffer::new(&self.device, bytes)?)
    }

    /// Fills o and lse of every set, which a backward pass reads.
    pub(super) fn prepare(&mut self, plan: &Plan<T>) -> Result<()> {
        let mut workspace = self.workspace(plan, Pass::Forward)?;
        for set in &mut self.sets {
            let slopes = self.slopes.as_ref();
            set.forward((plan, &self.stream), slopes, &mut workspace, true)?;
        }
        Ok(())
    }

    /// Queues a pass on the next set.
    pub(super) fn call(
        &mut self,
        plan: &Plan<T>,
        pass: Pass,
        workspace: &mut Buffer<u8>,
    ) -> Result<()> {
        let now = self.next;
        self.next = (now + 1) % self.sets.len();
        let set = &mut self.sets[now];
        let (stream, slopes) = (&self.stream, self.slopes.as_ref());
        match pass {
            Pass::Forward => set.forward((plan, stream), slopes, workspace, false),
            Pass::Backward => set.backward((plan, stream), slopes, workspace),
        }
    }
}

impl<T: Stored> Set<T> {
    fn new(
        device: &Device,
        normals: &mut Normals<T>,
        shape: &Shape,
        with_backward: bool,
    ) -> Result<Self> {
        let empty =
            |dims: [usize; 4]| -> Result<Buffer<T>> { Ok(Buffer::new(device, count(&dims)?)?) };
        let backward = match with_backward {
            false => None,
            true => Some(Backward {
                lse: Buffer::new(device, count(&shape.lse_dims())?)?,
                d_o: normals.buffer(device, shape.o_dims())?,
                dq: empty(shape.q_dims())?,
                dk: empty(shape.k_dims())?,
                dv: empty(shape.v_dims())?,
            }),
        };
        Ok(Self {
            q: normals.buffer(device, shape.q_dims())?,
            k: normals.buffer(device, shape.k_dims())?,
            v: normals.buffer(device, shape.v_dims())?,
            o: empty(shape.o_dims())?,
            backward,
        })
    }

    fn forward(
        &mut self,
        (plan, stream): (&Plan<T>, &Stream),
        slopes: Option<&Buffer<f32>>,
        workspace: &mut Buffer<u8>,
        with_lse: bool,
    ) -> Result<()> {
        let shape = plan.attention().shape();
        let inputs = inputs([&self.q, &self.k, &self.v], slopes, shape, stream)?;
        let lse = match &mut self.backward {
            Some(backward) if with_lse => Some(backward.lse.tensor_mut(stream, &shape.lse_dims())?),
            _ => None,
        };
        let mut output = Output { o: self.o.tensor_mut(stream, &shape.o_dims())?, lse };
        let workspace = memory(workspace, stream)?;
        Ok(plan.run_into(stream, inputs, &mut output, workspace)?)
    }

    fn backward(
        &mut self,
        (plan, stream): (&Plan<T>, &Stream),
        slopes: Option<&Buffer<f32>>,
        workspace: &mut Buffer<u8>,
    ) -> Result<()> {
        let shape = plan.attention().shape();
        let Some(Backward { lse, d_o, dq, dk, dv }) = &mut self.backward else { return Ok(()) };
        let saved = Saved {
            inputs: inputs([&self.q, &self.k, &self.v], slopes, shape, stream)?,
            o: self.o.tensor(stream, &shape.o_dims())?,
            lse: lse.tensor(stream, &shape.lse_dims())?,
        };
        let d_o = d_o.tensor(stream, &shape.o_dims())?;
        let mut gradients = Gradients {
            dq: Some(dq.tensor_mut(stream, &shape.q_dims())?),
            dk: Some(dk.tensor_mut(stream, &shape.k_dims())?),
            dv: Some(dv.tensor_mut(stream, &shape.v_dims())?),
            ..Gradients::default()
        };
        let workspace = memory(workspace, stream)?;
        Ok(plan.backward_into(stream, &saved, &d_o, None, &mut gradients, workspace)?)
    }
}

/// Elements of a tensor.
fn count(dims: &[usize]) -> Result<usize> {
    let elements = dims.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
    elements.ok_or_else(|| Failure::Run(format!("{dims:?} are more elements than memory holds")))
}

fn inputs<'a, T: Stored>(
    [q, k, v]: [&'a Buffer<T>; 3],
    slopes: Option<&'a Buffer<f32>>,
    shape: &Shape,
    stream: &'a Stream,
) -> Result<Inputs<'a, T>> {
    let mut inputs = Inputs::new(
        q.tensor(stream, &shape.q_dims())?,
        k.tensor(stream, &shape.k_dims())?,
        v.tensor(stream, &shape.v_dims())?,
    );
    inputs.alibi_slopes =
        slopes.map(|slopes| slopes.tensor(stream, &[shape.q_heads])).transpose()?;
    Ok(inputs)
}

fn memory<'a>(bytes: &'a mut Buffer<u8>, stream: &'a Stream) -> Result<Workspace<'a>> {
    match bytes.len() {
        0 => Ok(Workspace::none()),
        len => Ok(bytes.tensor_mut(stream, &[len])?.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_normal_and_differ() {
        let mut normals = Normals::<f32>::new();
        let (one, two) = (normals.take(5000).expect("some"), normals.take(5000).expect("some"));
        assert_ne!(one, two);
        let long = normals.take(2 * DRAWN + 3).expect("some");
        assert_eq!(long.len(), 2 * DRAWN + 3);
        let square: f32 = one.iter().map(|x| x * x).sum::<f32>() / 5000.0;
        assert!((square - 1.0).abs() < 0.1, "{square}");
    }
}
