//! The program as a user runs it, without a cluster: exit codes, streams and the environment.

#![expect(clippy::unwrap_used, reason = "a helper that fails must fail the test")]

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

const PLAIN: &str = "{apiVersion: kubevirt.io/v1, kind: KubeVirt, metadata: {name: kubevirt}, spec: {}}";

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_virt-operator"));
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str], input: &str) -> Output {
    let mut child = command(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn invalid_variables_of_the_operator_stop_only_the_operator() {
    for arguments in [&["crds"][..], &["manifests"], &["completions", "zsh"], &["--help"]] {
        let mut command = command(arguments);
        let output = command.env("VIRT_OPERATOR_CLIENT_QPS", "fast").env("NAMESPACE", "A_B").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
        assert!(!output.stdout.is_empty());
    }
    let output = command(&["run"]).env("NAMESPACE", "A_B").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = "error: NAMESPACE (--namespace): invalid value \"A_B\": must be the name of a single namespace\n";
    assert_eq!(stderr(&output), expected);
}

#[test]
fn render_exits_with_1_for_invalid_input_and_with_2_for_an_unreadable_file() {
    assert_eq!(run(&["render", "-f", "-", "-o", "json"], PLAIN).status.code(), Some(0));
    let invalid = run(&["render", "-f", "-"], &PLAIN.replace("spec: {}", "spec: {imagePullPolicy: [1]}"));
    assert_eq!(invalid.status.code(), Some(1));
    let expected = "error: standard input: KubeVirt kubevirt: spec.imagePullPolicy: must be a string, not a list\n";
    assert_eq!(stderr(&invalid), expected);
    let other = run(&["render", "-f", "-"], &PLAIN.replace("spec: {}", "spec: {imageTag: v1.7.0}"));
    assert_eq!(other.status.code(), Some(1));
    assert!(stderr(&other).starts_with("error: spec.imageTag: unsupported value \"v1.7.0\""), "{}", stderr(&other));
    let missing = command(&["render", "-f", "/no/such/file"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
}

#[test]
fn plan_exits_with_2_when_the_cluster_cannot_be_reached() {
    let missing = run(&["plan", "-f", "-", "--kubeconfig", "/no/such/kubeconfig"], PLAIN);
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
    assert!(stderr(&missing).contains("/no/such/kubeconfig"), "{}", stderr(&missing));
}

#[test]
fn the_version_names_program_project_commit_and_kubevirt_release() {
    let version = String::from_utf8(command(&["--version"]).output().unwrap().stdout).unwrap();
    let start = concat!("virt-operator ", env!("CARGO_PKG_VERSION"), " (VitiVirt commit ");
    assert!(version.starts_with(start) && version.ends_with(", KubeVirt v1.8.4)\n"), "{version}");
}

/// The operator checks its image before anything else, so its error shows which value it sees.
#[test]
fn variables_for_all_components_apply_to_the_operator_too() {
    let mut command = command(&["run"]);
    command.env("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4");
    let output = command.env("KV_IO_EXTRA_ENV_VIRT_OPERATOR_IMAGE", "junk").output().unwrap();
    let error = stderr(&output);
    assert!(error.starts_with("error: VIRT_OPERATOR_IMAGE: invalid value \"junk\""), "{error}");
}
