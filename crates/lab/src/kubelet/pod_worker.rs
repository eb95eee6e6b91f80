//! One pod, from its binding to a node until it is gone.
//!
//! Requests fail while a test has the API server away: whatever fails here is tried again, and a pod that is to go is
//! noticed all the while.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::{process::Child, sync::watch, time::Instant};

use super::{
    Kubelet, PodFate, containers,
    probe::{Probe, Readiness},
    process::{self, PodProcess, ProcessContext},
    restart::RestartBackoff,
    status::{ContainersState, StatusInput, is_ready},
};

pub(super) struct PodWorker<'a> {
    kubelet: &'a Kubelet,
    address: IpAddr,
    started: Timestamp,
    container: Container,
    process: Option<PodProcess>,
    process_state: ProcessState,
    backoff: RestartBackoff,
    restarts: i32,
    /// When a pod that is told to crash did so last.
    crashed: Option<Instant>,
    readiness: Readiness,
    /// Whether the guest has ever been in this launcher pod.
    hosted: bool,
    /// Once the containers have ended, and with what success, nothing makes them run again.
    ended: Option<bool>,
    reported: Option<PodReport>,
}

/// What the pod's program does.
enum ProcessState {
    /// There is none: the pod is only simulated.
    Simulated,
    Running {
        child: Child,
        since: Instant,
    },
    /// It ended and is started again then.
    Paused {
        until: Instant,
    },
}

/// Everything that a status depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PodReport {
    containers: ContainersState,
    ready: bool,
    restarts: i32,
}

/// How the containers are, and when to look again if nothing happens before.
type ContainerCheck = (ContainersState, Option<Duration>);

const RETRY: Duration = Duration::from_millis(150);
const CRASH_EVERY: Duration = Duration::from_secs(2);

impl<'a> PodWorker<'a> {
    pub(super) async fn run(
        kubelet: &'a Kubelet,
        pod: &Pod,
        address: IpAddr,
        news: &mut watch::Receiver<Option<Pod>>,
    ) -> Result<()> {
        let mut worker = PodWorker {
            kubelet,
            address,
            started: Timestamp::now(),
            container: containers(pod).next().cloned().context("a pod has a container")?,
            process: None,
            process_state: ProcessState::Simulated,
            backoff: RestartBackoff::default(),
            restarts: 0,
            crashed: None,
            readiness: Readiness::default(),
            hosted: false,
            ended: match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
                Some("Succeeded") => Some(true),
                Some("Failed") => Some(false),
                _ => None,
            },
            reported: None,
        };
        if worker.ended.is_none() {
            let ready_after = kubelet.behaviour.borrow().ready_after;
            tokio::select! {
                () = tokio::time::sleep(ready_after) => {}
                () = leaving(news) => {}
            }
            worker.begin(news).await;
        }
        worker.work(news).await
    }

    /// Starts the pod's program, however many attempts that takes; gives up only when the pod is to go.
    async fn begin(&mut self, news: &mut watch::Receiver<Option<Pod>>) {
        let mut complaint = String::new();
        loop {
            let Some(pod) = news.borrow_and_update().clone() else { return };
            let started = tokio::select! {
                biased;
                () = leaving(news) => return,
                started = self.start(&pod) => started,
            };
            let Err(error) = started else { return };
            let text = format!("{error:#}");
            if text != complaint {
                tracing::warn!("pod {} is not started yet: {text}", pod.name_any());
                complaint = text;
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = leaving(news) => return,
            }
        }
    }

    async fn start(&mut self, pod: &Pod) -> Result<()> {
        let program = process::program_of(&self.container, &self.kubelet.own_programs.borrow());
        if let Some(program) = program {
            let kubelet = self.kubelet;
            let context = ProcessContext { admin: &kubelet.admin, client: &kubelet.client, folder: &kubelet.folder };
            let process = PodProcess::prepare(&context, pod, self.address, program?).await?;
            self.process_state = ProcessState::Running { child: process.spawn()?, since: Instant::now() };
            self.process = Some(process);
        }
        Ok(())
    }

    async fn work(mut self, news: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        let mut behaviour = self.kubelet.behaviour.clone();
        let mut vmis = self.kubelet.vmis.subscribe();
        loop {
            let Some(pod) = news.borrow_and_update().clone() else { return Ok(()) };
            if pod.metadata.deletion_timestamp.is_some() {
                return self.end(&pod, news).await;
            }
            let fate = behaviour.borrow_and_update().fate(&pod);
            let (containers, again) = self.look(&pod, fate).await?;
            if let ContainersState::Ended { success } = containers {
                self.ended = Some(success);
                self.process_state = ProcessState::Simulated;
            }
            let again = match self.report(&pod, containers).await {
                true if self.ended.is_some() => {
                    leaving(news).await;
                    continue;
                }
                true => again,
                false => Some(again.unwrap_or(RETRY).min(RETRY)),
            };
            tokio::select! {
                _ = news.changed() => {}
                _ = behaviour.changed() => {}
                _ = vmis.changed() => {}
                () = self.process_state.exited() => {}
                () = tokio::time::sleep(again.unwrap_or(Duration::MAX)) => {}
            }
        }
    }

    async fn look(&mut self, pod: &Pod, fate: Option<PodFate>) -> Result<ContainerCheck> {
        if let Some(success) = self.ended {
            return Ok((ContainersState::Ended { success }, None));
        }
        match fate {
            Some(PodFate::NeverReady) => return Ok((ContainersState::Running { ready: false }, None)),
            Some(PodFate::Completes) => return Ok((ContainersState::Ended { success: true }, None)),
            Some(PodFate::Crashes) => return Ok(self.crash()),
            None => {}
        }
        if let Some(guest) = self.kubelet.vmis.guest_of(pod) {
            self.hosted |= guest.is_on(pod);
            if let Some(success) = guest.outcome(pod, self.hosted) {
                return Ok((ContainersState::Ended { success }, None));
            }
        }
        match &mut self.process_state {
            ProcessState::Simulated => Ok((ContainersState::Running { ready: true }, None)),
            ProcessState::Running { child, since } => {
                let since = *since;
                match child.try_wait().context("asking for the process")? {
                    Some(exit) => Ok(self.after_exit(pod, exit.success(), since)),
                    None => Ok(self.probe().await),
                }
            }
            ProcessState::Paused { until } => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.start_again();
                }
                Ok((ContainersState::Crashing, Some(left.max(RETRY))))
            }
        }
    }

    /// Counted by time, not by looks: each report of a crash is itself a reason to look again.
    fn crash(&mut self) -> ContainerCheck {
        let left = self.crashed.map_or(Duration::ZERO, |at| CRASH_EVERY.saturating_sub(at.elapsed()));
        if !left.is_zero() {
            return (ContainersState::Crashing, Some(left));
        }
        self.restarts += 1;
        self.crashed = Some(Instant::now());
        (ContainersState::Crashing, Some(CRASH_EVERY))
    }

    async fn probe(&mut self) -> ContainerCheck {
        let Some(probe) = Probe::of(&self.container) else { return (ContainersState::Running { ready: true }, None) };
        if self.readiness.is_due() {
            let succeeded = probe.succeeds(self.address).await;
            self.readiness.note(succeeded, probe.failure_threshold);
        }
        (ContainersState::Running { ready: self.readiness.is_ready() }, Some(self.readiness.until_due()))
    }

    fn after_exit(&mut self, pod: &Pod, success: bool, since: Instant) -> ContainerCheck {
        let policy = pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always");
        if policy == "Never" || (policy == "OnFailure" && success) {
            return (ContainersState::Ended { success }, None);
        }
        self.restarts += 1;
        self.readiness = Readiness::default();
        let pause = self.backoff.after(since.elapsed());
        self.process_state = ProcessState::Paused { until: Instant::now() + pause };
        (ContainersState::Crashing, Some(pause))
    }

    fn start_again(&mut self) {
        let Some(process) = &self.process else { return };
        self.process_state = match process.spawn() {
            Ok(child) => ProcessState::Running { child, since: Instant::now() },
            Err(error) => {
                tracing::warn!("a pod's program could not be started again: {error:#}");
                ProcessState::Paused { until: Instant::now() + self.backoff.after(Duration::ZERO) }
            }
        };
    }

    /// Writes the status if it says something new. Returns whether the API server knows it, or has no use for it.
    async fn report(&mut self, pod: &Pod, containers: ContainersState) -> bool {
        let report = PodReport { containers, ready: is_ready(pod, containers), restarts: self.restarts };
        if self.reported == Some(report) {
            return true;
        }
        let host_ip =
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).map(|node| self.kubelet.host_ip(node));
        let input = StatusInput {
            pod,
            containers,
            restarts: self.restarts,
            pod_ip: &self.address.to_string(),
            host_ip: &host_ip.unwrap_or_default(),
            started: self.started,
            now: Timestamp::now(),
        };
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": input.status()});
        match self.pods(pod).patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch)).await {
            Ok(_) => self.reported = Some(report),
            Err(error) if is_gone(&error) => {}
            Err(error) => {
                tracing::debug!("the status of pod {} was not written: {error}", pod.name_any());
                return false;
            }
        }
        true
    }

    /// The pod is to go: its process is asked to end, then the object is removed for good.
    async fn end(mut self, pod: &Pod, news: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        if let ProcessState::Running { child, .. } = &mut self.process_state {
            let grace =
                pod.metadata.deletion_grace_period_seconds.and_then(|grace| u64::try_from(grace).ok()).unwrap_or(30);
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
            if tokio::time::timeout(Duration::from_secs(grace), child.wait()).await.is_err() {
                child.kill().await.context("ending the process")?;
            }
        }
        // virt-controller takes a running guest whose pod vanished for a failed one.
        self.kubelet.vmis.wait_until_over(pod, self.hosted).await;
        let at_once = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
            ..DeleteParams::default()
        };
        loop {
            match self.pods(pod).delete(&pod.name_any(), &at_once).await {
                Ok(_) => return Ok(()),
                Err(error) if is_gone(&error) || news.borrow().is_none() => return Ok(()),
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.kubelet.client.clone(), &pod.namespace().unwrap_or_default())
    }
}

impl ProcessState {
    async fn exited(&mut self) {
        match self {
            ProcessState::Running { child, .. } => {
                let _ = child.wait().await;
            }
            ProcessState::Simulated | ProcessState::Paused { .. } => std::future::pending().await,
        }
    }
}

/// The pod that was meant is gone, whether or not another has its name.
fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found() || status.is_conflict())
}

/// Resolves when the pod is to go away or gone.
async fn leaving(news: &mut watch::Receiver<Option<Pod>>) {
    let _ = news.wait_for(|pod| pod.as_ref().is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())).await;
}
