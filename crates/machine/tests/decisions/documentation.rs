//! The troubleshooting page and the code stay in step.

use std::collections::BTreeSet;

use api::machine::machine_reason::ERRORS;
use machine::changes::{Effect, Kind, RULES, Rule};

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
