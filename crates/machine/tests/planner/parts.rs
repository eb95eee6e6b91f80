//! A problem of one part of a Machine does not stop the other parts.

use vitivirt_api::{
    Failure,
    machine::{CloudInit, Cpu, Disk, MachineSpec, Network, Resources, SecretKeyRef, condition_type as type_},
    reason,
};
use vitivirt_machine::{
    SecretBytes,
    observed::{LauncherProblem, LauncherView, SourceView},
};

use crate::simulated_cluster::{SimulatedCluster, running};

fn small_spec() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

/// A Machine on a network, with user data from a Secret.
fn spec() -> MachineSpec {
    let network = Network { name: "eth0".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let secret_ref = Some(SecretKeyRef { name: "s".to_owned(), key: None });
    MachineSpec {
        networks: vec![network],
        cloud_init: Some(CloudInit { secret_ref, ..CloudInit::default() }),
        ..small_spec()
    }
}

fn cluster() -> SimulatedCluster {
    let mut cluster = SimulatedCluster::new(spec()).with_network("prod");
    cluster.observed.source = SourceView::Read(SecretBytes(b"#cloud-config".to_vec()));
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.reconcile_until_up_to_date();
    cluster
}

/// Stops the machine, gives it four cores and retains its disk.
fn edited(mut spec: MachineSpec) -> MachineSpec {
    let cpu = Cpu { cores: Some(4), ..Cpu::default() };
    spec.power_state = Some("Stopped".to_owned());
    spec.resources = Some(Resources { cpu: Some(cpu), memory: None });
    spec.disks.push(Disk { name: "root".to_owned(), on_delete: Some("Retain".to_owned()), ..Disk::default() });
    spec
}

#[test]
fn power_size_labels_and_retention_follow_the_spec_beside_every_problem() {
    type Problem = fn(&mut SimulatedCluster, &mut MachineSpec);
    let cases: [(&str, &str, Problem); 7] = [
        ("SecretNotFound", "missing Secret", |cluster, _| cluster.observed.source = SourceView::SecretMissing),
        ("SecretNotFound", "unreadable Secret", |cluster, _| {
            cluster.observed.source = SourceView::Failed("no answer".to_owned());
        }),
        ("NetworkConfigurationNotFound", "missing network", |cluster, _| cluster.observed.networks.clear()),
        ("MultusNotInstalled", "no Multus", |cluster, _| cluster.observed.installed.multus = false),
        ("StorageClassNotFound", "new disk", |_, spec| {
            let (size, class) = (Some("1Gi".to_owned()), Some("gold".to_owned()));
            spec.disks.push(Disk { name: "data".to_owned(), size, storage_class: class, ..Disk::default() });
        }),
        ("MacAddressInUse", "address of another Machine", |cluster, spec| {
            spec.networks[0].mac_address = Some("52:54:00:00:00:01".to_owned());
            let used = ("prod".to_owned(), "52:54:00:00:00:01".to_owned());
            cluster.observed.macs_in_use.insert(used, "other".to_owned());
        }),
        ("NameTaken", "Secret of another owner", |cluster, _| {
            cluster.observed.secret.as_mut().unwrap().controller_uid = Some("other".to_owned());
            cluster.observed.secret.as_mut().unwrap().labels.clear();
        }),
    ];
    for (reason, case, spoil) in cases {
        let mut cluster = cluster();
        let devices = |cluster: &SimulatedCluster| {
            let spec = &cluster.observed.vm.as_ref().unwrap().spec["template"]["spec"];
            (spec["volumes"].clone(), spec["networks"].clone(), spec["domain"]["devices"]["interfaces"].clone())
        };
        let before = devices(&cluster);
        let mut spec = edited(spec());
        spoil(&mut cluster, &mut spec);
        cluster.edit(spec);
        cluster.observed.machine.metadata.labels =
            Some([("cluster.vitistack.io/cluster-name".to_owned(), "blue".to_owned())].into());
        cluster.reconcile_until_up_to_date();
        let vm = cluster.observed.vm.as_ref().unwrap();
        assert_eq!(vm.spec["runStrategy"], "Halted", "{case}");
        assert_eq!(vm.spec["template"]["spec"]["domain"]["cpu"]["cores"], 4, "{case}");
        assert_eq!(vm.labels["cluster.vitistack.io/cluster-name"], "blue", "{case}");
        assert_eq!(cluster.observed.pvcs["web-root"].labels["vitistack.io/on-delete"], "Retain", "{case}");
        assert_eq!(devices(&cluster), before, "{case}: the devices stay");
        assert_eq!(cluster.condition(type_::READY).1, reason, "{case}");
        assert_eq!(cluster.status().phase.unwrap().to_string(), "Running", "{case}: the guest still runs");
        cluster.observed.vmi = None;
        cluster.reconcile_until_up_to_date();
        assert_eq!(cluster.status().phase.unwrap().to_string(), "Stopped", "{case}");
    }
}

#[test]
fn an_invalid_spec_can_stop_its_machine() {
    let mut cluster = running(small_spec());
    cluster.edit(MachineSpec {
        template: Some("huge".to_owned()),
        power_state: Some("Stopped".to_owned()),
        ..MachineSpec::default()
    });
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec["runStrategy"], "Halted");
    assert_eq!(cluster.condition(type_::READY).1, "TemplateNotFound");
    assert_eq!(cluster.status().phase.unwrap().to_string(), "Running", "until the guest has stopped");
}

#[test]
fn a_network_that_is_being_deleted_stops_only_new_machines() {
    let mut cluster = cluster();
    cluster.observed.networks.get_mut("prod").unwrap().deleting = true;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.condition(type_::READY).1, "Running");
    assert!(cluster.condition(type_::NETWORK_READY).2.contains("prod is being deleted"));
    let mut new = SimulatedCluster::new(MachineSpec { cloud_init: None, ..spec() }).with_network("prod");
    new.observed.networks.get_mut("prod").unwrap().deleting = true;
    new.reconcile_until_up_to_date();
    assert_eq!(new.condition(type_::READY).1, "NetworkConfigurationNotFound");
    assert!(new.observed.vm.is_none());
}

#[test]
fn a_network_attachment_of_another_owner_is_not_ready() {
    let mut cluster = cluster();
    cluster.observed.network_attachments.get_mut("prod").unwrap().controller_uid = Some("other".to_owned());
    cluster.reconcile_with_failure(&Failure::invalid(reason::NAME_TAKEN, "already exists"));
    assert_eq!(cluster.condition(type_::NETWORK_READY).0, "False");
}

/// The PVC of a new disk may be refused, for example by a quota.
#[test]
fn a_change_that_needs_no_new_object_does_not_wait_for_one() {
    let mut cluster = running(small_spec());
    let mut spec = edited(small_spec());
    spec.disks.push(Disk { name: "data".to_owned(), size: Some("1Gi".to_owned()), ..Disk::default() });
    cluster.edit(spec);
    let plan = cluster.plan();
    let vm_steps: Vec<bool> = plan
        .steps
        .iter()
        .filter(|step| step.writes.iter().any(|write| write.target().resource.kind == "VirtualMachine"))
        .map(|step| step.independent)
        .collect();
    assert_eq!(vm_steps, [true, false], "power and CPU, then the new disk");
    cluster.reconcile_until_up_to_date();
    let volumes = &cluster.observed.vm.as_ref().unwrap().spec["template"]["spec"]["volumes"];
    assert_eq!(volumes.as_array().unwrap().len(), 2);
}

#[test]
fn a_source_secret_that_is_gone_does_not_prevent_a_new_vm() {
    let mut cluster = cluster();
    cluster.observed.source = SourceView::SecretMissing;
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    cluster.reconcile();
    assert!(cluster.observed.vm.is_some(), "the cloud-init Secret still has the user data");
}

#[test]
fn a_guest_that_is_not_ready_makes_its_machine_not_ready() {
    let mut cluster = running(small_spec());
    cluster.observed.vmi.as_mut().unwrap().not_ready = Some("node lost".to_owned());
    cluster.reconcile_until_up_to_date();
    let (is, reason, message) = cluster.condition(type_::READY);
    assert_eq!((is.as_str(), reason.as_str()), ("False", "GuestNotReady"));
    assert!(message.contains("node lost"), "{message}");
    assert_eq!(cluster.status().phase.unwrap().to_string(), "Running");
}

#[test]
fn the_cause_of_a_pod_that_does_not_start_is_reported() {
    let mut cluster = SimulatedCluster::new(small_spec());
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Scheduling");
    let message = "Multi-Attach error for volume \"pvc-1\"".to_owned();
    cluster.observed.launcher = LauncherView::Unknown;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.condition(type_::READY).1, "VMCreated", "no cause is known yet");
    let problem = LauncherProblem { reason: "FailedAttachVolume".to_owned(), message };
    cluster.observed.launcher = LauncherView::Problem(problem);
    cluster.reconcile_until_up_to_date();
    let (_, reason, message) = cluster.condition(type_::READY);
    assert!(reason == "PodNotStarted" && message.contains("another node"), "{reason}: {message}");
    // The operator reads a few pods at a time.
    let before = cluster.status();
    cluster.observed.launcher = LauncherView::Unknown;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.status(), before);
    cluster.observed.launcher = LauncherView::NoProblem;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.condition(type_::READY).1, "VMCreated");
    cluster.start_guest("Running");
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.condition(type_::READY).1, "Running");
}

#[test]
fn a_label_that_is_removed_from_the_machine_is_removed_from_its_objects() {
    let mut cluster = cluster();
    let label = "cluster.vitistack.io/cluster-name".to_owned();
    cluster.observed.machine.metadata.labels = Some([(label.clone(), "blue".to_owned())].into());
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].labels[&label], "blue");
    cluster.observed.machine.metadata.labels = None;
    cluster.reconcile_until_up_to_date();
    assert!(!cluster.observed.pvcs["web-root"].labels.contains_key(&label));
    assert!(!cluster.observed.secret.as_ref().unwrap().labels.contains_key(&label));
    let vm = cluster.observed.vm.as_ref().unwrap();
    assert!(!vm.labels.contains_key(&label) && !vm.spec.to_string().contains(&label));
}
