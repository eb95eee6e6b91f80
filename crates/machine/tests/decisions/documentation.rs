//! The troubleshooting page and the code stay in step.

use std::collections::BTreeSet;

use api::machine::machine_reason::ERRORS;

const PAGE: &str = include_str!("../../../../docs/troubleshooting.md");

#[test]
fn every_error_has_its_row_and_every_row_its_error() {
    let rows: BTreeSet<&str> =
        PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(reason, _)| reason).collect();
    assert_eq!(rows, ERRORS.into_iter().collect(), "docs/troubleshooting.md");
}

#[test]
fn every_row_says_cause_and_cure() {
    for line in PAGE.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        assert_eq!(cells.len(), 4, "reason, symptom, cause, what to do: {line}");
    }
}
