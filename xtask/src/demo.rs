//! `cargo xtask demo`: from nothing to a running virtual machine, with every step on the screen.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use lab::{KubeVirt, Lab, LabOptions, isolate, parts};

use crate::terminal::step;

const PATIENCE: Duration = Duration::from_secs(60);

const VIRTUAL_MACHINE: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: demo
  namespace: default
spec:
  runStrategy: Always
  template:
    spec:
      domain:
        cpu: {cores: 2}
        memory: {guest: 1Gi}
        devices:
          disks: [{name: root, disk: {bus: virtio}}]
          interfaces: [{name: default, masquerade: {}}]
      networks: [{name: default, pod: {}}]
      volumes: [{name: root, containerDisk: {image: quay.io/containerdisks/fedora:42}}]
";

pub(crate) fn run() -> ExitCode {
    isolate::run(
        || parts::ensure(&parts::STANDARD),
        || tokio::runtime::Runtime::new().context("starting tokio")?.block_on(show()).map(|()| ExitCode::SUCCESS),
    )
}

async fn show() -> Result<()> {
    let options = LabOptions { kubevirt: KubeVirt::Reference { custom_resource: None }, ..LabOptions::default() };
    let lab =
        step("a Kubernetes v1.36.3 control plane, and KubeVirt v1.8.4 installed by its operator", Lab::start(options))
            .await?;
    step("a VirtualMachine, admitted by virt-api and started by virt-controller", async {
        lab.create(VIRTUAL_MACHINE).await?;
        let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachine");
        let machines: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &ApiResource::from_gvk(&kind));
        lab.wait("a VirtualMachine that is ready", PATIENCE, machines, "demo", |vm| {
            vm.is_some_and(|vm| vm.data.pointer("/status/ready") == Some(&true.into()))
        })
        .await
    })
    .await?;
    eprintln!();
    kubectl(&lab, &["get", "pods", "--all-namespaces"])?;
    println!();
    kubectl(&lab, &["get", "virtualmachines,virtualmachineinstances"])?;
    eprintln!();
    eprintln!("That was a real control plane with simulated nodes; it is gone now.");
    eprintln!("To keep one: cargo xtask lab up --kubevirt reference");
    lab.stop().await
}

fn kubectl(lab: &Lab, arguments: &[&str]) -> Result<()> {
    eprintln!("$ kubectl {}", arguments.join(" "));
    let status = Command::new(parts::kubectl_dir()?.join("kubectl"))
        .args(arguments)
        .env("KUBECONFIG", lab.kubeconfig())
        .status()
        .context("running kubectl")?;
    if !status.success() {
        bail!("kubectl {} failed", arguments.join(" "));
    }
    Ok(())
}
