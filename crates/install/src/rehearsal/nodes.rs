//! What nodes mean for a rollout: whether pods of the components find a node, and which nodes keep their virt-handler.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, PodSpec, Taint, Toleration};
use serde_json::Value;
use vitivirt_api::Plan;

use super::selectors::selects_node;
use crate::{certificates::NoCertificates, installation::Installation, kind::Kind, pods::list};

const SCHEDULABLE: &str = "kubevirt.io/schedulable";

/// A node, reduced to what decides whether a pod can run there.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeState {
    pub name: String,
    pub is_ready: bool,
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    is_cordoned: bool,
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
    pub(super) fn can_run_vms(&self) -> bool {
        self.is_ready && !self.is_cordoned && self.labels.get(SCHEDULABLE).is_some_and(|value| value == "true")
    }

    /// Whether the scheduler may place a pod on it. Resources are not compared.
    fn fits(&self, pod: &PodSpec) -> bool {
        let has_labels = pod.node_selector.iter().flatten().all(|(key, value)| self.labels.get(key) == Some(value));
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        let has_affinity = required.is_none_or(|required| {
            required.node_selector_terms.iter().any(|term| selects_node(term, &self.name, &self.labels))
        });
        let tolerations = pod.tolerations.as_deref().unwrap_or_default();
        let is_tolerated =
            |taint: &Taint| taint.effect == "PreferNoSchedule" || tolerations.iter().any(|it| tolerates(it, taint));
        has_labels && has_affinity && self.taints.iter().all(is_tolerated)
    }
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

/// What nodes block, and what a user should know about them: blockers and warnings.
pub fn node_problems(installation: &Installation, plan: &Plan, nodes: &[NodeState]) -> (Vec<String>, Vec<String>) {
    let (mut blockers, mut warnings) = (Vec::new(), Vec::new());
    let written: Vec<_> = super::writes(plan).map(vitivirt_api::Write::target).collect();
    for object in &installation.objects {
        let target = object.target();
        let is_daemon_set = object.kind == Kind::DaemonSet;
        if !(is_daemon_set || object.kind == Kind::Deployment) || !written.contains(&&target) {
            continue;
        }
        let body = object.body(&NoCertificates).map(vitivirt_api::Body::into_json).unwrap_or_default();
        let pod = body.pointer("/spec/template/spec").cloned().unwrap_or(Value::Null);
        let Ok(pod) = serde_json::from_value::<PodSpec>(pod) else { continue };
        let fitting: Vec<&NodeState> = nodes.iter().filter(|node| node.fits(&pod)).collect();
        // A cordoned node gets pods of a DaemonSet, but no others.
        let can_start = |node: &&NodeState| node.is_ready && (is_daemon_set || !node.is_cordoned);
        let unready: Vec<&str> = fitting.iter().filter(|node| !node.is_ready).map(|node| node.name.as_str()).collect();
        if !fitting.iter().any(can_start) {
            let why = match (fitting.len(), unready.len()) {
                (0, _) => "no node matches its node selector, node affinity and tolerations".to_owned(),
                (all, unready) if all == unready => "none of the nodes that it can run on is ready".to_owned(),
                _ => "every node that it can run on is cordoned or not ready".to_owned(),
            };
            blockers.push(format!(
                "{target} cannot start: {why}; change spec.infra.nodePlacement or \
                 spec.workloads.nodePlacement, or make a node available"
            ));
        } else if is_daemon_set && !unready.is_empty() {
            let (nodes, verb) = if unready.len() == 1 { ("Node", "is") } else { ("Nodes", "are") };
            let names = list(unready.into_iter());
            let name = target.key.name();
            warnings.push(format!(
                "{nodes} {names} {verb} not ready: {name} keeps its version there until the node is \
                 ready, and the operator does not wait for it"
            ));
        }
    }
    (blockers, warnings)
}
