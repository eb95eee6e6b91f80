//! One installation through its life: a resource that is wrong, then right, customized, tampered with, and left alone.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Lab, LabOptions, Record, VirtOperator};

use crate::world::{NAMESPACE, PATIENCE, condition, kubevirts, operator_requests, program, replace_operator, settled};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("an_installation_through_its_life", |_| async move {
        let lab = Lab::start(LabOptions::default()).await?;
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.wait_for_virt_operator(PATIENCE).await?;
        a_wrong_first_resource_can_be_deleted(&lab).await?;
        a_wrong_first_resource_is_told_and_nothing_is_made(&lab).await?;
        edit(&lab, &variant("customize")?).await?;
        settled(&lab).await.context("the mended resource")?;
        what_is_wrong_is_refused(&lab).await?;
        drift_is_repaired(&lab).await?;
        a_settled_installation_is_left_alone(&lab).await?;
        edit(&lab, &variant("combined")?).await?;
        settled(&lab).await.context("the seed's resource")?;
        advice_is_given(&lab).await?;
        lab.stop().await
    });
}

fn kubevirt(spec: &Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": spec,
    })
}

fn patched(kind: &str, patch: &str) -> Value {
    json!({"customizeComponents": {"patches": [
        {"resourceType": "Deployment", "resourceName": "virt-api", "type": kind, "patch": patch},
    ]}})
}

fn variant(name: &str) -> Result<Value> {
    let path = format!("{}/../install/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let kubevirt: Value = serde_saphyr::from_str(&std::fs::read_to_string(path)?)?;
    Ok(kubevirt["spec"].clone())
}

/// The whole specification, not merged into the one before.
async fn edit(lab: &Lab, spec: &Value) -> Result<DynamicObject> {
    let patch: json_patch::Patch = serde_json::from_value(json!([{"op": "replace", "path": "/spec", "value": spec}]))?;
    let edited = kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::<()>::Json(patch)).await;
    edited.context("editing the KubeVirt resource")
}

async fn create(lab: &Lab, spec: &Value) -> Result<()> {
    let kubevirt = serde_json::from_value(kubevirt(spec))?;
    kubevirts(lab).create(&PostParams::default(), &kubevirt).await.context("creating the KubeVirt resource")?;
    Ok(())
}

/// Until something is installed there is no webhook, and whatever the schema allows can be stored.
async fn a_wrong_first_resource_can_be_deleted(lab: &Lab) -> Result<()> {
    create(lab, &json!({"infra": {"replicas": 0}})).await?;
    is_told(lab, "spec.infra.replicas").await?;
    kubevirts(lab).delete("kubevirt", &DeleteParams::default()).await?;
    lab.wait("a resource that goes as it came", PATIENCE, kubevirts(lab), "kubevirt", |kubevirt| kubevirt.is_none())
        .await?;
    Ok(())
}

async fn a_wrong_first_resource_is_told_and_nothing_is_made(lab: &Lab) -> Result<()> {
    let misfit = json!([{"op": "remove", "path": "/spec/nothing/here"}]).to_string();
    create(lab, &patched("json", &misfit)).await?;
    is_told(lab, "patches[0] does not apply").await?;
    let certificates = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    for (spec, says) in [
        (patched("json", "{"), "spec.customizeComponents.patches[0]: invalid patch: not JSON"),
        (patched("odd", "{}"), "spec.customizeComponents.patches[0]: type: unsupported value"),
        (certificates(json!({"ca": {"duration": "1h", "renewBefore": "2h"}})), "selfSigned.ca.renewBefore"),
        (
            certificates(json!({"server": {"duration": "a day"}})),
            "selfSigned.server.duration: invalid value \"a day\": must be a duration",
        ),
        (json!({"infra": {"replicas": 300}}), "spec.infra.replicas: invalid value 300: must be"),
        (json!({"infra": {"replicas": 0}, "imageTag": "v1.8.4-other"}), "spec.infra.replicas: invalid value 0"),
        (json!({"imageRegistry": "not a registry!!"}), "spec.imageRegistry"),
        (json!({"imageTag": "not a tag"}), "spec.imageTag"),
    ] {
        edit(lab, &spec).await?;
        is_told(lab, says).await?;
    }
    let own = ["kubevirts", "leases", "events"];
    let made = writes_since(lab, 0)?.into_iter().filter(|record| !own.contains(&record.resource.as_str()));
    let made: Vec<Record> = made.collect();
    ensure!(made.is_empty(), "nothing can be installed, and it made {made:?}");
    Ok(())
}

async fn is_told(lab: &Lab, says: &str) -> Result<()> {
    let told = |kubevirt: Option<&DynamicObject>| {
        let told = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        told.is_some_and(|(status, reason, message)| {
            status == "True" && reason == "DeploymentFailed" && message.contains(says)
        })
    };
    let what = format!("a condition that says {says:?}");
    lab.wait(&what, PATIENCE, kubevirts(lab), "kubevirt", told).await?;
    Ok(())
}

async fn what_is_wrong_is_refused(lab: &Lab) -> Result<()> {
    let certificates = |ca: Value| json!({"certificateRotateStrategy": {"selfSigned": {"ca": ca}}});
    for (what, spec, says) in [
        ("a patch that is no JSON", patched("json", "{"), "patches[0]"),
        ("a patch of no known type", patched("odd", "{}"), "odd"),
        ("a renewal before the beginning", certificates(json!({"duration": "1h", "renewBefore": "2h"})), "renewBefore"),
        ("no replicas", json!({"infra": {"replicas": 0}}), "replicas"),
        ("a registry that is none", json!({"imageRegistry": "not a registry"}), "imageRegistry"),
    ] {
        match edit(lab, &spec).await {
            Ok(_) => bail!("{what} was accepted"),
            Err(error) => ensure!(format!("{error:#}").contains(says), "{what}: {error:#}"),
        }
    }
    let mut second = kubevirt(&json!({}));
    second["metadata"]["name"] = json!("second");
    let Err(error) = kubevirts(lab).create(&PostParams::default(), &serde_json::from_value(second)?).await else {
        bail!("a second KubeVirt was accepted");
    };
    ensure!(error.to_string().contains("kubevirt/kubevirt"), "the first one is not named: {error}");
    settled(lab).await
}

/// Each as somebody might do it by hand; each is put back by one write.
async fn drift_is_repaired(lab: &Lab) -> Result<()> {
    settled(lab).await?;
    repaired::<Deployment>(lab, "virt-controller", &json!({"spec": {"replicas": 5}})).await?;
    repaired::<DaemonSet>(lab, "virt-handler", &json!({"spec": {"minReadySeconds": 7}})).await?;
    repaired::<Service>(lab, "virt-api", &json!({"spec": {"selector": {"added": "by-hand"}}})).await?;
    repaired::<ServiceAccount>(lab, "kubevirt-apiserver", &json!({"metadata": {"labels": {MANAGED_BY: null}}})).await?;
    // What a patch expects is compared byte by byte.
    repaired::<ConfigMap>(lab, "kubevirt-ca", &json!({"data": {"more": "# R&D <ca@example.com>\n"}})).await?;
    repaired::<Secret>(lab, "kubevirt-virt-api-certs", &json!({"data": {"tls.key": "eA=="}})).await?;
    repaired_cluster::<ClusterRole>(lab, "kubevirt-handler", &json!({"rules": []})).await?;
    let group = json!({"spec": {"names": {"shortNames": ["byhand"]}}});
    repaired_cluster::<CustomResourceDefinition>(lab, "virtualmachines.kubevirt.io", &group).await?;
    let webhook = json!({"metadata": {"labels": {"app.kubernetes.io/component": "else"}}});
    repaired_cluster::<ValidatingWebhookConfiguration>(lab, "virt-api-validator", &webhook).await?;
    deleted::<Deployment>(lab, "virt-controller").await?;
    deleted::<Service>(lab, "virt-api").await
}

const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

async fn repaired<K>(lab: &Lab, name: &str, change: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope> + Kind,
{
    repair(lab, Api::<K>::namespaced(lab.client(), NAMESPACE), name, change).await
}

async fn repaired_cluster<K>(lab: &Lab, name: &str, change: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope> + Kind,
{
    repair(lab, Api::<K>::all(lab.client()), name, change).await
}

/// What is needed of a kind to wait for it.
trait Kind: Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize + Send + Sync + 'static {}
impl<K: Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize + Send + Sync + 'static> Kind for K {}

async fn repair<K: Resource<DynamicType = ()> + Kind>(
    lab: &Lab,
    api: Api<K>,
    name: &str,
    change: &Value,
) -> Result<()> {
    let what = format!("{} {name}", K::kind(&()));
    let before = content(&api.get(name).await.with_context(|| what.clone())?)?;
    let seen = operator_requests(lab)?.len();
    let spoilt = api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.with_context(|| what.clone())?;
    ensure!(content(&spoilt)? != before, "{what} was not changed by {change}");
    // A key that does not fit its certificate is replaced by another; everything else comes back as it was.
    let is_secret = K::kind(&()) == "Secret";
    lab.wait(&format!("{what} as it was"), PATIENCE, api, name, |object| {
        object
            .and_then(|object| content(object).ok())
            .is_some_and(|now| now == before || is_secret && now["data"]["tls.key"] != json!("eA=="))
    })
    .await?;
    settled(lab).await?;
    let writes = writes_since(lab, seen)?;
    let own = writes.iter().filter(|record| record.name == name).count();
    ensure!(own == 1, "{what} took {own} writes: {writes:?}");
    Ok(())
}

async fn deleted<K>(lab: &Lab, name: &str) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope> + Kind,
{
    let api = Api::<K>::namespaced(lab.client(), NAMESPACE);
    let before = api.get(name).await?;
    api.delete(name, &DeleteParams::background()).await?;
    lab.wait(&format!("{} {name} again", K::kind(&())), PATIENCE, api, name, |object| {
        object.is_some_and(|object| object.uid() != before.uid())
    })
    .await?;
    settled(lab).await
}

/// What is ours of an object: not what the server counts.
fn content<K: serde::Serialize>(object: &K) -> Result<Value> {
    let mut object = serde_json::to_value(object)?;
    let labels = object["metadata"]["labels"].take();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
        fields.insert("metadata".to_owned(), labels);
    }
    Ok(object)
}

/// Those that changed something: an object that has lost its label is asked for by name, and that is refused first.
fn writes_since(lab: &Lab, seen: usize) -> Result<Vec<Record>> {
    let aside = |record: &Record| ["leases", "events"].contains(&record.resource.as_str());
    let status = |record: &Record| record.resource == "kubevirts" && record.subresource == "status";
    Ok(operator_requests(lab)?
        .into_iter()
        .skip(seen)
        .filter(|record| record.is_write() && record.code.is_some_and(|code| code < 300))
        .filter(|record| !aside(record) && !status(record))
        .collect())
}

/// Json patches of customizeComponents are in it: each was applied once.
async fn a_settled_installation_is_left_alone(lab: &Lab) -> Result<()> {
    settled(lab).await?;
    let seen = operator_requests(lab)?.len();
    for round in 0..20 {
        let touch = json!({"metadata": {"annotations": {"example.com/touched": round.to_string()}}});
        kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(touch)).await?;
    }
    replace_operator(lab).await?;
    settled(lab).await?;
    let writes: BTreeMap<String, usize> =
        writes_since(lab, seen)?.into_iter().fold(BTreeMap::new(), |mut all, record| {
            *all.entry(format!("{} {} {}", record.verb, record.resource, record.name)).or_default() += 1;
            all
        });
    ensure!(writes.is_empty(), "nothing had changed, and it wrote {writes:?}");
    Ok(())
}

async fn advice_is_given(lab: &Lab) -> Result<()> {
    let events: Api<Event> = Api::namespaced(lab.client(), NAMESPACE);
    for about in ["LiveMigration", "NUMA", "permitSlirpInterface"] {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let told = events.list(&Default::default()).await?.items.into_iter().filter_map(|event| event.note);
            if told.into_iter().any(|note| note.contains(about)) {
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "nobody was told about {about}");
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    }
    Ok(())
}
