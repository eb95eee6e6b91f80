//! Compares upgrades of KubeVirt v1.7.0, which its own operator has installed, to v1.8.4: by our virt-operator and by
//! the reference operator, one after the other. Every run has its own lab.
//!
//! The time counts from the moment at which the new operator leads: the operator before does not release its lease, so
//! both wait for it equally long.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::{KubeVirtRelease, Lab, LabOptions, VIRT_OPERATOR_USER, VirtOperator, kubevirt_resource};

use super::{
    install::{MeasuredOperator, NAMESPACE, is_lease},
    install_table, write_results,
};
use crate::{programs, terminal::step};

#[derive(Args)]
pub(crate) struct UpgradeOptions {
    /// Number of upgrades per operator and cluster
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    runs: u16,
    /// Numbers of nodes. One of more than 10 nodes is not ready
    #[arg(long, value_delimiter = ',', default_values_t = [5, 50], value_parser = clap::value_parser!(u8).range(2..=250))]
    nodes: Vec<u8>,
    /// Number of running VMs
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(0..=500))]
    vms: u16,
    /// Measure only this operator
    #[arg(long, value_enum)]
    only: Option<MeasuredOperator>,
}

const TIMEOUT: Duration = Duration::from_secs(240);
const DEAD: &str = "node-2";

/// One upgrade.
#[derive(Clone, Debug, Serialize)]
struct UpgradeRun {
    operator: MeasuredOperator,
    nodes: u8,
    dead_nodes: u8,
    /// From leading to Deployed. None if that took longer than the benchmark waits.
    seconds: Option<f64>,
    /// From leading to Deployed, without leases.
    requests: usize,
    longest_outage_seconds: f64,
    failed_requests_of_client: usize,
    requests_of_client: usize,
    vms_restarted: usize,
}

pub(super) async fn run(options: &UpgradeOptions) -> Result<()> {
    let both = [MeasuredOperator::Ours, MeasuredOperator::Reference];
    let mut runs = Vec::new();
    for number in 1..=options.runs {
        for nodes in &options.nodes {
            for operator in both.into_iter().filter(|operator| options.only.is_none_or(|only| only == *operator)) {
                let name = install_table::name(operator);
                let what = format!("run {number} of {}, {nodes} nodes: {name}", options.runs);
                runs.push(step(&what, measure(operator, *nodes, options.vms)).await?);
            }
        }
    }
    write_results("upgrade", &runs)?;
    println!("{}", table(&runs));
    Ok(())
}

async fn measure(kind: MeasuredOperator, nodes: u8, vms: u16) -> Result<UpgradeRun> {
    let lab = Lab::start(LabOptions { nodes, ..LabOptions::default() }).await?;
    let result = lab.keeping_logs("bench-upgrade", measure_upgrade(&lab, kind, nodes, vms)).await?;
    lab.stop().await?;
    Ok(result)
}

async fn measure_upgrade(lab: &Lab, kind: MeasuredOperator, nodes: u8, vms: u16) -> Result<UpgradeRun> {
    lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
    lab.deploy_kubevirt(None).await.context("installing v1.7.0")?;
    start_vms(lab, vms).await?;
    let before = vmi_uids(lab).await?;
    let dead_nodes = u8::from(nodes > 10);
    if dead_nodes > 0 {
        kill_node(lab).await?;
    }
    let operator = match kind {
        MeasuredOperator::Ours => VirtOperator::ours(programs::stage("release", "virt-operator")?),
        MeasuredOperator::Reference => VirtOperator::reference(),
    };
    let old: Vec<String> = operator_pods(lab).await?;
    let client = lab.subresource_client();
    lab.replace_virt_operator(&operator).await?;
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("the new operator leads", TIMEOUT, leases, "virt-operator", |lease| {
        let holder = lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref()).unwrap_or_default();
        !holder.is_empty() && !old.iter().any(|pod| holder.starts_with(pod.as_str()))
    })
    .await?;
    let (start, clock) = (Timestamp::now(), Instant::now());
    let deployed = wait_until_upgraded(lab).await;
    let seconds = deployed.is_ok().then(|| clock.elapsed().as_secs_f64());
    let end = Timestamp::now();
    let (seen, after) = (client.seen(), vmi_uids(lab).await?);
    let records = lab.audit()?;
    let requests =
        records.iter().filter(|record| record.user == VIRT_OPERATOR_USER && (start..end).contains(&record.time));
    Ok(UpgradeRun {
        operator: kind,
        nodes,
        dead_nodes,
        seconds,
        requests: requests.filter(|record| !is_lease(record)).count(),
        longest_outage_seconds: seen.longest.as_secs_f64(),
        failed_requests_of_client: seen.failed,
        requests_of_client: seen.requests,
        vms_restarted: before.iter().filter(|uid| !after.contains(uid)).count(),
    })
}

async fn wait_until_upgraded(lab: &Lab) -> Result<()> {
    let kubevirts: Api<DynamicObject> = Api::namespaced_with(lab.client(), NAMESPACE, &kubevirt_resource("KubeVirt"));
    lab.wait("v1.8.4 is deployed", TIMEOUT, kubevirts, "kubevirt", |kubevirt| {
        let text = |pointer: &str| kubevirt.and_then(|kubevirt| kubevirt.data.pointer(pointer)?.as_str());
        text("/status/phase") == Some("Deployed") && text("/status/observedKubeVirtVersion") == Some("v1.8.4")
    })
    .await
    .map(|_| ())
}

async fn operator_pods(lab: &Lab) -> Result<Vec<String>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let list = pods.list(&ListParams::default().labels("kubevirt.io=virt-operator")).await?;
    Ok(list.items.iter().map(ResourceExt::name_any).collect())
}

async fn start_vms(lab: &Lab, count: u16) -> Result<()> {
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"));
    for number in 0..count {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": format!("vm-{number}")},
            "spec": {"runStrategy": "Always", "template": {"spec": {
                "domain": {"devices": {}, "memory": {"guest": "128Mi"}}, "terminationGracePeriodSeconds": 0,
            }}},
        });
        vms.create(&PostParams::default(), &serde_json::from_value(vm)?).await.context("creating a VM")?;
    }
    let started = Instant::now();
    while vmi_uids(lab).await?.len() < usize::from(count) {
        if started.elapsed() > TIMEOUT {
            bail!("not all VMs run");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(())
}

/// The UIDs of the VMIs that run.
async fn vmi_uids(lab: &Lab) -> Result<Vec<String>> {
    let vmis: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachineInstance"));
    let list = vmis.list(&ListParams::default()).await?;
    let running =
        list.items.iter().filter(|vmi| vmi.data.pointer("/status/phase").and_then(Value::as_str) == Some("Running"));
    Ok(running.filter_map(ResourceExt::uid).collect())
}

/// What the node lifecycle controller writes when a kubelet stops. The lab has no such controller.
async fn kill_node(lab: &Lab) -> Result<()> {
    lab.set_pods(|pods| pods.dead_nodes = vec![DEAD.to_owned()]);
    let nodes: Api<Node> = Api::all(lab.client());
    let unknown = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    nodes.patch_status(DEAD, &PatchParams::default(), &Patch::Strategic(&unknown)).await?;
    let pods: Api<Pod> = Api::namespaced(lab.client(), NAMESPACE);
    let on_node = ListParams::default().fields(&format!("spec.nodeName={DEAD}"));
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    for pod in pods.list(&on_node).await? {
        pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Strategic(&unready)).await?;
    }
    Ok(())
}

fn table(runs: &[UpgradeRun]) -> String {
    let mut lines = vec![
        "| operator | nodes | not ready | s to Deployed | requests | longest outage, s | failed requests of the client | VMs restarted |".to_owned(),
        "|---|---|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(runs.iter().map(|run| {
        let seconds = run.seconds.map_or(format!("> {}", TIMEOUT.as_secs()), |seconds| format!("{seconds:.1}"));
        format!(
            "| {} | {} | {} | {seconds} | {} | {:.1} | {} of {} | {} |",
            install_table::name(run.operator),
            run.nodes,
            run.dead_nodes,
            run.requests,
            run.longest_outage_seconds,
            run.failed_requests_of_client,
            run.requests_of_client,
            run.vms_restarted,
        )
    }));
    lines.join("\n")
}
