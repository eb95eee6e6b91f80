//! Events on every transition and every error; none at steady state.

use api::machine::{MachineStatus, condition_type, phase};
use api::{EventKind, EventNote, ObjectRef, Plan};

use crate::observed::Observed;
use crate::report::verdict::Verdict;

pub(super) fn of(
    observed: &Observed,
    plan: &Plan,
    previous: &MachineStatus,
    status: &MachineStatus,
    verdict: &Verdict,
) -> Vec<EventNote> {
    let ready = |status: &MachineStatus| {
        let condition = status.conditions.iter().find(|condition| condition.type_ == condition_type::READY);
        condition.map(|condition| (condition.status.clone(), condition.reason.clone()))
    };
    let changed = previous.phase != status.phase || ready(previous) != ready(status);
    if !changed {
        return Vec::new();
    }
    let good = verdict.ready || matches!(verdict.phase, phase::CREATING | phase::RUNNING) && !is_error(verdict.reason);
    vec![EventNote {
        about: ObjectRef {
            api_version: "vitistack.io/v1alpha1".to_owned(),
            kind: "Machine".to_owned(),
            key: observed.key(observed.name()),
            uid: observed.uid().to_owned(),
        },
        kind: if good { EventKind::Normal } else { EventKind::Warning },
        reason: verdict.reason,
        action: if plan.write_count() > 0 { "Reconcile" } else { "Observe" },
        message: verdict.message.clone(),
    }]
}

fn is_error(reason: &str) -> bool {
    use api::machine::machine_reason as known;
    !matches!(
        reason,
        known::VM_CREATED
            | known::PVC_PENDING
            | known::RUNNING
            | known::STOPPED
            | known::STOPPING
            | known::PAUSED
            | known::DELETING
    )
}
