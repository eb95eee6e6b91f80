//! How far the rollout of a DaemonSet may go: to one node, then to a tenth of the nodes at a time.
//!
//! The DaemonSet controller replaces the pods. The operator decides only how many of them may be unavailable. The
//! state of a rollout is in the cluster alone, so the next leader continues it: the revisions of the pods show which
//! of them are updated.
//!
//! - As long as no updated pod works, one node is updated. A template that does not work reaches no other node.
//! - Then a tenth of the nodes is updated at a time.
//! - When no node is outdated, one pod may be unavailable, as in a new installation.
//!
//! A node that is not ready has no available pod, and the controller counts that pod as unavailable, even if the status
//! of the DaemonSet does not count the node because of its taints. So the number of these nodes is added, or the
//! controller would replace nothing. It replaces their pods when they are ready again.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use k8s_openapi::{
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::{SignedDuration, Timestamp},
};
use serde_json::Value;

use crate::{kind::Kind, live::LiveObject, live::Rollout, observed::Observed, pods::Pods};

/// Where a DaemonSet has the number of pods that may be unavailable.
pub(crate) const MAX_UNAVAILABLE: &str = "/spec/updateStrategy/rollingUpdate/maxUnavailable";
/// Upstream virt-operator writes the same text.
const TENTH: &str = "10%";
/// How long a pod whose containers were restarted must be ready until it counts as working. A container that crashes may
/// be ready for a moment after each restart.
const STABLE_AFTER: SignedDuration = SignedDuration::from_mins(1);

/// The number of pods of a DaemonSet that may be unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) value: IntOrString,
    /// Whether the live DaemonSet has this value.
    pub(crate) is_live: bool,
}

/// The limit for the present state of a rollout. `is_template_live`: the live template is the desired one. Otherwise the
/// next write starts a rollout. `None` if the DaemonSet has no limit.
pub(crate) fn limit(observed: &Observed, name: &str, live: &LiveObject, is_template_live: bool) -> Option<Limit> {
    let live_value: IntOrString =
        serde_json::from_value(live.content()?.pointer(MAX_UNAVAILABLE).filter(|value| !value.is_null())?.clone())
            .ok()?;
    let pods = &observed.pods;
    let value = if is_template_live {
        let nodes = RolloutNodes::observe(pods, name, live.rollout.unwrap_or_default(), observed.now);
        // Until the controller has noticed the template, no pod has it.
        nodes.map_or_else(|| live_value.clone(), RolloutNodes::max_unavailable)
    } else {
        allow(1, pods.unreachable_nodes(name).len())
    };
    Some(Limit { is_live: value == live_value, value })
}

/// Writes the limit into a DaemonSet.
pub(crate) fn set_limit(body: &mut Value, limit: &Limit) {
    if let Some(value) = body.pointer_mut(MAX_UNAVAILABLE) {
        *value = match &limit.value {
            IntOrString::Int(number) => Value::from(*number),
            IntOrString::String(text) => Value::from(text.as_str()),
        };
    }
}

/// Takes the limit of a live DaemonSet over. It is not part of the comparison: the next reconcile decides about it.
pub(crate) fn keep_live_limit(body: &mut Value, live: &Value) {
    if let (Some(value), Some(live)) = (body.pointer_mut(MAX_UNAVAILABLE), live.pointer(MAX_UNAVAILABLE)) {
        value.clone_from(live);
    }
}

/// The nodes of a DaemonSet by the state of its rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RolloutNodes {
    /// Nodes that are ready and should run a pod.
    ready: usize,
    /// Nodes that are not ready.
    dead: usize,
    /// Ready nodes whose pod has an older template.
    outdated: usize,
    /// Ready nodes whose pod has the current template and works.
    proven: usize,
    /// Ready nodes whose pod has the current template and does not work.
    unproven: usize,
}

impl RolloutNodes {
    /// `None` if it is not known which pods have the current template.
    pub(crate) fn observe(pods: &Pods, name: &str, rollout: Rollout, now: Timestamp) -> Option<Self> {
        let all = usize::try_from(rollout.pods).unwrap_or_default();
        let dead_nodes = pods.unreachable_nodes(name);
        let (dead, ready) = (dead_nodes.len(), all.saturating_sub(pods.counted_unreachable_nodes(name).len()));
        if rollout.is_complete() {
            return Some(Self { ready, dead, outdated: 0, proven: ready, unproven: 0 });
        }
        let current = pods.current_revision(name)?;
        let mut nodes = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
        let [outdated, proven, unproven] = &mut nodes;
        for (_, pod) in pods.of(Kind::DaemonSet, name).filter(|(_, pod)| pod.deleted.is_none() && !pod.ended) {
            let node = &*pod.node;
            if dead_nodes.contains(node) {
                continue;
            }
            if *pod.revision != *current {
                outdated.insert(node);
                continue;
            }
            let is_stable = pod.containers.iter().all(|container| container.restarts == 0 || container.init)
                || pod.ready_changed.is_some_and(|since| now.duration_since(since) >= STABLE_AFTER);
            if pod.ready && is_stable {
                proven.insert(node)
            } else {
                unproven.insert(node)
            };
        }
        let [outdated, proven, unproven] = nodes.map(|nodes| nodes.len());
        Some(Self { ready, dead, outdated, proven, unproven })
    }

    fn max_unavailable(self) -> IntOrString {
        if self.outdated == 0 { IntOrString::Int(1) } else { allow(self.batch(), self.dead) }
    }

    /// On how many ready nodes pods may be replaced at the same time.
    fn batch(self) -> usize {
        if self.proven == 0 { 1 } else { self.ready.div_ceil(10) }
    }

    /// The batches of a new template, if every pod of it works.
    pub(crate) fn batches(pods: &Pods, name: &str, rollout: Rollout) -> Vec<usize> {
        let all = usize::try_from(rollout.pods).unwrap_or_default();
        let dead = pods.unreachable_nodes(name).len();
        let ready = all.saturating_sub(pods.counted_unreachable_nodes(name).len());
        let mut nodes = Self { ready, dead, outdated: ready, proven: 0, unproven: 0 };
        let mut batches = Vec::new();
        while nodes.outdated > 0 {
            let batch = nodes.batch().clamp(1, nodes.outdated);
            nodes.outdated -= batch;
            nodes.proven += batch;
            batches.push(batch);
        }
        batches
    }

    /// Whether the rollout has stopped at the first nodes: an updated pod does not work, and none does.
    pub(crate) fn is_stopped(self) -> bool {
        self.outdated > 0 && self.proven == 0 && self.unproven > 0
    }
}

/// The limit that lets this many ready nodes be updated at the same time.
fn allow(nodes: usize, dead: usize) -> IntOrString {
    if dead == 0 && nodes > 1 {
        return IntOrString::String(TENTH.to_owned());
    }
    IntOrString::Int(i32::try_from(nodes.max(1) + dead).unwrap_or(i32::MAX))
}
