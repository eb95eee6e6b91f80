//! The real virt-api and virt-controller with simulated guests.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_lab::{
    GuestEnd, KubeVirtInstaller, Lab, LabOptions,
    harness::{SharedLabs, Suite},
    kubevirt_resource, tests,
};

const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        a_virtual_machine_reaches_running,
        virt_api_rejects_an_invalid_vm,
        virt_api_accepts_vmi_status_only_from_kubevirt_accounts,
        a_guest_that_shuts_down_is_started_again,
        a_slow_guest_boots_and_stops_after_its_delay,
        a_vmi_migrates_to_another_node_and_back,
        simulated_kubevirt_runs_and_stops_many_vms,
    );
}

async fn a_virtual_machine_reaches_running(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    create_vm(&lab, "runs").await?;
    let vm = wait_for_status(&lab, "runs", "Running").await?;
    ensure!(
        text(&vm, "/spec/template/spec/domain/machine/type") == "q35",
        "virt-api's mutating webhook was not called: {vm:?}"
    );
    let vmi = vmis(&lab).get("runs").await?;
    let address = text(&vmi, "/status/interfaces/0/ipAddress");
    ensure!(address.starts_with("10."), "the guest has no address: {address:?}");
    delete_vm(&lab, "runs").await
}

async fn virt_api_rejects_an_invalid_vm(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    let mut bad: DynamicObject = serde_json::from_value(vm("bad"))?;
    let volumes = bad.data.pointer_mut("/spec/template/spec/volumes").context("the VM has no volumes")?;
    *volumes = json!([]);
    let Err(error) = vms(&lab).create(&PostParams::default(), &bad).await else {
        bail!("virt-api admitted a disk without a volume")
    };
    ensure!(error.to_string().contains("admission webhook"), "{error}");
    Ok(())
}

async fn virt_api_accepts_vmi_status_only_from_kubevirt_accounts(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    create_vm(&lab, "identity").await?;
    wait_for_status(&lab, "identity", "Running").await?;
    let false_status = Patch::Merge(json!({"status": {"phase": "Failed"}}));

    // Not even an administrator may write it: virt-api silently restores the old status.
    let returned = vmis(&lab).patch("identity", &PatchParams::default(), &false_status).await?;
    ensure!(
        text(&returned, "/status/phase") == "Running",
        "virt-api accepted the status of another user: {returned:?}"
    );

    let node = text(&returned, "/status/nodeName");
    let handler = lab.virt_handler_client(&node).await?;
    let as_handler: Api<DynamicObject> =
        Api::namespaced_with(handler, "default", &kubevirt_resource("VirtualMachineInstance"));
    let returned = as_handler.patch("identity", &PatchParams::default(), &false_status).await?;
    ensure!(
        text(&returned, "/status/phase") == "Failed",
        "virt-api did not accept the status of virt-handler: {returned:?}"
    );
    delete_vm(&lab, "identity").await
}

async fn a_guest_that_shuts_down_is_started_again(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    create_vm(&lab, "again").await?;
    wait_for_status(&lab, "again", "Running").await?;
    let first = vmis(&lab).get("again").await?.metadata.uid;
    // Other clients write the same object at the same time, and the end of the guest is stored nevertheless.
    let other_writes = async {
        for number in 0..20 {
            let note = Patch::Merge(json!({"metadata": {"annotations": {"test/number": number.to_string()}}}));
            match vmis(&lab).patch("again", &PatchParams::default(), &note).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    };
    tokio::try_join!(other_writes, lab.end_guest("default", "again", GuestEnd::Shutdown))?;
    lab.wait("a second guest", TIMEOUT, vmis(&lab), "again", |vmi| {
        vmi.is_some_and(|vmi| vmi.metadata.uid != first && text(vmi, "/status/phase") == "Running")
    })
    .await?;
    delete_vm(&lab, "again").await
}

async fn a_slow_guest_boots_and_stops_after_its_delay(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    let delay = Duration::from_secs(3);
    let set_delay = |delay: Duration| {
        lab.set_guests(|guests| (guests.boots_after, guests.stops_after) = (delay.into(), delay.into()));
    };
    set_delay(delay);
    create_vm(&lab, "slow").await?;
    let wait_for_phase = |phase: &'static str| {
        lab.wait("the phase of a VMI", TIMEOUT, vmis(&lab), "slow", move |vmi| {
            vmi.is_some_and(|vmi| text(vmi, "/status/phase") == phase)
        })
    };
    wait_for_phase("Scheduled").await?;
    let scheduled = Instant::now();
    wait_for_phase("Running").await?;
    let booted_after = scheduled.elapsed();
    let deleted = Instant::now();
    delete_vm(&lab, "slow").await?;
    let stopped_after = deleted.elapsed();
    set_delay(Duration::ZERO);
    // The watch may report the phase Scheduled a little late.
    ensure!(booted_after >= delay.mul_f64(0.8), "the guest booted after {booted_after:?}");
    ensure!(stopped_after >= delay, "the guest stopped after {stopped_after:?}");
    Ok(())
}

async fn a_vmi_migrates_to_another_node_and_back(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.reference().await?;
    create_vm(&lab, "moves").await?;
    wait_for_status(&lab, "moves", "Running").await?;
    for round in ["there", "back"] {
        let from = text(&vmis(&lab).get("moves").await?, "/status/nodeName");
        migrate(&lab, "moves", round).await?;
        let moved = lab
            .wait("the guest on another node", TIMEOUT, vmis(&lab), "moves", |vmi| {
                vmi.is_some_and(|vmi| text(vmi, "/status/nodeName") != from)
            })
            .await?;
        ensure!(moved.is_some_and(|vmi| text(&vmi, "/status/phase") == "Running"), "the guest stopped");
    }
    delete_vm(&lab, "moves").await
}

async fn simulated_kubevirt_runs_and_stops_many_vms(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }).await?;
    for number in 0..20 {
        create_vm(&lab, &format!("vm-{number}")).await?;
    }
    for number in 0..20 {
        wait_for_status(&lab, &format!("vm-{number}"), "Running").await?;
    }
    let halt = Patch::Merge(json!({"spec": {"runStrategy": "Halted"}}));
    vms(&lab).patch("vm-0", &PatchParams::default(), &halt).await?;
    wait_for_status(&lab, "vm-0", "Stopped").await?;
    delete_vm(&lab, "vm-1").await?;
    lab.stop().await
}

async fn migrate(lab: &Lab, name: &str, round: &str) -> Result<()> {
    let migrations: Api<DynamicObject> =
        Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachineInstanceMigration"));
    let migration = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": round, "namespace": "default"},
        "spec": {"vmiName": name},
    });
    migrations
        .create(&PostParams::default(), &serde_json::from_value(migration)?)
        .await
        .context("creating a migration")?;
    lab.wait("a migration that succeeds", TIMEOUT, migrations, round, |migration| {
        migration.is_some_and(|migration| text(migration, "/status/phase") == "Succeeded")
    })
    .await
    .map(|_| ())
}

fn vms(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachine"))
}

fn vmis(lab: &Lab) -> Api<DynamicObject> {
    Api::namespaced_with(lab.client(), "default", &kubevirt_resource("VirtualMachineInstance"))
}

fn text(object: &DynamicObject, pointer: &str) -> String {
    object.data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn vm(name: &str) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "runStrategy": "Always",
            "template": {"spec": {
                "domain": {
                    "cpu": {"cores": 1},
                    "memory": {"guest": "128Mi"},
                    "devices": {
                        "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                        "interfaces": [{"name": "default", "masquerade": {}}],
                    },
                },
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "root", "containerDisk": {"image": "quay.io/containerdisks/fedora:42"}}],
            }},
        },
    })
}

async fn create_vm(lab: &Lab, name: &str) -> Result<()> {
    let object: DynamicObject = serde_json::from_value(vm(name))?;
    vms(lab).create(&PostParams::default(), &object).await.map(|_| ()).with_context(|| format!("creating VM {name}"))
}

async fn wait_for_status(lab: &Lab, name: &str, status: &str) -> Result<DynamicObject> {
    lab.wait(&format!("a VM that is {status}"), TIMEOUT, vms(lab), name, |vm| {
        vm.is_some_and(|vm| text(vm, "/status/printableStatus") == status)
    })
    .await?
    .context("the VM was deleted")
}

async fn delete_vm(lab: &Lab, name: &str) -> Result<()> {
    vms(lab).delete(name, &DeleteParams::default()).await?;
    lab.wait("no VM", TIMEOUT, vms(lab), name, |vm| vm.is_none()).await?;
    lab.wait("no VMI", TIMEOUT, vmis(lab), name, |vmi| vmi.is_none()).await.map(|_| ())
}
