//! Rooflines: rates over intensities, both on logarithmic axes. Roofs of the vendor and measured
//! ones are told apart by colour and line, modelled points from measured ones by their form.

use std::fmt::Write;

use super::drawing::{SIDE, label};
use super::measured::{Measured, Placed};
use super::modelled::Modelled;

/// Where the axes lie, in pixels.
const LEFT: f64 = 540.0;
const TOP: f64 = 60.0;
const WIDTH: f64 = 400.0;
/// Decades of intensity from 1 on, and of rates down from twice the highest roof.
const DECADES: [f64; 2] = [5.0, 4.0];
/// Colours of what is modelled and of what was measured.
const MODELLED: &str = "#e45756";
const MEASURED: &str = "#1f5fae";

/// A pair of roofs.
struct Roofs {
    bytes_per_second: f64,
    flops_per_second: f64,
    stroke: &'static str,
    /// How far below its roof a label stands.
    below: f64,
}

impl Roofs {
    fn attainable(&self, intensity: f64) -> f64 {
        (intensity * self.bytes_per_second).min(self.flops_per_second)
    }
}

/// The axes, as high as the highest roof asks for.
struct Axes {
    highest: f64,
}

impl Axes {
    fn x(&self, intensity: f64) -> f64 {
        LEFT + WIDTH * intensity.clamp(1.0, 1e5).log10() / DECADES[0]
    }

    fn y(&self, rate: f64) -> f64 {
        let down = (self.highest * 2.0 / rate.max(1.0)).log10();
        TOP + SIDE * (down / DECADES[1]).clamp(0.0, 1.0)
    }
}

/// Draws the vendor's roofs and the measured ones, whichever there are.
pub(super) fn draw(text: &mut String, modelled: &Modelled, measured: Option<&Measured>) {
    let vendor = modelled.vendor_roofs.map(|roofs| Roofs {
        bytes_per_second: roofs.bytes_per_second,
        flops_per_second: roofs.flops_per_second,
        stroke: "stroke=\"black\"",
        below: -8.0,
    });
    let seen = measured.map(|roofs| Roofs {
        bytes_per_second: roofs.bytes_per_second,
        flops_per_second: roofs.flops_per_second,
        stroke: "stroke=\"#1f5fae\" stroke-width=\"2\"",
        below: 16.0,
    });
    let title = match (&vendor, measured) {
        (None, None) => {
            let words = "no rooflines: neither --device-model nor --roofs was given";
            return label(text, [520.0, 40.0], words);
        }
        (Some(_), None) => ["rooflines by the vendor's figures; points are modelled".to_owned(), {
            "nothing here was measured".to_owned()
        }],
        (vendor, Some(measured)) => [
            format!("blue: roofs measured on {}, {}", measured.device, measured.date),
            match vendor {
                Some(_) => "black: the vendor's figures; dashed: modelled intensities".to_owned(),
                None => "dashed: modelled intensities".to_owned(),
            },
        ],
    };
    label(text, [LEFT, 24.0], &title[0]);
    label(text, [LEFT, 42.0], &title[1]);
    let both = [&vendor, &seen];
    let roofs = || both.into_iter().flatten();
    let axes = Axes { highest: roofs().map(|roofs| roofs.flops_per_second).fold(1.0, f64::max) };
    for roofs in roofs() {
        lines(text, &axes, roofs);
    }
    for decade in 0..=5 {
        let x = axes.x(10_f64.powi(decade));
        label(text, [x, TOP + SIDE + 22.0], &format!("1e{decade}"));
    }
    label(text, [LEFT, TOP + SIDE + 42.0], "FLOP a byte");
    // Points stand under the roofs that were seen, where some were.
    if let Some(under) = seen.as_ref().or(vendor.as_ref()) {
        points(text, &axes, under, modelled);
    }
    let passes =
        measured.map(|m| [("forward", Some(&m.forward)), ("backward", m.backward.as_ref())]);
    for (name, placed) in passes.into_iter().flatten() {
        if let Some(placed) = placed {
            took(text, &axes, name, placed);
        }
    }
}

/// The slope and the flat, with their rates.
fn lines(text: &mut String, axes: &Axes, roofs: &Roofs) {
    let ridge = roofs.flops_per_second / roofs.bytes_per_second;
    let ends = [1.0, ridge, 1e5].map(|at| [axes.x(at), axes.y(roofs.attainable(at))]);
    let path = ends.map(|[x, y]| format!("{x:.1},{y:.1}")).join(" ");
    let stroke = roofs.stroke;
    let _ = writeln!(text, "<polyline fill=\"none\" {stroke} points=\"{path}\"/>");
    let words = format!("{:.0} TFLOP/s", roofs.flops_per_second / 1e12);
    label(text, [ends[2][0] - 80.0, ends[2][1] + roofs.below], &words);
    let words = format!("{:.2} TB/s", roofs.bytes_per_second / 1e12);
    label(text, [ends[0][0] + 8.0, ends[0][1] + roofs.below], &words);
}

/// Modelled intensities, each on its roof.
fn points(text: &mut String, axes: &Axes, roofs: &Roofs, modelled: &Modelled) {
    // Their labels stand where no slope of a known device passes.
    let points = [
        (modelled.forward.scheduled_intensity, "forward, bytes as requested", 190.0),
        (modelled.forward.compulsory_intensity, "forward, bytes at least", 214.0),
        (modelled.backward.scheduled_intensity, "backward, bytes as requested", 238.0),
    ];
    for (intensity, words, below) in points {
        let below = TOP + below;
        let (at, roof) = (axes.x(intensity), axes.y(roofs.attainable(intensity)));
        let _ = writeln!(
            text,
            "<circle cx=\"{at:.1}\" cy=\"{roof:.1}\" r=\"4\" fill=\"{MODELLED}\"/>\n\
             <line x1=\"{at:.1}\" y1=\"{roof:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\" \
             stroke=\"{MODELLED}\" stroke-dasharray=\"3 3\"/>",
            below
        );
        let left_of = if at > LEFT + WIDTH / 2.0 { at - 180.0 } else { at + 4.0 };
        label(text, [left_of, below], &format!("{words}: {intensity:.0}"));
    }
}

/// A measured rate, as a square.
fn took(text: &mut String, axes: &Axes, name: &str, placed: &Placed) {
    let Some(timed) = &placed.timed else { return };
    let (x, y) = (axes.x(placed.modelled_intensity), axes.y(timed.flops_per_second));
    let _ = writeln!(
        text,
        "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"8\" height=\"8\" fill=\"{MEASURED}\">\
         <title>{name}, measured: {:.1} TFLOP/s</title></rect>",
        x - 4.0,
        y - 4.0,
        timed.flops_per_second / 1e12
    );
}
