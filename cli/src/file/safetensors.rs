//! Reading `.safetensors`.

use std::io::Read;
use std::path::{Path, PathBuf};

use ferroflash::Dtype;
use safetensors::tensor::Metadata;

use super::{Entry, open_regular, wrong_length};
use crate::failure::{Failure, Result};

/// The longest header the format allows, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the header's length, which come first.
const LENGTH_BYTES: u64 = 8;
/// How many tensors of a file a message lists.
const LISTED: usize = 12;

/// A `.safetensors` file whose header is read.
pub(crate) struct Safetensors {
    path: PathBuf,
    metadata: Metadata,
    data_start: u64,
}

impl Safetensors {
    /// Reads the header and checks it against the file's length.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if super::has_extension(path, "npy") {
            let needs = "a .safetensors (arrays of .npy are given as --q, --k and --v)";
            return Err(Failure::needs(path.display(), "is a .npy", needs));
        }
        let (mut file, length) = open_regular(path)?;
        let broken = |problem: &dyn std::fmt::Display| {
            Failure::needs(path.display(), problem, "a whole .safetensors file")
        };
        let mut header_length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut header_length)
            .map_err(|_| broken(&format_args!("has only {length} bytes")))?;
        let header_length = u64::from_le_bytes(header_length);
        if header_length > MAX_HEADER {
            return Err(broken(&format_args!("claims a header of {header_length} bytes")));
        }
        if LENGTH_BYTES + header_length > length {
            return Err(wrong_length(path, length, u128::from(LENGTH_BYTES + header_length)));
        }
        let mut header = Vec::new();
        file.take(header_length).read_to_end(&mut header).map_err(|error| broken(&error))?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| broken(&format_args!("has a bad header ({error})")))?;
        let data_start = LENGTH_BYTES + header_length;
        let needs = u128::from(data_start) + metadata.data_len() as u128;
        if u128::from(length) != needs {
            return Err(wrong_length(path, length, needs));
        }
        Ok(Self { path: path.to_path_buf(), metadata, data_start })
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// The tensor of this name.
    pub(crate) fn entry(&self, name: &'static str) -> Result<Entry> {
        let Some(info) = self.metadata.info(name) else {
            return Err(Failure::input(
                name,
                format!("{} has no such tensor, but {}", self.path.display(), self.contents()),
            ));
        };
        use safetensors::Dtype as D;
        let dtype = match info.dtype {
            D::BF16 => Dtype::Bf16,
            D::F16 => Dtype::F16,
            D::F32 => Dtype::F32,
            other => {
                let had = format!("holds {other}");
                return Err(Failure::needs(name, had, "BF16, F16 or F32"));
            }
        };
        Ok(Entry {
            name,
            dtype,
            dims: info.shape.clone(),
            path: self.path.clone(),
            offset: self.data_start + info.data_offsets.0 as u64,
        })
    }

    /// The names of its tensors, in words.
    fn contents(&self) -> String {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort_unstable();
        if names.is_empty() {
            return "no tensor at all".to_owned();
        }
        let more = match names.len().saturating_sub(LISTED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        names.truncate(LISTED);
        format!("has {}{more}", names.join(", "))
    }
}
