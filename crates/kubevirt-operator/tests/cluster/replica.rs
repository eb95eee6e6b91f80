//! One replica of the operator in a namespace of its test's own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use jiff::Timestamp;
use lab::leadership::{self, Messages, Reign};
use lab::{Lab, Program, ProgramOptions};
use runtime::lease::message;
use serde_json::{Value, json};

pub(crate) const ACCOUNT: &str = "kubevirt-operator-controller-manager";
/// Starting a debug build on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What leader election needs, and nothing else.
pub(crate) fn lease_rules() -> Value {
    json!([{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "list", "watch", "create", "update"]}])
}

pub(crate) async fn start(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<Program> {
    lab.run(ProgramOptions {
        file: PathBuf::from(env!("CARGO_BIN_EXE_kubevirt-operator")),
        namespace: namespace.to_owned(),
        service_account: ACCOUNT.to_owned(),
        arguments: vec!["run".to_owned()],
        environment: [
            ("NAMESPACE", namespace),
            ("METRICS_BIND_ADDRESS", "{address}:8080"),
            ("HEALTH_PROBE_BIND_ADDRESS", "{address}:8081"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec(),
        through_proxy,
    })
    .await
}

/// A replica that leads.
pub(crate) async fn start_leader(lab: &Lab, namespace: &str, through_proxy: bool) -> Result<Program> {
    lab.grant(namespace, ACCOUNT, &lease_rules()).await?;
    let program = start(lab, namespace, through_proxy).await?;
    program.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    Ok(program)
}

pub(crate) fn reigns(who: &str, program: &Program, died: Option<Timestamp>) -> Result<Vec<Reign>> {
    let messages = Messages { begins: message::ACQUIRED, ends: message::WORK_STOPPED };
    leadership::reigns(who, &program.log_lines(), messages, died)
}
