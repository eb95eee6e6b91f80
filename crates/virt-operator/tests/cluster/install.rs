//! From an empty cluster to KubeVirt: installed by ours, with the real virt-api and virt-controller.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::kubevirt_resource;

use crate::world::{PATIENCE, kubevirts, operator_requests, program, replace_operator, settled, text};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_virtual_machine_runs_on_what_was_installed", |labs| async move {
        let lab = labs.ours(&program()).await?;
        let vms: Api<DynamicObject> =
            Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"));
        vms.create(&PostParams::default(), &serde_json::from_value(vm("runs"))?).await.context("creating a VM")?;
        lab.wait("a VM that runs", PATIENCE, vms, "runs", |vm| {
            vm.is_some_and(|vm| text(vm, "/status/printableStatus") == "Running")
        })
        .await?;
        Ok(())
    });

    suite.test("a_node_s_virt_handler_may_mark_its_own_node_and_nothing_else", |labs| async move {
        let lab = labs.ours(&program()).await?;
        let nodes: Api<Node> = Api::all(lab.client());
        let names: Vec<String> =
            nodes.list(&Default::default()).await?.items.into_iter().filter_map(|node| node.metadata.name).collect();
        let [own, other, ..] = names.as_slice() else { anyhow::bail!("the lab has {} nodes", names.len()) };
        let handler: Api<Node> = Api::all(lab.virt_handler_client(own).await?);
        let attempts = [
            ("a label of KubeVirt", own, json!({"metadata": {"labels": {"kubevirt.io/probe": "a"}}}), true),
            ("an annotation of KubeVirt", own, json!({"metadata": {"annotations": {"kubevirt.io/probe": "a"}}}), true),
            (
                "a label of a CPU",
                own,
                json!({"metadata": {"labels": {"cpu-model.node.kubevirt.io/probe": "true"}}}),
                true,
            ),
            ("somebody else's label", own, json!({"metadata": {"labels": {"example.com/probe": "a"}}}), false),
            ("somebody else's annotation", own, json!({"metadata": {"annotations": {"example.com/x": "a"}}}), false),
            ("the specification", own, json!({"spec": {"unschedulable": true}}), false),
            ("a finalizer", own, json!({"metadata": {"finalizers": ["example.com/x"]}}), false),
            ("another node", other, json!({"metadata": {"labels": {"kubevirt.io/probe": "a"}}}), false),
        ];
        for (what, node, change, allowed) in attempts {
            let answer = handler.patch(node, &PatchParams::default(), &Patch::Strategic(&change)).await;
            match (allowed, answer) {
                (true, Ok(_)) => {}
                (true, Err(error)) => anyhow::bail!("{what} of {node} was refused: {error}"),
                (false, Ok(_)) => anyhow::bail!("{what} of {node} was allowed"),
                (false, Err(error)) => ensure!(
                    error.to_string().contains("denied") || error.to_string().contains("forbidden"),
                    "{what}: {error}"
                ),
            }
        }
        Ok(())
    });

    suite.test("a_settled_installation_is_left_alone_also_by_a_new_leader", |labs| async move {
        let lab = labs.ours(&program()).await?;
        settled(&lab).await?;
        let before = operator_requests(&lab)?.len();
        for round in 0..20 {
            let touch = json!({"metadata": {"annotations": {"example.com/touched": round.to_string()}}});
            kubevirts(&lab).patch("kubevirt", &PatchParams::default(), &Patch::Merge(touch)).await?;
        }
        replace_operator(&lab).await?;
        settled(&lab).await?;
        let records = operator_requests(&lab)?;
        let writes: BTreeMap<String, usize> = records
            .iter()
            .skip(before)
            .filter(|record| record.is_write() && record.resource != "leases" && record.resource != "events")
            .fold(BTreeMap::new(), |mut all, record| {
                *all.entry(format!("{} {} {}", record.verb, record.resource, record.name)).or_default() += 1;
                all
            });
        ensure!(writes.is_empty(), "nothing had changed, and it wrote {writes:?}");
        Ok(())
    });
}

fn vm(name: &str) -> Value {
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
