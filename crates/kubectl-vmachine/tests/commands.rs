//! The plugin as a user runs it, without a cluster: help, exit codes and sentences.

#![expect(clippy::unwrap_used, reason = "a helper that fails must fail the test")]

use std::process::{Command, Output, Stdio};

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vmachine"));
    command.args(arguments).env_clear().stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn help_lists_every_command_as_kubectl_calls_it() {
    let output = run(&["--help"]);
    let help = text(&output.stdout);
    assert!(output.status.success() && help.contains("Usage: kubectl vmachine <COMMAND>"), "{help}");
    for command in [
        "list",
        "describe",
        "start",
        "stop",
        "restart",
        "console",
        "ssh",
        "vnc",
        "plan",
        "adopt",
        "collect-debug-info",
        "completions",
    ] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(command)), "{command} is missing in {help}");
    }
}

#[test]
fn without_a_cluster_the_error_says_how_to_name_one() {
    for arguments in [&["list"][..], &["describe", "web"], &["stop", "web"], &["adopt", "web"], &["collect-debug-info"]]
    {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains("no cluster is configured") && error.contains("--kubeconfig"), "{error}");
        assert!(output.stdout.is_empty());
    }
    let output = run(&["list", "--kubeconfig", "/nonexistent"]);
    assert!(text(&output.stderr).contains("invalid kubeconfig /nonexistent"), "{}", text(&output.stderr));
}

#[test]
fn without_virtctl_the_error_says_how_to_get_it() {
    for command in ["console", "ssh", "vnc"] {
        let output = run(&[command, "web"]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("virtctl not found in PATH; install it with `kubectl krew install virt`"), "{error}");
    }
}

#[test]
fn virtctl_replaces_the_plugin() {
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("virtctl-of-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("virtctl");
    std::fs::write(&file, "#!/bin/sh\necho \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vmachine"));
    let output = command.args(["ssh", "root@web", "-n", "shop"]).env_clear().env("PATH", &folder).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(7), "ssh root@vm/web --namespace=shop\n"));
}

#[test]
fn kubectl_completes_commands_without_a_cluster() {
    for (arguments, expected) in [
        (&["__complete", "st"][..], "start\nstop\n:4\n"),
        (&["__complete", "describe", "-o", ""], "json\ntext\nyaml\n:0\n"),
        (&["__complete", "stop", ""], ":4\n"),
    ] {
        let output = run(arguments);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), expected), "{arguments:?}");
    }
}

#[test]
fn completions_are_for_the_plugin() {
    let output = run(&["completions", "bash"]);
    assert!(output.status.success() && text(&output.stdout).contains("collect-debug-info"));
}
