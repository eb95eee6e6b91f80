//! What people see of Machines: the rows of a list, and one Machine as a tree. The status page of kubevirt-operator and
//! `kubectl vmachine` show the same. Nothing here contains cloud-init data or the content of a Secret.

mod tree;

use k8s_openapi::jiff::Timestamp;
use serde::{Serialize, Serializer};
use vitivirt_api::machine::{Machine, MachinePhase, MachineStatus, condition_type};

pub use tree::{PodView, machine_tree};

use crate::{
    observed::Observed,
    ownership::{self, Ownership},
};

/// One Machine of a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineRow {
    pub namespace: String,
    pub name: String,
    pub phase: &'static str,
    pub ready: bool,
    /// The reason of the condition Ready.
    pub reason: String,
    /// Why the Machine is not ready, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<String>,
    /// The changes that wait for a restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_required: Option<String>,
    /// The changes that are impossible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_rejected: Option<String>,
    pub deleting: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub addresses: Vec<String>,
    /// In seconds since 1970.
    #[serde(serialize_with = "date")]
    pub created: i64,
}

pub fn cpus(count: u32) -> String {
    if count == 1 { "1 CPU".to_owned() } else { format!("{count} CPUs") }
}

/// As Kubernetes writes times.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn date<S: Serializer>(seconds: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&Timestamp::from_second(*seconds).unwrap_or_default())
}

impl MachineRow {
    pub fn new(machine: &Machine) -> Self {
        let (none, metadata) = (MachineStatus::default(), &machine.metadata);
        let status = machine.status.as_ref().unwrap_or(&none);
        let condition = |type_: &str| status.conditions.iter().find(|condition| condition.type_ == type_);
        let ready = condition(condition_type::READY);
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            phase: status.phase.unwrap_or(MachinePhase::Pending).as_str(),
            ready: ready.is_some_and(|ready| ready.status == "True"),
            reason: ready.map(|ready| ready.reason.clone()).unwrap_or_default(),
            diagnosis: status.diagnosis.clone(),
            restart_required: condition(condition_type::RESTART_REQUIRED).map(|condition| condition.message.clone()),
            changes_rejected: condition(condition_type::CHANGES_REJECTED).map(|condition| condition.message.clone()),
            deleting: metadata.deletion_timestamp.is_some(),
            cpu: status.resources.as_ref().map(|resources| resources.cpu),
            memory: status.resources.as_ref().map(|resources| resources.memory.clone()),
            node: status.node_name.clone(),
            addresses: status.ip_addresses.clone(),
            created: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        }
    }
}

/// The items of the annotation `vitistack.io/adopt` that would let the Machine take over the objects in its way. The
/// operator waits for this consent of a user.
pub fn adoptable_items(observed: &Observed) -> Vec<String> {
    let vm = observed.vm.iter().map(|vm| ownership::vm(observed, vm));
    let pvcs = observed.pvcs.iter().map(|(name, pvc)| ownership::pvc(observed, name, pvc));
    let secret = observed.secret.iter().map(|secret| ownership::secret(observed, secret));
    let mut items: Vec<String> = Vec::new();
    for owner in vm.chain(pvcs).chain(secret) {
        if let Ownership::Adoptable(item) = owner
            && !items.contains(&item)
        {
            items.push(item);
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_the_reason_and_no_user_data() {
        let machine: Machine = serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web", "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"template": "small", "cloudInit": {"userData": "password: hunter2"}},
            "status": {
                "phase": "Failed", "diagnosis": "Secret x not found",
                "conditions": [{"type": "Ready", "status": "False", "reason": "SecretNotFound", "message": "m",
                                "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            },
        }))
        .unwrap();
        let row = MachineRow::new(&machine);
        assert_eq!((row.phase, row.ready, row.reason.as_str()), ("Failed", false, "SecretNotFound"));
        assert_eq!(row.created, 1_767_225_600);
        assert!(!serde_json::to_string(&row).unwrap().contains("hunter2"));
    }
}
