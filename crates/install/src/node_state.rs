//! A node, reduced to what decides whether a pod can run there.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, PodSpec, Taint, Toleration};

use crate::selectors::selects_node;

const SCHEDULABLE: &str = "kubevirt.io/schedulable";
const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";
const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// What the pods of every DaemonSet tolerate: the DaemonSet controller adds it to them. So they stay on a node that is not
/// ready, but the controller counts no node with `NoSchedule` taints of the first two keys.
const DAEMON_TOLERATIONS: [(&str, &str); 6] = [
    (NOT_READY, NO_EXECUTE),
    (UNREACHABLE, NO_EXECUTE),
    ("node.kubernetes.io/disk-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/memory-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/pid-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/unschedulable", NO_SCHEDULE),
];
/// Added to the pods that use the network of their node.
const HOST_NETWORK_TOLERATION: (&str, &str) = ("node.kubernetes.io/network-unavailable", NO_SCHEDULE);

#[derive(Debug, Clone, PartialEq)]
pub struct NodeState {
    pub name: String,
    pub is_ready: bool,
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    pub(crate) is_cordoned: bool,
}

impl NodeState {
    pub fn new(node: Node) -> Self {
        let conditions = node.status.into_iter().flat_map(|status| status.conditions.unwrap_or_default());
        let is_ready = |kind: &str, status: &str| kind == "Ready" && status == "True";
        let spec = node.spec.unwrap_or_default();
        Self {
            name: node.metadata.name.unwrap_or_default(),
            is_ready: conditions.into_iter().any(|condition| is_ready(&condition.type_, &condition.status)),
            labels: node.metadata.labels.unwrap_or_default(),
            taints: spec.taints.unwrap_or_default(),
            is_cordoned: spec.unschedulable == Some(true),
        }
    }

    /// Whether a VM can be migrated to it.
    pub(crate) fn can_run_vms(&self) -> bool {
        self.is_ready && !self.is_cordoned && self.labels.get(SCHEDULABLE).is_some_and(|value| value == "true")
    }

    /// Whether it is a node for a pod when it is ready and not cordoned. Resources are not compared.
    pub(crate) fn fits(&self, pod: &PodSpec, is_daemon: bool) -> bool {
        let mut taints = self.taints.iter().filter(|taint| ![NOT_READY, UNREACHABLE].contains(&taint.key.as_str()));
        self.is_selected_by(pod) && taints.all(|taint| is_tolerated(taint, pod, is_daemon))
    }

    /// Whether the DaemonSet controller counts the node for a DaemonSet with this template: it wants a pod there. It counts
    /// a node that is not ready as long as the node has no taint that the pod does not tolerate.
    pub(crate) fn counts_for_daemon_set(&self, template: &PodSpec) -> bool {
        self.is_selected_by(template) && self.taints.iter().all(|taint| is_tolerated(taint, template, true))
    }

    fn is_selected_by(&self, pod: &PodSpec) -> bool {
        let has_labels = pod.node_selector.iter().flatten().all(|(key, value)| self.labels.get(key) == Some(value));
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        let has_affinity = required.is_none_or(|required| {
            required.node_selector_terms.iter().any(|term| selects_node(term, &self.name, &self.labels))
        });
        has_labels && has_affinity
    }
}

fn is_tolerated(taint: &Taint, pod: &PodSpec, is_daemon: bool) -> bool {
    let matches = |(key, effect): &(&str, &str)| taint.key == *key && taint.effect == *effect;
    let uses_host_network = pod.host_network == Some(true);
    let is_tolerated_by_daemon =
        DAEMON_TOLERATIONS.iter().any(matches) || uses_host_network && matches(&HOST_NETWORK_TOLERATION);
    ![NO_SCHEDULE, NO_EXECUTE].contains(&taint.effect.as_str())
        || is_daemon && is_tolerated_by_daemon
        || pod.tolerations.iter().flatten().any(|toleration| tolerates(toleration, taint))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let has_effect = toleration.effect.as_ref().is_none_or(|effect| effect.is_empty() || *effect == taint.effect);
    let key = toleration.key.as_deref().unwrap_or_default();
    let value = toleration.value.as_deref().unwrap_or_default();
    has_effect
        && match toleration.operator.as_deref() {
            Some("Exists") => key.is_empty() || key == taint.key,
            _ => key == taint.key && value == taint.value.as_deref().unwrap_or_default(),
        }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(taints: &[(&str, &str)]) -> NodeState {
        let taints: Vec<Value> = taints.iter().map(|(key, effect)| json!({"key": key, "effect": effect})).collect();
        let node =
            json!({"metadata": {"name": "a", "labels": {"kubernetes.io/os": "linux"}}, "spec": {"taints": taints}});
        NodeState::new(serde_json::from_value(node).unwrap())
    }

    fn template(more: &Value) -> PodSpec {
        let mut template = json!({
            "containers": [],
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "tolerations": [{"key": "CriticalAddonsOnly", "operator": "Exists"}],
        });
        template.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(template).unwrap()
    }

    /// The expected results are those of `NodeShouldRunDaemonPod` in Kubernetes.
    #[test]
    fn the_daemon_set_controller_does_not_count_a_node_with_a_taint_that_the_pod_does_not_tolerate() {
        for (taints, counts) in [
            (vec![], true),
            (vec![(UNREACHABLE, NO_EXECUTE)], true),
            (vec![(NOT_READY, NO_EXECUTE)], true),
            (vec![(UNREACHABLE, NO_SCHEDULE)], false),
            (vec![(NOT_READY, NO_SCHEDULE), (NOT_READY, NO_EXECUTE)], false),
            (vec![("node.kubernetes.io/unschedulable", NO_SCHEDULE)], true),
            (vec![("node.kubernetes.io/memory-pressure", NO_SCHEDULE)], true),
            (vec![("node.kubernetes.io/network-unavailable", NO_SCHEDULE)], false),
            (vec![("CriticalAddonsOnly", NO_SCHEDULE)], true),
            (vec![("example.org/storage", NO_SCHEDULE)], false),
            (vec![("example.org/storage", "PreferNoSchedule")], true),
        ] {
            assert_eq!(node(&taints).counts_for_daemon_set(&template(&json!({}))), counts, "{taints:?}");
        }
        let network = node(&[("node.kubernetes.io/network-unavailable", NO_SCHEDULE)]);
        assert!(network.counts_for_daemon_set(&template(&json!({"hostNetwork": true}))));
        let every = json!({"tolerations": [{"operator": "Exists"}]});
        assert!(node(&[(UNREACHABLE, NO_SCHEDULE)]).counts_for_daemon_set(&template(&every)));
        let windows = json!({"nodeSelector": {"kubernetes.io/os": "windows"}});
        assert!(!node(&[]).counts_for_daemon_set(&template(&windows)));
    }

    #[test]
    fn a_pod_fits_a_node_that_is_only_not_ready() {
        let dead = node(&[(UNREACHABLE, NO_SCHEDULE), (UNREACHABLE, NO_EXECUTE)]);
        let cordoned = node(&[("node.kubernetes.io/unschedulable", NO_SCHEDULE)]);
        let pod = template(&json!({}));
        assert!(dead.fits(&pod, false) && dead.fits(&pod, true) && cordoned.fits(&pod, true));
        assert!(!cordoned.fits(&pod, false) && !node(&[("example.org/storage", NO_EXECUTE)]).fits(&pod, true));
    }
}
