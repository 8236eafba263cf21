use super::*;

const HEADER: &str = r#"{"device": "NVIDIA H200", "driver": "580.1", "recorded": "2026-01-31"}"#;

fn line(kernel: &str, error: &str) -> String {
    let hash = "ab".repeat(32);
    format!(
        r#"{{"kernel": "{kernel}", "form": "cubin", "body_hash": "{hash}",
            "workload": {{"q_len": 7}}, "reference": "dense", "tolerance": 0.5,
            "max_error": {error}, "passed": true, "ms": [1.0, 2.0]}}"#
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
    let mut records = reports(&text).expect("the lines are well formed").into_iter();
    let Report { device, driver, recorded, row } = records.next().expect("there are two");
    let mut record = Record::new(device, driver, recorded, row);
    record.add(records.next().expect("there are two").row);
    let text = record.text().expect("it is JSON");
    assert_eq!(text.lines().count(), 10);
    let again = reports_of(&text);
    assert_eq!(
        again.iter().map(|r| &r.row).collect::<Vec<_>>(),
        record.rows.iter().collect::<Vec<_>>()
    );
}

fn reports_of(text: &str) -> Vec<Report> {
    reports(text).expect("what we wrote reads")
}

#[test]
fn a_newer_row_of_the_same_case_replaces_the_older() {
    let text = format!("{HEADER}\n{}\n{}", line("a", "0.25"), line("a", "0.125"));
    let mut rows = reports_of(&text).into_iter().map(|report| report.row);
    let first = rows.next().expect("there are two");
    let mut record = Record::new("d".into(), "1".into(), "2026-01-31".into(), first);
    record.add(rows.next().expect("there are two"));
    assert_eq!(record.rows.len(), 1);
    assert_eq!(record.rows[0].max_error, Some(0.125));
}

#[test]
fn what_is_no_evidence_is_refused() {
    for refused in [
        line("a", "0.25"),
        format!("{HEADER}\n{}", line("a", "0.75")),
        format!("{HEADER}\n{}", line("a", "null")),
        format!("{HEADER}\n{}", line("a", "0.25").replace("cubin", "sass")),
        format!("{HEADER}\n{}", line("a", "0.25").replace("abab", "")),
        format!("{}\n{}", HEADER.replace("-01-", "/01/"), line("a", "0.25")),
        format!("{HEADER}\n{{\"kernel\": \"a\"}}"),
        format!("{HEADER}\nnot JSON"),
    ] {
        assert!(reports(&refused).is_err(), "{refused}");
    }
}

#[test]
fn files_are_named_by_day_and_device() {
    assert_eq!(
        file_name("2026-01-31", "NVIDIA H200 (141 GB)"),
        "2026-01-31-nvidia-h200-141-gb.json"
    );
}
