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
