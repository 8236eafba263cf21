//! `ferroflash grad`.

mod common;

use common::{Folder, Tensor, read};

fn tensors() -> Vec<Tensor> {
    vec![
        Tensor::noise("q", &[2, 7, 4, 16]),
        Tensor::noise("k", &[2, 9, 2, 16]),
        Tensor::noise("v", &[2, 9, 2, 24]),
        Tensor::noise("d_o", &[2, 7, 4, 24]),
    ]
}

#[test]
fn gradients_pass_the_check_in_either_layout() {
    let folder = Folder::new();
    folder.tensors("rows.safetensors", &tensors());
    let exchanged: Vec<Tensor> = tensors().iter().map(Tensor::exchanged).collect();
    folder.tensors("heads.safetensors", &exchanged);
    for causal in ["none", "top-left", "bottom-right"] {
        let call = ["--causal", causal, "--check", "--json"];
        let rows = ["grad", "rows.safetensors", "--out", "rows-d.safetensors"];
        let report = folder.run(&[&rows[..], &call].concat()).succeeded().json();
        for gradient in ["dq", "dk", "dv"] {
            assert_eq!(report["check"][gradient]["passed"], true, "{report}");
        }
        let heads = ["grad", "heads.safetensors", "--out", "heads-d.safetensors"];
        folder.run(&[&heads[..], &call, &["--layout", "bhsd"]].concat()).succeeded();
        let names = ["dq", "dk", "dv"];
        let of_rows = read(&folder.path("rows-d.safetensors"), names);
        let of_heads = read(&folder.path("heads-d.safetensors"), names);
        for ((rows, heads), tensor) in of_rows.iter().zip(&of_heads).zip(tensors()) {
            assert_eq!(rows.dims(), tensor.dims());
            assert_eq!(rows.elements(), heads.exchanged().elements());
        }
    }
}

#[test]
fn the_forwards_results_are_taken_from_the_file() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &tensors());
    folder.run(&["attend", "in.safetensors", "--out", "o.safetensors", "--lse"]).succeeded();
    let [o, lse] = read(&folder.path("o.safetensors"), ["o", "lse"]);
    let mut all = tensors();
    all.extend([o, lse]);
    folder.tensors("all.safetensors", &all);
    let computed = folder.run(&["grad", "in.safetensors", "--out", "a.safetensors"]).succeeded();
    let saved = folder.run(&["grad", "all.safetensors", "--out", "b.safetensors"]).succeeded();
    assert!(computed.stdout.contains("forward  computed in"), "{}", computed.stdout);
    assert!(saved.stdout.contains("forward  o and lse are the file's"), "{}", saved.stdout);
    let content = |name| std::fs::read(folder.path(name)).expect("it was written");
    assert_eq!(content("a.safetensors"), content("b.safetensors"));
}

#[test]
fn gradients_of_lse_are_used() {
    let folder = Folder::new();
    folder.tensors("without.safetensors", &tensors());
    let mut with = tensors();
    with.push(Tensor::noise("d_lse", &[2, 4, 7]));
    folder.tensors("with.safetensors", &with);
    for name in ["without", "with"] {
        let (file, out) = (format!("{name}.safetensors"), format!("{name}-d.safetensors"));
        folder.run(&["grad", &file, "--out", &out, "--check"]).succeeded();
    }
    let [without] = read(&folder.path("without-d.safetensors"), ["dq"]);
    let [with] = read(&folder.path("with-d.safetensors"), ["dq"]);
    assert_ne!(without.elements(), with.elements());
}

#[test]
fn results_of_another_call_fail_the_check() {
    let folder = Folder::new();
    let mut wrong = tensors();
    wrong.push(Tensor::noise("o", &[2, 7, 4, 24]));
    wrong.push(Tensor::noise("lse", &[2, 4, 7]));
    folder.tensors("in.safetensors", &wrong);
    let ran = folder.run(&["grad", "in.safetensors", "--out", "d.safetensors", "--check"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stdout.contains("FAILED: max error"), "{}", ran.stdout);
    assert!(ran.stderr.starts_with("error: --check: dq is "), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1);
    assert_eq!(folder.files(), ["in.safetensors"]);
}

#[test]
fn bad_input_is_refused() {
    let folder = Folder::new();
    let refused = |tensors: &[Tensor], arguments: &[&str], words: &[&str]| {
        folder.tensors("in.safetensors", tensors);
        let call = ["grad", "in.safetensors", "--out", "d.safetensors"];
        folder.run(&[&call[..], arguments].concat()).refused(words);
        assert_eq!(folder.files(), ["in.safetensors"]);
    };
    refused(&tensors()[..3], &[], &["d_o: ", "has k, q, v"]);
    let mut other = tensors();
    other[3] = Tensor::noise("d_o", &[2, 7, 4, 16]);
    refused(&other, &[], &["d_o: has dimensions [2, 7, 4, 16]", "[2, 7, 4, 24]"]);
    let mut other = tensors();
    other.push(Tensor::noise("d_lse", &[2, 7, 4]));
    refused(&other, &[], &["d_lse: has dimensions [2, 7, 4]", "[2, 4, 7]"]);
    folder.run(&["grad", "in.safetensors", "--out", "d.npy"]).refused(&["--out: d.npy"]);
}
