//! `cargo xtask report`: docs/report.html, one page that needs nothing else, from the raw rounds of
//! docs/benchmarks, the evidence, the planner and the ledger.
//!
//! Charts are inline SVG; the page runs no script. What was not measured is named, not drawn.

mod differences;
mod errors;
mod models;
mod options;
mod rates;
mod svg;
mod tables;

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::facts::facts;
use crate::measured::bars::{Bar, bars};
use crate::measured::errors::calls;
use crate::measured::{
    DETERMINISTIC, OURS, Options, Row, deterministic, is_conventional, is_grouped, points, records,
    rows,
};
use crate::workspace::{root, write_or_compare};
use svg::escaped;

const FILE: &str = "docs/report.html";
const STYLE: &str = include_str!("style.css");
/// The device of the convention's rows.
const DEVICE: &str = "NVIDIA H200";
/// Most bytes of the page.
const MOST_BYTES: usize = 2_000_000;

/// Runs `report`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let page = page()?;
    if page.len() > MOST_BYTES {
        bail!("{FILE} would take {} bytes; at most {MOST_BYTES} are allowed", page.len());
    }
    write_or_compare(&root().join(FILE), &page, options.check, "report")?;
    eprintln!("{FILE}: {} KB", page.len() / 1000);
    Ok(())
}

/// Fails where the page is not what its sources give.
pub(crate) fn check() -> Result<()> {
    run(&Options { check: true })
}

/// A section, as it stands in the page and in its navigation.
struct Section {
    id: &'static str,
    title: &'static str,
    words: &'static str,
    body: String,
}

fn page() -> Result<String> {
    let rows = rows()?;
    let bars = bars(&rows, &calls()?);
    let sections = sections(&rows, &bars)?;
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>ferroflash: what was measured</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <div class=\"page\">\n{}<nav aria-label=\"Sections\">",
        head(&rows, &bars)
    );
    for Section { id, title, .. } in &sections {
        html += &format!("<a href=\"#{id}\">{title}</a>");
    }
    html += "</nav>\n<main>\n";
    for Section { id, title, words, body } in &sections {
        html += &format!(
            "<section id=\"{id}\">\n<h2>{title}</h2>\n<p>{words}</p>\n{body}\n</section>\n"
        );
    }
    html += "</main>\n<footer><p>Written by <code>cargo xtask report</code>. Rates are computed \
             from the raw rounds in docs/benchmarks: medians of rounds that alternate with the \
             peers’ in one process. FLOPs are 4·B·H·S²·d forward, half of it under a causal mask, \
             2.5 times it backward. Modelled figures follow from sizes and are in figures of their \
             own or named on the axis.</p></footer>\n</div>\n</body>\n</html>\n";
    Ok(html)
}

fn head(rows: &[Row], bars: &[Bar]) -> String {
    let mean = |name: &str| {
        let bar = bars.iter().find(|bar| bar.name.starts_with(name));
        bar.and_then(Bar::mean).map_or("–".to_owned(), |mean| format!("{mean:.3}"))
    };
    let stats = [
        ("hopper forward", "forward ÷ the faster of cuDNN and FlashAttention-3, 36 calls"),
        ("hopper backward", "backward ÷ cuDNN, the same 36 calls"),
        ("deterministic", "deterministic backward ÷ our default"),
        ("CPU forward", "CPU forward ÷ PyTorch, two cores, f32"),
    ];
    let stats =
        stats.map(|(bar, words)| format!("<div><dd>{}</dd><dt>{words}</dt></div>", mean(bar)));
    let samples: usize = rows.iter().flat_map(|row| row.ms.values()).map(Vec::len).sum();
    format!(
        "<header>\n<p class=\"brand\">ferroflash</p>\n<h1>Exact attention in Rust, measured beside \
         its peers</h1>\n<p class=\"lead\">{} calls, {samples} timed rounds, each of them kept. \
         Ratios are geometric means of rates: above 1 is faster than the peer. What was set as a \
         bar is below, met or not.</p>\n<dl class=\"stats\">{}</dl>\n</header>\n",
        rows.len(),
        stats.concat()
    )
}

fn sections(rows: &[Row], bars: &[Bar]) -> Result<Vec<Section>> {
    let of = |direction: &str, wanted: fn(&Row) -> bool| -> Vec<&Row> {
        let of_hopper = rows.iter().filter(|row| row.is_of("hopper"));
        of_hopper.filter(|row| row.direction == direction && wanted(row)).collect()
    };
    let [forward, backward] = ["forward", "backward"].map(|name| of(name, is_conventional));
    let [grouped, grouped_backward] = ["forward", "backward"].map(|name| of(name, is_grouped));
    let facts = facts()?;
    let mut all = vec![Section {
        id: "bars",
        title: "Bars",
        words: "What was to be reached. A dot is a call, the thick stroke their geometric mean; \
                solid and dashed strokes are what is asked of the mean and of each.",
        body: bar_list(rows, bars),
    }];
    all.push(Section {
        id: "forward",
        title: "Forward",
        words: "Rate against length, one panel a head dimension and mask: bf16, 16,384 tokens, \
                2,048 channels over all heads.",
        body: figure(rates::panels(&forward) + &rates::figures(&forward), &source(&forward)),
    });
    all.push(Section {
        id: "backward",
        title: "Backward",
        words: "The whole backward pass, from preprocessing to the conversion of dQ; the same \
                calls.",
        body: figure(rates::panels(&backward) + &rates::figures(&backward), &source(&backward)),
    });
    all.push(Section {
        id: "ratios",
        title: "Ratios",
        words: "Where we are ahead and where behind, call by call: our rate over the peer’s.",
        body: ratios([&forward, &backward], [&grouped, &grouped_backward]),
    });
    all.push(roofline([&forward, &backward])?);
    let (shares, source_of_errors) = errors::shares()?;
    all.push(Section {
        id: "errors",
        title: "Errors",
        words: "Largest difference from the f64 oracle, as a share of the bound it must keep: \
                twice the error of dense attention rounded to 16 bits where the kernels round, \
                and a little. The bar spans 95 % of the workloads.",
        body: figure(shares, &source_of_errors),
    });
    all.push(beside_peers()?);
    all.push(fixed_order(&backward));
    all.push(option_section(rows));
    all.push(Section {
        id: "memory",
        title: "Memory",
        words: "Bytes that a backward call needs beside its tensors, the f32 sums of dQ and two \
                values a row, for 16,384 tokens in all: it does not depend on how long items are, \
                where a 16-bit matrix of scores grows with them. Forward needs a few bytes.",
        body: figure(
            models::workspace(&facts.workspace),
            "Modelled: asked of the planner for an H200; nothing was measured.",
        ),
    });
    all.push(Section {
        id: "tiles",
        title: "Tiles",
        words: "Which tiles of the score matrix a kernel visits. Full tiles need no comparison, \
                partial ones one a score; skipped ones cost nothing.",
        body: figure(
            models::tile_maps()?,
            "Modelled: counted by the ledger from the kernel table’s tiles, 2,048 keys.",
        ),
    });
    let cpu: Vec<&Row> = rows.iter().filter(|row| row.is_of_cpu()).collect();
    let ratio = |row: &Row| row.is_of_cpu().then(|| row.ratio_to(&["torch"]))?;
    let of_cpu = |direction: &str| {
        tables::heat_map(&points(rows, |row| (row.direction == direction).then(|| ratio(row))?))
    };
    all.push(Section {
        id: "cpu",
        title: "CPU",
        words: "The path without a GPU, beside PyTorch’s scaled_dot_product_attention: f32, one \
                item, eight heads. Our rate over PyTorch’s.",
        body: figure(
            format!(
                "<div class=\"pair\"><div><h3>Forward</h3>{}</div><div><h3>Backward</h3>{}</div>\
                 </div>{}",
                of_cpu("forward"),
                of_cpu("backward"),
                rates::figures(&cpu)
            ),
            &source(&cpu),
        ),
    });
    Ok(all)
}

fn bar_list(rows: &[Row], bars: &[Bar]) -> String {
    let mut html = format!("<div class=\"bars\">{}", tables::scale_line(&tables::scale()));
    html.extend(bars.iter().map(tables::bar));
    figure(html + "</div>", &source(&rows.iter().collect::<Vec<_>>()))
}

fn ratios([forward, backward]: [&[&Row]; 2], [grouped, grouped_back]: [&[&Row]; 2]) -> String {
    let of = |rows: &[&Row], peers: &[&str]| {
        let rows: Vec<Row> = rows.iter().map(|row| (*row).clone()).collect();
        tables::heat_map(&points(&rows, |row| row.ratio_to(peers)))
    };
    let best = ["cudnn", "fa3"];
    let shades = ["under 0.90", "to 0.95", "to 0.99", "to 1.01", "to 1.05", "to 1.10", "above"];
    let key: String =
        (0..7).map(|i| format!("<li><i class=\"h{i}\"></i>{}</li>", shades[i])).collect();
    let body = format!(
        "<ul class=\"key\">{key}</ul><div class=\"pair\">\
         <div><h3>Forward ÷ the faster of cuDNN and FlashAttention-3</h3>{}</div>\
         <div><h3>Backward ÷ cuDNN</h3>{}</div>\
         <div><h3>64 query heads on 8: forward ÷ the faster</h3>{}</div>\
         <div><h3>64 query heads on 8: backward ÷ cuDNN</h3>{}</div></div>",
        of(forward, &best),
        of(backward, &["cudnn"]),
        of(grouped, &best),
        of(grouped_back, &["cudnn"])
    );
    let all: Vec<&Row> =
        [forward, backward, grouped, grouped_back].into_iter().flatten().copied().collect();
    figure(body, &source(&all))
}

fn roofline([forward, backward]: [&[&Row]; 2]) -> Result<Section> {
    let roofs = models::roofs(&records()?, DEVICE)?;
    let body = format!(
        "<div class=\"panels two\">{}{}</div>",
        models::roofline("forward", forward, &roofs),
        models::roofline("backward", backward, &roofs)
    );
    let all: Vec<&Row> = [forward, backward].into_iter().flatten().copied().collect();
    Ok(Section {
        id: "roofline",
        title: "Roofline",
        words: "Measured rate against modelled intensity. From a length of 512 on every call is \
                bound by products, not by device memory, if a cache keeps what is read again.",
        body: figure(body, &format!("{} {}", source(&all), models::roofs_in_words(&roofs))),
    })
}

fn fixed_order(backward: &[&Row]) -> Section {
    let rows: Vec<Row> = backward
        .iter()
        .filter(|row| row.ms.contains_key(DETERMINISTIC))
        .map(|row| (*row).clone())
        .collect();
    let all: Vec<&Row> = rows.iter().collect();
    Section {
        id: "determinism",
        title: "Determinism",
        words: "What a fixed order of sums costs: rate of the deterministic backward over our \
                default’s, which adds in any order. Equal calls then give equal bits.",
        body: figure(tables::heat_map(&points(&rows, deterministic)), &source(&all)),
    }
}

fn beside_peers() -> Result<Section> {
    let calls = calls()?;
    let body = match calls.is_empty() {
        true => {
            "<p class=\"missing\">Not measured yet: docs/benchmarks holds no errors.</p>".into()
        }
        false => figure(differences::beside_peers(&calls), &differences::source(&calls)),
    };
    Ok(Section {
        id: "peers",
        title: "Errors beside peers",
        words: "Root mean square difference from attention in f64, over the root mean square of the \
                values: what a result is off by, as a part of it. A dot is a call, the stroke their \
                geometric mean; further left is closer.",
        body,
    })
}

fn option_section(rows: &[Row]) -> Section {
    let (html, shown) = options::costs(rows);
    Section {
        id: "options",
        title: "Options",
        words: "What an option costs: our time without it over our time with it, plain and masked \
                kernels of one family, the same sizes. A window does less work, and may be above 1; \
                packed items are compared by the rate of what they see.",
        body: figure(html, &source(&shown)),
    }
}

fn figure(body: String, caption: &str) -> String {
    format!("<figure>{body}<figcaption>{caption}</figcaption></figure>")
}

/// Device, days and samples of some rows.
fn source(rows: &[&Row]) -> String {
    if rows.is_empty() {
        return "Not measured yet.".to_owned();
    }
    let set = |of: &dyn Fn(&Row) -> Option<&str>, missing: &str| {
        let words: BTreeSet<String> =
            rows.iter().map(|row| of(row).unwrap_or(missing).to_owned()).collect();
        escaped(&words.into_iter().collect::<Vec<_>>().join(", "))
    };
    let rounds: BTreeSet<usize> =
        rows.iter().filter_map(|row| row.ms.get(OURS)).map(Vec::len).collect();
    let least = rounds.first().copied().unwrap_or(0);
    let most = rounds.last().copied().unwrap_or(0);
    let each = if least == most { format!("{least}") } else { format!("{least} to {most}") };
    format!(
        "{}; {}; {} calls of {each} rounds a contender, medians.",
        set(&|row| row.device.as_deref(), "a device that was not recorded"),
        set(&|row| row.recorded.as_deref(), "a day that was not recorded"),
        rows.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::bars::Needs;

    #[test]
    fn a_figure_says_device_day_and_samples() {
        let rows = rows().expect("they read");
        let rows: Vec<&Row> = rows.iter().filter(|row| is_conventional(row)).collect();
        let words = source(&rows);
        assert!(words.starts_with("NVIDIA H200; 2026-"), "{words}");
        assert!(words.contains("20 rounds"), "{words}");
        assert_eq!(source(&[]), "Not measured yet.");
    }

    #[test]
    fn bars_without_rounds_are_drawn_as_such() {
        let line = tables::strip(&[], Needs::Most(1.1));
        assert!(!line.contains("circle") && line.contains("asked each"));
    }
}
