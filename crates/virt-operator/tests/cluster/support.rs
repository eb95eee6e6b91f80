//! What the tests share: the program, its requests, and how to wait for an installation that is ready.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod, discovery::v1::EndpointSlice, events::v1::Event};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{Lab, Record, VIRT_OPERATOR_USER, kubevirt_resource};

pub(crate) const NAMESPACE: &str = "kubevirt";
/// How long a test waits for a condition.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_virt-operator"))
}

pub(crate) fn kubevirts(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), NAMESPACE, &kubevirt_resource("KubeVirt"))
}

pub(crate) fn kubevirt(spec: &Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": spec,
    })
}

pub(crate) async fn create_kubevirt(lab: &Lab, spec: &Value) -> Result<()> {
    let kubevirt = serde_json::from_value(kubevirt(spec))?;
    kubevirts(lab).create(&PostParams::default(), &kubevirt).await.context("creating the KubeVirt resource")?;
    Ok(())
}

/// The string at this JSON pointer, or an empty one.
pub(crate) fn text(object: &DynamicObject, pointer: &str) -> String {
    object.data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// Status, reason and message of a condition of the KubeVirt resource.
pub(crate) fn condition(kubevirt: &DynamicObject, kind: &str) -> Option<(String, String, String)> {
    let conditions = kubevirt.data.pointer("/status/conditions")?.as_array()?;
    let found = conditions.iter().find(|condition| condition["type"] == kind)?;
    let part = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
    Some((part("status"), part("reason"), part("message")))
}

/// Every request that the operator has sent so far.
pub(crate) fn operator_requests(lab: &Lab) -> Result<Vec<Record>> {
    let all = lab.audit()?;
    Ok(all.into_iter().filter(|record| record.user == VIRT_OPERATOR_USER).collect())
}

/// Successful writes to the installation. Failed ones do not count: for an object that has lost its label the operator
/// first tries to create it, and the API server rejects that.
pub(crate) fn writes_since(lab: &Lab, seen: usize) -> Result<Vec<Record>> {
    let unrelated = |record: &Record| ["leases", "events"].contains(&record.resource.as_str());
    let status = |record: &Record| record.resource == "kubevirts" && record.subresource == "status";
    Ok(operator_requests(lab)?
        .into_iter()
        .skip(seen)
        .filter(|record| record.is_write() && record.code.is_some_and(|code| code < 300))
        .filter(|record| !unrelated(record) && !status(record))
        .collect())
}

/// Waits until the KubeVirt resource is available in its present generation.
pub(crate) async fn wait_until_available(lab: &Lab) -> Result<()> {
    lab.wait("KubeVirt is available", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        kubevirt.is_some_and(is_available)
    })
    .await
    .map(|_| ())
}

/// Waits until this release is deployed, in the present generation of the KubeVirt resource.
pub(crate) async fn wait_until_release(lab: &Lab, version: &str, timeout: Duration) -> Result<()> {
    lab.wait(&format!("{version} is deployed"), timeout, kubevirts(lab), "kubevirt", |kubevirt| {
        kubevirt.is_some_and(|kubevirt| {
            is_available(kubevirt)
                && text(kubevirt, "/status/phase") == "Deployed"
                && text(kubevirt, "/status/observedKubeVirtVersion") == version
                && text(kubevirt, "/status/targetKubeVirtVersion") == version
        })
    })
    .await
    .map(|_| ())
}

/// Whether the KubeVirt resource is available in its present generation.
pub(crate) fn is_available(kubevirt: &DynamicObject) -> bool {
    let observed = kubevirt.data.pointer("/status/observedGeneration").and_then(Value::as_i64);
    let available = condition(kubevirt, "Available").is_some_and(|(status, ..)| status == "True");
    observed == kubevirt.metadata.generation && available
}

/// Changes an annotation of the KubeVirt resource several times. The desired state stays the same.
pub(crate) async fn touch_kubevirt(kubevirts: &Api<DynamicObject>, times: usize) -> Result<()> {
    for round in 0..times {
        let touch = json!({"metadata": {"annotations": {"example.com/touched": round.to_string()}}});
        kubevirts.patch("kubevirt", &PatchParams::default(), &Patch::Merge(touch)).await?;
    }
    Ok(())
}

/// Deletes the operator's pods, and returns when one of the new pods leads and the API server reaches all of them.
pub(crate) async fn replace_operator(lab: &Lab) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    let holder = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
    ensure!(!holder(&leases.get("virt-operator").await?).is_empty(), "no pod leads");
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
    // Another old pod may become the leader shortly before it ends.
    lab.wait("a new pod leads", TIMEOUT, leases, "virt-operator", |lease| {
        let holder = lease.map(holder).unwrap_or_default();
        !holder.is_empty() && !old.iter().any(|pod| holder.starts_with(pod.as_str()))
    })
    .await?;
    wait_until_webhooks_respond(lab, &old).await
}

/// Waits until the webhooks of the new pods respond to the API server.
///
/// The status of the Deployment may be older than the deletion of the pods. Therefore this checks the EndpointSlices,
/// which name the pods, and sends a dry-run change, which fails until the API server reaches the new endpoints.
async fn wait_until_webhooks_respond(lab: &Lab, old: &[String]) -> Result<()> {
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), NAMESPACE);
    let webhooks = ListParams::default().labels("kubernetes.io/service-name=kubevirt-operator-webhook");
    let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
    let touch = json!({"metadata": {"annotations": {"example.com/rehearsed": "true"}}});
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let endpoints = slices.list(&webhooks).await?.items.into_iter().flat_map(|slice| slice.endpoints);
        let ready: BTreeSet<String> = endpoints
            .filter(|endpoint| endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true)))
            .filter_map(|endpoint| endpoint.target_ref.and_then(|target| target.name))
            .collect();
        let result = if ready.len() == old.len() && !old.iter().any(|pod| ready.contains(pod)) {
            kubevirts(lab).patch("kubevirt", &dry_run, &Patch::Merge(&touch)).await.map(|_| ()).map_err(Into::into)
        } else {
            Err(anyhow!("ready pods: {ready:?}"))
        };
        match result {
            Ok(()) => return Ok(()),
            Err(error) => ensure!(Instant::now() < deadline, "the new pods do not respond: {error:#}"),
        }
        // No watch reports when the API server reaches a webhook, so this polls.
        sleep(Duration::from_millis(100)).await;
    }
}

/// Waits for an event with this reason.
pub(crate) async fn event_exists(lab: &Lab, reason: &str) -> Result<()> {
    let events: Api<Event> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let found = events.list(&ListParams::default()).await?;
        if found.iter().any(|event| event.reason.as_deref() == Some(reason)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no event with the reason {reason}");
        // The name of the event is not known, so this polls the list.
        sleep(Duration::from_millis(200)).await;
    }
}
