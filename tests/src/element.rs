//! Element types with a poison value.

use cudarc::driver::DeviceRepr;
use ferroflash::Element;
use half::{bf16, f16};

/// An element type with a NaN of its own, which outputs hold before a call and which everything
/// around a tensor holds. Arithmetic makes other NaNs, so that its bits show what was not written.
pub trait Real: Element + DeviceRepr + Unpin {
    /// The poison.
    const POISON: Self;
    /// Its bits.
    fn bits(self) -> u32;
    /// Whether it is the poison, bit by bit.
    fn is_poison(self) -> bool {
        self.bits() == Self::POISON.bits()
    }
}

impl Real for bf16 {
    const POISON: Self = bf16::from_bits(0x7fd5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Real for f16 {
    const POISON: Self = f16::from_bits(0x7ed5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Real for f32 {
    const POISON: Self = f32::from_bits(0x7fc0_dead);
    fn bits(self) -> u32 {
        self.to_bits()
    }
}
