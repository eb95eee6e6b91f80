//! What the tests share: our program, its requests, and when an installation has come to rest.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, DynamicObject, ListParams};
use kube::{Api, ResourceExt};
use lab::{Lab, Record, kubevirt_resource};
use serde_json::Value;

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

/// Deletes the operator's pods, and returns when another one leads and all of the new ones are ready.
pub(crate) async fn replace_operator(lab: &Lab) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    let holder = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
    let before = holder(&leases.get("virt-operator").await?);
    ensure!(!before.is_empty(), "nobody leads");
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let old = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
    for pod in old {
        pods.delete(&pod.name_any(), &DeleteParams::default()).await?;
    }
    lab.wait("another leader", PATIENCE, leases, "virt-operator", |lease| {
        lease.is_some_and(|lease| !holder(lease).is_empty() && holder(lease) != before)
    })
    .await?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("new pods that are ready", PATIENCE, deployments, "virt-operator", |deployment| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        status.is_some_and(|status| status.ready_replicas == Some(2) && status.unavailable_replicas.is_none())
    })
    .await
    .map(|_| ())
}
