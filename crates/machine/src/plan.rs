//! The writes for a Machine that is not being deleted, in order: finalizer → import sources → PVCs, Secret, networks → VM
//! → obsolete objects. One reconcile plans all of them. The plan of a Machine that is up to date is empty.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use serde_json::{Value, json};
use vitivirt_api::{
    Body, Failure, Operation, Plan, Step, Target, Write,
    machine::{
        ANNOTATION_ADOPT_BY, ANNOTATION_CONTENT, ANNOTATION_DISK, ANNOTATION_IDENTITY, ANNOTATION_SEGMENTS,
        ANNOTATION_SOURCE, ANNOTATION_SOURCE_READ, ANNOTATION_STARTED_WITH, CLOUD_INIT_DISK, FINALIZER_MACHINE,
        LABEL_CLUSTER, LABEL_MACHINE, LABEL_MACHINE_UID, PvcPhase,
    },
    resources::{
        import_source_resource, network_attachment_resource, virtual_machine_instance_resource,
        virtual_machine_resource,
    },
};

use crate::{
    assessment::{Assessed, Assessment, allows_expansion, find_storage_class, never_bound, replaced_vmi},
    changes::started_with,
    delete,
    network_finalizer::protect,
    observed::{ImportSourceView, NetworkView, Observed, PvcView, SecretView, SourceView, VmOwner},
    ownership,
    problem::{Part, Problem},
    render::{
        self, cloud_init,
        live_parts::{KeptParts, keep, keep_changes_of_kubevirt},
        network, pvc, vm,
    },
    repairs::without_delayed,
    resolve::{DiskBacking, PowerState, Resolved, ResolvedDisk, power_state},
};

pub(crate) mod step {
    pub(crate) const FINALIZER: &str = "finalizer";
    pub(crate) const RESTORED_PVCS: &str = "release of restored PVCs";
    pub(crate) const IMPORT_SOURCES: &str = "import sources";
    pub(crate) const DEPENDENCIES: &str = "PVCs, Secret and networks";
    pub(crate) const VIRTUAL_MACHINE: &str = "VirtualMachine";
    pub(crate) const VIRTUAL_MACHINE_DEVICES: &str = "new devices of the VirtualMachine";
    pub(crate) const VMI_REPLACEMENT: &str = "replacement of a VMI that never ran";
    pub(crate) const OBSOLETE_SECRET: &str = "deletion of the obsolete cloud-init Secret";
}

/// Fails if an object cannot be serialized, or if the state before a deletion could not be confirmed.
pub fn plan(assessed: &Assessed) -> Result<Plan, Failure> {
    let (observed, assessment) = (assessed.observed(), assessed.assessment());
    if observed.is_deleting() {
        return match &observed.live_check_failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(delete::plan(observed)),
        };
    }
    let complete = |steps: Vec<Step>| {
        let steps = std::iter::once(restored_pvcs(observed)).chain(steps);
        without_delayed(observed, Plan { steps: steps.filter(|step| !step.writes.is_empty()).collect() })
    };
    let Some(resolved) = &assessment.resolved else { return Ok(complete(plan_of_invalid_spec(observed).steps)) };
    if assessed.is_stopped() {
        return Ok(complete(Vec::new()));
    }
    let mut steps = vec![
        finalizer(observed),
        import_sources(observed, assessment, resolved)?,
        dependencies(observed, assessment, resolved)?,
    ];
    steps.extend(virtual_machine(observed, assessment, resolved)?);
    steps.extend([vmi_replacement(observed), delete_obsolete_secret(assessed)]);
    Ok(complete(steps))
}

impl Assessed {
    /// Whether nothing is written. A VM is created only when all its parts can be: a Machine that never ran is not half
    /// created. A VM that exists follows the spec in the parts without a problem.
    pub fn is_stopped(&self) -> bool {
        let observed = self.observed();
        let has_user_data = observed.own_secret().is_some_and(|secret| !secret.deleting);
        let stops = |problem: &Problem| match problem.part {
            Part::Machine => true,
            // The Secret has the user data of the last time that the source existed.
            Part::CloudInit if has_user_data => false,
            Part::CloudInit | Part::Disk(_) | Part::Networks => observed.own_vm().is_none(),
        };
        self.assessment().problems.iter().any(stops)
    }
}

/// An invalid spec can still start and stop the machine that exists.
fn plan_of_invalid_spec(observed: &Observed) -> Plan {
    let run_strategy = match power_state(observed.machine.spec.power_state.as_deref()) {
        Ok(PowerState::Running) => "Always",
        Ok(PowerState::Stopped) => "Halted",
        Err(_) => return Plan::default(),
    };
    let vm = observed.own_vm().filter(|vm| !vm.deleting && !vm.restoring);
    let vm = vm.filter(|vm| vm.spec.get("runStrategy").and_then(Value::as_str) != Some(run_strategy));
    let write = vm.map(|vm| Write::Patch {
        target: Target::new(virtual_machine_resource(), observed.id.key()),
        uid: vm.uid.clone(),
        operations: vec![Operation::set("/spec/runStrategy", run_strategy.into())],
    });
    Plan { steps: write.into_iter().map(|write| Step::new(step::VIRTUAL_MACHINE).write(write)).collect() }
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

/// The sources of the PVCs that CDI fills. A PVC whose source does not exist is never filled, so they are created first,
/// and again while the PVC has no content.
fn import_sources(observed: &Observed, assessment: &Assessment, resolved: &Resolved) -> Result<Step, Failure> {
    let mut step = Step::new(step::IMPORT_SOURCES);
    for disk in disks_in_own_pvcs(assessment, resolved) {
        step.writes.extend(import_source(observed, assessment, resolved, &disk.backing)?);
    }
    Ok(step)
}

/// Everything that the VM refers to. None of it depends on another.
fn dependencies(observed: &Observed, assessment: &Assessment, resolved: &Resolved) -> Result<Step, Failure> {
    let mut step = Step::new(step::DEPENDENCIES);
    let names: BTreeSet<&str> = resolved.networks.iter().filter_map(|network| network.configuration()).collect();
    for name in names.into_iter().filter(|_| !assessment.stops(&Part::Networks)) {
        let Some(view) = observed.networks.get(name) else { continue };
        // The API server accepts no new finalizer on an object that is being deleted.
        if view.finalizer_index.is_none() && !view.deleting {
            step.writes.push(protect(&observed.key(name), &view.uid));
        }
        step.writes.extend(network_attachment(observed, name, view)?);
    }
    if !assessment.stops(&Part::CloudInit) {
        step.writes.extend(secret(observed, resolved)?);
    }
    for disk in disks_in_own_pvcs(assessment, resolved) {
        step.writes.extend(pvc(observed, assessment, resolved, disk)?);
        step.writes.extend(remove_outdated_marks(observed, disk));
    }
    Ok(step)
}

/// Removes the annotation with the name of the disk from the PVCs in which it was before.
fn remove_outdated_marks<'a>(observed: &'a Observed, disk: &'a ResolvedDisk) -> impl Iterator<Item = Write> + use<'a> {
    let own = observed.pvcs.iter().filter(|(name, view)| ownership::pvc(observed, name, view).is_own());
    let is_elsewhere = |name: &str| matches!(&disk.backing, DiskBacking::Pvc { pvc, .. } if pvc != name);
    let outdated = own.filter(move |(name, view)| view.disk.as_ref() == Some(&disk.name) && is_elsewhere(name));
    outdated.filter_map(|(name, view)| {
        let mark = Operation::remove(format!("/metadata/annotations/{}", Operation::escape(ANNOTATION_DISK)));
        patch(Target::of_kind::<PersistentVolumeClaim>(observed.key(name)), &view.uid, vec![mark])
    })
}

/// The disks that nothing stops and that are in a PVC of the Machine.
fn disks_in_own_pvcs<'a>(assessment: &'a Assessment, resolved: &'a Resolved) -> impl Iterator<Item = &'a ResolvedDisk> {
    resolved
        .disks
        .iter()
        .filter(|disk| !assessment.stops_disk(&disk.name) && !assessment.moved_disks.contains(&disk.name))
}

fn network_attachment(observed: &Observed, name: &str, view: &NetworkView) -> Result<Option<Write>, Failure> {
    let target = Target::new(network_attachment_resource(), observed.key(name));
    // The create of a name that another owner uses fails, and the executor reports the owner.
    let ours = observed.network_attachments.get(name).filter(|have| have.controller_uid.as_ref() == Some(&view.uid));
    let Some(attachment) = ours else {
        return Ok(Some(Write::Create { target, body: Body::from_object(&network::render(name, view))? }));
    };
    let mut operations = label_operations(&network::labels(), &attachment.labels);
    if attachment.config != network::cni_config(name, view) {
        operations.push(Operation::set("/spec", Body::from_object(&network::spec(name, view))?.into_json()));
    }
    if let Some(segments) = network::next_segments(attachment, view, observed.now.as_second()) {
        operations.push(if attachment.annotated {
            Operation::set(format!("/metadata/annotations/{}", Operation::escape(ANNOTATION_SEGMENTS)), segments.into())
        } else {
            Operation::set("/metadata/annotations", json!({ANNOTATION_SEGMENTS: segments})).expecting(Value::Null)
        });
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
    let has_inline = observed.omitted_inline.is_none();
    let Some(view) = observed.own_secret() else {
        if !has_inline || observed.lost_secret() && !observed.machine_confirmed {
            return Ok(None);
        }
        let mut new = cloud_init::render(resolved, given, source);
        if let Some(read) = &observed.source_read {
            let annotations = new.metadata.annotations.get_or_insert_default();
            annotations.insert(ANNOTATION_SOURCE_READ.to_owned(), read.clone());
        }
        return Ok(Some(Write::Create { target, body: Body::from_object(&new)? }));
    };
    let labels = label_operations(&render::object_labels(resolved), &view.labels);
    let mut operations: Vec<Operation> =
        set_owner(observed, view.controller_uid.as_deref(), view.has_owners).into_iter().collect();
    if view.content.as_ref() == Some(&digest) && !view.tampered {
        operations.extend(labels);
        return Ok(patch(target, &view.uid, operations));
    }
    // Without the bytes of the source and the inline data only the labels can be written: the data would lose a part.
    if has_inline && !matches!(observed.source, SourceView::Unchanged(_)) {
        operations.push(Operation::set("/data", Body::from_object(&cloud_init::data(given, source))?.into_json()));
        operations.extend(content_annotations(observed, view, digest));
    }
    operations.extend(labels);
    Ok(patch(target, &view.uid, operations))
}

/// The new digest. While a VMI runs, also the digest that it started with, because the guest does not see the change.
fn content_annotations(observed: &Observed, view: &SecretView, digest: String) -> Vec<Operation> {
    let set = |key: &str, value: String| {
        Operation::set(format!("/metadata/annotations/{}", Operation::escape(key)), value.into())
    };
    if !view.annotated {
        let mut all = BTreeMap::from([(ANNOTATION_CONTENT, digest)]);
        all.extend(observed.source_read.clone().map(|read| (ANNOTATION_SOURCE_READ, read)));
        return vec![Operation::set("/metadata/annotations", json!(all)).expecting(Value::Null)];
    }
    let read = observed.source_read.clone().map(|read| set(ANNOTATION_SOURCE_READ, read));
    // Another client removed the annotation.
    let Some(before) = &view.content else {
        return std::iter::once(set(ANNOTATION_CONTENT, digest)).chain(read).collect();
    };
    let running = observed.vmi.as_ref().filter(|vmi| vmi.is_running() && *before != digest);
    let first_change = running.filter(|vmi| started_with(view, &vmi.uid).is_none());
    let annotation = first_change.map(|vmi| set(ANNOTATION_STARTED_WITH, format!("{} {before}", vmi.uid)));
    std::iter::once(set(ANNOTATION_CONTENT, digest)).chain(annotation).chain(read).collect()
}

/// The owner reference of an object that lost it, or that the Machine adopts. A deletion with `--cascade=orphan` removes it,
/// and a cache may not show that the Machine is being deleted: then the object would be deleted with it.
fn set_owner(observed: &Observed, controller_uid: Option<&str>, has_owners: bool) -> Option<Operation> {
    if controller_uid.is_some() || !observed.machine_confirmed {
        return None;
    }
    let owner = json!(render::owner_reference(&observed.id));
    Some(if has_owners {
        Operation::set("/metadata/ownerReferences/-", owner)
    } else {
        Operation::set("/metadata/ownerReferences", json!([owner])).expecting(Value::Null)
    })
}

fn import_source(
    observed: &Observed,
    assessment: &Assessment,
    resolved: &Resolved,
    backing: &DiskBacking,
) -> Result<Option<Write>, Failure> {
    let DiskBacking::Pvc { pvc: name, .. } = backing else { return Ok(None) };
    let Some(source) = pvc::import_source(resolved, backing) else { return Ok(None) };
    // CDI reads it only while it fills the PVC. KubeVirt fills the PVC of a restored disk.
    if !observed.is_named_by_spec(name) || observed.pvcs.contains_key(name) && !never_bound(observed, name) {
        return Ok(None);
    }
    let target = Target::new(import_source_resource(), observed.key(name));
    let digest = source.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_SOURCE));
    match observed.import_sources.get(name) {
        // The PVC refers to it by name, so it cannot change before the PVC is deleted.
        Some(view) if view.source.is_some() && view.source.as_ref() != digest && !view.deleting => {
            Ok(Some(Write::Delete { target, uid: view.uid.clone(), resource_version: None }))
        }
        None if !assessment.replaced_pvcs.contains(name) => {
            Ok(Some(Write::Create { target, body: Body::from_object(&source)? }))
        }
        _ => Ok(None),
    }
}

fn pvc(
    observed: &Observed,
    assessment: &Assessment,
    resolved: &Resolved,
    disk: &ResolvedDisk,
) -> Result<Option<Write>, Failure> {
    let backing = &disk.backing;
    let DiskBacking::Pvc { pvc: name, size, storage_class, on_delete, .. } = backing else { return Ok(None) };
    let target = Target::of_kind::<PersistentVolumeClaim>(observed.key(name));
    let Some(view) = observed.pvcs.get(name) else {
        // The import source of an earlier edit is still being replaced.
        let digest = pvc::import_source(resolved, backing).and_then(|source| source.metadata.annotations);
        let digest = digest.and_then(|mut all| all.remove(ANNOTATION_SOURCE));
        let outdated = |view: &ImportSourceView| view.deleting || (view.source.is_some() && view.source != digest);
        if digest.is_some() && observed.import_sources.get(name).is_some_and(outdated) {
            return Ok(None);
        }
        let class = find_storage_class(observed, storage_class.as_deref());
        let pvc = class.and_then(|class| pvc::render(resolved, backing, &class.name));
        let Some(mut pvc) = pvc else { return Ok(None) };
        if !observed.is_named_by_spec(name) {
            // It replaces the lost PVC of a restored disk by an empty one. Nothing fills it.
            pvc.spec.get_or_insert_default().data_source_ref = None;
        }
        return Ok(Some(Write::Create { target, body: Body::from_object(&pvc)? }));
    };
    if assessment.replaced_pvcs.contains(name) {
        // A cache may lag: the PVC may be bound by now. Without a live read nothing is deleted.
        let delete = |version| Write::Delete { target, uid: view.uid.clone(), resource_version: Some(version) };
        return Ok(view.live_version.clone().map(delete));
    }
    let mut operations = label_operations(&pvc::pvc_labels(resolved, *on_delete), &view.labels);
    if !observed.is_named_by_spec(name) && view.disk.as_ref() != Some(&disk.name) {
        operations.push(mark_disk(&disk.name, name, view));
    }
    let grows = view.requested_size().is_none_or(|requested| *size > requested);
    let expandable = allows_expansion(observed, view.storage_class.as_deref().unwrap_or_default());
    // Kubernetes does not expand a PVC before it is bound; the operator does it then. Labels are written first, in a patch of
    // their own: the API server may refuse to expand the PVC, and the admission policy refuses a change of the spec of a PVC
    // that does not have the label with the UID yet.
    if grows && expandable && view.phase == PvcPhase::Bound && operations.is_empty() {
        operations.push(Operation::set("/spec/resources/requests/storage", size.to_string().into()));
    }
    Ok(patch(target, &view.uid, operations))
}

/// Writes into the PVC which disk it holds. The status says it too, but a backup may not contain the status.
fn mark_disk(disk: &str, name: &str, view: &PvcView) -> Operation {
    let mark = pvc::disk_mark(disk, name);
    if view.annotated {
        return Operation::set(format!("/metadata/annotations/{}", Operation::escape(ANNOTATION_DISK)), mark.into());
    }
    Operation::set("/metadata/annotations", json!({ANNOTATION_DISK: mark})).expecting(Value::Null)
}

/// Removes the owner references that KubeVirt sets on the PVCs of restored disks, whatever else is wrong. A PVC that KubeVirt
/// restored for another VM has the labels of this Machine too, and another owner.
fn restored_pvcs(observed: &Observed) -> Step {
    let mut step = Step::new(step::RESTORED_PVCS).independent(true);
    for (name, pvc) in &observed.pvcs {
        let Some(VmOwner { index, uid }) = &pvc.vm_owner else { continue };
        let is_of_own_vm = match observed.own_vm() {
            Some(vm) => vm.uid == *uid && !vm.restoring,
            // The garbage collector has not deleted the PVC yet.
            None => observed.recorded_disk(name).is_some(),
        };
        if !is_of_own_vm || !ownership::pvc(observed, name, pvc).is_own() {
            continue;
        }
        let target = Target::of_kind::<PersistentVolumeClaim>(observed.key(name));
        step.writes.extend(patch(target, &pvc.uid, ownership::remove_owner(*index, uid).into()));
    }
    step
}

/// A new VM waits for everything that it refers to. An existing one is changed in two steps: what does not need a new
/// object, even if another object could not be written; and the rest.
fn virtual_machine(observed: &Observed, assessment: &Assessment, resolved: &Resolved) -> Result<Vec<Step>, Failure> {
    let (now, later) = (Step::new(step::VIRTUAL_MACHINE), Step::new(step::VIRTUAL_MACHINE_DEVICES));
    let target = Target::new(virtual_machine_resource(), observed.id.key());
    let Some(view) = observed.own_vm() else {
        if observed.lost_vm() && !observed.machine_confirmed {
            return Ok(Vec::new());
        }
        return Ok(vec![now.write(Write::Create { target, body: Body::from_object(&vm::render(resolved))? })]);
    };
    if view.deleting || view.restoring {
        // The operator creates it again after its deletion. During a restore KubeVirt writes its spec.
        return Ok(Vec::new());
    }
    let spec = Body::from_object(&vm::spec(resolved))?.into_json();
    let spec = keep(&view.spec, spec, &stopped_parts(assessment, resolved));
    let spec = keep_changes_of_kubevirt(&view.spec, spec);
    let available = keep(&view.spec, spec.clone(), &unavailable_parts(observed, resolved));
    let mut operations: Vec<Operation> =
        set_owner(observed, view.controller_uid.as_deref(), view.has_owners).into_iter().collect();
    operations.extend(label_operations(&render::object_labels(resolved), &view.labels));
    operations.extend(vm::changes(&view.spec, &available));
    let now = patch(target.clone(), &view.uid, operations).into_iter().fold(now, Step::write).independent(true);
    let later = patch(target, &view.uid, vm::changes(&available, &spec)).into_iter().fold(later, Step::write);
    Ok(vec![now, later])
}

/// The parts that a problem stops.
fn stopped_parts<'a>(assessment: &Assessment, resolved: &'a Resolved) -> KeptParts<'a> {
    let disks = resolved.disks.iter().map(|disk| disk.name.as_str()).filter(|name| assessment.stops_disk(name));
    let cloud_init = Some(CLOUD_INIT_DISK).filter(|_| assessment.stops(&Part::CloudInit));
    KeptParts { disks: disks.chain(cloud_init).collect(), networks: assessment.stops(&Part::Networks) }
}

/// The parts that refer to an object that does not exist yet.
fn unavailable_parts<'a>(observed: &Observed, resolved: &'a Resolved) -> KeptParts<'a> {
    let is_missing = |disk: &&ResolvedDisk| match &disk.backing {
        DiskBacking::Pvc { pvc, .. } => !observed.pvcs.contains_key(pvc),
        DiskBacking::ContainerDisk { .. } => false,
    };
    let disks = resolved.disks.iter().filter(is_missing).map(|disk| disk.name.as_str());
    let cloud_init = Some(CLOUD_INIT_DISK).filter(|_| resolved.cloud_init.is_some() && observed.secret.is_none());
    let mut networks = resolved.networks.iter().filter_map(|network| network.configuration());
    KeptParts {
        disks: disks.chain(cloud_init).collect(),
        networks: networks.any(|name| !observed.network_attachments.contains_key(name)),
    }
}

/// Deletes a VMI that never ran if the VM has changed since. KubeVirt then creates it from the present VM, so that a
/// spec that asked for too much recovers after an edit. A cache may lag, and the guest may run by now, so it is deleted
/// only after a live read.
fn vmi_replacement(observed: &Observed) -> Step {
    let step = Step::new(step::VMI_REPLACEMENT);
    let live = replaced_vmi(observed).and_then(|vmi| Some((vmi, vmi.live_version.clone()?)));
    let Some((vmi, version)) = live else { return step };
    step.write(Write::Delete {
        target: Target::new(virtual_machine_instance_resource(), observed.id.key()),
        uid: vmi.uid.clone(),
        resource_version: Some(version),
    })
}

fn delete_obsolete_secret(assessed: &Assessed) -> Step {
    let (step, observed) = (Step::new(step::OBSOLETE_SECRET), assessed.observed());
    match assessed.obsolete_secret() {
        Some(view) => step.write(Write::Delete {
            target: Target::of_kind::<Secret>(observed.key(&cloud_init::secret_name(observed.name()))),
            uid: view.uid.clone(),
            resource_version: None,
        }),
        None => step,
    }
}

/// Sets the labels that are absent or different. The label with the cluster is removed when the Machine has none, because
/// only the operator sets it on objects of a Machine.
fn label_operations(desired: &BTreeMap<String, String>, current: &BTreeMap<String, String>) -> Vec<Operation> {
    let missing = missing_labels(desired, current);
    let mut operations: Vec<Operation> = set_labels(&missing, current).collect();
    let is_of_a_machine = desired.contains_key(LABEL_MACHINE);
    if is_of_a_machine && !desired.contains_key(LABEL_CLUSTER) && current.contains_key(LABEL_CLUSTER) {
        operations.push(Operation::remove(format!("/metadata/labels/{}", Operation::escape(LABEL_CLUSTER))));
    }
    operations
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
    let uid_label = || text(&format!("/metadata/labels/{}", Operation::escape(LABEL_MACHINE_UID)));
    let annotation = |name: &str| format!("/metadata/annotations/{}", Operation::escape(name));
    let consents = || text(&annotation(ANNOTATION_ADOPT_BY)) == Some(observed.name());
    match target.resource.kind.as_str() {
        "PersistentVolumeClaim" => {
            let label = uid_label();
            label.is_some_and(|uid| uid == observed.uid() || observed.adoption().includes_machine(uid))
                || (label.is_none() && text(&annotation(ANNOTATION_IDENTITY)) == Some(observed.uid()))
                || (observed.adoption().includes_pvc(target.key.name()) && (label.is_some() || consents()))
        }
        "NetworkAttachmentDefinition" => {
            let network = observed.networks.get(target.key.name());
            controller_uid(live).is_some_and(|uid| network.is_some_and(|network| network.uid == uid))
        }
        _ => match controller_uid(live) {
            Some(uid) => uid == observed.uid(),
            // An object that lost its owner reference, and the label that the caches select.
            None => {
                let guest = text("/spec/template/spec/domain/firmware/uuid");
                let is_adopted = target.resource.kind == "Secret"
                    && observed.adoption().includes_secret(target.key.name())
                    && consents();
                is_adopted || [uid_label(), guest].contains(&Some(observed.uid()))
            }
        },
    }
}

fn controller_uid(live: &Value) -> Option<&str> {
    let owners = live.pointer("/metadata/ownerReferences")?.as_array()?;
    owners.iter().find(|owner| owner.get("controller") == Some(&Value::Bool(true)))?.get("uid")?.as_str()
}
