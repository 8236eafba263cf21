//! `cargo xtask minimal-versions`: the published crates build with the least versions of what they
//! depend on that their manifests allow, so that no manifest promises too much.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::{cargo, create_folder, root, run, target};

/// The crates that are published.
const PUBLISHED: [&str; 4] =
    ["ferroflash-core", "ferroflash-ledger", "ferroflash", "ferroflash-cli"];
/// The lock file, which the folder has of its own.
const LOCK: &str = "Cargo.lock";

/// Resolves to the least direct versions and checks the published crates with them: in a folder
/// that shows the same sources, so that the committed lock file is left alone.
pub(crate) fn check() -> Result<()> {
    let folder = target().join("minimal-versions");
    let sources = folder.join("sources");
    show(&root(), &sources)?;
    // The unstable option is cargo's; the compiler is to be the one that users have.
    let resolve = ["update", "--quiet", "-Zdirect-minimal-versions"];
    run(cargo().args(resolve).env("RUSTC_BOOTSTRAP", "1").current_dir(&sources))?;
    let mut command = cargo();
    command.current_dir(&sources).args(["check", "--quiet", "--locked", "--target-dir"]);
    command.arg(folder.join("build"));
    for name in PUBLISHED {
        command.args(["--package", name]);
    }
    run(&mut command)
}

/// Links everything of the workspace but its lock file and its hidden and built files into
/// `folder`.
fn show(root: &Path, folder: &Path) -> Result<()> {
    create_folder(folder)?;
    for entry in fs::read_dir(root).with_context(|| format!("cannot list {}", root.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text == LOCK || text == "target" || text.starts_with('.') {
            continue;
        }
        let link = folder.join(&name);
        if fs::symlink_metadata(&link).is_err() {
            symlink(&entry.path(), &link)
                .with_context(|| format!("cannot link {}", link.display()))?;
        }
    }
    let stale = folder.join(LOCK);
    match fs::remove_file(&stale) {
        Err(why) if why.kind() != std::io::ErrorKind::NotFound => {
            Err(why).with_context(|| format!("cannot remove {}", stale.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn symlink(from: &Path, to: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(from, to)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::Error::other("links of folders are known on Unix alone"))
}
