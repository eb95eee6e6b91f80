//! Background labs: a process that keeps a lab running after the command that started it has exited. Other commands
//! find it by name, run programs in it and stop it.

use std::{
    fs::{File, TryLockError},
    io::Read,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use crate::{Lab, LabOptions, components, isolate, paths, process_table};

/// The process of a background lab, as its file in the cache folder describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabDaemon {
    /// The process that owns the lab. If it exits, the whole lab ends.
    pub pid: i32,
    /// The start time of that process in clock ticks of the kernel, because the kernel reuses PIDs.
    pid_started: u64,
    /// The first process of the lab's namespaces.
    inner_pid: i32,
    pub state: DaemonState,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum DaemonState {
    Starting,
    Ready { kubeconfig: PathBuf },
}

impl LabDaemon {
    /// The running lab of this name. Removes the file of a lab that no longer runs.
    pub fn find(name: &str) -> Result<Option<Self>> {
        let path = state_file(name)?;
        let Ok(text) = std::fs::read(&path) else { return Ok(None) };
        let daemon: LabDaemon =
            serde_json::from_slice(&text).with_context(|| format!("{} is not valid; remove it", path.display()))?;
        if start_time(daemon.pid) == Some(daemon.pid_started) {
            return Ok(Some(daemon));
        }
        let _ = std::fs::remove_file(path);
        Ok(None)
    }

    /// All running labs, by name.
    pub fn all() -> Result<Vec<(String, Self)>> {
        let folder = state_folder()?;
        let mut running = Vec::new();
        for entry in std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = entry.with_context(|| format!("reading {}", folder.display()))?.path();
            let name = path.file_stem().filter(|_| path.extension().is_some_and(|extension| extension == "json"));
            let Some(name) = name.and_then(|name| name.to_str()) else { continue };
            running.extend(Self::find(name)?.map(|daemon| (name.to_owned(), daemon)));
        }
        running.sort_by(|(first, _), (second, _)| first.cmp(second));
        Ok(running)
    }

    fn require(name: &str) -> Result<Self> {
        if let Some(daemon) = Self::find(name)? {
            return Ok(daemon);
        }
        let running: Vec<String> = Self::all()?.into_iter().map(|(name, _)| format!("`--name {name}`")).collect();
        let others = if running.is_empty() { String::new() } else { format!("; running: {}", running.join(", ")) };
        bail!("lab {name:?} is not running; start it with `cargo xtask lab up --name {name}`{others}")
    }

    fn save(&self, name: &str) -> Result<()> {
        let path = state_file(name)?;
        let temporary = path.with_extension("new");
        std::fs::write(&temporary, serde_json::to_vec(self).context("writing the lab's file")?)?;
        std::fs::rename(&temporary, &path).with_context(|| format!("writing {}", path.display()))
    }
}

/// The log file of a background lab's process.
pub fn log_file(name: &str) -> Result<PathBuf> {
    Ok(state_file(name)?.with_extension("log"))
}

/// A lock on starting a lab of this name. The caller holds it from the check for a running lab until the new lab can be
/// found.
pub fn lock(name: &str) -> Result<File> {
    lock_file(&state_file(name)?.with_extension("lock"), name)
}

fn lock_file(path: &Path, name: &str) -> Result<File> {
    let lock = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => {
            bail!("another command is already starting lab {name:?}; wait until it has finished")
        }
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {}", path.display())),
    }
}

fn state_file(name: &str) -> Result<PathBuf> {
    if name.is_empty() || !name.chars().all(|character| character.is_ascii_alphanumeric() || character == '-') {
        bail!("invalid lab name {name:?}: must consist of letters, digits and dashes");
    }
    Ok(state_folder()?.join(format!("{name}.json")))
}

fn state_folder() -> Result<PathBuf> {
    let folder = paths::cache_dir()?.join("labs");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// The main function of a background lab's process. It returns when the lab fails or cannot be started.
///
/// Its standard input must be a pipe from the command that starts it: if that command exits before the lab is ready
/// (Ctrl-C), the lab stops too.
///
/// `prepare` runs before the lab counts as ready.
pub fn run(
    name: &str,
    options: impl FnOnce() -> Result<LabOptions>,
    prepare: impl AsyncFnOnce(&Lab) -> Result<()>,
) -> ExitCode {
    // A new session, so that Ctrl-C and closing the terminal do not reach this process.
    let _ = nix::unistd::setsid();
    // Read before the namespaces exist: the inner process mounts its own /proc, in which this process is not found.
    let this_process = i32::try_from(std::process::id()).ok().and_then(|pid| Some((pid, start_time(pid)?)));
    isolate::run_with(
        || Ok(()),
        |inner_pid| {
            let (pid, pid_started) = this_process.context("reading /proc")?;
            let inner_pid = i32::try_from(inner_pid).context("the PID is too large")?;
            LabDaemon { pid, pid_started, inner_pid, state: DaemonState::Starting }.save(name)
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(async {
                let options = options()?;
                let start = async {
                    let lab = Lab::start(options).await?;
                    prepare(&lab).await?;
                    anyhow::Ok(lab)
                };
                let lab = tokio::select! {
                    lab = start => lab?,
                    () = end_of_input() => bail!("the command that started the lab exited before the lab was ready"),
                };
                set_ready(name, &lab)?;
                Err(lab.health().failed().await)
            })
        },
    )
}

/// Reads on its own thread, because a thread of tokio's pool that blocks would keep the runtime from shutting down.
async fn end_of_input() {
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _sender = sender;
        let mut buffer = [0; 64];
        while matches!(std::io::stdin().read(&mut buffer), Ok(1..)) {}
    });
    let _ = receiver.await;
}

/// Completes the file that the outer process has written.
fn set_ready(name: &str, lab: &Lab) -> Result<()> {
    let text = std::fs::read(state_file(name)?).context("reading the lab's file")?;
    let daemon: LabDaemon = serde_json::from_slice(&text).context("reading the lab's file")?;
    LabDaemon { state: DaemonState::Ready { kubeconfig: lab.kubeconfig().to_owned() }, ..daemon }.save(name)
}

/// The first process of the namespaces of a background lab, and the lab's kubeconfig.
fn ready(name: &str) -> Result<(i32, PathBuf)> {
    let daemon = LabDaemon::require(name)?;
    let DaemonState::Ready { kubeconfig } = daemon.state else {
        bail!("lab {name:?} is still starting; try again later");
    };
    Ok((daemon.inner_pid, kubeconfig))
}

/// Moves this process into the network of a background lab and returns the path of its kubeconfig. Sockets that are
/// already open stay in the network of the machine. It must be called while the process has a single thread.
pub fn enter_network(name: &str) -> Result<PathBuf> {
    let (inner_pid, kubeconfig) = ready(name)?;
    // Not the PID namespace: a process that has joined one cannot start threads.
    enter(inner_pid, &[USER, NETWORK, MOUNTS])?;
    Ok(kubeconfig)
}

/// Runs a command in the namespaces of a background lab and returns its exit code.
pub fn exec(name: &str, command: &[String]) -> Result<ExitCode> {
    let (inner_pid, kubeconfig) = ready(name)?;
    let (Some(program), arguments) = (command.first(), command.get(1..).unwrap_or_default()) else {
        bail!("the command is empty");
    };
    let folder = std::env::current_dir().context("finding the current folder")?;
    // Read before this process enters the mount namespace: its /proc shows only processes of the lab.
    let path = with_programs()?;
    enter(inner_pid, &[USER, NETWORK, PROCESSES, MOUNTS])?;
    // Joining a mount namespace resets the current folder.
    let _ = std::env::set_current_dir(folder);
    let status = Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .env("PATH", path)
        .status()
        .with_context(|| format!("running {program:?} inside the lab"))?;
    Ok(isolate::exit_code(status))
}

/// The `PATH` with kubectl and, next to this program, those that `cargo build` has built.
fn with_programs() -> Result<std::ffi::OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::current_exe().context("finding the path of this program")?;
    let own = program.parent().map(Path::to_owned);
    let folders = std::iter::once(components::kubectl_dir()?).chain(own).chain(std::env::split_paths(&path));
    std::env::join_paths(folders).context("adding programs to PATH")
}

type Namespace = (&'static str, CloneFlags);
const USER: Namespace = ("user", CloneFlags::CLONE_NEWUSER);
const NETWORK: Namespace = ("net", CloneFlags::CLONE_NEWNET);
const PROCESSES: Namespace = ("pid", CloneFlags::CLONE_NEWPID);
const MOUNTS: Namespace = ("mnt", CloneFlags::CLONE_NEWNS);

/// Joins namespaces of `pid`: the user namespace first, because the others belong to it.
fn enter(pid: i32, namespaces: &[Namespace]) -> Result<()> {
    let namespace_file = |owner: &str, kind: &str| Path::new("/proc").join(owner).join("ns").join(kind);
    let opened: Vec<(CloneFlags, File)> = namespaces
        .iter()
        .filter(|(kind, _)| {
            std::fs::read_link(namespace_file(&pid.to_string(), kind)).ok()
                != std::fs::read_link(namespace_file("self", kind)).ok()
        })
        .map(|(kind, flag)| {
            let file = File::open(namespace_file(&pid.to_string(), kind))
                .with_context(|| format!("opening the lab's {kind} namespace"))?;
            Ok((*flag, file))
        })
        .collect::<Result<_>>()?;
    for (flag, file) in opened {
        setns(file.as_fd(), flag)
            .context("entering the lab's namespaces; run the command as the user who started the lab")?;
    }
    Ok(())
}

/// Stops a background lab and waits until its processes have exited.
pub fn down(name: &str) -> Result<()> {
    let daemon = LabDaemon::require(name)?;
    kill(Pid::from_raw(daemon.pid), Signal::SIGTERM).context("stopping the lab's process")?;
    let signalled = Instant::now();
    while start_time(daemon.pid) == Some(daemon.pid_started) || start_time(daemon.inner_pid).is_some() {
        if signalled.elapsed() > Duration::from_secs(20) {
            bail!("process {} did not exit within 20 s", daemon.pid);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = std::fs::remove_file(state_file(name)?);
    Ok(())
}

fn start_time(pid: i32) -> Option<u64> {
    Some(process_table::find(u32::try_from(pid).ok()?)?.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_command_at_a_time_can_lock_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("default.lock");
        let first = lock_file(&path, "default").unwrap();
        let error = lock_file(&path, "default").unwrap_err().to_string();
        assert!(error.contains("another command is already starting lab"), "{error}");
        drop(first);
        lock_file(&path, "default").unwrap();
    }
}
