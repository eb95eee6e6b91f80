//! What is told of a failure: the reason that the condition shows is the one that the event has and the metric counts, and
//! what is no error counts as none.

use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;
use vitivirt_api::machine::machine_reason::{ERRORS, QUIET};
use vitivirt_api::machine::{
    CloudInit, MachineSpec, Network, SecretKeyRef, condition_type as type_, machine_reason as reason,
};
use vitivirt_api::{EventKind, Failure, Outcome, Plan, Stop, reason as cause};
use vitivirt_machine::observed::SourceView;

use crate::specs::spec;
use crate::world::{World, running};

fn small() -> MachineSpec {
    MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() }
}

fn denied(words: &str) -> Failure {
    Failure::invalid(cause::ADMISSION_REFUSED, words)
}

fn forbidden() -> Failure {
    Failure::forbidden(cause::PERMISSION_MISSING, "the operator may not delete virtualmachines of kubevirt.io")
}

#[test]
fn what_stands_in_the_way_is_counted_by_its_reason() {
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
        // As long as it is so.
        assert_eq!(world.reconcile().1.error, Some(expected));
    }
}

#[test]
fn what_the_cluster_says_of_the_guest_is_counted_by_its_reason() {
    let mut world = running(small());
    world.start_guest("Scheduling");
    world.observed.vmi.as_mut().unwrap().unschedulable = Some("0/1 nodes are available".to_owned());
    assert_eq!(world.reconcile().1.error, Some(reason::INSUFFICIENT_RESOURCES));
    world.start_guest("CrashLoopBackOff");
    assert_eq!(world.reconcile().1.error, Some(reason::VM_FAILED));
}

#[test]
fn a_life_without_trouble_has_no_error() {
    let mut world = World::new(small());
    let pass = |world: &mut World, expected: &str| {
        let (_, report) = world.reconcile();
        assert_eq!(world.condition(type_::READY).1, expected);
        assert_eq!(report.error, None, "{expected}");
    };
    pass(&mut world, "VMCreated");
    pass(&mut world, "PVCPending");
    world.bind_pvcs();
    world.start_guest("Scheduling");
    pass(&mut world, "VMCreated");
    world.start_guest("Running");
    pass(&mut world, "Running");
    world.observed.vmi.as_mut().unwrap().paused = true;
    pass(&mut world, "Paused");
    world.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..small() });
    pass(&mut world, "Stopping");
    world.observed.vmi = None;
    pass(&mut world, "Stopped");
    world.delete_machine();
    world.observed.now = world.observed.now.checked_add(SignedDuration::from_secs(10)).unwrap();
    pass(&mut world, "Deleting");
}

/// Whatever keeps a change from being written, the guest is what it was.
#[test]
fn a_machine_that_runs_is_running_when_a_write_is_refused() {
    let world = running(small());
    let stop = Stop::Failed { step: "claims", failure: denied("create Secret shop/s: quota") };
    let report = vitivirt_machine::report(&world.observed, &Plan::default(), &Outcome { stop, written: 0 });
    let status = report.status.unwrap().desired;
    assert_eq!(status["phase"], "Running");
    assert!(status["diagnosis"].as_str().unwrap().contains("the machine runs on"), "{status}");
    assert_eq!(report.error, Some(reason::ADMISSION_REFUSED));
}

/// A volume takes a moment to be made, and with WaitForFirstConsumer it is not even asked for.
#[test]
fn a_pvc_that_stays_unbound_becomes_an_error() {
    for (waits_for_consumer, expected) in [(false, Some(reason::PVC_PENDING)), (true, None)] {
        let mut world = World::new(small());
        world.observed.storage_classes[0].waits_for_consumer = waits_for_consumer;
        world.settle();
        assert_eq!(world.reconcile().1.error, None, "it is being made");
        world.observed.now = world.observed.now.checked_add(SignedDuration::from_mins(5)).unwrap();
        assert_eq!(world.reconcile().1.error, expected);
        // To fill a volume may take long.
        world.observed.pvcs.values_mut().for_each(|pvc| pvc.source = Some(String::new()));
        assert_eq!(world.reconcile().1.error, None);
        world.observed.pvcs.values_mut().for_each(|pvc| pvc.source = None);
        world.bind_pvcs();
        assert_eq!(world.reconcile().1.error, None);
    }
}

/// However long something else was wrong before.
#[test]
fn a_pvc_that_was_just_made_is_not_late() {
    let mut world = World::new(MachineSpec { template: Some("none".to_owned()), ..MachineSpec::default() });
    world.settle();
    world.observed.now = world.observed.now.checked_add(SignedDuration::from_mins(60)).unwrap();
    world.edit(small());
    for _ in 0..3 {
        assert_eq!(world.reconcile().1.error, None, "{:?}", world.status().diagnosis);
    }
}

#[test]
fn a_refusal_is_told_by_who_refuses() {
    let kubevirts = "create VirtualMachine shop/web: admission webhook \"virtualmachine-validator.kubevirt.io\" denied \
                     the request: spec.template.spec.domain.machine.type is not supported: pc";
    let policy = "create VirtualMachine shop/web: virtualmachines.kubevirt.io \"web\" is forbidden: \
                  ValidatingAdmissionPolicy 'p' with binding 'p' denied request: not on Sundays";
    let webhook =
        "create PersistentVolumeClaim shop/web-root: admission webhook \"disks.corp.example\" denied the request: no";
    let schema =
        "create VirtualMachine shop/web: VirtualMachine.kubevirt.io \"web\" is invalid: spec.x: Required value";
    let pvc = "create PersistentVolumeClaim shop/web-root: PersistentVolumeClaim \"web-root\" is invalid: spec: no";
    let unreachable = |name: &str| format!("create Secret shop/s: failed calling webhook \"{name}\": refused");
    let invalid = |words: &str| Failure::invalid(cause::INVALID_OBJECT, words);
    let silent = |name: &str| Failure::transient(cause::WEBHOOK_UNREACHABLE, unreachable(name));
    for (failure, expected) in [
        (denied(kubevirts), reason::KUBEVIRT_API_ERROR),
        (denied(policy), reason::ADMISSION_REFUSED),
        (denied(webhook), reason::ADMISSION_REFUSED),
        (denied("create Secret shop/s: secrets \"s\" is forbidden: maximum is 1"), reason::ADMISSION_REFUSED),
        (invalid(schema), reason::KUBEVIRT_API_ERROR),
        (invalid(pvc), reason::ADMISSION_REFUSED),
        (silent("virtualmachines-mutator.kubevirt.io"), reason::KUBEVIRT_API_ERROR),
        (silent("policy.corp.example"), reason::ADMISSION_REFUSED),
    ] {
        let mut world = World::new(small());
        let report = world.refused(&failure);
        let (is, why, message) = world.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        assert!(message.contains(&failure.message), "{message}");
        assert_eq!(report.events[0].reason, expected);
    }
    let mut world = World::new(small());
    world.refused(&denied(kubevirts));
    assert!(world.status().diagnosis.unwrap().contains("emulatedMachines"), "what an administrator can do");
}

/// What has no words of its own in the condition is counted by the failure itself.
#[test]
fn what_the_next_try_may_heal_is_no_error_of_the_machine() {
    for failure in [Failure::conflict(cause::OBJECT_CHANGED, "x"), Failure::transient(cause::API_SERVER_ERROR, "x")] {
        let mut world = World::new(small());
        assert_eq!(world.refused(&failure).error, None);
    }
}

#[test]
fn a_deletion_that_is_refused_says_what_is_held_up_and_goes_on() {
    let refusal = "delete VirtualMachine shop/web: virtualmachines.kubevirt.io \"web\" is forbidden: \
                   ValidatingAdmissionPolicy 'p' with binding 'p' denied request: nothing goes on Sundays";
    for (failure, expected, cure) in [
        (forbidden(), reason::PERMISSION_MISSING, "grant that to the operator's service account"),
        (denied(refusal), reason::ADMISSION_REFUSED, "whoever made the rule"),
    ] {
        let mut world = running(small());
        world.delete_machine();
        let report = world.refused(&failure);
        let (is, why, message) = world.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        for words in ["being deleted", "the deletion of the VirtualMachine is held up", &failure.message, cure] {
            assert!(message.contains(words), "{words:?} is missing in {message}");
        }
        assert_eq!(world.status().diagnosis, Some(message));
        let told: Vec<_> = report.events.iter().map(|event| (event.kind, event.reason)).collect();
        assert_eq!(told, [(EventKind::Warning, expected)]);
        assert!(world.refused(&failure).events.is_empty(), "once");

        world.reconcile();
        world.finish_shutdown();
        world.reconcile();
        assert!(world.gone, "it goes on when nobody refuses any more");
    }
}

#[test]
fn every_step_of_a_deletion_is_named_when_it_is_held_up() {
    let network = Network { name: "a".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let mut world = running(MachineSpec { networks: vec![network], ..small() });
    world.delete_machine();
    let held_up = |world: &mut World, what: &str| {
        world.refused(&forbidden());
        let diagnosis = world.status().diagnosis.unwrap();
        assert!(diagnosis.contains(&format!("the {what} is held up")), "{diagnosis}");
    };
    held_up(&mut world, "deletion of the VirtualMachine");
    world.finish_shutdown();
    held_up(&mut world, "deletion of the pvcs");
    world.observed.pvcs.clear();
    held_up(&mut world, "release of the networks");
    world.observed.networks.clear();
    held_up(&mut world, "removal of the finalizer");
}

#[test]
fn a_deletion_that_the_next_try_may_heal_says_nothing() {
    let mut world = running(small());
    world.delete_machine();
    let report = world.refused(&Failure::conflict(cause::OBJECT_CHANGED, "x"));
    assert!(report.status.is_none() && report.events.is_empty() && report.error.is_none());
}

#[test]
fn no_reason_is_both_an_error_and_none() {
    assert!(QUIET.iter().all(|reason| !ERRORS.contains(reason)));
}

proptest! {
    /// Whatever fails: the label is of a fixed set, and the reason is one that the troubleshooting page explains.
    #[test]
    fn whatever_is_told_is_on_the_page(spec in spec(), class in 0usize..5, known in 0usize..8, going in any::<bool>()) {
        let reasons = [
            cause::PERMISSION_MISSING, cause::QUOTA_EXCEEDED, cause::ADMISSION_REFUSED, cause::INVALID_OBJECT,
            cause::WEBHOOK_UNREACHABLE, cause::API_NOT_INSTALLED, cause::BAD_REQUEST, "Unheard",
        ];
        let mut world = World::new(spec).with_network("prod").with_network("storage");
        world.settle();
        if going {
            world.delete_machine();
        } else {
            world.observed.vm = None;
        }
        let report = world.refused(&Failure::new(vitivirt_api::ErrorClass::ALL[class], reasons[known], "words"));
        prop_assert!(report.error.is_none_or(|error| ERRORS.contains(&error)), "{:?}", report.error);
        let (is, why, _) = world.condition(type_::READY);
        prop_assert!(is == "True" || [&ERRORS[..], &QUIET[..]].concat().contains(&why.as_str()), "{why}");
    }
}
