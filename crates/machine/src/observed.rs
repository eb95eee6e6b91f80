//! Everything that a pass over a Machine decides on. The program fills it from its caches; nothing here is fetched.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use vitivirt_api::machine::Machine;

use crate::render::cloud_init::SecretBytes;

#[derive(Clone)]
pub struct Observed {
    pub machine: Machine,
    pub installed: Installed,
    pub storage_classes: Vec<StorageClassView>,
    /// The NetworkConfigurations that the Machine names.
    pub networks: BTreeMap<String, NetworkView>,
    /// NetworkAttachmentDefinitions of those names.
    pub attachments: BTreeMap<String, AttachmentView>,
    /// The Secret with the name of the Machine's cloud-init Secret.
    pub secret: Option<SecretView>,
    /// What `cloudInit.secretRef` refers to.
    pub source: SourceView,
    /// Claims that carry the Machine's UID or have a name that it needs, by name.
    pub pvcs: BTreeMap<String, PvcView>,
    /// CDI import sources with a name that the Machine needs.
    pub import_sources: BTreeMap<String, OwnedView>,
    pub vm: Option<VmView>,
    pub vmi: Option<VmiView>,
    /// MAC addresses, by network, that an older Machine of the namespace has, with its name.
    pub macs_in_use: BTreeMap<(String, String), String>,
    pub now: Timestamp,
}

impl Observed {
    /// A Machine in a cluster that has all neighbours, and nothing that the Machine needs or made.
    pub fn of(machine: Machine, now: Timestamp) -> Self {
        Self {
            machine,
            installed: Installed { kubevirt: true, multus: true, cdi: true },
            storage_classes: Vec::new(),
            networks: BTreeMap::new(),
            attachments: BTreeMap::new(),
            secret: None,
            source: SourceView::NotNeeded,
            pvcs: BTreeMap::new(),
            import_sources: BTreeMap::new(),
            vm: None,
            vmi: None,
            macs_in_use: BTreeMap::new(),
            now,
        }
    }
}

/// Which neighbours the cluster has.
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
    pub expands: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub vlan: Option<u16>,
    pub bridge: Option<String>,
    /// Where our finalizer stands among its own.
    pub protected: Option<usize>,
    pub deleting: bool,
    /// Other Machines that are to stay name it.
    pub other_users: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentView {
    pub uid: String,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub config: String,
}

/// An object that has a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedView {
    pub uid: String,
    pub controller_uid: Option<String>,
}

/// A Secret's metadata: its data is never cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretView {
    pub uid: String,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The digest that it was written with.
    pub content: Option<String>,
    /// It has annotations, ours or others'.
    pub annotated: bool,
    /// Somebody else has written its data since.
    pub tampered: bool,
    /// The guest that ran when the data was changed, and the digest of what it had begun with.
    pub began_with: Option<String>,
    pub deleting: bool,
}

/// The Secret that `cloudInit.secretRef` names.
#[derive(Clone)]
pub enum SourceView {
    /// The Machine has no `secretRef`.
    NotNeeded,
    SecretMissing,
    KeyMissing,
    /// The operator may not read it; the server's words.
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
    pub phase: String,
    pub requested: String,
    pub storage_class: Option<String>,
    pub access_mode: String,
    pub volume_mode: String,
    /// What it was filled with, as [`crate::render::PVC::source_digest`] says it; empty if that was not noted.
    pub source: Option<String>,
    pub deleting: bool,
    /// In seconds since 1970.
    pub created: i64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct VmView {
    pub uid: String,
    pub generation: i64,
    pub controller_uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// As [`crate::render::vm::without_defaults`] leaves it.
    pub spec: Value,
    pub deleting: bool,
    pub printable_status: String,
    pub ready: bool,
    /// KubeVirt says that something in the template needs a restart.
    pub restart_required: bool,
    /// The last complaint of virt-controller.
    pub failure: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct VmiView {
    pub uid: String,
    pub phase: String,
    pub node: Option<String>,
    pub addresses: Vec<String>,
    pub paused: bool,
    pub migrating: bool,
    /// The VM's generation that it was started from.
    pub vm_generation: Option<i64>,
    /// What it was started with, as [`crate::vmi_spec::comparable_spec`] leaves it.
    pub spec: Value,
    /// Whether it was started with the Machine's cloud-init Secret, or that is not known.
    pub needs_user_data: bool,
    /// Why its pod cannot be scheduled, in the scheduler's words.
    pub unschedulable: Option<String>,
    /// Why virt-controller could not make its pod.
    pub failure: Option<String>,
    pub deleting: bool,
}

impl Observed {
    pub fn name(&self) -> &str {
        self.machine.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.machine.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub fn uid(&self) -> &str {
        self.machine.metadata.uid.as_deref().unwrap_or_default()
    }

    pub fn is_deleting(&self) -> bool {
        self.machine.metadata.deletion_timestamp.is_some()
    }

    /// The names of all NetworkConfigurations that the Machine names.
    pub fn network_names(&self) -> BTreeSet<&str> {
        let networks = &self.machine.spec.networks;
        networks
            .iter()
            .map(|network| network.network_name.as_str())
            .filter(|name| *name != vitivirt_api::machine::POD_NETWORK)
            .collect()
    }
}
