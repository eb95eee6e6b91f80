//! Everything that a reconcile of a Machine decides on. The operator fills it from its caches; nothing here reads from
//! the API server.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::{
    EventSubject, Failure, ObjectKey, Quantity, RecentWrites, Target,
    machine::{
        ANNOTATION_REPLACE, API_VERSION, AccessMode, Adoption, DiskStatus, FINALIZER_MACHINE, Machine, MachineId,
        POD_NETWORK, PrintableStatus, PvcPhase, VmiPhase, VolumeMode,
    },
};

use crate::{
    problem::Problem,
    resolve::{Resolved, resolve},
    secret::{SecretBytes, secret_name},
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
    /// Identifies the version of that Secret and the rest of the user data, if it was read.
    pub source_read: Option<String>,
    /// The digest of the inline user data and network data, if `machine` contains only placeholders for them. The
    /// cloud-init Secret cannot be written then.
    pub omitted_inline: Option<String>,
    /// PVCs that carry the Machine's UID or have a name that the Machine needs, by name.
    pub pvcs: BTreeMap<String, PvcView>,
    /// VolumeImportSources of CDI with a name that the Machine needs.
    pub import_sources: BTreeMap<String, ImportSourceView>,
    pub vm: Option<VmView>,
    pub vmi: Option<VmiView>,
    /// Why the pod of a VMI that has been starting for a while does not start.
    pub launcher: LauncherView,
    /// MAC addresses of the Machine, by network, that another Machine on the same bridge and VLAN has, with the name of
    /// that Machine.
    pub macs_in_use: BTreeMap<(String, String), String>,
    /// UIDs of existing Machines to which PVCs belong that this Machine needs.
    pub living_owners: BTreeSet<String>,
    /// How the Machine is being deleted.
    pub deletion: Deletion,
    /// Whether the API server has confirmed that the Machine is not being deleted. False: only a cache shows it, which may
    /// lag.
    pub machine_confirmed: bool,
    /// Why the state before a deletion could not be confirmed. Nothing may be deleted then.
    pub live_check_failure: Option<Failure>,
    /// The recent writes of the operator to objects of the Machine.
    pub recent_writes: RecentWritesByObject,
    pub now: Timestamp,
}

/// The recent writes of the objects of a Machine, by kind and name. The operator keeps them between reconciles. They may
/// be lost at any time.
pub type RecentWritesByObject = BTreeMap<(String, String), RecentWrites<u64>>;

/// How a Machine is deleted: with everything that belongs to it, or alone (`--cascade=orphan`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    Cascade,
    Orphan,
    /// The operator did not see the deletion begin. The garbage collector may have removed the finalizer `orphan`, and
    /// the owner references, before the operator started.
    Unknown,
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
            source_read: None,
            omitted_inline: None,
            pvcs: BTreeMap::new(),
            import_sources: BTreeMap::new(),
            vm: None,
            vmi: None,
            launcher: LauncherView::NoProblem,
            macs_in_use: BTreeMap::new(),
            living_owners: BTreeSet::new(),
            deletion: Deletion::Cascade,
            machine_confirmed: true,
            live_check_failure: None,
            recent_writes: RecentWritesByObject::new(),
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

    /// What the status records about the disks and their PVCs.
    pub(crate) fn recorded_disks(&self) -> &[DiskStatus] {
        self.machine.status.as_ref().map_or(&[], |status| &status.disks)
    }

    /// What the status records for a PVC.
    pub(crate) fn recorded_disk(&self, pvc: &str) -> Option<&DiskStatus> {
        self.recorded_disks().iter().find(|disk| disk.pvc == pvc)
    }

    /// Whether a user consented to another PVC in place of a lost or an external one.
    pub(crate) fn consents_to_replace(&self, disk: &DiskStatus) -> bool {
        self.replacements().any(|item| item == consent_to_replace(disk))
    }

    /// The items of the annotation, separated by commas.
    pub(crate) fn replacements(&self) -> impl Iterator<Item = &str> {
        self.annotation(ANNOTATION_REPLACE).into_iter().flat_map(|value| value.split(',')).map(str::trim)
    }

    /// Whether a disk of the spec has a PVC of this name. KubeVirt gives the PVC of a restored disk another one.
    pub(crate) fn is_named_by_spec(&self, pvc: &str) -> bool {
        self.resolved.iter().flat_map(Resolved::pvc_names).any(|name| name == pvc)
    }

    pub(crate) fn adoption(&self) -> Adoption {
        Adoption::from_metadata(&self.machine.metadata)
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.machine.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// The key of another object in the Machine's namespace.
    pub(crate) fn key(&self, name: &str) -> ObjectKey {
        self.id.sibling(name)
    }

    pub(crate) fn machine_target(&self) -> Target {
        Target::of_kind::<Machine>(self.id.key())
    }

    /// What the events of a reconcile are about.
    pub(crate) fn event_subject(&self) -> EventSubject {
        EventSubject {
            api_version: API_VERSION.to_owned(),
            kind: "Machine".to_owned(),
            key: self.id.key(),
            uid: self.uid().to_owned(),
        }
    }

    /// The kinds and names of the objects that a reconcile may create or patch.
    pub fn writable_objects(&self) -> impl Iterator<Item = (&'static str, String)> {
        let needed = self.resolved.as_ref().ok().into_iter().flat_map(Resolved::pvc_names);
        let pvcs: BTreeSet<&str> = needed.chain(self.pvcs.keys().map(String::as_str)).collect();
        let networks = self.network_names().into_iter();
        let vm_and_secret = [("VirtualMachine", self.name().to_owned()), ("Secret", secret_name(self.name()))];
        let networks = networks.map(|name| ("NetworkAttachmentDefinition", name.to_owned()));
        let pvcs = pvcs.into_iter().map(|name| ("PersistentVolumeClaim", name.to_owned()));
        vm_and_secret.into_iter().chain(networks).chain(pvcs)
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
    /// The value of `ANNOTATION_SEGMENTS`.
    pub segments: Option<String>,
    /// It has annotations, the operator's or others.
    pub annotated: bool,
}

/// A VolumeImportSource of CDI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportSourceView {
    pub uid: String,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The [`crate::render::pvc::source_digest`] of its content, if it has one.
    pub source: Option<String>,
    pub deleting: bool,
}

/// A Secret's metadata. The caches never hold its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretView {
    pub uid: String,
    pub controller_uid: Option<String>,
    /// The position of the controller in the list of owner references.
    pub controller_index: usize,
    /// It has owner references, the Machine's or others.
    pub has_owners: bool,
    pub labels: BTreeMap<String, String>,
    /// The digest of the data that the operator wrote.
    pub content: Option<String>,
    /// The value of `ANNOTATION_SOURCE_READ`.
    pub source_read: Option<String>,
    /// It has annotations, the operator's or others.
    pub annotated: bool,
    /// Another client has written its data since.
    pub tampered: bool,
    /// The value of `ANNOTATION_ADOPT_BY`.
    pub adopt_by: Option<String>,
    /// The UID of the VMI that ran when the data changed, and the digest of the data that it started with.
    pub started_with: Option<String>,
    pub deleting: bool,
}

/// The Secret that `cloudInit.secretRef` refers to.
#[derive(Clone)]
pub enum SourceView {
    /// The Machine has no `secretRef`, or another problem stops it before the data is needed.
    NotNeeded,
    SecretMissing,
    KeyMissing,
    /// The operator is not allowed to read it; the server's message.
    Forbidden(String),
    /// It could not be read; the error.
    Failed(String),
    /// Its bytes, read because they are needed.
    Read(SecretBytes),
    /// Not read: neither it nor the inline data has changed since the cloud-init Secret was written with this digest.
    Unchanged(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PvcView {
    pub uid: String,
    /// The resource version, if it was read from the API server. None: it is from a cache.
    pub live_version: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub phase: PvcPhase,
    pub requested: String,
    pub storage_class: Option<String>,
    pub access_mode: AccessMode,
    pub volume_mode: VolumeMode,
    /// The [`crate::render::pvc::source_digest`] of the source that it was filled from. Empty if the PVC has a source
    /// but no digest.
    pub source: Option<String>,
    /// The volume that it is bound to.
    pub volume: Option<String>,
    /// The UID of its Machine in an annotation, for a PVC that lost its labels.
    pub identity: Option<String>,
    /// The value of `ANNOTATION_ADOPT_BY`.
    pub adopt_by: Option<String>,
    /// The disk that it holds, if `ANNOTATION_DISK` says so.
    pub disk: Option<String>,
    /// It has annotations, the operator's or others.
    pub annotated: bool,
    /// It has owner references, although the operator sets none.
    pub has_owners: bool,
    /// The first owner reference to a VirtualMachine. The garbage collector would delete the data with the VM.
    pub vm_owner: Option<VmOwner>,
    pub deleting: bool,
    /// In seconds since 1970.
    pub created: i64,
}

/// The value of the annotation that consents to the replacement of a lost PVC.
pub(crate) fn consent_to_replace(disk: &DiskStatus) -> &str {
    if disk.volume.is_empty() { &disk.pvc } else { &disk.volume }
}

/// An owner reference to a VirtualMachine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmOwner {
    /// Its position in the list.
    pub index: usize,
    pub uid: String,
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
    /// The position of the controller in the list of owner references.
    pub controller_index: usize,
    /// It has owner references, the Machine's or others.
    pub has_owners: bool,
    pub labels: BTreeMap<String, String>,
    /// The result of [`crate::render::vm::without_defaults`].
    pub spec: Value,
    pub deleting: bool,
    pub printable_status: PrintableStatus,
    pub ready: bool,
    /// KubeVirt restores it from a snapshot and writes its spec meanwhile.
    pub restoring: bool,
    /// While KubeVirt migrates volumes, and after it failed to: the PVCs that have the data, by volume.
    pub migration_sources: BTreeMap<String, String>,
    /// KubeVirt's migration of volumes failed, so it does not start the VM.
    pub needs_recovery: bool,
    /// KubeVirt reports that a change of the template needs a restart.
    pub restart_required: bool,
    /// The last error that virt-controller reported.
    pub failure: Option<String>,
    /// The clients other than this operator that set fields of its spec, as `managedFields` name them.
    pub other_managers: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct VmiView {
    pub uid: String,
    /// The resource version, if it was read from the API server. None: it is from a cache.
    pub live_version: Option<String>,
    /// When the guest was connected to its networks, in seconds since 1970: its creation or its last migration.
    pub connected_since: i64,
    pub phase: VmiPhase,
    pub node: Option<String>,
    pub addresses: Vec<String>,
    pub paused: bool,
    /// Why a guest that runs is not ready, for example because its node is lost.
    pub not_ready: Option<String>,
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
    /// In seconds since 1970.
    pub created: i64,
}

/// What is known about the pod of a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LauncherView {
    /// No problem is known, or the VMI has not been starting for long.
    NoProblem,
    /// It could not be read now. What is known of it still holds.
    Unknown,
    Problem(LauncherProblem),
}

/// What the kubelet or another component reports about the pod of a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherProblem {
    /// The reason of an event, or of a container that waits.
    pub reason: String,
    pub message: String,
}

impl VmiView {
    pub(crate) fn is_running(&self) -> bool {
        self.phase == VmiPhase::Running
    }
}
