//! `ferroflash explain`: plans with what they cost by arithmetic, and its drawings.

mod common;

use common::Folder;

const CAUSAL: &[&str] =
    &["explain", "--shape", "1,32,8,4096,4096,128", "--causal", "top-left", "--device", "cpu"];

#[test]
fn a_named_device_is_modelled() {
    let folder = Folder::new();
    let words = [CAUSAL, &["--device-model", "h200"]].concat();
    let said = folder.run(&words).succeeded().stdout;
    for line in ["modelled for h200", "nothing below was measured", "the vendor's figures"] {
        assert!(said.contains(line), "no `{line}` in\n{said}");
    }
    let report = folder.run(&[&words[..], &["--json"]].concat()).succeeded().json();
    let modelled = &report["modelled"];
    // The causal cells of M4.4 §0x05.1E, by every head.
    assert_eq!(modelled["tiles"]["visible_cells"], 8_390_656);
    let flops = 2_u64 * 2 * 128 * 32 * 8_390_656;
    assert_eq!(modelled["forward"]["useful_flops"], flops);
    assert_eq!(modelled["waves"]["slots"], 132);
    assert_eq!(report["not_modelled"], serde_json::Value::Null);
}

#[test]
fn the_plan_is_modelled_where_no_device_is_named() {
    let folder = Folder::new();
    let report = folder.run(&[CAUSAL, &["--json"]].concat()).succeeded().json();
    assert_eq!(report["modelled"]["kernel"], "cpu_tiled_forward");
    assert!(report["modelled"]["vendor_roofs"].is_null(), "no roof is made up");
    let words = ["explain", "--shape", "1,2,2,0,5,8", "--device", "cpu"];
    let said = folder.run(&words).succeeded().stdout;
    assert!(said.contains("not modelled: q_len: is 0, but must be at least 1"), "{said}");
}

#[test]
fn query_heads_that_run_as_rows_are_modelled_so() {
    let folder = Folder::new();
    let modelled = |shape: &str, kernel: &str| {
        let words = ["explain", "--shape", shape, "--device", "cpu", "--device-model", "h200"];
        let report = folder.run(&[&words[..], &["--json"]].concat()).succeeded().json();
        let modelled = report["modelled"].clone();
        assert_eq!(modelled["kernel"], kernel);
        modelled
    };
    let full = "hopper_forward_d128_bf16_full";
    let (packed, apart) =
        (modelled("8,64,8,1,4096,128", full), modelled("8,64,64,1,4096,128", full));
    assert_eq!((&packed["works"], &apart["works"]), (&64.into(), &512.into()));
    assert_eq!((&packed["packed_heads"], &apart["packed_heads"]), (&8.into(), &1.into()));
    assert_eq!((&packed["waves"]["waves"], &apart["waves"]["waves"]), (&1.into(), &4.into()));
    let flops = |modelled: &serde_json::Value, figure| modelled["forward"][figure].as_u64();
    assert_eq!(flops(&packed, "useful_flops"), flops(&apart, "useful_flops"));
    let scheduled = flops(&packed, "scheduled_flops").expect("a count");
    assert_eq!(Some(8 * scheduled), flops(&apart, "scheduled_flops"));
    // Rows of several a head are packed only where strides allow it.
    assert_eq!(modelled("8,64,8,3,4096,128", full)["packed_heads"], 1);
}

#[test]
fn a_device_may_be_described() {
    let folder = Folder::new();
    let own = r#"{"name": "own", "compute_capability": [8, 9], "multiprocessors": 10,
        "warps_per_sm": 48, "threads_per_sm": 1536, "blocks_per_sm": 24,
        "threads_per_block": 1024, "registers_per_sm": 65536, "registers_per_thread": 255,
        "shared_bytes_per_sm": 102400, "shared_bytes_per_block": 101376,
        "vendor_tensor_flops_per_second": null, "vendor_bytes_per_second": null}"#;
    folder.write("own.json", own.as_bytes());
    let words = [CAUSAL, &["--device-model", "own.json", "--json"]].concat();
    let report = folder.run(&words).succeeded().json();
    let kernel = report["modelled"]["kernel"].as_str().expect("a kernel");
    assert!(kernel.starts_with("portable_"), "{kernel}");
    assert_eq!(report["modelled"]["device"]["name"], "own");
}

#[test]
fn what_cannot_be_modelled_is_refused() {
    let folder = Folder::new();
    folder.write("bad.json", b"{}");
    for (name, word) in [("tpu", "there is no"), ("bad.json", "missing"), ("no.json", "no.json")] {
        let words = [CAUSAL, &["--device-model", name]].concat();
        folder.run(&words).refused(&["--device-model", word]);
    }
    let words = [CAUSAL, &["--svg", "no/such/folder.svg"]].concat();
    folder.run(&words).refused(&["--svg", "cannot be written"]);
}

#[test]
fn tiles_are_drawn() {
    let folder = Folder::new();
    let words = [CAUSAL, &["--device-model", "a100", "--svg", "tiles.svg"]].concat();
    folder.run(&words).succeeded();
    let drawing = std::fs::read_to_string(folder.path("tiles.svg")).expect("a drawing");
    assert!(drawing.starts_with("<svg") && drawing.ends_with("</svg>\n"));
    for part in ["rooflines", "owners", "nothing here was measured", "full", "skipped"] {
        assert!(drawing.contains(part), "no `{part}`");
    }
}

/// A run of `ferroflash bench` on a device, with two roofs and the forward pass of [`CAUSAL`].
fn measured(backend: &str, name: &str, dtype: &str) -> String {
    let device = serde_json::json!({"backend": backend, "name": name, "driver": null,
        "capability": null, "units": 2, "l2_bytes": null});
    let row = serde_json::json!({"direction": "forward", "d": 128, "dv": 128, "s": 4096,
        "sk": 4096, "b": 1, "heads": 32, "kv_heads": 8, "dtype": "bf16", "causal": true,
        "deterministic": false, "options": {}, "kernel": null, "flops": 1e11, "tflops": {},
        "ms": {"ferroflash": vec![0.5; 20]}, "calls": {}, "host_ms": {}, "buffers": 1,
        "clock": null});
    let run = serde_json::json!({"schema": "ferroflash.bench.v1", "ferroflash": "0.1.0",
        "date": "2026-11-30T00:00:00Z", "device": device, "method": "", "clocks": "",
        "timer_ms": 0.0, "peers": {}, "rows": [row], "left_out": [], "roofs": [
            {"kind": "copy", "dtype": null, "method": "copied", "work": 4e9,
             "ms": vec![1.0; 20]},
            {"kind": "matrix", "dtype": dtype, "method": "multiplied", "work": 8e11,
             "ms": vec![1.0; 20]}]});
    run.to_string()
}

#[test]
fn a_call_is_placed_under_measured_roofs() {
    let folder = Folder::new();
    folder.write("roofs.json", measured("cuda", "NVIDIA H200", "bf16").as_bytes());
    let words = [CAUSAL, &["--device-model", "h200", "--roofs", "roofs.json"]].concat();
    let said = folder.run(&words).succeeded().stdout;
    for line in [
        "measured on NVIDIA H200, 2026-11-30T00:00:00Z",
        "4.00 TB/s: copied",
        "800.00 TFLOP/s: multiplied",
        "meet at 200 FLOP a byte",
        "under the flat: products bound it",
        "took 0.5000 ms",
        "the vendor's figures",
    ] {
        assert!(said.contains(line), "no `{line}` in\n{said}");
    }
    assert!(!said.contains("measured  nothing"));
    let report = folder.run(&[&words[..], &["--json"]].concat()).succeeded().json();
    let forward = &report["measured"]["forward"];
    let flops = 2.0 * 2.0 * 128.0 * 32.0 * 8_390_656.0;
    let share = forward["timed"]["share_of_roof"].as_f64().expect("a share");
    assert!((share - flops / 0.5e-3 / 8e14).abs() < 1e-9, "{share}");
    assert_eq!(forward["bound_by"], "matrix");
    assert!(report["measured"]["backward"]["timed"].is_null(), "the file has no such row");

    folder.run(&[&words[..], &["--svg", "roofs.svg"]].concat()).succeeded();
    let drawing = std::fs::read_to_string(folder.path("roofs.svg")).expect("a drawing");
    for part in ["roofs measured on NVIDIA H200", "the vendor's figures", "forward, measured"] {
        assert!(drawing.contains(part), "no `{part}`");
    }
    assert!(!drawing.contains("nothing here was measured"));
}

#[test]
fn few_operations_a_byte_are_bound_by_bytes() {
    let folder = Folder::new();
    folder.write("roofs.json", measured("cuda", "NVIDIA H200", "bf16").as_bytes());
    let decode = ["explain", "--shape", "8,32,8,1,4096,128", "--device", "cpu", "--device-model"];
    let words = [&decode[..], &["h200", "--roofs", "roofs.json", "--json"]].concat();
    let report = folder.run(&words).succeeded().json();
    let forward = &report["measured"]["forward"];
    assert_eq!(forward["bound_by"], "copy");
    assert!(forward["share_of_matrix_roof"].as_f64().expect("a share") < 0.05, "{forward}");
}

#[test]
fn roofs_of_something_else_are_refused() {
    let folder = Folder::new();
    folder.write("h200.json", measured("cuda", "NVIDIA H200", "bf16").as_bytes());
    folder.write("f32.json", measured("cpu", "a processor", "f32").as_bytes());
    folder.write("cut.json", &measured("cpu", "a processor", "bf16").as_bytes()[..200]);
    for (file, words) in [
        ("h200.json", "was measured on NVIDIA H200"),
        ("f32.json", "has no roof of bf16 products"),
        ("cut.json", "cut short"),
    ] {
        folder.run(&[CAUSAL, &["--roofs", file]].concat()).refused(&["--roofs", words]);
    }
    folder.write("cpu.json", measured("cpu", "a processor", "bf16").as_bytes());
    folder.run(&[CAUSAL, &["--roofs", "cpu.json"]].concat()).succeeded();
    let none = ["explain", "--shape", "1,2,2,0,5,8", "--device", "cpu", "--roofs", "cpu.json"];
    folder.run(&none).refused(&["--roofs", "no work"]);
}
