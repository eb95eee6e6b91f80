//! Disks that are in another PVC than the one which the operator created: KubeVirt restored them from a snapshot, or a user
//! moved them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_ADOPT, ANNOTATION_DISK, LABEL_MACHINE_UID, Machine, condition_type};
use vitivirt_lab::{
    CLASS_WAIT, Extension, KubeVirtInstaller, Lab, LabOptions,
    harness::{SharedLabs, Suite},
};

use crate::machine_test::{MACHINE_PATIENCE, MachineTest, check_diagnosis, condition, machine, ready_reason};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_disk_that_kubevirt_restored_survives_the_loss_of_its_vm,
        a_vm_with_a_moved_disk_is_created_again_only_with_consent,
        a_running_machine_that_adopts_a_retained_disk_keeps_its_guest,
    );
}

const GROUP: &str = "snapshot.kubevirt.io";

/// KubeVirt makes the VM the owner of the PVC, so the garbage collector would delete the data with the VM.
async fn a_disk_that_kubevirt_restored_survives_the_loss_of_its_vm(_: Arc<SharedLabs>) -> Result<()> {
    let kubevirt = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"configuration": {"developerConfiguration": {"featureGates": ["Snapshot"]}}},
    });
    let lab = Lab::start(LabOptions {
        kubevirt: KubeVirtInstaller::Reference { custom_resource: Some(kubevirt) },
        extensions: vec![Extension::Snapshots],
        ..LabOptions::default()
    });
    let test = MachineTest::start_on(Arc::new(Box::pin(lab).await?), "restore").await?;
    // A PVC of this class is bound only when a pod uses it, so a restore is complete before that.
    let disk = json!({"name": "root", "size": "1Gi", "storageClass": CLASS_WAIT});
    test.create_json(&machine("web", &json!({"template": "small", "disks": [disk]}))).await?;
    test.wait_until_running("web").await?;
    snapshot_and_restore(&test, "first", "RandomizeNames").await?;
    let restored = pvc_of(&test).await?;
    ensure!(restored != "web-root", "KubeVirt did not restore the disk");
    let mark = format!("root {restored}");
    let is_marked = |pvc: Option<&PersistentVolumeClaim>| {
        pvc.is_some_and(|pvc| {
            pvc.owner_references().is_empty() && pvc.annotations().get(ANNOTATION_DISK) == Some(&mark)
        })
    };
    test.lab.wait("a marked PVC without owners", MACHINE_PATIENCE, test.api(), &restored, is_marked).await?;
    let is_recorded =
        |machine: &Machine| machine.status.iter().flat_map(|status| &status.disks).any(|disk| disk.pvc == restored);
    test.wait_for("web", "the restored PVC in the status", is_recorded).await?;

    // The PVC is deleted and created again under its name. In between the disk seems to be lost.
    let replaced = test.api::<PersistentVolumeClaim>().get(&restored).await?.uid();
    snapshot_and_restore(&test, "second", "InPlace").await?;
    ensure!(pvc_of(&test).await? == restored, "KubeVirt did not restore in place");
    let is_new = |pvc: Option<&PersistentVolumeClaim>| {
        pvc.is_some_and(|pvc| pvc.uid() != replaced && pvc.owner_references().is_empty())
    };
    test.lab.wait("another PVC without owners", MACHINE_PATIENCE, test.api(), &restored, is_new).await?;

    let earlier = test.vms().get("web").await?.uid();
    test.vms().delete("web", &DeleteParams::default()).await?;
    let is_new = |vm: Option<&DynamicObject>| vm.is_some_and(|vm| vm.uid() != earlier);
    test.lab.wait("another VM", MACHINE_PATIENCE, test.vms(), "web", is_new).await?;
    test.wait_until_running("web").await?;
    ensure!(pvc_of(&test).await? == restored, "the new VM has the disk from before the restore");
    let pvc = test.api::<PersistentVolumeClaim>().get(&restored).await?;
    ensure!(pvc.metadata.deletion_timestamp.is_none(), "the restored disk is being deleted");

    let retained = json!({"name": "root", "size": "1Gi", "storageClass": CLASS_WAIT, "onDelete": "Retain"});
    test.edit_spec("web", &json!({"disks": [retained]})).await?;
    test.wait_until_running("web").await?;
    test.delete_machine("web").await?;
    let kept = test.api::<PersistentVolumeClaim>().get(&restored).await?;
    ensure!(kept.metadata.deletion_timestamp.is_none(), "a retained disk is being deleted");

    // As after a backup: a new Machine has another UID and no status, and the PVC from before the restore does not exist.
    let earlier = kept.labels().get(LABEL_MACHINE_UID).context("no UID")?.clone();
    test.api::<PersistentVolumeClaim>().delete("web-root", &DeleteParams::default()).await?;
    test.wait_until_absent(test.api::<PersistentVolumeClaim>(), "web-root").await?;
    let disk = json!({"name": "root", "size": "1Gi", "storageClass": CLASS_WAIT});
    test.create_json(&machine("web", &json!({"template": "small", "disks": [disk]}))).await?;
    test.wait_for_reason("web", "NameTaken").await?;
    ensure!(test.vms().get_opt("web").await?.is_none(), "a VM without its disk");
    let consent = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION_ADOPT: earlier}}}));
    test.machines().patch("web", &PatchParams::default(), &consent).await?;
    test.wait_until_running("web").await?;
    ensure!(pvc_of(&test).await? == restored, "the new VM does not have the restored disk");
    Ok(())
}

/// A user moves a disk to a PVC of their own, and then the VM is deleted. A VM with the old PVC would lose what the guest has
/// written since.
async fn a_vm_with_a_moved_disk_is_created_again_only_with_consent(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "moved-disk")).await?;
    test.create_json(&machine("web", &json!({"template": "small"}))).await?;
    test.wait_until_running("web").await?;
    let pvc = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "moved"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    });
    test.create_json(&pvc).await?;
    let volume = json!([{
        "op": "replace", "path": "/spec/template/spec/volumes/0/persistentVolumeClaim/claimName", "value": "moved",
    }]);
    let patch = Patch::Json::<()>(serde_json::from_value(volume)?);
    test.vms().patch("web", &PatchParams::default(), &patch).await?;
    let is_external = |machine: &Machine| {
        let mut disks = machine.status.iter().flat_map(|status| &status.disks);
        disks.any(|disk| disk.pvc == "moved" && disk.external)
    };
    test.wait_for("web", "an external PVC in the status", is_external).await?;
    test.restart_vmi("web").await?;
    test.wait_until_running("web").await?;
    test.wait_until_idle().await?;

    test.vms().delete("web", &DeleteParams::default()).await?;
    test.wait_for_reason("web", "DiskMoved").await?;
    test.wait_until_idle().await?;
    ensure!(test.vms().get_opt("web").await?.is_none(), "the operator created a VM without consent");
    let annotate = |key: &str, value: &str| Patch::Merge(json!({"metadata": {"annotations": {key: value}}}));
    let consent = annotate("vitistack.io/adopt-by", "web");
    test.api::<PersistentVolumeClaim>().patch("moved", &PatchParams::default(), &consent).await?;
    let consent = annotate("vitistack.io/adopt", "pvc/moved");
    test.machines().patch("web", &PatchParams::default(), &consent).await?;
    test.wait_until_running("web").await?;
    ensure!(pvc_of(&test).await? == "moved", "the new VM has the disk from before it was moved");
    let adopted = test.api::<PersistentVolumeClaim>().get("moved").await?;
    ensure!(adopted.annotations().get(ANNOTATION_DISK).map(String::as_str) == Some("root moved"), "{adopted:?}");
    test.delete_machine("web").await?;
    test.wait_until_absent(test.api::<PersistentVolumeClaim>(), "moved").await
}

/// The UID of the earlier Machine becomes the identity of the guest at its next start. The diagnosis does not offer it, but a
/// user may set it.
async fn a_running_machine_that_adopts_a_retained_disk_keeps_its_guest(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "retained-disk")).await?;
    let root = json!({"name": "root", "size": "1Gi"});
    let data = json!({"name": "data", "size": "1Gi", "onDelete": "Retain"});
    test.create_json(&machine("web", &json!({"template": "small", "disks": [root, data]}))).await?;
    let earlier = test.wait_until_running("web").await?.uid().context("no UID")?;
    test.delete_machine("web").await?;
    test.create_json(&machine("web", &json!({"template": "small", "disks": [root]}))).await?;
    test.wait_until_running("web").await?;
    test.edit_spec("web", &json!({"disks": [root, data]})).await?;
    let refused = test.wait_for_reason("web", "NameTaken").await?;
    check_diagnosis(&refused, &["vitistack.io/adopt=pvc/web-data"])?;

    let consent = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION_ADOPT: earlier}}}));
    test.machines().patch("web", &PatchParams::default(), &consent).await?;
    let own = refused.uid();
    let is_adopted = |pvc: Option<&PersistentVolumeClaim>| {
        pvc.is_some_and(|pvc| pvc.labels().get(LABEL_MACHINE_UID) == own.as_ref())
    };
    test.lab.wait("an adopted PVC", MACHINE_PATIENCE, test.api(), "web-data", is_adopted).await?;
    let is_pending = |machine: &Machine| condition(machine, condition_type::RESTART_REQUIRED).is_some();
    let running = test.wait_for("web", "RestartRequired", is_pending).await?;
    ensure!(ready_reason(&running) == Some("Running"), "{:?}", running.status);
    let status = running.status.context("no status")?;
    ensure!(status.vmi_name.is_some() && !status.ip_addresses.is_empty(), "{status:?}");
    test.wait_until_idle().await?;
    test.edit_spec("web", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("web", "Stopped").await?;
    ensure!(test.vmis().get_opt("web").await?.is_none(), "the Machine is reported as stopped while its guest runs");
    test.delete_machine("web").await
}

/// Stops the Machine `web`, takes a snapshot of its VM, restores it, and starts the Machine.
async fn snapshot_and_restore(test: &MachineTest, name: &str, policy: &str) -> Result<()> {
    test.edit_spec("web", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_reason("web", "Stopped").await?;
    let vm = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "web"});
    let snapshot = json!({"source": vm});
    create_and_wait(test, "VirtualMachineSnapshot", name, &snapshot, "/status/readyToUse").await?;
    let restore = json!({"target": vm, "virtualMachineSnapshotName": name, "volumeRestorePolicy": policy});
    create_and_wait(test, "VirtualMachineRestore", name, &restore, "/status/complete").await?;
    test.edit_spec("web", &json!({"powerState": "Running"})).await?;
    test.wait_until_running("web").await.map(|_| ())
}

/// Creates an object of KubeVirt's snapshot API, and waits until the field is true.
async fn create_and_wait(test: &MachineTest, kind: &str, name: &str, spec: &Value, field: &str) -> Result<()> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1beta1", kind));
    let object = json!({
        "apiVersion": format!("{GROUP}/v1beta1"), "kind": kind, "metadata": {"name": name}, "spec": spec,
    });
    test.create_json(&object).await?;
    let is_done = |object: Option<&DynamicObject>| {
        object.is_some_and(|object| object.data.pointer(field) == Some(&Value::Bool(true)))
    };
    test.lab.wait(kind, MACHINE_PATIENCE, test.dynamic_api(&resource), name, is_done).await.map(|_| ())
}

/// The PVC that the VM uses.
async fn pvc_of(test: &MachineTest) -> Result<String> {
    let vm = test.vms().get("web").await?;
    let volumes = vm.data.pointer("/spec/template/spec/volumes").and_then(Value::as_array);
    let mut claims = volumes.into_iter().flatten().filter_map(|volume| {
        volume.pointer("/persistentVolumeClaim/claimName").and_then(Value::as_str).map(str::to_owned)
    });
    claims.next().context("the VM has no PVC")
}
