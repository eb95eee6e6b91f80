//! What to write now for a Machine that should exist, in order: finalizer → PVCs, Secret, networks → VM → what is not
//! needed any more. Everything is made in one pass; a pass over a settled Machine plans nothing.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_BEGAN_WITH, ANNOTATION_CONTENT, FINALIZER_MACHINE, LABEL_MACHINE_UID, Machine};
use vitivirt_api::{ApiResource, Body, ObjectKey, Operation, Plan, Step, Target, Write};

use crate::assessment::{Assessment, assess, may_grow, storage_class_of};
use crate::changes::began_with;
use crate::network_finalizer::protect;
use crate::observed::{Observed, SecretView, SourceView};
use crate::quantity::Quantity;
use crate::render::{self, cloud_init, network, pvc, vm};
use crate::resolve::{Content, Power, Resolved};

pub(crate) mod step {
    pub(crate) const FINALIZER: &str = "finalizer";
    pub(crate) const CHILDREN: &str = "PVCs, Secret and networks";
    pub(crate) const VIRTUAL_MACHINE: &str = "VirtualMachine";
    pub(crate) const REPLACE: &str = "replacement of a guest that never ran";
    pub(crate) const UNUSED: &str = "Secret that no guest uses any more";
}

pub fn plan(observed: &Observed) -> Plan {
    if observed.is_deleting() {
        return crate::delete::plan(observed);
    }
    let Assessment { resolved, blocker, .. } = assess(observed);
    let Some(resolved) = resolved.filter(|_| blocker.is_none()) else { return Plan::default() };
    let steps = [
        finalizer(observed),
        children(observed, &resolved),
        virtual_machine(observed, &resolved),
        replacement(observed),
        unused_secret(observed, &resolved),
    ];
    Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty()).collect() }
}

pub fn virtual_machine_resource() -> ApiResource {
    kubevirt("VirtualMachine", "virtualmachines")
}

pub fn virtual_machine_instance_resource() -> ApiResource {
    kubevirt("VirtualMachineInstance", "virtualmachineinstances")
}

pub fn network_attachment_resource() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
}

pub fn import_source_resource() -> ApiResource {
    resource("cdi.kubevirt.io", "v1beta1", "VolumeImportSource", "volumeimportsources")
}

fn kubevirt(kind: &str, plural: &str) -> ApiResource {
    resource("kubevirt.io", "v1", kind, plural)
}

fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: format!("{group}/{version}"),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

impl Observed {
    pub(crate) fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::namespaced(self.namespace(), name)
    }

    pub(crate) fn machine_target(&self) -> Target {
        Target::of::<Machine>(self.key(self.name()))
    }
}

fn finalizer(observed: &Observed) -> Step {
    let step = Step::new(step::FINALIZER);
    if has_finalizer(observed) {
        return step;
    }
    step.write(Write::Apply {
        target: observed.machine_target(),
        uid: observed.uid().to_owned(),
        body: Body::from(json!({"metadata": {"finalizers": [FINALIZER_MACHINE]}})),
    })
}

pub(crate) fn has_finalizer(observed: &Observed) -> bool {
    finalizer_place(observed).is_some()
}

/// Where our finalizer stands among those of the Machine.
pub(crate) fn finalizer_place(observed: &Observed) -> Option<usize> {
    observed.machine.metadata.finalizers.iter().flatten().position(|finalizer| finalizer == FINALIZER_MACHINE)
}

/// Everything that the VM refers to. None of it depends on another.
fn children(observed: &Observed, resolved: &Resolved) -> Step {
    let mut step = Step::new(step::CHILDREN);
    step.writes.extend(networks(observed, resolved));
    step.writes.extend(secret(observed, resolved));
    for disk in &resolved.disks {
        step.writes.extend(import_source(observed, &disk.content));
        step.writes.extend(pvc(observed, &disk.content));
    }
    step
}

fn networks(observed: &Observed, resolved: &Resolved) -> Vec<Write> {
    let mut writes = Vec::new();
    let names: std::collections::BTreeSet<&str> =
        resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    for name in names {
        let Some(view) = observed.networks.get(name) else { continue };
        if view.protected.is_none() {
            writes.push(protect(&observed.key(name), &view.uid));
        }
        let target = Target::new(network_attachment_resource(), observed.key(name));
        match observed.attachments.get(name) {
            None => writes.push(Write::Create { target, body: Body::from(network::render(name, view)) }),
            Some(attachment) if attachment.controller_uid.as_ref() != Some(&view.uid) => {
                // Somebody else's: asking for the name anew makes the executor say whose.
                writes.push(Write::Create { target, body: Body::from(network::render(name, view)) });
            }
            Some(attachment) => {
                let labels = missing(&network::labels(), &attachment.labels);
                let mut operations: Vec<Operation> = set_labels(&labels, &attachment.labels).collect();
                if attachment.config != network::config(name, view) {
                    operations.push(Operation::set("/spec", network::spec(name, view)));
                }
                if !operations.is_empty() {
                    writes.push(Write::Patch { target, uid: attachment.uid.clone(), operations });
                }
            }
        }
    }
    writes
}

fn secret(observed: &Observed, resolved: &Resolved) -> Option<Write> {
    resolved.cloud_init.as_ref()?;
    let machine = &observed.machine;
    let target = Target::of::<Secret>(observed.key(&cloud_init::secret_name(observed.name())));
    let source = match &observed.source {
        SourceView::Read(bytes) => Some(bytes),
        _ => None,
    };
    let digest = match &observed.source {
        SourceView::Unchanged(digest) => digest.clone(),
        _ => cloud_init::digest(machine, source.map(|bytes| bytes.0.as_slice())),
    };
    let Some(view) = &observed.secret else {
        return Some(Write::Create { target, body: Body::from(cloud_init::render(machine, source)) });
    };
    let labels = missing(&render::labels(machine), &view.labels);
    if view.content.as_ref() == Some(&digest) && !view.tampered && labels.is_empty() {
        return None;
    }
    let mut operations = Vec::new();
    // Without the source's bytes only the labels can be written: the data would lose the source's part.
    if !matches!(observed.source, SourceView::Unchanged(_)) {
        let given = machine.spec.cloud_init.clone().unwrap_or_default();
        operations.push(Operation::set("/data", cloud_init::data(&given, source)));
        operations.extend(content_annotations(observed, view, digest));
    }
    operations.extend(set_labels(&labels, &view.labels));
    (!operations.is_empty()).then(|| Write::Patch { target, uid: view.uid.clone(), operations })
}

/// The new digest, and with it, while a guest runs, the one that it began with: the guest does not see the change.
fn content_annotations(observed: &Observed, view: &SecretView, digest: String) -> Vec<Operation> {
    let set = |key: &str, value: String| {
        Operation::set(format!("/metadata/annotations/{}", Operation::escape(key)), value.into())
    };
    if !view.annotated {
        return vec![
            Operation::set("/metadata/annotations", json!({ANNOTATION_CONTENT: digest})).expecting(Value::Null),
        ];
    }
    // Somebody removed ours.
    let Some(before) = &view.content else { return vec![set(ANNOTATION_CONTENT, digest)] };
    let guest = observed.vmi.as_ref().filter(|vmi| vmi.phase == "Running" && *before != digest);
    let unnoted = guest.filter(|vmi| began_with(view, &vmi.uid).is_none());
    let note = unnoted.map(|vmi| set(ANNOTATION_BEGAN_WITH, format!("{} {before}", vmi.uid)));
    std::iter::once(set(ANNOTATION_CONTENT, digest)).chain(note).collect()
}

fn import_source(observed: &Observed, content: &Content) -> Option<Write> {
    let Content::Pvc { pvc: name, .. } = content else { return None };
    // Only the first filling of a PVC reads it.
    if observed.pvcs.contains_key(name) || observed.import_sources.contains_key(name) {
        return None;
    }
    let body = pvc::import_source(&observed.machine, content)?;
    Some(Write::Create { target: Target::new(import_source_resource(), observed.key(name)), body: Body::from(body) })
}

fn pvc(observed: &Observed, content: &Content) -> Option<Write> {
    let Content::Pvc { pvc: name, size, storage_class, on_delete, .. } = content else { return None };
    let target = Target::of::<PersistentVolumeClaim>(observed.key(name));
    let Some(view) = observed.pvcs.get(name) else {
        let class = storage_class_of(observed, storage_class.as_deref())?;
        return Some(Write::Create { target, body: Body::from(pvc::render(&observed.machine, content, &class.name)?) });
    };
    let labels = missing(&pvc::pvc_labels(&observed.machine, *on_delete), &view.labels);
    let mut operations: Vec<Operation> = set_labels(&labels, &view.labels).collect();
    let requested = Quantity::parse(&view.requested).map_or(0, Quantity::bytes);
    let expands = may_grow(observed, view.storage_class.as_deref().unwrap_or_default());
    // A PVC that is not bound yet cannot grow; it does when it is.
    if size.bytes() > requested && expands && view.phase == "Bound" {
        operations.push(Operation::set("/spec/resources/requests/storage", size.to_string().into()));
    }
    (!operations.is_empty()).then(|| Write::Patch { target, uid: view.uid.clone(), operations })
}

fn virtual_machine(observed: &Observed, resolved: &Resolved) -> Step {
    let step = Step::new(step::VIRTUAL_MACHINE);
    let machine = &observed.machine;
    let target = Target::new(virtual_machine_resource(), observed.key(observed.name()));
    let Some(view) = &observed.vm else {
        return step.write(Write::Create { target, body: Body::from(vm::render(machine, resolved)) });
    };
    if view.deleting {
        // It is made anew when it is gone.
        return step;
    }
    let spec = vm::spec(machine, resolved);
    let labels = missing(&render::labels(machine), &view.labels);
    let mut operations: Vec<Operation> = set_labels(&labels, &view.labels).collect();
    operations.extend(vm::changes(&view.spec, &spec));
    if operations.is_empty() {
        return step;
    }
    step.write(Write::Patch { target, uid: view.uid.clone(), operations })
}

/// A guest that never got to run is made anew from the VM as it is now, so that a spec that was too big heals.
fn replacement(observed: &Observed) -> Step {
    let step = Step::new(step::REPLACE);
    let (Some(vm), Some(vmi)) = (&observed.vm, &observed.vmi) else { return step };
    let waits = matches!(vmi.phase.as_str(), "" | "Pending" | "Scheduling") && !vmi.deleting;
    let outdated = vmi.vm_generation.is_some_and(|generation| generation < vm.generation);
    if !(waits && outdated) {
        return step;
    }
    step.write(Write::Delete {
        target: Target::new(virtual_machine_instance_resource(), observed.key(observed.name())),
        uid: vmi.uid.clone(),
    })
}

/// User data that the spec no longer asks for is not kept, because it is secret. A guest that began with it may still
/// move to another node, and one that is about to start may have been made from the VM as it was: so another guest has to
/// be there that does without, or the Machine is stopped and has none.
fn unused_secret(observed: &Observed, resolved: &Resolved) -> Step {
    let step = Step::new(step::UNUSED);
    match discarded(observed, resolved) {
        Some(view) => step.write(Write::Delete {
            target: Target::of::<Secret>(observed.key(&cloud_init::secret_name(observed.name()))),
            uid: view.uid.clone(),
        }),
        None => step,
    }
}

fn discarded<'a>(observed: &'a Observed, resolved: &Resolved) -> Option<&'a SecretView> {
    let no_guest_comes = observed.vmi.is_some() || resolved.power == Power::Stopped;
    spare_secret(observed).filter(|_| resolved.cloud_init.is_none() && no_guest_comes)
}

/// The Secret, if it is ours and no guest that is there needs it.
fn spare_secret(observed: &Observed) -> Option<&SecretView> {
    let spare = observed.vmi.as_ref().is_none_or(|vmi| !vmi.deleting && !vmi.needs_user_data);
    let view = observed.secret.as_ref().filter(|_| spare)?;
    (!view.deleting && view.controller_uid.as_deref() == Some(observed.uid())).then_some(view)
}

/// Whether user data is about to be discarded, which nothing brings back: whoever observes asks the server first, because
/// a cache may lag. Asked at every pass, and of nearly every Machine the first look is enough.
pub fn discards_user_data(observed: &Observed) -> bool {
    if observed.is_deleting() || spare_secret(observed).is_none() {
        return false;
    }
    let Assessment { resolved, blocker, .. } = assess(observed);
    resolved.filter(|_| blocker.is_none()).is_some_and(|resolved| discarded(observed, &resolved).is_some())
}

/// Of the wanted labels those that are absent or different.
fn missing(wanted: &BTreeMap<String, String>, have: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    wanted
        .iter()
        .filter(|(key, value)| have.get(*key) != Some(*value))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Foreign labels stay: each is set by itself, unless there are none at all.
fn set_labels<'a>(
    labels: &'a BTreeMap<String, String>,
    have: &BTreeMap<String, String>,
) -> impl Iterator<Item = Operation> + use<'a> {
    let whole = have.is_empty() && !labels.is_empty();
    let all = whole.then(|| Operation::set("/metadata/labels", json!(labels)));
    let each = labels.iter().filter(move |_| !whole).map(|(key, value)| {
        Operation::set(format!("/metadata/labels/{}", Operation::escape(key)), value.clone().into())
    });
    all.into_iter().chain(each)
}

/// Whether a live object whose name we wanted is one that we made for this Machine.
pub fn owns(observed: &Observed, target: &Target, live: &Value) -> bool {
    let text = |pointer: &str| live.pointer(pointer).and_then(Value::as_str);
    match target.resource.kind.as_str() {
        "PersistentVolumeClaim" => {
            text(&format!("/metadata/labels/{}", Operation::escape(LABEL_MACHINE_UID))) == Some(observed.uid())
        }
        "NetworkAttachmentDefinition" => {
            let network = observed.networks.get(target.key.name());
            controller(live).is_some_and(|uid| network.is_some_and(|network| network.uid == uid))
        }
        _ => controller(live) == Some(observed.uid()),
    }
}

fn controller(live: &Value) -> Option<&str> {
    let owners = live.pointer("/metadata/ownerReferences")?.as_array()?;
    owners.iter().find(|owner| owner.get("controller") == Some(&Value::Bool(true)))?.get("uid")?.as_str()
}
