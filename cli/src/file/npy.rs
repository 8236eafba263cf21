//! Reading `.npy`.

use std::io::{Cursor, Read};
use std::path::Path;

use ferroflash::Dtype;
use npyz::{NpyHeader, Order};

use super::{Entry, open_regular, wrong_length};
use crate::failure::{Failure, Result};

/// Bytes that a plain array's header fits in with ease. What is longer is no array of floats, and
/// is not handed to a recursive parser.
const LONGEST_HEADER: u64 = 1024;

/// Reads the header of an array and checks it against the file's length.
pub(crate) fn open(name: &'static str, path: &Path) -> Result<Entry> {
    let argument = format!("--{name}");
    let (file, length) = open_regular(path)?;
    let broken = |problem: &dyn std::fmt::Display| {
        let had = format!("{} {problem}", path.display());
        Failure::needs(&argument, had, "a whole .npy array")
    };
    let mut head = Vec::new();
    file.take(LONGEST_HEADER).read_to_end(&mut head).map_err(|error| broken(&error))?;
    if !head.starts_with(b"\x93NUMPY") {
        return Err(broken(&"does not begin as one"));
    }
    // Only headers over 64 KiB, or with names of fields, have another version.
    if head.get(6) != Some(&1) {
        return Err(broken(&"is not of format version 1.0"));
    }
    let mut cursor = Cursor::new(head.as_slice());
    // Absurd dimensions overflow in there, which panics where overflow is checked.
    let header = std::panic::catch_unwind(move || {
        NpyHeader::from_reader(&mut cursor).map(|header| (header, cursor.position()))
    });
    let (header, data_start) = match header {
        Ok(Ok(header)) => header,
        Ok(Err(error)) => return Err(broken(&format_args!("has a bad header ({error})"))),
        Err(_) => return Err(broken(&"has absurd dimensions")),
    };
    let descriptor = header.dtype().descr();
    let dtype = match descriptor.as_str() {
        "'<f2'" => Dtype::F16,
        "'<f4'" => Dtype::F32,
        other => {
            let had = format!("{} holds {other}", path.display());
            let needs = "'<f2' or '<f4' (bf16 travels in .safetensors)";
            return Err(Failure::needs(&argument, had, needs));
        }
    };
    if header.order() != Order::C {
        let had = format!("{} is in Fortran order", path.display());
        return Err(Failure::needs(&argument, had, "in C order (numpy.ascontiguousarray)"));
    }
    let bytes = header
        .shape()
        .iter()
        .try_fold(dtype.bytes() as u128, |product, &dim| product.checked_mul(u128::from(dim)));
    let needs = bytes.and_then(|bytes| bytes.checked_add(u128::from(data_start)));
    let needs = needs.ok_or_else(|| broken(&"has absurd dimensions"))?;
    if u128::from(length) != needs {
        return Err(wrong_length(path, length, needs));
    }
    let dims: Option<Vec<usize>> =
        header.shape().iter().map(|&dim| usize::try_from(dim).ok()).collect();
    let dims = dims.ok_or_else(|| broken(&"has absurd dimensions"))?;
    Ok(Entry { name, dtype, dims, path: path.to_path_buf(), offset: data_start })
}
