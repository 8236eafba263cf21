//! Bad input: one line that names the argument, what it had and what it needs; exit code 2;
//! nothing written.

mod common;

use common::{Folder, Tensor, image};
use safetensors::tensor::Dtype;

/// q, k and v of a small call that is right.
fn good() -> [Tensor; 3] {
    ["q", "k", "v"].map(|name| Tensor::noise(name, &[1, 4, 2, 8]))
}

/// Asserts that tensors are refused, with `arguments`, for reasons that contain `words`.
#[track_caller]
fn tensors_are_refused(tensors: &[Tensor], arguments: &[&str], words: &[&str]) {
    file_is_refused(&image(tensors), arguments, words);
}

/// As [`tensors_are_refused`], for the content of a file.
#[track_caller]
fn file_is_refused(content: &[u8], arguments: &[&str], words: &[&str]) {
    let folder = Folder::new();
    folder.write("in.safetensors", content);
    let call = ["attend", "in.safetensors", "--out", "o.safetensors"];
    folder.run(&[&call[..], arguments].concat()).refused(words);
    assert_eq!(folder.files(), ["in.safetensors"]);
}

#[test]
fn wrong_ranks() {
    let [q, k, v] = good();
    let flat = Tensor::noise("q", &[8, 8]);
    tensors_are_refused(&[flat, k, v], &[], &["q: has dimensions [8, 8]", "[batch, sequence,"]);
    let [_, _, v] = good();
    let k = Tensor::noise("k", &[4, 2, 8]);
    tensors_are_refused(&[q, k, v], &[], &["k: has dimensions [4, 2, 8]", "[1, 4, 2, 8]"]);
    let five = ["q", "k", "v"].map(|name| Tensor::noise(name, &[1, 1, 4, 2, 8]));
    tensors_are_refused(&five, &["--layout", "bhsd"], &["q: has ", "[batch, head, sequence,"]);
}

#[test]
fn mismatched_dimensions() {
    for (name, dims, needs) in [
        ("k", [2, 4, 2, 8], "[1, 4, 2, 8] to fit q's batch and channels"),
        ("k", [1, 4, 2, 9], "[1, 4, 2, 8] to fit q's batch and channels"),
        ("v", [1, 5, 2, 8], "[1, 4, 2, 8] to fit k's batch, sequence and heads"),
        ("v", [1, 4, 1, 8], "[1, 4, 2, 8] to fit k's batch, sequence and heads"),
    ] {
        let tensors = good().map(|tensor| match tensor.name() == name {
            true => Tensor::noise(name, &dims),
            false => tensor,
        });
        let had = format!("{name}: has dimensions {dims:?}");
        tensors_are_refused(&tensors, &[], &[&had, needs]);
    }
}

#[test]
fn heads_that_do_not_divide() {
    let [_, k, v] = good();
    let q = Tensor::noise("q", &[1, 4, 3, 8]);
    tensors_are_refused(&[q, k, v], &[], &["q_heads: 3", "a multiple of kv_heads = 2"]);
}

#[test]
fn head_dimensions_that_are_too_large() {
    let wide = ["q", "k", "v"].map(|name| Tensor::noise(name, &[1, 2, 1, 600]));
    tensors_are_refused(&wide, &[], &["head_dim: 600", "between 1 and 512"]);
    let none = ["q", "k", "v"].map(|name| Tensor::noise(name, &[1, 2, 1, 0]));
    tensors_are_refused(&none, &[], &["q: has dimensions [1, 2, 1, 0]", "one query at least"]);
    let [q, k, _] = good();
    let v = Tensor::noise("v", &[1, 4, 2, 0]);
    tensors_are_refused(&[q, k, v], &[], &["value_dim: 0", "between 1 and 512"]);
}

#[test]
fn other_element_types() {
    for (dtype, name) in [(Dtype::I32, "I32"), (Dtype::F64, "F64"), (Dtype::F8_E4M3, "F8_E4M3")] {
        let tensors = ["q", "k", "v"].map(|name| Tensor::zeros(name, &[1, 4, 2, 8], dtype));
        tensors_are_refused(&tensors, &[], &["q: holds ", name, "BF16, F16 or F32"]);
    }
    let [q, _, v] = good();
    let k = Tensor::zeros("k", &[1, 4, 2, 8], Dtype::BF16);
    tensors_are_refused(&[q, k, v], &[], &["k: holds bf16", "f32 as q"]);
}

#[test]
fn missing_tensors() {
    let [q, k, v] = good();
    tensors_are_refused(&[q, k, v.named("values")], &[], &["v: ", "has k, q, values"]);
    tensors_are_refused(&[], &[], &["q: ", "no tensor at all"]);
}

#[test]
fn files_that_are_not_whole() {
    file_is_refused(b"", &[], &["in.safetensors: is empty"]);
    file_is_refused(b"1234", &[], &["in.safetensors: has only 4 bytes"]);
    file_is_refused(b"not a file of tensors", &[], &["in.safetensors: claims a header of"]);
    let whole = image(&good());
    for length in [8, 9, 40, whole.len() / 2, whole.len() - 1] {
        let words = ["in.safetensors: is cut short", &format!("it has {length} bytes")];
        file_is_refused(&whole[..length], &[], &words);
    }
    file_is_refused(&[&whole[..], b"!"].concat(), &[], &["in.safetensors: is too long"]);
    let mut broken = whole.clone();
    broken[8] = b'!';
    file_is_refused(&broken, &[], &["in.safetensors: has a bad header"]);
}

#[test]
fn headers_that_lie() {
    let with_header = |header: &str| {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &[0; 64]].concat()
    };
    for header in [
        r#"{"q":{"dtype":"F32","shape":[4,4],"data_offsets":[0,60]}}"#,
        r#"{"q":{"dtype":"F32","shape":[4,4],"data_offsets":[64,0]}}"#,
        r#"{"q":{"dtype":"F32","shape":[4294967296,4294967296,16],"data_offsets":[0,64]}}"#,
        r#"{"q":{"dtype":"F31","shape":[4,4],"data_offsets":[0,64]}}"#,
        r#"{"q":{"dtype":"F32","shape":[-4,4],"data_offsets":[0,64]}}"#,
        r#"[["#,
    ] {
        file_is_refused(&with_header(header), &[], &["in.safetensors: has a bad header"]);
    }
    let nested = "[".repeat(100_000);
    file_is_refused(&with_header(&nested), &[], &["in.safetensors: has a bad header"]);
}

#[test]
fn files_that_are_not_there() {
    let folder = Folder::new();
    folder.run(&["attend", "in.safetensors", "--check"]).refused(&["in.safetensors: No such"]);
    folder.run(&["explain", "in.safetensors"]).refused(&["in.safetensors: No such"]);
    folder.run(&["attend", ".", "--check"]).refused(&[".: is not a regular file"]);
}

#[test]
fn scales_that_are_no_numbers() {
    for scale in ["nan", "inf", "1e39"] {
        tensors_are_refused(&good(), &["--scale", scale], &["scale: ", "a finite number"]);
    }
}

#[test]
fn windows_without_a_diagonal() {
    let [q, ..] = good();
    let [k, v] = ["k", "v"].map(|name| Tensor::noise(name, &[1, 5, 2, 8]));
    let window = ["--window", "2,0"];
    tensors_are_refused(&[q, k, v], &window, &["--align: not given", "top-left or bottom-right"]);
    let both = ["--causal", "top-left", "--align", "bottom-right"];
    tensors_are_refused(&good(), &both, &["--align: is not --causal's"]);
}

#[test]
fn gpus_that_are_not_there() {
    tensors_are_refused(&good(), &["--device", "cuda:99"], &["--device: cuda:99"]);
}

#[test]
fn artifacts_of_no_form() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &good());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroflash"));
    command.args(["attend", "in.safetensors", "--check"]).current_dir(folder.path("."));
    let output = command.env("FERROFLASH_ARTIFACT", "sass").output().expect("the command starts");
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "error: FERROFLASH_ARTIFACT: sass, but it must be cubin or ptx\n");
}

#[test]
fn outputs_that_cannot_be() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &good());
    folder.tensors(
        "bf16.safetensors",
        &["q", "k", "v"].map(|name| Tensor::zeros(name, &[1, 4, 2, 8], Dtype::BF16)),
    );
    std::fs::create_dir(folder.path("folder.npy")).expect("the folder is ours");
    let before = folder.files();
    let refused = |input: &str, out: &str, words: &[&str]| {
        folder.run(&["attend", input, "--out", out, "--lse"]).refused(words);
        assert_eq!(folder.files(), before);
    };
    refused("in.safetensors", "in.safetensors", &["--out: in.safetensors is also an input"]);
    refused("in.safetensors", "./folder.npy/../in.safetensors", &["is also an input"]);
    refused("in.safetensors", "folder.npy", &["--out: folder.npy is not a regular file"]);
    refused("in.safetensors", "no/o.npy", &["--out: no/o.npy cannot be written: No such file"]);
    refused("in.safetensors", "in.safetensors/o.npy", &["--out: in.safetensors/o.npy cannot"]);
    refused("in.safetensors", "o.pt", &["--out: o.pt", "a .safetensors or a .npy"]);
    refused("bf16.safetensors", "o.npy", &["--out: o.npy cannot hold bf16", "a .safetensors"]);
    let ran = folder.run(&["attend", "in.safetensors", "--out", "no/o.npy"]);
    assert!(!ran.stderr.contains(".ferroflash-"), "the temporary file shows in {}", ran.stderr);
    folder.npy_of("o.lse.npy", &Tensor::noise("q", &[1, 4, 2, 8]));
    let lse = "o.lse.npy";
    let arrays = ["attend", "--q", lse, "--k", lse, "--v", lse, "--out", "o.npy", "--lse"];
    folder.run(&arrays).refused(&["--out: o.lse.npy is also an input"]);
}

#[cfg(unix)]
#[test]
fn folders_that_may_not_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    folder.tensors("in.safetensors", &good());
    std::fs::create_dir(folder.path("closed")).expect("the folder is ours");
    let closed = std::fs::Permissions::from_mode(0o555);
    std::fs::set_permissions(folder.path("closed"), closed).expect("the folder is ours");
    if std::fs::write(folder.path("closed/probe"), b"").is_ok() {
        eprintln!("skipped: this user may write anywhere");
        return;
    }
    folder
        .run(&["attend", "in.safetensors", "--out", "closed/o.npy"])
        .refused(&["--out: closed/o.npy cannot be written: Permission denied"]);
}

#[test]
fn arrays_of_other_kinds() {
    let folder = Folder::new();
    let good = Tensor::noise("k", &[1, 4, 2, 8]);
    folder.npy_of("good.npy", &good);
    let data = [0; 256];
    folder.npy("double.npy", "<f8", "(1, 4, 1, 8)", &data);
    folder.npy("big.npy", ">f4", "(1, 4, 2, 8)", &data);
    folder.npy("half.npy", "<f2", "(1, 4, 4, 8)", &data);
    folder.npy("flat.npy", "<f4", "(64,)", &data);
    folder.npy("short.npy", "<f4", "(1, 4, 2, 9)", &data);
    folder.npy("shape.npy", "<f4", "(1, -4, 2, 8)", &data);
    folder.npy_in_order("fortran.npy", "True", "<f4", "(1, 4, 2, 8)", &data);
    folder.write("empty.npy", b"");
    folder.write("magic.npy", b"\x93NUMPY");
    folder.write("other.npy", b"PK and so on, as a .npz");
    folder.write("deep.npy", &[b"\x93NUMPY\x01\x00\xff\xff".as_slice(), &[b'('; 65_535]].concat());
    folder.write("large.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{");
    let before = folder.files();
    for (file, words) in [
        ("double.npy", ["double.npy holds '<f8'", "'<f4'"]),
        ("big.npy", ["big.npy holds '>f4'", "'<f4'"]),
        ("half.npy", ["k: holds f32", "f16 as q"]),
        ("flat.npy", ["q: has dimensions [64]", "[batch, sequence, head, channel]"]),
        ("short.npy", ["short.npy: is cut short", "its header tells of"]),
        ("shape.npy", ["shape.npy has a bad header", "negative"]),
        ("fortran.npy", ["fortran.npy is in Fortran order", "C order"]),
        ("empty.npy", ["empty.npy: is empty", ""]),
        ("magic.npy", ["magic.npy is not of format version 1.0", ""]),
        ("other.npy", ["other.npy does not begin as one", "a whole .npy"]),
        ("deep.npy", ["deep.npy has a bad header", "a whole .npy"]),
        ("large.npy", ["large.npy is not of format version 1.0", ""]),
        ("none.npy", ["none.npy: No such file", ""]),
    ] {
        let call = ["attend", "--q", file, "--k", "good.npy", "--v", "good.npy"];
        folder.run(&[&call[..], &["--out", "o.npy"]].concat()).refused(&words);
        assert_eq!(folder.files(), before, "{file}");
    }
    folder.run(&["attend", "good.npy", "--check"]).refused(&["good.npy: is a .npy", "--q, --k"]);
}

#[test]
fn dimensions_beyond_counting() {
    let folder = Folder::new();
    let huge = "(4294967296, 4294967296, 4294967296, 8)";
    folder.npy("huge.npy", "<f4", huge, &[0; 64]);
    let ran = folder.run(&[
        "attend", "--q", "huge.npy", "--k", "huge.npy", "--v", "huge.npy", "--out", "o.npy",
    ]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("--q: huge.npy has absurd dimensions"), "{ran:?}");
    assert_eq!(folder.files(), ["huge.npy"]);
    // Without elements such dimensions fit in any file.
    folder.npy("void.npy", "<f4", "(4294967295, 0, 4294967295, 8)", &[]);
    let void = ["attend", "--q", "void.npy", "--k", "void.npy", "--v", "void.npy", "--check"];
    folder.run(&void).refused(&["q: has dimensions [4294967295, 0,", "one query at least"]);
}

#[test]
fn usage() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &good());
    for arguments in [
        &["attend"][..],
        &["attend", "in.safetensors"],
        &["attend", "in.safetensors", "--out", "o.npy", "--causal", "left"],
        &["attend", "in.safetensors", "--out", "o.npy", "--device", "tpu"],
        &["attend", "in.safetensors", "--out", "o.npy", "--window", "3"],
        &["attend", "in.safetensors", "--out", "o.npy", "--window", "-2,0"],
        &["attend", "in.safetensors", "--out", "o.npy", "--scale", "half"],
        &["attend", "in.safetensors", "--out", "o.npy", "--q", "q.npy"],
        &["attend", "--q", "q.npy", "--check"],
        &["explain"],
        &["explain", "--shape", "1,2,3"],
        &["explain", "--shape", "1,2,1,9,9,64,64,64"],
        &["explain", "in.safetensors", "--shape", "1,2,1,9,9,64"],
        &["fly"],
    ] {
        assert_eq!(folder.run(arguments).code, Some(2), "{arguments:?}");
    }
    assert_eq!(folder.files(), ["in.safetensors"]);
}
