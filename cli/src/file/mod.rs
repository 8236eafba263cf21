//! Tensors in files: one of a `.safetensors`, or a whole `.npy`.
//!
//! Opening a file reads and checks its header, its length among it, and yields [`Entry`]s; only
//! the tensors that are wanted are then read.

mod npy;
mod safetensors;
mod write;

pub(crate) use self::npy::open as open_npy;
pub(crate) use self::safetensors::Safetensors;
pub(crate) use self::write::{Destination, Written, check_writable, write_text};

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use cudarc::driver::DeviceRepr;
use ferroflash::{Dtype, Element};
use half::{bf16, f16};

use crate::failure::{Failure, Result};

/// An element type that files store: little-endian, whatever the machine.
pub(crate) trait Stored: Element + DeviceRepr {
    /// From its bytes, as many as the type has.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Appends its bytes.
    fn append_to(self, bytes: &mut Vec<u8>);
}

macro_rules! stored {
    ($($element:ty, $bytes:literal;)*) => {$(
        impl Stored for $element {
            fn from_bytes(bytes: &[u8]) -> Self {
                let mut own = [0; $bytes];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }
            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    )*};
}
stored! { bf16, 2; f16, 2; f32, 4; }

/// The bytes of `elements`, as files store them.
pub(crate) fn bytes_of<T: Stored>(elements: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(elements));
    elements.iter().for_each(|element| element.append_to(&mut bytes));
    bytes
}

/// A tensor in a file, not yet read: contiguous, and known to lie inside the file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Name of the argument, such as `q`.
    pub(crate) name: &'static str,
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Dimensions, outermost first.
    pub(crate) dims: Vec<usize>,
    path: PathBuf,
    offset: u64,
}

impl Entry {
    /// Reads the elements; `T` is the entry's dtype.
    pub(crate) fn read<T: Stored>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Failure::needs(self.name, format!("holds {}", self.dtype), T::DTYPE));
        }
        let elements: usize = self.dims.iter().product();
        let mut data = reserve(self.name, elements)?;
        let broken = |error| Failure::Run(format!("{}: {error}", self.path.display()));
        let mut file = File::open(&self.path).map_err(broken)?;
        file.seek(SeekFrom::Start(self.offset)).map_err(broken)?;
        let mut reader = BufReader::with_capacity(1 << 16, file);
        let mut chunk = vec![0_u8; 1 << 16];
        while data.len() < elements {
            let wanted = ((elements - data.len()) * size_of::<T>()).min(chunk.len());
            reader.read_exact(&mut chunk[..wanted]).map_err(broken)?;
            data.extend(chunk[..wanted].chunks_exact(size_of::<T>()).map(T::from_bytes));
        }
        Ok(data)
    }
}

/// An empty vector with room for `elements`.
pub(crate) fn reserve<T>(name: &str, elements: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(elements).map_err(|_| {
        let bytes = elements.saturating_mul(size_of::<T>());
        Failure::Run(format!("{name}: {bytes} bytes of memory could not be had"))
    })?;
    Ok(data)
}

/// Opens a file to read from the start; also its length.
fn open_regular(path: &Path) -> Result<(File, u64)> {
    let unreadable = |error: std::io::Error| Failure::input(path.display(), error);
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(Failure::needs(path.display(), "is not a regular file", "one"));
    }
    if metadata.len() == 0 {
        return Err(Failure::needs(path.display(), "is empty", "a file of tensors"));
    }
    Ok((file, metadata.len()))
}

/// A file whose length is not what its header says.
fn wrong_length(path: &Path, had: u64, needs: u128) -> Failure {
    let what = if u128::from(had) < needs { "is cut short" } else { "is too long" };
    Failure::input(
        path.display(),
        format!("{what}: it has {had} bytes, but its header tells of {needs}"),
    )
}

/// Whether `path` ends in `.extension`, in any case.
pub(crate) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|own| own.eq_ignore_ascii_case(extension))
}
