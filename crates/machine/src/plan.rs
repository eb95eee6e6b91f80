//! The writes for a Machine that is not being deleted, in order: finalizer → PVCs, Secret, networks → VM → obsolete
//! objects. One reconcile plans all of them. The plan of a Machine that is up to date is empty.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use serde_json::{Value, json};
use vitivirt_api::{
    Body, Failure, Operation, Plan, Step, Target, Write,
    machine::{ANNOTATION_CONTENT, ANNOTATION_STARTED_WITH, FINALIZER_MACHINE, LABEL_MACHINE_UID, PvcPhase, VmiPhase},
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};

use crate::{
    assessment::{Assessed, allows_expansion, find_storage_class},
    changes::started_with,
    delete,
    network_finalizer::protect,
    observed::{NetworkView, Observed, SecretView, SourceView},
    render::{self, cloud_init, network, pvc, vm},
    resolve::{DiskBacking, Resolved},
};

pub(crate) mod step {
    pub(crate) const FINALIZER: &str = "finalizer";
    pub(crate) const DEPENDENCIES: &str = "PVCs, Secret and networks";
    pub(crate) const VIRTUAL_MACHINE: &str = "VirtualMachine";
    pub(crate) const VMI_REPLACEMENT: &str = "replacement of a VMI that never ran";
    pub(crate) const OBSOLETE_SECRET: &str = "deletion of the obsolete cloud-init Secret";
}

/// Fails only if an object cannot be serialized.
pub fn plan(assessed: &Assessed) -> Result<Plan, Failure> {
    let observed = assessed.observed();
    if observed.is_deleting() {
        return Ok(delete::plan(observed));
    }
    let Some(resolved) = assessed.assessment().applicable() else { return Ok(Plan::default()) };
    let steps = [
        finalizer(observed),
        dependencies(observed, resolved)?,
        virtual_machine(observed, resolved)?,
        vmi_replacement(observed),
        delete_obsolete_secret(assessed),
    ];
    Ok(Plan { steps: steps.into_iter().filter(|step| !step.writes.is_empty()).collect() })
}

fn finalizer(observed: &Observed) -> Step {
    let step = Step::new(step::FINALIZER);
    if observed.finalizer_index().is_some() {
        return step;
    }
    step.write(Write::Apply {
        target: observed.machine_target(),
        uid: observed.uid().to_owned(),
        body: Body::from(json!({"metadata": {"finalizers": [FINALIZER_MACHINE]}})),
    })
}

/// Everything that the VM refers to. None of it depends on another.
fn dependencies(observed: &Observed, resolved: &Resolved) -> Result<Step, Failure> {
    let mut step = Step::new(step::DEPENDENCIES);
    let names: BTreeSet<&str> = resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    for name in names {
        let Some(view) = observed.networks.get(name) else { continue };
        if view.finalizer_index.is_none() {
            step.writes.push(protect(&observed.key(name), &view.uid));
        }
        step.writes.extend(network_attachment(observed, name, view)?);
    }
    step.writes.extend(secret(observed, resolved)?);
    for disk in &resolved.disks {
        step.writes.extend(import_source(observed, resolved, &disk.backing)?);
        step.writes.extend(pvc(observed, resolved, &disk.backing)?);
    }
    Ok(step)
}

fn network_attachment(observed: &Observed, name: &str, view: &NetworkView) -> Result<Option<Write>, Failure> {
    let target = Target::new(network_attachment_resource(), observed.key(name));
    // The create of a name that another owner uses fails, and the executor reports the owner.
    let ours = observed.network_attachments.get(name).filter(|have| have.controller_uid.as_ref() == Some(&view.uid));
    let Some(attachment) = ours else {
        return Ok(Some(Write::Create { target, body: Body::from_object(&network::render(name, view))? }));
    };
    let labels = missing_labels(&network::labels(), &attachment.labels);
    let mut operations: Vec<Operation> = set_labels(&labels, &attachment.labels).collect();
    if attachment.config != network::cni_config(name, view) {
        operations.push(Operation::set("/spec", Body::from_object(&network::spec(name, view))?.into_json()));
    }
    Ok(patch(target, &attachment.uid, operations))
}

/// Nothing, if there is no operation.
fn patch(target: Target, uid: &str, operations: Vec<Operation>) -> Option<Write> {
    (!operations.is_empty()).then(|| Write::Patch { target, uid: uid.to_owned(), operations })
}

fn secret(observed: &Observed, resolved: &Resolved) -> Result<Option<Write>, Failure> {
    let (Some(_), Some(given)) = (&resolved.cloud_init, &observed.machine.spec.cloud_init) else { return Ok(None) };
    let target = Target::of_kind::<Secret>(observed.key(&cloud_init::secret_name(observed.name())));
    let source = match &observed.source {
        SourceView::Read(bytes) => Some(bytes),
        _ => None,
    };
    let digest = match &observed.source {
        SourceView::Unchanged(digest) => digest.clone(),
        _ => cloud_init::digest(&observed.id, given, source),
    };
    let Some(view) = &observed.secret else {
        return Ok(Some(Write::Create {
            target,
            body: Body::from_object(&cloud_init::render(resolved, given, source))?,
        }));
    };
    let labels = missing_labels(&render::labels(resolved), &view.labels);
    if view.content.as_ref() == Some(&digest) && !view.tampered && labels.is_empty() {
        return Ok(None);
    }
    let mut operations = Vec::new();
    // Without the bytes of the source only the labels can be written: the data would lose the part of the source.
    if !matches!(observed.source, SourceView::Unchanged(_)) {
        operations.push(Operation::set("/data", Body::from_object(&cloud_init::data(given, source))?.into_json()));
        operations.extend(content_annotations(observed, view, digest));
    }
    operations.extend(set_labels(&labels, &view.labels));
    Ok(patch(target, &view.uid, operations))
}

/// The new digest. While a VMI runs, also the digest that it started with, because the guest does not see the change.
fn content_annotations(observed: &Observed, view: &SecretView, digest: String) -> Vec<Operation> {
    let set = |key: &str, value: String| {
        Operation::set(format!("/metadata/annotations/{}", Operation::escape(key)), value.into())
    };
    if !view.annotated {
        return vec![
            Operation::set("/metadata/annotations", json!({ANNOTATION_CONTENT: digest})).expecting(Value::Null),
        ];
    }
    // Another client removed the annotation.
    let Some(before) = &view.content else { return vec![set(ANNOTATION_CONTENT, digest)] };
    let running = observed.vmi.as_ref().filter(|vmi| vmi.is_running() && *before != digest);
    let first_change = running.filter(|vmi| started_with(view, &vmi.uid).is_none());
    let annotation = first_change.map(|vmi| set(ANNOTATION_STARTED_WITH, format!("{} {before}", vmi.uid)));
    std::iter::once(set(ANNOTATION_CONTENT, digest)).chain(annotation).collect()
}

fn import_source(observed: &Observed, resolved: &Resolved, backing: &DiskBacking) -> Result<Option<Write>, Failure> {
    let DiskBacking::Pvc { pvc: name, .. } = backing else { return Ok(None) };
    // CDI reads it only when it fills the new PVC.
    if observed.pvcs.contains_key(name) || observed.import_sources.contains_key(name) {
        return Ok(None);
    }
    let Some(source) = pvc::import_source(resolved, backing) else { return Ok(None) };
    let target = Target::new(import_source_resource(), observed.key(name));
    Ok(Some(Write::Create { target, body: Body::from_object(&source)? }))
}

fn pvc(observed: &Observed, resolved: &Resolved, backing: &DiskBacking) -> Result<Option<Write>, Failure> {
    let DiskBacking::Pvc { pvc: name, size, storage_class, on_delete, .. } = backing else { return Ok(None) };
    let target = Target::of_kind::<PersistentVolumeClaim>(observed.key(name));
    let Some(view) = observed.pvcs.get(name) else {
        let class = find_storage_class(observed, storage_class.as_deref());
        let Some(pvc) = class.and_then(|class| pvc::render(resolved, backing, &class.name)) else { return Ok(None) };
        return Ok(Some(Write::Create { target, body: Body::from_object(&pvc)? }));
    };
    let labels = missing_labels(&pvc::pvc_labels(resolved, *on_delete), &view.labels);
    let mut operations: Vec<Operation> = set_labels(&labels, &view.labels).collect();
    let grows = view.requested_size().is_none_or(|requested| *size > requested);
    let expandable = allows_expansion(observed, view.storage_class.as_deref().unwrap_or_default());
    // Kubernetes does not expand a PVC before it is bound; the operator does it then.
    if grows && expandable && view.phase == PvcPhase::Bound {
        operations.push(Operation::set("/spec/resources/requests/storage", size.to_string().into()));
    }
    Ok(patch(target, &view.uid, operations))
}

fn virtual_machine(observed: &Observed, resolved: &Resolved) -> Result<Step, Failure> {
    let step = Step::new(step::VIRTUAL_MACHINE);
    let target = Target::new(virtual_machine_resource(), observed.id.key());
    let Some(view) = &observed.vm else {
        return Ok(step.write(Write::Create { target, body: Body::from_object(&vm::render(resolved))? }));
    };
    if view.deleting {
        // The operator creates it again after its deletion.
        return Ok(step);
    }
    let spec = Body::from_object(&vm::spec(resolved))?.into_json();
    let labels = missing_labels(&render::labels(resolved), &view.labels);
    let mut operations: Vec<Operation> = set_labels(&labels, &view.labels).collect();
    operations.extend(vm::changes(&view.spec, &spec));
    Ok(patch(target, &view.uid, operations).into_iter().fold(step, Step::write))
}

/// Deletes a VMI that never ran if the VM has changed since. KubeVirt then creates it from the present VM, so that a
/// spec that asked for too much recovers after an edit.
fn vmi_replacement(observed: &Observed) -> Step {
    let step = Step::new(step::VMI_REPLACEMENT);
    let (Some(vm), Some(vmi)) = (&observed.vm, &observed.vmi) else { return step };
    let never_ran = matches!(vmi.phase, VmiPhase::Unset | VmiPhase::Pending | VmiPhase::Scheduling) && !vmi.deleting;
    let outdated = vmi.vm_generation.is_some_and(|generation| generation < vm.generation);
    if !(never_ran && outdated) {
        return step;
    }
    step.write(Write::Delete {
        target: Target::new(virtual_machine_instance_resource(), observed.id.key()),
        uid: vmi.uid.clone(),
    })
}

fn delete_obsolete_secret(assessed: &Assessed) -> Step {
    let (step, observed) = (Step::new(step::OBSOLETE_SECRET), assessed.observed());
    match assessed.obsolete_secret() {
        Some(view) => step.write(Write::Delete {
            target: Target::of_kind::<Secret>(observed.key(&cloud_init::secret_name(observed.name()))),
            uid: view.uid.clone(),
        }),
        None => step,
    }
}

/// The desired labels that are absent or different.
fn missing_labels(desired: &BTreeMap<String, String>, current: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    desired
        .iter()
        .filter(|(key, value)| current.get(*key) != Some(*value))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Sets each label separately, so that labels of other clients stay. If the object has no labels, the map is set.
fn set_labels<'a>(
    labels: &'a BTreeMap<String, String>,
    current: &BTreeMap<String, String>,
) -> impl Iterator<Item = Operation> + use<'a> {
    let set_map = current.is_empty() && !labels.is_empty();
    let map = set_map.then(|| Operation::set("/metadata/labels", json!(labels)));
    let separately = labels.iter().filter(move |_| !set_map).map(|(key, value)| {
        Operation::set(format!("/metadata/labels/{}", Operation::escape(key)), value.clone().into())
    });
    map.into_iter().chain(separately)
}

/// Whether a live object with a name that the plan needs was created for this Machine.
pub fn owns(observed: &Observed, target: &Target, live: &Value) -> bool {
    let text = |pointer: &str| live.pointer(pointer).and_then(Value::as_str);
    match target.resource.kind.as_str() {
        "PersistentVolumeClaim" => {
            text(&format!("/metadata/labels/{}", Operation::escape(LABEL_MACHINE_UID))) == Some(observed.uid())
        }
        "NetworkAttachmentDefinition" => {
            let network = observed.networks.get(target.key.name());
            controller_uid(live).is_some_and(|uid| network.is_some_and(|network| network.uid == uid))
        }
        _ => observed.controls(controller_uid(live)),
    }
}

fn controller_uid(live: &Value) -> Option<&str> {
    let owners = live.pointer("/metadata/ownerReferences")?.as_array()?;
    owners.iter().find(|owner| owner.get("controller") == Some(&Value::Bool(true)))?.get("uid")?.as_str()
}
