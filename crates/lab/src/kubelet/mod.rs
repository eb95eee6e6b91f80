//! The simulated kubelet of every node: it sets scheduled pods to Running and removes deleted pods.
//!
//! Most pods are only simulated. For a pod of virt-api, virt-controller, virt-operator or one of our operators, the
//! kubelet starts the real process (see [`process`]). That pod is ready when its readiness probe succeeds.

mod pod_worker;
pub(crate) mod probe;
mod process;
mod programs;
mod restart;
mod status;
mod volumes;

use std::{collections::HashMap, net::IpAddr, path::PathBuf, sync::Arc};

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{Api, Client, ResourceExt, runtime::watcher};
use parking_lot::Mutex;
use pod_worker::PodWorker;
use probe::Probe;
pub(crate) use process::pod_log;
pub use programs::OwnProgram;
pub(crate) use programs::{Programs, split_image};
use tokio::sync::watch;
pub(crate) use volumes::FrozenPods;
use volumes::VolumeUpdates;

use crate::{
    addresses::AddressRange, credentials::Credentials, object_watch::run_per_object, pace::DelayRange, vmi::VmiPhases,
};

/// How pods behave. The first rule whose text occurs in one of the pod's images applies.
#[derive(Clone, Debug, Default)]
pub struct PodBehaviour {
    /// From the binding to a node until the pod is ready.
    pub ready_after: DelayRange,
    /// If it is not zero, a pod with a real process reports that it is ready first, and its process starts this much
    /// later. The process then listens within a second.
    pub starts_after_ready: DelayRange,
    /// From a change of a Secret or ConfigMap until the kubelet of the node has updated the files of the pods that mount
    /// it. Every node has its own delay.
    pub volumes_updated_after: DelayRange,
    pub rules: Vec<PodRule>,
    /// Nodes whose kubelet does not run: it reports nothing, and starts and ends no pod.
    pub dead_nodes: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct PodRule {
    pub image_contains: String,
    pub fate: PodFate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodFate {
    /// Its containers exit immediately, again after every restart, and report [`CRASH_MESSAGE`].
    Crashes,
    /// Its first init container does the same.
    InitCrashes,
    /// The images of its containers do not exist.
    ImageMissing,
    /// It runs, but never passes its readiness probe.
    NeverReady,
    /// It runs and exits successfully, like the pod of a Job.
    Completes,
}

/// What a container that crashes reports.
pub const CRASH_MESSAGE: &str = "panic: the container exited";

impl PodBehaviour {
    fn fate(&self, pod: &Pod) -> Option<PodFate> {
        let images: Vec<&str> = containers(pod).filter_map(|container| container.image.as_deref()).collect();
        let rule = self.rules.iter().find(|rule| images.iter().any(|image| image.contains(&rule.image_contains)))?;
        Some(rule.fate)
    }

    fn is_on_dead_node(&self, pod: &Pod) -> bool {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
        node.is_some_and(|node| self.dead_nodes.contains(node))
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| &spec.containers)
}

/// Whether the process of a pod answers its readiness probe now. None if the pod has no process or no probe.
pub(crate) async fn answers(pod: &Pod, programs: &Programs) -> Option<bool> {
    let container = containers(pod).next()?;
    programs.of(container)?.ok()?;
    let probe = Probe::from_container(container)?;
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).and_then(|ip| ip.parse().ok());
    match address {
        Some(address) => Some(probe.succeeds(address).await),
        None => Some(false),
    }
}

pub(crate) struct Kubelet {
    pub(crate) client: Client,
    pub(crate) admin: Credentials,
    pub(crate) address_range: Arc<AddressRange>,
    pub(crate) folder: PathBuf,
    pub(crate) behaviour: watch::Receiver<PodBehaviour>,
    pub(crate) programs: watch::Receiver<Programs>,
    pub(crate) vmis: VmiPhases,
    pub(crate) addresses: PodAddresses,
    pub(crate) seed: u64,
    /// How many pods there were by the name of their first container.
    pub(crate) known: Mutex<HashMap<String, u32>>,
    pub(crate) frozen: FrozenPods,
}

/// The address of each running pod, by UID. A guest has the address of its launcher pod.
#[derive(Clone, Default)]
pub(crate) struct PodAddresses(Arc<Mutex<HashMap<String, IpAddr>>>);

impl PodAddresses {
    pub(crate) fn get(&self, uid: &str) -> Option<IpAddr> {
        self.0.lock().get(uid).copied()
    }
}

impl Kubelet {
    /// Runs until cancelled. Cancelling it ends the processes of all its pods.
    pub(crate) async fn run(self) {
        let kubelet = Arc::new(self);
        let pods: Api<Pod> = Api::all(kubelet.client.clone());
        let bound = watcher::Config::default().fields("spec.nodeName!=");
        run_per_object(pods, bound, |_, _| {}, |changes| kubelet.clone().run_pod(changes)).await;
    }

    /// Runs one pod, from its binding to a node until it is removed.
    async fn run_pod(self: Arc<Self>, mut changes: watch::Receiver<Option<Pod>>) {
        let Some(pod) = changes.borrow_and_update().clone() else { return };
        let uid = pod.uid().unwrap_or_default();
        let address = self.address_range.next_pod();
        self.addresses.0.lock().insert(uid.clone(), address);
        if let Err(error) = PodWorker::run(&self, &pod, address, &mut changes).await {
            tracing::warn!("pod {}: {error:#}", pod.name_any());
        }
        self.addresses.0.lock().remove(&uid);
        let _ = std::fs::remove_dir_all(self.folder.join("pods").join(uid));
    }

    /// The name of a pod for its delays. Names of pods are random, so it consists of the name of the container and the
    /// number of earlier pods with such a container.
    fn delayed_name(&self, container: &Container) -> String {
        let mut known = self.known.lock();
        let number = known.entry(container.name.clone()).or_default();
        *number += 1;
        format!("{}/{number}", container.name)
    }

    fn volume_updates(&self, pod: &Pod) -> VolumeUpdates {
        VolumeUpdates {
            behaviour: self.behaviour.clone(),
            seed: self.seed,
            frozen: self.frozen.clone(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
            uid: pod.uid().unwrap_or_default(),
        }
    }

    fn host_ip(&self, node: &str) -> String {
        let number = node.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(1);
        self.address_range.node(number).to_string()
    }
}
