//! Reports about failures: condition, event and metric have the same reason, and only errors count as errors.

use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;
use vitivirt_api::{
    ErrorClass, EventKind, Failure, Outcome, Plan, Stop,
    machine::{
        CloudInit, MachinePhase, MachineSpec, Network, SecretKeyRef, condition_type as type_,
        machine_reason::{self as reason, ERRORS, NOT_READY_REASONS},
    },
    reason as cause,
};
use vitivirt_machine::{observed::SourceView, testing::machine_spec as spec};

use crate::world::{World, running};

fn small() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

fn denied(message: &str) -> Failure {
    Failure::invalid(cause::ADMISSION_REFUSED, message)
}

fn forbidden() -> Failure {
    Failure::forbidden(cause::PERMISSION_MISSING, "the operator may not delete virtualmachines of kubevirt.io")
}

#[test]
fn a_blocked_machine_counts_as_an_error_with_the_reason_of_its_condition() {
    let on = |name: &str| vec![Network { name: "a".to_owned(), network_name: name.to_owned(), ..Network::default() }];
    let secret_ref = Some(SecretKeyRef { name: "s".to_owned(), key: None });
    let cloud_init = Some(CloudInit { secret_ref, ..CloudInit::default() });
    let mut no_secret = World::new(MachineSpec { cloud_init, ..small() });
    no_secret.observed.source = SourceView::SecretMissing;
    let mut no_class = World::new(small());
    no_class.observed.storage_classes.clear();
    for (mut world, expected) in [
        (World::new(MachineSpec { template: Some("huge".to_owned()), ..small() }), reason::TEMPLATE_NOT_FOUND),
        (World::new(MachineSpec { power_state: Some("Off".to_owned()), ..small() }), reason::INVALID),
        (World::new(MachineSpec { networks: on("prod"), ..small() }), reason::NETWORK_CONFIGURATION_NOT_FOUND),
        (no_secret, reason::SECRET_NOT_FOUND),
        (no_class, reason::STORAGE_CLASS_NOT_FOUND),
    ] {
        let (_, report) = world.reconcile();
        assert_eq!((report.error, world.condition(type_::READY).1.as_str()), (Some(expected), expected));
        // In every reconcile while the problem lasts.
        assert_eq!(world.reconcile().1.error, Some(expected));
    }
}

#[test]
fn a_guest_that_cannot_run_counts_as_an_error_with_the_reason_of_its_condition() {
    let mut world = running(small());
    world.start_guest("Scheduling");
    world.observed.vmi.as_mut().unwrap().unschedulable = Some("0/1 nodes are available".to_owned());
    assert_eq!(world.reconcile().1.error, Some(reason::INSUFFICIENT_RESOURCES));
    world.start_guest("CrashLoopBackOff");
    assert_eq!(world.reconcile().1.error, Some(reason::VM_FAILED));
}

#[test]
fn a_machine_without_problems_never_counts_as_an_error() {
    let mut world = World::new(small());
    let reconcile = |world: &mut World, expected: &str| {
        let (_, report) = world.reconcile();
        assert_eq!(world.condition(type_::READY).1, expected);
        assert_eq!(report.error, None, "{expected}");
    };
    reconcile(&mut world, "VMCreated");
    reconcile(&mut world, "PVCPending");
    world.bind_pvcs();
    world.start_guest("Scheduling");
    reconcile(&mut world, "VMCreated");
    world.start_guest("Running");
    reconcile(&mut world, "Running");
    world.observed.vmi.as_mut().unwrap().paused = true;
    reconcile(&mut world, "Paused");
    world.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..small() });
    reconcile(&mut world, "Stopping");
    world.observed.vmi = None;
    reconcile(&mut world, "Stopped");
    world.delete_machine();
    world.observed.now = world.observed.now.checked_add(SignedDuration::from_secs(10)).unwrap();
    reconcile(&mut world, "Deleting");
}

#[test]
fn a_running_machine_stays_running_when_a_write_is_rejected() {
    let world = running(small());
    let stop = Stop::Failed { step: "PVCs", failure: denied("cannot create Secret shop/s: quota") };
    let report = vitivirt_machine::report(&world.assessed(), &Plan::default(), &Outcome { stop, written: 0 });
    let status = report.status.unwrap().desired;
    assert_eq!(status.phase, Some(MachinePhase::Running));
    assert!(status.diagnosis.as_ref().unwrap().contains("the machine keeps running"), "{status:?}");
    assert_eq!(report.error, Some(reason::ADMISSION_REFUSED));
}

/// Provisioning takes some time, and with WaitForFirstConsumer it starts later.
#[test]
fn a_pvc_that_stays_unbound_becomes_an_error() {
    for (waits_for_consumer, expected) in [(false, Some(reason::PVC_PENDING)), (true, None)] {
        let mut world = World::new(small());
        world.observed.storage_classes[0].waits_for_consumer = waits_for_consumer;
        world.settle();
        assert_eq!(world.reconcile().1.error, None, "it is being created");
        world.observed.now = world.observed.now.checked_add(SignedDuration::from_mins(5)).unwrap();
        assert_eq!(world.reconcile().1.error, expected);
        // Filling a volume may take hours.
        world.observed.pvcs.values_mut().for_each(|pvc| pvc.source = Some(String::new()));
        assert_eq!(world.reconcile().1.error, None);
        world.observed.pvcs.values_mut().for_each(|pvc| pvc.source = None);
        world.bind_pvcs();
        assert_eq!(world.reconcile().1.error, None);
    }
}

/// The age of the PVC counts, not the age of the Machine.
#[test]
fn a_new_pvc_of_an_old_machine_is_not_an_error() {
    let mut world = World::new(MachineSpec { template: Some("none".to_owned()), ..MachineSpec::default() });
    world.settle();
    world.observed.now = world.observed.now.checked_add(SignedDuration::from_mins(60)).unwrap();
    world.edit(small());
    for _ in 0..3 {
        assert_eq!(world.reconcile().1.error, None, "{:?}", world.status().diagnosis);
    }
}

#[test]
fn the_reason_of_a_rejection_depends_on_who_rejects() {
    let kubevirts = "cannot create VirtualMachine shop/web: admission webhook \
                     \"virtualmachine-validator.kubevirt.io\" denied the request: spec.template.spec.domain.machine.type is not supported: pc";
    let policy = "cannot create VirtualMachine shop/web: virtualmachines.kubevirt.io \"web\" is forbidden: \
                  ValidatingAdmissionPolicy 'p' with binding 'p' denied request: not on Sundays";
    let webhook = "cannot create PersistentVolumeClaim shop/web-root: admission webhook \
                   \"disks.corp.example\" denied the request: no";
    let schema =
        "cannot create VirtualMachine shop/web: VirtualMachine.kubevirt.io \"web\" is invalid: spec.x: Required value";
    let pvc =
        "cannot create PersistentVolumeClaim shop/web-root: PersistentVolumeClaim \"web-root\" is invalid: spec: no";
    let unreachable = |name: &str| format!("cannot create Secret shop/s: failed calling webhook \"{name}\": refused");
    let invalid = |message: &str| Failure::invalid(cause::INVALID_OBJECT, message);
    let silent = |name: &str| Failure::transient(cause::WEBHOOK_UNREACHABLE, unreachable(name));
    for (failure, expected) in [
        (denied(kubevirts), reason::KUBEVIRT_API_ERROR),
        (denied(policy), reason::ADMISSION_REFUSED),
        (denied(webhook), reason::ADMISSION_REFUSED),
        (denied("cannot create Secret shop/s: secrets \"s\" is forbidden: maximum is 1"), reason::ADMISSION_REFUSED),
        (invalid(schema), reason::KUBEVIRT_API_ERROR),
        (invalid(pvc), reason::ADMISSION_REFUSED),
        (silent("virtualmachines-mutator.kubevirt.io"), reason::KUBEVIRT_API_ERROR),
        (silent("policy.corp.example"), reason::ADMISSION_REFUSED),
    ] {
        let mut world = World::new(small());
        let report = world.reconcile_with_failure(&failure);
        let (is, why, message) = world.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        assert!(message.starts_with(&failure.message.replacen("cannot", "Cannot", 1)), "{message}");
        assert_eq!(report.events[0].reason, expected);
    }
    let mut world = World::new(small());
    world.reconcile_with_failure(&denied(kubevirts));
    assert!(world.status().diagnosis.unwrap().contains("emulatedMachines"), "the remedy for an administrator");
}

/// The runtime counts such a failure with its own reason.
#[test]
fn a_failure_that_a_retry_may_fix_is_not_an_error_of_the_machine() {
    for failure in [Failure::conflict(cause::OBJECT_CHANGED, "x"), Failure::transient(cause::API_SERVER_ERROR, "x")] {
        let mut world = World::new(small());
        assert_eq!(world.reconcile_with_failure(&failure).error, None);
    }
}

#[test]
fn a_rejected_deletion_is_reported_and_continues_when_it_is_allowed() {
    let refusal = "cannot delete VirtualMachine shop/web: virtualmachines.kubevirt.io \"web\" is forbidden: \
                   ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no deletion on Sundays";
    for (failure, expected, remedy) in [
        (forbidden(), reason::PERMISSION_MISSING, "grant the permission to the operator's ServiceAccount"),
        (denied(refusal), reason::ADMISSION_REFUSED, "ask the owner of the webhook or policy"),
    ] {
        let mut world = running(small());
        world.delete_machine();
        let report = world.reconcile_with_failure(&failure);
        let (is, why, message) = world.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        for part in ["being deleted", "the deletion of the VirtualMachine failed", &failure.message, remedy] {
            assert!(message.contains(part), "{part:?} is missing in {message}");
        }
        assert_eq!(world.status().diagnosis, Some(message));
        let events: Vec<_> = report.events.iter().map(|event| (event.kind, event.reason)).collect();
        assert_eq!(events, [(EventKind::Warning, expected)]);
        assert!(world.reconcile_with_failure(&failure).events.is_empty(), "once");

        world.reconcile();
        world.finish_shutdown();
        world.reconcile();
        assert!(world.gone, "the deletion continues when nothing rejects it");
    }
}

#[test]
fn a_failed_deletion_is_reported_with_its_step() {
    let network = Network { name: "a".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let mut world = running(MachineSpec { networks: vec![network], ..small() });
    world.delete_machine();
    let fails = |world: &mut World, what: &str| {
        world.reconcile_with_failure(&forbidden());
        let diagnosis = world.status().diagnosis.unwrap();
        assert!(diagnosis.contains(&format!("the {what} failed")), "{diagnosis}");
    };
    fails(&mut world, "deletion of the VirtualMachine");
    world.finish_shutdown();
    fails(&mut world, "deletion of the PVCs");
    world.observed.pvcs.clear();
    fails(&mut world, "release of the networks");
    world.observed.networks.clear();
    fails(&mut world, "removal of the finalizer");
}

#[test]
fn a_failed_deletion_that_a_retry_may_fix_is_not_reported() {
    let mut world = running(small());
    world.delete_machine();
    let report = world.reconcile_with_failure(&Failure::conflict(cause::OBJECT_CHANGED, "x"));
    assert!(report.status.is_none() && report.events.is_empty() && report.error.is_none());
}

#[test]
fn error_reasons_and_other_reasons_are_disjoint() {
    assert!(NOT_READY_REASONS.iter().all(|reason| !ERRORS.contains(reason)));
}

proptest! {
    /// The metric label is from a fixed set, and the troubleshooting page explains the reason.
    #[test]
    fn every_reported_reason_is_documented(spec in spec(), class in 0usize..5, known in 0usize..8, deleting in any::<bool>()) {
        let reasons = [
            cause::PERMISSION_MISSING, cause::QUOTA_EXCEEDED, cause::ADMISSION_REFUSED, cause::INVALID_OBJECT,
            cause::WEBHOOK_UNREACHABLE, cause::API_NOT_INSTALLED, cause::BAD_REQUEST, "Unknown",
        ];
        let mut world = World::new(spec).with_network("prod").with_network("storage");
        world.settle();
        if deleting {
            world.delete_machine();
        } else {
            world.observed.vm = None;
        }
        let report = world.reconcile_with_failure(&Failure::new(ErrorClass::ALL[class], reasons[known], "message"));
        prop_assert!(report.error.is_none_or(|error| ERRORS.contains(&error)), "{:?}", report.error);
        let (is, why, _) = world.condition(type_::READY);
        prop_assert!(is == "True" || [&ERRORS[..], &NOT_READY_REASONS[..]].concat().contains(&why.as_str()), "{why}");
    }
}
