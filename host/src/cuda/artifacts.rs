//! The compiled kernels, embedded: PTX for every device, machine code for the one it was made for.

use std::collections::HashMap;
use std::io::Read;
use std::sync::OnceLock;

use ferroflash_core::kernel_table;
use lzma_rust2::LzmaReader;
use serde::Deserialize;

/// In which form a kernel is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Machine code: loads at once, on its own architecture only.
    Cubin,
    /// PTX: compiled by the driver.
    Ptx,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Form::Cubin => "cubin",
            Form::Ptx => "ptx",
        })
    }
}

struct Artifact {
    name: &'static str,
    ptx: &'static [u8],
    cubin: &'static [u8],
}

macro_rules! artifacts {
    (
        $($name:ident = $family:ident
            $direction:ident<$tiling:ident, $element:ident, $mask:ident>;)*
    ) => {
        const ARTIFACTS: &[Artifact] = &[$(Artifact {
            name: stringify!($name),
            ptx: include_bytes!(concat!("../../artifacts/", stringify!($name), ".ptx.lzma")),
            cubin: include_bytes!(concat!("../../artifacts/", stringify!($name), ".cubin.lzma")),
        }),*];
    };
}
kernel_table!(artifacts);

/// The image of kernel `name`, as `cuModuleLoadData` takes it.
pub(crate) fn image(name: &str, form: Form) -> Option<Vec<u8>> {
    let artifact = ARTIFACTS.iter().find(|artifact| artifact.name == name)?;
    let packed = match form {
        Form::Cubin => artifact.cubin,
        Form::Ptx => artifact.ptx,
    };
    let mut image = Vec::new();
    LzmaReader::new_mem_limit(packed, u32::MAX, None).ok()?.read_to_end(&mut image).ok()?;
    if form == Form::Ptx {
        image.push(0);
    }
    Some(image)
}

/// What the build recorded of a kernel.
#[derive(Clone, Debug, Deserialize)]
pub struct Record {
    /// Name of the kernel.
    pub name: String,
    /// SHA-256 of its normalised body.
    pub body_hash: String,
    /// Registers of a thread.
    pub registers: u32,
}

#[derive(Deserialize)]
struct Manifest {
    compiler: Compiler,
    ptxas: String,
    kernels: Vec<Record>,
}

#[derive(Deserialize)]
struct Compiler {
    rustc: Vec<String>,
}

fn manifest() -> Option<&'static (String, HashMap<String, Record>)> {
    static MANIFEST: OnceLock<Option<(String, HashMap<String, Record>)>> = OnceLock::new();
    MANIFEST
        .get_or_init(|| {
            let text = include_str!("../../artifacts/manifest.json");
            let manifest: Manifest = serde_json::from_str(text).ok()?;
            let rustc = manifest.compiler.rustc.first().cloned().unwrap_or_default();
            let made_by = format!("{rustc}; ptxas: {}", manifest.ptxas);
            let records = manifest.kernels.into_iter().map(|r| (r.name.clone(), r)).collect();
            Some((made_by, records))
        })
        .as_ref()
}

/// The build's record of kernel `name`.
pub fn record(name: &str) -> Option<&'static Record> {
    manifest()?.1.get(name)
}

/// The compilers that made the artifacts, in words.
pub fn made_by() -> &'static str {
    manifest().map_or("unknown", |(made_by, _)| made_by)
}

/// Kernels embedded, and the bytes they take together.
pub fn totals() -> (usize, usize) {
    (ARTIFACTS.len(), ARTIFACTS.iter().map(|a| a.ptx.len() + a.cubin.len()).sum())
}
