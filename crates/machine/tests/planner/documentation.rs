//! The troubleshooting page and the code stay in step.

use std::collections::BTreeSet;

use vitivirt_api::machine::machine_reason::{ERRORS, QUIET};
use vitivirt_machine::changes::{Effect, Kind, RULES, Rule};

const PAGE: &str = include_str!("../../../../docs/troubleshooting.md");

/// What begins the second table: reasons of a Machine that is not ready although nothing is wrong.
const NOTHING_IS_WRONG: &str = "## Not ready, and nothing is wrong";

fn tables() -> [Vec<&'static str>; 2] {
    let (errors, rest) = PAGE.split_once(NOTHING_IS_WRONG).unwrap();
    let (quiet, _) = rest.split_once("\n## ").unwrap();
    [errors, quiet].map(|part| part.lines().filter(|line| line.starts_with("| `")).collect())
}

#[test]
fn every_reason_has_its_row_and_every_row_its_reason() {
    for (rows, reasons) in tables().into_iter().zip([&ERRORS[..], &QUIET[..]]) {
        let named = rows.iter().filter_map(|row| row.strip_prefix("| `")?.split_once('`')).map(|(reason, _)| reason);
        let named: Vec<&str> = named.collect();
        assert_eq!(named.len(), reasons.len(), "a row of its own for each: {named:?}");
        let (named, reasons): (BTreeSet<_>, BTreeSet<_>) =
            (named.into_iter().collect(), reasons.iter().copied().collect());
        assert_eq!(named, reasons, "docs/troubleshooting.md");
    }
}

#[test]
fn every_row_says_cause_and_cure() {
    let columns = ["reason, symptom, cause, what to do", "reason, what is so, what comes next"];
    for (rows, columns) in tables().into_iter().zip(columns) {
        for row in rows {
            let cells = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).count();
            assert_eq!(cells, columns.split(", ").count(), "{columns}: {row}");
        }
    }
}

const CHANGES: &str = include_str!("../../../../docs/changing-machines.md");

#[test]
fn the_page_about_changes_is_the_table() {
    let change = |kind: Kind| match kind {
        Kind::Any => "any other",
        Kind::Added => "added",
        Kind::Removed => "removed",
        Kind::Grows => "more",
        Kind::Shrinks => "less",
    };
    let effect = |effect: Effect| match effect {
        Effect::Live => "live",
        Effect::LiveIfPossible => "live if possible",
        Effect::Restart => "restart",
        Effect::Refused => "refused",
    };
    let alone = |rule: &Rule| RULES.iter().filter(|other| other.field == rule.field).count() == 1;
    let rows = RULES.iter().filter(|rule| rule.field != "metadata.finalizers").map(|rule| {
        let kind = if alone(rule) { "any" } else { change(rule.change) };
        format!("| `{}` | {kind} | {} | {} |\n", rule.field, effect(rule.effect), rule.why)
    });
    let expected: String = rows.collect();
    let (_, page) = CHANGES.split_once("|---|---|---|---|\n").unwrap();
    assert_eq!(page, expected, "docs/changing-machines.md");
}
