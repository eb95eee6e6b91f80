//! The objects of a Machine, one file per kind. Rendering cannot fail: `resolve` found everything that is invalid, and
//! `assessment` found every reference that is missing.

pub mod cloud_init;
pub(crate) mod live_parts;
pub mod network;
pub mod pvc;
pub mod vm;
pub mod vm_types;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use vitivirt_api::machine::{
    API_VERSION, LABEL_CLUSTER, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY, MachineId,
};

use crate::resolve::Resolved;

/// The labels of every object that is created for a Machine.
pub fn labels(resolved: &Resolved) -> BTreeMap<String, String> {
    let own = [(LABEL_MANAGED_BY, MANAGED_BY), (LABEL_MACHINE, resolved.id.name())];
    let cluster = resolved.cluster.as_deref().map(|cluster| (LABEL_CLUSTER, cluster));
    own.into_iter().chain(cluster).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// The labels of VM, Secret and import source. The UID proves whose an object is that lost its owner reference. The
/// template of the VM does not have it, because a guest needs no proof.
pub fn object_labels(resolved: &Resolved) -> BTreeMap<String, String> {
    let mut labels = labels(resolved);
    labels.insert(LABEL_MACHINE_UID.to_owned(), resolved.id.uid().to_owned());
    labels
}

/// The Machine as the controller of an object that is deleted with it.
pub(crate) fn owner_reference(machine: &MachineId) -> OwnerReference {
    OwnerReference {
        api_version: API_VERSION.to_owned(),
        kind: "Machine".to_owned(),
        name: machine.name().to_owned(),
        uid: machine.uid().to_owned(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
