//! Which states of a Machine are written, at any pace of storage and guests.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use proptest::prelude::*;
use vitivirt_api::{
    Outcome, StatusWrite, Stop,
    machine::{MachinePhase, MachineSpec, condition_type as type_, machine_reason as reason},
};
use vitivirt_machine::{Settled, WaitingState};

use crate::{data::use_pvc, simulated_cluster::SimulatedCluster};

/// A Machine that is being created, with what its status and events have cost so far. Time is in milliseconds.
struct Creation {
    cluster: SimulatedCluster,
    now: u64,
    status_writes: usize,
    events: usize,
    requeue_at: Option<u64>,
    waiting: Option<WaitingState>,
}

impl Creation {
    fn new(spec: MachineSpec) -> Self {
        let mut cluster = SimulatedCluster::new(spec);
        cluster.observed.machine.metadata.creation_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        Creation { cluster, now: 0, status_writes: 0, events: 0, requeue_at: None, waiting: None }
    }

    /// Something changed: one reconcile now.
    fn reconcile(&mut self) {
        self.cluster.observed.now = Timestamp::from_millisecond(i64::try_from(self.now).unwrap()).unwrap();
        let before = self.cluster.assessed();
        let plan = vitivirt_machine::plan(&before).unwrap();
        let outcome = self.cluster.apply(&plan);
        let report = vitivirt_machine::report(&before, &plan, &outcome);
        let Settled { report, waiting } = vitivirt_machine::settle(&before, report, self.waiting.as_ref());
        self.waiting = waiting;
        self.events += report.events.len();
        if let Some(status) = report.status.filter(StatusWrite::differs) {
            self.status_writes += 1;
            self.cluster.observed.machine.status = Some(status.desired);
        }
        self.requeue_at = report.requeue_after.map(|delay| self.now + u64::try_from(delay.as_millis()).unwrap() + 1);
    }

    /// Nothing changes for this time. The operator reconciles when it asked to.
    fn pass(&mut self, time: Duration) {
        let end = self.now + u64::try_from(time.as_millis()).unwrap();
        while let Some(at) = self.requeue_at.filter(|at| *at <= end) {
            self.now = at;
            self.reconcile();
        }
        self.now = end;
    }

    fn change(&mut self, change: impl FnOnce(&mut SimulatedCluster)) {
        change(&mut self.cluster);
        self.reconcile();
    }

    fn phase(&self) -> Option<MachinePhase> {
        self.cluster.status().phase
    }
}

fn small() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

/// A VM that is deleted a moment later is created again with the PVC that the status names.
#[test]
fn the_move_of_a_disk_is_written_at_once() {
    let mut creation = Creation::new(small());
    creation.reconcile();
    creation.change(SimulatedCluster::bind_pvcs);
    creation.change(|cluster| cluster.start_guest("Running"));
    creation.pass(Duration::from_secs(10));
    creation.change(|cluster| use_pvc(cluster, "moved"));
    let disk = &creation.cluster.status().disks[0];
    assert!(disk.pvc == "moved" && disk.external, "{disk:?}");
    // Also before the guest runs.
    let mut creation = Creation::new(small());
    creation.reconcile();
    creation.change(SimulatedCluster::bind_pvcs);
    creation.pass(Duration::from_secs(10));
    let writes = creation.status_writes;
    creation.change(|cluster| use_pvc(cluster, "moved"));
    assert_eq!((creation.status_writes, creation.cluster.status().disks[0].pvc.as_str()), (writes + 1, "moved"));
}

fn with_addresses(cluster: &mut SimulatedCluster, addresses: &[&str]) {
    let vmi = cluster.observed.vmi.as_mut().unwrap();
    vmi.addresses = addresses.iter().map(|&address| address.to_owned()).collect();
}

/// Everything that storage and KubeVirt do until a guest runs and has its addresses.
fn create(creation: &mut Creation, durations: &[Duration]) {
    let mut durations = durations.iter().copied();
    let mut next = || durations.next().unwrap();
    creation.reconcile();
    creation.reconcile();
    creation.pass(next());
    creation.change(SimulatedCluster::bind_pvcs);
    creation.pass(next());
    creation.change(|cluster| {
        cluster.start_guest("Pending");
        cluster.observed.vmi.as_mut().unwrap().unschedulable = Some("unbound PersistentVolumeClaims".to_owned());
    });
    creation.pass(next().min(Duration::from_secs(2)));
    for phase in ["Scheduling", "Scheduled"] {
        creation.change(|cluster| cluster.start_guest(phase));
        creation.pass(next());
    }
    creation.change(|cluster| {
        cluster.start_guest("Running");
        with_addresses(cluster, &[]);
    });
    assert_eq!(creation.phase(), Some(MachinePhase::Running), "a running guest is reported at once");
    creation.pass(next());
    creation.change(|cluster| with_addresses(cluster, &["10.1.2.3"]));
    creation.change(|cluster| with_addresses(cluster, &["10.1.2.3", "fe80::1"]));
    creation.pass(Duration::from_secs(5));
}

proptest! {
    #[test]
    fn a_creation_costs_at_most_three_status_writes_and_two_events(
        durations in prop::collection::vec((0..9_000_u64).prop_map(Duration::from_millis), 6),
    ) {
        let mut creation = Creation::new(small());
        create(&mut creation, &durations);
        prop_assert!(creation.status_writes <= 3, "{} status writes", creation.status_writes);
        prop_assert!(creation.events <= 2, "{} events", creation.events);
        // The status is complete, although most states were not written.
        let before = creation.cluster.assessed();
        let done = Outcome { stop: Stop::Done, written: 0 };
        let complete = vitivirt_machine::report(&before, &creation.cluster.plan(), &done);
        prop_assert!(!complete.status.unwrap().differs());
        prop_assert_eq!(creation.requeue_at, None);
    }
}

#[test]
fn a_quick_creation_is_written_once() {
    let mut creation = Creation::new(small());
    create(&mut creation, &[Duration::from_millis(200); 6]);
    assert_eq!((creation.status_writes, creation.events), (2, 1), "running, and its addresses");
}

#[test]
fn a_creation_that_takes_long_is_visible_after_two_seconds_and_later_once_a_minute() {
    let mut creation = Creation::new(small());
    creation.reconcile();
    creation.pass(Duration::from_secs(1));
    assert_eq!(creation.status_writes, 0);
    creation.pass(Duration::from_millis(1_100));
    assert_eq!((creation.status_writes, creation.phase()), (1, Some(MachinePhase::Creating)));
    assert_eq!(creation.cluster.condition(type_::READY).1, reason::PVC_PENDING);
    creation.change(SimulatedCluster::bind_pvcs);
    creation.pass(Duration::from_secs(50));
    assert_eq!(creation.status_writes, 1);
    creation.pass(Duration::from_secs(11));
    assert_eq!(creation.status_writes, 2);
    assert_eq!(creation.cluster.condition(type_::READY).1, reason::VM_CREATED);
}

#[test]
fn errors_lost_guests_and_edits_are_written_at_once() {
    let mut creation = Creation::new(small());
    create(&mut creation, &[Duration::from_millis(100); 6]);
    let expect = |creation: &mut Creation, what: &str, change: &dyn Fn(&mut SimulatedCluster)| {
        let before = creation.status_writes;
        creation.change(change);
        assert_eq!(creation.status_writes, before + 1, "{what}");
    };
    expect(&mut creation, "the guest is gone", &|cluster| cluster.observed.vmi = None);
    expect(&mut creation, "an error", &|cluster| {
        cluster.start_guest("Scheduling");
        cluster.observed.vmi.as_mut().unwrap().failure = Some("no such image".to_owned());
    });
    expect(&mut creation, "running again", &|cluster| cluster.start_guest("Running"));
    expect(&mut creation, "an edit", &|cluster| {
        cluster.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..small() });
    });
    expect(&mut creation, "stopped", &|cluster| cluster.observed.vmi = None);
}

#[test]
fn a_guest_that_fits_on_no_node_is_reported_when_that_lasts() {
    let mut creation = Creation::new(small());
    creation.reconcile();
    creation.change(|cluster| {
        cluster.start_guest("Scheduling");
        cluster.observed.vmi.as_mut().unwrap().unschedulable = Some("0/3 nodes".to_owned());
    });
    creation.pass(Duration::from_secs(4));
    assert_eq!(creation.status_writes, 0);
    creation.pass(Duration::from_secs(2));
    assert_eq!(creation.cluster.condition(type_::READY).1, reason::INSUFFICIENT_RESOURCES);
}

/// A quota's message contains the present use, which changes with every other Machine.
#[test]
fn an_error_whose_message_changes_is_written_again_after_a_pause() {
    let mut creation = Creation::new(small());
    creation.reconcile();
    let cause = |n: u32| format!("exceeded quota: used: {n}");
    for n in 0..20 {
        creation.change(|cluster| cluster.observed.vm.as_mut().unwrap().failure = Some(cause(n)));
    }
    assert_eq!((creation.status_writes, creation.events), (1, 1));
    creation.pass(Duration::from_secs(4));
    assert_eq!((creation.status_writes, creation.events), (2, 1));
    assert!(creation.cluster.status().diagnosis.unwrap().contains(&cause(19)));
}
