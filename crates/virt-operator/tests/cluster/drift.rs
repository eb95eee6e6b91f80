//! Changes by other clients: objects that lost their marks, adopted objects, restarts by users, and fights.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Pod, Service},
        events::v1::Event,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
    runtime::wait::await_condition,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use vitivirt_lab::{
    EditedInstallation, Lab, Record, VirtOperator,
    browser::Browser,
    get_status_page,
    harness::{SharedLabs, Suite},
    loopback,
};
use vitivirt_page::testing::parse;

use crate::support::{NAMESPACE, TIMEOUT, operator_requests, program, writes_since};

/// Set by `cargo xtask chaos fight`.
const LONG_FIGHT: &str = "FIGHT_FOR_THREE_MINUTES";

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        objects_that_another_client_changed_are_restored,
        a_fight_with_another_client_is_limited_and_reported,
    );
}

/// One installation for all of them, because an installation takes longer than a repair.
async fn objects_that_another_client_changed_are_restored(_: Arc<SharedLabs>) -> Result<()> {
    let installation = EditedInstallation::start(VirtOperator::ours(program()), &json!({})).await?;
    the_status_page_names_the_client(&installation).await.context("status page")?;
    lost_marks_are_restored(&installation).await.context("marks")?;
    an_owner_of_a_crd_is_removed(&installation).await.context("owner")?;
    a_restart_by_a_user_is_kept(&installation).await.context("restart")?;
    an_instancetype_of_another_client_is_adopted(&installation).await.context("instancetype")?;
    a_changed_instancetype_is_restored_exactly(&installation).await.context("changed instancetype")?;
    an_instancetype_that_the_release_does_not_have_is_deleted(&installation).await.context("unknown instancetype")?;
    installation.lab.stop().await
}

fn manager(name: &str) -> PatchParams {
    PatchParams { field_manager: Some(name.to_owned()), ..PatchParams::default() }
}

async fn the_status_page_names_the_client(installation: &EditedInstallation) -> Result<()> {
    let lab = &installation.lab;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let replicas = |deployment: &Deployment| deployment.spec.as_ref().and_then(|spec| spec.replicas);
    let before = replicas(&deployments.get("virt-controller").await?);
    let scale = json!({"spec": {"replicas": 5}});
    let scaled = deployments.patch("virt-controller", &manager("kubectl-scale"), &Patch::Merge(&scale)).await?;
    let generation = scaled.metadata.generation;
    lab.wait("the replicas are restored", TIMEOUT, deployments, "virt-controller", |deployment| {
        deployment.is_some_and(|found| replicas(found) == before && found.metadata.generation > generation)
    })
    .await?;
    installation.wait_until_complete().await?;

    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let operators = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?.items;
    let seen = wait_until_idle(lab).await?;
    let mut leaders = 0;
    for pod in &operators {
        let address =
            pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).context("a pod has no address")?;
        let (status, html) = get_status_page(address.parse()?, "/").await?;
        let page = parse(&html);
        ensure!(status == 200 && page.errors.is_empty(), "{status}: {:?}", page.errors);
        let mut expected = vec!["Deployed", "virt-handler", "kubevirt-virt-api-certs", "valid for"];
        if page.text.contains("this replica is the leader") {
            leaders += 1;
            a_browser_shows_the_page(lab, address.parse()?).await.context("Chromium")?;
            let drift = "Deployment kubevirt/virt-controller was changed by kubectl-scale: spec.replicas";
            expected.extend([drift, "nothing differs from the desired state"]);
        } else {
            expected.push("on standby: the leader is virt-operator-");
        }
        for text in expected {
            ensure!(page.text.contains(text), "{text:?} is missing in {}", page.text);
        }
    }
    ensure!(leaders == 1 && operators.len() > 1, "{leaders} of {} replicas lead", operators.len());
    let sent = requests(lab)?.split_off(seen);
    ensure!(sent.is_empty(), "{sent:?}");
    Ok(())
}

async fn a_browser_shows_the_page(lab: &Lab, address: IpAddr) -> Result<()> {
    let Some(mut browser) = Browser::start_if_installed(lab).await? else { return Ok(()) };
    let visits = browser.check_pages(&format!("http://{}:8082", loopback(address)), &["/"], "virt-operator").await?;
    let page = visits.first().context("no page was shown")?;
    ensure!(page.text.contains("changed by kubectl-scale"), "{}", page.text);
    Ok(())
}

/// Every request of the operator but the renewals of its Lease. A watch that the server ends is opened again.
fn requests(lab: &Lab) -> Result<Vec<Record>> {
    let mut requests = operator_requests(lab)?;
    requests.retain(|record| record.resource != "leases" && record.verb != "watch");
    Ok(requests)
}

/// Waits until the operator has sent no request for three seconds, and returns how many it has sent. The sleep is the
/// assertion: idle means that nothing happens for this time.
async fn wait_until_idle(lab: &Lab) -> Result<usize> {
    let deadline = Instant::now() + TIMEOUT;
    let mut before = requests(lab)?.len();
    loop {
        sleep(Duration::from_secs(3)).await;
        let now = requests(lab)?.len();
        if now == before {
            return Ok(now);
        }
        ensure!(Instant::now() < deadline, "the operator does not come to rest");
        before = now;
    }
}

async fn lost_marks_are_restored(installation: &EditedInstallation) -> Result<()> {
    let lab = &installation.lab;
    let services: Api<Service> = Api::namespaced(lab.client(), NAMESPACE);
    let before = services.get("virt-api").await?;
    let seen = operator_requests(lab)?.len();
    let unmarked = json!({"metadata": {
        "labels": {"app.kubernetes.io/managed-by": null},
        "annotations": {
            "kubevirt.io/install-strategy-identifier": null,
            "kubevirt.io/install-strategy-registry": null,
            "kubevirt.io/install-strategy-version": null,
        },
    }});
    services.patch("virt-api", &manager("kubectl-edit"), &Patch::Merge(&unmarked)).await?;
    lab.wait("the marks are restored", TIMEOUT, services, "virt-api", |service| {
        service.is_some_and(|service| {
            service.labels() == before.labels()
                && service.annotations() == before.annotations()
                && service.uid() == before.uid()
        })
    })
    .await?;
    // The API server may send the watch event before it logs the request.
    wait_until_idle(lab).await?;
    let writes = writes_since(lab, seen)?;
    ensure!(writes.len() == 1, "{writes:?}");
    Ok(())
}

/// The garbage collector would delete the CRD, and every VM with it, together with the owner.
async fn an_owner_of_a_crd_is_removed(installation: &EditedInstallation) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(installation.lab.client());
    let name = "virtualmachines.kubevirt.io";
    let owner = crds.get("virtualmachineinstances.kubevirt.io").await?;
    let owners = json!({"metadata": {"ownerReferences": [{
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "name": owner.name_any(), "uid": owner.uid(),
    }]}});
    crds.patch(name, &manager("kubectl-edit"), &Patch::Merge(&owners)).await?;
    installation
        .lab
        .wait("the owner is removed", TIMEOUT, crds, name, |crd| {
            crd.is_some_and(|crd| crd.owner_references().is_empty())
        })
        .await
        .map(|_| ())
}

/// As `kubectl rollout restart` does.
async fn a_restart_by_a_user_is_kept(installation: &EditedInstallation) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(installation.lab.client(), NAMESPACE);
    let restarted_at = |deployment: &Deployment| {
        let template = deployment.spec.as_ref()?.template.metadata.as_ref()?;
        template.annotations.as_ref()?.get("kubectl.kubernetes.io/restartedAt").cloned()
    };
    let restart =
        json!({"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}});
    let patched =
        deployments.patch("virt-controller", &manager("kubectl-rollout"), &Patch::Strategic(&restart)).await?;
    let generation = patched.metadata.generation;
    let lab = &installation.lab;
    lab.wait("the pods are replaced", TIMEOUT, deployments.clone(), "virt-controller", |deployment| {
        let status = deployment.and_then(|deployment| Some((deployment, deployment.status.as_ref()?)));
        status.is_some_and(|(deployment, status)| {
            let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            status.observed_generation >= generation
                && status.updated_replicas == replicas
                && status.replicas == replicas
        })
    })
    .await?;
    installation.edit(&json!({"customizeComponents": {"flags": {"controller": {"v": "4"}}}})).await?;
    installation.wait_until_complete().await?;
    let deployment = deployments.get("virt-controller").await?;
    ensure!(restarted_at(&deployment).as_deref() == Some("now"), "{:?}", deployment.spec);
    Ok(())
}

fn instancetypes(installation: &EditedInstallation) -> Api<DynamicObject> {
    let of = GroupVersionKind::gvk("instancetype.kubevirt.io", "v1beta1", "VirtualMachineClusterInstancetype");
    Api::all_with(installation.lab.client(), &ApiResource::from_gvk(&of))
}

/// Labels, annotations and the generation of the resource too.
async fn a_changed_instancetype_is_restored_exactly(installation: &EditedInstallation) -> Result<()> {
    let instancetypes = instancetypes(installation);
    let before = instancetypes.get("u1.large").await?;
    let change = json!({
        "metadata": {
            "labels": {"mine": "1"},
            "annotations": {"mine": "1", "kubevirt.io/generation": "4711"},
        },
        "spec": {"cpu": {"guest": 1024}},
    });
    instancetypes.patch("u1.large", &manager("kubectl-edit"), &Patch::Merge(&change)).await?;
    installation
        .lab
        .wait("the instancetype is restored", TIMEOUT, instancetypes, "u1.large", |found| {
            found.is_some_and(|found| {
                found.labels() == before.labels()
                    && found.annotations() == before.annotations()
                    && found.data["spec"] == before.data["spec"]
            })
        })
        .await
        .map(|_| ())
}

async fn an_instancetype_that_the_release_does_not_have_is_deleted(installation: &EditedInstallation) -> Result<()> {
    let instancetypes = instancetypes(installation);
    let labels = instancetypes.get("u1.small").await?.labels().clone();
    let unknown = json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1",
        "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "unknown", "labels": labels},
        "spec": {"cpu": {"guest": 1}, "memory": {"guest": "1Gi"}},
    });
    instancetypes.create(&PostParams::default(), &serde_json::from_value(unknown)?).await?;
    installation.lab.wait("it is deleted", TIMEOUT, instancetypes, "unknown", |found| found.is_none()).await.map(|_| ())
}

async fn an_instancetype_of_another_client_is_adopted(installation: &EditedInstallation) -> Result<()> {
    let instancetypes = instancetypes(installation);
    let expected = instancetypes.get("u1.small").await?;
    installation.edit(&json!({"configuration": {"commonInstancetypesDeployment": {"enabled": false}}})).await?;
    installation.wait_until_complete().await?;
    let foreign = json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1",
        "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "u1.small", "labels": {"app.kubernetes.io/managed-by": "someone"}, "annotations": {"mine": "1"}},
        "spec": {"cpu": {"guest": 7}, "memory": {"guest": "1Gi"}},
    });
    instancetypes.create(&PostParams::default(), &serde_json::from_value(foreign)?).await?;
    installation.edit(&json!({})).await?;
    installation.wait_until_complete().await?;
    let adopted = instancetypes.get("u1.small").await?;
    ensure!(adopted.data["spec"] == expected.data["spec"], "{:?}", adopted.data);
    ensure!(adopted.labels() == expected.labels(), "{:?}", adopted.labels());
    ensure!(!adopted.annotations().contains_key("mine"), "{:?}", adopted.annotations());
    Ok(())
}

/// A client that undoes each repair. Each attempt of it needs a repair, so the operator decides how long it takes.
async fn undo_repairs(deployments: Api<Deployment>, time: Duration) -> Result<usize> {
    let replicas = |deployment: Option<&Deployment>| deployment.and_then(|found| found.spec.as_ref()?.replicas);
    let until = Instant::now() + time;
    for undone in 0.. {
        let repaired = await_condition(deployments.clone(), "virt-controller", |found: Option<&Deployment>| {
            replicas(found) == Some(2)
        });
        match timeout(until.saturating_duration_since(Instant::now()), repaired).await {
            Ok(found) => drop(found?),
            Err(_) => return Ok(undone),
        }
        let scale: Value = json!({"spec": {"replicas": 3}});
        deployments.patch("virt-controller", &manager("scaler"), &Patch::Merge(&scale)).await?;
    }
    Ok(0)
}

/// The number of writes in each minute since the first one. A write is decided a moment before it is recorded, so the
/// next minute may seem to begin a moment early.
fn writes_per_minute(writes: &[Record]) -> BTreeMap<u64, usize> {
    let mut minutes = BTreeMap::new();
    for record in writes {
        let since_first = record.time.duration_since(writes[0].time).unsigned_abs();
        let minute = (since_first + Duration::from_secs(2)).as_secs() / 60;
        *minutes.entry(minute).or_default() += 1;
    }
    minutes
}

/// At most ten writes in the first minute, then one per minute.
async fn a_fight_with_another_client_is_limited_and_reported(_: Arc<SharedLabs>) -> Result<()> {
    let is_long = std::env::var_os(LONG_FIGHT).is_some();
    let time = Duration::from_secs(if is_long { 180 } else { 8 });
    let installation = EditedInstallation::start(VirtOperator::ours(program()), &json!({})).await?;
    let lab = &installation.lab;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), NAMESPACE);
    let seen = operator_requests(lab)?.len();
    let undone = undo_repairs(deployments.clone(), time).await?;
    let mut writes = writes_since(lab, seen)?;
    writes.retain(|record| record.name == "virt-controller");
    let minutes = writes_per_minute(&writes);
    let is_limited =
        |(minute, writes): (&u64, &usize)| if *minute == 0 { (5..=10).contains(writes) } else { *writes <= 1 };
    ensure!(!writes.is_empty() && minutes.iter().all(is_limited), "{minutes:?} writes per minute, {undone} undone");
    let events: Api<Event> = Api::namespaced(lab.client(), NAMESPACE);
    let deadline = Instant::now() + TIMEOUT;
    let is_reported = |event: &Event| {
        let note = event.note.as_deref().unwrap_or_default();
        event.reason.as_deref() == Some("RepeatedDrift") && note.contains("virt-controller") && note.contains("scaler")
    };
    while !events.list(&Default::default()).await?.items.iter().any(is_reported) {
        ensure!(Instant::now() < deadline, "no event names the other client");
        // The name of the event is not known, so this polls the list.
        sleep(Duration::from_millis(200)).await;
    }
    // After the fight the operator repairs within a minute. A new desired state is written at once.
    let expected = if is_long { 2 } else { 1 };
    if !is_long {
        installation.edit(&json!({"infra": {"replicas": 1}})).await?;
    }
    let converged =
        |deployment: Option<&Deployment>| deployment.and_then(|found| found.spec.as_ref()?.replicas) == Some(expected);
    lab.wait("the fight is over", Duration::from_secs(60), deployments, "virt-controller", converged).await?;
    installation.lab.stop().await
}
