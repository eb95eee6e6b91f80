//! Data: which PVCs survive, and which are replaced.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vitivirt_api::{
    Failure,
    machine::{ANNOTATION_REPLACE, Disk, DiskSource, MachineSpec, PvcPhase, UrlSource, condition_type as type_},
    reason,
};
use vitivirt_machine::{
    observed::{Deletion, ImportSourceView, PvcView, SourceView, VmOwner},
    view::machine_tree,
};

use crate::simulated_cluster::{SimulatedCluster, UID, running};

pub(crate) const OTHER_UID: &str = "11111111-52a5-4a7c-9d38-2f1f0f6f3d11";

pub(crate) fn small_spec() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

pub(crate) fn root(change: impl FnOnce(&mut Disk)) -> MachineSpec {
    let mut disk = Disk { name: "root".to_owned(), ..Disk::default() };
    change(&mut disk);
    MachineSpec { disks: vec![disk], ..small_spec() }
}

pub(crate) fn retained() -> MachineSpec {
    root(|disk| disk.on_delete = Some("Retain".to_owned()))
}

pub(crate) fn imported(url: &str) -> MachineSpec {
    let http = Some(UrlSource { url: url.to_owned() });
    root(|disk| disk.source = Some(DiskSource { http, ..DiskSource::default() }))
}

pub(crate) fn delete(cluster: &mut SimulatedCluster) {
    cluster.delete_machine();
    for _ in 0..3 {
        cluster.reconcile();
        cluster.finish_shutdown();
    }
}

/// KubeVirt restores the disk of the VM into the PVC `restore-root`.
pub(crate) fn restore(cluster: &mut SimulatedCluster) {
    let mut restored = cluster.observed.pvcs["web-root"].clone();
    restored.uid = "restored".to_owned();
    cluster.observed.pvcs.insert("restore-root".to_owned(), restored);
    use_pvc(cluster, "restore-root");
}

pub(crate) fn use_pvc(cluster: &mut SimulatedCluster, name: &str) {
    let spec = &mut cluster.observed.vm.as_mut().unwrap().spec;
    spec["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = name.into();
}

/// KubeVirt makes the VM the owner of the PVC that it restores.
#[test]
fn a_restored_pvc_loses_its_owner_when_the_restore_is_complete() {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    let owner = VmOwner { index: 0, uid: cluster.observed.vm.as_ref().unwrap().uid.clone() };
    let restored = cluster.observed.pvcs.get_mut("restore-root").unwrap();
    (restored.has_owners, restored.vm_owner) = (true, Some(owner));
    cluster.observed.vm.as_mut().unwrap().restoring = true;
    cluster.reconcile();
    assert!(cluster.observed.pvcs["restore-root"].vm_owner.is_some(), "KubeVirt still writes it");
    cluster.observed.vm.as_mut().unwrap().restoring = false;
    cluster.reconcile();
    assert!(cluster.observed.pvcs["restore-root"].vm_owner.is_none());
}

pub(crate) fn disk_in_vm(cluster: &SimulatedCluster) -> Value {
    let vm = cluster.observed.vm.as_ref().unwrap();
    vm.spec["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"].clone()
}

/// The PVC from before the restore has old data.
#[test]
fn a_new_vm_gets_the_restored_disk() {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.reconcile_until_up_to_date();
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "restore-root");

    // The restored PVC is lost too.
    cluster.observed.pvcs.remove("restore-root");
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    cluster.reconcile();
    let (status, reason, message) = cluster.condition(type_::STORAGE_READY);
    assert!(status == "False" && message.contains("restore-root"), "{reason}: {message}");
    assert!(cluster.observed.vm.is_none(), "a VM with the disk from before the restore");
    let volume = cluster.observed.machine.status.as_ref().unwrap().disks[0].volume.clone();
    cluster.observed.machine.metadata.annotations = Some([(ANNOTATION_REPLACE.to_owned(), volume)].into());
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "web-root");
}

/// A backup of a namespace has no status. The PVC itself says which disk it holds.
#[test]
fn a_machine_without_status_and_vm_finds_its_restored_disk() {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.reconcile_until_up_to_date();
    // A second restore, into another PVC.
    let mut second = cluster.observed.pvcs["restore-root"].clone();
    // The annotation was copied from a PVC with another name.
    (second.uid, second.disk) = ("second".to_owned(), None);
    cluster.observed.pvcs.insert("restore-second".to_owned(), second);
    use_pvc(&mut cluster, "restore-second");
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["restore-root"].disk, None, "two PVCs name the same disk");
    (cluster.observed.vm, cluster.observed.vmi, cluster.observed.machine.status) = (None, None, None);
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "restore-second");
}

/// The PVC of a user or of KubeVirt, to which a disk was moved by a change of the VM.
pub(crate) fn move_to_external(cluster: &mut SimulatedCluster) {
    use_pvc(cluster, "moved");
    cluster.reconcile_until_up_to_date();
}

/// What a live read of the external PVC finds.
pub(crate) fn external_pvc(cluster: &SimulatedCluster) -> PvcView {
    let own = cluster.observed.pvcs["web-root"].clone();
    PvcView { uid: "moved".to_owned(), labels: BTreeMap::new(), identity: None, annotated: false, ..own }
}

#[test]
fn a_vm_with_a_moved_disk_is_created_again_only_with_consent() {
    let mut cluster = running(small_spec());
    move_to_external(&mut cluster);
    assert!(cluster.observed.uncached_pvcs().is_empty(), "the operator reads a PVC that it does not need");
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    assert_eq!(cluster.observed.uncached_pvcs(), ["moved"]);
    let external = external_pvc(&cluster);
    cluster.observed.pvcs.insert("moved".to_owned(), external);
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.vm.is_none(), "a VM with the disk from before it was moved");
    let (_, reason, message) = cluster.condition(type_::READY);
    assert_eq!(reason, "DiskMoved");
    for command in ["vitistack.io/replace-volume=moved", "vitistack.io/adopt-by=web", "vitistack.io/adopt=pvc/moved"] {
        assert!(message.contains(command), "{command}: {message}");
    }
    let tree = format!("{:?}", machine_tree(&cluster.observed, None));
    assert!(tree.contains("moved"), "{tree}");
    let mut given_up = cluster.clone();
    given_up.annotate("vitistack.io/replace-volume", "moved");
    given_up.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&given_up), "web-root");
    assert!(given_up.observed.pvcs["moved"].labels.is_empty());

    cluster.annotate("vitistack.io/adopt", "pvc/moved");
    cluster.observed.pvcs.get_mut("moved").unwrap().adopt_by = Some("web".to_owned());
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "moved");
    let disk = &cluster.status().disks[0];
    assert!(disk.pvc == "moved" && !disk.external, "{disk:?}");
    assert_eq!(cluster.observed.pvcs["moved"].labels["vitistack.io/machine-uid"], UID);
}

/// While KubeVirt copies the data, and after it failed to, only the source has all of it.
#[test]
fn a_disk_stays_where_it_was_until_its_volume_has_migrated() {
    let mut cluster = running(small_spec());
    let sources = BTreeMap::from([("root".to_owned(), "web-root".to_owned())]);
    cluster.observed.vm.as_mut().unwrap().migration_sources = sources.clone();
    move_to_external(&mut cluster);
    assert_eq!(cluster.status().disks[0].pvc, "web-root");
    // The guest stopped during the migration.
    let mut failed = cluster.clone();
    let vm = failed.observed.vm.as_mut().unwrap();
    (vm.needs_recovery, failed.observed.vmi) = (true, None);
    failed.reconcile_until_up_to_date();
    let (_, reason, message) = failed.condition(type_::READY);
    assert!(reason == "VMFailed" && message.contains("root to PersistentVolumeClaim web-root"), "{reason}: {message}");
    (failed.observed.vm, failed.observed.vmi) = (None, None);
    failed.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&failed), "web-root");

    cluster.observed.vm.as_mut().unwrap().migration_sources.clear();
    cluster.reconcile_until_up_to_date();
    let disk = &cluster.status().disks[0];
    assert!(disk.pvc == "moved" && disk.external, "{disk:?}");
}

#[test]
fn a_disk_that_was_removed_and_added_again_has_its_restored_data() {
    let data = |name: &str| Disk { name: name.to_owned(), size: Some("1Gi".to_owned()), ..Disk::default() };
    let with_data = MachineSpec { disks: vec![data("data")], ..small_spec() };
    let mut cluster = running(with_data.clone());
    let mut restored = cluster.observed.pvcs["web-data"].clone();
    restored.uid = "restored".to_owned();
    cluster.observed.pvcs.insert("restore-data".to_owned(), restored);
    cluster.observed.vm.as_mut().unwrap().spec["template"]["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] =
        "restore-data".into();
    cluster.reconcile_until_up_to_date();
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    assert_eq!(volumes(&cluster).len(), 1);
    cluster.edit(with_data);
    cluster.reconcile_until_up_to_date();
    assert_eq!(volumes(&cluster)[1]["persistentVolumeClaim"]["claimName"], "restore-data");
}

fn volumes(cluster: &SimulatedCluster) -> &[Value] {
    cluster.observed.vm.as_ref().unwrap().spec["template"]["spec"]["volumes"].as_array().unwrap()
}

/// A PVC of a StorageClass that waits for a pod is not bound when the restore is complete.
#[test]
fn a_restored_pvc_that_is_not_bound_yet_is_neither_forgotten_nor_replaced() {
    let mut cluster = running(imported("http://images.example/a.img"));
    restore(&mut cluster);
    let restored = cluster.observed.pvcs.get_mut("restore-root").unwrap();
    (restored.phase, restored.volume) = (PvcPhase::Pending, None);
    let sources = cluster.observed.import_sources.len();
    cluster.reconcile();
    cluster.reconcile();
    assert_eq!(cluster.observed.import_sources.len(), sources, "CDI would fill the PVC");
    let recorded = &cluster.observed.machine.status.as_ref().unwrap().disks;
    assert!(recorded.iter().any(|disk| disk.pvc == "restore-root"), "{recorded:?}");
    cluster.edit(root(|disk| disk.storage_class = Some("fast-ssd".to_owned())));
    cluster.reconcile();
    assert!(!cluster.observed.pvcs["restore-root"].deleting);
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    cluster.reconcile();
    assert_eq!(disk_in_vm(&cluster), "restore-root");
}

#[test]
fn a_lost_restored_pvc_is_reported_while_its_vm_exists() {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.reconcile_until_up_to_date();
    cluster.observed.pvcs.remove("restore-root");
    cluster.reconcile();
    let (status, _, message) = cluster.condition(type_::STORAGE_READY);
    assert!(status == "False" && message.contains("restore-root"), "{message}");
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    cluster.reconcile();
    assert!(cluster.observed.vm.is_none(), "a VM with the disk from before the restore");
}

/// KubeVirt copies the labels of a PVC to those that it restores for another VM, such as a clone.
#[test]
fn a_pvc_that_kubevirt_restored_for_another_vm_is_not_touched() {
    let mut cluster = running(small_spec());
    let copies =
        [("restore-copy", true), ("web-copy-root", true), ("restore-unowned", false), ("web-clone-root", false)];
    for (name, has_owner) in copies {
        let mut copy = cluster.observed.pvcs["web-root"].clone();
        copy.uid = name.to_owned();
        copy.has_owners = has_owner;
        copy.vm_owner = has_owner.then(|| VmOwner { index: 0, uid: "another VM".to_owned() });
        copy.labels.insert("restore.kubevirt.io/source-vm-name".to_owned(), "web".to_owned());
        cluster.observed.pvcs.insert(name.to_owned(), copy);
    }
    cluster.reconcile();
    assert!(cluster.observed.pvcs["restore-copy"].vm_owner.is_some(), "the PVC of another VM lost its owner");
    delete(&mut cluster);
    assert!(cluster.machine_deleted);
    let left: Vec<&str> = cluster.observed.pvcs.keys().map(String::as_str).collect();
    assert_eq!(left, ["restore-copy", "restore-unowned", "web-clone-root", "web-copy-root"]);
}

#[test]
fn a_pvc_that_only_a_cache_shows_is_not_replaced() {
    let class = |name: &str| root(|disk| disk.storage_class = Some(name.to_owned()));
    let mut cluster = SimulatedCluster::new(class("fast-ssd"));
    cluster.reconcile_until_up_to_date();
    cluster.edit(class("standard"));
    let before = cluster.observed.pvcs["web-root"].uid.clone();
    cluster.observed.pvcs.get_mut("web-root").unwrap().live_version = None;
    assert_eq!(cluster.assessed().unconfirmed_pvcs(), ["web-root"]);
    cluster.reconcile();
    assert_eq!(cluster.observed.pvcs["web-root"].uid, before, "it may be bound by now");
    // The reason why it cannot be read is in the condition.
    cluster.observed.live_check_failure = Some(Failure::forbidden(reason::PERMISSION_MISSING, "may not get PVCs"));
    cluster.reconcile();
    let (status, _, message) = cluster.condition(type_::STORAGE_READY);
    assert!(status == "False" && message.contains("may not get PVCs"), "{status}: {message}");
    assert_eq!(cluster.observed.pvcs["web-root"].uid, before);
    cluster.observed.live_check_failure = None;
    cluster.observed.pvcs.get_mut("web-root").unwrap().live_version = Some("2".to_owned());
    assert!(cluster.assessed().unconfirmed_pvcs().is_empty());
    cluster.reconcile();
    assert!(cluster.observed.pvcs.get("web-root").is_none_or(|pvc| pvc.uid != before || pvc.deleting));
}

#[test]
fn a_pvc_is_retained_if_the_last_edit_says_so_whatever_else_is_wrong() {
    type Edit = fn(&mut SimulatedCluster);
    let edits: [(&str, Edit); 3] = [
        ("no reconcile after the edit", |_| ()),
        ("missing Secret", |cluster| cluster.observed.source = SourceView::SecretMissing),
        ("invalid spec", |cluster| cluster.observed.machine.spec.template = Some("huge".to_owned())),
    ];
    for (case, spoil) in edits {
        let mut cluster = running(small_spec());
        cluster.edit(retained());
        spoil(&mut cluster);
        delete(&mut cluster);
        assert!(cluster.machine_deleted, "{case}");
        let kept = &cluster.observed.pvcs["web-root"];
        assert_eq!(kept.labels["vitistack.io/on-delete"], "Retain", "{case}");
    }
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.reconcile_until_up_to_date();
    cluster.edit(retained());
    delete(&mut cluster);
    assert!(cluster.machine_deleted, "restored disk");
    let kept = cluster.observed.pvcs.get("restore-root").expect("the PVC of a restored disk is retained");
    assert_eq!(kept.labels["vitistack.io/on-delete"], "Retain");
    let mut cluster = running(retained());
    cluster.edit(small_spec());
    delete(&mut cluster);
    assert!(cluster.observed.pvcs.contains_key("web-root"), "the label still says Retain");
    let mut cluster = running(small_spec());
    delete(&mut cluster);
    assert!(cluster.machine_deleted && cluster.observed.pvcs.is_empty());
}

/// KubeVirt makes the VM the owner of the PVC that it restores.
#[test]
fn a_retained_pvc_loses_its_owner_before_the_vm_is_deleted() {
    let mut cluster = running(retained());
    cluster.observed.pvcs.get_mut("web-root").unwrap().has_owners = true;
    cluster.delete_machine();
    cluster.reconcile();
    assert!(!cluster.observed.pvcs["web-root"].has_owners);
    assert!(cluster.observed.vm.as_ref().unwrap().deleting);
}

#[test]
fn a_machine_deleted_as_an_orphan_leaves_its_vm_and_disks() {
    for gc_was_faster in [false, true] {
        let mut cluster = running(small_spec());
        cluster.delete_machine();
        if gc_was_faster {
            let vm = cluster.observed.vm.as_mut().unwrap();
            (vm.controller_uid, vm.has_owners) = (None, false);
            cluster.observed.deletion = Deletion::Orphan;
        } else {
            cluster.observed.machine.metadata.finalizers.as_mut().unwrap().push("orphan".to_owned());
        }
        cluster.reconcile();
        let finalizers = cluster.observed.machine.metadata.finalizers.clone().unwrap_or_default();
        assert!(!finalizers.contains(&"machine.vitistack.io/cleanup".to_owned()));
        assert!(!cluster.observed.vm.as_ref().unwrap().deleting && cluster.observed.vmi.is_some());
        assert_eq!(cluster.observed.pvcs["web-root"].labels["vitistack.io/on-delete"], "Retain");
    }
}

#[test]
fn a_deletion_that_may_be_an_orphan_asks() {
    let mut cluster = running(small_spec());
    let vm = cluster.observed.vm.as_mut().unwrap();
    (vm.controller_uid, vm.has_owners) = (None, false);
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Unknown;
    cluster.observed.now += k8s_openapi::jiff::SignedDuration::from_secs(5);
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    let diagnosis = cluster.status().diagnosis.unwrap();
    assert!(diagnosis.contains("annotate machines.vitistack.io web vitistack.io/cascade=background"), "{diagnosis}");
    cluster.annotate("vitistack.io/cascade", "background");
    cluster.reconcile();
    assert!(cluster.observed.vm.as_ref().unwrap().deleting);
}

#[test]
fn an_object_that_lost_its_owner_reference_gets_it_back_and_is_deleted_with_its_machine() {
    let cloud_init = vitivirt_api::machine::CloudInit { user_data: Some("x".to_owned()), ..Default::default() };
    let spec = MachineSpec { cloud_init: Some(cloud_init), ..small_spec() };
    let strip = |cluster: &mut SimulatedCluster| {
        let vm = cluster.observed.vm.as_mut().unwrap();
        (vm.controller_uid, vm.has_owners) = (None, false);
        let secret = cluster.observed.secret.as_mut().unwrap();
        (secret.controller_uid, secret.has_owners) = (None, false);
    };
    let mut cluster = running(spec);
    strip(&mut cluster);
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().controller_uid.as_deref(), Some(UID));
    assert_eq!(cluster.observed.secret.as_ref().unwrap().controller_uid.as_deref(), Some(UID));
    assert_eq!(cluster.condition(type_::READY).1, "Running");
    strip(&mut cluster);
    // Without its label, the guest's UUID is the proof.
    cluster.observed.vm.as_mut().unwrap().labels.remove("vitistack.io/machine-uid");
    cluster.delete_machine();
    cluster.reconcile();
    cluster.reconcile();
    assert!(cluster.observed.vm.as_ref().unwrap().deleting && cluster.observed.pvcs.contains_key("web-root"));
    cluster.finish_shutdown();
    cluster.reconcile();
    assert!(cluster.machine_deleted && cluster.observed.pvcs.is_empty());
    assert!(cluster.observed.secret.is_none(), "no garbage collector deletes the Secret");
}

#[test]
fn an_import_source_is_created_before_its_pvc_and_again_until_the_pvc_is_bound() {
    let mut cluster = SimulatedCluster::new(imported("https://example.com/a"));
    let kinds: Vec<String> = cluster
        .plan()
        .steps
        .iter()
        .flat_map(|step| step.writes.iter().map(|write| write.target().resource.kind.clone()))
        .collect();
    assert_eq!(kinds, ["Machine", "VolumeImportSource", "PersistentVolumeClaim", "VirtualMachine"]);
    cluster.reconcile_until_up_to_date();
    cluster.observed.import_sources.clear();
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.import_sources.contains_key("web-root"));
    cluster.bind_pvcs();
    cluster.observed.import_sources.clear();
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.import_sources.is_empty(), "CDI has read it");
}

#[test]
fn the_import_source_of_an_earlier_machine_is_not_used() {
    let mut cluster = SimulatedCluster::new(imported("https://example.com/a"));
    let earlier = ImportSourceView {
        uid: "earlier".to_owned(),
        controller_uid: Some(OTHER_UID.to_owned()),
        labels: [("vitistack.io/machine", "web"), ("vitistack.io/managed-by", "kubevirt-operator")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        source: None,
        deleting: false,
    };
    cluster.observed.import_sources.insert("web-root".to_owned(), earlier);
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    let status = cluster.status();
    assert_eq!(status.phase.map(|phase| phase.to_string()).as_deref(), Some("Pending"));
    assert_eq!(cluster.condition(type_::READY).1, "WaitingForDeletion");
    cluster.observed.import_sources.clear();
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.pvcs.contains_key("web-root"));
}

#[test]
fn a_pvc_that_never_held_data_follows_the_spec() {
    let mut cluster = SimulatedCluster::new(imported("https://example.com/wrong"));
    cluster.reconcile_until_up_to_date();
    let wrong = cluster.observed.pvcs["web-root"].clone();
    cluster.edit(imported("https://example.com/right"));
    cluster.reconcile_until_up_to_date();
    let right = &cluster.observed.pvcs["web-root"];
    assert!(right.uid != wrong.uid && right.source != wrong.source);
    assert_eq!(cluster.observed.import_sources["web-root"].source, right.source);
    let class = root(|disk| disk.storage_class = Some("fast-ssd".to_owned()));
    cluster.edit(class);
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].storage_class.as_deref(), Some("fast-ssd"));
    // A PVC with data is never replaced.
    cluster.bind_pvcs();
    cluster.reconcile_until_up_to_date();
    let bound = cluster.observed.pvcs["web-root"].clone();
    cluster.observed.pvcs.get_mut("web-root").unwrap().phase = PvcPhase::Pending;
    cluster.edit(imported("https://example.com/late"));
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].uid, bound.uid);
    assert!(!cluster.assessed().assessment().rejected_changes.is_empty());
}

#[test]
fn a_lost_pvc_is_reported_and_replaced_only_with_consent() {
    let mut cluster = running(small_spec());
    let volume = cluster.status().disks[0].volume.clone();
    cluster.observed.pvcs.clear();
    cluster.observed.vmi = None;
    let (plan, _) = cluster.reconcile();
    assert_eq!(plan.write_count(), 0, "{plan:?}");
    let (_, reason, message) = cluster.condition(type_::READY);
    assert_eq!(reason, "PVCLost");
    assert!(message.contains(&format!("vitistack.io/replace-volume={volume}")), "{message}");
    assert_eq!(cluster.condition(type_::STORAGE_READY).1, "PVCLost");
    // The rest of the spec still applies.
    cluster.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..small_spec() });
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec["runStrategy"], "Halted");
    cluster.annotate("vitistack.io/replace-volume", &volume);
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.pvcs.contains_key("web-root"));
    cluster.bind_pvcs();
    cluster.reconcile_until_up_to_date();
    assert_ne!(cluster.status().disks[0].volume, volume);
}

#[test]
fn a_pvc_with_data_that_is_being_deleted_is_reported() {
    let mut cluster = running(small_spec());
    cluster.observed.pvcs.get_mut("web-root").unwrap().deleting = true;
    cluster.reconcile_until_up_to_date();
    let (_, reason, message) = cluster.condition(type_::READY);
    assert!(reason == "PVCLost" && message.contains("copy the data now"), "{reason}: {message}");
    assert_eq!(cluster.status().phase.unwrap().to_string(), "Running");
}

#[test]
fn what_kubevirt_writes_into_the_vm_stays() {
    let mut cluster = running(small_spec());
    let spec = &mut cluster.observed.vm.as_mut().unwrap().spec;
    spec["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = "restore-root".into();
    let volumes = spec["template"]["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "extra", "persistentVolumeClaim": {"claimName": "extra", "hotpluggable": true}}));
    volumes.push(json!({"name": "dump", "memoryDump": {"claimName": "dump"}}));
    let disks = spec["template"]["spec"]["domain"]["devices"]["disks"].as_array_mut().unwrap();
    disks.push(json!({"name": "extra", "disk": {"bus": "scsi"}, "serial": "extra"}));
    spec["updateVolumesStrategy"] = "Migration".into();
    let kept = spec.clone();
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec, kept);
    let message = cluster.condition(type_::STORAGE_READY).2;
    assert!(message.contains("root (PVC restore-root)"), "{message}");
    // The old PVC may be deleted after a migration.
    cluster.observed.pvcs.clear();
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.pvcs.is_empty() && cluster.condition(type_::READY).0 == "True");
    // Other drift is still reverted.
    cluster.observed.vm.as_mut().unwrap().spec["template"]["spec"]["nodeSelector"] = json!({"a": "b"});
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec, kept);
}

/// A restored PVC has the labels of the original.
#[test]
fn a_restored_pvc_of_the_machine_is_its_disk() {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.edit(MachineSpec {
        disks: vec![Disk { size: Some("30Gi".to_owned()), ..retained().disks.remove(0) }],
        ..small_spec()
    });
    cluster.reconcile_until_up_to_date();
    let restored = &cluster.observed.pvcs["restore-root"];
    assert_eq!((restored.requested.as_str(), restored.labels["vitistack.io/on-delete"].as_str()), ("30Gi", "Retain"));
    assert_eq!(cluster.status().disks[0].pvc, "restore-root");
}

#[test]
fn a_vm_is_not_written_while_kubevirt_restores_it() {
    let mut cluster = running(small_spec());
    let vm = cluster.observed.vm.as_mut().unwrap();
    vm.restoring = true;
    vm.spec["runStrategy"] = "Halted".into();
    assert_eq!(cluster.reconcile().0.write_count(), 0);
    cluster.observed.vm.as_mut().unwrap().restoring = false;
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().spec["runStrategy"], "Always");
}
