//! The documentation has the same tables as the code.

use std::collections::BTreeSet;

use vitivirt_api::{
    machine::machine_reason::{ERRORS, NOT_READY_REASONS},
    troubleshooting_url,
};
use vitivirt_machine::changes::{ChangeKind, ChangeRule, Effect, RULES};

const PAGE: &str = include_str!("../../../../docs/troubleshooting.md");

/// The headings of the two parts: errors, and reasons of a Machine that is not ready without an error.
const ERRORS_HEADING: &str = "## Errors\n";
const NOT_READY_HEADING: &str = "## Not ready, and nothing is wrong\n";

/// The sections of both parts, each with its heading.
fn sections() -> [Vec<&'static str>; 2] {
    [ERRORS_HEADING, NOT_READY_HEADING].map(|heading| {
        let (_, part) = PAGE.split_once(heading).unwrap();
        let (part, _) = part.split_once("\n## ").unwrap();
        part.split("\n### ").skip(1).collect()
    })
}

/// The diagnosis of a Machine links to the anchor of the heading.
#[test]
fn the_troubleshooting_page_has_one_section_for_every_reason() {
    for (sections, reasons) in sections().into_iter().zip([&ERRORS[..], &NOT_READY_REASONS[..]]) {
        let named: Vec<&str> = sections.iter().filter_map(|section| section.lines().next()).collect();
        assert_eq!(named.len(), reasons.len(), "one section for each reason: {named:?}");
        let (named, reasons): (BTreeSet<_>, BTreeSet<_>) =
            (named.into_iter().collect(), reasons.iter().copied().collect());
        assert_eq!(named, reasons, "docs/troubleshooting.md");
    }
    let url = troubleshooting_url("TemplateNotFound");
    assert!(url.starts_with("https://") && url.ends_with("/docs/troubleshooting.md#templatenotfound"), "{url}");
}

#[test]
fn every_section_of_the_troubleshooting_page_has_all_parts() {
    let parts = [&["Symptom", "Cause", "What to do"][..], &["State", "What happens next"]];
    for (sections, parts) in sections().into_iter().zip(parts) {
        for section in sections {
            for part in parts {
                assert!(section.contains(&format!("\n- **{part}:** ")), "{part} is missing: {section}");
            }
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
