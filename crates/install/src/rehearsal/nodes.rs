//! What nodes mean for a rollout: whether pods of the components find a node, and which nodes keep their virt-handler.

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::Value;
use vitivirt_api::Plan;

use crate::{certificates::NoCertificates, installation::Installation, kind::Kind, node_state::NodeState, pods::list};

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
        let fitting: Vec<&NodeState> = nodes.iter().filter(|node| node.fits(&pod, is_daemon_set)).collect();
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
