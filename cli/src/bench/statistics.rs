//! Medians, their spread, and whether two sets of samples differ.
//!
//! **The comparison.** The effect is the ratio of medians, new ÷ old. Its interval is a percentile
//! bootstrap's: both sets are drawn again with replacement [`DRAWS`] times, and of the ratios of
//! their medians the middle 99 % are kept. With a least effect of 2 %:
//!
//! | verdict | when |
//! | --- | --- |
//! | slower | the ratio is at least 1.02, and the whole interval above 1.01 |
//! | faster | the ratio is at most 1 / 1.02, and the whole interval below 1 / 1.01 |
//! | same | the whole interval lies within 1 / 1.02 and 1.02 |
//! | unclear | otherwise: the samples do not tell a change of 2 % from none |
//!
//! What it takes for granted is that samples of a run differ among themselves as runs do. A chip
//! that was hotter for one whole run breaks that: medians of one kernel on one H200 moved by up to
//! 2.1 % between two runs in a row, with intervals of half that. Hence the 1 % that an interval
//! must stay clear of. A comparison in one process, in alternating rounds, has no such trouble.

/// Effects smaller than this share are none.
pub(super) const LEAST_EFFECT: f64 = 0.02;
/// What the median of a run may drift by, which no interval of its samples knows.
const DRIFT: f64 = 0.01;
/// Draws of a bootstrap.
const DRAWS: usize = 4000;
/// Share of the draws that each tail of the interval leaves out.
const TAIL: f64 = 0.005;

/// The median; NaN of nothing.
pub(crate) fn median(samples: &[f64]) -> f64 {
    quantile(&sorted(samples), 0.5)
}

/// Samples in few numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    /// Least.
    pub(crate) least: f64,
    /// Median.
    pub(crate) median: f64,
    /// Most.
    pub(crate) most: f64,
    /// Third quartile less the first.
    pub(crate) interquartile: f64,
}

impl Spread {
    /// Of samples, at least one.
    pub(crate) fn of(samples: &[f64]) -> Self {
        let sorted = sorted(samples);
        Self {
            least: quantile(&sorted, 0.0),
            median: quantile(&sorted, 0.5),
            most: quantile(&sorted, 1.0),
            interquartile: quantile(&sorted, 0.75) - quantile(&sorted, 0.25),
        }
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Between the two nearest samples, by distance.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = share * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

/// What a comparison comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// New takes longer.
    Slower,
    /// New takes less.
    Faster,
    /// They differ by less than [`LEAST_EFFECT`].
    Same,
    /// The samples do not tell.
    Unclear,
}

impl Verdict {
    /// In a word.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Slower => "slower",
            Self::Faster => "faster",
            Self::Same => "same",
            Self::Unclear => "unclear",
        }
    }
}

/// Two sets of samples beside one another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Comparison {
    /// Median of the new ÷ median of the old.
    pub(super) ratio: f64,
    /// Where that ratio lies, 99 % of the time.
    pub(super) interval: [f64; 2],
    /// What that means.
    pub(super) verdict: Verdict,
}

impl Comparison {
    /// Compares times; the same samples always give the same result.
    pub(super) fn new(old: &[f64], new: &[f64]) -> Self {
        let ratio = median(new) / median(old);
        let mut random = Random(0x5eed);
        let mut scratch = Vec::new();
        let mut drawn = |samples: &[f64]| {
            scratch.clear();
            scratch.extend((0..samples.len()).map(|_| samples[random.below(samples.len())]));
            scratch.sort_by(f64::total_cmp);
            quantile(&scratch, 0.5)
        };
        let ratios: Vec<f64> = (0..DRAWS).map(|_| drawn(new) / drawn(old)).collect();
        let ratios = sorted(&ratios);
        let interval = [quantile(&ratios, TAIL), quantile(&ratios, 1.0 - TAIL)];
        let [low, high] = interval;
        let most = 1.0 + LEAST_EFFECT;
        let verdict = if ratio >= most && low > 1.0 + DRIFT {
            Verdict::Slower
        } else if ratio <= 1.0 / most && high < 1.0 / (1.0 + DRIFT) {
            Verdict::Faster
        } else if low >= 1.0 / most && high <= most {
            Verdict::Same
        } else {
            Verdict::Unclear
        };
        Self { ratio, interval, verdict }
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014): equal seeds give equal numbers everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// 64 random bits.
    pub(super) const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `count`.
    fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.bits()) * count as u128) >> 64) as usize
    }

    /// A number above 0 and up to 1.
    fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// A standard normal number, by Box and Muller.
    pub(super) fn normal(&mut self) -> f64 {
        let (radius, turn) = ((-2.0 * self.unit().ln()).sqrt(), self.unit());
        radius * (std::f64::consts::TAU * turn).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples about `middle` whose deviation is `noise` of it.
    fn samples(seed: u64, middle: f64, noise: f64) -> Vec<f64> {
        let mut random = Random(seed);
        (0..20).map(|_| middle * (1.0 + noise * random.normal())).collect()
    }

    /// How often each verdict falls in 200 comparisons.
    fn verdicts(effect: f64, noise: f64) -> [usize; 4] {
        let mut counts = [0; 4];
        for seed in 0..200 {
            let old = samples(2 * seed + 1, 1.0, noise);
            let new = samples(7919 * seed + 4, effect, noise);
            counts[Comparison::new(&old, &new).verdict as usize] += 1;
        }
        counts
    }

    const SLOWER: usize = Verdict::Slower as usize;
    const FASTER: usize = Verdict::Faster as usize;
    const SAME: usize = Verdict::Same as usize;
    const UNCLEAR: usize = Verdict::Unclear as usize;

    #[test]
    fn no_difference_is_none() {
        let quiet = verdicts(1.0, 0.005);
        assert!(quiet[SAME] >= 198 && quiet[SLOWER] == 0 && quiet[FASTER] == 0, "{quiet:?}");
        // Real and too small to count.
        let small = verdicts(1.005, 0.003);
        assert_eq!(small[SAME], 200, "{small:?}");
    }

    #[test]
    fn regressions_are_found() {
        let counts = verdicts(1.05, 0.01);
        assert!(counts[SLOWER] >= 198, "{counts:?}");
        let counts = verdicts(1.03, 0.002);
        assert_eq!(counts[SLOWER], 200, "{counts:?}");
        let counts = verdicts(0.95, 0.01);
        assert!(counts[FASTER] >= 198, "{counts:?}");
    }

    #[test]
    fn noise_is_no_regression() {
        let counts = verdicts(1.0, 0.2);
        assert!(counts[SLOWER] + counts[FASTER] <= 6, "{counts:?}");
        assert!(counts[UNCLEAR] >= 190, "{counts:?}");
    }

    #[test]
    fn drift_between_runs_is_no_regression() {
        // A median 2.1 % off whose interval reaches to nothing, as two runs of one kernel had.
        let old: Vec<f64> = (0..20).map(|i| if i < 13 { 1.0 } else { 1.021 }).collect();
        let new: Vec<f64> = (0..20).map(|i| if i < 8 { 1.0 } else { 1.021 }).collect();
        assert_eq!(Comparison::new(&old, &new).verdict, Verdict::Unclear);
    }

    #[test]
    fn one_outlier_does_not_matter() {
        let old = samples(1, 1.0, 0.001);
        let mut new = samples(2, 1.0, 0.001);
        new[3] = 50.0;
        assert_eq!(Comparison::new(&old, &new).verdict, Verdict::Same);
    }

    #[test]
    fn quantiles_lie_between_samples() {
        let spread = Spread::of(&[4.0, 1.0, 2.0, 3.0, 5.0]);
        let expected = Spread { least: 1.0, median: 3.0, most: 5.0, interquartile: 2.0 };
        assert_eq!(spread, expected);
        assert_eq!(median(&[1.0, 2.0]), 1.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let mut random = Random(3);
        let drawn: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = drawn.iter().sum::<f64>() / 1e5;
        let square = drawn.iter().map(|x| x * x).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.02, "{mean} {square}");
    }
}
