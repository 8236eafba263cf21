//! Exact attention, forward and backward, on NVIDIA GPUs and on the CPU.
//!
//! An [`Attention`] describes a call: sizes, mask, scale and options. Its [`plan`](Attention::plan)
//! validates the call for a device, chooses a kernel and says why; the plan then runs on tensors as
//! often as needed. The GPU kernels are written in Rust, travel inside this crate and need nothing
//! but NVIDIA's driver; without one, the same algorithms run on the CPU.
//!
//! ```
//! use ferroflash::{Align, Attention, Buffer, Device, Inputs, Mask, Output, Shape};
//!
//! # fn main() -> ferroflash::Result<()> {
//! let shape = Shape {
//!     batch: 1, q_heads: 4, kv_heads: 2, q_len: 16, kv_len: 24, head_dim: 32, value_dim: 32,
//! };
//! let device = Device::cpu(); // or Device::best()
//! let stream = device.default_stream();
//! let q = Buffer::from_slice(&device, &vec![0.1_f32; 16 * 4 * 32])?;
//! let k = Buffer::from_slice(&device, &vec![0.2_f32; 24 * 2 * 32])?;
//! let v = Buffer::from_slice(&device, &vec![0.3_f32; 24 * 2 * 32])?;
//! let mut o = Buffer::<f32>::new(&device, 16 * 4 * 32)?;
//!
//! let attention = Attention::new(shape).mask(Mask::causal(Align::BottomRight));
//! let plan = attention.plan::<f32>(&device)?;
//! println!("{}", plan.explain());
//! let inputs = Inputs::new(
//!     q.tensor(&stream, &shape.q_dims())?,
//!     k.tensor(&stream, &shape.k_dims())?,
//!     v.tensor(&stream, &shape.v_dims())?,
//! );
//! let mut output = Output { o: o.tensor_mut(&stream, &shape.o_dims())?, lse: None };
//! plan.run(&stream, inputs, &mut output)?; // run_into() takes a workspace of the caller's
//! drop(output);
//! assert!(o.to_vec(&stream)?.iter().all(|x| (x - 0.3).abs() < 1e-6));
//! # Ok(())
//! # }
//! ```

mod attention;
mod buffer;
mod choose;
pub mod cpu;
mod cuda;
mod device;
mod element;
mod elsewhere;
mod error;
mod explain;
mod lengths;
mod options;
mod plan;
mod tensor;

pub use attention::{
    Align, Attention, Broadcast, Dropout, DropoutState, Gradients, Inputs, Layout, Lengths, Mask,
    Output, Packed, Saved, Scale, Shape,
};
pub use buffer::Buffer;
pub use choose::Rejection;
pub use cuda::artifacts::{Form, Record, made_by, record, totals};
pub use cuda::device::Limits;
pub use device::{Device, Stream};
pub use element::Element;
pub use error::{Error, Result};
pub use explain::{Explanation, Launch};
pub use ferroflash_core::axes::{Direction, Dtype, Family, MaskClass};
pub use ferroflash_core::table::{KERNELS, KernelSpec};
pub use ferroflash_core::visibility::{TileClass, Visibility};
pub use plan::{Plan, Preference, WORKSPACE_ALIGNMENT, Workspace, WorkspaceBytes};
pub use tensor::{MAX_RANK, Place, TensorMut, TensorRef, contiguous_strides};
