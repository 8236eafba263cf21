//! `ferroflash doctor`, which finds fault with nothing.

mod common;

use common::Folder;

#[test]
fn it_says_what_is_here() {
    let folder = Folder::new();
    let words = folder.run(&["doctor"]).succeeded().stdout;
    for line in ["ferroflash  ", "driver  ", "artifacts  ", "build-ptx  ", "ptxas  "] {
        assert!(words.contains(line), "no `{line}` in\n{words}");
    }
    let report = folder.run(&["doctor", "--json"]).succeeded().json();
    assert!(report["driver"]["found"].is_boolean());
    let artifacts = &report["artifacts"];
    assert!(artifacts["kernels"].as_u64() > Some(0));
    assert_eq!(artifacts["kernels"], artifacts["recorded"]);
}

#[test]
fn evidence_is_what_this_machine_shows() {
    let folder = Folder::new();
    let report = folder.run(&["doctor", "--evidence", "--json"]).succeeded().json();
    let cpu = &report["evidence"][0];
    for rung in cpu["rungs"].as_array().expect("rungs") {
        assert_eq!(rung["verdict"], "established", "{rung}");
    }
    assert!(cpu["median_seconds"].as_f64() > Some(0.0));
    assert_eq!(cpu["record"]["timing"]["samples_seconds"].as_array().map(Vec::len), Some(20));
    // Without a GPU its rungs are left open, with the reason.
    if report["driver"]["found"] == false {
        let gpu = &report["evidence"][1];
        let verdicts: Vec<_> = (0..4).map(|rung| &gpu["rungs"][rung]["verdict"]).collect();
        assert_eq!(verdicts, ["refused", "unmeasured", "refused", "unmeasured"]);
        assert!(gpu["record"]["parity"].is_null() && gpu["median_seconds"].is_null());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_reader_that_leaves_is_no_failure() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferroflash"))
        .arg("doctor")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
