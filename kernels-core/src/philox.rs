//! Philox4x32, a counter-based random number generator.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a
//! keyed bijection of 128-bit counters, so that any element's bits can be had anywhere, in any
//! order, without state. Seven rounds are the fewest that pass the authors' statistical tests;
//! ten are their recommendation with a margin. Dropout uses [`DROPOUT_ROUNDS`].

/// Rounds of the generator behind dropout masks.
pub const DROPOUT_ROUNDS: usize = 7;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];

/// What is added to the key after each round: the golden ratio and `√3 - 1`, in 32 bits.
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The four words that `ROUNDS` rounds make of `counter` under `key`.
#[inline(always)]
pub const fn philox4x32<const ROUNDS: usize>(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < ROUNDS {
        let even = MULTIPLIERS[0] as u64 * counter[0] as u64;
        let odd = MULTIPLIERS[1] as u64 * counter[2] as u64;
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        round += 1;
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONES: u32 = u32::MAX;
    /// Digits of π, as the published vectors have them: counter, then key.
    const PI: ([u32; 4], [u32; 2]) =
        ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);

    /// The known answers that Random123 publishes (`kat_vectors`).
    #[test]
    fn ten_rounds_give_the_published_vectors() {
        let words = philox4x32::<10>([0; 4], [0; 2]);
        assert_eq!(words, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let words = philox4x32::<10>([ONES; 4], [ONES; 2]);
        assert_eq!(words, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let words = philox4x32::<10>(PI.0, PI.1);
        assert_eq!(words, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn seven_rounds_give_the_published_vectors() {
        let words = philox4x32::<7>([0; 4], [0; 2]);
        assert_eq!(words, [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        let words = philox4x32::<7>([ONES; 4], [ONES; 2]);
        assert_eq!(words, [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        let words = philox4x32::<7>(PI.0, PI.1);
        assert_eq!(words, [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]);
    }

    #[test]
    fn no_rounds_are_the_identity() {
        assert_eq!(philox4x32::<0>([1, 2, 3, 4], [5, 6]), [1, 2, 3, 4]);
    }
}
