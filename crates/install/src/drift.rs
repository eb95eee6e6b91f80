//! Whether a live object matches the desired one, and what to change if it does not. `plan` decides which objects are
//! compared and turns the result into writes.
//!
//! The API server adds defaults to the content of some kinds. This needs no table of them:
//!
//! - If the record of an object (`record`) says that neither its desired nor its live content has changed since both
//!   matched, the content is up to date.
//! - Otherwise every desired value must be there, and no other client may have added anything, according to
//!   `managedFields`. Whatever is left may be a default or the rest of an earlier desired state: the content is
//!   replaced once, and the API server finds that it is equal, or drops what is stale.
//!
//! Kinds without defaults are compared exactly. Labels and annotations have no defaults: those that only a KubeVirt
//! operator has set are exact, and those of other clients are kept.

use serde_json::{Map, Value};
use vitivirt_api::{Failure, Operation, Quantity};

use crate::{
    digest::CERTIFICATES,
    kind::Kind,
    live::{LiveFields, LiveObject, NON_CONTENT, is_exclusive},
    names::IDENTITY,
    names::{annotation, label},
    record::{Recorded, is_recorded},
};

/// How a live object differs from the desired one.
#[derive(Clone, PartialEq)]
pub(crate) enum Drift {
    None,
    Patch(Vec<Operation>),
    /// An immutable field differs: the object must be deleted and created again.
    Recreate,
}

/// Labels that belong to the operator even when they are no longer desired.
const OWN_LABELS: [&str; 3] = [label::VERSION, label::PART_OF, label::COMPONENT];
const OWN_ANNOTATIONS: [&str; 1] = [annotation::CUSTOMIZER_IDENTIFIER];
/// Fields of a Service that the API server assigns and that are immutable.
const ALLOCATED: [&str; 3] = ["clusterIP", "clusterIPs", "ipFamilies"];

/// How a live object differs from `desired`, the object as it would be created. Only metadata is compared if only
/// metadata is known.
pub(crate) fn drift(kind: Kind, desired: &Value, live: &LiveObject, recorded: Recorded) -> Result<Drift, Failure> {
    let mut operations = metadata_patch(kind, desired, live);
    let is_outdated = matches!(recorded, Recorded::Outdated | Recorded::OutdatedPods);
    let mut is_certain = !operations.is_empty() || is_outdated;
    let replaces = is_outdated || recorded == Recorded::Unknown;
    if let Some(fields) = live.fields()?
        && let Some(desired) = desired.as_object()
    {
        for (key, value) in compared_fields(kind, desired) {
            let actual = fields.content.get(key).unwrap_or(&Value::Null);
            let value = with_server_assigned(kind, key, value, &fields, recorded);
            let differs = match recorded {
                Recorded::Same => has_other_certificate(&value, actual),
                _ => !is_equivalent(kind, &value, actual) || is_extended(key, &value, &fields),
            };
            if !differs && !replaces {
                continue;
            }
            if differs && is_immutable(kind, key, &value, actual) {
                return Ok(Drift::Recreate);
            }
            is_certain |= differs;
            let operation = Operation::set(format!("/{key}"), value);
            // Users add CA certificates to ConfigMaps of the installation. The precondition keeps a recent addition.
            let is_shared = kind == Kind::ConfigMap;
            operations.push(if is_shared { operation.expecting(actual.clone()) } else { operation });
        }
        let surplus = match recorded {
            Recorded::Same => Vec::new(),
            _ => surplus_fields(kind, desired, &fields, replaces),
        };
        is_certain |= !replaces && !surplus.is_empty();
        operations.extend(surplus);
    }
    if operations.is_empty() {
        return Ok(Drift::None);
    }
    // This annotation is the generation of the resource at the last change of the object. If the API server may find
    // the patch equal, it must not contain a new generation. The repair of an instancetype restores it exactly.
    if let Some(generation) = generation(desired).filter(|_| is_certain && !is_exclusive(kind)) {
        let path = format!("/metadata/annotations/{}", Operation::escape(annotation::GENERATION));
        if !operations.iter().any(|operation| operation.path == "/metadata/annotations" || operation.path == path) {
            operations.push(Operation::set(path, generation.clone()));
        }
    }
    Ok(Drift::Patch(operations))
}

fn generation(desired: &Value) -> Option<&Value> {
    desired.pointer("/metadata/annotations")?.get(annotation::GENERATION)
}

/// Certificates are the only part of the content that a record does not cover.
fn has_other_certificate(desired: &Value, actual: &Value) -> bool {
    match (desired, actual) {
        (Value::Object(desired), Value::Object(actual)) => desired.iter().any(|(key, value)| {
            let actual = actual.get(key).unwrap_or(&Value::Null);
            if CERTIFICATES.contains(&key.as_str()) { value != actual } else { has_other_certificate(value, actual) }
        }),
        (Value::Array(desired), Value::Array(actual)) => {
            desired.iter().zip(actual).any(|(desired, actual)| has_other_certificate(desired, actual))
        }
        _ => false,
    }
}

/// The top-level fields of an object that are compared as a whole. Metadata is compared separately.
fn compared_fields(kind: Kind, object: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    object.iter().filter(move |(key, _)| {
        let is_content = !NON_CONTENT.contains(&key.as_str());
        // Other clients add tokens and pull secrets to a ServiceAccount. The type of a Secret is immutable.
        is_content && kind != Kind::ServiceAccount && !(kind == Kind::Secret && *key == "type")
    })
}

/// Whether a patch cannot change this field.
fn is_immutable(kind: Kind, key: &str, desired: &Value, actual: &Value) -> bool {
    match kind {
        Kind::RoleBinding | Kind::ClusterRoleBinding => key == "roleRef",
        Kind::Service => {
            let headless = |spec: &Value| spec.get("clusterIP").is_some_and(|address| address == "None");
            headless(desired) != headless(actual)
        }
        _ => false,
    }
}

/// The patch of labels, annotations and owner references alone.
pub(crate) fn metadata_patch(kind: Kind, desired: &Value, live: &LiveObject) -> Vec<Operation> {
    let mut operations = Vec::new();
    // The garbage collector would delete the object, and with a CRD every object of it, together with the owner.
    if live.has_owners && desired.pointer("/metadata/ownerReferences").is_none() {
        operations.push(Operation::remove("/metadata/ownerReferences"));
    }
    let own: [(_, _, &[&str], Vec<&String>); 2] = [
        ("labels", &live.labels, &OWN_LABELS, live.own_labels().collect()),
        ("annotations", &live.annotations, &OWN_ANNOTATIONS, live.own_annotations().collect()),
    ];
    for (field, actual, managed, own) in own {
        let nothing = Map::new();
        let desired = desired.pointer(&format!("/metadata/{field}")).and_then(Value::as_object).unwrap_or(&nothing);
        let differs = |(key, value): &(&String, &Value)| {
            // A new generation of the resource alone is not a difference.
            let is_old = key.as_str() == annotation::GENERATION && !live.has_foreign_generation();
            let actual = actual.get(*key).map(String::as_str);
            actual != value.as_str() && !(is_old && actual.is_some())
        };
        let path = |key: &str| format!("/metadata/{field}/{}", Operation::escape(key));
        let changed: Vec<_> = desired.iter().filter(differs).collect();
        if actual.is_empty() && !changed.is_empty() {
            operations.push(Operation::set(format!("/metadata/{field}"), Value::Object(desired.clone())));
            continue;
        }
        operations.extend(changed.into_iter().map(|(key, value)| Operation::set(path(key), value.clone())));
        let is_own = |key: &String| is_exclusive(kind) || managed.contains(&key.as_str()) || own.contains(&key);
        let stale = actual.keys().filter(|key| !desired.contains_key(*key) && is_own(key));
        operations.extend(stale.map(|key| Operation::remove(path(key))));
    }
    operations
}

/// The desired value of the field `key` together with what the API server and `kubectl rollout restart` set.
fn with_server_assigned(kind: Kind, key: &str, desired: &Value, fields: &LiveFields, recorded: Recorded) -> Value {
    let actual = fields.content.get(key).unwrap_or(&Value::Null);
    if matches!(kind, Kind::Deployment | Kind::DaemonSet) {
        let other_pods = recorded == Recorded::OutdatedPods;
        return with_live_identity(desired, actual, &fields.foreign, other_pods);
    }
    let mut desired = desired.clone();
    if kind == Kind::Service
        && let (Some(desired), Some(actual)) = (desired.as_object_mut(), actual.as_object())
    {
        let headless = actual.get("clusterIP").is_some_and(|address| address == "None");
        // Without it, the API server would keep two addresses. This is its default for a new Service.
        if actual.contains_key("ipFamilyPolicy") && !desired.contains_key("ipFamilies") {
            desired.entry("ipFamilyPolicy").or_insert_with(|| "SingleStack".into());
        }
        for key in ALLOCATED.into_iter().filter(|_| !headless) {
            if let (None, Some(value)) = (desired.get(key), actual.get(key)) {
                desired.insert(key.to_owned(), value.clone());
            }
        }
    }
    desired
}

fn is_equivalent(kind: Kind, desired: &Value, actual: &Value) -> bool {
    match kind {
        // The API server stores these values as they are: an empty one differs from a missing one.
        Kind::Secret | Kind::ConfigMap | Kind::Instancetype | Kind::Preference => desired == actual,
        Kind::Role | Kind::ClusterRole | Kind::RoleBinding | Kind::ClusterRoleBinding => {
            is_same_content(desired, actual)
        }
        _ => contains_all(desired, actual),
    }
}

/// If nothing else about the pods changes, their template keeps the annotations of the deployment that started them, so
/// that a change of another part of the workload does not restart them. It always keeps the time of the last restart by
/// a user. `other_pods`: the record says that the pods change, perhaps by a field that is no longer desired.
fn with_live_identity(spec: &Value, actual: &Value, foreign: &[Value], other_pods: bool) -> Value {
    const ANNOTATIONS: &str = "/template/metadata/annotations";
    const MANAGED: &str = "/f:spec/f:template/f:metadata/f:annotations";
    let with_live = |keys: &[&str], mut spec: Value| {
        let live_annotations = actual.pointer(ANNOTATIONS).and_then(Value::as_object);
        let annotations = spec.pointer_mut(ANNOTATIONS).and_then(Value::as_object_mut);
        if let (Some(annotations), Some(live_annotations)) = (annotations, live_annotations) {
            let live = keys.iter().filter_map(|key| Some(((*key).to_owned(), live_annotations.get(*key)?.clone())));
            annotations.extend(live);
        }
        spec
    };
    let restarted = with_live(&[annotation::RESTARTED_AT], spec.clone());
    let is_foreign = |key: &&str| {
        let mut trees = foreign.iter().filter_map(|tree| tree.pointer(MANAGED));
        trees.any(|annotations| annotations.get(format!("f:{key}")).is_some())
    };
    if other_pods || IDENTITY.iter().any(is_foreign) {
        return restarted;
    }
    let desired = with_live(&IDENTITY, restarted.clone());
    let same_pods = match (desired.get("template"), actual.get("template")) {
        (Some(desired), Some(actual)) => contains_all(desired, actual),
        _ => false,
    };
    if same_pods { desired } else { restarted }
}

/// Whether `actual` contains all of `desired`. An empty value equals a missing one, because the API server drops empty
/// ones.
fn contains_all(desired: &Value, actual: &Value) -> bool {
    match (desired, actual) {
        (Value::Object(desired), Value::Object(actual)) => desired.iter().all(|(key, value)| {
            let actual = actual.get(key).unwrap_or(&Value::Null);
            let has_quantities = ["limits", "requests", "sizeLimit"].contains(&key.as_str());
            contains_all(value, actual) || has_quantities && equal_quantities(value, actual)
        }),
        (Value::Array(desired), Value::Array(actual)) => {
            desired.len() == actual.len()
                && desired.iter().zip(actual).all(|(desired, actual)| contains_all(desired, actual))
        }
        (value, Value::Null) | (Value::Null, value) => is_empty(value),
        (Value::Number(desired), Value::Number(actual)) => desired == actual || desired.as_f64() == actual.as_f64(),
        _ => desired == actual,
    }
}

/// Whether two values are equal, except for empty values, which equal missing ones.
pub(crate) fn is_same_content(a: &Value, b: &Value) -> bool {
    contains_all(a, b) && contains_all(b, a)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Array(elements) => elements.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

/// Whether quantities, or maps of quantities, are equal. The API server normalizes a CPU of `0.5` to `500m`, and
/// `1024Mi` to `1Gi`.
fn equal_quantities(desired: &Value, actual: &Value) -> bool {
    match (desired, actual) {
        (Value::Object(desired), Value::Object(actual)) => {
            desired.iter().all(|(name, amount)| actual.get(name).is_some_and(|actual| equal_quantities(amount, actual)))
        }
        (Value::String(desired), Value::String(actual)) => {
            desired == actual
                || Quantity::parse(desired).is_some_and(|desired| Quantity::parse(actual) == Some(desired))
        }
        _ => false,
    }
}

/// Whether another client has set something below the top-level field `key` that is not desired.
fn is_extended(key: &str, desired: &Value, fields: &LiveFields) -> bool {
    let actual = fields.content.get(key).unwrap_or(&Value::Null);
    let mut trees = fields.foreign.iter().filter_map(|tree| tree.get(format!("f:{key}")));
    trees.any(|tree| has_foreign_fields(desired, actual, tree))
}

/// Whether another client has set something here that is not desired. `tree` has the form of `managedFields`: `f:` is
/// the name of a field, `k:` an element of a list by its keys, `.` the value itself.
fn has_foreign_fields(desired: &Value, actual: &Value, tree: &Value) -> bool {
    let Some(parts) = tree.as_object() else { return false };
    parts.iter().any(|(part, below)| {
        let find = |value: &'_ Value| -> Option<Value> {
            if let Some(field) = part.strip_prefix("f:") {
                return value.get(field).cloned();
            }
            let keys: Value = serde_json::from_str(part.strip_prefix("k:")?).ok()?;
            let matches = |element: &&Value| {
                keys.as_object().is_some_and(|keys| keys.iter().all(|(key, value)| element.get(key) == Some(value)))
            };
            value.as_array()?.iter().find(matches).cloned()
        };
        let Some(actual) = find(actual).filter(|actual| !is_empty(actual)) else { return false };
        let desired = find(desired).unwrap_or(Value::Null);
        if below.as_object().is_some_and(|below| !below.is_empty()) {
            has_foreign_fields(&desired, &actual, below)
        } else {
            // The other client has set the whole value.
            has_extra(&desired, &actual)
        }
    })
}

/// Whether `actual` contains something that is not in `desired`.
fn has_extra(desired: &Value, actual: &Value) -> bool {
    match (desired, actual) {
        (_, actual) if is_empty(actual) => false,
        (Value::Object(desired), Value::Object(actual)) => {
            actual.iter().any(|(key, value)| has_extra(desired.get(key).unwrap_or(&Value::Null), value))
        }
        // `contains_all` compares values and the lengths of lists.
        (desired, _) => desired.is_null(),
    }
}

/// Top-level fields that are not desired. If the API server may have set them by default, only those that other clients
/// have set, unless the content is replaced.
fn surplus_fields(kind: Kind, desired: &Map<String, Value>, fields: &LiveFields, replaces: bool) -> Vec<Operation> {
    let Some(actual) = fields.content.as_object() else { return Vec::new() };
    let is_foreign = |name: &str| fields.foreign.iter().any(|tree| tree.get(format!("f:{name}")).is_some());
    let surplus = compared_fields(kind, actual).filter(|(name, value)| {
        // A certificate or bundle that is not known yet is not part of the desired object.
        let is_exact = replaces || !is_recorded(kind) && *name != "data";
        !desired.contains_key(*name) && !is_empty(value) && (is_exact || is_foreign(name.as_str()))
    });
    surplus.map(|(name, _)| Operation::remove(format!("/{name}"))).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::json;

    use super::*;

    fn live(object: &Value) -> LiveObject {
        let metadata: ObjectMeta = serde_json::from_value(object["metadata"].clone()).unwrap();
        LiveObject::new(&metadata, object.clone())
    }

    /// The comparison without a record.
    fn paths(kind: Kind, desired: &Value, actual: &Value) -> Vec<String> {
        recorded_paths(kind, desired, actual, Recorded::Never)
    }

    fn recorded_paths(kind: Kind, desired: &Value, actual: &Value, recorded: Recorded) -> Vec<String> {
        match drift(kind, desired, &live(actual), recorded).unwrap() {
            Drift::None => Vec::new(),
            Drift::Recreate => vec!["recreate".to_owned()],
            Drift::Patch(operations) => operations
                .into_iter()
                .map(|operation| format!("{}{}", if operation.value.is_none() { "-" } else { "" }, operation.path))
                .collect(),
        }
    }

    fn deployment() -> Value {
        json!({
            "metadata": {"labels": {"a": "1"}, "annotations": {"kubevirt.io/generation": "1"}},
            "spec": {"replicas": 2, "template": {
                "metadata": {"annotations": {"kubevirt.io/install-strategy-identifier": "one"}},
                "spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "0.5"}}}]},
            }},
        })
    }

    /// The object as the API server stores it.
    fn stored() -> Value {
        let mut stored = deployment();
        stored["spec"]["progressDeadlineSeconds"] = json!(600);
        stored["spec"]["template"]["spec"]["dnsPolicy"] = json!("ClusterFirst");
        stored["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("500m");
        stored["metadata"]["managedFields"] = json!([
            {"manager": "virt-operator", "operation": "Update", "fieldsV1": {"f:spec": {"f:progressDeadlineSeconds": {}}}},
            {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status",
             "fieldsV1": {"f:status": {}}},
        ]);
        stored
    }

    fn managed_fields(manager: &str, fields: &Value) -> Value {
        json!([{"manager": manager, "operation": "Update", "fieldsV1": fields}])
    }

    #[test]
    fn fields_that_the_api_server_adds_are_not_a_difference() {
        assert_eq!(paths(Kind::Deployment, &deployment(), &stored()), [""; 0]);
    }

    #[test]
    fn equal_quantities_with_another_suffix_are_not_a_difference() {
        let resources = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}});
        for (desired, actual, is_equal) in [
            (resources("0.5", "1024Mi"), resources("500m", "1Gi"), true),
            (resources("2000m", "1.1Gi"), resources("2", "1181116006400m"), true),
            (resources("1e3", "1Pi"), resources("1k", "1024Ti"), true),
            (resources("500m", "1Gi"), resources("500m", "1G"), false),
            (resources("500m", "1Gi"), resources("501m", "1Gi"), false),
            (resources("500m", "1Gi"), resources("500m", "large"), false),
        ] {
            let (desired, actual) = (json!({"resources": desired}), json!({"resources": actual}));
            assert_eq!(contains_all(&desired, &actual), is_equal, "{desired} and {actual}");
        }
    }

    #[test]
    fn a_changed_and_a_removed_value_are_restored() {
        let mut actual = stored();
        actual["spec"]["replicas"] = json!(3);
        let generation = "/metadata/annotations/kubevirt.io~1generation";
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), ["/spec", generation]);
        let mut actual = stored();
        actual["spec"]["template"]["spec"]["containers"][0].as_object_mut().unwrap().remove("image");
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), ["/spec", generation]);
    }

    #[test]
    fn a_field_that_another_client_added_is_removed() {
        let path = json!({"f:spec": {"f:template": {"f:spec": {
            "f:containers": {"k:{\"name\":\"c\"}": {"f:tty": {}}},
        }}}});
        let mut actual = stored();
        actual["spec"]["template"]["spec"]["containers"][0]["tty"] = json!(true);
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), [""; 0], "no client is recorded as its manager");
        actual["metadata"]["managedFields"] = managed_fields("kubectl-edit", &path);
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual)[0], "/spec");
        // The operator has set it for an earlier resource.
        actual["metadata"]["managedFields"] = managed_fields("virt-operator", &path);
        assert_eq!(recorded_paths(Kind::Deployment, &deployment(), &actual, Recorded::Unknown), ["/spec"]);
        // Another client changed a default.
        let mut actual = stored();
        actual["spec"]["progressDeadlineSeconds"] = json!(5);
        actual["metadata"]["managedFields"] =
            managed_fields("kubectl-edit", &json!({"f:spec": {"f:progressDeadlineSeconds": {}}}));
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual)[0], "/spec");
        // Another client set the desired value.
        let mut actual = stored();
        actual["metadata"]["managedFields"] = managed_fields("kubectl-edit", &json!({"f:spec": {"f:replicas": {}}}));
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), [""; 0]);
    }

    #[test]
    fn content_is_replaced_once_if_the_record_does_not_match() {
        let generation = "/metadata/annotations/kubevirt.io~1generation";
        for (recorded, expected) in [
            (Recorded::Same, vec![]),
            (Recorded::Outdated, vec!["/spec", generation]),
            // The API server may find the patch equal.
            (Recorded::Unknown, vec!["/spec"]),
            (Recorded::Never, vec![]),
        ] {
            assert_eq!(recorded_paths(Kind::Deployment, &deployment(), &stored(), recorded), expected, "{recorded:?}");
        }
    }

    #[test]
    fn a_renewed_certificate_is_written_although_the_record_matches() {
        let webhook = |bundle: &str| json!({"metadata": {}, "webhooks": [{"clientConfig": {"caBundle": bundle}}]});
        let paths = |desired: &str| {
            let kind = Kind::ValidatingWebhookConfiguration;
            recorded_paths(kind, &webhook(desired), &webhook("old"), Recorded::Same)
        };
        assert_eq!(paths("old"), [""; 0]);
        assert_eq!(paths("new"), ["/webhooks"]);
    }

    #[test]
    fn kinds_without_defaults_are_compared_exactly() {
        let role = |rule: &Value| json!({"metadata": {}, "rules": [rule]});
        let (desired, more) = (json!({"verbs": ["get"]}), json!({"verbs": ["get"], "resourceNames": ["a"]}));
        assert_eq!(paths(Kind::Role, &role(&desired), &role(&more)), ["/rules"]);
        assert_eq!(paths(Kind::Role, &role(&more), &role(&desired)), ["/rules"]);
        assert_eq!(paths(Kind::Role, &role(&desired), &role(&json!({"verbs": ["get"], "apiGroups": []}))), [""; 0]);
        let spec = |cpu: Value| json!({"metadata": {}, "spec": cpu});
        assert_eq!(paths(Kind::Preference, &spec(json!({})), &spec(json!({"a": {"b": false}}))), ["/spec"]);
    }

    #[test]
    fn metadata_that_only_the_operator_has_set_is_exact() {
        let desired = json!({"metadata": {"labels": {"kept": "1"}}});
        let keys = |keys: &[&str]| {
            let keys: Map<String, Value> = keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
            json!({"f:metadata": {"f:labels": keys}})
        };
        let entry =
            |manager: &str, fields: Value| json!({"manager": manager, "operation": "Update", "fieldsV1": fields});
        let actual = json!({"metadata": {
            "labels": {"kept": "1", "ours": "1", "shared": "1", "theirs": "1", "unknown": "1"},
            "managedFields": [
                entry("virt-operator", keys(&["kept", "ours", "shared"])),
                entry("kubectl", keys(&["shared", "theirs"])),
            ],
        }});
        assert_eq!(paths(Kind::Secret, &desired, &actual), ["-/metadata/labels/ours"]);
        // Upstream virt-operator keeps no metadata of other clients on these objects.
        assert_eq!(paths(Kind::Preference, &desired, &actual).len(), 4);
    }

    #[test]
    fn a_generation_that_another_client_has_set_is_restored() {
        let desired = json!({"metadata": {"annotations": {"kubevirt.io/generation": "2"}}});
        let mut actual = json!({"metadata": {"annotations": {"kubevirt.io/generation": "1"}}});
        assert_eq!(paths(Kind::Role, &desired, &actual), [""; 0], "it is older");
        let fields = json!({"f:metadata": {"f:annotations": {"f:kubevirt.io/generation": {}}}});
        actual["metadata"]["managedFields"] = managed_fields("virt-operator", &fields);
        assert_eq!(paths(Kind::Role, &desired, &actual), [""; 0], "it is older");
        actual["metadata"]["managedFields"] = managed_fields("kubectl-edit", &fields);
        assert_eq!(paths(Kind::Role, &desired, &actual), ["/metadata/annotations/kubevirt.io~1generation"]);
        actual["metadata"] = json!({"annotations": {"other": "1"}});
        assert_eq!(paths(Kind::Role, &desired, &actual), ["/metadata/annotations/kubevirt.io~1generation"]);
    }

    #[test]
    fn owners_are_removed() {
        let desired = json!({"metadata": {}});
        let actual =
            json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "A", "name": "a", "uid": "u"}]}});
        assert_eq!(paths(Kind::Role, &desired, &actual), ["-/metadata/ownerReferences"]);
    }

    #[test]
    fn a_restart_by_a_user_is_kept_and_a_foreign_identity_is_not() {
        let at = |fields: Value| json!({"f:spec": {"f:template": {"f:metadata": {"f:annotations": fields}}}});
        let mut actual = stored();
        actual["spec"]["template"]["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = json!("now");
        actual["metadata"]["managedFields"] =
            managed_fields("kubectl-rollout", &at(json!({"f:kubectl.kubernetes.io/restartedAt": {}})));
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), [""; 0]);
        let mut desired = deployment();
        desired["spec"]["template"]["spec"]["containers"][0]["image"] = json!("j");
        let Drift::Patch(operations) = drift(Kind::Deployment, &desired, &live(&actual), Recorded::Outdated).unwrap()
        else {
            panic!()
        };
        let annotations = &operations[0].value.as_ref().unwrap()["template"]["metadata"]["annotations"];
        assert_eq!(annotations["kubectl.kubernetes.io/restartedAt"], "now");
        let mut actual = stored();
        actual["spec"]["template"]["metadata"]["annotations"]["kubevirt.io/install-strategy-identifier"] = json!("x");
        actual["metadata"]["managedFields"] =
            managed_fields("kubectl-edit", &at(json!({"f:kubevirt.io/install-strategy-identifier": {}})));
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual)[0], "/spec");
    }

    #[test]
    fn a_new_deployment_identity_alone_restarts_no_pods() {
        let mut desired = deployment();
        desired["spec"]["template"]["metadata"]["annotations"]["kubevirt.io/install-strategy-identifier"] =
            json!("two");
        desired["metadata"]["annotations"]["kubevirt.io/generation"] = json!("2");
        assert_eq!(paths(Kind::Deployment, &desired, &stored()), [""; 0]);
        desired["spec"]["template"]["spec"]["containers"][0]["image"] = json!("j");
        assert_eq!(paths(Kind::Deployment, &desired, &stored())[0], "/spec");
    }

    #[test]
    fn foreign_labels_are_kept_and_managed_labels_are_exact() {
        let mut actual = stored();
        actual["metadata"]["labels"] = json!({"a": "2", "theirs": "x", "app.kubernetes.io/part-of": "old"});
        let generation = "/metadata/annotations/kubevirt.io~1generation";
        let expected = ["/metadata/labels/a", "-/metadata/labels/app.kubernetes.io~1part-of", generation];
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual), expected);
        actual["metadata"]["labels"] = Value::Null;
        assert_eq!(paths(Kind::Deployment, &deployment(), &actual)[0], "/metadata/labels");
    }

    #[test]
    fn a_service_keeps_its_cluster_ip() {
        let desired = json!({"metadata": {}, "spec": {"ports": [{"port": 443, "targetPort": 8443}]}});
        let mut actual = json!({"metadata": {}, "spec": {"clusterIP": "1.2.3.4", "type": "ClusterIP",
            "ports": [{"port": 443, "targetPort": 8443, "protocol": "TCP"}]}});
        assert_eq!(paths(Kind::Service, &desired, &actual), [""; 0]);
        actual["spec"]["ports"][0]["targetPort"] = json!(1);
        let Drift::Patch(operations) = drift(Kind::Service, &desired, &live(&actual), Recorded::Never).unwrap() else {
            panic!()
        };
        assert_eq!(operations[0].value.as_ref().unwrap()["clusterIP"], "1.2.3.4");
    }

    #[test]
    fn an_immutable_difference_recreates_the_object() {
        let desired = json!({"metadata": {}, "roleRef": {"name": "a"}, "subjects": []});
        let actual = json!({"metadata": {}, "roleRef": {"name": "b"}});
        assert_eq!(paths(Kind::RoleBinding, &desired, &actual), ["recreate"]);
    }

    #[test]
    fn data_is_compared_exactly() {
        let desired = json!({"metadata": {}, "data": {"a": "1"}});
        let actual = json!({"metadata": {}, "data": {"a": "1", "b": "2"}});
        assert_eq!(paths(Kind::ConfigMap, &desired, &actual), ["/data"]);
    }

    #[test]
    fn top_level_fields_of_other_clients_are_removed() {
        let desired = json!({"metadata": {}, "rules": []});
        let mut actual =
            json!({"metadata": {}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}});
        actual["metadata"]["managedFields"] = managed_fields("kubectl-edit", &json!({"f:aggregationRule": {}}));
        assert_eq!(paths(Kind::ClusterRole, &desired, &actual), ["-/aggregationRule"]);
    }
}
