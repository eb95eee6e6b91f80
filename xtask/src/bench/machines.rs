//! Many Machines on simulated KubeVirt: the cost per Machine, of the idle operator and of a restart.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Secret};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::{Value, json};
use vitivirt_lab::{KubeVirtInstaller, Lab, LabOptions, OperatorProcess, Record};

use super::{memory_mib, write_results};
use crate::{kubevirt_operator, terminal::step};

#[derive(Args)]
pub(crate) struct MachinesOptions {
    /// Number of Machines
    #[arg(long, default_value_t = 1000)]
    count: usize,
    /// Seconds to measure the idle operator
    #[arg(long, default_value_t = 60)]
    idle: u64,
    /// Give each Machine its own source Secret
    #[arg(long)]
    secret_refs: bool,
}

const USER: &str = "system:serviceaccount:kubevirt-operator-system:kubevirt-operator-controller-manager";

#[derive(Debug, Serialize)]
struct Figures {
    machines: usize,
    seconds_to_all_running: f64,
    /// Writes per second of a client that only creates ConfigMaps, on the same lab before the Machines.
    bare_writes_per_second: f64,
    /// All writes of the operator while the Machines were created, as a share of that rate.
    share_of_bare_rate: f64,
    writes_per_machine: f64,
    reads_per_machine: f64,
    peak_memory_mib: u64,
    /// Without watches: a watch that is silent for too long, or that the server ends, is opened again.
    idle_requests_per_minute: f64,
    idle_requests: Vec<String>,
    idle_watches_reopened: usize,
    vm_changes: ChangeFigures,
    restart_writes: usize,
    resident_after_restart_mib: u64,
}

pub(super) async fn run(options: &MachinesOptions) -> Result<()> {
    let figures = measure(options).await?;
    write_results("machines", &figures)?;
    println!("{}", serde_json::to_string(&figures).context("writing the figures")?);
    let violations = figures.violations(options.secret_refs);
    ensure!(violations.is_empty(), "{}", violations.join("\n"));
    Ok(())
}

impl Figures {
    /// What the operator must not cost at any number of Machines up to 10,000.
    fn violations(&self, has_secrets: bool) -> Vec<String> {
        // The source Secret of each Machine is read once.
        let reads = if has_secrets { 1.0 } else { 0.0 };
        let memory = if has_secrets { 80.0 } else { 60.0 };
        let limits = [
            ("writes per Machine", self.writes_per_machine, 9.0),
            ("reads per Machine", self.reads_per_machine, reads),
            ("MiB of memory", self.peak_memory_mib as f64, memory),
            ("requests per minute when idle", self.idle_requests_per_minute, 0.0),
            ("writes after a restart", self.restart_writes as f64, 0.0),
        ];
        let exceeded = limits.into_iter().filter(|(_, figure, limit)| figure > limit);
        exceeded.map(|(what, figure, limit)| format!("{figure:.2} {what}, expected at most {limit}")).collect()
    }
}

async fn measure(options: &MachinesOptions) -> Result<Figures> {
    let count = options.count;
    let idle = Duration::from_secs(options.idle);
    let lab = step(
        "start a lab with simulated KubeVirt",
        Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }),
    )
    .await?;
    kubevirt_operator::install(&lab).await?;
    let mut operator = kubevirt_operator::start(&lab, "release").await?;
    operator.wait_for_message(vitivirt_runtime::lease::message::ACQUIRED, Duration::from_secs(120)).await?;

    step("create one Machine to warm up the API server", warm_up(&lab)).await?;

    let bare_writes_per_second = step("measure a bare client", bare_rate(&lab)).await?;
    if options.secret_refs {
        step("create the source Secrets", create_secrets(&lab, count)).await?;
    }
    let start = Timestamp::now();
    let clock = Instant::now();
    step(&format!("create {count} Machines and wait until they are Running"), async {
        create_machines(&lab, count, options.secret_refs).await?;
        wait_until_reported(&operator, count).await?;
        wait_until(&lab, count, "Running", is_running).await
    })
    .await?;
    let seconds_to_all_running = clock.elapsed().as_secs_f64();
    let running = Timestamp::now();
    let peak_memory_mib = memory_mib(&operator.pid().to_string(), "VmHWM");
    // Simulated guests do not wait for their disks, and the cluster needs time to bind thousands of PVCs.
    step("wait until all disks are bound", wait_until(&lab, count, "stored", is_stored)).await?;
    wait_until_idle(&lab).await?;
    let all_running = Timestamp::now();
    step("measure the idle operator", async {
        tokio::time::sleep(idle).await;
        Ok(())
    })
    .await?;
    let idle_end = Timestamp::now();

    let changed = Timestamp::now();
    let latencies = step("change VirtualMachines", measure_status_latency(&lab, count)).await?;
    wait_until_idle(&lab).await?;
    let reported = Timestamp::now();

    operator.signal(Signal::SIGTERM)?;
    operator.wait(Duration::from_secs(20)).await?;
    let restarted = Timestamp::now();
    let operator = kubevirt_operator::start(&lab, "release").await?;
    step("restart the operator with all Machines up to date", async {
        operator.wait_for_message(vitivirt_runtime::lease::message::ACQUIRED, Duration::from_secs(120)).await?;
        // The operator reconciles every Machine once after its start, and must not write anything.
        tokio::time::sleep(idle.min(Duration::from_secs(30))).await;
        Ok(())
    })
    .await?;
    let records = lab.audit()?;
    let between = |from: Timestamp, to: Timestamp| {
        records
            .iter()
            .filter(move |record| record.user == USER && !is_excluded(record) && (from..to).contains(&record.time))
    };
    let per_machine = |number: usize| number as f64 / count as f64;
    let creation: Vec<&Record> = between(start, all_running).collect();
    let (idle_watches, idle_requests): (Vec<&Record>, Vec<&Record>) =
        between(all_running, idle_end).partition(|record| record.verb == "watch");
    let figures = Figures {
        machines: count,
        seconds_to_all_running,
        bare_writes_per_second,
        share_of_bare_rate: between(start, running).filter(|record| record.is_write()).count() as f64
            / seconds_to_all_running
            / bare_writes_per_second,
        writes_per_machine: per_machine(creation.iter().filter(|record| record.is_write()).count()),
        reads_per_machine: per_machine(creation.iter().filter(|record| record.verb == "get").count()),
        peak_memory_mib,
        idle_requests_per_minute: idle_requests.len() as f64 * 60.0 / idle.as_secs_f64(),
        idle_requests: idle_requests.iter().map(|record| format!("{} {}", record.verb, record.resource)).collect(),
        idle_watches_reopened: idle_watches.len(),
        vm_changes: ChangeFigures::from_latencies(
            latencies,
            between(changed, reported).filter(|record| record.is_write()).count(),
        ),
        restart_writes: between(restarted, Timestamp::now()).filter(|record| record.is_write()).count(),
        resident_after_restart_mib: memory_mib(&operator.pid().to_string(), "VmRSS"),
    };
    lab.stop().await?;
    Ok(figures)
}

/// The number of measured changes of VirtualMachines.
const CHANGES: usize = 100;

/// The time from a change of a VirtualMachine until the status of its Machine shows it.
#[derive(Debug, Serialize)]
struct ChangeFigures {
    count: usize,
    median_milliseconds: f64,
    slowest_milliseconds: f64,
    writes_per_change: f64,
}

impl ChangeFigures {
    fn from_latencies(mut latencies: Vec<Duration>, writes: usize) -> Self {
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

/// Sets the condition RestartRequired on one VirtualMachine after the other, and measures the time until the Machine
/// has it too.
async fn measure_status_latency(lab: &Lab, count: usize) -> Result<Vec<Duration>> {
    let vms: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), "default", &vitivirt_lab::kubevirt_resource("VirtualMachine"));
    let mut latencies = Vec::new();
    for number in 0..CHANGES {
        let name = format!("machine-{}", number % count);
        // With fewer Machines than changes, the condition is also removed and set again.
        let is_required = (number / count).is_multiple_of(2);
        let mut status = vms.get(&name).await?.data.get("status").cloned().unwrap_or_default();
        let conditions = status.pointer_mut("/conditions").and_then(Value::as_array_mut).context("conditions")?;
        conditions.retain(|condition| condition.get("type").is_none_or(|type_| type_ != "RestartRequired"));
        if is_required {
            conditions.push(json!({"type": "RestartRequired", "status": "True", "message": "something was changed"}));
        }
        let has_condition = move |machine: Option<&DynamicObject>| {
            let conditions = machine.and_then(|machine| machine.data.pointer("/status/conditions")?.as_array());
            let is_restart_required =
                |condition: &Value| condition.get("type").is_some_and(|type_| type_ == "RestartRequired");
            conditions.is_some_and(|conditions| conditions.iter().any(is_restart_required) == is_required)
        };
        let reported =
            lab.wait("a Machine status with the change", Duration::from_secs(20), machines(lab), &name, has_condition);
        let change = async {
            let patch = Patch::Merge(json!({"status": status}));
            vms.patch_status(&name, &PatchParams::default(), &patch).await.context("changing a VirtualMachine")?;
            anyhow::Ok(Instant::now())
        };
        let (changed, reported) = futures::future::join(change, reported.map(|result| (result, Instant::now()))).await;
        reported.0?;
        latencies.push(reported.1.saturating_duration_since(changed?));
    }
    Ok(latencies)
}

/// Waits until the operator has sent no requests for five seconds: PVCs may be bound after the guest runs.
async fn wait_until_idle(lab: &Lab) -> Result<()> {
    let mut before = usize::MAX;
    loop {
        let now = lab.audit()?.iter().filter(|record| record.user == USER && !is_excluded(record)).count();
        if now == before {
            return Ok(());
        }
        before = now;
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

/// Leases and events are not counted.
fn is_excluded(record: &Record) -> bool {
    record.resource == "leases" || record.resource == "events"
}

fn machines(lab: &Lab) -> Api<DynamicObject> {
    kubevirt_operator::machines(lab, "default")
}

/// The writes per second of a client that does nothing else.
async fn bare_rate(lab: &Lab) -> Result<f64> {
    const WRITES: usize = 2000;
    let api: Api<ConfigMap> = Api::namespaced(lab.client(), "default");
    let clock = Instant::now();
    stream::iter(0..WRITES)
        .map(|number| {
            let mut object = ConfigMap::default();
            object.metadata.name = Some(format!("bare-{number}"));
            let api = api.clone();
            async move { api.create(&PostParams::default(), &object).await.map(|_| ()) }
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await
        .context("creating ConfigMaps")?;
    Ok(WRITES as f64 / clock.elapsed().as_secs_f64())
}

async fn create_secrets(lab: &Lab, count: usize) -> Result<()> {
    let api: Api<Secret> = Api::namespaced(lab.client(), "default");
    stream::iter(0..count)
        .map(|number| {
            let secret = json!({"metadata": {"name": format!("source-{number}")}, "stringData": {"userdata": "#cloud-config\n"}});
            let api = api.clone();
            async move {
                let secret: Secret = serde_json::from_value(secret).context("building a Secret")?;
                api.create(&PostParams::default(), &secret).await.context("creating a Secret").map(|_| ())
            }
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await
}

fn machine(number: usize, secret_ref: bool) -> Value {
    let cloud_init = if secret_ref {
        json!({"secretRef": {"name": format!("source-{number}")}})
    } else {
        json!({"userData": "#cloud-config\nhostname: machine\n"})
    };
    json!({
        "apiVersion": "vitistack.io/v1alpha1",
        "kind": "Machine",
        "metadata": {"name": format!("machine-{number}"), "namespace": "default"},
        "spec": {"template": "small", "cloudInit": cloud_init},
    })
}

/// At the first write of a kind, the API server reads its schema. That takes seconds and must not be measured.
async fn warm_up(lab: &Lab) -> Result<()> {
    create_machines(lab, 1, false).await?;
    wait_until(lab, 1, "Running", is_running).await?;
    machines(lab).delete("machine-0", &DeleteParams::default()).await?;
    let deleted = |machine: Option<&DynamicObject>| machine.is_none();
    lab.wait("the deletion of the first Machine", Duration::from_secs(60), machines(lab), "machine-0", deleted).await?;
    // Its PVC is deleted shortly after it, and the next Machine of that name would wait for the deletion.
    let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(lab.client(), "default");
    let deleted = |pvc: Option<&PersistentVolumeClaim>| pvc.is_none();
    lab.wait("the deletion of its PVC", Duration::from_secs(60), pvcs, "machine-0-root", deleted).await.map(|_| ())
}

async fn create_machines(lab: &Lab, count: usize, secret_refs: bool) -> Result<()> {
    let api = machines(lab);
    stream::iter(0..count)
        .map(|number| {
            let api = api.clone();
            async move {
                let object: DynamicObject =
                    serde_json::from_value(machine(number, secret_refs)).context("building a Machine")?;
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

/// Waits until the operator's metrics count so many Machines in the phase Running. A list of thousands of Machines every
/// few seconds would take CPU time of the API server from the operator.
async fn wait_until_reported(operator: &OperatorProcess, count: usize) -> Result<()> {
    let deadline = Instant::now() + patience(count);
    loop {
        let (_, metrics) = operator.get(8080, "/metrics").await?;
        let running: f64 = metrics
            .lines()
            .filter(|line| line.starts_with("kubevirt_operator_machines_total{phase=\"Running\""))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum();
        if running >= count as f64 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the operator reports {running} of {count} Machines as Running");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn patience(count: usize) -> Duration {
    Duration::from_secs(120) + Duration::from_millis(100) * u32::try_from(count).unwrap_or(u32::MAX)
}

async fn wait_until(lab: &Lab, count: usize, what: &str, condition: fn(&DynamicObject) -> bool) -> Result<()> {
    let number = u32::try_from(count).unwrap_or(u32::MAX);
    let timeout = patience(count);
    // Listing thousands of Machines takes CPU time of the API server from the operator, so the pause grows with them.
    let pause = (Duration::from_micros(500) * number).max(Duration::from_millis(100));
    let started = Instant::now();
    loop {
        let list = machines(lab).list(&ListParams::default()).await.context("listing Machines")?;
        let others: Vec<_> = list.items.iter().filter(|machine| !condition(machine)).collect();
        ensure!(list.items.len() == count, "expected {count} Machines, found {}", list.items.len());
        let Some(other) = others.first() else { return Ok(()) };
        if started.elapsed() > timeout {
            let left = others.len();
            bail!("{left} of {count} Machines are not {what} after {timeout:?}; one of them: {:?}", other.data);
        }
        tokio::time::sleep(pause).await;
    }
}
