//! The conditions beside Ready: each says how one part of the machine is, whatever the others do.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use vitivirt_api::machine::machine_reason as reason;

use crate::assessment::Assessment;
use crate::changes::{is_seeded_otherwise, waiting};
use crate::observed::{Observed, PvcView};
use crate::report::summary::Summary;
use crate::resolve::Content;

pub(super) fn virtual_machine(observed: &Observed, summary: &Summary) -> (bool, &'static str, String) {
    let running = observed.vmi.as_ref().is_some_and(|vmi| vmi.phase == "Running");
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
        None if assessment.resolved.is_none() => {
            (false, reason::PVC_PENDING, "the spec cannot be understood yet".to_owned())
        }
        None => (true, reason::PVC_BOUND, "every disk has its storage".to_owned()),
    }
}

/// Claims that are not bound yet.
pub(super) struct Pending {
    /// Which, and why that may be.
    pub(super) message: String,
    /// One of them waits for nothing but its volume, and has for long.
    pub(super) overdue: bool,
}

/// How long the storage may take to make an empty volume before that is an error. To fill one may take hours.
const PROVISIONING: SignedDuration = SignedDuration::from_mins(1);

pub(super) fn pending_pvcs(observed: &Observed, assessment: &Assessment) -> Option<Pending> {
    let resolved = assessment.resolved.as_ref()?;
    let (mut pending, mut overdue) = (Vec::new(), false);
    for disk in &resolved.disks {
        let Content::Pvc { pvc, .. } = &disk.content else { continue };
        let view = observed.pvcs.get(pvc);
        if view.is_some_and(|view| view.phase == "Bound") {
            continue;
        }
        let class = view.and_then(|view| view.storage_class.as_deref());
        let waits =
            observed.storage_classes.iter().any(|known| Some(known.name.as_str()) == class && known.waits_for_consumer);
        overdue |= !waits && view.is_some_and(|view| is_overdue(observed, view));
        pending.push(match (view, waits) {
            (None, _) => format!("{pvc} is being made"),
            (Some(_), true) => {
                format!("{pvc} is bound when the machine's pod has been scheduled (WaitForFirstConsumer)")
            }
            (Some(_), false) => format!(
                "{pvc} waits for a volume of StorageClass {}; see `kubectl describe pvc {pvc}`",
                class.unwrap_or_default()
            ),
        });
    }
    (!pending.is_empty()).then(|| Pending { message: pending.join("; "), overdue })
}

fn is_overdue(observed: &Observed, pvc: &PvcView) -> bool {
    let since = Timestamp::from_second(pvc.created).unwrap_or(observed.now);
    pvc.source.is_none() && observed.now.duration_since(since) > PROVISIONING
}

pub(super) fn network(observed: &Observed, assessment: &Assessment) -> (bool, &'static str, String) {
    let about_networks =
        [reason::NETWORK_CONFIGURATION_NOT_FOUND, reason::MULTUS_NOT_INSTALLED, reason::MAC_ADDRESS_IN_USE];
    if let Some(problem) = assessment.blocker.as_ref().filter(|problem| about_networks.contains(&problem.reason)) {
        return (false, reason::NETWORK_FAILED, problem.message.clone());
    }
    let missing = observed.network_names().into_iter().find(|name| !observed.attachments.contains_key(*name));
    match (missing, &assessment.resolved) {
        (_, None) => (false, reason::NETWORK_FAILED, "the spec cannot be understood yet".to_owned()),
        (Some(name), _) => {
            (false, reason::NETWORK_FAILED, format!("the NetworkAttachmentDefinition {name} is being made"))
        }
        (None, Some(_)) => (true, reason::NETWORK_CONFIGURED, "every interface has its network".to_owned()),
    }
}

/// What was changed and waits for a restart. KubeVirt knows whether the guest's hardware does; which fields those are is
/// what differs between the VM and the guest that runs.
pub(super) fn restart(observed: &Observed) -> Option<(&'static str, String)> {
    let (vm, vmi) = (observed.vm.as_ref()?, observed.vmi.as_ref()?);
    let seeded_otherwise = is_seeded_otherwise(observed);
    let runs = !vmi.deleting && !matches!(vmi.phase.as_str(), "Succeeded" | "Failed");
    if !(runs && (vm.restart_required || seeded_otherwise)) {
        return None;
    }
    // What KubeVirt still plugs in does not wait.
    let waiting = waiting(observed).into_iter().filter(|field| vm.restart_required || field == "spec.cloudInit");
    let fields: Vec<String> = waiting.collect();
    let what = if fields.is_empty() { "a change".to_owned() } else { fields.join(", ") };
    let message = format!("waits for the machine's restart: {what}; `virtctl restart {}` does it", observed.name());
    Some((reason::PENDING_RESTART, message))
}
