//! A server process of the lab. It can be stopped and started again.
//!
//! If the process exits unexpectedly, the lab fails immediately with the end of its log, so that a test fails with the
//! cause and not with a timeout.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use parking_lot::Mutex;
use tokio::{
    process::{Child, Command},
    sync::watch,
};

/// The reason why a lab has failed. Empty while it is healthy.
#[derive(Clone)]
pub struct LabHealth {
    failure: Arc<watch::Sender<Option<String>>>,
}

impl Default for LabHealth {
    fn default() -> Self {
        LabHealth { failure: Arc::new(watch::Sender::new(None)) }
    }
}

impl LabHealth {
    pub(crate) fn fail(&self, reason: String) {
        self.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            if first {
                tracing::error!("{reason}");
                *failure = Some(reason);
            }
            first
        });
    }

    /// Resolves when the lab has failed, and never otherwise.
    pub async fn failed(&self) -> anyhow::Error {
        let mut failure = self.failure.subscribe();
        let reason = failure.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        anyhow!(reason.unwrap_or_else(|| "the lab has been dropped".to_owned()))
    }

    /// Runs `work`. Returns an error if the lab fails before it completes.
    pub(crate) async fn guard<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            result = work => result,
            failure = self.failed() => Err(failure),
        }
    }
}

/// The command of a process, kept so that it can be started again.
#[derive(Clone)]
pub(crate) struct ServerCommand {
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) log: PathBuf,
    /// The program exits when it cannot reach the API server, and is restarted as a kubelet would do. A process that a
    /// signal ended is not restarted: only a test sends one.
    pub(crate) restarts: bool,
}

impl ServerCommand {
    pub(crate) fn spawn(&self) -> Result<Child> {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("opening {}", self.log.display()))?;
        Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing the log file")?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {} ({})", self.name, self.program.display()))
    }
}

pub struct ServerProcess {
    command: Arc<ServerCommand>,
    health: LabHealth,
    running: Arc<Mutex<Option<Running>>>,
}

struct Running {
    process: ProcessId,
    /// Set before the process is stopped, so that its exit is not a failure of the lab.
    expected: Arc<watch::Sender<bool>>,
    ended: watch::Receiver<bool>,
}

/// The PID of a process that has not been reaped. Empty afterwards, because the kernel reuses PIDs.
#[derive(Clone, Default)]
struct ProcessId(Arc<Mutex<Option<Pid>>>);

impl ProcessId {
    fn set(&self, child: Option<&Child>) -> Result<()> {
        *self.0.lock() = child.map(pid_of).transpose()?;
        Ok(())
    }

    fn get(&self) -> Option<Pid> {
        *self.0.lock()
    }

    /// Does nothing if the process has exited.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = *self.0.lock() {
            let _ = kill(pid, signal);
        }
    }
}

impl ServerProcess {
    pub(crate) fn start(command: ServerCommand, health: &LabHealth) -> Result<Self> {
        let server = ServerProcess { command: Arc::new(command), health: health.clone(), running: Arc::default() };
        server.resume()?;
        Ok(server)
    }

    /// Starts the process again after [`ServerProcess::stop`]. Does nothing if it is running.
    pub(crate) fn resume(&self) -> Result<()> {
        let mut running = self.running.lock();
        if running.as_ref().is_some_and(|running| !*running.ended.borrow()) {
            return Ok(());
        }
        let child = self.command.spawn()?;
        let expected = Arc::new(watch::Sender::new(false));
        let (end, ended) = watch::channel(false);
        let process = ProcessId::default();
        process.set(Some(&child))?;
        *running = Some(Running { process: process.clone(), expected: expected.clone(), ended });
        let watcher = Watcher {
            command: self.command.clone(),
            health: self.health.clone(),
            running: self.running.clone(),
            process,
            expected,
        };
        tokio::spawn(async move {
            watcher.watch(child).await;
            end.send_replace(true);
        });
        Ok(())
    }

    /// Sends `signal` and waits until the process has exited.
    pub async fn stop(&self, signal: Signal) -> Result<()> {
        let Some(running) = self.running.lock().take() else { return Ok(()) };
        running.expected.send_replace(true);
        running.process.signal(signal);
        let mut ended = running.ended;
        let ended_in_time = tokio::time::timeout(Duration::from_secs(20), ended.wait_for(|ended| *ended)).await.is_ok();
        if !ended_in_time {
            running.process.signal(Signal::SIGKILL);
            let _ = ended.wait_for(|ended| *ended).await;
        }
        Ok(())
    }

    /// The PID, while the process is running.
    pub fn pid(&self) -> Option<i32> {
        self.running.lock().as_ref()?.process.get().map(Pid::as_raw)
    }

    /// Kills the process without waiting for its exit.
    pub(crate) fn kill(&self) {
        if let Some(running) = self.running.lock().take() {
            running.expected.send_replace(true);
            running.process.signal(Signal::SIGKILL);
        }
    }

    pub(crate) fn log(&self) -> &Path {
        &self.command.log
    }
}

/// Waits for the exit of one process, and restarts it if that is allowed.
struct Watcher {
    command: Arc<ServerCommand>,
    health: LabHealth,
    running: Arc<Mutex<Option<Running>>>,
    process: ProcessId,
    expected: Arc<watch::Sender<bool>>,
}

impl Watcher {
    async fn watch(self, mut child: Child) {
        loop {
            let status = child.wait().await;
            let _ = self.process.set(None);
            let restart = self.command.restarts && status.as_ref().is_ok_and(|status| status.code().is_some());
            if *self.expected.borrow() {
                return;
            }
            if restart {
                tokio::time::sleep(RESTART_DELAY).await;
                match self.restart() {
                    Ok(Some(restarted)) => {
                        child = restarted;
                        continue;
                    }
                    Ok(None) => return,
                    Err(error) => return self.health.fail(format!("{error:#}")),
                }
            }
            let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            let tail = log_tail(&self.command.log);
            return self
                .health
                .fail(format!("{} exited unexpectedly ({how}); end of its log: {tail}", self.command.name));
        }
    }

    /// Holds the lock, so that a concurrent stop either sees the new process or prevents its start.
    fn restart(&self) -> Result<Option<Child>> {
        let running = self.running.lock();
        if running.is_none() || *self.expected.borrow() {
            return Ok(None);
        }
        let child = self.command.spawn()?;
        self.process.set(Some(&child))?;
        Ok(Some(child))
    }
}

const RESTART_DELAY: Duration = Duration::from_millis(500);

fn pid_of(child: &Child) -> Result<Pid> {
    child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw).context("the process exited immediately")
}

/// Dropping a lab kills its servers.
impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The end of a log file, on one line.
pub(crate) fn log_tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail: Vec<&str> = lines.iter().rev().take(5).rev().copied().collect();
    if tail.is_empty() { "(empty)".to_owned() } else { tail.join(" | ") }
}
