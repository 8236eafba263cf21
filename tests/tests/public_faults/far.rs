//! Strides past 2^31 elements on a device, where its memory allows.

use cudarc::driver::{CudaViewMut, DevicePtr};
use ferroflash::{Inputs, Output, Place, Stream, TensorMut, TensorRef};
use ferroflash_tests::backend::Backend;
use ferroflash_tests::case::Case;
use ferroflash_tests::gpu::{copy_stream, device};
use ferroflash_tests::memory::Owned;
use half::bf16;

const STEP: usize = (1 << 30) + 8;
const ELEMENTS: usize = 2 * STEP + 4 * 64;

/// q, k, v and o row by row in one allocation, rows [`STEP`] elements apart: `expected` is o.
pub(crate) fn on_the_gpu(backend: Backend, case: &Case<bf16>, expected: &[f64]) {
    let context = device().expect("a device").context().expect("CUDA").clone();
    let (free, _) = context.mem_get_info().expect("a driver");
    if free < 3 * ELEMENTS * size_of::<bf16>() {
        println!("strides past 2^31: {free} bytes of device memory are too few; not run");
        return;
    }
    let queue = copy_stream();
    // SAFETY: every element that is read was written before.
    let mut memory = unsafe { queue.alloc::<bf16>(ELEMENTS) }.expect("device memory");
    let place = |tensor: usize, row: usize| row * STEP + tensor * 64;
    let values = |owned: &Owned<bf16>| -> Vec<bf16> {
        owned.bits().into_iter().map(|bits| bf16::from_bits(bits as u16)).collect()
    };
    for (tensor, owned) in [&case.q, &case.k, &case.v].into_iter().enumerate() {
        for (row, values) in values(owned).chunks_exact(64).enumerate() {
            let start = place(tensor, row);
            let mut to: CudaViewMut<'_, bf16> = memory.slice_mut(start..start + 64);
            queue.memcpy_htod(values, &mut to).expect("a copy");
        }
    }
    queue.synchronize().expect("copies");
    let base = memory.device_ptr(&queue).0;
    let (dims, strides) = ([1, 3, 1, 64], [0, STEP as i64, 0, 1]);
    let address = |tensor: usize| base as usize + tensor * 64 * size_of::<bf16>();
    // SAFETY: the last row ends inside the allocation, and the four tensors share no element.
    let (inputs, mut output) = unsafe {
        let read = |tensor| {
            let at = address(tensor) as *const bf16;
            TensorRef::from_raw(at, &dims, &strides, Place::Cuda(0)).expect("four axes")
        };
        let o = TensorMut::from_raw(address(3) as *mut bf16, &dims, &strides, Place::Cuda(0));
        (Inputs::new(read(0), read(1), read(2)), Output { o: o.expect("four axes"), lse: None })
    };
    let stream = Stream::from(queue.clone());
    let plan = backend.plan::<bf16>(&case.attention).expect("a plan");
    plan.run(&stream, inputs, &mut output).expect("a launch");
    drop(output);
    stream.synchronize().expect("the kernel ran");
    for row in 0..3 {
        let start = place(3, row);
        let had = queue.clone_dtoh(&memory.slice(start..start + 64)).expect("a copy");
        queue.synchronize().expect("a copy");
        let had: Vec<f64> = had.into_iter().map(|value| value.to_f64()).collect();
        assert_eq!(had, expected[row * 64..][..64], "row {row}");
    }
}
