//! What is not compared.
//!
//! - objects of the resources in [`LEFT_OUT`], and objects that no virt-operator has marked as its own
//! - the values of certificates, keys, bundles and the text of the install strategy; that they are there is compared
//! - the values of the annotations for the generation of the resource and for the identifiers; the identifiers have
//!   tests of their own against values of the reference
//! - `description`, the descriptions of instancetypes, and `summary` and `description` of alerts: prose of our own
//! - `validations`, `variables` and `matchConditions` of admission policies: logic of our own
//! - cluster IPs, and `secrets` of service accounts: the server's; `status`; metadata that the server or its
//!   controllers fill in; the end of a name that the server gave
//! - of the KubeVirt resource what the user wrote, the times and messages of conditions, hashes and generations
//! - of the namespace everything but its labels

#![expect(clippy::indexing_slicing, reason = "reading a field of a JSON value gives null where there is none")]

use serde_json::{Map, Value, json};

/// Resources whose objects are no part of an installation: they follow from others, or are over when it is done.
pub const LEFT_OUT: [&str; 8] = [
    "componentstatuses",
    "controllerrevisions",
    "endpoints",
    "endpointslices",
    "events",
    "jobs",
    "pods",
    "replicasets",
];

const ONLY_THAT_IT_IS_THERE: [&str; 4] = [
    "caBundle",
    "kubevirt.io/generation",
    "kubevirt.io/customizer-identifier",
    "kubevirt.io/install-strategy-identifier",
];
const PROSE: &str = "instancetype.kubevirt.io/description";
const METADATA_OF_THE_SERVER: [&str; 6] =
    ["uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink"];
const ANNOTATIONS_OF_CONTROLLERS: [&str; 2] =
    ["deployment.kubernetes.io/revision", "deprecated.daemonset.template.generation"];
const LOGIC: [&str; 3] = ["validations", "variables", "matchConditions"];
const REPORTED: [&str; 7] = [
    "phase",
    "operatorVersion",
    "observedKubeVirtVersion",
    "targetKubeVirtVersion",
    "observedKubeVirtRegistry",
    "targetKubeVirtRegistry",
    "defaultArchitecture",
];

const MARK: &str = "kubevirt.io/install-strategy-version";
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const MANAGERS: [&str; 2] = ["virt-operator", "kubevirt-operator"];
const NAMESPACE: &str = "kubevirt";

/// Whether an object is part of an installation, or tells of it.
pub fn belongs(object: &Value) -> bool {
    let is_its_namespace = object["kind"] == "Namespace" && object["metadata"]["name"] == NAMESPACE;
    object["kind"] == "KubeVirt" || is_its_namespace || is_installed(object)
}

/// Whether a virt-operator has made it.
pub fn is_installed(object: &Value) -> bool {
    let metadata = &object["metadata"];
    metadata["annotations"].get(MARK).is_some()
        || metadata["labels"][MANAGED_BY].as_str().is_some_and(|manager| MANAGERS.contains(&manager))
}

/// What identifies an object in both installations.
pub fn key(object: &Value) -> String {
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let group = version.split_once('/').map_or("core", |(group, _)| group);
    let metadata = &object["metadata"];
    let parts = [Some(group), object["kind"].as_str(), metadata["namespace"].as_str(), metadata["name"].as_str()];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}

/// The object without what is not compared. Doing it twice changes nothing.
pub fn normalise(object: Value) -> Value {
    match object["kind"].as_str() {
        Some("KubeVirt") => kubevirt(object),
        Some("Namespace") => namespace(&object),
        _ => installed(object),
    }
}

fn kubevirt(object: Value) -> Value {
    let status = &object["status"];
    if status["conditions"].is_object() {
        return object;
    }
    let mut reported: Map<String, Value> =
        REPORTED.iter().filter_map(|field| Some(((*field).to_owned(), status.get(*field)?.clone()))).collect();
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

fn namespace(object: &Value) -> Value {
    let metadata = &object["metadata"];
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": metadata["name"], "labels": metadata["labels"]}})
}

fn installed(object: Value) -> Value {
    let mut object = prune(object);
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
                spec.retain(|key, _| !LOGIC.contains(&key.as_str()));
            }
        }
        "PrometheusRule" => drop(spec(fields).map(without_texts_of_alerts)),
        _ => {}
    }
    object
}

fn spec(fields: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    fields.get_mut("spec").and_then(Value::as_object_mut)
}

fn normalise_metadata(metadata: &mut Map<String, Value>) {
    metadata.retain(|key, _| !METADATA_OF_THE_SERVER.contains(&key.as_str()));
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|key, _| !ANNOTATIONS_OF_CONTROLLERS.contains(&key.as_str()));
    }
    if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str) {
        let name = format!("{prefix}*");
        metadata.insert("name".to_owned(), name.into());
    }
}

fn without_texts_of_alerts(spec: &mut Map<String, Value>) {
    let groups = spec.get_mut("groups").and_then(Value::as_array_mut).into_iter().flatten();
    let rules = groups.filter_map(|group| group.get_mut("rules")?.as_array_mut()).flatten();
    for annotations in rules.filter_map(|rule| rule.get_mut("annotations")?.as_object_mut()) {
        annotations.retain(|key, _| key != "summary" && key != "description");
    }
}

fn prune(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(key, value)| !(key == "description" && value.is_string() || key == PROSE))
            .map(|(key, value)| {
                let only_there = ONLY_THAT_IT_IS_THERE.contains(&key.as_str());
                let value = if only_there { json!("*") } else { prune(value) };
                (key, value)
            })
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(list) => list.into_iter().map(prune).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resource_tells_only_what_it_reports() {
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
    fn what_a_server_assigns_and_what_is_random_goes() {
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
    fn only_marked_objects_belong() {
        let object = |metadata: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
        assert!(belongs(&object(json!({"annotations": {MARK: "v1"}}))));
        assert!(belongs(&object(json!({"labels": {MANAGED_BY: "virt-operator"}}))));
        assert!(!belongs(&object(json!({"labels": {MANAGED_BY: "helm"}, "annotations": {"a": "b"}}))));
        assert!(!belongs(&json!({"kind": "Namespace", "metadata": {"name": "default"}})));
    }
}
