//! The committed artifacts: against a fresh build, and by themselves.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use ferroflash_core::table::KERNELS;

use super::assemble::Ptxas;
use super::manifest::{Kernel, Manifest, hex_hash, source_hash};
use super::{Built, checks, compressed, decompressed, in_parallel, inspect};
use crate::workspace::{artifacts, create_folder, files_under, read, target};

/// Compares a fresh build with what is committed: byte for byte as far as compiler and assembler
/// are those of the manifest.
pub(super) fn compare(new: &Manifest, built: &[Built], partial: bool) -> Result<()> {
    let old = Manifest::committed()?;
    let same_compiler = old.compiler == new.compiler;
    let same_ptxas = old.ptxas == new.ptxas;
    let mut drift = Vec::new();
    for Built { row, ptx, cubin } in built {
        if same_compiler && !is_committed(&format!("{}.ptx.lzma", row.name), ptx) {
            drift.push(format!("\n  {}.ptx.lzma differs from a fresh build", row.name));
        }
        if same_compiler && same_ptxas && !is_committed(&format!("{}.cubin.lzma", row.name), cubin)
        {
            drift.push(format!("\n  {}.cubin.lzma differs from a fresh build", row.name));
        }
    }
    if same_compiler && same_ptxas {
        if !partial && !is_committed("manifest.json", new.text()?.as_bytes()) {
            drift.push("\n  manifest.json differs from a fresh build".to_owned());
        }
    } else {
        if old.families != new.families {
            drift.push("\n  manifest.json has other flags than build-ptx".to_owned());
        }
        let rustc = old.compiler.rustc.first().map_or("another rustc", String::as_str);
        eprintln!(
            "warning: this compiler or ptxas is not the manifest's ({rustc}; {}):",
            old.ptxas
        );
        eprintln!("warning: kernels were rebuilt and checked; bytes could not be compared");
    }
    if !drift.is_empty() {
        bail!("run `cargo xtask build-ptx` and commit host/artifacts:{}", drift.concat());
    }
    if !(same_compiler && same_ptxas) {
        check_files(&old)?;
    }
    eprintln!("{} kernels: no drift", built.len());
    Ok(())
}

/// Checks the committed artifacts; needs ptxas alone.
pub(crate) fn check_committed() -> Result<()> {
    let manifest = Manifest::committed()?;
    check_files(&manifest)?;
    let ptxas = Ptxas::find()?;
    let same_ptxas = manifest.ptxas == ptxas.version;
    if !same_ptxas {
        eprintln!("warning: ptxas is {}, not the manifest's ({})", ptxas.version, manifest.ptxas);
    }
    let folder = target().join("ptx-build/checked");
    create_folder(&folder)?;
    let specs: Vec<_> = KERNELS.iter().collect();
    let results = in_parallel(&specs, |spec| -> Result<()> {
        let row = manifest.kernel(spec.name).context("the manifest has no row")?;
        let ptx = decompressed(&artifacts().join(format!("{}.ptx.lzma", spec.name)))?;
        let ptx = String::from_utf8(ptx).context("its PTX is not text")?;
        let (mut found, cubin) = inspect(spec, &ptx, &ptxas, &row.source_hash, &folder)?;
        found.ptx_compressed = compressed(ptx.as_bytes())?.len();
        found.cubin_compressed = compressed(&cubin)?.len();
        if !same_ptxas {
            // What ptxas decides is its own; the rest must be as recorded.
            found = Kernel {
                cubin_hash: row.cubin_hash.clone(),
                registers: row.registers,
                cubin_bytes: row.cubin_bytes,
                cubin_compressed: row.cubin_compressed,
                ..found
            };
        }
        if found != *row {
            bail!("its manifest row does not describe its files: {}", differences(row, &found)?);
        }
        Ok(())
    });
    let failed: Vec<String> = KERNELS
        .iter()
        .zip(results)
        .filter_map(|(spec, result)| Some(format!("\n  {}: {:#}", spec.name, result.err()?)))
        .collect();
    if !failed.is_empty() {
        bail!("{} of {} kernels may not ship:{}", failed.len(), KERNELS.len(), failed.concat());
    }
    eprintln!("{} kernels checked", KERNELS.len());
    Ok(())
}

/// Table, manifest and folder name the same kernels; files are those of the manifest; sources are
/// those it was built from.
fn check_files(manifest: &Manifest) -> Result<()> {
    let rows = manifest.kernels.iter().map(|row| row.name.as_str());
    checks::same_names("the manifest", KERNELS.iter().map(|spec| spec.name), rows)?;
    checks::limits(&manifest.kernels)?;

    let mut expected = BTreeSet::from(["manifest.json".to_owned()]);
    for row in &manifest.kernels {
        expected.extend([format!("{}.ptx.lzma", row.name), format!("{}.cubin.lzma", row.name)]);
    }
    for file in files_under(&artifacts())? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !expected.remove(&name) {
            bail!("{} belongs to no kernel of the manifest", file.display());
        }
    }
    if let Some(missing) = expected.first() {
        bail!("host/artifacts lacks {missing}");
    }
    for row in &manifest.kernels {
        let cubin = decompressed(&artifacts().join(format!("{}.cubin.lzma", row.name)))?;
        if hex_hash(&cubin) != row.cubin_hash {
            bail!("{}.cubin.lzma is not the one of the manifest", row.name);
        }
    }
    let sources = source_hash()?;
    if let Some(row) = manifest.kernels.iter().find(|row| row.source_hash != sources) {
        bail!("{} was built from other sources: run `cargo xtask build-ptx`", row.name);
    }
    Ok(())
}

/// The fields in which a row and what was found differ.
fn differences(recorded: &Kernel, found: &Kernel) -> Result<String> {
    let (recorded, found) = (serde_json::to_value(recorded)?, serde_json::to_value(found)?);
    let fields = recorded.as_object().into_iter().flatten();
    let differ = fields.filter(|(name, value)| found[name.as_str()] != **value);
    let said = differ.map(|(name, value)| format!("{name} is {value}, found {}", found[name]));
    Ok(said.collect::<Vec<_>>().join("; "))
}

fn is_committed(name: &str, contents: &[u8]) -> bool {
    read(&artifacts().join(name)).is_ok_and(|committed| committed == contents)
}
