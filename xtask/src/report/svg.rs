//! Drawing: a panel with axes, lines that are named at their ends, and text that cannot break out.

use std::fmt::Write;

/// Width of a panel, in its own units: about a phone's, so that text keeps its size there.
const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 242.0;
const LEFT: f64 = 36.0;
const RIGHT: f64 = 264.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 206.0;
/// Least distance between the names of two lines.
const LINE_HEIGHT: f64 = 13.0;

/// Text for HTML and SVG.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// An axis, linear or logarithmic, with the values that are written beside it.
pub(super) struct Axis {
    /// What it measures, with its unit.
    pub(super) name: String,
    /// Where it begins and ends.
    pub(super) range: [f64; 2],
    /// Whether equal distances are equal quotients.
    pub(super) is_logarithmic: bool,
    /// Values and their texts.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From 0 to a round number above `most`, in steps of `step`.
    pub(super) fn from_zero(name: &str, most: f64, step: f64) -> Self {
        let steps = (most / step).ceil().max(1.0) as u32;
        let tick = |index| (f64::from(index) * step, format!("{}", f64::from(index) * step));
        Self {
            name: name.to_owned(),
            range: [0.0, f64::from(steps) * step],
            is_logarithmic: false,
            ticks: (0..=steps).map(tick).collect(),
        }
    }

    /// Where a value lies, 0 to 1; outside it is put on the edge.
    pub(super) fn at(&self, value: f64) -> f64 {
        let scaled = |x: f64| if self.is_logarithmic { x.ln() } else { x };
        let [from, to] = self.range.map(scaled);
        ((scaled(value) - from) / (to - from)).clamp(0.0, 1.0)
    }
}

/// A line of a panel.
pub(super) struct Line {
    /// Class that colours it.
    pub(super) class: String,
    /// Name at its end; none is written if empty.
    pub(super) name: String,
    /// Values on both axes, and what is said of each.
    pub(super) points: Vec<(f64, f64, String)>,
    /// Whether points are joined.
    pub(super) is_joined: bool,
}

/// A chart with one pair of axes.
pub(super) struct Panel {
    /// What is special about it.
    pub(super) title: String,
    /// Horizontal.
    pub(super) x: Axis,
    /// Vertical.
    pub(super) y: Axis,
    /// What it shows, the most important last.
    pub(super) lines: Vec<Line>,
}

impl Panel {
    /// As SVG.
    pub(super) fn svg(&self) -> String {
        let mut svg = String::new();
        let title = escaped(&self.title);
        let _ = write!(
            svg,
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\
             <text class=\"panel\" x=\"0\" y=\"11\">{title}</text>\
             <text class=\"axis\" x=\"{WIDTH}\" y=\"11\" text-anchor=\"end\">{}</text>",
            escaped(&self.y.name)
        );
        for (value, text) in &self.y.ticks {
            let y = self.vertical(*value);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/><text class=\"tick\" \
                 x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 3.5,
                escaped(text)
            );
        }
        for (value, text) in &self.x.ticks {
            let _ = write!(
                svg,
                "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                self.horizontal(*value),
                BOTTOM + 15.0,
                escaped(text)
            );
        }
        let _ = write!(
            svg,
            "<text class=\"axis\" x=\"{RIGHT}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            BOTTOM + 29.0,
            escaped(&self.x.name)
        );
        self.lines.iter().for_each(|line| self.draw(&mut svg, line));
        self.name_lines(&mut svg);
        svg + "</svg>"
    }

    fn horizontal(&self, value: f64) -> f64 {
        LEFT + self.x.at(value) * (RIGHT - LEFT)
    }

    fn vertical(&self, value: f64) -> f64 {
        BOTTOM - self.y.at(value) * (BOTTOM - TOP)
    }

    fn draw(&self, svg: &mut String, line: &Line) {
        let class = &line.class;
        let _ = write!(svg, "<g class=\"{class}\">");
        if line.is_joined {
            svg.push_str("<path class=\"line\" d=\"");
            for (index, (x, y, _)) in line.points.iter().enumerate() {
                let step = if index == 0 { 'M' } else { 'L' };
                let _ = write!(svg, "{step}{:.1} {:.1}", self.horizontal(*x), self.vertical(*y));
            }
            svg.push_str("\"/>");
        }
        for (x, y, said) in line.points.iter().filter(|(.., said)| !said.is_empty()) {
            let (x, y) = (self.horizontal(*x), self.vertical(*y));
            let said = escaped(said);
            // A larger circle that is not seen is easier to point at.
            let _ = write!(
                svg,
                "<g><title>{said}</title><circle class=\"hit\" cx=\"{x:.1}\" cy=\"{y:.1}\" \
                 r=\"8\"/><circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/></g>"
            );
        }
        svg.push_str("</g>");
    }

    /// Names at the ends of lines, moved apart where they would overlap.
    fn name_lines(&self, svg: &mut String) {
        let end = |line: &Line| line.points.last().map(|(x, y, _)| (*x, self.vertical(*y)));
        let named = self.lines.iter().filter(|line| !line.name.is_empty());
        let mut names: Vec<(f64, &Line)> =
            named.filter_map(|line| Some((end(line)?.1, line))).collect();
        names.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut heights: Vec<f64> = names.iter().map(|(y, _)| *y).collect();
        spread(&mut heights, TOP, BOTTOM);
        for ((_, line), y) in names.iter().zip(heights) {
            let _ = write!(
                svg,
                "<text class=\"name {}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                line.class,
                RIGHT + 8.0,
                y + 4.0,
                escaped(&line.name)
            );
        }
    }
}

/// Moves sorted heights apart, within bounds, as little as a pass from each side does.
fn spread(heights: &mut [f64], top: f64, bottom: f64) {
    let mut least = top;
    for height in heights.iter_mut() {
        *height = height.max(least);
        least = *height + LINE_HEIGHT;
    }
    let mut most = bottom;
    for height in heights.iter_mut().rev() {
        *height = height.min(most);
        most = *height - LINE_HEIGHT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_overlap() {
        let mut heights = [50.0, 52.0, 53.0, 204.0, 205.0];
        spread(&mut heights, 30.0, 206.0);
        assert!(heights.windows(2).all(|pair| pair[1] - pair[0] >= LINE_HEIGHT - 1e-9));
        assert!(heights.iter().all(|height| (30.0..=206.0).contains(height)));
    }

    #[test]
    fn axes_place_values() {
        let axis = Axis::from_zero("a rate", 410.0, 200.0);
        assert_eq!(axis.range, [0.0, 600.0]);
        assert_eq!(axis.at(300.0), 0.5);
        let axis = Axis { range: [1.0, 100.0], is_logarithmic: true, ..axis };
        assert!((axis.at(10.0) - 0.5).abs() < 1e-12);
        assert_eq!(axis.at(1e9), 1.0);
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a < b & \"c\""), "a &lt; b &amp; &quot;c&quot;");
    }
}
