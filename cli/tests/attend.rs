//! `ferroflash attend` and `explain` where all is well.

mod common;

use common::{Folder, Tensor, minilm, read};

/// q, k and v of grouped heads and unequal lengths: `[2, 7, 4, 16]`, `[2, 9, 2, 16]`, `[…, 24]`.
fn grouped() -> [Tensor; 3] {
    [
        Tensor::noise("q", &[2, 7, 4, 16]),
        Tensor::noise("k", &[2, 9, 2, 16]),
        Tensor::noise("v", &[2, 9, 2, 24]),
    ]
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |largest, (a, b)| largest.max((a - b).abs()))
}

#[test]
fn real_activations_pass_the_check() {
    let folder = Folder::new();
    for file in ["layer0-f32", "layer0-bf16", "layer5-f32", "layer5-bf16"] {
        let path = minilm(&format!("{file}.safetensors"));
        for causal in ["none", "top-left", "bottom-right"] {
            let path = path.to_str().expect("a path in UTF-8");
            let ran = folder.run(&["attend", path, "--check", "--json", "--causal", causal]);
            let report = ran.succeeded().json();
            let check = &report["check"];
            assert_eq!(check["passed"], true, "{report}");
            let limit = if file.ends_with("bf16") { 3e-3 } else { 1e-6 };
            assert!(check["rel_error"].as_f64() < Some(limit), "{report}");
            assert!(check["max_abs_error"].as_f64() < check["bound"].as_f64(), "{report}");
            assert_eq!(report["shape"]["head_dim"], 32);
            assert!(report["milliseconds"].as_f64() > Some(0.0));
            assert!(report["device"].is_string() && report["kernel"].is_string());
        }
    }
    assert!(folder.files().is_empty());
}

#[test]
fn o_is_what_the_model_computed() {
    let folder = Folder::new();
    for file in ["layer0-f32.safetensors", "layer5-f32.safetensors"] {
        let path = minilm(file);
        let out = folder.path(file);
        folder.run(&["attend", path.to_str().expect("UTF-8"), "--out", file, "--lse"]).succeeded();
        let [model] = read(&path, ["o_model"]);
        let [o, lse] = read(&out, ["o", "lse"]);
        assert_eq!(o.dims(), model.dims());
        let &[batch, rows, heads, _] = o.dims() else { panic!("four axes") };
        assert_eq!(lse.dims(), [batch, heads, rows]);
        let model = model.elements();
        let largest = model.iter().fold(0.0_f32, |largest, o| largest.max(o.abs()));
        assert!(largest_difference(&o.elements(), &model) <= 4e-6 * largest);
    }
}

#[test]
fn either_layout_gives_the_same() {
    let folder = Folder::new();
    let tensors = grouped();
    folder.tensors("rows.safetensors", &tensors);
    folder.tensors("heads.safetensors", &tensors.each_ref().map(Tensor::exchanged));
    for causal in ["none", "top-left", "bottom-right"] {
        let call = ["--causal", causal, "--check", "--lse"];
        let rows = ["attend", "rows.safetensors", "--out", "rows-o.safetensors"];
        folder.run(&[&rows[..], &call].concat()).succeeded();
        let heads = ["attend", "heads.safetensors", "--out", "heads-o.safetensors"];
        folder.run(&[&heads[..], &call, &["--layout", "bhsd"]].concat()).succeeded();
        let [o, lse] = read(&folder.path("rows-o.safetensors"), ["o", "lse"]);
        let [o_heads, lse_heads] = read(&folder.path("heads-o.safetensors"), ["o", "lse"]);
        assert_eq!(o.dims(), [2, 7, 4, 24]);
        assert_eq!(o_heads.dims(), [2, 4, 7, 24]);
        assert_eq!(o.elements(), o_heads.exchanged().elements());
        assert_eq!(lse.elements(), lse_heads.elements());
    }
}

#[test]
fn the_batch_axis_may_be_left_out() {
    let folder = Folder::new();
    for (q, k, layout, o_dims) in
        [([7, 4, 16], [9, 2, 16], "bshd", [7, 4, 16]), ([4, 7, 16], [2, 9, 16], "bhsd", [4, 7, 16])]
    {
        folder.tensors(
            "in.safetensors",
            &[Tensor::noise("q", &q), Tensor::noise("k", &k), Tensor::noise("v", &k)],
        );
        let arguments = ["attend", "in.safetensors", "--out", "o.safetensors", "--lse"];
        folder.run(&[&arguments[..], &["--layout", layout, "--check"]].concat()).succeeded();
        let [o, lse] = read(&folder.path("o.safetensors"), ["o", "lse"]);
        assert_eq!(o.dims(), o_dims);
        assert_eq!(lse.dims(), [4, 7]);
    }
}

#[test]
fn arrays_of_numpy_go_in_and_out() {
    let folder = Folder::new();
    let tensors = grouped();
    for (tensor, file) in tensors.iter().zip(["q.npy", "k.npy", "v.npy"]) {
        folder.npy_of(file, tensor);
    }
    folder.tensors("in.safetensors", &tensors);
    let arrays = ["attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy"];
    folder.run(&[&arrays[..], &["--out", "o.npy", "--lse", "--check"]].concat()).succeeded();
    folder.run(&["attend", "in.safetensors", "--out", "o.safetensors", "--lse"]).succeeded();
    let [o, lse] = read(&folder.path("o.safetensors"), ["o", "lse"]);
    // Ours reads what it wrote: as q, k and v of another call.
    for (array, tensor, shape) in
        [("o.npy", &o, "'shape': (2, 7, 4, 24, )"), ("o.lse.npy", &lse, "'shape': (2, 4, 7, )")]
    {
        let content = std::fs::read(folder.path(array)).expect("it was written");
        let header = String::from_utf8_lossy(&content[..128]).into_owned();
        assert!(header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"));
        assert!(header.contains(shape), "{header}");
        let data = tensor.elements().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        assert!(content.ends_with(&data));
    }
    let again = ["attend", "--q", "o.npy", "--k", "o.npy", "--v", "o.npy", "--check", "--json"];
    assert_eq!(folder.run(&again).succeeded().json()["shape"]["q_len"], 7);
}

#[test]
fn outputs_replace_what_was_there() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &grouped());
    folder.write("o.safetensors", b"something else");
    folder.run(&["attend", "in.safetensors", "--out", "o.safetensors"]).succeeded();
    assert_eq!(folder.files(), ["in.safetensors", "o.safetensors"]);
    let [o] = read(&folder.path("o.safetensors"), ["o"]);
    assert_eq!(o.dims(), [2, 7, 4, 24]);
}

#[cfg(unix)]
#[test]
fn outputs_may_be_read_by_whom_the_umask_lets() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    folder.tensors("in.safetensors", &grouped());
    folder.run(&["attend", "in.safetensors", "--out", "o.safetensors"]).succeeded();
    let mode = |name| {
        let metadata = std::fs::metadata(folder.path(name)).expect("it is there");
        metadata.permissions().mode()
    };
    assert_eq!(mode("o.safetensors"), mode("in.safetensors"));
}

#[test]
fn windows_and_scales_are_applied() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &grouped());
    let lse = |options: &[&str]| {
        let arguments = ["attend", "in.safetensors", "--out", "o.safetensors", "--lse", "--check"];
        folder.run(&[&arguments[..], options].concat()).succeeded();
        let [lse] = read(&folder.path("o.safetensors"), ["lse"]);
        lse.elements()
    };
    let causal = lse(&["--causal", "bottom-right"]);
    assert_eq!(causal, lse(&["--window", "-1,0", "--align", "bottom-right"]));
    assert_eq!(causal, lse(&["--causal", "bottom-right", "--window", "99,3"]));
    assert_ne!(causal, lse(&["--causal", "top-left"]));
    assert_ne!(causal, lse(&["--causal", "bottom-right", "--window", "2,0"]));
    // Every score is 0: a row's log-sum-exp counts the keys it sees.
    let counts = lse(&["--scale", "0", "--window", "1,1", "--align", "top-left"]);
    let ends: Vec<f32> = counts[..7].iter().map(|lse| lse.exp().round()).collect();
    assert_eq!(ends, [2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]);
    assert_ne!(lse(&["--scale", "-0.5"]), lse(&[]));
}

#[test]
fn no_keys_give_zeros() {
    let folder = Folder::new();
    folder.tensors(
        "in.safetensors",
        &[
            Tensor::noise("q", &[1, 3, 2, 8]),
            Tensor::noise("k", &[1, 0, 2, 8]),
            Tensor::noise("v", &[1, 0, 2, 8]),
        ],
    );
    folder
        .run(&["attend", "in.safetensors", "--out", "o.safetensors", "--lse", "--check"])
        .succeeded();
    let [o, lse] = read(&folder.path("o.safetensors"), ["o", "lse"]);
    assert_eq!(o.elements(), [0.0; 48]);
    assert_eq!(lse.elements(), [f32::NEG_INFINITY; 6]);
}

#[test]
fn people_get_a_table() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &grouped());
    let ran = folder.run(&["attend", "in.safetensors", "--out", "o.safetensors", "--check"]);
    let said = ran.succeeded().stdout;
    for line in ["shape    batch 2, heads 4/2, length 7/9, channels 16/24", "passed: ", "wrote  "] {
        assert!(said.contains(line), "no `{line}` in\n{said}");
    }
}

#[test]
fn plans_are_explained() {
    let folder = Folder::new();
    folder.tensors("in.safetensors", &grouped());
    let from_file = folder.run(&["explain", "in.safetensors", "--json", "--device", "cpu"]);
    let shape = ["explain", "--shape", "2,4,2,7,9,16,24", "--dtype", "f32", "--device", "cpu"];
    let from_shape = folder.run(&[&shape[..], &["--json"]].concat());
    let plan = from_file.succeeded().json();
    assert_eq!(plan, from_shape.succeeded().json());
    assert_eq!(plan["kernel"], "cpu_tiled_forward");
    let words = folder.run(&shape).succeeded().stdout;
    assert!(words.contains("kernel    cpu_tiled_forward (f32)"), "{words}");
}
