//! Edits of the KubeVirt resource: what is no longer wanted is removed from the cluster.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::Node,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_install::testing::random_spec;
use vitivirt_lab::{
    EditedInstallation, VirtOperator,
    harness::{SharedLabs, Suite},
};
use vitivirt_snapshot::{Snapshot, compare};

use crate::support::{NAMESPACE, TIMEOUT, operator_requests, program, writes_since};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; settings_that_are_taken_back_leave_nothing, a_chain_of_edits_equals_a_fresh_installation);
}

/// One installation for all of them, because an installation takes longer than an edit.
async fn settings_that_are_taken_back_leave_nothing(_: Arc<SharedLabs>) -> Result<()> {
    let installation = EditedInstallation::start(VirtOperator::ours(program()), &json!({})).await?;
    a_patch_is_applied_and_removed(&installation).await.context("patch")?;
    pull_secrets_are_set_and_unset(&installation).await.context("imagePullSecrets")?;
    virt_handler_returns_to_every_node(&installation).await.context("nodeSelector")?;
    a_migration_network_is_set_and_unset(&installation).await.context("migrations network")?;
    without_records_each_object_costs_one_equal_patch(&installation).await.context("no records")?;
    installation.lab.stop().await
}

/// Takes every setting back, and compares with the installation before.
async fn take_back(installation: &EditedInstallation, before: &Snapshot) -> Result<()> {
    installation.edit(&json!({})).await?;
    installation.wait_until_complete().await?;
    let comparison = compare(before, &installation.snapshot().await?);
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    Ok(())
}

fn deployments(installation: &EditedInstallation) -> Api<Deployment> {
    Api::namespaced(installation.lab.client(), NAMESPACE)
}

fn daemon_sets(installation: &EditedInstallation) -> Api<DaemonSet> {
    Api::namespaced(installation.lab.client(), NAMESPACE)
}

async fn a_patch_is_applied_and_removed(installation: &EditedInstallation) -> Result<()> {
    let patch = |kind: &str, name: &str, patch: Value| json!({"resourceType": kind, "resourceName": name, "type": "strategic", "patch": patch.to_string()});
    let metadata = json!({"labels": {"patched": "yes"}, "annotations": {"team": "infra"}});
    let spec = json!({"customizeComponents": {"patches": [
        patch("Deployment", "virt-controller", json!({
            "metadata": metadata,
            "spec": {"template": {"metadata": metadata, "spec": {"dnsPolicy": "Default", "containers": [
                {"name": "virt-controller", "resources": {"limits": {"memory": "2Gi"}}},
            ]}}},
        })),
        patch("Service", "virt-api", json!({"metadata": metadata, "spec": {
            "sessionAffinity": "ClientIP", "type": "NodePort", "ipFamilyPolicy": "PreferDualStack",
        }})),
    ]}});
    let before = installation.snapshot().await?;
    installation.edit(&spec).await?;
    installation.wait_until_complete().await?;
    let deployment = serde_json::to_value(deployments(installation).get("virt-controller").await?)?;
    ensure!(deployment["spec"]["template"]["spec"]["dnsPolicy"] == "Default", "{}", deployment["spec"]);
    ensure!(deployment["metadata"]["labels"]["patched"] == "yes", "{}", deployment["metadata"]);
    take_back(installation, &before).await
}

async fn pull_secrets_are_set_and_unset(installation: &EditedInstallation) -> Result<()> {
    let before = installation.snapshot().await?;
    installation.edit(&json!({"imagePullSecrets": [{"name": "pull-me"}]})).await?;
    installation.wait_until_complete().await?;
    let deployment = serde_json::to_value(deployments(installation).get("virt-api").await?)?;
    let secrets = &deployment["spec"]["template"]["spec"]["imagePullSecrets"];
    ensure!(secrets[0]["name"] == "pull-me", "{secrets}");
    take_back(installation, &before).await
}

/// Such an edit never completes, so nothing about it is recorded in the status.
async fn virt_handler_returns_to_every_node(installation: &EditedInstallation) -> Result<()> {
    let before = installation.snapshot().await?;
    let selector = json!({"workloads": {"nodePlacement": {"nodeSelector": {"example.com/no-node-has-it": "x"}}}});
    installation.edit(&selector).await?;
    wait_for_pods(installation, 0).await?;
    take_back(installation, &before).await?;
    let nodes: Api<Node> = Api::all(installation.lab.client());
    wait_for_pods(installation, nodes.list(&Default::default()).await?.items.len().try_into()?).await
}

/// Waits until this many pods of virt-handler are desired and ready.
async fn wait_for_pods(installation: &EditedInstallation, count: i32) -> Result<()> {
    let has_pods = |daemon_set: Option<&DaemonSet>| {
        let status = daemon_set.and_then(|daemon_set| daemon_set.status.as_ref());
        status.is_some_and(|status| status.desired_number_scheduled == count && status.number_ready == count)
    };
    let what = format!("virt-handler has {count} pods");
    installation.lab.wait(&what, TIMEOUT, daemon_sets(installation), "virt-handler", has_pods).await.map(|_| ())
}

async fn a_migration_network_is_set_and_unset(installation: &EditedInstallation) -> Result<()> {
    let spec = json!({"configuration": {"migrations": {"network": "migration"}}});
    let before = installation.snapshot().await?;
    installation.edit(&spec).await?;
    installation.wait_until_complete().await?;
    let daemon_set = serde_json::to_value(daemon_sets(installation).get("virt-handler").await?)?;
    let annotations = &daemon_set["spec"]["template"]["metadata"]["annotations"];
    ensure!(annotations["k8s.v1.cni.cncf.io/networks"].is_string(), "{annotations}");
    take_back(installation, &before).await
}

/// As with an installation of upstream virt-operator, which records no digests.
async fn without_records_each_object_costs_one_equal_patch(installation: &EditedInstallation) -> Result<()> {
    let (lab, kubevirts) = (&installation.lab, installation.kubevirts());
    let before = versions(installation).await?;
    let seen = operator_requests(lab)?.len();
    scale_operator(installation, 0).await?;
    let forget = json!({"status": {"generations": null}});
    kubevirts.patch_status("kubevirt", &PatchParams::default(), &Patch::Merge(&forget)).await?;
    scale_operator(installation, 2).await?;
    lab.wait("the objects are recorded again", TIMEOUT, kubevirts, "kubevirt", |kubevirt| {
        let recorded = kubevirt.and_then(|kubevirt| kubevirt.data.pointer("/status/generations")?.as_array());
        recorded.is_some_and(|recorded| recorded.len() > 30 && recorded.iter().all(|entry| entry["hash"].is_string()))
    })
    .await?;
    let mut writes: BTreeMap<String, usize> = BTreeMap::new();
    for record in writes_since(lab, seen)? {
        *writes.entry(format!("{} {} {}", record.verb, record.resource, record.name)).or_default() += 1;
    }
    ensure!(writes.len() > 30 && writes.values().all(|count| *count == 1), "{writes:?}");
    let after = versions(installation).await?;
    ensure!(before == after, "the API server did not find every patch equal: {before:?} before, {after:?} after");
    Ok(())
}

async fn scale_operator(installation: &EditedInstallation, replicas: i32) -> Result<()> {
    let (deployments, scale) = (deployments(installation), json!({"spec": {"replicas": replicas}}));
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::Merge(&scale)).await?;
    let is_scaled = |deployment: Option<&Deployment>| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        status.is_some_and(|status| {
            (status.replicas.unwrap_or_default(), status.ready_replicas.unwrap_or_default()) == (replicas, replicas)
        })
    };
    installation.lab.wait("virt-operator is scaled", TIMEOUT, deployments, "virt-operator", is_scaled).await.map(|_| ())
}

/// The generation of each object of the kinds that have records, or its resource version if it has no generation.
async fn versions(installation: &EditedInstallation) -> Result<BTreeMap<String, String>> {
    let mut versions = BTreeMap::new();
    for (group, kind) in [
        ("", "Service"),
        ("apps", "Deployment"),
        ("apps", "DaemonSet"),
        ("policy", "PodDisruptionBudget"),
        ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration"),
        ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy"),
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicyBinding"),
        ("apiregistration.k8s.io", "APIService"),
        ("apiextensions.k8s.io", "CustomResourceDefinition"),
        ("monitoring.coreos.com", "ServiceMonitor"),
        ("monitoring.coreos.com", "PrometheusRule"),
    ] {
        let of = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let of = if kind == "ValidatingAdmissionPolicy" {
            ApiResource { plural: "validatingadmissionpolicies".to_owned(), ..of }
        } else {
            of
        };
        let api: Api<DynamicObject> = Api::all_with(installation.lab.client(), &of);
        let managed = ListParams::default().labels("app.kubernetes.io/managed-by=virt-operator");
        for object in api.list(&managed).await.context(kind)? {
            let metadata = &object.metadata;
            let version = metadata.generation.map(|generation| generation.to_string());
            let name = format!("{kind} {}", metadata.name.as_deref().unwrap_or_default());
            versions.insert(name, version.or(metadata.resource_version.clone()).unwrap_or_default());
        }
    }
    Ok(versions)
}

/// `cargo xtask chaos edits` runs many random chains. This one has some of everything.
async fn a_chain_of_edits_equals_a_fresh_installation(_: Arc<SharedLabs>) -> Result<()> {
    let [first, replaced, other, last] = [3, 5, 8, 13].map(random_spec);
    let installation = EditedInstallation::start(VirtOperator::ours(program()), &first).await?;
    installation.edit(&json!({})).await?;
    installation.wait_until_complete().await.context("without settings")?;
    installation.edit(&replaced).await?;
    // The next edit replaces it before its pods are ready.
    tokio::time::sleep(Duration::from_millis(500)).await;
    installation.edit(&other).await?;
    installation.wait_until_complete().await.context("after a replaced edit")?;
    installation.edit(&last).await?;
    installation.wait_until_complete().await.context("after the last edit")?;
    let comparison = installation.compare_with_fresh(&last).await?;
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    let writes = installation.writes_of_a_new_leader().await?;
    ensure!(writes.is_empty(), "nothing changed, but a restarted operator wrote {writes:?}");
    installation.lab.stop().await
}
