//! The labels and annotations of every installed object: its manager, its product and its deployment.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};
use vitivirt_api::kubevirt::KubeVirt;

use crate::{
    config::{DeploymentConfig, is_label_value},
    live::LiveObject,
    names::{annotation, label},
};

const COMPONENT: &str = "kubevirt";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ManagedMetadata {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    generation: i64,
}

impl ManagedMetadata {
    pub(crate) fn new(kubevirt: &KubeVirt, config: &DeploymentConfig) -> Self {
        let spec = &kubevirt.spec;
        let valid = |text: &'_ str| !text.is_empty() && is_label_value(text);
        let product = [
            (label::VERSION, spec.product_version.as_str()),
            (label::PART_OF, &spec.product_name),
            (label::COMPONENT, if valid(&spec.product_component) { &spec.product_component } else { COMPONENT }),
            (label::MANAGED_BY, label::MANAGED_BY_VALUE),
        ];
        let annotations = [
            (annotation::VERSION, &config.kube_virt_version),
            (annotation::REGISTRY, &config.registry),
            (annotation::IDENTIFIER, &config.id),
        ];
        Self {
            labels: product
                .into_iter()
                .filter(|(_, value)| valid(value))
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
            annotations: annotations.map(|(key, value)| (key.to_owned(), value.clone())).into(),
            generation: kubevirt.metadata.generation.unwrap_or_default(),
        }
    }

    /// Whether an object has the labels of this installation.
    pub(crate) fn has_labels(&self, live: &LiveObject) -> bool {
        self.labels.iter().all(|(key, value)| live.labels.get(key) == Some(value))
    }

    /// Without the generation of the resource, because a new generation must not restart pods.
    pub(crate) fn add_to_template(&self, metadata: &mut ObjectMeta) {
        metadata.labels.get_or_insert_default().extend(self.labels.clone());
        metadata.annotations.get_or_insert_default().extend(self.annotations.clone());
    }

    pub(crate) fn add_to_metadata(&self, metadata: &mut ObjectMeta) {
        self.add_to_template(metadata);
        metadata
            .annotations
            .get_or_insert_default()
            .insert(annotation::GENERATION.to_owned(), self.generation.to_string());
    }

    pub(crate) fn add_to_object(&self, object: &mut Value) {
        let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
        merge(metadata, "labels", &self.labels);
        merge(metadata, "annotations", &self.annotations);
        merge(
            metadata,
            "annotations",
            &BTreeMap::from([(annotation::GENERATION.to_owned(), self.generation.to_string())]),
        );
    }
}

/// Adds values to a map of the metadata, which is created if it is missing.
pub(crate) fn merge(metadata: &mut Map<String, Value>, field: &str, values: &BTreeMap<String, String>) {
    let entry = metadata.entry(field).or_insert(Value::Null);
    if !entry.is_object() {
        *entry = Value::Object(Map::new());
    }
    if let Some(map) = entry.as_object_mut() {
        map.extend(values.iter().map(|(key, value)| (key.clone(), Value::String(value.clone()))));
    }
}
