//! Everything that a reconcile of a Machine decides on. The operator fills it from its caches; nothing here reads from
//! the API server.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::{
    Failure, ObjectKey, Quantity, Target,
    machine::{
        AccessMode, FINALIZER_MACHINE, Machine, MachineId, POD_NETWORK, PrintableStatus, PvcPhase, VmiPhase, VolumeMode,
    },
};

use crate::{
    problem::Problem,
    resolve::{Resolved, resolve},
    secret::SecretBytes,
};

#[derive(Clone)]
pub struct Observed {
    pub id: MachineId,
    pub machine: Machine,
    /// The parsed spec, or the reason why it is invalid.
    pub resolved: Result<Resolved, Problem>,
    pub installed: Installed,
    pub storage_classes: Vec<StorageClassView>,
    /// The NetworkConfigurations that the Machine refers to.
    pub networks: BTreeMap<String, NetworkView>,
    /// NetworkAttachmentDefinitions with the same names.
    pub network_attachments: BTreeMap<String, NetworkAttachmentView>,
    /// The Secret with the name of the Machine's cloud-init Secret.
    pub secret: Option<SecretView>,
    /// The Secret that `cloudInit.secretRef` refers to.
    pub source: SourceView,
    /// PVCs that carry the Machine's UID or have a name that the Machine needs, by name.
    pub pvcs: BTreeMap<String, PvcView>,
    /// VolumeImportSources of CDI with a name that the Machine needs.
    pub import_sources: BTreeMap<String, OwnedView>,
    pub vm: Option<VmView>,
    pub vmi: Option<VmiView>,
    /// MAC addresses of the Machine, by network, that an older Machine of the namespace uses, with the name of that
    /// Machine.
    pub macs_in_use: BTreeMap<(String, String), String>,
    pub now: Timestamp,
}

impl Observed {
    /// A Machine in a cluster with KubeVirt, Multus and CDI, but without any object that the Machine refers to or owns.
    /// The spec is parsed here, once for the whole reconcile. Fails if the Machine has no name, namespace or UID.
    pub fn new(machine: Machine, now: Timestamp) -> Result<Self, Failure> {
        Ok(Self {
            id: MachineId::from_metadata(&machine.metadata)?,
            resolved: resolve(&machine),
            machine,
            installed: Installed { kubevirt: true, multus: true, cdi: true },
            storage_classes: Vec::new(),
            networks: BTreeMap::new(),
            network_attachments: BTreeMap::new(),
            secret: None,
            source: SourceView::NotNeeded,
            pvcs: BTreeMap::new(),
            import_sources: BTreeMap::new(),
            vm: None,
            vmi: None,
            macs_in_use: BTreeMap::new(),
            now,
        })
    }

    pub fn name(&self) -> &str {
        self.id.name()
    }

    pub fn namespace(&self) -> &str {
        self.id.namespace()
    }

    pub fn uid(&self) -> &str {
        self.id.uid()
    }

    pub fn is_deleting(&self) -> bool {
        self.machine.metadata.deletion_timestamp.is_some()
    }

    /// The names of all NetworkConfigurations that the Machine refers to.
    pub(crate) fn network_names(&self) -> BTreeSet<&str> {
        let names = self.machine.spec.networks.iter().map(|network| network.network_name.as_str());
        names.filter(|name| *name != POD_NETWORK).collect()
    }

    /// The VM, if the Machine is its controller.
    pub(crate) fn own_vm(&self) -> Option<&VmView> {
        self.vm.as_ref().filter(|vm| self.controls(vm.controller_uid.as_deref()))
    }

    pub(crate) fn controls(&self, controller_uid: Option<&str>) -> bool {
        controller_uid == Some(self.uid())
    }

    /// The key of another object in the Machine's namespace.
    pub(crate) fn key(&self, name: &str) -> ObjectKey {
        self.id.sibling(name)
    }

    pub(crate) fn machine_target(&self) -> Target {
        Target::of_kind::<Machine>(self.id.key())
    }

    /// The index of the operator's finalizer in the Machine's list.
    pub fn finalizer_index(&self) -> Option<usize> {
        self.machine.metadata.finalizers.iter().flatten().position(|finalizer| finalizer == FINALIZER_MACHINE)
    }
}

/// The optional components that the cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    pub kubevirt: bool,
    pub multus: bool,
    pub cdi: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageClassView {
    pub name: String,
    pub is_default: bool,
    pub waits_for_consumer: bool,
    pub allows_expansion: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub vlan: Option<u16>,
    pub bridge: Option<String>,
    /// The index of the operator's finalizer in the network's list.
    pub finalizer_index: Option<usize>,
    pub deleting: bool,
    /// Another Machine that is not being deleted refers to it.
    pub other_users: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkAttachmentView {
    pub uid: String,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub config: String,
}

/// An object of which only the controller matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedView {
    pub uid: String,
    pub controller_uid: Option<String>,
}

/// A Secret's metadata. The caches never hold its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretView {
    pub uid: String,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The digest of the data that the operator wrote.
    pub content: Option<String>,
    /// It has annotations, the operator's or others.
    pub annotated: bool,
    /// Another client has written its data since.
    pub tampered: bool,
    /// The UID of the VMI that ran when the data changed, and the digest of the data that it started with.
    pub started_with: Option<String>,
    pub deleting: bool,
}

/// The Secret that `cloudInit.secretRef` refers to.
#[derive(Clone)]
pub enum SourceView {
    /// The Machine has no `secretRef`.
    NotNeeded,
    SecretMissing,
    KeyMissing,
    /// The operator is not allowed to read it; the server's message.
    Forbidden(String),
    /// Its bytes, read because they are needed.
    Read(SecretBytes),
    /// Not read: it has not changed since the cloud-init Secret was written with this digest.
    Unchanged(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PvcView {
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    pub phase: PvcPhase,
    pub requested: String,
    pub storage_class: Option<String>,
    pub access_mode: AccessMode,
    pub volume_mode: VolumeMode,
    /// The [`crate::render::pvc::source_digest`] of the source that it was filled from. Empty if the PVC has a source
    /// but no digest.
    pub source: Option<String>,
    pub deleting: bool,
    /// In seconds since 1970.
    pub created: i64,
}

impl PvcView {
    /// The requested size in whole bytes. None if it is not a quantity.
    pub(crate) fn requested_size(&self) -> Option<Quantity> {
        Quantity::parse(&self.requested).map(Quantity::rounded_up)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct VmView {
    pub uid: String,
    pub generation: i64,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The result of [`crate::render::vm::without_defaults`].
    pub spec: Value,
    pub deleting: bool,
    pub printable_status: PrintableStatus,
    pub ready: bool,
    /// KubeVirt reports that a change of the template needs a restart.
    pub restart_required: bool,
    /// The last error that virt-controller reported.
    pub failure: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct VmiView {
    pub uid: String,
    pub phase: VmiPhase,
    pub node: Option<String>,
    pub addresses: Vec<String>,
    pub paused: bool,
    pub migrating: bool,
    /// The generation of the VM that it was started from.
    pub vm_generation: Option<i64>,
    /// The spec that it was started with, as [`crate::vmi_spec::comparable_spec`] returns it.
    pub spec: Value,
    /// It was started with the Machine's cloud-init Secret, or that is unknown.
    pub needs_user_data: bool,
    /// Why its pod cannot be scheduled: the scheduler's message.
    pub unschedulable: Option<String>,
    /// Why virt-controller could not create its pod.
    pub failure: Option<String>,
    pub deleting: bool,
}

impl VmiView {
    pub(crate) fn is_running(&self) -> bool {
        self.phase == VmiPhase::Running
    }
}
