//! Failures that no program can hold: readings of a figure, of a source or of a name.

const NO_MEASUREMENT: &str = "infers a duration or a rank from a count: no program computes it; \
    the ledger has no unit of time but those it is given";
const NO_COUNTER: &str = "reads a logical count as a hardware counter: the ledger's documentation \
    says what its figures are, and no function returns a measured one";
const EVIDENCE: &str = "a rule for reading records: `cargo xtask evidence` asks for workload, \
    kernel hash, reference and errors with every row, and leaves empty what was not measured";
const HISTORY: &str = "says what a historical source or paper is: nothing here runs that source";
const COMPILER: &str = "reads a model of fragments or of shared memory as what a compiler \
    allocates: the manifest's registers come from ptxas alone";

/// Claims, and why each has no mutation.
pub(crate) const REASONS: &[(&str, &str)] = &[
    ("m43-005", NO_MEASUREMENT),
    ("m43-006", NO_MEASUREMENT),
    ("m43-015", EVIDENCE),
    ("m43-049", NO_COUNTER),
    ("m43-127", "says that equal forms need not cost the same: costs are not part of a result"),
    ("m43-146", "a distinction of names: the paper's loops and this project's are apart by module"),
    ("m43-185", NO_COUNTER),
    ("m43-193", NO_COUNTER),
    ("m43-205", NO_COUNTER),
    ("m43-231", "misquotes a theorem; `bounds` gives the later, pointwise one (see m43-236)"),
    ("m43-278", HISTORY),
    ("m43-284", "warns of an interface that this project does not have: no call returns P"),
    ("m43-288", HISTORY),
    ("m43-292", "counts cases of a test-suite that is not run here"),
    ("m43-302", EVIDENCE),
    ("m43-313", EVIDENCE),
    ("m43-316", EVIDENCE),
    ("m43-317", EVIDENCE),
    ("m43-319", EVIDENCE),
    ("m43-323", EVIDENCE),
    ("m43-325", EVIDENCE),
    ("m43-330", NO_MEASUREMENT),
    ("m44-117", HISTORY),
    ("m44-194", COMPILER),
    ("m44-196", COMPILER),
    ("m44-197", "a scenario called a measurement: `residency` takes registers as an input or none"),
    ("m44-199", NO_MEASUREMENT),
    ("m44-258", NO_COUNTER),
    ("m44-415", HISTORY),
    ("m44-416", NO_MEASUREMENT),
    ("m44-496", COMPILER),
    ("m44-499", NO_MEASUREMENT),
    ("m44-564", NO_COUNTER),
    ("m44-568", NO_MEASUREMENT),
    ("m44-570", "a rule for profiling: times in the records are taken without a profiler"),
    ("m44-571", "mixes two documents' subjects: no account here is of a split cache"),
    ("m44-612", HISTORY),
    ("m44-613", HISTORY),
    ("m44-614", HISTORY),
    ("m44-615", HISTORY),
    ("m44-617", NO_COUNTER),
    ("m44-620", NO_MEASUREMENT),
    ("m44-691", "calls a rate by another name: the numerators are apart by function"),
    ("m44-694", "fills in what a paper does not say: such fields are quotations or absent"),
    ("m44-696", "calls a ratio by another name: `rate_ratio` has no unit"),
    ("m44-697", NO_MEASUREMENT),
    ("m44-698", NO_COUNTER),
    ("m44-699", "mixes two documents' subjects: no rate here is of a split cache"),
];
