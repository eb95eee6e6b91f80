//! The configuration and the install strategy of resources and environments that no snapshot has, compared with what
//! the release itself generates (`reference/strategies.json`, `cargo xtask generate --release-data`).
//!
//! Release data (definitions, instancetypes) is compared by the parity test. Left out here: the CEL of policies and the
//! texts of alerts, which are our own, and fields that Go writes though they are empty.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may stop where something is not as it should be"
)]

use std::collections::BTreeMap;
use std::io::Read;

use serde::Deserialize;
use serde_json::{Value, json};
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_install::{DeploymentConfig, Environment, Kind, Strategy};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Case {
    name: String,
    environment: BTreeMap<String, String>,
    monitor_namespace: String,
    kubevirt: KubeVirt,
}

#[derive(Deserialize)]
struct Expected {
    config: String,
    objects: Vec<Value>,
}

type Objects = BTreeMap<String, Value>;

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("reference/strategies.json")).unwrap()
}

fn expected() -> BTreeMap<String, Expected> {
    let bytes = include_bytes!("reference/strategies.expected.json.gz").as_slice();
    let mut text = String::new();
    flate2::read::GzDecoder::new(bytes).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn normalise(kind: &str, mut object: Value) -> Value {
    let fields = object.as_object_mut().unwrap();
    // The release writes some versions that no server knows, and the reference does not read them.
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
        // Its null fields are demanded by the API.
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

fn by_name(objects: impl IntoIterator<Item = Value>) -> Objects {
    let keyed = objects.into_iter().map(|object| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let kind = text(&object["kind"]);
        (format!("{kind} {}/{}", text(&metadata["namespace"]), text(&metadata["name"])), normalise(&kind, object))
    });
    keyed.collect()
}

#[test]
fn configurations_are_byte_for_byte_those_of_the_release() {
    let expected = expected();
    for case in cases() {
        let config = DeploymentConfig::new(&case.kubevirt, &Environment::from_variables(case.environment));
        assert_eq!(config.json(), expected[&case.name].config, "{}", case.name);
    }
}

#[test]
fn strategies_are_those_of_the_release() {
    let mut expected = expected();
    for case in cases() {
        let environment = Environment::from_variables(case.environment);
        let config = DeploymentConfig::new(&case.kubevirt, &environment);
        let monitor = Some(case.monitor_namespace.as_str()).filter(|namespace| !namespace.is_empty());
        let strategy = Strategy::generate(&config, monitor, environment.runbook_url_template.as_deref()).unwrap();
        let data = [Kind::CustomResourceDefinition, Kind::Instancetype, Kind::Preference];
        let ours = strategy.items().iter().filter(|item| !data.contains(&item.kind));
        let ours = by_name(ours.map(|item| item.object().unwrap()));
        let theirs = by_name(expected.remove(&case.name).unwrap().objects);
        assert_eq!(
            ours.keys().collect::<Vec<_>>(),
            theirs.keys().collect::<Vec<_>>(),
            "{}: other objects than the release",
            case.name
        );
        for (key, theirs) in &theirs {
            assert_eq!(&ours[key], theirs, "{}: {key}", case.name);
        }
    }
    assert!(expected.is_empty());
}
