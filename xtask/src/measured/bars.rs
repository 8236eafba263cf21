//! The bars: what is to be reached, and what the raw rounds say was.

use super::errors::{Call, Figures, over_peer};
use super::ratios::{
    DIMENSIONS, LENGTHS, Point, between, deterministic, half, is_conventional, is_grouped, points,
    window, with_option,
};
use super::{Row, geometric_mean};

/// Families of kernels, the planner's first choice first.
const FAMILIES: [&str; 2] = ["hopper", "portable"];

/// What a bar asks of its points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Needs {
    /// A geometric mean of at least the first, and no point under the second.
    Least {
        /// Of all points.
        mean: Option<f64>,
        /// Of each point.
        each: Option<f64>,
    },
    /// No point above it.
    Most(f64),
}

/// One bar, with its points.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    /// What is compared with what.
    pub(crate) name: String,
    /// What is asked.
    pub(crate) needs: Needs,
    /// How many points it is over, where that is laid down.
    pub(crate) expected: Option<usize>,
    /// What was measured.
    pub(crate) points: Vec<Point>,
}

/// What came of a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There are no points.
    NotMeasured,
    /// What there is holds, but points are missing.
    Incomplete,
    /// It is not reached.
    NotMet,
    /// It is reached.
    Met,
}

impl Verdict {
    /// In words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::NotMeasured => "not measured",
            Self::Incomplete => "incomplete",
            Self::NotMet => "not met",
            Self::Met => "met",
        }
    }
}

impl Bar {
    fn new(name: impl Into<String>, needs: Needs, points: Vec<Point>) -> Self {
        Self { name: name.into(), needs, expected: None, points }
    }

    fn of(self, expected: usize) -> Self {
        Self { expected: Some(expected), ..self }
    }

    /// The geometric mean of its points.
    pub(crate) fn mean(&self) -> Option<f64> {
        geometric_mean(&self.points.iter().map(|point| point.ratio).collect::<Vec<_>>())
    }

    /// The point that is furthest on the wrong side.
    pub(crate) fn worst(&self) -> Option<&Point> {
        let by_ratio = |a: &&Point, b: &&Point| a.ratio.total_cmp(&b.ratio);
        match self.needs {
            Needs::Least { .. } => self.points.iter().min_by(by_ratio),
            Needs::Most(_) => self.points.iter().max_by(by_ratio),
        }
    }

    /// Whether it is reached: by unrounded figures.
    pub(crate) fn verdict(&self) -> Verdict {
        let (Some(mean), Some(worst)) = (self.mean(), self.worst()) else {
            return Verdict::NotMeasured;
        };
        let holds = match self.needs {
            Needs::Least { mean: least, each } => {
                least.is_none_or(|least| mean >= least)
                    && each.is_none_or(|least| worst.ratio >= least)
            }
            Needs::Most(most) => worst.ratio <= most,
        };
        match self.expected {
            _ if !holds => Verdict::NotMet,
            Some(expected) if self.points.len() < expected => Verdict::Incomplete,
            _ => Verdict::Met,
        }
    }

    /// What it asks, in words.
    pub(crate) fn asks(&self) -> String {
        match self.needs {
            Needs::Least { mean, each } => {
                let mean = mean.map(|least| format!("mean ≥ {least:.2}"));
                let each = each.map(|least| format!("each ≥ {least:.2}"));
                [mean, each].into_iter().flatten().collect::<Vec<_>>().join(", ")
            }
            Needs::Most(most) => format!("each ≤ {most:.2}"),
        }
    }
}

const fn mean(least: f64) -> Needs {
    Needs::Least { mean: Some(least), each: None }
}

const fn each(least: f64) -> Needs {
    Needs::Least { mean: None, each: Some(least) }
}

const fn mean_and_each(mean: f64, each: f64) -> Needs {
    Needs::Least { mean: Some(mean), each: Some(each) }
}

/// Every bar of the project.
pub(crate) fn bars(rows: &[Row], errors: &[Call]) -> Vec<Bar> {
    let of = |direction: &'static str, family: &'static str, wanted: fn(&Row) -> bool| {
        move |row: &Row| row.direction == direction && row.is_of(family) && wanted(row)
    };
    let against = |wanted: &dyn Fn(&Row) -> bool, peers: &[&str]| {
        points(rows, |row| wanted(row).then(|| row.ratio_to(peers))?)
    };
    let all = DIMENSIONS.len() * LENGTHS.len() * 2;
    let forward = of("forward", "hopper", is_conventional);
    let backward = of("backward", "hopper", is_conventional);
    let on_cpu = |direction: &str| {
        points(rows, |row| {
            (row.is_of_cpu() && row.direction == direction).then(|| row.ratio_to(&["torch"]))?
        })
    };
    let grouped_forward = of("forward", "hopper", is_grouped);
    let grouped_backward = of("backward", "hopper", is_grouped);
    let portable_forward = of("forward", "portable", is_conventional);
    let portable_backward = of("backward", "portable", is_conventional);
    let mut bars = vec![
        Bar::new(
            "hopper forward ÷ the faster of cuDNN and FlashAttention-3",
            mean_and_each(1.0, 0.92),
            against(&forward, &["cudnn", "fa3"]),
        )
        .of(all),
        Bar::new(
            "hopper backward ÷ cuDNN",
            mean_and_each(1.08, 0.95),
            against(&backward, &["cudnn"]),
        )
        .of(all),
        Bar::new(
            "64 query heads on 8, hopper forward ÷ the faster of cuDNN and FlashAttention-3",
            mean(1.0),
            against(&grouped_forward, &["cudnn", "fa3"]),
        )
        .of(10),
        Bar::new(
            "64 query heads on 8, hopper backward ÷ cuDNN",
            mean(1.0),
            against(&grouped_backward, &["cudnn"]),
        )
        .of(10),
        Bar::new(
            "deterministic hopper backward ÷ the default",
            each(0.82),
            points(rows, |row| backward(row).then(|| deterministic(row))?),
        )
        .of(all),
        Bar::new(
            "portable forward ÷ FlashAttention-2, same GPU",
            mean(1.0),
            against(&portable_forward, &["fa2"]),
        ),
        Bar::new(
            "portable backward ÷ FlashAttention-2, same GPU",
            mean(1.0),
            against(&portable_backward, &["fa2"]),
        ),
        Bar::new(
            "time at a dimension between compiled ones ÷ at the next one",
            Needs::Most(1.1),
            between(rows),
        ),
        Bar::new(
            "binary16 ÷ bfloat16, each over cuDNN's in its own process",
            each(0.97),
            half(rows),
        ),
        Bar::new(
            "f32 on a GPU ÷ dense PyTorch in f32 without TF32",
            each(3.0),
            points(rows, |row| (!row.is_of_cpu()).then(|| row.ratio_to(&["dense"]))?),
        ),
    ];
    bars.extend(FAMILIES.into_iter().flat_map(|family| of_options(rows, family)));
    bars.extend([
        Bar::new("CPU forward ÷ PyTorch", each(0.9), on_cpu("forward")).of(2),
        Bar::new("CPU backward ÷ PyTorch", each(0.9), on_cpu("backward")).of(2),
        Bar::new(
            "error ÷ cuDNN's, root mean square",
            Needs::Most(1.2),
            over_peer(errors, "cudnn", Figures::rms),
        ),
        Bar::new(
            "largest error ÷ cuDNN's",
            Needs::Most(1.2),
            over_peer(errors, "cudnn", Figures::max),
        ),
    ]);
    bars
}

/// What options may cost on a family's kernels, beside its plain ones.
fn of_options(rows: &[Row], family: &str) -> Vec<Bar> {
    let bar = |what: &str, needs, points| Bar::new(format!("{family}: {what}"), needs, points);
    let with =
        |option: &str, wanted: &dyn Fn(&Row) -> bool| with_option(rows, family, option, wanted);
    let forward_from = |d: u64| move |row: &Row| row.direction == "forward" && row.d >= d;
    let forward_of = |d: u64| move |row: &Row| row.direction == "forward" && row.d == d;
    let backward = |row: &Row| row.direction == "backward";
    vec![
        bar("ALiBi ÷ plain", each(0.8), with("alibi", &|_| true)),
        bar(
            "window: time ÷ plain, over the share of tiles visited",
            Needs::Most(1.15),
            window(rows, family),
        ),
        bar("softcap ÷ plain, forward, d ≥ 128", each(0.75), with("softcap", &forward_from(128))),
        bar("softcap ÷ plain, forward, d = 64", each(0.55), with("softcap", &forward_of(64))),
        bar("dropout ÷ plain, forward, d ≥ 128", each(0.6), with("dropout", &forward_from(128))),
        bar("dropout ÷ plain, forward, d = 64", each(0.5), with("dropout", &forward_of(64))),
        bar("dropout ÷ plain, backward", each(0.6), with("dropout", &backward)),
        bar("packed, equal lengths ÷ dense", each(0.95), with("packed equal", &|_| true)),
        bar(
            "packed, heavy-tailed lengths ÷ dense, rates of visible work",
            each(0.85),
            with("packed heavy-tailed", &|_| true),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(needs: Needs, ratios: &[f64]) -> Bar {
        let point = |ratio: &f64| Point { place: "d 64 full".to_owned(), s: 512, ratio: *ratio };
        Bar::new("a bar", needs, ratios.iter().map(point).collect())
    }

    #[test]
    fn a_bar_is_met_by_all_that_it_asks() {
        let verdict = |needs, ratios: &[f64]| bar(needs, ratios).verdict();
        assert_eq!(verdict(mean(1.0), &[]), Verdict::NotMeasured);
        assert_eq!(verdict(mean_and_each(1.0, 0.9), &[0.95, 1.1]), Verdict::Met);
        assert_eq!(verdict(mean_and_each(1.0, 0.9), &[0.89, 1.3]), Verdict::NotMet);
        assert_eq!(verdict(mean_and_each(1.0, 0.9), &[0.95, 1.0]), Verdict::NotMet);
        // Rounding does not help.
        assert_eq!(verdict(each(0.82), &[0.8199]), Verdict::NotMet);
        assert_eq!(verdict(Needs::Most(1.1), &[0.9, 1.11]), Verdict::NotMet);
        assert_eq!(verdict(Needs::Most(1.1), &[0.9, 1.1]), Verdict::Met);
        assert_eq!(bar(mean(1.0), &[1.0, 1.0]).of(3).verdict(), Verdict::Incomplete);
        assert_eq!(bar(mean(1.0), &[0.9, 1.0]).of(3).verdict(), Verdict::NotMet);
    }

    #[test]
    fn the_worst_point_is_on_the_side_that_is_asked() {
        let worst = |needs| bar(needs, &[0.9, 1.2, 1.0]).worst().map(|point| point.ratio);
        assert_eq!(worst(each(1.0)), Some(0.9));
        assert_eq!(worst(Needs::Most(1.1)), Some(1.2));
    }
}
