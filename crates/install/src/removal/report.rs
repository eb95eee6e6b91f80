//! The status of a KubeVirt resource whose installation is removed. Phases, conditions and reasons are those of upstream
//! virt-operator; a removal that is blocked has its own reason.

use std::time::Duration;

use k8s_openapi::jiff::SignedDuration;
use vitivirt_api::{ErrorClass, EventKind, Outcome, Plan, Report, Stop, Write, kubevirt::KubeVirtStatus};

use super::{RemovalInput, RemovalMode, RemovalStage, has_finalizer};
use crate::{
    desired::Desired,
    names::event_reason,
    observed::Observed,
    report::{build_report, condition, phase, reason, remove_condition, set_condition},
};

/// A removal that takes longer reports what it waits for.
const QUIET_PERIOD: SignedDuration = SignedDuration::from_secs(10);
/// How often a blocked removal is checked. The end of the cause may not cause a watch event.
const REQUEUE: Duration = Duration::from_secs(10);

/// `observed` has no objects any more: they are in `input`.
pub fn removal_report(observed: &Observed, input: &RemovalInput, plan: &Plan, outcome: &Outcome) -> Report {
    let before = observed.kubevirt.status.clone().unwrap_or_default();
    let conflict = matches!(&outcome.stop, Stop::Failed { failure, .. } if failure.class == ErrorClass::Conflict);
    if conflict || releases_kubevirt(plan) || !has_finalizer(&observed.kubevirt) {
        // The resource is gone, or about to be.
        return Report::default();
    }
    let mut status = before.clone();
    let mut events = Vec::new();
    let is_complete = input.stage() == RemovalStage::Nodes && input.complete && outcome.stop == Stop::Done;
    let is_first = before.phase != phase::DELETING && before.phase != phase::DELETED;
    phase::DELETING.clone_into(&mut status.phase);
    if is_complete {
        phase::DELETED.clone_into(&mut status.phase);
    }
    set_deleting(&mut status);
    if is_first {
        events.push((EventKind::Normal, event_reason::DELETING, "KubeVirt is being removed".to_owned()));
    }
    let blocked = blocked_by(observed, input, &outcome.stop);
    if let Some((reason, message)) = &blocked {
        set_condition(&mut status, condition::SYNCHRONIZED, "False", reason, message);
        events.push((EventKind::Warning, *reason, message.clone()));
    }
    let mut report = build_report(observed, &Desired::Nothing, before, status, events);
    let check = (!is_complete).then_some(REQUEUE);
    report.requeue_after = report.requeue_after.into_iter().chain(check).min();
    report
}

fn releases_kubevirt(plan: &Plan) -> bool {
    let mut writes = plan.steps.iter().flat_map(|step| &step.writes);
    writes.any(|write| matches!(write, Write::Patch { target, .. } if target.resource.kind == "KubeVirt"))
}

fn set_deleting(status: &mut KubeVirtStatus) {
    remove_condition(status, condition::CREATED);
    remove_condition(status, condition::SYNCHRONIZED);
    for (kind, value) in
        [(condition::AVAILABLE, "False"), (condition::PROGRESSING, "False"), (condition::DEGRADED, "True")]
    {
        set_condition(status, kind, value, reason::DELETING, "Deletion was triggered");
    }
}

fn blocked_by(observed: &Observed, input: &RemovalInput, stop: &Stop) -> Option<(&'static str, String)> {
    match stop {
        Stop::Failed { failure, .. } => {
            Some((event_reason::DELETION_FAILED, format!("An error occurred during deletion: {}", failure.message)))
        }
        Stop::Waiting { wait, .. } => {
            let deleted = observed.kubevirt.metadata.deletion_timestamp.as_ref();
            let is_long = deleted.is_some_and(|at| observed.now.duration_since(at.0) >= QUIET_PERIOD);
            let is_reported = is_long && input.mode == RemovalMode::Operator;
            is_reported.then(|| (event_reason::DELETION_BLOCKED, format!("Removal is waiting: {}", wait.message)))
        }
        Stop::Done | Stop::NameConflict { .. } => None,
    }
}

/// The report of an installation that is kept, although its resource is being deleted, because `refusal` protects the
/// workloads. `report` is that of the installation.
pub fn guarded_report(observed: &Observed, mut report: Report, refusal: &str) -> Report {
    let Some(write) = &mut report.status else { return report };
    let Ok(mut status) = serde_json::from_value::<KubeVirtStatus>(write.desired.clone()) else { return report };
    phase::DELETING.clone_into(&mut status.phase);
    let before = observed.kubevirt.status.clone().unwrap_or_default();
    set_condition(&mut status, condition::SYNCHRONIZED, "False", event_reason::DELETION_BLOCKED, refusal);
    let events = vec![(EventKind::Warning, event_reason::DELETION_BLOCKED, refusal.to_owned())];
    let guarded = build_report(observed, &Desired::Nothing, before, status, events);
    report.status = guarded.status;
    // The installation itself reports nothing new.
    report.events = guarded.events;
    report.requeue_after = report.requeue_after.into_iter().chain([REQUEUE]).min();
    report
}
