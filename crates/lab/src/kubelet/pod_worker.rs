//! Runs one pod, from its binding to a node until it is removed. `process` starts its process, `probe` checks its
//! readiness, and `status` builds the status that it reports.
//!
//! Requests fail while a test keeps the API server stopped. The worker retries every failed request, and it reacts to
//! the deletion of the pod at any time.

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
    Kubelet, PodBehaviour, PodFate, containers,
    probe::{Probe, Readiness},
    process::{PodProcess, ProcessContext},
    restart::RestartBackoff,
    status::{ContainersState, StatusInput, is_ready},
};
use crate::pace::DelayRange;

pub(super) struct PodWorker<'a> {
    kubelet: &'a Kubelet,
    address: IpAddr,
    started: Timestamp,
    container: Container,
    process: Option<PodProcess>,
    process_state: PodProcessState,
    backoff: RestartBackoff,
    restarts: i32,
    /// When a pod with [`PodFate::Crashes`] crashed last.
    crashed: Option<Instant>,
    readiness: Readiness,
    /// Whether the guest has ever run in this launcher pod.
    hosted: bool,
    /// Whether the containers exited successfully, once they have exited. They are not restarted after that.
    ended: Option<bool>,
    reported: Option<PodReport>,
}

/// The state of the pod's process.
enum PodProcessState {
    /// There is no process: the pod is only simulated.
    Simulated,
    /// The pod already reports that it is ready. The worker starts the process at this time.
    Late {
        until: Instant,
    },
    Running {
        child: Child,
        since: Instant,
    },
    /// The process exited. The worker restarts it at this time.
    Paused {
        until: Instant,
    },
}

/// Everything that the pod's status depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PodReport {
    containers: ContainersState,
    ready: bool,
    restarts: i32,
}

/// The state of the containers, and when to check again if nothing changes before.
type ContainerCheck = (ContainersState, Option<Duration>);

const RETRY: Duration = Duration::from_millis(150);
const CRASH_EVERY: Duration = Duration::from_secs(2);

impl<'a> PodWorker<'a> {
    pub(super) async fn run(
        kubelet: &'a Kubelet,
        pod: &Pod,
        address: IpAddr,
        changes: &mut watch::Receiver<Option<Pod>>,
    ) -> Result<()> {
        let mut worker = PodWorker {
            kubelet,
            address,
            started: Timestamp::now(),
            container: containers(pod).next().cloned().context("the pod has no container")?,
            process: None,
            process_state: PodProcessState::Simulated,
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
            wait_until_node_lives(&mut kubelet.behaviour.clone(), changes).await;
            let behaviour = kubelet.behaviour.borrow().clone();
            let name = kubelet.delayed_name(&worker.container);
            let delay = |range: DelayRange, what: &str| range.pick(kubelet.seed, what, &name);
            tokio::select! {
                () = tokio::time::sleep(delay(behaviour.ready_after, "ready")) => {}
                () = deleted(changes) => {}
            }
            worker.begin(delay(behaviour.starts_after_ready, "start"), changes).await;
        }
        worker.work(changes).await
    }

    /// Starts the pod's process, or schedules its start. It retries until that succeeds or the pod is deleted.
    async fn begin(&mut self, late: Duration, changes: &mut watch::Receiver<Option<Pod>>) {
        let mut last_error = String::new();
        loop {
            let Some(pod) = changes.borrow_and_update().clone() else { return };
            let started = tokio::select! {
                biased;
                () = deleted(changes) => return,
                started = self.start(&pod, late) => started,
            };
            let Err(error) = started else { return };
            let text = format!("{error:#}");
            if text != last_error {
                tracing::warn!("cannot start pod {}, retrying: {text}", pod.name_any());
                last_error = text;
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = deleted(changes) => return,
            }
        }
    }

    async fn start(&mut self, pod: &Pod, late: Duration) -> Result<()> {
        let program = self.kubelet.programs.borrow().of(&self.container);
        if let Some(program) = program {
            let kubelet = self.kubelet;
            let context = ProcessContext {
                admin: &kubelet.admin,
                client: &kubelet.client,
                folder: &kubelet.folder,
                volume_updates: kubelet.volume_updates(pod),
            };
            let process = PodProcess::prepare(&context, pod, self.address, program?).await?;
            let fate = kubelet.behaviour.borrow().fate(pod);
            // Its process starts when the rule is lifted.
            let cannot_run = matches!(fate, Some(PodFate::ImageMissing | PodFate::InitCrashes));
            self.process_state = if late.is_zero() && !cannot_run {
                PodProcessState::Running { child: process.spawn()?, since: Instant::now() }
            } else {
                PodProcessState::Late { until: Instant::now() + late }
            };
            self.process = Some(process);
        }
        Ok(())
    }

    async fn work(mut self, changes: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        let mut behaviour = self.kubelet.behaviour.clone();
        let mut vmis = self.kubelet.vmis.subscribe();
        loop {
            wait_until_node_lives(&mut behaviour, changes).await;
            let Some(pod) = changes.borrow_and_update().clone() else { return Ok(()) };
            if pod.metadata.deletion_timestamp.is_some() {
                return self.end(&pod, changes).await;
            }
            let fate = behaviour.borrow_and_update().fate(&pod);
            let (containers, next_check) = self.check(&pod, fate).await?;
            if let ContainersState::Ended { success } = containers {
                self.ended = Some(success);
                self.process_state = PodProcessState::Simulated;
            }
            let reported = self.report(&pod, containers).await;
            if reported && self.ended.is_some() {
                deleted(changes).await;
                continue;
            }
            let next_check = if reported { next_check } else { Some(next_check.unwrap_or(RETRY).min(RETRY)) };
            tokio::select! {
                _ = changes.changed() => {}
                _ = behaviour.changed() => {}
                _ = vmis.changed() => {}
                () = self.process_state.exited() => {}
                () = tokio::time::sleep(next_check.unwrap_or(Duration::MAX)) => {}
            }
        }
    }

    async fn check(&mut self, pod: &Pod, fate: Option<PodFate>) -> Result<ContainerCheck> {
        if let Some(success) = self.ended {
            return Ok((ContainersState::Ended { success }, None));
        }
        match fate {
            Some(PodFate::NeverReady) => return Ok((ContainersState::Running { ready: false }, None)),
            Some(PodFate::Completes) => return Ok((ContainersState::Ended { success: true }, None)),
            Some(PodFate::Crashes) => return Ok(self.crash(ContainersState::Crashing)),
            Some(PodFate::InitCrashes) => return Ok(self.crash(ContainersState::InitCrashing)),
            Some(PodFate::ImageMissing) => return Ok((ContainersState::ImageMissing, None)),
            None => {}
        }
        if let Some(guest) = self.kubelet.vmis.guest_of(pod) {
            self.hosted |= guest.is_on(pod);
            if let Some(success) = guest.outcome(pod, self.hosted) {
                return Ok((ContainersState::Ended { success }, None));
            }
        }
        match &mut self.process_state {
            PodProcessState::Simulated => Ok((ContainersState::Running { ready: true }, None)),
            PodProcessState::Late { until } => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.readiness = Readiness::presumed();
                    self.restart();
                }
                Ok((ContainersState::Running { ready: true }, Some(left.max(RETRY))))
            }
            PodProcessState::Running { child, since } => {
                let since = *since;
                match child.try_wait().context("checking the process")? {
                    Some(exit) => Ok(self.after_exit(pod, exit.success(), since)),
                    None => Ok(self.probe().await),
                }
            }
            PodProcessState::Paused { until } => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.restart();
                }
                Ok((ContainersState::Crashing, Some(left.max(RETRY))))
            }
        }
    }

    /// Crashes are counted by time, not by checks: writing the status of a crash itself causes another check.
    fn crash(&mut self, state: ContainersState) -> ContainerCheck {
        let left = self.crashed.map_or(Duration::ZERO, |at| CRASH_EVERY.saturating_sub(at.elapsed()));
        if !left.is_zero() {
            return (state, Some(left));
        }
        self.restarts += 1;
        self.crashed = Some(Instant::now());
        (state, Some(CRASH_EVERY))
    }

    async fn probe(&mut self) -> ContainerCheck {
        let Some(probe) = Probe::from_container(&self.container) else {
            return (ContainersState::Running { ready: true }, None);
        };
        if self.readiness.is_due() {
            let succeeded = probe.succeeds(self.address).await;
            self.readiness.record(succeeded, probe.failure_threshold);
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
        self.process_state = PodProcessState::Paused { until: Instant::now() + pause };
        (ContainersState::Crashing, Some(pause))
    }

    fn restart(&mut self) {
        let Some(process) = &self.process else { return };
        self.process_state = match process.spawn() {
            Ok(child) => PodProcessState::Running { child, since: Instant::now() },
            Err(error) => {
                tracing::warn!("cannot restart the process of a pod: {error:#}");
                PodProcessState::Paused { until: Instant::now() + self.backoff.after(Duration::ZERO) }
            }
        };
    }

    /// Writes the status if it has changed. Returns false if the write must be retried.
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
                tracing::debug!("cannot write the status of pod {}: {error}", pod.name_any());
                return false;
            }
        }
        true
    }

    /// Handles the deletion of the pod: stops its process, then removes the object.
    async fn end(mut self, pod: &Pod, changes: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        if let PodProcessState::Running { child, .. } = &mut self.process_state {
            let grace =
                pod.metadata.deletion_grace_period_seconds.and_then(|grace| u64::try_from(grace).ok()).unwrap_or(30);
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
            if tokio::time::timeout(Duration::from_secs(grace), child.wait()).await.is_err() {
                child.kill().await.context("killing the process")?;
            }
        }
        // If the pod disappeared while its guest runs, virt-controller would treat the VMI as failed.
        self.kubelet.vmis.wait_until_stopped(pod, self.hosted).await;
        let immediately = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
            ..DeleteParams::default()
        };
        loop {
            match self.pods(pod).delete(&pod.name_any(), &immediately).await {
                Ok(_) => return Ok(()),
                Err(error) if is_gone(&error) || changes.borrow().is_none() => return Ok(()),
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.kubelet.client.clone(), &pod.namespace().unwrap_or_default())
    }
}

impl PodProcessState {
    async fn exited(&mut self) {
        match self {
            PodProcessState::Running { child, .. } => {
                let _ = child.wait().await;
            }
            PodProcessState::Simulated | PodProcessState::Late { .. } | PodProcessState::Paused { .. } => {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// The pod no longer exists, whether or not another pod has its name.
fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found() || status.is_conflict())
}

/// Returns when the kubelet of the pod's node runs, or when the pod was removed.
async fn wait_until_node_lives(
    behaviour: &mut watch::Receiver<PodBehaviour>,
    changes: &mut watch::Receiver<Option<Pod>>,
) {
    let Some(pod) = changes.borrow().clone() else { return };
    tokio::select! {
        _ = behaviour.wait_for(|behaviour| !behaviour.is_on_dead_node(&pod)) => {}
        _ = changes.wait_for(Option::is_none) => {}
    }
}

/// Resolves when the pod is being deleted or removed.
async fn deleted(changes: &mut watch::Receiver<Option<Pod>>) {
    let _ = changes.wait_for(|pod| pod.as_ref().is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())).await;
}
