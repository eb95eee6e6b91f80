//! The writes for a Machine that is being deleted: first VM and VMI (the operator waits for their shutdown), then
//! PVCs, then the finalizers of the networks, then the Machine's finalizer. Nothing that the Machine refers to is
//! needed, so a deletion works without the template, the Secret, the networks, the StorageClasses or KubeVirt.
//!
//! A deletion with `--cascade=orphan` leaves VM, PVCs and Secret.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use serde_json::json;
use vitivirt_api::{
    Operation, Plan, Step, Target, Wait, Write,
    machine::{
        ANNOTATION_CASCADE, Disk, FINALIZER_MACHINE, FINALIZER_ORPHAN, LABEL_ON_DELETE, ON_DELETE_RETAIN,
        machine_reason::DELETING as REASON,
    },
    remove_finalizer,
    resources::virtual_machine_resource,
};

use crate::{
    network_finalizer,
    observed::{Deletion, Observed, PvcView},
    ownership::{self, Ownership},
    render::cloud_init::secret_name,
};

/// Names of the steps. Messages insert them after "the".
pub(crate) mod step {
    pub(crate) const RETAINED_PVCS: &str = "update of the retained PVCs";
    pub(crate) const VIRTUAL_MACHINE: &str = "deletion of the VirtualMachine";
    pub(crate) const PVCS: &str = "deletion of the PVCs";
    pub(crate) const SECRET: &str = "deletion of the cloud-init Secret";
    pub(crate) const NETWORKS: &str = "release of the networks";
    pub(crate) const FINALIZER: &str = "removal of the finalizer";
}

pub(crate) fn plan(observed: &Observed) -> Plan {
    if observed.finalizer_index().is_none() {
        return Plan::default();
    }
    let steps = match deletion(observed) {
        Deletion::Orphan => vec![retained_pvcs(observed, true), networks(observed), finalizer(observed)],
        Deletion::Cascade => vec![
            retained_pvcs(observed, false),
            virtual_machine(observed),
            pvcs(observed),
            secret(observed),
            networks(observed),
            finalizer(observed),
        ],
        Deletion::Unknown => vec![Step::new(step::VIRTUAL_MACHINE).wait(wait(unknown_message(observed)))],
    };
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty() || step.wait.is_some()).collect() }
}

/// Whether the objects of the Machine are deleted with it. The garbage collector removes the owner reference of an
/// orphan before it removes its finalizer, so a VM with its owner reference shows that the Machine is not deleted alone.
fn deletion(observed: &Observed) -> Deletion {
    let mut finalizers = observed.machine.metadata.finalizers.iter().flatten();
    if finalizers.any(|finalizer| finalizer == FINALIZER_ORPHAN) {
        return Deletion::Orphan;
    }
    let chosen = match observed.annotation(ANNOTATION_CASCADE) {
        Some("orphan") => Deletion::Orphan,
        Some("background") => Deletion::Cascade,
        _ => observed.deletion,
    };
    let is_unmarked = observed.vm.as_ref().is_some_and(|vm| ownership::vm(observed, vm) == Ownership::Unmarked);
    match chosen {
        Deletion::Unknown if !is_unmarked => Deletion::Cascade,
        chosen => chosen,
    }
}

fn unknown_message(observed: &Observed) -> String {
    let (namespace, name) = (observed.namespace(), observed.name());
    let command =
        |choice: &str| format!("`kubectl -n {namespace} annotate machine {name} {ANNOTATION_CASCADE}={choice}`");
    format!(
        "VirtualMachine {name} has no owner reference, and the operator was not running when the deletion began, so it \
         cannot know whether to keep the VirtualMachine and its disks; to delete them, run {}; to keep them, run {}",
        command("background"),
        command("orphan"),
    )
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
                resource_version: None,
            })
        }
        (None, Some(_)) => step.wait(wait(format!("VirtualMachineInstance {} is shutting down", observed.name()))),
        (None, None) => step,
    }
}

/// Marks the PVCs that stay. An owner reference is removed, because the garbage collector would delete the PVC with its
/// owner: KubeVirt sets one on the PVC of a restored VM.
fn retained_pvcs(observed: &Observed, all: bool) -> Step {
    let mut step = Step::new(step::RETAINED_PVCS);
    for (name, pvc) in own_pvcs(observed).filter(|(name, pvc)| all || is_retained(observed, name, pvc)) {
        let mut operations = Vec::new();
        if pvc.labels.get(LABEL_ON_DELETE).map(String::as_str) != Some(ON_DELETE_RETAIN) {
            let label = format!("/metadata/labels/{}", Operation::escape(LABEL_ON_DELETE));
            operations.push(Operation::set(label, ON_DELETE_RETAIN.into()));
        }
        if pvc.has_owners {
            operations.push(Operation::set("/metadata/ownerReferences", json!([])));
        }
        if !operations.is_empty() {
            let target = Target::of_kind::<PersistentVolumeClaim>(observed.key(name));
            step.writes.push(Write::Patch { target, uid: pvc.uid.clone(), operations });
        }
    }
    step
}

/// Deletes the PVCs that carry the Machine's UID, including those of disks that are no longer in the spec.
fn pvcs(observed: &Observed) -> Step {
    let mut step = Step::new(step::PVCS);
    let is_deleted = |(name, pvc): &(&String, &PvcView)| {
        is_known(observed, name, pvc) && !is_retained(observed, name, pvc) && !pvc.deleting
    };
    for (name, pvc) in own_pvcs(observed).filter(is_deleted) {
        step.writes.push(Write::Delete {
            target: Target::of_kind::<PersistentVolumeClaim>(observed.key(name)),
            uid: pvc.uid.clone(),
            resource_version: None,
        });
    }
    step
}

/// Whether the PVC has or had a disk of this Machine. KubeVirt copies its labels to PVCs that it restores for other VMs, such
/// as clones.
fn is_known(observed: &Observed, name: &str, pvc: &PvcView) -> bool {
    let is_named = name.strip_prefix(observed.name()).is_some_and(|rest| rest.starts_with('-'));
    observed.recorded_disk(name).is_some() || is_named && pvc.vm_owner.is_none()
}

fn own_pvcs(observed: &Observed) -> impl Iterator<Item = (&String, &PvcView)> {
    observed.pvcs.iter().filter(|(name, pvc)| match ownership::pvc(observed, name, pvc) {
        Ownership::Own => true,
        // It lost its label. An adoption that is not complete deletes nothing.
        Ownership::Unmarked => pvc.identity.as_deref() == Some(observed.uid()),
        Ownership::Leaving | Ownership::Adoptable(_) | Ownership::Foreign => false,
    })
}

/// Whether the PVC stays: the label says so, or the spec, which may be newer than the label. The spec need not be valid.
/// The PVC of a disk has the name of Machine and disk, or the name in the status if KubeVirt moved the disk.
fn is_retained(observed: &Observed, name: &str, pvc: &PvcView) -> bool {
    let labelled = pvc.labels.get(LABEL_ON_DELETE).map(String::as_str) == Some(ON_DELETE_RETAIN);
    let named = name.strip_prefix(observed.name()).and_then(|rest| rest.strip_prefix('-'));
    let status = observed.machine.status.iter().flat_map(|status| &status.disks);
    let recorded = status.filter(|disk| disk.pvc == name).map(|disk| disk.name.as_str());
    let disks: Vec<&str> = named.into_iter().chain(recorded).collect();
    let retains = |disk: &Disk| disk.on_delete.as_deref() == Some(ON_DELETE_RETAIN);
    let mut specs = observed.machine.spec.disks.iter();
    labelled || specs.any(|spec| disks.contains(&spec.name.as_str()) && retains(spec))
}

/// The garbage collector deletes the Secret, unless it lost its owner reference.
fn secret(observed: &Observed) -> Step {
    let step = Step::new(step::SECRET);
    let view = observed.secret.as_ref().filter(|view| !view.deleting);
    match view.filter(|view| ownership::secret(observed, view) == Ownership::Unmarked) {
        Some(view) => step.write(Write::Delete {
            target: Target::of_kind::<Secret>(observed.key(&secret_name(observed.name()))),
            uid: view.uid.clone(),
            resource_version: None,
        }),
        None => step,
    }
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
