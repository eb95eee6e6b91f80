//! Details of workloads that depend on the resource or on how they are rolled out.

use k8s_openapi::api::apps::v1::{DaemonSet, RollingUpdateDaemonSet};
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use vitivirt_api::kubevirt::KubeVirtSpec;

use crate::{certificates::VIRT_HANDLER_CLIENT, names::label};

const MIGRATION_NAMES: &str = "migration-cn-types";

/// Two, one on a single node, and more on many nodes.
pub(crate) fn api_replicas(schedulable_nodes: usize) -> i32 {
    match schedulable_nodes {
        1 => 1,
        nodes => i32::try_from(nodes / 10).unwrap_or(i32::MAX).max(2),
    }
}

/// TLS as virt-template takes it on its command line; the other components read the resource.
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

/// How many virtual machines a node may hold, if the resource says so.
pub(crate) fn limit_devices(daemon_set: &mut DaemonSet, limit: Option<i64>) {
    let containers = pod(daemon_set).map(|pod| &mut pod.containers);
    if let (Some(limit), Some(container)) = (limit, containers.and_then(|all| all.first_mut())) {
        container.command.get_or_insert_default().extend(["--max-devices".to_owned(), limit.to_string()]);
    }
}

/// As virt-handler is when no rollout goes on: it checks the names of those who migrate to it, for which it no longer
/// needs the older client certificate, and one at a time is replaced.
pub(crate) fn settle(daemon_set: &mut DaemonSet) {
    if let Some(strategy) = daemon_set.spec.as_mut().and_then(|spec| spec.update_strategy.as_mut())
        && strategy.type_.as_deref() == Some("RollingUpdate")
    {
        strategy.rolling_update =
            Some(RollingUpdateDaemonSet { max_unavailable: Some(IntOrString::Int(1)), max_surge: None });
    }
    let labels = daemon_set.metadata.labels.as_ref();
    let can = labels.and_then(|labels| labels.get(label::CHECKS_MIGRATION_NAMES)).is_some_and(|value| value == "true");
    let Some(pod) = pod(daemon_set).filter(|_| can) else { return };
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

fn pod(daemon_set: &mut DaemonSet) -> Option<&mut PodSpec> {
    daemon_set.spec.as_mut()?.template.spec.as_mut()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn replicas_of_virt_api_grow_with_the_cluster() {
        for (nodes, replicas) in [(0, 2), (1, 1), (2, 2), (29, 2), (30, 3), (100, 10)] {
            assert_eq!(api_replicas(nodes), replicas, "{nodes} nodes");
        }
    }

    #[test]
    fn tls_on_the_command_line() {
        let arguments = |configuration: serde_json::Value| {
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
