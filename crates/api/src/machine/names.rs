//! Every name that users see and scripts rely on: labels, finalizers, condition types, reasons. Each exists once, here.

/// Who keeps an object. (`app.kubernetes.io/managed-by=kubevirt-operator` is never used: KubeVirt's own operator deletes
/// what carries it.)
pub const LABEL_MANAGED_BY: &str = "vitistack.io/managed-by";
pub const MANAGED_BY: &str = "kubevirt-operator";
/// The Machine that an object belongs to.
pub const LABEL_MACHINE: &str = "vitistack.io/machine";
/// The UID of the Machine that a PVC belongs to: PVCs have no owner reference, so that no garbage collection can
/// take data.
pub const LABEL_MACHINE_UID: &str = "vitistack.io/machine-uid";
/// The cluster that a Machine is part of; handed down to everything made for it.
pub const LABEL_CLUSTER: &str = "cluster.vitistack.io/cluster-name";
/// Names the template of a Machine that has no `spec.template`.
pub const LABEL_TEMPLATE: &str = "vitistack.io/machine-template";

/// On a PVC: what becomes of it with its Machine. It is kept here because a disk may have left the spec by then.
pub const LABEL_ON_DELETE: &str = "vitistack.io/on-delete";
pub const ON_DELETE_RETAIN: &str = "Retain";
pub const ON_DELETE_DELETE: &str = "Delete";

pub const FINALIZER_MACHINE: &str = "machine.vitistack.io/cleanup";
pub const FINALIZER_NETWORK: &str = "networkconfiguration.vitistack.io/in-use";

/// A digest of what the cloud-init Secret should hold, on the Secret.
pub const ANNOTATION_CONTENT: &str = "vitistack.io/content";
/// On the cloud-init Secret, when it was changed under a running guest: the guest's UID and the digest that it began with.
pub const ANNOTATION_BEGAN_WITH: &str = "vitistack.io/guest-began-with";
/// On a PVC: a digest of what it was filled with.
pub const ANNOTATION_SOURCE: &str = "vitistack.io/source";

/// The reserved name of the cloud-init volume and disk.
pub const CLOUD_INIT_DISK: &str = "cloudinitdisk";
/// The `networkName` of the pod network.
pub const POD_NETWORK: &str = "pod";

pub mod phase {
    pub const PENDING: &str = "Pending";
    pub const CREATING: &str = "Creating";
    pub const RUNNING: &str = "Running";
    pub const STOPPED: &str = "Stopped";
    pub const FAILED: &str = "Failed";
}

pub mod condition_type {
    pub const READY: &str = "Ready";
    pub const VIRTUAL_MACHINE_READY: &str = "VirtualMachineReady";
    pub const STORAGE_READY: &str = "StorageReady";
    pub const NETWORK_READY: &str = "NetworkReady";
    pub const RESTART_REQUIRED: &str = "RestartRequired";
}

/// Reasons of conditions and events, and values of the metric label `error_type`.
pub mod machine_reason {
    // The seed's error types.
    pub const TEMPLATE_NOT_FOUND: &str = "TemplateNotFound";
    pub const NETWORK_CONFIGURATION_NOT_FOUND: &str = "NetworkConfigurationNotFound";
    pub const STORAGE_CLASS_NOT_FOUND: &str = "StorageClassNotFound";
    pub const INSUFFICIENT_RESOURCES: &str = "InsufficientResources";
    pub const KUBEVIRT_API_ERROR: &str = "KubeVirtApiError";
    // What real clusters add.
    pub const INVALID: &str = "Invalid";
    pub const NAME_TAKEN: &str = "NameTaken";
    pub const QUOTA_EXCEEDED: &str = "QuotaExceeded";
    pub const SECRET_NOT_FOUND: &str = "SecretNotFound";
    pub const MAC_ADDRESS_IN_USE: &str = "MacAddressInUse";
    pub const PERMISSION_MISSING: &str = "PermissionMissing";
    pub const MULTUS_NOT_INSTALLED: &str = "MultusNotInstalled";
    pub const CDI_NOT_INSTALLED: &str = "CdiNotInstalled";
    pub const ADMISSION_REFUSED: &str = "AdmissionRefused";
    /// Every reason that is an error: the values of the metric label `error_type`, and the rows of the troubleshooting page.
    pub const ERRORS: [&str; 16] = [
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
    ];
    /// Every other reason of a Machine that is not ready: nothing is wrong, and the page says so.
    pub const QUIET: [&str; 4] = [VM_CREATED, PAUSED, STOPPING, DELETING];
    // How things are.
    pub const VM_CREATED: &str = "VMCreated";
    pub const VM_FAILED: &str = "VMFailed";
    pub const PVC_BOUND: &str = "PVCBound";
    pub const PVC_PENDING: &str = "PVCPending";
    pub const NETWORK_CONFIGURED: &str = "NetworkConfigured";
    pub const NETWORK_FAILED: &str = "NetworkFailed";
    pub const RUNNING: &str = "Running";
    pub const STOPPED: &str = "Stopped";
    pub const PAUSED: &str = "Paused";
    pub const STOPPING: &str = "Stopping";
    pub const DELETING: &str = "Deleting";
    pub const POWER_STATE_RESTORED: &str = "PowerStateRestored";
    pub const PENDING_RESTART: &str = "PendingRestart";
}
