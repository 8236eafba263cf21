//! Programs that hold the same kernels, packed as one stream: what they share is stored once.
//!
//! The stream is LZMA, which `xz` and Python read; beside it lies a list, a line a file: its first
//! byte in the stream, its bytes, its path in the bundle.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lzma_rust2::{LzmaOptions, LzmaWriter};

use crate::workspace::{read, write};

/// The stream's name, and its list's.
pub(super) const STREAM: &str = "programs.lzma";
pub(super) const LIST: &str = "programs.list";
/// More than the programs take together, so that the last can refer to the first.
const DICTIONARY_BYTES: u32 = 128 << 20;

/// Puts `files` of `folder` into the stream and removes them.
pub(super) fn pack(folder: &Path, files: &[PathBuf]) -> Result<()> {
    let mut contents = Vec::new();
    let mut list = String::new();
    for file in files {
        let bytes = read(file)?;
        let inside = file.strip_prefix(folder).unwrap_or(file);
        list += &format!("{} {} {}\n", contents.len(), bytes.len(), inside.display());
        contents.extend(bytes);
    }
    let options = LzmaOptions { dict_size: DICTIONARY_BYTES, ..LzmaOptions::with_preset(6) };
    let size = Some(contents.len() as u64);
    let mut packed = LzmaWriter::new_use_header(Vec::new(), &options, size)?;
    packed.write_all(&contents)?;
    write(&folder.join(STREAM), &packed.finish()?)?;
    write(&folder.join(LIST), list.as_bytes())?;
    for file in files {
        fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Bytes that do not compress by themselves.
    fn noise(length: usize, mut state: u32) -> Vec<u8> {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        };
        (0..length).map(|_| next()).collect()
    }

    #[cfg(unix)]
    #[test]
    fn what_programs_share_is_stored_once_and_run_sh_unpacks_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("ferroflash-bundle-{}", std::process::id()));
        let shared = noise(300_000, 7);
        let programs = [("bin/gpu", 1), ("bin/ferroflash", 2), ("python/ferroflash/x.so", 3)];
        let contents = |seed: u32| [noise(1000, seed), shared.clone(), noise(500, seed)].concat();
        let mut files = Vec::new();
        for (name, seed) in programs {
            write(&folder.join(name), &contents(seed)).expect("a file of the test");
            files.push(folder.join(name));
        }
        pack(&folder, &files).expect("they are packed");
        let size = fs::metadata(folder.join(STREAM)).expect("it is there").len();
        assert!(size < 320_000, "{size} bytes");
        assert!(files.iter().all(|file| !file.exists()));

        write(&folder.join("run.sh"), super::super::RUN_SH.as_bytes()).expect("the script");
        let status = Command::new("bash")
            .arg(folder.join("run.sh"))
            .args(["unpack", "--budget", "60"])
            .env("OUT", folder.join("out"))
            .status()
            .expect("bash is here");
        assert!(status.success(), "{status}");
        for (name, seed) in programs {
            let file = folder.join(name);
            assert!(read(&file).expect("it is unpacked") == contents(seed), "{name}");
            let mode = fs::metadata(&file).expect("it is there").permissions().mode();
            assert_eq!(mode & 0o111, 0o111, "{name} can be run");
        }
        fs::remove_dir_all(&folder).expect("the test's folder");
    }
}
