//! `ferroflash bench`: how fast it is here, with the samples to show for it.
//!
//! | module | what it does |
//! | --- | --- |
//! | `grid`, `workload` | what is measured, in sizes, in words and in operations |
//! | `tensors`, `timer`, `measure` | inputs, clocks, and the loop that takes samples |
//! | `roofs`, `clocks` | what the device reaches, and what it says of itself |
//! | `record`, `read`, `date` | the file: `ferroflash.bench.v1` |
//! | `statistics`, `against` | medians, spread, and two runs compared |
//! | `table`, `csv`, `html` | a run to read |

mod against;
mod clocks;
mod csv;
mod date;
mod grid;
mod html;
mod measure;
mod read;
pub(crate) mod record;
mod roofs;
pub(crate) mod statistics;
pub(crate) mod table;
mod tensors;
mod timer;
mod workload;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Failure, Result};
use crate::file::{check_writable, write_text};
use crate::forward::open;
use crate::options::{DeviceChoice, form};
use crate::report::{print, print_json};

use self::against::Against;
use self::clocks::Clocks;
use self::grid::{Grid, Outputs};
use self::measure::{Bench, Rows, rounds};
use self::record::{Run, SCHEMA};
use self::timer::Timer;

/// Arguments of `bench`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    grid: Grid,
    /// Where it runs: auto, cpu or cuda:N
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// A kernel of the table by its name, or hopper or portable: no other runs
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Samples of each workload, 20 at least
    #[arg(long, default_value = "20", value_name = "N")]
    rounds: usize,
    /// Measure first what the device reaches: bytes copied and products a second
    #[arg(long)]
    roofs: bool,
    /// Measure nothing but the roofs
    #[arg(long, conflicts_with_all = ["Grid", "kernel"])]
    only_roofs: bool,
    /// Read the run in FILE, which `--json` or Python's `ferroflash.bench` wrote, in place of
    /// measuring one
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["Grid", "device", "kernel", "rounds", "roofs", "only_roofs"]
    )]
    from: Option<PathBuf>,
    /// Compare with the run in FILE; exit with 3 if a workload got slower by 2 % or more
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // A long measurement should not end in a refusal.
    let outputs = &arguments.outputs;
    outputs.check()?;
    let old = match &arguments.against {
        Some(file) => Some((Run::read("--against", file)?, file)),
        None => None,
    };
    let run = match &arguments.from {
        Some(file) => Run::read("--from", file)?,
        None => measure(arguments, old.as_ref().map(|(old, _)| old))?,
    };
    let against = match &old {
        Some((old, file)) => Some(Against::new(old, &run, file)?),
        None => None,
    };
    outputs.write(&run)?;
    if !outputs.json_to_stdout() {
        let mut words = table::words(&run);
        if let Some(against) = &against {
            words += &against.words();
        }
        print(&words)?;
    }
    against.map_or(Ok(()), |against| against.verdict())
}

fn measure(arguments: &Arguments, old: Option<&Run>) -> Result<Run> {
    let rounds = rounds(arguments.rounds)?;
    let device = open(arguments.device)?;
    if let (None, Some(kernel)) = (device.context(), &arguments.kernel) {
        let needs = "left out where the CPU is measured, which has one for each pass";
        return Err(Failure::needs("--kernel", format!("is {kernel}"), needs));
    }
    let groups = match arguments.only_roofs {
        true => Vec::new(),
        false => arguments.grid.groups(device.context().is_some())?,
    };
    let clocks = Clocks::of(&device);
    let timer = Timer::new(&device)?;
    let kernel = arguments.kernel.clone();
    let mut bench = Bench { device, timer, clocks, rounds, kernel, form: form()? };
    let mut run = Run {
        schema: SCHEMA.to_owned(),
        ferroflash: env!("CARGO_PKG_VERSION").to_owned(),
        date: date::now(),
        device: bench.measured_on(),
        method: bench.timer.method().to_owned(),
        clocks: bench.clocks.words(),
        timer_ms: bench.timer.empty_ms()?,
        peers: BTreeMap::new(),
        rows: Vec::new(),
        left_out: Vec::new(),
        roofs: Vec::new(),
    };
    if let (Some(old), Some(file)) = (old, &arguments.against) {
        against::check_comparable(old, &run, file)?;
    }
    if arguments.roofs || arguments.only_roofs {
        run.roofs = bench.roofs()?;
    }
    let Rows { rows, left_out } = bench.rows(&groups)?;
    if rows.is_empty() && !groups.is_empty() {
        let why = left_out.first().map_or_else(String::new, |left| left.why.clone());
        return Err(Failure::Input(format!("nothing was measured: {why}")));
    }
    (run.rows, run.left_out) = (rows, left_out);
    Ok(run)
}

impl Outputs {
    fn json_to_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all = [("--json", &self.json), ("--csv", &self.csv), ("--html", &self.html)];
        let given = all.into_iter().filter_map(|(name, file)| Some((name, file.as_deref()?)));
        given.filter(|(name, file)| *name != "--json" || *file != Path::new("-"))
    }

    /// Refuses to replace what is there, and files that are one another.
    fn check(&self) -> Result<()> {
        let files: Vec<_> = self.files().collect();
        for (index, (argument, file)) in files.iter().enumerate() {
            if let Some((other, _)) = files[..index].iter().find(|(_, earlier)| earlier == file) {
                let had = format!("{} is {other}'s too", file.display());
                return Err(Failure::needs(argument, had, "another file"));
            }
            if file.symlink_metadata().is_err() {
                check_writable(argument, file)?;
                continue;
            }
            if !file.is_file() {
                let had = format!("{} is not a regular file", file.display());
                return Err(Failure::needs(argument, had, "one, or none yet"));
            }
            if !self.force {
                let had = format!("{} is there already", file.display());
                return Err(Failure::input(argument, had + "; --force replaces it"));
            }
        }
        Ok(())
    }

    fn write(&self, run: &Run) -> Result<()> {
        if self.json_to_stdout() {
            print_json(run)?;
        }
        for (argument, file) in self.files() {
            let text = match argument {
                "--json" => {
                    let text = serde_json::to_string(run);
                    text.map_err(|why| Failure::Run(format!("--json: {why}")))? + "\n"
                }
                "--csv" => csv::text(run),
                _ => html::text(run),
            };
            write_text(argument, file, &text)?;
        }
        Ok(())
    }
}
