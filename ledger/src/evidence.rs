//! What may be said of a run, from what was recorded of it (M4.3 §0x0FA–0x0FF, M4.4 §0x06.5H).
//!
//! Four rungs in a fixed order: the call is frozen, its result is that of a reference, the kernel
//! that made it is known, its time was taken. None stands for another: a right result may come
//! from another kernel than was asked for, and a fast one may be wrong. A rung whose field was not
//! observed is `unmeasured`; nothing is ever filled in from elsewhere.

use serde::{Deserialize, Serialize};

/// Timed samples that a published time needs at least.
pub const SAMPLES: usize = 20;

/// What was recorded of a run. A field that was not observed is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    /// The call and the machine.
    pub manifest: Manifest,
    /// The comparison with a reference.
    pub parity: Option<Parity>,
    /// Which kernel ran.
    pub identity: Option<Identity>,
    /// How long it took.
    pub timing: Option<Timing>,
}

/// What a result depends on besides its inputs' values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// Device and architecture.
    pub device: Option<String>,
    /// Driver.
    pub driver: Option<String>,
    /// Library or source version.
    pub version: Option<String>,
    /// Element type.
    pub dtype: Option<String>,
    /// Sizes, both head counts among them.
    pub sizes: Option<String>,
    /// Strides or layout.
    pub layout: Option<String>,
    /// Kind of mask, with its alignment.
    pub mask: Option<String>,
    /// Score scale.
    pub scale: Option<String>,
    /// Dropout, or that there is none.
    pub dropout: Option<String>,
}

/// A comparison with a reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parity {
    /// What it was compared with.
    pub reference: String,
    /// Largest difference that is allowed.
    pub tolerance: f64,
    /// Largest difference found.
    pub max_error: f64,
}

/// Which kernel ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// What was asked for.
    pub requested: String,
    /// Names of what ran; none if nothing did.
    pub kernels: Vec<String>,
    /// Hash of its code: names change meaning between versions.
    pub body: Option<String>,
    /// Warnings and refusals, in the words they came in.
    #[serde(default)]
    pub diagnostics: Vec<String>,
}

/// Times, as they were taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Runs before the first sample.
    pub warmups: Option<u64>,
    /// Whether the device was waited for at each sample.
    pub synchronized: bool,
    /// Every sample, in seconds.
    pub samples_seconds: Vec<f64>,
}

/// How far a rung holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It holds.
    Established,
    /// Nothing was observed.
    Unmeasured,
    /// What was observed does not do, or a rung below does not hold.
    Refused,
}

/// One rung.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rung {
    /// What it is about.
    pub name: &'static str,
    /// How far it holds.
    pub verdict: Verdict,
    /// Why, where it does not.
    pub reason: String,
}

/// The rungs of a record, in order.
pub fn ladder(record: &Record) -> [Rung; 4] {
    let observed = [
        ("semantics frozen", frozen(&record.manifest)),
        ("reference parity", record.parity.as_ref().map_or_else(unmeasured, parity)),
        ("kernel identity", record.identity.as_ref().map_or_else(unmeasured, identity)),
        ("timing", record.timing.as_ref().map_or_else(unmeasured, timing)),
    ];
    let mut below = None;
    observed.map(|(name, (mut verdict, mut reason))| {
        if let (Some(missing), Verdict::Established) = (below, verdict) {
            (verdict, reason) = (Verdict::Refused, format!("{missing} is not established"));
        }
        if verdict != Verdict::Established {
            below = below.or(Some(name));
        }
        Rung { name, verdict, reason }
    })
}

/// The median of a record's samples, where its time may be stated at all.
pub fn median_seconds(record: &Record) -> Option<f64> {
    if ladder(record).iter().any(|rung| rung.verdict != Verdict::Established) {
        return None;
    }
    let mut samples = record.timing.as_ref()?.samples_seconds.clone();
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    let upper = *samples.get(middle)?;
    if samples.len() % 2 == 1 {
        return Some(upper);
    }
    Some((samples.get(middle.checked_sub(1)?)? + upper) / 2.0)
}

type Judged = (Verdict, String);

fn unmeasured() -> Judged {
    (Verdict::Unmeasured, "not run".to_owned())
}

fn established() -> Judged {
    (Verdict::Established, String::new())
}

fn refused(reason: impl Into<String>) -> Judged {
    (Verdict::Refused, reason.into())
}

fn frozen(manifest: &Manifest) -> Judged {
    let fields = [
        ("device", &manifest.device),
        ("driver", &manifest.driver),
        ("version", &manifest.version),
        ("dtype", &manifest.dtype),
        ("sizes", &manifest.sizes),
        ("layout", &manifest.layout),
        ("mask", &manifest.mask),
        ("scale", &manifest.scale),
        ("dropout", &manifest.dropout),
    ];
    let missing = fields.iter().filter(|(_, value)| value.is_none()).map(|(name, _)| *name);
    let missing: Vec<&str> = missing.collect();
    if missing.len() == fields.len() {
        return unmeasured();
    }
    if missing.is_empty() {
        return established();
    }
    refused(format!("the manifest lacks {}", missing.join(", ")))
}

fn parity(parity: &Parity) -> Judged {
    if parity.max_error <= parity.tolerance {
        return established();
    }
    let Parity { reference, tolerance, max_error } = parity;
    refused(format!("differs from {reference} by {max_error:e}, more than {tolerance:e}"))
}

fn identity(identity: &Identity) -> Judged {
    if identity.kernels.is_empty() {
        let words = identity.diagnostics.join("; ");
        let words = if words.is_empty() { "no reason was kept".to_owned() } else { words };
        return refused(format!("{} did not run: {words}", identity.requested));
    }
    if identity.body.is_none() {
        return refused("a name alone, whose code is not known");
    }
    if !identity.kernels.contains(&identity.requested) {
        let ran = identity.kernels.join(", ");
        return refused(format!("{} was asked for, but {ran} ran", identity.requested));
    }
    established()
}

fn timing(timing: &Timing) -> Judged {
    let samples = timing.samples_seconds.len();
    if samples < SAMPLES {
        return refused(format!("{samples} raw samples, where {SAMPLES} are needed"));
    }
    if timing.warmups.is_none() {
        return refused("how many runs came before the first sample was not recorded");
    }
    if !timing.synchronized {
        return refused("the device was not waited for");
    }
    if timing.samples_seconds.iter().any(|seconds| !seconds.is_finite() || *seconds <= 0.0) {
        return refused("a sample is no duration");
    }
    established()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Record {
        let some = |text: &str| Some(text.to_owned());
        Record {
            manifest: Manifest {
                device: some("cpu"),
                driver: some("none"),
                version: some("0.1.0"),
                dtype: some("f32"),
                sizes: some("B1 Hq4 Hkv2 S16"),
                layout: some("bshd, contiguous"),
                mask: some("causal, bottom right"),
                scale: some("1/sqrt(d)"),
                dropout: some("none"),
            },
            parity: Some(Parity {
                reference: "dense f64".to_owned(),
                tolerance: 1e-6,
                max_error: 1e-7,
            }),
            identity: Some(Identity {
                requested: "tiled".to_owned(),
                kernels: vec!["tiled".to_owned()],
                body: some("0123"),
                diagnostics: Vec::new(),
            }),
            timing: Some(Timing {
                warmups: Some(3),
                synchronized: true,
                samples_seconds: (1..=20).map(f64::from).collect(),
            }),
        }
    }

    fn verdicts(record: &Record) -> [Verdict; 4] {
        ladder(record).map(|rung| rung.verdict)
    }

    #[test]
    fn a_whole_record_has_a_median() {
        assert_eq!(verdicts(&whole()), [Verdict::Established; 4]);
        assert_eq!(median_seconds(&whole()), Some(10.5));
    }

    #[test]
    fn a_missing_field_is_named() {
        let mut record = whole();
        record.manifest.sizes = None;
        record.manifest.scale = None;
        let [frozen, rest @ ..] = ladder(&record);
        assert_eq!(frozen.reason, "the manifest lacks sizes, scale");
        assert!(rest.iter().all(|rung| rung.reason == "semantics frozen is not established"));
        assert_eq!(median_seconds(&record), None);
    }

    #[test]
    fn no_rung_stands_for_another() {
        use Verdict::{Established, Refused, Unmeasured};
        let without_parity = Record { parity: None, ..whole() };
        assert_eq!(verdicts(&without_parity), [Established, Unmeasured, Refused, Refused]);
        let without_identity = Record { identity: None, ..whole() };
        assert_eq!(verdicts(&without_identity), [Established, Established, Unmeasured, Refused]);
        assert_eq!(median_seconds(&without_identity), None);
        let mut another = whole();
        if let Some(identity) = &mut another.identity {
            identity.kernels = vec!["dense".to_owned()];
        }
        assert_eq!(verdicts(&another), [Established, Established, Refused, Refused]);
        let mut wrong = whole();
        if let Some(parity) = &mut wrong.parity {
            parity.max_error = f64::NAN;
        }
        assert_eq!(verdicts(&wrong), [Established, Refused, Refused, Refused]);
    }

    #[test]
    fn timing_needs_twenty_samples() {
        let with = |change: fn(&mut Timing)| {
            let mut record = whole();
            record.timing.as_mut().map(change);
            let [.., timing] = ladder(&record);
            (timing.verdict == Verdict::Refused).then_some(timing.reason)
        };
        let few = with(|timing| timing.samples_seconds.truncate(19));
        assert_eq!(few.unwrap(), "19 raw samples, where 20 are needed");
        assert!(with(|timing| timing.warmups = None).is_some());
        assert!(with(|timing| timing.synchronized = false).is_some());
        assert!(with(|timing| timing.samples_seconds[3] = f64::NAN).is_some());
    }

    #[test]
    fn what_was_not_observed_is_unmeasured() {
        assert_eq!(verdicts(&Record::default()), [Verdict::Unmeasured; 4]);
    }

    #[test]
    fn a_refusal_is_kept_in_words() {
        let mut record = whole();
        record.identity = Some(Identity {
            requested: "flash".to_owned(),
            kernels: Vec::new(),
            body: None,
            diagnostics: vec!["head dimension 300 is not supported".to_owned()],
        });
        let [_, _, identity, _] = ladder(&record);
        assert_eq!(identity.reason, "flash did not run: head dimension 300 is not supported");
    }

    #[test]
    fn a_name_alone_is_no_identity() {
        let mut record = whole();
        record.identity.as_mut().unwrap().body = None;
        let [_, _, identity, timing] = ladder(&record);
        assert_eq!(identity.reason, "a name alone, whose code is not known");
        assert_eq!(timing.verdict, Verdict::Refused);
    }
}
