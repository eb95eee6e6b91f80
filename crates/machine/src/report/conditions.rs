//! The conditions other than Ready. Each describes one part of the machine, independently of the others.

use vitivirt_api::machine::{VmiPhase, machine_reason as reason};

use super::{pending_pvcs::pending_pvcs, summary::Summary};
use crate::{
    assessment::Assessment,
    changes::{pending_restart_fields, user_data_outdated},
    observed::{Observed, VmiView},
    problem::Part,
    render::{live_parts::moved_pvcs, network::outdated_segment},
};

const NOT_EVALUATED: &str = "Not evaluated: the spec is invalid, see condition Ready";

pub(super) fn virtual_machine(observed: &Observed, summary: &Summary) -> (bool, &'static str, String) {
    let running = observed.vmi.as_ref().is_some_and(VmiView::is_running);
    match (observed.own_vm(), summary.reason) {
        (_, reason::VM_FAILED) => (false, reason::VM_FAILED, summary.message.clone()),
        (Some(_), _) if summary.ready || running => (true, reason::VM_CREATED, summary.message.clone()),
        (Some(_), _) => (false, reason::VM_CREATED, summary.message.clone()),
        (None, _) => (false, summary.reason, summary.message.clone()),
    }
}

pub(super) fn storage(observed: &Observed, assessment: &Assessment) -> (bool, &'static str, String) {
    if let Some(problem) = assessment.problems.iter().find(|problem| matches!(problem.part, Part::Disk(_))) {
        let reason = if problem.reason == reason::PVC_LOST { reason::PVC_LOST } else { reason::PVC_PENDING };
        return (false, reason, problem.message.clone());
    }
    match pending_pvcs(observed, assessment) {
        Some(pending) => (false, reason::PVC_PENDING, pending.message),
        None if assessment.resolved.is_none() => (false, reason::PVC_PENDING, NOT_EVALUATED.to_owned()),
        None => (true, reason::PVC_BOUND, bound_message(observed, assessment)),
    }
}

fn bound_message(observed: &Observed, assessment: &Assessment) -> String {
    let Some(vm) = observed.own_vm().filter(|_| !assessment.moved_disks.is_empty()) else {
        return "All disks are ready".to_owned();
    };
    let resolved = assessment.resolved.as_ref();
    let moved = resolved.into_iter().flat_map(|resolved| moved_pvcs(&vm.spec, resolved));
    let names: Vec<String> = moved
        .map(|(disk, pvc)| {
            format!("{disk} ({})", pvc.map_or_else(|| "a DataVolume".to_owned(), |pvc| format!("PVC {pvc}")))
        })
        .collect();
    format!(
        "All disks are ready; for these disks the VirtualMachine uses volumes that do not belong to the Machine, and the \
         operator keeps them: {}",
        names.join(", ")
    )
}

pub(super) fn network(observed: &Observed, assessment: &Assessment) -> (bool, &'static str, String) {
    if let Some(problem) = assessment.problems.iter().find(|problem| problem.part == Part::Networks) {
        return (false, reason::NETWORK_FAILED, problem.message.clone());
    }
    let own = |name: &str| {
        let uid = observed.networks.get(name).map(|network| network.uid.as_str());
        let attachment = observed.network_attachments.get(name);
        attachment.map(|attachment| attachment.controller_uid.as_deref() == uid)
    };
    if let Some(name) = observed.network_names().into_iter().find(|name| own(name) == Some(false)) {
        let message = format!(
            "NetworkAttachmentDefinition {name} does not belong to NetworkConfiguration {name}, so it may be another \
             network; delete the NetworkAttachmentDefinition, or use a NetworkConfiguration of another name"
        );
        return (false, reason::NETWORK_FAILED, message);
    }
    let missing = observed.network_names().into_iter().find(|name| own(name).is_none());
    match (missing, &assessment.resolved) {
        (_, None) => (false, reason::NETWORK_FAILED, NOT_EVALUATED.to_owned()),
        (Some(name), _) => {
            (false, reason::NETWORK_FAILED, format!("NetworkAttachmentDefinition {name} is being created"))
        }
        (None, Some(_)) => {
            let deleting = |name: &&str| observed.networks.get(*name).is_some_and(|network| network.deleting);
            let message = match observed.network_names().into_iter().find(deleting) {
                Some(name) => format!(
                    "All networks are ready; NetworkConfiguration {name} is being deleted and stays until no Machine uses it"
                ),
                None => "All networks are ready".to_owned(),
            };
            (true, reason::NETWORK_CONFIGURED, message)
        }
    }
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
pub(super) fn restart_required(observed: &Observed) -> Option<(&'static str, String)> {
    let (vm, vmi) = (observed.own_vm()?, observed.vmi.as_ref()?);
    let active = !vmi.deleting && !matches!(vmi.phase, VmiPhase::Succeeded | VmiPhase::Failed);
    let networks = outdated_networks(observed, vmi);
    if !(active && (vm.restart_required || user_data_outdated(observed) || !networks.is_empty())) {
        return None;
    }
    // Without KubeVirt's report, KubeVirt may still hotplug the other fields.
    let waits = |field: &String| vm.restart_required || field == "spec.cloudInit";
    let fields: Vec<String> = pending_restart_fields(observed).into_iter().filter(waits).chain(networks).collect();
    let what = if fields.is_empty() { "a change".to_owned() } else { fields.join(", ") };
    let message = format!(
        "Restart required to apply {what}; restart the machine with `virtctl restart -n {} {}`",
        observed.namespace(),
        observed.name()
    );
    Some((reason::PENDING_RESTART, message))
}
