//! Details of workloads that depend on the KubeVirt resource, on the number of nodes or on the rollout.

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, RollingUpdateDaemonSet},
        core::v1::PodSpec,
    },
    apimachinery::pkg::util::intstr::IntOrString,
};
use vitivirt_api::kubevirt::KubeVirtSpec;

use crate::{certificates::VIRT_HANDLER_CLIENT, names::label};

const MIGRATION_NAMES: &str = "migration-cn-types";

/// One replica on a single node, otherwise one for every ten nodes and at least two.
pub(crate) fn api_replicas(schedulable_nodes: usize) -> i32 {
    match schedulable_nodes {
        1 => 1,
        nodes => i32::try_from(nodes / 10).unwrap_or(i32::MAX).max(2),
    }
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
        && strategy.type_.as_deref() == Some("RollingUpdate")
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

    #[test]
    fn tls_settings_become_arguments() {
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
