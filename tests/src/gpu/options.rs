//! The options of a call on a CUDA device.

use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use ferroflash::{Inputs, Lengths, Packed, Place, TensorRef};

use super::{OnDevice, copy_stream};
use crate::case::Case;
use crate::element::Real;

/// Elements before and after the contents.
const GUARD: usize = 64;

/// A contiguous tensor of integers, with others around it.
struct Integers<V> {
    memory: CudaSlice<V>,
    address: u64,
    dims: Vec<usize>,
}

impl<V: DeviceRepr + Copy> Integers<V> {
    fn upload(contents: &[V], dims: &[usize], around: V) -> Self {
        let stream = copy_stream();
        let values = Self::guarded(contents, around);
        let memory = stream.clone_htod(&values).expect("device memory");
        stream.synchronize().expect("a copy");
        let address = memory.device_ptr(&stream).0 + (GUARD * size_of::<V>()) as u64;
        Self { memory, address, dims: dims.to_vec() }
    }

    fn guarded(contents: &[V], around: V) -> Vec<V> {
        let mut values = vec![around; GUARD];
        values.extend_from_slice(contents);
        values.extend(vec![around; GUARD]);
        values
    }

    fn replace(&mut self, contents: &[V], around: V) {
        let stream = copy_stream();
        stream.memcpy_htod(&Self::guarded(contents, around), &mut self.memory).expect("a copy");
        stream.synchronize().expect("a copy");
    }

    fn view(&self) -> TensorRef<'_, V> {
        let strides = ferroflash::contiguous_strides(&self.dims);
        let address = self.address as *const V;
        // SAFETY: the memory was allocated for these elements and more, and tests synchronise
        // before they drop it.
        unsafe { TensorRef::from_raw(address, &self.dims, &strides, Place::Cuda(0)) }
            .expect("at most four axes")
    }
}

/// Offsets and used lengths of packed items: cumulative queries and keys, used queries and keys.
struct PackedOnDevice {
    cu: [Integers<i32>; 2],
    used: [Option<Integers<i32>>; 2],
}

/// Everything that a call's options read.
pub(super) struct OptionsOnDevice {
    bias: Option<OnDevice<f32>>,
    boolean_mask: Option<Integers<u8>>,
    dropout_state: Option<Integers<u64>>,
    alibi_slopes: Option<OnDevice<f32>>,
    sink: Option<OnDevice<f32>>,
    key_lengths: Option<Integers<i32>>,
    packed: Option<PackedOnDevice>,
}

impl OptionsOnDevice {
    pub(super) fn upload<T: Real>(case: &Case<T>) -> Self {
        let lengths = |values: &Vec<i32>| Integers::upload(values, &[values.len()], i32::MAX);
        Self {
            bias: case.bias.as_ref().map(|(_, bias)| OnDevice::upload(bias)),
            boolean_mask: case.given_mask().map(|(mask, dims)| Integers::upload(mask, &dims, 0xff)),
            dropout_state: case.dropout_state.map(|state| Integers::upload(&state, &[2], 0)),
            alibi_slopes: case.alibi_slopes.as_ref().map(OnDevice::upload),
            sink: case.sink.as_ref().map(OnDevice::upload),
            key_lengths: case.key_lengths.as_ref().map(lengths),
            packed: case.packed.as_ref().map(|packed| PackedOnDevice {
                cu: [lengths(&packed.cu_q), lengths(&packed.cu_k)],
                used: [packed.used_q.as_ref().map(lengths), packed.used_k.as_ref().map(lengths)],
            }),
        }
    }

    /// Another seed and offset, in the same place.
    pub(super) fn replace_dropout_state(&mut self, state: [u64; 2]) {
        let had = self.dropout_state.as_mut().expect("a call with a state on the device");
        had.replace(&state, 0);
    }

    /// Adds them to a call's inputs.
    pub(super) fn give<'a, T>(&'a self, inputs: &mut Inputs<'a, T>) {
        let on_device = |values: &'a Integers<i32>| Lengths::Device(values.view());
        inputs.bias = self.bias.as_ref().map(OnDevice::view);
        inputs.boolean_mask = self.boolean_mask.as_ref().map(Integers::view);
        inputs.dropout_state = self.dropout_state.as_ref().map(Integers::view);
        inputs.alibi_slopes = self.alibi_slopes.as_ref().map(OnDevice::view);
        inputs.sink = self.sink.as_ref().map(OnDevice::view);
        inputs.key_lengths = self.key_lengths.as_ref().map(on_device);
        inputs.packed = self.packed.as_ref().map(|PackedOnDevice { cu, used }| Packed {
            cu_q: on_device(&cu[0]),
            cu_k: on_device(&cu[1]),
            used_q: used[0].as_ref().map(on_device),
            used_k: used[1].as_ref().map(on_device),
        });
    }
}
