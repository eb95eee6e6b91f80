//! The conditions other than Ready. Each describes one part of the machine, independently of the others.

use vitivirt_api::{
    ConditionStatus,
    machine::{VmiPhase, machine_reason as reason},
};

use super::{pending_pvcs::pending_pvcs, summary::Summary};
use crate::{
    assessment::Assessment,
    changes::{pending_restart_fields, user_data_outdated, with_template},
    observed::{Observed, VmiView},
    problem::Part,
    render::{live_parts::pvc_of, network::outdated_segment},
};

pub(super) fn virtual_machine(observed: &Observed, summary: &Summary) -> (bool, &'static str, String) {
    let running = observed.vmi.as_ref().is_some_and(VmiView::is_running);
    match (observed.own_vm(), summary.reason) {
        (_, reason::VM_FAILED) => (false, reason::VM_FAILED, summary.message.clone()),
        (Some(_), _) if summary.ready || running => (true, reason::VM_CREATED, summary.message.clone()),
        (Some(_), _) => (false, reason::VM_CREATED, summary.message.clone()),
        (None, _) => (false, summary.reason, summary.message.clone()),
    }
}

pub(super) fn storage(observed: &Observed, assessment: &Assessment) -> (ConditionStatus, &'static str, String) {
    if let Some(problem) = assessment.problems.iter().find(|problem| matches!(problem.part, Part::Disk(_))) {
        let reason = if problem.reason == reason::PVC_LOST { reason::PVC_LOST } else { reason::PVC_PENDING };
        return (ConditionStatus::False, reason, problem.message.clone());
    }
    if assessment.resolved.is_none() {
        return not_evaluated();
    }
    match pending_pvcs(observed, assessment) {
        Some(pending) => {
            let reason = if pending.lost { reason::PVC_LOST } else { reason::PVC_PENDING };
            (ConditionStatus::False, reason, pending.message)
        }
        None => (ConditionStatus::True, reason::PVC_BOUND, bound_message(observed, assessment)),
    }
}

fn not_evaluated() -> (ConditionStatus, &'static str, String) {
    let message = "Not evaluated, because the spec is invalid; see condition Ready";
    (ConditionStatus::Unknown, reason::NOT_EVALUATED, message.to_owned())
}

fn bound_message(observed: &Observed, assessment: &Assessment) -> String {
    let Some(vm) = observed.own_vm().filter(|_| !assessment.moved_disks.is_empty()) else {
        return "All disks are ready".to_owned();
    };
    let name = |disk: &String| Some(format!("{disk} (PVC {})", pvc_of(&vm.spec, disk)?));
    let names: Vec<String> = assessment.moved_disks.iter().filter_map(name).collect();
    format!(
        "All disks are ready; for these disks the VirtualMachine uses volumes that do not belong to the Machine, and the \
         operator keeps them: {}",
        names.join(", ")
    )
}

pub(super) fn network(observed: &Observed, assessment: &Assessment) -> (ConditionStatus, &'static str, String) {
    let failed = |message: String| (ConditionStatus::False, reason::NETWORK_FAILED, message);
    if let Some(problem) = assessment.problems.iter().find(|problem| problem.part == Part::Networks) {
        return failed(problem.message.clone());
    }
    let own = |name: &str| {
        let uid = observed.networks.get(name).map(|network| network.uid.as_str());
        let attachment = observed.network_attachments.get(name);
        attachment.map(|attachment| attachment.controller_uid.as_deref() == uid)
    };
    if let Some(name) = observed.network_names().into_iter().find(|name| own(name) == Some(false)) {
        return failed(format!(
            "NetworkAttachmentDefinition {name} does not belong to NetworkConfiguration {name}, so it may be another \
             network; delete the NetworkAttachmentDefinition, or use a NetworkConfiguration of another name"
        ));
    }
    if assessment.resolved.is_none() {
        return not_evaluated();
    }
    if let Some(name) = observed.network_names().into_iter().find(|name| own(name).is_none()) {
        return failed(format!("NetworkAttachmentDefinition {name} is being created"));
    }
    let deleting = |name: &&str| observed.networks.get(*name).is_some_and(|network| network.deleting);
    let message = match observed.network_names().into_iter().find(deleting) {
        Some(name) => format!(
            "All networks are ready; NetworkConfiguration {name} is being deleted and stays until no Machine uses it"
        ),
        None => "All networks are ready".to_owned(),
    };
    (ConditionStatus::True, reason::NETWORK_CONFIGURED, message)
}

/// The networks whose bridge or VLAN has changed since the guest was connected. Until it restarts or migrates, it is on
/// the earlier one.
fn outdated_networks(observed: &Observed, vmi: &VmiView) -> Vec<String> {
    let outdated = |name: &str| {
        let uid = observed.networks.get(name).map(|network| network.uid.as_str());
        let attachment = observed.network_attachments.get(name)?;
        let (old, new) = outdated_segment(attachment, vmi.connected_since)
            .filter(|_| uid.is_some() && attachment.controller_uid.as_deref() == uid)?;
        Some(format!("NetworkConfiguration {name} (now {new}; the guest is connected to {old})"))
    };
    observed.network_names().into_iter().filter_map(outdated).collect()
}

/// Changes that wait for a restart. KubeVirt reports whether a change of the hardware waits; the difference between
/// the VM and the running VMI shows which fields.
pub(super) fn restart_required_message(observed: &Observed) -> Option<String> {
    let (vm, vmi) = (observed.own_vm()?, observed.vmi.as_ref()?);
    let active = !vmi.deleting && !matches!(vmi.phase, VmiPhase::Succeeded | VmiPhase::Failed);
    let networks = outdated_networks(observed, vmi);
    if !(active && (vm.restart_required || user_data_outdated(observed) || !networks.is_empty())) {
        return None;
    }
    // Without KubeVirt's report, KubeVirt may still hotplug the other fields.
    let waits = |field: &String| vm.restart_required || field == "spec.cloudInit";
    let fields = pending_restart_fields(observed).into_iter().filter(waits);
    let fields = fields.map(|field| with_template(&observed.machine.spec, field));
    let fields: Vec<String> = fields.chain(networks).collect();
    let what = if fields.is_empty() { "a change".to_owned() } else { fields.join(", ") };
    Some(format!(
        "Restart required to apply {what}; restart the machine with `virtctl restart -n {} {}`",
        observed.namespace(),
        observed.name()
    ))
}

/// The changes that are impossible. The machine runs, but not as its spec describes it.
pub(super) fn changes_rejected(assessment: &Assessment) -> Option<String> {
    let changes: Vec<String> =
        assessment.rejected_changes.iter().map(|change| format!("{}: {}", change.field, change.reason)).collect();
    (!changes.is_empty()).then(|| changes.join("; "))
}
