//! Running the command on files made for the occasion.
#![allow(dead_code, reason = "each test program uses some of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tempfile::TempDir;

/// A folder that a test's files are in.
pub(crate) struct Folder {
    folder: TempDir,
}

/// A tensor for a file.
pub(crate) struct Tensor {
    name: &'static str,
    dtype: Dtype,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// An f32 tensor.
    pub(crate) fn new(name: &'static str, dims: &[usize], elements: &[f32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), elements.len());
        let bytes = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        Self { name, dtype: Dtype::F32, dims: dims.to_vec(), bytes }
    }

    /// An f32 tensor of values in ±2 that look random.
    pub(crate) fn noise(name: &'static str, dims: &[usize]) -> Self {
        let mut state = name.bytes().fold(17_u32, |state, byte| state * 31 + u32::from(byte));
        let elements: Vec<f32> = (0..dims.iter().product())
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 22) as f32 - 2.0
            })
            .collect();
        Self::new(name, dims, &elements)
    }

    /// A tensor of zeros of any dtype.
    pub(crate) fn zeros(name: &'static str, dims: &[usize], dtype: Dtype) -> Self {
        let bytes = vec![0; dims.iter().product::<usize>() * dtype.bitsize() / 8];
        Self { name, dtype, dims: dims.to_vec(), bytes }
    }

    /// The same tensor under another name.
    pub(crate) fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Its axes 1 and 2 exchanged, and its elements with them.
    pub(crate) fn exchanged(&self) -> Self {
        let &[batch, rows, columns, channels] = self.dims.as_slice() else { panic!("four axes") };
        let vector = channels * self.dtype.bitsize() / 8;
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for index in 0..batch * rows * columns {
            let (batch, column, row) =
                (index / (rows * columns), index / rows % columns, index % rows);
            let from = (batch * rows + row) * columns + column;
            bytes.extend(&self.bytes[from * vector..(from + 1) * vector]);
        }
        let dims = vec![batch, columns, rows, channels];
        Self { name: self.name, dtype: self.dtype, dims, bytes }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Its dimensions.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Its elements, if it is f32.
    pub(crate) fn elements(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        let elements = self.bytes.chunks_exact(4);
        elements.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

impl Folder {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        std::fs::write(self.path(name), content).expect("the folder is ours");
        self.path(name)
    }

    /// Writes a .safetensors.
    pub(crate) fn tensors(&self, name: &str, tensors: &[Tensor]) -> PathBuf {
        self.write(name, &image(tensors))
    }

    /// Writes a .npy of format version 1.0 by its header and its data.
    pub(crate) fn npy(&self, name: &str, descriptor: &str, shape: &str, data: &[u8]) -> PathBuf {
        self.npy_in_order(name, "False", descriptor, shape, data)
    }

    /// As [`Folder::npy`], with `fortran_order`.
    pub(crate) fn npy_in_order(
        &self,
        name: &str,
        fortran: &str,
        descriptor: &str,
        shape: &str,
        data: &[u8],
    ) -> PathBuf {
        let mut header =
            format!("{{'descr': '{descriptor}', 'fortran_order': {fortran}, 'shape': {shape}, }}");
        while (header.len() + 11) % 64 != 0 {
            header.push(' ');
        }
        header.push('\n');
        let mut content = b"\x93NUMPY\x01\x00".to_vec();
        content.extend((header.len() as u16).to_le_bytes());
        content.extend(header.as_bytes());
        content.extend(data);
        self.write(name, &content)
    }

    /// Writes an f32 tensor as a .npy.
    pub(crate) fn npy_of(&self, name: &str, tensor: &Tensor) -> PathBuf {
        let dims: Vec<String> = tensor.dims.iter().map(usize::to_string).collect();
        self.npy(name, "<f4", &format!("({})", dims.join(", ")), &tensor.bytes)
    }

    /// The names of its files.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("the folder is ours");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Runs the command in it.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().expect("the command starts"))
    }

    /// Runs the command in it, on one thread: for measurements, which run beside one another here.
    pub(crate) fn run_on_one_thread(&self, arguments: &[&str]) -> Ran {
        let mut command = self.command(arguments);
        Ran::of(command.env("RAYON_NUM_THREADS", "1").output().expect("the command starts"))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferroflash"));
        command.args(arguments).current_dir(self.folder.path());
        command
    }
}

/// The image of a .safetensors.
pub(crate) fn image(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.dims.clone(), &tensor.bytes);
        (tensor.name, view.expect("dimensions that fit"))
    });
    safetensors::serialize(views, None).expect("tensors that fit")
}

/// Reads the tensors of a .safetensors by name.
pub(crate) fn read<const N: usize>(path: &Path, names: [&'static str; N]) -> [Tensor; N] {
    let content = std::fs::read(path).expect("the file is there");
    let file = SafeTensors::deserialize(&content).expect("a whole file");
    names.map(|name| {
        let view = file.tensor(name).expect("the tensor is there");
        Tensor {
            name,
            dtype: view.dtype(),
            dims: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        }
    })
}

/// A fixture of real activations.
pub(crate) fn minilm(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/minilm").join(name)
}

/// What a run of the command gave.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Asserts that it succeeded, silently on stderr.
    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// Asserts that the input was refused: exit code 2, nothing on stdout, and one line on stderr
    /// that contains each of `words`.
    #[track_caller]
    pub(crate) fn refused(self, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(2), ""), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no `{word}` in {}", self.stderr);
        }
    }

    /// stdout as JSON, of one line.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.stdout.lines().count(), 1, "{self:?}");
        serde_json::from_str(&self.stdout).expect("JSON on stdout")
    }
}
