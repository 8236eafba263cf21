//! Writing files whole or not at all: to a temporary file beside the target, then renamed.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use ferroflash::Dtype;
use npyz::WriterBuilder;
use tempfile::NamedTempFile;

use super::{Stored, bytes_of, has_extension};
use crate::failure::{Failure, Result};

/// A tensor to write.
pub(crate) struct Written {
    name: &'static str,
    dtype: Dtype,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl Written {
    /// A contiguous tensor.
    pub(crate) fn new<T: Stored>(name: &'static str, dims: &[usize], elements: &[T]) -> Self {
        Self { name, dtype: T::DTYPE, dims: dims.to_vec(), bytes: bytes_of(elements) }
    }
}

impl safetensors::View for &Written {
    fn dtype(&self) -> safetensors::Dtype {
        match self.dtype {
            Dtype::Bf16 => safetensors::Dtype::BF16,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::F32 => safetensors::Dtype::F32,
        }
    }
    fn shape(&self) -> &[usize] {
        &self.dims
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Where results go, checked before any work is done.
#[derive(Debug)]
pub(crate) struct Destination {
    /// One file for all tensors, or one for each.
    files: Vec<PathBuf>,
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Safetensors,
    Npy,
}

impl Destination {
    /// Of the tensors `names`, at `--out path`: one `.safetensors` of all, or one `.npy` each, the
    /// first at `path` itself and others at `STEM.NAME.npy`.
    ///
    /// No file may be one of `inputs`, and each must be possible to create.
    pub(crate) fn new(path: &Path, names: &[&str], dtype: Dtype, inputs: &[&Path]) -> Result<Self> {
        let (files, format) = if has_extension(path, "safetensors") {
            (vec![path.to_path_buf()], Format::Safetensors)
        } else if has_extension(path, "npy") {
            if dtype == Dtype::Bf16 {
                let had = format!("{} cannot hold bf16", path.display());
                return Err(Failure::needs("--out", had, "a .safetensors"));
            }
            (names.iter().enumerate().map(|each| npy_file(path, each)).collect(), Format::Npy)
        } else {
            let needs = "a .safetensors or a .npy";
            return Err(Failure::needs("--out", path.display(), needs));
        };
        for file in &files {
            check(file, inputs)?;
        }
        Ok(Self { files, format })
    }

    /// Writes the tensors, those that were named and in that order; gives the files.
    pub(crate) fn write(&self, tensors: &[Written]) -> Result<&[PathBuf]> {
        let contents = match self.format {
            Format::Safetensors => {
                let views = tensors.iter().map(|tensor| (tensor.name, tensor));
                let image = safetensors::serialize(views, None);
                vec![image.map_err(|error| Failure::Run(format!("--out: {error}")))?]
            }
            Format::Npy => tensors.iter().map(npy).collect::<Result<_>>()?,
        };
        let mut finished = Vec::with_capacity(contents.len());
        for (file, content) in self.files.iter().zip(&contents) {
            let failed = |error: std::io::Error| unwritable(file, &error, Failure::Run);
            let mut temporary = beside(file).map_err(failed)?;
            temporary.write_all(content).map_err(failed)?;
            temporary.as_file().sync_all().map_err(failed)?;
            finished.push((temporary, file));
        }
        for (temporary, file) in finished {
            temporary.persist(file).map_err(|e| unwritable(file, &e.error, Failure::Run))?;
        }
        Ok(&self.files)
    }
}

/// Writes text to the file that `argument` names, whole or not at all.
pub(crate) fn write_text(argument: &str, file: &Path, text: &str) -> Result<()> {
    let failed = |error: &std::io::Error| {
        Failure::input(argument, format!("{} cannot be written: {error}", file.display()))
    };
    let mut temporary = beside(file).map_err(|error| failed(&error))?;
    temporary.write_all(text.as_bytes()).map_err(|error| failed(&error))?;
    temporary.persist(file).map_err(|error| failed(&error.error))?;
    Ok(())
}

/// The `.npy` of the tensor at `index`: `o.npy`, then `o.lse.npy`.
fn npy_file(path: &Path, (index, name): (usize, &&str)) -> PathBuf {
    if index == 0 {
        return path.to_path_buf();
    }
    let mut file = path.file_stem().map(OsString::from).unwrap_or_default();
    file.push(format!(".{name}.npy"));
    path.with_file_name(file)
}

/// The image of a `.npy`.
fn npy(tensor: &Written) -> Result<Vec<u8>> {
    let failed = |error: &dyn std::fmt::Display| Failure::Run(format!("--out: {error}"));
    let descriptor = match tensor.dtype {
        Dtype::F16 => "<f2",
        Dtype::F32 => "<f4",
        Dtype::Bf16 => return Err(failed(&".npy cannot hold bf16")),
    };
    let dims: Vec<u64> = tensor.dims.iter().map(|&dim| dim as u64).collect();
    let mut image = Vec::with_capacity(tensor.bytes.len() + 128);
    npyz::WriteOptions::new_header_only()
        .dtype(npyz::DType::new_scalar(descriptor.parse().map_err(|error| failed(&error))?))
        .shape(&dims)
        .writer(&mut image)
        .write_header_only()
        .map_err(|error| failed(&error))?;
    image.extend(&tensor.bytes);
    Ok(image)
}

/// Whether `file` can be created or replaced, and is none of the inputs.
fn check(file: &Path, inputs: &[&Path]) -> Result<()> {
    if let Ok(metadata) = file.metadata()
        && !metadata.is_file()
    {
        let had = format!("{} is not a regular file", file.display());
        return Err(Failure::needs("--out", had, "one, or none yet"));
    }
    if let Ok(own) = file.canonicalize()
        && inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == own))
    {
        let had = format!("{} is also an input", file.display());
        return Err(Failure::needs("--out", had, "another file"));
    }
    // Created and deleted at once: a long computation should not end in a refusal.
    beside(file).map(drop).map_err(|error| unwritable(file, &error, Failure::Input))
}

/// Whether `file` can be put where it is to go: a long measurement should not end in a refusal.
pub(crate) fn check_writable(argument: &str, file: &Path) -> Result<()> {
    let problem = |error| format!("{} cannot be written: {error}", file.display());
    beside(file).map(drop).map_err(|error| Failure::input(argument, problem(error)))
}

/// A temporary file in the folder of `file`.
fn beside(file: &Path) -> std::io::Result<NamedTempFile> {
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".ferroflash-");
    #[cfg(unix)]
    {
        // As any new file; the umask still applies.
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        builder.permissions(everyone).tempfile_in(folder)
    }
    #[cfg(not(unix))]
    builder.tempfile_in(folder)
}

fn unwritable(file: &Path, error: &std::io::Error, kind: fn(String) -> Failure) -> Failure {
    // tempfile adds the temporary's own path, which would only puzzle.
    let error = error.to_string();
    let error = error.split(" at path ").next().unwrap_or(&error);
    kind(format!("--out: {} cannot be written: {error}", file.display()))
}
