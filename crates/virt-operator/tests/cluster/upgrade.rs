//! Upgrades and downgrades between releases.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Pod, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    KubeVirtRelease, Lab, LabOptions, PodFate, PodRule, VirtOperator,
    harness::{SharedLabs, Suite},
    kubevirt_resource,
};
use vitivirt_snapshot::{Snapshot, compare};

use crate::{
    support::{
        NAMESPACE, condition, create_kubevirt, kubevirts, program, text, wait_until_available, wait_until_release,
    },
    takeover::component_pods,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(
        suite;
        the_previous_release_is_upgraded_in_place,
        image_tag_there_and_back,
        outdated_vms_are_updated_after_the_upgrade_and_not_before,
    );
}

/// An upgrade replaces every pod, and the lease of the operator before ends after 15 s.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);
const VERSION_ANNOTATION: &str = "kubevirt.io/install-strategy-version";
const VMS: [&str; 3] = ["vm-1", "vm-2", "vm-3"];
/// How long a user may not reach virt-api.
const OUTAGE: Duration = Duration::from_secs(2);

pub(crate) fn vmis(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachineInstance"))
}

/// Creates VMs and waits until they run.
pub(crate) async fn start_vms(lab: &Lab, names: &[&str]) -> Result<()> {
    start_vms_with(lab, names, &json!({})).await
}

/// The same, with more fields in the template of each VM.
pub(crate) async fn start_vms_with(lab: &Lab, names: &[&str], fields: &Value) -> Result<()> {
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"));
    for name in names {
        let mut vm = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": name},
            "spec": {"runStrategy": "Always", "template": {"spec": {
                "domain": {"devices": {}, "memory": {"guest": "128Mi"}},
                "terminationGracePeriodSeconds": 0,
            }}},
        });
        json_patch::merge(&mut vm["spec"]["template"]["spec"], fields);
        vms.create(&PostParams::default(), &serde_json::from_value(vm)?).await.context("creating a VM")?;
    }
    for name in names {
        let is_running = |vmi: Option<&DynamicObject>| vmi.is_some_and(|vmi| text(vmi, "/status/phase") == "Running");
        lab.wait("the VM runs", TIMEOUT, vmis(lab), name, is_running).await?;
    }
    Ok(())
}

/// The UID of each VMI and of its pods. They change when a VM is restarted or migrated.
async fn running_vms(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let mut running = BTreeMap::new();
    for vmi in vmis(lab).list(&ListParams::default()).await? {
        ensure!(text(&vmi, "/status/phase") == "Running", "{} does not run", vmi.name_any());
        running.insert(vmi.name_any(), vmi.uid().unwrap_or_default());
    }
    let pods: Api<Pod> = Api::namespaced(lab.client(), "default");
    for pod in pods.list(&ListParams::default().labels("kubevirt.io=virt-launcher")).await? {
        running.insert(pod.name_any(), pod.uid().unwrap_or_default());
    }
    Ok(running)
}

async fn ca(lab: &Lab) -> Result<Vec<u8>> {
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let data = secrets.get("kubevirt-ca").await?.data.unwrap_or_default();
    Ok(data.get("tls.crt").context("no CA")?.0.clone())
}

/// What a new installation of this release contains.
async fn fresh_installation() -> Result<Snapshot> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    let snapshot = lab.installed(None).await?;
    lab.stop().await?;
    Ok(snapshot)
}

async fn the_previous_release_is_upgraded_in_place(_: Arc<SharedLabs>) -> Result<()> {
    let expected = Box::pin(fresh_installation()).await.context("in another lab")?;
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_release(&lab, KubeVirtRelease::Previous.version(), TIMEOUT).await.context("v1.7.0")?;
    start_vms(&lab, &VMS).await?;
    let running = running_vms(&lab).await?;
    the_operator_before_takes_a_failing_upgrade_back(&lab).await.context("an upgrade that fails")?;
    // v1.7.0 writes the lifetime of a certificate as another text than v1.8.4, and replaces a CA whose text differs.
    let ca_before = ca(&lab).await?;
    ensure!(running_vms(&lab).await? == running, "a VM was restarted or migrated");
    let client = lab.subresource_client();
    lab.replace_virt_operator(&VirtOperator::ours(program())).await?;
    wait_until_release(&lab, KubeVirtRelease::Current.version(), TIMEOUT).await.context("v1.8.4")?;
    let outages = client.seen();
    ensure!(outages.longest <= OUTAGE && outages.requests > 0, "{outages:?}");
    ensure!(running_vms(&lab).await? == running, "a VM was restarted or migrated");
    ensure!(ca(&lab).await? == ca_before, "the CA was replaced");
    wait_until_available(&lab).await?;
    let comparison = compare(&expected, &lab.installed(None).await?);
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    lab.stop().await
}

/// Lets virt-handler of a release crash, and waits until the resource says so after `change`.
async fn fail_upgrade(lab: &Lab, version: &str, change: impl Future<Output = Result<()>>) -> Result<()> {
    let rule = PodRule { image_contains: format!("virt-handler:{version}"), fate: PodFate::Crashes };
    lab.set_pods(|pods| pods.rules = vec![rule]);
    change.await?;
    lab.wait("the crash stops the upgrade", TIMEOUT, kubevirts(lab), "kubevirt", |kubevirt| {
        let progressing = kubevirt.and_then(|kubevirt| condition(kubevirt, "Progressing"));
        progressing.is_some_and(|(_, _, message)| {
            ["virt-handler exits with code 1", "the rollout stops here"].iter().all(|part| message.contains(part))
        })
    })
    .await
    .map(|_| ())
}

/// The pod that crashes is replaced, although it never became ready.
async fn require_handlers_of(lab: &Lab, version: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let handlers = pods.list(&ListParams::default().labels("kubevirt.io=virt-handler")).await?;
    ensure!(!handlers.items.is_empty(), "no pod of virt-handler");
    for pod in handlers {
        let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let is_of_release = containers.any(|container| {
            container.image.as_deref().is_some_and(|image| image.ends_with(&format!("virt-handler:{version}")))
        });
        ensure!(is_of_release, "{} is not of {version}", pod.name_any());
    }
    Ok(())
}

async fn the_operator_before_takes_a_failing_upgrade_back(lab: &Lab) -> Result<()> {
    let (before, now) = (KubeVirtRelease::Previous, KubeVirtRelease::Current);
    fail_upgrade(lab, now.version(), lab.replace_virt_operator(&VirtOperator::ours(program()))).await?;
    ensure!(text(&kubevirts(lab).get("kubevirt").await?, "/status/observedKubeVirtVersion") == before.version());
    lab.replace_virt_operator(&VirtOperator::reference_of(before)).await?;
    let daemon_sets: Api<DaemonSet> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("virt-handler of the release before is back", TIMEOUT, daemon_sets, "virt-handler", |found| {
        found.is_some_and(|daemon_set| {
            let annotations = daemon_set.annotations();
            let status = daemon_set.status.clone().unwrap_or_default();
            annotations.get(VERSION_ANNOTATION).is_some_and(|version| version == before.version())
                && status.updated_number_scheduled == Some(status.desired_number_scheduled)
                && status.number_available == Some(status.desired_number_scheduled)
        })
    })
    .await?;
    // The operator of v1.7.0 has no permission to delete a Secret that only v1.8.4 has. docs/upgrade.md says so.
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    secrets.delete("kubevirt-backup-ca", &DeleteParams::default()).await.context("deleting what v1.7.0 cannot")?;
    wait_until_release(lab, before.version(), TIMEOUT).await.context("taken back")?;
    require_handlers_of(lab, before.version()).await?;
    lab.set_pods(|pods| pods.rules.clear());
    Ok(())
}

async fn image_tag_there_and_back(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    create_kubevirt(&lab, &json!({})).await?;
    wait_until_available(&lab).await?;
    let before = lab.installed(None).await?;
    start_vms(&lab, &VMS).await?;
    let (running, ca_before) = (running_vms(&lab).await?, ca(&lab).await?);
    let set_tag = |tag: Value| {
        let (api, patch) = (kubevirts(&lab), json!({"spec": {"imageTag": tag}}));
        async move { api.patch("kubevirt", &PatchParams::default(), &Patch::Merge(&patch)).await }
    };
    fail_upgrade(&lab, "v1.7.0", async { Ok(set_tag(json!("v1.7.0")).await.map(|_| ())?) }).await?;
    set_tag(Value::Null).await?;
    wait_until_release(&lab, "v1.8.4", TIMEOUT).await.context("taken back")?;
    require_handlers_of(&lab, "v1.8.4").await?;
    let comparison = compare(&before, &lab.installed(None).await?);
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    lab.set_pods(|pods| pods.rules.clear());
    set_tag(json!("v1.7.0")).await?;
    wait_until_release(&lab, "v1.7.0", TIMEOUT).await.context("to v1.7.0")?;
    ensure!(running_vms(&lab).await? == running, "a VM was restarted or migrated");
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    for pod in
        pods.list(&ListParams::default().labels("kubevirt.io in (virt-api, virt-controller, virt-handler)")).await?
    {
        // A Deployment is complete while its old pods still end.
        if pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let images = pod.spec.iter().flat_map(|spec| &spec.containers).filter_map(|container| container.image.clone());
        let images: Vec<String> = images.collect();
        ensure!(images.iter().all(|image| image.ends_with(":v1.7.0")), "{}: {images:?}", pod.name_any());
    }
    set_tag(Value::Null).await?;
    wait_until_release(&lab, "v1.8.4", TIMEOUT).await.context("back to v1.8.4")?;
    ensure!(running_vms(&lab).await? == running, "a VM was restarted or migrated");
    ensure!(ca(&lab).await? == ca_before, "the CA was replaced");
    let degraded = condition(&kubevirts(&lab).get("kubevirt").await?, "Degraded").map(|(status, ..)| status);
    ensure!(degraded.as_deref() == Some("False"), "{degraded:?}");
    let comparison = compare(&before, &lab.installed(None).await?);
    ensure!(comparison.is_equal(), "{comparison}\n{}", comparison.details(5));
    lab.stop().await
}

pub(crate) fn migrations(lab: &Lab) -> Api<DynamicObject> {
    Api::all_with(lab.client(), &kubevirt_resource("VirtualMachineInstanceMigration"))
}

/// virt-controller updates VMs: it migrates those that can be migrated, and evicts the others.
async fn outdated_vms_are_updated_after_the_upgrade_and_not_before(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
    let spec = json!({"workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate", "Evict"]}});
    create_kubevirt(&lab, &spec).await?;
    wait_until_release(&lab, KubeVirtRelease::Previous.version(), TIMEOUT).await.context("v1.7.0")?;
    start_vms(&lab, &["migrated"]).await?;
    lab.set_guests(|guests| guests.live_migratable = false);
    start_vms(&lab, &["evicted"]).await?;
    let before = running_vms(&lab).await?;
    // virt-api is the last component of an upgrade. As long as it does not start, the upgrade is not complete.
    let rule = PodRule { image_contains: "virt-api:v1.8.4".to_owned(), fate: PodFate::ImageMissing };
    lab.set_pods(|pods| pods.rules = vec![rule]);
    lab.replace_virt_operator(&VirtOperator::ours(program())).await?;
    let expected = ["virt-api:v1.8.4", "cannot be pulled"];
    lab.wait("the upgrade waits for virt-api", TIMEOUT, kubevirts(&lab), "kubevirt", |kubevirt| {
        let progressing = kubevirt.and_then(|kubevirt| condition(kubevirt, "Progressing"));
        progressing.is_some_and(|(_, _, message)| expected.iter().all(|expected| message.contains(expected)))
    })
    .await?;
    // The new virt-controller runs and marks outdated VMs. In this time it may update none of them.
    for name in ["migrated", "evicted"] {
        lab.wait("the VM is outdated", TIMEOUT, vmis(&lab), name, |vmi| {
            vmi.is_some_and(|vmi| vmi.labels().contains_key("kubevirt.io/outdatedLauncherImage"))
        })
        .await?;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(running_vms(&lab).await? == before, "a VM was updated before the upgrade was complete");
    ensure!(migrations(&lab).list(&ListParams::default()).await?.items.is_empty(), "a migration was created too early");
    lab.set_pods(|pods| pods.rules.clear());
    wait_until_release(&lab, KubeVirtRelease::Current.version(), TIMEOUT).await.context("v1.8.4")?;
    lab.wait("the VM is migrated", TIMEOUT, vmis(&lab), "migrated", |vmi| {
        vmi.is_some_and(|vmi| {
            let completed = vmi.data.pointer("/status/migrationState/completed");
            completed == Some(&json!(true)) && vmi.uid().as_ref() == before.get("migrated")
        })
    })
    .await?;
    lab.wait("the VM is evicted and started again", TIMEOUT, vmis(&lab), "evicted", |vmi| {
        vmi.is_some_and(|vmi| text(vmi, "/status/phase") == "Running" && vmi.uid().as_ref() != before.get("evicted"))
    })
    .await?;
    an_edit_that_restarts_nothing_updates_nothing(&lab).await?;
    lab.stop().await
}

async fn an_edit_that_restarts_nothing_updates_nothing(lab: &Lab) -> Result<()> {
    let count = || async { anyhow::Ok(migrations(lab).list(&ListParams::default()).await?.items.len()) };
    let (before, pods) = ((running_vms(lab).await?, count().await?), component_pods(lab).await?);
    let edit = json!({"spec": {"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}});
    kubevirts(lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(&edit)).await?;
    wait_until_available(lab).await?;
    // In this time nothing may happen.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let present = component_pods(lab).await?;
    ensure!(present == pods, "the pods changed from {pods:?} to {present:?}");
    ensure!((running_vms(lab).await?, count().await?) == before, "VMs were updated, although no pod was restarted");
    Ok(())
}
