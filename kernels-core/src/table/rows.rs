//! The rows.

/// Hands every row of the kernel table to `$callback`, as
/// `name = Family Direction<Tiling, Element, MaskKind>;`.
#[macro_export]
macro_rules! kernel_table {
    ($callback:ident) => {
        $callback! {
            portable_forward_d32_bf16_full = Portable Forward<Portable32, Bf16, Full>;
            portable_forward_d32_bf16_causal = Portable Forward<Portable32, Bf16, Causal>;
            portable_forward_d32_f16_full = Portable Forward<Portable32, F16, Full>;
            portable_forward_d32_f16_causal = Portable Forward<Portable32, F16, Causal>;
            portable_forward_d64_bf16_full = Portable Forward<Portable64, Bf16, Full>;
            portable_forward_d64_bf16_causal = Portable Forward<Portable64, Bf16, Causal>;
            portable_forward_d64_f16_full = Portable Forward<Portable64, F16, Full>;
            portable_forward_d64_f16_causal = Portable Forward<Portable64, F16, Causal>;
            portable_forward_d96_bf16_full = Portable Forward<Portable96, Bf16, Full>;
            portable_forward_d96_bf16_causal = Portable Forward<Portable96, Bf16, Causal>;
            portable_forward_d96_f16_full = Portable Forward<Portable96, F16, Full>;
            portable_forward_d96_f16_causal = Portable Forward<Portable96, F16, Causal>;
            portable_forward_d128_bf16_full = Portable Forward<Portable128, Bf16, Full>;
            portable_forward_d128_bf16_causal = Portable Forward<Portable128, Bf16, Causal>;
            portable_forward_d128_f16_full = Portable Forward<Portable128, F16, Full>;
            portable_forward_d128_f16_causal = Portable Forward<Portable128, F16, Causal>;
            portable_forward_d192_bf16_full = Portable Forward<Portable192, Bf16, Full>;
            portable_forward_d192_bf16_causal = Portable Forward<Portable192, Bf16, Causal>;
            portable_forward_d192_f16_full = Portable Forward<Portable192, F16, Full>;
            portable_forward_d192_f16_causal = Portable Forward<Portable192, F16, Causal>;
            portable_forward_d256_bf16_full = Portable Forward<Portable256, Bf16, Full>;
            portable_forward_d256_bf16_causal = Portable Forward<Portable256, Bf16, Causal>;
            portable_forward_d256_f16_full = Portable Forward<Portable256, F16, Full>;
            portable_forward_d256_f16_causal = Portable Forward<Portable256, F16, Causal>;
            portable_forward_d192x128_bf16_full = Portable Forward<Portable192x128, Bf16, Full>;
            portable_forward_d192x128_bf16_causal = Portable Forward<Portable192x128, Bf16, Causal>;
            portable_forward_d192x128_f16_full = Portable Forward<Portable192x128, F16, Full>;
            portable_forward_d192x128_f16_causal = Portable Forward<Portable192x128, F16, Causal>;
            portable_forward_d64x256_bf16_full = Portable Forward<Portable64x256, Bf16, Full>;
            portable_forward_d64x256_bf16_causal = Portable Forward<Portable64x256, Bf16, Causal>;
            portable_forward_d64x256_f16_full = Portable Forward<Portable64x256, F16, Full>;
            portable_forward_d64x256_f16_causal = Portable Forward<Portable64x256, F16, Causal>;
            portable_forward_d32_bf16_masked = Portable Forward<Portable32, Bf16, Masked>;
            portable_forward_d32_f16_masked = Portable Forward<Portable32, F16, Masked>;
            portable_forward_d64_bf16_masked = Portable Forward<Portable64, Bf16, Masked>;
            portable_forward_d64_f16_masked = Portable Forward<Portable64, F16, Masked>;
            portable_forward_d96_bf16_masked = Portable Forward<Portable96, Bf16, Masked>;
            portable_forward_d96_f16_masked = Portable Forward<Portable96, F16, Masked>;
            portable_forward_d128_bf16_masked = Portable Forward<Portable128, Bf16, Masked>;
            portable_forward_d128_f16_masked = Portable Forward<Portable128, F16, Masked>;
            portable_forward_d192_bf16_masked = Portable Forward<Portable192, Bf16, Masked>;
            portable_forward_d192_f16_masked = Portable Forward<Portable192, F16, Masked>;
            portable_forward_d256_bf16_masked = Portable Forward<Portable256, Bf16, Masked>;
            portable_forward_d256_f16_masked = Portable Forward<Portable256, F16, Masked>;
            portable_forward_d192x128_bf16_masked = Portable Forward<Portable192x128, Bf16, Masked>;
            portable_forward_d192x128_f16_masked = Portable Forward<Portable192x128, F16, Masked>;
            portable_forward_d64x256_bf16_masked = Portable Forward<Portable64x256, Bf16, Masked>;
            portable_forward_d64x256_f16_masked = Portable Forward<Portable64x256, F16, Masked>;
            portable_forward_d512x256_bf16_masked = Portable Forward<Portable512, Bf16, Masked>;
            portable_forward_d512x256_f16_masked = Portable Forward<Portable512, F16, Masked>;
            portable_forward_d32_bf16_general = Portable Forward<General32, Bf16, General>;
            portable_forward_d32_f16_general = Portable Forward<General32, F16, General>;
            portable_forward_d64_bf16_general = Portable Forward<General64, Bf16, General>;
            portable_forward_d64_f16_general = Portable Forward<General64, F16, General>;
            portable_forward_d96_bf16_general = Portable Forward<Portable96, Bf16, General>;
            portable_forward_d96_f16_general = Portable Forward<Portable96, F16, General>;
            portable_forward_d128_bf16_general = Portable Forward<General128, Bf16, General>;
            portable_forward_d128_f16_general = Portable Forward<General128, F16, General>;
            portable_forward_d192_bf16_general = Portable Forward<Portable192, Bf16, General>;
            portable_forward_d192_f16_general = Portable Forward<Portable192, F16, General>;
            portable_forward_d256_bf16_general = Portable Forward<Portable256, Bf16, General>;
            portable_forward_d256_f16_general = Portable Forward<Portable256, F16, General>;
            portable_forward_d192x128_bf16_general =
                Portable Forward<Portable192x128, Bf16, General>;
            portable_forward_d192x128_f16_general =
                Portable Forward<Portable192x128, F16, General>;
            portable_forward_d64x256_bf16_general = Portable Forward<Portable64x256, Bf16, General>;
            portable_forward_d64x256_f16_general = Portable Forward<Portable64x256, F16, General>;
            portable_forward_d512x256_bf16_general = Portable Forward<General512, Bf16, General>;
            portable_forward_d512x256_f16_general = Portable Forward<General512, F16, General>;
            portable_preprocess_bf16 = Portable Preprocess<BackwardRows, Bf16, Full>;
            portable_preprocess_f16 = Portable Preprocess<BackwardRows, F16, Full>;
            portable_preprocess_bf16_masked = Portable Preprocess<BackwardRows, Bf16, Masked>;
            portable_preprocess_f16_masked = Portable Preprocess<BackwardRows, F16, Masked>;
            portable_backward_d32_bf16_full = Portable Backward<PortableBackward32, Bf16, Full>;
            portable_backward_d32_bf16_causal = Portable Backward<PortableBackward32, Bf16, Causal>;
            portable_backward_d32_f16_full = Portable Backward<PortableBackward32, F16, Full>;
            portable_backward_d32_f16_causal = Portable Backward<PortableBackward32, F16, Causal>;
            portable_backward_d64_bf16_full = Portable Backward<PortableBackward64, Bf16, Full>;
            portable_backward_d64_bf16_causal = Portable Backward<PortableBackward64, Bf16, Causal>;
            portable_backward_d64_f16_full = Portable Backward<PortableBackward64, F16, Full>;
            portable_backward_d64_f16_causal = Portable Backward<PortableBackward64, F16, Causal>;
            portable_backward_d96_bf16_full = Portable Backward<PortableBackward96, Bf16, Full>;
            portable_backward_d96_bf16_causal = Portable Backward<PortableBackward96, Bf16, Causal>;
            portable_backward_d96_f16_full = Portable Backward<PortableBackward96, F16, Full>;
            portable_backward_d96_f16_causal = Portable Backward<PortableBackward96, F16, Causal>;
            portable_backward_d128_bf16_full = Portable Backward<PortableBackward128, Bf16, Full>;
            portable_backward_d128_bf16_causal =
                Portable Backward<PortableBackward128, Bf16, Causal>;
            portable_backward_d128_f16_full = Portable Backward<PortableBackward128, F16, Full>;
            portable_backward_d128_f16_causal = Portable Backward<PortableBackward128, F16, Causal>;
            portable_backward_d192_bf16_full = Portable Backward<PortableBackward192, Bf16, Full>;
            portable_backward_d192_bf16_causal =
                Portable Backward<PortableBackward192, Bf16, Causal>;
            portable_backward_d192_f16_full = Portable Backward<PortableBackward192, F16, Full>;
            portable_backward_d192_f16_causal = Portable Backward<PortableBackward192, F16, Causal>;
            portable_backward_d256_bf16_full = Portable Backward<PortableBackward256, Bf16, Full>;
            portable_backward_d256_bf16_causal =
                Portable Backward<PortableBackward256, Bf16, Causal>;
            portable_backward_d256_f16_full = Portable Backward<PortableBackward256, F16, Full>;
            portable_backward_d256_f16_causal = Portable Backward<PortableBackward256, F16, Causal>;
            portable_backward_d256_large_bf16_full =
                Portable Backward<PortableBackward256Large, Bf16, Full>;
            portable_backward_d256_large_bf16_causal =
                Portable Backward<PortableBackward256Large, Bf16, Causal>;
            portable_backward_d256_large_f16_full =
                Portable Backward<PortableBackward256Large, F16, Full>;
            portable_backward_d256_large_f16_causal =
                Portable Backward<PortableBackward256Large, F16, Causal>;
            portable_backward_d192x128_bf16_full =
                Portable Backward<PortableBackward192x128, Bf16, Full>;
            portable_backward_d192x128_bf16_causal =
                Portable Backward<PortableBackward192x128, Bf16, Causal>;
            portable_backward_d192x128_f16_full =
                Portable Backward<PortableBackward192x128, F16, Full>;
            portable_backward_d192x128_f16_causal =
                Portable Backward<PortableBackward192x128, F16, Causal>;
            portable_backward_d64x256_bf16_full =
                Portable Backward<PortableBackward64x256, Bf16, Full>;
            portable_backward_d64x256_bf16_causal =
                Portable Backward<PortableBackward64x256, Bf16, Causal>;
            portable_backward_d64x256_f16_full =
                Portable Backward<PortableBackward64x256, F16, Full>;
            portable_backward_d64x256_f16_causal =
                Portable Backward<PortableBackward64x256, F16, Causal>;
            portable_backward_d32_bf16_masked = Portable Backward<PortableBackward32, Bf16, Masked>;
            portable_backward_d32_f16_masked = Portable Backward<PortableBackward32, F16, Masked>;
            portable_backward_d64_bf16_masked = Portable Backward<PortableBackward64, Bf16, Masked>;
            portable_backward_d64_f16_masked = Portable Backward<PortableBackward64, F16, Masked>;
            portable_backward_d96_bf16_masked = Portable Backward<PortableBackward96, Bf16, Masked>;
            portable_backward_d96_f16_masked = Portable Backward<PortableBackward96, F16, Masked>;
            portable_backward_d128_bf16_masked =
                Portable Backward<PortableBackward128Shared, Bf16, Masked>;
            portable_backward_d128_f16_masked =
                Portable Backward<PortableBackward128Shared, F16, Masked>;
            portable_backward_d192_bf16_masked =
                Portable Backward<PortableBackward192, Bf16, Masked>;
            portable_backward_d192_f16_masked = Portable Backward<PortableBackward192, F16, Masked>;
            portable_backward_d256_bf16_masked =
                Portable Backward<PortableBackward256, Bf16, Masked>;
            portable_backward_d256_f16_masked = Portable Backward<PortableBackward256, F16, Masked>;
            portable_backward_d256_large_bf16_masked =
                Portable Backward<PortableBackward256Large, Bf16, Masked>;
            portable_backward_d256_large_f16_masked =
                Portable Backward<PortableBackward256Large, F16, Masked>;
            portable_backward_d192x128_bf16_masked =
                Portable Backward<PortableBackward192x128, Bf16, Masked>;
            portable_backward_d192x128_f16_masked =
                Portable Backward<PortableBackward192x128, F16, Masked>;
            portable_backward_d64x256_bf16_masked =
                Portable Backward<PortableBackward64x256, Bf16, Masked>;
            portable_backward_d64x256_f16_masked =
                Portable Backward<PortableBackward64x256, F16, Masked>;
            portable_backward_d32_bf16_general =
                Portable Backward<PortableBackward32, Bf16, General>;
            portable_backward_d32_f16_general = Portable Backward<PortableBackward32, F16, General>;
            portable_backward_d64_bf16_general =
                Portable Backward<PortableBackward64, Bf16, General>;
            portable_backward_d64_f16_general = Portable Backward<PortableBackward64, F16, General>;
            portable_backward_d96_bf16_general =
                Portable Backward<PortableBackward96, Bf16, General>;
            portable_backward_d96_f16_general = Portable Backward<PortableBackward96, F16, General>;
            portable_backward_d128_bf16_general =
                Portable Backward<PortableBackward128Shared, Bf16, General>;
            portable_backward_d128_f16_general =
                Portable Backward<PortableBackward128Shared, F16, General>;
            portable_backward_d192_bf16_general =
                Portable Backward<PortableBackward192, Bf16, General>;
            portable_backward_d192_f16_general =
                Portable Backward<PortableBackward192, F16, General>;
            portable_backward_d256_large_bf16_general =
                Portable Backward<PortableBackward256Large, Bf16, General>;
            portable_backward_d256_large_f16_general =
                Portable Backward<PortableBackward256Large, F16, General>;
            portable_backward_d192x128_bf16_general =
                Portable Backward<PortableBackward192x128, Bf16, General>;
            portable_backward_d192x128_f16_general =
                Portable Backward<PortableBackward192x128, F16, General>;
            portable_backward_d64x256_bf16_general =
                Portable Backward<PortableBackward64x256, Bf16, General>;
            portable_backward_d64x256_f16_general =
                Portable Backward<PortableBackward64x256, F16, General>;
            hopper_backward_d64_bf16_full = Hopper Backward<HopperBackward64, Bf16, Full>;
            hopper_backward_d64_bf16_causal = Hopper Backward<HopperBackward64, Bf16, Causal>;
            hopper_backward_d64_f16_full = Hopper Backward<HopperBackward64, F16, Full>;
            hopper_backward_d64_f16_causal = Hopper Backward<HopperBackward64, F16, Causal>;
            hopper_backward_d96_bf16_full = Hopper Backward<HopperBackward96, Bf16, Full>;
            hopper_backward_d96_bf16_causal = Hopper Backward<HopperBackward96, Bf16, Causal>;
            hopper_backward_d96_f16_full = Hopper Backward<HopperBackward96, F16, Full>;
            hopper_backward_d96_f16_causal = Hopper Backward<HopperBackward96, F16, Causal>;
            hopper_backward_d128_bf16_full = Hopper Backward<HopperBackward128, Bf16, Full>;
            hopper_backward_d128_bf16_causal = Hopper Backward<HopperBackward128, Bf16, Causal>;
            hopper_backward_d128_f16_full = Hopper Backward<HopperBackward128, F16, Full>;
            hopper_backward_d128_f16_causal = Hopper Backward<HopperBackward128, F16, Causal>;
            hopper_backward_d192_bf16_full = Hopper Backward<HopperBackward192, Bf16, Full>;
            hopper_backward_d192_bf16_causal = Hopper Backward<HopperBackward192, Bf16, Causal>;
            hopper_backward_d192_f16_full = Hopper Backward<HopperBackward192, F16, Full>;
            hopper_backward_d192_f16_causal = Hopper Backward<HopperBackward192, F16, Causal>;
            hopper_backward_d256_bf16_full = Hopper Backward<HopperBackward256, Bf16, Full>;
            hopper_backward_d256_bf16_causal = Hopper Backward<HopperBackward256, Bf16, Causal>;
            hopper_backward_d256_f16_full = Hopper Backward<HopperBackward256, F16, Full>;
            hopper_backward_d256_f16_causal = Hopper Backward<HopperBackward256, F16, Causal>;
            hopper_backward_d192x128_bf16_full = Hopper Backward<HopperBackward192x128, Bf16, Full>;
            hopper_backward_d192x128_bf16_causal =
                Hopper Backward<HopperBackward192x128, Bf16, Causal>;
            hopper_backward_d192x128_f16_full = Hopper Backward<HopperBackward192x128, F16, Full>;
            hopper_backward_d192x128_f16_causal =
                Hopper Backward<HopperBackward192x128, F16, Causal>;
            hopper_backward_d64x256_bf16_full = Hopper Backward<HopperBackward64x256, Bf16, Full>;
            hopper_backward_d64x256_bf16_causal =
                Hopper Backward<HopperBackward64x256, Bf16, Causal>;
            hopper_backward_d64x256_f16_full = Hopper Backward<HopperBackward64x256, F16, Full>;
            hopper_backward_d64x256_f16_causal = Hopper Backward<HopperBackward64x256, F16, Causal>;
            portable_convert_bf16 = Portable Convert<BackwardRows, Bf16, Full>;
            portable_convert_f16 = Portable Convert<BackwardRows, F16, Full>;
            portable_convert_bf16_masked = Portable Convert<BackwardRows, Bf16, Masked>;
            portable_convert_f16_masked = Portable Convert<BackwardRows, F16, Masked>;
            hopper_forward_d64_bf16_full = Hopper Forward<Hopper64, Bf16, Full>;
            hopper_forward_d64_bf16_causal = Hopper Forward<Hopper64, Bf16, Causal>;
            hopper_forward_d64_f16_full = Hopper Forward<Hopper64, F16, Full>;
            hopper_forward_d64_f16_causal = Hopper Forward<Hopper64, F16, Causal>;
            hopper_forward_d96_bf16_full = Hopper Forward<Hopper96, Bf16, Full>;
            hopper_forward_d96_bf16_causal = Hopper Forward<Hopper96, Bf16, Causal>;
            hopper_forward_d96_f16_full = Hopper Forward<Hopper96, F16, Full>;
            hopper_forward_d96_f16_causal = Hopper Forward<Hopper96, F16, Causal>;
            hopper_forward_d128_bf16_full = Hopper Forward<Hopper128, Bf16, Full>;
            hopper_forward_d128_bf16_causal = Hopper Forward<Hopper128Causal, Bf16, Causal>;
            hopper_forward_d128_long_bf16_causal = Hopper Forward<Hopper128, Bf16, Causal>;
            hopper_forward_d128_long_f16_causal = Hopper Forward<Hopper128, F16, Causal>;
            hopper_forward_d128_f16_full = Hopper Forward<Hopper128, F16, Full>;
            hopper_forward_d128_f16_causal = Hopper Forward<Hopper128Causal, F16, Causal>;
            hopper_forward_d192_bf16_full = Hopper Forward<Hopper192, Bf16, Full>;
            hopper_forward_d192_bf16_causal = Hopper Forward<Hopper192, Bf16, Causal>;
            hopper_forward_d192_f16_full = Hopper Forward<Hopper192, F16, Full>;
            hopper_forward_d192_f16_causal = Hopper Forward<Hopper192, F16, Causal>;
            hopper_forward_d256_bf16_full = Hopper Forward<Hopper256, Bf16, Full>;
            hopper_forward_d256_bf16_causal = Hopper Forward<Hopper256, Bf16, Causal>;
            hopper_forward_d256_f16_full = Hopper Forward<Hopper256, F16, Full>;
            hopper_forward_d256_f16_causal = Hopper Forward<Hopper256, F16, Causal>;
            hopper_forward_d192x128_bf16_full = Hopper Forward<Hopper192x128, Bf16, Full>;
            hopper_forward_d192x128_bf16_causal = Hopper Forward<Hopper192x128, Bf16, Causal>;
            hopper_forward_d192x128_f16_full = Hopper Forward<Hopper192x128, F16, Full>;
            hopper_forward_d192x128_f16_causal = Hopper Forward<Hopper192x128, F16, Causal>;
            hopper_forward_d64x256_bf16_full = Hopper Forward<Hopper64x256, Bf16, Full>;
            hopper_forward_d64x256_bf16_causal = Hopper Forward<Hopper64x256, Bf16, Causal>;
            hopper_forward_d64x256_f16_full = Hopper Forward<Hopper64x256, F16, Full>;
            hopper_forward_d64x256_f16_causal = Hopper Forward<Hopper64x256, F16, Causal>;
            portable_forward_d64_f32_masked = Portable Forward<Split64, F32, Masked>;
            portable_forward_d64_f32_general = Portable Forward<Split64, F32, General>;
            portable_forward_d128_f32_masked = Portable Forward<Split128, F32, Masked>;
            portable_forward_d128_f32_general = Portable Forward<Split128, F32, General>;
            portable_preprocess_f32_masked = Portable Preprocess<BackwardRows, F32, Masked>;
            portable_backward_d64_f32_masked = Portable Backward<SplitBackward64, F32, Masked>;
            portable_backward_d64_f32_general = Portable Backward<SplitBackward64, F32, General>;
            portable_backward_d128_f32_masked = Portable Backward<SplitBackward128, F32, Masked>;
            portable_backward_d128_f32_general = Portable Backward<SplitBackward128, F32, General>;
            portable_convert_f32_masked = Portable Convert<BackwardRows, F32, Masked>;
            hopper_forward_d64_bf16_masked = Hopper Forward<HopperMasked64, Bf16, Masked>;
            hopper_forward_d64_f16_masked = Hopper Forward<HopperMasked64, F16, Masked>;
            hopper_forward_d128_bf16_masked = Hopper Forward<Hopper128Causal, Bf16, Masked>;
            hopper_forward_d128_f16_masked = Hopper Forward<Hopper128Causal, F16, Masked>;
            hopper_backward_d64_bf16_masked = Hopper Backward<HopperBackward64, Bf16, Masked>;
            hopper_backward_d64_f16_masked = Hopper Backward<HopperBackward64, F16, Masked>;
            hopper_backward_d128_bf16_masked = Hopper Backward<HopperBackward128, Bf16, Masked>;
            hopper_backward_d128_f16_masked = Hopper Backward<HopperBackward128, F16, Masked>;
        }
    };
}
