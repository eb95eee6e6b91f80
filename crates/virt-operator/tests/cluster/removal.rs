//! KubeVirt is removed: with and without VMs, from every state of the resource, without its operator, and by the command.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{Namespace, Node, Pod, Secret, Service},
        rbac::v1::{ClusterRole, PolicyRule},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
    core::PartialObjectMeta,
    discovery::{ApiGroup, Discovery, verbs},
};
use serde_json::json;
use tokio::{
    process::Command,
    time::{Instant, sleep},
};
use vitivirt_lab::{
    Lab, LabOptions, PodFate, PodRule, VirtOperator,
    harness::{SharedLabs, Suite},
    kubevirt_resource,
};

use crate::{
    install::vm,
    lifecycle::{replace_spec, spec_with_patch},
    support::{
        NAMESPACE, TIMEOUT, condition, create_kubevirt, kubevirts, operator_requests, program, replace_operator, text,
        wait_until_available,
    },
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        an_installation_with_vms_is_removed_and_can_be_installed_again,
        protected_vms_keep_their_installation_until_the_last_one_is_gone,
        fault_17_a_removal_names_the_finalizer_that_blocks_it,
        fault_17_webhooks_of_a_dead_virt_api_do_not_block_a_removal,
        a_resource_that_is_not_installed_yet_is_removed,
        an_installation_is_removed_from_every_state,
        a_namespace_that_is_deleted_first_takes_kubevirt_with_it,
        uninstall_removes_kubevirt_without_its_operator,
        uninstall_removes_kubevirt_whose_namespace_is_being_deleted,
    );
}

const FINALIZER: &str = "example.com/keep";

/// What controllers create and delete at any time.
const TEMPORARY: [&str; 7] =
    ["componentstatuses", "controllerrevisions", "endpoints", "endpointslices", "events", "pods", "replicasets"];

/// What a removal leaves, see docs/uninstall.md: the leases of KubeVirt's components and of the operator.
fn may_stay(object: &str) -> bool {
    object.starts_with("coordination.k8s.io/Lease kubevirt/")
}

/// Every object of the cluster. A group whose last CRD is deleted during the discovery makes it fail.
async fn objects(lab: &Lab) -> Result<BTreeSet<String>> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match discovered_objects(lab).await {
            Err(error) if Instant::now() < deadline => eprintln!("discovery is repeated: {error:#}"),
            result => return result,
        }
        // No watch reports when the groups are stable, so this polls.
        sleep(Duration::from_millis(200)).await;
    }
}

async fn discovered_objects(lab: &Lab) -> Result<BTreeSet<String>> {
    let discovery = Discovery::new(lab.client()).exclude(&["subresources.kubevirt.io"]).run().await?;
    let resources = discovery.groups().flat_map(ApiGroup::recommended_resources);
    let resources = resources.filter(|(resource, capabilities)| {
        capabilities.supports_operation(verbs::LIST) && !TEMPORARY.contains(&resource.plural.as_str())
    });
    let lists = resources.map(|(resource, _)| list(lab, resource));
    let lists: Vec<Vec<String>> = stream::iter(lists).buffer_unordered(6).try_collect().await?;
    Ok(lists.into_iter().flatten().collect())
}

async fn list(lab: &Lab, resource: ApiResource) -> Result<Vec<String>> {
    let items = list_served(lab, &resource, &ListParams::default()).await?;
    let name = |object: &PartialObjectMeta<DynamicObject>| {
        let namespace = object.namespace().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        format!("{}/{} {namespace}{}", resource.group, resource.kind, object.name_any())
    };
    Ok(items.iter().map(name).collect())
}

/// The objects of a kind, or none if its CRD was deleted after the discovery.
async fn list_served(
    lab: &Lab,
    resource: &ApiResource,
    selected: &ListParams,
) -> Result<Vec<PartialObjectMeta<DynamicObject>>> {
    let api: Api<DynamicObject> = Api::all_with(lab.client(), resource);
    match api.list_metadata(selected).await {
        Ok(list) => Ok(list.items),
        Err(kube::Error::Api(status)) if [404, 429, 503].contains(&status.code) => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("listing {}", resource.plural)),
    }
}

/// A lab with an operator, and the objects that it has before KubeVirt is installed.
async fn lab_with_operator() -> Result<(Lab, BTreeSet<String>)> {
    let lab = Lab::start(LabOptions::default()).await?;
    start_operator(&lab).await?;
    let before = objects(&lab).await?;
    Ok((lab, before))
}

async fn start_operator(lab: &Lab) -> Result<()> {
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await
}

pub(crate) fn virtual_machines(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"))
}

pub(crate) async fn create_vm(lab: &Lab, name: &str, finalizer: Option<&str>) -> Result<()> {
    let mut vm = vm(name);
    if let Some(finalizer) = finalizer {
        vm["metadata"]["finalizers"] = json!([finalizer]);
    }
    let parameters = PostParams { field_manager: Some("backup-tool".to_owned()), ..PostParams::default() };
    virtual_machines(lab).create(&parameters, &serde_json::from_value(vm)?).await.context("creating a VM")?;
    wait_until_running(lab, name).await
}

async fn wait_until_running(lab: &Lab, name: &str) -> Result<()> {
    lab.wait("VM is running", TIMEOUT, virtual_machines(lab), name, |vm| {
        vm.is_some_and(|vm| text(vm, "/status/printableStatus") == "Running")
    })
    .await
    .map(|_| ())
}

pub(crate) async fn delete_kubevirt(lab: &Lab) -> Result<()> {
    kubevirts(lab).delete("kubevirt", &DeleteParams::default()).await.context("deleting the KubeVirt resource")?;
    Ok(())
}

/// The removal ends within a minute, or a condition reports by then what it waits for. The API server may take a minute to
/// delete the objects of a CRD that is deleted right after its creation.
pub(crate) async fn wait_until_removed(lab: &Lab) -> Result<()> {
    let start = Instant::now();
    let reasons = ["DeletionBlocked", "DeletionFailed"];
    let is_removed_or_blocked = |kubevirt: Option<&DynamicObject>| {
        kubevirt.is_none_or(|kubevirt| {
            let synchronized = condition(kubevirt, "Synchronized");
            synchronized.is_some_and(|(status, reason, message)| {
                status == "False" && reasons.contains(&reason.as_str()) && !message.is_empty()
            })
        })
    };
    let what = "KubeVirt is deleted, or a condition reports why not";
    lab.wait(what, MESSAGE_TIMEOUT, kubevirts(lab), "kubevirt", is_removed_or_blocked).await?;
    let is_deleted = |kubevirt: Option<&DynamicObject>| kubevirt.is_none();
    lab.wait("KubeVirt is deleted", 2 * TIMEOUT, kubevirts(lab), "kubevirt", is_deleted).await?;
    println!("removed in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Nothing is left, and no node has a label of KubeVirt.
async fn require_clean(lab: &Lab, before: &BTreeSet<String>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let now = objects(lab).await?;
        let left: Vec<&String> = now.difference(before).filter(|object| !may_stay(object)).collect();
        let missing: Vec<&String> = before.difference(&now).filter(|object| !may_stay(object)).collect();
        let marks = node_marks(lab).await?;
        if left.is_empty() && missing.is_empty() && marks.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "left: {left:?}; missing: {missing:?}; on nodes: {marks:?}");
        // The garbage collector deletes what depended on an object, so this polls.
        sleep(Duration::from_millis(200)).await;
    }
}

async fn node_marks(lab: &Lab) -> Result<Vec<String>> {
    let nodes: Api<Node> = Api::all(lab.client());
    let nodes = nodes.list_metadata(&ListParams::default()).await?.items;
    let keys = nodes.iter().flat_map(|node| node.labels().keys().chain(node.annotations().keys()));
    Ok(keys.filter(|key| key.contains("kubevirt.io/")).cloned().collect())
}

/// Shorter than the grace period of the operator's pods, which ends with its namespace.
const LAST_SECONDS: Duration = Duration::from_secs(15);
/// A condition reports what is wrong within a minute.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

async fn wait_for_message(lab: &Lab, kind: &str, expected: &[&str]) -> Result<()> {
    let what = format!("condition {kind} contains {expected:?}");
    lab.wait(&what, MESSAGE_TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        let message = kubevirt.and_then(|kubevirt| condition(kubevirt, kind)).map(|(_, _, message)| message);
        message.is_some_and(|message| expected.iter().all(|part| message.contains(part)))
    })
    .await
    .map(|_| ())
}

async fn scale_operator(lab: &Lab, replicas: i64) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let patch = json!({"spec": {"replicas": replicas}});
    deployments.patch("virt-operator", &PatchParams::default(), &Patch::Merge(patch)).await?;
    wait_until_pods_are(lab, "kubevirt.io=virt-operator", replicas).await
}

async fn wait_until_pods_are(lab: &Lab, label: &str, expected: i64) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let found = pods.list_metadata(&ListParams::default().labels(label)).await?.items.len();
        if i64::try_from(found)? == expected {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{found} pods with {label}, expected {expected}");
        // The names of the pods are not known, so this polls.
        sleep(Duration::from_millis(100)).await;
    }
}

async fn an_installation_with_vms_is_removed_and_can_be_installed_again(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "a", None).await?;
    create_vm(&lab, "b", None).await?;
    let seen = operator_requests(&lab)?.len();
    let deleted = lab.wait("the phase is Deleted", TIMEOUT, kubevirts(&lab), "kubevirt", |kubevirt| {
        kubevirt.is_some_and(|kubevirt| text(kubevirt, "/status/phase") == "Deleted")
    });
    let deleting = async {
        delete_kubevirt(&lab).await?;
        wait_until_removed(&lab).await
    };
    tokio::try_join!(deleted, deleting)?;
    let writes = operator_requests(&lab)?;
    let mut node_writes: BTreeMap<String, usize> = BTreeMap::new();
    for record in writes.into_iter().skip(seen).filter(|record| record.is_write() && record.resource == "nodes") {
        *node_writes.entry(record.name).or_default() += 1;
    }
    ensure!(!node_writes.is_empty() && node_writes.values().all(|writes| *writes == 1), "{node_writes:?}");
    require_clean(&lab, &before).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await.context("after a second installation")?;
    delete_kubevirt(&lab).await?;
    wait_until_removed(&lab).await.context("without VMs")?;
    require_clean(&lab, &before).await?;
    lab.stop().await
}

/// The resource is deleted while no operator runs, so no webhook checks it. The operator that returns does.
async fn protected_vms_keep_their_installation_until_the_last_one_is_gone(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "protected", None).await?;
    let denied = kubevirts(&lab).delete("kubevirt", &DeleteParams::default()).await;
    let denied = denied.err().context("the webhook allowed the deletion")?.to_string();
    ensure!(denied.contains("default/protected"), "{denied}");

    scale_operator(&lab, 0).await?;
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    webhooks.delete("virt-operator-validator", &DeleteParams::default()).await?;
    delete_kubevirt(&lab).await?;
    scale_operator(&lab, 2).await?;
    wait_for_message(&lab, "Synchronized", &["default/protected", "uninstallStrategy"]).await?;
    // The installation is repaired, and the VM runs.
    lab.wait("the webhook is created again", TIMEOUT, webhooks, "virt-operator-validator", |it| it.is_some()).await?;
    wait_until_running(&lab, "protected").await?;
    virtual_machines(&lab).delete("protected", &DeleteParams::default()).await?;
    wait_until_removed(&lab).await?;
    require_clean(&lab, &before).await?;
    lab.stop().await
}

async fn fault_17_a_removal_names_the_finalizer_that_blocks_it(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "stuck", Some(FINALIZER)).await?;
    delete_kubevirt(&lab).await?;
    wait_for_message(&lab, "Synchronized", &["VirtualMachine default/stuck", FINALIZER, "backup-tool"]).await?;
    // KubeVirt's components and certificates are kept, and another operator continues.
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    deployments.get("virt-controller").await?;
    secrets.get("kubevirt-ca").await?;
    replace_operator(&lab).await?;
    let none = json!({"metadata": {"finalizers": null}});
    virtual_machines(&lab).patch("stuck", &PatchParams::default(), &Patch::Merge(none)).await?;
    wait_until_removed(&lab).await?;
    require_clean(&lab, &before).await?;
    lab.stop().await
}

/// virt-controller removes the finalizer of a VM by a patch, which the webhooks of virt-api would reject.
async fn fault_17_webhooks_of_a_dead_virt_api_do_not_block_a_removal(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "orphan", None).await?;
    let dead = PodRule { image_contains: "virt-api".to_owned(), fate: PodFate::ImageMissing };
    lab.set_pods(|pods| pods.rules.push(dead));
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    for pod in pods.list_metadata(&ListParams::default().labels("kubevirt.io=virt-api")).await? {
        pods.delete(&pod.name_any(), &DeleteParams::default()).await?;
    }
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("virt-api is dead", TIMEOUT, deployments, "virt-api", |deployment| {
        let ready = deployment.and_then(|deployment| deployment.status.as_ref()?.ready_replicas);
        ready.unwrap_or_default() == 0
    })
    .await?;
    delete_kubevirt(&lab).await?;
    wait_until_removed(&lab).await?;
    require_clean(&lab, &before).await?;
    lab.stop().await
}

/// A certificate that is created after the removal would stay forever.
async fn a_resource_that_is_not_installed_yet_is_removed(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    for milliseconds in [0, 10, 40, 160, 640] {
        create_kubevirt(&lab, &json!({})).await?;
        // The moment of the deletion is what this test varies.
        sleep(Duration::from_millis(milliseconds)).await;
        delete_kubevirt(&lab).await?;
        wait_until_removed(&lab).await?;
        require_clean_objects(&lab, &before).await.with_context(|| format!("deleted after {milliseconds} ms"))?;
    }
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    lab.stop().await
}

/// A resource without the finalizer is gone at once. No removal has cleaned its nodes, and it had changed none.
async fn require_clean_objects(lab: &Lab, before: &BTreeSet<String>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let now = objects(lab).await?;
        let left: Vec<&String> = now.difference(before).filter(|object| !may_stay(object)).collect();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "left: {left:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

async fn an_installation_is_removed_from_every_state(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    let remove = async |state: &'static str| -> Result<()> {
        delete_kubevirt(&lab).await.context(state)?;
        wait_until_removed(&lab).await.context(state)?;
        require_clean(&lab, &before).await.context(state)
    };
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    let unmatched = json!([{"op": "remove", "path": "/spec/nothing"}]).to_string();
    replace_spec(&lab, &spec_with_patch("json", &unmatched)).await?;
    wait_for_message(&lab, "Degraded", &["patches[0] does not apply"]).await?;
    remove("invalid resource").await?;

    let missing = PodRule { image_contains: "virt-operator:v9.9.9".to_owned(), fate: PodFate::ImageMissing };
    lab.set_pods(|pods| pods.rules = vec![missing]);
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    replace_spec(&lab, &json!({"imageTag": "v9.9.9"})).await?;
    wait_for_message(&lab, "Progressing", &["virt-operator:v9.9.9"]).await?;
    remove("strategy of another release").await?;

    let never = PodRule { image_contains: "virt-controller".to_owned(), fate: PodFate::Crashes };
    lab.set_pods(|pods| pods.rules = vec![never]);
    create_kubevirt(&lab, &json!({})).await?;
    wait_for_message(&lab, "Progressing", &["virt-controller"]).await?;
    remove("deploying").await?;
    lab.set_pods(|pods| pods.rules.clear());

    let roles: Api<ClusterRole> = Api::all(lab.client());
    let role = roles.get("kubevirt-operator").await?;
    let replace_role = async |rules: Option<Vec<PolicyRule>>| -> Result<()> {
        let metadata = ObjectMeta { name: role.metadata.name.clone(), ..ObjectMeta::default() };
        roles
            .replace("kubevirt-operator", &PostParams::default(), &ClusterRole { metadata, rules, ..role.clone() })
            .await?;
        Ok(())
    };
    let mut reduced = role.rules.clone();
    for rule in reduced.iter_mut().flatten() {
        if rule.resources.iter().flatten().any(|resource| resource == "serviceaccounts") {
            rule.verbs.retain(|verb| verb != "create");
        }
    }
    replace_role(reduced).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_for_message(&lab, "Degraded", &["may not create serviceaccounts"]).await?;
    delete_kubevirt(&lab).await?;
    wait_until_removed(&lab).await.context("failed (permission missing)")?;
    replace_role(role.rules.clone()).await?;
    require_clean(&lab, &before).await.context("failed (permission missing)")?;

    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    scale_operator(&lab, 0).await?;
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    secrets.delete("kubevirt-ca", &DeleteParams::default()).await?;
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(lab.client());
    webhooks.delete("virt-operator-validator", &DeleteParams::default()).await?;
    delete_kubevirt(&lab).await?;
    scale_operator(&lab, 2).await?;
    wait_until_removed(&lab).await.context("missing CA")?;
    require_clean(&lab, &before).await.context("missing CA")?;

    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    let foreign = json!({"metadata": {"name": "virt-api"}, "spec": {"ports": [{"port": 443}]}});
    services.create(&PostParams::default(), &serde_json::from_value(foreign)?).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_for_message(&lab, "Degraded", &["Service kubevirt/virt-api already exists"]).await?;
    delete_kubevirt(&lab).await?;
    wait_until_removed(&lab).await.context("name conflict")?;
    services.delete("virt-api", &DeleteParams::default()).await.context("the Service of another client is gone")?;
    require_clean(&lab, &before).await.context("name conflict")?;
    lab.stop().await
}

async fn wait_until_namespace_is_gone(lab: &Lab) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(lab.client());
    let gone = lab.wait("the namespace is gone", 2 * TIMEOUT, namespaces, NAMESPACE, |namespace| namespace.is_none());
    gone.await.map(|_| ())
}

/// What could reject the deletion of the objects of a namespace.
const BLOCKING: [(&str, &str); 3] = [
    ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration"),
    ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
    ("apiregistration.k8s.io", "APIService"),
];

async fn blocking_objects(lab: &Lab) -> Result<Vec<String>> {
    let managed = ListParams::default().labels("app.kubernetes.io/managed-by=virt-operator");
    let mut found = Vec::new();
    for (group, kind) in BLOCKING {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let objects = list_served(lab, &resource, &managed).await?;
        found.extend(objects.iter().map(|object| format!("{kind} {}", object.name_any())));
    }
    Ok(found)
}

/// The operator deletes them at once, because its pods are being deleted too.
async fn wait_until_nothing_blocks(lab: &Lab) -> Result<()> {
    let deadline = Instant::now() + LAST_SECONDS;
    loop {
        let left = blocking_objects(lab).await?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "left {LAST_SECONDS:?} after the namespace was deleted: {left:?}");
        // No watch reports that the last one is gone, so this polls.
        sleep(Duration::from_millis(100)).await;
    }
}

/// The operator itself is in that namespace.
async fn a_namespace_that_is_deleted_first_takes_kubevirt_with_it(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    let webhooks = blocking_objects(&lab).await?;
    ensure!(BLOCKING.iter().all(|(_, kind)| webhooks.iter().any(|object| object.contains(kind))), "{webhooks:?}");
    let namespaces: Api<Namespace> = Api::all(lab.client());
    namespaces.delete(NAMESPACE, &DeleteParams::default()).await?;
    wait_until_nothing_blocks(&lab).await?;
    wait_until_namespace_is_gone(&lab).await?;
    // The operator removes its finalizer last, so it has deleted everything else by then. See docs/uninstall.md.
    require_clean_objects(&lab, &before).await.context("before the uninstall")?;
    let now = objects(&lab).await?;
    let of_namespace = |object: &str| object.contains(" kubevirt/") || object == "/Namespace kubevirt";
    let missing: Vec<&String> = before.difference(&now).filter(|object| !of_namespace(object)).collect();
    ensure!(missing.is_empty(), "the operator also deleted {missing:?}");
    // virt-handler may have labeled its node again.
    uninstall(&lab, &["--yes"]).await?;
    start_operator(&lab).await?;
    require_clean(&lab, &before).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    lab.stop().await
}

async fn run_uninstall(lab: &Lab, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program());
    command.arg("uninstall").args(arguments).arg("--kubeconfig").arg(lab.kubeconfig()).stdin(Stdio::null());
    Ok(command.output().await?)
}

async fn uninstall(lab: &Lab, arguments: &[&str]) -> Result<String> {
    let output = run_uninstall(lab, arguments).await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

async fn uninstall_removes_kubevirt_without_its_operator(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "left", Some(FINALIZER)).await?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    deployments.delete("virt-operator", &DeleteParams::background()).await?;
    wait_until_pods_are(&lab, "kubevirt.io=virt-operator", 0).await?;

    let installed = objects(&lab).await?;
    let refused = run_uninstall(&lab, &["--yes"]).await?;
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1) && reason.contains("default/left"), "{reason}");
    let unanswered = run_uninstall(&lab, &["--force"]).await?;
    ensure!(unanswered.status.code() == Some(1), "{}", String::from_utf8_lossy(&unanswered.stdout));
    let rehearsal = uninstall(&lab, &["--force", "--dry-run"]).await?;
    ensure!(rehearsal.contains("KubeVirt kubevirt/kubevirt") && rehearsal.contains("  ClusterRole: "), "{rehearsal}");
    ensure!(objects(&lab).await?.is_superset(&installed), "a refused removal and a dry run delete nothing");

    uninstall(&lab, &["--yes", "--force"]).await?;
    start_operator(&lab).await?;
    require_clean(&lab, &before).await?;

    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await.context("after an uninstall")?;
    scale_operator(&lab, 0).await?;
    delete_every_second_object(&lab).await?;
    uninstall(&lab, &["--yes"]).await?;
    scale_operator(&lab, 2).await?;
    require_clean(&lab, &before).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await.context("after half of the objects were deleted")?;
    lab.stop().await
}

/// A user has started to remove KubeVirt by hand.
async fn delete_every_second_object(lab: &Lab) -> Result<()> {
    let discovery = Discovery::new(lab.client()).exclude(&["subresources.kubevirt.io"]).run().await?;
    let managed = ListParams::default().labels("app.kubernetes.io/managed-by=virt-operator");
    let mut count = 0;
    for (resource, capabilities) in discovery.groups().flat_map(ApiGroup::recommended_resources) {
        let can = |verb: &str| capabilities.supports_operation(verb);
        if !can(verbs::LIST) || !can(verbs::DELETE) || TEMPORARY.contains(&resource.plural.as_str()) {
            continue;
        }
        for object in list_served(lab, &resource, &managed).await? {
            count += 1;
            if count % 2 == 0 {
                let api: Api<DynamicObject> = match object.namespace() {
                    Some(namespace) => Api::namespaced_with(lab.client(), &namespace, &resource),
                    None => Api::all_with(lab.client(), &resource),
                };
                let deleted = api.delete(&object.name_any(), &DeleteParams::background()).await;
                // An object of a CRD that was deleted before is gone with it.
                if let Err(error) = deleted {
                    ensure!(matches!(&error, kube::Error::Api(status) if status.code == 404), "{error}");
                }
            }
        }
    }
    ensure!(count > 50, "{count} objects");
    Ok(())
}

/// The operator had no time to react. Its webhook and the finalizer of the resource keep the namespace.
async fn uninstall_removes_kubevirt_whose_namespace_is_being_deleted(_: Arc<SharedLabs>) -> Result<()> {
    let (lab, before) = lab_with_operator().await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    create_vm(&lab, "left", None).await?;
    scale_operator(&lab, 0).await?;
    let namespaces: Api<Namespace> = Api::all(lab.client());
    namespaces.delete(NAMESPACE, &DeleteParams::default()).await?;
    wait_until_pods_are(&lab, "kubevirt.io=virt-controller", 0).await?;
    uninstall(&lab, &["--yes", "--force"]).await?;
    wait_until_namespace_is_gone(&lab).await?;
    start_operator(&lab).await?;
    require_clean(&lab, &before).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    lab.stop().await
}
