//! What options cost: a line an option, family and direction, also where nothing was measured.

use ferroflash_core::axes::{Direction, Family, MaskClass};
use ferroflash_core::table::KERNELS;

use super::svg::escaped;
use super::tables;
use crate::measured::{Point, Row, option_costs};

/// Options by the words that rows begin theirs with, and the mask class that does them.
const OPTIONS: [(&str, MaskClass); 10] = [
    ("window", MaskClass::Masked),
    ("alibi", MaskClass::Masked),
    ("softcap", MaskClass::Masked),
    ("sink", MaskClass::Masked),
    ("key lengths", MaskClass::Masked),
    ("packed equal", MaskClass::Masked),
    ("packed heavy-tailed", MaskClass::Masked),
    ("mask", MaskClass::General),
    ("bias", MaskClass::General),
    ("dropout", MaskClass::General),
];

/// The lines, and the rows that they show.
pub(super) fn costs(rows: &[Row]) -> (String, Vec<&Row>) {
    let costs = option_costs(rows);
    let mut html = format!("<div class=\"strips\">{}", tables::scale_line(&tables::scale()));
    let mut shown = Vec::new();
    for (option, mask) in OPTIONS {
        for family in [Family::Hopper, Family::Portable] {
            for direction in [Direction::Forward, Direction::Backward] {
                let of_line: Vec<_> = costs
                    .iter()
                    .filter(|cost| cost.row.options.as_ref().is_some_and(|o| o.starts_with(option)))
                    .filter(|cost| cost.row.is_of(family.name()))
                    .filter(|cost| cost.row.direction == direction.name())
                    .collect();
                let name = format!("{option}, {} {}", family.name(), direction.name());
                if !of_line.is_empty() {
                    let point = |row: &Row, ratio| Point { place: place(row), s: row.s, ratio };
                    let points: Vec<Point> =
                        of_line.iter().map(|cost| point(cost.row, cost.ratio)).collect();
                    html += &tables::of_option(&name, &points);
                    shown.extend(of_line.iter().map(|cost| cost.row));
                } else if has_kernel(family, direction, mask) {
                    html += &missing(&name);
                }
            }
        }
    }
    (html + "</div>", shown)
}

/// Whether a family has kernels for it at all; the other family's run it if not.
fn has_kernel(family: Family, direction: Direction, mask: MaskClass) -> bool {
    KERNELS.iter().any(|spec| (spec.family, spec.direction, spec.mask) == (family, direction, mask))
}

fn place(row: &Row) -> String {
    format!("{}, {}", row.place(), row.options.as_deref().unwrap_or_default())
}

fn missing(name: &str) -> String {
    format!(
        "<div class=\"bar open\"><p class=\"what\">{}</p><p class=\"asks\">not measured</p></div>",
        escaped(name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_named() {
        let (html, shown) = costs(&[]);
        assert!(shown.is_empty());
        assert!(html.contains("window, portable backward") && html.contains("not measured"));
    }
}
