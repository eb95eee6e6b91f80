//! What is wrong in one part of an installation does not hold up the others: certificates are renewed in every state of
//! the resource, webhooks answer throughout, and the edit that corrects the resource is accepted.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        core::v1::{Secret, Service, ServiceAccount},
        rbac::v1::ClusterRole,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    Extension, Lab, LabOptions, PodFate, PodRule, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    alerts::MONITORING,
    lifecycle::{replace_spec, spec_with_patch},
    support::{NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirts, program, wait_until_available},
    webhook_client::WebhookClient,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; certificates_are_renewed_in_every_state_of_the_resource);
}

/// The leaf certificates that a test waits for in each state.
const ROTATIONS: usize = 3;
/// The Secret whose certificate is watched.
const SECRET: &str = "kubevirt-virt-api-certs";

/// One test with many steps, because every step needs an installation.
async fn certificates_are_renewed_in_every_state_of_the_resource(_: Arc<SharedLabs>) -> Result<()> {
    let extensions = vec![Extension::Monitoring];
    let lab = Lab::start(LabOptions { extensions, ..LabOptions::default() }).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    lab.create(MONITORING).await?;
    let service = create_foreign_service(&lab).await?;
    create_kubevirt(&lab, &with_lifetimes(json!({}))).await?;
    wait_for_message(&lab, "Degraded", "Service kubevirt/virt-api already exists").await?;
    WebhookClient::wait_until_answered(&lab.client()).await?;
    rotate(&lab, "Degraded", "Service kubevirt/virt-api already exists").await.context("foreign Service")?;

    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    services.delete(&service, &DeleteParams::default()).await?;
    wait_until_available_soon(&lab).await.context("after the foreign Service was deleted")?;

    let unmatched = json!([{"op": "remove", "path": "/spec/nothing"}]).to_string();
    replace_spec(&lab, &with_lifetimes(spec_with_patch("json", &unmatched))).await?;
    wait_for_message(&lab, "Degraded", "patches[0] does not apply").await?;
    rotate(&lab, "Degraded", "patches[0] does not apply").await.context("patch that does not apply")?;

    let rule = PodRule { image_contains: "virt-operator:v9.9.9".to_owned(), fate: PodFate::ImageMissing };
    lab.set_pods(|pods| pods.rules = vec![rule]);
    replace_spec(&lab, &with_lifetimes(json!({"imageTag": "v9.9.9"}))).await?;
    wait_for_message(&lab, "Progressing", "virt-operator:v9.9.9").await?;
    rotate(&lab, "Progressing", "virt-operator:v9.9.9").await.context("imageTag that cannot be pulled")?;

    replace_spec(&lab, &with_lifetimes(json!({}))).await.context("the edit that corrects the resource")?;
    wait_until_available_soon(&lab).await.context("after the resource was corrected")?;

    let role = objects_cannot_be_written(&lab).await?;
    wait_for_message(&lab, "Degraded", "may not create serviceaccounts").await?;
    wait_for_message(&lab, "Synchronized", "monitoring: ").await?;
    rotate(&lab, "Degraded", "may not create serviceaccounts").await.context("objects that cannot be written")?;
    objects_can_be_written(&lab, role).await?;
    replace_spec(&lab, &with_lifetimes(json!({}))).await.context("the last edit")?;
    wait_until_available_soon(&lab).await.context("after every cause was removed")?;
    lab.stop().await
}

/// Lifetimes that a test can wait for. The lab's kubelet updates Secrets at once.
fn with_lifetimes(mut spec: Value) -> Value {
    spec["certificateRotateStrategy"] = json!({"selfSigned": {
        "ca": {"duration": "60s", "renewBefore": "20s"}, "server": {"duration": "16s", "renewBefore": "9s"},
    }});
    spec
}

/// A Service with the name of one of the installation, which works like it.
async fn create_foreign_service(lab: &Lab) -> Result<String> {
    let service = json!({
        "metadata": {"name": "virt-api", "namespace": NAMESPACE},
        "spec": {"selector": {"kubevirt.io": "virt-api"}, "ports": [{"port": 443, "targetPort": 8443}]},
    });
    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    let created = services.create(&PostParams::default(), &serde_json::from_value(service)?).await?;
    created.metadata.name.context("a Service without a name")
}

/// Waits until a condition has this text.
async fn wait_for_message(lab: &Lab, kind: &str, expected: &str) -> Result<()> {
    let what = format!("condition {kind} contains {expected:?}");
    lab.wait(&what, TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| says(kubevirt, kind, expected)).await?;
    Ok(())
}

fn says(kubevirt: Option<&DynamicObject>, kind: &str, expected: &str) -> bool {
    let found = kubevirt.and_then(|kubevirt| condition(kubevirt, kind));
    found.is_some_and(|(_, _, message)| message.contains(expected))
}

/// A failed write may be repeated after a minute.
async fn wait_until_available_soon(lab: &Lab) -> Result<()> {
    let first = wait_until_available(lab).await;
    if first.is_ok() { first } else { wait_until_available(lab).await }
}

/// Waits for new certificates. The condition says what is wrong all the time, and no call fails.
async fn rotate(lab: &Lab, kind: &str, expected: &str) -> Result<()> {
    let client = WebhookClient::start(vec![lab.client()]);
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let mut seen = BTreeSet::from([certificate(&secrets.get(SECRET).await?)?]);
    while seen.len() <= ROTATIONS {
        let known = seen.clone();
        let renewed = lab.wait("a new certificate", TIMEOUT, secrets.clone(), SECRET, |secret| {
            secret.and_then(|secret| certificate(secret).ok()).is_some_and(|current| !known.contains(&current))
        });
        let renewed = renewed.await?.context("the Secret was deleted")?;
        seen.insert(certificate(&renewed)?);
        let kubevirt = kubevirts(lab).get("kubevirt").await?;
        ensure!(
            says(Some(&kubevirt), kind, expected),
            "condition {kind} is {:?}, expected {expected:?}",
            condition(&kubevirt, kind)
        );
    }
    client.finish().await
}

fn certificate(secret: &Secret) -> Result<Vec<u8>> {
    let data = secret.data.as_ref().and_then(|data| data.get("tls.crt"));
    data.map(|bytes| bytes.0.clone()).ok_or_else(|| anyhow!("the Secret has no certificate"))
}

const CRD: &str = "virtualmachineclones.clone.kubevirt.io";
const FOREIGN_FINALIZER: &str = "example.com/keep";
const BROKEN_WEBHOOK: &str = "broken-prometheus-webhook";

fn prometheus_rules(lab: &Lab) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: "monitoring.coreos.com".to_owned(),
        version: "v1".to_owned(),
        api_version: "monitoring.coreos.com/v1".to_owned(),
        kind: "PrometheusRule".to_owned(),
        plural: "prometheusrules".to_owned(),
    };
    Api::namespaced_with(lab.client(), NAMESPACE, &resource)
}

/// A CRD is being deleted and stays, a permission is missing, the namespace of a ServiceMonitor does not exist, and the
/// webhook of PrometheusRules does not respond. Returns the role as it was before.
async fn objects_cannot_be_written(lab: &Lab) -> Result<ClusterRole> {
    let crds: Api<CustomResourceDefinition> = Api::all(lab.client());
    let finalizer = json!({"metadata": {"finalizers": [FOREIGN_FINALIZER]}});
    crds.patch(CRD, &PatchParams::default(), &Patch::Merge(&finalizer)).await?;
    crds.delete(CRD, &DeleteParams::default()).await?;

    let webhook = json!({
        "metadata": {"name": BROKEN_WEBHOOK},
        "webhooks": [{
            "name": "rules.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 2,
            "clientConfig": {"service": {"namespace": "default", "name": "nothing"}},
            "rules": [{"apiGroups": ["monitoring.coreos.com"], "apiVersions": ["v1"], "resources": ["prometheusrules"],
                "operations": ["CREATE", "UPDATE"]}],
        }],
    });
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    webhooks.create(&PostParams::default(), &serde_json::from_value(webhook)?).await?;
    prometheus_rules(lab).delete("prometheus-kubevirt-rules", &DeleteParams::default()).await?;

    let roles: Api<ClusterRole> = Api::all(lab.client());
    let role = roles.get("kubevirt-operator").await?;
    let mut reduced = role.clone();
    for rule in reduced.rules.iter_mut().flatten() {
        if rule.resources.iter().flatten().any(|resource| resource == "serviceaccounts") {
            rule.verbs.retain(|verb| verb != "create");
        }
    }
    reduced.metadata = ObjectMeta { name: role.metadata.name.clone(), ..ObjectMeta::default() };
    roles.replace("kubevirt-operator", &PostParams::default(), &reduced).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(lab.client(), NAMESPACE);
    accounts.delete("kubevirt-exportproxy", &DeleteParams::default()).await?;
    replace_spec(lab, &with_lifetimes(json!({"serviceMonitorNamespace": "nowhere"}))).await?;
    Ok(role)
}

async fn objects_can_be_written(lab: &Lab, role: ClusterRole) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(lab.client());
    let none = json!({"metadata": {"finalizers": null}});
    crds.patch(CRD, &PatchParams::default(), &Patch::Merge(&none)).await?;
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    webhooks.delete(BROKEN_WEBHOOK, &DeleteParams::default()).await?;
    let roles: Api<ClusterRole> = Api::all(lab.client());
    let metadata = ObjectMeta { name: role.metadata.name.clone(), ..ObjectMeta::default() };
    roles.replace("kubevirt-operator", &PostParams::default(), &ClusterRole { metadata, ..role }).await?;
    Ok(())
}
