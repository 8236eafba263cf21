//! Kernels in Rust → PTX and machine code that the library embeds.
//!
//! For each unit of a family: compile its kernels as one module ([`compiler`]), take it apart
//! and patch each kernel from the table ([`ptx_text`]), assemble it ([`assemble`]), check it
//! ([`checks`]), and write the compressed files and their manifest ([`manifest`]).

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use ferroflash_core::axes::Family;
use ferroflash_core::table::{KERNELS, KernelSpec};
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};

use crate::workspace::{self, artifacts, create_folder, read, target};
use assemble::{Ptxas, flags};
use compiler::{Compiler, rustflags};
use manifest::{CompilerRecord, FamilyRecord, Kernel, Manifest, SCHEMA, hex_hash, source_hash};
use ptx_text::{Entry, Module, one_spaced};

mod assemble;
mod checks;
mod compiler;
pub(crate) mod manifest;
mod ptx_text;
mod verify;

pub(crate) use verify::check_committed;

/// What `build-ptx` was asked for.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Rebuild, compare with the committed artifacts, write nothing
    #[arg(long)]
    pub(crate) check: bool,
    /// Only the kernels whose names contain this
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// Keep each kernel's PTX and cubin, uncompressed, in target/ptx
    #[arg(long)]
    pub(crate) keep: bool,
}

/// A kernel as it ships.
pub(crate) struct Built {
    row: Kernel,
    ptx: Vec<u8>,
    cubin: Vec<u8>,
}

/// Runs `build-ptx`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let compiler = Compiler::find()?;
    let ptxas = Ptxas::find()?;
    eprintln!("rustc: {} ({})", first_line(&compiler.version), compiler.origin);
    eprintln!("ptxas: {}", ptxas.version);

    let wanted = |spec: &&KernelSpec| {
        options.kernel.as_ref().is_none_or(|part| spec.name.contains(part.as_str()))
    };
    let specs: Vec<&KernelSpec> = KERNELS.iter().filter(wanted).collect();
    if specs.is_empty() {
        bail!("no kernel's name contains `{}`", options.kernel.as_deref().unwrap_or_default());
    }
    let modules = in_parallel(&units(&specs), |&(family, unit)| -> Result<(&str, Module)> {
        eprintln!("compiling {unit} for {}", family.ptx_target());
        let module = Module::parse(&compiler.compile(family, unit)?)?;
        let of_unit = KERNELS.iter().filter(|spec| spec.unit() == unit);
        checks::same_names(
            "the compiled module",
            of_unit.map(|spec| spec.name),
            module.entries.iter().map(|entry| entry.name.as_str()),
        )?;
        Ok((unit, module))
    });
    let modules = modules.into_iter().collect::<Result<Vec<_>>>()?;
    let built = build_kernels(&modules, &specs, &ptxas, options.keep)?;

    let new = new_manifest(&compiler, &ptxas, &built, options.kernel.is_some())?;
    checks::limits(&new.kernels)?;
    if options.check {
        return verify::compare(&new, &built, options.kernel.is_some());
    }
    for Built { row, ptx, cubin } in &built {
        workspace::write(&artifacts().join(format!("{}.ptx.lzma", row.name)), ptx)?;
        workspace::write(&artifacts().join(format!("{}.cubin.lzma", row.name)), cubin)?;
    }
    remove_strangers(&new)?;
    workspace::write(&artifacts().join("manifest.json"), new.text()?.as_bytes())?;
    let bytes: usize = new.kernels.iter().map(|k| k.ptx_compressed + k.cubin_compressed).sum();
    eprintln!("wrote {} kernels; {} in all, {} KB", built.len(), new.kernels.len(), bytes / 1000);
    Ok(())
}

/// The units of some kernels, each with its family, in the table's order.
fn units(specs: &[&KernelSpec]) -> Vec<(Family, &'static str)> {
    let mut units = Vec::new();
    for spec in specs {
        let unit = (spec.family, spec.unit());
        if !units.contains(&unit) {
            units.push(unit);
        }
    }
    units
}

/// The manifest after this build: of one with a `--kernel`, the other rows stay.
fn new_manifest(
    compiler: &Compiler,
    ptxas: &Ptxas,
    built: &[Built],
    partial: bool,
) -> Result<Manifest> {
    let mut families_of_table = Vec::new();
    for family in [Family::Portable, Family::Hopper] {
        families_of_table.push(FamilyRecord {
            family: family.name().to_owned(),
            rustflags: rustflags(family)?,
            ptxas_flags: flags(family.cubin_target()).to_vec(),
        });
    }
    let old = if partial { Manifest::committed().ok() } else { None };
    let mut new = Manifest {
        schema: SCHEMA.to_owned(),
        compiler: CompilerRecord {
            rustc: compiler.version.lines().map(str::to_owned).collect(),
            llvm: compiler.llvm().to_owned(),
        },
        ptxas: ptxas.version.clone(),
        families: families_of_table,
        kernels: Vec::new(),
    };
    if let Some(old) = old {
        if old.compiler != new.compiler || old.ptxas != new.ptxas {
            bail!(
                "the other kernels were built by another compiler or ptxas ({}; {}): build all",
                old.compiler.rustc.first().map_or("unknown", String::as_str),
                old.ptxas
            );
        }
        new.kernels = old.kernels;
    }
    new.merge(built.iter().map(|built| built.row.clone()).collect());
    Ok(new)
}

/// Patches, assembles and checks some kernels of the compiled units, on every core.
fn build_kernels(
    modules: &[(&str, Module)],
    specs: &[&KernelSpec],
    ptxas: &Ptxas,
    keep: bool,
) -> Result<Vec<Built>> {
    let folder = target().join(if keep { "ptx" } else { "ptx-build/assembled" });
    create_folder(&folder)?;
    let sources = source_hash()?;
    let results = in_parallel(specs, |spec| {
        let of_unit = modules.iter().find(|(unit, _)| *unit == spec.unit());
        let (_, module) = of_unit.context("its unit was not compiled")?;
        build_kernel(module, spec, ptxas, &sources, &folder).with_context(|| spec.name.to_owned())
    });
    if keep {
        eprintln!("kept in {}", folder.display());
    }
    let (mut built, mut failed) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(kernel) => built.push(kernel),
            Err(why) => failed.push(format!("\n  {why:#}")),
        }
    }
    if !failed.is_empty() {
        bail!("{} of {} kernels may not ship:{}", failed.len(), specs.len(), failed.concat());
    }
    Ok(built)
}

fn build_kernel(
    module: &Module,
    spec: &KernelSpec,
    ptxas: &Ptxas,
    sources: &str,
    folder: &Path,
) -> Result<Built> {
    let entry = module.entries.iter().find(|entry| entry.name == spec.name);
    let mut entry = entry.ok_or_else(|| anyhow!("the module has no such entry"))?.clone();
    entry.set_launch_bounds(spec.threads, spec.blocks_per_sm)?;
    if let Some(bytes) = parameter_alignment(spec) {
        entry.set_parameter_alignment(bytes)?;
    }
    let ptx = module.standalone(&entry);
    let (row, cubin) = inspect(spec, &ptx, ptxas, sources, folder)?;
    let ptx = compressed(ptx.as_bytes())?;
    let cubin = compressed(&cubin)?;
    let row = Kernel { ptx_compressed: ptx.len(), cubin_compressed: cubin.len(), ..row };
    Ok(Built { row, ptx, cubin })
}

/// Alignment of a kernel's parameters, where it is not rustc's: descriptors of the tensor memory
/// accelerator need 64 bytes.
const fn parameter_alignment(spec: &KernelSpec) -> Option<u32> {
    match spec.parameter_alignment() {
        8 => None,
        bytes => Some(bytes),
    }
}

/// Checks one patched kernel and assembles it: for its cubin, and for the lowest architecture
/// that a driver may compile its PTX for.
fn inspect(
    spec: &KernelSpec,
    ptx: &str,
    ptxas: &Ptxas,
    sources: &str,
    folder: &Path,
) -> Result<(Kernel, Vec<u8>)> {
    let module = Module::parse(ptx)?;
    let names = module.entries.iter().map(|entry| entry.name.as_str());
    checks::same_names("its PTX", [spec.name].into_iter(), names)?;
    let entry: &Entry = &module.entries[0];
    checks::patches(spec, parameter_alignment(spec), ptx)?;
    if module.target != spec.family.ptx_target() {
        bail!("its PTX is for {}, not {}", module.target, spec.family.ptx_target());
    }
    let instructions = checks::body(entry)?;
    checks::counts(spec, &instructions)?;
    let (cubin_target, ptx_target) = (spec.family.cubin_target(), spec.family.ptx_target());
    let (cubin, found) = ptxas.assemble(spec.name, ptx, cubin_target, folder)?;
    checks::resources(&found)?;
    if cubin_target != ptx_target {
        checks::resources(&ptxas.assemble(spec.name, ptx, ptx_target, folder)?.1)?;
    }
    let row = Kernel {
        name: spec.name.to_owned(),
        family: spec.family.name().to_owned(),
        ptx_target: module.target.clone(),
        ptx_version: module.version.clone(),
        cubin_target: cubin_target.to_owned(),
        body_hash: hex_hash(one_spaced(&entry.text()).as_bytes()),
        source_hash: sources.to_owned(),
        cubin_hash: hex_hash(&cubin),
        threads: spec.threads,
        blocks_per_sm: spec.blocks_per_sm,
        shared_bytes: spec.shared_bytes,
        registers: found.registers,
        spill_bytes: found.spill_bytes,
        stack_bytes: found.stack_bytes,
        instructions,
        ptx_bytes: ptx.len(),
        ptx_compressed: 0,
        cubin_bytes: cubin.len(),
        cubin_compressed: 0,
    };
    Ok((row, cubin))
}

/// Calls `work` for every item on every core; results in the items' order.
fn in_parallel<I: Sync, O: Send>(items: &[I], work: impl Fn(&I) -> O + Sync) -> Vec<O> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { break };
                    let result = work(item);
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// LZMA at its best level: the same bytes on every machine.
fn compressed(bytes: &[u8]) -> Result<Vec<u8>> {
    // No artifact is larger than the dictionary.
    let options = LzmaOptions { dict_size: 1 << 20, ..LzmaOptions::with_preset(9) };
    let mut packed = LzmaWriter::new_use_header(Vec::new(), &options, Some(bytes.len() as u64))?;
    packed.write_all(bytes)?;
    Ok(packed.finish()?)
}

fn decompressed(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    LzmaReader::new_mem_limit(read(path)?.as_slice(), u32::MAX, None)
        .and_then(|mut packed| packed.read_to_end(&mut bytes))
        .with_context(|| format!("{} does not decompress", path.display()))?;
    Ok(bytes)
}

/// Deletes artifacts of kernels that left the table.
fn remove_strangers(manifest: &Manifest) -> Result<()> {
    for file in workspace::files_under(&artifacts())? {
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let stem = name.strip_suffix(".ptx.lzma").or_else(|| name.strip_suffix(".cubin.lzma"));
        if stem.is_some_and(|stem| manifest.kernel(stem).is_none()) {
            std::fs::remove_file(&file)
                .with_context(|| format!("cannot delete {}", file.display()))?;
            eprintln!("deleted {name}: it is not in the table");
        }
    }
    Ok(())
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
