//! What to say about a Machine: status, conditions, diagnosis, events, and when to look again. It is always computed from
//! everything that was seen, also after an error, and written only if it says something new.

mod conditions;
mod deletion;
mod events;
mod refusal;
mod summary;

use std::time::Duration;

use serde_json::Value;
use vitivirt_api::machine::{EffectiveResources, MachineStatus, condition_type};
use vitivirt_api::{ConditionStatus, Outcome, Plan, Report, StatusWrite, set_condition};

use crate::assessment::{Assessment, assess};
use crate::observed::{Observed, SourceView};
use summary::{Summary, summarize};

/// What a guest reports is not ours: no more of it than this reaches the status.
const MOST_ADDRESSES: usize = 16;
/// How soon a permission that was missing is tried again.
const ASK_AGAIN: Duration = Duration::from_secs(10);

pub fn report(observed: &Observed, plan: &Plan, outcome: &Outcome) -> Report {
    if observed.is_deleting() {
        return deletion::report(observed, outcome);
    }
    let assessment = assess(observed);
    let Some(summary) = summarize(observed, &assessment, outcome) else { return Report::default() };
    let status = status(observed, &assessment, &summary);
    finish(observed, plan, status, &summary)
}

fn finish(observed: &Observed, plan: &Plan, status: MachineStatus, summary: &Summary) -> Report {
    let previous = observed.machine.status.clone().unwrap_or_default();
    Report {
        events: events::of(observed, plan, &previous, &status, summary),
        status: Some(write(observed, &previous, status)),
        // Granting a permission wakes nobody.
        requeue_after: matches!(observed.source, SourceView::Forbidden(_)).then_some(ASK_AGAIN),
        error: summary.error.then_some(summary.reason),
    }
}

/// The two fields that would change with every write change only when something else does.
fn write(observed: &Observed, previous: &MachineStatus, mut desired: MachineStatus) -> StatusWrite {
    desired.last_updated.clone_from(&previous.last_updated);
    desired.resource_version.clone_from(&previous.resource_version);
    if desired != *previous {
        desired.last_updated = Some(observed.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        desired.resource_version.clone_from(&observed.machine.metadata.resource_version);
    }
    let value = |status: &MachineStatus| serde_json::to_value(status).unwrap_or(Value::Null);
    StatusWrite {
        target: observed.machine_target(),
        uid: observed.uid().to_owned(),
        observed: value(previous),
        desired: value(&desired),
    }
}

fn status(observed: &Observed, assessment: &Assessment, summary: &Summary) -> MachineStatus {
    let previous = observed.machine.status.clone().unwrap_or_default();
    let generation = observed.machine.metadata.generation;
    let vm = observed.vm.as_ref().filter(|vm| vm.controller_uid.as_deref() == Some(observed.uid()));
    let vmi = vm.and(observed.vmi.as_ref());
    let mut status = MachineStatus {
        phase: Some(summary.phase.to_owned()),
        conditions: previous.conditions,
        diagnosis: (!summary.ready).then(|| summary.message.clone()),
        vm_name: vm.map(|_| observed.name().to_owned()),
        vmi_name: vmi.map(|_| observed.name().to_owned()),
        ip_addresses: vmi.map(|vmi| vmi.addresses.iter().take(MOST_ADDRESSES).cloned().collect()).unwrap_or_default(),
        node_name: vmi.and_then(|vmi| vmi.node.clone()),
        resources: assessment
            .resolved
            .as_ref()
            .map(|resolved| EffectiveResources { cpu: resolved.cpu.cpus(), memory: resolved.memory.to_string() }),
        observed_generation: generation,
        last_updated: None,
        resource_version: None,
    };
    let mut set = |type_: &str, is: bool, reason: &str, message: &str| {
        set_condition(
            &mut status.conditions,
            type_,
            ConditionStatus::from(is),
            reason,
            message,
            generation,
            observed.now,
        );
    };
    set(condition_type::READY, summary.ready, summary.reason, &summary.message);
    let (is, reason, message) = conditions::virtual_machine(observed, summary);
    set(condition_type::VIRTUAL_MACHINE_READY, is, reason, &message);
    let (is, reason, message) = conditions::storage(observed, assessment);
    set(condition_type::STORAGE_READY, is, reason, &message);
    let (is, reason, message) = conditions::network(observed, assessment);
    set(condition_type::NETWORK_READY, is, reason, &message);
    match conditions::restart(observed) {
        Some((reason, message)) => set(condition_type::RESTART_REQUIRED, true, reason, &message),
        None => status.conditions.retain(|condition| condition.type_ != condition_type::RESTART_REQUIRED),
    }
    status
}
