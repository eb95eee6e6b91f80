//! The CRDs, generated from the Rust types.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, ValidationRule};
use kube_core::CustomResourceExt;

use serde_json::Value;

use super::{Machine, NetworkConfiguration, installation_labels, schema};

/// The CRDs of Machine and NetworkConfiguration, as they are installed.
pub fn crds() -> Vec<CustomResourceDefinition> {
    generated_crds().into_iter().map(without_unsigned_formats).collect()
}

/// Kubernetes warns about formats that it does not know. The minimum and maximum already say that a number is unsigned.
fn without_unsigned_formats(crd: CustomResourceDefinition) -> CustomResourceDefinition {
    fn clean(value: &mut Value) {
        match value {
            Value::Object(map) => {
                if map.get("format").and_then(Value::as_str).is_some_and(|format| format.starts_with("uint")) {
                    map.remove("format");
                }
                map.values_mut().for_each(clean);
            }
            Value::Array(items) => items.iter_mut().for_each(clean),
            _ => {}
        }
    }
    let cleaned = serde_json::to_value(&crd).and_then(|mut json| {
        clean(&mut json);
        serde_json::from_value(json)
    });
    cleaned.unwrap_or(crd)
}

fn generated_crds() -> Vec<CustomResourceDefinition> {
    let mut machine = Machine::crd();
    // The rules are constants, so parsing them cannot fail. A test checks that the CRDs contain them.
    let rules: Vec<ValidationRule> = serde_json::from_value(schema::root_rules()).unwrap_or_default();
    for version in &mut machine.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            schema.x_kubernetes_validations = Some(rules.clone());
        }
    }
    let mut crds = vec![machine, NetworkConfiguration::crd()];
    for crd in &mut crds {
        crd.metadata.labels.get_or_insert_default().extend(installation_labels());
    }
    crds
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{JSONSchemaProps, JSONSchemaPropsOrArray};

    use super::*;

    #[test]
    fn the_crds_contain_every_rule() {
        let text = serde_json::to_string(&crds()).unwrap();
        for part in [
            "the VirtualMachine has the same name",
            "disk name cloudinitdisk is reserved",
            "exactly one of containerDisk, pvc, snapshot, http or registry must be set",
            "secureBoot requires efi",
            "\"x-kubernetes-list-map-keys\":[\"name\"]",
            "\"x-kubernetes-preserve-unknown-fields\":true",
            "\"default\":{\"phase\":\"Pending\"}",
        ] {
            assert!(text.contains(part), "{part} is missing");
        }
    }

    #[test]
    fn the_crds_have_no_unsigned_format() {
        assert!(!serde_json::to_string(&crds()).unwrap().contains("uint"));
    }

    /// `kubectl explain` shows the descriptions. Kubernetes describes the metadata.
    #[test]
    fn every_field_has_a_description() {
        fn undescribed(path: &str, schema: &JSONSchemaProps, found: &mut Vec<String>) {
            for (name, field) in schema.properties.iter().flatten() {
                let path = format!("{path}.{name}");
                if field.description.as_ref().is_none_or(String::is_empty) {
                    found.push(path.clone());
                }
                undescribed(&path, field, found);
            }
            if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
                undescribed(&format!("{path}[]"), items, found);
            }
        }
        let mut found = Vec::new();
        for crd in crds() {
            for version in &crd.spec.versions {
                let schema = version.schema.clone().unwrap().open_api_v3_schema.unwrap();
                assert!(schema.properties.as_ref().is_some_and(|fields| fields.contains_key("spec")));
                undescribed(&crd.spec.names.kind, &schema, &mut found);
            }
        }
        assert!(found.is_empty(), "no description: {found:#?}");
    }
}
