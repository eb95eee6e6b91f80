//! The documentation has the same tables as the code.

use std::collections::BTreeSet;

use vitivirt_api::machine::machine_reason::{ERRORS, NOT_READY_REASONS};
use vitivirt_machine::changes::{ChangeKind, ChangeRule, Effect, RULES};

const PAGE: &str = include_str!("../../../../docs/troubleshooting.md");

/// The heading of the second table: reasons of a Machine that is not ready without an error.
const NOT_READY_HEADING: &str = "## Not ready, and nothing is wrong";

fn tables() -> [Vec<&'static str>; 2] {
    let (errors, rest) = PAGE.split_once(NOT_READY_HEADING).unwrap();
    let (quiet, _) = rest.split_once("\n## ").unwrap();
    [errors, quiet].map(|part| part.lines().filter(|line| line.starts_with("| `")).collect())
}

#[test]
fn the_troubleshooting_page_has_one_row_for_every_reason() {
    for (rows, reasons) in tables().into_iter().zip([&ERRORS[..], &NOT_READY_REASONS[..]]) {
        let named = rows.iter().filter_map(|row| row.strip_prefix("| `")?.split_once('`')).map(|(reason, _)| reason);
        let named: Vec<&str> = named.collect();
        assert_eq!(named.len(), reasons.len(), "one row for each reason: {named:?}");
        let (named, reasons): (BTreeSet<_>, BTreeSet<_>) =
            (named.into_iter().collect(), reasons.iter().copied().collect());
        assert_eq!(named, reasons, "docs/troubleshooting.md");
    }
}

#[test]
fn every_row_of_the_troubleshooting_page_has_all_columns() {
    let columns = ["reason, symptom, cause, what to do", "reason, state, what follows"];
    for (rows, columns) in tables().into_iter().zip(columns) {
        for row in rows {
            let cells = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).count();
            assert_eq!(cells, columns.split(", ").count(), "{columns}: {row}");
        }
    }
}

const CHANGES: &str = include_str!("../../../../docs/changing-machines.md");

#[test]
fn the_page_about_changes_contains_every_rule() {
    let change = |kind: ChangeKind| match kind {
        ChangeKind::Any => "any other",
        ChangeKind::Added => "added",
        ChangeKind::Removed => "removed",
        ChangeKind::Grows => "more",
        ChangeKind::Shrinks => "less",
    };
    let effect = |effect: Effect| match effect {
        Effect::Live => "live",
        Effect::LiveIfPossible => "live if possible",
        Effect::Restart => "restart",
        Effect::Refused => "refused",
    };
    let alone = |rule: &ChangeRule| RULES.iter().filter(|other| other.field == rule.field).count() == 1;
    let rows = RULES.iter().filter(|rule| rule.field != "metadata.finalizers").map(|rule| {
        let kind = if alone(rule) { "any" } else { change(rule.change) };
        format!("| `{}` | {kind} | {} | {} |\n", rule.field, effect(rule.effect), rule.why)
    });
    let expected: String = rows.collect();
    let (_, page) = CHANGES.split_once("|---|---|---|---|\n").unwrap();
    assert_eq!(page, expected, "docs/changing-machines.md");
}
