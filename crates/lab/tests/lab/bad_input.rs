//! Problems of the machine are reported in one sentence with a remedy, and exit code 1.

use std::{os::unix::fs::PermissionsExt, process::Command, sync::Arc};

use anyhow::{Result, ensure};
use nix::mount::{MsFlags, mount};
use vitivirt_lab::{
    harness::{SharedLabs, Suite},
    tests,
};

use crate::nested::{self, KEEP_LAB, PORT_IN_USE};

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        a_missing_go_is_reported,
        an_old_go_version_is_reported,
        an_unavailable_go_module_is_reported,
        a_full_disk_is_reported,
        forbidden_user_namespaces_are_reported,
        a_port_in_use_is_reported,
    );
}

async fn a_missing_go_is_reported(_: Arc<SharedLabs>) -> Result<()> {
    let cache = tempfile::tempdir()?;
    let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
    command.env("XDG_CACHE_HOME", cache.path()).env("PATH", cache.path());
    expect(command, &["`go` was not found", "install Go 1.26"]).await
}

async fn an_old_go_version_is_reported(_: Arc<SharedLabs>) -> Result<()> {
    let cache = tempfile::tempdir()?;
    let go = cache.path().join("go");
    std::fs::write(&go, "#!/bin/sh\necho go version go1.19.3 linux/amd64\n")?;
    std::fs::set_permissions(&go, std::fs::Permissions::from_mode(0o755))?;
    let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
    command.env("XDG_CACHE_HOME", cache.path()).env("PATH", cache.path());
    expect(command, &["Go 1.19 is too old", "needs Go 1.26"]).await
}

async fn an_unavailable_go_module_is_reported(_: Arc<SharedLabs>) -> Result<()> {
    let cache = tempfile::tempdir()?;
    let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
    command
        .env("XDG_CACHE_HOME", cache.path())
        .env("GOMODCACHE", cache.path().join("modules"))
        .env("GOCACHE", cache.path().join("build"))
        .env("GOPROXY", "off");
    expect(command, &["cannot download a Go module of etcd", "check the network"]).await
}

async fn a_full_disk_is_reported(_: Arc<SharedLabs>) -> Result<()> {
    let cache = tempfile::tempdir()?;
    mount(Some("small"), cache.path(), Some("tmpfs"), MsFlags::empty(), Some("size=8m"))?;
    let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
    command.env("XDG_CACHE_HOME", cache.path());
    let result = expect(command, &["MiB free", "free some space"]).await;
    nix::mount::umount(cache.path())?;
    result
}

async fn forbidden_user_namespaces_are_reported(_: Arc<SharedLabs>) -> Result<()> {
    // A user namespace that allows no nested ones. The limit disappears with it.
    let nested = nested::command(&std::env::current_exe()?, KEEP_LAB);
    let mut command = Command::new("unshare");
    vitivirt_lab::isolate::outside(&mut command);
    for (name, value) in nested.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        command.env(name, value);
    }
    command.args(["--user", "--map-root-user", "sh", "-c"]).arg(
        "echo 0 > /proc/sys/user/max_net_namespaces && echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\"",
    );
    command.arg(nested.get_program());
    expect(command, &["does not allow unprivileged user namespaces", "or run as root"]).await
}

async fn a_port_in_use_is_reported(_: Arc<SharedLabs>) -> Result<()> {
    let command = nested::command(&std::env::current_exe()?, PORT_IN_USE);
    expect(command, &["kube-apiserver cannot listen on 10.1.0.1:6443", "another process"]).await
}

/// Checks for exit code 1 and one error line that contains every part.
async fn expect(command: Command, parts: &[&str]) -> Result<()> {
    let (code, stderr) = nested::run_to_end(command).await?;
    ensure!(code == Some(1), "exit code {code:?}: {stderr}");
    let sentence = stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    for part in parts {
        ensure!(sentence.contains(part), "{part:?} is missing in: {stderr}");
    }
    ensure!(
        stderr.lines().filter(|line| line.starts_with("error: ")).count() == 1,
        "expected one error line: {stderr}"
    );
    Ok(())
}
