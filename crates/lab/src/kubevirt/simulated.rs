//! VM and VMI status without virt-api, virt-controller and pods, for benchmarks with thousands of VMs.
//!
//! It writes the final status of virt-controller and virt-handler with as few writes as possible. Benchmarks use it to
//! measure cost; tests of behaviour must not use it.

use std::{net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    runtime::watcher,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::kubevirt_resource;
use crate::{
    addresses::AddressRange,
    object_watch::run_per_object,
    virt_handler::{BOOT, GuestBehaviour},
    vmi,
};

const RETRY: Duration = Duration::from_millis(200);

#[derive(Clone)]
pub(crate) struct SimulatedKubeVirt {
    pub(crate) client: Client,
    pub(crate) address_range: Arc<AddressRange>,
    pub(crate) nodes: u8,
    pub(crate) behaviour: GuestBehaviour,
    pub(crate) seed: u64,
}

fn vm_resource() -> ApiResource {
    kubevirt_resource("VirtualMachine")
}

impl SimulatedKubeVirt {
    /// Runs until cancelled.
    pub(crate) async fn run(self) {
        let vms: Api<DynamicObject> = Api::all_with(self.client.clone(), &vm_resource());
        run_per_object(vms, watcher::Config::default(), |_, _| {}, |changes| self.clone().run_vm(changes)).await;
    }

    async fn run_vm(self, mut changes: watch::Receiver<Option<DynamicObject>>) {
        let address = self.address_range.next_pod();
        let mut done = None;
        loop {
            let Some(vm) = changes.borrow_and_update().clone() else { return };
            if vm.metadata.deletion_timestamp.is_some() {
                return;
            }
            let should_run = should_run(&vm);
            if done == Some((should_run, vm.metadata.generation)) {
                if changes.changed().await.is_err() {
                    return;
                }
                continue;
            }
            match self.reconcile(&vm, should_run, address).await {
                Ok(()) => done = Some((should_run, vm.metadata.generation)),
                Err(error) => {
                    tracing::debug!("simulated KubeVirt, {}: {error:#}", vm.name_any());
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn reconcile(&self, vm: &DynamicObject, should_run: bool, address: IpAddr) -> Result<()> {
        let (name, namespace) = (vm.name_any(), vm.namespace().unwrap_or_default());
        let instances: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &vmi::resource());
        if should_run {
            tokio::time::sleep(self.behaviour.boots_after.pick(self.seed, BOOT, &format!("{namespace}/{name}"))).await;
            let [_, _, third, fourth] = match address {
                IpAddr::V4(address) => address.octets(),
                IpAddr::V6(_) => [0; 4],
            };
            let node = crate::node::name(1 + (third ^ fourth) % self.nodes.max(1));
            let instance: DynamicObject =
                serde_json::from_value(instance(vm, &node, &address.to_string())).context("building a VMI")?;
            ignore_existing(instances.create(&PostParams::default(), &instance).await)?;
        } else {
            ignore_missing(instances.delete(&name, &DeleteParams::default()).await)?;
        }
        let vms: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &vm_resource());
        let status = json!({"status": vm_status(vm, should_run)});
        vms.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.context("writing VM status")?;
        Ok(())
    }
}

fn should_run(vm: &DynamicObject) -> bool {
    let strategy = vm.data.pointer("/spec/runStrategy").and_then(Value::as_str);
    let running = vm.data.pointer("/spec/running").and_then(Value::as_bool);
    !matches!(strategy, Some("Halted")) && running != Some(false)
}

fn vm_status(vm: &DynamicObject, running: bool) -> Value {
    let now = vmi::now();
    json!({
        "created": running,
        "ready": running,
        "printableStatus": if running { "Running" } else { "Stopped" },
        "observedGeneration": vm.metadata.generation,
        "desiredGeneration": vm.metadata.generation,
        "runStrategy": vm.data.pointer("/spec/runStrategy"),
        "conditions": [{
            "type": "Ready",
            "status": if running { "True" } else { "False" },
            "lastProbeTime": null,
            "lastTransitionTime": now,
        }],
    })
}

fn instance(vm: &DynamicObject, node: &str, address: &str) -> Value {
    let now = vmi::now();
    let interfaces = vm
        .data
        .pointer("/spec/template/spec/domain/devices/interfaces")
        .and_then(Value::as_array)
        .map(|interfaces| {
            interfaces
                .iter()
                .map(|interface| {
                    json!({
                        "name": interface.get("name"),
                        "mac": interface.get("macAddress"),
                        "ipAddress": address,
                        "ipAddresses": [address],
                        "infoSource": "domain",
                    })
                })
                .collect::<Vec<_>>()
        })
        .unwrap_or_default();
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": vm.name_any(),
            "namespace": vm.namespace(),
            "labels": vm.data.pointer("/spec/template/metadata/labels"),
            "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachine",
                "name": vm.name_any(),
                "uid": vm.uid(),
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": vm.data.pointer("/spec/template/spec"),
        "status": {
            "phase": "Running",
            "nodeName": node,
            "interfaces": interfaces,
            "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": null, "lastTransitionTime": now}],
        },
    })
}

fn ignore_existing<T>(result: kube::Result<T>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        other => other.map(|_| ()).context("creating a VMI"),
    }
}

fn ignore_missing<T>(result: kube::Result<T>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        other => other.map(|_| ()).context("deleting a VMI"),
    }
}
