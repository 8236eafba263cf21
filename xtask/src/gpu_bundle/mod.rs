//! `cargo xtask gpu-bundle`: everything a GPU run needs, in one folder, for a machine with a GPU
//! and no Rust. The library holds the kernels, so the programs are all there is to carry.

mod pack;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::test::packages;
use crate::workspace::{
    artifacts, cargo, create_folder, files_under, root, spelled, target, write,
};

const RUN_SH: &str = include_str!("run.sh");
/// Most bytes that the bundle may take.
const MOST_BYTES: u64 = 20_000_000;
/// Release, without what only a debugger reads; a profile of its own leaves target/release alone.
const PROFILE: [&str; 8] = [
    "--config",
    "profile.bundle.inherits='release'",
    "--config",
    "profile.bundle.debug=false",
    "--config",
    "profile.bundle.strip='symbols'",
    "--profile",
    "bundle",
];

/// A line of cargo's `--message-format=json`.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds the bundle anew.
pub(crate) fn run() -> Result<()> {
    let folder = target().join("gpu-bundle");
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let packages = packages()?;
    let has = |name: &str| packages.iter().any(|package| package == name);
    for needed in ["ferroflash-tests", "ferroflash-cli"] {
        if !has(needed) {
            bail!("the workspace has no package {needed}, and the bundle needs it");
        }
    }
    gather_tests(&folder)?;
    gather_command(&folder)?;
    if has("ferroflash-python") {
        gather_python(&folder)?;
    } else {
        eprintln!(
            "note: the workspace has no ferroflash-python; `bench` and `python` will be skipped"
        );
    }
    let programs: Vec<PathBuf> = files_under(&folder)?
        .into_iter()
        .filter(|file| file.starts_with(folder.join("bin")) || is_library(file))
        .collect();
    pack::pack(&folder, &programs)?;
    let evidence = root().join("fixtures").join("evidence");
    copy_folder(&root().join("fixtures"), &folder.join("fixtures"), &|file| {
        !file.starts_with(&evidence)
    })?;
    let peers = root().join("tests").join("peers");
    if peers.is_dir() {
        let python = |file: &Path| file.extension() == Some(OsStr::new("py"));
        copy_folder(&peers, &folder.join("peers"), &python)?;
    }
    copy(&artifacts().join("manifest.json"), &folder.join("manifest.json"))?;
    write(&folder.join("run.sh"), RUN_SH.as_bytes())?;
    make_executable(&folder.join("run.sh"))?;

    let mut bytes = 0;
    for file in files_under(&folder)? {
        bytes += fs::metadata(&file).with_context(|| file.display().to_string())?.len();
    }
    if bytes > MOST_BYTES {
        bail!("{} takes {bytes} bytes; at most {MOST_BYTES} may be carried", folder.display());
    }
    eprintln!("{}: {:.1} MB", folder.display(), bytes as f64 / 1e6);
    Ok(())
}

/// The test programs named `gpu…`.
fn gather_tests(folder: &Path) -> Result<()> {
    let messages = build(&["test", "--no-run", "--package", "ferroflash-tests"])?;
    let mut found = 0;
    for message in messages {
        let (Some(target), Some(program)) = (message.target, message.executable) else { continue };
        if target.name.starts_with("gpu") && target.kind.iter().any(|kind| kind == "test") {
            copy(&program, &folder.join("bin").join(&target.name))?;
            found += 1;
        }
    }
    if found == 0 {
        bail!("ferroflash-tests has no test program whose name begins with `gpu`");
    }
    Ok(())
}

fn gather_command(folder: &Path) -> Result<()> {
    let messages = build(&["build", "--package", "ferroflash-cli"])?;
    let program = messages
        .into_iter()
        .filter(|message| message.target.as_ref().is_some_and(|t| t.name == "ferroflash"))
        .find_map(|message| message.executable)
        .context("ferroflash-cli has no program named ferroflash")?;
    copy(&program, &folder.join("bin").join("ferroflash"))
}

/// The extension, beside the package's Python files where there are any, and their tests.
fn gather_python(folder: &Path) -> Result<()> {
    let messages = build(&["build", "--package", "ferroflash-python"])?;
    let (name, library) = messages
        .into_iter()
        .filter_map(|message| {
            let target = message.target?;
            target.kind.iter().any(|kind| kind == "cdylib").then_some(())?;
            Some((target.name, message.filenames.into_iter().find(|file| is_library(file))?))
        })
        .next_back()
        .context("ferroflash-python builds no extension module (crate-type cdylib)")?;
    let module = format!("{name}.abi3.so");
    for place in ["python/python/ferroflash", "python/ferroflash"] {
        let package = root().join(place);
        if package.join("__init__.py").is_file() {
            let destination = folder.join("python").join("ferroflash");
            let source = |file: &Path| {
                matches!(file.extension().and_then(OsStr::to_str), Some("py" | "pyi" | "typed"))
            };
            copy_folder(&package, &destination, &source)?;
            let tests = root().join("python").join("tests");
            copy_folder(&tests, &folder.join("python-tests"), &source)?;
            return copy(&library, &destination.join(module));
        }
    }
    copy(&library, &folder.join("python").join(module))
}

fn is_library(file: &Path) -> bool {
    file.extension() == Some(OsStr::new("so"))
}

/// Runs cargo with the bundle's profile; returns what it made.
fn build(arguments: &[&str]) -> Result<Vec<Message>> {
    let mut command = cargo();
    command.args(arguments).args(PROFILE).arg("--message-format=json-render-diagnostics");
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("`{}` did not start", spelled(&command)))?;
    if !output.status.success() {
        bail!("`{}` ended with {}", spelled(&command), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    Ok(messages.filter(|message| message.reason == "compiler-artifact").collect())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        create_folder(folder)?;
    }
    // `fs::copy` keeps the permissions, so that a program stays one.
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn copy_folder(from: &Path, to: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
    for file in files_under(from)?.into_iter().filter(|file| wanted(file)) {
        let inside = file.strip_prefix(from).unwrap_or(&file);
        copy(&file, &to.join(inside))?;
    }
    Ok(())
}

#[cfg(unix)]
fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", file.display()))
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}
