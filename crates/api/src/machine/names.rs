//! Every name that users see and scripts rely on: labels, finalizers, annotations, condition types and reasons.

use std::collections::BTreeMap;

/// Group and version of Machine and NetworkConfiguration.
pub const API_VERSION: &str = "vitistack.io/v1alpha1";

/// Kubernetes' recommended labels of the objects that install the operator. They say which release a cluster has.
pub const INSTALLATION_LABELS: [(&str, &str); 3] = [
    ("app.kubernetes.io/name", "kubevirt-operator"),
    ("app.kubernetes.io/part-of", "vitivirt"),
    ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
];

/// The same, for the metadata of an object.
pub fn installation_labels() -> BTreeMap<String, String> {
    INSTALLATION_LABELS.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

/// The operator that manages an object. `app.kubernetes.io/managed-by=kubevirt-operator` is not used, because
/// upstream virt-operator deletes objects with that label.
pub const LABEL_MANAGED_BY: &str = "vitistack.io/managed-by";
pub const MANAGED_BY: &str = "kubevirt-operator";
/// The Machine that an object belongs to.
pub const LABEL_MACHINE: &str = "vitistack.io/machine";
/// The UID of the Machine that an object belongs to. PVCs have no owner reference, so that the garbage collector cannot
/// delete data. For the other objects it proves whose they are after they lost their owner reference.
pub const LABEL_MACHINE_UID: &str = "vitistack.io/machine-uid";
/// On a PVC that the operator created: the UID of its Machine, in case the label is lost.
pub const ANNOTATION_IDENTITY: &str = "vitistack.io/identity";
/// On a PVC whose name does not say which disk it holds: the disk and the name of the PVC. KubeVirt copies annotations when it
/// restores a PVC, and the copy has another name.
pub const ANNOTATION_DISK: &str = "vitistack.io/disk";
/// On a Machine: the consent to take over existing objects. See [`super::Adoption`].
pub const ANNOTATION_ADOPT: &str = "vitistack.io/adopt";
/// On a PVC or Secret without the operator's labels: the name of the Machine that may take it over. A user sets it. The
/// admission policy of the operator's account does not let the operator set it.
pub const ANNOTATION_ADOPT_BY: &str = "vitistack.io/adopt-by";
/// On a Machine: the volumes of lost PVCs, or the names of external PVCs, separated by commas, as the consent to start without
/// them.
pub const ANNOTATION_REPLACE: &str = "vitistack.io/replace-volume";
/// On a Machine that is being deleted: `background` or `orphan`, if the operator cannot know which of them a user
/// chose.
pub const ANNOTATION_CASCADE: &str = "vitistack.io/cascade";
/// The cluster that a Machine is part of. The operator copies the label to every object of the Machine.
pub const LABEL_CLUSTER: &str = "cluster.vitistack.io/cluster-name";
/// The template of a Machine without `spec.template`.
pub const LABEL_TEMPLATE: &str = "vitistack.io/machine-template";

/// On a PVC: what happens to it when its Machine is deleted. The disk may no longer be in the spec then, so the PVC
/// carries the policy.
pub const LABEL_ON_DELETE: &str = "vitistack.io/on-delete";

/// KubeVirt sets it on a PVC that it restores from a snapshot: the name of the VM of the snapshot.
pub const LABEL_RESTORED_FROM: &str = "restore.kubevirt.io/source-vm-name";
pub const ON_DELETE_RETAIN: &str = "Retain";
pub const ON_DELETE_DELETE: &str = "Delete";

pub const FINALIZER_MACHINE: &str = "machine.vitistack.io/cleanup";
/// Kubernetes adds it when a user deletes a Machine with `--cascade=orphan`. The garbage collector removes it again.
pub const FINALIZER_ORPHAN: &str = "orphan";
pub const FINALIZER_NETWORK: &str = "networkconfiguration.vitistack.io/in-use";

/// On the cloud-init Secret: a digest of the data that it should have.
pub const ANNOTATION_CONTENT: &str = "vitistack.io/content";
/// On the cloud-init Secret, if its data changed while a VMI runs: the UID of the VMI and the digest of the data that
/// it started with.
pub const ANNOTATION_STARTED_WITH: &str = "vitistack.io/guest-began-with";
/// On a PVC: a digest of the source that it was filled from.
pub const ANNOTATION_SOURCE: &str = "vitistack.io/source";
/// On a cloud-init Secret: which version of the source Secret it contains, so that another replica need not read it.
pub const ANNOTATION_SOURCE_READ: &str = "vitistack.io/source-read";
/// On a NetworkAttachmentDefinition: the bridges and VLANs that the network had, as JSON.
pub const ANNOTATION_SEGMENTS: &str = "vitistack.io/segments";

/// The reserved name of the cloud-init volume and disk.
pub const CLOUD_INIT_DISK: &str = "cloudinitdisk";
/// The `networkName` of the pod network.
pub const POD_NETWORK: &str = "pod";

pub mod condition_type {
    pub const READY: &str = "Ready";
    pub const VIRTUAL_MACHINE_READY: &str = "VirtualMachineReady";
    pub const STORAGE_READY: &str = "StorageReady";
    pub const NETWORK_READY: &str = "NetworkReady";
    pub const RESTART_REQUIRED: &str = "RestartRequired";
    pub const CHANGES_REJECTED: &str = "ChangesRejected";
    /// The operator deletes the VirtualMachine and the disks with the Machine.
    pub const DELETING: &str = "Deleting";
}

/// Reasons of conditions and events, and values of the metric label `error_type`.
pub mod machine_reason {
    // Errors.
    pub const TEMPLATE_NOT_FOUND: &str = "TemplateNotFound";
    pub const NETWORK_CONFIGURATION_NOT_FOUND: &str = "NetworkConfigurationNotFound";
    pub const STORAGE_CLASS_NOT_FOUND: &str = "StorageClassNotFound";
    pub const INSUFFICIENT_RESOURCES: &str = "InsufficientResources";
    pub const KUBEVIRT_API_ERROR: &str = "KubeVirtApiError";
    pub const INVALID: &str = "Invalid";
    pub const NAME_TAKEN: &str = "NameTaken";
    pub const QUOTA_EXCEEDED: &str = "QuotaExceeded";
    pub const SECRET_NOT_FOUND: &str = "SecretNotFound";
    pub const MAC_ADDRESS_IN_USE: &str = "MacAddressInUse";
    pub const PERMISSION_MISSING: &str = "PermissionMissing";
    pub const MULTUS_NOT_INSTALLED: &str = "MultusNotInstalled";
    pub const CDI_NOT_INSTALLED: &str = "CdiNotInstalled";
    pub const ADMISSION_REFUSED: &str = "AdmissionRefused";
    /// Every reason that is an error: the values of the metric label `error_type`, and the first sections of
    /// docs/troubleshooting.md.
    pub const ERRORS: [&str; 19] = [
        TEMPLATE_NOT_FOUND,
        NETWORK_CONFIGURATION_NOT_FOUND,
        STORAGE_CLASS_NOT_FOUND,
        INSUFFICIENT_RESOURCES,
        KUBEVIRT_API_ERROR,
        INVALID,
        NAME_TAKEN,
        QUOTA_EXCEEDED,
        SECRET_NOT_FOUND,
        MAC_ADDRESS_IN_USE,
        PERMISSION_MISSING,
        MULTUS_NOT_INSTALLED,
        CDI_NOT_INSTALLED,
        ADMISSION_REFUSED,
        VM_FAILED,
        PVC_PENDING,
        PVC_LOST,
        DISK_MOVED,
        POD_NOT_STARTED,
    ];
    /// Every reason of a Machine that is not ready without an error: the second part of docs/troubleshooting.md.
    pub const NOT_READY_REASONS: [&str; 7] =
        [VM_CREATED, PAUSED, STOPPING, DELETING, DELETION_UNCONFIRMED, WAITING_FOR_DELETION, GUEST_NOT_READY];
    // States. `ERRORS` contains those that are errors.
    pub const VM_CREATED: &str = "VMCreated";
    pub const VM_FAILED: &str = "VMFailed";
    pub const PVC_BOUND: &str = "PVCBound";
    pub const PVC_PENDING: &str = "PVCPending";
    pub const PVC_LOST: &str = "PVCLost";
    pub const DISK_MOVED: &str = "DiskMoved";
    pub const POD_NOT_STARTED: &str = "PodNotStarted";
    pub const WAITING_FOR_DELETION: &str = "WaitingForDeletion";
    pub const GUEST_NOT_READY: &str = "GuestNotReady";
    pub const IMPOSSIBLE_CHANGE: &str = "ImpossibleChange";
    pub const NOT_EVALUATED: &str = "NotEvaluated";
    pub const NETWORK_CONFIGURED: &str = "NetworkConfigured";
    pub const NETWORK_FAILED: &str = "NetworkFailed";
    pub const RUNNING: &str = "Running";
    pub const STOPPED: &str = "Stopped";
    pub const PAUSED: &str = "Paused";
    pub const STOPPING: &str = "Stopping";
    pub const DELETING: &str = "Deleting";
    pub const DELETION_UNCONFIRMED: &str = "DeletionUnconfirmed";
    pub const POWER_STATE_RESTORED: &str = "PowerStateRestored";
    pub const PENDING_RESTART: &str = "PendingRestart";
    pub const REPEATED_DRIFT: &str = "RepeatedDrift";
}
