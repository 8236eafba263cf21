//! A run as a page that needs nothing else: a curve for each pass, mask and head size, and the
//! table.

use std::fmt::Write;

use super::record::{OURS, Row, Run};
use super::statistics::Spread;
use super::table::{milliseconds, roof_in_words};

/// Colours of contenders, this library's first; they tell apart without red against green.
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7f00", "#888888"];
const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:1rem auto;max-width:70rem;\
    padding:0 1rem;color:#222;background:#fff}figure{display:inline-block;margin:0 1rem 1rem 0}\
    svg{max-width:100%;height:auto}svg text{fill:currentColor;font-size:11px}\
    .wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}\
    td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ccc;white-space:nowrap}\
    :is(td,th):nth-child(-n+2){text-align:left}\
    @media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}\
    td,th{border-color:#444}}";
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 44.0;
const BELOW: f64 = 24.0;

/// The text of the page.
pub(super) fn text(run: &Run) -> String {
    let contenders = run.contenders();
    let on = escaped(&run.device.name);
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>ferroflash bench: {on}</title><style>{STYLE}</style>\n<h1>{on}</h1>\n"
    );
    let driver = run.device.driver.as_deref().unwrap_or("none");
    let _ = writeln!(
        text,
        "<p>{}, ferroflash {}, driver {}. {}. Clocks: {}.</p>",
        escaped(&run.date),
        escaped(&run.ferroflash),
        escaped(driver),
        escaped(&run.method),
        escaped(&run.clocks)
    );
    for roof in &run.roofs {
        let _ = writeln!(text, "<p>Roof: {}</p>", escaped(&roof_in_words(roof)));
    }
    legend(&mut text, &contenders);
    // Curves: rows that differ in length alone, by what they share.
    let mut curves: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in &run.rows {
        let w = &row.workload;
        let title = format!("{} {}, d {}", w.dtype, w.kind(), w.channels());
        match curves.iter_mut().find(|(other, _)| *other == title) {
            Some((_, rows)) => rows.push(row),
            None => curves.push((title, vec![row])),
        }
    }
    for (title, rows) in &mut curves {
        rows.sort_by_key(|row| row.workload.s);
        curve(&mut text, title, rows, &contenders);
    }
    table(&mut text, run, &contenders);
    for left in &run.left_out {
        let _ = writeln!(text, "<p>Left out: {}: {}</p>", escaped(&left.what), escaped(&left.why));
    }
    text + "</html>\n"
}

fn legend(text: &mut String, contenders: &[&str]) {
    let entries = contenders
        .iter()
        .zip(COLOURS.iter().cycle())
        .map(|(who, colour)| format!("<span style=\"color:{colour}\">●</span> {}", escaped(who)));
    let _ = writeln!(text, "<p>{}</p>", entries.collect::<Vec<_>>().join(" &nbsp; "));
}

/// Rates by length; lengths are equally far apart.
fn curve(text: &mut String, title: &str, rows: &[&Row], contenders: &[&str]) {
    let rates = rows.iter().flat_map(|row| contenders.iter().filter_map(|who| row.tera(who)));
    let most = rates.fold(0.0, f64::max).max(1e-9) * 1.08;
    let (right, top) = (WIDTH - 24.0, 12.0);
    let step = (right - LEFT) / (rows.len().max(2) - 1) as f64;
    let x = |index: usize| LEFT + step * index as f64;
    let y = |rate: f64| HEIGHT - BELOW - (HEIGHT - BELOW - top) * rate / most;
    let (factor, unit) = if most < 1.0 { (1e3, "GFLOP/s") } else { (1.0, "TFLOP/s") };
    let _ = write!(
        text,
        "<figure><figcaption>{}, {unit}</figcaption><svg width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
        escaped(title),
        escaped(title)
    );
    let between = round_step(most * factor) / factor;
    for part in 0..=(most / between) as u32 {
        let rate = between * f64::from(part);
        let _ = write!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{0:.1}\" y2=\"{0:.1}\" stroke=\"#8884\"/>\
             <text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{3}</text>",
            y(rate),
            LEFT - 6.0,
            y(rate) + 4.0,
            shortest(rate * factor)
        );
    }
    for (index, row) in rows.iter().enumerate() {
        let _ = write!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(index),
            HEIGHT - 8.0,
            row.workload.lengths()
        );
    }
    for (who, colour) in contenders.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<(f64, f64, String)> = rows
            .iter()
            .enumerate()
            .filter_map(|(index, row)| {
                let rate = row.tera(who)?;
                let words = format!("{who}, s {}: {:.1}", row.workload.s, rate * factor);
                Some((x(index), y(rate), words))
            })
            .collect();
        let line: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(
            text,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
            line.join(" ")
        );
        for (x, y, words) in points {
            let words = escaped(&words);
            let _ = write!(
                text,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\">\
                 <title>{words}</title></circle>"
            );
        }
    }
    text.push_str("</svg></figure>\n");
}

/// 1, 2 or 5 times a power of ten, three to six times in `most`.
fn round_step(most: f64) -> f64 {
    let power = 10_f64.powf((most / 3.0).log10().floor());
    let digit = [5.0, 2.0, 1.0].into_iter().find(|digit| digit * power <= most / 3.0);
    digit.unwrap_or(1.0) * power
}

/// As few decimals as steps of a thousandth need.
fn shortest(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn table(text: &mut String, run: &Run, contenders: &[&str]) {
    text.push_str("<div class=\"wide\"><table>\n<tr><th>workload<th>kernel<th>samples<th>ms");
    text.push_str("<th>least<th>most");
    for who in contenders {
        let _ = write!(text, "<th>{}, TFLOP/s", escaped(who));
    }
    text.push('\n');
    for row in &run.rows {
        let _ = write!(
            text,
            "<tr><td>{}<td>{}",
            escaped(&row.workload.words()),
            escaped(row.kernel.as_deref().unwrap_or("-"))
        );
        match row.ms.get(OURS) {
            Some(samples) => {
                let spread = Spread::of(samples);
                let times = [spread.median, spread.least, spread.most].map(milliseconds);
                let _ = write!(text, "<td>{}<td>{}", samples.len(), times.join("<td>"));
            }
            None => text.push_str("<td>-<td>-<td>-<td>-"),
        }
        for who in contenders {
            let rate = row.tera(who).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}"));
            let _ = write!(text, "<td>{rate}");
        }
        text.push('\n');
    }
    text.push_str("</table></div>\n");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::run;

    #[test]
    fn steps_are_round() {
        assert_eq!([700.0, 299.0, 16.8, 0.9].map(round_step), [200.0, 50.0, 5.0, 0.2]);
        for most in [0.01, 0.7, 3.1, 42.0, 599.0, 1000.0] {
            assert!((3.0..7.6).contains(&(most / round_step(most))), "{most}");
        }
        assert_eq!(shortest(0.30000000000000004), 0.3);
    }

    #[test]
    fn a_page_needs_nothing_else() {
        let mut run = run(&[2.0; 20]);
        let mut longer = run.rows[0].clone();
        longer.workload.s = 256;
        run.rows.push(longer);
        run.device.name = "<a & b>".to_owned();
        let page = text(&run);
        assert!(page.contains("&lt;a &amp; b&gt;") && !page.contains("<a & b>"));
        assert!(!page.contains("http") && !page.contains("<script"));
        // Both lengths lie on one curve.
        assert_eq!(page.matches("<figure>").count(), 1);
        assert_eq!(page.matches("<circle").count(), 2);
        assert_eq!(page.matches("<tr>").count(), 3);
    }
}
