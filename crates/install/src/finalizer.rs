//! The step that marks a KubeVirt resource before anything is installed for it.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vitivirt_api::{ObjectKey, Operation, Step, Target, Write, kubevirt::KubeVirt};

use crate::names::FINALIZER;

/// The step that sets the finalizer of the KubeVirt resource.
pub const RESOURCE_STEP: &str = "resource";

/// Annotations with the API versions of the resource. KubeVirt's components read them.
const OBSERVED_VERSIONS: [(&str, &str); 2] =
    [("kubevirt.io/latest-observed-api-version", "v1"), ("kubevirt.io/storage-observed-api-version", "v1")];

/// Sets the finalizer before the operator creates anything that has to be cleaned up.
pub(crate) fn ensure_finalizer(kubevirt: &KubeVirt) -> Option<Step> {
    let metadata = &kubevirt.metadata;
    let mut operations = Vec::new();
    let finalizers = metadata.finalizers.clone().unwrap_or_default();
    let deleting = metadata.deletion_timestamp.is_some();
    if !deleting && !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        operations.push(if finalizers.is_empty() {
            Operation::set("/metadata/finalizers", json!([FINALIZER])).expecting(Value::Null)
        } else {
            Operation::set("/metadata/finalizers/-", json!(FINALIZER))
        });
    }
    let none = BTreeMap::new();
    let annotations = metadata.annotations.as_ref().unwrap_or(&none);
    let missing =
        OBSERVED_VERSIONS.iter().filter(|(key, value)| annotations.get(*key).is_none_or(|have| have != value));
    let missing: Vec<_> = missing.collect();
    if annotations.is_empty() && !missing.is_empty() {
        let annotations: serde_json::Map<String, Value> =
            missing.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        operations.push(Operation::set("/metadata/annotations", Value::Object(annotations)).expecting(Value::Null));
    } else {
        let set = |(key, value): &(&str, &str)| {
            Operation::set(format!("/metadata/annotations/{}", Operation::escape(key)), json!(value))
        };
        operations.extend(missing.into_iter().map(set));
    }
    let uid = metadata.uid.clone()?;
    let target = Target::of_kind::<KubeVirt>(ObjectKey::from_metadata(metadata));
    (!operations.is_empty()).then(|| Step::new(RESOURCE_STEP).write(Write::Patch { target, uid, operations }))
}
