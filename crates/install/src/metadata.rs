//! Shorthands for the metadata of generated objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

pub(crate) fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

pub(crate) fn strings(all: &[&str]) -> Vec<String> {
    all.iter().map(|text| (*text).to_owned()).collect()
}

pub(crate) fn cluster(name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: (!labels.is_empty()).then(|| map(labels)),
        ..ObjectMeta::default()
    }
}

pub(crate) fn namespaced(namespace: &str, name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
    ObjectMeta { namespace: Some(namespace.to_owned()), ..cluster(name, labels) }
}

pub(crate) fn annotated(mut metadata: ObjectMeta, annotations: &[(&str, &str)]) -> ObjectMeta {
    metadata.annotations.get_or_insert_default().extend(map(annotations));
    metadata
}

pub(crate) fn label_selector(labels: &[(&str, &str)]) -> LabelSelector {
    LabelSelector { match_labels: Some(map(labels)), match_expressions: None }
}
