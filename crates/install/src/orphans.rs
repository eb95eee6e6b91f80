//! Orphans: live objects of an earlier installation that the present one does not contain, and the order of their
//! deletion. `plan` decides when they are deleted.

use std::{collections::HashSet, sync::Arc};

use vitivirt_api::{ObjectKey, kubevirt::KubeVirt};

use crate::{
    config::DeploymentConfig,
    desired::Desired,
    installation::Installation,
    kind::Kind,
    live::{LiveObject, is_exclusive},
    managed_metadata::ManagedMetadata,
    names::label,
    observed::Observed,
    webhooks::BLOCKING_PREFIX,
};

/// Orphans are deleted in this order: first the objects that could forbid the deletion of others.
const DELETE_ORDER: [Kind; 23] = [
    Kind::ValidatingWebhookConfiguration,
    Kind::MutatingWebhookConfiguration,
    Kind::ApiService,
    Kind::Secret,
    Kind::ConfigMap,
    Kind::ValidatingAdmissionPolicyBinding,
    Kind::ValidatingAdmissionPolicy,
    Kind::CustomResourceDefinition,
    Kind::DaemonSet,
    Kind::Deployment,
    Kind::Service,
    Kind::ClusterRoleBinding,
    Kind::ClusterRole,
    Kind::RoleBinding,
    Kind::Role,
    Kind::ServiceAccount,
    Kind::SecurityContextConstraints,
    Kind::PrometheusRule,
    Kind::ServiceMonitor,
    Kind::Instancetype,
    Kind::Preference,
    Kind::PodDisruptionBudget,
    Kind::Route,
];

/// The objects that a plan deletes because the installation no longer contains them. Before the deletion, the operator
/// reads the KubeVirt resource, and the objects of CRDs among the orphans, from the API server (live check).
pub fn orphans(observed: &Observed, desired: &Desired) -> Vec<(Kind, ObjectKey)> {
    let Some(installation) = desired.installation() else { return Vec::new() };
    orphaned_objects(observed, installation).into_iter().map(|(kind, key, _)| (kind, key.clone())).collect()
}

/// Live objects with the operator's labels and annotations that the installation does not contain, in the order in
/// which they are deleted. Any client can copy labels and annotations, so only namespaces in which this installation or
/// one before it has objects count. Instancetypes and preferences need only the labels, as with upstream virt-operator.
pub(crate) fn orphaned_objects<'a>(
    observed: &'a Observed,
    installation: &Installation,
) -> Vec<(Kind, &'a ObjectKey, &'a Arc<LiveObject>)> {
    let config = &installation.config;
    let desired: HashSet<(Kind, &ObjectKey)> =
        installation.objects.iter().map(|object| (object.kind, &object.key)).collect();
    let current_strategy = observed.objects.strategy(&config.id).map(|(key, _)| key);
    let mut namespaces = recorded_namespaces(&observed.kubevirt);
    namespaces.extend(monitoring_namespaces(config).map(str::to_owned));
    namespaces.extend(["kube-system", config.namespace.as_str()].map(str::to_owned));
    let is_orphan = |kind: Kind, key: &ObjectKey, live: &LiveObject| {
        let is_current = live.is_strategy && (Some(key) == current_strategy || current_strategy.is_none());
        let kept = desired.contains(&(kind, key)) || key.name().starts_with(BLOCKING_PREFIX) || is_current;
        // Any client can copy the annotations alone.
        let is_marked = live.labels.contains_key(label::MANAGED_BY);
        is_marked && !kept && !live.deleting && key.namespace().is_none_or(|namespace| namespaces.contains(namespace))
    };
    let metadata = ManagedMetadata::new(&observed.kubevirt, config);
    let is_ours = |kind: Kind, live: &LiveObject| live.is_ours() || is_exclusive(kind) && metadata.has_labels(live);
    DELETE_ORDER
        .into_iter()
        .flat_map(|kind| observed.objects.recognized(kind).map(move |(key, live)| (kind, key, live)))
        .filter(|(kind, key, live)| is_ours(*kind, live) && is_orphan(*kind, key, live))
        .collect()
}

/// The namespaces in which the installations of a resource have objects, according to its status. The namespace of the
/// operator is not among them.
pub fn recorded_namespaces(kubevirt: &KubeVirt) -> HashSet<String> {
    let status = kubevirt.status.as_ref();
    let configs = status.map(|status| [&status.observed_deployment_config, &status.target_deployment_config]);
    let configs: Vec<DeploymentConfig> =
        configs.into_iter().flatten().filter_map(|text| serde_json::from_str(text).ok()).collect();
    let monitoring = configs.iter().flat_map(monitoring_namespaces);
    // An installation that an edit replaced before it was complete.
    let replaced = status.into_iter().flat_map(|status| &status.generations);
    let replaced = replaced.map(|recorded| recorded.namespace.as_str()).filter(|namespace| !namespace.is_empty());
    monitoring.chain(replaced).map(str::to_owned).collect()
}

fn monitoring_namespaces(config: &DeploymentConfig) -> impl Iterator<Item = &str> {
    config.monitor_namespaces().into_iter().chain(config.service_monitor_namespace())
}
