//! Limits the repairs of an object of a Machine that another client changes again and again ([`RecentWrites`]).

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use serde_json::json;
use vitivirt_api::{
    EventKind, EventRecord, Plan, RecentWrites, Target, Write, machine::machine_reason, repeated_drift_message,
};

use crate::{observed::Observed, render::network};

/// The objects that a plan repairs.
pub fn repaired_objects(plan: &Plan) -> impl Iterator<Item = &Target> {
    let writes = plan.steps.iter().flat_map(|step| &step.writes);
    writes.filter(|write| is_repair(write)).map(Write::target)
}

/// A deletion or a finalizer is not a repair, and the desired state has one of each.
fn is_repair(write: &Write) -> bool {
    matches!(write, Write::Create { .. } | Write::Patch { .. })
}

/// The digest of what decides the content of an object. An edit by a user changes it, and is never delayed.
pub fn desired_digest(observed: &Observed, target: &Target) -> u64 {
    let mut hasher = DefaultHasher::new();
    let network = observed.networks.get(target.key.name());
    match network.filter(|_| target.resource.kind == "NetworkAttachmentDefinition") {
        // All Machines of the network repair it.
        Some(view) => network::cni_config(target.key.name(), view).hash(&mut hasher),
        None => {
            let metadata = &observed.machine.metadata;
            let spec = json!(observed.machine.spec);
            (&metadata.uid, spec, &metadata.labels, &metadata.annotations, &observed.source_read).hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// The plan without the writes that would repeat others too often.
pub(crate) fn without_delayed(observed: &Observed, mut plan: Plan) -> Plan {
    let mut is_incomplete = false;
    for step in &mut plan.steps {
        let writes = step.writes.len();
        // A new VM waits for everything that it refers to.
        let is_withheld = |write: &Write| is_delayed(observed, write) || (is_incomplete && creates_vm(write));
        step.writes.retain(|write| !is_withheld(write));
        is_incomplete |= step.writes.len() < writes;
    }
    plan.steps.retain(|step| !step.writes.is_empty() || step.wait.is_some());
    plan
}

fn creates_vm(write: &Write) -> bool {
    matches!(write, Write::Create { target, .. } if target.resource.kind == "VirtualMachine")
}

fn is_delayed(observed: &Observed, write: &Write) -> bool {
    let recent = recent_writes(observed, write.target()).filter(|_| is_repair(write));
    recent.is_some_and(|recent| recent.is_exhausted(observed.now))
}

/// The writes that another write of this object would repeat.
fn recent_writes<'a>(observed: &'a Observed, target: &Target) -> Option<&'a RecentWrites<u64>> {
    let recent = observed.recent_writes.get(&(target.resource.kind.clone(), target.key.name().to_owned()))?;
    // The digest is computed only for the few objects to which it matters.
    (recent.written() == desired_digest(observed, target)).then_some(recent)
}

/// Names the clients that change an object again and again, with the write that exhausts the limit.
pub(crate) fn events(observed: &Observed, plan: &Plan) -> Vec<EventRecord> {
    let is_last = |target: &&Target| {
        recent_writes(observed, target).is_some_and(|recent| recent.exhausts_with_next(observed.now))
    };
    let event = |target: &Target| {
        let vm = observed.vm.as_ref().filter(|_| target.resource.kind == "VirtualMachine");
        let managers = vm.map(|vm| vm.other_managers.as_slice()).unwrap_or_default();
        EventRecord {
            about: observed.event_subject(),
            kind: EventKind::Warning,
            reason: machine_reason::REPEATED_DRIFT,
            action: "Reconcile",
            message: repeated_drift_message(target, managers, "change the Machine instead"),
        }
    };
    repaired_objects(plan).filter(is_last).map(event).collect()
}

/// The time until the first delayed write is allowed.
pub(crate) fn next_repair(observed: &Observed) -> Option<Duration> {
    let next =
        observed.recent_writes.values().map(RecentWrites::next_write).filter(|next| *next > observed.now).min()?;
    Some(Duration::try_from(next.duration_since(observed.now)).unwrap_or_default() + Duration::from_millis(100))
}
