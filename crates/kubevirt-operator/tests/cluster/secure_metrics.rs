//! Metrics over TLS: who can read them, what that costs the API server, and which certificate is served.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleRef, Subject};
use kubevirt_operator::rbac;
use serde_json::json;
use vitivirt_lab::{
    Lab, OperatorProcess, Record,
    harness::{SharedLabs, Suite},
    manifests,
};
use vitivirt_runtime::{
    lease::message,
    tls::{PemKeyPair, served_certificate},
};

use crate::{
    machine_test::operator_user,
    poll::poll_until,
    replica::{ACCOUNT, PATIENCE, grant_permissions, start_with_environment},
};

const PORT: u16 = 8080;
const TLS: (&str, &str) = ("METRICS_TLS", "true");
const AUTHORIZATION: (&str, &str) = ("METRICS_AUTHORIZATION", "true");

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        secure_metrics_require_a_token_whose_user_has_permission,
        metrics_are_served_with_the_certificate_of_the_folder,
        authorization_of_metrics_without_tls_is_refused,
    );
}

async fn secure_metrics_require_a_token_whose_user_has_permission(labs: Arc<SharedLabs>) -> Result<()> {
    let namespace = "secure-metrics";
    let lab = labs.plain().await?;
    let operator = start(&lab, namespace, &[TLS, AUTHORIZATION]).await?;
    let reader = lab.credentials(namespace, "prometheus").await?;

    ensure!(operator.get(PORT, "/metrics").await.is_err(), "the metrics are served in plain text");
    let (status, body) = operator.get(8081, "/healthz").await?;
    ensure!(status == 200, "/healthz answered {status}: {body}");
    let (status, body) = operator.get_over_tls(PORT, "/healthz").await?;
    ensure!(status == 404, "/healthz on the port of the metrics answered {status}: {body}");
    expect(&operator, None, 401, "no bearer token").await?;

    // The operator itself has no permission to ask yet.
    expect(&operator, Some(reader.token()), 503, "the API server cannot be asked").await?;
    ensure!(operator.log_text().contains("tokenreviews"), "the cause is not in the log: {}", operator.log_text());
    let (role, binding, reader_role) = rbac::metrics_roles();
    let binding = bound_to(binding, namespace, ACCOUNT);
    manifests::create(&lab.client(), &[json!(role), json!(binding), json!(reader_role)]).await?;

    // The API server reads roles from a cache, so a new one takes a moment.
    let is_refused = || async { Ok(ask(&operator, Some(reader.token())).await?.0 == 403) };
    poll_until(PATIENCE, is_refused, || format!("403 for an account without a role\n{}", operator.log_text())).await?;
    let user = format!("system:serviceaccount:{namespace}:prometheus");
    expect(&operator, Some(reader.token()), 403, &format!("user \"{user}\" cannot get /metrics")).await?;
    expect(&operator, Some("not.a.token"), 401, "does not accept this bearer token").await?;

    let of_reader = ClusterRoleBinding {
        role_ref: RoleRef { name: rbac::METRICS_READER_ROLE.to_owned(), ..binding.role_ref },
        ..bound_to(rbac::metrics_roles().1, namespace, "prometheus")
    };
    manifests::create(&lab.client(), &[json!(of_reader)]).await?;
    let is_allowed = || async { Ok(ask(&operator, Some(reader.token())).await?.0 == 200) };
    poll_until(PATIENCE, is_allowed, || format!("200 for an account with the role\n{}", operator.log_text())).await?;
    expect(&operator, Some(reader.token()), 200, "kubevirt_operator_leader").await?;
    expect(&operator, Some("not.another.token"), 401, "does not accept this bearer token").await?;

    let before = reviews(&lab, namespace)?;
    ensure!(before > 0, "the audit log has no reviews");
    for _ in 0..50 {
        expect(&operator, Some(reader.token()), 200, "kubevirt_operator_leader").await?;
        expect(&operator, Some("not.another.token"), 401, "does not accept this bearer token").await?;
    }
    let after = reviews(&lab, namespace)?;
    // A slow lab may need longer than the lifetime of an answer.
    ensure!(after.saturating_sub(before) <= 10, "{before} reviews became {after}");
    Ok(())
}

async fn metrics_are_served_with_the_certificate_of_the_folder(labs: Arc<SharedLabs>) -> Result<()> {
    let namespace = "metrics-certificate";
    let lab = labs.plain().await?;
    let folder = lab.folder().join(namespace);
    std::fs::create_dir_all(&folder)?;
    write_certificate(&folder, "first.example.com")?;
    let path = folder.display().to_string();
    let operator = start(&lab, namespace, &[TLS, ("METRICS_TLS_CERT_DIR", &path)]).await?;
    ensure!(serves(&operator, "first.example.com").await, "another certificate is served");
    expect(&operator, None, 200, "kubevirt_operator_leader").await?;

    write_certificate(&folder, "second.example.com")?;
    let is_reloaded = || async { Ok(serves(&operator, "second.example.com").await) };
    poll_until(PATIENCE, is_reloaded, || format!("the new certificate is served\n{}", operator.log_text())).await?;
    expect(&operator, None, 200, "kubevirt_operator_leader").await
}

async fn authorization_of_metrics_without_tls_is_refused(labs: Arc<SharedLabs>) -> Result<()> {
    let namespace = "metrics-without-tls";
    let lab = labs.plain().await?;
    grant_permissions(&lab, namespace).await?;
    let mut operator = start_with_environment(&lab, namespace, false, &[AUTHORIZATION]).await?;
    let status = operator.wait(Duration::from_secs(10)).await?;
    let log = operator.log_text();
    ensure!(!status.success() && log.contains("clients must not send tokens in plain text"), "{status}: {log}");
    Ok(())
}

/// Starts an operator, and waits until it leads.
async fn start(lab: &Lab, namespace: &str, environment: &[(&str, &str)]) -> Result<OperatorProcess> {
    grant_permissions(lab, namespace).await?;
    let operator = start_with_environment(lab, namespace, false, environment).await?;
    operator.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    Ok(operator)
}

async fn ask(operator: &OperatorProcess, token: Option<&str>) -> Result<(u16, String)> {
    operator.get_over_tls_with_token(PORT, "/metrics", token).await
}

async fn expect(operator: &OperatorProcess, token: Option<&str>, status: u16, text: &str) -> Result<()> {
    let (found, body) = ask(operator, token).await.context("asking for metrics")?;
    ensure!(found == status && body.contains(text), "{found} and not {status} with {text:?}: {body}");
    Ok(())
}

/// The binding of the operator's account, for another account.
fn bound_to(mut binding: ClusterRoleBinding, namespace: &str, account: &str) -> ClusterRoleBinding {
    binding.metadata.name = Some(format!("{namespace}-{account}"));
    binding.subjects = Some(vec![Subject {
        kind: "ServiceAccount".to_owned(),
        name: account.to_owned(),
        namespace: Some(namespace.to_owned()),
        ..Subject::default()
    }]);
    binding
}

/// How many questions about tokens and permissions the operator has asked.
fn reviews(lab: &Lab, namespace: &str) -> Result<usize> {
    let is_review = |record: &Record| {
        record.user == operator_user(namespace)
            && ["tokenreviews", "subjectaccessreviews"].contains(&record.resource.as_str())
    };
    Ok(lab.audit()?.iter().filter(|record| is_review(record)).count())
}

fn write_certificate(folder: &Path, name: &str) -> Result<()> {
    let pair = PemKeyPair::self_signed(name)?;
    std::fs::write(folder.join("tls.crt"), &pair.certificate)?;
    std::fs::write(folder.join("tls.key"), &pair.key)?;
    Ok(())
}

/// Whether the operator serves a certificate for this name.
async fn serves(operator: &OperatorProcess, name: &str) -> bool {
    let address = SocketAddr::new(operator.address(), PORT);
    let served = served_certificate(address, Duration::from_secs(5)).await.unwrap_or_default();
    served.windows(name.len()).any(|part| part == name.as_bytes())
}
