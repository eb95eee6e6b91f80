//! Reports about failures: condition, event and metric have the same reason, and only errors count as errors.

use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;
use vitivirt_api::{
    ErrorClass, EventKind, Failure, Outcome, Plan, STARTING, Stop,
    machine::{
        CloudInit, MachinePhase, MachineSpec, Network, PvcPhase, SecretKeyRef, condition_type as type_,
        machine_reason::{self as reason, ERRORS, NOT_READY_REASONS},
    },
    reason as cause,
};
use vitivirt_machine::{observed::SourceView, testing::machine_spec as spec};

use crate::simulated_cluster::{SimulatedCluster, running};

fn small_spec() -> MachineSpec {
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
    let mut no_secret = SimulatedCluster::new(MachineSpec { cloud_init, ..small_spec() });
    no_secret.observed.source = SourceView::SecretMissing;
    let mut no_class = SimulatedCluster::new(small_spec());
    no_class.observed.storage_classes.clear();
    for (mut cluster, expected) in [
        (
            SimulatedCluster::new(MachineSpec { template: Some("huge".to_owned()), ..small_spec() }),
            reason::TEMPLATE_NOT_FOUND,
        ),
        (SimulatedCluster::new(MachineSpec { power_state: Some("Off".to_owned()), ..small_spec() }), reason::INVALID),
        (
            SimulatedCluster::new(MachineSpec { networks: on("prod"), ..small_spec() }),
            reason::NETWORK_CONFIGURATION_NOT_FOUND,
        ),
        (no_secret, reason::SECRET_NOT_FOUND),
        (no_class, reason::STORAGE_CLASS_NOT_FOUND),
    ] {
        let (_, report) = cluster.reconcile();
        assert_eq!((report.error, cluster.condition(type_::READY).1.as_str()), (Some(expected), expected));
        // In every reconcile while the problem lasts.
        assert_eq!(cluster.reconcile().1.error, Some(expected));
    }
}

#[test]
fn a_guest_that_cannot_run_counts_as_an_error_with_the_reason_of_its_condition() {
    let mut cluster = running(small_spec());
    cluster.start_guest("Scheduling");
    cluster.observed.vmi.as_mut().unwrap().unschedulable = Some("0/1 nodes are available".to_owned());
    assert_eq!(cluster.reconcile().1.error, Some(reason::INSUFFICIENT_RESOURCES));
    cluster.start_guest("CrashLoopBackOff");
    assert_eq!(cluster.reconcile().1.error, Some(reason::VM_FAILED));
}

#[test]
fn a_machine_without_problems_never_counts_as_an_error() {
    let mut cluster = SimulatedCluster::new(small_spec());
    let reconcile = |cluster: &mut SimulatedCluster, expected: &str| {
        let (_, report) = cluster.reconcile();
        assert_eq!(cluster.condition(type_::READY).1, expected);
        assert_eq!(report.error, None, "{expected}");
    };
    reconcile(&mut cluster, "VMCreated");
    reconcile(&mut cluster, "PVCPending");
    cluster.bind_pvcs();
    cluster.start_guest("Scheduling");
    reconcile(&mut cluster, "VMCreated");
    cluster.start_guest("Running");
    reconcile(&mut cluster, "Running");
    cluster.observed.vmi.as_mut().unwrap().paused = true;
    reconcile(&mut cluster, "Paused");
    cluster.edit(MachineSpec { power_state: Some("Stopped".to_owned()), ..small_spec() });
    reconcile(&mut cluster, "Stopping");
    cluster.observed.vmi = None;
    reconcile(&mut cluster, "Stopped");
    cluster.delete_machine();
    cluster.observed.now = cluster.observed.now.checked_add(SignedDuration::from_secs(10)).unwrap();
    reconcile(&mut cluster, "Deleting");
}

#[test]
fn a_running_machine_stays_running_when_a_write_is_rejected() {
    let cluster = running(small_spec());
    let stop = Stop::Failed { step: "PVCs", failure: denied("cannot create Secret shop/s: quota") };
    let report = vitivirt_machine::report(&cluster.assessed(), &Plan::default(), &Outcome { stop, written: 0 });
    let status = report.status.unwrap().desired;
    assert_eq!(status.phase, Some(MachinePhase::Running));
    assert!(status.diagnosis.as_ref().unwrap().contains("the machine keeps running"), "{status:?}");
    assert_eq!(report.error, Some(reason::ADMISSION_REFUSED));
}

/// Provisioning takes some time, and with WaitForFirstConsumer it starts later.
#[test]
fn a_pvc_that_stays_unbound_becomes_an_error() {
    for (waits_for_consumer, expected) in [(false, Some(reason::PVC_PENDING)), (true, None)] {
        let mut cluster = SimulatedCluster::new(small_spec());
        cluster.observed.storage_classes[0].waits_for_consumer = waits_for_consumer;
        cluster.reconcile_until_up_to_date();
        assert_eq!(cluster.reconcile().1.error, None, "it is being created");
        cluster.observed.now = cluster.observed.now.checked_add(SignedDuration::from_mins(5)).unwrap();
        assert_eq!(cluster.reconcile().1.error, expected);
        // Filling a volume may take hours.
        cluster.observed.pvcs.values_mut().for_each(|pvc| pvc.source = Some(String::new()));
        assert_eq!(cluster.reconcile().1.error, None);
        cluster.observed.pvcs.values_mut().for_each(|pvc| pvc.source = None);
        cluster.bind_pvcs();
        assert_eq!(cluster.reconcile().1.error, None);
    }
}

/// Kubernetes sets the phase when the PersistentVolume of a bound PVC is deleted.
#[test]
fn a_pvc_without_its_volume_is_lost() {
    let mut cluster = running(small_spec());
    cluster.observed.pvcs.values_mut().for_each(|pvc| pvc.phase = PvcPhase::Lost);
    let volume = cluster.observed.pvcs["web-root"].volume.clone().unwrap();
    assert_eq!(cluster.reconcile().1.error, None, "the guest runs");
    assert_eq!(cluster.condition(type_::READY).0, "True");
    let (is, why, message) = cluster.condition(type_::STORAGE_READY);
    assert_eq!((is.as_str(), why.as_str()), ("False", reason::PVC_LOST));
    for part in ["web-root", &volume, "no longer exists", "backup"] {
        assert!(message.contains(part), "{part:?} is missing in {message}");
    }
    cluster.start_guest("Scheduling");
    assert_eq!(cluster.reconcile().1.error, Some(reason::PVC_LOST));
    assert_eq!(cluster.condition(type_::READY).1, reason::PVC_LOST);
}

/// The age of the PVC counts, not the age of the Machine.
#[test]
fn a_new_pvc_of_an_old_machine_is_not_an_error() {
    let mut cluster =
        SimulatedCluster::new(MachineSpec { template: Some("none".to_owned()), ..MachineSpec::default() });
    cluster.reconcile_until_up_to_date();
    cluster.observed.now = cluster.observed.now.checked_add(SignedDuration::from_mins(60)).unwrap();
    cluster.edit(small_spec());
    for _ in 0..3 {
        assert_eq!(cluster.reconcile().1.error, None, "{:?}", cluster.status().diagnosis);
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
    let silent = |name: &str| Failure {
        failing_for: STARTING,
        ..Failure::transient(cause::WEBHOOK_UNREACHABLE, unreachable(name))
    };
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
        let mut cluster = SimulatedCluster::new(small_spec());
        let report = cluster.reconcile_with_failure(&failure);
        let (is, why, message) = cluster.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        assert!(message.starts_with(&failure.message.replacen("cannot", "Cannot", 1)), "{message}");
        assert_eq!(report.events[0].reason, expected);
    }
    let mut cluster = SimulatedCluster::new(small_spec());
    cluster.reconcile_with_failure(&denied(kubevirts));
    assert!(cluster.status().diagnosis.unwrap().contains("emulatedMachines"), "the remedy for an administrator");
}

/// The runtime counts such a failure with its own reason.
#[test]
fn a_failure_that_a_retry_may_fix_is_not_an_error_of_the_machine() {
    for failure in [Failure::conflict(cause::OBJECT_CHANGED, "x"), Failure::transient(cause::API_SERVER_ERROR, "x")] {
        let mut cluster = SimulatedCluster::new(small_spec());
        assert_eq!(cluster.reconcile_with_failure(&failure).error, None);
    }
}

/// Otherwise a write that fails for hours would hide that the guest stopped or moved to another node.
#[test]
fn the_status_follows_the_vm_while_a_write_keeps_failing() {
    for name in [cause::API_SERVER_ERROR, cause::API_UNAVAILABLE, cause::TOO_MANY_REQUESTS, cause::DEADLINE_EXCEEDED] {
        let failure = |failing_for| Failure { failing_for, ..Failure::transient(name, "no response") };
        let mut cluster = running(small_spec());
        let before = cluster.status();
        cluster.edit(MachineSpec { template: Some("medium".to_owned()), ..MachineSpec::default() });
        cluster.observed.vmi.as_mut().unwrap().node = Some("another-node".to_owned());
        cluster.reconcile_with_failure(&failure(STARTING / 2));
        assert_eq!(cluster.status(), before, "{name}: it may succeed soon");
        let report = cluster.reconcile_with_failure(&failure(STARTING));
        let (is, why, message) = cluster.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("True", reason::RUNNING, None), "{message}");
        let end = "; the operator cannot apply the spec: no response; it retries automatically";
        assert!(message.starts_with("Machine is running") && message.contains(end), "{message}");
        let status = cluster.status();
        assert_eq!(status.node_name.as_deref(), Some("another-node"));
        assert_eq!(status.observed_generation, cluster.observed.machine.metadata.generation);
        cluster.start_guest("Scheduling");
        cluster.reconcile_with_failure(&failure(STARTING));
        assert_eq!(cluster.condition(type_::READY).0, "False");

        let mut cluster = running(small_spec());
        (cluster.observed.vm, cluster.observed.vmi) = (None, None);
        cluster.reconcile_with_failure(&failure(STARTING));
        let (is, _, message) = cluster.condition(type_::READY);
        assert!(is == "False" && message.contains("the last attempt failed: no response"), "{message}");
    }
}

/// Pods are ready before their endpoints are in place everywhere, and a CRD exists before it is served.
#[test]
fn a_webhook_that_is_not_reachable_yet_is_not_an_error_of_the_machine() {
    for name in [cause::WEBHOOK_UNREACHABLE, cause::API_NOT_INSTALLED, cause::API_UNAVAILABLE] {
        let failure = Failure::transient(name, "connection refused");
        let mut cluster = SimulatedCluster::new(small_spec());
        let report = cluster.reconcile_with_failure(&failure);
        let (is, why, message) = cluster.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", reason::VM_CREATED, None), "{message}");
        assert!(message.contains("connection refused"), "{message}");
        assert_eq!(report.events[0].kind, EventKind::Normal);

        let mut cluster = running(small_spec());
        let before = cluster.status();
        cluster.observed.vm = None;
        cluster.reconcile_with_failure(&failure);
        assert_eq!(cluster.status(), before, "a machine that runs stays as it is");
        cluster.delete_machine();
        let report = cluster.reconcile_with_failure(&failure);
        assert!(report.status.is_none() && report.error.is_none());
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
        let mut cluster = running(small_spec());
        cluster.delete_machine();
        let report = cluster.reconcile_with_failure(&failure);
        let (is, why, message) = cluster.condition(type_::READY);
        assert_eq!((is.as_str(), why.as_str(), report.error), ("False", expected, Some(expected)), "{message}");
        for part in ["being deleted", "the deletion of the VirtualMachine failed", &failure.message, remedy] {
            assert!(message.contains(part), "{part:?} is missing in {message}");
        }
        let url = vitivirt_api::troubleshooting_url(expected);
        assert_eq!(cluster.status().diagnosis, Some(format!("{message}; see {url}")));
        let events: Vec<_> = report.events.iter().map(|event| (event.kind, event.reason)).collect();
        assert_eq!(events, [(EventKind::Warning, expected)]);
        assert!(cluster.reconcile_with_failure(&failure).events.is_empty(), "once");

        cluster.reconcile();
        cluster.finish_shutdown();
        cluster.reconcile();
        assert!(cluster.machine_deleted, "the deletion continues when nothing rejects it");
    }
}

#[test]
fn a_failed_deletion_is_reported_with_its_step() {
    let network = Network { name: "a".to_owned(), network_name: "prod".to_owned(), ..Network::default() };
    let mut cluster = running(MachineSpec { networks: vec![network], ..small_spec() });
    cluster.delete_machine();
    let fails = |cluster: &mut SimulatedCluster, what: &str| {
        cluster.reconcile_with_failure(&forbidden());
        let diagnosis = cluster.status().diagnosis.unwrap();
        assert!(diagnosis.contains(&format!("the {what} failed")), "{diagnosis}");
    };
    fails(&mut cluster, "deletion of the VirtualMachine");
    cluster.finish_shutdown();
    fails(&mut cluster, "deletion of the PVCs");
    cluster.observed.pvcs.clear();
    fails(&mut cluster, "release of the networks");
    cluster.observed.networks.clear();
    fails(&mut cluster, "removal of the finalizer");
}

#[test]
fn a_failed_deletion_that_a_retry_may_fix_is_not_reported() {
    let mut cluster = running(small_spec());
    cluster.delete_machine();
    let report = cluster.reconcile_with_failure(&Failure::conflict(cause::OBJECT_CHANGED, "x"));
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
        let mut cluster = SimulatedCluster::new(spec).with_network("prod").with_network("storage");
        cluster.reconcile_until_up_to_date();
        if deleting {
            cluster.delete_machine();
        } else {
            cluster.observed.vm = None;
        }
        let report = cluster.reconcile_with_failure(&Failure::new(ErrorClass::ALL[class], reasons[known], "message"));
        prop_assert!(report.error.is_none_or(|error| ERRORS.contains(&error)), "{:?}", report.error);
        let (is, why, _) = cluster.condition(type_::READY);
        prop_assert!(is == "True" || [&ERRORS[..], &NOT_READY_REASONS[..]].concat().contains(&why.as_str()), "{why}");
    }
}

/// The scheduler reports every guest whose volumes are being created as unschedulable.
#[test]
fn a_guest_that_waits_for_its_volumes_does_not_lack_resources() {
    let mut cluster = SimulatedCluster::new(small_spec());
    cluster.reconcile_until_up_to_date();
    cluster.start_guest("Scheduling");
    let message = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims";
    cluster.observed.vmi.as_mut().unwrap().unschedulable = Some(message.to_owned());
    assert_eq!(cluster.reconcile().1.error, None);
    assert_eq!(cluster.condition(type_::READY).1, reason::PVC_PENDING);
    cluster.bind_pvcs();
    assert_eq!(cluster.reconcile().1.error, Some(reason::INSUFFICIENT_RESOURCES));
}
