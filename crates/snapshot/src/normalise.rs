//! Which objects belong to an installation, and which of their fields are compared. `compare` compares the rest. Not
//! compared are:
//!
//! - objects of the resources in [`EXCLUDED_RESOURCES`], and objects without the labels or annotations of a
//!   virt-operator
//! - the values of certificates, keys, CA bundles and the text of the install strategy; only their presence is compared
//! - the values of the annotations for the generation of the resource and for the identifiers; other tests compare the
//!   identifiers with values of the reference operator
//! - `description`, the descriptions of instancetypes, and `summary` and `description` of alerts: this project has its
//!   own texts
//! - `validations`, `variables` and `matchConditions` of admission policies: this project has its own expressions
//! - values of the API server and its controllers: cluster IPs, `secrets` of service accounts, `status`, metadata, and
//!   the suffix of generated names
//! - for the KubeVirt resource: the `spec`, the times and messages of conditions, hashes and generations
//! - for the namespace: everything except its labels

#![expect(clippy::indexing_slicing, reason = "reading a field of a JSON value gives null where there is none")]

use serde_json::{Map, Value, json};

/// Resources that are not part of an installation: controllers create them, or they are temporary.
pub const EXCLUDED_RESOURCES: [&str; 8] = [
    "componentstatuses",
    "controllerrevisions",
    "endpoints",
    "endpointslices",
    "events",
    "jobs",
    "pods",
    "replicasets",
];

const PRESENCE_ONLY: [&str; 4] = [
    "caBundle",
    "kubevirt.io/generation",
    "kubevirt.io/customizer-identifier",
    "kubevirt.io/install-strategy-identifier",
];
const DESCRIPTION_ANNOTATION: &str = "instancetype.kubevirt.io/description";
const SERVER_METADATA: [&str; 6] =
    ["uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink"];
const CONTROLLER_ANNOTATIONS: [&str; 2] =
    ["deployment.kubernetes.io/revision", "deprecated.daemonset.template.generation"];
const POLICY_EXPRESSIONS: [&str; 3] = ["validations", "variables", "matchConditions"];
const COMPARED_STATUS_FIELDS: [&str; 7] = [
    "phase",
    "operatorVersion",
    "observedKubeVirtVersion",
    "targetKubeVirtVersion",
    "observedKubeVirtRegistry",
    "targetKubeVirtRegistry",
    "defaultArchitecture",
];

const VERSION_ANNOTATION: &str = "kubevirt.io/install-strategy-version";
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const MANAGERS: [&str; 2] = ["virt-operator", "kubevirt-operator"];
const NAMESPACE: &str = "kubevirt";

/// Whether an object is part of an installation, or is its KubeVirt resource or namespace.
pub(crate) fn belongs_to_installation(object: &Value) -> bool {
    let is_its_namespace = object["kind"] == "Namespace" && object["metadata"]["name"] == NAMESPACE;
    object["kind"] == "KubeVirt" || is_its_namespace || is_installed(object)
}

/// Whether a virt-operator has created the object.
pub fn is_installed(object: &Value) -> bool {
    let metadata = &object["metadata"];
    metadata["annotations"].get(VERSION_ANNOTATION).is_some()
        || metadata["labels"][MANAGED_BY].as_str().is_some_and(|manager| MANAGERS.contains(&manager))
}

/// The key of an object: the same in both installations.
pub fn key(object: &Value) -> String {
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let group = version.split_once('/').map_or("core", |(group, _)| group);
    let metadata = &object["metadata"];
    let parts = [Some(group), object["kind"].as_str(), metadata["namespace"].as_str(), metadata["name"].as_str()];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}

/// The object without the fields that are not compared. The function is idempotent.
pub fn normalise(object: Value) -> Value {
    match object["kind"].as_str() {
        Some("KubeVirt") => normalise_kubevirt(object),
        Some("Namespace") => normalise_namespace(&object),
        _ => normalise_installed(object),
    }
}

fn normalise_kubevirt(object: Value) -> Value {
    let status = &object["status"];
    if status["conditions"].is_object() {
        return object;
    }
    let mut reported: Map<String, Value> = COMPARED_STATUS_FIELDS
        .iter()
        .filter_map(|field| Some(((*field).to_owned(), status.get(*field)?.clone())))
        .collect();
    let conditions = status["conditions"].as_array().into_iter().flatten().filter_map(|condition| {
        let kind = condition["type"].as_str()?.to_owned();
        Some((kind, json!([condition["status"], condition.get("reason")])))
    });
    reported.insert("conditions".to_owned(), conditions.collect::<Map<_, _>>().into());
    let metadata = &object["metadata"];
    let annotations: Vec<&String> = metadata["annotations"].as_object().into_iter().flat_map(Map::keys).collect();
    json!({
        "apiVersion": object["apiVersion"],
        "kind": object["kind"],
        "status": reported,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "finalizers": metadata["finalizers"],
            "annotations": annotations,
        },
    })
}

fn normalise_namespace(object: &Value) -> Value {
    let metadata = &object["metadata"];
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": metadata["name"], "labels": metadata["labels"]}})
}

fn normalise_installed(object: Value) -> Value {
    let mut object = strip_fields(object);
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    let Some(fields) = object.as_object_mut() else { return object };
    fields.remove("status");
    if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
        normalise_metadata(metadata);
    }
    match kind.as_str() {
        "Secret" | "ConfigMap" => {
            let keys = fields.get("data").and_then(Value::as_object).into_iter().flat_map(Map::keys);
            let data: Map<String, Value> = keys.map(|key| (key.clone(), json!("*"))).collect();
            fields.insert("data".to_owned(), data.into());
        }
        "ServiceAccount" => drop(fields.remove("secrets")),
        "Service" => {
            if let Some(spec) = spec(fields) {
                spec.retain(|key, value| {
                    !key.starts_with("clusterIP") || *value == "None" || *value == json!(["None"])
                });
            }
        }
        "ValidatingAdmissionPolicy" => {
            if let Some(spec) = spec(fields) {
                spec.retain(|key, _| !POLICY_EXPRESSIONS.contains(&key.as_str()));
            }
        }
        "PrometheusRule" => drop(spec(fields).map(remove_alert_texts)),
        _ => {}
    }
    object
}

fn spec(fields: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    fields.get_mut("spec").and_then(Value::as_object_mut)
}

fn normalise_metadata(metadata: &mut Map<String, Value>) {
    metadata.retain(|key, _| !SERVER_METADATA.contains(&key.as_str()));
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|key, _| !CONTROLLER_ANNOTATIONS.contains(&key.as_str()));
    }
    if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str) {
        let name = format!("{prefix}*");
        metadata.insert("name".to_owned(), name.into());
    }
}

fn remove_alert_texts(spec: &mut Map<String, Value>) {
    let groups = spec.get_mut("groups").and_then(Value::as_array_mut).into_iter().flatten();
    let rules = groups.filter_map(|group| group.get_mut("rules")?.as_array_mut()).flatten();
    for annotations in rules.filter_map(|rule| rule.get_mut("annotations")?.as_object_mut()) {
        annotations.retain(|key, _| key != "summary" && key != "description");
    }
}

fn strip_fields(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(key, value)| !(key == "description" && value.is_string() || key == DESCRIPTION_ANNOTATION))
            .map(|(key, value)| {
                let presence_only = PRESENCE_ONLY.contains(&key.as_str());
                let value = if presence_only { json!("*") } else { strip_fields(value) };
                (key, value)
            })
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(list) => list.into_iter().map(strip_fields).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_status_of_the_kubevirt_resource_is_compared() {
        let live = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt", "uid": "u", "finalizers": ["f"], "annotations": {"b": "1", "a": "2"}},
            "spec": {"imageTag": "x"},
            "status": {"phase": "Deployed", "observedDeploymentID": "h", "conditions": [
                {"type": "Available", "status": "True", "reason": "AllComponentsReady", "lastProbeTime": "t"}]},
        });
        let normal = normalise(live);
        assert_eq!(
            normal["status"],
            json!({"phase": "Deployed", "conditions": {"Available": ["True", "AllComponentsReady"]}})
        );
        assert_eq!(normal["metadata"]["annotations"], json!(["a", "b"]));
        assert_eq!(normalise(normal.clone()), normal);
    }

    #[test]
    fn values_of_the_api_server_and_random_values_are_removed() {
        let live = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "strategy-x7", "generateName": "strategy-", "uid": "u", "resourceVersion": "1",
                         "annotations": {"kubevirt.io/generation": "7", "deployment.kubernetes.io/revision": "1"}},
            "data": {"manifests": "long"}, "status": {},
        });
        let normal = normalise(live);
        assert_eq!(
            normal,
            json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "strategy-*", "generateName": "strategy-", "annotations": {"kubevirt.io/generation": "*"}},
                "data": {"manifests": "*"},
            })
        );
        assert_eq!(normalise(normal.clone()), normal);
        let service = |ip: &str| json!({"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": {"clusterIP": ip, "clusterIPs": [ip]}});
        assert_eq!(normalise(service("10.0.0.1"))["spec"], json!({}));
        assert_eq!(normalise(service("None"))["spec"], json!({"clusterIP": "None", "clusterIPs": ["None"]}));
    }

    #[test]
    fn only_objects_with_labels_or_annotations_of_a_virt_operator_belong_to_an_installation() {
        let object = |metadata: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
        assert!(belongs_to_installation(&object(json!({"annotations": {VERSION_ANNOTATION: "v1"}}))));
        assert!(belongs_to_installation(&object(json!({"labels": {MANAGED_BY: "virt-operator"}}))));
        assert!(!belongs_to_installation(&object(json!({"labels": {MANAGED_BY: "helm"}, "annotations": {"a": "b"}}))));
        assert!(!belongs_to_installation(&json!({"kind": "Namespace", "metadata": {"name": "default"}})));
    }
}
