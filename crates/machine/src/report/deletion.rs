//! The report about a Machine that is being deleted: nothing while the deletion is quick, what it waits for if it is
//! not, and failures immediately. Only the condition Ready and the diagnosis change; the rest of the status stays.

use std::time::Duration;

use vitivirt_api::{
    ConditionStatus, ErrorClass, Failure, Outcome, Plan, Report, Stop, Wait,
    machine::{MachinePhase, MachineStatus, condition_type, machine_reason::DELETING},
    set_condition,
};

use super::{
    build_report,
    failures::classify_failure,
    settle::until,
    summary::{Summary, not_ready},
};
use crate::{delete::must_record, observed::Observed};

/// A quicker deletion is not worth a status write.
const VISIBLE_AFTER: Duration = Duration::from_secs(2);

pub(super) fn report(observed: &Observed, outcome: &Outcome) -> Report<MachineStatus> {
    match &outcome.stop {
        Stop::Waiting { wait, .. } => waiting_report(observed, wait),
        Stop::Failed { step, failure } => failure_report(observed, step, failure),
        Stop::Done | Stop::NameConflict { .. } => Report::default(),
    }
}

/// A failure that a retry may fix is reported when the deletion takes long.
fn failure_report(observed: &Observed, step: &str, failure: &Failure) -> Report<MachineStatus> {
    let what = match &observed.live_check_failure {
        Some(_) => "the operator could not check whether its VirtualMachine still exists".to_owned(),
        None => format!("the {step} failed"),
    };
    match classify_failure(failure) {
        Some((reason, error)) => {
            let message = format!("Machine is being deleted, but {what}: {error}");
            ready_false_report(observed, &not_ready(MachinePhase::Creating, reason, message))
        }
        None if remaining_quiet_time(observed).is_zero() && failure.class != ErrorClass::Conflict => {
            let message = format!(
                "Machine is being deleted, but {what}: {}; the operator retries automatically",
                failure.message
            );
            ready_false_report(observed, &not_ready(MachinePhase::Creating, DELETING, message))
        }
        None => Report::default(),
    }
}

/// The time for which a deletion that is not complete is not reported yet.
fn remaining_quiet_time(observed: &Observed) -> Duration {
    let since = observed.machine.metadata.deletion_timestamp.as_ref().map(|time| time.0);
    until(since, VISIBLE_AFTER, observed.now)
}

fn waiting_report(observed: &Observed, wait: &Wait) -> Report<MachineStatus> {
    let remaining = remaining_quiet_time(observed);
    if !remaining.is_zero() && !must_record(observed) {
        // The deletion timestamp has whole seconds, so the requeue adds a margin.
        return Report { requeue_after: Some(remaining + Duration::from_millis(100)), ..Report::default() };
    }
    let message = format!("Machine is being deleted: {}", wait.message);
    let report = ready_false_report(observed, &not_ready(MachinePhase::Creating, wait.reason, message));
    if remaining.is_zero() { report } else { Report { events: Vec::new(), ..report } }
}

fn ready_false_report(observed: &Observed, summary: &Summary) -> Report<MachineStatus> {
    let mut status = observed.machine.status.clone().unwrap_or_default();
    status.diagnosis = Some(summary.diagnosis());
    set_condition(
        &mut status.conditions,
        condition_type::READY,
        ConditionStatus::False,
        summary.reason,
        &summary.message,
        observed.machine.metadata.generation,
        observed.now,
    );
    if must_record(observed) {
        set_condition(
            &mut status.conditions,
            condition_type::DELETING,
            ConditionStatus::True,
            DELETING,
            "VirtualMachine and disks without onDelete: Retain are deleted with the Machine",
            observed.machine.metadata.generation,
            observed.now,
        );
    }
    build_report(observed, &Plan::default(), status, summary)
}
