//! docs/compatibility.md: which of KubeVirt's specs pass with which operator.

use std::{fmt::Write, fs, path::Path};

use anyhow::{Context, Result};

use super::{
    NOT_ON_THE_LAB, RELEASE, TestedOperator,
    report::{Spec, Specs},
};
use crate::programs;

const PAGE: &str = "docs/compatibility.md";

/// Writes the page if both operators have been tested.
pub(super) fn write(folder: &Path) -> Result<()> {
    let [upstream, ours] = TestedOperator::BOTH.map(|operator| Specs::read(folder, operator));
    let (Some(upstream), Some(ours)) = (upstream?, ours?) else { return Ok(()) };
    let file = programs::root().join(PAGE);
    fs::write(&file, page(&upstream, &ours)).with_context(|| format!("writing {}", file.display()))?;
    println!("wrote {PAGE}");
    Ok(())
}

fn page(upstream: &Specs, ours: &Specs) -> String {
    let mut text = format!(
        "<!-- Written by `cargo xtask e2e`. Do not edit. -->\n\n# Compatibility with upstream virt-operator\n\n\
         KubeVirt {RELEASE} has its own end-to-end specs of virt-operator (package `tests/operator`). `cargo xtask e2e` \
         runs them in the lab, once with upstream virt-operator and once with this project's. Each line is one spec.\n\n\
         | operator | result |\n|---|---|\n| upstream | {upstream} |\n| ours | {ours} |\n\n\
         ## Specs\n\n| spec | upstream | ours |\n|---|---|---|\n"
    );
    let ours = ours.by_name();
    let mut not_run = Vec::new();
    for spec in &upstream.specs {
        let ours = ours.get(spec.name.as_str()).copied();
        let reason = NOT_ON_THE_LAB.iter().find(|(part, _)| spec.name.contains(part));
        if let (Some((_, reason)), true) = (reason, spec.is_skipped()) {
            not_run.push((short_name(&spec.name), reason));
            continue;
        }
        let _ = writeln!(text, "| {} | {} | {} |", short_name(&spec.name), result(Some(spec)), result(ours));
    }
    text.push_str("\n## Specs that the lab cannot run\n\n| spec | reason |\n|---|---|\n");
    for (name, reason) in not_run {
        let _ = writeln!(text, "| {name} | {reason} |");
    }
    text
}

fn result(spec: Option<&Spec>) -> &'static str {
    match spec {
        Some(spec) if spec.has_passed() => "passed",
        Some(spec) if spec.is_skipped() => "skipped",
        Some(_) => "**failed**",
        None => "not run",
    }
}

/// The name without the tags of KubeVirt's test plan, except for the number of the test.
fn short_name(name: &str) -> String {
    let mut short = String::new();
    let mut rest = name;
    while let Some((before, tagged)) = rest.split_once('[') {
        short.push_str(before);
        let Some((tag, after)) = tagged.split_once(']') else { break };
        if let Some(id) = tag.strip_prefix("test_id:") {
            let _ = write!(short, " {id}: ");
        }
        rest = after;
    }
    short.push_str(rest);
    let short = short.split_whitespace().collect::<Vec<_>>().join(" ");
    short.strip_prefix("Operator ").unwrap_or(&short).replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_removed_from_names() {
        let name = "[sig-operator]Operator [rfe_id:2291][crit:high]infrastructure management [test_id:3152]should fail";
        assert_eq!(short_name(name), "infrastructure management 3152: should fail");
    }

    #[test]
    fn the_page_has_a_line_for_each_spec() {
        let specs = |state: &str| -> Specs {
            let spec = |name: &str, state: &str| serde_json::json!({"name": name, "state": state, "seconds": 1, "failure": ""});
            let all = [spec("a", state), spec("[test_id:2910]b", "skipped")];
            serde_json::from_value(serde_json::json!({"specs": all})).unwrap()
        };
        let page = page(&specs("passed"), &specs("timedout"));
        assert!(page.contains("\n| a | passed | **failed** |\n"), "{page}");
        assert!(page.contains("\n| 2910: b | needs OpenShift |\n"), "{page}");
    }
}
