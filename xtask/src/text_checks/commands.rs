//! Shell commands in the docs. A test of kubevirt-operator runs those of the pages that it lists; every other block has a
//! comment that says why it is not run.
//!
//! Commands that users copy, from pages, manifests and messages: they work next to other products.

use vitivirt_lab::shell_blocks::{BlockRun, shell_blocks};

use super::{
    files::{self, SourceFile},
    phrases::CRATES_WITH_MESSAGES,
    rust_source::FragmentKind,
};
use crate::programs::root;

/// Whether the test on the lab runs the commands of a page: its list of pages contains the path.
fn is_run(path: &str) -> bool {
    let test = SourceFile::read(&root().join("crates/kubevirt-operator/tests/cluster/documents.rs"));
    test.text.contains(&format!("\"{path}\""))
}

#[test]
fn every_shell_command_of_the_docs_is_run_or_says_why_not() {
    let mut problems = Vec::new();
    for SourceFile { path, text } in files::documents() {
        for block in shell_blocks(&text) {
            let place = format!("{path}:{}", block.line);
            match block.run {
                BlockRun::No { reason } if reason.trim().is_empty() => problems.push(format!("{place}: no reason")),
                BlockRun::No { .. } => {}
                BlockRun::Yes { .. } | BlockRun::Helm | BlockRun::Last if is_run(&path) => {}
                BlockRun::Yes { .. } | BlockRun::Helm | BlockRun::Last => {
                    problems.push(format!("{place}: no test runs this page"));
                }
            }
        }
    }
    assert!(problems.is_empty(), "see crates/lab/src/shell_blocks.rs:\n{}", problems.join("\n"));
}

/// The commands of kubectl that name the resource `machine` without its group, with the number of their line. A code span may
/// continue on the next line, and so does a line that ends with a backslash.
fn commands_without_group(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        for (at, _) in line.match_indices("kubectl ") {
            let is_span = line[..at].matches('`').count() % 2 == 1;
            let mut command = line[at..].to_owned();
            let mut following = lines[index + 1..].iter();
            while (is_span && !command.contains('`')) || command.ends_with('\\') {
                let Some(next) = following.next() else { break };
                command = format!("{} {}", command.trim_end_matches('\\').trim_end(), next.trim_start());
            }
            let command = if is_span { command.split('`').next().unwrap_or_default() } else { &command };
            let is_ambiguous = |word: &str| {
                let names = word.trim_end_matches(|mark: char| ".;:)`'\"".contains(mark)).split([',', '/']);
                // In vitistack.io/machine it is the name of a label.
                !word.contains("vitistack.io/") && names.into_iter().any(|name| ["machine", "machines"].contains(&name))
            };
            if command.split_whitespace().any(is_ambiguous) {
                found.push((index + 1, command.to_owned()));
            }
        }
    }
    found
}

/// Cluster API and OpenShift have a kind Machine too, and kubectl takes one of them.
#[test]
fn every_command_names_the_group_of_machines() {
    let mut problems = Vec::new();
    let alerts = SourceFile::read(&root().join("xtask/src/monitoring/alerts.yaml"));
    for SourceFile { path, text } in files::documents().into_iter().chain(files::manifests()).chain([alerts]) {
        problems.extend(
            commands_without_group(&text).into_iter().map(|(line, command)| format!("{path}:{line}: {command}")),
        );
    }
    for folder in CRATES_WITH_MESSAGES {
        for (SourceFile { path, .. }, source) in files::production_files(&format!("{folder}/src")) {
            for fragment in source.fragments.iter().filter(|fragment| fragment.kind != FragmentKind::Comment) {
                let commands = commands_without_group(&fragment.text);
                problems.extend(commands.into_iter().map(|(line, command)| {
                    let line = fragment.lines.get(line - 1).copied().unwrap_or_default();
                    format!("{path}:{line}: {command}")
                }));
            }
        }
    }
    assert!(problems.is_empty(), "write machines.vitistack.io:\n{}", problems.join("\n"));
}

mod tests {
    use super::*;

    #[test]
    fn a_machine_without_group_is_found_in_commands_only() {
        let lines =
            |text: &str| -> Vec<usize> { commands_without_group(text).into_iter().map(|(line, _)| line).collect() };
        assert_eq!(lines("a\nrun `kubectl -n {namespace} annotate machine {name} x=y`"), [2]);
        assert_eq!(lines("`kubectl get\nmachines -A` and `kubectl get vm,machines`"), [1, 2]);
        assert_eq!(lines("kubectl -n shop wait \\\n  machine/web"), [1]);
        assert_eq!(lines("`kubectl get machines.vitistack.io` lists machines"), [0; 0]);
        assert_eq!(lines("kubectl get pvc -l vitistack.io/machine=web -L vitistack.io/machine"), [0; 0]);
        assert_eq!(lines("`kubectl describe pod -l vm.kubevirt.io/name={machine}`"), [0; 0]);
    }
}
