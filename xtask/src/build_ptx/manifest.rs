//! `host/artifacts/manifest.json`: what was built, from what, by what.

use std::path::Path;

use anyhow::{Context, Result, bail};
use ferroflash_core::table::KERNELS;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::checks::Instructions;
use crate::workspace::{artifacts, files_under, read, read_text, root};

/// The schema this program reads and writes.
pub(crate) const SCHEMA: &str = "ferroflash.artifacts.v1";

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// [`SCHEMA`].
    pub(crate) schema: String,
    /// The compiler.
    pub(crate) compiler: CompilerRecord,
    /// ptxas' release and build.
    pub(crate) ptxas: String,
    /// One a family.
    pub(crate) families: Vec<FamilyRecord>,
    /// One a kernel, in the order of the table.
    pub(crate) kernels: Vec<Kernel>,
}

/// The compiler that wrote the PTX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CompilerRecord {
    /// All that `rustc -vV` says, a line each.
    pub(crate) rustc: Vec<String>,
    /// LLVM's version.
    pub(crate) llvm: String,
}

/// How a family is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FamilyRecord {
    /// Its name.
    pub(crate) family: String,
    /// rustc's flags; the remapping of the workspace's path is left out.
    pub(crate) rustflags: Vec<String>,
    /// ptxas' flags.
    pub(crate) ptxas_flags: Vec<String>,
}

/// One kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    /// Name of the entry point and of the two files.
    pub(crate) name: String,
    /// Family.
    pub(crate) family: String,
    /// `.target` of the PTX.
    pub(crate) ptx_target: String,
    /// `.version` of the PTX.
    pub(crate) ptx_version: String,
    /// Architecture of the cubin.
    pub(crate) cubin_target: String,
    /// SHA-256 of the entry's text, patched and one-spaced: it changes only when the kernel does.
    pub(crate) body_hash: String,
    /// SHA-256 of the sources it was built from.
    pub(crate) source_hash: String,
    /// SHA-256 of the cubin.
    pub(crate) cubin_hash: String,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Blocks a multiprocessor should hold.
    pub(crate) blocks_per_sm: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    /// Registers of a thread, in the cubin.
    pub(crate) registers: u32,
    /// Bytes of spill stores and loads, in the cubin.
    pub(crate) spill_bytes: u32,
    /// Bytes of a thread's stack frame, in the cubin.
    pub(crate) stack_bytes: u32,
    /// Instructions of the PTX.
    pub(crate) instructions: Instructions,
    /// Bytes of the PTX.
    pub(crate) ptx_bytes: usize,
    /// Bytes of the PTX as shipped.
    pub(crate) ptx_compressed: usize,
    /// Bytes of the cubin.
    pub(crate) cubin_bytes: usize,
    /// Bytes of the cubin as shipped.
    pub(crate) cubin_compressed: usize,
}

impl Manifest {
    /// The committed manifest.
    pub(crate) fn committed() -> Result<Self> {
        let path = artifacts().join("manifest.json");
        let text = read_text(&path).context("run `cargo xtask build-ptx`")?;
        let manifest: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} does not read as {SCHEMA}", path.display()))?;
        if manifest.schema != SCHEMA {
            bail!("{} is {}, and this program reads {SCHEMA}", path.display(), manifest.schema);
        }
        Ok(manifest)
    }

    /// The text to commit.
    pub(crate) fn text(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The row of a kernel.
    pub(crate) fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Puts rows in the place of those of the same name, drops those that left the table, and
    /// keeps the table's order.
    pub(crate) fn merge(&mut self, rows: Vec<Kernel>) {
        self.kernels.retain(|old| rows.iter().all(|row| row.name != old.name));
        self.kernels.extend(rows);
        let place = |name: &str| KERNELS.iter().position(|spec| spec.name == name);
        self.kernels.retain(|kernel| place(&kernel.name).is_some());
        self.kernels.sort_by_key(|kernel| place(&kernel.name));
    }
}

/// SHA-256 as hexadecimal digits.
pub(crate) fn hex_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 over every source file of the two crates that kernels are compiled from.
pub(crate) fn source_hash() -> Result<String> {
    let root = root();
    let mut hash = Sha256::new();
    for folder in ["kernels-core/src", "kernels-gpu/src"] {
        for file in files_under(&root.join(folder))? {
            let contents = read(&file)?;
            hash.update(relative(&file, &root).as_bytes());
            hash.update([0]);
            hash.update((contents.len() as u64).to_le_bytes());
            hash.update(&contents);
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn relative(file: &Path, root: &Path) -> String {
    let path = file.strip_prefix(root).unwrap_or(file);
    path.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_hexadecimal() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hex_hash(b""), empty);
    }
}
