//! Pods that do not load a new certificate.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Pod, Secret},
    },
    jiff::SignedDuration,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab, LabOptions, Record, VirtOperator, check_tls,
    harness::{SharedLabs, Suite},
};

use crate::support::{NAMESPACE, TIMEOUT, condition, event_exists, kubevirts, operator_requests, program};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; fault_1_pods_that_never_load_their_new_certificate_are_reported_and_deleted_once);
}

/// The servers of the certificates of an installation: label of the pods, name, and port.
const SERVERS: [(&str, &str, u16); 2] = [
    ("kubevirt.io=virt-operator", "kubevirt-operator-webhook.kubevirt.svc", 8444),
    ("kubevirt.io=virt-api", "virt-api.kubevirt.svc", 8443),
];

async fn fault_1_pods_that_never_load_their_new_certificate_are_reported_and_deleted_once(
    _: Arc<SharedLabs>,
) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    let short = json!([{"op": "add", "path": "/spec/template/spec/containers/0/args/-",
        "value": "--certificate-reload-seconds=6"}]);
    let short: json_patch::Patch = serde_json::from_value(short)?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::<()>::Json(short)).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    lab.deploy_kubevirt(None).await?;
    // An installation is complete when one pod is ready.
    lab.wait("every pod of virt-api is ready", TIMEOUT, deployments, "virt-api", |deployment| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        status.is_some_and(|status| status.ready_replicas == Some(2))
    })
    .await?;
    clients_whose_clocks_are_a_minute_off_trust_the_servers(&lab).await?;
    let mut frozen = lab.freeze_volumes(NAMESPACE, "virt-api").await?;
    ensure!(frozen.len() == 2, "virt-api has the pods {frozen:?}");
    replace_ca(&lab).await?;

    let is_degraded = |kubevirt: Option<&kube::api::DynamicObject>| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, reason, message)| {
            status == "True" && reason == "CertificateRefused" && message.contains("virt-api serves a certificate")
        })
    };
    lab.wait("the pods are reported", TIMEOUT, kubevirts(&lab), "kubevirt", is_degraded).await?;
    event_exists(&lab, "CertificateRefused").await?;
    // The next pod is deleted when the new one is ready, not only when the old one is gone.
    lab.set_pods(|pods| pods.ready_after = Duration::from_secs(5).into());
    pods_are_replaced_one_at_a_time(&lab, &frozen).await?;
    event_exists(&lab, "PodDeleted").await?;
    let is_ready = |kubevirt: Option<&kube::api::DynamicObject>| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, _, message)| status == "False" && message == "All components are ready.")
    };
    lab.wait("the installation is ready again", TIMEOUT, kubevirts(&lab), "kubevirt", is_ready).await?;
    wait_for_metric(&lab).await?;

    // Another pod would be deleted after nine seconds at the latest. Probes are no requests.
    let seen = operator_requests(&lab)?.len();
    sleep(Duration::from_secs(12)).await;
    // An event that occurred several times is counted later.
    let is_silent =
        |record: &Record| ["leases", "events"].contains(&record.resource.as_str()) || record.verb == "watch";
    let requests: Vec<Record> =
        operator_requests(&lab)?.into_iter().skip(seen).filter(|record| !is_silent(record)).collect();
    ensure!(requests.is_empty(), "nothing changed, but the operator sent {requests:?}");
    let is_pod_deletion = |record: &Record| record.resource == "pods" && record.verb == "delete";
    let mut deleted: Vec<String> =
        operator_requests(&lab)?.into_iter().filter(is_pod_deletion).map(|record| record.name).collect();
    deleted.sort_unstable();
    frozen.sort_unstable();
    ensure!(deleted == frozen, "the operator deleted {deleted:?}, but {frozen:?} were frozen");
    lab.stop().await
}

/// The certificates were issued a few seconds ago, by the clock of the operator.
async fn clients_whose_clocks_are_a_minute_off_trust_the_servers(lab: &Lab) -> Result<()> {
    let cas: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let ca =
        cas.get("kubevirt-ca").await?.data.and_then(|mut data| data.remove("ca-bundle")).context("no CA bundle")?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    for (label, name, port) in SERVERS {
        let pods = pods.list(&ListParams::default().labels(label)).await?.items;
        ensure!(!pods.is_empty(), "no pod has the label {label}");
        for pod in pods {
            let address = pod.status.and_then(|status| status.pod_ip).context("a pod without address")?;
            let server = SocketAddr::new(address.parse()?, port);
            for seconds in [-60, 0, 60] {
                let result = check_tls(server, name, &ca, SignedDuration::from_secs(seconds)).await;
                result.with_context(|| format!("{name}, by a clock that is off by {seconds} s"))?;
            }
        }
    }
    Ok(())
}

async fn pods_are_replaced_one_at_a_time(lab: &Lab, old: &[String]) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let pods = pods.list(&ListParams::default().labels("kubevirt.io=virt-api")).await?;
        let is_ready = |pod: &&Pod| {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        let running = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        ensure!(running.filter(is_ready).count() >= 1, "no pod of virt-api is ready");
        if !pods.iter().any(|pod| old.contains(&pod.name_any())) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not all of {old:?} were replaced");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Replaces the CA without the overlap in which the old one is still trusted: while the operator does not run, its
/// Secret and its bundle are lost.
async fn replace_ca(lab: &Lab) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let scale = |replicas: u32| Patch::Merge(json!({"spec": {"replicas": replicas}}));
    deployments.patch("virt-operator", &PatchParams::default(), &scale(0)).await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    while !pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?.items.is_empty() {
        ensure!(Instant::now() < deadline, "the operator does not end");
        sleep(Duration::from_millis(100)).await;
    }
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    secrets.delete("kubevirt-ca", &DeleteParams::default()).await?;
    let bundles: Api<ConfigMap> = Api::namespaced(lab.client(), NAMESPACE);
    let empty = json!({"data": {"ca-bundle": ""}});
    bundles.patch("kubevirt-ca", &PatchParams::default(), &Patch::Merge(&empty)).await?;
    deployments.patch("virt-operator", &PatchParams::default(), &scale(2)).await?;
    Ok(())
}

/// The leader exports how long the served certificates are valid.
async fn wait_for_metric(lab: &Lab) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let pods = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
    let mut found = String::new();
    for pod in &pods {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/https:{}:8443/proxy/metrics", pod.name_any());
        found += &lab.client().request_text(http::Request::get(path).body(Vec::new())?).await?;
    }
    for served in ["true", "false"] {
        let name = "kubevirt_virt_operator_certificate_expiry_seconds";
        let series = format!("{name}{{secret=\"kubevirt-virt-api-certs\",served=\"{served}\"}} ");
        let seconds = found.lines().find_map(|line| line.strip_prefix(&series)?.parse::<i64>().ok());
        ensure!(seconds.is_some_and(|seconds| seconds > 0), "{series}is {seconds:?}");
    }
    Ok(())
}
