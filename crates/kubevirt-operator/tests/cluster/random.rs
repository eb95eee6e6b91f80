//! Random valid specs meet the real virt-api and virt-controller: everything that the pure tests call valid is admitted,
//! and what KubeVirt's defaults and webhooks make of it is never written over.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use kube::Api;
use kube::api::{DynamicObject, ListParams, PostParams};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use vitivirt_api::machine::{Machine, MachineSpec};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Lab, manifests};
use vitivirt_machine::testing::machine_spec;

use crate::world::{World, at_once, machine, phase};

const ADMITTED: usize = 250;
const MADE: usize = 50;
/// Fifty guests on a busy machine.
const ALL_RUNNING: Duration = Duration::from_secs(150);

pub(crate) fn add(suite: &mut Suite) {
    suite.test("random_machines_are_admitted_by_kubevirt", |labs| async move {
        let lab = Box::pin(labs.reference()).await?;
        let place = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "random-admitted"}});
        manifests::create(&lab.client(), &[place]).await?;
        let drawn = drawn(1, ADMITTED)?;
        at_once(drawn.iter().map(|drawn| admitted(&lab, drawn).boxed()).collect()).await.map(|_| ())
    });

    suite.test("random_machines_settle_and_a_second_look_writes_nothing", |labs| async move {
        let mut world = Box::pin(World::begin(&labs, "random-made")).await?;
        world.storage_class("fast-ssd").await?;
        world.networks(&["prod", "storage"]).await?;
        import_sources_are_known(&world.lab).await?;
        let drawn = drawn(2, MADE)?;
        let create = drawn.iter().map(|drawn| world.create_drawn(drawn).boxed());
        at_once(create.collect()).await?;
        for drawn in &drawn {
            let wanted = if is_stopped(&drawn.spec) { "Stopped" } else { "Running" };
            let is_there = |machine: &Machine| phase(machine) == Some(wanted);
            world.until_within(ALL_RUNNING, &drawn.name, wanted, is_there).await.with_context(|| drawn.describe())?;
        }
        world.settled().await?;

        let before = world.requests()?.len();
        world.restart().await?;
        world.settled().await?;
        let writes = world.writes_since(before)?;
        if let Some(write) = writes.first() {
            let is_of =
                |drawn: &&Drawn| write.name == drawn.name || write.name.starts_with(&format!("{}-", drawn.name));
            let drawn = drawn.iter().find(is_of).with_context(|| format!("{write:?}"))?;
            let (_, plan) = world.plan(&machine(&drawn.name, &json!(affordable(drawn.spec.clone()))), &[]).await?;
            bail!("{} writes after a restart; {}: {plan}", writes.len(), drawn.describe());
        }
        let made = world.vms().list(&ListParams::default()).await?.items.len();
        ensure!(made == MADE, "{made} VirtualMachines for {MADE} Machines");
        Ok(())
    });
}

impl World {
    async fn create_drawn(&self, drawn: &Drawn) -> Result<()> {
        let object = machine(&drawn.name, &json!(affordable(drawn.spec.clone())));
        self.create_json(&object).await.with_context(|| drawn.describe())
    }
}

/// A random spec, and how to have it again.
pub(crate) struct Drawn {
    pub(crate) name: String,
    pub(crate) spec: MachineSpec,
    seed: u8,
}

impl Drawn {
    pub(crate) fn describe(&self) -> String {
        format!("{} of seed {}: {}", self.name, self.seed, json!(self.spec))
    }
}

/// The same seed gives the same specs.
pub(crate) fn drawn(seed: u8, count: usize) -> Result<Vec<Drawn>> {
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    (0..count)
        .map(|number| {
            let tree = machine_spec().new_tree(&mut runner).map_err(|reason| anyhow::anyhow!("{reason}"))?;
            Ok(Drawn { name: format!("random-{number}"), spec: tree.current(), seed })
        })
        .collect()
}

/// As small as the lab's nodes, which all tests share, need it.
pub(crate) fn affordable(mut spec: MachineSpec) -> MachineSpec {
    if let Some(resources) = &mut spec.resources {
        if let Some(size) = resources.memory.as_mut().and_then(|memory| memory.size.as_mut()) {
            *size = size.replace('G', "M");
        }
        if let Some(cores) = resources.cpu.as_mut().and_then(|cpu| cpu.cores.as_mut()) {
            *cores = (*cores).min(4);
        }
    }
    spec
}

pub(crate) fn is_stopped(spec: &MachineSpec) -> bool {
    spec.power_state.as_deref() == Some("Stopped")
}

/// CDI's kind that a disk from a URL needs, without the rest of CDI: that would make KubeVirt start anew under all tests.
pub(crate) async fn import_sources_are_known(lab: &Lab) -> Result<()> {
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "volumeimportsources.cdi.kubevirt.io"},
        "spec": {
            "group": "cdi.kubevirt.io", "scope": "Namespaced",
            "names": {"kind": "VolumeImportSource", "plural": "volumeimportsources"},
            "versions": [{
                "name": "v1beta1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    });
    manifests::create(&lab.client(), &[definition]).await
}

/// What the operator would create, as a dry run by an administrator: defaults, webhooks and schema all have their say.
async fn admitted(lab: &Lab, drawn: &Drawn) -> Result<()> {
    let mut machine = Machine { spec: drawn.spec.clone(), ..Machine::default() };
    machine.metadata.name = Some(drawn.name.clone());
    machine.metadata.namespace = Some("random-admitted".to_owned());
    machine.metadata.uid = Some("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11".to_owned());
    let resolved = vitivirt_machine::resolve::resolve(&machine)
        .map_err(|problem| anyhow::anyhow!("{}: {}", problem.message, drawn.describe()))?;
    let resource = vitivirt_api::resources::virtual_machine_resource();
    let mut vm = json!(vitivirt_machine::render::vm::render(&resolved));
    if let Some(fields) = vm.as_object_mut() {
        fields.insert("apiVersion".to_owned(), resource.api_version.clone().into());
        fields.insert("kind".to_owned(), resource.kind.clone().into());
    }
    if let Some(metadata) = vm.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        metadata.insert("name".to_owned(), drawn.name.clone().into());
    }
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "random-admitted", &resource);
    let object: DynamicObject = serde_json::from_value(vm).context("a VirtualMachine")?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    vms.create(&dry, &object).await.with_context(|| drawn.describe()).map(|_| ())
}
