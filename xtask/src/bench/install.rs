//! Compares our virt-operator with the reference operator, one after the other: the duration and cost of an
//! installation, and the requests when idle. Every run has its own lab.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject},
};
use parking_lot::Mutex;
use serde::Serialize;
use vitivirt_lab::{Lab, LabOptions, Record, VIRT_OPERATOR_USER, VirtOperator};

use super::{
    install_table, memory_kib, processor_time,
    readiness::{self, Seen},
    write_results,
};
use crate::{lab_commands::PaceChoice, programs, terminal::step};

#[derive(Args)]
pub(crate) struct InstallOptions {
    /// Number of installations per operator
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Seconds to measure the idle operator
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    idle: u64,
    /// Measure only this operator
    #[arg(long, value_enum)]
    only: Option<MeasuredOperator>,
    /// Delays of the lab. The idle operator is measured only without delays
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [PaceChoice::Instant, PaceChoice::Real])]
    pace: Vec<PaceChoice>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum MeasuredOperator {
    /// Release build of our virt-operator
    Ours,
    /// Reference operator v1.8.4
    Reference,
}

pub(super) const NAMESPACE: &str = "kubevirt";
const TIMEOUT: Duration = Duration::from_secs(120);
/// An operator without requests for this time has filled its caches.
const QUIET: Duration = Duration::from_secs(3);

/// One installation.
#[derive(Clone, Debug, Serialize)]
pub(super) struct InstallRun {
    pub(super) operator: MeasuredOperator,
    pub(super) pace: PaceChoice,
    pub(super) seconds_to_deployed: f64,
    /// Until the last process answered its readiness probe and the last endpoint existed.
    pub(super) seconds_to_ready: f64,
    /// The condition Degraded, if it was ever True.
    pub(super) degraded: Option<String>,
    /// The highest value of all its processes.
    pub(super) peak_memory_mb: f64,
    /// From the creation of the KubeVirt resource until its phase is Deployed, without leases.
    pub(super) requests_to_deployed: usize,
    pub(super) objects: usize,
    /// From the deletion of the KubeVirt resource until it is gone.
    pub(super) seconds_to_removed: f64,
    /// CPU time of each program of the cluster until Deployed. Processes that have exited are not included.
    pub(super) processor_seconds: BTreeMap<String, f64>,
    /// Measured only without delays.
    pub(super) idle: Option<IdleRequests>,
}

/// Requests of the idle operator.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct IdleRequests {
    pub(super) seconds: u64,
    pub(super) lease: usize,
    /// Watches that were reopened.
    pub(super) watches: usize,
    /// Everything else, by verb and resource.
    pub(super) others: BTreeMap<String, usize>,
}

pub(super) async fn run(options: &InstallOptions) -> Result<()> {
    let both = [MeasuredOperator::Ours, MeasuredOperator::Reference]
        .into_iter()
        .filter(|operator_kind| options.only.is_none_or(|only| only == *operator_kind));
    let both: Vec<MeasuredOperator> = both.collect();
    let mut runs = Vec::new();
    for number in 1..=options.runs {
        for (pace, operator_kind) in
            options.pace.iter().flat_map(|pace| both.iter().map(move |operator| (pace, operator)))
        {
            let name = install_table::name(*operator_kind);
            let what = format!("run {number} of {}, pace {}: {name}", options.runs, install_table::pace_name(*pace));
            runs.push(step(&what, measure(*operator_kind, *pace, u64::from(number), options.idle)).await?);
        }
    }
    write_results("install", &runs)?;
    println!("{}", install_table::table(&runs));
    let violations = install_table::violations(&runs);
    ensure!(violations.is_empty(), "{}", violations.join("\n"));
    Ok(())
}

async fn measure(
    operator_kind: MeasuredOperator,
    pace: PaceChoice,
    seed: u64,
    idle_seconds: u64,
) -> Result<InstallRun> {
    let operator = match operator_kind {
        MeasuredOperator::Ours => VirtOperator::ours(programs::stage("release", "virt-operator")?),
        MeasuredOperator::Reference => VirtOperator::reference(),
    };
    // Both operators get the same delays, and each run others.
    let lab = Lab::start(LabOptions { seed, ..LabOptions::at(pace.into()) }).await?;
    let what = format!("bench-install-{}", if operator_kind == MeasuredOperator::Ours { "ours" } else { "reference" });
    let result = lab.keeping_logs(&what, measure_install(&lab, operator_kind, pace, &operator, idle_seconds)).await?;
    lab.stop().await?;
    Ok(result)
}

async fn measure_install(
    lab: &Lab,
    operator_kind: MeasuredOperator,
    pace: PaceChoice,
    operator: &VirtOperator,
    idle_seconds: u64,
) -> Result<InstallRun> {
    lab.create_virt_operator(operator).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    wait_until_idle(lab).await?;

    let cpu_before = processor_time::by_process()?;
    let (start, clock) = (Timestamp::now(), Instant::now());
    let seen = Arc::new(Mutex::new(Seen::default()));
    let installation = async {
        lab.deploy_kubevirt(None).await?;
        let (deployed, seconds_to_deployed) = (Timestamp::now(), clock.elapsed().as_secs_f64());
        let processor_seconds = processor_time::since(&cpu_before)?;
        let ready = readiness::wait(lab, NAMESPACE, &seen).await?;
        anyhow::Ok((deployed, seconds_to_deployed, processor_seconds, ready))
    };
    let (deployed, seconds_to_deployed, processor_seconds, ready) = tokio::select! {
        installed = installation => installed?,
        () = readiness::observe(lab, NAMESPACE, Arc::clone(&seen)) => bail!("the watches of the benchmark ended"),
    };
    let idle_end = deployed + Duration::from_secs(idle_seconds);
    if pace == PaceChoice::Instant {
        tokio::time::sleep(idle_end.duration_since(Timestamp::now()).unsigned_abs()).await;
    }

    let records = lab.audit()?;
    let between = |from: Timestamp, to: Timestamp| {
        records.iter().filter(move |record| record.user == VIRT_OPERATOR_USER && (from..to).contains(&record.time))
    };
    let installed = lab.installed(None).await?;
    let peak_memory_mb = peak_memory_mb("virt-operator")?;
    let seconds_to_removed = measure_removal(lab).await?;
    Ok(InstallRun {
        operator: operator_kind,
        pace,
        seconds_to_deployed,
        seconds_to_ready: ready.duration_since(clock).as_secs_f64(),
        degraded: seen.lock().degraded.clone(),
        peak_memory_mb,
        requests_to_deployed: between(start, deployed).filter(|record| !is_lease(record)).count(),
        objects: installed.values().filter(|object| vitivirt_snapshot::is_installed(object)).count(),
        seconds_to_removed,
        processor_seconds,
        idle: (pace == PaceChoice::Instant).then(|| classify(idle_seconds, between(deployed, idle_end))),
    })
}

async fn measure_removal(lab: &Lab) -> Result<f64> {
    let kubevirts: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), NAMESPACE, &vitivirt_lab::kubevirt_resource("KubeVirt"));
    let start = Instant::now();
    kubevirts.delete("kubevirt", &DeleteParams::default()).await.context("deleting the KubeVirt resource")?;
    lab.wait("KubeVirt is removed", TIMEOUT, kubevirts, "kubevirt", |kubevirt| kubevirt.is_none()).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// Waits until one replica leads and the operator sends no more requests.
async fn wait_until_idle(lab: &Lab) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(lab.client(), NAMESPACE);
    lab.wait("a leader", TIMEOUT, leases, "virt-operator", |lease| {
        let holder = lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_ref());
        holder.is_some_and(|holder| !holder.is_empty())
    })
    .await?;
    let started = Instant::now();
    let mut before = usize::MAX;
    while started.elapsed() < TIMEOUT {
        let now = lab.audit()?.iter().filter(|record| record.user == VIRT_OPERATOR_USER && !is_lease(record)).count();
        if now == before {
            return Ok(());
        }
        before = now;
        tokio::time::sleep(QUIET).await;
    }
    bail!("the operator still sends requests after {TIMEOUT:?}, although there is nothing to install")
}

pub(super) fn is_lease(record: &Record) -> bool {
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

/// The highest peak memory of all processes of this name.
fn peak_memory_mb(name: &str) -> Result<f64> {
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    let named = processes.filter(|process| {
        std::fs::read(process.path().join("cmdline")).is_ok_and(|command| command.starts_with(name.as_bytes()))
    });
    let most = named.map(|process| memory_kib(&process.file_name().to_string_lossy(), "VmHWM")).max();
    Ok(most.unwrap_or_default() as f64 * 1024.0 / 1e6)
}
