//! The state of VMIs that the simulated kubelet and the simulated virt-handler share.

use std::{collections::HashMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;
use tokio::sync::watch;

use crate::kubevirt::kubevirt_resource;

/// How long a guest may take to shut down before its pod is removed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Kubernetes timestamps have no fractions of a second. KubeVirt's controllers compare values that they read and write
/// back byte for byte, so a fraction in a custom resource would make their patches fail permanently.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

pub(crate) fn resource() -> ApiResource {
    kubevirt_resource("VirtualMachineInstance")
}

pub(crate) fn all_vmis(client: Client) -> Api<DynamicObject> {
    Api::all_with(client, &resource())
}

/// The fields of a VMI that determine when a launcher pod ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmiSummary {
    pub(crate) phase: String,
    pub(crate) node: String,
    /// The UID of the migration that failed last.
    pub(crate) failed_migration: Option<String>,
}

impl VmiSummary {
    pub(crate) fn from_vmi(vmi: &DynamicObject) -> Self {
        let text = |pointer: &str| vmi.data.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let failed = vmi.data.pointer("/status/migrationState/failed").and_then(Value::as_bool) == Some(true);
        VmiSummary {
            phase: text("/status/phase").unwrap_or_default(),
            node: text("/status/nodeName").unwrap_or_default(),
            failed_migration: text("/status/migrationState/migrationUid").filter(|_| failed),
        }
    }
}

/// The VMIs that exist, by UID.
#[derive(Clone)]
pub(crate) struct VmiPhases(Arc<watch::Sender<HashMap<String, VmiSummary>>>);

impl Default for VmiPhases {
    fn default() -> Self {
        VmiPhases(Arc::new(watch::Sender::new(HashMap::new())))
    }
}

impl VmiPhases {
    pub(crate) fn set(&self, uid: String, summary: &VmiSummary) {
        self.0.send_if_modified(|summaries| summaries.insert(uid, summary.clone()).as_ref() != Some(summary));
    }

    pub(crate) fn remove(&self, uid: &str) {
        self.0.send_if_modified(|summaries| summaries.remove(uid).is_some());
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<HashMap<String, VmiSummary>> {
        self.0.subscribe()
    }

    /// The VMI of a launcher pod. None for any other pod.
    pub(crate) fn guest_of(&self, pod: &Pod) -> Option<VmiSummary> {
        self.0.borrow().get(launched_vmi(pod)?).cloned()
    }

    /// Returns when the guest of a launcher pod has stopped, and immediately for any other pod.
    pub(crate) async fn wait_until_stopped(&self, pod: &Pod, hosted: bool) {
        let Some(uid) = launched_vmi(pod).filter(|_| hosted) else { return };
        let mut summaries = self.0.subscribe();
        let stopped =
            summaries.wait_for(|summaries| summaries.get(uid).is_none_or(|vmi| vmi.outcome(pod, hosted).is_some()));
        let _ = tokio::time::timeout(TIMEOUT, stopped).await;
    }
}

fn launched_vmi(pod: &Pod) -> Option<&str> {
    let labels = pod.labels();
    (labels.get("kubevirt.io").map(String::as_str) == Some("virt-launcher"))
        .then(|| labels.get("kubevirt.io/created-by").map(String::as_str))
        .flatten()
}

impl VmiSummary {
    pub(crate) fn is_on(&self, pod: &Pod) -> bool {
        pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&self.node)
    }

    /// Whether a launcher pod has ended, and with success: its guest has stopped or moved to another node, or the
    /// migration that created the pod has failed. `hosted` is true if the guest has ever run in this pod.
    pub(crate) fn outcome(&self, pod: &Pod, hosted: bool) -> Option<bool> {
        let awaited = pod.labels().get("kubevirt.io/migrationJobUID");
        match self.phase.as_str() {
            "Succeeded" => Some(true),
            "Failed" => Some(false),
            "Running" if hosted && !self.is_on(pod) => Some(true),
            "Running" if !hosted && awaited.is_some() && awaited == self.failed_migration.as_ref() => Some(false),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launcher(node: &str) -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"labels": {
                "kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "u", "kubevirt.io/migrationJobUID": "m",
            }},
            "spec": {"nodeName": node, "containers": []},
        }))
        .unwrap()
    }

    #[test]
    fn a_launcher_pod_ends_when_its_guest_stops_or_moves() {
        let vmi = |phase: &str, node: &str| VmiSummary {
            phase: phase.to_owned(),
            node: node.to_owned(),
            ..VmiSummary::default()
        };
        for (summary, hosted, expected) in [
            (vmi("Running", "a"), true, None),
            (vmi("Running", "b"), true, Some(true)),
            (vmi("Running", "b"), false, None),
            (vmi("Scheduled", "a"), false, None),
            (vmi("Succeeded", "a"), true, Some(true)),
            (vmi("Failed", "a"), true, Some(false)),
            (VmiSummary { failed_migration: Some("m".to_owned()), ..vmi("Running", "b") }, false, Some(false)),
            (VmiSummary { failed_migration: Some("other".to_owned()), ..vmi("Running", "b") }, false, None),
        ] {
            assert_eq!(summary.outcome(&launcher("a"), hosted), expected, "{summary:?}");
        }
    }
}
