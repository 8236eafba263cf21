//! Errors against the f64 oracle, from the evidence of the kernels' present bodies.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Result;
use ferroflash_core::table::KERNELS;

use super::svg::{Axis, escaped};
use super::tables::scale_line;
use crate::build_ptx::manifest::Manifest;
use crate::evidence::committed_rows;

/// Largest error ÷ the bound, of every workload.
#[derive(Default)]
struct Group {
    shares: Vec<f64>,
    kernels: BTreeSet<String>,
}

/// A line a family, direction and mask class; and where the rows are from.
pub(super) fn shares() -> Result<(String, String)> {
    let manifest = Manifest::committed()?;
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    let mut sources: BTreeMap<String, usize> = BTreeMap::new();
    for (record, row) in committed_rows()? {
        let spec = KERNELS.iter().find(|spec| spec.name == row.kernel);
        let built = manifest.kernel(&row.kernel);
        let (Some(spec), Some(built), Some(error)) = (spec, built, row.max_error) else { continue };
        if built.body_hash != row.body_hash || row.tolerance <= 0.0 {
            continue;
        }
        let name =
            format!("{} {}, {}", spec.family.name(), spec.direction.name(), spec.mask.name());
        let group = groups.entry(name).or_default();
        group.shares.push(error / row.tolerance);
        group.kernels.insert(row.kernel);
        *sources.entry(record).or_default() += 1;
    }
    let scale = scale();
    let mut html = format!("<div class=\"strips\">{}", scale_line(&scale));
    for (name, mut group) in groups {
        group.shares.sort_by(f64::total_cmp);
        html += &line(&name, &group, &scale);
    }
    let sources = sources.iter().map(|(record, rows)| format!("{record}: {rows} workloads"));
    Ok((html + "</div>", sources.collect::<Vec<_>>().join("; ")))
}

/// From no error to a little past the bound.
fn scale() -> Axis {
    Axis {
        name: String::new(),
        range: [0.0, 1.1],
        is_logarithmic: false,
        ticks: [(0.0, "0"), (0.5, "half"), (1.0, "the bound")]
            .map(|(share, text)| (share, text.to_owned()))
            .to_vec(),
    }
}

fn line(name: &str, group: &Group, scale: &Axis) -> String {
    let at = |share: f64| {
        let index = ((group.shares.len() - 1) as f64 * share) as usize;
        group.shares.get(index).copied().unwrap_or(0.0)
    };
    let percent = |share: f64| format!("{:.2}%", 100.0 * scale.at(share));
    let [middle, high, most] = [at(0.5), at(0.95), at(1.0)];
    let mut svg = String::from(
        "<svg class=\"strip\" width=\"100%\" height=\"30\" role=\"img\" aria-label=\"errors\">",
    );
    let _ = write!(
        svg,
        "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"15\" y2=\"15\"/>\
         <line class=\"asked\" x1=\"{0}\" x2=\"{0}\" y1=\"3\" y2=\"27\"/>\
         <rect class=\"range\" x=\"0\" y=\"11\" width=\"{1}\" height=\"8\"/>\
         <line class=\"mean\" x1=\"{2}\" x2=\"{2}\" y1=\"7\" y2=\"23\"/>\
         <circle class=\"dot\" cx=\"{3}\" cy=\"15\" r=\"3.4\"><title>largest: {most:.2} of the \
         bound</title></circle></svg>",
        percent(1.0),
        percent(high),
        percent(middle),
        percent(most)
    );
    format!(
        "<div class=\"bar open\"><p class=\"what\">{}</p><p class=\"asks\">{} kernels, {} \
         workloads</p>{svg}<p class=\"got\"><b>{most:.2}</b> largest, median {middle:.2}</p></div>",
        escaped(name),
        group.kernels.len(),
        group.shares.len()
    )
}
