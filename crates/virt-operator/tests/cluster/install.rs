//! From an empty cluster to KubeVirt: this operator installs it, with the real virt-api and virt-controller.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    harness::{SharedLabs, Suite},
    kubevirt_resource,
};

use crate::support::{
    TIMEOUT, kubevirts, operator_requests, program, replace_operator, text, touch_kubevirt, wait_until_available,
};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_vm_runs_on_the_installed_kubevirt", a_vm_runs_on_the_installed_kubevirt);
    suite.test(
        "virt_handler_may_change_only_kubevirt_metadata_of_its_own_node",
        virt_handler_may_change_only_kubevirt_metadata_of_its_own_node,
    );
    suite.test(
        "an_unchanged_installation_causes_no_writes_even_with_a_new_leader",
        an_unchanged_installation_causes_no_writes_even_with_a_new_leader,
    );
}

async fn a_vm_runs_on_the_installed_kubevirt(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"));
    vms.create(&PostParams::default(), &serde_json::from_value(vm("runs"))?).await.context("creating a VM")?;
    lab.wait("VM is running", TIMEOUT, vms, "runs", |vm| {
        vm.is_some_and(|vm| text(vm, "/status/printableStatus") == "Running")
    })
    .await?;
    Ok(())
}

async fn virt_handler_may_change_only_kubevirt_metadata_of_its_own_node(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    let nodes: Api<Node> = Api::all(lab.client());
    let names: Vec<String> =
        nodes.list(&Default::default()).await?.items.into_iter().filter_map(|node| node.metadata.name).collect();
    let [own, other, ..] = names.as_slice() else { bail!("the lab has {} nodes", names.len()) };
    let handler: Api<Node> = Api::all(lab.virt_handler_client(own).await?);
    let attempts = [
        ("KubeVirt label", own, json!({"metadata": {"labels": {"kubevirt.io/probe": "a"}}}), true),
        ("KubeVirt annotation", own, json!({"metadata": {"annotations": {"kubevirt.io/probe": "a"}}}), true),
        ("CPU model label", own, json!({"metadata": {"labels": {"cpu-model.node.kubevirt.io/probe": "true"}}}), true),
        ("other label", own, json!({"metadata": {"labels": {"example.com/probe": "a"}}}), false),
        ("other annotation", own, json!({"metadata": {"annotations": {"example.com/x": "a"}}}), false),
        ("spec", own, json!({"spec": {"unschedulable": true}}), false),
        ("finalizer", own, json!({"metadata": {"finalizers": ["example.com/x"]}}), false),
        ("KubeVirt label of another node", other, json!({"metadata": {"labels": {"kubevirt.io/probe": "a"}}}), false),
    ];
    for (change, node, patch, allowed) in attempts {
        let result = handler.patch(node, &PatchParams::default(), &Patch::Strategic(&patch)).await;
        match (allowed, result) {
            (true, Ok(_)) => {}
            (true, Err(error)) => bail!("{change} on {node} was denied: {error}"),
            (false, Ok(_)) => bail!("{change} on {node} was allowed"),
            (false, Err(error)) => ensure!(
                error.to_string().contains("denied") || error.to_string().contains("forbidden"),
                "{change}: {error}"
            ),
        }
    }
    Ok(())
}

async fn an_unchanged_installation_causes_no_writes_even_with_a_new_leader(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    wait_until_available(&lab).await?;
    let before = operator_requests(&lab)?.len();
    touch_kubevirt(&kubevirts(&lab), 20).await?;
    replace_operator(&lab).await?;
    wait_until_available(&lab).await?;
    let records = operator_requests(&lab)?;
    let writes: BTreeMap<String, usize> = records
        .iter()
        .skip(before)
        .filter(|record| record.is_write() && record.resource != "leases" && record.resource != "events")
        .fold(BTreeMap::new(), |mut writes, record| {
            *writes.entry(format!("{} {} {}", record.verb, record.resource, record.name)).or_default() += 1;
            writes
        });
    ensure!(writes.is_empty(), "nothing changed, but the operator wrote {writes:?}");
    Ok(())
}

pub(crate) fn vm(name: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "runStrategy": "Always",
            "template": {"spec": {
                "domain": {
                    "cpu": {"cores": 1},
                    "memory": {"guest": "128Mi"},
                    "devices": {
                        "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                        "interfaces": [{"name": "default", "masquerade": {}}],
                    },
                },
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "root", "containerDisk": {"image": "example.com/disk:1"}}],
            }},
        },
    })
}
