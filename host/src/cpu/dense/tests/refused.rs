//! Calls that are refused, by the name of the argument, and views that are not.

use super::case::{Case, shape};
use crate::attention::{Align, Attention, Broadcast, Dropout, DropoutState, Inputs, Lengths, Mask};
use crate::cpu::dense::{Precision, backward, forward};
use crate::error::Error;
use crate::tensor::{Place, TensorRef};

/// The argument or tensor that an error names.
fn named<T: std::fmt::Debug>(result: Result<T, Error>) -> &'static str {
    match result {
        Err(Error::Argument { argument, .. }) => argument,
        Err(
            Error::Dimensions { tensor, .. }
            | Error::ChannelStride { tensor, .. }
            | Error::Placement { tensor, .. }
            | Error::Presence { tensor, .. },
        ) => tensor,
        other => panic!("{other:?}"),
    }
}

fn small() -> Attention {
    Attention::new(shape(2, (2, 1), (3, 4), (2, 2)))
}

#[test]
fn options_and_tensors_go_together() {
    type Remove = fn(&mut Case);
    let declared: [(Attention, &str, Remove); 4] = [
        (small().bias(Broadcast::NONE), "bias", |case| case.bias = None),
        (small().boolean_mask(Broadcast::NONE), "boolean_mask", |case| case.boolean_mask = None),
        (small().alibi(), "alibi_slopes", |case| case.slopes = None),
        (small().sink(), "sink", |case| case.sink = None),
    ];
    for (attention, name, remove) in declared {
        let mut missing = Case::new(attention);
        let mut undeclared = missing.clone();
        remove(&mut missing);
        assert_eq!(named(missing.try_forward()), name);
        undeclared.attention = small();
        assert_eq!(named(undeclared.try_forward()), name);
    }
    let mut lengths = Case::new(small()).with_key_lengths(&[1, 2]);
    lengths.attention = small();
    assert_eq!(named(lengths.try_forward()), "key_lengths");
    let mut packed = Case::packed((2, 1), (2, 2), &[0, 3], &[0, 4], Mask::full());
    packed.packed = None;
    assert_eq!(named(packed.try_forward()), "packed");
}

#[test]
fn a_dropout_state_comes_from_one_place() {
    let words = [1_u64, 2, 3];
    let view = |dims: &[usize]| TensorRef::host(&words, dims).expect("inside");
    let answer = |attention: Attention, state: Option<TensorRef<'_, u64>>| {
        let case = Case::new(attention);
        let mut inputs = case.inputs().expect("valid");
        inputs.dropout_state = state;
        forward(&attention, &inputs, Precision::F64)
    };
    let given = small().dropout(Dropout::new(0.5, DropoutState::Given));
    let by_value = small().dropout(Dropout::new(0.5, (1, 2)));
    for (attention, state) in [
        (given, None),
        (by_value, Some(view(&[2]))),
        (small(), Some(view(&[2]))),
        (given, Some(view(&[3]))),
        (given, Some(view(&[1, 2]))),
    ] {
        assert_eq!(named(answer(attention, state)), "dropout_state");
    }
    // SAFETY: the view is refused before anything is read through it.
    let elsewhere = unsafe {
        TensorRef::from_raw(std::ptr::without_provenance(256), &[2], &[1], Place::Cuda(0))
    };
    assert_eq!(named(answer(given, Some(elsewhere.expect("a view")))), "dropout_state");
    let had = answer(given, Some(view(&[2]))).expect("a valid call");
    assert_eq!(had, answer(by_value, None).expect("a valid call"));
}

#[test]
fn bits_have_dimensions_of_their_own() {
    let bytes = [0xff_u8; 2 * 2 * 3 * 4];
    let answer = |attention: Attention, keys: usize| {
        let case = Case::new(attention);
        let mut inputs = case.inputs().expect("valid");
        inputs.boolean_mask = Some(TensorRef::host(&bytes, &[2, 2, 3, keys]).expect("inside"));
        forward(&attention, &inputs, Precision::F64)
    };
    let (bits, mask) = (small().bit_mask(Broadcast::NONE), small().boolean_mask(Broadcast::NONE));
    assert_eq!(answer(bits, 1), answer(mask, 4), "4 keys are in a byte");
    assert_eq!(named(answer(bits, 4)), "boolean_mask");
    assert_eq!(named(answer(mask, 1)), "boolean_mask");
}

#[test]
fn m10_p8_lengths_are_checked() {
    for lengths in [[1, 5], [-1, 2]] {
        let case = Case::new(small()).with_key_lengths(&lengths);
        assert_eq!(named(case.try_forward()), "key_lengths");
    }
    assert_eq!(named(Case::new(small()).with_key_lengths(&[1]).try_forward()), "key_lengths");
    let packed = || Case::packed((2, 1), (2, 2), &[0, 2, 5], &[0, 4, 6], Mask::full());
    let with = |change: fn(&mut Case)| {
        let mut case = packed();
        change(&mut case);
        named(case.try_forward())
    };
    assert!(packed().try_forward().is_ok());
    assert_eq!(with(|case| case.attention.shape.q_len = 2), "q_len");
    assert_eq!(with(|case| case.attention.shape.kv_len = 3), "kv_len");
    let cu_q = |case: &mut Case, values: [i32; 3]| {
        if let Some(packed) = &mut case.packed {
            packed.cu_q = values.to_vec();
        }
    };
    for values in [[1, 2, 5], [0, 2, 4], [0, 6, 5], [0, 3, 2]] {
        let mut case = packed();
        cu_q(&mut case, values);
        assert_eq!(named(case.try_forward()), "cu_q");
    }
}

#[test]
fn device_memory_is_refused() {
    let case = Case::new(small());
    let (q_dims, lse_dims) = (case.attention.tensor_dims()[0].clone(), case.attention.lse_dims());
    // SAFETY: the view is refused before anything is read through it.
    let on_device = |dims: &[usize]| unsafe {
        TensorRef::<f32>::from_raw(
            std::ptr::without_provenance(256),
            dims,
            &crate::tensor::contiguous_strides(dims),
            Place::Cuda(0),
        )
    };
    let mut inputs = case.inputs().expect("valid");
    inputs.q = on_device(&q_dims).expect("a view");
    assert_eq!(named(forward(&case.attention, &inputs, Precision::F64)), "q");
    let inputs = case.inputs().expect("valid");
    let d_o = TensorRef::host(&case.d_o, &q_dims).expect("as o");
    let d_lse = on_device(&lse_dims).expect("a view");
    let refused = backward(&case.attention, &inputs, &d_o, Some(&d_lse), Precision::F64);
    assert_eq!(named(refused), "d_lse");

    let lengths = Case::new(small()).with_key_lengths(&[1, 2]);
    let mut inputs = lengths.inputs().expect("valid");
    // SAFETY: as above.
    let device_lengths = unsafe {
        TensorRef::from_raw(std::ptr::without_provenance(256), &[2], &[1], Place::Cuda(0))
    };
    inputs.key_lengths = Some(Lengths::Device(device_lengths.expect("a view")));
    assert_eq!(named(forward(&lengths.attention, &inputs, Precision::F64)), "key_lengths");
}

#[test]
fn results_that_cannot_be_held_are_an_error() {
    let huge = shape(1, ((1 << 32) - 1, 1), (1 << 28, 1), (4, 4));
    let row = [0.0_f32; 4];
    let repeated = |dims: [usize; 4]| TensorRef::host_strided(&row, &dims, &[0, 0, 0, 1]);
    let inputs = Inputs::new(
        repeated(huge.q_dims()).expect("a view"),
        repeated(huge.k_dims()).expect("a view"),
        repeated(huge.v_dims()).expect("a view"),
    );
    let refused = forward(&Attention::new(huge), &inputs, Precision::F64);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
}

#[test]
fn p4_every_head_dim() {
    for dim in [1, 7, 8, 40, 72, 80, 96, 112, 136, 144, 160, 176, 192, 256] {
        let attention = Attention::new(shape(1, (2, 1), (5, 6), (dim, dim)));
        let case = Case::new(attention.mask(Mask::causal(Align::BottomRight)));
        // One more channel of zeros changes nothing but the default scale, so state it.
        let scale = crate::attention::Scale::Factor(case.attention.scale_factor());
        let mut wider = case.clone();
        wider.attention = Attention::new(shape(1, (2, 1), (5, 6), (dim + 1, dim + 1)))
            .mask(Mask::causal(Align::BottomRight))
            .scale(scale);
        let widen = |tensor: &[f32]| -> Vec<f32> {
            tensor.chunks(dim).flat_map(|row| [row, &[0.0]].concat()).collect()
        };
        for tensor in [&mut wider.q, &mut wider.k, &mut wider.v, &mut wider.d_o] {
            *tensor = widen(tensor);
        }
        let narrow = |tensor: &[f64]| -> Vec<f64> {
            tensor.chunks(dim + 1).flat_map(|row| row[..dim].to_vec()).collect()
        };
        super::assert_close(&narrow(&wider.forward().o), &case.forward().o, 1e-13, "o");
        let (wider, gradients) = (wider.backward(), case.backward());
        super::assert_close(&narrow(&wider.dq), &gradients.dq, 1e-12, "dq");
        super::assert_close(&narrow(&wider.dk), &gradients.dk, 1e-12, "dk");
        super::assert_close(&narrow(&wider.dv), &gradients.dv, 1e-12, "dv");
    }
}

#[test]
fn p5_strided_views_are_read_in_place_or_refused() {
    let case = Case::new(Attention::new(shape(2, (2, 2), (3, 4), (2, 2))));
    let exact = case.forward();
    // [B, H, S, D] in memory, seen as [B, S, H, D].
    let transposed = |tensor: &[f32], rows: usize| -> Vec<f32> {
        let mut out = vec![0.0; tensor.len()];
        for (index, value) in tensor.iter().enumerate() {
            let (c, h, s, b) = (index % 2, index / 2 % 2, index / 4 % rows, index / 4 / rows);
            out[((b * 2 + h) * rows + s) * 2 + c] = *value;
        }
        out
    };
    let (q, k, v) = (transposed(&case.q, 3), transposed(&case.k, 4), transposed(&case.v, 4));
    fn view(data: &[f32], rows: usize) -> TensorRef<'_, f32> {
        let view = TensorRef::host(data, &[2, 2, rows, 2]).and_then(|view| view.transposed(1, 2));
        view.expect("a view")
    }
    let inputs = Inputs::new(view(&q, 3), view(&k, 4), view(&v, 4));
    assert_eq!(forward(&case.attention, &inputs, Precision::F64).ok(), Some(exact));
    // Channels that are not contiguous are refused, not copied.
    let strided = TensorRef::host_strided(&q, &[2, 3, 2, 2], &[12, 4, 1, 2]).expect("a view");
    let inputs = Inputs::new(strided, view(&k, 4), view(&v, 4));
    assert_eq!(named(forward(&case.attention, &inputs, Precision::F64)), "q");
}
