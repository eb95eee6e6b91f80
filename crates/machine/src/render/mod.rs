//! The objects that a Machine becomes, one file per kind. Rendering cannot fail: everything that could go wrong was found
//! by `resolve` or is a reference that `plan` looked up.

pub mod cloud_init;
pub mod network;
pub mod pvc;
pub mod vm;
pub mod vm_types;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use vitivirt_api::machine::{LABEL_CLUSTER, LABEL_MACHINE, LABEL_MANAGED_BY, MANAGED_BY, Machine};

/// The labels of everything that is made for a Machine.
pub fn labels(machine: &Machine) -> BTreeMap<String, String> {
    let mut labels: BTreeMap<String, String> = [
        (LABEL_MANAGED_BY.to_owned(), MANAGED_BY.to_owned()),
        (LABEL_MACHINE.to_owned(), machine.metadata.name.clone().unwrap_or_default()),
    ]
    .into();
    let cluster = machine.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_CLUSTER));
    labels.extend(cluster.map(|cluster| (LABEL_CLUSTER.to_owned(), cluster.clone())));
    labels
}

/// The Machine as the controller of an object that goes with it.
pub fn owner(machine: &Machine) -> OwnerReference {
    OwnerReference {
        api_version: "vitistack.io/v1alpha1".to_owned(),
        kind: "Machine".to_owned(),
        name: machine.metadata.name.clone().unwrap_or_default(),
        uid: machine.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}
