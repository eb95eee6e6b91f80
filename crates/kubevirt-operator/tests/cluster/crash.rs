//! The operator is killed right after the API server stored one of its writes, and another process takes over. The
//! objects are the same as without the crash.
//!
//! `cargo xtask test` tries a few of the writes of a Machine's life; `cargo xtask chaos machines` tries all of them.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{PersistentVolumeClaim, Secret},
};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_MACHINE, Machine, NetworkConfiguration};
use vitivirt_lab::{
    Extension, Lab, OperatorProcess, Record,
    harness::{SharedLabs, Suite},
    manifests,
    proxy::{Match, ProxyFault, ProxyRule, When},
};

use crate::{
    machine_test::{create_crds, in_namespace, is_observed, is_operator_request, machine, phase},
    random_specs::create_import_source_crd,
    replica::{grant_permissions, start_with_environment},
};

const NAMESPACE: &str = "crash";
const STEP_PATIENCE: Duration = Duration::from_secs(90);
/// The garbage collector discovers new kinds every half minute, and retries more and more slowly until it knows a kind.
const COLLECTION_PATIENCE: Duration = Duration::from_secs(120);
/// Set by `cargo xtask chaos machines`.
const EVERY_WRITE: &str = "CRASH_AFTER_EVERY_WRITE";

pub(crate) fn add(suite: &mut Suite) {
    // `cargo xtask chaos machines` selects this test with `a_crash_after_a_write`.
    vitivirt_lab::tests!(suite; a_crash_after_a_write_does_not_change_the_result);
}

async fn a_crash_after_a_write_does_not_change_the_result(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(labs.reference()).await?;
    create_crds(&lab).await?;
    create_import_source_crd(&lab).await?;
    lab.install(Extension::Multus).await?;
    grant_permissions(&lab, NAMESPACE).await?;

    let undisturbed = MachineLife { lab: lab.clone(), name: "undisturbed".to_owned() };
    let (expected, writes) = Box::pin(undisturbed.run(None)).await?;
    let crash_after: Vec<u64> = match std::env::var_os(EVERY_WRITE) {
        Some(_) => {
            eprintln!("the life of a Machine takes {writes} writes; the operator is killed after each of them");
            (1..=writes).collect()
        }
        // The finalizer, an object that the VM needs, the VM, and a write in the middle.
        None => vec![1, 4, 6, writes / 2],
    };
    for nth in crash_after {
        let life = MachineLife { lab: lab.clone(), name: format!("crash-{nth}") };
        let (found, _) =
            Box::pin(life.run(Some(nth))).await.with_context(|| format!("killed after write {nth} of {writes}"))?;
        ensure!(found == expected, "killed after write {nth}: {found:#} instead of {expected:#}");
    }
    Ok(())
}

/// A Machine that is created, edited and deleted.
struct MachineLife {
    lab: Arc<Lab>,
    name: String,
}

impl MachineLife {
    /// Returns the Machine's objects before its deletion, and the number of writes from creation to deletion.
    async fn run(&self, killed_after: Option<u64>) -> Result<(Value, u64)> {
        let before = self.count_writes()?;
        let mut first = self.start_operator(true).await?;
        let matcher =
            Match::writes().user_agent("kubevirt-operator/").namespace(NAMESPACE).except(["leases", "events"]);
        let rule = match killed_after {
            Some(nth) => {
                let kill = ProxyFault::kill(u32::try_from(first.pid())?)?;
                Some(self.lab.proxy().add(ProxyRule::new(matcher, When::Nth(nth), kill)))
            }
            None => None,
        };
        let steps = self.create_edit_and_delete();
        let successor = async {
            first.wait(Duration::from_secs(600)).await?;
            let _second = self.start_operator(false).await?;
            std::future::pending::<Result<Value>>().await
        };
        let found = tokio::select! {
            found = steps => found?,
            ended = successor => ended?,
        };
        if let Some(rule) = rule {
            ensure!(rule.hits() == 1, "the operator was never killed");
        }
        Ok((found, self.count_writes()? - before))
    }

    async fn start_operator(&self, through_proxy: bool) -> Result<OperatorProcess> {
        // Without leader election, because the successor would wait until the dead leader's Lease expires. The tests of
        // the Lease cover that.
        let environment = [("WATCH_NAMESPACE", NAMESPACE), ("LEADER_ELECTION", "false")];
        start_with_environment(&self.lab, NAMESPACE, through_proxy, &environment).await
    }

    async fn create_edit_and_delete(&self) -> Result<Value> {
        let machines = self.api::<Machine>();
        let name = self.name.as_str();
        let network = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration",
            "metadata": {"name": name, "namespace": NAMESPACE}, "spec": {"bridge": "br0"},
        });
        let image =
            json!({"name": "image", "size": "1Gi", "source": {"http": {"url": "http://images.example/one.img"}}});
        let disks = |root_size: &str| json!([{"name": "root", "size": root_size}, image]);
        let spec = json!({
            "template": "small",
            "disks": disks("20Gi"),
            "networks": [{"name": "lan", "networkName": name}],
            "cloudInit": {"userData": "#cloud-config\n"},
        });
        let object = in_namespace(&machine(name, &spec), NAMESPACE);
        manifests::create(&self.lab.client(), &[network, object]).await?;
        let is_running = |machine: Option<&Machine>| machine.and_then(phase) == Some("Running");
        self.lab.wait("Running", STEP_PATIENCE, machines.clone(), name, is_running).await?;

        let edit = json!({"spec": {"disks": disks("30Gi"), "powerState": "Stopped"}});
        machines.patch(name, &PatchParams::default(), &Patch::Merge(edit)).await?;
        let is_stopped = |machine: Option<&Machine>| {
            machine.is_some_and(|machine| phase(machine) == Some("Stopped") && is_observed(machine))
        };
        self.lab.wait("Stopped", STEP_PATIENCE, machines.clone(), name, is_stopped).await?;
        let has_grown = |pvc: Option<&PersistentVolumeClaim>| {
            let requests = pvc.and_then(|pvc| pvc.spec.as_ref()?.resources.as_ref()?.requests.as_ref());
            requests.and_then(|requests| requests.get("storage")).is_some_and(|size| size.0 == "30Gi")
        };
        self.lab.wait("a larger PVC", STEP_PATIENCE, self.api(), &format!("{name}-root"), has_grown).await?;
        let found = self.comparable_objects().await?;

        machines.delete(name, &DeleteParams::default()).await?;
        self.lab.wait("the deletion", STEP_PATIENCE, machines, name, |machine| machine.is_none()).await?;
        self.check_nothing_is_left().await?;
        Ok(found)
    }

    fn selected(&self) -> ListParams {
        ListParams::default().labels(&format!("{LABEL_MACHINE}={}", self.name))
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.lab.client(), NAMESPACE)
    }

    fn vms(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &vitivirt_api::resources::virtual_machine_resource())
    }

    fn nads(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &vitivirt_api::resources::network_attachment_resource())
    }

    fn import_sources(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &vitivirt_api::resources::import_source_resource())
    }

    /// The Machine's objects, without names, UIDs and MAC addresses, which differ between Machines.
    async fn comparable_objects(&self) -> Result<Value> {
        let vms = self.vms().list(&self.selected()).await?.items;
        let pvcs = self.api::<PersistentVolumeClaim>().list(&self.selected()).await?.items;
        let secrets = self.api::<Secret>().list(&self.selected()).await?.items;
        let uid =
            vms.first().and_then(|vm| vm.owner_references().first().map(|owner| owner.uid.clone())).unwrap_or_default();
        let vms: Vec<Value> =
            vms.iter().map(|vm| json!({"labels": vm.labels(), "spec": vm.data.get("spec")})).collect();
        let pvcs: Vec<Value> = pvcs
            .iter()
            .map(|pvc| {
                let resources = pvc.spec.as_ref().and_then(|spec| spec.resources.as_ref());
                json!({"name": pvc.name_any(), "labels": pvc.labels(), "requests": resources})
            })
            .collect();
        let secrets: Vec<Value> = secrets
            .iter()
            .map(|secret| json!({"name": secret.name_any(), "labels": secret.labels(), "data": secret.data}))
            .collect();
        let nad = self.nads().get(&self.name).await?.data;
        let sources = self.import_sources().list(&self.selected()).await?.items;
        let sources: Vec<Value> =
            sources.iter().map(|source| json!({"name": source.name_any(), "spec": source.data.get("spec")})).collect();
        let text = json!({"vms": vms, "pvcs": pvcs, "secrets": secrets, "nad": nad, "sources": sources}).to_string();
        let mac = vitivirt_machine::resolve::derived_mac(&uid, "lan");
        let text = text.replace(&self.name, "NAME").replace(&uid, "UID").replace(&mac, "MAC");
        serde_json::from_str(&text).context("reading the objects as JSON")
    }

    async fn check_nothing_is_left(&self) -> Result<()> {
        ensure!(self.vms().list(&self.selected()).await?.items.is_empty(), "a VM is left");
        let network = self.api::<NetworkConfiguration>().get(&self.name).await?;
        ensure!(network.finalizers().is_empty(), "the network still has a finalizer: {network:?}");
        // PVC protection and the garbage collector delete these shortly after the Machine.
        let (image, secret) = (format!("{}-image", self.name), format!("{}-cloudinit", self.name));
        for pvc in [&format!("{}-root", self.name), &image] {
            let is_absent = |pvc: Option<&PersistentVolumeClaim>| pvc.is_none();
            self.lab.wait("no PVC", COLLECTION_PATIENCE, self.api(), pvc, is_absent).await?;
        }
        let is_absent = |source: Option<&DynamicObject>| source.is_none();
        self.lab.wait("no import source", COLLECTION_PATIENCE, self.import_sources(), &image, is_absent).await?;
        let is_absent = |secret: Option<&Secret>| secret.is_none();
        self.lab.wait("no Secret", COLLECTION_PATIENCE, self.api(), &secret, is_absent).await?;
        Ok(())
    }

    /// The number of the operator's writes in this namespace, without those of its Lease and events.
    fn count_writes(&self) -> Result<u64> {
        let is_counted = |record: &&Record| is_operator_request(record, NAMESPACE) && record.is_write();
        Ok(u64::try_from(self.lab.audit()?.iter().filter(is_counted).count())?)
    }
}
