//! KubeVirt's own operator, measured in the lab: what ours has to beat.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use lab::{Lab, LabOptions, REFERENCE_IMAGE, Record};
use serde::Serialize;

use super::{keep, memory_mib};
use crate::terminal::step;

#[derive(Args)]
pub(crate) struct Options {
    /// How often
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// For how many seconds it is watched when it has nothing to do
    #[arg(long, default_value_t = 60)]
    idle: u64,
}

const OPERATOR: &str = "system:serviceaccount:kubevirt:kubevirt-operator";

#[derive(Debug, Serialize)]
struct Installation {
    operator: &'static str,
    seconds_to_deployed: f64,
    peak_memory_mib: u64,
    requests_to_deployed: usize,
    /// Lease renewals left out.
    idle_requests_per_minute: f64,
    idle_lease_requests_per_minute: f64,
}

pub(super) async fn run(options: &Options) -> Result<()> {
    let mut results = Vec::new();
    for run in 1..=options.runs {
        let what = format!("run {run} of {}: the reference operator", options.runs);
        results.push(step(&what, install_by_reference(Duration::from_secs(options.idle))).await?);
    }
    keep("install", &results)?;
    for result in &results {
        println!("{}", serde_json::to_string(result).context("writing a result")?);
    }
    Ok(())
}

async fn install_by_reference(idle: Duration) -> Result<Installation> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(REFERENCE_IMAGE).await?;
    let deployments: Api<Deployment> = Api::namespaced(lab.client(), "kubevirt");
    lab.wait("a warm operator", Duration::from_secs(120), deployments, "virt-operator", |deployment| {
        deployment.and_then(|deployment| deployment.status.as_ref()?.ready_replicas) == Some(2)
    })
    .await?;

    let (begun, clock) = (Timestamp::now(), Instant::now());
    lab.deploy_kubevirt(None).await?;
    let (deployed, seconds_to_deployed) = (Timestamp::now(), clock.elapsed().as_secs_f64());
    tokio::time::sleep(idle).await;

    let records = lab.audit()?;
    let by_operator = |from: Timestamp, to: Timestamp, lease: bool| {
        records
            .iter()
            .filter(|record| record.user == OPERATOR && is_lease(record) == lease && (from..to).contains(&record.time))
            .count()
    };
    let now = Timestamp::now();
    let per_minute = |count: usize| count as f64 * 60.0 / idle.as_secs_f64();
    let result = Installation {
        operator: "reference v1.8.4",
        seconds_to_deployed,
        peak_memory_mib: peak_memory("virt-operator")?,
        requests_to_deployed: by_operator(begun, deployed, false),
        idle_requests_per_minute: per_minute(by_operator(deployed, now, false)),
        idle_lease_requests_per_minute: per_minute(by_operator(deployed, now, true)),
    };
    lab.stop().await?;
    Ok(result)
}

fn is_lease(record: &Record) -> bool {
    record.resource == "leases"
}

/// The most that any process of this name has ever had in memory, in MiB.
fn peak_memory(name: &str) -> Result<u64> {
    let processes = std::fs::read_dir("/proc").context("reading /proc")?.flatten();
    let named = processes.filter(|process| {
        std::fs::read(process.path().join("cmdline")).is_ok_and(|command| command.starts_with(name.as_bytes()))
    });
    Ok(named.map(|process| memory_mib(&process.file_name().to_string_lossy(), "VmHWM")).max().unwrap_or_default())
}
