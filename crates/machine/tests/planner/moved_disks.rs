//! Disks that KubeVirt or a user moved to another PVC: a new VM never starts with an older or an incomplete copy.

use std::collections::BTreeMap;

use vitivirt_api::{
    Write,
    machine::{ContainerDiskSource, Disk, DiskSource, MachineSpec, condition_type as type_},
};
use vitivirt_machine::observed::PvcView;

use crate::{
    data::{OTHER_UID, disk_in_vm, external_pvc, imported, move_to_external, restore, root, small_spec, use_pvc},
    simulated_cluster::{SimulatedCluster, running},
};

fn lose_vm(cluster: &mut SimulatedCluster) {
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
}

/// A namespace that was restored from a backup: new UIDs, no status, no VM.
fn restored_from_backup(with_original: bool) -> SimulatedCluster {
    let mut cluster = running(small_spec());
    restore(&mut cluster);
    cluster.reconcile_until_up_to_date();
    if !with_original {
        cluster.observed.pvcs.remove("web-root");
    }
    for pvc in cluster.observed.pvcs.values_mut() {
        pvc.labels.insert("vitistack.io/machine-uid".to_owned(), OTHER_UID.to_owned());
        pvc.identity = Some(OTHER_UID.to_owned());
    }
    lose_vm(&mut cluster);
    (cluster.observed.secret, cluster.observed.machine.status) = (None, None);
    cluster
}

#[test]
fn after_a_backup_the_restored_disk_is_adopted_and_not_the_one_before_it() {
    for with_original in [true, false] {
        let mut cluster = restored_from_backup(with_original);
        cluster.reconcile();
        assert!(cluster.observed.vm.is_none(), "a VM without consent");
        let (_, reason, message) = cluster.condition(type_::READY);
        let command = format!("vitistack.io/adopt={OTHER_UID}");
        assert!(reason == "NameTaken" && message.contains("restore-root") && message.contains(&command), "{message}");
        cluster.annotate("vitistack.io/adopt", OTHER_UID);
        cluster.reconcile_until_up_to_date();
        assert_eq!(disk_in_vm(&cluster), "restore-root");
    }
}

/// A PVC that a user or a backup created is not known to be empty, even if it has no volume yet.
#[test]
fn a_pvc_with_a_source_of_another_client_is_never_replaced() {
    let data = |cluster: &mut SimulatedCluster, pvc: PvcView| cluster.observed.pvcs.insert("web-root".to_owned(), pvc);
    let mut first = SimulatedCluster::new(small_spec());
    first.reconcile_until_up_to_date();
    let pending = PvcView { uid: "theirs".to_owned(), ..first.observed.pvcs["web-root"].clone() };
    let from_snapshot = PvcView { source: Some(String::new()), requested: "40Gi".to_owned(), ..pending.clone() };
    let adopted = PvcView { adopt_by: Some("web".to_owned()), requested: "40Gi".to_owned(), ..pending };
    for pvc in [from_snapshot, adopted] {
        let mut cluster = SimulatedCluster::new(small_spec());
        data(&mut cluster, pvc);
        cluster.reconcile_until_up_to_date();
        assert_eq!(cluster.observed.pvcs["web-root"].uid, "theirs");
        assert!(!cluster.assessed().assessment().rejected_changes.is_empty());
    }
}

/// A backup restores the annotations of an imported disk, and the data with another tool.
#[test]
fn an_imported_disk_of_an_earlier_machine_is_never_replaced() {
    let mut first = SimulatedCluster::new(imported("http://images.example/a.img"));
    first.reconcile_until_up_to_date();
    let mut restored = first.observed.pvcs["web-root"].clone();
    (restored.uid, restored.requested) = ("theirs".to_owned(), "40Gi".to_owned());
    restored.identity = Some(OTHER_UID.to_owned());
    restored.labels.insert("vitistack.io/machine-uid".to_owned(), OTHER_UID.to_owned());
    let mut cluster = SimulatedCluster::new(imported("http://images.example/a.img"));
    cluster.observed.pvcs.insert("web-root".to_owned(), restored);
    cluster.annotate("vitistack.io/adopt", OTHER_UID);
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs["web-root"].uid, "theirs");
    assert!(!cluster.assessed().assessment().rejected_changes.is_empty());
}

/// While KubeVirt copies the data into a PVC of the Machine, and after it failed to, only the source has all of it.
#[test]
fn a_disk_that_migrates_into_a_pvc_of_the_machine_stays_where_it_was() {
    type Move = fn(&mut SimulatedCluster);
    let moves: [(&str, Move); 2] = [
        ("moved", move_to_external),
        ("restore-root", |cluster| {
            restore(cluster);
            cluster.reconcile_until_up_to_date();
        }),
    ];
    for (source, move_disk) in moves {
        let mut cluster = running(small_spec());
        move_disk(&mut cluster);
        let mark = cluster.observed.pvcs.get(source).and_then(|pvc| pvc.disk.clone());
        let sources = BTreeMap::from([("root".to_owned(), source.to_owned())]);
        cluster.observed.vm.as_mut().unwrap().migration_sources = sources;
        use_pvc(&mut cluster, "web-root");
        cluster.reconcile_until_up_to_date();
        assert_eq!(disk_in_vm(&cluster), "web-root", "the operator undoes the migration");
        assert_eq!(cluster.status().disks[0].pvc, source);
        assert_eq!(cluster.observed.pvcs.get(source).and_then(|pvc| pvc.disk.clone()), mark);
        let mut lost = cluster.clone();
        lose_vm(&mut lost);
        if source == "moved" {
            assert_eq!(lost.assessed().observed().uncached_pvcs(), ["moved"]);
            let external = external_pvc(&lost);
            lost.observed.pvcs.insert("moved".to_owned(), external);
        }
        lost.reconcile();
        let asks_or_uses_the_source = lost.observed.vm.is_none() || disk_in_vm(&lost) == source;
        assert!(asks_or_uses_the_source, "a VM with an incomplete copy");

        cluster.observed.vm.as_mut().unwrap().migration_sources.clear();
        cluster.reconcile_until_up_to_date();
        assert_eq!(cluster.status().disks[0].pvc, "web-root");
    }
}

/// A container disk has no PVC, but the disk may return to the one in which it was.
#[test]
fn the_record_of_a_moved_disk_survives_an_edit_of_its_source_and_back() {
    let mut cluster = running(small_spec());
    move_to_external(&mut cluster);
    let container_disk = Some(ContainerDiskSource { image: "registry.example/image:1".to_owned() });
    let image = DiskSource { container_disk, ..DiskSource::default() };
    cluster.edit(root(|disk| disk.source = Some(image)));
    cluster.reconcile_until_up_to_date();
    assert!(cluster.assessed().observed().uncached_pvcs().is_empty(), "the operator reads a PVC that it does not need");
    lose_vm(&mut cluster);
    cluster.reconcile_until_up_to_date();
    lose_vm(&mut cluster);
    cluster.edit(small_spec());
    assert_eq!(cluster.assessed().observed().uncached_pvcs(), ["moved"]);
    let external = external_pvc(&cluster);
    cluster.observed.pvcs.insert("moved".to_owned(), external);
    cluster.reconcile_until_up_to_date();
    assert!(cluster.observed.vm.is_none(), "a VM with the disk from before it was moved");
}

/// CDI does not fill a PVC that the spec does not name, so it would wait forever for its source.
#[test]
fn a_lost_restored_pvc_of_an_imported_disk_is_replaced_by_an_empty_one() {
    let mut cluster = running(imported("http://images.example/a.img"));
    restore(&mut cluster);
    cluster.observed.pvcs.get_mut("restore-root").unwrap().volume = Some("pv-restored".to_owned());
    cluster.reconcile_until_up_to_date();
    cluster.observed.pvcs.remove("restore-root");
    cluster.annotate("vitistack.io/replace-volume", "pv-restored");
    let (plan, _) = cluster.reconcile();
    let mut writes = plan.steps.iter().flat_map(|step| &step.writes);
    let body = writes.find_map(|write| match write {
        Write::Create { target, body } if target.key.name() == "restore-root" => Some(body.json()),
        _ => None,
    });
    assert_eq!(body.unwrap().pointer("/spec/dataSourceRef"), None);
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "restore-root");
}

/// The PVC of an earlier Machine is not a disk of this one, so it is not missed when a user deletes it.
#[test]
fn a_pvc_that_the_machine_never_had_is_not_recorded() {
    let mut cluster = restored_from_backup(false);
    cluster.reconcile();
    assert_eq!(cluster.condition(type_::READY).1, "NameTaken");
    assert!(cluster.status().disks.is_empty(), "{:?}", cluster.status().disks);
    cluster.observed.pvcs.remove("restore-root");
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "web-root");
}

#[test]
fn a_move_is_recorded_while_the_spec_is_invalid() {
    let mut cluster = running(small_spec());
    cluster.edit(MachineSpec { template: Some("huge".to_owned()), ..small_spec() });
    cluster.reconcile();
    restore(&mut cluster);
    cluster.observed.pvcs.get_mut("restore-root").unwrap().volume = Some("pv-restored".to_owned());
    cluster.reconcile();
    let disks = cluster.status().disks;
    assert_eq!((disks[0].pvc.as_str(), disks[0].volume.as_str()), ("restore-root", "pv-restored"));
    lose_vm(&mut cluster);
    cluster.edit(small_spec());
    cluster.reconcile_until_up_to_date();
    assert_eq!(disk_in_vm(&cluster), "restore-root");
}

/// The message says which disk the consent leads to.
#[test]
fn a_user_who_gives_up_an_external_pvc_gets_the_disk_from_before_the_move() {
    for has_restored in [true, false] {
        let mut cluster = running(small_spec());
        if has_restored {
            restore(&mut cluster);
            cluster.reconcile_until_up_to_date();
        }
        move_to_external(&mut cluster);
        lose_vm(&mut cluster);
        let external = external_pvc(&cluster);
        cluster.observed.pvcs.insert("moved".to_owned(), external);
        if !has_restored {
            cluster.observed.pvcs.remove("web-root");
        }
        cluster.reconcile();
        let message = cluster.condition(type_::READY).2;
        let expected = if has_restored { "PersistentVolumeClaim restore-root" } else { "a new disk" };
        assert!(message.contains(expected), "{message}");
        cluster.annotate("vitistack.io/replace-volume", "moved");
        cluster.reconcile_until_up_to_date();
        assert_eq!(disk_in_vm(&cluster), if has_restored { "restore-root" } else { "web-root" });
    }
}

#[test]
fn two_lost_disks_are_replaced_by_following_the_messages() {
    let disk = |name: &str| Disk { name: name.to_owned(), ..Disk::default() };
    let spec = MachineSpec {
        disks: vec![disk("root"), Disk { size: Some("1Gi".to_owned()), ..disk("data") }],
        ..small_spec()
    };
    let mut cluster = running(spec);
    cluster.observed.pvcs.clear();
    lose_vm(&mut cluster);
    for _ in 0..2 {
        cluster.reconcile();
        assert!(cluster.observed.vm.is_none(), "a VM without consent");
        let message = cluster.condition(type_::READY).2;
        let (_, command) = message.split_once("vitistack.io/replace-volume=").unwrap();
        let (value, _) = command.split_once(' ').unwrap();
        let value = value.to_owned();
        cluster.annotate("vitistack.io/replace-volume", &value);
    }
    cluster.reconcile_until_up_to_date();
    assert_eq!(cluster.observed.pvcs.len(), 2);
    assert!(cluster.observed.vm.is_some());
}
