//! The operator is killed right after one of its writes was stored, and another goes on: the end is the same as without.
//!
//! The test command tries a few of the writes of a Machine's life; `cargo xtask chaos machines` tries all of them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use vitivirt_api::machine::{LABEL_MACHINE, Machine, MachinePhase, NetworkConfiguration, crds};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::proxy::{Fault, Match, Rule, When};
use vitivirt_lab::{Extension, Lab, Program, manifests};

use crate::replica::{ACCOUNT, grant, start_with};
use crate::world::machine;

const NAMESPACE: &str = "crash";
const LIFE: Duration = Duration::from_secs(90);
/// Set by `cargo xtask chaos machines`.
const EVERY: &str = "CRASH_AFTER_EVERY_WRITE";

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_crash_after_a_write_leaves_no_trace", |labs| async move {
        let lab = Box::pin(labs.reference()).await?;
        let definitions: Vec<Value> = crds().iter().map(|definition| json!(definition)).collect();
        manifests::create(&lab.client(), &definitions).await?;
        lab.install(Extension::Multus).await?;
        grant(&lab, NAMESPACE).await?;

        let undisturbed = Round { lab: lab.clone(), name: "undisturbed".to_owned() };
        let (expected, writes) = Box::pin(undisturbed.live(None)).await?;
        let struck: Vec<u64> = match std::env::var_os(EVERY) {
            Some(_) => {
                eprintln!("a Machine's life takes {writes} writes; the operator is killed after each of them");
                (1..=writes).collect()
            }
            // The finalizer, one of what the VM needs, the VM, and one in the middle.
            None => vec![1, 4, 6, writes / 2],
        };
        for nth in struck {
            let round = Round { lab: lab.clone(), name: format!("crash-{nth}") };
            let (found, _) = Box::pin(round.live(Some(nth)))
                .await
                .with_context(|| format!("killed after write {nth} of {writes}"))?;
            ensure!(found == expected, "killed after write {nth}: {found:#} instead of {expected:#}");
        }
        Ok(())
    });
}

/// The garbage collector learns of new kinds every half minute, and comes back later and later to what it does not know.
const COLLECTED: Duration = Duration::from_secs(120);

/// One Machine's life: created, edited, deleted.
struct Round {
    lab: Arc<Lab>,
    name: String,
}

impl Round {
    /// Returns what stood before the deletion, and how many writes the whole life took.
    async fn live(&self, killed_after: Option<u64>) -> Result<(Value, u64)> {
        let before = self.writes()?;
        let mut first = self.start(true).await?;
        let matcher =
            Match::writes().user_agent("kubevirt-operator/").namespace(NAMESPACE).except(["leases", "events"]);
        let rule = match killed_after {
            Some(nth) => {
                let kill = Fault::kill(u32::try_from(first.pid())?)?;
                Some(self.lab.proxy().add(Rule::new(matcher, When::Nth(nth), kill)))
            }
            None => None,
        };
        let life = self.scenario();
        let successor = async {
            first.wait(Duration::from_secs(600)).await?;
            let _second = self.start(false).await?;
            std::future::pending::<Result<Value>>().await
        };
        let found = tokio::select! {
            found = life => found?,
            ended = successor => ended?,
        };
        if let Some(rule) = rule {
            ensure!(rule.hits() == 1, "the operator was never killed");
        }
        Ok((found, self.writes()? - before))
    }

    async fn start(&self, through_proxy: bool) -> Result<Program> {
        // Without a lease: its successor would wait for the dead one's to run out, which is tested elsewhere.
        let alone = [("WATCH_NAMESPACE", NAMESPACE), ("LEADER_ELECTION", "false")];
        start_with(&self.lab, NAMESPACE, through_proxy, &alone).await
    }

    async fn scenario(&self) -> Result<Value> {
        let machines: Api<Machine> = Api::namespaced(self.lab.client(), NAMESPACE);
        let name = self.name.as_str();
        let network = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration",
            "metadata": {"name": name, "namespace": NAMESPACE}, "spec": {"bridge": "br0"},
        });
        let spec = json!({
            "template": "small",
            "networks": [{"name": "lan", "networkName": name}],
            "cloudInit": {"userData": "#cloud-config\n"},
        });
        let mut object = machine(name, &spec);
        if let Some(metadata) = object.pointer_mut("/metadata").and_then(Value::as_object_mut) {
            metadata.insert("namespace".to_owned(), NAMESPACE.into());
        }
        manifests::create(&self.lab.client(), &[network, object]).await?;
        let is_running = |machine: Option<&Machine>| {
            machine.and_then(|machine| machine.status.as_ref()?.phase) == Some(MachinePhase::Running)
        };
        self.lab.wait("Running", LIFE, machines.clone(), name, is_running).await?;

        let edit = json!({"spec": {"disks": [{"name": "root", "size": "30Gi"}], "powerState": "Stopped"}});
        machines.patch(name, &PatchParams::default(), &Patch::Merge(edit)).await?;
        let is_stopped = |machine: Option<&Machine>| {
            let status = machine.and_then(|machine| machine.status.as_ref());
            status.is_some_and(|status| {
                status.phase == Some(MachinePhase::Stopped) && status.observed_generation == Some(2)
            })
        };
        self.lab.wait("Stopped", LIFE, machines.clone(), name, is_stopped).await?;
        let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(self.lab.client(), NAMESPACE);
        let has_grown = |pvc: Option<&PersistentVolumeClaim>| {
            let requests = pvc.and_then(|pvc| pvc.spec.as_ref()?.resources.as_ref()?.requests.as_ref());
            requests.and_then(|requests| requests.get("storage")).is_some_and(|size| size.0 == "30Gi")
        };
        self.lab.wait("a bigger PVC", LIFE, pvcs, &format!("{name}-root"), has_grown).await?;
        let found = self.objects().await?;

        machines.delete(name, &DeleteParams::default()).await?;
        self.lab.wait("the end", LIFE, machines, name, |machine| machine.is_none()).await?;
        self.nothing_is_left().await?;
        Ok(found)
    }

    fn selected(&self) -> ListParams {
        ListParams::default().labels(&format!("{LABEL_MACHINE}={}", self.name))
    }

    fn vms(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &vitivirt_api::resources::virtual_machine_resource())
    }

    fn attachments(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.lab.client(), NAMESPACE, &vitivirt_api::resources::network_attachment_resource())
    }

    /// What was made for the Machine, without what differs from round to round.
    async fn objects(&self) -> Result<Value> {
        let client = self.lab.client();
        let vms = self.vms().list(&self.selected()).await?.items;
        let pvcs =
            Api::<PersistentVolumeClaim>::namespaced(client.clone(), NAMESPACE).list(&self.selected()).await?.items;
        let secrets = Api::<Secret>::namespaced(client, NAMESPACE).list(&self.selected()).await?.items;
        let uid =
            vms.first().and_then(|vm| vm.owner_references().first().map(|owner| owner.uid.clone())).unwrap_or_default();
        let vms: Vec<Value> =
            vms.iter().map(|vm| json!({"labels": vm.labels(), "spec": vm.data.get("spec")})).collect();
        let pvcs: Vec<Value> = pvcs
            .iter()
            .map(|pvc| json!({"name": pvc.name_any(), "labels": pvc.labels(), "requests": pvc.spec.as_ref().and_then(|spec| spec.resources.as_ref())}))
            .collect();
        let secrets: Vec<Value> = secrets
            .iter()
            .map(|secret| json!({"name": secret.name_any(), "labels": secret.labels(), "data": secret.data}))
            .collect();
        let attachment = self.attachments().get(&self.name).await?.data;
        let text = json!({"vms": vms, "claims": pvcs, "secrets": secrets, "attachment": attachment}).to_string();
        let mac = vitivirt_machine::resolve::derived_mac(&uid, "lan");
        let text = text.replace(&self.name, "NAME").replace(&uid, "UID").replace(&mac, "MAC");
        serde_json::from_str(&text).context("the objects")
    }

    async fn nothing_is_left(&self) -> Result<()> {
        let client = self.lab.client();
        ensure!(self.vms().list(&self.selected()).await?.items.is_empty(), "a VirtualMachine is left");
        let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
        let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
        let network = Api::<NetworkConfiguration>::namespaced(client, NAMESPACE).get(&self.name).await?;
        ensure!(network.finalizers().is_empty(), "the network is still in use: {network:?}");
        // Both go a moment after the Machine: by the PVC protection and the garbage collector.
        self.lab.wait("no PVC", COLLECTED, pvcs, &format!("{}-root", self.name), |pvc| pvc.is_none()).await?;
        self.lab
            .wait("no Secret", COLLECTED, secrets, &format!("{}-cloudinit", self.name), |secret| secret.is_none())
            .await?;
        Ok(())
    }

    /// The operator's stored writes in this namespace so far; its Lease and events aside.
    fn writes(&self) -> Result<u64> {
        let user = format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}");
        let counted = |record: &&vitivirt_lab::Record| {
            record.user == user && record.is_write() && !["leases", "events"].contains(&record.resource.as_str())
        };
        Ok(u64::try_from(self.lab.audit()?.iter().filter(counted).count())?)
    }
}
