//! Compares upgrades of KubeVirt v1.7.0, which its own operator has installed, to v1.8.4: by our virt-operator and by
//! the reference operator, one after the other. Every run has its own lab.
//!
//! The time counts from the moment at which the new operator leads: the operator before does not release its lease, so
//! both wait for it equally long.
//!
//! The command fails if an upgrade by our virt-operator replaced the CA, touched a VM, was noticed by users for longer
//! than [`OUTAGE`], left other objects than a new installation, or took more than half the time of the reference
//! operator.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Pod, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, PostParams},
};
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::{KubeVirtRelease, Lab, LabOptions, NodeTaints, VIRT_OPERATOR_USER, VirtOperator, kubevirt_resource};
use vitivirt_snapshot::{Comparison, Snapshot, compare};

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
/// How long a user may not reach virt-api.
const OUTAGE: Duration = Duration::from_secs(2);
/// The part of the reference operator's time in which our virt-operator must complete an upgrade.
const SHARE_OF_REFERENCE: f64 = 0.5;

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
    launchers_replaced: usize,
    ca_kept: bool,
    /// The objects that a new installation of our virt-operator does not have in the same form. Only for our upgrades, and
    /// if all nodes are ready.
    differing_objects: Vec<String>,
}

impl UpgradeRun {
    /// What an upgrade must not do, and this one did.
    fn violations(&self) -> Vec<String> {
        let mut violations = Vec::new();
        if self.seconds.is_none() {
            violations.push(format!("it was not complete after {} s", TIMEOUT.as_secs()));
        }
        if self.requests_of_client == 0 {
            violations.push("the client of virt-api sent no request".to_owned());
        }
        if !self.ca_kept {
            violations.push("it replaced the CA".to_owned());
        }
        if self.vms_restarted > 0 {
            violations.push(format!("it restarted {} VMs", self.vms_restarted));
        }
        if self.launchers_replaced > 0 {
            violations.push(format!("it replaced {} pods of virt-launcher", self.launchers_replaced));
        }
        if self.longest_outage_seconds > OUTAGE.as_secs_f64() {
            let limit = OUTAGE.as_secs();
            violations.push(format!("virt-api was gone for {:.1} s, expected {limit} s", self.longest_outage_seconds));
        }
        if !self.differing_objects.is_empty() {
            let objects = self.differing_objects.join(", ");
            violations.push(format!("other objects than in a new installation: {objects}"));
        }
        violations
    }
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
    require(&runs)
}

/// Fails if an upgrade by our virt-operator did what it must not do, or took too long. The reference operator is only
/// measured.
fn require(runs: &[UpgradeRun]) -> Result<()> {
    let ours = runs.iter().filter(|run| run.operator == MeasuredOperator::Ours);
    let violations = ours.flat_map(|run| {
        let violations = run.violations().into_iter().chain(too_slow(run, runs));
        violations.map(|violation| format!("upgrade of {} nodes: {violation}", run.nodes))
    });
    let violations: Vec<String> = violations.collect();
    ensure!(violations.is_empty(), "{}", violations.join("\n"));
    Ok(())
}

/// Whether an upgrade by our virt-operator took more than half the time that the reference operator takes on average with
/// as many nodes.
fn too_slow(ours: &UpgradeRun, runs: &[UpgradeRun]) -> Option<String> {
    let reference = runs.iter().filter(|run| run.operator == MeasuredOperator::Reference && run.nodes == ours.nodes);
    // How long an upgrade takes that was not complete is not known.
    let reference: Vec<f64> = reference.filter_map(|run| run.seconds).collect();
    let seconds = ours.seconds.filter(|_| !reference.is_empty())?;
    let average = reference.iter().sum::<f64>() / reference.len() as f64;
    let limit = average * SHARE_OF_REFERENCE;
    (seconds > limit)
        .then(|| format!("it took {seconds:.1} s, expected {limit:.1} s, half of the reference operator's"))
}

async fn measure(kind: MeasuredOperator, nodes: u8, vms: u16) -> Result<UpgradeRun> {
    let lab = Lab::start(LabOptions { nodes, ..LabOptions::default() }).await?;
    let mut result = lab.keeping_logs("bench-upgrade", measure_upgrade(&lab, kind, nodes, vms)).await?;
    let upgraded = lab.installed(None).await?;
    lab.stop().await?;
    if kind == MeasuredOperator::Ours && result.seconds.is_some() && result.dead_nodes == 0 {
        let Comparison { missing, extra, differing, .. } = compare(&new_installation(nodes).await?, &upgraded);
        result.differing_objects = missing.into_iter().chain(extra).chain(differing.into_keys()).collect();
    }
    Ok(result)
}

/// The objects of an installation by our virt-operator that no other one preceded.
async fn new_installation(nodes: u8) -> Result<Snapshot> {
    let lab = Lab::start(LabOptions { nodes, ..LabOptions::default() }).await?;
    let operator = VirtOperator::ours(programs::stage("release", "virt-operator")?);
    lab.create_virt_operator(&operator).await?;
    lab.deploy_kubevirt(None).await.context("a new installation")?;
    let snapshot = lab.installed(None).await?;
    lab.stop().await?;
    Ok(snapshot)
}

async fn measure_upgrade(lab: &Lab, kind: MeasuredOperator, nodes: u8, vms: u16) -> Result<UpgradeRun> {
    lab.create_virt_operator(&VirtOperator::reference_of(KubeVirtRelease::Previous)).await?;
    lab.deploy_kubevirt(None).await.context("installing v1.7.0")?;
    start_vms(lab, vms).await?;
    let (before, launchers, ca) = (vmi_uids(lab).await?, launcher_uids(lab).await?, ca(lab).await?);
    ensure!(launchers.len() == usize::from(vms), "{vms} VMs run in {} pods", launchers.len());
    let dead_nodes = u8::from(nodes > 10);
    if dead_nodes > 0 {
        lab.kill_node(DEAD, NodeTaints::Set).await?;
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
        launchers_replaced: launchers.difference(&launcher_uids(lab).await?).count(),
        ca_kept: self::ca(lab).await? == ca,
        differing_objects: Vec::new(),
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

/// The UIDs of the pods in which VMs run.
async fn launcher_uids(lab: &Lab) -> Result<BTreeSet<String>> {
    let pods: Api<Pod> = Api::namespaced(lab.client(), "default");
    let list = pods.list(&ListParams::default().labels("kubevirt.io=virt-launcher")).await?;
    let running = list.items.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    Ok(running.filter_map(ResourceExt::uid).collect())
}

/// The certificate of the CA.
async fn ca(lab: &Lab) -> Result<Vec<u8>> {
    let secrets: Api<Secret> = Api::namespaced(lab.client(), NAMESPACE);
    let data = secrets.get("kubevirt-ca").await?.data.unwrap_or_default();
    Ok(data.get("tls.crt").context("Secret kubevirt-ca has no certificate")?.0.clone())
}

fn table(runs: &[UpgradeRun]) -> String {
    let mut lines = vec![
        "| operator | nodes | not ready | s to Deployed | requests | longest outage, s | failed requests of the client | VMs restarted | launchers replaced | CA |".to_owned(),
        "|---|---|---|---|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(runs.iter().map(|run| {
        let seconds = run.seconds.map_or(format!("> {}", TIMEOUT.as_secs()), |seconds| format!("{seconds:.1}"));
        format!(
            "| {} | {} | {} | {seconds} | {} | {:.1} | {} of {} | {} | {} | {} |",
            install_table::name(run.operator),
            run.nodes,
            run.dead_nodes,
            run.requests,
            run.longest_outage_seconds,
            run.failed_requests_of_client,
            run.requests_of_client,
            run.vms_restarted,
            run.launchers_replaced,
            if run.ca_kept { "kept" } else { "replaced" },
        )
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> UpgradeRun {
        UpgradeRun {
            operator: MeasuredOperator::Ours,
            nodes: 5,
            dead_nodes: 0,
            seconds: Some(10.0),
            requests: 100,
            longest_outage_seconds: 1.9,
            failed_requests_of_client: 3,
            requests_of_client: 100,
            vms_restarted: 0,
            launchers_replaced: 0,
            ca_kept: true,
            differing_objects: Vec::new(),
        }
    }

    #[test]
    fn an_upgrade_by_our_operator_may_not_touch_vms_the_ca_or_users() {
        let good = good();
        require(std::slice::from_ref(&good)).unwrap();
        for (bad, expected) in [
            (UpgradeRun { seconds: None, ..good.clone() }, "not complete"),
            (UpgradeRun { ca_kept: false, ..good.clone() }, "replaced the CA"),
            (UpgradeRun { vms_restarted: 1, ..good.clone() }, "restarted 1 VMs"),
            (UpgradeRun { launchers_replaced: 2, ..good.clone() }, "replaced 2 pods of virt-launcher"),
            (UpgradeRun { longest_outage_seconds: 2.1, ..good.clone() }, "gone for 2.1 s"),
            (UpgradeRun { differing_objects: vec!["a".to_owned()], ..good.clone() }, "new installation: a"),
        ] {
            let error = require(&[good.clone(), bad.clone()]).unwrap_err().to_string();
            assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
            require(&[UpgradeRun { operator: MeasuredOperator::Reference, ..bad }]).unwrap();
        }
    }

    #[test]
    fn an_upgrade_by_our_operator_takes_half_the_time_of_the_reference_operator() {
        let reference = |nodes, seconds| UpgradeRun { operator: MeasuredOperator::Reference, nodes, seconds, ..good() };
        for (runs, is_met) in [
            (vec![reference(5, Some(20.0))], true),
            (vec![reference(5, Some(19.0))], false),
            (vec![reference(5, Some(12.0)), reference(5, Some(30.0))], true),
            // Of another cluster, and not complete.
            (vec![reference(50, Some(12.0)), reference(5, None)], true),
        ] {
            let runs = [vec![good()], runs].concat();
            assert_eq!(require(&runs).is_ok(), is_met, "{runs:?}");
        }
    }
}
