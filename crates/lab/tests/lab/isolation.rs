//! A lab cannot reach other machines, leaves nothing behind, and is isolated from other labs.

use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::PostParams};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vitivirt_lab::{
    Lab, LabOptions,
    daemon::{DaemonState, LabDaemon},
    harness::{SharedLabs, Suite},
    tests,
};

use crate::nested::{self, BACKGROUND_LAB, ENTER_NETWORK, EXEC, KEEP_LAB};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Creating and removing namespaces waits in the kernel until the network namespaces of earlier labs are removed.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        no_address_outside_the_lab_is_reachable,
        two_labs_share_neither_objects_nor_folders,
        nothing_is_left_after_the_lab_process_is_killed,
        a_leftover_environment_variable_changes_no_mounts,
        a_background_lab_stops_when_its_starter_exits_before_it_is_ready,
        a_process_that_enters_a_background_lab_keeps_its_listener,
        a_command_runs_in_a_background_lab,
        the_logs_of_a_stopped_lab_are_kept_until_the_test_ends,
        an_unprivileged_user_can_run_a_lab,
        a_dead_server_process_fails_the_lab,
    );
}

async fn no_address_outside_the_lab_is_reachable(_: Arc<SharedLabs>) -> Result<()> {
    let connect = |address: &str| -> Result<ErrorKind> {
        let address: SocketAddr = address.parse()?;
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(_) => bail!("{address} answered"),
            Err(error) => Ok(error.kind()),
        }
    };
    ensure!(
        connect("10.200.3.4:443")? == ErrorKind::ConnectionRefused,
        "an unused 10.x address must refuse connections"
    );
    for address in ["192.0.2.1:443", "198.51.100.1:80"] {
        ensure!(connect(address)? == ErrorKind::NetworkUnreachable, "{address} must have no route");
    }
    Ok(())
}

async fn two_labs_share_neither_objects_nor_folders(_: Arc<SharedLabs>) -> Result<()> {
    let (one, two) = tokio::try_join!(Lab::start(LabOptions::default()), Lab::start(LabOptions::default()))?;
    let namespaces = |lab: &Lab| -> Api<Namespace> { Api::all(lab.client()) };
    let mut only_here = Namespace::default();
    only_here.metadata.name = Some("only-here".to_owned());
    namespaces(&one).create(&PostParams::default(), &only_here).await?;
    ensure!(namespaces(&one).get_opt("only-here").await?.is_some(), "the first lab must have the namespace");
    ensure!(namespaces(&two).get_opt("only-here").await?.is_none(), "the second lab must not have the namespace");
    ensure!(one.folder() != two.folder(), "each lab must have its own folder");
    one.stop().await?;
    ensure!(namespaces(&two).get_opt("default").await?.is_some(), "the second lab must continue");
    two.stop().await
}

async fn nothing_is_left_after_the_lab_process_is_killed(_: Arc<SharedLabs>) -> Result<()> {
    // The cache is on a shared mount, which propagates mounts below it unless the nested lab makes its mounts private.
    let home = Home::new()?;
    let _shared = home.shared_tmpfs()?;
    let _components = home.with_components()?;
    let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
    command.env("XDG_CACHE_HOME", home.path());
    let nested = nested::start(command).await?;
    let run = home.cache().join("run");
    let inside =
        nested::descendants(nested.id()).first().map(|(pid, _)| *pid).context("no process in the namespaces")?;
    ensure!(is_mounted(&inside.to_string(), &run)?, "the nested lab has no tmpfs");
    ensure!(!is_mounted("self", &run)?, "the nested lab's tmpfs is visible outside of it");
    expect_nothing_left(nested.id()).await?;
    ensure!(!is_mounted("self", &run)?, "a mount of the nested lab is left");
    ensure!(std::fs::read_dir(&run)?.next().is_none(), "files of the nested lab are left in {}", run.display());
    Ok(())
}

async fn a_leftover_environment_variable_changes_no_mounts(_: Arc<SharedLabs>) -> Result<()> {
    let proc_mounts = || -> Result<usize> {
        Ok(mount_points("self")?.iter().filter(|point| point.as_path() == Path::new("/proc")).count())
    };
    let before = proc_mounts()?;
    for network in [std::fs::read_link("/proc/self/ns/net")?, "net:[1]".into()] {
        let mut command = nested::command(&std::env::current_exe()?, KEEP_LAB);
        command.env("VITISTACK_LAB_INSIDE", format!("{} {}", std::process::id(), network.display()));
        let (code, error) = nested::run_to_end(command).await?;
        ensure!(code == Some(1) && error.contains("not in its own namespaces"), "{code:?}: {error}");
        ensure!(proc_mounts()? == before, "the command mounted /proc in this process's namespace");
    }
    Ok(())
}

async fn a_background_lab_stops_when_its_starter_exits_before_it_is_ready(_: Arc<SharedLabs>) -> Result<()> {
    let name = format!("test-{}", std::process::id());
    let mut command = nested::command(&std::env::current_exe()?, BACKGROUND_LAB);
    command.env(nested::NAME, &name).stdin(Stdio::piped());
    let mut daemon = command.spawn()?;
    let started = wait_until(|| !nested::descendants(daemon.id()).is_empty()).await;
    let descendants = nested::descendants(daemon.id());
    drop(daemon.stdin.take());
    let ended = wait_until(|| {
        !descendants.iter().chain([&(daemon.id(), String::new())]).any(|(pid, _)| nested::is_alive(*pid))
    });
    let ended = ended.await;
    let _ = daemon.kill();
    let output = tokio::task::spawn_blocking(move || daemon.wait_with_output()).await??;
    let error = String::from_utf8_lossy(&output.stderr);
    started.with_context(|| format!("the background lab does not start: {error}"))?;
    ended.with_context(|| format!("the background lab still runs after its starter exited: {error}"))?;
    ensure!(error.contains("exited before the lab was ready"), "{error}");
    ensure!(LabDaemon::find(&name)?.is_none(), "the file of the lab must be removed");
    Ok(())
}

/// Runs a part of a test while a background lab of this name runs.
async fn with_background_lab<T>(name: &str, test: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
    let mut lab = nested::command(&std::env::current_exe()?, BACKGROUND_LAB);
    let mut lab = lab.env(nested::NAME, name).stdin(Stdio::piped()).spawn()?;
    let is_ready = || {
        let found = LabDaemon::find(name).ok().flatten();
        found.is_some_and(|daemon| matches!(daemon.state, DaemonState::Ready { .. }))
    };
    let result = match wait_until(is_ready).await {
        Ok(()) => test().await,
        Err(error) => Err(error.context("the background lab is not ready")),
    };
    let _ = vitivirt_lab::daemon::down(name);
    let _ = lab.kill();
    tokio::task::spawn_blocking(move || lab.wait()).await??;
    result
}

/// `cargo xtask lab page` relies on it: a browser outside of the lab reaches a server inside of it.
async fn a_process_that_enters_a_background_lab_keeps_its_listener(_: Arc<SharedLabs>) -> Result<()> {
    let name = format!("test-page-{}", std::process::id());
    let connect = async || {
        let mut command = nested::command(&std::env::current_exe()?, ENTER_NETWORK);
        command.env(nested::NAME, &name);
        tokio::task::spawn_blocking(move || nested::connect_through(command)).await?
    };
    let answer = with_background_lab(&name, connect).await?;
    ensure!(answer.contains("HTTP request to an HTTPS server"), "{answer:?}");
    Ok(())
}

async fn a_command_runs_in_a_background_lab(_: Arc<SharedLabs>) -> Result<()> {
    let name = format!("test-exec-{}", std::process::id());
    let run = async |name: String| {
        let mut command = nested::command(&std::env::current_exe()?, EXEC);
        command.env(nested::NAME, name);
        nested::run_to_end(command).await
    };
    let (code, output) = with_background_lab(&name, async || {
        let (code, error) = run("test-absent".to_owned()).await?;
        ensure!(code == Some(1) && error.contains(&format!("`--name {name}`")), "{code:?}: {error}");
        run(name.clone()).await
    })
    .await?;
    ensure!(code == Some(7) && output.contains("node/node-1"), "{code:?}: {output}");
    Ok(())
}

async fn the_logs_of_a_stopped_lab_are_kept_until_the_test_ends(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
    let folder = lab.folder().to_owned();
    lab.stop().await?;
    ensure!(!folder.exists(), "the lab's folder must be removed");
    let mut saved = std::fs::read_dir(vitivirt_lab::paths::stopped_labs_dir(stringify!(
        the_logs_of_a_stopped_lab_are_kept_until_the_test_ends
    ))?)?;
    let logs = saved.next().context("no logs were kept")??.path();
    ensure!(
        std::fs::read_to_string(logs.join("audit.log"))?.contains("audit.k8s.io"),
        "the audit log contains no events"
    );
    ensure!(logs.join("logs/kube-apiserver.log").is_file(), "the logs of the servers must be kept");
    ensure!(!logs.join("admin.kubeconfig").exists(), "credentials must not be kept");
    Ok(())
}

async fn an_unprivileged_user_can_run_a_lab(_: Arc<SharedLabs>) -> Result<()> {
    let home = Home::new()?;
    let mut mounts = Vec::new();
    let nobody_id = 65534;
    let mut command = if is_real_root()? {
        // The user needs access to the binary and the built components.
        let program = home.path().join("lab-tests");
        std::fs::write(&program, "")?;
        mounts.push(BindMount::bind(&std::env::current_exe()?, &program)?);
        mounts.push(home.with_components()?);
        for folder in [home.path(), &home.cache()] {
            std::os::unix::fs::chown(folder, Some(nobody_id), Some(nobody_id))?;
        }
        let mut command = nested::command(&program, KEEP_LAB);
        command
            .uid(nobody_id)
            .gid(nobody_id)
            .current_dir("/")
            .env("HOME", home.path())
            .env("XDG_CACHE_HOME", home.path());
        command
    } else {
        nested::command(&std::env::current_exe()?, KEEP_LAB)
    };
    command.env_remove("KUBEBUILDER_ASSETS");
    let nested = nested::start(command).await?;
    expect_nothing_left(nested.id()).await
}

async fn a_dead_server_process_fails_the_lab(_: Arc<SharedLabs>) -> Result<()> {
    for name in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
        let folder = lab.folder().display().to_string();
        let (_, server) =
            lab.servers().into_iter().find(|(server, _)| *server == name).context("server process not found")?;
        let pid = server.pid().context("the server process is not running")?;
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        let failure = tokio::time::timeout(TIMEOUT, lab.health().failed()).await?;
        ensure!(failure.to_string().starts_with(&format!("{name} exited unexpectedly")), "{failure}");
        drop(lab);
        let this_process = std::process::id();
        wait_until(|| !nested::descendants(this_process).iter().any(|(_, command)| command.contains(&folder)))
            .await
            .with_context(|| format!("processes of the lab still run: {:?}", nested::descendants(this_process)))?;
    }
    Ok(())
}

/// Kills the process and checks that all its descendants exit.
async fn expect_nothing_left(pid: u32) -> Result<()> {
    let expected = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];
    // A process has no command line between fork and exec.
    let is_running = |name: &str| nested::descendants(pid).iter().any(|(_, command)| command.contains(name));
    wait_until(|| expected.iter().all(|name| is_running(name)))
        .await
        .with_context(|| format!("not all of {expected:?} run: {:?}", nested::descendants(pid)))?;
    let descendants = nested::descendants(pid);
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    wait_until(|| !descendants.iter().any(|(pid, _)| nested::is_alive(*pid))).await.with_context(|| {
        format!("still running: {:?}", descendants.iter().filter(|(pid, _)| nested::is_alive(*pid)).collect::<Vec<_>>())
    })?;
    Ok(())
}

/// A temporary folder for the cache of a nested lab. Mounts in it must be declared after it, so that they are unmounted
/// before the folder is removed.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Result<Self> {
        Ok(Home(tempfile::Builder::new().prefix("lab-user-").tempdir_in("/tmp")?))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn cache(&self) -> PathBuf {
        self.path().join("vitistack-lab")
    }

    /// Mounts the built components of this process's own cache.
    fn with_components(&self) -> Result<BindMount> {
        let components = self.cache().join("parts");
        std::fs::create_dir_all(&components)?;
        BindMount::bind(&vitivirt_lab::paths::cache_dir()?.join("parts"), &components)
    }

    fn shared_tmpfs(&self) -> Result<BindMount> {
        mount(Some("home"), self.path(), Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
            .context("mounting a tmpfs")?;
        let mounted = BindMount(self.path().to_owned());
        mount(None::<&str>, self.path(), None::<&str>, MsFlags::MS_SHARED, None::<&str>)
            .context("making the mount shared")?;
        Ok(mounted)
    }
}

/// A mount. Dropping it unmounts it.
struct BindMount(PathBuf);

impl BindMount {
    fn bind(from: &Path, to: &Path) -> Result<Self> {
        mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
            .context("creating a bind mount")?;
        Ok(BindMount(to.to_owned()))
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// The mount points that a process (a PID or `self`) sees.
fn mount_points(process: &str) -> Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string(format!("/proc/{process}/mountinfo"))?;
    Ok(table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect())
}

fn is_mounted(process: &str, point: &Path) -> Result<bool> {
    Ok(mount_points(process)?.iter().any(|mounted| mounted == point))
}

async fn wait_until(condition: impl Fn() -> bool) -> Result<()> {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(NAMESPACE_TIMEOUT, waiting)
        .await
        .with_context(|| format!("timed out after {NAMESPACE_TIMEOUT:?}"))
}

/// Whether this process is root on the machine, not only in a user namespace.
fn is_real_root() -> Result<bool> {
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
}
