//! The operator as users install it: from the files in `config/`, as a pod with its own service account.

use std::{path::Path, sync::Arc};

use anyhow::{Result, ensure};
use vitivirt_lab::{
    Extension, KubeVirtInstaller, Lab, LabOptions, OwnProgram,
    harness::{SharedLabs, Suite},
};

use crate::machine_test::create_storage_class;

/// Matches the repository of the image with both programs.
const IMAGE: &str = "vitistack/kubevirt-operator";
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

async fn kubectl_apply_of_config_installs_the_operator(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(Lab::start(LabOptions {
        kubevirt: KubeVirtInstaller::Reference { custom_resource: None },
        extensions: vec![Extension::Multus],
        own_programs: vec![OwnProgram {
            image: IMAGE.to_owned(),
            file: env!("CARGO_BIN_EXE_kubevirt-operator").into(),
        }],
        ..LabOptions::default()
    }))
    .await?;
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name).display().to_string();
    let (crd, rbac, manager) = (file("config/crd"), file("config/rbac"), file("config/manager"));
    Box::pin(lab.kubectl(&["apply", "-f", &crd, "-f", &rbac, "-f", &manager])).await?;
    lab.kubectl(&ROLLOUT).await?;

    create_storage_class(&lab, "fast-ssd").await?;
    lab.kubectl(&["apply", "-f", &file("examples/networks.yaml")]).await?;
    for name in ["basic-vm", "custom-vm", "networked-vm", "cloud-init-vm"] {
        lab.kubectl(&["apply", "-f", &file(&format!("examples/{name}.yaml"))]).await?;
    }
    let running = "--for=jsonpath={.status.phase}=Running";
    lab.kubectl(&["wait", "machines.vitistack.io", "--all", running, "--timeout=120s"]).await?;

    let again = lab.kubectl(&["apply", "-k", &file("config")]).await?;
    let changed: Vec<&str> = again.lines().filter(|line| !line.ends_with(" unchanged")).collect();
    ensure!(changed.is_empty() && !again.is_empty(), "kustomize gives other objects: {changed:?}");

    // Machines, their VMs and disks stay when the operator is removed.
    lab.kubectl(&["delete", "-f", &manager, "-f", &rbac]).await?;
    let left = lab.kubectl(&["get", "virtualmachines,persistentvolumeclaims", "--output=name"]).await?;
    ensure!(left.lines().count() >= 8, "{left}");
    Box::pin(lab.kubectl(&["apply", "-f", &rbac, "-f", &manager])).await?;
    lab.kubectl(&ROLLOUT).await?;
    lab.kubectl(&["delete", "machines.vitistack.io", "--all", "--timeout=120s"]).await?;
    Ok(())
}
