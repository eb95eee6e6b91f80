//! Events on every transition and every error; none at steady state.

use vitivirt_api::machine::{MachineStatus, condition_type, machine_reason as reason};
use vitivirt_api::{EventKind, EventRecord, EventSubject, Plan};

use crate::observed::Observed;
use crate::report::summary::Summary;

pub(super) fn of(
    observed: &Observed,
    plan: &Plan,
    previous: &MachineStatus,
    status: &MachineStatus,
    summary: &Summary,
) -> Vec<EventRecord> {
    let ready = |status: &MachineStatus| {
        let condition = status.conditions.iter().find(|condition| condition.type_ == condition_type::READY);
        condition.map(|condition| (condition.status.clone(), condition.reason.clone()))
    };
    let mut notes: Vec<EventRecord> =
        [power_restored(observed, plan), restart_required(observed, previous, status)].into_iter().flatten().collect();
    let changed = previous.phase != status.phase || ready(previous) != ready(status);
    if !changed {
        return notes;
    }
    notes.push(EventRecord {
        about: about(observed),
        kind: if summary.error { EventKind::Warning } else { EventKind::Normal },
        reason: summary.reason,
        action: if plan.write_count() > 0 { "Reconcile" } else { "Observe" },
        message: summary.message.clone(),
    });
    notes
}

fn about(observed: &Observed) -> EventSubject {
    EventSubject {
        api_version: "vitistack.io/v1alpha1".to_owned(),
        kind: "Machine".to_owned(),
        key: observed.key(observed.name()),
        uid: observed.uid().to_owned(),
    }
}

/// Somebody started or stopped the VM by hand. Whoever did it should learn why it did not last.
fn power_restored(observed: &Observed, plan: &Plan) -> Option<EventRecord> {
    let writes_vm = plan.steps.iter().any(|step| step.name == crate::plan::step::VIRTUAL_MACHINE);
    let found = observed.vm.as_ref().filter(|_| writes_vm)?.spec.get("runStrategy")?.as_str()?;
    let (wanted, state) = match observed.machine.spec.power_state.as_deref() {
        Some("Stopped") => ("Halted", "Stopped"),
        _ => ("Always", "Running"),
    };
    // An edit of powerState itself changes the generation; then nobody contradicted it.
    let edited = observed.machine.status.as_ref().and_then(|status| status.observed_generation)
        != observed.machine.metadata.generation;
    (found != wanted && !edited).then(|| EventRecord {
        about: about(observed),
        kind: EventKind::Normal,
        reason: reason::POWER_STATE_RESTORED,
        action: "Reconcile",
        message: format!("the VirtualMachine's runStrategy was {found} and is {wanted} again, because powerState is {state}; change powerState instead"),
    })
}

/// Once, when something begins to wait for a restart.
fn restart_required(observed: &Observed, previous: &MachineStatus, status: &MachineStatus) -> Option<EventRecord> {
    let find = |status: &'_ MachineStatus| {
        status.conditions.iter().find(|have| have.type_ == condition_type::RESTART_REQUIRED).cloned()
    };
    let condition = find(status).filter(|_| find(previous).is_none())?;
    Some(EventRecord {
        about: about(observed),
        kind: EventKind::Normal,
        reason: reason::PENDING_RESTART,
        action: "Observe",
        message: condition.message,
    })
}
