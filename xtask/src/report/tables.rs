//! Ratios as tables whose cells are coloured, and as points on a line.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::svg::{Axis, escaped};
use crate::measured::bars::{Bar, Needs, Verdict};
use crate::measured::{Point, length};

/// A table of ratios, a row a place and a column a length.
pub(super) fn heat_map(points: &[Point]) -> String {
    let lengths: BTreeSet<u64> = points.iter().map(|point| point.s).collect();
    let mut places: Vec<&str> = points.iter().map(|point| point.place.as_str()).collect();
    places.dedup();
    let mut html = String::from("<table class=\"heat\"><thead><tr><th></th>");
    for s in &lengths {
        let _ = write!(html, "<th>{}</th>", length(*s));
    }
    html += "</tr></thead><tbody>";
    for place in places {
        let _ = write!(html, "<tr><th>{}</th>", escaped(place));
        for s in &lengths {
            let point = points.iter().find(|point| point.place == place && point.s == *s);
            match point {
                None => html += "<td class=\"none\">–</td>",
                Some(Point { ratio, .. }) => {
                    let _ = write!(html, "<td class=\"h{}\">{ratio:.2}</td>", shade(*ratio));
                }
            }
        }
        html += "</tr>";
    }
    html + "</tbody></table>"
}

/// One of seven shades: 3 is as fast, 0 slowest, 6 fastest; a shade spans 4 to 5 %.
fn shade(ratio: f64) -> usize {
    [0.9, 0.95, 0.99, 1.01, 1.05, 1.1].into_iter().filter(|bound| ratio >= *bound).count()
}

/// A bar as a line: what it asks, its points, and what came of it.
pub(super) fn bar(bar: &Bar) -> String {
    let verdict = bar.verdict();
    let class = match verdict {
        Verdict::Met => "met",
        Verdict::NotMet => "missed",
        Verdict::Incomplete | Verdict::NotMeasured => "open",
    };
    let figure = match (bar.needs, bar.mean(), bar.worst()) {
        (Needs::Least { mean: Some(_), .. }, Some(mean), Some(worst)) => {
            format!("<b>{mean:.3}</b> mean, least {:.3}", worst.ratio)
        }
        (Needs::Least { .. }, Some(mean), Some(worst)) => {
            format!("<b>{:.3}</b> least, mean {mean:.3}", worst.ratio)
        }
        (Needs::Most(_), Some(_), Some(worst)) => format!("<b>{:.3}</b> most", worst.ratio),
        _ => "no rounds".to_owned(),
    };
    format!(
        "<div class=\"bar {class}\"><p class=\"what\">{}</p><p class=\"asks\">{}</p>{}\
         <p class=\"got\">{figure}</p><p class=\"verdict\">{}</p></div>",
        escaped(&bar.name),
        bar.asks(),
        strip(&bar.points, bar.needs),
        verdict.words()
    )
}

/// What an option costs, a line of points.
pub(super) fn of_option(name: &str, points: &[Point]) -> String {
    let ratios: Vec<f64> = points.iter().map(|point| point.ratio).collect();
    let mean = crate::measured::geometric_mean(&ratios).unwrap_or(f64::NAN);
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    format!(
        "<div class=\"bar open\"><p class=\"what\">{}</p><p class=\"asks\">{} calls</p>{}\
         <p class=\"got\"><b>{mean:.3}</b> mean, least {least:.3}</p></div>",
        escaped(name),
        points.len(),
        strip(points, Needs::Least { mean: None, each: None })
    )
}

/// The scale of every strip of ratios.
pub(super) fn scale() -> Axis {
    let tick = |value: f64| (value, format!("{value:.1}"));
    Axis {
        name: String::new(),
        range: [0.45, 1.45],
        is_logarithmic: false,
        ticks: [0.6, 0.8, 1.0, 1.2, 1.4].map(tick).to_vec(),
    }
}

/// The values of an axis in a line of their own, above strips.
pub(super) fn scale_line(axis: &Axis) -> String {
    let tick = |(value, text): &(f64, String)| {
        format!(
            "<text class=\"tick\" x=\"{:.2}%\" y=\"12\" text-anchor=\"middle\">{text}</text>",
            100.0 * axis.at(*value)
        )
    };
    let ticks: String = axis.ticks.iter().map(tick).collect();
    format!(
        "<div class=\"bar scale\"><p></p><p></p><svg class=\"strip\" width=\"100%\" \
         height=\"16\" aria-hidden=\"true\">{ticks}</svg><p></p></div>"
    )
}

/// Points on a line, with what is asked of their mean and of each.
pub(super) fn strip(points: &[Point], needs: Needs) -> String {
    let scale = scale();
    let at = |value: f64| format!("{:.2}%", 100.0 * scale.at(value));
    let mut svg = String::from(
        "<svg class=\"strip\" width=\"100%\" height=\"30\" role=\"img\" aria-label=\"ratios\">",
    );
    let _ = write!(
        svg,
        "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"15\" y2=\"15\"/>\
         <line class=\"one\" x1=\"{0}\" x2=\"{0}\" y1=\"3\" y2=\"27\"/>",
        at(1.0)
    );
    let (mean, each) = match needs {
        Needs::Least { mean, each } => (mean, each),
        Needs::Most(most) => (None, Some(most)),
    };
    for (bound, class) in [(mean, "asked"), (each, "asked each")] {
        if let Some(bound) = bound {
            let _ = write!(
                svg,
                "<line class=\"{class}\" x1=\"{0}\" x2=\"{0}\" y1=\"3\" y2=\"27\"/>",
                at(bound)
            );
        }
    }
    for Point { place, s, ratio } in points {
        let _ = write!(
            svg,
            "<circle class=\"dot\" cx=\"{}\" cy=\"15\" r=\"3.4\"><title>{}, {}: {ratio:.3}</title>\
             </circle>",
            at(*ratio),
            escaped(place),
            length(*s)
        );
    }
    let ratios: Vec<f64> = points.iter().map(|point| point.ratio).collect();
    if let Some(mean) = crate::measured::geometric_mean(&ratios) {
        let _ = write!(
            svg,
            "<line class=\"mean\" x1=\"{0}\" x2=\"{0}\" y1=\"6\" y2=\"24\"/>",
            at(mean)
        );
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_are_even_around_one() {
        let shades = [0.85, 0.92, 0.97, 1.0, 1.03, 1.07, 1.2].map(shade);
        assert_eq!(shades, [0, 1, 2, 3, 4, 5, 6]);
    }
}
