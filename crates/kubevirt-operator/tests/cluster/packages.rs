//! The operator as users install it: from the files in `config/`, as a pod with its own service account.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use vitivirt_api::IMAGE_NAME;
use vitivirt_lab::{
    Extension, KubeVirtInstaller, Lab, LabOptions, OwnProgram,
    harness::{SharedLabs, Suite},
};

use crate::machine_test::create_storage_class;

const ROLLOUT: [&str; 6] = [
    "rollout",
    "status",
    "deployment/kubevirt-operator-controller-manager",
    "--namespace",
    "kubevirt-operator-system",
    "--timeout=120s",
];

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        kubectl_apply_of_config_installs_the_operator,
    );
}

/// A lab with KubeVirt, in which pods with our image run the operator.
pub(crate) async fn lab_for_pods() -> Result<Lab> {
    Box::pin(Lab::start(LabOptions {
        kubevirt: KubeVirtInstaller::Reference { custom_resource: None },
        extensions: vec![Extension::Multus, Extension::Monitoring, Extension::Cdi],
        own_programs: vec![OwnProgram {
            image: IMAGE_NAME.to_owned(),
            file: env!("CARGO_BIN_EXE_kubevirt-operator").into(),
        }],
        ..LabOptions::default()
    }))
    .await
}

/// The path of a file or folder of the repository.
pub(crate) fn repository_path(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name).display().to_string()
}

/// Applies four examples and one that boots an image, and returns when all Machines are running.
pub(crate) async fn run_examples(lab: &Lab) -> Result<()> {
    create_storage_class(lab, "fast-ssd").await?;
    for name in ["networks", "container-disk-vm", "basic-vm", "custom-vm", "networked-vm", "cloud-init-vm"] {
        lab.kubectl(&["apply", "-f", &repository_path(&format!("examples/{name}.yaml"))]).await?;
    }
    wait_until_all_run(lab).await
}

/// Waits until every Machine of the default namespace is running.
pub(crate) async fn wait_until_all_run(lab: &Lab) -> Result<()> {
    let running = "--for=jsonpath={.status.phase}=Running";
    lab.kubectl(&["wait", "machines.vitistack.io", "--all", running, "--timeout=120s"]).await.map(drop)
}

/// The metrics of the operator's pods require TLS and a token.
async fn check_secure_metrics(lab: &Lab) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), "kubevirt-operator-system");
    let pods = pods.list(&ListParams::default().labels("app.kubernetes.io/component=manager")).await?;
    // A pod of the Deployment before the change may still be ending.
    let pod = pods.items.iter().find(|pod| {
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut variables = containers.flat_map(|container| container.env.iter().flatten());
        variables.any(|variable| variable.name == "METRICS_TLS")
    });
    let (status, body) = lab.get_from_pod(pod.context("no pod with METRICS_TLS")?, 8080, "/metrics").await?;
    ensure!(status == 401, "{status}: {body}");
    Ok(())
}

async fn kubectl_apply_of_config_installs_the_operator(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(lab_for_pods()).await?;
    let file = repository_path;
    let (crd, rbac, manager) = (file("config/crd"), file("config/rbac"), file("config/manager"));
    Box::pin(lab.kubectl(&["apply", "-f", &crd, "-f", &rbac, "-f", &manager])).await?;
    lab.kubectl(&ROLLOUT).await?;
    run_examples(&lab).await?;
    // Some samples need more than this lab has in order to run. All of them are valid.
    lab.kubectl(&["apply", "-k", &file("config/samples"), "--dry-run=server"]).await?;

    let again = lab.kubectl(&["apply", "-k", &file("config")]).await?;
    let changed: Vec<&str> = again.lines().filter(|line| !line.ends_with(" unchanged")).collect();
    ensure!(changed.is_empty() && !again.is_empty(), "kustomize gives other objects: {changed:?}");

    Box::pin(lab.kubectl(&["apply", "-k", &file("config/secure-metrics")])).await?;
    lab.kubectl(&["apply", "-f", &file("config/secure-metrics/monitor.yaml")]).await?;
    lab.kubectl(&ROLLOUT).await?;
    check_secure_metrics(&lab).await?;

    // Machines, their VMs and disks stay when the operator is removed.
    lab.kubectl(&["delete", "-f", &manager, "-f", &rbac]).await?;
    let left = lab.kubectl(&["get", "virtualmachines,persistentvolumeclaims", "--output=name"]).await?;
    ensure!(left.lines().count() >= 10, "{left}");
    Box::pin(lab.kubectl(&["apply", "-f", &rbac, "-f", &manager])).await?;
    lab.kubectl(&ROLLOUT).await?;
    lab.kubectl(&["delete", "machines.vitistack.io", "--all", "--timeout=120s"]).await?;
    Ok(())
}
