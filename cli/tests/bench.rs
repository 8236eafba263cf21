//! `ferroflash bench` on the CPU: small runs, their files, and comparisons.

mod common;

use common::Folder;
use serde_json::Value;

const TINY: &str = "bench --device cpu --seqs 24,40 --dims 8 --heads 2 --kv-heads 1 --batch 1";

fn tiny(more: &[&'static str]) -> Vec<&'static str> {
    TINY.split_whitespace().chain(more.iter().copied()).collect()
}

fn json(folder: &Folder, name: &str) -> Value {
    let text = std::fs::read_to_string(folder.path(name)).expect("the file is there");
    serde_json::from_str(&text).expect("JSON")
}

/// The file with some of its text replaced.
fn altered(folder: &Folder, name: &str, new: &str, from: &str, to: &str) {
    let text = std::fs::read_to_string(folder.path(name)).expect("the file is there");
    assert!(text.contains(from), "no `{from}` in {name}");
    folder.write(new, text.replace(from, to).as_bytes());
}

fn schema() -> jsonschema::Validator {
    let schema: Value = json_at("../fixtures/schemas/bench.v1.json");
    jsonschema::meta::validate(&schema).expect("a schema");
    jsonschema::validator_for(&schema).expect("a schema")
}

/// A file of the repository.
fn json_at(path: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let text = std::fs::read_to_string(path).expect("the file is there");
    serde_json::from_str(&text).expect("JSON")
}

fn follows_the_schema(run: &Value) {
    let faults: Vec<String> = schema()
        .iter_errors(run)
        .map(|fault| format!("{}: {fault}", fault.instance_path()))
        .collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn the_schema_can_refuse() {
    let roofs = json_at("../docs/benchmarks/roofs-h200.json");
    follows_the_schema(&roofs);
    for (pointer, wrong) in [
        ("/schema", Value::from("ferroflash.bench.v2")),
        ("/roofs/0/ms", Value::from(vec![1.0; 19])),
        ("/roofs/0/kind", Value::from("sideways")),
        ("/device/units", Value::from(0)),
        ("/date", Value::from("yesterday")),
    ] {
        let mut run = roofs.clone();
        *run.pointer_mut(pointer).expect(pointer) = wrong;
        assert!(!schema().is_valid(&run), "{pointer} was let through");
    }
}

#[test]
fn kept_roofs_are_read() {
    let folder = Folder::new();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/benchmarks/roofs-h200.json");
    let said = folder.run_on_one_thread(&["bench", "--from", file]).succeeded().stdout;
    assert!(said.contains("NVIDIA H200") && said.contains("TB/s"), "{said}");
    let shape = ["explain", "--shape", "4,16,16,4096,4096,128", "--device", "cpu"];
    let roofs = ["--device-model", "h200", "--roofs", file];
    let said = folder.run_on_one_thread(&[&shape[..], &roofs].concat()).succeeded().stdout;
    assert!(said.contains("products bound it"), "{said}");
}

#[test]
fn a_grid_is_measured_and_written() {
    let folder = Folder::new();
    let files = ["--json", "run.json", "--csv", "run.csv", "--html", "run.html"];
    let passes = ["--directions", "forward,backward,deterministic"];
    let said = folder.run_on_one_thread(&tiny(&[&files[..], &passes].concat())).succeeded().stdout;
    for words in ["backward, causal, deterministic", "cpu_tiled_forward", "2/1", "clocks  not read"]
    {
        assert!(said.contains(words), "no `{words}` in\n{said}");
    }
    let run = json(&folder, "run.json");
    follows_the_schema(&run);
    let rows = run["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2 * 2 * 3);
    for row in rows {
        let samples = row["ms"]["ferroflash"].as_array().expect("samples");
        assert_eq!(samples.len(), 20);
        // A sample lasts about two milliseconds, beside which the clock's own time is nothing.
        let calls = row["calls"]["ferroflash"].as_f64().expect("calls");
        let least = samples.iter().filter_map(Value::as_f64).fold(f64::INFINITY, f64::min);
        assert!(run["timer_ms"].as_f64().expect("a time") < 0.05 * calls * least, "{row}");
    }
    assert_eq!(std::fs::read_to_string(folder.path("run.csv")).expect("csv").lines().count(), 13);
    assert!(std::fs::read_to_string(folder.path("run.html")).expect("html").contains("<svg"));
}

#[test]
fn options_are_part_of_a_workload() {
    let folder = Folder::new();
    let words = "bench --device cpu --seqs 24 --kv-len 40 --dims 8 --heads 2 --batch 1 \
        --dtype bf16,f32 --directions forward --causal top-left --window 7,0 --softcap 30 \
        --dropout 0.5 --alibi --scale -0.5 --json";
    let words: Vec<&str> = words.split_whitespace().collect();
    let run = folder.run_on_one_thread(&words).succeeded().json();
    follows_the_schema(&run);
    let rows = run["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    let expected = serde_json::json!({
        "window": [7, 0], "align": "top-left", "scale": -0.5, "softcap": 30.0, "dropout": 0.5,
        "alibi": true
    });
    assert_eq!(rows[0]["options"], expected);
    assert_eq!((&rows[0]["dtype"], &rows[1]["dtype"]), (&"bf16".into(), &"f32".into()));
    // Row i sees keys i - 7 to i.
    let cells = 24.0 * 8.0 - 28.0;
    assert_eq!(rows[0]["flops"].as_f64(), Some(4.0 * 8.0 * cells * 2.0));
}

#[test]
fn files_that_are_there_stay() {
    let folder = Folder::new();
    folder.write("run.json", b"precious");
    let write = tiny(&["--directions", "forward", "--json", "run.json"]);
    folder.run_on_one_thread(&write).refused(&["--json", "run.json is there already", "--force"]);
    assert_eq!(std::fs::read(folder.path("run.json")).expect("there"), b"precious");
    folder.run_on_one_thread(&[&write[..], &["--force"]].concat()).succeeded();
    assert_eq!(json(&folder, "run.json")["schema"], "ferroflash.bench.v1");
    folder
        .run_on_one_thread(&tiny(&["--json", "a", "--csv", "a"]))
        .refused(&["--csv", "--json's too"]);
    folder
        .run_on_one_thread(&tiny(&["--csv", "missing/run.csv"]))
        .refused(&["--csv", "missing/run.csv cannot be written"]);
}

#[test]
fn a_workload_that_is_none_leaves_the_others() {
    let folder = Folder::new();
    let forward = ["--directions", "forward", "--json", "run.json"];
    let grid = "bench --device cpu --seqs 24 --dims 8,1024 --heads 2 --batch 1";
    let grid: Vec<&str> = grid.split_whitespace().chain(forward).collect();
    folder.run_on_one_thread(&grid).succeeded();
    let run = json(&folder, "run.json");
    let count = |name: &str| run[name].as_array().map(Vec::len);
    // Full and causal, each.
    assert_eq!((count("rows"), count("left_out")), (Some(2), Some(2)));
    assert!(run["rows"].as_array().is_some_and(|rows| rows.iter().all(|row| row["d"] == 8)));
    follows_the_schema(&run);
}

#[test]
fn runs_are_compared() {
    let folder = Folder::new();
    folder.run_on_one_thread(&tiny(&["--json", "run.json"])).succeeded();
    // Samples as a quiet machine takes them, and all twice as long: read in place of measured.
    for (name, ms) in [("old.json", 1.0), ("slower.json", 2.0)] {
        let mut run = json(&folder, "run.json");
        for row in run["rows"].as_array_mut().expect("rows") {
            let samples: Vec<f64> = (0..20).map(|i| ms * (1.0 + 1e-3 * f64::from(i % 5))).collect();
            row["ms"]["ferroflash"] = Value::from(samples);
        }
        folder.write(name, run.to_string().as_bytes());
    }
    let same = ["bench", "--from", "old.json", "--against", "old.json"];
    let said = folder.run_on_one_thread(&same).succeeded().stdout;
    assert!(said.contains("0 slower, 0 faster, 8 same"), "{said}");
    let ran =
        folder.run_on_one_thread(&["bench", "--from", "slower.json", "--against", "old.json"]);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(ran.stdout.contains("8 slower") && ran.stderr.contains("got slower"), "{ran:?}");
    let ran =
        folder.run_on_one_thread(&["bench", "--from", "old.json", "--against", "slower.json"]);
    assert!(ran.succeeded().stdout.contains("8 faster"));
}

#[test]
fn runs_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    folder.run_on_one_thread(&tiny(&["--directions", "forward", "--json", "run.json"])).succeeded();
    let whole = std::fs::read(folder.path("run.json")).expect("the file is there");
    folder.write("half.json", &whole[..whole.len() / 2]);
    altered(&folder, "run.json", "v2.json", "bench.v1", "bench.v2");
    altered(&folder, "run.json", "elsewhere.json", "\"units\":", "\"units\":1");
    let mut twice = json(&folder, "run.json");
    let row = twice["rows"][0].clone();
    twice["rows"].as_array_mut().expect("rows").push(row);
    folder.write("twice.json", twice.to_string().as_bytes());
    for (file, words) in [
        ("half.json", "cut short"),
        ("v2.json", "of schema ferroflash.bench.v2"),
        ("twice.json", "the same workload"),
        ("elsewhere.json", "was measured on"),
        ("none.json", "none.json"),
    ] {
        let compare = ["bench", "--from", "run.json", "--against", file];
        folder.run_on_one_thread(&compare).refused(&["--against", words]);
    }
    folder.run_on_one_thread(&["bench", "--from", "half.json"]).refused(&["--from", "cut short"]);
    // Before anything is measured: this grid has nothing that a kernel runs, and would say so.
    altered(&folder, "run.json", "otherwise.json", "\"method\":\"", "\"method\":\"alternating ");
    let nothing = ["bench", "--device", "cpu", "--seqs", "8", "--dims", "600"];
    folder.run_on_one_thread(&nothing).refused(&["nothing was measured"]);
    let compare = [&nothing[..], &["--against", "otherwise.json"]].concat();
    folder.run_on_one_thread(&compare).refused(&["--against", "sampled in another way"]);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let folder = Folder::new();
    for (words, argument) in [
        (&["--seqs", "0"][..], "--seqs"),
        (&["--dims", "0"], "--dims"),
        (&["--heads", "0"], "--heads"),
        (&["--dims", "8,8"], "asked for twice"),
        (&["--rounds", "19"], "--rounds"),
        (&["--kernel", "portable"], "--kernel"),
        (&["--softcap", "-1"], "softcap"),
        (&["--heads", "2", "--kv-heads", "3"], "q_heads"),
        (&["--seqs", "1048576", "--batch", "4294967295", "--heads", "4294967295"], "elements"),
        (&["--seqs", "1048576", "--batch", "1048576", "--heads", "64"], "of memory"),
    ] {
        folder
            .run_on_one_thread(&[&["bench", "--device", "cpu"], words].concat())
            .refused(&[argument]);
    }
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    let folder = Folder::new();
    for words in [["--from", "run.json", "--seqs", "24"], ["--from", "run.json", "--rounds", "30"]]
    {
        let ran = folder.run_on_one_thread(&[&["bench"], &words[..]].concat());
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("cannot be used with"), "{ran:?}");
    }
    let ran = folder.run_on_one_thread(&["bench", "--only-roofs", "--dims", "64"]);
    assert!(ran.code == Some(2) && ran.stderr.contains("cannot be used with"), "{ran:?}");
}

#[test]
fn roofs_are_measured() {
    let folder = Folder::new();
    let run = folder.run_on_one_thread(&["bench", "--device", "cpu", "--only-roofs", "--json"]);
    let run = run.succeeded().json();
    let roofs = run["roofs"].as_array().expect("roofs");
    let kinds: Vec<&str> = roofs.iter().filter_map(|roof| roof["kind"].as_str()).collect();
    assert_eq!(kinds, ["copy", "matrix"]);
    assert_eq!(run["rows"], serde_json::json!([]));
    for roof in roofs {
        assert_eq!(roof["ms"].as_array().map(Vec::len), Some(20));
    }
}
