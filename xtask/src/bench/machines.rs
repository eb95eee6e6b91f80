//! Many Machines on simulated KubeVirt: what one costs, what rest costs, what a restart costs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams, PostParams};
use lab::{KubeVirt, Lab, LabOptions, Record};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::{Value, json};

use super::{keep, memory_mib};
use crate::machine_operator;
use crate::terminal::step;

#[derive(Args)]
pub(crate) struct Options {
    /// How many Machines
    #[arg(long, default_value_t = 1000)]
    count: usize,
    /// For how many seconds the operator is watched when it has nothing to do
    #[arg(long, default_value_t = 60)]
    idle: u64,
}

const USER: &str = "system:serviceaccount:kubevirt-operator-system:kubevirt-operator-controller-manager";

#[derive(Debug, Serialize)]
struct Figures {
    machines: usize,
    seconds_to_all_running: f64,
    writes_per_machine: f64,
    reads_per_machine: f64,
    peak_memory_mib: u64,
    idle_requests_per_minute: f64,
    restart_seconds_to_settled: f64,
    restart_writes: usize,
    resident_after_restart_mib: u64,
}

pub(super) async fn run(options: &Options) -> Result<()> {
    let figures = measure(options).await?;
    keep("machines", &figures)?;
    println!("{}", serde_json::to_string(&figures).context("writing the figures")?);
    Ok(())
}

async fn measure(options: &Options) -> Result<Figures> {
    let count = options.count;
    let idle = Duration::from_secs(options.idle);
    let lab = step(
        "a lab with simulated KubeVirt",
        Lab::start(LabOptions { kubevirt: KubeVirt::Simulated, ..LabOptions::default() }),
    )
    .await?;
    machine_operator::install(&lab).await?;
    let mut operator = machine_operator::start(&lab, "release").await?;

    let begun = Timestamp::now();
    let clock = Instant::now();
    step(&format!("{count} Machines to Running"), async {
        create_machines(&lab, count).await?;
        wait_until_running(&lab, count).await
    })
    .await?;
    let seconds_to_all_running = clock.elapsed().as_secs_f64();
    let peak_memory_mib = memory_mib(&operator.pid().to_string(), "VmHWM");
    settle(&lab).await?;
    let all_running = Timestamp::now();
    step("at rest", async {
        tokio::time::sleep(idle).await;
        Ok(())
    })
    .await?;
    let rested = Timestamp::now();

    operator.signal(Signal::SIGTERM)?;
    operator.wait(Duration::from_secs(20)).await?;
    let restarted = Timestamp::now();
    let clock = Instant::now();
    let operator = machine_operator::start(&lab, "release").await?;
    step("a restart with everything settled", async {
        operator.wait_for_message(runtime::lease::message::ACQUIRED, Duration::from_secs(120)).await?;
        // Every Machine is looked at once after a start; nothing may be written for it.
        tokio::time::sleep(idle.min(Duration::from_secs(30))).await;
        Ok(())
    })
    .await?;
    let restart_seconds_to_settled = clock.elapsed().as_secs_f64();
    let records = lab.audit()?;
    let between = |from: Timestamp, to: Timestamp| {
        records
            .iter()
            .filter(move |record| record.user == USER && !is_apart(record) && (from..to).contains(&record.time))
    };
    let per_machine = |number: usize| number as f64 / count as f64;
    let creation: Vec<&Record> = between(begun, all_running).collect();
    let figures = Figures {
        machines: count,
        seconds_to_all_running,
        writes_per_machine: per_machine(creation.iter().filter(|record| record.is_write()).count()),
        reads_per_machine: per_machine(creation.iter().filter(|record| record.verb == "get").count()),
        peak_memory_mib,
        idle_requests_per_minute: between(all_running, rested).count() as f64 * 60.0 / idle.as_secs_f64(),
        restart_seconds_to_settled,
        restart_writes: between(restarted, Timestamp::now()).filter(|record| record.is_write()).count(),
        resident_after_restart_mib: memory_mib(&operator.pid().to_string(), "VmRSS"),
    };
    lab.stop().await?;
    Ok(figures)
}

/// Returns when the operator has asked for nothing for five seconds: storage may be bound after a guest runs.
async fn settle(lab: &Lab) -> Result<()> {
    let mut before = usize::MAX;
    loop {
        let now = lab.audit()?.iter().filter(|record| record.user == USER && !is_apart(record)).count();
        if now == before {
            return Ok(());
        }
        before = now;
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

/// Leases and events are not counted.
fn is_apart(record: &Record) -> bool {
    record.resource == "leases" || record.resource == "events"
}

fn machines(lab: &Lab) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: "vitistack.io".to_owned(),
        version: "v1alpha1".to_owned(),
        api_version: "vitistack.io/v1alpha1".to_owned(),
        kind: "Machine".to_owned(),
        plural: "machines".to_owned(),
    };
    Api::namespaced_with(lab.client(), "default", &resource)
}

fn machine(number: usize) -> Value {
    json!({
        "apiVersion": "vitistack.io/v1alpha1",
        "kind": "Machine",
        "metadata": {"name": format!("machine-{number}"), "namespace": "default"},
        "spec": {"template": "small", "cloudInit": {"userData": "#cloud-config\nhostname: machine\n"}},
    })
}

async fn create_machines(lab: &Lab, count: usize) -> Result<()> {
    let api = machines(lab);
    stream::iter(0..count)
        .map(|number| {
            let api = api.clone();
            async move {
                let object: DynamicObject = serde_json::from_value(machine(number)).context("a Machine")?;
                api.create(&PostParams::default(), &object).await.context("creating a Machine")?;
                anyhow::Ok(())
            }
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await
}

async fn wait_until_running(lab: &Lab, count: usize) -> Result<()> {
    let patience = Duration::from_secs(120) + Duration::from_millis(100) * u32::try_from(count).unwrap_or(u32::MAX);
    let started = Instant::now();
    loop {
        let list = machines(lab).list(&ListParams::default()).await.context("listing Machines")?;
        let running = list
            .items
            .iter()
            .filter(|machine| machine.data.pointer("/status/phase") == Some(&"Running".into()))
            .count();
        if running == count {
            return Ok(());
        }
        ensure!(list.items.len() == count, "{} Machines instead of {count}", list.items.len());
        if started.elapsed() > patience {
            let other =
                list.items.iter().find(|machine| machine.data.pointer("/status/phase") != Some(&"Running".into()));
            bail!(
                "only {running} of {count} are Running after {patience:?}; one of the others: {:?}",
                other.map(|machine| &machine.data)
            );
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
