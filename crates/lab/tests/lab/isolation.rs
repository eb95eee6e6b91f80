//! Nothing gets out, nothing is left behind, and several labs do not see each other.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use kube::api::PostParams;
use lab::harness::Suite;
use lab::{Lab, LabOptions};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::nested::{self, HOLD};

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn add(suite: &mut Suite) {
    suite.test("nothing_outside_is_reachable", |_| async move {
        let connect = |address: &str| -> Result<ErrorKind> {
            let address: SocketAddr = address.parse()?;
            match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
                Ok(_) => bail!("{address} answered"),
                Err(error) => Ok(error.kind()),
            }
        };
        ensure!(connect("10.200.3.4:443")? == ErrorKind::ConnectionRefused, "an unserved 10.x address must be refused");
        for elsewhere in ["192.0.2.1:443", "198.51.100.1:80"] {
            ensure!(connect(elsewhere)? == ErrorKind::NetworkUnreachable, "{elsewhere} must have no route");
        }
        Ok(())
    });

    suite.test("two_labs_at_once_do_not_see_each_other", |_| async move {
        let (one, two) = tokio::try_join!(Lab::start(LabOptions::default()), Lab::start(LabOptions::default()))?;
        let namespaces = |lab: &Lab| -> Api<Namespace> { Api::all(lab.client()) };
        let mut only_here = Namespace::default();
        only_here.metadata.name = Some("only-here".to_owned());
        namespaces(&one).create(&PostParams::default(), &only_here).await?;
        ensure!(namespaces(&one).get_opt("only-here").await?.is_some(), "the namespace is where it was made");
        ensure!(namespaces(&two).get_opt("only-here").await?.is_none(), "the other lab must not have it");
        ensure!(one.folder() != two.folder(), "each has a folder of its own");
        one.stop().await?;
        ensure!(namespaces(&two).get_opt("default").await?.is_some(), "the other lab goes on");
        two.stop().await
    });

    suite.test("nothing_is_left_after_kill_9_of_the_process", |_| async move {
        let nested = nested::start(nested::command(&std::env::current_exe()?, HOLD)).await?;
        expect_nothing_left(nested.id()).await
    });

    suite.test("an_ordinary_user_can_run_a_lab", |_| async move {
        let home = tempfile::Builder::new().prefix("lab-user-").tempdir_in("/tmp")?;
        let nobody = 65534;
        let mut command = if is_real_root()? {
            // What the user needs is put where the user may look: the binary and the built parts.
            let program = home.path().join("lab-tests");
            std::fs::write(&program, "")?;
            bind(&std::env::current_exe()?, &program)?;
            let parts = home.path().join("vitistack-lab/parts");
            std::fs::create_dir_all(&parts)?;
            bind(&lab::place::cache_dir()?.join("parts"), &parts)?;
            for folder in [home.path(), &home.path().join("vitistack-lab")] {
                std::os::unix::fs::chown(folder, Some(nobody), Some(nobody))?;
            }
            let mut command = nested::command(&program, HOLD);
            command
                .uid(nobody)
                .gid(nobody)
                .current_dir("/")
                .env("HOME", home.path())
                .env("XDG_CACHE_HOME", home.path());
            command
        } else {
            nested::command(&std::env::current_exe()?, HOLD)
        };
        command.env_remove("KUBEBUILDER_ASSETS");
        let nested = nested::start(command).await?;
        expect_nothing_left(nested.id()).await?;
        for mounted in ["lab-tests", "vitistack-lab/parts"] {
            let _ = nix::mount::umount(&home.path().join(mounted));
        }
        Ok(())
    });

    suite.test("a_server_that_dies_is_reported_at_once", |_| async move {
        for name in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
            let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
            let folder = lab.folder().display().to_string();
            let (_, server) = lab.servers().into_iter().find(|(server, _)| *server == name).context("a server")?;
            let pid = server.pid().context("it runs")?;
            kill(Pid::from_raw(pid), Signal::SIGKILL)?;
            let failure = tokio::time::timeout(Duration::from_secs(2), lab.health().failed()).await?;
            ensure!(failure.to_string().starts_with(&format!("{name} ended unexpectedly")), "{failure}");
            drop(lab);
            let own = std::process::id();
            wait_until(|| !nested::descendants(own).iter().any(|(_, command)| command.contains(&folder)))
                .await
                .with_context(|| format!("processes of the lab are left: {:?}", nested::descendants(own)))?;
        }
        Ok(())
    });
}

/// Kills the process with everything below it alive, and checks that all of it goes.
async fn expect_nothing_left(pid: u32) -> Result<()> {
    let below = nested::descendants(pid);
    for expected in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        ensure!(below.iter().any(|(_, command)| command.contains(expected)), "{expected} does not run: {below:?}");
    }
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    wait_until(|| !below.iter().any(|(pid, _)| nested::is_alive(*pid))).await.with_context(|| {
        format!("left: {:?}", below.iter().filter(|(pid, _)| nested::is_alive(*pid)).collect::<Vec<_>>())
    })?;
    // The nested lab's tmpfs lay over the same folder as ours, but in a mount namespace that is gone.
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let labs = mounts.lines().filter(|line| line.starts_with("lab ")).count();
    ensure!(labs == 1, "{labs} labs are mounted instead of this process's own:\n{mounts}");
    Ok(())
}

async fn wait_until(is_so: impl Fn() -> bool) -> Result<()> {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.with_context(|| format!("not within {PATIENCE:?}"))
}

/// Root of the machine, not only of a user namespace.
fn is_real_root() -> Result<bool> {
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>).context("a bind mount")
}
