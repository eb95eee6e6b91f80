//! Data of Machines: which disks survive what, and how a user gets them back.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, PropagationPolicy},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_ADOPT, LABEL_MACHINE_UID, Machine, NetworkConfiguration, condition_type};
use vitivirt_lab::{
    PodFate, PodRule, Record,
    harness::{SharedLabs, Suite},
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb},
};

use crate::{
    machine_test::{
        MACHINE_PATIENCE, MachineTest, check_diagnosis, condition, diagnosis, machine, phase, ready_reason,
    },
    poll::poll_until,
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_retained_disk_survives_whatever_else_is_wrong_and_is_adopted_by_consent,
        an_orphaned_vm_keeps_running_and_is_adopted_by_consent,
        the_disks_of_an_orphan_stay_when_the_operator_did_not_see_its_deletion,
        an_orphan_stays_even_when_the_machine_cache_is_stale,
        objects_without_owner_reference_are_repaired_and_deleted,
        a_restored_namespace_runs_again_on_its_old_disks,
        a_pvc_without_data_is_replaced_and_a_lost_one_is_not,
        a_bound_pvc_is_kept_even_when_the_pvc_cache_is_stale,
        a_guest_that_runs_is_kept_even_when_the_vmi_cache_is_stale,
        a_problem_of_one_part_does_not_stop_the_others,
    );
}

impl MachineTest {
    fn pvcs(&self) -> Api<PersistentVolumeClaim> {
        self.api()
    }

    async fn merge_machine(&self, name: &str, change: &Value) -> Result<()> {
        self.machines().patch(name, &PatchParams::default(), &Patch::Merge(change)).await?;
        Ok(())
    }

    /// Runs the command of the diagnosis that consents to the adoption.
    async fn consent(&self, name: &str) -> Result<String> {
        let names_command = |machine: &Machine| diagnosis(machine).contains(&format!("{ANNOTATION_ADOPT}="));
        let refused = self.wait_for(name, "a command for the adoption", names_command).await?;
        let message = diagnosis(&refused);
        let value = message.split(&format!("{ANNOTATION_ADOPT}=")).nth(1).and_then(|rest| rest.split(' ').next());
        let value = value.context("the command has no value")?.to_owned();
        self.merge_machine(name, &json!({"metadata": {"annotations": {ANNOTATION_ADOPT: value}}})).await?;
        Ok(value)
    }
}

/// The MAC addresses and the UUID of the guest in a VM.
fn hardware(vm: &DynamicObject) -> (Value, Value) {
    let part = |pointer: &str| vm.data.pointer(pointer).cloned().unwrap_or_default();
    (part("/spec/template/spec/domain/devices/interfaces"), part("/spec/template/spec/domain/firmware/uuid"))
}

async fn a_retained_disk_survives_whatever_else_is_wrong_and_is_adopted_by_consent(
    labs: Arc<SharedLabs>,
) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "data-retain")).await?;
    test.create_secret("source", "userdata", "#cloud-config\n").await?;
    let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source"}}});
    test.create_json(&machine("web", &spec)).await?;
    let first = test.wait_until_running("web").await?;
    let hardware_before = hardware(&test.vms().get("web").await?);
    test.api::<Secret>().delete("source", &DeleteParams::default()).await?;
    test.wait_for_reason("web", "SecretNotFound").await?;
    test.edit_spec("web", &json!({"disks": [{"name": "root", "onDelete": "Retain"}]})).await?;
    test.delete_machine("web").await?;
    let kept = test.pvcs().get("web-root").await?;
    ensure!(kept.metadata.deletion_timestamp.is_none(), "{kept:?}");

    // A new Machine of the same name takes the disk over, and continues as the earlier one.
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    let command = test.consent("web").await?;
    ensure!(Some(&command) == first.uid().as_ref(), "{command}");
    let second = test.wait_until_running("web").await?;
    let adopted = test.pvcs().get("web-root").await?;
    ensure!(
        adopted.uid() == kept.uid() && adopted.labels().get(LABEL_MACHINE_UID) == second.uid().as_ref(),
        "{adopted:?}"
    );
    let hardware_after = hardware(&test.vms().get("web").await?);
    ensure!(hardware_after == hardware_before, "{hardware_before:?} became {hardware_after:?}");

    // A PVC that was there before.
    let mut pvc = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "own-root"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    });
    test.create_json(&pvc.take()).await?;
    test.create_json(&machine("own", &json!({"template": "small"}))).await?;
    let by_owner = json!({"metadata": {"annotations": {"vitistack.io/adopt-by": "own"}}});
    test.pvcs().patch("own-root", &PatchParams::default(), &Patch::Merge(by_owner)).await?;
    ensure!(test.consent("own").await? == "pvc/own-root", "the command names the PVC");
    let own = test.wait_until_running("own").await?;
    let adopted = test.pvcs().get("own-root").await?;
    ensure!(adopted.labels().get(LABEL_MACHINE_UID) == own.uid().as_ref(), "{adopted:?}");
    Ok(())
}

async fn an_orphaned_vm_keeps_running_and_is_adopted_by_consent(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "data-orphan")).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    let (vm, vmi) = (test.vms().get("web").await?, test.vmis().get("web").await?);
    let orphan = DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    test.machines().delete("web", &orphan).await?;
    test.wait_until_deleted("web").await?;
    let left = test.vms().get("web").await?;
    ensure!(left.uid() == vm.uid() && left.metadata.deletion_timestamp.is_none(), "{left:?}");
    ensure!(test.vmis().get("web").await?.uid() == vmi.uid(), "the guest was restarted");
    let pvc = test.pvcs().get("web-root").await?;
    ensure!(pvc.metadata.deletion_timestamp.is_none(), "{pvc:?}");

    test.create_json(&machine("web", &spec)).await?;
    test.consent("web").await?;
    let adopted = test.wait_until_running("web").await?;
    let vm_after = test.vms().get("web").await?;
    ensure!(vm_after.uid() == vm.uid() && test.vmis().get("web").await?.uid() == vmi.uid(), "{vm_after:?}");
    ensure!(vm_after.owner_references().iter().any(|owner| Some(&owner.uid) == adopted.uid().as_ref()), "{vm_after:?}");
    test.delete_machine("web").await?;
    test.wait_until_absent(test.pvcs(), "web-root").await
}

/// The operator did not see the deletion, and when it starts the VM is gone too.
async fn the_disks_of_an_orphan_stay_when_the_operator_did_not_see_its_deletion(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "data-unseen")).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    test.stop_operator().await?;
    let orphan = DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    test.machines().delete("web", &orphan).await?;
    let is_orphaned = |machine: &Machine| machine.finalizers().iter().all(|finalizer| finalizer != "orphan");
    test.wait_for("web", "a Machine that the garbage collector has orphaned", is_orphaned).await?;
    test.vms().delete("web", &DeleteParams::default()).await?;
    test.wait_until_absent(test.vms(), "web").await?;
    test.wait_until_absent(test.vmis(), "web").await?;

    test.start_operator_again().await?;
    let asking = test.wait_for_reason("web", "DeletionUnconfirmed").await?;
    check_diagnosis(&asking, &["vitistack.io/cascade=background", "vitistack.io/cascade=orphan"])?;
    test.wait_until_idle().await?;
    let kept = test.pvcs().get("web-root").await?;
    ensure!(kept.metadata.deletion_timestamp.is_none(), "{kept:?}");
    test.merge_machine("web", &json!({"metadata": {"annotations": {"vitistack.io/cascade": "orphan"}}})).await?;
    test.wait_until_deleted("web").await?;
    let kept = test.pvcs().get("web-root").await?;
    ensure!(kept.metadata.deletion_timestamp.is_none(), "{kept:?}");
    Ok(())
}

/// The operator sees that the VM lost its owner reference, but not yet that the Machine is being deleted.
async fn an_orphan_stays_even_when_the_machine_cache_is_stale(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "data-stale-machine";
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    test.wait_until_idle().await?;

    let machine_watch = Match::verb(RequestVerb::Watch).user_agent("kubevirt-operator/").resource("machines");
    let stall = ProxyRule::always(machine_watch.namespace(NAMESPACE), ProxyFault::StallWatch { after_events: 0 });
    let stall = test.lab.proxy().add(stall);
    let seen = test.operator_requests()?.len();
    let orphan = DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    test.machines().delete("web", &orphan).await?;
    let is_orphaned = |machine: &Machine| machine.finalizers().iter().all(|finalizer| finalizer != "orphan");
    test.wait_for("web", "a Machine that the garbage collector has orphaned", is_orphaned).await?;
    let reads_machine = || async {
        let requests = test.operator_requests()?.split_off(seen);
        let is_read = |request: &&Record| request.verb == "get" && request.resource == "machines";
        Ok(requests.iter().filter(is_read).count() >= 3)
    };
    poll_until(MACHINE_PATIENCE, reads_machine, || "the operator reads the Machine".to_owned()).await?;
    let left = test.vms().get("web").await?;
    ensure!(left.owner_references().is_empty(), "the VM would be deleted with its Machine: {left:?}");
    stall.remove();
    test.wait_until_deleted("web").await?;
    let left = test.vms().get("web").await?;
    ensure!(left.owner_references().is_empty() && left.metadata.deletion_timestamp.is_none(), "{left:?}");
    let pvc = test.pvcs().get("web-root").await?;
    ensure!(pvc.metadata.deletion_timestamp.is_none(), "{pvc:?}");
    Ok(())
}

async fn objects_without_owner_reference_are_repaired_and_deleted(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "data-owner")).await?;
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    let without_owner = Patch::Merge(json!({"metadata": {"ownerReferences": null}}));
    let has_owner = |object: Option<&DynamicObject>| object.is_some_and(|object| !object.owner_references().is_empty());
    let has_secret_owner = |secret: Option<&Secret>| secret.is_some_and(|secret| !secret.owner_references().is_empty());
    test.vms().patch("web", &PatchParams::default(), &without_owner).await?;
    test.api::<Secret>().patch("web-cloudinit", &PatchParams::default(), &without_owner).await?;
    test.lab.wait("the owner of the VM", MACHINE_PATIENCE, test.vms(), "web", has_owner).await?;
    test.lab.wait("the owner of the Secret", MACHINE_PATIENCE, test.api(), "web-cloudinit", has_secret_owner).await?;
    // A deletion right after the loss: the VM and its disk are deleted too, in this order.
    test.vms().patch("web", &PatchParams::default(), &without_owner).await?;
    test.machines().delete("web", &DeleteParams::default()).await?;
    test.wait_until_deleted("web").await?;
    ensure!(test.vms().get_opt("web").await?.is_none() && test.vmis().get_opt("web").await?.is_none(), "a VM is left");
    test.wait_until_absent(test.pvcs(), "web-root").await?;
    test.wait_until_absent(test.api::<Secret>(), "web-cloudinit").await
}

/// The steps of docs/backup-and-restore.md.
async fn a_restored_namespace_runs_again_on_its_old_disks(labs: Arc<SharedLabs>) -> Result<()> {
    const MACHINES: [&str; 5] = ["one", "two", "three", "four", "five"];
    // Of these the backup has VM and cloud-init Secret too.
    const WITH_VM: [&str; 2] = ["two", "four"];
    let test = Box::pin(MachineTest::start(&labs, "data-restore")).await?;
    test.create_networks(&["net"]).await?;
    test.create_secret("source", "userdata", "#cloud-config\n").await?;
    for (index, name) in MACHINES.iter().enumerate() {
        let disks = json!([{"name": "data", "size": "1Gi"}]);
        let spec = if index % 2 == 0 {
            let networks = json!([{"name": "a", "networkName": "net"}]);
            let cloud_init = json!({"secretRef": {"name": "source"}});
            json!({"template": "small", "disks": disks, "networks": networks, "cloudInit": cloud_init})
        } else {
            json!({"template": "small", "disks": disks, "cloudInit": {"userData": "#cloud-config\n"}})
        };
        test.create_json(&machine(name, &spec)).await?;
    }
    let mut before = Vec::new();
    for name in MACHINES {
        let machine = test.wait_until_running(name).await?;
        before.push((hardware(&test.vms().get(name).await?), machine.status.unwrap_or_default().disks));
    }
    // The backup.
    let mut saved: Vec<Value> = Vec::new();
    saved.push(json!(test.api::<NetworkConfiguration>().get("net").await?));
    saved.push(json!(test.api::<Secret>().get("source").await?));
    for name in WITH_VM {
        saved.push(json!(test.api::<Secret>().get(&format!("{name}-cloudinit")).await?));
        saved.push(json!(test.vms().get(name).await?));
    }
    let mut pvcs = Vec::new();
    for name in MACHINES {
        saved.push(json!(test.machines().get(name).await?));
        for disk in ["root", "data"] {
            pvcs.push(test.pvcs().get(&format!("{name}-{disk}")).await?);
        }
    }
    // Everything is lost but the volumes.
    let volumes: Api<PersistentVolume> = Api::all(test.lab.client());
    for pvc in &pvcs {
        let volume = pvc.spec.as_ref().and_then(|spec| spec.volume_name.clone()).context("no volume")?;
        let retained = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}));
        volumes.patch(&volume, &PatchParams::default(), &retained).await?;
    }
    for name in MACHINES {
        test.delete_machine(name).await?;
    }
    for name in WITH_VM {
        test.wait_until_absent(test.api::<Secret>(), &format!("{name}-cloudinit")).await?;
        test.wait_until_absent(test.vms(), name).await?;
    }
    test.api::<Secret>().delete("source", &DeleteParams::default()).await?;
    test.api::<NetworkConfiguration>().delete("net", &DeleteParams::default()).await?;
    test.wait_until_absent(test.api::<NetworkConfiguration>(), "net").await?;
    for pvc in &pvcs {
        test.wait_until_absent(test.pvcs(), &pvc.name_any()).await?;
        let volume = pvc.spec.as_ref().and_then(|spec| spec.volume_name.clone()).context("no volume")?;
        // A released volume can be bound again when it names no earlier PVC.
        let free = json!({"spec": {"claimRef": {"uid": null, "resourceVersion": null}}});
        volumes.patch(&volume, &PatchParams::default(), &Patch::Merge(free)).await?;
    }
    // The restore: the PVCs first.
    for pvc in pvcs {
        test.create_json(&without_identity(json!(pvc))).await?;
    }
    for object in saved {
        test.create_json(&without_identity(object)).await?;
    }
    let mut restored_uids = Vec::new();
    for name in WITH_VM {
        let secret = test.api::<Secret>().get(&format!("{name}-cloudinit")).await?;
        restored_uids.push((test.vms().get(name).await?.uid(), secret.uid()));
    }
    for name in MACHINES {
        test.consent(name).await?;
    }
    for (name, (hardware_before, disks)) in MACHINES.iter().zip(before) {
        let restored = test.wait_until_running(name).await?;
        let hardware_after = hardware(&test.vms().get(name).await?);
        ensure!(hardware_after == hardware_before, "{name}: {hardware_before:?} became {hardware_after:?}");
        ensure!(restored.status.unwrap_or_default().disks == disks, "{name} runs on other volumes");
    }
    for (name, (vm_uid, secret_uid)) in WITH_VM.iter().zip(restored_uids) {
        let (vm, secret) = (test.vms().get(name).await?, test.api::<Secret>().get(&format!("{name}-cloudinit")).await?);
        ensure!(vm.uid() == vm_uid && secret.uid() == secret_uid, "{name}: VM or Secret was created again");
        let owner = test.machines().get(name).await?.uid();
        for owners in [vm.owner_references(), secret.owner_references()] {
            ensure!(owners.iter().any(|reference| Some(&reference.uid) == owner.as_ref()), "{name}: {owners:?}");
        }
    }
    Ok(())
}

/// The object as a restore creates it: without what only the API server sets, and without owners.
fn without_identity(mut object: Value) -> Value {
    if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
        for field in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "generation",
            "managedFields",
            "ownerReferences",
            "finalizers",
        ] {
            metadata.remove(field);
        }
        if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
            annotations.retain(|name, _| !name.starts_with("pv.kubernetes.io/"));
        }
    }
    if let Value::Object(fields) = &mut object {
        fields.remove("status");
    }
    object
}

async fn a_pvc_without_data_is_replaced_and_a_lost_one_is_not(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "data-lost")).await?;
    let disks = |class: &str| json!([{"name": "root", "size": "1Gi", "storageClass": class}]);
    let spec = json!({"template": "small", "disks": disks("never-binds")});
    test.create_json(&machine("web", &spec)).await?;
    let waits_for_volume = |machine: &Machine| {
        let storage = condition(machine, condition_type::STORAGE_READY);
        storage
            .is_some_and(|storage| storage.reason == "PVCPending" && storage.message.contains("waiting for a volume"))
    };
    test.wait_for("web", "a PVC without a volume", waits_for_volume).await?;
    test.edit_spec("web", &json!({"disks": disks("standard")})).await?;
    let running = test.wait_until_running("web").await?;
    let volume =
        running.status.unwrap_or_default().disks.first().map(|disk| disk.volume.clone()).context("no volume")?;

    test.edit_spec("web", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("web", "Stopped").await?;
    test.pvcs().delete("web-root", &DeleteParams::default()).await?;
    // While the PVC is being deleted, the message says so.
    let command = format!("vitistack.io/replace-volume={volume}");
    let is_lost = |machine: &Machine| ready_reason(machine) == Some("PVCLost") && diagnosis(machine).contains(&command);
    test.wait_for("web", "PVCLost with the command", is_lost).await?;
    test.wait_until_idle().await?;
    ensure!(test.pvcs().get_opt("web-root").await?.is_none(), "an empty PVC replaced the lost one");
    let consent = json!({"metadata": {"annotations": {"vitistack.io/replace-volume": volume}}});
    test.merge_machine("web", &consent).await?;
    test.edit_spec("web", &json!({"powerState": "Running"})).await?;
    test.wait_until_running("web").await?;

    // A Machine that is deleted without its finalizer while the operator is stopped leaves a PVC that the metrics show.
    test.operator.signal(Signal::SIGTERM)?;
    let status = test.operator.wait(MACHINE_PATIENCE).await?;
    ensure!(status.success(), "the operator ended with {status}");
    test.merge_machine("web", &json!({"metadata": {"finalizers": null}})).await?;
    test.machines().delete("web", &DeleteParams::default()).await?;
    test.wait_until_absent(test.machines(), "web").await?;
    let successor = Box::pin(MachineTest::start(&labs, "data-lost")).await?;
    let is_shown = || async {
        let (_, text) = successor.operator.get(8080, "/metrics").await?;
        Ok(text.lines().any(|line| line == "kubevirt_operator_orphaned_pvcs 1"))
    };
    poll_until(MACHINE_PATIENCE, is_shown, || "the metrics show the orphaned PVC".to_owned()).await?;
    let left = test.pvcs().get("web-root").await?;
    ensure!(left.metadata.deletion_timestamp.is_none(), "{left:?}");
    Ok(())
}

async fn a_bound_pvc_is_kept_even_when_the_pvc_cache_is_stale(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "data-stale";
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    let disks = |class: &str| json!([{"name": "root", "size": "1Gi", "storageClass": class}]);
    test.create_json(&machine("web", &json!({"template": "small", "disks": disks("never-binds")}))).await?;
    test.wait_for_reason("web", "PVCPending").await?;
    test.wait_until_idle().await?;

    // The operator does not see that an administrator supplies a volume.
    let pvc_watch = Match::verb(RequestVerb::Watch).user_agent("kubevirt-operator/").resource("persistentvolumeclaims");
    let stall = ProxyRule::always(pvc_watch.namespace(NAMESPACE), ProxyFault::StallWatch { after_events: 0 });
    let stall = test.lab.proxy().add(stall);
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": NAMESPACE},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "never-binds",
            "claimRef": {"namespace": NAMESPACE, "name": "web-root"}, "hostPath": {"path": "/data-stale"},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    });
    let volumes: Api<PersistentVolume> = Api::all(test.lab.client());
    volumes.create(&PostParams::default(), &serde_json::from_value(volume)?).await?;
    let is_bound = |pvc: Option<&PersistentVolumeClaim>| {
        pvc.and_then(|pvc| pvc.status.as_ref()?.phase.as_deref()).is_some_and(|phase| phase == "Bound")
    };
    test.lab.wait("a bound PVC", MACHINE_PATIENCE, test.pvcs(), "web-root", is_bound).await?;
    let bound = test.pvcs().get("web-root").await?;
    test.edit_spec("web", &json!({"disks": disks("standard")})).await?;
    let is_refused = |machine: &Machine| {
        let ready = condition(machine, condition_type::READY);
        ready.is_some_and(|ready| ready.message.contains("spec.disks[root].storageClass: cannot change"))
    };
    let refused = test.wait_for("web", "a refused change", is_refused).await;
    let kept = test.pvcs().get("web-root").await?;
    ensure!(
        kept.uid() == bound.uid() && kept.metadata.deletion_timestamp.is_none(),
        "the operator deleted a PVC that has a volume"
    );
    refused?;
    stall.remove();
    Ok(())
}

async fn a_guest_that_runs_is_kept_even_when_the_vmi_cache_is_stale(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "guest-stale";
    const IMAGE: &str = "quay.io/example/starts-while-the-watch-is-stalled";
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    let rule = PodRule { image_contains: IMAGE.to_owned(), fate: PodFate::NeverReady };
    test.lab.set_pods(|pods| pods.rules.push(rule));
    let disk = json!({"name": "root", "source": {"containerDisk": {"image": IMAGE}}});
    test.create_json(&machine("web", &json!({"template": "small", "disks": [disk]}))).await?;
    let has_phase = |phase: &'static str| {
        move |vmi: Option<&DynamicObject>| {
            vmi.is_some_and(|vmi| vmi.data.pointer("/status/phase") == Some(&json!(phase)))
        }
    };
    test.lab.wait("a VMI whose pod starts", MACHINE_PATIENCE, test.vmis(), "web", has_phase("Scheduling")).await?;
    test.wait_until_idle().await?;

    // The operator does not see that the guest starts, so an edit of its VM seems to need another VMI.
    let vmi_watch =
        Match::verb(RequestVerb::Watch).user_agent("kubevirt-operator/").resource("virtualmachineinstances");
    let stall = ProxyRule::always(vmi_watch.namespace(NAMESPACE), ProxyFault::StallWatch { after_events: 0 });
    let stall = test.lab.proxy().add(stall);
    test.lab.set_pods(|pods| pods.rules.retain(|rule| rule.image_contains != IMAGE));
    test.lab.wait("a guest that runs", MACHINE_PATIENCE, test.vmis(), "web", has_phase("Running")).await?;
    let before = test.vmis().get("web").await?;
    test.edit_spec("web", &json!({"resources": {"cpu": {"cores": 2}}})).await?;
    let has_cores = |vm: Option<&DynamicObject>| {
        vm.is_some_and(|vm| vm.data.pointer("/spec/template/spec/domain/cpu/cores") == Some(&json!(2)))
    };
    test.lab.wait("a VM with two cores", MACHINE_PATIENCE, test.vms(), "web", has_cores).await?;
    let reads_vmi = || async {
        let requests = test.operator_requests()?;
        Ok(requests.iter().any(|request| request.verb == "get" && request.resource == "virtualmachineinstances"))
    };
    poll_until(MACHINE_PATIENCE, reads_vmi, || "the operator reads the VMI".to_owned()).await?;
    test.wait_until_idle().await?;
    let kept = test.vmis().get("web").await?;
    ensure!(
        kept.uid() == before.uid() && kept.metadata.deletion_timestamp.is_none(),
        "the operator deleted a VMI whose guest runs"
    );
    stall.remove();
    test.delete_machine("web").await
}

async fn a_problem_of_one_part_does_not_stop_the_others(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "data-parts")).await?;
    test.create_networks(&["net"]).await?;
    test.create_secret("source", "userdata", "#cloud-config\n").await?;
    let spec = json!({
        "template": "small",
        "networks": [{"name": "a", "networkName": "net"}],
        "cloudInit": {"secretRef": {"name": "source"}},
    });
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    // A network that is being deleted stays as long as it is used.
    test.api::<NetworkConfiguration>().delete("net", &DeleteParams::default()).await?;
    test.api::<Secret>().delete("source", &DeleteParams::default()).await?;
    test.wait_for_reason("web", "SecretNotFound").await?;
    test.edit_spec("web", &json!({"powerState": "Stopped", "resources": {"cpu": {"cores": 2}}})).await?;
    let is_stopped =
        |machine: &Machine| phase(machine) == Some("Stopped") && ready_reason(machine) == Some("SecretNotFound");
    test.wait_for_within(MACHINE_PATIENCE, "web", "Stopped", is_stopped).await?;
    let vm = test.vms().get("web").await?;
    ensure!(vm.data.pointer("/spec/template/spec/domain/cpu/cores") == Some(&json!(2)), "{vm:?}");
    test.create_secret("source", "userdata", "#cloud-config\n").await?;
    test.edit_spec("web", &json!({"powerState": "Running"})).await?;
    test.wait_until_running("web").await?;
    test.delete_machine("web").await?;
    test.wait_until_absent(test.api::<NetworkConfiguration>(), "net").await
}
