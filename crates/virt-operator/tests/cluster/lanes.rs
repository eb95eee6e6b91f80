//! What is wrong in one part of an installation does not block the others: certificates are renewed in every state of
//! the resource, webhooks answer throughout, and the edit that corrects the resource is accepted.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
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
    Extension, KubeVirtRelease, Lab, LabOptions, PodFate, PodRule, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::{
    alerts::MONITORING,
    lifecycle::{replace_spec, spec_with_patch},
    removal::{create_vm, delete_kubevirt, virtual_machines, wait_until_removed},
    support::{
        NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirts, program, wait_until_available, wait_until_release,
    },
    webhook_client::{VmCall, WebhookClient},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        certificates_are_renewed_in_every_state_of_the_resource,
        certificates_are_renewed_while_objects_cannot_be_written,
        certificates_of_another_release_are_renewed_also_while_its_removal_is_blocked,
    );
}

/// The leaf certificates that a test waits for in each state.
const ROTATIONS: usize = 3;
/// Longer than all of them take.
const ROTATIONS_TIMEOUT: Duration = Duration::from_secs(600);
/// The Secret whose certificate is watched.
const SECRET: &str = "kubevirt-virt-api-certs";

/// The name of an object is taken, a patch does not apply, or an image cannot be pulled. One test with many steps, because
/// every step needs an installation.
async fn certificates_are_renewed_in_every_state_of_the_resource(_: Arc<SharedLabs>) -> Result<()> {
    let lab = start().await?;
    let service = create_foreign_service(&lab).await?;
    create_kubevirt(&lab, &with_lifetimes(json!({}))).await?;
    let taken = "Service kubevirt/virt-api already exists";
    wait_for_message(&lab, "Degraded", taken).await?;
    WebhookClient::wait_until_answered(&lab.client()).await?;
    rotate_and_edit(&lab, "Degraded", taken, json!({})).await.context("foreign Service")?;
    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    services.delete(&service, &DeleteParams::default()).await?;
    wait_until_available_soon(&lab).await.context("after the foreign Service was deleted")?;

    let unmatched = json!([{"op": "remove", "path": "/spec/nothing"}]).to_string();
    replace_spec(&lab, &with_lifetimes(spec_with_patch("json", &unmatched))).await?;
    let not_applied = rotate_and_edit(&lab, "Degraded", "patches[0] does not apply", json!({})).await;
    not_applied.context("patch that does not apply")?;

    let rule = PodRule { image_contains: "virt-operator:v9.9.9".to_owned(), fate: PodFate::ImageMissing };
    lab.set_pods(|pods| pods.rules = vec![rule]);
    replace_spec(&lab, &with_lifetimes(json!({"imageTag": "v9.9.9"}))).await?;
    let not_pulled = rotate_and_edit(&lab, "Progressing", "virt-operator:v9.9.9", json!({})).await;
    not_pulled.context("imageTag that cannot be pulled")?;
    wait_until_available_soon(&lab).await.context("after the resource was corrected")?;
    lab.stop().await
}

/// A CRD is being deleted and stays, a permission is missing, the namespace of a ServiceMonitor does not exist, or the
/// webhook of PrometheusRules does not respond.
async fn certificates_are_renewed_while_objects_cannot_be_written(_: Arc<SharedLabs>) -> Result<()> {
    let lab = start().await?;
    create_kubevirt(&lab, &with_lifetimes(json!({}))).await?;
    wait_until_available_soon(&lab).await?;

    replace_spec(&lab, &with_lifetimes(json!({"serviceMonitorNamespace": "nowhere"}))).await?;
    rotate_and_edit(&lab, "Synchronized", "nowhere", json!({})).await.context("missing namespace")?;
    wait_until_available_soon(&lab).await.context("after the namespace was corrected")?;

    break_prometheus_webhook(&lab).await?;
    let edit = json!({"configuration": {"developerConfiguration": {"logVerbosity": {"virtAPI": 3}}}});
    rotate_and_edit(&lab, "Synchronized", "rules.example.com", edit).await.context("broken webhook")?;
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    webhooks.delete(BROKEN_WEBHOOK, &DeleteParams::default()).await?;
    wait_until_available_soon(&lab).await.context("after the webhook was deleted")?;

    let crds: Api<CustomResourceDefinition> = Api::all(lab.client());
    set_finalizers(&crds, &json!([FOREIGN_FINALIZER])).await?;
    crds.delete(CRD, &DeleteParams::default()).await?;
    let deleted = format!("CustomResourceDefinition {CRD} is being deleted");
    rotate_and_edit(&lab, "Progressing", &deleted, json!({})).await.context("CRD that is being deleted")?;
    set_finalizers(&crds, &Value::Null).await?;
    wait_until_available_soon(&lab).await.context("after the CRD was deleted")?;

    let role = remove_permission(&lab).await?;
    let forbidden = "may not create serviceaccounts";
    rotate_and_edit(&lab, "Degraded", forbidden, json!({"infra": {"replicas": 2}})).await.context("permission")?;
    let roles: Api<ClusterRole> = Api::all(lab.client());
    roles.replace("kubevirt-operator", &PostParams::default(), &without_version(&role)).await?;
    wait_until_available_soon(&lab).await.context("after every cause was removed")?;
    lab.stop().await
}

/// A VM whose finalizer stays keeps KubeVirt's components, which need certificates that are valid. The components are of
/// another release than the operator.
async fn certificates_of_another_release_are_renewed_also_while_its_removal_is_blocked(
    _: Arc<SharedLabs>,
) -> Result<()> {
    let lab = start().await?;
    let release = KubeVirtRelease::Previous.version();
    create_kubevirt(&lab, &with_lifetimes(json!({"imageTag": release}))).await?;
    wait_until_release(&lab, release, 2 * TIMEOUT).await?;
    wait_until_available(&lab).await?;
    rotate(&lab, "Available", "All components are ready", VmCall::Create).await.context("another release")?;
    create_vm(&lab, "stuck", Some(FOREIGN_FINALIZER)).await?;
    delete_kubevirt(&lab).await?;
    rotate(&lab, "Synchronized", FOREIGN_FINALIZER, VmCall::Update("stuck")).await.context("removal")?;
    let none = json!({"metadata": {"finalizers": null}});
    virtual_machines(&lab).patch("stuck", &PatchParams::default(), &Patch::Merge(none)).await?;
    wait_until_removed(&lab).await?;
    lab.stop().await
}

async fn start() -> Result<Lab> {
    let extensions = vec![Extension::Monitoring];
    let lab = Lab::start(LabOptions { extensions, ..LabOptions::default() }).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    lab.create(MONITORING).await?;
    Ok(lab)
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

/// Waits for new certificates, and edits the resource, which the API server accepts while the cause lasts.
async fn rotate_and_edit(lab: &Lab, kind: &str, expected: &str, edit: Value) -> Result<()> {
    rotate(lab, kind, expected, VmCall::Create).await?;
    replace_spec(lab, &with_lifetimes(edit)).await.context("the edit was not accepted")?;
    Ok(())
}

/// Waits until a condition has this text, and then for new certificates. The condition keeps the text all the time, and no
/// call fails.
async fn rotate(lab: &Lab, kind: &str, expected: &str, vm_call: VmCall) -> Result<()> {
    wait_for_message(lab, kind, expected).await?;
    let is_silent = |kubevirt: Option<&DynamicObject>| !says(kubevirt, kind, expected);
    let what = format!("condition {kind} loses {expected:?}");
    tokio::select! {
        renewed = wait_for_rotations(lab, vm_call) => renewed,
        silent = lab.wait(&what, ROTATIONS_TIMEOUT, kubevirts(lab), "kubevirt", is_silent) => {
            let found = silent?.as_ref().and_then(|kubevirt| condition(kubevirt, kind));
            bail!("condition {kind} is {found:?}, expected {expected:?}")
        }
    }
}

async fn wait_for_rotations(lab: &Lab, vm_call: VmCall) -> Result<()> {
    let client = WebhookClient::start_with(vec![lab.client()], vm_call);
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let mut seen = BTreeSet::from([certificate(&secrets.get(SECRET).await?)?]);
    while seen.len() <= ROTATIONS {
        let known = seen.clone();
        let renewed = lab.wait("a new certificate", TIMEOUT, secrets.clone(), SECRET, |secret| {
            secret.and_then(|secret| certificate(secret).ok()).is_some_and(|current| !known.contains(&current))
        });
        seen.insert(certificate(&renewed.await?.context("the Secret was deleted")?)?);
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

async fn set_finalizers(crds: &Api<CustomResourceDefinition>, finalizers: &Value) -> Result<()> {
    let patch = json!({"metadata": {"finalizers": finalizers}});
    crds.patch(CRD, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// A webhook that does not respond checks PrometheusRules, and one of them is missing.
async fn break_prometheus_webhook(lab: &Lab) -> Result<()> {
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
    Ok(())
}

/// The operator may not create service accounts, and one of them is missing. Returns the role as it was before.
async fn remove_permission(lab: &Lab) -> Result<ClusterRole> {
    let roles: Api<ClusterRole> = Api::all(lab.client());
    let role = roles.get("kubevirt-operator").await?;
    let mut reduced = without_version(&role);
    for rule in reduced.rules.iter_mut().flatten() {
        if rule.resources.iter().flatten().any(|resource| resource == "serviceaccounts") {
            rule.verbs.retain(|verb| verb != "create");
        }
    }
    roles.replace("kubevirt-operator", &PostParams::default(), &reduced).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(lab.client(), NAMESPACE);
    accounts.delete("kubevirt-exportproxy", &DeleteParams::default()).await?;
    Ok(role)
}

/// The role in a form that replaces any version of it.
fn without_version(role: &ClusterRole) -> ClusterRole {
    let metadata = ObjectMeta { name: role.metadata.name.clone(), ..ObjectMeta::default() };
    ClusterRole { metadata, ..role.clone() }
}
