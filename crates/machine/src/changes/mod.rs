//! What becomes of a change, field by field: taken up by a running guest, waiting for its next start, or never possible,
//! and why. It is the one place that says so: `plan` refuses by it, `report` names by it what waits for a restart, and
//! the command `kubevirt-operator plan` shows it.
//!
//! What KubeVirt takes live is what v1.8 does with its default rollout strategy (LiveUpdate). With the strategy Stage
//! everything of the template waits.

mod rules;

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};
use vitivirt_api::{Target, Write};

use crate::observed::{Observed, SecretView};
use crate::quantity::Quantity;
use crate::vmi_spec::comparable_spec;
use rules::machine_field;
pub use rules::{Effect, Kind, NO_EXPANSION, RULES, Rule, rule_of};

/// A field that differs, in the object that is written and in the Machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldChange {
    /// Where it is in the object that is written.
    pub field: String,
    /// The Machine's field that it comes from; none for what somebody else put there.
    #[serde(rename = "machineField", skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
    pub effect: Effect,
    pub why: &'static str,
}

/// A change that can never be made; everything else of the edit still applies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The Machine's field.
    pub field: String,
    /// Why, and what to do.
    pub reason: String,
}

/// What a write changes, field by field.
pub fn changes_of(observed: &Observed, write: &Write) -> Vec<FieldChange> {
    let target = write.target();
    match write {
        Write::Create { .. } | Write::Delete { .. } | Write::Lazy { .. } => Vec::new(),
        Write::Apply { .. } | Write::Status { .. } => vec![change("metadata.finalizers", "metadata.finalizers", None)],
        Write::Patch { operations, .. } => {
            let each = operations.iter();
            let all = each
                .flat_map(|operation| operation_changes(observed, target, &operation.path, operation.value.as_ref()));
            held_up(all.collect())
        }
    }
}

fn operation_changes(observed: &Observed, target: &Target, pointer: &str, to: Option<&Value>) -> Vec<FieldChange> {
    let at = pointer.trim_start_matches('/').replace('/', ".").replace("~1", "/").replace("~0", "~");
    if at.starts_with("metadata.labels") {
        let on_delete = at.ends_with(vitivirt_api::machine::LABEL_ON_DELETE);
        let disk = disk_of(observed, target);
        let field = disk.filter(|_| on_delete).map(|disk| format!("spec.disks[{disk}].onDelete"));
        // What carries the label is changed at once, whatever waits for its next start.
        return vec![FieldChange {
            effect: Effect::Live,
            ..change(&at, field.as_deref().unwrap_or("metadata.labels"), to)
        }];
    }
    match (target.resource.kind.as_str(), pointer.strip_prefix("/spec")) {
        // What is in it is nobody's business here, and its annotations only go with it.
        ("Secret", _) if at.starts_with("data") => vec![change(&at, "spec.cloudInit", None)],
        ("Secret", _) => Vec::new(),
        ("VirtualMachine", Some(inner)) => {
            let before = observed.vm.as_ref().and_then(|vm| vm.spec.pointer(inner));
            differences(&at, before, to)
        }
        ("PersistentVolumeClaim", Some(_)) => {
            let disk = disk_of(observed, target).unwrap_or_default();
            let before = observed.pvcs.get(target.key.name()).map(|pvc| pvc.requested.clone().into());
            vec![FieldChange { from: before, ..change(&at, &format!("spec.disks[{disk}].size"), to) }]
        }
        // A NetworkAttachmentDefinition follows its NetworkConfiguration, not the Machine.
        _ => {
            let of = change(&at, "spec.networks[].networkName", to);
            vec![FieldChange { of: None, ..of }]
        }
    }
}

/// The disk that a PVC was made for.
fn disk_of<'a>(observed: &Observed, target: &'a Target) -> Option<&'a str> {
    target.key.name().strip_prefix(observed.name())?.strip_prefix('-')
}

fn change(at: &str, field: &str, to: Option<&Value>) -> FieldChange {
    let rule = rule_of(field, Kind::Any);
    FieldChange {
        field: at.to_owned(),
        of: Some(field.to_owned()),
        from: None,
        to: to.cloned(),
        effect: rule.map_or(Effect::Restart, |rule| rule.effect),
        why: rule.map_or(FOREIGN, |rule| rule.why),
    }
}

const FOREIGN: &str = "no Machine has this field: it is put back to what KubeVirt makes of its absence";

/// While anything of the template waits for a restart, KubeVirt plugs nothing in.
fn held_up(mut changes: Vec<FieldChange>) -> Vec<FieldChange> {
    let waits =
        |change: &FieldChange| change.effect == Effect::Restart && change.field.starts_with("spec.template.spec");
    if changes.iter().any(waits) {
        for change in changes.iter_mut().filter(|change| change.effect == Effect::LiveIfPossible) {
            change.effect = Effect::Restart;
            change.why = "KubeVirt plugs nothing into a guest that has to be restarted for something else";
        }
    }
    changes
}

/// The leaves that differ. Things in lists are known by their names, as KubeVirt knows them.
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
    // Features come and go one by one, and with the last of them the object that holds them.
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
        (None, _) => Kind::Added,
        (_, None) => Kind::Removed,
        (Some(from), Some(to)) => match (amount(from), amount(to)) {
            (Some(from), Some(to)) if to > from => Kind::Grows,
            (Some(from), Some(to)) if to < from => Kind::Shrinks,
            _ => Kind::Any,
        },
    };
    let of = machine_field(path);
    let rule = of.as_deref().and_then(|field| rule_of(field, kind));
    FieldChange {
        field: path.to_owned(),
        of,
        from: from.cloned(),
        to: to.cloned(),
        effect: rule.map_or(Effect::Restart, |rule| rule.effect),
        why: rule.map_or(FOREIGN, |rule| rule.why),
    }
}

fn amount(value: &Value) -> Option<u128> {
    match value {
        Value::Number(number) => number.as_u64().map(u128::from),
        Value::String(text) => Quantity::parse(text).map(Quantity::bytes),
        _ => None,
    }
}

fn are_named(list: &[Value]) -> bool {
    list.iter().all(|item| name_of(item).is_some())
}

fn name_of(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}

/// The Machine's fields that a running guest does not have yet as the VM has them.
pub(crate) fn waiting(observed: &Observed) -> BTreeSet<String> {
    let (Some(vm), Some(vmi)) = (&observed.vm, &observed.vmi) else { return BTreeSet::new() };
    let template = vm.spec.pointer("/template/spec").map(comparable_spec);
    let differ = differences("spec.template.spec", Some(&vmi.spec), template.as_ref());
    let known = differ.into_iter().filter_map(|change| change.of);
    let seeded = is_seeded_otherwise(observed).then(|| "spec.cloudInit".to_owned());
    known.chain(seeded).collect()
}

/// Whether the guest was started with other contents of its cloud-init Secret. KubeVirt does not look into it.
pub(crate) fn is_seeded_otherwise(observed: &Observed) -> bool {
    let (Some(secret), Some(vmi)) = (&observed.secret, &observed.vmi) else { return false };
    let began_with = began_with(secret, &vmi.uid);
    began_with.is_some() && began_with != secret.content.as_deref()
}

/// The digest of what a guest was started with, where it was noted because it changed since.
pub(crate) fn began_with<'a>(secret: &'a SecretView, guest: &str) -> Option<&'a str> {
    let (uid, digest) = secret.began_with.as_deref()?.split_once(' ')?;
    (uid == guest).then_some(digest)
}
