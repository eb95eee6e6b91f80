//! Whose an object is. The owner reference says it, and for a PVC the label with the Machine's UID. An object that lost
//! either is recognized by a second proof: the label on VM and Secret, the UUID of the guest in the VM, an annotation on
//! the PVC. The operator takes over the object of an earlier Machine only if a user consented (annotation
//! `vitistack.io/adopt`), and never the object of a Machine that exists. An object that no Machine ever had needs consent of
//! its own (annotation `vitistack.io/adopt-by`).

use std::collections::BTreeMap;

use serde_json::Value;
use vitivirt_api::{
    Operation,
    machine::{Adoption, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, MANAGED_BY},
};

use crate::{
    observed::{ImportSourceView, Observed, PvcView, SecretView, VmView},
    secret::secret_name,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// It belongs to the Machine and says so.
    Own,
    /// It belongs to the Machine but does not say so: it lost its owner reference or label, or a user consented to its
    /// adoption.
    Unmarked,
    /// It belongs to an earlier Machine and is being deleted, by that Machine or by the garbage collector.
    Leaving,
    /// A user may consent to its adoption with this item.
    Adoptable(String),
    /// It belongs to another owner.
    Foreign,
}

impl Ownership {
    pub(crate) fn is_own(&self) -> bool {
        matches!(self, Self::Own | Self::Unmarked)
    }
}

impl Observed {
    /// The VM, if it belongs to the Machine.
    pub fn own_vm(&self) -> Option<&VmView> {
        self.vm.as_ref().filter(|vm| self::vm(self, vm).is_own())
    }

    /// Whether the Machine had a VM that does not exist any more.
    pub(crate) fn lost_vm(&self) -> bool {
        self.vm.is_none() && self.machine.status.as_ref().is_some_and(|status| status.vm_name.is_some())
    }

    /// Whether the VM, which uses the cloud-init Secret if the Machine has user data, exists without it.
    pub(crate) fn lost_secret(&self) -> bool {
        self.secret.is_none() && self.own_vm().is_some()
    }

    /// The cloud-init Secret, if it belongs to the Machine.
    pub(crate) fn own_secret(&self) -> Option<&SecretView> {
        self.secret.as_ref().filter(|secret| self::secret(self, secret).is_own())
    }

    /// Whether the Machine's VM is connected to this NetworkConfiguration, so that its finalizer must keep it.
    pub(crate) fn uses_network(&self, name: &str) -> bool {
        let has_vm = self.machine.status.as_ref().is_some_and(|status| status.vm_name.is_some());
        let networks = self.own_vm().and_then(|vm| vm.spec.pointer("/template/spec/networks")?.as_array());
        let is_connected =
            |network: &Value| network.pointer("/multus/networkName").and_then(Value::as_str) == Some(name);
        match networks {
            Some(networks) => networks.iter().any(is_connected),
            // Another client deleted the VM.
            None => has_vm,
        }
    }
}

pub(crate) fn vm(observed: &Observed, vm: &VmView) -> Ownership {
    let guest = vm.spec.pointer("/template/spec/domain/firmware/uuid").and_then(Value::as_str);
    let label = label(&vm.labels, LABEL_MACHINE_UID);
    let adoption = observed.adoption();
    let is_named = is_of_a_machine_named(&vm.labels, observed.name());
    match vm.controller_uid.as_deref() {
        Some(uid) if uid == observed.uid() => Ownership::Own,
        Some(_) if is_named => Ownership::Leaving,
        Some(_) => Ownership::Foreign,
        None if [label, guest].contains(&Some(observed.uid())) => Ownership::Unmarked,
        None if [label, guest].into_iter().flatten().any(|uid| adoption.includes_machine(uid)) => Ownership::Unmarked,
        None if vm.deleting => Ownership::Leaving,
        // The guest's UUID is first, because the new guest gets the same one.
        None => match guest.or(label).filter(|_| is_named) {
            Some(uid) => Ownership::Adoptable(uid.to_owned()),
            None => Ownership::Foreign,
        },
    }
}

pub(crate) fn secret(observed: &Observed, secret: &SecretView) -> Ownership {
    let label = label(&secret.labels, LABEL_MACHINE_UID);
    let adoption = observed.adoption();
    let name = secret_name(observed.name());
    let is_named = is_of_a_machine_named(&secret.labels, observed.name());
    match secret.controller_uid.as_deref() {
        Some(uid) if uid == observed.uid() => Ownership::Own,
        Some(_) if is_named => Ownership::Leaving,
        Some(_) => Ownership::Foreign,
        None if label == Some(observed.uid()) => Ownership::Unmarked,
        None if label.is_some_and(|uid| adoption.includes_machine(uid)) => Ownership::Unmarked,
        None if adoption.includes_secret(&name)
            && (is_managed(&secret.labels) || secret.adopt_by.as_deref() == Some(observed.name())) =>
        {
            Ownership::Unmarked
        }
        None if secret.deleting => Ownership::Leaving,
        None if is_named => Ownership::Adoptable(item(observed, label, || Adoption::secret_item(&name))),
        None => Ownership::Foreign,
    }
}

/// A PVC of any name can be adopted: a user may have created it before the Machine.
pub(crate) fn pvc(observed: &Observed, name: &str, pvc: &PvcView) -> Ownership {
    let label = label(&pvc.labels, LABEL_MACHINE_UID);
    if label == Some(observed.uid()) {
        return Ownership::Own;
    }
    let adoption = observed.adoption();
    let identity = pvc.identity.as_deref();
    match label {
        Some(uid) if observed.living_owners.contains(uid) => Ownership::Foreign,
        Some(uid) if adoption.includes_machine(uid) => Ownership::Unmarked,
        None if identity == Some(observed.uid()) => Ownership::Unmarked,
        None if identity.is_some_and(|uid| adoption.includes_machine(uid)) => Ownership::Unmarked,
        _ if adoption.includes_pvc(name)
            && (label.or(identity).is_some() || pvc.adopt_by.as_deref() == Some(observed.name())) =>
        {
            Ownership::Unmarked
        }
        _ if pvc.deleting => Ownership::Leaving,
        _ => Ownership::Adoptable(item(observed, label.or(identity), || Adoption::pvc_item(name))),
    }
}

/// The item with which an object of the Machine with this UID is adopted. A UID also becomes the identity of the guest. A
/// Machine that has a VM keeps its identity, so it adopts one object by its name.
fn item(observed: &Observed, uid: Option<&str>, name: impl FnOnce() -> String) -> String {
    uid.filter(|_| observed.own_vm().is_none()).map_or_else(name, str::to_owned)
}

/// Whether the object with this name among the items of an adoption needs consent of its own, because no Machine had it.
pub(crate) fn needs_own_consent(observed: &Observed, item: &str) -> bool {
    let labels = match item.split_once('/') {
        None => return false,
        Some((_, name)) if item == Adoption::pvc_item(name) => observed.pvcs.get(name).map(|pvc| &pvc.labels),
        Some((_, name)) => {
            observed.secret.as_ref().filter(|_| name == secret_name(observed.name())).map(|secret| &secret.labels)
        }
    };
    labels.is_none_or(|labels| !labels.contains_key(LABEL_MACHINE_UID))
}

/// Removes one owner reference and keeps the others. The patch fails if the list has changed since.
pub(crate) fn remove_owner(index: usize, uid: &str) -> [Operation; 2] {
    let owner = format!("/metadata/ownerReferences/{index}");
    let is_same = Operation::set(format!("{owner}/uid"), uid.into()).expecting(uid.into());
    [is_same, Operation::remove(owner)]
}

/// An import source holds no data, so it is not adopted: the garbage collector deletes that of an earlier Machine.
pub(crate) fn import_source(observed: &Observed, source: &ImportSourceView) -> Ownership {
    match source.controller_uid.as_deref() {
        Some(uid) if uid == observed.uid() => Ownership::Own,
        None if label(&source.labels, LABEL_MACHINE_UID) == Some(observed.uid()) => Ownership::Unmarked,
        Some(_) if is_of_a_machine_named(&source.labels, observed.name()) => Ownership::Leaving,
        _ if source.deleting => Ownership::Leaving,
        _ => Ownership::Foreign,
    }
}

fn label<'a>(labels: &'a BTreeMap<String, String>, key: &str) -> Option<&'a str> {
    labels.get(key).map(String::as_str)
}

/// Whether the operator created the object for a Machine of this name. If another Machine controls it, that Machine is
/// gone, because its name is free.
fn is_of_a_machine_named(labels: &BTreeMap<String, String>, name: &str) -> bool {
    label(labels, LABEL_MACHINE) == Some(name) && is_managed(labels)
}

fn is_managed(labels: &BTreeMap<String, String>) -> bool {
    label(labels, LABEL_MANAGED_BY) == Some(MANAGED_BY)
}
