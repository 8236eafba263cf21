//! The tile map of a call: as letters, and as an SVG with its owners and its rooflines.

use std::fmt::Write;
use std::ops::Range;

use ferroflash::{TileClass, Visibility};

use super::measured::Measured;
use super::modelled::Modelled;
use super::roofline;

/// Letters of a map at most, across and down.
const LETTERS: [u64; 2] = [64, 24];
/// Cells of a drawing at most on a side.
const CELLS: u64 = 64;
/// Side of the drawing of the tiles, in pixels.
pub(super) const SIDE: f64 = 384.0;

/// A matrix of tiles in `rows × columns` groups, each drawn as one.
struct Groups<'a> {
    visible: &'a Visibility,
    rows: Vec<Range<u32>>,
    columns: Vec<Range<u32>>,
}

impl<'a> Groups<'a> {
    fn new(modelled: &Modelled, visible: &'a Visibility, [across, down]: [u64; 2]) -> Self {
        let cut = |len: u32, block: u64, most: u64| -> Vec<Range<u32>> {
            let tiles = u64::from(len).div_ceil(block);
            let step = tiles.div_ceil(most).max(1).saturating_mul(block);
            let step = u32::try_from(step).unwrap_or(u32::MAX);
            let starts = (0..len).step_by(step as usize);
            starts.map(|start| start..start.saturating_add(step).min(len)).collect()
        };
        Self {
            visible,
            rows: cut(visible.q_len, modelled.q_block, down),
            columns: cut(visible.kv_len, modelled.kv_block, across),
        }
    }

    fn class(&self, row: usize, column: usize) -> TileClass {
        self.visible.class(&self.rows[row], &self.columns[column])
    }
}

/// The map in letters: `#` full, `+` partial, `.` skipped.
pub(super) fn map(modelled: &Modelled, visible: &Visibility) -> String {
    let groups = Groups::new(modelled, visible, LETTERS);
    let mut text = String::new();
    for row in 0..groups.rows.len() {
        let name = if row == 0 { "map" } else { "" };
        let letter = |column| match groups.class(row, column) {
            TileClass::Full => '#',
            TileClass::Partial => '+',
            TileClass::Skipped => '.',
        };
        let letters: String = (0..groups.columns.len()).map(letter).collect();
        let _ = writeln!(text, "{name:<9} {letters}");
    }
    text + "          # full, + partial, . skipped; rows are queries, columns keys\n"
}

/// The drawing: tiles with their owners, and rooflines where the device's are known.
pub(super) fn svg(
    modelled: &Modelled,
    visible: &Visibility,
    measured: Option<&Measured>,
) -> String {
    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"980\" height=\"520\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"980\" height=\"520\" fill=\"white\"/>\n",
    );
    tiles(&mut text, modelled, visible);
    roofline::draw(&mut text, modelled, measured);
    text + "</svg>\n"
}

pub(super) fn label(text: &mut String, [x, y]: [f64; 2], words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>");
}

fn rectangle(text: &mut String, [x, y, width, height]: [f64; 4], fill: &str) {
    let _ = writeln!(
        text,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" \
         fill=\"{fill}\" stroke=\"white\" stroke-width=\"0.4\"/>"
    );
}

fn tiles(text: &mut String, modelled: &Modelled, visible: &Visibility) {
    let groups = Groups::new(modelled, visible, [CELLS, CELLS]);
    let (left, top) = (60.0, 60.0);
    let [rows, keys] = [visible.q_len, visible.kv_len].map(|len| f64::from(len.max(1)));
    let y = |row: u32| top + SIDE * f64::from(row) / rows;
    let x = |key: u32| left + SIDE * f64::from(key) / keys;
    let t = &modelled.tiles;
    let title = format!(
        "tiles of {} rows x {} keys: {} full, {} partial, {} skipped",
        modelled.q_block, modelled.kv_block, t.full, t.partial, t.skipped
    );
    label(text, [left, 24.0], &title);
    label(text, [left, 42.0], "above: owners of dK and dV; at the left: owners of o");
    let stripe = |index: usize| if index.is_multiple_of(2) { "#4c78a8" } else { "#9ecae9" };
    for (index, rows) in groups.rows.iter().enumerate() {
        let place = [left - 12.0, y(rows.start), 8.0, y(rows.end) - y(rows.start)];
        rectangle(text, place, stripe(index));
    }
    for (index, keys) in groups.columns.iter().enumerate() {
        let place = [x(keys.start), top - 12.0, x(keys.end) - x(keys.start), 8.0];
        rectangle(text, place, stripe(index));
    }
    for (row, rows) in groups.rows.iter().enumerate() {
        for (column, keys) in groups.columns.iter().enumerate() {
            let fill = match groups.class(row, column) {
                TileClass::Full => "#54a24b",
                TileClass::Partial => "#f2b701",
                TileClass::Skipped => "#e4e4e4",
            };
            let (width, height) = (x(keys.end) - x(keys.start), y(rows.end) - y(rows.start));
            rectangle(text, [x(keys.start), y(rows.start), width, height], fill);
        }
    }
    let below = top + SIDE + 22.0;
    for (index, (fill, words)) in
        [("#54a24b", "full"), ("#f2b701", "partial"), ("#e4e4e4", "skipped")].iter().enumerate()
    {
        let at = left + 90.0 * index as f64;
        rectangle(text, [at, below - 10.0, 12.0, 12.0], fill);
        label(text, [at + 18.0, below], words);
    }
    let tails =
        [(modelled.q_block, visible.q_len, "query"), (modelled.kv_block, visible.kv_len, "key")];
    let tails: Vec<String> = tails
        .iter()
        .filter(|(block, len, _)| u64::from(*len) % block != 0)
        .map(|(block, len, name)| format!("the last {name} tile has {}", u64::from(*len) % block))
        .collect();
    label(text, [left, below + 20.0], &tails.join("; "));
}
