//! One installation through its lifetime: an invalid resource, then a valid one, customized, tampered with, and
//! unchanged.

use std::{collections::BTreeMap, fmt::Debug, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope,
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        apps::v1::{DaemonSet, Deployment},
        batch::v1::Job,
        core::v1::{ConfigMap, Secret, Service, ServiceAccount},
        events::v1::Event,
        rbac::v1::ClusterRole,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use vitivirt_lab::{
    Lab, LabOptions, PodFate, PodRule, Record, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{
    NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirt, kubevirts, operator_requests, program, replace_operator,
    touch_kubevirt, wait_until_available, writes_since,
};

pub(crate) fn add(suite: &mut Suite) {
    suite.test(
        "an_installation_is_created_customized_repaired_and_then_left_unchanged",
        an_installation_is_created_customized_repaired_and_then_left_unchanged,
    );
}

/// One test with many steps, because every step needs the installation of the step before it.
async fn an_installation_is_created_customized_repaired_and_then_left_unchanged(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    an_invalid_first_resource_can_be_deleted(&lab).await?;
    a_first_resource_with_a_mistyped_image_tag_can_be_deleted(&lab).await?;
    an_invalid_first_resource_is_reported_and_nothing_is_created(&lab).await?;
    replace_spec(&lab, &variant_spec("customize")?).await?;
    wait_until_available(&lab).await.context("after the resource was corrected")?;
    invalid_changes_are_denied(&lab).await?;
    drift_is_repaired(&lab).await?;
    an_unchanged_installation_causes_no_writes(&lab).await?;
    replace_spec(&lab, &variant_spec("combined")?).await?;
    wait_until_available(&lab).await.context("with questionable settings")?;
    questionable_settings_are_reported_as_events(&lab).await?;
    lab.stop().await
}

pub(crate) fn spec_with_patch(kind: &str, patch: &str) -> Value {
    json!({"customizeComponents": {"patches": [
        {"resourceType": "Deployment", "resourceName": "virt-api", "type": kind, "patch": patch},
    ]}})
}

/// The spec of one of the resources that the tests of the install crate use.
pub(crate) fn variant_spec(name: &str) -> Result<Value> {
    let path = format!("{}/../install/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let kubevirt: Value = serde_saphyr::from_str(&std::fs::read_to_string(path)?)?;
    Ok(kubevirt["spec"].clone())
}

/// Replaces the whole spec; nothing is merged.
pub(crate) async fn replace_spec(lab: &Lab, spec: &Value) -> Result<DynamicObject> {
    let patch: json_patch::Patch = serde_json::from_value(json!([{"op": "replace", "path": "/spec", "value": spec}]))?;
    let replaced = kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::<()>::Json(patch)).await;
    replaced.context("editing the KubeVirt resource")
}

/// Before the first installation there is no webhook, so the API server stores every resource that the schema allows.
async fn an_invalid_first_resource_can_be_deleted(lab: &Lab) -> Result<()> {
    create_kubevirt(lab, &json!({"infra": {"replicas": 0}})).await?;
    wait_until_degraded(lab, "spec.infra.replicas").await?;
    kubevirts(lab).delete("kubevirt", &DeleteParams::default()).await?;
    lab.wait("KubeVirt is deleted", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| kubevirt.is_none()).await?;
    Ok(())
}

/// The Job that asks another release for its strategy never ends, because the image does not exist.
async fn a_first_resource_with_a_mistyped_image_tag_can_be_deleted(lab: &Lab) -> Result<()> {
    let never = PodRule { image_contains: ":v9.9.9".to_owned(), fate: PodFate::NeverReady };
    lab.set_pods(|pods| pods.rules.push(never));
    let jobs: Api<Job> = Api::namespaced(lab.client(), NAMESPACE);
    create_kubevirt(lab, &json!({"imageTag": "v9.9.9"})).await?;
    let deadline = Instant::now() + TIMEOUT;
    let name = loop {
        if let Some(job) = jobs.list(&Default::default()).await?.items.first() {
            break job.name_any();
        }
        ensure!(Instant::now() < deadline, "no Job asks for the install strategy");
        // The name of the Job is not known, so this polls the list.
        sleep(Duration::from_millis(100)).await;
    };
    kubevirts(lab).delete("kubevirt", &DeleteParams::default()).await?;
    lab.wait("KubeVirt is deleted", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| kubevirt.is_none()).await?;
    lab.wait("the Job is deleted", TIMEOUT, jobs, &name, |job| job.is_none()).await?;
    Ok(())
}

async fn an_invalid_first_resource_is_reported_and_nothing_is_created(lab: &Lab) -> Result<()> {
    let seen = operator_requests(lab)?.len();
    let unmatched = json!([{"op": "remove", "path": "/spec/nothing/here"}]).to_string();
    create_kubevirt(lab, &spec_with_patch("json", &unmatched)).await?;
    wait_until_degraded(lab, "patches[0] does not apply").await?;
    let certificates = |settings: Value| json!({"certificateRotateStrategy": {"selfSigned": settings}});
    for (spec, expected) in [
        (spec_with_patch("json", "{"), "spec.customizeComponents.patches[0]: invalid patch: not JSON"),
        (spec_with_patch("odd", "{}"), "spec.customizeComponents.patches[0]: type: unsupported value"),
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
        replace_spec(lab, &spec).await?;
        wait_until_degraded(lab, expected).await?;
    }
    let unrelated = ["kubevirts", "leases", "events"];
    let writes = writes_since(lab, seen)?.into_iter().filter(|record| !unrelated.contains(&record.resource.as_str()));
    let writes: Vec<Record> = writes.collect();
    ensure!(writes.is_empty(), "nothing can be installed, but the operator wrote {writes:?}");
    Ok(())
}

/// Waits until the condition Degraded is true and its message contains `expected`.
async fn wait_until_degraded(lab: &Lab, expected: &str) -> Result<()> {
    let is_degraded = |kubevirt: Option<&DynamicObject>| {
        let degraded = kubevirt.and_then(|kubevirt| condition(kubevirt, "Degraded"));
        degraded.is_some_and(|(status, reason, message)| {
            status == "True" && reason == "DeploymentFailed" && message.contains(expected)
        })
    };
    let what = format!("condition Degraded contains {expected:?}");
    lab.wait(&what, TIMEOUT, kubevirts(lab), "kubevirt", is_degraded).await?;
    Ok(())
}

async fn invalid_changes_are_denied(lab: &Lab) -> Result<()> {
    let certificates = |ca: Value| json!({"certificateRotateStrategy": {"selfSigned": {"ca": ca}}});
    for (what, spec, expected) in [
        ("a patch that is not JSON", spec_with_patch("json", "{"), "patches[0]"),
        ("a patch of an unsupported type", spec_with_patch("odd", "{}"), "odd"),
        ("a renewal before the issue", certificates(json!({"duration": "1h", "renewBefore": "2h"})), "renewBefore"),
        ("zero replicas", json!({"infra": {"replicas": 0}}), "replicas"),
        ("an invalid registry", json!({"imageRegistry": "not a registry"}), "imageRegistry"),
    ] {
        match replace_spec(lab, &spec).await {
            Ok(_) => bail!("{what} was accepted"),
            Err(error) => ensure!(format!("{error:#}").contains(expected), "{what}: {error:#}"),
        }
    }
    let mut second = kubevirt(&json!({}));
    second["metadata"]["name"] = json!("second");
    let Err(error) = kubevirts(lab).create(&PostParams::default(), &serde_json::from_value(second)?).await else {
        bail!("a second KubeVirt was accepted");
    };
    ensure!(error.to_string().contains("kubevirt/kubevirt"), "the message does not name the first one: {error}");
    wait_until_available(lab).await
}

/// Changes that a user might make by hand. The operator reverts each of them with one write.
async fn drift_is_repaired(lab: &Lab) -> Result<()> {
    wait_until_available(lab).await?;
    object_is_repaired::<Deployment>(lab, "virt-controller", &json!({"spec": {"replicas": 5}})).await?;
    object_is_repaired::<DaemonSet>(lab, "virt-handler", &json!({"spec": {"minReadySeconds": 7}})).await?;
    object_is_repaired::<Service>(lab, "virt-api", &json!({"spec": {"selector": {"added": "by-hand"}}})).await?;
    object_is_repaired::<ServiceAccount>(
        lab,
        "kubevirt-apiserver",
        &json!({"metadata": {"labels": {MANAGED_BY: null}}}),
    )
    .await?;
    // The API server compares the expected value of a patch byte by byte.
    object_is_repaired::<ConfigMap>(lab, "kubevirt-ca", &json!({"data": {"more": "# R&D <ca@example.com>\n"}})).await?;
    object_is_repaired::<Secret>(lab, "kubevirt-virt-api-certs", &json!({"data": {"tls.key": "eA=="}})).await?;
    cluster_object_is_repaired::<ClusterRole>(lab, "kubevirt-handler", &json!({"rules": []})).await?;
    let short_names = json!({"spec": {"names": {"shortNames": ["byhand"]}}});
    cluster_object_is_repaired::<CustomResourceDefinition>(lab, "virtualmachines.kubevirt.io", &short_names).await?;
    let webhook = json!({"metadata": {"labels": {"app.kubernetes.io/component": "else"}}});
    cluster_object_is_repaired::<ValidatingWebhookConfiguration>(lab, "virt-api-validator", &webhook).await?;
    deleted_object_is_created_again::<Deployment>(lab, "virt-controller").await?;
    deleted_object_is_created_again::<Service>(lab, "virt-api").await
}

const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

async fn object_is_repaired<K>(lab: &Lab, name: &str, change: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + TestObject,
{
    change_and_wait_for_repair(lab, Api::<K>::namespaced(lab.client(), NAMESPACE), name, change).await
}

async fn cluster_object_is_repaired<K>(lab: &Lab, name: &str, change: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = ClusterResourceScope> + TestObject,
{
    change_and_wait_for_repair(lab, Api::<K>::all(lab.client()), name, change).await
}

/// The bounds that a type needs so that a test can change it and wait for it.
trait TestObject: Clone + Debug + DeserializeOwned + Serialize + Send + Sync + 'static {}
impl<K: Clone + Debug + DeserializeOwned + Serialize + Send + Sync + 'static> TestObject for K {}

async fn change_and_wait_for_repair<K: Resource<DynamicType = ()> + TestObject>(
    lab: &Lab,
    api: Api<K>,
    name: &str,
    change: &Value,
) -> Result<()> {
    let what = format!("{} {name}", K::kind(&()));
    let before = content(&api.get(name).await.with_context(|| what.clone())?)?;
    let seen = operator_requests(lab)?.len();
    let changed =
        api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.with_context(|| what.clone())?;
    ensure!(content(&changed)? != before, "{what} was not changed by {change}");
    // A Secret whose key does not belong to its certificate gets a new pair. Every other object gets its old content.
    let is_secret = K::kind(&()) == "Secret";
    lab.wait(&format!("{what} is repaired"), TIMEOUT, api, name, |object| {
        object
            .and_then(|object| content(object).ok())
            .is_some_and(|now| now == before || is_secret && now["data"]["tls.key"] != json!("eA=="))
    })
    .await?;
    wait_until_available(lab).await?;
    let writes = writes_since(lab, seen)?;
    let own_writes = writes.iter().filter(|record| record.name == name).count();
    ensure!(own_writes == 1, "{what} took {own_writes} writes: {writes:?}");
    Ok(())
}

async fn deleted_object_is_created_again<K>(lab: &Lab, name: &str) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + TestObject,
{
    let api = Api::<K>::namespaced(lab.client(), NAMESPACE);
    let before = api.get(name).await?;
    api.delete(name, &DeleteParams::background()).await?;
    lab.wait(&format!("{} {name} is created again", K::kind(&())), TIMEOUT, api, name, |object| {
        object.is_some_and(|object| object.uid() != before.uid())
    })
    .await?;
    wait_until_available(lab).await
}

/// The part of an object that the operator writes, without the fields that the API server sets.
fn content<K: Serialize>(object: &K) -> Result<Value> {
    let mut object = serde_json::to_value(object)?;
    let labels = object["metadata"]["labels"].take();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
        fields.insert("metadata".to_owned(), labels);
    }
    Ok(object)
}

/// The spec contains JSON patches in customizeComponents. Applied a second time, they would show up as writes.
async fn an_unchanged_installation_causes_no_writes(lab: &Lab) -> Result<()> {
    wait_until_available(lab).await?;
    let seen = operator_requests(lab)?.len();
    touch_kubevirt(&kubevirts(lab), 20).await?;
    replace_operator(lab).await?;
    wait_until_available(lab).await?;
    let writes: BTreeMap<String, usize> =
        writes_since(lab, seen)?.into_iter().fold(BTreeMap::new(), |mut writes, record| {
            *writes.entry(format!("{} {} {}", record.verb, record.resource, record.name)).or_default() += 1;
            writes
        });
    ensure!(writes.is_empty(), "nothing changed, but the operator wrote {writes:?}");
    Ok(())
}

async fn questionable_settings_are_reported_as_events(lab: &Lab) -> Result<()> {
    let events: Api<Event> = Api::namespaced(lab.client(), NAMESPACE);
    for setting in ["LiveMigration", "NUMA", "permitSlirpInterface"] {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let notes = events.list(&Default::default()).await?.items.into_iter().filter_map(|event| event.note);
            if notes.into_iter().any(|note| note.contains(setting)) {
                break;
            }
            ensure!(Instant::now() < deadline, "no event names {setting}");
            // The name of the event is not known, so this polls the list.
            sleep(Duration::from_millis(200)).await;
        }
    }
    Ok(())
}
