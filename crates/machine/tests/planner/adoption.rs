//! Objects of an earlier Machine, and objects that a user created: taken over by consent only.

use vitivirt_api::machine::{Disk, MachineSpec, Network, condition_type as type_};
use vitivirt_machine::resolve::resolve;

use crate::simulated_cluster::{SimulatedCluster, UID, running};

const EARLIER: &str = "11111111-52a5-4a7c-9d38-2f1f0f6f3d11";

fn spec() -> MachineSpec {
    let network = Network { name: "eth0".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let user_data = Some("#cloud-config".to_owned());
    MachineSpec {
        template: Some("small".to_owned()),
        networks: vec![network],
        cloud_init: Some(vitivirt_api::machine::CloudInit { user_data, ..Default::default() }),
        ..MachineSpec::default()
    }
}

/// Everything of an earlier Machine, without owner references, as a restore from a backup leaves it.
fn restored() -> SimulatedCluster {
    let mut earlier = SimulatedCluster::new(spec()).with_network("prod");
    earlier.observed.machine.metadata.uid = Some(EARLIER.to_owned());
    earlier.reconcile_until_up_to_date();
    earlier.bind_pvcs();
    let mut cluster = SimulatedCluster::new(spec()).with_network("prod");
    cluster.observed.pvcs = earlier.observed.pvcs;
    cluster.observed.vm = earlier.observed.vm;
    cluster.observed.secret = earlier.observed.secret;
    let vm = cluster.observed.vm.as_mut().unwrap();
    (vm.controller_uid, vm.has_owners) = (None, false);
    let secret = cluster.observed.secret.as_mut().unwrap();
    (secret.controller_uid, secret.has_owners) = (None, false);
    cluster
}

fn command(cluster: &SimulatedCluster) -> Option<String> {
    let message = cluster.condition(type_::READY).2;
    let start = message.find("vitistack.io/adopt=")? + "vitistack.io/adopt=".len();
    message[start..].split(' ').next().map(str::to_owned)
}

#[test]
fn a_restored_machine_continues_with_its_objects_by_consent() {
    let mut cluster = restored();
    let (vm, pvc) = (cluster.observed.vm.clone().unwrap(), cluster.observed.pvcs["web-root"].clone());
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "nothing without consent: {plan:?}");
    assert_eq!(cluster.condition(type_::READY).1, "NameTaken");
    let value = command(&cluster).unwrap();
    assert_eq!(value, EARLIER);
    cluster.annotate("vitistack.io/adopt", &value);
    cluster.reconcile_until_up_to_date();
    let now = cluster.observed.vm.clone().unwrap();
    assert_eq!((now.uid, now.spec), (vm.uid, vm.spec), "the same VM, MAC address and guest UUID");
    assert_eq!(now.controller_uid.as_deref(), Some(UID));
    let adopted = &cluster.observed.pvcs["web-root"];
    assert_eq!((&adopted.uid, adopted.labels["vitistack.io/machine-uid"].as_str()), (&pvc.uid, UID));
    assert_eq!(cluster.observed.secret.as_ref().unwrap().controller_uid.as_deref(), Some(UID));
}

#[test]
fn a_vm_that_is_created_again_after_a_restore_has_the_same_mac_and_uuid() {
    let mut cluster = restored();
    let vm = cluster.observed.vm.take().unwrap();
    cluster.observed.secret = None;
    cluster.annotate("vitistack.io/adopt", EARLIER);
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec, vm.spec);
}

/// The first UID of the list stays the identity.
#[test]
fn a_second_restore_keeps_the_identity_of_the_first_machine() {
    let second = "22222222-52a5-4a7c-9d38-2f1f0f6f3d11";
    let mut cluster = restored();
    cluster.observed.vm = None;
    cluster
        .observed
        .pvcs
        .get_mut("web-root")
        .unwrap()
        .labels
        .insert("vitistack.io/machine-uid".to_owned(), second.to_owned());
    cluster.annotate("vitistack.io/adopt", EARLIER);
    let mac = resolve(&cluster.observed.machine).unwrap().networks[0].mac.clone();
    cluster.reconcile();
    let value = command(&cluster).unwrap();
    assert_eq!(value, format!("{EARLIER},{second}"));
    cluster.annotate("vitistack.io/adopt", &value);
    cluster.reconcile_until_up_to_date();
    assert_eq!(resolve(&cluster.observed.machine).unwrap().networks[0].mac, mac);
    assert!(cluster.observed.vm.is_some());
}

/// The guest would get another MAC address and UUID at its next start.
#[test]
fn a_machine_that_has_a_vm_adopts_a_retained_disk_without_the_identity_of_its_earlier_machine() {
    let mut cluster = SimulatedCluster::new(spec()).with_network("prod");
    cluster.reconcile_until_up_to_date();
    cluster.bind_pvcs();
    cluster.start_guest("Running");
    cluster.reconcile_until_up_to_date();
    let mut retained = cluster.observed.pvcs["web-root"].clone();
    retained.labels.insert("vitistack.io/machine-uid".to_owned(), EARLIER.to_owned());
    retained.identity = Some(EARLIER.to_owned());
    retained.volume = Some("retained".to_owned());
    cluster.observed.pvcs.insert("web-data".to_owned(), retained);
    let data = Disk { name: "data".to_owned(), size: Some("20Gi".to_owned()), ..Disk::default() };
    let root = Disk { name: "root".to_owned(), ..data.clone() };
    cluster.edit(MachineSpec { disks: vec![root, data], ..spec() });
    cluster.reconcile();
    let message = cluster.condition(type_::READY).2;
    assert_eq!(command(&cluster).as_deref(), Some("pvc/web-data"), "{message}");
    assert!(!message.contains("adopt-by"), "the label is its consent: {message}");
    let mac = resolve(&cluster.observed.machine).unwrap().networks[0].mac.clone();
    cluster.annotate("vitistack.io/adopt", "pvc/web-data");
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-data"].labels["vitistack.io/machine-uid"], UID);
    assert_eq!(cluster.status().disks.len(), 2);
    assert_eq!(resolve(&cluster.observed.machine).unwrap().networks[0].mac, mac);
}

#[test]
fn a_pvc_that_was_there_before_is_adopted_by_its_name() {
    let mut cluster = running(MachineSpec { cloud_init: None, ..spec() });
    cluster.observed.vm = None;
    let pvc = cluster.observed.pvcs.get_mut("web-root").unwrap();
    pvc.labels.clear();
    pvc.identity = None;
    cluster.observed.machine.status = None;
    cluster.reconcile();
    assert_eq!(command(&cluster).as_deref(), Some("pvc/web-root"));
    assert!(cluster.observed.vm.is_none());
    cluster.annotate("vitistack.io/adopt", "pvc/web-root");
    cluster.reconcile();
    assert!(cluster.observed.pvcs["web-root"].labels.is_empty(), "the PVC does not consent");
    let message = cluster.condition(type_::READY).2;
    assert!(message.contains("`kubectl -n shop annotate pvc web-root vitistack.io/adopt-by=web`"), "{message}");
    cluster.observed.pvcs.get_mut("web-root").unwrap().adopt_by = Some("web".to_owned());
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].labels["vitistack.io/machine-uid"], UID);
    assert_eq!(resolve(&cluster.observed.machine).unwrap().id.identity(), UID, "a PVC is no identity");
}

/// The admission policy refuses a change of its spec before it has the labels of the Machine.
#[test]
fn an_adopted_pvc_that_is_too_small_is_labelled_first_and_then_expanded() {
    let mut cluster = running(MachineSpec { cloud_init: None, ..spec() });
    cluster.observed.vm = None;
    let pvc = cluster.observed.pvcs.get_mut("web-root").unwrap();
    let size = std::mem::replace(&mut pvc.requested, "1Gi".to_owned());
    pvc.labels.clear();
    pvc.identity = None;
    pvc.adopt_by = Some("web".to_owned());
    pvc.storage_class = Some("fast-ssd".to_owned());
    cluster.observed.machine.status = None;
    cluster.annotate("vitistack.io/adopt", "pvc/web-root");
    cluster.reconcile();
    let pvc = &cluster.observed.pvcs["web-root"];
    assert_eq!((pvc.labels["vitistack.io/machine-uid"].as_str(), pvc.requested.as_str()), (UID, "1Gi"));
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].requested, size);
    assert!(cluster.observed.vm.is_some());
}

#[test]
fn the_pvc_of_an_existing_machine_is_never_adopted() {
    let mut cluster = restored();
    (cluster.observed.vm, cluster.observed.secret) = (None, None);
    cluster.observed.living_owners.insert(EARLIER.to_owned());
    cluster.annotate("vitistack.io/adopt", &format!("{EARLIER},pvc/web-root"));
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    assert_eq!(cluster.condition(type_::READY).1, "NameTaken");
    assert_eq!(command(&cluster), None);
}

#[test]
fn objects_of_an_earlier_machine_that_are_being_deleted_are_waited_for() {
    let mut cluster = restored();
    cluster.observed.vm.as_mut().unwrap().deleting = true;
    cluster.observed.pvcs.get_mut("web-root").unwrap().deleting = true;
    // The garbage collector will delete it: its owner is gone.
    cluster.observed.secret.as_mut().unwrap().controller_uid = Some(EARLIER.to_owned());
    while cluster.observed.vm.is_some() || cluster.observed.secret.is_some() || !cluster.observed.pvcs.is_empty() {
        let (plan, report) = cluster.reconcile();
        assert_eq!((plan.write_count(), report.error), (0, None), "{plan:?}");
        assert_eq!(cluster.condition(type_::READY).1, "WaitingForDeletion");
        assert_eq!(cluster.status().phase.unwrap().to_string(), "Pending");
        if cluster.observed.vm.take().is_none() && cluster.observed.secret.take().is_none() {
            cluster.observed.pvcs.clear();
        }
    }
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.vm.is_some());
}

#[test]
fn an_annotation_that_is_not_a_list_of_items_is_invalid() {
    let mut cluster = SimulatedCluster::new(MachineSpec { networks: Vec::new(), cloud_init: None, ..spec() });
    cluster.annotate("vitistack.io/adopt", "everything");
    cluster.reconcile_until_up_to_date();
    let (_, reason, message) = cluster.condition(type_::READY);
    assert!(reason == "Invalid" && message.contains("\"everything\""), "{message}");
}
