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
