//! Many Machines on simulated KubeVirt: what one costs, what rest costs, what a restart costs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::{KubeVirtInstaller, Lab, LabOptions, Record};

use super::{keep, memory_mib};
use crate::{kubevirt_operator, terminal::step};

#[derive(Args)]
pub(crate) struct MachinesOptions {
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
    vm_changes: ChangeFigures,
    restart_seconds_to_settled: f64,
    restart_writes: usize,
    resident_after_restart_mib: u64,
}

pub(super) async fn run(options: &MachinesOptions) -> Result<()> {
    let figures = measure(options).await?;
    keep("machines", &figures)?;
    println!("{}", serde_json::to_string(&figures).context("writing the figures")?);
    Ok(())
}

async fn measure(options: &MachinesOptions) -> Result<Figures> {
    let count = options.count;
    let idle = Duration::from_secs(options.idle);
    let lab = step(
        "a lab with simulated KubeVirt",
        Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }),
    )
    .await?;
    kubevirt_operator::install(&lab).await?;
    let mut operator = kubevirt_operator::start(&lab, "release").await?;
    operator.wait_for_message(vitivirt_runtime::lease::message::ACQUIRED, Duration::from_secs(120)).await?;

    step("one Machine, for an API server that has seen each kind once", warm_up(&lab)).await?;

    let begun = Timestamp::now();
    let clock = Instant::now();
    step(&format!("{count} Machines to Running"), async {
        create_machines(&lab, count).await?;
        wait_until(&lab, count, "Running", is_running).await
    })
    .await?;
    let seconds_to_all_running = clock.elapsed().as_secs_f64();
    let peak_memory_mib = memory_mib(&operator.pid().to_string(), "VmHWM");
    // Simulated guests do not wait for their disks, and binding ten thousand of them takes the cluster its time.
    step("all disks bound", wait_until(&lab, count, "stored", is_stored)).await?;
    settle(&lab).await?;
    let all_running = Timestamp::now();
    step("at rest", async {
        tokio::time::sleep(idle).await;
        Ok(())
    })
    .await?;
    let rested = Timestamp::now();

    let changed = Timestamp::now();
    let latencies = step("changes of VirtualMachines", told_after_changes(&lab, count)).await?;
    settle(&lab).await?;
    let told = Timestamp::now();

    operator.signal(Signal::SIGTERM)?;
    operator.wait(Duration::from_secs(20)).await?;
    let restarted = Timestamp::now();
    let clock = Instant::now();
    let operator = kubevirt_operator::start(&lab, "release").await?;
    step("a restart with everything settled", async {
        operator.wait_for_message(vitivirt_runtime::lease::message::ACQUIRED, Duration::from_secs(120)).await?;
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
        vm_changes: ChangeFigures::of(latencies, between(changed, told).filter(|record| record.is_write()).count()),
        restart_seconds_to_settled,
        restart_writes: between(restarted, Timestamp::now()).filter(|record| record.is_write()).count(),
        resident_after_restart_mib: memory_mib(&operator.pid().to_string(), "VmRSS"),
    };
    lab.stop().await?;
    Ok(figures)
}

/// How many changes of VirtualMachines are measured.
const CHANGES: usize = 100;

/// From a VirtualMachine's change to the status of its Machine that tells of it.
#[derive(Debug, Serialize)]
struct ChangeFigures {
    count: usize,
    median_milliseconds: f64,
    slowest_milliseconds: f64,
    writes_per_change: f64,
}

impl ChangeFigures {
    fn of(mut latencies: Vec<Duration>, writes: usize) -> Self {
        latencies.sort();
        let milliseconds =
            |latency: Option<&Duration>| latency.map_or(f64::NAN, |latency| latency.as_secs_f64() * 1000.0);
        ChangeFigures {
            count: latencies.len(),
            median_milliseconds: milliseconds(latencies.get(latencies.len() / 2)),
            slowest_milliseconds: milliseconds(latencies.last()),
            writes_per_change: writes as f64 / latencies.len() as f64,
        }
    }
}

/// KubeVirt says of one VirtualMachine after the other that it must be restarted: how long until its Machine says so?
async fn told_after_changes(lab: &Lab, count: usize) -> Result<Vec<Duration>> {
    let vms: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), "default", &vitivirt_lab::kubevirt_resource("VirtualMachine"));
    let mut latencies = Vec::new();
    for number in 0..CHANGES {
        let name = format!("machine-{}", number % count);
        // Said, and with fewer Machines than changes taken back and said again.
        let is_required = (number / count).is_multiple_of(2);
        let mut status = vms.get(&name).await?.data.get("status").cloned().unwrap_or_default();
        let conditions = status.pointer_mut("/conditions").and_then(Value::as_array_mut).context("conditions")?;
        conditions.retain(|condition| condition.get("type").is_none_or(|type_| type_ != "RestartRequired"));
        if is_required {
            conditions.push(json!({"type": "RestartRequired", "status": "True", "message": "something was changed"}));
        }
        let says_so = move |machine: Option<&DynamicObject>| {
            let conditions = machine.and_then(|machine| machine.data.pointer("/status/conditions")?.as_array());
            let said = |condition: &Value| condition.get("type").is_some_and(|type_| type_ == "RestartRequired");
            conditions.is_some_and(|conditions| conditions.iter().any(said) == is_required)
        };
        let told = lab.wait("a status that tells of it", Duration::from_secs(20), machines(lab), &name, says_so);
        let change = async {
            let patch = Patch::Merge(json!({"status": status}));
            vms.patch_status(&name, &PatchParams::default(), &patch).await.context("changing a VirtualMachine")?;
            anyhow::Ok(Instant::now())
        };
        let (changed, told) = futures::future::join(change, told.map(|told| (told, Instant::now()))).await;
        told.0?;
        latencies.push(told.1.saturating_duration_since(changed?));
    }
    Ok(latencies)
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

/// The first write of a kind makes an API server read its schema, which takes it seconds that are nobody's to save.
async fn warm_up(lab: &Lab) -> Result<()> {
    create_machines(lab, 1).await?;
    wait_until(lab, 1, "Running", is_running).await?;
    machines(lab).delete("machine-0", &DeleteParams::default()).await?;
    let gone = |machine: Option<&DynamicObject>| machine.is_none();
    lab.wait("the end of the first Machine", Duration::from_secs(60), machines(lab), "machine-0", gone).await?;
    // Its claim outlives it by a moment, and the next Machine of the name would wait for it.
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(lab.client(), "default");
    let gone = |claim: Option<&PersistentVolumeClaim>| claim.is_none();
    lab.wait("the end of its claim", Duration::from_secs(60), claims, "machine-0-root", gone).await.map(|_| ())
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

fn is_running(machine: &DynamicObject) -> bool {
    machine.data.pointer("/status/phase") == Some(&"Running".into())
}

fn is_stored(machine: &DynamicObject) -> bool {
    let conditions = machine.data.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let has = |condition: &Value, field: &str, value: &str| condition.get(field).is_some_and(|have| have == value);
    conditions.into_iter().any(|have| has(have, "type", "StorageReady") && has(have, "status", "True"))
}

async fn wait_until(lab: &Lab, count: usize, what: &str, is_so: fn(&DynamicObject) -> bool) -> Result<()> {
    let number = u32::try_from(count).unwrap_or(u32::MAX);
    let timeout = Duration::from_secs(120) + Duration::from_millis(100) * number;
    // Listing thousands of Machines costs the API server what it should have for the operator.
    let pause = (Duration::from_micros(500) * number).max(Duration::from_millis(100));
    let started = Instant::now();
    loop {
        let list = machines(lab).list(&ListParams::default()).await.context("listing Machines")?;
        let others: Vec<_> = list.items.iter().filter(|machine| !is_so(machine)).collect();
        ensure!(list.items.len() == count, "{} Machines instead of {count}", list.items.len());
        let Some(other) = others.first() else { return Ok(()) };
        if started.elapsed() > timeout {
            let left = others.len();
            bail!("{left} of {count} are not {what} after {timeout:?}; one of them: {:?}", other.data);
        }
        tokio::time::sleep(pause).await;
    }
}
