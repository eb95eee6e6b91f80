//! Details of workloads that depend on the KubeVirt resource, on the number of nodes or on the rollout.

pub(crate) mod canary;
pub(crate) mod revision;

use std::collections::VecDeque;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, RollingUpdateDaemonSet},
        core::v1::PodSpec,
    },
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::{SignedDuration, Timestamp},
};
use serde_json::Value;
use vitivirt_api::kubevirt::KubeVirtSpec;

use crate::{certificates::VIRT_HANDLER_CLIENT, names::label};

const MIGRATION_NAMES: &str = "migration-cn-types";
const ROLLING: &str = "RollingUpdate";
/// Where a DaemonSet has the settings of its rollout.
pub(crate) const ROLLING_UPDATE: &str = "/spec/updateStrategy/rollingUpdate";

/// One replica on a single node, otherwise one for every ten nodes and at least two.
pub fn api_replicas(schedulable_nodes: usize) -> i32 {
    match schedulable_nodes {
        1 => 1,
        nodes => i32::try_from(nodes / 10).unwrap_or(i32::MAX).max(2),
    }
}

/// How long a node that is no longer schedulable still counts. virt-handler makes its node unschedulable when it stops,
/// so each restart of it is such a dip.
const NODE_HOLD: SignedDuration = SignedDuration::from_mins(5);

/// The numbers of schedulable nodes of the last minutes, so that the replicas of virt-api do not follow a short dip. It
/// may be lost at any time: after a restart of the operator, the live replicas show how many nodes there were.
#[derive(Clone, Debug, Default)]
pub struct NodeHistory {
    /// Numbers that no later one exceeds, and when each was last seen.
    seen: VecDeque<(Timestamp, usize)>,
}

/// The number of nodes that counts, and until when it counts although fewer are schedulable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldNodes {
    pub count: usize,
    pub until: Option<Timestamp>,
}

impl NodeHistory {
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// `live_replicas` are those of virt-api. They matter only if the history is empty.
    pub fn observe(&mut self, now: Timestamp, nodes: usize, live_replicas: Option<i64>) -> HeldNodes {
        match self.seen.back_mut() {
            // This number has lasted until now.
            Some((last_seen, _)) => *last_seen = now,
            None => {
                let expected = i64::from(api_replicas(nodes));
                // More than twice as many do not follow from a dip.
                let plausible = live_replicas.filter(|live| (expected + 1..=2 * expected).contains(live));
                self.seen.extend(plausible.map(|live| (now, nodes_for(live))));
            }
        }
        while self.seen.back().is_some_and(|(_, seen)| *seen <= nodes) {
            self.seen.pop_back();
        }
        self.seen.push_back((now, nodes));
        while self.seen.len() > 1 && self.seen.front().is_some_and(|(last_seen, _)| *last_seen + NODE_HOLD <= now) {
            self.seen.pop_front();
        }
        let (last_seen, count) = self.seen.front().copied().unwrap_or((now, nodes));
        HeldNodes { count, until: (count > nodes).then(|| last_seen + NODE_HOLD) }
    }
}

/// The fewest nodes for which virt-api has this many replicas.
fn nodes_for(replicas: i64) -> usize {
    let replicas = usize::try_from(replicas).unwrap_or_default();
    if replicas <= 2 { replicas } else { replicas.saturating_mul(10) }
}

/// The TLS settings as command-line arguments of virt-template. The other components read the KubeVirt resource.
pub(crate) fn tls_arguments(spec: &KubeVirtSpec) -> Vec<String> {
    let flag = |name: &str, value: String| [format!("--{name}"), value];
    let Some(tls) = &spec.configuration.tls_configuration else {
        return flag("tls-min-version", "VersionTLS12".to_owned()).into();
    };
    let ciphers = tls.ciphers.as_deref().filter(|ciphers| !ciphers.is_empty());
    let version = Some(&tls.min_tls_version).filter(|version| !version.is_empty());
    let ciphers = ciphers.map(|ciphers| flag("tls-cipher-suites", ciphers.join(",")));
    let version = version.map(|version| flag("tls-min-version", version.clone()));
    ciphers.into_iter().chain(version).flatten().collect()
}

/// Limits the number of VMIs per node, if the resource sets a limit.
pub(crate) fn limit_devices(daemon_set: &mut DaemonSet, limit: Option<i64>) {
    let containers = pod(daemon_set).map(|pod| &mut pod.containers);
    if let (Some(limit), Some(container)) = (limit, containers.and_then(|all| all.first_mut())) {
        container.command.get_or_insert_default().extend(["--max-devices".to_owned(), limit.to_string()]);
    }
}

/// The settings of virt-handler when no rollout is in progress: it checks the common names of migration clients, so it
/// does not need the older client certificate, and pods are replaced one at a time.
pub(crate) fn adjust_update_strategy(daemon_set: &mut DaemonSet) {
    if let Some(strategy) = daemon_set.spec.as_mut().and_then(|spec| spec.update_strategy.as_mut())
        && strategy.type_.as_deref() == Some(ROLLING)
    {
        strategy.rolling_update =
            Some(RollingUpdateDaemonSet { max_unavailable: Some(IntOrString::Int(1)), max_surge: None });
    }
    let labels = daemon_set.metadata.labels.as_ref();
    let supported =
        labels.and_then(|labels| labels.get(label::CHECKS_MIGRATION_NAMES)).is_some_and(|value| value == "true");
    let Some(pod) = pod(daemon_set).filter(|_| supported) else { return };
    let Some(container) = pod.containers.first_mut() else { return };
    let arguments = container.args.get_or_insert_default();
    if arguments.iter().any(|argument| argument.contains(MIGRATION_NAMES)) {
        return;
    }
    arguments.extend([format!("--{MIGRATION_NAMES}"), "migration".to_owned()]);
    if let Some(mounts) = &mut container.volume_mounts {
        mounts.retain(|mount| mount.name != VIRT_HANDLER_CLIENT);
    }
    if let Some(volumes) = &mut pod.volumes {
        volumes.retain(|volume| volume.name != VIRT_HANDLER_CLIENT);
    }
}

/// The settings of a rollout that a patch contains and [`adjust_update_strategy`] replaces, one sentence for each.
pub(crate) fn unused_update_settings(name: &str, patched: &Value) -> Vec<String> {
    if patched.pointer("/spec/updateStrategy/type").is_none_or(|kind| kind != ROLLING) {
        return Vec::new();
    }
    let settings = patched.pointer(ROLLING_UPDATE).and_then(Value::as_object).into_iter().flatten();
    let sentence = |(field, value): (&String, &Value)| {
        format!(
            "spec.customizeComponents has no effect on {field} of {name}: the patch sets {value}, but the operator \
             controls the rollout: it updates one node, and when the new pod is ready, a tenth of the nodes at a time; \
             remove the setting from the patch"
        )
    };
    settings.filter(|(_, value)| !value.is_null()).map(sentence).collect()
}

fn pod(daemon_set: &mut DaemonSet) -> Option<&mut PodSpec> {
    daemon_set.spec.as_mut()?.template.spec.as_mut()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn virt_api_has_more_replicas_in_larger_clusters() {
        for (nodes, replicas) in [(0, 2), (1, 1), (2, 2), (29, 2), (30, 3), (100, 10)] {
            assert_eq!(api_replicas(nodes), replicas, "{nodes} nodes");
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    #[test]
    fn a_short_dip_of_the_nodes_does_not_count() {
        let mut history = NodeHistory::default();
        let mut count = |seconds: i64, nodes: usize| history.observe(at(seconds), nodes, None);
        assert_eq!(count(0, 2), HeldNodes { count: 2, until: None });
        // virt-handler restarts on one of two nodes.
        assert_eq!(count(1000, 1), HeldNodes { count: 2, until: Some(at(1300)) });
        assert_eq!(count(1020, 1), HeldNodes { count: 2, until: Some(at(1300)) });
        assert_eq!(count(1030, 2), HeldNodes { count: 2, until: None });
        // A node is removed for good.
        assert_eq!(count(2000, 1), HeldNodes { count: 2, until: Some(at(2300)) });
        assert_eq!(count(2300, 1), HeldNodes { count: 1, until: None });
        // A new node counts at once.
        assert_eq!(count(2301, 30), HeldNodes { count: 30, until: None });
        // Two dips: the first ends earlier.
        assert_eq!(count(2400, 20), HeldNodes { count: 30, until: Some(at(2700)) });
        assert_eq!(count(2500, 10), HeldNodes { count: 30, until: Some(at(2700)) });
        assert_eq!(count(2700, 10), HeldNodes { count: 20, until: Some(at(2800)) });
        assert_eq!(count(2800, 10), HeldNodes { count: 10, until: None });
    }

    #[test]
    fn a_restarted_operator_keeps_replicas_that_a_dip_explains() {
        for (nodes, live, replicas) in
            [(1, Some(2), 2), (1, Some(9), 1), (2, Some(1), 2), (60, Some(10), 10), (60, Some(50), 6), (2, None, 2)]
        {
            let held = NodeHistory::default().observe(at(0), nodes, live);
            assert_eq!(api_replicas(held.count), replicas, "{nodes} nodes, {live:?} replicas");
        }
    }

    /// Upstream virt-operator removed the certificate of a virt-handler that needed it.
    #[test]
    fn fault_24_a_virt_handler_that_does_not_check_names_keeps_its_client_certificate() {
        for checks_names in [true, false] {
            let labels = if checks_names { json!({label::CHECKS_MIGRATION_NAMES: "true"}) } else { json!({}) };
            let certificate = json!({"name": VIRT_HANDLER_CLIENT, "mountPath": "/c"});
            let pod = json!({
                "containers": [{"name": "virt-handler", "args": ["-v", "2"], "volumeMounts": [certificate]}],
                "volumes": [{"name": VIRT_HANDLER_CLIENT}, {"name": "other"}],
            });
            let object = json!({
                "metadata": {"labels": labels},
                "spec": {"selector": {}, "template": {"spec": pod}, "updateStrategy": {"type": "RollingUpdate"}},
            });
            let mut daemon_set: DaemonSet = serde_json::from_value(object).unwrap();
            adjust_update_strategy(&mut daemon_set);
            let pod = super::pod(&mut daemon_set).unwrap();
            let arguments = pod.containers[0].args.clone().unwrap().join(" ");
            assert_eq!(arguments.contains(MIGRATION_NAMES), checks_names, "{arguments}");
            let volumes: Vec<&str> = pod.volumes.iter().flatten().map(|volume| volume.name.as_str()).collect();
            assert_eq!(volumes.contains(&VIRT_HANDLER_CLIENT), !checks_names, "{volumes:?}");
            assert!(volumes.contains(&"other"));
            assert_eq!(pod.containers[0].volume_mounts.as_ref().unwrap().is_empty(), checks_names);
        }
    }

    #[test]
    fn tls_settings_become_arguments() {
        let arguments = |configuration: Value| {
            let spec = json!({ "configuration": configuration });
            tls_arguments(&serde_json::from_value(spec).unwrap()).join(" ")
        };
        assert_eq!(arguments(json!({})), "--tls-min-version VersionTLS12");
        assert_eq!(arguments(json!({"tlsConfiguration": {}})), "");
        assert_eq!(
            arguments(json!({"tlsConfiguration": {"minTLSVersion": "VersionTLS11", "ciphers": ["A", "B"]}})),
            "--tls-cipher-suites A,B --tls-min-version VersionTLS11"
        );
    }
}
