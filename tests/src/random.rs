//! Seeded values. Value `index` of a seed does not depend on how many are drawn.

use rayon::prelude::*;

/// SplitMix64 of a position.
fn word(seed: u64, index: u64) -> u64 {
    let mut bits = seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(index + 1);
    bits = bits.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Uniform in 0..1, never 0.
fn unit(bits: u32) -> f32 {
    ((bits >> 8) as f32 + 0.5) * (1.0 / 16_777_216.0)
}

/// One normal value (Box–Muller).
fn normal_at(seed: u64, index: u64) -> f32 {
    let bits = word(seed, index);
    let (a, b) = (unit((bits >> 32) as u32), unit(bits as u32));
    (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
}

/// `count` normal values of standard deviation `deviation`.
pub fn normal(seed: u64, count: usize, deviation: f32) -> Vec<f32> {
    let values = (0..count).into_par_iter().with_min_len(4096);
    values.map(|index| normal_at(seed, index as u64) * deviation).collect()
}

/// `count` uniform values in `low..high`.
pub fn uniform(seed: u64, count: usize, low: f32, high: f32) -> Vec<f32> {
    let value = |index| low + (high - low) * unit(word(seed, index) as u32);
    (0..count as u64).map(value).collect()
}

/// `count` integers below `limit`.
pub fn below(seed: u64, count: usize, limit: u64) -> Vec<u64> {
    (0..count as u64).map(|index| word(seed, index) % limit.max(1)).collect()
}
