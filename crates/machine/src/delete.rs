//! What to write now for a Machine that is to go: VM and guest first (their shutdown is respected), then PVCs, then
//! network references, then the finalizer. It needs nothing of what the Machine refers to, so it works when the template,
//! the Secret, the networks, the classes or KubeVirt itself are gone.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use vitivirt_api::machine::{FINALIZER_MACHINE, LABEL_MACHINE_UID, LABEL_ON_DELETE, ON_DELETE_RETAIN};
use vitivirt_api::{Plan, Step, Target, Wait, Write, remove_finalizer};

use crate::network_finalizer::release;
use crate::observed::Observed;
use crate::plan::{finalizer_place, has_finalizer, virtual_machine_resource};

pub(crate) mod step {
    pub(crate) const VIRTUAL_MACHINE: &str = "deletion of the VirtualMachine";
    pub(crate) const CLAIMS: &str = "deletion of the PVCs";
    pub(crate) const NETWORKS: &str = "release of the networks";
    pub(crate) const FINALIZER: &str = "removal of the finalizer";
}

pub(crate) fn plan(observed: &Observed) -> Plan {
    if !has_finalizer(observed) {
        return Plan::default();
    }
    let steps = [virtual_machine(observed), pvcs(observed), networks(observed), finalizer(observed)];
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty() || step.wait.is_some()).collect() }
}

fn wait(message: String) -> Wait {
    Wait { reason: vitivirt_api::machine::machine_reason::DELETING, message, requeue_after: None }
}

fn virtual_machine(observed: &Observed) -> Step {
    let step = Step::new(step::VIRTUAL_MACHINE);
    let ours = observed.vm.as_ref().filter(|vm| vm.controller_uid.as_deref() == Some(observed.uid()));
    match (ours, &observed.vmi) {
        (Some(vm), _) => {
            let waiting = step.wait(wait(format!("the VirtualMachine {} is shutting down", observed.name())));
            if vm.deleting {
                return waiting;
            }
            waiting.write(Write::Delete {
                target: Target::new(virtual_machine_resource(), observed.key(observed.name())),
                uid: vm.uid.clone(),
            })
        }
        (None, Some(_)) if observed.vm.is_none() => {
            step.wait(wait(format!("the guest {} is shutting down", observed.name())))
        }
        (None, _) => step,
    }
}

/// Claims that carry our UID, also of disks that have left the spec.
fn pvcs(observed: &Observed) -> Step {
    let mut step = Step::new(step::CLAIMS);
    for (name, pvc) in &observed.pvcs {
        let ours = pvc.labels.get(LABEL_MACHINE_UID).map(String::as_str) == Some(observed.uid());
        let kept = pvc.labels.get(LABEL_ON_DELETE).map(String::as_str) == Some(ON_DELETE_RETAIN);
        if ours && !kept && !pvc.deleting {
            step.writes.push(Write::Delete {
                target: Target::of::<PersistentVolumeClaim>(observed.key(name)),
                uid: pvc.uid.clone(),
            });
        }
    }
    step
}

/// A NetworkConfiguration may go when its last user has. The next step may be the end of the last Machine, so it is done
/// before that; whatever leaves a network in another way is found by [`crate::release`].
fn networks(observed: &Observed) -> Step {
    let mut step = Step::new(step::NETWORKS);
    let last = observed.networks.iter().filter(|(_, network)| !network.other_users);
    step.writes.extend(
        last.filter_map(|(name, network)| Some(release(&observed.key(name), &network.uid, network.protected?))),
    );
    step
}

fn finalizer(observed: &Observed) -> Step {
    let step = Step::new(step::FINALIZER);
    let place = finalizer_place(observed);
    let removal =
        place.map(|index| remove_finalizer(observed.machine_target(), observed.uid(), FINALIZER_MACHINE, index));
    removal.into_iter().fold(step, Step::write)
}
