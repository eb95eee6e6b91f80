//! The conditions other than Ready. Each describes one part of the machine, independently of the others.

use vitivirt_api::machine::{VmiPhase, machine_reason as reason};

use super::{pending_pvcs::pending_pvcs, summary::Summary};
use crate::{
    assessment::Assessment,
    changes::{pending_restart_fields, user_data_outdated},
    observed::{Observed, VmiView},
};

const NOT_EVALUATED: &str = "Not evaluated: the spec is invalid, see condition Ready";

pub(super) fn virtual_machine(observed: &Observed, summary: &Summary) -> (bool, &'static str, String) {
    let running = observed.vmi.as_ref().is_some_and(VmiView::is_running);
    match (&observed.vm, summary.reason) {
        (_, reason::VM_FAILED) => (false, reason::VM_FAILED, summary.message.clone()),
        (Some(_), _) if summary.ready || running => (true, reason::VM_CREATED, summary.message.clone()),
        (Some(_), _) => (false, reason::VM_CREATED, summary.message.clone()),
        (None, _) => (false, summary.reason, summary.message.clone()),
    }
}

pub(super) fn storage(observed: &Observed, assessment: &Assessment) -> (bool, &'static str, String) {
    let about_storage = [reason::STORAGE_CLASS_NOT_FOUND, reason::CDI_NOT_INSTALLED];
    if let Some(problem) = assessment.blocker.as_ref().filter(|problem| about_storage.contains(&problem.reason)) {
        return (false, reason::PVC_PENDING, problem.message.clone());
    }
    match pending_pvcs(observed, assessment) {
        Some(pending) => (false, reason::PVC_PENDING, pending.message),
        None if assessment.resolved.is_none() => (false, reason::PVC_PENDING, NOT_EVALUATED.to_owned()),
        None => (true, reason::PVC_BOUND, "All disks are ready".to_owned()),
    }
}

pub(super) fn network(observed: &Observed, assessment: &Assessment) -> (bool, &'static str, String) {
    let about_networks =
        [reason::NETWORK_CONFIGURATION_NOT_FOUND, reason::MULTUS_NOT_INSTALLED, reason::MAC_ADDRESS_IN_USE];
    if let Some(problem) = assessment.blocker.as_ref().filter(|problem| about_networks.contains(&problem.reason)) {
        return (false, reason::NETWORK_FAILED, problem.message.clone());
    }
    let missing = observed.network_names().into_iter().find(|name| !observed.network_attachments.contains_key(*name));
    match (missing, &assessment.resolved) {
        (_, None) => (false, reason::NETWORK_FAILED, NOT_EVALUATED.to_owned()),
        (Some(name), _) => {
            (false, reason::NETWORK_FAILED, format!("NetworkAttachmentDefinition {name} is being created"))
        }
        (None, Some(_)) => (true, reason::NETWORK_CONFIGURED, "All networks are ready".to_owned()),
    }
}

/// Changes that wait for a restart. KubeVirt reports whether a change of the hardware waits; the difference between
/// the VM and the running VMI shows which fields.
pub(super) fn restart_required(observed: &Observed) -> Option<(&'static str, String)> {
    let (vm, vmi) = (observed.vm.as_ref()?, observed.vmi.as_ref()?);
    let active = !vmi.deleting && !matches!(vmi.phase, VmiPhase::Succeeded | VmiPhase::Failed);
    if !(active && (vm.restart_required || user_data_outdated(observed))) {
        return None;
    }
    // Without KubeVirt's report, KubeVirt may still hotplug the other fields.
    let waits = |field: &String| vm.restart_required || field == "spec.cloudInit";
    let fields: Vec<String> = pending_restart_fields(observed).into_iter().filter(waits).collect();
    let what = if fields.is_empty() { "a change".to_owned() } else { fields.join(", ") };
    let message =
        format!("Restart required to apply {what}; restart the machine with `virtctl restart {}`", observed.name());
    Some((reason::PENDING_RESTART, message))
}
