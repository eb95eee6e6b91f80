//! Objects that are stored in a version which the CRD of the release does not have.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::Pod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab, LabOptions, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    rehearsal::plan,
    support::{
        NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirts, operator_requests, program, wait_until_available,
    },
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; objects_of_a_version_that_is_dropped_are_stored_again);
}

const GROUP: &str = "instancetype.kubevirt.io";
const PLURAL: &str = "virtualmachineinstancetypes";
const OLD: &str = "v1alpha0";
const PRESENT: &str = "v1beta1";
const OBJECTS: [&str; 3] = ["one", "two", "three"];

fn crds(lab: &Lab) -> Api<CustomResourceDefinition> {
    Api::all(lab.client())
}

fn crd_name() -> String {
    format!("{PLURAL}.{GROUP}")
}

fn instancetypes(lab: &Lab, version: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(GROUP, version, "VirtualMachineInstancetype");
    Api::namespaced_with(lab.client(), "default", &ApiResource::from_gvk_with_plural(&kind, PLURAL))
}

async fn scale_operator(lab: &Lab, replicas: i32) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let patch = json!({"spec": {"replicas": replicas}});
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::Merge(&patch)).await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    while replicas == 0
        && !pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?.items.is_empty()
    {
        ensure!(Instant::now() < deadline, "the operator does not stop");
        // The names of the pods are not known, so this polls the list.
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// Adds the old version to the CRD, or makes the other one the stored version.
async fn store_in(lab: &Lab, version: &str) -> Result<()> {
    let mut crd = crds(lab).get(&crd_name()).await?;
    if !crd.spec.versions.iter().any(|existing| existing.name == OLD) {
        let mut old = crd.spec.versions.first().context("the CRD has no version")?.clone();
        OLD.clone_into(&mut old.name);
        crd.spec.versions.push(old);
    }
    for existing in &mut crd.spec.versions {
        existing.storage = existing.name == version;
    }
    crds(lab).replace(&crd_name(), &PostParams::default(), &crd).await?;
    Ok(())
}

fn stored_versions(crd: &CustomResourceDefinition) -> Vec<String> {
    crd.status.as_ref().and_then(|status| status.stored_versions.clone()).unwrap_or_default()
}

async fn objects_of_a_version_that_is_dropped_are_stored_again(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    scale_operator(&lab, 0).await?;
    store_in(&lab, OLD).await?;
    create_objects(&lab).await?;
    store_in(&lab, PRESENT).await?;
    let stored = stored_versions(&crds(&lab).get(&crd_name()).await?);
    ensure!(stored.contains(&OLD.to_owned()) && stored.contains(&PRESENT.to_owned()), "{stored:?}");
    let planned = plan(&lab, &json!({}), &[]).await?;
    let preparations = planned.object["rollout"]["preparations"].to_string();
    let expected = [crd_name(), "3 objects are stored again in version v1beta1".to_owned(), OLD.to_owned()];
    ensure!(expected.iter().all(|expected| preparations.contains(expected)), "{preparations}");
    ensure!(planned.code == 0, "{}", planned.object["rollout"]);
    let before = operator_requests(&lab)?.len();
    scale_operator(&lab, 2).await?;
    lab.wait("the version is dropped", TIMEOUT, crds(&lab), &crd_name(), |crd| {
        crd.is_some_and(|crd| stored_versions(crd) == [PRESENT] && !crd.spec.versions.iter().any(|it| it.name == OLD))
    })
    .await?;
    wait_until_available(&lab).await?;
    // The API server cannot read an object of a version that the CRD does not have.
    for name in OBJECTS {
        let object = instancetypes(&lab, PRESENT).get(name).await.with_context(|| format!("reading {name}"))?;
        ensure!(object.data["spec"]["cpu"]["guest"] == json!(1), "{:?}", object.data);
    }
    the_order_was_objects_status_crd(&lab, before)?;
    a_refused_upgrade_continues_when_the_crd_is_corrected(&lab).await.context("a refused upgrade")?;
    lab.stop().await
}

/// The stored version would be lost, and the operator cannot store objects in another one.
async fn a_refused_upgrade_continues_when_the_crd_is_corrected(lab: &Lab) -> Result<()> {
    scale_operator(lab, 0).await?;
    store_in(lab, OLD).await?;
    scale_operator(lab, 2).await?;
    let refused = format!("CustomResourceDefinition {} has objects that are stored in version {OLD}", crd_name());
    lab.wait("the upgrade is refused", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, _, message)| status == "True" && message.contains(&refused))
    })
    .await?;
    // An upgrade that fails again and again is tried rarely. One that waits for a user is not.
    sleep(Duration::from_secs(3)).await;
    let corrected = Instant::now();
    store_in(lab, PRESENT).await?;
    wait_until_available(lab).await?;
    ensure!(corrected.elapsed() < Duration::from_secs(10), "it took {:?}", corrected.elapsed());
    Ok(())
}

async fn create_objects(lab: &Lab) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    for name in OBJECTS {
        let object: Value = json!({
            "apiVersion": format!("{GROUP}/{OLD}"), "kind": "VirtualMachineInstancetype", "metadata": {"name": name},
            "spec": {"cpu": {"guest": 1}, "memory": {"guest": "128Mi"}},
        });
        let object: DynamicObject = serde_json::from_value(object)?;
        while let Err(error) = instancetypes(lab, OLD).create(&PostParams::default(), &object).await {
            ensure!(Instant::now() < deadline, "{name} cannot be created: {error}");
            // No watch shows when the API server serves a new version, so this polls.
            sleep(Duration::from_millis(200)).await;
        }
    }
    Ok(())
}

fn the_order_was_objects_status_crd(lab: &Lab, before: usize) -> Result<()> {
    let requests: Vec<_> = operator_requests(lab)?.into_iter().skip(before).collect();
    let accepted = |resource: &str, name: &str, subresource: &str| {
        requests.iter().position(|record| {
            record.verb == "patch"
                && record.code.is_some_and(|code| code < 300)
                && (record.resource.as_str(), record.name.as_str(), record.subresource.as_str())
                    == (resource, name, subresource)
        })
    };
    let objects = OBJECTS.map(|name| accepted(PLURAL, name, ""));
    let status = accepted("customresourcedefinitions", &crd_name(), "status");
    let crd = accepted("customresourcedefinitions", &crd_name(), "");
    let last = objects.iter().max().copied().flatten();
    ensure!(objects.iter().all(Option::is_some) && last < status && status < crd, "{objects:?} {status:?} {crd:?}");
    Ok(())
}
