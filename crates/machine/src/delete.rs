//! The writes for a Machine that is being deleted: first VM and VMI (the operator waits for their shutdown), then
//! PVCs, then the finalizers of the networks, then the Machine's finalizer. Nothing that the Machine refers to is
//! needed, so a deletion works without the template, the Secret, the networks, the StorageClasses or KubeVirt.
//!
//! A deletion with `--cascade=orphan` leaves VM, PVCs and Secret, without owner references.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use serde_json::json;
use vitivirt_api::{
    Operation, Plan, Step, Target, Wait, Write,
    machine::{
        ANNOTATION_CASCADE, Disk, FINALIZER_MACHINE, FINALIZER_ORPHAN, LABEL_ON_DELETE, LABEL_RESTORED_FROM,
        ON_DELETE_RETAIN, condition_type,
        machine_reason::{DELETING, DELETION_UNCONFIRMED},
    },
    remove_finalizer,
    resources::virtual_machine_resource,
};

use crate::{
    assessment::never_bound,
    network_finalizer,
    observed::{Deletion, Observed, PvcView},
    ownership::{self, Ownership},
    render::{cloud_init::secret_name, live_parts::disk_with_pvc},
};

/// Names of the steps. Messages insert them after "the".
pub(crate) mod step {
    pub(crate) const OWNERS: &str = "removal of the owner references";
    pub(crate) const RETAINED_PVCS: &str = "update of the retained PVCs";
    pub(crate) const VIRTUAL_MACHINE: &str = "deletion of the VirtualMachine";
    pub(crate) const PVCS: &str = "deletion of the PVCs";
    pub(crate) const SECRET: &str = "deletion of the cloud-init Secret";
    pub(crate) const NETWORKS: &str = "release of the networks";
    pub(crate) const FINALIZER: &str = "removal of the finalizer";
}

const SOON: Duration = Duration::from_millis(1);

pub(crate) fn plan(observed: &Observed) -> Plan {
    if observed.finalizer_index().is_none() {
        return Plan::default();
    }
    let steps = match deletion(observed) {
        Deletion::Orphan => {
            vec![owners(observed), retained_pvcs(observed, true), networks(observed), finalizer(observed)]
        }
        Deletion::Cascade if must_record(observed) => vec![record(observed)],
        Deletion::Cascade => vec![
            retained_pvcs(observed, false),
            virtual_machine(observed),
            pvcs(observed),
            secret(observed),
            networks(observed),
            finalizer(observed),
        ],
        Deletion::Unknown => {
            let wait = Wait { reason: DELETION_UNCONFIRMED, ..wait(unknown_message(observed)) };
            vec![Step::new(step::VIRTUAL_MACHINE).wait(wait)]
        }
    };
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty() || step.wait.is_some()).collect() }
}

/// Whether the objects of the Machine are deleted with it.
fn deletion(observed: &Observed) -> Deletion {
    match seen_deletion(observed) {
        Deletion::Unknown if is_cascade(observed) => Deletion::Cascade,
        seen => seen,
    }
}

/// How the Machine is deleted, as far as the Machine itself shows it.
fn seen_deletion(observed: &Observed) -> Deletion {
    let mut finalizers = observed.machine.metadata.finalizers.iter().flatten();
    if finalizers.any(|finalizer| finalizer == FINALIZER_ORPHAN) {
        return Deletion::Orphan;
    }
    match (observed.annotation(ANNOTATION_CASCADE), observed.deletion) {
        (Some("orphan"), _) | (_, Deletion::Orphan) => Deletion::Orphan,
        (Some("background"), _) => Deletion::Cascade,
        (_, seen) => seen,
    }
}

impl Observed {
    /// Whether the owner references of VM and Secret decide what is deleted, or must be removed. A cache may show those that
    /// the garbage collector has removed, and may not show those that the operator has set.
    pub fn is_deleted_as_owners_say(&self) -> bool {
        self.is_deleting() && seen_deletion(self) != Deletion::Cascade
    }
}

/// Whether the objects show how the Machine is deleted. The garbage collector removes the owner references of all
/// dependents of an orphan before it removes its finalizer, so an object that has one shows that the Machine is not deleted
/// alone. A VM without one shows the opposite, or has lost it.
fn is_cascade(observed: &Observed) -> bool {
    match observed.vm.as_ref().map(|vm| ownership::vm(observed, vm)) {
        Some(Ownership::Own) => true,
        Some(Ownership::Unmarked) => has_owned_secret(observed),
        _ => is_confirmed(observed),
    }
}

/// Whether the next leader can know, when the VM is gone, that the disks are deleted with the Machine.
fn is_confirmed(observed: &Observed) -> bool {
    let mut conditions = observed.machine.status.iter().flat_map(|status| &status.conditions);
    let is_recorded = conditions.any(|have| have.type_ == condition_type::DELETING && have.status == "True");
    let loses_data = deleted_pvcs(observed).any(|(name, _)| !never_bound(observed, name));
    is_recorded || has_owned_secret(observed) || !loses_data
}

fn has_owned_secret(observed: &Observed) -> bool {
    observed.secret.as_ref().is_some_and(|secret| ownership::secret(observed, secret) == Ownership::Own)
}

/// Whether the status must say that the disks are deleted, before the first object is. A leader that did not see the
/// deletion begin cannot know it without the VM.
pub(crate) fn must_record(observed: &Observed) -> bool {
    deletion(observed) == Deletion::Cascade
        && observed.annotation(ANNOTATION_CASCADE) != Some("background")
        && !is_confirmed(observed)
}

fn record(observed: &Observed) -> Step {
    let message =
        if observed.own_vm().is_some() { shutdown_message(observed) } else { "its PVCs are being deleted".to_owned() };
    let wait = Wait { requeue_after: Some(SOON), ..wait(message) };
    Step::new(step::VIRTUAL_MACHINE).wait(wait)
}

fn unknown_message(observed: &Observed) -> String {
    let (namespace, name) = (observed.namespace(), observed.name());
    let command = |choice: &str| {
        format!("`kubectl -n {namespace} annotate machines.vitistack.io {name} {ANNOTATION_CASCADE}={choice}`")
    };
    let what = if observed.own_vm().is_some() { "has no owner reference" } else { "does not exist" };
    format!(
        "VirtualMachine {name} {what}, and the operator was not running when the deletion began, so it cannot know whether \
         to keep the VirtualMachine and its disks; to delete them, run {}; to keep them, run {}",
        command("background"),
        command("orphan"),
    )
}

fn shutdown_message(observed: &Observed) -> String {
    format!("VirtualMachine {} is shutting down", observed.name())
}

fn wait(message: String) -> Wait {
    Wait { reason: DELETING, message, requeue_after: None }
}

fn virtual_machine(observed: &Observed) -> Step {
    let step = Step::new(step::VIRTUAL_MACHINE);
    match (observed.own_vm(), &observed.vmi) {
        (Some(vm), _) => {
            let waiting = step.wait(wait(shutdown_message(observed)));
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

/// Removes the Machine from the owners of VM and Secret. The garbage collector does so too, but it may have finished before the
/// operator set one, and would then delete the object with the Machine.
fn owners(observed: &Observed) -> Step {
    let step = Step::new(step::OWNERS);
    let vm = observed.vm.as_ref().filter(|vm| ownership::vm(observed, vm) == Ownership::Own);
    let vm = vm.map(|vm| (Target::new(virtual_machine_resource(), observed.id.key()), &vm.uid, vm.controller_index));
    let secret = observed.secret.as_ref().filter(|secret| ownership::secret(observed, secret) == Ownership::Own);
    let secret_key = observed.key(&secret_name(observed.name()));
    let secret = secret.map(|secret| (Target::of_kind::<Secret>(secret_key), &secret.uid, secret.controller_index));
    vm.into_iter().chain(secret).fold(step, |step, (target, uid, index)| {
        let operations = ownership::remove_owner(index, observed.uid()).into();
        step.write(Write::Patch { target, uid: uid.clone(), operations })
    })
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
    for (name, pvc) in deleted_pvcs(observed) {
        step.writes.push(Write::Delete {
            target: Target::of_kind::<PersistentVolumeClaim>(observed.key(name)),
            uid: pvc.uid.clone(),
            resource_version: None,
        });
    }
    step
}

fn deleted_pvcs(observed: &Observed) -> impl Iterator<Item = (&String, &PvcView)> {
    own_pvcs(observed).filter(|(name, pvc)| !is_retained(observed, name, pvc) && !pvc.deleting)
}

/// Whether the PVC has or had a disk of this Machine. KubeVirt copies its labels and annotations to PVCs that it restores for
/// other VMs, such as clones, and may choose a name that begins with that of this Machine.
fn is_known(observed: &Observed, name: &str, pvc: &PvcView) -> bool {
    let is_named = name.strip_prefix(observed.name()).is_some_and(|rest| rest.starts_with('-'));
    observed.recorded_disk(name).is_some()
        || pvc.disk.is_some()
        || disk_of_vm(observed, name).is_some()
        || observed.is_named_by_spec(name) && pvc.vm_owner.is_none()
        || is_named && pvc.vm_owner.is_none() && !pvc.labels.contains_key(LABEL_RESTORED_FROM)
}

/// The disk of the VM that is in this PVC. The operator may not have seen the restore or the move of the disk.
fn disk_of_vm<'a>(observed: &'a Observed, pvc: &str) -> Option<&'a str> {
    observed.own_vm().and_then(|vm| disk_with_pvc(&vm.spec, pvc))
}

fn own_pvcs(observed: &Observed) -> impl Iterator<Item = (&String, &PvcView)> {
    let is_own = |(name, pvc): &(&String, &PvcView)| match ownership::pvc(observed, name, pvc) {
        Ownership::Own => true,
        // It lost its label. An adoption that is not complete deletes nothing.
        Ownership::Unmarked => pvc.identity.as_deref() == Some(observed.uid()),
        Ownership::Leaving | Ownership::Adoptable(_) | Ownership::Foreign => false,
    };
    observed.pvcs.iter().filter(move |pvc| is_own(pvc) && is_known(observed, pvc.0, pvc.1))
}

/// Whether the PVC stays: the label says so, or the spec, which may be newer than the label. The spec need not be valid.
/// The PVC of a disk has the name of Machine and disk, or the status, an annotation or the VM names the disk.
fn is_retained(observed: &Observed, name: &str, pvc: &PvcView) -> bool {
    let labelled = pvc.labels.get(LABEL_ON_DELETE).map(String::as_str) == Some(ON_DELETE_RETAIN);
    let named = name.strip_prefix(observed.name()).and_then(|rest| rest.strip_prefix('-'));
    let recorded = observed.recorded_disks().iter().filter(|disk| disk.pvc == name).map(|disk| disk.name.as_str());
    let elsewhere = pvc.disk.as_deref().into_iter().chain(disk_of_vm(observed, name));
    let disks: Vec<&str> = named.into_iter().chain(recorded).chain(elsewhere).collect();
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
