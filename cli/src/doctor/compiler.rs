//! What `cargo xtask build-ptx` would take: looked for where it looks, and not run.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

/// The compilers that are here.
#[derive(Serialize)]
pub(crate) struct Found {
    pub(crate) compiler: Tool,
    pub(crate) ptxas: Tool,
}

/// A program that was found, or what would be done without it.
#[derive(Serialize)]
pub(crate) struct Tool {
    found: bool,
    says: String,
}

impl Tool {
    /// In words.
    pub(crate) fn words(&self) -> &str {
        &self.says
    }

    fn found(origin: &str, version: &str) -> Self {
        Self { found: true, says: format!("{version} ({origin})") }
    }

    fn missing(says: &str) -> Self {
        Self { found: false, says: says.to_owned() }
    }
}

impl Found {
    /// Looks for both. Only changing the kernels takes them.
    pub(crate) fn look() -> Self {
        Self { compiler: compiler(), ptxas: ptxas() }
    }
}

/// A rustc 1.95 or later whose sysroot has core's source.
fn compiler() -> Tool {
    const SETTING: &str = "FERROFLASH_PTX_RUSTC";
    if let Some(setting) = std::env::var_os(SETTING) {
        return match with_source(Path::new(&setting)) {
            Some(version) => Tool::found(SETTING, &version),
            None => Tool::missing("FERROFLASH_PTX_RUSTC names no rustc that has core's source"),
        };
    }
    let debian = PathBuf::from("/usr/bin/rustc");
    let candidates = nightlies().into_iter().chain([(debian, "the system's rustc".to_owned())]);
    for (rustc, origin) in candidates {
        if let Some(version) = with_source(&rustc) {
            return Tool::found(&origin, &version);
        }
    }
    Tool::missing(
        "no rustc here has core's source, and only changing kernels takes one: \
         a rustup nightly with rust-src, or Debian's rustc-web and rust-web-src",
    )
}

/// ptxas by setting or on PATH.
fn ptxas() -> Tool {
    const SETTING: &str = "FERROFLASH_PTXAS";
    let (program, origin) = match std::env::var_os(SETTING) {
        Some(setting) => (PathBuf::from(setting), SETTING),
        None => (PathBuf::from("ptxas"), "PATH"),
    };
    let said = printed(Command::new(program).arg("--version"));
    match said.as_deref().and_then(|said| said.lines().find(|line| line.contains("release"))) {
        Some(version) => Tool::found(origin, version.trim()),
        None => Tool::missing("none on PATH: build-ptx would install it from PyPI under target/"),
    }
}

/// The version of a rustc that could compile the kernels.
fn with_source(rustc: &Path) -> Option<String> {
    let version = printed(Command::new(rustc).arg("-V"))?;
    let release = version.split_whitespace().nth(1)?;
    let mut numbers = release.split('.').map_while(|part| part.parse::<u32>().ok());
    if (numbers.next()?, numbers.next()?) < (1, 95) {
        return None;
    }
    let sysroot = PathBuf::from(printed(Command::new(rustc).args(["--print", "sysroot"]))?);
    let source = sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml");
    source.is_file().then_some(version)
}

fn nightlies() -> Vec<(PathBuf, String)> {
    let listed = printed(Command::new("rustup").args(["toolchain", "list"])).unwrap_or_default();
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    names
        .filter(|name| name.starts_with("nightly"))
        .filter_map(|name| {
            let mut which = Command::new("rustup");
            let rustc = printed(which.args(["which", "--toolchain", name, "rustc"]))?;
            Some((PathBuf::from(rustc), format!("rustup's {name}")))
        })
        .collect()
}

/// What a program prints, if it runs and succeeds.
fn printed(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
