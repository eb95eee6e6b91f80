//! Compares every generated object with the objects that the reference operator created in a live cluster for the same
//! KubeVirt resource (`reference/`, for the seven resources of `variants/`).
//!
//! Generated objects first get the defaults of the API server (`api_server`), so that it makes no difference whether
//! the operator or the API server sets a field. Values that only a live cluster fills in, and texts and logic of this
//! project, are removed from both sides: see `normalise` in the crate `snapshot`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;
use vitivirt_api::kubevirt::KubeVirt;
use vitivirt_install::{Cluster, DeploymentConfig, Environment, Installation, names::label};
use vitivirt_snapshot::Snapshot;

use crate::{TestCertificates, api_server, decompress};

#[derive(Deserialize)]
struct Snapshots {
    default: Snapshot,
    variants: BTreeMap<String, Variant>,
}

/// The differences of another resource from the default one.
#[derive(Deserialize)]
struct Variant {
    absent: BTreeSet<String>,
    /// Merge patches, or the whole object if the default resource does not have it.
    changed: Snapshot,
}

/// Objects that the operator does not create.
const NOT_CREATED: [&str; 2] = ["KubeVirt", "Namespace"];

fn reference(name: &str) -> Snapshot {
    // 870 KB unpacked: too large to review as text.
    let text = decompress(include_bytes!("../reference/snapshots.json.gz"));
    let snapshots: Snapshots = serde_json::from_str(&text).unwrap();
    let mut objects = snapshots.default;
    if name != "default" {
        let variant = &snapshots.variants[name];
        objects.retain(|key, _| !variant.absent.contains(key));
        for (key, patch) in &variant.changed {
            merge(objects.entry(key.clone()).or_default(), patch);
        }
    }
    objects
}

/// Applies a merge patch.
fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                match value {
                    Value::Null => drop(target.remove(key)),
                    value => merge(target.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}

fn kubevirt(name: &str) -> KubeVirt {
    let path = format!("{}/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

fn environment() -> Environment {
    let variables = [("VIRT_OPERATOR_IMAGE", "quay.io/kubevirt/virt-operator:v1.8.4"), ("KUBEVIRT_VERSION", "v1.8.4")];
    Environment::from_variables(variables.map(|(name, value)| (name.to_owned(), value.to_owned())))
}

/// The cluster of the snapshots.
fn cluster(name: &str) -> Cluster {
    let monitoring = name == "monitoring";
    Cluster {
        admission_policies: true,
        service_monitors: monitoring,
        prometheus_rules: monitoring,
        monitor_namespace: monitoring.then(|| "monitoring".to_owned()),
        schedulable_nodes: 2,
        ..Cluster::default()
    }
}

fn generated(name: &str) -> Snapshot {
    let installation = Installation::new(&kubevirt(name), &environment(), &cluster(name)).unwrap();
    let bodies = installation.objects.iter().map(|object| object.body(&TestCertificates).unwrap().into_json());
    let mut out = Snapshot::new();
    for mut object in bodies {
        api_server::add_defaults(&mut object);
        // The logic of a policy is not compared, but it must not be empty.
        assert!(object["kind"] != "ValidatingAdmissionPolicy" || object["spec"]["validations"][0].is_object());
        let object = vitivirt_snapshot::normalise(object);
        let key = vitivirt_snapshot::key(&object);
        assert!(out.insert(key.clone(), object).is_none(), "{key} is generated twice");
    }
    out
}

fn compare(name: &str) {
    let mut reference_objects = reference(name);
    reference_objects.retain(|_, object| !NOT_CREATED.iter().any(|kind| object["kind"] == *kind));
    let result = vitivirt_snapshot::compare(&reference_objects, &generated(name));
    eprintln!("{name}: {result}");
    assert!(result.is_equal(), "{name}: {result}\n{}", result.details(usize::MAX));
}

macro_rules! variants {
    ($($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                compare(stringify!($name));
            }
        )*
    };
}

variants!(default, customize, gates, images, monitoring, placement, combined);

#[test]
fn the_reported_version_and_the_namespace_label_match_the_reference() {
    for name in ["default", "images", "combined"] {
        let reference_objects = reference(name);
        let config = DeploymentConfig::new(&kubevirt(name), &environment());
        let status = &reference_objects["kubevirt.io/KubeVirt/kubevirt/kubevirt"]["status"];
        assert_eq!(status["targetKubeVirtVersion"], config.kube_virt_version.as_str());
        assert_eq!(status["targetKubeVirtRegistry"], config.registry.as_str());
        let (label, value) = label::OF_NAMESPACE;
        assert_eq!(reference_objects["core/Namespace/kubevirt"]["metadata"]["labels"][label], value);
    }
}

#[test]
fn the_reference_has_every_object() {
    for (name, count) in [
        ("default", 207),
        ("customize", 207),
        ("gates", 211),
        ("images", 207),
        ("monitoring", 211),
        ("placement", 205),
        ("combined", 207),
    ] {
        assert_eq!(reference(name).len(), count, "{name}");
    }
}
