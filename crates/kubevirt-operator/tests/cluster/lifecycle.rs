//! Machines on a cluster with the real virt-api and virt-controller: the examples, missing references, name conflicts,
//! deletion, the number of requests, and the plan command.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{
    ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vitivirt_api::machine::{
    FINALIZER_MACHINE, FINALIZER_NETWORK, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY, Machine,
    MachinePhase, NetworkConfiguration,
};
use vitivirt_lab::harness::{SharedLabs, Suite};

use crate::machine_test::{MachineTest, condition, foreign_vm, is_protected, machine, phase, ready_reason};

const EXAMPLES: [(&str, &str); 4] = [
    ("basic-vm", include_str!("../../../../examples/basic-vm.yaml")),
    ("custom-vm", include_str!("../../../../examples/custom-vm.yaml")),
    ("networked-vm", include_str!("../../../../examples/networked-vm.yaml")),
    ("cloud-init-vm", include_str!("../../../../examples/cloud-init-vm.yaml")),
];
pub(crate) const EXAMPLE_NETWORKS: &str = include_str!("../../../../examples/networks.yaml");

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        every_example_machine_runs,
        machines_with_missing_references_report_them_and_recover,
        a_changed_source_secret_updates_the_cloud_init_secret,
        a_vm_of_another_owner_is_not_changed,
        deleting_a_machine_deletes_everything_but_retained_disks,
        an_imported_machine_with_finalizers_can_be_deleted,
        a_machine_takes_at_most_8_writes_and_no_reads,
        the_plan_command_shows_changes_and_writes_nothing,
    );
}

async fn every_example_machine_runs(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "examples")).await?;
    test.create_storage_class("fast-ssd").await?;
    test.create_yaml(EXAMPLE_NETWORKS).await?;
    for (_, text) in EXAMPLES {
        test.create_yaml(text).await?;
    }
    for (name, _) in EXAMPLES {
        let machine = test.wait_until_running(name).await?;
        check_running_machine(&test, &machine).await.with_context(|| name.to_owned())?;
    }
    let pvcs = test.object_names::<PersistentVolumeClaim>().await?;
    let expected = ["basic-vm-root", "cloud-init-vm-root", "custom-vm-data", "custom-vm-root", "networked-vm-root"];
    ensure!(pvcs == expected, "{pvcs:?}");
    let nads = test.nads().list(&ListParams::default()).await?;
    ensure!(nads.items.len() == 2, "one NAD per NetworkConfiguration");
    check_example_metrics(&test).await
}

/// Checks status, finalizer, ownership and labels of a Machine that runs, and of its objects.
async fn check_running_machine(test: &MachineTest, machine: &Machine) -> Result<()> {
    let (name, uid) = (machine.name_any(), machine.uid().unwrap_or_default());
    let status = machine.status.clone().unwrap_or_default();
    for type_ in ["Ready", "VirtualMachineReady", "StorageReady", "NetworkReady"] {
        ensure!(
            condition(machine, type_).is_some_and(|have| have.status == "True"),
            "{type_}: {:?}",
            status.conditions
        );
    }
    ensure!(status.vm_name.as_deref() == Some(&name) && status.vmi_name.as_deref() == Some(&name), "{status:?}");
    ensure!(!status.ip_addresses.is_empty() && status.node_name.is_some(), "{status:?}");
    ensure!(machine.finalizers().iter().any(|finalizer| finalizer == "machine.vitistack.io/cleanup"), "no finalizer");

    let vm = test.vms().get(&name).await?;
    let owner = vm.owner_references().first().cloned().context("the VM has no owner")?;
    ensure!((owner.kind.as_str(), &owner.name, &owner.uid) == ("Machine", &name, &uid), "{owner:?}");
    ensure!(vm.labels().get(LABEL_MANAGED_BY).map(String::as_str) == Some(MANAGED_BY), "{:?}", vm.labels());
    // Users find the objects of a Machine with this selector.
    let selector = format!("{LABEL_MACHINE}={name}");
    let selected = ListParams::default().labels(&selector);
    ensure!(test.vms().list(&selected).await?.items.len() == 1, "the VM does not have the label {selector}");
    ensure!(test.vmis().list(&selected).await?.items.len() == 1, "the VMI does not have the label {selector}");
    let pvcs = test.api::<PersistentVolumeClaim>().list(&selected).await?.items;
    ensure!(!pvcs.is_empty(), "no PVC has the label {selector}");
    for pvc in pvcs {
        ensure!(pvc.name_any().starts_with(&format!("{name}-")), "{}", pvc.name_any());
        ensure!(pvc.owner_references().is_empty() && pvc.labels().get(LABEL_MACHINE_UID) == Some(&uid), "{pvc:?}");
    }
    let text = serde_json::to_string(&vm.data).unwrap_or_default();
    ensure!(!text.contains("ssh-rsa"), "the VM contains user data, which belongs in its Secret");
    Ok(())
}

async fn check_example_metrics(test: &MachineTest) -> Result<()> {
    let (status, text) = test.operator.get(8080, "/metrics").await?;
    ensure!(status == 200, "{status}");
    for line in [
        "kubevirt_operator_machines_total{phase=\"Running\",template=\"medium\"} 2",
        "kubevirt_operator_machines_total{phase=\"Running\",template=\"small\"} 1",
        "kubevirt_operator_virtual_machines_total{status=\"Running\"} 4",
        "kubevirt_operator_storage_provisioning_duration_seconds_count{storage_class=\"fast-ssd\"} 1",
        "kubevirt_operator_machine_time_to_running_seconds_count 4",
    ] {
        ensure!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
    }
    Ok(())
}

async fn machines_with_missing_references_report_them_and_recover(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "missing-references")).await?;
    let cases = [
        ("no-template", json!({"template": "huge"}), "Failed", "TemplateNotFound"),
        (
            "no-class",
            json!({"template": "small", "disks": [{"name": "root", "storageClass": "missing-references"}]}),
            "Pending",
            "StorageClassNotFound",
        ),
        (
            "no-network",
            json!({"template": "small", "networks": [{"name": "a", "networkName": "later"}]}),
            "Pending",
            "NetworkConfigurationNotFound",
        ),
        (
            "no-secret",
            json!({"template": "small", "cloudInit": {"secretRef": {"name": "later"}}}),
            "Pending",
            "SecretNotFound",
        ),
    ];
    for (name, spec, ..) in &cases {
        test.create_json(&machine(name, spec)).await?;
    }
    for (name, _, phase, expected) in &cases {
        let machine = test.wait_for(name, "the error", |machine| ready_reason(machine) == Some(*expected)).await?;
        let status = machine.status.clone().unwrap_or_default();
        ensure!(status.phase.map(MachinePhase::as_str) == Some(phase), "{name}: {status:?}");
        ensure!(status.diagnosis.is_some_and(|text| !text.is_empty()), "{name} has no diagnosis");
    }
    ensure!(test.vms().list(&ListParams::default()).await?.items.is_empty(), "a VM was created");
    ensure!(test.object_names::<PersistentVolumeClaim>().await?.is_empty(), "a PVC was created");
    test.wait_for_error_counts(&cases.each_ref().map(|(_, _, _, reason)| *reason)).await?;

    test.edit_spec("no-template", &json!({"template": "small"})).await?;
    test.create_storage_class("missing-references").await?;
    test.create_networks(&["later"]).await?;
    test.create_secret("later", "userdata", "#cloud-config\n").await?;
    for (name, ..) in &cases {
        test.wait_until_running(name).await?;
    }
    Ok(())
}

async fn a_changed_source_secret_updates_the_cloud_init_secret(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "source-secret")).await?;
    test.create_secret("source", "k", "first").await?;
    let spec = json!({"template": "small", "cloudInit": {"secretRef": {"name": "source", "key": "k"}}});
    test.create_json(&machine("web", &spec)).await?;
    test.wait_for_user_data("web-cloudinit", "first").await?;
    let secrets = test.api::<Secret>();
    let change = json!({"stringData": {"k": "second"}});
    secrets.patch("source", &PatchParams::default(), &Patch::Merge(change)).await?;
    test.wait_for_user_data("web-cloudinit", "second").await?;
    test.wait_until_running("web").await?;
    // The operator reverts what another client writes to the cloud-init Secret.
    let foreign = json!({"stringData": {"userdata": "evil", "more": "evil"}});
    secrets.patch("web-cloudinit", &PatchParams::default(), &Patch::Merge(foreign)).await?;
    let restored = test.wait_for_user_data("web-cloudinit", "second").await?;
    ensure!(
        restored.and_then(|secret| secret.data).is_some_and(|data| data.len() == 1),
        "the added key is still there"
    );
    Ok(())
}

async fn a_vm_of_another_owner_is_not_changed(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "foreign-vm")).await?;
    test.create_json(&foreign_vm("mine")).await?;
    let before = test.vms().get("mine").await?;
    test.create_json(&machine("mine", &json!({"template": "small"}))).await?;
    let conflicting = test.wait_for_reason("mine", "NameTaken").await?;
    ensure!(phase(&conflicting) == Some("Failed"), "{:?}", conflicting.status);
    test.edit_spec("mine", &json!({"template": "large"})).await?;
    test.wait_until_observed("mine").await?;
    test.delete_machine("mine").await?;
    let after = test.vms().get("mine").await?;
    let comparable_spec = |vm: &DynamicObject| {
        let metadata = &vm.metadata;
        let spec = vm.data.get("spec").cloned();
        (metadata.uid.clone(), metadata.generation, vm.labels().clone(), metadata.deletion_timestamp.clone(), spec)
    };
    ensure!(comparable_spec(&before) == comparable_spec(&after), "{before:?} became {after:?}");
    let written = after.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(MANAGED_BY));
    ensure!(!written, "the operator wrote to the VM");
    Ok(())
}

async fn deleting_a_machine_deletes_everything_but_retained_disks(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "deletion")).await?;
    test.create_networks(&["net"]).await?;
    let spec = json!({
        "template": "small",
        "disks": [{"name": "data", "size": "1Gi"}, {"name": "kept", "size": "1Gi", "onDelete": "Retain"}],
        "networks": [{"name": "a", "networkName": "net"}],
        "cloudInit": {"userData": "#cloud-config\n"},
    });
    test.create_json(&machine("deleted", &spec)).await?;
    let machine = test.wait_until_running("deleted").await?;
    let networks = test.api::<NetworkConfiguration>();
    ensure!(is_protected(&networks.get("net").await?), "the network is in use and has no finalizer");
    test.delete_machine("deleted").await?;
    ensure!(test.vms().list(&ListParams::default()).await?.items.is_empty(), "the VM still exists");
    ensure!(test.vmis().list(&ListParams::default()).await?.items.is_empty(), "the VMI still exists");
    let uid = machine.uid().unwrap_or_default();
    let pvcs = test.api::<PersistentVolumeClaim>();
    test.wait_until_absent(pvcs.clone(), "deleted-root").await?;
    test.wait_until_absent(pvcs.clone(), "deleted-data").await?;
    let kept = pvcs.get("deleted-kept").await?;
    ensure!(kept.labels().get(LABEL_MACHINE_UID) == Some(&uid), "{kept:?}");
    ensure!(kept.metadata.deletion_timestamp.is_none(), "{kept:?}");
    test.wait_until_absent(test.api::<Secret>(), "deleted-cloudinit").await?;
    ensure!(networks.get("net").await?.finalizers().is_empty(), "no Machine uses the network, and it has a finalizer");
    networks.delete("net", &DeleteParams::default()).await?;
    test.wait_until_absent(networks, "net").await
}

/// A client that creates objects from an export sets the operator's finalizers itself.
async fn an_imported_machine_with_finalizers_can_be_deleted(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "imported")).await?;
    let networks = test.api::<NetworkConfiguration>();
    let network = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration",
        "metadata": {"name": "imported", "finalizers": ["example.com/other", FINALIZER_NETWORK]},
        "spec": {"bridge": "br0"},
    });
    networks.create(&PostParams::default(), &serde_json::from_value(network)?).await?;
    let mut imported =
        machine("imported", &json!({"template": "small", "networks": [{"name": "a", "networkName": "imported"}]}));
    if let Some(Value::Object(metadata)) = imported.get_mut("metadata") {
        metadata.insert("finalizers".to_owned(), json!([FINALIZER_MACHINE]));
    }
    test.create_json(&imported).await?;
    test.wait_until_running("imported").await?;
    test.delete_machine("imported").await?;
    let left = networks.get("imported").await?;
    ensure!(
        left.finalizers() == ["example.com/other"],
        "the operator removes its own finalizer only: {:?}",
        left.finalizers()
    );
    Ok(())
}

async fn a_machine_takes_at_most_8_writes_and_no_reads(labs: Arc<SharedLabs>) -> Result<()> {
    let mut test = Box::pin(MachineTest::start(&labs, "budget")).await?;
    test.wait_until_idle().await?;
    let before = test.operator_requests()?.len();
    let spec = json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}});
    test.create_json(&machine("cheap", &spec)).await?;
    test.wait_until_running("cheap").await?;
    test.wait_until_idle().await?;
    let requests = test.operator_requests()?.split_off(before);
    let (writes, reads): (Vec<_>, Vec<_>) = requests.iter().partition(|record| record.is_write());
    let shown: Vec<String> = requests
        .iter()
        .map(|record| format!("{} {}/{} {:?}", record.verb, record.resource, record.subresource, record.code))
        .collect();
    ensure!(writes.len() <= 8 && reads.is_empty(), "{} writes and {} reads: {shown:#?}", writes.len(), reads.len());

    let before = test.operator_requests()?.len();
    // The assertion is that an idle operator sends nothing for five seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let while_idle = test.operator_requests()?.len() - before;
    ensure!(while_idle == 0, "{while_idle} requests of an idle operator");
    test.restart_operator().await?;
    // The assertion is that a restarted operator writes nothing for three seconds.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let writes = test.writes_since(before)?.len();
    ensure!(writes == 0, "{writes} writes after a restart");

    let before = test.operator_requests()?.len();
    test.delete_machine("cheap").await?;
    let writes = test.writes_since(before)?.len();
    ensure!(writes <= 4, "{writes} writes for a deletion");
    Ok(())
}

async fn the_plan_command_shows_changes_and_writes_nothing(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "plan-command")).await?;
    let spec = json!({"template": "small"});
    let (success, text) = test.run_plan_command(&machine("planned", &spec), &[]).await?;
    ensure!(success && text.contains("+ create  VirtualMachine plan-command/planned"), "a new Machine: {text}");
    let (success, text) = test.run_plan_command(&machine("planned", &json!({"template": "none"})), &[]).await?;
    ensure!(!success && text.contains("TemplateNotFound"), "an unknown template: {text}");
    test.create_json(&machine("planned", &spec)).await?;
    test.wait_until_running("planned").await?;
    let (success, same) = test.run_plan_command(&machine("planned", &spec), &[]).await?;
    ensure!(success && same.contains("nothing to write") && same.contains("→ phase Running, Ready: "), "{same}");
    let version = test.vms().get("planned").await?.metadata.generation;
    let edited = json!({"template": "small", "resources": {"cpu": {"cores": 4}}, "powerState": "Stopped"});
    let (_, text) = test.run_plan_command(&machine("planned", &edited), &[]).await?;
    for part in [
        "~ update  VirtualMachine plan-command/planned",
        "spec.template.spec.domain.cpu.cores: 1 → 4 (at restart)",
        "(live)",
    ] {
        ensure!(text.contains(part), "{part} is missing in {text}");
    }
    ensure!(test.vms().get("planned").await?.metadata.generation == version, "the plan command changed the VM");
    Ok(())
}
