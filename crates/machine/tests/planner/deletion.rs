//! Deletions: what is evidence enough to delete disks.

use vitivirt_api::{
    Write,
    machine::{CloudInit, MachineSpec, condition_type as type_},
};
use vitivirt_machine::observed::{Deletion, VmOwner};

use crate::{
    data::{restore, retained, small_spec},
    simulated_cluster::{SimulatedCluster, UID, running},
};

fn with_cloud_init() -> MachineSpec {
    MachineSpec {
        cloud_init: Some(CloudInit { user_data: Some("x".to_owned()), ..CloudInit::default() }),
        ..small_spec()
    }
}

/// The garbage collector has removed the owner references and the finalizer of a deletion with `--cascade=orphan`, which
/// the operator did not see.
fn orphan_unseen(cluster: &mut SimulatedCluster) {
    let vm = cluster.observed.vm.as_mut().unwrap();
    (vm.controller_uid, vm.has_owners) = (None, false);
    if let Some(secret) = &mut cluster.observed.secret {
        (secret.controller_uid, secret.has_owners) = (None, false);
    }
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Unknown;
    cluster.observed.now += k8s_openapi::jiff::SignedDuration::from_secs(5);
}

#[test]
fn the_disks_of_a_machine_that_may_be_an_orphan_stay_when_its_vm_is_gone() {
    for spec in [small_spec(), with_cloud_init()] {
        for asked_before in [true, false] {
            let mut cluster = running(spec.clone());
            orphan_unseen(&mut cluster);
            if asked_before {
                cluster.reconcile();
                assert_eq!(cluster.condition(type_::READY).1, "DeletionUnconfirmed");
            }
            // A user deletes the VM to keep only the disks.
            cluster.finish_shutdown();
            for _ in 0..3 {
                cluster.reconcile();
            }
            assert!(cluster.observed.pvcs.contains_key("web-root") && !cluster.machine_deleted);
            let message = cluster.condition(type_::READY).2;
            assert!(message.contains("vitistack.io/cascade=orphan"), "{message}");

            let mut kept = cluster.clone();
            kept.annotate("vitistack.io/cascade", "orphan");
            kept.reconcile();
            assert!(kept.machine_deleted);
            assert_eq!(kept.observed.pvcs["web-root"].labels["vitistack.io/on-delete"], "Retain");
            cluster.annotate("vitistack.io/cascade", "background");
            cluster.reconcile();
            assert!(cluster.machine_deleted && cluster.observed.pvcs.is_empty());
        }
    }
}

/// A failed attempt does not make a deletion of everything out of a deletion of the Machine alone.
#[test]
fn a_failure_while_the_deletion_is_unconfirmed_confirms_nothing() {
    let mut cluster = running(small_spec());
    orphan_unseen(&mut cluster);
    cluster.finish_shutdown();
    let failure = vitivirt_api::Failure::transient(vitivirt_api::reason::API_SERVER_ERROR, "etcd is slow");
    cluster.reconcile_with_failure(&failure);
    cluster.reconcile();
    assert!(cluster.observed.pvcs.contains_key("web-root"));
}

/// The next leader did not see the deletion begin.
#[test]
fn a_new_leader_completes_a_deletion_at_every_point() {
    for spec in [small_spec(), with_cloud_init()] {
        for reconciles in 0..6 {
            for vm_is_gone in [false, true] {
                let mut cluster = running(spec.clone());
                cluster.delete_machine();
                cluster.observed.deletion = Deletion::Cascade;
                for _ in 0..reconciles {
                    cluster.reconcile();
                }
                if vm_is_gone && cluster.observed.vm.as_ref().is_some_and(|vm| vm.deleting) {
                    cluster.finish_shutdown();
                }
                cluster.observed.deletion = Deletion::Unknown;
                for _ in 0..4 {
                    cluster.reconcile();
                    if cluster.observed.vm.as_ref().is_some_and(|vm| vm.deleting) {
                        cluster.finish_shutdown();
                    }
                }
                assert!(cluster.machine_deleted && cluster.observed.pvcs.is_empty(), "{reconciles} {vm_is_gone}");
            }
        }
    }
}

/// Without a disk that would be lost, nothing is asked.
#[test]
fn a_deletion_that_loses_no_data_needs_no_confirmation() {
    let mut cluster = running(retained());
    cluster.finish_shutdown();
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Unknown;
    cluster.reconcile();
    assert!(cluster.machine_deleted);
}

/// KubeVirt copies labels and annotations to the PVC of a clone. Without its owner nothing deletes it with the clone.
#[test]
fn the_pvc_of_a_clone_keeps_its_owner_when_the_original_is_deleted() {
    for deletion in [Deletion::Cascade, Deletion::Orphan] {
        let mut cluster = running(retained());
        let mut copy = cluster.observed.pvcs["web-root"].clone();
        (copy.uid, copy.has_owners) = ("copy".to_owned(), true);
        copy.vm_owner = Some(VmOwner { index: 0, uid: "clone".to_owned() });
        cluster.observed.pvcs.insert("restore-copy".to_owned(), copy);
        cluster.delete_machine();
        cluster.observed.deletion = deletion;
        cluster.reconcile();
        assert!(cluster.observed.pvcs["restore-copy"].has_owners, "{deletion:?}");
        assert_eq!(cluster.observed.pvcs["web-root"].labels["vitistack.io/on-delete"], "Retain");
    }
}

/// KubeVirt restored the disk while the operator did not run. The garbage collector would delete the PVC with the VM.
#[test]
fn a_retained_disk_that_was_restored_unseen_survives_a_deletion() {
    for deletion in [Deletion::Cascade, Deletion::Unknown, Deletion::Orphan] {
        let mut cluster = running(retained());
        restore(&mut cluster);
        let owner = VmOwner { index: 0, uid: cluster.observed.vm.as_ref().unwrap().uid.clone() };
        let restored = cluster.observed.pvcs.get_mut("restore-root").unwrap();
        (restored.has_owners, restored.vm_owner) = (true, Some(owner));
        restored.labels.remove("vitistack.io/on-delete");
        cluster.delete_machine();
        cluster.observed.deletion = deletion;
        cluster.reconcile();
        let restored = &cluster.observed.pvcs["restore-root"];
        assert!(!restored.has_owners && !restored.deleting, "{deletion:?}");
        assert_eq!(restored.labels["vitistack.io/on-delete"], "Retain");
    }
}

/// The annotation may be older than the deletion.
#[test]
fn a_deletion_that_was_seen_to_orphan_keeps_everything() {
    let mut cluster = running(small_spec());
    cluster.annotate("vitistack.io/cascade", "background");
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Orphan;
    cluster.reconcile();
    assert!(cluster.machine_deleted && cluster.observed.vm.is_some());
    assert!(!cluster.observed.pvcs["web-root"].deleting);
}

/// Other clients may set owner references too.
#[test]
fn an_orphan_keeps_its_other_owners() {
    let mut cluster = running(with_cloud_init());
    cluster.observed.vm.as_mut().unwrap().controller_index = 1;
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Orphan;
    let plan = cluster.plan();
    let operations = plan.steps[0].writes.iter().flat_map(|write| match write {
        Write::Patch { operations, .. } => operations.iter().map(|operation| operation.path.as_str()),
        other => panic!("unexpected {other:?}"),
    });
    let expected = [1, 0].map(|index| format!("/metadata/ownerReferences/{index}"));
    let expected: Vec<String> = expected.into_iter().flat_map(|owner| [format!("{owner}/uid"), owner]).collect();
    assert_eq!(operations.collect::<Vec<_>>(), expected);
}

/// The cache does not show yet that the Machine is being deleted with `--cascade=orphan`.
#[test]
fn an_object_without_owner_gets_none_before_its_machine_is_confirmed() {
    let mut cluster = running(with_cloud_init());
    let vm = cluster.observed.vm.as_mut().unwrap();
    (vm.controller_uid, vm.has_owners) = (None, false);
    let secret = cluster.observed.secret.as_mut().unwrap();
    (secret.controller_uid, secret.has_owners) = (None, false);
    cluster.observed.machine_confirmed = false;
    assert!(cluster.assessed().needs_confirmed_machine());
    assert!(cluster.plan().steps.is_empty());
    cluster.observed.machine_confirmed = true;
    assert!(!cluster.assessed().needs_confirmed_machine());
    cluster.reconcile();
    assert_eq!(cluster.observed.vm.as_ref().unwrap().controller_uid.as_deref(), Some(UID));
    assert_eq!(cluster.observed.secret.as_ref().unwrap().controller_uid.as_deref(), Some(UID));
}

/// A user deleted the VM or the Secret of an orphan, to keep the disks.
#[test]
fn a_lost_object_is_not_created_again_before_its_machine_is_confirmed() {
    let confirm = |mut cluster: SimulatedCluster| {
        cluster.observed.machine_confirmed = false;
        assert!(cluster.assessed().needs_confirmed_machine());
        assert!(cluster.plan().steps.is_empty());
        cluster.observed.machine_confirmed = true;
        assert!(!cluster.plan().steps.is_empty());
    };
    let mut cluster = running(with_cloud_init());
    cluster.observed.secret = None;
    confirm(cluster);
    let mut cluster = running(small_spec());
    (cluster.observed.vm, cluster.observed.vmi) = (None, None);
    confirm(cluster);
    // Nothing is confirmed for the first creation.
    let mut cluster = SimulatedCluster::new(with_cloud_init());
    cluster.observed.machine_confirmed = false;
    assert!(!cluster.assessed().needs_confirmed_machine());
}

/// A cache may show owner references that the garbage collector has removed.
#[test]
fn owner_references_are_read_if_they_decide_how_a_machine_is_deleted() {
    for (deletion, annotation, is_read) in [
        (Deletion::Cascade, "", false),
        (Deletion::Unknown, "", true),
        (Deletion::Orphan, "", true),
        (Deletion::Unknown, "background", false),
        (Deletion::Cascade, "orphan", true),
    ] {
        let mut cluster = running(small_spec());
        if !annotation.is_empty() {
            cluster.annotate("vitistack.io/cascade", annotation);
        }
        cluster.observed.deletion = deletion;
        assert!(!cluster.observed.is_deleted_as_owners_say());
        cluster.delete_machine();
        assert_eq!(cluster.observed.is_deleted_as_owners_say(), is_read, "{deletion:?} {annotation}");
    }
}

/// The operator has set the owner references after the garbage collector had removed them.
#[test]
fn an_orphan_leaves_no_owner_reference_with_which_its_objects_would_be_deleted() {
    let mut cluster = running(with_cloud_init());
    cluster.delete_machine();
    cluster.observed.deletion = Deletion::Orphan;
    cluster.reconcile();
    assert!(cluster.machine_deleted);
    assert_eq!(cluster.observed.vm.as_ref().unwrap().controller_uid, None);
    assert_eq!(cluster.observed.secret.as_ref().unwrap().controller_uid, None);
}

/// A quick deletion of a Machine without Secret writes the condition that a new leader needs, and nothing else.
#[test]
fn a_quick_deletion_sends_no_event() {
    let mut cluster = running(small_spec());
    cluster.delete_machine();
    let (_, report) = cluster.reconcile();
    assert!(report.status.is_some() && report.events.is_empty(), "{:?}", report.events);
}
