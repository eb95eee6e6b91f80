//! Shell commands in the docs. A test of kubevirt-operator runs those of the pages that it lists; every other block has a
//! comment that says why it is not run.

use vitivirt_lab::shell_blocks::{BlockRun, shell_blocks};

use super::files::{self, SourceFile};
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
