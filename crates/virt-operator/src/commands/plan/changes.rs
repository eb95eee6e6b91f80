//! Which fields a write changes, and whether pods restart because of it.

use std::collections::BTreeMap;

use serde_json::Value;
use vitivirt_api::{ObjectKey, Operation, Write};
use vitivirt_cli::{ChangeEffect, PlannedChange, PlannedWrite, WriteAction};
use vitivirt_install::{Installation, Kind, Observed, certificates::NoCertificates};

/// The `spec` of live CRDs, which the operator does not watch.
pub(super) type CrdSpecs = BTreeMap<ObjectKey, Value>;

/// What the changes of a plan are compared with.
pub(super) struct PlanComparison<'a> {
    pub(super) observed: &'a Observed,
    /// The objects as the live resource asks for them. What an edit takes away is in these only.
    pub(super) before: Option<&'a Installation>,
    pub(super) crds: &'a CrdSpecs,
}

impl PlanComparison<'_> {
    pub(super) fn planned_write(&self, write: &Write) -> PlannedWrite {
        let made = match write {
            Write::Lazy { make, verb: "patch", .. } => make.make().ok(),
            _ => None,
        };
        let (action, changes) = match made.as_ref().unwrap_or(write) {
            Write::Create { .. } | Write::Lazy { verb: "create", .. } => (WriteAction::Create, Vec::new()),
            Write::Delete { .. } => (WriteAction::Delete, Vec::new()),
            Write::Lazy { .. } | Write::Apply { .. } | Write::Status { .. } => (WriteAction::Update, Vec::new()),
            Write::Patch { operations, .. } => {
                let before = self.before.and_then(|before| {
                    let object = before.objects.iter().find(|object| object.target() == *write.target())?;
                    Some(object.body(&NoCertificates).ok()?.into_json())
                });
                let changes: Vec<PlannedChange> = operations
                    .iter()
                    .flat_map(|operation| self.changed_fields(write, operation, before.as_ref()))
                    .collect();
                let restarts = changes.iter().any(|change| change.effect == ChangeEffect::Restart);
                (if restarts { WriteAction::Restart } else { WriteAction::Update }, changes)
            }
        };
        PlannedWrite::new(action, write.target(), changes)
    }

    /// The fields below a replaced field whose values differ. `before` is the object as the live resource asks for it.
    fn changed_fields(&self, write: &Write, operation: &Operation, before: Option<&Value>) -> Vec<PlannedChange> {
        let target = write.target();
        let path =
            operation.path.trim_start_matches('/').split('/').map(|part| part.replace("~1", "/").replace("~0", "~"));
        let path: Vec<String> = path.collect();
        let [field] = path.as_slice() else {
            return vec![planned_change(path.join("."), operation.value.is_none())];
        };
        let kind = Kind::from_name(&target.resource.kind);
        let is_crd = kind == Some(Kind::CustomResourceDefinition);
        let live = match self.crds.get(&target.key).filter(|_| is_crd && field == "spec") {
            Some(spec) => Some(spec.clone()),
            None => kind
                .and_then(|kind| self.observed.objects.get(kind, &target.key))
                .and_then(|live| live.content())
                .and_then(|content| content.get(field).cloned()),
        };
        match (&operation.value, &live) {
            (Some(new), Some(old)) if is_crd => crd_changes(old, new),
            (Some(new), Some(old)) => {
                let (mut differences, mut removed) = (Vec::new(), Vec::new());
                collect_differences(field, old, new, &mut differences);
                if let Some(before) = before.and_then(|before| before.get(field)) {
                    collect_removed(field, before, new, old, &mut removed);
                }
                let changed = differences.into_iter().map(|field| planned_change(field, false));
                changed.chain(removed.into_iter().map(|field| planned_change(field, true))).collect()
            }
            (value, _) => vec![planned_change(field.clone(), value.is_none())],
        }
    }
}

/// The fields that a write changes, without their values.
pub(crate) fn written_fields(observed: &Observed, write: &Write) -> Vec<String> {
    let Write::Patch { operations, .. } = write else { return Vec::new() };
    let comparison = PlanComparison { observed, before: None, crds: &CrdSpecs::new() };
    let changes = operations.iter().flat_map(|operation| comparison.changed_fields(write, operation, None));
    changes.map(|change| change.field).collect()
}

/// A schema has thousands of fields, so it counts as one. Versions are compared by their names.
fn crd_changes(old: &Value, new: &Value) -> Vec<PlannedChange> {
    let without_versions = |spec: &Value| {
        let mut spec = spec.clone();
        spec.as_object_mut().map(|fields| fields.remove("versions"));
        spec
    };
    let mut fields = Vec::new();
    collect_differences("spec", &without_versions(old), &without_versions(new), &mut fields);
    let mut changes: Vec<PlannedChange> = fields.into_iter().map(|field| planned_change(field, false)).collect();
    let versions = |spec: &Value| spec.get("versions").and_then(Value::as_array).cloned().unwrap_or_default();
    let name = |version: &Value| version.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let (old, new) = (versions(old), versions(new));
    for version in &new {
        let path = format!("spec.versions[{}]", name(version));
        let Some(live) = old.iter().find(|live| name(live) == name(version)) else {
            changes.push(planned_change(path, false));
            continue;
        };
        for (field, value) in version.as_object().into_iter().flatten() {
            let mut differences = Vec::new();
            collect_differences("", live.get(field).unwrap_or(&Value::Null), value, &mut differences);
            if !differences.is_empty() {
                changes.push(planned_change(format!("{path}.{field}"), false));
            }
        }
    }
    let removed = old.iter().filter(|live| !new.iter().any(|version| name(version) == name(live)));
    changes.extend(removed.map(|live| planned_change(format!("spec.versions[{}]", name(live)), true)));
    changes
}

/// Without values: they can be secret.
fn planned_change(field: String, removed: bool) -> PlannedChange {
    let effect = if field.starts_with("spec.template.") { ChangeEffect::Restart } else { ChangeEffect::Live };
    let reason = removed.then(|| "removed".to_owned());
    PlannedChange { field, source_field: None, from: None, to: None, effect, reason }
}

/// The fields that the object had before the edit, does not have any more, and that the live object has.
fn collect_removed(path: &str, before: &Value, new: &Value, live: &Value, into: &mut Vec<String>) {
    match (before, new, live) {
        (Value::Object(before), Value::Object(new), Value::Object(live)) => {
            for (key, value) in before {
                match (new.get(key), live.get(key)) {
                    (Some(new), Some(live)) => collect_removed(&format!("{path}.{key}"), value, new, live, into),
                    (None, Some(_)) => into.push(format!("{path}.{key}")),
                    (_, None) => {}
                }
            }
        }
        (Value::Array(before), Value::Array(new), Value::Array(live))
            if before.len() == new.len() && live.len() == new.len() =>
        {
            for (index, ((before, new), live)) in before.iter().zip(new).zip(live).enumerate() {
                collect_removed(&format!("{path}[{index}]"), before, new, live, into);
            }
        }
        _ => {}
    }
}

fn collect_differences(path: &str, old: &Value, new: &Value, into: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let nothing = Value::Null;
            // Fields that only the live object has are defaults of the API server.
            for (key, value) in new {
                collect_differences(&format!("{path}.{key}"), old.get(key).unwrap_or(&nothing), value, into);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (index, (old, new)) in old.iter().zip(new).enumerate() {
                collect_differences(&format!("{path}[{index}]"), old, new, into);
            }
        }
        (old, new) if old != new => into.push(path.to_owned()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_fields_of_the_desired_object_that_differ_are_listed() {
        let old = json!({"replicas": 2, "template": {"a": [1, {"b": 2}], "defaulted": true}, "same": "x"});
        let new = json!({"replicas": 3, "template": {"a": [1, {"b": 3}]}, "same": "x", "added": [1]});
        let mut fields = Vec::new();
        collect_differences("spec", &old, &new, &mut fields);
        assert_eq!(fields, ["spec.added", "spec.replicas", "spec.template.a[1].b"]);
        let effects = fields.into_iter().map(|field| planned_change(field, false).effect);
        assert_eq!(effects.collect::<Vec<_>>(), [ChangeEffect::Live, ChangeEffect::Live, ChangeEffect::Restart]);
    }

    /// A field that only the live object has may be a default of the API server.
    #[test]
    fn fields_that_an_edit_takes_away_are_removed_and_defaults_are_not() {
        let before =
            json!({"template": {"nodeSelector": {"a": "b", "os": "linux"}, "list": [{"x": 1, "y": 2}], "gone": 1}});
        let new = json!({"template": {"nodeSelector": {"os": "linux"}, "list": [{"x": 1}]}});
        let live =
            json!({"template": {"nodeSelector": {"a": "b", "os": "linux"}, "list": [{"x": 1, "y": 2}], "default": 1}});
        let mut fields = Vec::new();
        collect_removed("spec", &before, &new, &live, &mut fields);
        assert_eq!(fields, ["spec.template.list[0].y", "spec.template.nodeSelector.a"]);
        let change = planned_change("spec.template.nodeSelector.a".to_owned(), true);
        assert_eq!((change.effect, change.reason.as_deref()), (ChangeEffect::Restart, Some("removed")));
    }

    #[test]
    fn a_crd_is_compared_version_by_version() {
        let schema = |field: &str| json!({"openAPIV3Schema": {"properties": {(field): {"type": "string"}}}});
        let old = json!({"group": "g", "conversion": {"strategy": "None"}, "versions": [
            {"name": "v1alpha1", "served": true, "storage": false, "schema": schema("a")},
            {"name": "v1beta1", "served": true, "storage": true, "schema": schema("a")},
        ]});
        let new = json!({"group": "g", "versions": [
            {"name": "v1beta1", "served": true, "storage": false, "schema": schema("b")},
            {"name": "v1", "served": true, "storage": true, "schema": schema("b")},
        ]});
        let fields = |old: &Value, new: &Value| {
            let changes = crd_changes(old, new).into_iter();
            changes.map(|change| (change.field, change.reason.is_some())).collect::<Vec<_>>()
        };
        let expected = [
            ("spec.versions[v1beta1].schema", false),
            ("spec.versions[v1beta1].storage", false),
            ("spec.versions[v1]", false),
            ("spec.versions[v1alpha1]", true),
        ];
        assert_eq!(fields(&old, &new), expected.map(|(field, removed)| (field.to_owned(), removed)));
        assert_eq!(fields(&old, &old), []);
    }
}
