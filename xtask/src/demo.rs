//! `cargo xtask demo`: from an empty cluster to a running VM, with output for every step.

use std::{
    process::{Command, ExitCode},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use vitivirt_lab::{Lab, LabOptions, VirtOperator, components, isolate};

use crate::{kubevirt_operator, programs, terminal::step};

const TIMEOUT: Duration = Duration::from_secs(60);

const MACHINE: &str = include_str!("../../examples/basic-vm.yaml");

pub(crate) fn run() -> ExitCode {
    isolate::run(
        || {
            components::ensure(&components::STANDARD)?;
            programs::build(false).map(|_| ())
        },
        || tokio::runtime::Runtime::new().context("starting tokio")?.block_on(run_demo()).map(|()| ExitCode::SUCCESS),
    )
}

async fn run_demo() -> Result<()> {
    let lab = step("start an empty Kubernetes v1.36.3", Lab::start(LabOptions::default())).await?;
    step("install virt-operator with `virt-operator manifests`", async {
        lab.create_virt_operator(&VirtOperator::ours(programs::stage("debug", "virt-operator")?)).await?;
        lab.wait_for_virt_operator(TIMEOUT).await
    })
    .await?;
    step("create a KubeVirt resource and wait until KubeVirt v1.8.4 is deployed", lab.deploy_kubevirt(None)).await?;
    let _operator = step("start kubevirt-operator with its own service account", async {
        kubevirt_operator::install(&lab).await?;
        kubevirt_operator::start(&lab, "debug").await
    })
    .await?;
    step("create a Machine and wait until its VM is running", async {
        lab.create(MACHINE).await?;
        let kind = GroupVersionKind::gvk("vitistack.io", "v1alpha1", "Machine");
        let machines: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &ApiResource::from_gvk(&kind));
        lab.wait("Machine in phase Running", TIMEOUT, machines, "basic-vm", |machine| {
            machine.is_some_and(|machine| machine.data.pointer("/status/phase") == Some(&"Running".into()))
        })
        .await
    })
    .await?;
    eprintln!();
    kubectl(&lab, &["get", "pods", "--all-namespaces"])?;
    println!();
    kubectl(&lab, &["get", "machines,virtualmachines,virtualmachineinstances,persistentvolumeclaims"])?;
    eprintln!();
    eprintln!("This was a real control plane with simulated nodes. The demo has stopped it.");
    eprintln!("To start a lab that keeps running: cargo xtask lab up --kubevirt ours");
    lab.stop().await
}

fn kubectl(lab: &Lab, arguments: &[&str]) -> Result<()> {
    eprintln!("$ kubectl {}", arguments.join(" "));
    let status = Command::new(components::kubectl_dir()?.join("kubectl"))
        .args(arguments)
        .env("KUBECONFIG", lab.kubeconfig())
        .status()
        .context("running kubectl")?;
    if !status.success() {
        bail!("kubectl {} failed", arguments.join(" "));
    }
    Ok(())
}
