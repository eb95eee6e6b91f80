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
    machine::{
        DiskStatus, EffectiveResources, MachinePhase, MachineStatus, PvcPhase, condition_type, machine_reason as reason,
    },
    set_condition,
};

pub use self::settle::{Settled, WaitingState, settle};
use self::summary::{Summary, summarize};
use crate::{
    assessment::{Assessed, Assessment, migration_source},
    observed::{Observed, SourceView},
    ownership,
    render::live_parts::pvc_of,
    repairs::next_repair,
    resolve::{DiskBacking, ResolvedDisk, pvc_name},
    warnings::boot_warning,
};

/// The guest reports its addresses, so their number has a limit.
const MAX_ADDRESSES: usize = 16;
/// The disks that were removed from the spec and that the status keeps.
const MAX_REMOVED_DISKS: usize = 16;
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

/// The PVCs and volumes of the disks. An entry stays when its PVC is lost. It also stays when its disk was removed from the
/// spec, unless the name of the PVC says which disk it holds.
fn disks(observed: &Observed, assessment: &Assessment, previous: &[DiskStatus]) -> Vec<DiskStatus> {
    let Some(resolved) = &assessment.resolved else {
        let followed = |have: &DiskStatus| moved_disk(observed, &have.name, previous).unwrap_or_else(|| have.clone());
        return previous.iter().map(followed).collect();
    };
    let status = |disk: &ResolvedDisk| {
        let DiskBacking::Pvc { pvc, .. } = &disk.backing else {
            // An edit may bring the disk back to the PVC in which it was.
            let default_name = pvc_name(observed.name(), &disk.name);
            return previous.iter().find(|have| have.name == disk.name && have.pvc != default_name).cloned();
        };
        if assessment.moved_disks.contains(&disk.name) {
            return moved_disk(observed, &disk.name, previous);
        }
        let bound =
            observed.pvcs.get(pvc).filter(|view| view.phase == PvcPhase::Bound && !assessment.stops_disk(&disk.name));
        let entry = |volume| DiskStatus { name: disk.name.clone(), pvc: pvc.clone(), volume, external: false };
        match bound.and_then(|view| view.volume.clone()) {
            Some(volume) => Some(entry(volume)),
            None => previous.iter().find(|have| have.pvc == *pvc).cloned().or_else(|| {
                let is_own = |view| ownership::pvc(observed, pvc, view).is_own();
                let is_restored = !observed.is_named_by_spec(pvc) && observed.pvcs.get(pvc).is_some_and(is_own);
                is_restored.then(|| entry(String::new()))
            }),
        }
    };
    let is_removed = |have: &&DiskStatus| {
        let is_kept = have.external || observed.pvcs.contains_key(&have.pvc) || observed.live_check_failure.is_some();
        let default_name = pvc_name(observed.name(), &have.name);
        is_kept && have.pvc != default_name && resolved.disks.iter().all(|disk| disk.name != have.name)
    };
    let removed = previous.iter().filter(is_removed).take(MAX_REMOVED_DISKS).cloned();
    resolved.disks.iter().filter_map(status).chain(removed).collect()
}

/// The PVC in which the VM has a disk. While KubeVirt copies the data, the disk is still where it was.
fn moved_disk(observed: &Observed, name: &str, previous: &[DiskStatus]) -> Option<DiskStatus> {
    let vm = observed.own_vm()?;
    let pvc = migration_source(observed, name).or_else(|| pvc_of(&vm.spec, name))?;
    if let Some(have) = previous.iter().find(|have| have.name == name && have.pvc == pvc) {
        return Some(have.clone());
    }
    let own = observed.pvcs.get(pvc).filter(|view| ownership::pvc(observed, pvc, view).is_own());
    let volume = own.and_then(|view| view.volume.clone()).unwrap_or_default();
    Some(DiskStatus { name: name.to_owned(), pvc: pvc.to_owned(), volume, external: own.is_none() })
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
    let mut set = |type_: &str, is: ConditionStatus, reason: &str, message: &str| {
        set_condition(&mut status.conditions, type_, is, reason, message, generation, observed.now);
    };
    set(condition_type::READY, summary.ready.into(), summary.reason, &summary.full_message());
    let (is, reason, message) = conditions::virtual_machine(observed, summary);
    set(condition_type::VIRTUAL_MACHINE_READY, is.into(), reason, &message);
    let (is, reason, message) = conditions::storage(observed, assessment);
    set(condition_type::STORAGE_READY, is, reason, &message);
    let (is, reason, message) = conditions::network(observed, assessment);
    set(condition_type::NETWORK_READY, is, reason, &message);
    let restart = conditions::restart_required_message(observed);
    let rejected = conditions::changes_rejected(assessment);
    let optional = [
        (condition_type::RESTART_REQUIRED, reason::PENDING_RESTART, restart),
        (condition_type::CHANGES_REJECTED, reason::IMPOSSIBLE_CHANGE, rejected),
    ];
    for (type_, reason, message) in &optional {
        if let Some(message) = message {
            set(type_, ConditionStatus::True, reason, message);
        }
    }
    let is_over = |type_: &str| optional.iter().any(|(known, _, message)| *known == type_ && message.is_none());
    status.conditions.retain(|condition| !is_over(&condition.type_));
    status
}
