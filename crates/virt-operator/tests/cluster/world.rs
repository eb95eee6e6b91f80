//! What the tests share: our program, its requests, and when an installation has come to rest.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use vitivirt_lab::{Lab, Record, kubevirt_resource};

pub(crate) const NAMESPACE: &str = "kubevirt";
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_virt-operator"))
}

pub(crate) fn kubevirts(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), NAMESPACE, &kubevirt_resource("KubeVirt"))
}

pub(crate) fn text(object: &DynamicObject, pointer: &str) -> String {
    object.data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// A condition of the KubeVirt resource, as its status and reason.
pub(crate) fn condition(kubevirt: &DynamicObject, kind: &str) -> Option<(String, String, String)> {
    let conditions = kubevirt.data.pointer("/status/conditions")?.as_array()?;
    let found = conditions.iter().find(|condition| condition["type"] == kind)?;
    let part = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
    Some((part("status"), part("reason"), part("message")))
}

/// Every request of the operator so far.
pub(crate) fn operator_requests(lab: &Lab) -> Result<Vec<Record>> {
    let all = lab.audit()?;
    Ok(all.into_iter().filter(|record| record.user.ends_with(":kubevirt:kubevirt-operator")).collect())
}

/// The resource says that all is ready, for the generation it has.
pub(crate) async fn settled(lab: &Lab) -> Result<()> {
    lab.wait("an installation that is ready", PATIENCE, kubevirts(lab), "kubevirt", |kubevirt| {
        kubevirt.is_some_and(|kubevirt| {
            let observed = kubevirt.data.pointer("/status/observedGeneration").and_then(Value::as_i64);
            let ready = condition(kubevirt, "Available").is_some_and(|(status, ..)| status == "True");
            observed == kubevirt.metadata.generation && ready
        })
    })
    .await
    .map(|_| ())
}

/// Deletes the operator's pods, and returns when one of the new ones leads and all of them answer the API server.
pub(crate) async fn replace_operator(lab: &Lab) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    let holder = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
    ensure!(!holder(&leases.get("virt-operator").await?).is_empty(), "nobody leads");
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let old: Vec<String> = pods
        .list(&ListParams::default().labels("kubevirt.io=virt-operator"))
        .await?
        .into_iter()
        .map(|pod| pod.name_any())
        .collect();
    for pod in &old {
        pods.delete(pod, &DeleteParams::default()).await?;
    }
    // Another of the old ones may lead for a moment before it ends as well.
    lab.wait("another leader", PATIENCE, leases, "virt-operator", |lease| {
        let holder = lease.map(holder).unwrap_or_default();
        !holder.is_empty() && !old.iter().any(|pod| holder.starts_with(pod.as_str()))
    })
    .await?;
    new_pods_answer(lab, &old).await
}

/// What a Deployment counts is older than what was just deleted: the endpoints name the pods, and a rehearsed change
/// tells that the API server has heard of them too.
async fn new_pods_answer(lab: &Lab, old: &[String]) -> Result<()> {
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), NAMESPACE);
    let webhooks = ListParams::default().labels("kubernetes.io/service-name=kubevirt-operator-webhook");
    let rehearsal = PatchParams { dry_run: true, ..PatchParams::default() };
    let touch = json!({"metadata": {"annotations": {"example.com/rehearsed": "true"}}});
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let endpoints = slices.list(&webhooks).await?.items.into_iter().flat_map(|slice| slice.endpoints);
        let ready: BTreeSet<String> = endpoints
            .filter(|endpoint| endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true)))
            .filter_map(|endpoint| endpoint.target_ref.and_then(|target| target.name))
            .collect();
        let answer = if ready.len() == old.len() && !old.iter().any(|pod| ready.contains(pod)) {
            kubevirts(lab).patch("kubevirt", &rehearsal, &Patch::Merge(&touch)).await.map(|_| ()).map_err(Into::into)
        } else {
            Err(anyhow!("ready are {ready:?}"))
        };
        match answer {
            Ok(()) => return Ok(()),
            Err(error) => ensure!(tokio::time::Instant::now() < deadline, "the new pods do not answer: {error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
