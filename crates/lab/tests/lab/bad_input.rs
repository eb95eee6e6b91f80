//! What is missing or wrong on a machine gets one sentence that says what to do, exit code 1, and leaves nothing.

use std::{os::unix::fs::PermissionsExt, process::Command};

use anyhow::{Result, ensure};
use nix::mount::{MsFlags, mount};
use vitivirt_lab::harness::Suite;

use crate::nested::{self, HOLD, PORT_TAKEN};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("go_is_missing", |_| async move {
        let cache = tempfile::tempdir()?;
        let mut command = nested::command(&std::env::current_exe()?, HOLD);
        command.env("XDG_CACHE_HOME", cache.path()).env("PATH", cache.path());
        expect(command, &["`go` was not found", "install Go 1.26"]).await
    });

    suite.test("go_is_too_old", |_| async move {
        let cache = tempfile::tempdir()?;
        let go = cache.path().join("go");
        std::fs::write(&go, "#!/bin/sh\necho go version go1.19.3 linux/amd64\n")?;
        std::fs::set_permissions(&go, std::fs::Permissions::from_mode(0o755))?;
        let mut command = nested::command(&std::env::current_exe()?, HOLD);
        command.env("XDG_CACHE_HOME", cache.path()).env("PATH", cache.path());
        expect(command, &["Go 1.19 is too old", "needs Go 1.26"]).await
    });

    suite.test("a_module_is_not_to_be_had", |_| async move {
        let cache = tempfile::tempdir()?;
        let mut command = nested::command(&std::env::current_exe()?, HOLD);
        command
            .env("XDG_CACHE_HOME", cache.path())
            .env("GOMODCACHE", cache.path().join("modules"))
            .env("GOCACHE", cache.path().join("build"))
            .env("GOPROXY", "off");
        expect(command, &["a Go module of etcd is not to be had", "check the network"]).await
    });

    suite.test("the_disk_is_full", |_| async move {
        let cache = tempfile::tempdir()?;
        mount(Some("small"), cache.path(), Some("tmpfs"), MsFlags::empty(), Some("size=8m"))?;
        let mut command = nested::command(&std::env::current_exe()?, HOLD);
        command.env("XDG_CACHE_HOME", cache.path());
        let result = expect(command, &["MiB free", "free some space"]).await;
        nix::mount::umount(cache.path())?;
        result
    });

    suite.test("namespaces_are_not_allowed", |_| async move {
        // A user namespace below which no further ones may be made; the limit dies with it.
        let nested = nested::command(&std::env::current_exe()?, HOLD);
        let mut command = Command::new("unshare");
        vitivirt_lab::isolate::outside(&mut command);
        for (name, value) in nested.get_envs().filter_map(|(name, value)| Some((name, value?))) {
            command.env(name, value);
        }
        command.args(["--user", "--map-root-user", "sh", "-c"]).arg(
            "echo 0 > /proc/sys/user/max_net_namespaces && echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\"",
        );
        command.arg(nested.get_program());
        expect(command, &["does not let an ordinary user make user namespaces", "or run as root"]).await
    });

    suite.test("the_port_is_taken", |_| async move {
        let command = nested::command(&std::env::current_exe()?, PORT_TAKEN);
        expect(command, &["kube-apiserver cannot listen on 10.1.0.1:6443", "another process"]).await
    });
}

/// Exit code 1, one line that holds every part, and no process left.
async fn expect(command: Command, parts: &[&str]) -> Result<()> {
    let (code, complaint) = nested::complaint(command).await?;
    ensure!(code == Some(1), "exit code {code:?}: {complaint}");
    let sentence = complaint.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    for part in parts {
        ensure!(sentence.contains(part), "{part:?} is missing in: {complaint}");
    }
    ensure!(complaint.lines().filter(|line| line.starts_with("error: ")).count() == 1, "one sentence: {complaint}");
    Ok(())
}
