//! The worked examples of the seed documents (`fixtures/seeds`). Tests are named `KIND/ID`.

use ferroflash_tests::seeds::{Case, cases};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let trials = cases().into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(case: Case) -> Trial {
    Trial::test(format!("{}/{}", case.kind, case.id), move || {
        case.run();
        Ok(())
    })
}
