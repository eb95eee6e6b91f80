//! The effect of a change, field by field: applied to a running guest, applied at its next start, or rejected, and why.
//! This is the only source of that information: `assessment` rejects changes by it, `report` names the fields that wait
//! for a restart, and the command `kubevirt-operator plan` shows it.
//!
//! Live changes are those of KubeVirt v1.8 with its default rollout strategy, LiveUpdate. With the strategy Stage every
//! change of the template waits for a restart.

mod rules;

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};
use vitivirt_api::{
    Quantity, Target, Write,
    machine::{LABEL_ON_DELETE, MachineSpec},
};

pub(crate) use self::rules::NO_EXPANSION;
use self::rules::machine_field;
pub use self::rules::{ChangeKind, ChangeRule, Effect, RULES, rule_of};
use crate::{
    observed::{Observed, SecretView},
    vmi_spec::comparable_spec,
};

/// A changed field of an object that is written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldChange {
    /// Its path in the object.
    pub field: String,
    /// The Machine's field that it is derived from; none for a field that another client set.
    #[serde(rename = "machineField", skip_serializing_if = "Option::is_none")]
    pub machine_field: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
    pub effect: Effect,
    pub why: &'static str,
}

/// A change that is impossible. The other changes of the same edit still apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RejectedChange {
    /// The Machine's field.
    pub field: String,
    /// Cause and remedy.
    pub reason: String,
}

/// The fields that a write changes.
pub fn changes_of(observed: &Observed, write: &Write) -> Vec<FieldChange> {
    let target = write.target();
    match write {
        Write::Create { .. } | Write::Delete { .. } | Write::Lazy { .. } => Vec::new(),
        Write::Apply { .. } | Write::Status { .. } => vec![change("metadata.finalizers", "metadata.finalizers", None)],
        Write::Patch { operations, .. } => {
            let changes = operations
                .iter()
                .flat_map(|operation| operation_changes(observed, target, &operation.path, operation.value.as_ref()));
            downgrade_hotplug(changes.collect())
        }
    }
}

fn operation_changes(observed: &Observed, target: &Target, pointer: &str, to: Option<&Value>) -> Vec<FieldChange> {
    let at = pointer.trim_start_matches('/').replace('/', ".").replace("~1", "/").replace("~0", "~");
    if at.starts_with("metadata.labels") {
        let on_delete = at.ends_with(LABEL_ON_DELETE);
        let disk = disk_of(observed, target);
        let field = disk.filter(|_| on_delete).map(|disk| format!("spec.disks[{disk}].onDelete"));
        // The labelled object changes immediately, even if the guest sees its labels only at the next start.
        return vec![FieldChange {
            effect: Effect::Live,
            ..change(&at, field.as_deref().unwrap_or("metadata.labels"), to)
        }];
    }
    if at.starts_with("metadata.ownerReferences") {
        return vec![metadata_change(&at, to, OWNER)];
    }
    match (target.resource.kind.as_str(), pointer.strip_prefix("/spec")) {
        // It only describes the configuration.
        ("NetworkAttachmentDefinition", None) => Vec::new(),
        // The data is secret, and the annotations only describe it.
        ("Secret", _) if at.starts_with("data") => vec![change(&at, "spec.cloudInit", None)],
        ("Secret", _) => Vec::new(),
        ("VirtualMachine", Some(inner)) => {
            let before = observed.vm.as_ref().and_then(|vm| vm.spec.pointer(inner));
            differences(&at, before, to)
        }
        ("PersistentVolumeClaim", None) => vec![metadata_change(&at, to, DISK_MARK)],
        ("PersistentVolumeClaim", Some(_)) => {
            let disk = disk_of(observed, target).unwrap_or_default();
            let before = observed.pvcs.get(target.key.name()).map(|pvc| pvc.requested.clone().into());
            vec![FieldChange { from: before, ..change(&at, &format!("spec.disks[{disk}].size"), to) }]
        }
        // A NetworkAttachmentDefinition follows its NetworkConfiguration, not the Machine.
        _ => vec![FieldChange { machine_field: None, ..change(&at, "spec.networks[].networkName", to) }],
    }
}

const OWNER: &str = "the garbage collector deletes an object with its owner: VirtualMachine and Secret belong to the Machine, and \
                     a PVC has no owner";
const DISK_MARK: &str = "it says which disk the PVC holds, in case a backup does not contain the status of the Machine";

/// A change that does not follow from the spec.
fn metadata_change(at: &str, to: Option<&Value>, why: &'static str) -> FieldChange {
    FieldChange { field: at.to_owned(), machine_field: None, from: None, to: to.cloned(), effect: Effect::Live, why }
}

/// The disk that a PVC belongs to.
fn disk_of<'a>(observed: &Observed, target: &'a Target) -> Option<&'a str> {
    target.key.name().strip_prefix(observed.name())?.strip_prefix('-')
}

fn change(at: &str, field: &str, to: Option<&Value>) -> FieldChange {
    let rule = rule_of(field, ChangeKind::Any);
    FieldChange {
        field: at.to_owned(),
        machine_field: Some(field.to_owned()),
        from: None,
        to: to.cloned(),
        effect: rule.map_or(Effect::Restart, |rule| rule.effect),
        why: rule.map_or(FOREIGN, |rule| rule.why),
    }
}

const FOREIGN: &str = "no field of a Machine sets it; the operator removes it, and KubeVirt uses its default";

/// While a change of the template waits for a restart, KubeVirt hotplugs nothing.
fn downgrade_hotplug(mut changes: Vec<FieldChange>) -> Vec<FieldChange> {
    let waits =
        |change: &FieldChange| change.effect == Effect::Restart && change.field.starts_with("spec.template.spec");
    if changes.iter().any(waits) {
        for change in changes.iter_mut().filter(|change| change.effect == Effect::LiveIfPossible) {
            change.effect = Effect::Restart;
            change.why = "KubeVirt does not hotplug while another change is waiting for a restart";
        }
    }
    changes
}

/// The leaves that differ. Items of lists are matched by name, as KubeVirt does it.
pub(crate) fn differences(path: &str, from: Option<&Value>, to: Option<&Value>) -> Vec<FieldChange> {
    let mut found = Vec::new();
    collect(path, from, to, &mut found);
    found
}

fn collect(path: &str, from: Option<&Value>, to: Option<&Value>, found: &mut Vec<FieldChange>) {
    if from == to {
        return;
    }
    let none = Value::Object(Map::new());
    // Features change one by one. The object that contains them is absent if there is none.
    let (from, to) = if path.ends_with(".features") { (from.or(Some(&none)), to.or(Some(&none))) } else { (from, to) };
    match (from, to) {
        (Some(Value::Object(from)), Some(Value::Object(to))) => {
            let names: BTreeSet<&String> = from.keys().chain(to.keys()).collect();
            for name in names {
                collect(&format!("{path}.{name}"), from.get(name), to.get(name), found);
            }
        }
        (Some(Value::Array(from)), Some(Value::Array(to))) if are_named(from) && are_named(to) => {
            let names: BTreeSet<&str> = from.iter().chain(to).filter_map(name_of).collect();
            for name in names {
                let find = |list: &'_ [Value]| list.iter().find(|item| name_of(item) == Some(name)).cloned();
                collect(&format!("{path}[{name}]"), find(from).as_ref(), find(to).as_ref(), found);
            }
        }
        (from, to) => found.push(leaf(path, from, to)),
    }
}

fn leaf(path: &str, from: Option<&Value>, to: Option<&Value>) -> FieldChange {
    let kind = match (from, to) {
        (None, _) => ChangeKind::Added,
        (_, None) => ChangeKind::Removed,
        (Some(from), Some(to)) => match (amount(from), amount(to)) {
            (Some(from), Some(to)) if to > from => ChangeKind::Grows,
            (Some(from), Some(to)) if to < from => ChangeKind::Shrinks,
            _ => ChangeKind::Any,
        },
    };
    let machine_field = machine_field(path);
    let rule = machine_field.as_deref().and_then(|field| rule_of(field, kind));
    FieldChange {
        field: path.to_owned(),
        machine_field,
        from: from.cloned(),
        to: to.cloned(),
        effect: rule.map_or(Effect::Restart, |rule| rule.effect),
        why: rule.map_or(FOREIGN, |rule| rule.why),
    }
}

fn amount(value: &Value) -> Option<Quantity> {
    match value {
        Value::Number(number) => Quantity::parse(&number.to_string()),
        Value::String(text) => Quantity::parse(text),
        _ => None,
    }
}

fn are_named(list: &[Value]) -> bool {
    list.iter().all(|item| name_of(item).is_some())
}

fn name_of(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}

/// The Machine's fields in which the running VMI differs from the VM.
pub(crate) fn pending_restart_fields(observed: &Observed) -> BTreeSet<String> {
    let (Some(vm), Some(vmi)) = (&observed.vm, &observed.vmi) else { return BTreeSet::new() };
    let template = vm.spec.pointer("/template/spec").map(comparable_spec);
    let changes = differences("spec.template.spec", Some(&vmi.spec), template.as_ref());
    let fields = changes.into_iter().filter_map(|change| change.machine_field);
    let cloud_init = user_data_outdated(observed).then(|| "spec.cloudInit".to_owned());
    fields.chain(cloud_init).collect()
}

/// The field, with the template if that sets it and the spec does not. A user who changed the template knows no other field.
pub(crate) fn with_template(spec: &MachineSpec, field: String) -> String {
    let Some(template) = &spec.template else { return field };
    let Some(resource) = field.strip_prefix("spec.resources.") else { return field };
    let resources = serde_json::to_value(&spec.resources).unwrap_or_default();
    let is_set = resources.pointer(&format!("/{}", resource.replace('.', "/"))).is_some();
    if is_set { field } else { format!("{field} (from template {template})") }
}

/// Whether the VMI was started with other data of its cloud-init Secret. KubeVirt does not compare it.
pub(crate) fn user_data_outdated(observed: &Observed) -> bool {
    let (Some(secret), Some(vmi)) = (&observed.secret, &observed.vmi) else { return false };
    let started_with = started_with(secret, &vmi.uid);
    started_with.is_some() && started_with != secret.content.as_deref()
}

/// The digest of the user data that a VMI was started with, if the data changed since.
pub(crate) fn started_with<'a>(secret: &'a SecretView, vmi_uid: &str) -> Option<&'a str> {
    let (uid, digest) = secret.started_with.as_deref()?.split_once(' ')?;
    (uid == vmi_uid).then_some(digest)
}
