use super::*;

pub(crate) const HEADER: &str =
    r#"{"device": "NVIDIA H200", "driver": "580.1", "recorded": "2026-01-31"}"#;

pub(crate) fn line(kernel: &str, error: &str) -> String {
    let (hash, times) = ("ab".repeat(32), [1.0; 20]);
    format!(
        r#"{{"kernel": "{kernel}", "form": "cubin", "body_hash": "{hash}",
            "workload": {{"q_len": 7}}, "reference": "dense", "tolerance": 0.5,
            "max_error": {error}, "passed": true, "ms": {times:?}}}"#
    )
    .replace('\n', " ")
}

#[test]
fn rows_follow_the_line_that_names_the_device() {
    let text = format!("{HEADER}\n{}\n\n{}\n", line("a", "0.25"), line("b", "0.5"));
    let reports = reports(&text).expect("the lines are well formed");
    assert_eq!(reports.len(), 2);
    assert_eq!(reports[1].device, "NVIDIA H200");
    assert_eq!(reports[1].row.kernel, "b");
    assert_eq!(reports[1].row.other["reference"], "dense");
}

#[test]
fn a_record_reads_back() {
    let text = format!("{HEADER}\n{}\n{}", line("a", "0.25"), line("b", "0.25"));
    let mut reports = reports_of(&text).into_iter();
    let mut record = Record::new(reports.next().expect("there are two"));
    record.clocks = Some("1980 MHz".to_owned());
    assert_eq!(record.add(reports.next().expect("there are two").row), Added::Anew);
    let text = record.text().expect("it is JSON");
    assert_eq!(text.lines().count(), 11);
    let again = reports_of(&text);
    assert_eq!(
        again.iter().map(|r| &r.row).collect::<Vec<_>>(),
        record.rows.iter().collect::<Vec<_>>()
    );
    assert_eq!(again[0].clocks, record.clocks);
}

fn reports_of(text: &str) -> Vec<Report> {
    reports(text).expect("what we wrote reads")
}

#[test]
fn a_newer_row_of_the_same_case_replaces_the_older() {
    let text = format!("{HEADER}\n{}\n{}", line("a", "0.25"), line("a", "0.125"));
    let mut reports = reports_of(&text).into_iter();
    let mut record = Record::new(reports.next().expect("there are two"));
    let newer = reports.next().expect("there are two").row;
    assert_eq!(record.add(newer.clone()), Added::Instead);
    assert_eq!(record.add(newer.clone()), Added::Again);
    assert_eq!((record.rows.len(), record.rows[0].max_error), (1, Some(0.125)));
    // Under a sanitizer it is a case of its own.
    let mut checked = newer;
    checked.other.insert("sanitizer".to_owned(), "memcheck".into());
    assert_eq!(record.add(checked), Added::Anew);
}

#[test]
fn what_is_no_evidence_is_refused_by_name() {
    let after = |line: String| format!("{HEADER}\n{line}");
    for (refused, word) in [
        (line("a", "0.25"), "names device, driver and recorded"),
        (after(line("a", "0.75")), "it says `passed`"),
        (after(line("a", "null")), "it says `passed`"),
        (after(line("a", "0.25").replace("cubin", "sass")), "form is \"sass\""),
        (after(line("a", "0.25").replace("abab", "")), "body_hash is"),
        (after(line("a", "0.25").replace("\"ms\"", "\"seconds\"")), "the field `seconds`"),
        (after(line("a", "0.25")).replace("-01-", "/01/"), "it must be a day"),
        (after("{\"kernel\": \"a\"}".to_owned()), "lacks `"),
        (after("not JSON".to_owned()), "line 2: it is no JSON"),
        (after(line("a", "0.25")[..90].to_owned()), "line 2: it is cut short"),
        (after(line("a", "0.25").replace("{\"kernel", "{\"device\": \"B\", \"kernel")), "another"),
        (HEADER.replace("{\"device", "{\"schema\": \"x.v2\", \"device"), "reads ferroflash."),
        (HEADER.replace("{\"device", "{\"temperature\": 3, \"device"), "`temperature`"),
    ] {
        let why = format!("{:#}", reports(&refused).expect_err("it is no evidence"));
        assert!(why.contains(word), "{refused}: {why}");
    }
}

#[test]
fn broken_records_are_refused_by_name() {
    let text = format!("{HEADER}\n{}", line("a", "0.25"));
    let report = reports_of(&text).remove(0);
    let mut record = Record::new(report);
    let sound = record.text().expect("it is JSON");
    reports(&sound).expect("it is sound");
    record.rows.push(record.rows[0].clone());
    let twice = record.text().expect("it is JSON");
    for (refused, word) in [
        (sound[..sound.len() - 9].to_owned(), "it is cut short"),
        (sound.replace("evidence.v1", "evidence.v2"), "and this program reads"),
        (sound.replace("\"driver\": \"580.1\",", ""), "lacks `driver`"),
        (twice, "is there twice"),
    ] {
        let why = format!("{:#}", reports(&refused).expect_err("it is broken"));
        assert!(why.contains(word), "{why}");
    }
}

#[test]
fn files_are_named_by_day_and_device() {
    assert_eq!(
        file_name("2026-01-31", "NVIDIA H200 (141 GB)"),
        "2026-01-31-nvidia-h200-141-gb.json"
    );
}
