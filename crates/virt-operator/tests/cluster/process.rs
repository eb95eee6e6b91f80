//! The process: how it starts, which endpoints it serves and how it stops.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::{process::Command, time::timeout};
use vitivirt_lab::{
    Lab, OperatorProcess, OperatorProcessOptions, VIRT_OPERATOR_USER,
    harness::{SharedLabs, Suite},
};
use vitivirt_runtime::lease::message;

use crate::support::program;

const SERVICE_ACCOUNT: &str = "kubevirt-operator";
const IMAGE: &str = "quay.io/kubevirt/virt-operator:v1.8.4";
const TIMEOUT: Duration = Duration::from_secs(30);
const METRICS_PORT: u16 = 8186;

pub(crate) fn add(suite: &mut Suite) {
    suite.test(
        "an_invalid_image_variable_ends_the_process_with_one_error_line",
        an_invalid_image_variable_ends_the_process_with_one_error_line,
    );
    suite.test(
        "the_process_leads_serves_its_endpoints_and_stops_on_sigterm",
        the_process_leads_serves_its_endpoints_and_stops_on_sigterm,
    );
}

async fn an_invalid_image_variable_ends_the_process_with_one_error_line(_: Arc<SharedLabs>) -> Result<()> {
    for (variable, image) in [("VIRT_OPERATOR_IMAGE", ""), ("VIRT_OPERATOR_IMAGE", "junk"), ("GS_IMAGE", " ")] {
        let mut command = Command::new(program());
        command.env("VIRT_OPERATOR_IMAGE", IMAGE).env(variable, image).kill_on_drop(true);
        let output = timeout(TIMEOUT, command.output()).await??;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{variable}={image:?} ended with {}", output.status);
        let names_variable = error.starts_with(&format!("error: {variable}: "));
        ensure!(names_variable && error.contains("must be") && error.lines().count() == 1, "{error}");
    }
    Ok(())
}

async fn the_process_leads_serves_its_endpoints_and_stops_on_sigterm(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let mut process = start(&lab, "kubevirt").await?;
    process.wait_for_message(message::ACQUIRED, TIMEOUT).await?;
    timeout(TIMEOUT, wait_until_ready(&process)).await?;
    for (path, expected) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/else", 404)] {
        let (status, body) = process.get_over_tls(METRICS_PORT, path).await?;
        ensure!(status == expected, "{path} responded with {status}: {body}");
    }
    // What the alerts and dashboards of a release read.
    let (_, metrics) = process.get_over_tls(METRICS_PORT, "/metrics").await?;
    for name in [
        "kubevirt_rest_client_requests_total{code=\"200\",method=\"GET\",host=",
        "kubevirt_workqueue_depth{name=\"virt-operator\"}",
        "kubevirt_workqueue_adds_total{name=\"virt-operator\"}",
        "kubevirt_virt_operator_leading_status 1",
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        "virt_operator_build_info{version=",
    ] {
        ensure!(metrics.lines().any(|line| line.starts_with(name)), "{name} is missing in {metrics}");
    }
    process.signal(Signal::SIGTERM)?;
    process.wait_for_message(message::RELEASED, TIMEOUT).await?;
    // Its webhooks must work until the API server knows other endpoints.
    let (status, _) = process.get_over_tls(METRICS_PORT, "/healthz").await?;
    ensure!(status == 200, "after the release of the lease /healthz responded with {status}");
    let (status, _) = process.get_over_tls(METRICS_PORT, "/readyz").await?;
    ensure!(status == 500, "after the release of the lease /readyz responded with {status}");
    let status = process.wait(TIMEOUT).await?;
    ensure!(status.code() == Some(0), "after SIGTERM the process must exit with 0: {status}");

    let requests: Vec<_> = lab.audit()?.into_iter().filter(|record| record.user == VIRT_OPERATOR_USER).collect();
    ensure!(!requests.is_empty(), "the process sent no request as its own service account");
    let agent = concat!("virt-operator/", env!("CARGO_PKG_VERSION"));
    ensure!(
        requests.iter().all(|record| record.user_agent == agent),
        "not every request has the user agent {agent:?}: {requests:?}"
    );
    let is_own_lease = |name: &str, resource: &str| name == "virt-operator" && resource == "leases";
    ensure!(requests.iter().any(|record| is_own_lease(&record.name, &record.resource)), "{requests:?}");
    Ok(())
}

/// Polls the readiness endpoint, which reports no changes.
async fn wait_until_ready(process: &OperatorProcess) {
    while !process.get_over_tls(METRICS_PORT, "/readyz").await.is_ok_and(|(status, _)| status == 200) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Starts the operator. Its service account may write Leases and read everything.
async fn start(lab: &Lab, namespace: &str) -> Result<OperatorProcess> {
    let leases = json!([{
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "list", "watch", "create", "update"],
    }]);
    lab.grant(namespace, SERVICE_ACCOUNT, &leases).await?;
    lab.create(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: reads-everything}}
rules: [{{apiGroups: ['*'], resources: ['*'], verbs: [get, list, watch]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: reads-everything}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reads-everything}}
subjects: [{{kind: ServiceAccount, name: {SERVICE_ACCOUNT}, namespace: {namespace}}}]
"
    ))
    .await?;
    lab.run(OperatorProcessOptions {
        file: program(),
        namespace: namespace.to_owned(),
        service_account: SERVICE_ACCOUNT.to_owned(),
        arguments: ["--listen", "{address}"].map(str::to_owned).to_vec(),
        environment: vec![("VIRT_OPERATOR_IMAGE".to_owned(), IMAGE.to_owned())],
        through_proxy: false,
    })
    .await
}
