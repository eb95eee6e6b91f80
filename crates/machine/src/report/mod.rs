//! The report about a Machine: status, conditions, diagnosis, events and requeue time. It is always computed from the
//! whole observed state, also after an error, and written only if it changed.

mod conditions;
mod deletion;
mod events;
mod failures;
mod launcher;
mod pending_pvcs;
mod settle;
mod summary;

use std::time::Duration;

use vitivirt_api::{
    ConditionStatus, Outcome, Plan, Report, StatusWrite,
    machine::{DiskStatus, EffectiveResources, MachinePhase, MachineStatus, PvcPhase, condition_type},
    set_condition,
};

pub use self::settle::{Settled, WaitingState, settle};
use self::summary::{Summary, summarize};
use crate::{
    assessment::{Assessed, Assessment},
    boot::boot_warning,
    observed::{Observed, SourceView},
    repairs::next_repair,
    resolve::{DiskBacking, ResolvedDisk},
};

/// The guest reports its addresses, so their number has a limit.
const MAX_ADDRESSES: usize = 16;
/// The delay before a missing permission is tried again.
const PERMISSION_RETRY: Duration = Duration::from_secs(10);

pub fn report(assessed: &Assessed, plan: &Plan, outcome: &Outcome) -> Report<MachineStatus> {
    let (observed, assessment) = (assessed.observed(), assessed.assessment());
    if observed.is_deleting() {
        return deletion::report(observed, outcome);
    }
    let Some(mut summary) = summarize(observed, assessment, outcome) else { return Report::default() };
    if summary.ready && summary.phase == MachinePhase::Running {
        summary.note = boot_warning(assessed);
    }
    let status = status(observed, assessment, &summary);
    build_report(observed, plan, status, &summary)
}

fn build_report(observed: &Observed, plan: &Plan, status: MachineStatus, summary: &Summary) -> Report<MachineStatus> {
    let previous = observed.machine.status.clone().unwrap_or_default();
    Report {
        events: events::events(observed, plan, &previous, &status, summary),
        status: Some(status_write(observed, previous, status)),
        requeue_after: requeue_after(observed),
        error: summary.error.then_some(summary.reason),
    }
}

/// Granting a permission triggers no reconcile, and neither does the end of a delay of repairs.
fn requeue_after(observed: &Observed) -> Option<Duration> {
    let lacks_permission = observed.live_check_failure.is_some()
        || matches!(observed.source, SourceView::Forbidden(_) | SourceView::Failed(_));
    lacks_permission.then_some(PERMISSION_RETRY).into_iter().chain(next_repair(observed)).min()
}

/// `lastUpdated` and `resourceVersion` change only if another field does. Otherwise every report would be a write.
fn status_write(
    observed: &Observed,
    previous: MachineStatus,
    mut desired: MachineStatus,
) -> StatusWrite<MachineStatus> {
    desired.last_updated.clone_from(&previous.last_updated);
    desired.resource_version.clone_from(&previous.resource_version);
    if desired != previous {
        desired.last_updated = Some(observed.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        desired.resource_version.clone_from(&observed.machine.metadata.resource_version);
    }
    StatusWrite { target: observed.machine_target(), uid: observed.uid().to_owned(), observed: previous, desired }
}

/// The volumes of the disks in the spec. An entry stays when its PVC is lost.
fn disks(observed: &Observed, assessment: &Assessment, previous: &[DiskStatus]) -> Vec<DiskStatus> {
    let Some(resolved) = &assessment.resolved else { return previous.to_vec() };
    let status = |disk: &ResolvedDisk| {
        let DiskBacking::Pvc { pvc, .. } = &disk.backing else { return None };
        let bound =
            observed.pvcs.get(pvc).filter(|view| view.phase == PvcPhase::Bound && !assessment.stops_disk(&disk.name));
        match bound.and_then(|view| view.volume.clone()) {
            Some(volume) => Some(DiskStatus { name: disk.name.clone(), pvc: pvc.clone(), volume }),
            None => previous.iter().find(|have| have.pvc == *pvc).cloned().or_else(|| {
                let is_restored = !observed.is_named_by_spec(pvc);
                is_restored.then(|| DiskStatus { name: disk.name.clone(), pvc: pvc.clone(), volume: String::new() })
            }),
        }
    };
    let own = resolved.disks.iter().filter(|disk| !assessment.moved_disks.contains(&disk.name));
    own.filter_map(status).collect()
}

fn status(observed: &Observed, assessment: &Assessment, summary: &Summary) -> MachineStatus {
    let previous = observed.machine.status.clone().unwrap_or_default();
    let generation = observed.machine.metadata.generation;
    let vm = observed.own_vm();
    let vmi = vm.and(observed.vmi.as_ref());
    let disks = disks(observed, assessment, &previous.disks);
    let mut status = MachineStatus {
        phase: Some(summary.phase),
        conditions: previous.conditions,
        diagnosis: (!summary.ready).then(|| summary.diagnosis()),
        vm_name: vm.map(|_| observed.name().to_owned()),
        vmi_name: vmi.map(|_| observed.name().to_owned()),
        ip_addresses: vmi.map(|vmi| vmi.addresses.iter().take(MAX_ADDRESSES).cloned().collect()).unwrap_or_default(),
        node_name: vmi.and_then(|vmi| vmi.node.clone()),
        disks,
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
    set(condition_type::READY, summary.ready, summary.reason, &summary.full_message());
    let (is, reason, message) = conditions::virtual_machine(observed, summary);
    set(condition_type::VIRTUAL_MACHINE_READY, is, reason, &message);
    let (is, reason, message) = conditions::storage(observed, assessment);
    set(condition_type::STORAGE_READY, is, reason, &message);
    let (is, reason, message) = conditions::network(observed, assessment);
    set(condition_type::NETWORK_READY, is, reason, &message);
    match conditions::restart_required(observed) {
        Some((reason, message)) => set(condition_type::RESTART_REQUIRED, true, reason, &message),
        None => status.conditions.retain(|condition| condition.type_ != condition_type::RESTART_REQUIRED),
    }
    status
}
