//! ptxas: finding it, running it, reading what it says.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, capture, create_folder, on_path, printed, target};

/// Environment variable that names the ptxas to use.
const SETTING: &str = "FERROFLASH_PTXAS";
/// The PyPI package that carries ptxas, at the version the committed cubins are built with.
const PACKAGE: &str = "nvidia-cuda-nvcc==13.5.37";

/// A ptxas that was found or installed.
pub(crate) struct Ptxas {
    program: PathBuf,
    /// Release and build, in its own words.
    pub(crate) version: String,
}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resources {
    /// The architecture it was assembled for.
    pub(crate) target: String,
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Bytes of spill stores and loads.
    pub(crate) spill_bytes: u32,
    /// Bytes of a thread's stack frame.
    pub(crate) stack_bytes: u32,
    /// Bytes of static shared memory.
    pub(crate) static_shared_bytes: u32,
    /// Hardware barriers.
    pub(crate) barriers: u32,
}

impl Ptxas {
    /// Takes the setting, else `PATH`, else installs the PyPI package under target/.
    pub(crate) fn find() -> Result<Self> {
        if let Some(setting) = std::env::var_os(SETTING) {
            return Self::at(PathBuf::from(&setting))
                .with_context(|| format!("{SETTING} is {}", setting.display()));
        }
        if let Some(program) = on_path("ptxas") {
            return Self::at(program);
        }
        let folder = target().join("ptxas");
        if let Some(program) = installed(&folder) {
            return Self::at(program);
        }
        eprintln!("installing {PACKAGE} (it carries ptxas) under {}", folder.display());
        install(&folder).with_context(|| {
            format!("no ptxas: put one on PATH, name one in {SETTING}, or let pip reach {PACKAGE}")
        })?;
        let program = installed(&folder).with_context(|| format!("{PACKAGE} holds no ptxas"))?;
        Self::at(program)
    }

    fn at(program: PathBuf) -> Result<Self> {
        let said = printed(Command::new(&program).arg("--version"))?;
        let lines = said.lines().map(str::trim).skip_while(|line| !line.contains("release"));
        let version = lines.collect::<Vec<_>>().join("; ");
        if version.is_empty() {
            bail!("{} --version names no release", program.display());
        }
        Ok(Self { program, version })
    }

    /// Assembles a kernel's PTX for a real architecture.
    pub(crate) fn assemble(
        &self,
        name: &str,
        ptx: &str,
        architecture: &str,
        folder: &Path,
    ) -> Result<(Vec<u8>, Resources)> {
        let source = folder.join(format!("{name}.ptx"));
        let cubin = folder.join(format!("{name}.{architecture}.cubin"));
        workspace::write(&source, ptx.as_bytes())?;
        let mut command = Command::new(&self.program);
        command.args(flags(architecture)).arg(&source).arg("-o").arg(&cubin);
        let output = capture(&mut command)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let said = format!("{}{said}", String::from_utf8_lossy(&output.stdout));
        if !output.status.success() {
            bail!("ptxas refused it for {architecture}: {}", said.trim());
        }
        let resources = read_resources(&said, architecture)
            .with_context(|| format!("ptxas said for {architecture}: {}", said.trim()))?;
        if let Some(line) = said.lines().find(|line| is_refused(line)) {
            let Resources { registers, spill_bytes, stack_bytes, .. } = resources;
            bail!(
                "for {architecture}: {registers} registers, {spill_bytes} bytes spilled, \
                 {stack_bytes} bytes of stack; {}",
                line.trim()
            );
        }
        Ok((workspace::read(&cubin)?, resources))
    }
}

/// ptxas' flags.
pub(crate) fn flags(architecture: &str) -> [String; 4] {
    [
        format!("-arch={architecture}"),
        "-v".to_owned(),
        "--warn-on-spills".to_owned(),
        "--warn-on-local-memory-usage".to_owned(),
    ]
}

/// Warnings, and the C75xx notes on serialised `wgmma` and ignored `setmaxnreg`.
fn is_refused(line: &str) -> bool {
    line.contains("warning") || line.contains("(C75")
}

fn read_resources(said: &str, architecture: &str) -> Result<Resources> {
    // The number before a phrase, such as `24 bytes stack frame`; absent means none.
    let before = |phrase: &str| -> u32 {
        let at = said.find(phrase);
        let number = at.and_then(|at| said[..at].split_whitespace().next_back());
        number.and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    if !said.contains(" registers") || !said.contains(" bytes stack frame") {
        bail!("it does not say how many registers and how much stack the kernel takes");
    }
    Ok(Resources {
        target: architecture.to_owned(),
        registers: before(" registers"),
        spill_bytes: before(" bytes spill stores") + before(" bytes spill loads"),
        stack_bytes: before(" bytes stack frame"),
        static_shared_bytes: before(" bytes smem"),
        barriers: before(" barriers"),
    })
}

fn installed(folder: &Path) -> Option<PathBuf> {
    let files = workspace::files_under(folder).ok()?;
    files.into_iter().find(|file| file.ends_with("bin/ptxas"))
}

/// Into a virtual environment; where Python has no `venv`, into a plain folder.
fn install(folder: &Path) -> Result<()> {
    create_folder(folder)?;
    let environment = folder.join("venv");
    let made = capture(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let mut pip = if made.status.success() {
        let mut pip = Command::new(environment.join("bin/python"));
        pip.args(["-m", "pip", "install"]);
        pip
    } else {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--target"]).arg(folder.join("packages"));
        pip
    };
    printed(pip.args(["--quiet", "--no-deps", PACKAGE])).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 32 bytes smem
ptxas info    : Compile time = 2.852 ms
";

    #[test]
    fn resources_are_read() {
        let found = read_resources(SAID, "sm_90").expect("all is there");
        let expected = Resources {
            target: "sm_90".to_owned(),
            registers: 168,
            spill_bytes: 12,
            stack_bytes: 16,
            static_shared_bytes: 32,
            barriers: 1,
        };
        assert_eq!(found, expected);
        assert!(read_resources("nothing of use", "sm_90").is_err());
    }

    #[test]
    fn notes_on_performance_are_refused() {
        assert!(SAID.lines().all(|line| !is_refused(line)));
        assert!(is_refused("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async"));
        assert!(is_refused("ptxas warning : Registers are spilled to local memory"));
    }
}
