//! Chains of edits: S0 → S1 → … → Sn leaves the same objects as Sn alone, made elsewhere.
//!
//! What a Machine once had stays until it goes: the PVCs of disks that left its spec. Its cloud-init Secret stays while
//! a guest that began with it runs, which may still need it to move to another node: so every guest is started anew at the
//! end of its chain. Everything else has no memory.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::{FutureExt, future};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use vitivirt_api::machine::{Disk, LABEL_MACHINE, Machine, MachineSpec};
use vitivirt_lab::harness::Suite;

use crate::random::{Drawn, affordable, drawn, import_sources_are_known, is_stopped};
use crate::world::{World, at_once, machine, phase};

const CHAINS: usize = 24;
const SETTLED: Duration = Duration::from_secs(150);
const NETWORKS: [&str; 2] = ["prod", "storage"];

pub(crate) fn add(suite: &mut Suite) {
    suite.test("chains_of_edits_end_where_the_last_one_begins", |labs| async move {
        let (edited, direct) = future::try_join(
            Box::pin(World::begin(&labs, "edits-chained")),
            Box::pin(World::begin(&labs, "edits-direct")),
        )
        .await?;
        edited.storage_class("fast-ssd").await?;
        import_sources_are_known(&edited.lab).await?;
        for world in [&edited, &direct] {
            world.networks(&NETWORKS).await?;
        }
        let retagged = json!({"spec": {"vlan": 200}});
        direct.retag(&retagged).await?;

        let chains = chains()?;
        let lives = chains.iter().map(|chain| live(chain, &edited, &direct).boxed());
        at_once(lives.collect()).await?;
        edited.retag(&retagged).await?;
        edited.settled().await?;
        direct.settled().await?;
        for chain in &chains {
            let (found, expected) =
                future::try_join(edited.comparable_spec(&chain.name), direct.comparable_spec(&chain.name)).await?;
            compare(chain, &found, &expected).with_context(|| chain.describe())?;
        }
        ensure!(edited.attached().await? == direct.attached().await?, "the networks differ");
        Ok(())
    });
}

async fn live(chain: &Chain, edited: &World, direct: &World) -> Result<()> {
    let elsewhere = async {
        let last = chain.specs.last().context("a chain has an end")?;
        direct.declare(&chain.name, last).await?;
        direct.is_as_declared(&chain.name, last).await
    };
    future::try_join(edited.walk(chain), elsewhere).await.with_context(|| chain.describe()).map(|_| ())
}

struct Chain {
    name: String,
    specs: Vec<MachineSpec>,
    seed: String,
}

impl Chain {
    fn describe(&self) -> String {
        format!("{} ({}): {:#}", self.name, self.seed, json!(self.specs))
    }
}

/// Two to four edits each.
fn chains() -> Result<Vec<Chain>> {
    let mut drawn = drawn(4, CHAINS * 5)?.into_iter();
    let chain = |number: usize| {
        let links: Vec<Drawn> = drawn.by_ref().take(3 + number % 3).collect();
        let seed = links.iter().map(|link| link.name.clone()).collect::<Vec<_>>().join(" → ");
        let specs = may_follow(links.into_iter().map(|link| affordable(link.spec)).collect());
        Chain { name: format!("chain-{number}"), specs, seed }
    };
    Ok((0..CHAINS).map(chain).collect())
}

/// What may never change is made the same all along: a disk's class and source. Its size only grows.
fn may_follow(mut specs: Vec<MachineSpec>) -> Vec<MachineSpec> {
    let mut first: BTreeMap<String, Disk> = BTreeMap::new();
    for (link, spec) in specs.iter_mut().enumerate() {
        if !spec.disks.iter().any(|disk| disk.name == "root") {
            spec.disks.push(Disk { name: "root".to_owned(), ..Disk::default() });
        }
        for disk in &mut spec.disks {
            let known = first.entry(disk.name.clone()).or_insert_with(|| disk.clone());
            disk.source.clone_from(&known.source);
            disk.storage_class.clone_from(&known.storage_class);
            let image = disk.source.as_ref().is_some_and(|source| source.container_disk.is_some());
            disk.size = (!image).then(|| format!("{}Gi", 10 * (1 + link)));
        }
    }
    specs
}

impl World {
    /// As `kubectl apply --server-side` would: what the spec no longer says is gone.
    async fn declare(&self, name: &str, spec: &MachineSpec) -> Result<()> {
        let declared = Patch::Apply(machine(name, &json!(spec)));
        self.machines().patch(name, &PatchParams::apply("somebody").force(), &declared).await?;
        Ok(())
    }

    async fn walk(&self, chain: &Chain) -> Result<()> {
        for (link, spec) in chain.specs.iter().enumerate() {
            self.declare(&chain.name, spec).await?;
            // Some edits come while the last one is still being carried out.
            let hasty = link % 2 == 0 && link + 1 < chain.specs.len();
            if hasty {
                self.until_within(SETTLED, &chain.name, "a look at the edit", is_observed).await?;
            } else {
                self.is_as_declared(&chain.name, spec).await?;
            }
        }
        let last = chain.specs.last().filter(|spec| !is_stopped(spec));
        if last.is_some() { self.restart_guest(&chain.name).await } else { Ok(()) }
    }

    async fn is_as_declared(&self, name: &str, spec: &MachineSpec) -> Result<()> {
        let wanted = if is_stopped(spec) { "Stopped" } else { "Running" };
        let is_there = |machine: &Machine| is_observed(machine) && phase(machine) == Some(wanted);
        self.until_within(SETTLED, name, wanted, is_there).await.map(|_| ())
    }

    /// Another VLAN for the networks.
    async fn retag(&self, change: &Value) -> Result<()> {
        let networks = self.api::<vitivirt_api::machine::NetworkConfiguration>();
        for name in NETWORKS {
            networks.patch(name, &PatchParams::default(), &Patch::Merge(change)).await?;
        }
        Ok(())
    }

    async fn attached(&self) -> Result<Vec<Value>> {
        let list = self.attachments().list(&ListParams::default()).await?;
        Ok(list.items.iter().map(|item| json!([item.name_any(), item.labels(), item.data.get("spec")])).collect())
    }

    /// What was made for the Machine, without what differs from Machine to Machine.
    async fn comparable_spec(&self, name: &str) -> Result<Essence> {
        let selected = ListParams::default().labels(&format!("{LABEL_MACHINE}={name}"));
        let made = self.machines().get(name).await?;
        let uid = made.uid().unwrap_or_default();
        let vm = self.vms().get(name).await?;
        let pvcs = self.api::<PersistentVolumeClaim>().list(&selected).await?.items;
        let secret = self.api::<Secret>().get_opt(&format!("{name}-cloudinit")).await?;
        let plain = |value: Value| without_identity(&value, &uid, &interfaces(&vm));
        Ok(Essence {
            vm: plain(json!({"labels": vm.labels(), "owners": owners(&vm), "spec": vm.data.get("spec")}))?,
            pvcs: pvcs
                .into_iter()
                .map(|pvc| {
                    let mut spec = json!(pvc.spec);
                    if let Some(fields) = spec.as_object_mut() {
                        fields.remove("volumeName");
                    }
                    Ok((pvc.name_any(), plain(json!({"labels": pvc.labels(), "spec": spec}))?))
                })
                .collect::<Result<_>>()?,
            secret: secret
                // Its annotations are about the running guest and the Machine's UID.
                .map(|secret| plain(json!({"labels": secret.labels(), "data": secret.data})))
                .transpose()?,
        })
    }
}

struct Essence {
    vm: Value,
    pvcs: BTreeMap<String, Value>,
    secret: Option<Value>,
}

fn compare(chain: &Chain, found: &Essence, expected: &Essence) -> Result<()> {
    ensure!(found.vm == expected.vm, "{:#} instead of {:#}", found.vm, expected.vm);
    for (name, pvc) in &expected.pvcs {
        ensure!(found.pvcs.get(name) == Some(pvc), "{:#?} instead of {pvc:#}", found.pvcs.get(name));
    }
    let past: Vec<String> =
        chain.specs.iter().flat_map(|spec| &spec.disks).map(|disk| format!("{}-{}", chain.name, disk.name)).collect();
    for name in found.pvcs.keys().filter(|name| !expected.pvcs.contains_key(*name)) {
        ensure!(past.contains(name), "the PVC {name} is of no disk");
    }
    ensure!(found.secret == expected.secret, "{:#?} instead of {:#?}", found.secret, expected.secret);
    Ok(())
}

fn is_observed(machine: &Machine) -> bool {
    let observed = machine.status.as_ref().and_then(|status| status.observed_generation);
    observed.is_some() && observed == machine.metadata.generation
}

fn interfaces(vm: &DynamicObject) -> Vec<String> {
    let interfaces = vm.data.pointer("/spec/template/spec/domain/devices/interfaces").and_then(Value::as_array);
    let names = interfaces.into_iter().flatten().filter_map(|interface| interface.get("name")?.as_str());
    names.map(str::to_owned).collect()
}

fn owners(vm: &DynamicObject) -> Vec<(String, String, Option<bool>)> {
    let owners = vm.owner_references().iter();
    owners.map(|owner| (owner.kind.clone(), owner.name.clone(), owner.controller)).collect()
}

fn without_identity(value: &Value, uid: &str, interfaces: &[String]) -> Result<Value> {
    let mut text = value.to_string().replace(uid, "UID");
    for name in interfaces {
        text = text.replace(&vitivirt_machine::resolve::derived_mac(uid, name), &format!("MAC-{name}"));
    }
    serde_json::from_str(&text).context("an object")
}
