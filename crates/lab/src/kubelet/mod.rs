//! The simulated kubelet of every node: a scheduled pod becomes Running, a deleted one goes away.
//!
//! Most pods are only simulated. A pod of virt-api, virt-controller, virt-operator or of a program of ours starts the
//! real process (see [`process`]) and is ready when its readiness probe says so.

mod probe;
mod process;
mod status;
mod volumes;

pub use process::OwnProgram;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde_json::json;
use tokio::process::Child;
use tokio::sync::watch;

use crate::addresses::Slot;
use crate::credentials::Credentials;
use crate::follow::follow_each;
use crate::vmi::VmiPhases;
use probe::Probe;
use process::{PodProcess, Surroundings};
use status::{Containers, Sighting, is_ready};

/// What pods do, by image. The first rule whose text occurs in an image of the pod decides.
#[derive(Clone, Debug, Default)]
pub struct PodBehaviour {
    pub ready_after: Duration,
    pub rules: Vec<PodRule>,
}

#[derive(Clone, Debug)]
pub struct PodRule {
    pub image_contains: String,
    pub fate: PodFate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodFate {
    /// Its containers end at once, again and again.
    Crashes,
    /// It runs, but never passes its readiness probe.
    NeverReady,
    /// It runs and ends with success, as a Job's pod.
    Completes,
}

impl PodBehaviour {
    fn fate(&self, pod: &Pod) -> Option<PodFate> {
        let images: Vec<&str> = containers(pod).filter_map(|container| container.image.as_deref()).collect();
        let rule = self.rules.iter().find(|rule| images.iter().any(|image| image.contains(&rule.image_contains)))?;
        Some(rule.fate)
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| &spec.containers)
}

pub(crate) struct Kubelet {
    pub(crate) client: Client,
    pub(crate) admin: Credentials,
    pub(crate) slot: Arc<Slot>,
    pub(crate) folder: PathBuf,
    pub(crate) behaviour: watch::Receiver<PodBehaviour>,
    pub(crate) own_programs: watch::Receiver<Vec<OwnProgram>>,
    pub(crate) vmis: VmiPhases,
    pub(crate) addresses: PodAddresses,
}

/// The address of each pod that runs, by its UID: a guest answers on the address of its launcher pod.
#[derive(Clone, Default)]
pub(crate) struct PodAddresses(Arc<Mutex<HashMap<String, IpAddr>>>);

impl PodAddresses {
    pub(crate) fn get(&self, uid: &str) -> Option<IpAddr> {
        self.0.lock().get(uid).copied()
    }
}

impl Kubelet {
    /// Runs until cancelled; with it end all its pods.
    pub(crate) async fn run(self) {
        let kubelet = Arc::new(self);
        let pods: Api<Pod> = Api::all(kubelet.client.clone());
        let bound = watcher::Config::default().fields("spec.nodeName!=");
        follow_each(pods, bound, |_, _| {}, |news| kubelet.clone().look_after(news)).await;
    }

    /// One pod, from its binding to a node until it is gone.
    async fn look_after(self: Arc<Self>, mut news: watch::Receiver<Option<Pod>>) {
        let Some(pod) = news.borrow_and_update().clone() else { return };
        let uid = pod.uid().unwrap_or_default();
        let address = self.slot.next_pod();
        self.addresses.0.lock().insert(uid.clone(), address);
        if let Err(error) = self.pod_life(&pod, address, &mut news).await {
            tracing::warn!("pod {}: {error:#}", pod.name_any());
        }
        self.addresses.0.lock().remove(&uid);
        let _ = std::fs::remove_dir_all(self.folder.join("pods").join(uid));
    }

    async fn pod_life(&self, pod: &Pod, address: IpAddr, news: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
        let mut life = Life {
            kubelet: self,
            address,
            started: Timestamp::now(),
            container: containers(pod).next().cloned().context("a pod has a container")?,
            process: None,
            child: None,
            restarts: 0,
            hosted: false,
            reported: None,
        };
        if !matches!(phase, "Succeeded" | "Failed") {
            let ready_after = self.behaviour.borrow().ready_after;
            tokio::select! {
                () = tokio::time::sleep(ready_after) => {}
                () = leaving(news) => {}
            }
            life.start(pod).await?;
        }
        life.run(news).await
    }
}

/// Resolves when the pod is to go away or gone.
async fn leaving(news: &mut watch::Receiver<Option<Pod>>) {
    let _ = news.wait_for(|pod| pod.as_ref().is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())).await;
}

struct Life<'a> {
    kubelet: &'a Kubelet,
    address: IpAddr,
    started: Timestamp,
    container: Container,
    process: Option<PodProcess>,
    child: Option<Child>,
    restarts: i32,
    /// Whether the guest has ever been in this launcher pod.
    hosted: bool,
    reported: Option<(Containers, bool)>,
}

const PROBE_EVERY: Duration = Duration::from_millis(150);
const CRASH_EVERY: Duration = Duration::from_secs(2);

impl Life<'_> {
    async fn start(&mut self, pod: &Pod) -> Result<()> {
        let program = process::program_of(&self.container, &self.kubelet.own_programs.borrow());
        if let Some(program) = program {
            let kubelet = self.kubelet;
            let surroundings = Surroundings { admin: &kubelet.admin, client: &kubelet.client, folder: &kubelet.folder };
            let process = PodProcess::prepare(&surroundings, pod, self.address, program?).await?;
            self.child = Some(process.spawn()?);
            self.process = Some(process);
        }
        Ok(())
    }

    async fn run(mut self, news: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        let mut behaviour = self.kubelet.behaviour.clone();
        let mut vmis = self.kubelet.vmis.subscribe();
        loop {
            let Some(pod) = news.borrow_and_update().clone() else { return Ok(()) };
            if pod.metadata.deletion_timestamp.is_some() {
                return self.end(&pod, news).await;
            }
            let fate = behaviour.borrow_and_update().fate(&pod);
            let (containers, again) = self.look(&pod, fate).await?;
            self.report(&pod, containers).await?;
            if matches!(containers, Containers::Ended { .. }) {
                leaving(news).await;
                continue;
            }
            tokio::select! {
                _ = news.changed() => {}
                _ = behaviour.changed() => {}
                _ = vmis.changed() => {}
                () = exited(&mut self.child) => {}
                () = tokio::time::sleep(again.unwrap_or(Duration::MAX)) => {}
            }
        }
    }

    /// How the containers are now, and when to look again if nothing happens before.
    async fn look(&mut self, pod: &Pod, fate: Option<PodFate>) -> Result<(Containers, Option<Duration>)> {
        match fate {
            Some(PodFate::NeverReady) => return Ok((Containers::Running { ready: false }, None)),
            Some(PodFate::Completes) => return Ok((Containers::Ended { success: true }, None)),
            Some(PodFate::Crashes) => {
                self.restarts += 1;
                return Ok((Containers::Crashing { restarts: self.restarts }, Some(CRASH_EVERY)));
            }
            None => {}
        }
        if let Some(guest) = self.kubelet.vmis.guest_of(pod) {
            self.hosted |= guest.is_on(pod);
            if let Some(success) = guest.outcome(pod, self.hosted) {
                return Ok((Containers::Ended { success }, None));
            }
        }
        let Some(child) = &mut self.child else { return Ok((Containers::Running { ready: true }, None)) };
        if let Some(exit) = child.try_wait().context("asking for the process")? {
            return self.after_exit(pod, exit.success());
        }
        let ready = match Probe::of(&self.container) {
            Some(probe) => probe.succeeds(self.address).await,
            None => true,
        };
        Ok((Containers::Running { ready }, Some(if ready { PROBE_EVERY * 20 } else { PROBE_EVERY })))
    }

    fn after_exit(&mut self, pod: &Pod, success: bool) -> Result<(Containers, Option<Duration>)> {
        let policy = pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always");
        if policy == "Never" || (policy == "OnFailure" && success) {
            return Ok((Containers::Ended { success }, None));
        }
        self.restarts += 1;
        if let Some(process) = &self.process {
            self.child = Some(process.spawn()?);
        }
        Ok((Containers::Crashing { restarts: self.restarts }, Some(PROBE_EVERY)))
    }

    /// Writes the status, if it says something new.
    async fn report(&mut self, pod: &Pod, containers: Containers) -> Result<()> {
        let seen = (containers, is_ready(pod, containers));
        if self.reported == Some(seen) {
            return Ok(());
        }
        let host_ip =
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).map(|node| self.kubelet.host_ip(node));
        let sighting = Sighting {
            pod,
            containers,
            pod_ip: &self.address.to_string(),
            host_ip: &host_ip.unwrap_or_default(),
            started: self.started,
            now: Timestamp::now(),
        };
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": sighting.status()});
        let pods: Api<Pod> = Api::namespaced(self.kubelet.client.clone(), &pod.namespace().unwrap_or_default());
        match pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(patch)).await {
            Ok(_) => self.reported = Some(seen),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            // The API server may be away on purpose; the next look reports again.
            Err(_) => tokio::time::sleep(PROBE_EVERY).await,
        }
        Ok(())
    }

    /// The pod is to go: its process is asked to end, then the object is removed for good.
    async fn end(mut self, pod: &Pod, news: &mut watch::Receiver<Option<Pod>>) -> Result<()> {
        if let Some(child) = &mut self.child {
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
        let pods: Api<Pod> = Api::namespaced(self.kubelet.client.clone(), &pod.namespace().unwrap_or_default());
        let at_once = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
            ..DeleteParams::default()
        };
        loop {
            match pods.delete(&pod.name_any(), &at_once).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => return Ok(()),
                Err(_) if news.borrow().is_none() => return Ok(()),
                Err(_) => tokio::time::sleep(PROBE_EVERY).await,
            }
        }
    }
}

impl Kubelet {
    fn host_ip(&self, node: &str) -> String {
        let number = node.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(1);
        self.slot.node(number).to_string()
    }
}

async fn exited(child: &mut Option<Child>) {
    match child {
        Some(child) => {
            let _ = child.wait().await;
        }
        None => std::future::pending().await,
    }
}
