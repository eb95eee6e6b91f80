//! A plan for people. The text is styled with ANSI escape codes, which the output stream removes if it has no colors.
//! Columns are padded before they are styled, so escape codes do not count as width.

use std::{collections::BTreeMap, fmt::Write as _};

use anstyle::{AnsiColor, Style};

use super::{
    ChangeEffect, ObjectIdentity, PlanDocument, PlanResult, PlannedChange, PlannedObject, PlannedRestart,
    PlannedRollout, PlannedVm, PlannedWrite, VmEffect, WriteAction,
};

const BOLD: Style = Style::new().bold();
const DIMMED: Style = Style::new().dimmed();
const RED: Style = AnsiColor::Red.on_default();
const GREEN: Style = AnsiColor::Green.on_default();
const YELLOW: Style = AnsiColor::Yellow.on_default();

/// The width of "restart" and "refused", the longest words of the first column.
const COLUMN: usize = 7;
/// So many objects of which only the metadata changes are listed one by one.
const LISTED_METADATA: usize = 10;
/// So many names are listed one by one.
const LISTED_NAMES: usize = 5;

pub(super) fn render(document: &PlanDocument) -> String {
    let mut lines = Vec::new();
    for warning in &document.warnings {
        lines.push(warning_line(warning));
    }
    for object in &document.objects {
        object_lines(object, &mut lines);
    }
    let mut text = String::new();
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn object_lines(object: &PlannedObject, lines: &mut Vec<String>) {
    let state = if object.exists { "exists" } else { "does not exist yet" };
    lines.push(styled(BOLD, &format!("{} ({state})", object.identity)));
    let (metadata, others): (Vec<_>, Vec<_>) = object.writes.iter().partition(|write| changes_only_metadata(write));
    if metadata.len() > LISTED_METADATA {
        let column = styled(YELLOW, &format!("~ {:<COLUMN$}", verb(WriteAction::Update)));
        let count = metadata.len();
        lines.push(format!("  {column} {count} objects: only labels and annotations; -o json lists them"));
        others.into_iter().for_each(|write| write_lines(write, lines));
    } else {
        object.writes.iter().for_each(|write| write_lines(write, lines));
    }
    for kept in object.rollout.iter().flat_map(|rollout| &rollout.kept) {
        lines.push(format!("  {} {}", styled(GREEN, &format!("= {:<COLUMN$}", "keep")), kept.line()));
    }
    if let Some(rollout) = &object.rollout {
        rollout_lines(rollout, lines);
    }
    for refused in &object.refused {
        let column = styled(RED, &format!("! {:<COLUMN$}", "refused"));
        lines.push(format!("  {column} {}: {}", refused.field, refused.reason));
    }
    for blocker in object.rollout.iter().flat_map(|rollout| &rollout.blockers) {
        lines.push(format!("  {} {blocker}", styled(RED, &format!("! {:<COLUMN$}", "blocked"))));
    }
    for warning in &object.warnings {
        lines.push(format!("  {}", warning_line(warning)));
    }
    let unchanged = object.rollout.as_ref().map(|rollout| format!(", {} unchanged", rollout.unchanged));
    lines.push(format!("  {}{}", counts(&object.writes), unchanged.unwrap_or_default()));
    lines.push(format!("  {}", result_line(&object.result)));
}

fn write_lines(write: &PlannedWrite, lines: &mut Vec<String>) {
    let (sign, style) = match write.action {
        WriteAction::Create => ('+', GREEN),
        WriteAction::Update => ('~', YELLOW),
        WriteAction::Restart => ('~', RED),
        WriteAction::Delete => ('-', RED),
    };
    let column = styled(style, &format!("{sign} {:<COLUMN$}", verb(write.action)));
    lines.push(format!("  {column} {}", write.identity));
    for change in &write.changes {
        lines.push(format!("      {}", change_line(change)));
        let why: Vec<&str> = [change.source_field.as_deref(), change.reason.as_deref()].into_iter().flatten().collect();
        if !why.is_empty() {
            lines.push(format!("        {}", styled(DIMMED, &why.join(": "))));
        }
    }
}

fn changes_only_metadata(write: &PlannedWrite) -> bool {
    write.action == WriteAction::Update
        && !write.changes.is_empty()
        && write.changes.iter().all(|change| change.field.starts_with("metadata."))
}

fn rollout_lines(rollout: &PlannedRollout, lines: &mut Vec<String>) {
    if let (Some(from), Some(to)) = (&rollout.from_version, &rollout.to_version)
        && from != to
    {
        lines.push(format!("  {}", styled(BOLD, &format!("{from} → {to}"))));
    }
    lines.extend(rollout.preparations.iter().map(|preparation| format!("  first: {preparation}")));
    if !rollout.restarts.is_empty() {
        lines.push("  pods restart, in this order:".to_owned());
    }
    for (index, restart) in rollout.restarts.iter().enumerate() {
        lines.push(format!("    {}. {}", index + 1, restart_line(restart)));
    }
    let mut groups: BTreeMap<(VmEffect, &str), Vec<&PlannedVm>> = BTreeMap::new();
    for vm in &rollout.vms {
        groups.entry((vm.effect, &vm.reason)).or_default().push(vm);
    }
    if !groups.is_empty() {
        lines.push("  VMs, when KubeVirt is updated:".to_owned());
    }
    for ((effect, reason), vms) in groups {
        let (verb, style) = match effect {
            VmEffect::Migrate => ("migrate", GREEN),
            VmEffect::Evict => ("evict", RED),
            VmEffect::StayOutdated => ("outdated", YELLOW),
        };
        let key = |vm: &&PlannedVm| match &vm.identity.namespace {
            Some(namespace) => format!("{namespace}/{}", vm.identity.name),
            None => vm.identity.name.clone(),
        };
        let names = shortened(&vms.iter().map(key).collect::<Vec<_>>());
        lines.push(format!("    {} {names}", styled(style, &format!("{verb:<8} {:>4}", vms.len()))));
        lines.push(format!("        {}", styled(DIMMED, reason)));
    }
}

fn restart_line(restart: &PlannedRestart) -> String {
    let count = |number: usize, one: &str| format!("{number} {one}{}", if number == 1 { "" } else { "s" });
    let pods = count(restart.pods.len(), "pod");
    let how = match restart.batches.as_slice() {
        [] if restart.pods.is_empty() => String::new(),
        [] => format!(": {}", shortened(&restart.pods)),
        [first] => format!(": on {} first", count(*first, "node")),
        [first, then, ..] => {
            let batches = restart.batches.len();
            format!(
                ": on {} first, then on {} at a time ({batches} batches)",
                count(*first, "node"),
                count(*then, "node")
            )
        }
    };
    format!("{}, {pods}{how}", restart.identity)
}

fn shortened(names: &[String]) -> String {
    let listed = names.iter().take(LISTED_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(LISTED_NAMES) {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

fn change_line(change: &PlannedChange) -> String {
    let effect = match change.effect {
        ChangeEffect::Live => "live",
        ChangeEffect::LiveIfPossible => "live if KubeVirt can hotplug it, otherwise at restart",
        ChangeEffect::Restart => "at restart",
        ChangeEffect::Refused => "refused",
    };
    let field = &change.field;
    match (&change.from, &change.to) {
        (None, None) => format!("{field} ({effect})"),
        (None, Some(to)) => format!("{field}: {to} ({effect})"),
        (Some(from), None) => format!("{field}: {from} is removed ({effect})"),
        (Some(from), Some(to)) => format!("{field}: {from} → {to} ({effect})"),
    }
}

fn counts(writes: &[PlannedWrite]) -> String {
    let mut counts: BTreeMap<WriteAction, usize> = BTreeMap::new();
    for write in writes {
        *counts.entry(write.action).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(action, count)| format!("{count} to {}", verb(*action))).collect();
    if counts.is_empty() { "nothing to write".to_owned() } else { counts.join(", ") }
}

fn verb(action: WriteAction) -> &'static str {
    match action {
        WriteAction::Create => "create",
        WriteAction::Update => "update",
        WriteAction::Restart => "restart",
        WriteAction::Delete => "delete",
    }
}

/// `→ phase Failed, not Ready (SecretNotFound): Secret x not found`. A reason that repeats the phase is left out.
fn result_line(result: &PlanResult) -> String {
    let phase = result.phase.as_deref().map(|phase| format!("phase {phase}"));
    let (state, style) = match (result.ready, result.error) {
        (Some(true), false) => (Some("Ready"), GREEN),
        (Some(true), true) => (Some("Ready"), YELLOW),
        (Some(false), error) => (Some("not Ready"), if error { RED } else { YELLOW }),
        (None, true) => (Some("error"), RED),
        (None, false) => (None, GREEN),
    };
    let reason = result.reason.as_deref().filter(|reason| result.phase.as_deref() != Some(*reason));
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let states: Vec<String> = phase.into_iter().chain(state.map(ToOwned::to_owned)).collect();
    let states = styled(style, &format!("{}{reason}", states.join(", ")));
    match (result.message.as_deref(), states.is_empty()) {
        (Some(message), true) => format!("→ {message}"),
        (Some(message), false) => format!("→ {states}: {message}"),
        (None, _) => format!("→ {states}"),
    }
}

fn warning_line(warning: &str) -> String {
    format!("{} {warning}", styled(YELLOW, "warning:"))
}

fn styled(style: Style, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{style}{text}{style:#}") }
}

impl std::fmt::Display for ObjectIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}
