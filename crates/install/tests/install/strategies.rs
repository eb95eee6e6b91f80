//! Compares the configuration and the install strategy of resources and environments that no snapshot has with those
//! that the KubeVirt release generates (`reference/strategies.json`, `cargo xtask generate --release-data`).
//!
//! The parity tests compare release data (CRDs, instancetypes). Not compared: the CEL of policies and the texts of
//! alerts, which differ on purpose, and fields that Go writes although they are empty.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_install::{DeploymentConfig, Environment, InstallStrategy, Kind};

use crate::decompress;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StrategyCase {
    name: String,
    environment: BTreeMap<String, String>,
    monitor_namespace: String,
    kubevirt: KubeVirt,
}

#[derive(Deserialize)]
struct ExpectedStrategy {
    config: String,
    objects: Vec<Value>,
}

fn cases() -> Vec<StrategyCase> {
    serde_json::from_str(include_str!("../reference/strategies.json")).unwrap()
}

fn expected() -> BTreeMap<String, ExpectedStrategy> {
    // 290 KB unpacked: too large to review as text.
    serde_json::from_str(&decompress(include_bytes!("../reference/strategies.expected.json.gz"))).unwrap()
}

fn normalise(kind: &str, mut object: Value) -> Value {
    let fields = object.as_object_mut().unwrap();
    // The release writes some API versions that do not exist, and the reference operator does not read them.
    fields.remove("apiVersion");
    fields.remove("status");
    match kind {
        "ValidatingAdmissionPolicy" => {
            for logic in ["validations", "variables", "matchConditions"] {
                fields["spec"].as_object_mut().unwrap().remove(logic);
            }
        }
        "PrometheusRule" => {
            let groups = fields["spec"]["groups"].as_array_mut().unwrap().iter_mut();
            for rule in groups.flat_map(|group| group["rules"].as_array_mut().unwrap()) {
                if let Some(annotations) = rule.get_mut("annotations").and_then(Value::as_object_mut) {
                    annotations.remove("summary");
                    annotations.remove("description");
                }
            }
        }
        // The API requires its null fields.
        "SecurityContextConstraints" => return object,
        _ => {}
    }
    without_empties(object)
}

fn without_empties(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let empty = |key: &str, value: &Value| {
                value.is_null() || ["strategy", "updateStrategy", "resources"].contains(&key) && *value == json!({})
            };
            let kept = map.into_iter().filter(|(key, value)| !empty(key, value));
            Value::Object(kept.map(|(key, value)| (key, without_empties(value))).collect())
        }
        Value::Array(list) => list.into_iter().map(without_empties).collect(),
        other => other,
    }
}

fn by_name(objects: impl IntoIterator<Item = Value>) -> BTreeMap<String, Value> {
    let keyed = objects.into_iter().map(|object| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let kind = text(&object["kind"]);
        (format!("{kind} {}/{}", text(&metadata["namespace"]), text(&metadata["name"])), normalise(&kind, object))
    });
    keyed.collect()
}

#[test]
fn configurations_equal_those_of_the_release_byte_for_byte() {
    let expected = expected();
    for case in cases() {
        let config = DeploymentConfig::new(&case.kubevirt, &Environment::from_variables(case.environment));
        assert_eq!(config.json(), expected[&case.name].config, "{}", case.name);
    }
}

#[test]
fn strategies_equal_those_of_the_release() {
    let mut expected = expected();
    for case in cases() {
        let environment = Environment::from_variables(case.environment);
        let config = DeploymentConfig::new(&case.kubevirt, &environment);
        let monitor = Some(case.monitor_namespace.as_str()).filter(|namespace| !namespace.is_empty());
        let strategy =
            InstallStrategy::generate(&config, monitor, environment.runbook_url_template.as_deref()).unwrap();
        let data = [Kind::CustomResourceDefinition, Kind::Instancetype, Kind::Preference];
        let ours = strategy.items().iter().filter(|item| !data.contains(&item.kind));
        let ours = by_name(ours.map(|item| item.object().unwrap()));
        let expected_objects = by_name(expected.remove(&case.name).unwrap().objects);
        assert_eq!(
            ours.keys().collect::<Vec<_>>(),
            expected_objects.keys().collect::<Vec<_>>(),
            "{}: the objects differ from those of the release",
            case.name
        );
        for (key, expected) in &expected_objects {
            assert_eq!(&ours[key], expected, "{}: {key}", case.name);
        }
    }
    assert!(expected.is_empty());
}
