//! Random valid specs with the real virt-api and virt-controller. KubeVirt admits the VM of each spec, and the operator
//! does not revert what KubeVirt's defaults and webhooks add to it.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use kube::{
    Api,
    api::{DynamicObject, ListParams, PostParams},
};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use serde_json::{Value, json};
use vitivirt_api::machine::{Machine, MachineSpec};
use vitivirt_lab::{
    Lab,
    harness::{SharedLabs, Suite},
    manifests,
};
use vitivirt_machine::testing::machine_spec;

use crate::machine_test::{MachineTest, machine, phase, run_concurrently};

const ADMITTED_SPECS: usize = 250;
const CREATED_MACHINES: usize = 50;
/// Enough to start fifty VMs on a busy machine.
const ALL_RUNNING_PATIENCE: Duration = Duration::from_secs(150);

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        kubevirt_admits_the_vm_of_every_random_machine,
        random_machines_start_and_a_restarted_operator_writes_nothing,
    );
}

async fn kubevirt_admits_the_vm_of_every_random_machine(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(labs.reference()).await?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "random-admitted"}});
    manifests::create(&lab.client(), &[namespace]).await?;
    let specs = random_specs(1, ADMITTED_SPECS)?;
    run_concurrently(specs.iter().map(|random| check_vm_is_admitted(&lab, random).boxed()).collect()).await.map(|_| ())
}

async fn random_machines_start_and_a_restarted_operator_writes_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "random-made")).await?;
    test.create_storage_class("fast-ssd").await?;
    test.create_networks(&["prod", "storage"]).await?;
    create_import_source_crd(&test.lab).await?;
    let specs = random_specs(2, CREATED_MACHINES)?;
    run_concurrently(specs.iter().map(|random| create_machine(&test, random).boxed()).collect()).await?;
    for random in &specs {
        let expected = expected_phase(&random.spec);
        let has_phase = |machine: &Machine| phase(machine) == Some(expected);
        let reached = test.wait_for_within(ALL_RUNNING_PATIENCE, &random.name, expected, has_phase).await;
        reached.with_context(|| random.describe())?;
    }
    test.wait_until_idle().await?;

    let before = test.operator_requests()?.len();
    test.restart_operator().await?;
    test.wait_until_idle().await?;
    let writes = test.writes_since(before)?;
    if let Some(write) = writes.first() {
        let is_of =
            |random: &&RandomSpec| write.name == random.name || write.name.starts_with(&format!("{}-", random.name));
        let random = specs.iter().find(is_of).with_context(|| format!("{write:?}"))?;
        let object = machine(&random.name, &json!(with_reduced_resources(random.spec.clone())));
        let (_, plan) = test.run_plan_command(&object, &[]).await?;
        bail!("{} writes after a restart; {}: {plan}", writes.len(), random.describe());
    }
    let vms = test.vms().list(&ListParams::default()).await?.items.len();
    ensure!(vms == CREATED_MACHINES, "{vms} VMs for {CREATED_MACHINES} Machines");
    Ok(())
}

async fn create_machine(test: &MachineTest, random: &RandomSpec) -> Result<()> {
    let object = machine(&random.name, &json!(with_reduced_resources(random.spec.clone())));
    test.create_json(&object).await.with_context(|| random.describe())
}

/// A random spec. `seed` generates it again.
pub(crate) struct RandomSpec {
    pub(crate) name: String,
    pub(crate) spec: MachineSpec,
    seed: u8,
}

impl RandomSpec {
    pub(crate) fn describe(&self) -> String {
        format!("{} of seed {}: {}", self.name, self.seed, json!(self.spec))
    }
}

/// The same seed gives the same specs.
pub(crate) fn random_specs(seed: u8, count: usize) -> Result<Vec<RandomSpec>> {
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    (0..count)
        .map(|number| {
            let tree = machine_spec().new_tree(&mut runner).map_err(|reason| anyhow::anyhow!("{reason}"))?;
            Ok(RandomSpec { name: format!("random-{number}"), spec: tree.current(), seed })
        })
        .collect()
}

/// Reduces CPU and memory, so that all tests fit on the lab's nodes.
pub(crate) fn with_reduced_resources(mut spec: MachineSpec) -> MachineSpec {
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

/// The phase that a Machine with this spec must reach.
pub(crate) fn expected_phase(spec: &MachineSpec) -> &'static str {
    if is_stopped(spec) { "Stopped" } else { "Running" }
}

/// Creates the one CRD of CDI that a disk from a URL needs. The rest of CDI would make KubeVirt restart under all
/// tests.
pub(crate) async fn create_import_source_crd(lab: &Lab) -> Result<()> {
    let crd = json!({
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
    manifests::create(&lab.client(), &[crd]).await
}

/// Creates the VM of the spec with a dry run, so that KubeVirt's defaults, webhooks and schema are applied.
async fn check_vm_is_admitted(lab: &Lab, random: &RandomSpec) -> Result<()> {
    let mut machine = Machine { spec: random.spec.clone(), ..Machine::default() };
    machine.metadata.name = Some(random.name.clone());
    machine.metadata.namespace = Some("random-admitted".to_owned());
    machine.metadata.uid = Some("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11".to_owned());
    let resolved = vitivirt_machine::resolve::resolve(&machine)
        .map_err(|problem| anyhow::anyhow!("{}: {}", problem.message, random.describe()))?;
    let resource = vitivirt_api::resources::virtual_machine_resource();
    let mut vm = json!(vitivirt_machine::render::vm::render(&resolved));
    if let Some(fields) = vm.as_object_mut() {
        fields.insert("apiVersion".to_owned(), resource.api_version.clone().into());
        fields.insert("kind".to_owned(), resource.kind.clone().into());
    }
    if let Some(metadata) = vm.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        metadata.insert("name".to_owned(), random.name.clone().into());
    }
    let vms: Api<DynamicObject> = Api::namespaced_with(lab.client(), "random-admitted", &resource);
    let object: DynamicObject = serde_json::from_value(vm).context("not a VirtualMachine")?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    vms.create(&dry_run, &object).await.with_context(|| random.describe()).map(|_| ())
}
