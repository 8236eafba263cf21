//! The GPU kernels of ferroflash: `no_std` Rust, compiled to PTX by rustc's own backend.
//!
//! | module | what is in it |
//! | --- | --- |
//! | [`ptx`] | one thin wrapper per instruction; the only place with `asm!` |
//! | [`options`] | what kernels with options share |
//! | [`pieces`] | elements multiplied in pieces: f32 |
//! | [`ring`] | what the hopper kernels share: rings of slots |
//! | [`tile`] | moving tiles between global memory, shared memory and registers |
//! | [`forward`] | the forward kernels |
//! | [`backward`] | the kernels of the backward pass |
//!
//! The entry points at the end of this file are the rows of `ferroflash_core::kernel_table!`.
//! Kernels run on a device only, but everything type-checks for the host as well, so that clippy,
//! documentation and editors work on stable Rust; see [`ptx`].
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(
        abi_ptx,
        abi_unadjusted,
        asm_experimental_arch,
        core_intrinsics,
        link_llvm_intrinsics,
        stdarch_nvptx
    ),
    allow(internal_features)
)]
// A kernel is unsafe from its first line to its last: it reads what the host's parameters promise.
// Marking each call would say nothing more; the contracts stand at each wrapper.
#![allow(unsafe_op_in_unsafe_fn)]

pub mod backward;
pub mod forward;
pub mod options;
pub mod pieces;
pub mod ptx;
pub mod ring;
pub mod tile;

use ferroflash_core::{axes, tilings};

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// One entry point a row. On the host the row is only type-checked.
macro_rules! entries {
    (
        $($name:ident = $family:ident
            $direction:ident<$tiling:ident, $element:ident, $mask:ident>;)*
    ) => {
        $(entry!($name $family $direction $tiling $element $mask);)*
    };
}

/// Which function a row's entry point calls, with which parameters, in which unit of the build
/// (`KernelSpec::unit`).
macro_rules! entry {
    ($name:ident Portable Forward $tiling:ident F32 $mask:ident) => {
        entry_point!("portable_f32"
            $name(params: ferroflash_core::params::options::PortableMaskedParams) =
            forward::portable::masked_block::<tilings::$tiling, axes::F32, axes::$mask>);
    };
    ($name:ident Portable Preprocess $tiling:ident F32 $mask:ident) => {
        entry_point!("portable_f32"
            $name(params: ferroflash_core::backward::params::options::PreprocessMaskedParams) =
            backward::stages::preprocess::<axes::F32>);
    };
    ($name:ident Portable Backward $tiling:ident F32 $mask:ident) => {
        entry_point!("portable_f32"
            $name(params:
                ferroflash_core::backward::params::options::PortableMaskedBackwardParams) =
            backward::portable::masked_block::<tilings::$tiling, axes::F32, axes::$mask>);
    };
    ($name:ident Portable Convert $tiling:ident F32 $mask:ident) => {
        entry_point!("portable_f32"
            $name(params: ferroflash_core::backward::params::options::ConvertMaskedParams) =
            backward::stages::convert::<axes::F32>);
    };
    ($name:ident Portable Forward $tiling:ident $element:ident Masked) => {
        entry_point!("portable_forward_options"
            $name(params: ferroflash_core::params::options::PortableMaskedParams) =
            forward::portable::masked_block::<tilings::$tiling, axes::$element, axes::Masked>);
    };
    ($name:ident Portable Forward $tiling:ident $element:ident General) => {
        entry_point!("portable_forward_options"
            $name(params: ferroflash_core::params::options::PortableMaskedParams) =
            forward::portable::masked_block::<tilings::$tiling, axes::$element, axes::General>);
    };
    ($name:ident Portable Forward $tiling:ident $element:ident $mask:ident) => {
        entry_point!("portable_forward"
            $name(params: ferroflash_core::params::PortableForwardParams) =
            forward::portable::block::<tilings::$tiling, axes::$element, axes::$mask>);
    };
    ($name:ident Portable Preprocess $tiling:ident $element:ident Masked) => {
        entry_point!("portable_backward_options"
            $name(params: ferroflash_core::backward::params::options::PreprocessMaskedParams) =
            backward::stages::preprocess::<axes::$element>);
    };
    ($name:ident Portable Backward $tiling:ident $element:ident Masked) => {
        entry_point!("portable_backward_options"
            $name(params:
                ferroflash_core::backward::params::options::PortableMaskedBackwardParams) =
            backward::portable::masked_block::<tilings::$tiling, axes::$element, axes::Masked>);
    };
    ($name:ident Portable Backward $tiling:ident $element:ident General) => {
        entry_point!("portable_backward_options"
            $name(params:
                ferroflash_core::backward::params::options::PortableMaskedBackwardParams) =
            backward::portable::masked_block::<tilings::$tiling, axes::$element, axes::General>);
    };
    ($name:ident Portable Convert $tiling:ident $element:ident Masked) => {
        entry_point!("portable_backward_options"
            $name(params: ferroflash_core::backward::params::options::ConvertMaskedParams) =
            backward::stages::convert::<axes::$element>);
    };
    ($name:ident Portable Preprocess $tiling:ident $element:ident $mask:ident) => {
        entry_point!("portable_backward"
            $name(params: ferroflash_core::backward::params::PreprocessParams) =
            backward::preprocess::block::<axes::$element>);
    };
    ($name:ident Portable Backward $tiling:ident $element:ident $mask:ident) => {
        entry_point!("portable_backward"
            $name(params: ferroflash_core::backward::params::PortableBackwardParams) =
            backward::portable::block::<tilings::$tiling, axes::$element, axes::$mask>);
    };
    ($name:ident Portable Convert $tiling:ident $element:ident $mask:ident) => {
        entry_point!("portable_backward"
            $name(params: ferroflash_core::backward::params::ConvertParams) =
            backward::convert::block::<axes::$element>);
    };
    ($name:ident Hopper Forward $tiling:ident $element:ident Masked) => {
        entry_point!("hopper_forward_options"
            $name(params: ferroflash_core::params::options::HopperMaskedParams, maps) =
            forward::hopper::masked_block::<tilings::$tiling, axes::$element>);
    };
    ($name:ident Hopper Forward $tiling:ident $element:ident $mask:ident) => {
        entry_point!("hopper_forward"
            $name(params: ferroflash_core::params::HopperForwardParams, maps) =
            forward::hopper::block::<tilings::$tiling, axes::$element, axes::$mask>);
    };
    ($name:ident Hopper Backward $tiling:ident $element:ident Masked) => {
        entry_point!("hopper_backward_options"
            $name(params:
                ferroflash_core::backward::params::options::HopperMaskedBackwardParams, maps) =
            backward::hopper::masked_block::<tilings::$tiling, axes::$element>);
    };
    ($name:ident Hopper Backward $tiling:ident $element:ident $mask:ident) => {
        entry_point!("hopper_backward"
            $name(params: ferroflash_core::backward::params::HopperBackwardParams, maps) =
            backward::hopper::block::<tilings::$tiling, axes::$element, axes::$mask>);
    };
}

/// The entry point itself; with `maps`, the function is given its parameters' address as well.
macro_rules! entry_point {
    ($unit:literal $name:ident($params:ident: $type:path) = $block:expr) => {
        #[cfg(all(target_arch = "nvptx64", feature = $unit))]
        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($params: $type) {
            ($block)(&$params)
        }
        #[cfg(not(target_arch = "nvptx64"))]
        const _: unsafe fn(&$type) = $block;
    };
    ($unit:literal $name:ident($params:ident: $type:path, maps) = $block:expr) => {
        #[cfg(all(target_arch = "nvptx64", feature = $unit))]
        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($params: $type) {
            ($block)(&$params, parameter_address!($name))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        const _: unsafe fn(&$type, u64) = $block;
    };
}

ferroflash_core::kernel_table!(entries);
