//! What is not compared.
//!
//! - the values of certificates, keys, bundles and the text of the install strategy; that they are there is compared
//! - the values of the annotations for the generation of the resource and for the identifiers; the identifiers have
//!   tests of their own against values of the reference
//! - `description`, the descriptions of instancetypes, and `summary` and `description` of alerts: prose of our own
//! - `validations`, `variables` and `matchConditions` of admission policies: logic of our own
//! - cluster IPs, and `secrets` of service accounts: the server's; `status`; metadata that the server fills in

use serde_json::{Map, Value, json};

const VALUES: [&str; 4] = [
    "caBundle",
    "kubevirt.io/generation",
    "kubevirt.io/customizer-identifier",
    "kubevirt.io/install-strategy-identifier",
];
const PROSE: [&str; 1] = ["instancetype.kubevirt.io/description"];

fn prune(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(key, value)| !(key == "description" && value.is_string() || PROSE.contains(&key.as_str())))
            .map(|(key, value)| {
                let value = if VALUES.contains(&key.as_str()) { json!("*") } else { prune(value) };
                (key, value)
            })
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(list) => list.into_iter().map(prune).collect(),
        other => other,
    }
}

pub(crate) fn normalise(object: Value) -> Value {
    let mut object = prune(object);
    let kind = object["kind"].as_str().unwrap().to_owned();
    let fields = object.as_object_mut().unwrap();
    fields.remove("status");
    if let Some(prefix) = fields["metadata"].get("generateName").and_then(Value::as_str) {
        fields["metadata"]["name"] = format!("{prefix}*").into();
    }
    match kind.as_str() {
        "Secret" | "ConfigMap" => {
            let keys = fields.get("data").and_then(Value::as_object).into_iter().flatten();
            let data: Map<String, Value> = keys.map(|(key, _)| (key.clone(), json!("*"))).collect();
            fields.insert("data".to_owned(), data.into());
        }
        "ValidatingAdmissionPolicy" => {
            for logic in ["validations", "variables", "matchConditions"] {
                fields["spec"].as_object_mut().unwrap().remove(logic).unwrap();
            }
        }
        "PrometheusRule" => {
            let groups = fields["spec"]["groups"].as_array_mut().unwrap().iter_mut();
            for rule in groups.flat_map(|group| group["rules"].as_array_mut().unwrap()) {
                if let Some(annotations) = rule.get_mut("annotations").and_then(Value::as_object_mut) {
                    annotations.remove("summary").unwrap();
                    annotations.remove("description");
                }
            }
        }
        _ => {}
    }
    object
}

pub(crate) fn key(object: &Value) -> String {
    let group = object["apiVersion"].as_str().unwrap().split_once('/').map_or("core", |(group, _)| group);
    let metadata = &object["metadata"];
    let parts = [Some(group), object["kind"].as_str(), metadata["namespace"].as_str(), metadata["name"].as_str()];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}
