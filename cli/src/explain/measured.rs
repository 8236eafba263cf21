//! A call under roofs that were measured. What is measured here is the roofs and, where the file
//! has the same workload, its time; operations, bytes and so intensities stay modelled.

use std::fmt::Write;
use std::path::Path;

use ferroflash::Explanation;
use serde::Serialize;

use crate::bench::record::{OURS, Roof, RoofKind, Run, Workload};
use crate::bench::statistics::median;
use crate::bench::table::rate_in_words;
use crate::failure::{Failure, Result, one_line};

/// A call under measured roofs.
#[derive(Serialize)]
pub(super) struct Measured {
    /// What the roofs were measured on.
    pub(super) device: String,
    /// When.
    pub(super) date: String,
    /// Bytes copied a second, read and written.
    pub(super) bytes_per_second: f64,
    /// How.
    bytes_method: String,
    /// Operations of products a second.
    pub(super) flops_per_second: f64,
    /// How.
    flops_method: String,
    /// Operations a byte where the roofs meet.
    pub(super) ridge: f64,
    /// The forward pass.
    pub(super) forward: Placed,
    /// The backward pass.
    pub(super) backward: Option<Placed>,
}

/// A pass under the roofs.
#[derive(Serialize)]
pub(super) struct Placed {
    /// Modelled: operations over visible keys a byte of tensors that are each moved once.
    pub(super) modelled_intensity: f64,
    /// Which roof is lower at that intensity: `copy` or `matrix`.
    bound_by: RoofKind,
    /// Operations a second under both roofs.
    pub(super) attainable_flops_per_second: f64,
    /// That as a share of the matrix roof.
    share_of_matrix_roof: f64,
    /// Seconds at that rate.
    least_seconds: f64,
    /// What the file has measured of this very workload.
    pub(super) timed: Option<Timed>,
}

/// A workload's time.
#[derive(Serialize)]
pub(super) struct Timed {
    /// Median, in seconds.
    seconds: f64,
    /// Modelled operations over that.
    pub(super) flops_per_second: f64,
    /// That as a share of what is attainable.
    share_of_roof: f64,
}

impl Measured {
    /// Places a call, its forward and its backward pass, under the roofs in `file`. A device that
    /// was named need not be the roofs'.
    pub(super) fn new(
        file: &Path,
        plan: &Explanation,
        call: &[Workload; 2],
        is_named: bool,
    ) -> Result<Self> {
        let run = Run::read("--roofs", file)?;
        let on = &run.device;
        let is_here = match on.backend.as_str() {
            "cpu" => plan.device == "cpu",
            _ => plan.device == on.name,
        };
        if !is_named && !is_here {
            let had = format!("{} was measured on {}", file.display(), on.name);
            let needs = format!("of the plan's device, {}, or --device-model named", plan.device);
            return Err(Failure::needs("--roofs", had, needs));
        }
        let roof = |kind, dtype: Option<&str>| {
            let fits = |roof: &&Roof| roof.kind == kind && fits(roof.dtype.as_deref(), dtype);
            let roofs = run.roofs.iter().filter(fits);
            let best = roofs.max_by(|a, b| a.per_second().total_cmp(&b.per_second()));
            best.ok_or_else(|| {
                let what = match dtype {
                    None => "copies".to_owned(),
                    Some(dtype) => format!("{dtype} products"),
                };
                Failure::input("--roofs", format!("{} has no roof of {what}", file.display()))
            })
        };
        let copy = roof(RoofKind::Copy, None)?;
        let matrix = roof(RoofKind::Matrix, Some(&call[0].dtype))?;
        let roofs = [copy.per_second(), matrix.per_second()];
        let timed = |workload: &Workload| {
            let row = run.rows.iter().find(|row| row.workload == *workload)?;
            row.ms.get(OURS).map(|ms| median(ms) * 1e-3)
        };
        let place = |pass: &Explanation, workload| {
            let seconds = timed(workload);
            Placed::new(pass.flops, pass.bytes, roofs, seconds).ok_or_else(|| {
                Failure::input("--roofs", "the call has no work to be placed under a roof")
            })
        };
        Ok(Self {
            device: on.name.clone(),
            date: run.date.clone(),
            bytes_per_second: roofs[0],
            bytes_method: copy.method.clone(),
            flops_per_second: roofs[1],
            flops_method: matrix.method.clone(),
            ridge: roofs[1] / roofs[0],
            forward: place(plan, &call[0])?,
            backward: plan.backward.as_ref().map(|pass| place(pass, &call[1])).transpose()?,
        })
    }

    /// The same in words.
    pub(super) fn words(&self) -> String {
        let mut text = format!(
            "\nmeasured on {}, {}: the roofs and the times; intensities stay modelled\n",
            one_line(&self.device),
            one_line(&self.date)
        );
        let copy = rate_in_words(RoofKind::Copy, self.bytes_per_second);
        let matrix = rate_in_words(RoofKind::Matrix, self.flops_per_second);
        let _ = writeln!(text, "roofs     {copy}: {}", one_line(&self.bytes_method));
        let _ = writeln!(text, "          {matrix}: {}", one_line(&self.flops_method));
        let _ = writeln!(text, "          they meet at {:.0} FLOP a byte", self.ridge);
        let passes = [("forward", Some(&self.forward)), ("backward", self.backward.as_ref())];
        for (name, placed) in passes {
            let Some(placed) = placed else { continue };
            let side = match placed.bound_by {
                RoofKind::Copy => "under the slope: bytes bound it",
                RoofKind::Matrix => "under the flat: products bound it",
            };
            let _ = writeln!(
                text,
                "{name:<9} {:.0} FLOP a byte at least, {side};\n          at most {}, {:.0} % of \
                 the matrix roof: {:.4} ms at least",
                placed.modelled_intensity,
                rate_in_words(RoofKind::Matrix, placed.attainable_flops_per_second),
                placed.share_of_matrix_roof * 100.0,
                placed.least_seconds * 1e3
            );
            if let Some(timed) = &placed.timed {
                let _ = writeln!(
                    text,
                    "          took {:.4} ms, {}: {:.0} % of its roof",
                    timed.seconds * 1e3,
                    rate_in_words(RoofKind::Matrix, timed.flops_per_second),
                    timed.share_of_roof * 100.0
                );
            }
        }
        text
    }
}

/// Whether a roof of one element type bounds products of another: 16-bit ones share a unit.
fn fits(roof: Option<&str>, wanted: Option<&str>) -> bool {
    let short = |dtype: &str| dtype == "bf16" || dtype == "f16";
    match (roof, wanted) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(roof), Some(wanted)) => roof == wanted || (short(roof) && short(wanted)),
    }
}

impl Placed {
    /// `None` for a pass without operations or bytes.
    fn new(flops: f64, bytes: f64, [copy, matrix]: [f64; 2], seconds: Option<f64>) -> Option<Self> {
        if !(flops > 0.0 && bytes > 0.0) {
            return None;
        }
        let modelled_intensity = flops / bytes;
        let slope = modelled_intensity * copy;
        let attainable = slope.min(matrix);
        Some(Self {
            modelled_intensity,
            bound_by: if slope < matrix { RoofKind::Copy } else { RoofKind::Matrix },
            attainable_flops_per_second: attainable,
            share_of_matrix_roof: attainable / matrix,
            least_seconds: flops / attainable,
            timed: seconds.map(|seconds| Timed {
                seconds,
                flops_per_second: flops / seconds,
                share_of_roof: flops / seconds / attainable,
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_roof_may_be_the_lower() {
        // They meet at 100 operations a byte.
        let roofs = [1e12, 1e14];
        let flat = Placed::new(4e12, 1e10, roofs, Some(0.05)).expect("work");
        assert_eq!((flat.bound_by, flat.modelled_intensity), (RoofKind::Matrix, 400.0));
        assert_eq!((flat.share_of_matrix_roof, flat.least_seconds), (1.0, 0.04));
        let timed = flat.timed.expect("a time");
        assert!((timed.share_of_roof - 0.8).abs() < 1e-12);
        let slope = Placed::new(5e11, 1e10, roofs, None).expect("work");
        assert_eq!((slope.bound_by, slope.share_of_matrix_roof), (RoofKind::Copy, 0.5));
        assert_eq!(slope.least_seconds, 0.01);
        assert!(slope.timed.is_none());
        assert!(Placed::new(0.0, 1e10, roofs, None).is_none());
        assert!(Placed::new(0.0, 0.0, roofs, None).is_none());
    }

    #[test]
    fn sixteen_bits_share_a_roof() {
        assert!(fits(Some("bf16"), Some("f16")) && fits(None, None));
        assert!(!fits(Some("bf16"), Some("f32")) && !fits(None, Some("f32")));
    }
}
