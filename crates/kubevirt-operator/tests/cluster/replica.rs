//! One replica of the operator in a namespace of its test's own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;
use kubevirt_operator::rbac;
use serde_json::{Value, json};
use vitivirt_lab::leadership::{self, LeadershipSpan, Messages};
use vitivirt_lab::{Lab, OperatorProcess, OperatorProcessOptions, Record, manifests};
use vitivirt_runtime::lease::message;
use vitivirt_runtime::program::message::STARTED;

pub(crate) use kubevirt_operator::rbac::ACCOUNT;
/// Starting a debug build on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What leader election needs, and nothing else.
pub(crate) fn lease_rules() -> Value {
    json!(rbac::lease_rules())
}

/// Everything that the operator may do, for the account of a test's own namespace.
pub(crate) async fn grant(lab: &Lab, namespace: &str) -> Result<()> {
    lab.grant(namespace, ACCOUNT, &lease_rules()).await?;
    let mut binding = rbac::manager_binding();
    binding.metadata.name = Some(format!("{}-{namespace}", rbac::MANAGER_BINDING));
    for subject in binding.subjects.iter_mut().flatten() {
        subject.namespace = Some(namespace.to_owned());
    }
    manifests::create(&lab.client(), &[json!(rbac::manager_role()), json!(binding)]).await
}

pub(crate) async fn start(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    start_with(lab, namespace, through_proxy, &[]).await
}

pub(crate) async fn start_with(
    lab: &Lab,
    namespace: &str,
    through_proxy: bool,
    more: &[(&str, &str)],
) -> Result<OperatorProcess> {
    let usual = [
        ("NAMESPACE", namespace),
        ("METRICS_BIND_ADDRESS", "{address}:8080"),
        ("HEALTH_PROBE_BIND_ADDRESS", "{address}:8081"),
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

/// A replica that leads.
pub(crate) async fn start_leader(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    grant(lab, namespace).await?;
    let program = start(lab, namespace, through_proxy).await?;
    program.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    Ok(program)
}

/// A replica beside one that leads. Its watch of the lease is open: from now on it hears of every change.
pub(crate) async fn start_standby(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<OperatorProcess> {
    let begun = Timestamp::now();
    let program = start(lab, namespace, through_proxy).await?;
    program.wait_for_message(STARTED, PATIENCE).await?;
    // Whoever leads does not watch, so a watch that began after this replica is this replica's.
    let is_watch = |record: &Record| {
        record.namespace == namespace
            && (record.verb.as_str(), record.resource.as_str(), record.code) == ("watch", "leases", Some(200))
            && record.time >= begun
    };
    let watching = async {
        while !lab.audit()?.iter().any(is_watch) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    let watching = tokio::time::timeout(PATIENCE, watching).await;
    watching.with_context(|| format!("the standby never watched the lease:\n{}", program.log_text()))??;
    Ok(program)
}

pub(crate) fn spans(who: &str, program: &OperatorProcess, died: Option<Timestamp>) -> Result<Vec<LeadershipSpan>> {
    let messages = Messages { begins: message::ACQUIRED, ends: message::WORK_STOPPED };
    leadership::spans(who, &program.log_lines(), messages, died)
}
