//! Compares the customizer with that of the KubeVirt release, for the same patches and objects
//! (`tests/reference/patches.json`, `cargo xtask generate --release-data`).

use std::io::Read;

use serde::Deserialize;
use serde_json::{Value, json};

use super::*;
use crate::{config::DeploymentConfig, strategy::InstallStrategy};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PatchCase {
    name: String,
    customize_components: CustomizeComponents,
}

#[derive(Deserialize)]
struct ExpectedPatch {
    #[serde(default)]
    error: bool,
    #[serde(default)]
    hash: String,
    #[serde(default)]
    objects: Vec<Value>,
}

fn expected() -> BTreeMap<String, ExpectedPatch> {
    // 11 000 lines as formatted JSON: too large to review as text.
    let bytes = include_bytes!("../../tests/reference/patches.expected.json.gz").as_slice();
    let mut text = String::new();
    flate2::read::GzDecoder::new(bytes).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn strategy() -> InstallStrategy {
    let config = DeploymentConfig {
        namespace: "kubevirt".to_owned(),
        registry: "r".to_owned(),
        kube_virt_version: "v1".to_owned(),
        ..DeploymentConfig::default()
    };
    InstallStrategy::generate(&config, None, None).unwrap()
}

/// Drops fields that Go writes although they are empty.
fn without_empties(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let empty = |key: &str, value: &Value| {
                value.is_null()
                    || ["strategy", "updateStrategy", "resources"].contains(&key) && *value == json!({})
                    || key == "status"
                    // The API server replaces it with the port.
                    || key == "targetPort" && *value == json!(0)
            };
            let kept = map.into_iter().filter(|(key, value)| !empty(key, value));
            Value::Object(kept.map(|(key, value)| (key, without_empties(value))).collect())
        }
        Value::Array(list) => list.into_iter().map(without_empties).collect(),
        other => other,
    }
}

/// The objects that a customization changes, and its hash.
fn customized(
    strategy: &InstallStrategy,
    customize_components: &CustomizeComponents,
) -> Result<(String, Vec<Value>), Failure> {
    let customizer = Customizer::new(customize_components)?;
    let mut out = Vec::new();
    for item in strategy.items().iter().filter(|item| Customizer::applies_to(item.kind)) {
        let before = item.object()?;
        let mut after = before.clone();
        customizer.apply(item.kind, item.key.name(), &mut after)?;
        let hash = after["metadata"]["annotations"].as_object_mut().unwrap().remove(annotation::CUSTOMIZER_IDENTIFIER);
        assert_eq!(hash, Some(customizer.hash.as_str().into()));
        if after["metadata"]["annotations"] == json!({}) {
            after["metadata"].as_object_mut().unwrap().remove("annotations");
        }
        if after != before {
            out.push(without_empties(after));
        }
    }
    Ok((customizer.hash, out))
}

fn title(object: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&object["kind"]), text(&object["metadata"]["name"]))
}

#[test]
fn every_case_equals_the_result_of_the_release() {
    let cases: Vec<PatchCase> = serde_json::from_str(include_str!("../../tests/reference/patches.json")).unwrap();
    let expected = expected();
    assert_eq!(cases.len(), expected.len());
    let strategy = strategy();
    for case in cases {
        let expected = &expected[&case.name];
        match customized(&strategy, &case.customize_components) {
            Ok((hash, mut objects)) => {
                assert!(!expected.error, "{}: the release rejects it", case.name);
                assert_eq!(hash, expected.hash, "{}", case.name);
                objects.sort_by_key(title);
                let mut expected_objects: Vec<Value> = expected.objects.iter().cloned().map(without_empties).collect();
                expected_objects.sort_by_key(title);
                assert_eq!(objects, expected_objects, "{}", case.name);
            }
            Err(error) => {
                assert!(expected.error, "{}: the release accepts it, but here: {error}", case.name);
                assert_eq!(error.class, vitivirt_api::ErrorClass::Invalid, "{}", case.name);
                assert!(error.message.starts_with("spec.customizeComponents."), "{}: {error}", case.name);
            }
        }
    }
}

#[test]
fn an_error_names_the_patch_and_the_object() {
    let patch = |patch: &str, patch_type: &str| Customization {
        resource_name: "virt-api".to_owned(),
        resource_type: "Deployment".to_owned(),
        patch: patch.to_owned(),
        patch_type: patch_type.to_owned(),
    };
    let customize_components = |patches: Vec<Customization>| CustomizeComponents { patches, flags: None };
    let long = patch(r#"{"metadata":{"labels":{"a":"a long value, so that it sorts last"}}}"#, "merge");
    let error = customized(&strategy(), &customize_components(vec![long, patch("{", "merge")])).unwrap_err();
    assert!(error.message.starts_with("spec.customizeComponents.patches[1]: invalid patch: not JSON"), "{error}");
    let missing = patch(r#"[{"op":"remove","path":"/nothing"}]"#, "json");
    let error = customized(&strategy(), &customize_components(vec![missing])).unwrap_err();
    assert!(error.message.contains("patches[0] does not apply to Deployment virt-api"), "{error}");
}

#[test]
fn a_json_patch_that_replaces_replicas_is_detected() {
    let customize_components = |name: &str, patch: &str| CustomizeComponents {
        patches: vec![Customization {
            resource_name: name.to_owned(),
            patch: patch.to_owned(),
            ..Customization::default()
        }],
        flags: None,
    };
    let replace = r#"[{"op":"replace","path":"/spec/replicas","value":5}]"#;
    assert!(sets_replicas(&customize_components(VIRT_API, replace), VIRT_API));
    assert!(!sets_replicas(&customize_components(VIRT_CONTROLLER, replace), VIRT_API));
    assert!(!sets_replicas(&customize_components(VIRT_API, r#"{"spec":{"replicas":5}}"#), VIRT_API));
    assert!(!sets_replicas(
        &customize_components(VIRT_API, r#"[{"op":"add","path":"/spec/replicas","value":5}]"#),
        VIRT_API
    ));
}
