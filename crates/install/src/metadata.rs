//! Short functions for the metadata of generated objects. `managed_metadata` adds the labels and annotations that every
//! object of an installation has.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

pub(crate) fn string_map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

pub(crate) fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

pub(crate) fn cluster_scoped(name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: (!labels.is_empty()).then(|| string_map(labels)),
        ..ObjectMeta::default()
    }
}

pub(crate) fn namespaced(namespace: &str, name: &str, labels: &[(&str, &str)]) -> ObjectMeta {
    ObjectMeta { namespace: Some(namespace.to_owned()), ..cluster_scoped(name, labels) }
}

pub(crate) fn with_annotations(mut metadata: ObjectMeta, annotations: &[(&str, &str)]) -> ObjectMeta {
    metadata.annotations.get_or_insert_default().extend(string_map(annotations));
    metadata
}

pub(crate) fn label_selector(labels: &[(&str, &str)]) -> LabelSelector {
    LabelSelector { match_labels: Some(string_map(labels)), match_expressions: None }
}
