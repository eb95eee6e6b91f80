//! A lab that outlives the command that started it: held by a process of its own, found by name, entered and ended.

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

/// What is known of a daemon lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabDaemon {
    /// The process that holds it; with it everything ends.
    pub pid: i32,
    /// When the pid was started, in the kernel's clock ticks: process numbers are used again.
    pid_started: u64,
    /// The first process of the lab's namespaces.
    inner: i32,
    pub state: DaemonState,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum DaemonState {
    Starting,
    Ready { kubeconfig: PathBuf },
}

impl LabDaemon {
    /// The lab of this name, if it lives. What a dead one left is removed.
    pub fn find(name: &str) -> Result<Option<Self>> {
        let path = file(name)?;
        let Ok(text) = std::fs::read(&path) else { return Ok(None) };
        let daemon: LabDaemon =
            serde_json::from_slice(&text).with_context(|| format!("{} is damaged: remove it", path.display()))?;
        if started(daemon.pid) == Some(daemon.pid_started) {
            return Ok(Some(daemon));
        }
        let _ = std::fs::remove_file(path);
        Ok(None)
    }

    fn require(name: &str) -> Result<Self> {
        Self::find(name)?.with_context(|| format!("no lab {name:?} runs: start it with `cargo xtask lab up`"))
    }

    fn save(&self, name: &str) -> Result<()> {
        let path = file(name)?;
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, serde_json::to_vec(self).context("writing the lab's file")?)?;
        std::fs::rename(&fresh, &path).with_context(|| format!("writing {}", path.display()))
    }
}

/// Where a daemon lab's process writes what it has to say.
pub fn log_file(name: &str) -> Result<PathBuf> {
    Ok(file(name)?.with_extension("log"))
}

/// The right to start a lab of this name, as long as it is held: from looking for one that runs until the new one can
/// be found.
pub fn lock(name: &str) -> Result<File> {
    lock_file(&file(name)?.with_extension("lock"), name)
}

fn lock_file(path: &Path, name: &str) -> Result<File> {
    let lock = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => bail!("a lab {name:?} is being started by another command: wait for it"),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("locking {}", path.display())),
    }
}

fn file(name: &str) -> Result<PathBuf> {
    if name.is_empty() || !name.chars().all(|character| character.is_ascii_alphanumeric() || character == '-') {
        bail!("{name:?} cannot name a lab: use letters, digits and dashes");
    }
    let folder = paths::cache_dir()?.join("labs");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder.join(format!("{name}.json")))
}

/// The main function of the process that holds a lab. It returns when the lab ends or cannot be started.
///
/// Its standard input must be a pipe from whoever starts it: if that ends before the lab is ready (Ctrl-C), nobody waits
/// for the lab any more, and it ends as well.
pub fn hold(name: &str, options: impl FnOnce() -> Result<LabOptions>) -> ExitCode {
    // A session of its own: neither Ctrl-C in the terminal nor the terminal's end concern it.
    let _ = nix::unistd::setsid();
    isolate::run_with(
        || Ok(()),
        |inner| {
            let pid = i32::try_from(std::process::id()).context("a process number")?;
            let inner = i32::try_from(inner).context("a process number")?;
            let pid_started = started(pid).context("reading /proc")?;
            LabDaemon { pid, pid_started, inner, state: DaemonState::Starting }.save(name)
        },
        || {
            let runtime = tokio::runtime::Runtime::new().context("starting tokio")?;
            runtime.block_on(async {
                let options = options()?;
                let lab = tokio::select! {
                    lab = Lab::start(options) => lab?,
                    () = end_of_input() => bail!("the command that started the lab has ended before it was ready"),
                };
                announce(name, &lab)?;
                Err(lab.health().failed().await)
            })
        },
    )
}

/// Read on a thread of its own: one that blocks in tokio's pool would keep the runtime from ending.
async fn end_of_input() {
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _sender = sender;
        let mut some = [0; 64];
        while matches!(std::io::stdin().read(&mut some), Ok(1..)) {}
    });
    let _ = receiver.await;
}

/// The pid wrote the file; the lab inside completes it.
fn announce(name: &str, lab: &Lab) -> Result<()> {
    let text = std::fs::read(file(name)?).context("reading the lab's file")?;
    let daemon: LabDaemon = serde_json::from_slice(&text).context("reading the lab's file")?;
    LabDaemon { state: DaemonState::Ready { kubeconfig: lab.kubeconfig().to_owned() }, ..daemon }.save(name)
}

/// Runs a command in the namespaces of a daemon lab and returns its exit code.
pub fn exec(name: &str, command: &[String]) -> Result<ExitCode> {
    let daemon = LabDaemon::require(name)?;
    let DaemonState::Ready { kubeconfig } = daemon.state else {
        bail!("the lab {name:?} is still starting: try again in a moment");
    };
    let (Some(program), arguments) = (command.first(), command.get(1..).unwrap_or_default()) else {
        bail!("there is no command to run");
    };
    let folder = std::env::current_dir().context("finding the current folder")?;
    enter(daemon.inner)?;
    // The mount namespace has its own view of the same folder.
    let _ = std::env::set_current_dir(folder);
    let status = Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .env("PATH", with_kubectl()?)
        .status()
        .with_context(|| format!("running {program:?} inside the lab"))?;
    Ok(isolate::exit_code(status))
}

fn with_kubectl() -> Result<std::ffi::OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(components::kubectl_dir()?).chain(std::env::split_paths(&path));
    std::env::join_paths(folders).context("adding kubectl to PATH")
}

/// Joins the namespaces of `pid`: the user namespace first, because the others belong to it.
fn enter(pid: i32) -> Result<()> {
    let of = |owner: &str, kind: &str| Path::new("/proc").join(owner).join("ns").join(kind);
    let opened: Vec<(CloneFlags, File)> = [
        ("user", CloneFlags::CLONE_NEWUSER),
        ("net", CloneFlags::CLONE_NEWNET),
        ("pid", CloneFlags::CLONE_NEWPID),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ]
    .into_iter()
    .filter(|(kind, _)| {
        std::fs::read_link(of(&pid.to_string(), kind)).ok() != std::fs::read_link(of("self", kind)).ok()
    })
    .map(|(kind, flag)| {
        let file =
            File::open(of(&pid.to_string(), kind)).with_context(|| format!("opening the lab's {kind} namespace"))?;
        Ok((flag, file))
    })
    .collect::<Result<_>>()?;
    for (flag, file) in opened {
        setns(file.as_fd(), flag)
            .context("entering the lab's namespaces; were you another user when you started it?")?;
    }
    Ok(())
}

/// Ends a daemon lab and waits until it is gone.
pub fn down(name: &str) -> Result<()> {
    let daemon = LabDaemon::require(name)?;
    kill(Pid::from_raw(daemon.pid), Signal::SIGTERM).context("ending the lab's process")?;
    let asked = Instant::now();
    while started(daemon.pid) == Some(daemon.pid_started) || started(daemon.inner).is_some() {
        if asked.elapsed() > Duration::from_secs(20) {
            bail!("process {} does not end", daemon.pid);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = std::fs::remove_file(file(name)?);
    Ok(())
}

fn started(pid: i32) -> Option<u64> {
    Some(process_table::find(u32::try_from(pid).ok()?)?.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_is_claimed_once_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("default.lock");
        let first = lock_file(&path, "default").unwrap();
        let refused = lock_file(&path, "default").unwrap_err().to_string();
        assert!(refused.contains("is being started by another command"), "{refused}");
        drop(first);
        lock_file(&path, "default").unwrap();
    }
}
