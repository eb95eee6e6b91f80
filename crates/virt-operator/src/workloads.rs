//! The workloads that still exist. spec.uninstallStrategy may protect them.

use kube::{
    Api, Client,
    api::ListParams,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use vitivirt_api::{ObjectKey, kubevirt::GROUP};
use vitivirt_install::validation::Remaining;

/// A message names two objects of a kind at most.
const LIST_LIMIT: u32 = 2;
/// The name of the kind in messages, the kind and its plural.
const WORKLOADS: [(&str, &str, &str); 3] = [
    ("Virtual Machine Instances", "VirtualMachineInstance", "virtualmachineinstances"),
    ("Virtual Machines", "VirtualMachine", "virtualmachines"),
    ("Virtual Machine Instance Replica Sets", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets"),
];

/// The number of requests of [`remaining_workloads`].
pub(crate) const REQUESTS: usize = WORKLOADS.len();

/// Examples of the workloads that still exist, by kind.
pub(crate) async fn remaining_workloads(client: &Client) -> Result<Vec<Remaining>, kube::Error> {
    let mut remaining = Vec::new();
    for (display_name, kind, plural) in WORKLOADS {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", kind), plural);
        let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let Some(list) = found_or_none(api.list_metadata(&ListParams::default().limit(LIST_LIMIT)).await)? else {
            continue;
        };
        let mut examples: Vec<ObjectKey> =
            list.items.iter().map(|object| ObjectKey::from_metadata(&object.metadata)).collect();
        let more = list.metadata.continue_.is_some_and(|token| !token.is_empty());
        examples.truncate(LIST_LIMIT as usize);
        remaining.push(Remaining { kind: display_name, examples, more });
    }
    Ok(remaining)
}

/// `None` if the object does not exist or its kind is not served. A kind that is not served has no objects.
pub(crate) fn found_or_none<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(error),
    }
}
