//! Pods that do not load a new certificate.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab, LabOptions, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{NAMESPACE, TIMEOUT, condition, event_exists, kubevirts, operator_requests, program};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; a_pod_that_never_loads_its_new_certificate_is_reported_and_deleted_once);
}

async fn a_pod_that_never_loads_its_new_certificate_is_reported_and_deleted_once(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    let short = json!([{"op": "add", "path": "/spec/template/spec/containers/0/args/-",
        "value": "--certificate-reload-seconds=6"}]);
    let short: json_patch::Patch = serde_json::from_value(short)?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::<()>::Json(short)).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    lab.deploy_kubevirt(None).await?;
    let before = api_pods(&lab).await?;
    let frozen = before.first().context("virt-api has no pods")?.clone();
    lab.freeze_volumes(NAMESPACE, &frozen).await?;
    replace_ca(&lab).await?;

    let is_degraded = |kubevirt: Option<&kube::api::DynamicObject>| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, reason, message)| {
            status == "True" && reason == "CertificateRefused" && message.contains(&format!("pod {frozen}"))
        })
    };
    lab.wait("the pod is reported", TIMEOUT, kubevirts(&lab), "kubevirt", is_degraded).await?;
    event_exists(&lab, "CertificateRefused").await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("the pod is deleted", TIMEOUT, pods, &frozen, |pod| pod.is_none()).await?;
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
    let is_silent = |record: &Record| record.resource == "leases" || record.verb == "watch";
    let requests: Vec<Record> =
        operator_requests(&lab)?.into_iter().skip(seen).filter(|record| !is_silent(record)).collect();
    ensure!(requests.is_empty(), "nothing changed, but the operator sent {requests:?}");
    let is_pod_deletion = |record: &Record| record.resource == "pods" && record.verb == "delete";
    let deleted: Vec<String> =
        operator_requests(&lab)?.into_iter().filter(is_pod_deletion).map(|record| record.name).collect();
    ensure!(deleted == [frozen.clone()], "the operator deleted {deleted:?}, but {frozen} is the frozen pod");
    let after = api_pods(&lab).await?;
    ensure!(before.iter().skip(1).all(|pod| after.contains(pod)), "{before:?} became {after:?}");
    lab.stop().await
}

async fn api_pods(lab: &Lab) -> Result<Vec<String>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let pods = pods.list(&ListParams::default().labels("kubevirt.io=virt-api")).await?;
    Ok(pods.iter().map(ResourceExt::name_any).collect())
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
