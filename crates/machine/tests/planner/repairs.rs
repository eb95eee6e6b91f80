//! Another client changes an object of a Machine after each repair.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vitivirt_api::{
    EventRecord, Plan, RecentWrites,
    machine::{CloudInit, MachineSpec},
};
use vitivirt_machine::{desired_digest, repaired_objects};

use crate::simulated_cluster::{SimulatedCluster, running};

/// One reconcile after another client set the number of cores. Returns whether the operator repaired it, and the events.
fn undo_and_reconcile(cluster: &mut SimulatedCluster) -> (bool, Vec<EventRecord>, Option<std::time::Duration>) {
    let vm = cluster.observed.vm.as_mut().unwrap();
    vm.spec["template"]["spec"]["domain"]["cpu"]["cores"] = 7.into();
    vm.other_managers = vec!["autosizer".to_owned()];
    let (plan, report) = cluster.reconcile();
    record(cluster, &plan);
    (plan.write_count() > 0, report.events, report.requeue_after)
}

/// What the operator remembers after the API server accepted the writes.
fn record(cluster: &mut SimulatedCluster, plan: &Plan) {
    let observed = &mut cluster.observed;
    for target in repaired_objects(plan) {
        let object = (target.resource.kind.clone(), target.key.name().to_owned());
        let written = desired_digest(observed, target);
        let before = observed.recent_writes.get(&object).filter(|before| before.written() == written);
        let after = RecentWrites::after(before, written, observed.now);
        observed.recent_writes.insert(object, after);
    }
}

#[test]
fn repairs_that_another_client_undoes_are_limited_and_an_event_names_the_client() {
    let mut cluster = running(MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() });
    cluster.observed.now = Timestamp::from_second(1_800_000_000).unwrap();
    let mut repairs = 0;
    let mut messages = Vec::new();
    for _ in 0..30 {
        let (repaired, events, _) = undo_and_reconcile(&mut cluster);
        repairs += usize::from(repaired);
        messages.extend(events.into_iter().filter(|event| event.reason == "RepeatedDrift").map(|event| event.message));
    }
    assert_eq!(repairs, 10);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].contains("VirtualMachine shop/web") && messages[0].contains("autosizer"), "{messages:?}");

    let (_, _, requeue) = undo_and_reconcile(&mut cluster);
    assert!(requeue.is_some_and(|after| after <= std::time::Duration::from_secs(61)), "{requeue:?}");
    cluster.observed.now += SignedDuration::from_secs(60);
    assert!(undo_and_reconcile(&mut cluster).0, "one repair per minute");
    assert!(!undo_and_reconcile(&mut cluster).0);

    // An edit is written at once.
    cluster.observed.machine.spec.power_state = Some("Stopped".to_owned());
    assert!(undo_and_reconcile(&mut cluster).0);
    assert_eq!(cluster.observed.vm.unwrap().spec["runStrategy"], "Halted");
}

#[test]
fn a_vm_is_not_created_while_the_repair_of_its_secret_is_delayed() {
    let cloud_init = CloudInit { user_data: Some("#cloud-config\n".to_owned()), ..CloudInit::default() };
    let template = Some("small".to_owned());
    let mut cluster = running(MachineSpec { template, cloud_init: Some(cloud_init), ..MachineSpec::default() });
    cluster.observed.now = Timestamp::from_second(1_800_000_000).unwrap();
    let mut created = Vec::new();
    for _ in 0..12 {
        (cluster.observed.vm, cluster.observed.vmi, cluster.observed.secret) = (None, None, None);
        let (plan, _) = cluster.reconcile();
        record(&mut cluster, &plan);
        cluster.observed.recent_writes.retain(|(kind, _), _| kind == "Secret");
        let is_created = |kind: &str| repaired_objects(&plan).any(|target| target.resource.kind == kind);
        created.push(["Secret", "VirtualMachine"].map(is_created));
    }
    assert_eq!(created, [vec![[true; 2]; 10], vec![[false; 2]; 2]].concat());
}
