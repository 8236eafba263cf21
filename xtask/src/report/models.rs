//! What arithmetic says beside the measurements: roofline, workspace, tile maps. Each figure says
//! that it is modelled.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use ferroflash_core::table::{KERNELS, KernelSpec};
use ferroflash_core::visibility::{Align, TileClass, Visibility};
use ferroflash_ledger::device::device;
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::stages::{backward_stages_of, forward_stages_of};
use ferroflash_ledger::tiles::{TileCounts, tile_counts_of};
use serde_json::Value;

use super::svg::{Axis, Line, Panel, escaped};
use crate::facts::Workspace;
use crate::measured::{OURS, Row, length, median};

/// Bytes of lse, delta and accumulators.
const ACCUMULATOR_BYTES: u64 = 4;

/// A roof: FLOP/s or bytes/s, and whose figure it is.
pub(super) struct Roof {
    rate: f64,
    origin: String,
    is_measured: bool,
}

/// Roofs of bytes and of products on a device: those that a run of `ferroflash bench` measured,
/// else the vendor's.
pub(super) fn roofs(records: &[(std::path::PathBuf, Value)], name: &str) -> Result<[Roof; 2]> {
    let vendor = device("h200", &[]).context("the ledger knows it")?;
    let measured = |kind: &str| {
        let of_device =
            records.iter().map(|(_, run)| run).filter(|run| run["device"]["name"] == name);
        let roofs = of_device.flat_map(|run| {
            let date = run["date"].as_str().and_then(|date| date.get(..10)).unwrap_or("no date");
            let roofs = run["roofs"].as_array().into_iter().flatten();
            roofs.map(move |roof| (date, roof))
        });
        roofs
            .filter(|(_, roof)| roof["kind"] == kind)
            .filter_map(|(date, roof)| {
                let ms: Vec<f64> = serde_json::from_value(roof["ms"].clone()).ok()?;
                let method = roof["method"].as_str().unwrap_or("a method that was not recorded");
                Some(Roof {
                    rate: roof["work"].as_f64()? / median(&ms)? * 1e3,
                    origin: format!("measured {date}, {} samples: {method}", ms.len()),
                    is_measured: true,
                })
            })
            .next_back()
    };
    let quoted = |rate: Option<f64>| {
        let rate = rate.context("the vendor's figure is missing")?;
        let origin = "the vendor's figure; not measured yet".to_owned();
        anyhow::Ok(Roof { rate, origin, is_measured: false })
    };
    let bytes = measured("copy").map_or_else(|| quoted(vendor.vendor_bytes_per_second), Ok)?;
    let products =
        measured("matrix").map_or_else(|| quoted(vendor.vendor_tensor_flops_per_second), Ok)?;
    Ok([bytes, products])
}

fn spec(name: &str) -> Option<&'static KernelSpec> {
    KERNELS.iter().find(|spec| spec.name == name)
}

/// FLOPs that the mask leaves a byte that a cache which kept everything would move.
fn intensity(row: &Row) -> Option<f64> {
    let spec = spec(row.kernel.as_deref()?)?;
    let s = u32::try_from(row.s).ok()?;
    let visible = match row.causal {
        true => Visibility::causal(s, s, Align::TopLeft),
        false => Visibility::full(s, s),
    };
    let sizes = Sizes {
        batch: row.b,
        q_heads: row.heads,
        kv_heads: row.kv_heads(),
        q_len: row.s,
        kv_len: row.s,
        head_dim: row.d,
        value_dim: row.d,
    };
    let tile = (spec.tile.q_rows.into(), spec.tile.kv_columns.into());
    let tiles = tile_counts_of(&visible, tile.0, tile.1).ok()?;
    if row.direction == "forward" {
        let stages = forward_stages_of(&sizes, &tiles, 2, ACCUMULATOR_BYTES).ok()?;
        return Some(stages.compulsory_intensity);
    }
    // q, k, v, o and dO in, dq, dk and dv out, lse in; each once.
    let stages = backward_stages_of(&sizes, &tiles, 2, ACCUMULATOR_BYTES).ok()?;
    let values = sizes.values().ok()?;
    let bytes = 2 * (3 * values.q + values.o + 2 * (values.k + values.v)) + 4 * values.rows;
    Some(stages.useful_flops as f64 / bytes as f64)
}

/// The roofline with a direction's points.
pub(super) fn roofline(title: &str, rows: &[&Row], [bytes, products]: &[Roof; 2]) -> String {
    let ridge = products.rate / bytes.rate;
    let roof = |name: &str, points: Vec<(f64, f64)>, is_measured: bool| Line {
        class: if is_measured { "roof" } else { "roof quoted" }.to_owned(),
        name: name.to_owned(),
        points: points.into_iter().map(|(x, y)| (x, y, String::new())).collect(),
        is_joined: true,
    };
    let top = products.rate / 1e12;
    let slope = bytes.rate / 1e12;
    let points = rows.iter().filter_map(|row| {
        let (at, rate) = (intensity(row)?, row.rate(OURS)?);
        let said =
            format!("{}, {}: {rate:.0} TFLOP/s at {at:.0} FLOP a byte", row.place(), length(row.s));
        Some((at, rate, said))
    });
    let tick = |value: f64| (value, format!("{value:.0}"));
    let panel = Panel {
        title: title.to_owned(),
        x: Axis {
            name: "useful FLOP a compulsory byte, modelled".to_owned(),
            range: [32.0, 16384.0],
            is_logarithmic: true,
            ticks: [64.0, 256.0, 1024.0, 4096.0, 16384.0].map(tick).to_vec(),
        },
        y: Axis {
            name: "TFLOP/s".to_owned(),
            range: [50.0, 1500.0],
            is_logarithmic: true,
            ticks: [50.0, 100.0, 200.0, 400.0, 800.0].map(tick).to_vec(),
        },
        lines: vec![
            roof("", vec![(32.0, 32.0 * slope), (ridge, top)], bytes.is_measured),
            roof("products", vec![(ridge, top), (16384.0, top)], products.is_measured),
            Line {
                class: "s-ferroflash".to_owned(),
                name: String::new(),
                points: points.collect(),
                is_joined: false,
            },
        ],
    };
    panel.svg()
}

/// Where the roofs are from.
pub(super) fn roofs_in_words([bytes, products]: &[Roof; 2]) -> String {
    format!(
        "Bytes: {:.2} TB/s, {}. Products: {:.0} TFLOP/s, {}.",
        bytes.rate / 1e12,
        escaped(&bytes.origin),
        products.rate / 1e12,
        escaped(&products.origin)
    )
}

/// Workspace of the backward pass against length, beside one matrix of scores.
pub(super) fn workspace(rows: &[Workspace]) -> String {
    let mut groups: BTreeMap<u64, Vec<&Workspace>> = BTreeMap::new();
    rows.iter().for_each(|row| groups.entry(row.d).or_default().push(row));
    let mut html = String::from("<div class=\"panels\">");
    for (d, rows) in groups {
        let line = |class: &str, name: &str, of: &dyn Fn(&Workspace) -> u64| Line {
            class: class.to_owned(),
            name: name.to_owned(),
            points: rows
                .iter()
                .map(|row| {
                    let mib = of(row) as f64 / f64::from(1 << 20);
                    let said = format!("{name}, {}: {} bytes", length(row.s), of(row));
                    (row.s as f64, mib, said)
                })
                .collect(),
            is_joined: true,
        };
        let scores = |row: &Workspace| 2 * row.b * row.heads * row.s * row.s;
        let tensors = |row: &Workspace| 2 * 4 * row.b * row.heads * row.s * row.d;
        let tick = |value: f64, text: &str| (value, text.to_owned());
        let panel = Panel {
            title: format!("d = {d}"),
            x: Axis {
                name: "query rows and keys".to_owned(),
                range: [512.0, 16384.0],
                is_logarithmic: true,
                ticks: rows.iter().map(|row| (row.s as f64, length(row.s))).collect(),
            },
            y: Axis {
                name: "bytes, modelled".to_owned(),
                range: [64.0, 32768.0],
                is_logarithmic: true,
                ticks: vec![
                    tick(64.0, "64M"),
                    tick(256.0, "256M"),
                    tick(1024.0, "1G"),
                    tick(4096.0, "4G"),
                    tick(16384.0, "16G"),
                ],
            },
            lines: vec![
                line("s-fa2", "S × S", &scores),
                line("s-fa3", "q, k, v, o", &tensors),
                line("s-ferroflash", "backward", &|row| row.backward),
            ],
        };
        html += &panel.svg();
    }
    html + "</div>"
}

/// Query rows and keys of the tile maps.
const MAP_LENGTH: u32 = 2048;

/// Maps of which tiles a kernel visits, of masks that differ.
pub(super) fn tile_maps() -> Result<String> {
    let causal = Visibility::causal(MAP_LENGTH, MAP_LENGTH, Align::BottomRight);
    let rows = MAP_LENGTH / 2;
    let wide = Visibility::causal(rows, MAP_LENGTH, Align::BottomRight);
    let mut html = String::from("<div class=\"panels maps\">");
    for (title, kernel, visible) in [
        ("causal", "hopper_forward_d128_bf16_causal", causal),
        ("window of 512 keys", "portable_forward_d128_bf16_masked", {
            Visibility { left: 511, ..causal }
        }),
        ("causal, half as many rows", "hopper_forward_d128_bf16_causal", wide),
    ] {
        let spec = spec(kernel).with_context(|| format!("the table has no {kernel}"))?;
        html += &tile_map(title, spec, &visible)?;
    }
    Ok(html + "</div>")
}

fn tile_map(title: &str, spec: &KernelSpec, visible: &Visibility) -> Result<String> {
    const SIDE: f64 = 240.0;
    let (q, kv) = (spec.tile.q_rows, spec.tile.kv_columns);
    let counts = tile_counts_of(visible, q.into(), kv.into())?;
    let TileCounts { full, partial, skipped, .. } = counts;
    let scale = SIDE / f64::from(MAP_LENGTH);
    let (width, height) = (f64::from(kv) * scale, f64::from(q) * scale);
    let mut svg = format!(
        "<svg viewBox=\"0 0 340 {:.0}\" role=\"img\" aria-label=\"{title}\">\
         <text class=\"panel\" x=\"0\" y=\"11\">{title}</text>\
         <text class=\"axis\" x=\"0\" y=\"28\">keys →, {} × {} tiles of {q} × {kv}</text>",
        48.0 + SIDE,
        counts.q_tiles,
        counts.kv_tiles
    );
    for row in 0..visible.q_len.div_ceil(q) {
        for column in 0..visible.kv_len.div_ceil(kv) {
            let class = visible.class(&(row * q..(row + 1) * q), &(column * kv..(column + 1) * kv));
            let name = match class {
                TileClass::Full => "full",
                TileClass::Partial => "partial",
                TileClass::Skipped => "skipped",
            };
            let _ = write!(
                svg,
                "<rect class=\"tile {name}\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"{:.1}\"/>",
                f64::from(column) * width,
                36.0 + f64::from(row) * height,
                width - 1.0,
                height - 1.0
            );
        }
    }
    let key = [("full", full), ("partial", partial), ("skipped", skipped)];
    for (index, (name, count)) in key.into_iter().enumerate() {
        let y = 44.0 + 20.0 * index as f64;
        let _ = write!(
            svg,
            "<rect class=\"tile {name}\" x=\"{0}\" y=\"{1}\" width=\"11\" height=\"11\"/>\
             <text class=\"tick\" x=\"{2}\" y=\"{3}\">{count} {name}</text>",
            SIDE + 12.0,
            y,
            SIDE + 29.0,
            y + 9.5
        );
    }
    Ok(svg + "</svg>")
}
