//! The writes for a Machine that is being deleted: first VM and VMI (the operator waits for their shutdown), then
//! PVCs, then the finalizers of the networks, then the Machine's finalizer. Nothing that the Machine refers to is
//! needed, so a deletion works without the template, the Secret, the networks, the StorageClasses or KubeVirt.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use vitivirt_api::{
    Plan, Step, Target, Wait, Write,
    machine::{
        FINALIZER_MACHINE, LABEL_MACHINE_UID, LABEL_ON_DELETE, ON_DELETE_RETAIN, machine_reason::DELETING as REASON,
    },
    remove_finalizer,
    resources::virtual_machine_resource,
};

use crate::{network_finalizer, observed::Observed};

/// Names of the steps. Messages insert them after "the".
pub(crate) mod step {
    pub(crate) const VIRTUAL_MACHINE: &str = "deletion of the VirtualMachine";
    pub(crate) const PVCS: &str = "deletion of the PVCs";
    pub(crate) const NETWORKS: &str = "release of the networks";
    pub(crate) const FINALIZER: &str = "removal of the finalizer";
}

pub(crate) fn plan(observed: &Observed) -> Plan {
    if observed.finalizer_index().is_none() {
        return Plan::default();
    }
    let steps = [virtual_machine(observed), pvcs(observed), networks(observed), finalizer(observed)];
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty() || step.wait.is_some()).collect() }
}

fn wait(message: String) -> Wait {
    Wait { reason: REASON, message, requeue_after: None }
}

fn virtual_machine(observed: &Observed) -> Step {
    let step = Step::new(step::VIRTUAL_MACHINE);
    match (observed.own_vm(), &observed.vmi) {
        (Some(vm), _) => {
            let waiting = step.wait(wait(format!("VirtualMachine {} is shutting down", observed.name())));
            if vm.deleting {
                return waiting;
            }
            waiting.write(Write::Delete {
                target: Target::new(virtual_machine_resource(), observed.id.key()),
                uid: vm.uid.clone(),
            })
        }
        (None, Some(_)) if observed.vm.is_none() => {
            step.wait(wait(format!("VirtualMachineInstance {} is shutting down", observed.name())))
        }
        (None, _) => step,
    }
}

/// Deletes the PVCs that carry the Machine's UID, including those of disks that are no longer in the spec.
fn pvcs(observed: &Observed) -> Step {
    let mut step = Step::new(step::PVCS);
    for (name, pvc) in &observed.pvcs {
        let ours = pvc.labels.get(LABEL_MACHINE_UID).map(String::as_str) == Some(observed.uid());
        let retained = pvc.labels.get(LABEL_ON_DELETE).map(String::as_str) == Some(ON_DELETE_RETAIN);
        if ours && !retained && !pvc.deleting {
            step.writes.push(Write::Delete {
                target: Target::of_kind::<PersistentVolumeClaim>(observed.key(name)),
                uid: pvc.uid.clone(),
            });
        }
    }
    step
}

/// Removes the finalizer from networks of which this Machine is the last user. It happens before the Machine's own
/// finalizer is removed, because no reconcile of the Machine follows that. [`crate::network_finalizer`] covers the
/// other ways in which a network loses its last user.
fn networks(observed: &Observed) -> Step {
    let mut step = Step::new(step::NETWORKS);
    let unused = observed.networks.iter().filter(|(_, network)| !network.other_users);
    step.writes.extend(unused.filter_map(|(name, network)| {
        Some(network_finalizer::release(&observed.key(name), &network.uid, network.finalizer_index?))
    }));
    step
}

fn finalizer(observed: &Observed) -> Step {
    let step = Step::new(step::FINALIZER);
    match observed.finalizer_index() {
        Some(index) => {
            step.write(remove_finalizer(observed.machine_target(), observed.uid(), FINALIZER_MACHINE, index))
        }
        None => step,
    }
}
