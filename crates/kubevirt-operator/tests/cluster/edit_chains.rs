//! Chains of edits: applying S0 → S1 → … → Sn to one Machine gives the same objects as creating a Machine with Sn.
//!
//! Two things outlive an edit. The PVC of a disk that left the spec stays until the Machine is deleted. The cloud-init
//! Secret stays while a VMI that started with it runs, because a live migration may need it; therefore the test
//! restarts the VMI at the end of each chain.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::{FutureExt, future};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{
    ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_api::machine::{Disk, LABEL_MACHINE, Machine, MachineSpec, NetworkConfiguration};
use vitivirt_lab::harness::{SharedLabs, Suite};

use crate::{
    machine_test::{MachineTest, is_observed, machine, phase, run_concurrently},
    random_specs::{
        RandomSpec, create_import_source_crd, expected_phase, is_stopped, random_specs, with_reduced_resources,
    },
};

const CHAINS: usize = 24;
const EDIT_PATIENCE: Duration = Duration::from_secs(150);
const NETWORKS: [&str; 2] = ["prod", "storage"];

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; a_chain_of_edits_gives_the_same_objects_as_its_last_spec);
}

async fn a_chain_of_edits_gives_the_same_objects_as_its_last_spec(labs: Arc<SharedLabs>) -> Result<()> {
    let (edited, direct) = future::try_join(
        Box::pin(MachineTest::start(&labs, "edits-chained")),
        Box::pin(MachineTest::start(&labs, "edits-direct")),
    )
    .await?;
    edited.create_storage_class("fast-ssd").await?;
    create_import_source_crd(&edited.lab).await?;
    for test in [&edited, &direct] {
        test.create_networks(&NETWORKS).await?;
    }
    change_vlan(&direct).await?;

    let chains = edit_chains()?;
    run_concurrently(chains.iter().map(|chain| apply_both_ways(chain, &edited, &direct).boxed()).collect()).await?;
    change_vlan(&edited).await?;
    edited.wait_until_idle().await?;
    direct.wait_until_idle().await?;
    for chain in &chains {
        let (found, expected) = future::try_join(
            ComparableObjects::read(&edited, &chain.name),
            ComparableObjects::read(&direct, &chain.name),
        )
        .await?;
        compare(chain, &found, &expected).with_context(|| chain.describe())?;
    }
    ensure!(comparable_nads(&edited).await? == comparable_nads(&direct).await?, "the NADs differ");
    Ok(())
}

/// Applies the chain to one Machine, and its last spec to a Machine in the other namespace.
async fn apply_both_ways(chain: &EditChain, edited: &MachineTest, direct: &MachineTest) -> Result<()> {
    let apply_last = async {
        let last = chain.specs.last().context("the chain is empty")?;
        apply_spec(direct, &chain.name, last).await?;
        wait_until_applied(direct, &chain.name, last).await
    };
    future::try_join(apply_chain(edited, chain), apply_last).await.with_context(|| chain.describe()).map(|_| ())
}

struct EditChain {
    name: String,
    specs: Vec<MachineSpec>,
    /// The names of the random specs.
    origin: String,
}

impl EditChain {
    fn describe(&self) -> String {
        format!("{} ({}): {:#}", self.name, self.origin, json!(self.specs))
    }
}

/// Chains of two to four edits.
fn edit_chains() -> Result<Vec<EditChain>> {
    let mut random = random_specs(4, CHAINS * 5)?.into_iter();
    let chain = |number: usize| {
        let links: Vec<RandomSpec> = random.by_ref().take(3 + number % 3).collect();
        let origin = links.iter().map(|link| link.name.clone()).collect::<Vec<_>>().join(" → ");
        let specs =
            with_allowed_disk_changes(links.into_iter().map(|link| with_reduced_resources(link.spec)).collect());
        EditChain { name: format!("chain-{number}"), specs, origin }
    };
    Ok((0..CHAINS).map(chain).collect())
}

/// Gives every disk the same StorageClass, modes and source in all specs, which are immutable, and a size that only grows.
fn with_allowed_disk_changes(mut specs: Vec<MachineSpec>) -> Vec<MachineSpec> {
    let mut first: BTreeMap<String, Disk> = BTreeMap::new();
    for (link, spec) in specs.iter_mut().enumerate() {
        if !spec.disks.iter().any(|disk| disk.name == "root") {
            spec.disks.push(Disk { name: "root".to_owned(), ..Disk::default() });
        }
        for disk in &mut spec.disks {
            let known = first.entry(disk.name.clone()).or_insert_with(|| disk.clone());
            disk.source.clone_from(&known.source);
            disk.storage_class.clone_from(&known.storage_class);
            disk.access_mode.clone_from(&known.access_mode);
            disk.volume_mode.clone_from(&known.volume_mode);
            let is_image = disk.source.as_ref().is_some_and(|source| source.container_disk.is_some());
            disk.size = (!is_image).then(|| format!("{}Gi", 10 * (1 + link)));
        }
    }
    specs
}

/// Applies the spec as `kubectl apply --server-side` does: fields that the spec no longer has are removed.
async fn apply_spec(test: &MachineTest, name: &str, spec: &MachineSpec) -> Result<()> {
    let applied = Patch::Apply(machine(name, &json!(spec)));
    test.machines().patch(name, &PatchParams::apply("a-user").force(), &applied).await?;
    Ok(())
}

async fn apply_chain(test: &MachineTest, chain: &EditChain) -> Result<()> {
    for (link, spec) in chain.specs.iter().enumerate() {
        apply_spec(test, &chain.name, spec).await?;
        // Every second edit follows while the operator still carries out the one before.
        let is_hasty = link % 2 == 0 && link + 1 < chain.specs.len();
        if is_hasty {
            test.wait_for_within(EDIT_PATIENCE, &chain.name, "a reconcile of the edit", is_observed).await?;
        } else {
            wait_until_applied(test, &chain.name, spec).await?;
        }
    }
    let last = chain.specs.last().filter(|spec| !is_stopped(spec));
    if last.is_some() { test.restart_vmi(&chain.name).await } else { Ok(()) }
}

async fn wait_until_applied(test: &MachineTest, name: &str, spec: &MachineSpec) -> Result<()> {
    let expected = expected_phase(spec);
    let is_applied = |machine: &Machine| is_observed(machine) && phase(machine) == Some(expected);
    test.wait_for_within(EDIT_PATIENCE, name, expected, is_applied).await.map(|_| ())
}

/// Gives the networks another VLAN.
async fn change_vlan(test: &MachineTest) -> Result<()> {
    let change = json!({"spec": {"vlan": 200}});
    for name in NETWORKS {
        test.api::<NetworkConfiguration>().patch(name, &PatchParams::default(), &Patch::Merge(&change)).await?;
    }
    Ok(())
}

async fn comparable_nads(test: &MachineTest) -> Result<Vec<Value>> {
    let list = test.nads().list(&ListParams::default()).await?;
    Ok(list.items.iter().map(|item| json!([item.name_any(), item.labels(), item.data.get("spec")])).collect())
}

/// The objects of a Machine, without UIDs and MAC addresses, which differ between Machines.
struct ComparableObjects {
    vm: Value,
    pvcs: BTreeMap<String, Value>,
    secret: Option<Value>,
}

impl ComparableObjects {
    async fn read(test: &MachineTest, name: &str) -> Result<Self> {
        let selected = ListParams::default().labels(&format!("{LABEL_MACHINE}={name}"));
        let uid = test.machines().get(name).await?.uid().unwrap_or_default();
        let vm = test.vms().get(name).await?;
        let pvcs = test.api::<PersistentVolumeClaim>().list(&selected).await?.items;
        let secret = test.api::<Secret>().get_opt(&format!("{name}-cloudinit")).await?;
        let comparable = |value: Value| without_identity(&value, &uid, &interface_names(&vm));
        Ok(ComparableObjects {
            vm: comparable(json!({"labels": vm.labels(), "owners": owners(&vm), "spec": vm.data.get("spec")}))?,
            pvcs: pvcs
                .into_iter()
                .map(|pvc| {
                    let mut spec = json!(pvc.spec);
                    if let Some(fields) = spec.as_object_mut() {
                        fields.remove("volumeName");
                    }
                    Ok((pvc.name_any(), comparable(json!({"labels": pvc.labels(), "spec": spec}))?))
                })
                .collect::<Result<_>>()?,
            secret: secret
                // The annotations are about the running VMI and the Machine's UID.
                .map(|secret| comparable(json!({"labels": secret.labels(), "data": secret.data})))
                .transpose()?,
        })
    }
}

fn compare(chain: &EditChain, found: &ComparableObjects, expected: &ComparableObjects) -> Result<()> {
    ensure!(found.vm == expected.vm, "{:#} instead of {:#}", found.vm, expected.vm);
    for (name, pvc) in &expected.pvcs {
        ensure!(found.pvcs.get(name) == Some(pvc), "{:#?} instead of {pvc:#}", found.pvcs.get(name));
    }
    let past: Vec<String> =
        chain.specs.iter().flat_map(|spec| &spec.disks).map(|disk| format!("{}-{}", chain.name, disk.name)).collect();
    for name in found.pvcs.keys().filter(|name| !expected.pvcs.contains_key(*name)) {
        ensure!(past.contains(name), "PVC {name} belongs to no disk of the chain");
    }
    ensure!(found.secret == expected.secret, "{:#?} instead of {:#?}", found.secret, expected.secret);
    Ok(())
}

fn interface_names(vm: &DynamicObject) -> Vec<String> {
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
    serde_json::from_str(&text).context("reading the object as JSON")
}
