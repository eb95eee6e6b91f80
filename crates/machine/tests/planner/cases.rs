//! Phase and conditions of a Machine in the known cases.

use vitivirt_api::{
    Write,
    machine::{
        CloudInit, Cpu, Disk, MachinePhase, MachineSpec, Memory, Network, Resources, SecretKeyRef,
        condition_type as type_,
    },
};
use vitivirt_machine::{SecretBytes, observed::SourceView, resolve::resolve};

use crate::simulated_cluster::{SimulatedCluster, UID};

fn template(name: &str) -> MachineSpec {
    MachineSpec { template: Some(name.to_owned()), ..MachineSpec::default() }
}

fn on_network(name: &str) -> MachineSpec {
    let network = Network { name: "eth0".to_owned(), network_name: name.to_owned(), ..Network::default() };
    MachineSpec { networks: vec![network], ..template("small") }
}

fn expect(cluster: &SimulatedCluster, phase: &str, ready: &str, reason: &str) {
    let status = cluster.status();
    let (is, why, message) = cluster.condition(type_::READY);
    let is_phase = status.phase.map(MachinePhase::as_str);
    assert_eq!((is_phase, is.as_str(), why.as_str()), (Some(phase), ready, reason), "{message}");
    assert_eq!(status.diagnosis.is_some(), ready == "False", "diagnosis exactly if not ready");
}

#[test]
fn a_new_machine_becomes_ready() {
    let mut cluster = SimulatedCluster::new(template("medium"));
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 3, "finalizer, PVC and VM: {plan:?}");
    expect(&cluster, "Creating", "False", "VMCreated");
    cluster.reconcile();
    expect(&cluster, "Creating", "False", "PVCPending");
    cluster.bind_pvcs();
    cluster.start_guest("Scheduling");
    cluster.reconcile();
    expect(&cluster, "Creating", "False", "VMCreated");
    cluster.start_guest("Running");
    cluster.reconcile();
    expect(&cluster, "Running", "True", "Running");
    let status = cluster.status();
    assert_eq!((status.ip_addresses, status.node_name.as_deref()), (vec!["10.1.2.3".to_owned()], Some("node-1")));
    assert_eq!(cluster.condition(type_::STORAGE_READY).1, "PVCBound");
    assert_eq!(cluster.condition(type_::NETWORK_READY).1, "NetworkConfigured");
}

#[test]
fn a_running_machine_keeps_running_when_its_source_secret_is_deleted() {
    let cloud_init =
        CloudInit { secret_ref: Some(SecretKeyRef { name: "s".to_owned(), key: None }), ..CloudInit::default() };
    let mut cluster = SimulatedCluster::new(MachineSpec { cloud_init: Some(cloud_init), ..template("small") });
    cluster.observed.source = SourceView::Read(SecretBytes(b"#cloud-config".to_vec()));
    cluster.reconcile();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.reconcile();
    expect(&cluster, "Running", "True", "Running");
    cluster.observed.source = SourceView::SecretMissing;
    cluster.reconcile();
    expect(&cluster, "Running", "False", "SecretNotFound");
    assert!(cluster.status().diagnosis.unwrap().contains("the machine keeps running"));
}

#[test]
fn an_unknown_template_is_reported_with_the_known_ones_until_it_is_corrected() {
    let mut cluster = SimulatedCluster::new(template("huge"));
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0);
    expect(&cluster, "Failed", "False", "TemplateNotFound");
    assert!(cluster.status().diagnosis.unwrap().contains("small, medium, large"));
    cluster.edit(template("small"));
    cluster.reconcile();
    expect(&cluster, "Creating", "False", "VMCreated");
}

#[test]
fn a_missing_reference_is_reported_and_nothing_is_created() {
    let mut no_class = SimulatedCluster::new(MachineSpec {
        disks: vec![Disk {
            name: "data".to_owned(),
            size: Some("1Gi".to_owned()),
            storage_class: Some("gold".to_owned()),
            ..Disk::default()
        }],
        ..template("small")
    });
    let mut no_default = SimulatedCluster::new(template("small"));
    no_default.observed.storage_classes.clear();
    let no_network = SimulatedCluster::new(on_network("prod"));
    let mut no_multus = SimulatedCluster::new(on_network("prod")).with_network("prod");
    no_multus.observed.installed.multus = false;
    let mut no_kubevirt = SimulatedCluster::new(template("small"));
    no_kubevirt.observed.installed.kubevirt = false;
    let mut no_secret = SimulatedCluster::new(MachineSpec {
        cloud_init: Some(CloudInit {
            secret_ref: Some(SecretKeyRef { name: "s".to_owned(), key: None }),
            ..CloudInit::default()
        }),
        ..template("small")
    });
    no_secret.observed.source = SourceView::SecretMissing;
    let mut no_permission = SimulatedCluster::new(no_secret.observed.machine.spec.clone());
    no_permission.observed.source = SourceView::Forbidden("the operator may not get secrets".to_owned());
    for (cluster, phase, reason, part) in [
        (&mut no_class, "Pending", "StorageClassNotFound", "gold"),
        (&mut no_default, "Pending", "StorageClassNotFound", "default"),
        (&mut { no_network }, "Pending", "NetworkConfigurationNotFound", "prod"),
        (&mut no_multus, "Pending", "MultusNotInstalled", "Multus"),
        (&mut no_kubevirt, "Creating", "KubeVirtApiError", "install KubeVirt"),
        (&mut no_secret, "Pending", "SecretNotFound", "Secret s not found"),
        (&mut no_permission, "Pending", "PermissionMissing", "may not get secrets; grant"),
    ] {
        let (plan, _) = cluster.reconcile();
        assert_eq!(plan.write_count(), 0, "{reason}: {plan:?}");
        expect(cluster, phase, "False", reason);
        let diagnosis = cluster.status().diagnosis.unwrap();
        assert!(diagnosis.contains(part), "{diagnosis}");
    }
}

#[test]
fn fields_without_override_keep_the_values_of_the_template() {
    let spec = MachineSpec {
        resources: Some(Resources {
            cpu: Some(Cpu { cores: Some(4), ..Cpu::default() }),
            memory: Some(Memory { size: Some("8Gi".to_owned()) }),
        }),
        ..template("medium")
    };
    let resolved = resolve(&SimulatedCluster::new(spec).observed.machine).unwrap();
    assert_eq!((resolved.cpu.cores, resolved.cpu.threads, resolved.cpu.sockets), (4, 1, 1));
    assert_eq!(resolved.memory.to_string(), "8Gi");
    assert_eq!(resolved.disks.len(), 1, "the template's root disk stays");
}

#[test]
fn a_stopped_machine_is_ready() {
    let mut cluster =
        SimulatedCluster::new(MachineSpec { power_state: Some("Stopped".to_owned()), ..template("small") });
    cluster.reconcile_until_up_to_date();
    expect(&cluster, "Stopped", "True", "Stopped");
}

#[test]
fn a_vmi_that_never_ran_is_deleted_after_an_edit() {
    let mut cluster = SimulatedCluster::new(template("large"));
    cluster.reconcile_until_up_to_date();
    cluster.start_guest("Scheduling");
    if let Some(vmi) = &mut cluster.observed.vmi {
        vmi.unschedulable = Some("0/1 nodes are available: 1 Insufficient memory".to_owned());
    }
    cluster.reconcile();
    expect(&cluster, "Creating", "False", "InsufficientResources");
    cluster.edit(template("small"));
    cluster.reconcile();
    cluster.reconcile();
    assert!(cluster.observed.vmi.is_none(), "the VMI is deleted, so that KubeVirt creates a new one");
}

#[test]
fn a_vmi_that_only_a_cache_shows_is_not_deleted() {
    let mut cluster = SimulatedCluster::new(template("large"));
    cluster.reconcile_until_up_to_date();
    cluster.start_guest("Scheduling");
    cluster.edit(template("small"));
    cluster.observed.vmi.as_mut().unwrap().live_version = None;
    cluster.reconcile();
    assert!(cluster.assessed().replaces_unconfirmed_vmi());
    cluster.reconcile();
    assert!(cluster.observed.vmi.is_some(), "the guest may run by now");
}

#[test]
fn a_running_vmi_is_never_deleted_by_an_edit() {
    let mut cluster = SimulatedCluster::new(template("large"));
    cluster.reconcile_until_up_to_date();
    cluster.start_guest("Running");
    cluster.edit(template("small"));
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.vmi.is_some());
}

#[test]
fn a_disk_grows_and_never_shrinks() {
    let disk = |size: &str| MachineSpec {
        disks: vec![Disk { name: "data".to_owned(), size: Some(size.to_owned()), ..Disk::default() }],
        ..template("small")
    };
    let mut cluster = SimulatedCluster::new(disk("10Gi"));
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.edit(disk("20Gi"));
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-data"].requested, "20Gi");
    cluster.edit(disk("5Gi"));
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-data"].requested, "20Gi");
    assert!(cluster.condition(type_::READY).2.contains("cannot shrink"));
}

#[test]
fn a_vm_of_another_owner_is_not_changed() {
    let mut cluster = SimulatedCluster::new(template("small"));
    cluster.reconcile_until_up_to_date();
    let vm = cluster.observed.vm.as_mut().unwrap();
    vm.controller_uid = Some("other".to_owned());
    vm.labels.clear();
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    expect(&cluster, "Failed", "False", "NameTaken");
    cluster.delete_machine();
    cluster.reconcile();
    assert!(
        cluster.machine_deleted && !cluster.observed.vm.as_ref().unwrap().deleting,
        "the VM of the other owner stays"
    );
}

#[test]
fn drift_of_the_vm_and_the_network_attachment_is_reverted() {
    let mut cluster = SimulatedCluster::new(on_network("prod")).with_network("prod");
    cluster.reconcile_until_up_to_date();
    let good = cluster.observed.vm.clone().unwrap().spec;
    cluster.observed.vm.as_mut().unwrap().spec["runStrategy"] = "Halted".into();
    cluster.observed.vm.as_mut().unwrap().spec["template"]["spec"]["nodeSelector"] = serde_json::json!({"x": "y"});
    cluster.observed.vm.as_mut().unwrap().labels.remove("vitistack.io/machine");
    cluster.observed.network_attachments.get_mut("prod").unwrap().config = "{}".to_owned();
    cluster.observed.network_attachments.get_mut("prod").unwrap().labels.clear();
    cluster.reconcile_until_up_to_date();
    let vm = cluster.observed.vm.clone().unwrap();
    assert_eq!(vm.spec, good);
    assert_eq!(vm.labels["vitistack.io/machine"], "web");
    assert!(cluster.observed.network_attachments["prod"].config.contains("br1"));
    assert_eq!(cluster.observed.network_attachments["prod"].labels["vitistack.io/managed-by"], "kubevirt-operator");
}

#[test]
fn the_last_machine_of_a_network_removes_its_finalizer() {
    for (other_users, protected) in [(false, false), (true, true)] {
        let mut cluster = SimulatedCluster::new(on_network("prod")).with_network("prod");
        cluster.reconcile_until_up_to_date();
        assert!(cluster.observed.networks["prod"].finalizer_index.is_some());
        cluster.observed.networks.get_mut("prod").unwrap().other_users = other_users;
        cluster.delete_machine();
        cluster.reconcile();
        cluster.finish_shutdown();
        cluster.reconcile();
        assert!(cluster.machine_deleted);
        assert_eq!(cluster.observed.networks["prod"].finalizer_index.is_some(), protected);
    }
}

#[test]
fn a_change_keeps_the_defaults_of_kubevirt() {
    let live = serde_json::json!({
        "runStrategy": "Halted",
        "template": {"metadata": {"annotations": {"kubevirt.io/pci-topology-version": "v3"}}, "spec": {"architecture": "amd64", "domain": {"resources": {}, "features": {"acpi": {}}}}},
    });
    let domain = serde_json::json!({"features": {}});
    let bare = serde_json::json!({"runStrategy": "Halted", "template": {"metadata": {}, "spec": {"domain": domain}}});
    assert_eq!(vitivirt_machine::render::vm::without_defaults(live), bare);
    let desired =
        serde_json::json!({"runStrategy": "Always", "template": {"metadata": {}, "spec": {"domain": domain}}});
    let paths: Vec<String> =
        vitivirt_machine::render::vm::changes(&bare, &desired).into_iter().map(|operation| operation.path).collect();
    assert_eq!(paths, ["/spec/runStrategy"]);
}

#[test]
fn a_secret_is_written_again_after_an_edit_or_a_foreign_change() {
    let cloud_init = |text: &str| MachineSpec {
        cloud_init: Some(CloudInit { user_data: Some(text.to_owned()), ..CloudInit::default() }),
        ..template("small")
    };
    let mut cluster = SimulatedCluster::new(cloud_init("one"));
    cluster.reconcile_until_up_to_date();
    let first = cluster.observed.secret.clone().unwrap().content;
    cluster.edit(cloud_init("canary"));
    cluster.reconcile_until_up_to_date();
    assert_ne!(cluster.observed.secret.clone().unwrap().content, first);
    cluster.observed.secret.as_mut().unwrap().tampered = true;
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 1, "{plan:?}");
    assert!(!format!("{plan:?} {:?}", cluster.observed.machine).contains("canary"), "user data must never be printed");
    // Another client removed the annotation: once all annotations, once only the operator's.
    for annotated in [false, true] {
        let secret = cluster.observed.secret.as_mut().unwrap();
        (secret.content, secret.annotated) = (None, annotated);
        assert_eq!(cluster.reconcile().0.write_count(), 1);
        assert!(cluster.observed.secret.as_ref().unwrap().content.is_some());
    }
}

#[test]
fn a_secret_whose_source_was_not_read_keeps_its_data() {
    let mut cluster = SimulatedCluster::new(MachineSpec {
        cloud_init: Some(CloudInit {
            secret_ref: Some(SecretKeyRef { name: "s".to_owned(), key: None }),
            ..CloudInit::default()
        }),
        ..template("small")
    });
    cluster.observed.source = SourceView::Read(SecretBytes(b"#cloud-config".to_vec()));
    cluster.reconcile_until_up_to_date();
    let content = cluster.observed.secret.clone().unwrap().content.unwrap();
    cluster.observed.source = SourceView::Unchanged(content);
    cluster.observed.secret.as_mut().unwrap().labels.remove("vitistack.io/machine");
    let plan = cluster.plan();
    let paths: Vec<&str> = plan
        .steps
        .iter()
        .flat_map(|step| &step.writes)
        .flat_map(|write| match write {
            Write::Patch { operations, .. } => operations.iter().map(|operation| operation.path.as_str()).collect(),
            _ => Vec::new(),
        })
        .collect();
    assert_eq!(paths, ["/metadata/labels/vitistack.io~1machine"]);
}

#[test]
fn a_vm_that_is_created_again_has_the_same_firmware_uuid_and_mac() {
    let mut cluster = SimulatedCluster::new(template("small"));
    cluster.reconcile_until_up_to_date();
    let first = cluster.observed.vm.clone().unwrap().spec;
    cluster.observed.vm = None;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.clone().unwrap().spec, first);
    assert_eq!(first.pointer("/template/spec/domain/firmware/uuid").unwrap(), UID);
}

#[test]
fn a_stop_by_a_user_is_reverted_with_an_event() {
    let mut cluster = SimulatedCluster::new(template("small"));
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.reconcile_until_up_to_date();
    cluster.observed.vm.as_mut().unwrap().spec["runStrategy"] = "Halted".into();
    let (_, report) = cluster.reconcile();
    let reasons: Vec<&str> = report.events.iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["PowerStateRestored"]);
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec["runStrategy"], "Always");
    cluster.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..template("small") });
    let (_, report) = cluster.reconcile();
    assert!(
        report.events.iter().all(|event| event.reason != "PowerStateRestored"),
        "an edit of powerState is not reverted"
    );
}

/// Granting a permission triggers no reconcile.
#[test]
fn a_missing_permission_is_retried_after_a_delay() {
    let mut cluster = SimulatedCluster::new(MachineSpec {
        cloud_init: Some(CloudInit {
            secret_ref: Some(SecretKeyRef { name: "s".to_owned(), key: None }),
            ..CloudInit::default()
        }),
        ..template("small")
    });
    cluster.observed.source = SourceView::Forbidden("no".to_owned());
    let (_, report) = cluster.reconcile();
    assert!(report.requeue_after.is_some());
    cluster.observed.source = SourceView::Read(SecretBytes(b"#cloud-config".to_vec()));
    let (plan, report) = cluster.reconcile();
    assert_eq!((plan.write_count(), report.requeue_after), (4, None), "{plan:?}");
}
