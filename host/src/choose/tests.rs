//! Which kernel a call takes.

use super::*;
use crate::attention::{Align, Broadcast, Dropout, Mask, Shape};

fn attention() -> Attention {
    Attention::new(Shape {
        batch: 2,
        q_heads: 2,
        kv_heads: 1,
        q_len: 8,
        kv_len: 8,
        head_dim: 64,
        value_dim: 64,
    })
}

#[test]
fn a_call_takes_the_narrowest_class_that_has_its_options() {
    use MaskClass::{Causal, Full, General, Masked};
    let causal = Mask::causal(Align::BottomRight);
    let window = |left, right| attention().mask(causal.window(left, right));
    let packed = Layout::Packed { q_tokens: 9, kv_tokens: 9 };
    let dropout = Dropout::new(0.0, (0, 0));
    for (class, attention) in [
        (Full, attention()),
        // Sides that hide nothing.
        (Full, window(Some(7), Some(7))),
        (Causal, window(Some(7), Some(0))),
        (Causal, window(None, Some(6))),
        (Masked, window(Some(6), None)),
        (Masked, attention().layout(Layout::KeyLengths)),
        (Masked, attention().layout(packed)),
        (Masked, attention().softcap(1.0)),
        (Masked, attention().alibi()),
        (Masked, attention().sink()),
        (General, attention().bias(Broadcast::NONE)),
        (General, attention().boolean_mask(Broadcast::NONE)),
        (General, attention().dropout(dropout)),
    ] {
        assert_eq!(mask_class(&attention), class, "{attention:?}");
    }
    let names = options(&window(Some(2), Some(0)).layout(packed));
    let expected = [(Causal, RIGHT_SIDE), (Masked, "left window"), (Masked, "packed sequences")];
    assert_eq!(names, expected);
}

#[test]
fn wide_values_take_two_launches() {
    let taken = |head_dim, value_dim, shared_bytes_per_block| {
        let a100 = Limits { capability: (8, 0), shared_bytes_per_block, ..h200() };
        let shape = Shape { head_dim, value_dim, ..attention().shape };
        choose(&Attention::new(shape), Dtype::Bf16, Direction::Forward, &a100, None)
            .map(|choice| (choice.spec.name, choice.reason))
    };
    let (kernel, reason) = taken(512, 512, 166_912).expect("a kernel");
    assert_eq!(kernel, "portable_forward_d512x256_bf16_masked");
    assert!(reason.ends_with("in 2 launches of 256 values"), "{reason}");
    // The narrowest that holds the queries, on consumer cards too.
    let (kernel, _) = taken(40, 300, 101_376).expect("a kernel");
    assert_eq!(kernel, "portable_forward_d64x256_bf16_full");
    let (kernel, reason) = taken(257, 256, 101_376).expect("a kernel");
    assert_eq!(kernel, "portable_forward_d512x256_bf16_masked");
    assert!(!reason.contains("launches"), "{reason}");
    for (head_dim, value_dim) in [(513, 8), (8, 513)] {
        let error = taken(head_dim, value_dim, 166_912).expect_err("too wide");
        assert!(error.to_string().contains("up to (512, 512)"), "{error}");
    }
}

fn h200() -> Limits {
    Limits {
        name: "NVIDIA H200".to_owned(),
        capability: (9, 0),
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        shared_bytes_per_multiprocessor: 233_472,
        l2_bytes: 62_914_560,
        memory_bytes: 150_000_000_000,
        driver_version: 13_000,
    }
}

#[test]
fn options_keep_the_family_as_far_as_it_has_them() {
    let taken = |dims: (usize, usize), call: fn(Attention) -> Attention| {
        let shape = Shape { head_dim: dims.0, value_dim: dims.1, ..attention().shape };
        let choice =
            choose(&call(Attention::new(shape)), Dtype::F16, Direction::Forward, &h200(), None)
                .expect("a kernel");
        (choice.spec.name, choice.fallback.map(|spec| spec.name), choice.rejected)
    };
    let window = |call: Attention| call.mask(Mask::full().window(Some(2), None));
    let (name, fallback, _) = taken((64, 64), window);
    assert_eq!(name, "hopper_forward_d64_f16_masked");
    assert_eq!(fallback, Some("portable_forward_d64_f16_masked"));
    let packed = |call: Attention| {
        call.layout(Layout::Packed { q_tokens: 9, kv_tokens: 9 }).alibi().softcap(3.0).sink()
    };
    assert_eq!(taken((128, 72), packed).0, "hopper_forward_d128_f16_masked");
    let bias = |call: Attention| call.bias(Broadcast::NONE);
    let (name, fallback, rejected) = taken((64, 64), bias);
    assert_eq!((name, fallback), ("portable_forward_d64_f16_general", None));
    let why = rejected.iter().find(|other| other.kernel == "hopper_forward_d64_f16_masked");
    assert_eq!(why.map(|other| other.reason.as_str()), Some("has no bias"));
}

#[test]
fn options_keep_the_family_backward_as_far_as_registers_go() {
    let taken = |dims: (usize, usize), call: fn(Attention) -> Attention| {
        let shape = Shape { head_dim: dims.0, value_dim: dims.1, ..attention().shape };
        let call = call(Attention::new(shape));
        choose(&call, Dtype::Bf16, Direction::Backward, &h200(), None).expect("a kernel")
    };
    let packed = |call: Attention| {
        call.layout(Layout::Packed { q_tokens: 9, kv_tokens: 9 }).softcap(3.0).sink()
    };
    let choice = taken((64, 64), packed);
    assert_eq!(choice.spec.name, "hopper_backward_d64_bf16_masked");
    let fallback = choice.fallback.map(|spec| spec.name);
    assert_eq!(fallback, Some("portable_backward_d64_bf16_masked"));
    assert_eq!(taken((72, 128), packed).spec.name, "hopper_backward_d128_bf16_masked");
    assert_eq!(taken((192, 128), packed).spec.family, Family::Portable);
    let both = |call: Attention| call.softcap(3.0).alibi();
    assert_eq!(taken((64, 64), both).spec.name, "hopper_backward_d64_bf16_masked");
    let choice = taken((128, 128), both);
    assert_eq!(choice.spec.family, Family::Portable);
    let name = "hopper_backward_d128_bf16_masked";
    let why = choice.rejected.iter().find(|other| other.kernel == name);
    let why = why.map(|other| other.reason.as_str());
    assert_eq!(why, Some("has no registers for a softcap and ALiBi together"));
}

#[test]
fn many_keys_take_wide_tiles() {
    let h200 = h200();
    let taken = |mask, kv_len, limits: &Limits| {
        let shape = Shape { kv_len, head_dim: 128, value_dim: 128, ..attention().shape };
        let call = Attention::new(shape).mask(mask);
        call.kernel_for(Dtype::Bf16, limits).expect("a kernel").name
    };
    let causal = Mask::causal(Align::TopLeft);
    assert_eq!(taken(causal, 4095, &h200), "hopper_forward_d128_bf16_causal");
    assert_eq!(taken(causal, 4096, &h200), "hopper_forward_d128_long_bf16_causal");
    assert_eq!(taken(Mask::full(), 4096, &h200), "hopper_forward_d128_bf16_full");
    // The mask class comes before the width of the tile.
    let a100 = Limits { capability: (8, 0), shared_bytes_per_block: 166_912, ..h200 };
    for keys in [64, 4096] {
        assert_eq!(taken(Mask::full(), keys, &a100), "portable_forward_d128_bf16_full");
        assert_eq!(taken(causal, keys, &a100), "portable_forward_d128_bf16_causal");
    }
}
