//! The input of a reconcile: the KubeVirt resource, the objects and features of the cluster, and the time.
//! virt-operator fills it from its caches; this crate reads nothing from the cluster.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use vitivirt_api::{
    ApiResource, ObjectKey, RecentWrites,
    kubevirt::{Generation, KubeVirt},
};

use crate::{
    digest::Digest,
    environment::Cluster,
    kind::Kind,
    live::LiveObject,
    names::annotation,
    node_state::NodeState,
    order::{Lane, LaneProblem},
    pods::Pods,
};

pub struct Observed {
    pub kubevirt: KubeVirt,
    /// The oldest KubeVirt resource of the namespace, if it is another one: a cluster has one installation.
    pub first_kubevirt: Option<ObjectKey>,
    /// The namespace of the operator. The installation is in the same namespace.
    pub operator_namespace: String,
    /// The architecture of the operator's node, in Kubernetes' spelling, for example `amd64`.
    pub architecture: &'static str,
    pub now: Timestamp,
    pub cluster: Cluster,
    /// Every object that a KubeVirt operator manages.
    pub objects: Objects,
    /// The namespace of the installation.
    pub namespace: Option<Arc<LiveObject>>,
    /// The addresses at which other clusters reach virt-synchronization-controller.
    pub synchronization_addresses: Vec<String>,
    /// Whether an object that is not in `objects` is not in the cluster either, and `kubevirt` is current.
    pub caches_complete: bool,
    /// The pods of the installation and of its operator.
    pub pods: Pods,
    /// The certificates that the pods serve.
    pub served: Served,
    /// The CRDs that the next plan changes.
    pub crd_checks: BTreeMap<ObjectKey, CrdCheck>,
    /// The objects that are stored again before CRDs are changed, see [`crate::next_migration`].
    pub storage_page: Option<StoragePage>,
    /// CRDs that the installation no longer contains but that still have objects.
    pub crds_with_objects: BTreeSet<ObjectKey>,
    /// Why the operator could not check whether orphans may be deleted.
    pub unchecked_orphans: Option<String>,
    /// What is wrong in the lanes that only report, see [`crate::lane_problem`].
    pub lane_problems: BTreeMap<Lane, LaneProblem>,
    /// How often each object was written lately.
    pub repairs: Arc<Repairs>,
    /// When fewer nodes count, see [`crate::NodeHistory`].
    pub nodes_held_until: Option<Timestamp>,
}

impl Observed {
    /// The nodes that may be the reason why a pod is not ready, each with a digest of what a check of the node depends on.
    pub fn nodes_to_check(&self) -> BTreeMap<String, u64> {
        let counted = |daemon_set: &ObjectKey| {
            let rollout = self.objects.get(Kind::DaemonSet, daemon_set)?.rollout?;
            Some(rollout.pods)
        };
        self.pods.nodes_to_check(self.now, counted)
    }

    /// Records the nodes that are not ready, by name. `None` stands for a node that does not exist.
    pub fn set_dead_nodes(&mut self, nodes: BTreeMap<String, Option<NodeState>>) {
        let template = |live: &LiveObject| {
            let template = live.content()?.pointer_mut("/spec/template/spec")?.take();
            serde_json::from_value(template).ok()
        };
        // Most clusters have none, and a template is large.
        let are_needed = !nodes.is_empty();
        let daemon_sets = self.objects.recognized(Kind::DaemonSet).filter(|_| are_needed);
        let templates = daemon_sets.filter_map(|(key, live)| Some((key.name().to_owned(), template(live)?)));
        let templates = templates.collect();
        self.pods.set_dead_nodes(nodes, &templates);
    }

    /// What the status of the KubeVirt resource records of an object.
    pub(crate) fn recorded_generation(&self, kind: Kind, key: &ObjectKey) -> Option<&Generation> {
        let resource = kind.resource();
        let status = self.kubevirt.status.as_ref()?;
        status.generations.iter().find(|recorded| {
            recorded.resource == resource.plural
                && recorded.name == key.name()
                && recorded.namespace == key.namespace().unwrap_or_default()
        })
    }
}

/// Live objects by kind and key.
#[derive(Clone, Default)]
pub struct Objects(BTreeMap<(Kind, ObjectKey), Arc<LiveObject>>);

impl Objects {
    pub fn insert(&mut self, kind: Kind, key: ObjectKey, live: Arc<LiveObject>) {
        self.0.insert((kind, key), live);
    }

    /// The object of the installation with this key. A foreign object with the same key shows up as a name conflict
    /// when the operator creates its own.
    pub fn get(&self, kind: Kind, key: &ObjectKey) -> Option<&Arc<LiveObject>> {
        self.0.get(&(kind, key.clone())).filter(|live| live.is_recognized(kind))
    }

    /// The objects of a kind that may be objects of the installation, if they have the name of one.
    pub fn recognized(&self, kind: Kind) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        let of_kind = self.0.iter().filter(move |((of, _), live)| *of == kind && live.is_recognized(kind));
        of_kind.map(|((_, key), live)| (key, live))
    }

    /// The objects of a kind that a KubeVirt operator created, whatever their names.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        self.0.iter().filter(move |((of, _), live)| *of == kind && live.is_ours()).map(|((_, key), live)| (key, live))
    }

    /// The objects of a kind that the removal of an installation may delete.
    pub(crate) fn managed(&self, kind: Kind) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        let managed = self.0.iter().filter(move |((of, _), live)| *of == kind && live.is_managed());
        managed.map(|((_, key), live)| (key, live))
    }

    /// Whether an installation, or a part of one, exists. What dumps or contains an install strategy is not part of it.
    pub(crate) fn contain_installation(&self) -> bool {
        let is_installed = |((kind, _), live): (&(Kind, ObjectKey), &Arc<LiveObject>)| {
            live.is_ours() && *kind != Kind::Job && !live.is_strategy
        };
        self.0.iter().any(is_installed)
    }

    /// The newest ConfigMap with the install strategy of a deployment.
    pub fn strategy(&self, identifier: &str) -> Option<(&ObjectKey, &Arc<LiveObject>)> {
        let is_current = |(_, live): &(&ObjectKey, &Arc<LiveObject>)| {
            live.is_strategy && !live.deleting && live.annotation(annotation::IDENTIFIER) == identifier
        };
        self.of_kind(Kind::ConfigMap).filter(is_current).max_by_key(|(_, live)| live.created)
    }
}

/// A port on which the pods of a Deployment serve a certificate.
#[derive(Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub deployment: &'static str,
    pub port: u16,
    pub secret: &'static str,
}

/// The certificate that a pod serves, compared with the stored one, the CA bundle and the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServedState {
    Good,
    /// Another certificate than the stored one. Clients still accept it.
    NotReloaded,
    Expired,
    /// No CA of the bundle has signed it.
    Untrusted,
    /// The pod presents no certificate. It may be starting, or a NetworkPolicy may refuse the connection.
    Unreachable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedCertificate {
    pub endpoint: &'static Endpoint,
    pub pod: ObjectKey,
    pub pod_uid: Box<str>,
    pub state: ServedState,
    /// Whether clients accept the stored certificate.
    pub stored_is_good: bool,
    /// Since when the pod does not serve the stored certificate.
    pub since: Timestamp,
    /// When the certificate that the pod serves expires.
    pub expires: Timestamp,
}

/// The results of the last probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub certificates: Vec<ServedCertificate>,
    /// How long a pod may need to load a new certificate.
    pub reload_time: Duration,
    /// The pods that were deleted because of their certificates, by UID, with the names of their Deployments.
    pub deleted_pods: BTreeMap<Box<str>, &'static str>,
}

/// What an upgrade must know about one live CRD before it changes the CRD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrdCheck {
    /// Stored versions that the new CRD does not have.
    pub(crate) lost_versions: Vec<String>,
    /// The stored versions that would be left.
    pub(crate) kept_versions: Vec<String>,
    /// How the stored versions that would be lost become unnecessary, if that is possible.
    pub(crate) migration: Option<StorageMigration>,
    /// Versions that get the status subresource.
    pub(crate) new_status: Vec<String>,
}

/// How stored versions of a CRD become unnecessary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageMigration {
    /// The kind of the objects, in the version in which the API server stores them.
    pub resource: ApiResource,
    /// The stored versions that are left.
    pub(crate) stored_versions: Vec<String>,
}

/// The objects of a CRD that the next reconcile stores again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoragePage {
    pub crd: ObjectKey,
    /// With their UIDs.
    pub objects: Vec<(ObjectKey, String)>,
    /// The objects of earlier pages.
    pub done: usize,
    /// The objects of later pages, if the API server counts them.
    pub remaining: usize,
    pub is_last: bool,
}

/// The recent writes of each object. virt-operator keeps them between reconciles. They may be lost at any time.
#[derive(Clone, Debug, Default)]
pub struct Repairs {
    pub(crate) objects: RecentObjectWrites,
    /// Those of the lane `Certificates`, which writes a part of some objects of other lanes.
    pub(crate) certificates: RecentObjectWrites,
}

pub(crate) type RecentObjectWrites = HashMap<(Kind, ObjectKey), RecentWrites<Digest>>;
