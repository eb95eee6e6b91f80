//! Starts replicas of the operator, and grants permissions to their service account. Each test has its own namespace.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, PolicyRule};
use kubevirt_operator::rbac;
pub(crate) use kubevirt_operator::rbac::ACCOUNT;
use serde_json::{Value, json};
use vitivirt_lab::{
    Lab, OperatorProcess, OperatorProcessOptions, Record,
    leadership::{self, LeadershipSpan, Messages},
    manifests,
};
use vitivirt_runtime::{lease::message, program::message::STARTED};

use crate::poll::poll_until;

/// Enough to start a debug build on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The permissions for leader election, and no others.
pub(crate) fn lease_rules() -> Value {
    json!(rbac::lease_rules())
}

/// Every rule that a Role in one namespace can grant to the operator, changed by `change`.
pub(crate) fn namespaced_rules(change: impl Fn(&mut PolicyRule)) -> Value {
    let mut rules: Vec<_> = rbac::manager_rules().into_iter().chain(rbac::lease_rules()).collect();
    rules.iter_mut().for_each(change);
    json!(rules)
}

pub(crate) fn rule_is_about(rule: &PolicyRule, resources: &[&str]) -> bool {
    rule.resources.iter().flatten().any(|resource| resources.contains(&resource.as_str()))
}

/// Grants all permissions of the operator to the service account of a test's namespace.
pub(crate) async fn grant_permissions(lab: &Lab, namespace: &str) -> Result<()> {
    lab.grant(namespace, ACCOUNT, &lease_rules()).await?;
    let binding = manager_binding(format!("{}-{namespace}", rbac::MANAGER_BINDING), namespace);
    manifests::create(&lab.client(), &[json!(rbac::manager_role()), json!(binding)]).await
}

/// Grants the permissions on cluster-scoped kinds, which a Role cannot grant.
pub(crate) async fn grant_cluster_scoped_kinds(lab: &Lab, namespace: &str) -> Result<()> {
    let name = format!("reads-the-cluster-{namespace}");
    let mut role = rbac::manager_role();
    role.metadata.name = Some(name.clone());
    if let Some(rules) = &mut role.rules {
        rules.retain(|rule| !rbac::is_namespaced(rule));
    }
    let mut binding = manager_binding(name.clone(), namespace);
    binding.role_ref.name = name;
    manifests::create(&lab.client(), &[json!(role), json!(binding)]).await
}

/// The operator's ClusterRoleBinding, for the service account of another namespace.
fn manager_binding(name: String, namespace: &str) -> ClusterRoleBinding {
    let mut binding = rbac::manager_binding();
    binding.metadata.name = Some(name);
    for subject in binding.subjects.iter_mut().flatten() {
        subject.namespace = Some(namespace.to_owned());
    }
    binding
}

pub(crate) async fn start(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    start_with_environment(lab, namespace, through_proxy, &[]).await
}

pub(crate) async fn start_with_environment(
    lab: &Lab,
    namespace: &str,
    through_proxy: bool,
    more: &[(&str, &str)],
) -> Result<OperatorProcess> {
    let usual = [
        ("NAMESPACE", namespace),
        ("METRICS_BIND_ADDRESS", "{address}:8080"),
        ("HEALTH_PROBE_BIND_ADDRESS", "{address}:8081"),
        ("STATUS_BIND_ADDRESS", "{loopback}:8082"),
    ];
    lab.run(OperatorProcessOptions {
        file: PathBuf::from(env!("CARGO_BIN_EXE_kubevirt-operator")),
        namespace: namespace.to_owned(),
        service_account: ACCOUNT.to_owned(),
        arguments: vec!["run".to_owned()],
        environment: usual.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        through_proxy,
    })
    .await
}

/// Starts a replica and waits until it holds the Lease.
pub(crate) async fn start_leader(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    grant_permissions(lab, namespace).await?;
    let program = start(lab, namespace, through_proxy).await?;
    program.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    Ok(program)
}

/// Starts a second replica and waits until it watches the Lease: from then on it receives every change.
pub(crate) async fn start_standby(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    let started = Timestamp::now();
    let program = start(lab, namespace, through_proxy).await?;
    program.wait_for_message(STARTED, PATIENCE).await?;
    // The leader does not watch the Lease, so a watch that is newer than this replica belongs to this replica.
    let is_watch = |record: &Record| {
        record.namespace == namespace
            && (record.verb.as_str(), record.resource.as_str(), record.code) == ("watch", "leases", Some(200))
            && record.time >= started
    };
    let is_watching = || async { Ok(lab.audit()?.iter().any(is_watch)) };
    poll_until(PATIENCE, is_watching, || format!("the standby watches the Lease; its log:\n{}", program.log_text()))
        .await?;
    Ok(program)
}

/// The times in which a replica did the leader's work, read from its log.
pub(crate) fn leadership_spans(
    replica: &str,
    program: &OperatorProcess,
    died: Option<Timestamp>,
) -> Result<Vec<LeadershipSpan>> {
    let messages = Messages { begins: message::ACQUIRED, ends: message::WORK_STOPPED };
    leadership::spans(replica, &program.log_lines(), messages, died)
}
