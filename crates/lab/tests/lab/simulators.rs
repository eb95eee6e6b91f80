//! Simulated storage, pods and extensions behave like real ones.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    admissionregistration::v1::ValidatingAdmissionPolicyBinding,
    apps::v1::Deployment,
    core::v1::{PersistentVolumeClaim, Pod},
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    CLASS_NEVER, CLASS_STANDARD, CLASS_WAIT, Extension, Lab, LabOptions, OwnProgram, PodFate, PodRule, Record,
    harness::{SharedLabs, Suite},
    tests,
};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        a_pvc_binds_as_its_storage_class_requires,
        pod_rules_select_pods_by_image,
        pods_become_ready_after_the_configured_delay,
        pods_become_ready_after_an_outage_of_the_api_server,
        the_simulators_retry_rejected_writes,
        an_exited_program_is_restarted_and_counted,
        a_deployment_creates_pods_and_its_deletion_removes_them,
        an_extension_is_served_only_after_its_installation,
    );
}

async fn a_pvc_binds_as_its_storage_class_requires(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    for (name, class) in [("binds", CLASS_STANDARD), ("waits", CLASS_WAIT), ("never", CLASS_NEVER)] {
        create_pvc(&lab, name, class).await?;
    }
    wait_for_pvc(&lab, "binds", "Bound").await?;
    ensure!(phase(&lab, "waits").await? == "Pending", "no pod uses the PVC yet");
    create_pod(&lab, "consumer", "example.org/consumer", Some("waits")).await?;
    wait_for_pvc(&lab, "waits", "Bound").await?;
    ensure!(phase(&lab, "never").await? == "Pending", "PVCs of this StorageClass never bind");

    let larger = Patch::Merge(json!({"spec": {"resources": {"requests": {"storage": "3Gi"}}}}));
    pvcs(&lab).patch("binds", &PatchParams::default(), &larger).await?;
    lab.wait("a PVC with the larger capacity", TIMEOUT, pvcs(&lab), "binds", |pvc| {
        let capacity = pvc.and_then(|pvc| pvc.status.as_ref()?.capacity.as_ref()?.get("storage").cloned());
        capacity.is_some_and(|capacity| capacity.0 == "3Gi")
    })
    .await
    .map(|_| ())
}

async fn pod_rules_select_pods_by_image(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let rule = |image: &str, fate| PodRule { image_contains: image.to_owned(), fate };
    lab.set_pods(|pods| {
        pods.rules.push(rule("example.org/crashes", PodFate::Crashes));
        pods.rules.push(rule("example.org/not-ready", PodFate::NeverReady));
    });
    for (name, image) in
        [("good", "example.org/good"), ("crashes", "example.org/crashes:1"), ("not-ready", "example.org/not-ready:1")]
    {
        create_pod(&lab, name, image, None).await?;
    }
    wait_for_pod(&lab, "good", is_ready).await?;
    wait_for_pod(&lab, "crashes", |pod| restarts(pod) >= 2).await?;
    wait_for_pod(&lab, "not-ready", |pod| has_address(pod) && !is_ready(pod)).await?;
    lab.set_pods(|pods| pods.rules.clear());
    wait_for_pod(&lab, "not-ready", is_ready).await
}

async fn pods_become_ready_after_the_configured_delay(_: Arc<SharedLabs>) -> Result<()> {
    let delay = Duration::from_secs(2);
    let mut options = LabOptions { nodes: 1, ..LabOptions::default() };
    options.pods.ready_after = delay.into();
    let lab = Lab::start(options).await?;
    let started = std::time::Instant::now();
    create_pod(&lab, "late", "example.org/late", None).await?;
    wait_for_pod(&lab, "late", is_ready).await?;
    ensure!(started.elapsed() >= delay, "the pod was already ready after {:?}", started.elapsed());
    lab.stop().await
}

async fn pods_become_ready_after_an_outage_of_the_api_server(_: Arc<SharedLabs>) -> Result<()> {
    let delay = Duration::from_secs(3);
    let mut options = LabOptions { nodes: 1, own_programs: vec![sleeper()], ..LabOptions::default() };
    options.pods.ready_after = delay.into();
    let lab = Lab::start(options).await?;
    create_pod(&lab, "simulated", "example.org/simulated", None).await?;
    create_sleeper(&lab, "real", "1000").await?;
    for name in ["simulated", "real"] {
        wait_for_pod(&lab, name, |pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())).await?;
    }
    lab.stop_api_server().await?;
    // The pods start and report while the API server is stopped, so there is no condition to wait for.
    tokio::time::sleep(delay + Duration::from_secs(1)).await;
    lab.start_api_server().await?;
    for name in ["simulated", "real"] {
        wait_for_pod(&lab, name, is_ready).await.with_context(|| format!("pod {name} did not become ready"))?;
    }
    lab.stop().await
}

async fn the_simulators_retry_rejected_writes(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    create_pod(&lab, "held-first", "example.org/held", None).await?;
    wait_for_pod(&lab, "held-first", is_ready).await?;
    lab.create(DENY_HELD_WRITES).await?;
    // A policy takes effect shortly after its creation.
    let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
    let status_change = Patch::Merge(json!({"status": {"message": "touched"}}));
    let effective = async {
        while pods(&lab).patch_status("held-first", &dry_run, &status_change).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, effective).await.context("the policy did not take effect")?;
    create_pod(&lab, "held-second", "example.org/held", None).await?;
    create_pvc(&lab, "held", CLASS_STANDARD).await?;
    let rejected = |record: &&Record| record.code.is_some_and(|code| code >= 400);
    let of_pod = |record: &&Record| record.name == "held-second" && record.subresource == "status";
    let of_volume = |record: &&Record| record.resource == "persistentvolumes" && record.verb == "create";
    let retried = async {
        loop {
            let records = lab.audit()?;
            if records.iter().filter(rejected).filter(of_pod).count() >= 3
                && records.iter().filter(rejected).filter(of_volume).count() >= 3
            {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, retried).await.context("the simulators did not retry")??;
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(lab.client());
    bindings.delete("held", &Default::default()).await?;
    wait_for_pod(&lab, "held-second", is_ready).await?;
    wait_for_pvc(&lab, "held", "Bound").await
}

async fn an_exited_program_is_restarted_and_counted(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 1, own_programs: vec![sleeper()], ..LabOptions::default() }).await?;
    create_sleeper(&lab, "brief", "1").await?;
    wait_for_pod(&lab, "brief", |pod| restarts(pod) >= 2 && is_ready(pod)).await?;
    lab.stop().await
}

async fn a_deployment_creates_pods_and_its_deletion_removes_them(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), "default");
    let labels = json!({"app": "rollout"});
    let deployment = json!({
        "metadata": {"name": "rollout"},
        "spec": {"replicas": 3, "selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "main", "image": "example.org/rollout"}]},
        }},
    });
    deployments.create(&PostParams::default(), &serde_json::from_value(deployment)?).await?;
    lab.wait("three ready pods", TIMEOUT, deployments.clone(), "rollout", |deployment| {
        deployment.and_then(|deployment| deployment.status.as_ref()?.ready_replicas) == Some(3)
    })
    .await?;
    let pod = pods(&lab).list(&ListParams::default().labels("app=rollout")).await?.items.remove(0);
    let name = pod.metadata.name.context("the pod has no name")?;
    deployments.delete("rollout", &Default::default()).await?;
    lab.wait("no pod", TIMEOUT, pods(&lab), &name, |pod| pod.is_none()).await.map(|_| ())
}

async fn an_extension_is_served_only_after_its_installation(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 1, extensions: vec![Extension::Multus], ..LabOptions::default() }).await?;
    for (extension, path) in [
        (Extension::Multus, "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions"),
        (Extension::Monitoring, "/apis/monitoring.coreos.com/v1/servicemonitors"),
        (Extension::Cdi, "/apis/cdi.kubevirt.io/v1beta1/datavolumes"),
        (Extension::OpenShift, "/apis/security.openshift.io/v1/securitycontextconstraints"),
    ] {
        ensure!(is_served(&lab, path).await? == (extension == Extension::Multus), "{extension:?}");
        lab.install(extension).await?;
        ensure!(is_served(&lab, path).await?, "{extension:?} must be served after its installation");
    }
    lab.stop().await
}

async fn is_served(lab: &Lab, path: &str) -> Result<bool> {
    match lab.client().request_text(http::Request::get(path).body(Vec::new())?).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn pvcs(lab: &Lab) -> Api<PersistentVolumeClaim> {
    Api::namespaced(lab.client(), "default")
}

pub(crate) fn pods(lab: &Lab) -> Api<Pod> {
    Api::namespaced(lab.client(), "default")
}

pub(crate) async fn create_pvc(lab: &Lab, name: &str, class: &str) -> Result<()> {
    let pvc = json!({
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": class, "resources": {"requests": {"storage": "1Gi"}}},
    });
    pvcs(lab).create(&PostParams::default(), &serde_json::from_value(pvc)?).await?;
    Ok(())
}

async fn phase(lab: &Lab, name: &str) -> Result<String> {
    Ok(pvcs(lab).get(name).await?.status.and_then(|status| status.phase).unwrap_or_default())
}

pub(crate) async fn wait_for_pvc(lab: &Lab, name: &str, phase: &str) -> Result<()> {
    lab.wait(&format!("a PVC that is {phase}"), TIMEOUT, pvcs(lab), name, |pvc| {
        pvc.and_then(|pvc| pvc.status.as_ref()?.phase.as_deref()) == Some(phase)
    })
    .await
    .map(|_| ())
}

async fn create_pod(lab: &Lab, name: &str, image: &str, pvc: Option<&str>) -> Result<()> {
    let volumes: Vec<Value> =
        pvc.iter().map(|pvc| json!({"name": "disk", "persistentVolumeClaim": {"claimName": pvc}})).collect();
    let pod = json!({
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": image}], "volumes": volumes},
    });
    wait_for_account(lab).await?;
    pods(lab).create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok(())
}

/// Denies status writes of pods whose names begin with `held-`, and the volume of the PVC `held`.
const DENY_HELD_WRITES: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: held}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: [""], apiVersions: [v1], resources: [pods/status], operations: [UPDATE]}
    - {apiGroups: [""], apiVersions: [v1], resources: [persistentvolumes], operations: [CREATE]}
  validations:
  - expression: "request.resource.resource != 'pods' || !object.metadata.name.startsWith('held-')"
  - expression: "request.resource.resource != 'persistentvolumes' || object.spec.claimRef.name != 'held'"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: held}
spec: {policyName: held, validationActions: [Deny]}
"#;

const SLEEPER: &str = "example.org/sleeper";

fn sleeper() -> OwnProgram {
    OwnProgram { image: SLEEPER.to_owned(), file: "/bin/sleep".into() }
}

async fn create_sleeper(lab: &Lab, name: &str, seconds: &str) -> Result<()> {
    let pod = json!({
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": SLEEPER, "command": ["sleep", seconds]}]},
    });
    wait_for_account(lab).await?;
    pods(lab).create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok(())
}

/// The controller creates the default service account shortly after the namespace.
pub(crate) async fn wait_for_account(lab: &Lab) -> Result<()> {
    let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(lab.client(), "default");
    lab.wait("the default service account", TIMEOUT, accounts, "default", |account| account.is_some()).await?;
    Ok(())
}

pub(crate) async fn wait_for_pod(lab: &Lab, name: &str, condition: impl Fn(&Pod) -> bool + Send + Sync) -> Result<()> {
    lab.wait("a pod as expected", TIMEOUT, pods(lab), name, |pod| pod.is_some_and(&condition)).await.map(|_| ())
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn has_address(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(|status| status.pod_ip.is_some())
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.into_iter().flatten().map(|status| status.restart_count).sum()
}
