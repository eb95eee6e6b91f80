//! Simulated nodes: the labels and status that the scheduler and virt-controller require, and the heartbeat.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Node, NodeAddress, NodeCondition, NodeStatus, Pod},
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, Time},
    },
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
    core::PartialObjectMeta,
};
use serde_json::json;

use crate::addresses::AddressRange;

/// virt-controller treats a node without a heartbeat for five minutes as dead.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// How soon a virt-handler that starts sets the labels of its node.
const LABEL: Duration = Duration::from_secs(2);
pub(crate) const HEARTBEAT_ANNOTATION: &str = "kubevirt.io/heartbeat";
pub(crate) const SCHEDULABLE: &str = "kubevirt.io/schedulable";

/// Machine types, CPU models and features that the VMs of tests may require.
const CAPABILITIES: &[&str] = &[
    "machine-type.node.kubevirt.io/q35",
    "machine-type.node.kubevirt.io/pc-q35-rhel9.6.0",
    "machine-type.node.kubevirt.io/pc",
    "machine-type.node.kubevirt.io/pc-i440fx-2.12",
    "cpu-model.node.kubevirt.io/Skylake-Client",
    "cpu-model-migration.node.kubevirt.io/Skylake-Client",
    "host-model-cpu.node.kubevirt.io/Skylake-Client",
    "cpu-vendor.node.kubevirt.io/Intel",
    "hyperv.node.kubevirt.io/base",
    "hyperv.node.kubevirt.io/frequencies",
    "hyperv.node.kubevirt.io/ipi",
    "hyperv.node.kubevirt.io/reenlightenment",
    "hyperv.node.kubevirt.io/reset",
    "hyperv.node.kubevirt.io/runtime",
    "hyperv.node.kubevirt.io/synic",
    "hyperv.node.kubevirt.io/synic2",
    "hyperv.node.kubevirt.io/synictimer",
    "hyperv.node.kubevirt.io/time",
    "hyperv.node.kubevirt.io/tlbflush",
    "hyperv.node.kubevirt.io/vpindex",
];

/// The labels that virt-handler sets.
fn capabilities() -> BTreeMap<String, String> {
    CAPABILITIES.iter().chain([&SCHEDULABLE]).map(|label| ((*label).to_owned(), "true".to_owned())).collect()
}

pub(crate) fn name(number: u8) -> String {
    format!("node-{number}")
}

pub(crate) async fn create(client: &Client, address_range: &AddressRange, number: u8) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let name = name(number);
    let mut labels = capabilities();
    for (label, value) in [
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
        ("kubernetes.io/hostname", name.as_str()),
        ("node-role.kubernetes.io/control-plane", ""),
        ("node-role.kubernetes.io/worker", ""),
    ] {
        labels.insert(label.to_owned(), value.to_owned());
    }
    let node = Node {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            labels: Some(labels),
            annotations: Some([(HEARTBEAT_ANNOTATION.to_owned(), crate::vmi::now())].into()),
            ..ObjectMeta::default()
        },
        ..Node::default()
    };
    nodes.create(&PostParams::default(), &node).await.with_context(|| format!("creating {name}"))?;
    let status = json!({"status": status(address_range.node(number).to_string(), &name)});
    nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
    // Admission taints every new node as not ready. The node lifecycle controller, which removes the taint, is
    // disabled.
    nodes.patch(&name, &PatchParams::default(), &Patch::Merge(json!({"spec": {"taints": null}}))).await?;
    Ok(())
}

fn status(address: String, name: &str) -> NodeStatus {
    let resources: BTreeMap<String, Quantity> = [
        ("cpu", "256"),
        ("memory", "2Ti"),
        ("ephemeral-storage", "10Ti"),
        ("pods", "10000"),
        ("devices.kubevirt.io/kvm", "10000"),
        ("devices.kubevirt.io/tun", "10000"),
        ("devices.kubevirt.io/vhost-net", "10000"),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), Quantity(value.to_owned())))
    .collect();
    NodeStatus {
        allocatable: Some(resources.clone()),
        capacity: Some(resources),
        addresses: Some(vec![
            NodeAddress { type_: "InternalIP".to_owned(), address },
            NodeAddress { type_: "Hostname".to_owned(), address: name.to_owned() },
        ]),
        conditions: Some(vec![NodeCondition {
            type_: "Ready".to_owned(),
            status: "True".to_owned(),
            reason: Some("KubeletReady".to_owned()),
            last_heartbeat_time: Some(Time(Timestamp::now())),
            last_transition_time: Some(Time(Timestamp::now())),
            ..NodeCondition::default()
        }]),
        ..NodeStatus::default()
    }
}

/// Runs until cancelled. A node that has lost its labels does not get them back until virt-handler runs on it.
pub(crate) async fn heartbeat(client: Client) {
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::all(client);
    let mut last = Instant::now();
    loop {
        tokio::time::sleep(LABEL).await;
        let is_due = last.elapsed() >= HEARTBEAT;
        if is_due {
            last = Instant::now();
        }
        let Ok(list) = nodes.list_metadata(&Default::default()).await else { continue };
        let (labelled, unlabelled): (Vec<_>, Vec<_>) =
            list.into_iter().partition(|node| node.labels().contains_key(SCHEDULABLE));
        let handlers = if unlabelled.is_empty() {
            Vec::new()
        } else {
            let handlers = pods.list(&ListParams::default().labels("kubevirt.io=virt-handler")).await;
            handlers.map(|list| list.items).unwrap_or_default()
        };
        let runs = |node: &PartialObjectMeta<Node>| {
            let mut running = handlers.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
            running.any(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&*node.name_any()))
        };
        for node in labelled.iter().filter(|_| is_due).chain(unlabelled.iter().filter(|node| runs(node))) {
            // A node that changed since the list may have no virt-handler any more.
            let beat = json!({"metadata": {
                "resourceVersion": node.resource_version(),
                "annotations": {HEARTBEAT_ANNOTATION: crate::vmi::now()},
                "labels": capabilities(),
            }});
            let _ = nodes.patch_metadata(&node.name_any(), &PatchParams::default(), &Patch::Merge(beat)).await;
        }
    }
}
