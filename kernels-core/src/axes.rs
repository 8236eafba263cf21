//! The compile-time axes of a kernel: family, direction, element type and mask class.
//!
//! Each axis is an enum for the host and, where a kernel is generic over it, a marker type.

use core::fmt;

/// A group of kernels written for one kind of machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `mma.sync` and `cp.async`: compute capability 8.0 and later.
    Portable,
    /// `wgmma`, the copy engine and register reallocation: compute capability 9.0 alone.
    Hopper,
}

impl Family {
    /// Name, as in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Portable => "portable",
            Family::Hopper => "hopper",
        }
    }

    /// The PTX target its kernels are compiled for.
    pub const fn ptx_target(self) -> &'static str {
        match self {
            Family::Portable => "sm_80",
            Family::Hopper => "sm_90a",
        }
    }

    /// The real architecture its shipped machine code is assembled for.
    pub const fn cubin_target(self) -> &'static str {
        match self {
            Family::Portable => "sm_90",
            Family::Hopper => "sm_90a",
        }
    }

    /// Whether its PTX runs on compute capability `major.minor`.
    pub const fn runs_on(self, major: u32, minor: u32) -> bool {
        match self {
            Family::Portable => major >= 8,
            // Architecture-specific PTX is not forward compatible.
            Family::Hopper => major == 9 && minor == 0,
        }
    }

    /// Whether its shipped machine code runs on compute capability `major.minor`.
    pub const fn cubin_runs_on(self, major: u32, minor: u32) -> bool {
        match self {
            Family::Portable | Family::Hopper => major == 9 && minor == 0,
        }
    }
}

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// o and lse from q, k and v.
    Forward,
    /// Of the backward pass, first: lse scaled, delta formed, sums and counters cleared.
    Preprocess,
    /// Of the backward pass, the main part: dK, dV, and the sums of dQ.
    Backward,
    /// Of the backward pass, last: dQ from its sums.
    Convert,
}

impl Direction {
    /// Name, as in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Preprocess => "preprocess",
            Direction::Backward => "backward",
            Direction::Convert => "convert",
        }
    }
}

/// Element type of q, k, v and o.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16: 8 bits of exponent, 8 of precision.
    Bf16,
    /// IEEE binary16: 5 bits of exponent, 11 of precision.
    F16,
    /// IEEE binary32.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }

    /// 16-bit pieces that kernels multiply an element as: a tile has a plane of each in shared
    /// memory. An f32 is the sum of three bfloat16.
    pub const fn pieces(self) -> u32 {
        match self {
            Dtype::Bf16 | Dtype::F16 => 1,
            Dtype::F32 => 3,
        }
    }

    /// Products of pieces that make one product of elements: of an f32's nine, all but the three
    /// that are under 2⁻²² of it.
    pub const fn products(self) -> u32 {
        match self {
            Dtype::Bf16 | Dtype::F16 => 1,
            Dtype::F32 => 6,
        }
    }

    /// The arithmetic of kernels on tensor cores, in the words of a plan.
    pub const fn arithmetic(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16 products, f32 sums",
            Dtype::F16 => "f16 products, f32 sums",
            Dtype::F32 => "split products: f32 as three bf16 pieces, six products each, f32 sums",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::F32 => "f32",
        })
    }
}

/// What a kernel's mask code can express.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MaskClass {
    /// Only the end of the keys.
    Full,
    /// The end of the keys and a right window side, of either alignment.
    Causal,
    /// Both sides of a window, lengths of items, packed items, ALiBi, softcap and sinks: branches
    /// that all threads take alike.
    Masked,
    /// Boolean masks, biases and dropout as well.
    General,
}

impl MaskClass {
    /// Name, as in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            MaskClass::Full => "full",
            MaskClass::Causal => "causal",
            MaskClass::Masked => "masked",
            MaskClass::General => "general",
        }
    }
}

/// An element type a kernel is generic over.
pub trait Element: Copy {
    /// Its name for the host.
    const DTYPE: Dtype;
}

/// bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// IEEE binary16.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// IEEE binary32.
#[derive(Clone, Copy, Debug)]
pub struct F32;

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl Element for F32 {
    const DTYPE: Dtype = Dtype::F32;
}

/// A mask class a kernel is generic over.
pub trait MaskKind {
    /// Its name for the host.
    const CLASS: MaskClass;
}

/// No mask but the end of the keys.
#[derive(Clone, Copy, Debug)]
pub struct Full;
/// Causal, of either alignment.
#[derive(Clone, Copy, Debug)]
pub struct Causal;
/// Windows, lengths, ALiBi, softcap and sinks.
#[derive(Clone, Copy, Debug)]
pub struct Masked;
/// Every option.
#[derive(Clone, Copy, Debug)]
pub struct General;

impl MaskKind for Full {
    const CLASS: MaskClass = MaskClass::Full;
}
impl MaskKind for Causal {
    const CLASS: MaskClass = MaskClass::Causal;
}
impl MaskKind for Masked {
    const CLASS: MaskClass = MaskClass::Masked;
}
impl MaskKind for General {
    const CLASS: MaskClass = MaskClass::General;
}
