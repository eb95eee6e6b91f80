//! Events: one for every change of phase, readiness or reason, none while nothing changes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use vitivirt_api::{
    EventKind, EventRecord, Plan,
    machine::{MachineStatus, condition_type, machine_reason as reason},
};

use super::summary::Summary;
use crate::{observed::Observed, plan::step, repairs};

pub(super) fn events(
    observed: &Observed,
    plan: &Plan,
    previous: &MachineStatus,
    status: &MachineStatus,
    summary: &Summary,
) -> Vec<EventRecord> {
    let ready = |status: &MachineStatus| {
        find(status, condition_type::READY).map(|condition| (condition.status.clone(), condition.reason.clone()))
    };
    let mut events = repairs::events(observed, plan);
    events.extend(power_restored(observed, plan));
    events.extend(restart_required(observed, previous, status));
    events.extend(changes_rejected(observed, previous, status));
    let changed = previous.phase != status.phase || ready(previous) != ready(status);
    if !changed {
        return events;
    }
    events.push(EventRecord {
        about: observed.event_subject(),
        kind: if summary.error { EventKind::Warning } else { EventKind::Normal },
        reason: summary.reason,
        action: if plan.write_count() > 0 { "Reconcile" } else { "Observe" },
        message: summary.full_message(),
    });
    events
}

/// A user started or stopped the VM directly. The event explains why the operator reverts that.
fn power_restored(observed: &Observed, plan: &Plan) -> Option<EventRecord> {
    let writes_vm = plan.steps.iter().any(|step| step.name == step::VIRTUAL_MACHINE);
    let found = observed.vm.as_ref().filter(|_| writes_vm)?.spec.get("runStrategy")?.as_str()?;
    let (desired, state) = match observed.machine.spec.power_state.as_deref() {
        Some("Stopped") => ("Halted", "Stopped"),
        _ => ("Always", "Running"),
    };
    // An edit of powerState changes the generation. Then the difference is the edit.
    let edited = observed.machine.status.as_ref().and_then(|status| status.observed_generation)
        != observed.machine.metadata.generation;
    (found != desired && !edited).then(|| EventRecord {
        about: observed.event_subject(),
        kind: EventKind::Normal,
        reason: reason::POWER_STATE_RESTORED,
        action: "Reconcile",
        message: format!(
            "VirtualMachine has runStrategy {found}; the operator resets it to {desired} because powerState is \
             {state}; to start or stop the machine, change powerState"
        ),
    })
}

/// Once, when the first change waits for a restart.
fn restart_required(observed: &Observed, previous: &MachineStatus, status: &MachineStatus) -> Option<EventRecord> {
    let condition = find(status, condition_type::RESTART_REQUIRED)
        .filter(|_| find(previous, condition_type::RESTART_REQUIRED).is_none())?;
    Some(condition_event(observed, EventKind::Normal, reason::PENDING_RESTART, condition))
}

/// Once per set of impossible changes.
fn changes_rejected(observed: &Observed, previous: &MachineStatus, status: &MachineStatus) -> Option<EventRecord> {
    let condition = find(status, condition_type::CHANGES_REJECTED)?;
    let is_known =
        find(previous, condition_type::CHANGES_REJECTED).is_some_and(|known| known.message == condition.message);
    (!is_known).then(|| condition_event(observed, EventKind::Warning, reason::IMPOSSIBLE_CHANGE, condition))
}

fn find<'a>(status: &'a MachineStatus, type_: &str) -> Option<&'a Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_)
}

fn condition_event(observed: &Observed, kind: EventKind, reason: &'static str, condition: &Condition) -> EventRecord {
    EventRecord { about: observed.event_subject(), kind, reason, action: "Observe", message: condition.message.clone() }
}
