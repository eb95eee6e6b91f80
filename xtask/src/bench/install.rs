//! Ours against KubeVirt's own operator, one after the other in the same run: how long an installation takes, what it
//! costs, and what rest costs. Every run has a lab of its own, with nothing else in it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde::Serialize;
use vitivirt_lab::{Lab, LabOptions, Record, VirtOperator};

use super::{install_table, keep, memory_kib, processor_time};
use crate::{programs, terminal::step};

#[derive(Args)]
pub(crate) struct InstallOptions {
    /// How often each of them installs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// For how many seconds it is watched when it has nothing to do
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    idle: u64,
    /// Only one of them
    #[arg(long, value_enum)]
    only: Option<MeasuredOperator>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum MeasuredOperator {
    /// Our virt-operator, as it is shipped
    Ours,
    /// KubeVirt's own of v1.8.4
    Reference,
}

const OPERATOR: &str = "system:serviceaccount:kubevirt:kubevirt-operator";
const NAMESPACE: &str = "kubevirt";
const TIMEOUT: Duration = Duration::from_secs(120);
/// An operator that has asked for nothing for so long has read what it wants to know.
const QUIET: Duration = Duration::from_secs(3);

/// One installation.
#[derive(Clone, Debug, Serialize)]
pub(super) struct InstallRun {
    pub(super) operator: MeasuredOperator,
    pub(super) seconds_to_deployed: f64,
    /// Of the process that needed most.
    pub(super) peak_memory_mb: f64,
    /// From the resource's creation until it said Deployed; leases are not counted.
    pub(super) requests_to_deployed: usize,
    pub(super) objects: usize,
    /// What the cluster's programs computed until Deployed, those that have ended since not counted: whose work the time
    /// went into.
    pub(super) processor_seconds: BTreeMap<String, f64>,
    pub(super) idle: IdleRequests,
}

/// Requests at rest.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct IdleRequests {
    pub(super) seconds: u64,
    pub(super) lease: usize,
    /// Watches that were opened again.
    pub(super) watches: usize,
    /// Everything else, by verb and resource.
    pub(super) others: BTreeMap<String, usize>,
}

pub(super) async fn run(options: &InstallOptions) -> Result<()> {
    let both = [MeasuredOperator::Ours, MeasuredOperator::Reference]
        .into_iter()
        .filter(|who| options.only.is_none_or(|only| only == *who));
    let both: Vec<MeasuredOperator> = both.collect();
    let mut runs = Vec::new();
    for number in 1..=options.runs {
        for who in &both {
            let what = format!("run {number} of {}: {}", options.runs, install_table::name(*who));
            runs.push(step(&what, measure(*who, options.idle)).await?);
        }
    }
    keep("install", &runs)?;
    println!("{}", install_table::table(&runs));
    Ok(())
}

async fn measure(who: MeasuredOperator, idle_seconds: u64) -> Result<InstallRun> {
    let operator = match who {
        MeasuredOperator::Ours => VirtOperator::ours(programs::stage("release", "virt-operator")?),
        MeasuredOperator::Reference => VirtOperator::reference(),
    };
    let lab = Lab::start(LabOptions::default()).await?;
    let what = format!("bench-install-{}", if who == MeasuredOperator::Ours { "ours" } else { "reference" });
    let result = lab.keeping_logs(&what, figures(&lab, who, &operator, idle_seconds)).await?;
    lab.stop().await?;
    Ok(result)
}

async fn figures(lab: &Lab, who: MeasuredOperator, operator: &VirtOperator, idle_seconds: u64) -> Result<InstallRun> {
    lab.create_virt_operator(operator).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    wait_until_warm(lab).await?;

    let computed = processor_time::by_process()?;
    let (begun, clock) = (Timestamp::now(), Instant::now());
    lab.deploy_kubevirt(None).await?;
    let (deployed, seconds_to_deployed) = (Timestamp::now(), clock.elapsed().as_secs_f64());
    let processor_seconds = processor_time::since(&computed)?;
    tokio::time::sleep(Duration::from_secs(idle_seconds)).await;
    let rested = Timestamp::now();

    let records = lab.audit()?;
    let between = |from: Timestamp, to: Timestamp| {
        records.iter().filter(move |record| record.user == OPERATOR && (from..to).contains(&record.time))
    };
    let installed = lab.installed(None).await?;
    Ok(InstallRun {
        operator: who,
        seconds_to_deployed,
        peak_memory_mb: peak_memory_mb("virt-operator")?,
        requests_to_deployed: between(begun, deployed).filter(|record| !is_lease(record)).count(),
        objects: installed.values().filter(|object| vitivirt_snapshot::is_installed(object)).count(),
        processor_seconds,
        idle: classify(idle_seconds, between(deployed, rested)),
    })
}

/// Somebody leads, and nobody reads any more.
async fn wait_until_warm(lab: &Lab) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("a leader", TIMEOUT, leases, "virt-operator", |lease| {
        let holder = lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_ref());
        holder.is_some_and(|holder| !holder.is_empty())
    })
    .await?;
    let started = Instant::now();
    let mut before = usize::MAX;
    while started.elapsed() < TIMEOUT {
        let now = lab.audit()?.iter().filter(|record| record.user == OPERATOR && !is_lease(record)).count();
        if now == before {
            return Ok(());
        }
        before = now;
        tokio::time::sleep(QUIET).await;
    }
    bail!("the operator still asks for things after {TIMEOUT:?}, with nothing to install")
}

fn is_lease(record: &Record) -> bool {
    record.resource == "leases"
}

fn classify<'a>(seconds: u64, records: impl Iterator<Item = &'a Record>) -> IdleRequests {
    let mut idle = IdleRequests { seconds, ..IdleRequests::default() };
    for record in records {
        if is_lease(record) && record.verb != "watch" {
            idle.lease += 1;
        } else if record.verb == "watch" {
            idle.watches += 1;
        } else {
            *idle.others.entry(describe(record)).or_default() += 1;
        }
    }
    idle
}

fn describe(record: &Record) -> String {
    let slash = if record.subresource.is_empty() { "" } else { "/" };
    let resource = if record.resource.is_empty() { "(no resource)" } else { &record.resource };
    format!("{} {resource}{slash}{}", record.verb, record.subresource)
}

/// The most that any process of this name has ever had in memory.
fn peak_memory_mb(name: &str) -> Result<f64> {
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    let named = processes.filter(|process| {
        std::fs::read(process.path().join("cmdline")).is_ok_and(|command| command.starts_with(name.as_bytes()))
    });
    let most = named.map(|process| memory_kib(&process.file_name().to_string_lossy(), "VmHWM")).max();
    Ok(most.unwrap_or_default() as f64 * 1024.0 / 1e6)
}
