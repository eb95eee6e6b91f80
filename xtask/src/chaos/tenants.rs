//! One namespace attacks, another one works. The victim's waiting times, the operator's memory and its file descriptors
//! are measured during each attack and compared with the quiet cluster.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use vitivirt_lab::{
    Extension, KubeVirtInstaller, Lab, LabOptions, OperatorProcess, manifests,
    proxy::{Match, ProxyFault, ProxyRule},
};
use vitivirt_runtime::lease::message;

use crate::{kubevirt_operator, terminal::step};

#[derive(Args)]
pub(crate) struct TenantsOptions {
    /// Divide the number of objects of each attack by this
    #[arg(long, default_value_t = 1)]
    divide: usize,
    /// Machines that the victim creates, edits and deletes during each attack
    #[arg(long, default_value_t = 10)]
    probes: usize,
    /// Attacks to run, as letters
    #[arg(long, default_value = "abcdef")]
    attacks: String,
}

const VICTIM: &str = "victim";
const ATTACKER: &str = "attacker";
/// How much longer than on a quiet cluster the slowest request of the victim may take.
const TOLERATED: Duration = Duration::from_secs(5);
const MEMORY_MIB: u64 = 150;
/// More than the connections to the API server, of the servers and of the caches need.
const DESCRIPTORS: usize = 300;
const PATIENCE: Duration = Duration::from_secs(300);

struct Attack {
    letter: char,
    name: &'static str,
}

const ATTACKS: [Attack; 6] = [
    Attack { letter: 'a', name: "2000 Machines with one MAC address" },
    Attack { letter: 'b', name: "100 Machines of the largest size" },
    Attack { letter: 'c', name: "10000 Machines" },
    Attack { letter: 'd', name: "1000 source Secrets, and a restart of the API server" },
    Attack { letter: 'e', name: "VirtualMachines that take 10 s to create" },
    Attack { letter: 'f', name: "1100 connections" },
];

struct TenantCampaign {
    lab: Lab,
    operator: OperatorProcess,
    divide: usize,
}

/// What the victim and the operator showed during one attack.
#[derive(Debug)]
struct AttackFigures {
    slowest: Duration,
    memory_mib: u64,
    descriptors: usize,
}

pub(super) async fn run(options: &TenantsOptions) -> Result<()> {
    let lab = Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }).await?;
    lab.install(Extension::Multus).await?;
    kubevirt_operator::install(&lab).await?;
    for namespace in [VICTIM, ATTACKER] {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        manifests::create(&lab.client(), &[object]).await?;
    }
    let operator = kubevirt_operator::start_through(&lab, "debug", true).await?;
    operator.wait_for_message(message::ACQUIRED, PATIENCE).await?;
    let campaign = TenantCampaign { lab, operator, divide: options.divide.max(1) };
    campaign.probe("warm", 2).await?;
    let quiet = campaign.probe("quiet", options.probes).await?;
    println!("quiet: {quiet:?}");
    for attack in ATTACKS.iter().filter(|attack| options.attacks.contains(attack.letter)) {
        let figures = step(attack.name, campaign.attack(attack, options.probes)).await?;
        println!("{}: {figures:?}", attack.name);
        let allowed = quiet.slowest + TOLERATED;
        ensure!(figures.slowest <= allowed, "{}: {:?}, allowed {allowed:?}", attack.name, figures.slowest);
        ensure!(figures.memory_mib <= MEMORY_MIB, "{}: {} MiB", attack.name, figures.memory_mib);
        ensure!(figures.descriptors <= DESCRIPTORS, "{}: {} descriptors", attack.name, figures.descriptors);
    }
    ensure!(!campaign.operator.log_text().contains("panic"), "the operator has panicked");
    campaign.lab.stop().await
}

impl TenantCampaign {
    fn count(&self, number: usize) -> usize {
        (number / self.divide).max(1)
    }

    async fn attack(&self, attack: &Attack, probes: usize) -> Result<AttackFigures> {
        let letter = attack.letter;
        let plain = small(&json!({}));
        let figures = match letter {
            'a' => {
                let interface = json!({"name": "a", "networkName": "pod", "macAddress": "02:00:00:00:00:01"});
                let machine = small(&json!({"networks": [interface]}));
                self.with_machines(letter, self.count(2000), |_| machine.clone(), probes).await?
            }
            'b' => {
                // Text that does not compress.
                let noise = |n: usize, kib: usize| {
                    let words = (0..64 * kib).map(|m| format!("{:016x}", mix(n * 64 * 256 + m)));
                    words.collect::<String>()
                };
                // The schema allows 64 KiB of each, and Kubernetes 256 KiB of annotations.
                let largest = |n: usize| {
                    let cloud_init = json!({"userData": noise(3 * n, 64), "networkData": noise(3 * n + 1, 64)});
                    json!({
                        "metadata": {"annotations": {"example.com/noise": noise(3 * n + 2, 250)}},
                        "spec": {"template": "small", "cloudInit": cloud_init},
                    })
                };
                self.with_machines(letter, self.count(100), largest, probes).await?
            }
            'c' => self.with_machines(letter, self.count(10_000), |_| plain.clone(), probes).await?,
            'd' => {
                let count = self.count(1000);
                for n in 0..count {
                    let secret = json!({
                        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": format!("s-{n}"), "namespace": ATTACKER},
                        "stringData": {"userdata": "#cloud-config\n"},
                    });
                    manifests::create(&self.lab.client(), &[secret]).await?;
                }
                let machine = |n: usize| small(&json!({"cloudInit": {"secretRef": {"name": format!("s-{n}")}}}));
                self.create(letter, count, &machine).await?;
                self.lab.stop_api_server().await?;
                self.lab.start_api_server().await?;
                self.probe("d", probes).await?
            }
            'e' => {
                let slow = Match::writes().resource("virtualmachines").namespace(ATTACKER);
                let rule = self.lab.proxy().add(ProxyRule::always(slow, ProxyFault::Delay(Duration::from_secs(10))));
                let figures = self.with_machines(letter, self.count(100), |_| plain.clone(), probes).await?;
                rule.remove();
                figures
            }
            _ => {
                let mut connections = Vec::new();
                for n in 0..self.count(1100) {
                    let port = if n % 2 == 0 { 8080 } else { 8081 };
                    connections.extend(TcpStream::connect((self.operator.address(), port)).await.ok());
                }
                let figures = self.probe("f", probes).await?;
                let (status, _) = self.operator.get(8081, "/healthz").await.context("the flood closed /healthz")?;
                ensure!(status == 200, "/healthz: {status}");
                figures
            }
        };
        self.delete_machines(attack.name).await?;
        Ok(figures)
    }

    /// The API server may not delete ten thousand Machines before the request times out. Then it is sent again.
    async fn delete_machines(&self, attack: &str) -> Result<()> {
        let machines = self.machines(ATTACKER);
        let started = Instant::now();
        let mut last = Err(String::new());
        while !machines.list(&ListParams::default().limit(1)).await?.items.is_empty() {
            ensure!(started.elapsed() < PATIENCE * 4, "{attack}: the Machines are not deleted: {last:?}");
            if last.is_err() {
                let response = machines.delete_collection(&DeleteParams::default(), &ListParams::default()).await;
                last = response.map(drop).map_err(|error| error.to_string());
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }

    /// The victim works while the attacker creates Machines.
    async fn with_machines(
        &self,
        letter: char,
        count: usize,
        machine: impl Fn(usize) -> Value,
        probes: usize,
    ) -> Result<AttackFigures> {
        let name = letter.to_string();
        let (figures, created) =
            futures::future::join(self.probe(&name, probes), self.create(letter, count, &machine)).await;
        created?;
        // And once more when all of them exist.
        let later = self.probe(&format!("{name}2"), probes).await?;
        let figures = figures?;
        Ok(AttackFigures { slowest: figures.slowest.max(later.slowest), ..later })
    }

    async fn create(&self, letter: char, count: usize, machine: &impl Fn(usize) -> Value) -> Result<()> {
        let api = self.machines(ATTACKER);
        stream::iter(0..count)
            .map(|n| {
                let (api, machine) = (api.clone(), machine(n));
                async move { create_machine(&api, &format!("{letter}-{n}"), machine).await }
            })
            .buffer_unordered(16)
            .try_collect::<()>()
            .await
    }

    fn machines(&self, namespace: &str) -> Api<DynamicObject> {
        kubevirt_operator::machines(&self.lab, namespace)
    }

    /// The victim creates Machines one after the other, waits until each runs, stops it, and deletes it.
    async fn probe(&self, name: &str, probes: usize) -> Result<AttackFigures> {
        let api = self.machines(VICTIM);
        let mut slowest = Duration::ZERO;
        for n in 0..probes {
            let name = format!("{name}-{n}");
            let mut wait = async |what: &str, is_done: fn(Option<&DynamicObject>) -> bool, started: Instant| {
                self.lab.wait(what, PATIENCE, api.clone(), &name, is_done).await?;
                slowest = slowest.max(started.elapsed());
                anyhow::Ok(())
            };
            let started = Instant::now();
            create_machine(&api, &name, small(&json!({}))).await?;
            wait("Running", |machine| phase(machine) == Some("Running"), started).await?;
            let started = Instant::now();
            let stop = Patch::Merge(json!({"spec": {"powerState": "Stopped"}}));
            api.patch(&name, &PatchParams::default(), &stop).await?;
            wait("Stopped", |machine| phase(machine) == Some("Stopped"), started).await?;
            let started = Instant::now();
            api.delete(&name, &DeleteParams::default()).await?;
            wait("deleted", |machine| machine.is_none(), started).await?;
        }
        let pid = self.operator.pid().to_string();
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).context("the operator has ended")?.count();
        Ok(AttackFigures { slowest, memory_mib: crate::bench::memory_mib(&pid, "VmHWM"), descriptors })
    }
}

fn phase(machine: Option<&DynamicObject>) -> Option<&str> {
    machine?.data.pointer("/status/phase")?.as_str()
}

/// A Machine without a name.
fn small(fields: &Value) -> Value {
    let mut spec = json!({"template": "small"});
    json_patch::merge(&mut spec, fields);
    json!({"spec": spec})
}

/// Attempts to create a Machine while the server closes connections.
const ATTEMPTS: usize = 10;

async fn create_machine(api: &Api<DynamicObject>, name: &str, mut machine: Value) -> Result<()> {
    let identity = json!({"apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": name}});
    json_patch::merge(&mut machine, &identity);
    let object: DynamicObject = serde_json::from_value(machine).context("building a Machine")?;
    for attempt in 1..=ATTEMPTS {
        match api.create(&PostParams::default(), &object).await {
            Ok(_) => return Ok(()),
            // The attempt before succeeded, and its response was lost.
            Err(kube::Error::Api(status)) if status.is_already_exists() && attempt > 1 => return Ok(()),
            Err(error @ kube::Error::Api(_)) => return Err(error).context("creating a Machine"),
            Err(error) if attempt == ATTEMPTS => return Err(error).context("creating a Machine"),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    Ok(())
}

/// A number without a pattern.
fn mix(number: usize) -> u64 {
    let mixed = (number as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}
