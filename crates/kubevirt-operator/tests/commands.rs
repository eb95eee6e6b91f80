//! The program as a user runs it, without a cluster: exit codes, streams and the environment.

#![expect(clippy::unwrap_used, reason = "a helper that fails must fail the test")]

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/basic-vm.yaml");
const INVALID: &str =
    "{apiVersion: vitistack.io/v1alpha1, kind: Machine, metadata: {name: vm}, spec: {disks: [{size: 5}]}}";
const REFUSED: &str =
    "{apiVersion: vitistack.io/v1alpha1, kind: Machine, metadata: {name: vm}, spec: {template: huge}}";

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubevirt-operator"));
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str], input: &str) -> Output {
    let mut child = command(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn invalid_variables_of_the_operator_stop_only_the_operator() {
    for arguments in [&["crds"][..], &["render", "-f", EXAMPLE], &["completions", "bash"], &["--help"]] {
        let output = command(arguments)
            .env("LOG_LEVEL", "loud")
            .env("RECONCILE_INTERVAL", "soon")
            .env("NAMESPACE", "A_B")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
        assert!(!output.stdout.is_empty());
    }
    let output = command(&["run"]).env("LOG_LEVEL", "loud").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = "error: LOG_LEVEL (--log-level): unsupported value \"loud\"; supported values: error, warn, info, debug, trace\n";
    assert_eq!(stderr(&output), expected);
}

#[test]
fn render_exits_with_1_for_invalid_input_and_with_2_for_an_unreadable_file() {
    let invalid = run(&["render", "-f", "-"], INVALID);
    assert_eq!(invalid.status.code(), Some(1));
    let expected = "error: standard input: Machine vm: spec.disks[0].";
    assert!(stderr(&invalid).starts_with(expected), "{}", stderr(&invalid));

    let refused = run(&["render", "-n", "ns", "-f", "-"], REFUSED);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).starts_with("error: Machine ns/vm: TemplateNotFound: "), "{}", stderr(&refused));

    let missing = command(&["render", "-f", "/no/such/file"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).starts_with("error: cannot read /no/such/file: "), "{}", stderr(&missing));
    assert_eq!(command(&["render"]).output().unwrap().status.code(), Some(2), "an argument is missing");
}

#[test]
fn plan_exits_with_2_when_the_cluster_cannot_be_reached() {
    let plan = |arguments: &[&str]| command(&[&["plan", "-f", EXAMPLE], arguments].concat()).output().unwrap();
    let missing = plan(&["--kubeconfig", "/no/such/kubeconfig"]);
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
    assert!(stderr(&missing).contains("/no/such/kubeconfig"), "{}", stderr(&missing));
    assert!(missing.stdout.is_empty());
}

#[test]
fn the_version_names_program_project_commit_and_kubevirt_release() {
    let version = stdout(&command(&["--version"]).output().unwrap());
    let start = concat!("kubevirt-operator ", env!("CARGO_PKG_VERSION"), " (VitiVirt commit ");
    assert!(version.starts_with(start) && version.ends_with(", KubeVirt v1.8.4)\n"), "{version}");
}
