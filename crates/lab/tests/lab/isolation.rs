//! Nothing gets out, nothing is left behind, and several labs do not see each other.

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
    harness::{SharedLabs, Suite},
    tests,
};

use crate::nested::{self, HOLD, RESIDE};

const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        no_address_outside_the_lab_is_reachable,
        two_labs_share_neither_objects_nor_folders,
        nothing_is_left_after_the_lab_process_is_killed,
        a_leftover_environment_variable_changes_no_mounts,
        a_background_lab_stops_when_its_starter_exits_before_it_is_ready,
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
    ensure!(connect("10.200.3.4:443")? == ErrorKind::ConnectionRefused, "an unserved 10.x address must be refused");
    for elsewhere in ["192.0.2.1:443", "198.51.100.1:80"] {
        ensure!(connect(elsewhere)? == ErrorKind::NetworkUnreachable, "{elsewhere} must have no route");
    }
    Ok(())
}

async fn two_labs_share_neither_objects_nor_folders(_: Arc<SharedLabs>) -> Result<()> {
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
}

async fn nothing_is_left_after_the_lab_process_is_killed(_: Arc<SharedLabs>) -> Result<()> {
    // Its cache lies on a mount that passes on whatever is mounted below it, unless the nested lab prevents that.
    let home = Home::new()?;
    let _shared = home.shared_tmpfs()?;
    let _parts = home.with_parts()?;
    let mut command = nested::command(&std::env::current_exe()?, HOLD);
    command.env("XDG_CACHE_HOME", home.path());
    let nested = nested::start(command).await?;
    let run = home.cache().join("run");
    let inside = nested::descendants(nested.id()).first().map(|(pid, _)| *pid).context("no process inside")?;
    ensure!(is_mounted(&inside.to_string(), &run)?, "the nested lab has no tmpfs of its own");
    ensure!(!is_mounted("self", &run)?, "the nested lab's tmpfs appeared outside of it");
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
        let mut command = nested::command(&std::env::current_exe()?, HOLD);
        command.env("VITISTACK_LAB_INSIDE", format!("{} {}", std::process::id(), network.display()));
        let (code, complaint) = nested::complaint(command).await?;
        ensure!(code == Some(1) && complaint.contains("not in its own namespaces"), "{code:?}: {complaint}");
        ensure!(proc_mounts()? == before, "it has mounted /proc over the one of this process");
    }
    Ok(())
}

async fn a_background_lab_stops_when_its_starter_exits_before_it_is_ready(_: Arc<SharedLabs>) -> Result<()> {
    let name = format!("test-{}", std::process::id());
    let mut command = nested::command(&std::env::current_exe()?, RESIDE);
    command.env(nested::NAME, &name).stdin(Stdio::piped());
    let mut holder = command.spawn()?;
    wait_until(|| !nested::descendants(holder.id()).is_empty()).await.context("it does not start")?;
    let below = nested::descendants(holder.id());
    drop(holder.stdin.take());
    let ended =
        wait_until(|| !below.iter().chain([&(holder.id(), String::new())]).any(|(pid, _)| nested::is_alive(*pid)));
    let ended = ended.await;
    let _ = holder.kill();
    let complaint = tokio::task::spawn_blocking(move || holder.wait_with_output()).await??;
    let complaint = String::from_utf8_lossy(&complaint.stderr);
    ended.with_context(|| format!("it goes on without its starter: {complaint}"))?;
    ensure!(complaint.contains("exited before the lab was ready"), "{complaint}");
    ensure!(vitivirt_lab::daemon::LabDaemon::find(&name)?.is_none(), "it can still be found");
    Ok(())
}

async fn the_logs_of_a_stopped_lab_are_kept_until_the_test_ends(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
    let folder = lab.folder().to_owned();
    lab.stop().await?;
    ensure!(!folder.exists(), "the lab's folder is left");
    let mut aside = std::fs::read_dir(vitivirt_lab::paths::stopped_labs_dir(stringify!(
        the_logs_of_a_stopped_lab_are_kept_until_the_test_ends
    ))?)?;
    let logs = aside.next().context("nothing was put aside")??.path();
    ensure!(std::fs::read_to_string(logs.join("audit.log"))?.contains("audit.k8s.io"), "an audit log without events");
    ensure!(logs.join("logs/kube-apiserver.log").is_file(), "the servers' logs are lost");
    ensure!(!logs.join("admin.kubeconfig").exists(), "credentials are no logs");
    Ok(())
}

async fn an_unprivileged_user_can_run_a_lab(_: Arc<SharedLabs>) -> Result<()> {
    let home = Home::new()?;
    let mut mounts = Vec::new();
    let nobody = 65534;
    let mut command = if is_real_root()? {
        // What the user needs is put where the user may look: the binary and the built parts.
        let program = home.path().join("lab-tests");
        std::fs::write(&program, "")?;
        mounts.push(BindMount::bind(&std::env::current_exe()?, &program)?);
        mounts.push(home.with_parts()?);
        for folder in [home.path(), &home.cache()] {
            std::os::unix::fs::chown(folder, Some(nobody), Some(nobody))?;
        }
        let mut command = nested::command(&program, HOLD);
        command.uid(nobody).gid(nobody).current_dir("/").env("HOME", home.path()).env("XDG_CACHE_HOME", home.path());
        command
    } else {
        nested::command(&std::env::current_exe()?, HOLD)
    };
    command.env_remove("KUBEBUILDER_ASSETS");
    let nested = nested::start(command).await?;
    expect_nothing_left(nested.id()).await
}

async fn a_dead_server_process_fails_the_lab(_: Arc<SharedLabs>) -> Result<()> {
    for name in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        let lab = Lab::start(LabOptions { nodes: 1, ..LabOptions::default() }).await?;
        let folder = lab.folder().display().to_string();
        let (_, server) = lab.servers().into_iter().find(|(server, _)| *server == name).context("a server")?;
        let pid = server.pid().context("it runs")?;
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        let failure = tokio::time::timeout(TIMEOUT, lab.health().failed()).await?;
        ensure!(failure.to_string().starts_with(&format!("{name} exited unexpectedly")), "{failure}");
        drop(lab);
        let own = std::process::id();
        wait_until(|| !nested::descendants(own).iter().any(|(_, command)| command.contains(&folder)))
            .await
            .with_context(|| format!("processes of the lab are left: {:?}", nested::descendants(own)))?;
    }
    Ok(())
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
    Ok(())
}

/// A place for the cache of a nested lab. Its mounts must be declared after it: they have to end before it is removed
/// with all it holds.
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

    /// The built parts of this process's own cache.
    fn with_parts(&self) -> Result<BindMount> {
        let parts = self.cache().join("parts");
        std::fs::create_dir_all(&parts)?;
        BindMount::bind(&vitivirt_lab::paths::cache_dir()?.join("parts"), &parts)
    }

    fn shared_tmpfs(&self) -> Result<BindMount> {
        mount(Some("home"), self.path(), Some("tmpfs"), MsFlags::empty(), Some("mode=0755")).context("a tmpfs")?;
        let mounted = BindMount(self.path().to_owned());
        mount(None::<&str>, self.path(), None::<&str>, MsFlags::MS_SHARED, None::<&str>).context("a shared mount")?;
        Ok(mounted)
    }
}

/// A mount that ends when it is dropped.
struct BindMount(PathBuf);

impl BindMount {
    fn bind(from: &Path, to: &Path) -> Result<Self> {
        mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
            .context("a bind mount")?;
        Ok(BindMount(to.to_owned()))
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// Where something is mounted, as a process (a number or `self`) sees it.
fn mount_points(process: &str) -> Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string(format!("/proc/{process}/mountinfo"))?;
    Ok(table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from).collect())
}

fn is_mounted(process: &str, point: &Path) -> Result<bool> {
    Ok(mount_points(process)?.iter().any(|mounted| mounted == point))
}

async fn wait_until(is_so: impl Fn() -> bool) -> Result<()> {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, waiting).await.with_context(|| format!("not within {TIMEOUT:?}"))
}

/// Root of the machine, not only of a user namespace.
fn is_real_root() -> Result<bool> {
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
}
