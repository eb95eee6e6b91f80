//! The removal of an installation: what is deleted, in which order, and what a removal waits for.
//!
//! It needs no install strategy, no Job and no image, because the labels of the objects show what belongs to an
//! installation. So it works in every state of the KubeVirt resource, and without one. The operator and the command
//! `virt-operator uninstall` share it.
//!
//! The stages follow from the objects that are left (`stage`), so a removal continues where another one stopped:
//!
//! 1. `Stage::Instances`: the CRDs are deleted, and the API server deletes their objects. KubeVirt's components run, and
//!    its webhooks and certificates are kept, until the last VM and VMI is gone. A finalizer keeps all CRDs until the
//!    last one has no objects, because the components need them.
//! 2. `Stage::Objects`: everything else, first what could reject the deletion of other objects.
//! 3. `Stage::Nodes`: the labels and annotations of nodes, when no virt-handler runs that would set them again, and last
//!    the finalizer of the KubeVirt resource.
//!
//! `plan` lists the writes, `obstacles` explains what blocks a removal, and `report` writes the status.

mod nodes;
mod obstacles;
mod plan;
mod report;

use std::{collections::HashSet, sync::Arc};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use vitivirt_api::{ObjectKey, Target, kubevirt::KubeVirt};

pub use self::{
    nodes::MarkedNode,
    obstacles::obstacles,
    plan::removal_plan,
    report::{guarded_report, removal_report},
};
use crate::{
    eligibility::is_eligible,
    kind::Kind,
    live::{Finalizer, LiveObject},
    names::{FINALIZER, OPERATOR_SERVICE_ACCOUNT, VIRT_CONTROLLER, VIRT_HANDLER, VIRT_OPERATOR},
    observed::{Objects, Observed},
    orphans::recorded_namespaces,
    pods::{Pod, Pods},
};

/// Keeps a CRD until no CRD has objects. Upstream virt-operator uses the same one.
pub(crate) const CRD_FINALIZER: &str = "kubevirt.io/virtOperatorFinalizer";
/// The API server keeps a CRD with it until the CRD has no objects.
const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";
/// The CRD of the KubeVirt resource belongs to the operator, not to an installation.
const OPERATOR_CRD: &str = "kubevirts.kubevirt.io";
const OPERATOR_ROLES: [&str; 3] = [OPERATOR_SERVICE_ACCOUNT, "kubevirt-operator-rolebinding", "kubevirt.io:operator"];

/// How much of the control plane a removal can rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalMode {
    /// The operator runs, and everything in its namespace.
    Operator,
    /// The namespace of the operator is being deleted. The operator has seconds until it ends, so it waits for nothing.
    NamespaceDeleted(Workloads),
    /// A user runs `virt-operator uninstall`. `force`: finalizers of other clients are removed too.
    Command { force: bool },
}

/// VMs and VMIs in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workloads {
    None,
    /// spec.uninstallStrategy protects them.
    Protected,
    Deleted,
}

/// What a removal is decided on.
pub struct RemovalInput {
    pub kubevirt: Option<KubeVirt>,
    /// The namespace of the operator and of the installation.
    pub namespace: String,
    pub mode: RemovalMode,
    pub now: Timestamp,
    pub objects: Objects,
    pub pods: Pods,
    /// Whether an object that is not in `objects` is not in the cluster either.
    pub complete: bool,
    /// Objects of the CRDs. They are read when a removal waits for them.
    pub instances: Vec<Instance>,
    /// CRDs of which that read has found no objects.
    pub empty_crds: Vec<ObjectKey>,
    /// They are read when nothing else is left.
    pub nodes: Vec<MarkedNode>,
}

/// An object of one of KubeVirt's CRDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub target: Target,
    pub uid: String,
    pub finalizers: Vec<Finalizer>,
    /// The node of a VMI.
    pub node: Option<String>,
}

impl Instance {
    pub fn new(target: Target, metadata: &ObjectMeta) -> Self {
        Self {
            target,
            uid: metadata.uid.clone().unwrap_or_default(),
            finalizers: Finalizer::all(metadata),
            node: metadata.labels.as_ref().and_then(|labels| labels.get("kubevirt.io/nodeName")).cloned(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RemovalStage {
    Instances,
    Objects,
    Nodes,
}

/// Whether the installation of this resource is removed.
pub fn is_being_removed(observed: &Observed) -> bool {
    is_eligible(observed) && (observed.kubevirt.metadata.deletion_timestamp.is_some() || is_namespace_deleted(observed))
}

pub fn is_namespace_deleted(observed: &Observed) -> bool {
    observed.namespace.as_ref().is_some_and(|namespace| namespace.deleting)
}

/// Whether an installation of this resource can be removed completely. Before it has the finalizer, nothing may be
/// created for it: nothing would be deleted with it.
pub fn has_finalizer(kubevirt: &KubeVirt) -> bool {
    kubevirt.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

impl RemovalInput {
    pub fn stage(&self) -> RemovalStage {
        let objects = self.removable();
        if objects.iter().any(|(kind, ..)| *kind == Kind::CustomResourceDefinition) {
            RemovalStage::Instances
        } else if objects.is_empty() {
            RemovalStage::Nodes
        } else {
            RemovalStage::Objects
        }
    }

    /// The kind of each object that the removal deletes.
    pub fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.removable().into_iter().map(|(kind, ..)| kind)
    }

    /// Whether the CRDs are being deleted, and with them every VM.
    pub fn is_irrevocable(&self) -> bool {
        self.crds().any(|(_, live)| live.deleting)
    }

    /// The CRDs whose objects are not deleted yet.
    pub fn crds_with_instances(&self) -> impl Iterator<Item = &ObjectKey> {
        self.crds().filter(|(_, live)| !is_cleaned_up(live)).map(|(key, _)| key)
    }

    fn crds(&self) -> impl Iterator<Item = (&ObjectKey, &Arc<LiveObject>)> {
        self.objects.managed(Kind::CustomResourceDefinition).filter(|(key, _)| key.name() != OPERATOR_CRD)
    }

    /// Every object of an installation. In namespaces of other users, only objects count that have the operator's label
    /// and its annotations.
    fn removable(&self) -> Vec<(Kind, &ObjectKey, &Arc<LiveObject>)> {
        let recorded = self.kubevirt.as_ref().map(recorded_namespaces);
        // They are deleted with their CRDs.
        let kinds = Kind::ALL.into_iter().filter(|kind| !matches!(kind, Kind::Instancetype | Kind::Preference));
        let objects = kinds.flat_map(|kind| self.objects.managed(kind).map(move |(key, live)| (kind, key, live)));
        objects.filter(|(kind, key, live)| self.belongs_to_installation(*kind, key, live, recorded.as_ref())).collect()
    }

    fn belongs_to_installation(
        &self,
        kind: Kind,
        key: &ObjectKey,
        live: &LiveObject,
        recorded: Option<&HashSet<String>>,
    ) -> bool {
        if is_of_operator(kind, key.name()) {
            return false;
        }
        match key.namespace() {
            None => true,
            Some(namespace) if namespace == self.namespace => true,
            Some(namespace) => {
                let is_known = namespace == "kube-system" || recorded.is_none_or(|known| known.contains(namespace));
                is_known && live.is_ours()
            }
        }
    }

    /// Whether a component has a ready pod.
    fn is_ready(&self, deployment: &str) -> bool {
        let key = ObjectKey::namespaced(&self.namespace, deployment);
        let live = self.objects.get(Kind::Deployment, &key);
        live.and_then(|live| live.rollout).is_some_and(|rollout| rollout.ready > 0)
    }

    /// The pods of virt-handler that may still label their node.
    fn running_handlers(&self) -> Vec<&(ObjectKey, Arc<Pod>)> {
        let handlers = self.pods.of(Kind::DaemonSet, VIRT_HANDLER);
        handlers.filter(|(_, pod)| !pod.ended && !pod.is_overdue(self.now)).collect()
    }

    /// Whether no component removes KubeVirt's own finalizers any more.
    fn is_control_plane_gone(&self) -> bool {
        match self.mode {
            RemovalMode::Operator => false,
            RemovalMode::NamespaceDeleted(_) => true,
            RemovalMode::Command { .. } => !self.is_ready(VIRT_CONTROLLER),
        }
    }
}

/// The API server has deleted all objects of the CRD.
fn is_cleaned_up(crd: &LiveObject) -> bool {
    crd.deleting && !crd.finalizers.iter().any(|finalizer| finalizer.name == CLEANUP_FINALIZER)
}

/// The operator does not delete itself, even if a tool has labelled its objects.
fn is_of_operator(kind: Kind, name: &str) -> bool {
    match kind {
        Kind::Deployment => name == VIRT_OPERATOR,
        Kind::ServiceAccount => name == OPERATOR_SERVICE_ACCOUNT,
        Kind::ClusterRole | Kind::ClusterRoleBinding | Kind::Role | Kind::RoleBinding => OPERATOR_ROLES.contains(&name),
        Kind::CustomResourceDefinition => name == OPERATOR_CRD,
        _ => false,
    }
}

/// Whether KubeVirt's own components set and remove the finalizer.
fn is_own_finalizer(name: &str) -> bool {
    let domain = name.split_once('/').map_or("", |(domain, _)| domain);
    name == "foregroundDeleteVirtualMachine" || domain == "kubevirt.io" || domain.ends_with(".kubevirt.io")
}
