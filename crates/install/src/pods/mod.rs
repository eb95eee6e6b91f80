//! The pods of the installation, reduced to what a reconcile reads: which workload a pod belongs to, where it runs, and
//! why it is not ready. `problems` turns them into sentences.
//!
//! A cluster has a virt-handler pod on every node, so a pod that is ready takes little memory. Texts of the kubelet are
//! reduced when a pod is projected: a restart that changes only a time or an identifier in a text is not a change.

mod problems;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    net::IpAddr,
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod as KubernetesPod, PodSpec, PodStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    jiff::{SignedDuration, Timestamp},
};
use vitivirt_api::ObjectKey;

use crate::{
    kind::Kind,
    live::Rollout,
    names::{STRATEGY_JOB_APP, VIRT_OPERATOR, annotation, label},
    node_state::NodeState,
    stable_text,
};

pub(crate) use problems::{Problems, examples, list};

/// How long a pod may be not ready before its node is checked. Pods that just start need no check.
const CHECK_NODE_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// How much longer than its grace period a pod may take to end.
const OVERDUE: SignedDuration = SignedDuration::from_secs(10);
/// The value of the label `kubevirt.io` of the pods that run VMIs.
const VIRT_LAUNCHER: &str = "virt-launcher";
const CRASH_LOOP: &str = "CrashLoopBackOff";

/// The labels of pods that are not part of an installation even if a user gave them the label of its manager.
pub const FOREIGN_PODS: (&str, &str) = (label::APP, VIRT_LAUNCHER);
/// The labels of the operator's own pods, and of the Job that dumps the install strategy of another release.
pub const OPERATOR_PODS: (&str, [&str; 2]) = (label::APP, [VIRT_OPERATOR, STRATEGY_JOB_APP]);

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pod {
    pub uid: Box<str>,
    /// The workload that created it: a Deployment, a DaemonSet or a Job, and its name.
    pub workload: Option<(Kind, Box<str>)>,
    /// The hash of the template from which it was created.
    pub revision: Box<str>,
    /// The version of KubeVirt that it belongs to. Empty if it is not a component.
    pub(crate) version: Box<str>,
    pub created: Option<Timestamp>,
    /// When it must have ended, if it is being deleted.
    pub deleted: Option<Timestamp>,
    /// Empty as long as it is not scheduled.
    pub node: Box<str>,
    pub address: Option<IpAddr>,
    /// Whether it failed or succeeded, so that its containers do not run again.
    pub ended: bool,
    pub ready: bool,
    /// When `ready` changed last.
    pub ready_changed: Option<Timestamp>,
    /// Why the pod as a whole does not start: the scheduler's message, or why the kubelet rejected it.
    reason: Option<PodReason>,
    /// Containers that are not ready or were restarted.
    pub containers: Box<[Container]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum PodReason {
    Unschedulable(Box<str>),
    Failed(Box<str>),
}

/// A container that is not ready or was restarted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Container {
    pub name: Box<str>,
    pub image: Box<str>,
    pub init: bool,
    pub ready: bool,
    pub restarts: i32,
    /// The reason and the message of its state, if it waits.
    pub waiting: Option<(Box<str>, Box<str>)>,
    /// How it ended last.
    pub exit: Option<Exit>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Exit {
    pub code: i32,
    pub reason: Box<str>,
    /// What the container reported, or the end of its log.
    pub message: Box<str>,
}

impl Pod {
    pub fn new(pod: KubernetesPod) -> Self {
        let KubernetesPod { metadata, spec, status } = pod;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let phase = status.phase.as_deref().unwrap_or_default();
        let ready = condition(&status, "Ready");
        Self {
            workload: workload(&metadata),
            revision: revision(&metadata).into(),
            version: version(&metadata).into(),
            created: metadata.creation_timestamp.as_ref().map(|time| time.0),
            deleted: metadata.deletion_timestamp.as_ref().map(|time| time.0),
            uid: metadata.uid.unwrap_or_default().into(),
            node: spec.node_name.unwrap_or_default().into(),
            address: status.pod_ip.as_deref().and_then(|address| address.parse().ok()),
            ended: matches!(phase, "Failed" | "Succeeded"),
            ready: ready.is_some_and(|(ready, _)| ready),
            ready_changed: ready.and_then(|(_, changed)| changed),
            reason: pod_reason(&status, phase == "Failed"),
            containers: containers(&status),
        }
    }

    /// Whether it should have ended long ago. Its kubelet does not answer, so nothing waits for it.
    pub(crate) fn is_overdue(&self, now: Timestamp) -> bool {
        self.overdue_from().is_some_and(|at| at <= now)
    }

    /// When it becomes overdue, if it is being deleted.
    pub(crate) fn overdue_from(&self) -> Option<Timestamp> {
        self.deleted.map(|at| at + OVERDUE)
    }

    fn belongs_to(&self, kind: Kind, name: &str) -> bool {
        self.workload.as_ref().is_some_and(|(of, workload)| (*of, &**workload) == (kind, name))
    }

    /// Whether the scheduler excluded nodes because of the pod's node affinity or node selector.
    fn has_no_matching_node(&self) -> bool {
        matches!(&self.reason, Some(PodReason::Unschedulable(message)) if message.contains("node affinity/selector"))
    }

    /// Whether its node must be checked, because the node may be the reason why the pod is not ready.
    fn may_be_on_dead_node(&self, now: Timestamp) -> bool {
        if self.ready && self.deleted.is_none() || self.ended || self.node.is_empty() {
            return false;
        }
        // The node lifecycle controller sets the condition Ready of the pods on a dead node. The states of the
        // containers stay as the kubelet reported them last.
        let marked =
            !self.ready && self.ready_changed.is_some() && self.containers.iter().all(|container| container.ready);
        let since = self.deleted.or(self.ready_changed).or(self.created);
        marked || since.is_none_or(|since| now.duration_since(since) >= CHECK_NODE_AFTER)
    }
}

/// A Deployment owns its pods through a ReplicaSet, whose name ends with the hash of the template.
fn workload(metadata: &ObjectMeta) -> Option<(Kind, Box<str>)> {
    let owner = metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))?;
    match owner.kind.as_str() {
        "DaemonSet" => Some((Kind::DaemonSet, owner.name.as_str().into())),
        "Job" => Some((Kind::Job, owner.name.as_str().into())),
        "ReplicaSet" => Some((Kind::Deployment, owner.name.rsplit_once('-')?.0.into())),
        _ => None,
    }
}

/// The label of the pods of a DaemonSet with the hash of their template.
pub(crate) const REVISION_HASH: &str = "controller-revision-hash";

fn revision(metadata: &ObjectMeta) -> &str {
    let labels = metadata.labels.as_ref();
    let hash = ["pod-template-hash", REVISION_HASH].iter().find_map(|key| labels?.get(*key));
    hash.map(String::as_str).unwrap_or_default()
}

fn version(metadata: &ObjectMeta) -> &str {
    let annotations = metadata.annotations.as_ref();
    annotations.and_then(|annotations| annotations.get(annotation::VERSION)).map(String::as_str).unwrap_or_default()
}

fn condition(status: &PodStatus, kind: &str) -> Option<(bool, Option<Timestamp>)> {
    let condition = status.conditions.iter().flatten().find(|condition| condition.type_ == kind)?;
    Some((condition.status == "True", condition.last_transition_time.as_ref().map(|time| time.0)))
}

fn pod_reason(status: &PodStatus, failed: bool) -> Option<PodReason> {
    if failed {
        let (reason, message) =
            (status.reason.as_deref().unwrap_or_default(), status.message.as_deref().unwrap_or_default());
        return (!reason.is_empty())
            .then(|| PodReason::Failed(stable_text::status(&format!("{reason}: {message}")).into()));
    }
    let unschedulable = status.conditions.iter().flatten().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    })?;
    let message = unschedulable.message.as_deref().unwrap_or_default();
    // What preemption could not do repeats the first part.
    let message = message.split(" preemption:").next().unwrap_or_default();
    Some(PodReason::Unschedulable(stable_text::status(message).trim_end_matches('.').into()))
}

fn containers(status: &PodStatus) -> Box<[Container]> {
    let init = status.init_container_statuses.iter().flatten().map(|container| container_state(container, true));
    let others = status.container_statuses.iter().flatten().map(|container| container_state(container, false));
    init.chain(others).filter(|container| !container.ready || container.restarts > 0).collect()
}

fn container_state(status: &ContainerStatus, init: bool) -> Container {
    let state = status.state.clone().unwrap_or_default();
    let terminated = state.terminated.or_else(|| status.last_state.clone().unwrap_or_default().terminated);
    // A completed init container is ready.
    let completed = init && terminated.as_ref().is_some_and(|exit| exit.exit_code == 0) && state.waiting.is_none();
    let waiting = state.waiting.map(|waiting| {
        let reason = waiting.reason.unwrap_or_default();
        // The kubelet's message about a crash loop contains the delay, which grows.
        let message = waiting.message.filter(|_| reason != CRASH_LOOP).unwrap_or_default();
        (reason.into(), stable_text::status(&message).into())
    });
    Container {
        name: status.name.as_str().into(),
        image: status.image.as_str().into(),
        init,
        ready: status.ready || completed,
        restarts: status.restart_count,
        waiting,
        exit: terminated.map(|exit| Exit {
            code: exit.exit_code,
            reason: exit.reason.unwrap_or_default().into(),
            message: stable_text::log(exit.message.as_deref().unwrap_or_default()).into(),
        }),
    }
}

/// The pods of an installation and of its operator, and the nodes that are known not to be ready.
#[derive(Clone, Default)]
pub struct Pods {
    pods: Vec<(ObjectKey, Arc<Pod>)>,
    pub dead_nodes: BTreeSet<String>,
    /// The nodes among these that the status of a DaemonSet does not count, by the name of the DaemonSet.
    uncounted_nodes: BTreeMap<String, BTreeSet<String>>,
    /// The revision of the pods that have the current template, by the name of the DaemonSet. Known only while a rollout
    /// is in progress.
    pub current_revisions: BTreeMap<String, Box<str>>,
}

impl FromIterator<(ObjectKey, Arc<Pod>)> for Pods {
    fn from_iter<I: IntoIterator<Item = (ObjectKey, Arc<Pod>)>>(pods: I) -> Self {
        let mut pods: Vec<_> = pods.into_iter().collect();
        // The oldest pod is the example in messages, so that the example stays the same while pods appear.
        pods.sort_by(|(a_key, a), (b_key, b)| (a.created, a_key).cmp(&(b.created, b_key)));
        Self { pods, ..Self::default() }
    }
}

impl Pods {
    pub(crate) fn get(&self, key: &ObjectKey) -> Option<&Arc<Pod>> {
        self.pods.iter().find(|(found, _)| found == key).map(|(_, pod)| pod)
    }

    pub fn of(&self, kind: Kind, name: &str) -> impl Iterator<Item = &(ObjectKey, Arc<Pod>)> {
        self.pods.iter().filter(move |(_, pod)| pod.belongs_to(kind, name))
    }

    /// Whether a pod of another version of KubeVirt may still run.
    pub(crate) fn has_other_version(&self, version: &str) -> bool {
        let mut others = self.pods.iter().filter(|(_, pod)| !pod.version.is_empty() && *pod.version != *version);
        others.any(|(_, pod)| pod.deleted.is_none() && !pod.ended && !self.is_on_dead_node(pod))
    }

    /// The revision of the pods that have the current template of a DaemonSet.
    pub(crate) fn current_revision(&self, daemon_set: &str) -> Option<&str> {
        self.current_revisions.get(daemon_set).map(|revision| &**revision)
    }

    /// The nodes that may be the reason why a pod is not ready, each with a digest of these pods. The digest changes
    /// when the kubelet of the node reports something, and when a DaemonSet counts other nodes: taints may have changed.
    /// `counted` is the number of nodes in the status of a DaemonSet.
    pub(crate) fn nodes_to_check(
        &self,
        now: Timestamp,
        counted: impl Fn(&ObjectKey) -> Option<i64>,
    ) -> BTreeMap<String, u64> {
        let mut nodes: BTreeMap<String, DefaultHasher> = BTreeMap::new();
        for (key, pod) in self.pods.iter().filter(|(_, pod)| pod.may_be_on_dead_node(now)) {
            let daemon_set = pod.workload.as_ref().filter(|(kind, _)| *kind == Kind::DaemonSet).map(|(_, name)| name);
            let daemon_set = daemon_set.zip(key.namespace());
            let counted = daemon_set.map(|(name, namespace)| counted(&ObjectKey::namespaced(namespace, name)));
            (pod, counted).hash(nodes.entry(pod.node.to_string()).or_default());
        }
        nodes.into_iter().map(|(node, hasher)| (node, hasher.finish())).collect()
    }

    /// Records the nodes that are not ready. `None` stands for a node that does not exist. `templates` are those of the
    /// DaemonSets, by name.
    pub(crate) fn set_dead_nodes(
        &mut self,
        nodes: BTreeMap<String, Option<NodeState>>,
        templates: &BTreeMap<String, PodSpec>,
    ) {
        let uncounted = |template: &PodSpec| {
            let is_counted =
                |node: &Option<NodeState>| node.as_ref().is_some_and(|it| it.counts_for_daemon_set(template));
            nodes.iter().filter(|(_, node)| !is_counted(node)).map(|(name, _)| name.clone()).collect()
        };
        self.uncounted_nodes = templates.iter().map(|(name, template)| (name.clone(), uncounted(template))).collect();
        self.dead_nodes = nodes.into_keys().collect();
    }

    fn is_on_dead_node(&self, pod: &Pod) -> bool {
        self.dead_nodes.contains(&*pod.node) && (!pod.ready || pod.deleted.is_some())
    }

    /// The nodes on which a DaemonSet cannot have a ready pod, because the nodes are not ready.
    pub(crate) fn unreachable_nodes(&self, daemon_set: &str) -> BTreeSet<&str> {
        let pods = self.of(Kind::DaemonSet, daemon_set);
        pods.filter(|(_, pod)| self.is_on_dead_node(pod)).map(|(_, pod)| &*pod.node).collect()
    }

    /// The nodes among these that the status of the DaemonSet counts. It does not count a node with a taint that the pods
    /// do not tolerate, although their pods stay there: the node lifecycle controller sets one on most dead nodes.
    pub(crate) fn counted_unreachable_nodes(&self, daemon_set: &str) -> BTreeSet<&str> {
        let mut nodes = self.unreachable_nodes(daemon_set);
        nodes.retain(|node| self.is_counted(daemon_set, node));
        nodes
    }

    #[cfg(test)]
    pub(crate) fn set_uncounted_nodes(&mut self, daemon_set: &str, nodes: BTreeSet<String>) {
        self.uncounted_nodes.insert(daemon_set.to_owned(), nodes);
    }

    fn is_counted(&self, daemon_set: &str, node: &str) -> bool {
        !self.uncounted_nodes.get(daemon_set).is_some_and(|nodes| nodes.contains(node))
    }

    /// The rollout of a workload without the nodes that are not ready: a DaemonSet cannot have a ready pod there, and
    /// to wait for such a node could take days.
    fn rollout_on_ready_nodes(&self, name: &str, rollout: Rollout) -> Rollout {
        if !rollout.every_node {
            return rollout;
        }
        let dead = self.of(Kind::DaemonSet, name).map(|(_, pod)| pod);
        let dead = dead.filter(|pod| self.is_on_dead_node(pod) && self.is_counted(name, &pod.node));
        let dead: Vec<&Arc<Pod>> = dead.collect();
        // If the revision is not known, the newest pod has the current template, unless the controller has not created
        // any of these yet. Then the DaemonSet's own number of updated pods is too low anyway.
        let newest = || self.of(Kind::DaemonSet, name).filter(|(_, pod)| pod.deleted.is_none()).last();
        let current = self.current_revision(name).or_else(|| newest().map(|(_, pod)| &*pod.revision));
        let is_current =
            |pod: &&&Arc<Pod>| pod.deleted.is_none() && current.is_some_and(|current| *current == *pod.revision);
        let nodes = |pods: &mut dyn Iterator<Item = &Arc<Pod>>| {
            let nodes: BTreeSet<&str> = pods.map(|pod| &*pod.node).collect();
            i64::try_from(nodes.len()).unwrap_or_default()
        };
        let (all, updated) = (nodes(&mut dead.iter().copied()), nodes(&mut dead.iter().filter(is_current).copied()));
        Rollout { pods: rollout.pods - all, updated: rollout.updated - updated, ..rollout }
    }
}
